"""Real memcached servers for the tests, each a process of its own on a free port; and one that answers whatever a test wants."""

import contextlib
import os
import pwd
import signal
import socket
import subprocess
import threading
import time

from common.world.network import free_port
from tests.tools.packages import program

HOST = "127.0.0.1"


class Memcached:
    """One server; a context manager, so that nothing of it is left."""

    def __init__(self, *options):
        self._command = [
            program("memcached"),
            "-l",
            HOST,
            "-U",
            "0",
            "-t",
            "1",
            "-u",
            pwd.getpwuid(os.getuid()).pw_name,
            *map(str, options),
        ]
        for _ in range(5):  # somebody else may take the port first
            self.port = free_port()
            if self.start():
                break
        else:
            raise RuntimeError("memcached did not start")
        self.address = f"{HOST}:{self.port}"

    def start(self):
        """Whether it answers; after kill() it is empty, at the same address."""
        self.process = subprocess.Popen([*self._command, "-p", str(self.port)], stderr=subprocess.DEVNULL)
        while self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), timeout=10):
                return True
            time.sleep(0.01)
        return False

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


class Liar:
    """Keeps what is set, as memcached does, and answers a get of it with what `answer(key, value, values)` yields, piece by piece."""

    def __init__(self, answer):
        self.answer, self.values, self.gets = answer, {}, 0
        self._listener = socket.create_server((HOST, 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._open = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection):
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as lines:
            for line in lines:
                words = line.split()
                if words[0] == b"set":
                    self.values[words[1]] = lines.read(int(words[4]) + 2)[:-2]
                    connection.sendall(b"STORED\r\n")
                elif words[0] == b"get":
                    value = self.values.get(words[1])
                    self.gets += value is not None
                    for piece in [b"END\r\n"] if value is None else self.answer(words[1], value, self.values):
                        connection.sendall(piece)
                else:
                    connection.sendall(b"VERSION 1\r\n")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for connection in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
