"""A watcher: a small process that tells how a rank ended, if the rank has no parent process of this project.

It is forked before anything is computed, and does not use the device. This module has the communication between the two;
watcher.py watches one of several ranks, single_rank.py the only rank.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, NoReturn, Optional

from common import heartbeat
from common.errors import STOP_SIGNALS, one_line
from common.files import scratch_folder
from common.watching.worker import Worker

ANSWER_SECONDS = 10  # of the watcher, to its rank
ENDING_SECONDS = 2  # how long a rank may take to end by itself

# What Python's fault handler writes of a crash, beside the stack.
CRASHES = {
    "Segmentation fault": signal.SIGSEGV, "Aborted": signal.SIGABRT, "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL, "Floating": signal.SIGFPE,
}  # fmt: skip


class Rank:
    """The process from which the watcher was forked, with the methods of Popen that a Worker needs."""

    def __init__(self, pid: int, files: str, orders: socket.socket):
        self.pid, self._files, self._orders = pid, files, orders
        self._stops_well = False  # whether it handles SIGTERM by now
        self.doubt = ""  # about the signal that poll() returns

    def poll(self) -> Optional[int]:
        """Return None while it runs; then the exit code that it has left, or the signal that has ended it.

        Only a parent learns that signal. A crash leaves its stack; else it is SIGKILL, or SIGTERM as long as nobody handles it.
        """
        if os.getppid() == self.pid:
            with contextlib.suppress(OSError):
                caught = Path(f"/proc/{self.pid}/status").read_text().partition("SigCgt:")[2].split()[0]
                self._stops_well = bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
            return None
        with contextlib.suppress(OSError, ValueError):
            return int(Path(f"{self._files}.end").read_text())
        stack = heartbeat.crash(self._files)
        crashed = next((number for words, number in CRASHES.items() if words in stack), None)
        self.doubt = "" if crashed or self._stops_well else " or SIGKILL"
        return -(crashed or (signal.SIGKILL if self._stops_well else signal.SIGTERM))

    def send_signal(self, number: int) -> None:
        if os.getppid() == self.pid:
            os.kill(self.pid, number)

    def order(self, seconds: float) -> Optional[dict[str, Any]]:
        """What it asks for, if it does within these seconds."""
        if select.select([self._orders], [], [], seconds)[0] and (line := self._orders.recv(65536)):
            return json.loads(line)
        return None

    def answer(self, **answer: Any) -> None:
        self._orders.send(json.dumps(answer).encode())

    def end(self, code: int) -> None:
        """Make it end with this exit code, or by force."""
        with contextlib.suppress(OSError):
            self.answer(end=code)
        deadline = time.monotonic() + ENDING_SECONDS
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self.send_signal(signal.SIGKILL)


class Beside:
    """The socket to its watcher, in the process that is watched."""

    def __init__(self, orders: socket.socket, lost: Callable[[], None]):
        """`lost` is called when the watcher has gone."""
        self._orders, self._answers, self._lost = orders, threading.Semaphore(0), lost
        self._port = 0
        threading.Thread(target=self._listen, name="watcher", daemon=True).start()

    def _listen(self):
        with contextlib.suppress(OSError):
            while line := self._orders.recv(65536):
                answer = json.loads(line)
                if "end" in answer:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(answer["end"])
                self._port = answer["port"]
                self._answers.release()
        self._lost()

    def listen(self, key: str, **order: Any) -> int:
        """Return the port on which the watcher of rank 0 now waits for the others; 0 where it does not answer."""
        self._send(listen=key, **order)
        self._answers.acquire(timeout=ANSWER_SECONDS)
        return self._port

    def join(self, **order: Any) -> None:
        self._send(**order)

    def _send(self, **order):
        with contextlib.suppress(OSError):  # it was lost, and the rank trains on
            self._orders.send(json.dumps(order).encode())


def start(rank: int, watch: Callable[[Worker], None], lost: Callable[[], None]) -> tuple[str, Beside]:
    """Fork a process that calls `watch`; (the files with which this one tells how it is, the socket to that one)."""
    folder = scratch_folder()
    worker = Worker(rank, os.path.join(folder, "worker"))
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        mine.close()
        worker.process = Rank(pid, worker.files, its)
        _watch(worker, watch, folder)
    its.close()
    return worker.files, Beside(mine, lost)


def _name_this_process(name):
    """Write the name over the command that this process has from its rank, for ps."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    room = end - begin - 1  # what the last byte is else, the kernel takes for a part of a longer name
    if room > 0:
        ctypes.memmove(begin, name.encode()[:room].ljust(room + 1, b"\0"), room + 1)


def _watch(worker, watch, folder) -> NoReturn:
    try:
        _name_this_process(f"watcher of rank {worker.rank}")
        for number in (*STOP_SIGNALS, signal.SIGHUP, signal.SIGUSR2):  # they are for the rank, which says what it does
            signal.signal(number, signal.SIG_IGN)
        watch(worker)
    except BaseException as error:
        with contextlib.suppress(OSError):
            print(f"warning: rank {worker.rank} is no longer watched: {type(error).__name__}: {one_line(error)}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
