"""Elastic jobs: runs that lose one and end with the undisturbed run's bits (the rules: test_rules.py)."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.check_ledger import complaints, steps_that_count
from tests.common.report.test_report import shown
from tests.tools.jobs import PATIENCE, ROOT, Popen, assert_same_bits, environment, final_state, in_rehearsal, run_job, wait_for
from tests.tools.objectstore import free_port
from tests.tools.ranks import LOOPBACK, LOOPBACK_6, children, listening, workers_of

SMALL = ["--custom_data", "true", "--max_samples", "160", "--batch_size", "8", "--width", "2"]
SHARES = ["--shares", "4"]


# --- Options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "job, options, says",
    [
        ("train_ddp_exact", ["--min_nodes", 2, "--nproc_per_node", 2], "--min_nodes 2, but the job has 1 node"),
        (
            "train_ddp_exact",
            ["--min_nodes", 1, "--nproc_per_node", 2, "--max_restarts", 1],
            "--max_restarts starts all workers again",
        ),
        (
            "train_imagenet",
            ["--min_nodes", 1, "--data_backend", "dali-cpu", "--ignore", "width"],
            "--data_backend dali-cpu cannot: use pytorch",
        ),
        ("train_ddp_exact", ["--min_nodes", 1], "--min_nodes is for several nodes or workers, and this is the only one"),
        (
            "train_ddp",
            ["--min_nodes", 1, "--nproc_per_node", 2],
            "use jobs/train_ddp_exact.py or jobs/train_imagenet.py",
        ),
    ],
)
def test_where_it_cannot_be_is_a_sentence(tmp_path, job, options, says):
    assert says in run_job(job, tmp_path, *SMALL, *options, check=2).stderr


@pytest.mark.parametrize("job", in_rehearsal(["train_exact", "train_dp", "train_amp"], lambda job: job != "train_exact"))
def test_a_job_of_one_process_has_no_such_option(tmp_path, job):
    assert "error: unknown option --min_nodes" in run_job(job, tmp_path, *SMALL, "--min_nodes", 1, check=2).stderr


# --- Runs --------------------------------------------------------------------------------------------------------------


EPOCHS = ["--epochs", "12"]  # of 5 steps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run_job("train_exact", folder, *SMALL, *SHARES, *EPOCHS)
    return final_state(folder)


class Nodes:
    """Nodes of a run on this machine, each in its own session and with an output folder of its own, as on separate disks."""

    def __init__(self, folder, number, *options, job=ROOT / "jobs" / "train_ddp_exact.py", env=None, host="127.0.0.1"):
        self.folder, self.number, self.options = folder, number, options
        self.address = f"tcp://{host}:{free_port()}"
        self.job, self.env = job, env or {}  # {node: its own variables}
        self.running = [self.start(node) for node in range(number)]

    def start(self, node):
        own = self.folder / f"node{node}"
        own.mkdir(exist_ok=True)
        words = [sys.executable, self.job, *SMALL, *SHARES, *EPOCHS, "--ledger", "true"]
        words += ["--init_method", self.address, "--rank", node, "--world_size", self.number, *self.options]
        with open(own / "log", "a") as log:
            kind = subprocess.Popen if self.env.get(node) else Popen  # what a fork has imported already cannot be broken
            return kind(
                list(map(str, words + ["--output_dir", own / "out"])), cwd=own, env=environment(ANYRANK_SECRET="a secret of the nodes", **self.env.get(node, {})),
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def log(self, node=None):
        nodes = range(self.number) if node is None else [node]
        return "".join((self.folder / f"node{node}" / "log").read_text() for node in nodes)

    def kill(self, node):
        os.killpg(self.running[node].pid, signal.SIGKILL)
        self.running[node].wait()

    def wait_for(self, pattern, node=None):
        wait_for(lambda: re.search(pattern, self.log(node)), None, pattern)

    def end(self, *nodes):
        """Their exit codes."""
        return [self.running[node].wait(PATIENCE) for node in nodes]

    def state(self):
        return final_state(max((self.folder / f"node{node}" for node in range(self.number)), key=newest))

    def assert_every_sample_once(self):
        folders = [self.folder / f"node{node}" / "out" for node in range(self.number)]
        assert list(complaints(steps_that_count(folders), 160, 32)) == []

    def close(self):
        for node, process in enumerate(self.running):
            if process.poll() is None:
                self.kill(node)


def newest(folder):
    return max((path.name for path in (folder / "out" / "checkpoints").glob("*.json")), default="")


@pytest.fixture
def nodes(tmp_path):
    made = []

    def make(number, *options, **how):
        made.append(Nodes(tmp_path, number, *options, **how))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_node_is_lost_and_comes_back_and_the_bits_stay_the_same(nodes, undisturbed):
    """Node 0, which leads and writes: another node does both from then on, and it finds the run again. They wait for it."""
    run = nodes(3, "--min_nodes", 3)
    run.wait_for("epoch=2/12", 0)
    ranks = [pid for parent in run.running for pid in children(parent)]
    assert len(ranks) >= 3 and listening(ranks) == {LOOPBACK}, "whoever reaches torchft can end a rank"
    assert listening([run.running[0].pid]) == {LOOPBACK, "0" * 32}, "the lighthouse, and the port that asks for the secret"
    run.kill(0)
    run.wait_for(r"node 0 \(rank 0\) is lost; fewer than --min_nodes 3 remain: waiting for others up to 900 s", 1)
    run.running[0] = run.start(0)
    run.wait_for(r"node 0 \(rank 0\) is lost; node 0 \(rank 0\) has joined: 3 ranks went on with step \d+ after [\d.]+ s", 1)
    assert run.end(0, 1, 2) == [0, 0, 0]
    assert_same_bits(run.state(), undisturbed)
    run.assert_every_sample_once()
    assert re.search(r"the run is under way, led by node [12] at 127.0.0.1: this node joins it", run.log(0))
    written = [path.parent for path in run.folder.glob("node*/out/journal.jsonl")]  # of those that have led
    told = [row[2] for folder in written for row in shown(folder).tables["events"]]
    assert any(re.match(r"node 0 \(rank 0\) is lost; node 0 \(rank 0\) has joined \([\d.]+ s\)", text) for text in told), told


@pytest.mark.rehearsal
@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this kernel has no IPv6")
def test_nodes_find_each_other_by_ipv6_too(nodes):
    run = nodes(2, "--min_nodes", 2, "--epochs", 40, host="[::1]")
    run.wait_for("epoch=1/40", 0)
    assert listening([pid for parent in run.running for pid in children(parent)]) == {LOOPBACK, LOOPBACK_6}
    assert run.end(0, 1) == [0, 0], run.log()


@pytest.mark.rehearsal
def test_a_node_that_comes_back_finds_a_run_that_goes_on_without_node_0(nodes, undisturbed):
    run = nodes(3, "--min_nodes", 2)
    run.wait_for("epoch=2/12", 0)
    run.kill(2)
    run.wait_for(r"node 2 \(rank 2\) is lost: 2 ranks went on", 0)
    run.kill(0)
    run.wait_for(r"node 0 \(rank 0\) is lost; fewer than --min_nodes 2 remain", 1)
    run.running[2] = run.start(2)
    run.wait_for(r"node 2 \(rank 2\) has joined: 2 ranks went on", 1)
    assert run.end(1, 2) == [0, 0]
    assert_same_bits(run.state(), undisturbed)
    run.assert_every_sample_once()
    assert "the run is under way, led by node 1 at 127.0.0.1: this node joins it" in run.log(2)


@pytest.mark.rehearsal
def test_a_node_that_joins_names_the_one_that_is_lost_meanwhile(nodes):
    run = nodes(2, "--min_nodes", 1)
    run.wait_for("epoch=2/12", 0)
    run.kill(0)
    run.wait_for(r"node 0 \(rank 0\) is lost: 1 rank went on", 1)
    run.running[0] = run.start(0)
    run.wait_for("led by node 1 at 127.0.0.1: this node joins it", 0)
    run.kill(1)
    assert run.end(0) == [1] and "error: node 1 (rank 1) is lost" in run.log(0)


@pytest.mark.rehearsal
def test_a_node_that_comes_back_after_the_end_says_so(nodes):
    run = nodes(2, "--min_nodes", 1)
    run.wait_for("epoch=2/12", 0)
    run.kill(1)
    assert run.end(0) == [0]
    run.options = (*run.options, "--join_seconds", "1")
    run.running[1] = run.start(1)
    assert run.end(1) == [2] and "no node of the run that this one was part of answers: it is over, or node 0" in run.log(1)


@pytest.mark.rehearsal
def test_a_loss_before_the_first_step_ends_all(nodes):
    run = nodes(2, "--min_nodes", 1)
    run.wait_for("starting rank 1 of 2", 1)
    run.kill(1)
    assert run.end(0) == [1] and "error: node 1 (rank 1) is lost; stopping all 2 ranks" in run.log(0)


@pytest.mark.rehearsal
def test_a_worker_that_is_killed_or_stopped_leaves_the_others_of_its_node(nodes, undisturbed):
    run = nodes(2, "--min_nodes", 1, "--nproc_per_node", 2, "--workers", 1)
    run.wait_for("epoch=2/12", 0)
    workers = workers_of(pid for process in run.running for pid in children(process))
    os.kill(workers[2], signal.SIGKILL)
    run.wait_for(r"rank 2 \(node 1, host .*\) was killed by SIGKILL.*: 3 ranks went on", 0)
    os.kill(workers[0], signal.SIGSTOP)
    run.wait_for(r"rank 0 \(node 0, host .*\) is stopped \(state T\).*: 2 ranks went on", 0)
    os.kill(workers[1], signal.SIGKILL)  # the last one of the node that leads
    assert run.end(0, 1) == [1, 0]
    assert re.search(r"error: rank 0 .* is stopped .*; rank 1 \(node 0, host .*\) was killed by SIGKILL", run.log(0))
    assert re.search(r"rank 1 \(node 0, host .*\) was killed by SIGKILL.*: 1 rank went on", run.log(1))
    assert_same_bits(run.state(), undisturbed)
    run.assert_every_sample_once()


@pytest.mark.rehearsal
def test_a_node_that_is_told_to_stop_leaves_and_all_nodes_that_are_save_and_end(nodes, undisturbed):
    run = nodes(2, "--min_nodes", 1)
    run.wait_for("epoch=2/12", 0)
    run.running[1].send_signal(signal.SIGTERM)
    run.wait_for(r"node 1 \(rank 1\) was told to stop \(SIGTERM\): 1 rank went on", 0)
    assert run.end(1) == [143] and "SIGTERM: this node leaves, and the others go on" in run.log(1)
    run.running[0].send_signal(signal.SIGTERM)
    assert run.end(0) == [143] and re.search(r"stopped by SIGTERM; saved after step \d+", run.log(0))
    again = nodes(2, "--min_nodes", 2)
    assert again.end(0, 1) == [0, 0] and "going on from" in again.log(0)
    assert_same_bits(again.state(), undisturbed)
    again.assert_every_sample_once()


@pytest.mark.rehearsal
def test_with_fewer_nodes_than_wanted_the_run_waits_then_saves_and_stops(nodes, undisturbed):
    run = nodes(2, "--min_nodes", 2, "--join_seconds", 20)
    run.wait_for("epoch=2/12", 0)
    run.kill(1)
    run.wait_for(r"node 1 \(rank 1\) is lost; fewer than --min_nodes 2 remain: waiting for others up to 20 s", 0)
    assert run.end(0) == [1]
    assert re.search(r"fewer than --min_nodes 2 remained for 20 s; saved after step \d+: start again to go on", run.log(0))
    assert "error: node 1 (rank 1) is lost; fewer than --min_nodes 2 remained for 20 s; stopping" in run.log(0)
    again = nodes(2, "--min_nodes", 2)
    assert again.end(0, 1) == [0, 0]
    assert_same_bits(again.state(), undisturbed)


@pytest.mark.rehearsal
def test_a_node_that_is_cut_off_from_those_that_write_saves_nothing(nodes):
    """The others may go on, and in a bucket or a shared folder its checkpoint would take the run away from them."""
    run = nodes(3, "--min_nodes", 1, "--epochs", 2000)
    run.wait_for("epoch=2/2000", 0)
    for parent in run.running[:2]:
        parent.send_signal(signal.SIGSTOP)
    assert run.end(2) == [1] and "1 of 3 nodes cannot know whether the others go on; stopping" in run.log(2)
    assert not (run.folder / "node2" / "out" / "checkpoints").exists()


@pytest.mark.rehearsal
def test_other_code_or_other_arguments_are_not_taken_in(nodes, undisturbed):
    run = nodes(2, "--min_nodes", 1)
    run.wait_for("epoch=2/12", 0)
    run.kill(1)
    run.wait_for("1 rank went on", 0)
    run.options = (*run.options, "--lr", "0.5")
    run.running[1] = run.start(1)
    assert run.end(1) == [2] and "arguments differs: lr=" in run.log(1)
    assert run.end(0) == [0]
    assert_same_bits(run.state(), undisturbed)


@pytest.mark.rehearsal
def test_a_node_without_a_package_writes_all_but_what_it_makes(nodes, tmp_path, undisturbed):
    (tmp_path / "broken" / "matplotlib").mkdir(parents=True)
    (tmp_path / "broken" / "matplotlib" / "__init__.py").write_text("raise ValueError('numpy.dtype size changed')")
    run = nodes(2, "--min_nodes", 1, env={1: {"PYTHONPATH": str(tmp_path / "broken")}})
    run.wait_for("epoch=2/12", 0)
    run.kill(0)
    assert run.end(1) == [0]
    assert "left out: curves.png and the report's figures (matplotlib cannot be imported: ValueError: numpy" in run.log(1)
    assert_same_bits(run.state(), undisturbed)


# A rank that is told to dies in its first evaluation.
DIES = """
import os, signal, sys
sys.path.insert(0, {root!r})
from common.run import scores
all_reduce = scores.Scores.all_reduce

def dies(self):
    if os.environ.get("DIES"):
        os.kill(os.getpid(), signal.SIGKILL)
    return all_reduce(self)

scores.Scores.all_reduce = dies
exec(compile({text!r}, {job!r}, "exec"), {{"__name__": "__main__", "__file__": {job!r}}})
"""


@pytest.mark.rehearsal
@pytest.mark.parametrize("intact", [True, False])
def test_an_evaluation_in_which_a_rank_is_lost_begins_anew_and_the_block_for_it_is_needed(nodes, undisturbed, tmp_path, intact):
    job = ROOT / "jobs" / "train_ddp_exact.py"
    text = job.read_text()
    if not intact:
        text = text.replace("scores = run.together(evaluate, ", "scores = evaluate(")
        assert text != job.read_text()
    script = tmp_path / "train_ddp_exact.py"
    script.write_text(DIES.format(root=str(ROOT), text=text, job=str(job)))
    run = nodes(2, "--min_nodes", 1, job=script, env={1: {"DIES": "1"}})
    codes = run.end(0, 1)
    if not intact:
        assert codes[0] == 1 and "failed after step 5, in phase evaluate: RanksChanged" in run.log(0)
        return
    assert codes == [0, 1]
    assert re.search(r"rank 1 \(node 1, host .*\) was killed by SIGKILL.*: 1 rank went on with step 6 after", run.log(0))
    assert_same_bits(run.state(), undisturbed)
    run.assert_every_sample_once()


@pytest.mark.rehearsal
def test_without_exact_a_run_goes_on_too_and_says_what_its_bits_depend_on(nodes):
    small = ["--arch", "resnet18", "--image_size", 32, "--epochs", 3, "--ignore", "width"]
    run = nodes(2, "--min_nodes", 1, *small, job=ROOT / "jobs" / "train_imagenet.py")
    run.wait_for("epoch=1/3", 0)
    run.kill(0)
    assert run.end(1) == [0] and "node 0 (rank 0) is lost: 1 rank went on with step" in run.log(1)
    assert "4 shares of 8 samples, for 1 to 4 ranks; the bits of the result depend on who takes part" in run.log(0)
    run.assert_every_sample_once()
