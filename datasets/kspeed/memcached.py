"""Sockets for the memcached client that share a deadline, which pymemcache lacks."""

import socket
import threading
import time
from typing import Any, Callable


class Network:
    """Takes the place of the socket module in pymemcache, for one thread's connections,
    and gives each operation a deadline."""

    def __init__(self) -> None:
        self.deadline = 0.0  # seconds
        self._ends_at = 0.0
        self._addresses = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    def begin(self) -> None:
        """Begin an operation, which may take `deadline` seconds."""
        self._ends_at = time.monotonic() + self.deadline

    def remaining(self) -> float:
        """Return the seconds until the operation's deadline; TimeoutError if it has passed."""
        remaining = self._ends_at - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("timed out")
        return remaining

    def socket(self, *args: Any) -> Any:
        """Return a socket, made as by socket.socket(), that keeps to the deadline."""
        sock = _Socket(*args)
        sock.network = self
        return sock

    def getaddrinfo(self, host: str, port: int, *args: Any) -> Any:
        """Look up a name in a thread, as getaddrinfo takes no timeout, and wait until the deadline, or half
        as long if an earlier call has found an address. A late answer is kept for the next call."""

        def resolve():
            try:
                entries = socket.getaddrinfo(host, port, *args)
                self._addresses[host, port] = sorted(
                    entries, key=lambda entry: entry[0] != socket.AF_INET
                )  # pymemcache tries one
            except (OSError, UnicodeError) as error:
                errors.append(error)

        errors = []
        thread = threading.Thread(target=resolve, daemon=True)
        thread.start()
        thread.join(self.remaining() / 2 if (host, port) in self._addresses else self.remaining())
        if (host, port) not in self._addresses:
            reason = errors[0] if errors else "no answer yet"
            raise OSError(f"no address for {host}: {reason}")
        return self._addresses[host, port]


class _Socket(socket.socket):
    """A socket whose calls share the deadline of one operation. pymemcache's own timeout begins anew with
    each call."""

    network: Any = None

    def _in_time(self, call: Callable[..., Any], argument: object) -> Any:
        self.settimeout(self.network.remaining())
        return call(argument)

    def connect(self, address: object) -> None:
        self._in_time(super().connect, address)

    def sendall(self, content: object) -> None:
        self._in_time(super().sendall, content)

    def recv(self, count: int) -> bytes:
        content = self._in_time(super().recv, count)
        if not content:
            raise ConnectionError("the connection was closed")
        return content
