"""Ranks that a platform starts one by one: they have watchers, and none waits for one that is gone (see also test_lost.py)."""

import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.tools.jobs import PATIENCE, ROOT, Popen, assert_same_bits, command, environment, final_state, forked, saved, wait_for
from tests.tools.objectstore import free_port
from tests.tools.ranks import LONG, TORCHRUN, TWO, children, processes_of, rank_environments


@contextlib.contextmanager
def ranks(folder, words, launcher=None):
    """The processes that a platform would start, rank 0's first; what all of them print is in folder/log."""
    words = [*map(str, words), "--output_dir", str(folder / "out")]
    with open(folder / "log", "w") as log:
        how = {"cwd": folder, "stdout": log, "stderr": log}
        if launcher:
            started = [Popen([*launcher, str(free_port()), *words[1:]], env=environment(), **how)]
        else:
            started = [Popen(words, env=environment(**env), **how) for env in rank_environments()]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_watcher_that_is_killed_ends_the_job_and_ps_tells_it_from_its_rank(tmp_path, rank):
    with ranks(tmp_path, command("train_ddp", *LONG, "--save_steps", 1)) as both:
        wait_for(saved(tmp_path, 16), both[0], "a step")
        shown = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0") for pid in children(both[rank])}
        (watcher,) = [pid for pid, words in shown.items() if words == b"watcher of rank %d" % rank]
        os.kill(watcher, signal.SIGKILL)
        assert both[rank].wait(PATIENCE) == 1 and both[1 - rank].wait(PATIENCE) == 1
    log = (tmp_path / "log").read_text()
    assert f"error: the watcher of rank {rank} has ended, so this rank does, too" in log
    # new: one rank of each host says it for all, here rank 0
    assert rank == 0 or "error: rank 1 is lost; stopping all 2 ranks" in log, log


DIES_ONCE_JOINED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from common.ranks import group
join = group.join

def dies_once_joined(*given):
    join(*given)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

group.join = dies_once_joined
exec(compile(open({job!r}).read(), {job!r}, "exec"), {{"__name__": "__main__", "__file__": {job!r}}})
"""


def test_a_rank_that_is_killed_under_the_doctor_is_named(tmp_path):
    job = tmp_path / "train_ddp.py"
    job.write_text(DIES_ONCE_JOINED.format(root=str(ROOT), job=str(ROOT / "jobs" / "train_ddp.py")))
    with ranks(tmp_path, [sys.executable, str(job), *TWO, "--doctor", "true"]) as (first, _):
        assert first.wait(PATIENCE) == 1
    assert re.search(r"error: rank 1 \(host \S+\) was killed by SIGTERM or SIGKILL", (tmp_path / "log").read_text())


@pytest.mark.rehearsal
def test_ranks_that_end_well_take_their_watchers_with_them(tmp_path, two_ranks):
    with ranks(tmp_path, command("train_ddp", *TWO)) as both:
        assert [process.wait(PATIENCE) for process in both] == [0, 0]
        log = (tmp_path / "log").read_text()
        assert "error" not in log and "warning: rank" not in log, log
    wait_for(lambda: not processes_of(tmp_path), None, "the end of the watchers")
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))


# A job whose rank 0 stands still while it looks for a checkpoint, and the other rank waits for that.
STANDS_STILL = """
import os, runpy, signal, sys
sys.path.insert(0, {root!r})
from common.checkpoints import restore
restore.find_checkpoint = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
sys.argv[0] = {job!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_rank_that_others_wait_for_without_a_collective_is_named(tmp_path):
    job = tmp_path / "train_ddp.py"
    job.write_text(STANDS_STILL.format(root=str(ROOT), job=str(ROOT / "jobs" / "train_ddp.py")))
    with ranks(tmp_path, [sys.executable, job, *TWO]) as (first, second):
        assert second.wait(PATIENCE) == 1
        first.wait(PATIENCE)
    line = r"error: rank 0 \(host \S+\) is stopped \(state T\) after step 0, in phase start; stopping all 2 ranks"
    assert re.search(line, (tmp_path / "log").read_text()), (tmp_path / "log").read_text()


@pytest.mark.rehearsal
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_of_one_rank_stops_all_as_it_should(tmp_path, number, code):
    with ranks(tmp_path, command("train_ddp", *LONG, "--save_steps", 1)) as both:
        wait_for(saved(tmp_path, 16), both[0], "a step")
        both[1].send_signal(number)
        assert [process.wait(PATIENCE) for process in both] == [code, code]
    log = (tmp_path / "log").read_text()
    assert f"stopped by {number.name}; saved after step" in log and "error" not in log, log


@pytest.mark.rehearsal
def test_where_torchruns_agent_is_killed_its_ranks_save_and_end(tmp_path):
    with ranks(tmp_path, command("train_ddp", *LONG), TORCHRUN) as (agent,):
        wait_for(lambda: "step=1/" in (tmp_path / "log").read_text(), agent, "a step")
        agent.kill()
        wait_for(lambda: not processes_of(tmp_path), None, "the end of the ranks")
    assert "stopped by SIGTERM; saved after step" in (tmp_path / "log").read_text()


ASKS_WHAT_ENDS_IT = """
import argparse, ctypes, sys
sys.path.insert(0, {root!r})
from common.ranks import group
from common.world import World

group.start_workers(argparse.Namespace(world=World("launcher", "", "process", 0, 1, 0, 1, 0, 1), doctor=False))
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
print(number.value)
"""


def test_under_torchrun_a_rank_is_stopped_when_its_agent_ends_and_elsewhere_it_outlives_who_has_started_it(tmp_path):
    found = forked(["-c", ASKS_WHAT_ENDS_IT.format(root=str(ROOT))], tmp_path, {"TORCHELASTIC_RUN_ID": "x"}, {})
    assert [done.stdout for done in found] == [f"{int(signal.SIGTERM)}\n", "0\n"], found
