"""A watcher: a small process that tells how a rank ended, if the rank has no parent process of this project.

It is forked before the rank computes anything. What it does is in watcher.py.
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

from common.alive import heartbeat
from common.alive.worker import Worker
from common.errors import STOP_SIGNALS, one_line
from common.files import create_scratch_folder

ANSWER_SECONDS = 10  # how long a rank waits for an answer from its watcher
ENDING_SECONDS = 2  # how long a rank may take to end by itself before it is killed

# {words that Python's fault handler writes above the stack of a crash: the signal that they stand for}
CRASHES = {
    "Segmentation fault": signal.SIGSEGV, "Aborted": signal.SIGABRT, "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL, "Floating": signal.SIGFPE,
}  # fmt: skip


class WatchedRank:
    """The watched process, as its watcher sees it, with the methods of Popen that a Worker needs."""

    def __init__(self, pid: int, worker: Worker, request_socket: socket.socket):
        self.pid = pid
        self._worker = worker
        self._socket = request_socket
        self._handles_sigterm = False  # whether the process had a handler for SIGTERM at the last poll()
        # for the log: another signal that may have ended the process, besides the one that poll() returns
        self.doubt = ""

    def poll(self) -> Optional[int]:
        """Return None while the process runs; then its exit code or, as Popen does,
        minus the signal that has ended it.

        Only a parent is told the signal. Here it is guessed: SIGSEGV etc. after a crash, else SIGTERM if
        unhandled, or SIGKILL.
        """
        if os.getppid() == self.pid:
            with contextlib.suppress(OSError):
                caught_mask = Path(f"/proc/{self.pid}/status").read_text().partition("SigCgt:")[2].split()[0]
                self._handles_sigterm = bool(int(caught_mask, 16) >> (signal.SIGTERM - 1) & 1)
            return None
        if code_plus_one := self._worker.pulse.get("ended"):
            return code_plus_one - 1
        stack = heartbeat.crash_stack(self._worker.file_prefix)
        crash_signal = next((number for message, number in CRASHES.items() if message in stack), None)
        self.doubt = "" if crash_signal or self._handles_sigterm else " or SIGKILL"
        return -(crash_signal or (signal.SIGKILL if self._handles_sigterm else signal.SIGTERM))

    def send_signal(self, number: int) -> None:
        """Send a signal to the rank, unless it has ended."""
        if os.getppid() == self.pid:
            os.kill(self.pid, number)

    def next_request(self, seconds: float) -> Optional[dict[str, Any]]:
        """Return the next request of the rank; None if none comes within `seconds`, or the rank has ended."""
        if select.select([self._socket], [], [], seconds)[0] and (content := self._socket.recv(65536)):
            return json.loads(content)
        return None

    def answer(self, **answer: Any) -> None:
        """Send the rank the answer to its request."""
        self._socket.send(json.dumps(answer).encode())

    def end(self, code: int) -> None:
        """Ask the rank to exit with this code, and kill it if it has not ended within ENDING_SECONDS."""
        with contextlib.suppress(OSError):
            self.answer(end=code)
        deadline = time.monotonic() + ENDING_SECONDS
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self.send_signal(signal.SIGKILL)


class WatcherConnection:
    """The connection of a watched process to its watcher."""

    def __init__(self, request_socket: socket.socket, on_exit: Callable[[], None]):
        """`on_exit`: called in a thread when the watcher has ended."""
        self._socket = request_socket
        self._answers = threading.Semaphore(0)
        self._on_exit = on_exit
        self._port = 0
        threading.Thread(target=self._listen, name="watcher", daemon=True).start()

    def _listen(self):
        """Take the watcher's answers; exit with the code that it sends, or call _on_exit() if it ends."""
        with contextlib.suppress(OSError):
            while content := self._socket.recv(65536):
                answer = json.loads(content)
                if "end" in answer:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(answer["end"])
                self._port = answer["port"]
                self._answers.release()
        self._on_exit()

    def listen(self, key: str, **request: Any) -> int:
        """Ask the watcher of rank 0 to accept other watchers with this `key`; return its port,
        or 0 if it does not answer."""
        self._send(listen=key, **request)
        self._answers.acquire(timeout=ANSWER_SECONDS)
        return self._port

    def join(self, **request: Any) -> None:
        """Ask the watcher to connect to the watcher of rank 0."""
        self._send(**request)

    def _send(self, **request: Any) -> None:
        with contextlib.suppress(OSError):  # the watcher has ended, and _listen() calls _on_exit()
            self._socket.send(json.dumps(request).encode())


def start(
    rank: int, watch: Callable[[Worker], None], on_exit: Callable[[], None]
) -> tuple[str, WatcherConnection]:
    """Fork a watcher, which calls `watch`; return (prefix of this rank's files, connection to the watcher).

    `on_exit`: called in a thread of this process when the watcher has ended.
    """
    folder = create_scratch_folder()
    worker = Worker(rank, os.path.join(folder, "worker"))
    rank_socket, watcher_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        rank_socket.close()
        worker.process = WatchedRank(pid, worker, watcher_socket)
        _watch(worker, watch, folder)
    watcher_socket.close()
    return worker.file_prefix, WatcherConnection(rank_socket, on_exit)


def _name_this_process(name: str) -> None:
    """Let ps show this name, in place of the command line that the watcher has inherited from its rank."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    length = end - begin - 1  # the last byte stays 0, or the kernel would read on beyond it
    if length > 0:
        ctypes.memmove(begin, name.encode()[:length].ljust(length + 1, b"\0"), length + 1)


def _watch(worker: Worker, watch: Callable[[Worker], None], folder: str) -> NoReturn:
    """Call `watch` in the forked process, remove the files of the rank, and end this process."""
    try:
        _name_this_process(f"watcher of rank {worker.rank}")
        for number in (*STOP_SIGNALS, signal.SIGHUP, signal.SIGUSR2):  # they are meant for the rank
            signal.signal(number, signal.SIG_IGN)
        watch(worker)
    except BaseException as error:
        with contextlib.suppress(OSError):
            print(
                (
                    f"warning: rank {worker.rank} is no longer watched: {type(error).__name__}: "
                    f"{one_line(error)}"
                ),
                flush=True,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
