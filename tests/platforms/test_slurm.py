"""A real SLURM of two nodes starts the DDP job by srun, and runs the batch script that submit sends."""

import os
import sys

import pytest

from tests.tools.jobs import TINY, assert_same_bits, command, final_state, saved
from tests.tools.ranks import TWO, check_ledger
from tests.tools.slurm import CORES, Slurm

pytestmark = pytest.mark.rehearsal  # packages of the system, and root


@pytest.fixture(scope="module", params=["task/none", "task/affinity"])
def slurm(request, tmp_path_factory):
    running = Slurm(tmp_path_factory.mktemp("slurm"), request.param)
    running.binds = request.param == "task/affinity"
    yield running
    running.close()


BINDS = pytest.mark.parametrize("slurm", ["task/affinity"], indirect=True)  # where binding makes no difference, one of both


def test_srun_starts_one_task_on_each_node(slurm, two_ranks, tmp_path):
    printed = slurm.run("srun", "-N2", *command("train_ddp", *TWO, "--output_dir", tmp_path / "out"), OMP_NUM_THREADS="1")
    assert "node 0: starting rank 0 of 2 (slurm: srun, one task per node)" in printed
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))
    check_ledger(tmp_path / "out")


@pytest.mark.parametrize("nodes", [1, 2])
def test_srun_starts_one_task_per_process(slurm, nodes, two_ranks, tmp_path):
    """Two on one node, or two on each of two, which together take the same batches."""
    each = ["--overcommit", f"-N{nodes}", f"-n{2 * nodes}"]
    options = [*TWO, "--batch_size", 8 // nodes, "--output_dir", tmp_path / "out"]
    printed = slurm.run("srun", *each, *command("train_ddp", *options), OMP_NUM_THREADS="1")
    assert f"rank 0 of {2 * nodes}, platform slurm (srun, one task per process)" in printed
    check_ledger(tmp_path / "out")
    if nodes == 1:
        assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))


# --- The batch script that submit sends ----------------------------------------------------------------------------------


def test_the_script_trains_on_two_nodes_and_its_log_lies_in_the_output_folder(slurm, tmp_path):
    sizes = ["--nodes", 2, "--cpus", CORES]
    job, printed = slurm.submit(tmp_path, *sizes, "--follow", "true", "--", *TWO, "--nproc_per_node", 1)
    assert f"{job} is COMPLETED" in printed and "done: best accuracy" in printed
    log = (tmp_path / "out" / f"run-{job}.log").read_text()
    assert "(slurm: srun, one task per node)" in log and f"cpu ({CORES} thread" in log and "rank 0 of 2, platform slurm" in log
    check_ledger(tmp_path / "out")


@BINDS
def test_a_mistake_is_shown_and_not_tried_again(slurm, tmp_path):
    job, printed = slurm.submit(tmp_path, "--cpus", 1, "--follow", "true", "--", "--epochs", "none", check=1)
    assert f"{job} is FAILED" in printed and printed.count("error: argument --epochs") == 1, printed
    assert "Restarts=0 " in slurm.run("scontrol", "show", "job", job)


# A job that says what it sees, and ends with the exit code that the test writes into a pipe; 143 when it is warned.
STAND_IN = """\
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(143))
print("start", os.environ.get("SLURM_RESTART_COUNT", 0), "cores", len(os.sched_getaffinity(0)), flush=True)
sys.exit(int(open({pipe!r}).read()))
"""


@pytest.fixture
def stand_in(slurm, tmp_path):
    """stand_in(*OPTIONS): (the number of such a job, what its log says)."""
    (tmp_path / "jobs").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "jobs" / "train.py").write_text(STAND_IN.format(pipe=str(tmp_path / "pipe")))

    def submit(*options):
        job, _ = slurm.submit(tmp_path, "--code_url", tmp_path, *options, job="jobs/train.py")
        log = tmp_path / "out" / f"run-{job}.log"

        def starts(count):
            slurm.wait_for(lambda: log.exists() and log.read_text().count("start ") >= count, f"start {count}")
            return log.read_text()

        return job, starts

    return submit


def end(folder, code):
    """The job that reads the pipe ends with this exit code."""
    (folder / "pipe").write_text(str(code))


@pytest.mark.parametrize("asked", [1, CORES])
def test_the_job_sees_the_cores_that_were_asked_for(slurm, stand_in, asked, tmp_path):
    """On a cluster that binds tasks; elsewhere it sees all."""
    job, starts = stand_in("--cpus", asked)
    assert f"cores {asked if slurm.binds else CORES}\n" in starts(1)
    end(tmp_path, 0)
    slurm.wait_for(lambda: slurm.state(job) == "COMPLETED", "end")


@BINDS
def test_time_limits_do_not_use_up_the_retries_and_failures_do(slurm, stand_in, tmp_path):
    """Two warnings, then as many failures as --retries allows, and one more."""
    job, starts = stand_in("--cpus", 1, "--retries", 1)
    starts(1)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")  # less than SLURM is to warn before
    starts(3)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED")
    seen = starts(3).count("start ")  # a late warning may have led to one more
    end(tmp_path, 3)
    starts(seen + 1)
    end(tmp_path, 3)
    slurm.wait_for(lambda: slurm.state(job) == "FAILED", "end")
    assert not list((tmp_path / "out").glob(".*.failures"))


@BINDS
def test_a_warned_job_goes_on_from_its_checkpoint_until_it_is_cancelled(slurm, tmp_path):
    job, _ = slurm.submit(tmp_path, "--nodes", 2, "--cpus", 1, "--", *TWO[:8], "--epochs", 200, "--save_steps", 1)
    log = tmp_path / "out" / f"run-{job}.log"
    slurm.wait_for(saved(tmp_path, 32), "a few steps")
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    slurm.wait_for(lambda: "Restarts=1 " in slurm.run("scontrol", "show", "job", job), "place in the queue")
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED")
    slurm.wait_for(lambda: "going on from" in log.read_text(), "second start")
    slurm.run(sys.executable, "-m", "launch", "submit", "--platform", "slurm", "--stop", job)
    slurm.wait_for(lambda: slurm.state(job) == "CANCELLED", "end")
    assert "Restarts=1 " in slurm.run("scontrol", "show", "job", job)


@BINDS
@pytest.mark.parametrize("words, why", [
    (["--cpus", 3 * CORES // 2 + 1], "Requested node configuration is not available"),  # of one node, though two have as many
    (["--gpus", 1], "Invalid generic resource (gres) specification"),
])  # fmt: skip
def test_what_no_node_has_is_said_with_what_was_asked_for(slurm, words, why, tmp_path):
    _, printed = slurm.submit(tmp_path, *words, "--", *TINY, check=2)
    cores, gpus = (words[1], 0) if words[0] == "--cpus" else (4, 1)
    assert (
        f"{why}: each node has to have {cores} cores, 4 GiB and {gpus} GPUs; " in printed
        and "--gpus 0 asks for none" in printed
    )


@BINDS
def test_a_job_that_cannot_start_says_why(slurm, tmp_path):
    """SLURM takes a job for more nodes than there are, and lets it wait."""
    job, _ = slurm.submit(tmp_path, "--nodes", 3, "--cpus", 1, "--", *TINY)
    script = f"from launch.submit import slurm; print(slurm.state(None, None, {job!r}))"
    slurm.wait_for(lambda: "('PENDING (Partition" in slurm.run(sys.executable, "-c", script), "reason")
    slurm.run(sys.executable, "-m", "launch", "submit", "--platform", "slurm", "--stop", job)
    assert slurm.state(job) == "CANCELLED"
