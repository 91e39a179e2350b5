"""A memcached client on pymemcache.

It adds what pymemcache lacks, and replaces what costs it 1.3 times the CPU time or more.

Replaced or added are:

- The hash that chooses a server, and the receiving of a value: together they make a get 2.5 times as fast.
- A deadline for a whole operation and for the name lookup. pymemcache's timeouts begin anew with every call.
- A client for each thread: a HashClient shared by threads raises exceptions if a server dies.
- A connection that the server has closed, as after a restart, is opened again at once: pymemcache gives a
  miss.
- The login of memcached -Y; checks of lengths; no retry of samples that are too large for a server; log lines
  about servers.

`python -m tests.benchmarks.memcached` measures what they bring (tests/benchmarks/results/ray_and_cache.md).
Only cache.py imports this module, and only inside a function, because pymemcache is an optional package.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from pymemcache.client.base import Client
from pymemcache.client.hash import HashClient
from pymemcache.client.rendezvous import RendezvousHash
from pymemcache.exceptions import MemcacheClientError, MemcacheServerError

from datasets.kspeed.memcached import Network
from datasets.kspeed.servers import LOGIN, PAUSE_SECONDS, Server, Servers, Unfit
from datasets.kspeed.values import HEADER, LARGEST, NOT_STORED, STORED, TOO_LARGE, Values

CRLF = b"\r\n"  # of a line, and of a value


def connect(
    servers: Servers, values: Values, login: Optional[bytes], too_large: dict[Server, int]
) -> "Fleet":
    """Return one client for all servers.

    A key belongs to one server; after a failure it belongs to another for a while.

    `login`: what opens a connection; None: nothing does. `too_large`: the size from which a server has
    refused a value.
    """
    network = Network()

    def connection(*args: Any, **kwargs: Any) -> ServerConnection:
        return ServerConnection(servers, values, login, too_large, *args, **kwargs)

    options: dict = {
        "hasher": functools.partial(RendezvousHash, hash_function=_score), "socket_module": network,
        "retry_attempts": 0, "dead_timeout": PAUSE_SECONDS, "ignore_exc": True, "default_noreply": False,
        "no_delay": True,
    }  # fmt: skip
    return Fleet(connection, network, servers.addresses, **options)


def _score(text: str, _seed: int) -> int:
    """Return a hash of the text, in a tenth of the time that pymemcache's hash in Python takes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class ServerConnection(Client):
    """The connection to one server.

    HashClient leaves a server alone after an OSError; other errors are misses.
    """

    sock: Any
    server: Any  # (host, port): pymemcache would also take the path of a socket

    def __init__(
        self,
        servers: Servers,
        values: Values,
        login: Optional[bytes],
        too_large: dict[Server, int],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.servers = servers
        self.values = values
        self.login = login
        self.too_large = too_large

    def get_many(self, keys: Sequence[str], seals: Mapping[str, bytes]) -> dict[str, Any]:
        """Return {key: sample} of the samples that are there and undamaged.

        `seals`: {key: secret for its checksum}.
        """
        self.socket_module.begin()  # the time for the whole operation
        answers = self._call(super().get_many, keys) or {}  # None after an error
        samples = {}
        for key, (header, content) in answers.items():
            if self.values.is_valid(header, seals[key], content):
                samples[key] = content
            else:
                self.servers.count_wrong_answer(self.server, "a value that is damaged or not ours")
        return samples

    def set(self, key: str, value: Any) -> Any:
        return self._call(self._set, key, value)

    def touch(self, key: str) -> Any:
        return self._call(super().touch, key)

    def delete(self, key: str) -> Any:
        return self._call(super().delete, key)

    def stats(self):
        return self._call(super().stats)

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a method of pymemcache and note its failure.

        Try again if the server had closed the connection.
        """
        was_open = self.sock is not None
        try:
            answer = function(*arguments)
        except Unfit:
            raise
        except OSError as error:
            if was_open and isinstance(error, ConnectionError):
                # the server was restarted, or closed an idle connection
                return self._call(function, *arguments)
            self.servers.note_outage(self.server, error)
            raise
        except MemcacheClientError as error:
            if "unauthenticated" in str(error):
                self.servers.give_up(
                    self.server, LOGIN, "wants a user and a password: the files are read instead"
                )
            return self.servers.count_wrong_answer(self.server, error)
        except Exception as error:
            return self.servers.count_wrong_answer(self.server, error)
        if not was_open:
            self.servers.note_answer(self.server)
        return answer

    def _extract_value(
        self, expect_cas: bool, line: bytes, buf: Any, remapped_keys: Any, prefixed_keys: object
    ) -> Any:
        """Return (key, (header, content), the bytes that follow). pymemcache's own method accepts any length
        and copies a value in pieces of 4 KB. If more values are to come, the deadline begins anew."""
        _, name, _, size = line.split()
        if not HEADER.size <= int(size) <= HEADER.size + LARGEST:
            raise ValueError(f"{int(size)} bytes are no sample")
        while len(buf) < HEADER.size + len(CRLF):
            buf += self.sock.recv(HEADER.size + len(CRLF) - len(buf))
        value_end = int(size) + len(CRLF)
        parts = [buf[HEADER.size : value_end]]
        following = buf[value_end:]
        remaining = value_end - len(buf)
        while remaining > 0:
            parts.append(self.sock.recv(remaining))
            remaining -= len(parts[-1])
        last_part = parts.pop()
        if len(last_part) < len(CRLF):  # the two bytes of CRLF came separately
            last_part = parts.pop() + last_part
        if not last_part.endswith(CRLF) or following[:1] not in (b"", b"V", b"E"):
            # the line after it is VALUE or END
            raise ValueError("a value has no end")
        content = b"".join((*parts, memoryview(last_part)[: -len(CRLF)]))
        key = remapped_keys.pop(name)  # so a server that sends a value twice cannot prolong this
        if remapped_keys:
            self.socket_module.begin()
        return key, (buf[: HEADER.size], content), following

    def _set(self, key: str, value: Any) -> Any:
        limit = self.too_large.get(self.server)
        if limit and len(value) >= limit:
            return TOO_LARGE
        try:
            return STORED if super().set(key, value) else NOT_STORED
        except MemcacheServerError as error:
            if "too large" not in str(error):
                return NOT_STORED
            self.too_large[self.server] = len(value)
            return TOO_LARGE

    def _connect(self):
        """Connect, and log in only if the server demands it: the login is sent as a value,
        which other servers would store."""
        super()._connect()
        if not self.login:
            return
        try:
            self.version()
            return self.servers.warn_of_no_password(self.server)
        except MemcacheClientError:  # it requires a login; pymemcache has closed the connection
            super()._connect()
        try:
            super().set("login", self.login)
        except MemcacheClientError:
            self.servers.give_up(
                self.server, LOGIN, "refuses the user or the password: the files are read instead"
            )


class Fleet(HashClient):
    """One thread's client for all servers. `network.deadline` and `network.begin()` bound each operation."""

    def __init__(
        self, connection: Callable[..., ServerConnection], network: Network, *args: Any, **kwargs: Any
    ) -> None:
        self.client_class = connection  # also of a server that is asked again
        self.network = network
        super().__init__(*args, **kwargs)
