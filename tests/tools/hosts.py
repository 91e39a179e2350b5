"""Several hosts on one machine: network namespaces, joined by a bridge, each with its own address and its own folder."""

import contextlib
import fcntl
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.tools.jobs import ROOT, Popen, environment

NUMBERS = itertools.count()
NAMED = Path("/etc/netns")  # where ip finds what a host has in place of /etc/hosts
OUTSIDE = "10.77.0.254"  # this machine, as the hosts see it


class Hosts:
    """`count` hosts, 10.77.0.1 and up, each able to reach the others, by their names if `called` has some, and, if asked, this machine.

    `ours`: names by which they know this machine, if `called` has theirs.
    """

    def __init__(self, count, folder, outside=False, called=(), forked=False, ours=()):
        own = f"{os.getpid()}{next(NUMBERS)}"  # the kernel takes a moment to forget a name
        self.names = [f"ar{own}-{number}" for number in range(count)]
        self.bridge = f"ar{own}"
        self.folders = [folder / f"host{number}" for number in range(count)]
        self.called, self.forked, self.outside = called, forked, outside
        self.processes = []
        ip("link", "add", self.bridge, "type", "bridge")
        if outside:
            self.lock = open(Path(tempfile.gettempdir()) / "anyrank-outside.lock", "w")  # noqa: SIM115 (until close)
            fcntl.flock(self.lock, fcntl.LOCK_EX)  # one at a time has this address
            left = subprocess.run(["ip", "-o", "addr", "show", "to", OUTSIDE], check=True, capture_output=True, text=True)
            for line in left.stdout.splitlines():  # by a test that was killed: answers would go to its bridge
                ip("link", "del", line.split()[1])
            ip("addr", "add", f"{OUTSIDE}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for number, name in enumerate(self.names):
            self.folders[number].mkdir(parents=True, exist_ok=True)
            ip("netns", "add", name)
            ip("link", "add", f"{self.bridge}-{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{self.bridge}-{number}", "master", self.bridge, "up")
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            if called:
                addresses = [f"10.77.0.{other + 1} {word}\n" for other, word in enumerate(called)]
                addresses += [f"{OUTSIDE} {word}\n" for word in ours]
                (NAMED / name).mkdir(parents=True)
                (NAMED / name / "hosts").write_text("".join(["127.0.0.1 localhost\n", *addresses]))

    def start(self, number, nodes, *options, rank=None, job="train_ddp", root=ROOT, launcher=None, env=None, output="out"):
        """The job on one host, as a platform starts it; the output in the host's own folder."""
        rank = number if rank is None else rank
        injected = ["--init_method", "tcp://10.77.0.1:6666", "--rank", rank, "--world_size", nodes]
        script = [root / "jobs" / f"{job}.py", *options, *([] if launcher else injected)]
        words = [*(launcher or [sys.executable]), *script, *(["--output_dir", output] if output else [])]
        return self.run(number, *words, env=env)

    def run(self, number, *words, env=None):
        """Any program on one host; what it prints is in log(number)."""
        log = open(self.folders[number] / "log", "a")  # noqa: SIM115 (the process owns it)
        how = {
            "cwd": self.folders[number],
            "env": environment(**{"ANYRANK_SECRET": "a secret of the hosts", **(env or {})}),
            "stdout": log,
            "stderr": log,
        }
        if self.forked:  # from a process that has done the imports
            process = Popen(words, host=self.names[number], **how)
        else:
            process = subprocess.Popen(self.words(number, *words), start_new_session=True, **how)
        self.processes.append(process)
        return process

    def words(self, number, *words):
        """The command that runs this one there."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.called[number]] if self.called else []
        return ["ip", "netns", "exec", self.names[number], *named, *map(str, words)]

    def log(self, number):
        return (self.folders[number] / "log").read_text()

    def cut(self, number):
        """Pull the cable."""
        ip("link", "set", f"{self.bridge}-{number}", "down")

    def plug(self, number):
        ip("link", "set", f"{self.bridge}-{number}", "up")

    def pids(self, number):
        done = subprocess.run(["ip", "netns", "pids", self.names[number]], capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def kill(self, number):
        """Take the whole machine away: its link and every process on it, at once."""
        for pid in self.pids(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def close(self):
        for number in range(len(self.names)):
            self.kill(number)
        for process in self.processes:
            process.wait()
        for name in self.names:
            ip("netns", "del", name)
            shutil.rmtree(NAMED / name, ignore_errors=True)
        ip("link", "del", self.bridge)
        if self.outside:
            self.lock.close()


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


def wait_all(processes, seconds):
    """The exit codes, and the seconds until each had ended."""
    begun, ends = time.monotonic(), [None] * len(processes)
    while None in ends:
        for number, process in enumerate(processes):
            if ends[number] is None and process.poll() is not None:
                ends[number] = time.monotonic() - begun
        assert time.monotonic() - begun < seconds, f"still running after {seconds} s: {ends}"
        time.sleep(0.01)
    return [process.returncode for process in processes], ends
