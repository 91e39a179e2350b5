"""What the memcached client needs and pymemcache lacks: sockets that share a deadline; the form of a stored sample."""

import socket
import struct
import threading
import time
from typing import Any, Callable, Optional, Protocol, Union

LEFT_ALONE = 30  # seconds until a server that failed is asked again
END = b"\r\n"  # of a line, and of a value
LARGEST = 64 << 20  # bytes of a sample; more would not come within the deadline over a fast network
STORED, TOO_LARGE, NOT_STORED = "stored", "too large", "not stored"

# Stored before each sample.
HEADER = struct.Struct(">4sI16s")  # magic, length of the sample, checksum over key and sample

# Kinds of warnings about a server (bits); each is logged once, DOWN once for every outage.
DOWN, WRONG, LOGIN, OPEN = 1, 2, 4, 8


Server = tuple[str, int]  # (host, port)


class CacheOfServers(Protocol):
    """What the connections to the servers need of the cache that they belong to: the forms of its values, and whom to tell."""

    servers: list[Server]
    deadline: float  # seconds for an operation
    login: Optional[bytes]  # what opens a connection; None: nothing does
    too_large: dict[Server, int]  # the size from which a server has refused a value

    def header(self, seal: bytes, content: bytes) -> bytes: ...

    def note_answer(self, server: Server) -> None: ...

    def note_outage(self, server: Server, error: Exception) -> None: ...

    def count_wrong_answer(self, server: Server, error: Union[Exception, str]) -> None: ...

    def give_up(self, server: Server, kind: int, what: str) -> None: ...

    def warn_of_no_password(self, server: Server) -> None: ...


class Unfit(OSError):
    """The server answers, but cannot be used. The log already says so."""


class Network:
    """Takes the place of the socket module in pymemcache, for one thread's connections, and gives each operation a deadline."""

    def __init__(self, cache: CacheOfServers):
        self.cache = cache
        self._until = 0.0
        self._found = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    def begin(self):
        self._until = time.monotonic() + self.cache.deadline

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
