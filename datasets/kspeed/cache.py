"""A cache of samples on several memcached servers: jobs and nodes read a file from storage once, and then from memory.

No job depends on the cache. If a server dies, hangs, or loses or changes values, an operation still ends within its deadline. A
wrong value is a miss. A server that fails is not asked for a while, and one line says so. Nothing is unpickled.
"""

import hashlib
import hmac
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Optional, Union

from common.errors import UserError, one_line
from common.progress import warn
from datasets.crc import crc32
from datasets.kspeed.memcached import DOWN, HEADER, LARGEST, LEFT_ALONE, NOT_STORED, OPEN, TOO_LARGE, WRONG, Server, Unfit

PORT = 11211
MOST_WRONG = 3  # after so many wrong answers a server is left alone for a while
MAGIC = b"ARC1"
HASHED_KEY = 20  # bytes

Servers = Union[str, Sequence[str], None]  # "host:port,host:port", or a list of host:port
Key = Union[str, bytes]


class SampleCache:
    """Client for threads and forked or spawned processes, each with own connections. `deadline`: seconds for a get or set."""

    def __init__(self, servers: Servers, user: Optional[str] = None, password: Optional[str] = None, deadline: float = 0.05):
        try:
            import pymemcache  # noqa: F401
        except ImportError:
            raise UserError("the sample cache needs pymemcache: pip install .[cache]") from None
        if (user is None) != (password is None):
            raise UserError("--kspeed_user and KSPEED_PASSWORD belong together: give both, or neither")
        if any(character.isspace() for character in f"{user}{password}"):
            raise UserError("--kspeed_user or KSPEED_PASSWORD contains a space, at which memcached ends a user: choose others")
        self.servers, self.deadline = addresses(servers), deadline
        self.login = f"{user} {password}".encode() if user else None
        self.too_large: dict[Server, int] = {}  # bytes, with the header, of the smallest value that each refused
        self._secret = hashlib.sha256(password.encode()).digest() if password else b""
        self._start()

    def _start(self):
        self._reported = mmap.mmap(-1, len(self.servers))  # a byte each; forked workers share it, so an outage is logged once
        self._wrong = dict.fromkeys(self.servers, 0)
        self._failing: set[Server] = set()
        self._start_process()

    def _start_process(self):
        self._process = os.getpid()
        self._thread, self._lock = threading.local(), threading.Lock()

    def __getstate__(self):
        return {name: vars(self)[name] for name in ("servers", "deadline", "login", "too_large", "_secret")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def get(self, key: Key) -> Optional[bytes]:
        """Return the sample; None if it is not there or damaged, or if its server does not answer."""
        return self.get_many([key])[key]

    def get_many(self, keys: Iterable[Key]) -> dict[Any, Optional[bytes]]:
        """Return {key: sample or None}, with one request to each server for all samples that it may have."""
        hashed = {key: self._hashed(key) for key in keys}
        samples = self._fleet().get_many([name for name, _ in hashed.values()], seals=dict(hashed.values()))
        return {key: samples.get(name) for key, (name, _) in hashed.items()}

    def set(self, key: Key, content: bytes) -> str:
        """Store a sample. Return STORED, TOO_LARGE or NOT_STORED, which a job may ignore."""
        if len(content) > LARGEST:
            return TOO_LARGE
        name, seal = self._hashed(key)
        return self._fleet().set(name, self.header(seal, content) + content) or NOT_STORED

    def has(self, key: Key) -> bool:
        """Return whether a server says that it has a value for this key. The value is neither transferred nor verified."""
        return bool(self._fleet().touch(self._hashed(key)[0]))

    def delete(self, key: Key) -> bool:
        """Delete a sample. Return whether its server had it; False also if the server does not answer."""
        return bool(self._fleet().delete(self._hashed(key)[0]))

    def status(self) -> dict[Server, Optional[dict[str, Any]]]:
        statistics = {}
        for client in self._fleet().clients.values():
            client.socket_module.begin()
            try:
                statistics[client.server] = {name.decode(): value for name, value in client.stats().items()}
            except Exception:
                statistics[client.server] = None
        return statistics

    def failing_servers(self) -> list[Server]:
        """Return the servers that failed and have not answered this process on a new connection since."""
        return [server for server in self.servers if server in self._failing]

    # --- Keys and values ---

    def _hashed(self, key: Union[str, bytes]) -> tuple[str, bytes]:
        """Return (the key's name on the server, secret for its checksum). The name is a hash, so it contains no command."""
        key = key if isinstance(key, bytes) else key.encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(key, digest_size=HASHED_KEY + 32, key=self._secret, person=b"anyrank sample").digest()
        return digest[:HASHED_KEY].hex(), digest[HASHED_KEY:]

    def header(self, seal: bytes, content: bytes) -> bytes:
        """Return the header to store before `content`. `seal`: the key's secret. Without a password, headers can be forged."""
        if self._secret:
            checksum = hmac.digest(seal, content, "sha256")[:16]
        else:
            checksum = crc32(content, int.from_bytes(seal[:4], "big")).to_bytes(16, "big")
        return HEADER.pack(MAGIC, len(content), checksum)

    # --- Servers ---

    def _fleet(self):
        if self._process != os.getpid():
            self._start_process()
        if not hasattr(self._thread, "fleet"):
            from datasets.kspeed.fleet import connect

            self._thread.fleet = connect(self)
        fleet = self._thread.fleet
        fleet.network.begin()
        return fleet

    def note_answer(self, server: Server) -> None:
        """Note that a server answered on a new connection. If its outage was reported, here or by a fork, print its end."""
        self._failing.discard(server)
        place = self.servers.index(server)
        with self._lock:
            reported = self._reported[place] & DOWN
            self._reported[place] &= ~DOWN
        if reported:
            print(f"cache server {name_of(server)} answers again", flush=True)

    def note_outage(self, server: Server, error: Exception) -> None:
        self._failing.add(server)
        what = f"does not answer ({one_line(error)[:100]}): the files are read instead, and it is asked again in {LEFT_ALONE} s"
        self._warn_once(server, DOWN, what)

    def count_wrong_answer(self, server: Server, error: Union[Exception, str]) -> None:
        """Count a server's wrong answer. After every MOST_WRONG of them raise Unfit, so that it is left alone for a while."""
        self._wrong[server] += 1
        if self._wrong[server] % MOST_WRONG == 0:
            self.give_up(server, WRONG, f"gives wrong answers ({one_line(error)[:100]}): the files are read instead")

    def give_up(self, server: Server, kind: int, what: str) -> None:
        """Warn once for each `kind` of failure. Raise Unfit: pymemcache then leaves the server alone for LEFT_ALONE seconds."""
        self._failing.add(server)
        self._warn_once(server, kind, what)
        raise Unfit(what)

    def warn_of_no_password(self, server: Server) -> None:
        self._warn_once(server, OPEN, "asks for no password: anybody who can reach it can read and delete what it holds")

    def _warn_once(self, server: Server, kind: int, what: str) -> None:
        place = self.servers.index(server)
        with self._lock:
            reported = self._reported[place] & kind
            self._reported[place] |= kind
        if not reported:
            warn(f"cache server {name_of(server)} {what}")


def addresses(iplist: Servers) -> list[Server]:
    """Return [(host, port)] without duplicates, with memcached's port by default. UserError for a bad or missing address."""
    entries = iplist.split(",") if isinstance(iplist, str) else iplist or []
    servers = []
    for entry in filter(None, (entry.strip() for entry in entries)):
        host, colon, port = entry.rpartition(":")
        if not colon or entry.endswith("]"):
            host, port = entry, str(PORT)
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not host or any(character.isspace() for character in host) or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(f"{one_line(entry)!r} is no cache server: give host:port, several with commas between them")
        servers.append((host, int(port)))
    if not servers:
        raise UserError("no cache server is given: give host:port, several with commas between them, or set KSPEED_IPLIST")
    return list(dict.fromkeys(servers))


def name_of(server: Server) -> str:
    return one_line("{}:{}".format(*server))
