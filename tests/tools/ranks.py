"""The DDP job in the tests: two ranks that together take the batches of tests.tools.jobs.TINY, their ledgers and their processes."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from tests.tools.jobs import ROOT, TINY, command, environment, forked, run
from tests.tools.objectstore import free_port

# Two ranks: a global batch of 16, as in TINY. So few pictures would have norms over both ranks, unasked.
TWO = [*TINY[:4], "--batch_size", "8", *TINY[6:], "--ledger", "true", "--sync_bn", "false"]
LONG = [*TWO, "--epochs", "200"]
CHECK = [sys.executable, str(ROOT / "tests" / "check_ledger.py"), "--samples", "64", "--global_batch", "16"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]

# The last rank does something else instead of its third batch.
CHANGED = """
import ctypes, os, sys, time
sys.path.insert(0, {root!r})
from datasets import loader
batches = loader.DeviceLoader.__iter__

def changed(self):
    for number, batch in enumerate(batches(self)):
        if number == 2:
            {what}
        yield batch

if os.environ.get("RANK") != "0":
    loader.DeviceLoader.__iter__ = changed
exec(compile(open({job!r}).read(), {job!r}, "exec"), {{"__name__": "__main__", "__file__": {job!r}}})
"""


def changed_loader(name, folder, what):
    """The command of this job with `what` in place of the third batch; without progress for 8 s it is ended."""
    job = folder / f"{name}.py"
    job.write_text(CHANGED.format(root=str(ROOT), job=str(ROOT / "jobs" / job.name), what=what))
    return [sys.executable, str(job), "--patience", "40"]


def processes_of(folder):
    """The processes of the run whose output is in folder/out, which work in this folder or say so in their command."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "cwd") == str(folder) or f"{folder}/out" in (process / "cmdline").read_text():
                found.append(int(process.name))
    return found


def check_ledger(*folders):
    done = subprocess.run([*CHECK, *map(str, folders)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def run_variant(job, folder, *options):
    """A changed job from nothing, with the output in folder/out; returns the finished process, however it ended."""
    script = [sys.executable, str(job), *map(str, options), "--output_dir", str(folder / "out")]
    return run(script, cwd=folder, env=environment())


def rank_environments(ranks=2, **more):
    """What a platform that starts one process per GPU sets for each of them, on one node."""
    size, port = str(ranks), str(free_port())
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **more}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def fork_ranks(job, folder, *options, ranks=2):
    """The script `job` as ranks without a parent; returns the first of them."""
    return forked([job, *options, "--output_dir", folder / "out"], folder, *rank_environments(ranks))[0]


def run_ranks(folder, *options):
    """The DDP job to its good end, where nothing but what it leaves is looked at."""
    done = fork_ranks(command("train_ddp")[1], folder, *options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def children(process):
    """The processes that this one has started."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


LOOPBACK, LOOPBACK_6 = "0100007F", "00000000000000000000000001000000"  # 127.0.0.1 and ::1, as the kernel writes them


def listening(pids):
    """The addresses at which these processes accept connections, as the kernel writes them."""
    return {address.split(":")[0] for address in _listeners(pids)}


def ports_of(pids):
    return {int(address.split(":")[1], 16) for address in _listeners(pids)}


def _listeners(pids):
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(file).removeprefix("socket:[").rstrip("]"))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {words[1] for words in lines if words[3] == "0A" and words[9] in sockets}


def workers_of(pids):
    """{rank: pid} of those processes that are workers; a process that was forked from one, to watch it, is none."""
    found, parents = {}, {}
    for pid in pids:
        with contextlib.suppress(OSError, KeyError):
            env = dict(word.partition("=")[::2] for word in Path(f"/proc/{pid}/environ").read_text().split("\0"))
            name = Path(f"/proc/{pid}/comm").read_text().strip()  # of one that tests/tools/starter.py has forked
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            found[pid] = int(name.removeprefix("rank ") if name.startswith("rank ") else env["RANK"])
    return {rank: pid for pid, rank in found.items() if found.get(parents[pid]) != rank}
