"""What is tried again is no stall: a store or a mount that does not answer is waited for, for --patience seconds."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from common.alive import heartbeat, held, judge, patience, worker
from common.run import clock
from common.run.clock import Clock
from tests.tools.faultproxy import faults
from tests.tools.flagship import SMALL
from tests.tools.jobs import (
    FIGURES,
    PATIENCE,
    ROOT,
    TINY,
    Popen,
    assert_same_bits,
    command,
    environment,
    final_state,
    in_rehearsal,
    wait_for,
)
from tests.tools.packs import fetchers, reached, root, url, whole  # noqa: F401 (fixtures)
from tests.tools.ranks import TWO
from tests.tools.stores import store_environment

RANKS = {1: [], 2: ["--nproc_per_node", "2"]}


@pytest.fixture
def now(at):
    return at([1000.0], heartbeat, patience, worker, held, clock)


# --- What the pulse says -----------------------------------------------------------------------------------------------


def test_a_wait_is_news_once_and_its_seconds_are_added_up(now):
    wait = heartbeat.Pulse(None).store
    assert not wait.lasts() and wait.text() == "" and wait.seconds() == 0 and wait.report_end("s3://a") == 0
    assert wait.report_begin("s3://a", 990, 1290) and not wait.report_begin("s3://a", 995, 1295), (
        "of several processes one says so"
    )
    now[0] += 4
    assert wait.lasts() and wait.text() == "s3://a for 14 s" and wait.seconds() == 14
    assert wait.report_end("s3://b") == 0, "another store has answered"
    assert wait.report_end("s3://a") == 14 and wait.report_end("s3://a") == 0 and wait.seconds() == 14 and not wait.lasts()
    now[0] += 10
    assert not wait.report_begin("s3://a", 900, 1300), "a store that stumbles now and then has one line"
    assert wait.seconds() == 14 + 10, "no second counts twice"
    assert wait.report_begin("s3://b", 1014, 1314) and wait.seconds() == 14 + 10 and wait.text() == "s3://b for 0 s"


def test_a_wait_is_no_hang_until_its_time_is_over(now):
    wait = heartbeat.Pulse(None).store
    wait.report_begin("s3://a", 1000, 1300)
    now[0] += 600
    assert not wait.lasts() and wait.text() == "s3://a for 600 s" and wait.seconds() == 300
    assert wait.report_begin("s3://a", 1590, 1890), "after a minute it is news again"
    now[0] += 5
    assert wait.seconds() == 300 + 15 and wait.report_end("s3://a") == 15


def test_a_store_and_a_disk_do_not_end_the_wait_for_each_other(now):
    pulse = heartbeat.Pulse(None)
    assert pulse.store.report_begin("s3://a", 1000, 1300) and pulse.disk.report_begin(held.DISK, 1000, 1300)
    assert not pulse.store.report_begin("s3://a", 1000, 1300) and not pulse.disk.report_begin(held.DISK, 1000, 1300)
    now[0] += 7
    assert pulse.store.report_end("s3://a") == 7 and pulse.disk.lasts() and pulse.waited_seconds() == 14


@pytest.mark.parametrize("phase, counted", [("data", 30), ("evaluate", 30), ("save", 30), ("step", 0)])
def test_the_time_is_a_phase_of_its_own_unless_the_rank_computes_meanwhile(now, monkeypatch, phase, counted):
    monkeypatch.setattr(heartbeat, "of_this_process", functools.cache(lambda: heartbeat.Pulse(None)))
    run = Clock()
    run.enter(phase, 1)
    now[0] += 10
    heartbeat.of_this_process().store.report_begin("s3://a", now[0], now[0] + 100)
    now[0] += 30
    heartbeat.of_this_process().store.report_end("s3://a")
    now[0] += 2
    seconds = run.read()
    assert seconds["waiting_for_storage"] == counted
    assert seconds[clock.PHASE_OF_HEARTBEAT[phase]] == 42 - counted


def watched(folder, pid=None):
    found = worker.Worker(0, str(folder / "worker"))
    found.process = types.SimpleNamespace(poll=lambda: None, pid=pid or os.getpid())
    return found


def look_for(rank, now, seconds):
    for _ in range(seconds):
        now[0] += 1
        rank.look()


def test_what_a_rank_has_waited_for_is_no_time_without_progress(tmp_path, now):
    rank = watched(tmp_path)
    look_for(rank, now, 50)
    rank.pulse.store.report_begin("s3://a", now[0] - 40, now[0] + 260)  # its first attempt took so long
    look_for(rank, now, 1)
    assert rank.status()["idle"] == 10 and rank.status()["waiting"]
    look_for(rank, now, 270)
    assert rank.status()["idle"] == 21 and not rank.status()["waiting"]
    look_for(rank, now, 45)
    stalled = judge.find_stalled([judge.summarize([{**rank.status(), "phase": "data"}])])
    assert worker.describe_progress(stalled) == "for 66 s after step 0, in phase data, waiting for s3://a for 356 s"


def test_nobody_is_late_while_a_rank_waits_for_a_store():
    status = {"rank": 0, "phase": "compile", "steps": 0, "idle": 901, "median": 0.0, "waits": "", "waiting": False}
    other = {**status, "rank": 1, "phase": "data", "idle": 0, "waits": "s3://a for 200 s", "waiting": True}
    for nodes in ([[status, other]], [[status], [other]]):
        assert judge.find_stalled([judge.summarize(node) for node in nodes]) is None
    assert judge.find_stalled([judge.summarize([status, {**other, "waiting": False}])])["rank"] == 0


def test_a_step_in_which_something_was_waited_for_tells_nothing_of_the_others(tmp_path, now):
    rank = watched(tmp_path)
    for step, waits in ((1, False), (2, False), (3, True), (4, False)):
        if waits:
            rank.pulse.store.report_begin("s3://a", now[0], now[0] + 300)
        look_for(rank, now, 4)
        rank.pulse.store.report_end("s3://a")
        rank.pulse.set("data", step)
        rank.look()
    assert list(rank.step_seconds) == [4, 4]


@pytest.mark.parametrize("seconds, training, saving", [(300, 60, 900), (1000, 200, 3000), (10, 2, 900)])
def test_a_larger_number_raises_every_limit(seconds, training, saving):
    patience.use(seconds)
    for phase, limit in (("data", training), ("save", saving)):
        for idle in (limit - 1, limit + 1):
            status = {"rank": 0, "phase": phase, "steps": 5, "idle": idle, "median": 0.01, "waits": "", "waiting": False}
            assert bool(judge.find_stalled([judge.summarize([status])])) == (idle > limit)


# --- How long is waited ------------------------------------------------------------------------------------------------


def test_many_requests_have_one_limit_and_one_line(monkeypatch):
    monkeypatch.setattr(patience, "LONGEST_PAUSE", 0.06)
    waiting, said = patience.Patience(0.4), []
    while not waiting.failed("a store", time.monotonic()):
        pauses = [threading.Thread(target=waiting.pause, args=("a store", said.append, "no connection")) for _ in range(8)]
        for thread in pauses:
            thread.start()
        for thread in pauses:
            thread.join()
    assert said == ["warning: no connection; trying again for 0.4 s"]
    waits = heartbeat.of_this_process().store
    assert round(waits.seconds(), 6) >= 0.4 and waits.text() == "", "who has given up does not wait"  # of a clock that is large
    waiting.succeeded("a store", said.append)
    assert not waiting.failed("a store", time.monotonic())


def test_the_time_begins_with_the_first_attempt_that_fails(now):
    waiting = patience.Patience()
    now[0] += 1000  # in which there was nothing to ask for
    assert not waiting.failed("a store", now[0] - 10)
    now[0] += 291
    assert waiting.failed("a store", now[0])


def test_the_option_is_named_where_it_is_the_limit(monkeypatch):
    monkeypatch.setattr(patience, "LONGEST_PAUSE", 0.06)
    said = []
    for what, seconds, option in (("a", None, True), ("b", 20, True), ("c", None, False)):
        if not option:  # a program that has none
            monkeypatch.delenv(patience.VARIABLE)
        waiting = patience.Patience(seconds)
        assert not waiting.failed(what, time.monotonic())
        waiting.pause(what, said.append, what)
    assert said == [
        f"warning: {words}"
        for words in ("a; trying again for 300 s (--patience)", "b; trying again for 20 s", "c; trying again for 300 s")
    ]


def test_what_is_sent_in_the_background_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(patience, "LONGEST_PAUSE", 0.06)
    waiting, said = patience.Patience(60), []
    for in_the_way in (False, True):
        waiting.set_limit(20, in_the_way)
        assert not waiting.failed("a store", time.monotonic())
        waiting.pause("a store", said.append, "no connection")
        assert heartbeat.of_this_process().store.lasts() == in_the_way
    assert len(said) == 2


# --- Jobs ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(folder, words, *options, **env):
    folder.mkdir(exist_ok=True)
    with open(folder / "log", "w") as log:
        process = Popen([*words, *map(str, options), "--output_dir", folder / "out"], cwd=folder, env=environment(**store_environment(), **env),
                        stdout=log, stderr=log)  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        end_all_in(folder)


def end_all_in(folder):
    """A loader process that has been stopped outlives its rank."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.readlink(place / "cwd") == str(folder):
                os.kill(int(place.name), signal.SIGKILL)


def log_of(folder):
    return (folder / "log").read_text()


def pictures(url, ranks, *options):
    backend = "packed-remote" if str(url).startswith("s3://") else "packed"
    return command(
        "train_imagenet", *SMALL, "--workers", 1, "--data_backend", backend, "--data_url", url, *RANKS[ranks], *options
    )


def silent_from(number, seconds):
    """A plan for the proxy: after so many requests for bytes of an object, none is answered to the end for so long."""
    objects, silenced = [], []

    def plan(request):
        objects.extend([request] * request.is_object)
        if request.is_object and len(objects) > number and (not silenced or request.at < silenced[0].at + seconds):
            silenced.append(request)
            return "stall"
        return None

    return plan, silenced


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.rehearsal)])
def test_a_store_that_is_silent_for_longer_than_a_step_may_take_costs_only_time(
    url, whole, store, monkeypatch, tmp_path, ranks
):
    """For 12 s, in which an attempt takes 4 s, and a rank without progress is ended after 8 s."""
    plan, silenced = silent_from(3, 12)
    with (
        faults(store, plan, monkeypatch),
        started(tmp_path / "silent", pictures(url, ranks, "--patience", 40), **FIGURES) as process,
    ):
        assert process.wait(PATIENCE) == 0, log_of(tmp_path / "silent")
    with started(tmp_path / "untouched", pictures(whole, ranks)) as process:
        assert process.wait(PATIENCE) == 0
    log = log_of(tmp_path / "silent")
    assert silenced
    assert len(re.findall(r"^warning: get_object s3://data/pack/.*; trying again for 40 s \(--patience\)$", log, re.M)) == 1
    assert re.search(r"^warning: s3://data at http://\S+ has answered after \d+ s$", log, re.M)
    assert_same_bits(final_state(tmp_path / "silent"), final_state(tmp_path / "untouched"))
    if ranks == 1:
        rows = [json.loads(line) for line in (tmp_path / "silent/out/speed.jsonl").read_text().splitlines()]
        assert sum(row["waiting_for_storage"] for row in rows) > 8
        page = (tmp_path / "silent/out/report.html").read_text()
        assert "waiting for a store or a disk" in page and "has answered after" in page


@pytest.mark.parametrize("ranks", in_rehearsal([1, 2], lambda ranks: ranks == 1))
def test_a_store_that_stays_silent_ends_the_job_in_a_line_that_names_it(url, store, monkeypatch, tmp_path, ranks):
    plan, _ = silent_from(3, 10**6)
    with faults(store, plan, monkeypatch), started(tmp_path / "silent", pictures(url, ranks, "--patience", 20)) as process:
        assert process.wait(PATIENCE) == 1
    last = log_of(tmp_path / "silent").splitlines()[-1]
    assert re.match(
        r"error: .*get_object s3://data/pack/train-\S+ at http://\S+: no good answer for 20 s, the last was: ", last
    ), last


# What happens once, in the third batch of the last rank: `where` it is loaded, or in the step after it.
ONCE = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from common.run.run import Run
from datasets import loader
def once(owner, name):
    whole, calls = getattr(owner, name), []
    def changed(self, *given):
        calls.append(given)
        if len(calls) == 3 and os.environ.get("RANK") in (None, "1"):
            {what}
        return whole(self, *given)
    setattr(owner, name, changed)
once(*{where})
exec(compile(open({job!r}).read(), {job!r}, "exec"), {{"__name__": "__main__", "__file__": {job!r}}})
"""
IN_A_LOADER, IN_A_STEP = '(loader.WithSampleErrors, "__getitem__")', '(Run, "step")'


def changed(folder, ranks, where, what, *options):
    job = folder / ("train_ddp.py" if ranks > 1 else "train.py")
    job.write_text(ONCE.format(root=str(ROOT), job=str(ROOT / "jobs" / job.name), where=where, what=what))
    return [sys.executable, str(job), *(TWO if ranks > 1 else TINY), *RANKS[ranks], "--workers", "1", *options]


@pytest.mark.parametrize("ranks", in_rehearsal([1, 2], lambda ranks: ranks == 1))
@pytest.mark.parametrize(
    "where, what, phase",
    [(IN_A_LOADER, "os.kill(os.getpid(), signal.SIGSTOP)", "data"), (IN_A_STEP, "time.sleep(10000)", "step")],
)
def test_what_nobody_tries_again_is_stuck_after_its_own_limit(tmp_path, ranks, where, what, phase):
    with started(tmp_path, changed(tmp_path, ranks, where, what, "--patience", "30")) as process:
        assert process.wait(PATIENCE) == 1
    # Where a rank hangs in its step, the other one may wait for it in the same one: then nobody knows which of them it is.
    who = "0" if ranks == 1 else "1" if phase == "data" else "[01]"
    assert re.search(rf"^error: rank {who} has made no progress for \d+ s after step \d, in phase {phase}(; stopping all 2 ranks)?$", log_of(tmp_path),
                     re.M), log_of(tmp_path)  # fmt: skip


@pytest.fixture
def disk(tmp_path):
    """(code that the kernel holds until the disk answers, a function with which it does): a process that starts another one by
    vfork is held, in state D, until that has opened its files."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    spawn = (
        f"os.posix_spawn('/bin/true', ['true'], {{}}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, {str(fifo)!r}, os.O_RDONLY, 0)])"
    )
    code = f"os.waitpid({spawn}, 0)"  # until it has ended, its end of the pipe takes an answer that is for the next one

    def answer():
        with contextlib.suppress(OSError):  # nobody waits
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
            return True
        return False

    yield code, answer
    answer()


def test_what_has_a_session_of_its_own_holds_no_rank():
    code = "import subprocess as s; own, other = (s.Popen(['cat'], stdin=s.PIPE, start_new_session=new) for new in (False, True)); "
    code += "print(own.pid, other.pid, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        own, other = map(int, process.stdout.readline().split())
        wait_for(lambda: os.getsid(other) == other, process, "its session")
        assert [*held.children(process.pid)] == [own]


def test_a_process_that_the_kernel_holds_is_not_idle(tmp_path, now, disk, capsys):
    code, answer = disk
    with subprocess.Popen([sys.executable, "-c", f"import os; {code}; print('there', flush=True); input()"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as process:  # fmt: skip
        rank = watched(tmp_path, process.pid)
        wait_for(lambda: [*held.children(process.pid)] and [*held.waits_of(process.pid)], process, "the kernel to hold it")
        idle = []
        for seconds in (4, 4, 282, 40):
            look_for(rank, now, seconds)
            idle.append(rank.status()["idle"])
        waits = rank.status()["waits"]
        answer()
        assert waits == "a disk or a mount for 326 s"
        assert idle == [4, 8, 4, 30], "without what it has waited, from when it was found to the end of --patience"
        assert process.stdout.readline() == "there\n"
        look_for(rank, now, 1)
        assert rank.status()["waits"] == "" and rank.pulse.waited_seconds() == 300
        process.communicate("\n")
    who = rf"warning: rank 0 \(process {process.pid}\)"
    assert re.fullmatch(
        rf"{who} waits .* for 300 s \(--patience\)\n{who} has waited \d+ s for a disk or a mount\n", capsys.readouterr().out
    )


def test_only_one_wait_that_lasts_counts_as_a_disk_that_does_not_answer(now, monkeypatch):
    waits, of_a_rank = set(), held.BlockedThreads()
    monkeypatch.setattr(held, "waits_of", lambda pid: set(waits))

    def looked(seconds, *found):
        waits.clear()
        waits.update(found)
        now[0] += seconds
        return of_a_rank.blocked_since(1)

    assert [looked(1, (7, f"wait {number}")) for number in range(10)] == [None] * 10, "a slow disk"
    assert [looked(1, (7, "a")) for _ in range(4)] == [None] * 4 and looked(1, (7, "a"), (8, "b")) == now[0] - 4
    assert looked(1000, (7, "a")) is None and looked(2, (7, "a")) is None, "nobody has looked meanwhile"
    assert looked(2, (7, "a")) == now[0] - 4
    monkeypatch.setenv(patience.VARIABLE, "20")  # less is enough for a line, and a look may come late all the same
    assert [looked(2, (9, "b")) for _ in range(3)] == [None, now[0] - 4, now[0] - 4]


def test_each_operation_of_a_thread_is_a_wait_of_its_own(tmp_path, disk):
    code, answer = disk
    script = f"import os\nfor _ in range(2):\n    {code}\n    print('there', flush=True)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        found = []
        for _ in range(2):
            wait_for(lambda: [*held.children(process.pid)] and [*held.waits_of(process.pid)], process, "the kernel to hold it")
            found.append(set(held.waits_of(process.pid)))
            wait_for(answer, process, "what it waits for")
            process.stdout.readline()
    assert found[0] and found[1] and not found[0] & found[1]


LONGER = ["--max_samples", "256", "--batch_size", "32"]  # so that the watcher looks once more before the end


@pytest.mark.parametrize("ranks", in_rehearsal([1, 2], lambda ranks: ranks == 1))
def test_a_mount_that_answers_again_is_waited_for(tmp_path, ranks, disk):
    code, answer = disk
    with started(tmp_path, changed(tmp_path, ranks, IN_A_LOADER, code, *LONGER)) as process:
        wait_for(lambda: "waits for a disk or a mount that does not answer" in log_of(tmp_path), process, "the warning")
        answer()
        assert process.wait(PATIENCE) == 0, log_of(tmp_path)
    assert re.search(
        rf"^warning: rank {ranks - 1} \(process \d+\) has waited \d+ s for a disk or a mount$", log_of(tmp_path), re.M
    )


def test_a_mount_that_stays_silent_is_named_in_the_last_line(tmp_path, disk):
    code, _ = disk
    with started(tmp_path, changed(tmp_path, 1, IN_A_LOADER, code, "--patience", "20")) as process:
        assert process.wait(PATIENCE) == 1
    last = log_of(tmp_path).splitlines()[-1]
    assert re.fullmatch(
        r"error: rank 0 has made no progress for \d+ s after step \d, in phase data, waiting for a disk or a mount for 2\d s",
        last,
    ), last
