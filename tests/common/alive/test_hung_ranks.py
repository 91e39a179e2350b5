"""Alive but without progress: who is named, and what is no reason for an alarm."""

import os
import re
import resource
import signal
import types

import pytest

from common.alive import beside, heartbeat, judge, worker
from tests.tools.jobs import ROOT
from tests.tools.ranks import TWO, run_variant


def status(rank, phase, steps, idle, median=0.1):
    return {"rank": rank, "phase": phase, "steps": steps, "idle": idle, "median": median, "waits": "", "waiting": False}


@pytest.mark.parametrize(
    "what, statuses, culprit",
    [
        ("all train", [status(0, "step", 9, 1), status(1, "step", 9, 1)], None),
        ("one hangs in its loader, the others wait for it", [status(0, "step", 9, 70), status(1, "data", 9, 70)], 1),
        ("one is a step behind", [status(0, "step", 10, 70), status(1, "step", 9, 71)], 1),
        ("the last progress is less than a minute old", [status(0, "step", 9, 59), status(1, "data", 9, 70)], None),
        ("steps of 20 s may take 200 s", [status(0, "step", 9, 150, 20.0), status(1, "data", 9, 150, 20.0)], None),
        ("the slowest node counts", [status(0, "step", 9, 150, 20.0), status(1, "data", 9, 150)], None),
        ("and no longer", [status(0, "step", 9, 210, 20.0), status(1, "data", 9, 210, 20.0)], 1),
        ("rank 0 saves, the others wait", [status(0, "save", 9, 600), status(1, "step", 9, 600)], None),
        ("but not for ever", [status(0, "save", 9, 901), status(1, "step", 9, 901)], 0),
        ("an evaluation of half an hour", [status(0, "evaluate", 9, 1800), status(1, "evaluate", 9, 1800)], None),
        ("and of more than an hour", [status(0, "evaluate", 9, 3601), status(1, "evaluate", 9, 3601)], 0),
        ("the first step compiles", [status(0, "compile", 0, 800), status(1, "compile", 0, 800)], None),
        ("a long download", [status(0, "start", 0, 3000), status(1, "start", 0, 3000)], None),
    ],
)
def test_who_holds_the_others_up(what, statuses, culprit):
    found = judge.find_stalled([judge.summarize([status]) for status in statuses])
    assert found == judge.find_stalled([judge.summarize(statuses)]), "whether on one node or on two"
    assert (found and found["rank"]) == culprit, what


# Put into the program of rank 0; without progress for ten seconds it would be ended.
PATCHED = """
import os, sys, time
sys.path.insert(0, {root!r})
from common.checkpoints import checkpoint
from datasets import sampler
write, in_order = checkpoint.write, sampler.InOrder.__iter__

def slow_write(*words):
    time.sleep(15)
    print("a save took longer than that")
    write(*words)

def slow_evaluation(self):
    time.sleep(15)
    print("an evaluation took longer than that")
    yield from in_order(self)

if os.environ.get("RANK") == "0":
    checkpoint.write, sampler.InOrder.__iter__ = slow_write, slow_evaluation
exec(compile(open({job!r}).read(), {job!r}, "exec"), {{"__name__": "__main__", "__file__": {job!r}}})  # keeps sys.argv: workers start this file
"""


@pytest.mark.rehearsal
def test_a_long_save_or_evaluation_is_no_alarm(tmp_path):
    job = tmp_path / "train_ddp.py"
    job.write_text(PATCHED.format(root=str(ROOT), job=str(ROOT / "jobs" / job.name)))
    options = [*TWO, "--nproc_per_node", 2, "--patience", 50, "--epochs", 1, "--save_steps", 2]
    done = run_variant(job, tmp_path, *options)
    assert "a save took longer" in done.stdout and "an evaluation took longer" in done.stdout
    assert done.returncode == 0 and "error" not in done.stderr, done.stderr


def test_what_a_watcher_has_slept_is_no_time_of_its_worker(tmp_path, at):
    """A terminal's Ctrl-Z stops both, and so does a cluster that suspends the job."""
    clock = at([1000.0], worker)
    watched = worker.Worker(0, str(tmp_path / "worker"))
    watched.process = types.SimpleNamespace(poll=lambda: None, pid=os.getpid())
    for seconds, idle in ((1, 1), (9, 10), (3600, 10), (2, 12)):
        clock[0] += seconds
        watched.look()
        assert watched.status()["idle"] == idle


@pytest.mark.parametrize("code, seen", [(0, 0), (3, 3), (None, 0), ("why", 1), (-1, 255)])
def test_how_a_rank_has_ended_is_known_also_where_the_temporary_disk_is_full(tmp_path, monkeypatch, code, seen):
    watched = worker.Worker(0, str(tmp_path / "worker"))
    monkeypatch.setattr(heartbeat, "_single_rank", watched.file_prefix)
    if not (rank := os.fork()):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file can be written to
        heartbeat.report_end(code)
        os._exit(0)
    os.waitpid(rank, 0)
    assert beside.WatchedRank(rank, watched, None).poll() == seen


def test_a_signal_without_a_name_is_named_by_its_number(tmp_path):
    watched = worker.Worker(0, str(tmp_path / "worker"))
    watched.code = -(signal.SIGRTMIN + 6)
    assert re.search(rf"was killed by signal {signal.SIGRTMIN + 6} after step 0", watched.fault("node 0")["text"])


@pytest.mark.parametrize("code, again", [(2, False), (1, True)], ids=["a mistake", "a failure"])
def test_a_mistake_of_the_user_is_not_tried_again(tmp_path, monkeypatch, code, again):
    watched = worker.Worker(0, str(tmp_path / "worker"))
    monkeypatch.setenv(heartbeat.FILES, watched.file_prefix)
    heartbeat.report_fault("UserError: no such folder", code, victim=False)
    watched.code = code
    fault = watched.fault("node 0")
    assert (fault["code"], fault["restart"], fault["direct"]) == (code, again, True) and "no such folder" in fault["text"]


def test_a_victim_is_named_once_no_cause_has_come_and_at_once_where_it_is_alone(at):
    clock = at([1000.0], judge)
    alone, of_two = judge.Judge(1), judge.Judge(2)
    victim, culprit = worker.cause("lost its peer", direct=False), worker.cause("was killed")
    for one in (alone, of_two):
        one.accuse(victim)
    clock[0] += 0.1
    assert (alone.verdict(stalls=False), of_two.verdict(stalls=False)) == (victim, None)
    clock[0] += judge.CASCADE_SECONDS
    assert of_two.verdict(stalls=False) == victim
    of_two.accuse(culprit)
    assert of_two.verdict(stalls=False) == culprit
