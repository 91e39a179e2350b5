"""A start of a run whose machine stands still, at a chosen moment, while another start goes on with the run.

Used by test_frozen_machine.py and tests/chaos/frozen.py. The disk has no locks, as some mounted stores: else the other start would be
refused where both are on one machine.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from tests.tools.jobs import ROOT, Popen, environment, wait_for
from tests.tools.ranks import processes_of

SCRIPT = """
import contextlib, errno, fcntl, fnmatch, os, signal, sys
sys.path.insert(0, {root!r})

def changed(room, name, what):
    usual = getattr(room, name)
    setattr(room, name, lambda *given, **how: what(usual, *given, **how))

def without_locks(usual, file, *how):
    if os.readlink(f"/proc/self/fd/{{file}}").endswith("/.lock"):
        raise OSError(errno.ENOLCK, "no locks")
    return usual(file, *how)

times = []

def stand_still(operation, path):
    wanted, pattern, number = os.environ["FREEZE"].split(" ")
    if operation == wanted and fnmatch.fnmatch(path, pattern) and os.environ.get("RANK", "0") == "0":
        times.append(path)
        if len(times) == int(number):
            for pid in [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]:
                with contextlib.suppress(OSError):  # first the rest of its machine, which would take this one for stopped
                    if os.readlink(f"/proc/{{pid}}/cwd") == os.getcwd():
                        os.kill(pid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)

def replace(usual, source, target, **how):
    deletes = os.path.basename(target).startswith("removed-")
    stand_still(*(("delete", source) if deletes else ("rename", target)))
    return usual(source, target, **how)

def unlink(usual, path, **how):
    stand_still("delete", path)
    return usual(path, **how)

def mkdir(usual, path, *how, **more):
    stand_still("mkdir", str(path))
    return usual(path, *how, **more)

def request(usual, self, operation, parameters):
    stand_still("upload" if operation.startswith("Put") else operation, parameters.get("Key", ""))
    return usual(self, operation, parameters)

def step(usual, self, loss):
    usual(self, loss)
    if self.position.total_steps == int(os.environ["STEP"]) and self.peers.rank == 0:
        open(os.environ["FIFO"] + ".at", "w").close()
        open(os.environ["FIFO"]).close()  # until somebody opens it to write

if not hasattr(os, "in_a_test"):  # else this is a fork of the parent of its node, which has done it
    os.in_a_test = True
    changed(fcntl, "flock", without_locks)
    if "FREEZE" in os.environ:
        import botocore.client
        changed(os, "replace", replace)
        changed(os, "unlink", unlink)
        changed(os, "mkdir", mkdir)
        changed(botocore.client.BaseClient, "_make_api_call", request)
if "FIFO" in os.environ:
    from common.run import Run
    changed(Run, "step", step)
exec(compile(open({job!r}).read(), {job!r}, "exec"), {{"__name__": "__main__", "__file__": {job!r}}})
"""


class Start:
    """One of the starts, in a folder of its own; `output`: where its results go; `launcher`: what comes before the script."""

    def __init__(self, folder, job, options, output, env=None, launcher=()):
        self.folder = folder
        folder.mkdir()
        script = folder / f"{job}.py"
        script.write_text(SCRIPT.format(root=str(ROOT), job=str(ROOT / "jobs" / script.name)))
        words = [sys.executable, *launcher, script, *options, "--output_dir", output]
        how = {"cwd": folder, "env": environment(**(env or {})), "stderr": subprocess.STDOUT}
        with open(folder / "log", "w") as log:
            self.process = Popen(list(map(str, words)), stdout=log, **how)

    def log(self):
        return (self.folder / "log").read_text()

    def signal(self, number):
        """All processes of its machine."""
        for pid in processes_of(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def ends(self):
        return self.process.wait()


def frozen(folder, moment, *start, env=None, **how):
    """A start that stands still at this moment: an operation, what its path or key has to match, and the how manieth time."""
    began = Start(folder, *start, env={"FREEZE": moment, **(env or {})}, **how)
    wait_for(lambda: stands_still(began.process.pid), began.process, "the moment at which it stands still")
    return began


def stands_still(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def held(folder, step, *start, env=None, **how):
    """A start that waits after this step until let_go() is called."""
    os.mkfifo(fifo := f"{folder}.fifo")
    return Start(folder, *start, env={"FIFO": fifo, "STEP": str(step), **(env or {})}, **how)


def wait_until_held(start):
    """Whether it is: it may have gone on from behind that step."""
    there = Path(f"{start.folder}.fifo.at")
    wait_for(lambda: there.exists() or start.process.poll() is not None, None, "the step at which it is held")
    return there.exists()


def let_go(start):
    open(f"{start.folder}.fifo", "w").close()


def left_in(output):
    """What a run leaves that is a function of seed and data; the names of its checkpoints; and what should not be there."""
    names = sorted(path.name for path in (output / "checkpoints").iterdir() if path.name != ".lock")
    files = {name: (output / name).read_bytes() for name in ("metrics.jsonl", "state.json", "report.txt", "report.json")}
    return {**files, "checkpoints": names, "hidden": [path.name for path in output.rglob(".*") if path.name != ".lock"]}
