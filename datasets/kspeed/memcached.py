"""A memcached client on pymemcache. It adds what pymemcache lacks, and replaces what costs it 1.3 times the CPU time or more.

pymemcache speaks the protocol, keeps the connections, chooses the server of a key, and leaves a failed server alone for a
while. A get of 110 KB from three servers takes 64 us of CPU time with this client and 165 us with pymemcache's HashClient, both
without a checksum, and 100 us with this client and the checksum. With eight threads it takes 405 us with the checksum, and 712
us with a HashClient that has a pool. Replaced or added are:

- The hash that chooses a server: pymemcache's, in Python, makes a get 1.8 times as expensive, with ten servers 2.0 times.
- A value is received at its length and not copied again: pymemcache's pieces of 4 KB make a get 2.6 times as expensive.
- A deadline for the whole operation. pymemcache's timeouts, here 0.05 s, begin anew with every call: a server that sent a byte
  every 10 ms delayed it for as long as it sent, and this client for 51 ms. The deadline costs 3 to 8 % of a get.
- A deadline for the name lookup. Where that took 1 s, pymemcache took 1 s and this client 50 ms. It costs a connection 175 us.
- A client for each thread: a HashClient shared by threads raised exceptions in 10 of 20 trials in which a server died.
- A connection that the server has closed, as after a restart, is opened again at once: pymemcache gives a miss.
- The login of memcached -Y; checks of lengths; no retry of samples that are too large for a server; log lines about servers.

`python -m tests.benchmarks.memcached` takes these figures again; they and the hardware are in tests/benchmarks/RESULTS.md.
"""

import functools
import hashlib
import hmac
import socket
import struct
import threading
import time
from typing import Any

LEFT_ALONE = 30  # seconds until a server that failed is asked again
END = b"\r\n"  # of a line, and of a value
LARGEST = 64 << 20  # bytes of a sample; more would not come within the deadline over a fast network
STORED, TOO_LARGE, NOT_STORED = "stored", "too large", "not stored"

# Stored before each sample.
HEADER = struct.Struct(">4sI16s")  # magic, length of the sample, checksum over key and sample

# Kinds of warnings about a server (bits); each is logged once, DOWN once for every outage.
DOWN, WRONG, LOGIN, OPEN = 1, 2, 4, 8


class Unfit(OSError):
    """The server answers, but cannot be used. The log already says so."""


class _Network:
    """Takes the place of the socket module in pymemcache, for one thread's connections, and gives each operation a deadline."""

    def __init__(self, cache):
        self.cache, self._until, self._found = cache, 0.0, {}

    def __getattr__(self, name):
        return getattr(socket, name)

    def begin(self):
        self._until = time.monotonic() + self.cache.deadline

    def left(self):
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left

    def socket(self, *how):
        made = _Socket(*how)
        made.network = self
        return made

    def getaddrinfo(self, host, port, *how):
        """Look up a name in a thread, as getaddrinfo takes no timeout, and wait until the deadline. A late answer is kept."""

        def ask():
            try:
                found = socket.getaddrinfo(host, port, *how)
                self._found[host, port] = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)  # pymemcache tries one
            except (OSError, UnicodeError) as error:
                failed.append(error)

        failed = []
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(self.left())
        if (host, port) not in self._found:
            raise OSError(f"no address for {host}: {failed[0] if failed else 'no answer yet'}")
        return self._found[host, port]


class _Socket(socket.socket):
    """A socket whose calls share the deadline of one operation. pymemcache's own timeout begins anew with each call."""

    network: Any = None

    def _in_time(self, call, what):
        self.settimeout(self.network.left())
        return call(what)

    def connect(self, address):
        self._in_time(super().connect, address)

    def sendall(self, content):
        self._in_time(super().sendall, content)

    def recv(self, count):
        found = self._in_time(super().recv, count)
        if not found:
            raise ConnectionError("the connection was closed")
        return found


def connect(cache: Any) -> Any:
    """Return one client for all servers. Each key belongs to a server; while that is left alone, to one of the others."""
    from pymemcache.client.rendezvous import RendezvousHash

    network = _Network(cache)
    how: dict = {
        "hasher": functools.partial(RendezvousHash, hash_function=_score), "socket_module": network, "retry_attempts": 0,
        "dead_timeout": LEFT_ALONE, "ignore_exc": True, "default_noreply": False, "no_delay": True,
    }  # fmt: skip
    fleet = _fleet_class()(cache.servers, **how)
    fleet.network = network
    return fleet


def _score(text, _seed):
    """Return a hash of the text, in a tenth of the time that pymemcache's hash in Python takes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@functools.cache
def _fleet_class():
    from pymemcache.client.base import Client
    from pymemcache.client.hash import HashClient
    from pymemcache.exceptions import MemcacheClientError, MemcacheServerError

    class Connection(Client):
        """The connection to one server. HashClient leaves a server alone after an OSError; other errors are misses."""

        sock: Any

        def get_many(self, keys, seals):
            """Return {key: sample} of the samples that are there and undamaged. `seals`: {key: secret for its checksum}."""
            self.socket_module.begin()
            found = {}
            for key, (header, content) in (self._asked(super().get_many, keys) or {}).items():
                if hmac.compare_digest(header, self.cache.header(seals[key], content)):
                    found[key] = content
                else:
                    self.cache.is_wrong(self.server, "a value that is damaged or not ours")
            return found

        def set(self, key, value):
            return self._asked(self._set, key, value)

        def touch(self, key):
            return self._asked(super().touch, key)

        def delete(self, key):
            return self._asked(super().delete, key)

        def stats(self):
            return self._asked(super().stats)

        @property
        def cache(self):
            return self.socket_module.cache

        def _asked(self, function, *arguments):
            was_open = self.sock is not None
            try:
                answer = function(*arguments)
            except Unfit:
                raise
            except OSError as error:
                if was_open and isinstance(error, ConnectionError):  # the server was restarted, or closed an idle connection
                    return self._asked(function, *arguments)
                self.cache.is_down(self.server, error)
                raise
            except MemcacheClientError as error:
                if "unauthenticated" in str(error):
                    self.cache.leave_alone(self.server, LOGIN, "wants a user and a password: the files are read instead")
                return self.cache.is_wrong(self.server, error)
            except Exception as error:
                return self.cache.is_wrong(self.server, error)
            if not was_open:
                self.cache.answered(self.server)
            return answer

        def _extract_value(self, expect_cas, line, buf, remapped_keys, prefixed_keys):
            """Return (key, (header, content), the bytes that follow). pymemcache's own method accepts any length and copies a
            value in pieces of 4 KB. If more values are to come, the deadline begins anew."""
            _, name, _, size = line.split()
            if not HEADER.size <= int(size) <= HEADER.size + LARGEST:
                raise ValueError(f"{int(size)} bytes are no sample")
            while len(buf) < HEADER.size + len(END):
                buf += self.sock.recv(HEADER.size + len(END) - len(buf))
            whole = int(size) + len(END)
            parts, rest, missing = [buf[HEADER.size : whole]], buf[whole:], whole - len(buf)
            while missing > 0:
                parts.append(self.sock.recv(missing))
                missing -= len(parts[-1])
            last = parts.pop()
            if len(last) < len(END):  # the two bytes of END came separately
                last = parts.pop() + last
            if not last.endswith(END) or rest[:1] not in (b"", b"V", b"E"):  # the line after it is VALUE or END
                raise ValueError("a value has no end")
            content = b"".join((*parts, memoryview(last)[: -len(END)]))
            key = remapped_keys.pop(name)  # so a server that sends a value twice cannot prolong this
            if remapped_keys:
                self.socket_module.begin()
            return key, (buf[: HEADER.size], content), rest

        def _set(self, key, value):
            limit = self.cache.too_large.get(self.server)
            if limit and len(value) >= limit:
                return TOO_LARGE
            try:
                return STORED if super().set(key, value) else NOT_STORED
            except MemcacheServerError as error:
                if "too large" not in str(error):
                    return NOT_STORED
                self.cache.too_large[self.server] = len(value)
                return TOO_LARGE

        def _connect(self):
            """Connect, and log in to a server that demands it, not to others: memcached -Y takes the first set as the login."""
            super()._connect()
            if not self.cache.login:
                return
            try:
                self.version()
                return self.cache.asks_nobody(self.server)
            except MemcacheClientError:  # it requires a login; pymemcache has closed the connection
                super()._connect()
            try:
                super().set("login", self.cache.login)
            except MemcacheClientError:
                self.cache.leave_alone(self.server, LOGIN, "refuses the user or the password: the files are read instead")

    class Fleet(HashClient):
        client_class = Connection
        network: Any = None

    return Fleet
