"""The memcached servers of a sample cache, through pymemcache, which leaves to its users what is added here.

A deadline for the whole of an operation, a login as memcached -Y wants it, and a get that costs little.
"""

import functools
import hashlib
import hmac
import socket
import struct
import threading
import time

LEFT_ALONE = 30  # seconds until a server that was no help is asked again
LARGEST = 64 << 20  # bytes of a sample; more would not come within the deadline over a fast network
STORED, TOO_LARGE, NOT_STORED = "stored", "too large", "not stored"

# What is stored: this, and then the sample as it is.
HEADER = struct.Struct(">4sI16s")  # magic, length of the sample, checksum over key and sample
END = b"\r\nEND\r\n"
END_OF_ONE = b"\r\n"  # where others follow
BEGIN = 128  # bytes received first: the length, by which the rest comes in one call
FITS = 4096  # bytes that the kernel takes over at once on an idle connection

# What is said of a server, once each.
DOWN, WRONG, LOGIN, OPEN = 1, 2, 4, 8


class Unfit(OSError):
    """The server answers, but is no help; this has been said."""


class Answer(Exception):
    """What a server says in place of values: a line."""


class _Network:
    """What pymemcache needs of the socket module, for the connections of one thread: every operation has an end."""

    def __init__(self, cache):
        self.cache, self._until, self._found = cache, 0.0, {}

    def __getattr__(self, name):
        return getattr(socket, name)

    def begin(self):
        self._until = time.monotonic() + self.cache.deadline

    def left(self):
        left = self._until - time.monotonic()
        if left <= 0:
            raise self.late()
        return left

    def late(self):
        return TimeoutError(f"no answer within {self.cache.deadline:g} s")

    def socket(self, *how):
        made = _Socket(*how)
        made.network = self
        return made

    def getaddrinfo(self, host, port, *how):
        """A name server has no deadline: what it says too late is there the next time."""

        def ask():
            try:
                found = socket.getaddrinfo(host, port, *how)
                self._found[host, port] = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)  # memcached's own choice
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
    """Blocking, with the kernel as the clock: waiting for many bytes is one call, and ends also where they drip in.

    No wait begins after the operation's deadline, and none is longer, so that all together last at most twice as long.
    """

    network = None
    _memory = b""

    def connect(self, address):
        seconds = self.network.cache.deadline
        self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
        self.settimeout(self.network.left())
        super().connect(address)

    def sendall(self, content):
        if len(content) < FITS:
            return super().sendall(content)
        self.settimeout(self.network.left())
        super().sendall(content)
        self.settimeout(None)

    def recv(self, count):
        """Of what begins a line, and may be followed by a sample."""
        return self._in_time(super().recv, min(count, BEGIN))

    def fetch(self, keys):
        """(key, header, sample) of each of these that is there, in their order; each has the whole deadline.

        A value is received into memory that the next one uses again: new memory is slow.
        """
        self.sendall(b"get %s\r\n" % b" ".join(keys))
        left, found = list(keys), b""
        while True:
            while b"\r\n" not in found:
                found += self.recv(BEGIN)
            if found == b"END\r\n":
                return
            line, _, begun = found.partition(b"\r\n")
            words = line.split()
            if len(words) != 4 or words[0] != b"VALUE" or words[1] not in left:
                raise Answer(line)
            del left[: left.index(words[1]) + 1]
            size = int(words[3])
            if not HEADER.size <= size <= HEADER.size + LARGEST:
                raise ValueError(f"{size} bytes are no sample")
            ending = END_OF_ONE if left else END
            memory, found = self._value(begun, size + len(ending))
            if memory[size:] != ending or (found and not left):
                raise ValueError("a value has no end")
            yield words[1], bytes(memory[: HEADER.size]), bytes(memory[HEADER.size : size])
            if not left:
                return
            self.network.begin()

    def _value(self, begun, length):
        """(so many bytes, of which the first have come already; what has come behind them)"""
        if len(self._memory) < length:
            self._memory = memoryview(bytearray(length))
        memory, have = self._memory[:length], min(len(begun), length)
        memory[:have] = begun[:have]
        while have < length:
            have += self._in_time(super().recv_into, memory[have:], 0, socket.MSG_WAITALL)
        return memory, begun[length:]

    def line(self):
        found = b""
        while not found.endswith(b"\r\n"):
            found += self.recv(BEGIN)
        return found

    def _in_time(self, receive, *arguments):
        self.network.left()
        try:
            found = receive(*arguments)
        except BlockingIOError:
            raise self.network.late() from None
        if not found:
            raise ConnectionError("the connection was closed")
        return found


def connect(cache):
    """The servers as one client sees them: a key has its place, and places of a server that is left alone are the others'."""
    from pymemcache.client.rendezvous import RendezvousHash

    network = _Network(cache)
    fleet = _fleet_class()(
        cache.servers, hasher=functools.partial(RendezvousHash, hash_function=_score), socket_module=network,
        retry_attempts=0, dead_timeout=LEFT_ALONE, ignore_exc=True, default_noreply=False, no_delay=True,
    )  # fmt: skip
    fleet.network = network
    return fleet


def _score(text, _seed):
    """A tenth of the time that pymemcache's own hash takes in Python."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@functools.cache
def _fleet_class():
    from pymemcache.client.base import Client
    from pymemcache.client.hash import HashClient
    from pymemcache.exceptions import MemcacheClientError, MemcacheServerError

    class Connection(Client):
        """One server. An OSError makes HashClient leave it alone for a while; whatever else it does is a miss."""

        def get_many(self, keys, seals):
            """{key: sample} of those that are there. `seals`: the secret of each key's checksum."""
            self.socket_module.begin()
            found = {}
            for key, header, content in self._asked(self._get, keys) or ():
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
                if was_open and isinstance(
                    error, ConnectionError
                ):  # the server has been restarted, or has closed what was idle
                    self.close()
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

        def _get(self, keys):
            """pymemcache's own takes twice the time: it receives a sample in pieces of 4 KB."""
            if self.sock is None:
                self._connect()
            try:
                return [(key.decode(), *value) for key, *value in self.sock.fetch([key.encode() for key in keys])]
            except Answer as answer:
                self.close()
                (line,) = answer.args
                self._raise_errors(line, b"get")
                raise ValueError(f"{line[:80]!r} is no answer to what was asked") from None
            except Exception:
                self.close()
                raise

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
            super()._connect()
            if self.cache.login:
                try:
                    self._log_in()
                except Exception:
                    self.close()
                    raise

        def _log_in(self):
            """As memcached -Y wants it: the first value that is set. A server that asks for no password is not told it."""
            self.sock.sendall(b"version\r\n")
            if self.sock.line().startswith(b"VERSION"):
                return self.cache.asks_nobody(self.server)
            self.sock.sendall(b"set login 0 0 %d\r\n%s\r\n" % (len(self.cache.login), self.cache.login))
            if self.sock.line() != b"STORED\r\n":
                self.cache.leave_alone(self.server, LOGIN, "refuses the user or the password: the files are read instead")

    class Fleet(HashClient):
        client_class = Connection

    return Fleet
