"""A job on one device has a watcher, too: however it ends, and where it hangs, a line says so, and nothing is left behind."""

import argparse
import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

import pytest

from common import files
from common.alive import heartbeat, watcher, worker
from common.alive.wire import hub
from common.ranks import collectives, group
from common.world import World
from tests.common.alive.wire import test_strangers as strangers
from tests.tools.jobs import PATIENCE, ROOT, TINY, Popen, command, environment, run, run_job, saved, wait_for
from tests.tools.ranks import changed_loader, processes_of

LONG = [*TINY, "--epochs", "200"]
HOME = r"rank 0 \(host \S+\)"


@contextlib.contextmanager
def alone(folder, words, stdin=subprocess.DEVNULL, **env):
    words = [*map(str, words), "--output_dir", str(folder / "out")]
    with open(folder / "log", "w") as log:
        process = Popen(words, cwd=folder, env=environment(**env), stdin=stdin, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        wait_for(lambda: not processes_of(folder), None, "the end of the watcher")


def log_of(folder):
    return (folder / "log").read_text()


def test_in_a_terminal_a_job_that_hangs_is_only_warned_of(tmp_path):
    warning = re.compile(r"^warning: rank 0 has made no progress for \d+ s after step 2, in phase data$", re.MULTILINE)
    words = [*changed_loader("train", tmp_path, "time.sleep(10000)"), *LONG]
    own, its = pty.openpty()
    with open(own, "wb"), open(its, "rb") as terminal, alone(tmp_path, words, terminal) as process:
        wait_for(lambda: warning.search(log_of(tmp_path)), process, "the warning")
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
    assert len(warning.findall(log_of(tmp_path))) == 1 and "was killed by SIGKILL" in log_of(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_before_the_run_it_is_not_claimed_to_know_the_signal(tmp_path, number):
    script = tmp_path / "early.py"
    script.write_text(EARLY.format(root=str(ROOT)))
    with alone(tmp_path, [sys.executable, str(script)], subprocess.PIPE) as process:
        wait_for(lambda: "ready" in log_of(tmp_path), process, "the beginning")
        process.send_signal(number)
        process.wait(PATIENCE)
        wait_for(lambda: not processes_of(tmp_path), None, "the end of the watcher")
    assert re.search(rf"^error: {HOME} was killed by SIGTERM or SIGKILL after step 0, in phase start$", log_of(tmp_path), re.M)


EARLY = """
import sys
sys.path.insert(0, {root!r})
from common import arguments
from common.job import run_job
from datasets import cifar10

def main():
    arguments.parse(cifar10.parser("A job that has only begun."))
    print("ready", flush=True)
    sys.stdin.read()

run_job(main)
"""


def test_of_a_job_that_ends_nothing_is_said_and_nothing_left(tmp_path):
    with alone(tmp_path, command("train", *TINY)) as process:
        wait_for(lambda: "epoch=1/2" in log_of(tmp_path), process, "an epoch")
        folders = set()
        for number in os.listdir(f"/proc/{process.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                file = os.readlink(f"/proc/{process.pid}/fd/{number}")
                folders |= {os.path.dirname(file)} if file.endswith(".stack") else set()
        assert len(folders) == 1 and process.wait(PATIENCE) == 0
    assert silent(tmp_path) and not any(map(os.path.exists, folders))


@pytest.fixture
def short_folder():
    """The path of a socket has 107 letters."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_what_a_killed_job_and_its_watcher_have_left_goes_with_the_next_start(tmp_path, short_folder):
    words = [*command("train", *LONG, "--save_steps", 1, "--workers", 1), "--output_dir", tmp_path / "out"]
    process = Popen(words, cwd=tmp_path, env=environment(TMPDIR=str(short_folder)), stdout=subprocess.DEVNULL)
    wait_for(saved(tmp_path, 32), process, "a second step, whose batch has come from the process that loads")
    for pid in processes_of(tmp_path):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not processes_of(tmp_path), None, "the end of all")
    assert any(short_folder.glob("*/worker.pulse")) and any(short_folder.glob("*/listener-*"))
    run_job(
        "train",
        tmp_path,
        *TINY,
        "--max_steps",
        1,
        "--resume",
        "never",
        "--overwrite",
        "true",
        env={"TMPDIR": str(short_folder)},
    )
    wait_for(lambda: not processes_of(tmp_path), None, "the end of the watcher")
    assert not list(short_folder.iterdir())


def test_a_temporary_folder_that_is_used_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = files.create_scratch_folder()
    (tmp_path / re.sub("-[^-]*$", "-killed", mine)).mkdir()
    (tmp_path / "anyrank-run-another-host").mkdir()
    assert {mine, files.create_scratch_folder(), str(tmp_path / "anyrank-run-another-host")} == set(
        map(str, tmp_path.iterdir())
    )


def test_the_line_after_a_stack_that_was_cut_off_begins_a_line(tmp_path):
    """Python's fault handler may crash itself while it lists the modules."""
    rank = worker.Worker(0, str(tmp_path / "worker"))
    rank.code = -signal.SIGSEGV
    for written, shown in (
        ("", ""),
        ("Extension modules: numpy, torch._", "Extension modules: numpy, torch._\n"),
        ("whole\n", "whole\n"),
    ):
        (tmp_path / "worker.crash").write_text(written)
        assert rank.stack() == shown


def test_of_a_job_that_is_told_to_stop_nothing_is_said(tmp_path):
    with alone(tmp_path, command("train", *LONG, "--save_steps", 1)) as process:
        wait_for(saved(tmp_path, 16), process, "a step")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 143
    assert silent(tmp_path)


def silent(folder):
    return not re.search("error:|rank 0|no progress", log_of(folder).partition("\n")[2])


def test_a_mistake_is_said_once(tmp_path):
    with alone(tmp_path, command("train", "--data_url", tmp_path / "nothing")) as process:
        assert process.wait(PATIENCE) == 2
    assert log_of(tmp_path).count("error:") == 1


def test_without_room_for_its_files_the_job_trains_on(monkeypatch, capsys):
    monkeypatch.setattr(watcher.beside, "start", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    watcher.start_for_single_rank(World("local", "", "node", 0, 1, 0, 1, 0, 1), lambda since, why: None)
    assert capsys.readouterr().err == "warning: this process is not watched: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_only_rank_has_no_second_watcher_on_which_it_depends(monkeypatch, ranks):
    """run_job() has started the one that only looks on; it is the ranks of a group that end with their watchers."""
    started = []
    monkeypatch.delenv(heartbeat.PARENT, raising=False)
    monkeypatch.setattr(watcher, "start", lambda here, *_, **__: started.append(here.world_size))
    monkeypatch.setattr(collectives.GROUP, "watcher", None)
    here = World("slurm", "", "process", 0, 1, 0, ranks, 0, ranks)
    group.start_workers(argparse.Namespace(world=here, doctor=False))
    assert started == [2] * (ranks - 1)


def test_of_a_rank_that_hangs_the_stack_and_the_line_below_it_go_to_stderr(tmp_path, at, capsys):
    clock, ended = at([1000.0], watcher, worker), []

    def runs():
        clock[0] += 9
        assert clock[0] < 1200, "it hangs, and nobody says so"

    def dumps(_):
        (tmp_path / "worker.stack").write_text("its stack\n")

    rank = worker.Worker(0, str(tmp_path / "worker"))
    rank.process = types.SimpleNamespace(
        pid=os.getpid(), poll=runs, next_request=lambda seconds: None, send_signal=dumps, end=ended.append
    )
    rank.pulse.set("step", 3)
    watcher.Watcher(World("local", "", "node", 0, 1, 0, 1, 0, 1), rank, lambda since, why: None, says_why=True).run()
    out, err = capsys.readouterr()
    line = r"error: rank 0 has made no progress for \d+ s after step 3, in phase step"
    assert out == "" and re.fullmatch(rf"its stack\n{line}\n", err), (out, err)
    assert ended == [1]


def test_a_rank_that_ends_as_soon_as_it_has_asked_to_be_watched_is_named_by_the_watchers(tmp_path):
    """Its order and its end are seen in one turn: its watcher connects, and then says what has happened."""
    with hub.listen(0) as listener:
        first = hub.Hub(listener, strangers.hello(0), print, strangers.KEY)
        port = listener.getsockname()[1]
        orders = [{"address": "127.0.0.1", "port": port, "hello": strangers.hello(1), "key": strangers.KEY.hex()}]
        rank = worker.Worker(1, str(tmp_path / "worker"))
        rank.process = types.SimpleNamespace(
            pid=os.getpid(),
            poll=lambda: -9,
            next_request=lambda seconds: orders.pop() if orders else None,
            end=lambda code: None,
        )
        here = World("mpi", "", "process", 0, 1, 1, 2, 0, 2)
        other = watcher.Watcher(here, rank, lambda since, why: None, says_why=False)
        thread = threading.Thread(target=other.run, daemon=True)
        thread.start()
        first.meet(30)
        first.send(go={"attempt": 0, "address": "127.0.0.1", "port": 1})
        faults = []
        while not faults:
            heard = first.poll(5)
            assert heard and None not in dict(heard).values(), "the rank was not named"
            faults = [message["fault"] for _, message in heard if "fault" in message]
        assert re.match(r"rank 1 \(host .*SIGKILL", faults[0]["text"])
        first.send(verdict=faults[0])
        thread.join(30)
        assert not thread.is_alive()
        first.close()


FAILS = """
import sys, threading
sys.path.insert(0, {root!r})
from common.alive import beside

ended = threading.Event()
beside.start(0, lambda rank: {{}}["key"], ended.set)
ended.wait()
"""


def test_a_watcher_that_fails_says_why(tmp_path):
    done = run([sys.executable, "-c", FAILS.format(root=str(ROOT))], cwd=tmp_path, env=environment())
    assert done.stdout == "warning: rank 0 is no longer watched: KeyError: 'key'\n", done.stdout + done.stderr
