"""All tests, each file in a process of its own: python -m tests [FILES OR FOLDERS] [OPTIONS OF PYTEST]

The processes are forks of this one, which has done the slow imports. They wait for other processes now and then, so there
are more of them than cores. What has failed is tried once more, alone: if it passes then, the run is not red, but the last lines
name it, because it is a defect of the test. More than three are no chance.

At the end stand the longest tests, and for each file the seconds of CPU and of the clock (CONTRIBUTING.md has the budget).
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests run side by side, and threads that wait spin

import pytest

from tests.tools import starter

HERE = Path(__file__).resolve().parent
PROCESSES = 2  # for each core
MOST = 3  # tests that are tried again
SHOWN = 20
OUTCOMES = ["passed", "skipped", "failed"]
# The longest begin first; those that wait and those that compute in turn.
FIRST = ["patience", "train", "frozen_machine", "train_imagenet", "run_bucket", "bundle", "download", "docs", "dpex", "elastic",
         "packed", "exact", "watcher", "modelarts", "doctor", "resume_at_other_sizes"]  # fmt: skip


class Results:
    """Written where the parent reads them: what each test has come to, and its seconds."""

    def __init__(self, path):
        self._path, self.outcomes, self.seconds = path, {}, {}

    def pytest_runtest_logreport(self, report):
        name = report.nodeid
        self.outcomes[name] = max(self.outcomes.get(name, "passed"), report.outcome, key=OUTCOMES.index)
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration

    def pytest_sessionfinish(self):
        self._path.write_text(json.dumps([self.outcomes, self.seconds]))


class File:
    """The tests of one file while they run, and what came of them."""

    def __init__(self, names, options, folder):
        self.name, self._folder, self._began = names[0].partition("::")[0], folder, time.monotonic()
        sys.stdout.flush()
        asked, answers = os.pipe(), os.pipe()
        self._starter = os.fork()  # of this test process, which ends with it
        if not self._starter:
            os.close(asked[1])
            os.close(answers[0])
            starter.leave(lambda: starter.serve(asked[0], answers[1]))  # whatever fails there ends this process alone
        os.close(asked[0])
        os.close(answers[1])
        self.process = os.fork()
        if not self.process:
            starter.leave(lambda: self._test([*names, *options], f"{asked[1]} {answers[0]}"))
        os.close(asked[1])
        os.close(answers[0])

    def _test(self, words, pipes):
        log = os.open(self._folder / "log", os.O_WRONLY | os.O_CREAT)
        for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(descriptor, number)
        os.environ.update(STARTER=pipes, SHARED=str(self._folder.parent))
        own = ["--basetemp", str(self._folder / "t"), "-p", "no:cacheprovider"]
        sys.exit(pytest.main([*own, *words], [Results(self._folder / "results")]))

    def ended(self, status, used):
        self.clock = time.monotonic() - self._began
        os.kill(self._starter, signal.SIGKILL)
        self.cpu = sum(one.ru_utime + one.ru_stime for one in (used, os.wait4(self._starter, 0)[2]))
        self.code, self.log = os.waitstatus_to_exitcode(status), (self._folder / "log").read_text(errors="replace")
        self.outcomes, self.seconds = {}, {}
        with contextlib.suppress(OSError, ValueError):
            self.outcomes, self.seconds = json.loads((self._folder / "results").read_text())
        shutil.rmtree(self._folder, ignore_errors=True)

    def names(self, outcome):
        return [name for name, its in self.outcomes.items() if its == outcome]

    @property
    def failed(self):
        """5 is pytest's code where the options choose no test of the file."""
        return self.names("failed") or ([self.name] if self.code not in (0, 5) else [])


def run(groups, options, at_once, temporary):
    """The Files of these lists of tests; what has failed is printed as soon as it has."""
    waiting, running, done = list(groups), {}, []
    while waiting or running:
        while waiting and len(running) < at_once:
            started = File(waiting.pop(0), options, Path(tempfile.mkdtemp(prefix="", dir=temporary)))
            running[started.process] = started
        file = running.pop(one_that_has_ended(running))
        file.ended(*os.wait4(file.process, 0)[1:])
        done.append(file)
        if file.outcomes or file.failed:
            print(f"{file.name}: {counted([file]) or f'exit code {file.code}'}", flush=True)
        if file.failed:
            print(file.log, flush=True)
    return done


def one_that_has_ended(processes):
    """One of these, which its owner then waits for."""
    while True:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        for pid in processes:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                return pid
        time.sleep(0.01)  # it is a starter, whose tests end now


def counted(files):
    names = {outcome: [name for file in files for name in file.names(outcome)] for outcome in OUTCOMES}
    return ", ".join(f"{len(names[outcome])} {outcome}" for outcome in OUTCOMES if names[outcome])


def is_file(word):
    """Of tests, or of one of them: FILE.py::TEST."""
    return Path(str(word).partition("::")[0]).suffix == ".py"


def is_folder(word):
    """Of tests: a word of pytest's options may be the name of another folder."""
    return HERE in (Path(word).resolve(), *Path(word).resolve().parents) and Path(word).is_dir()


def files_in(folder):
    return [os.path.relpath(path) for path in sorted(Path(folder).rglob("test_*.py"), key=order)]


def order(path):
    name = path.stem.removeprefix("test_")
    return (FIRST.index(name) if name in FIRST else len(FIRST)), -path.stat().st_size


def main(words):
    began = time.monotonic()
    for word in words:
        if word.startswith("tests/") and not Path(word.partition("::")[0]).exists():
            sys.exit(f"error: there is no {word}: ls tests shows the folders, one for each room")
    chosen = [word for word in words if is_file(word) or is_folder(word)]
    options = [word for word in words if word not in chosen]
    files = [name for word in chosen or [HERE] for name in ([word] if is_file(word) else files_in(word))]
    groups = [[name] for name in files]
    # What is killed leaves its temporary files, so all go with a folder. Its name is short, for the paths of sockets.
    os.environ["TMPDIR"] = tempfile.tempdir = temporary = tempfile.mkdtemp(prefix="t-")
    try:
        starter.load()
        files = run(groups, options, int(PROCESSES * len(os.sched_getaffinity(0))), temporary)
        once = twice = [name for file in files for name in file.failed]
        if 0 < len(once) <= MOST:
            print(f"once more, alone: {', '.join(once)}", flush=True)
            twice = run([once], ["-m", ""], 1, temporary)[0].failed
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    show_seconds(files)
    passed = [name for name in once if name not in twice]
    if passed:
        print(f"\n{len(passed)} passed at the second try: {', '.join(passed)}")
    print("\n".join(["", *(f"FAILED {name}" for name in twice)]))
    used, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
    cpu = used.ru_utime + used.ru_stime
    print(f"{counted(files)}; minutes: {cpu / 60:.1f} of CPU, {clock / 60:.1f} of the clock", flush=True)
    return 1 if twice or not any(file.outcomes for file in files) else 0


def show_seconds(files):
    longest = sorted(((seconds, name) for file in files for name, seconds in file.seconds.items()), reverse=True)[:SHOWN]
    print("\nthe longest tests, in seconds", *(f"{seconds:6.1f}  {name}" for seconds, name in longest), sep="\n")
    rows = sorted(((file.cpu, file.clock, file.name) for file in files if file.seconds), reverse=True)
    print("\nseconds of CPU and of the clock", *(f"{cpu:6.1f} {clock:6.1f}  {name}" for cpu, clock, name in rows), sep="\n")


if __name__ == "__main__":
    starter.leave(lambda: sys.exit(main(sys.argv[1:])))
