"""Sockets for the memcached client that share a deadline, which pymemcache lacks."""

import socket
import threading
import time
from typing import Any, Callable


class Network:
    """Takes the place of the socket module in pymemcache, for one thread's connections, and gives each operation a deadline."""

    def __init__(self) -> None:
        self.deadline = 0.0  # seconds
        self._until = 0.0
        self._found = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    def begin(self):
        self._until = time.monotonic() + self.deadline

    def left(self):
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left

    def socket(self, *how: Any) -> Any:
        made = _Socket(*how)
        made.network = self
        return made

    def getaddrinfo(self, host: str, port: int, *how: Any) -> Any:
        """Look up a name in a thread, as getaddrinfo takes no timeout, and wait until the deadline, or half as long if an
        earlier call has found an address. A late answer is kept for the next call."""

        def ask():
            try:
                found = socket.getaddrinfo(host, port, *how)
                self._found[host, port] = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)  # pymemcache tries one
            except (OSError, UnicodeError) as error:
                failed.append(error)

        failed = []
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(self.left() / 2 if (host, port) in self._found else self.left())
        if (host, port) not in self._found:
            raise OSError(f"no address for {host}: {failed[0] if failed else 'no answer yet'}")
        return self._found[host, port]


class _Socket(socket.socket):
    """A socket whose calls share the deadline of one operation. pymemcache's own timeout begins anew with each call."""

    network: Any = None

    def _in_time(self, call: Callable[..., Any], what: object) -> Any:
        self.settimeout(self.network.left())
        return call(what)

    def connect(self, address: object) -> None:
        self._in_time(super().connect, address)

    def sendall(self, content: object) -> None:
        self._in_time(super().sendall, content)

    def recv(self, count: int) -> bytes:
        found = self._in_time(super().recv, count)
        if not found:
            raise ConnectionError("the connection was closed")
        return found
