"""A cache of samples over a fleet of memcached servers: many jobs and nodes read a file once, and then from memory.

The cache is never needed. Whatever a server does (dies, hangs, forgets, lies), an operation ends within its deadline, a wrong
value is a miss, a server that is no help is left alone for a while, and one line says so. Nothing is ever unpickled.
"""

import hashlib
import hmac
import mmap
import os
import threading
import zlib

from common.errors import UserError, one_line
from datasets.kspeed import memcached
from datasets.kspeed.memcached import DOWN, HEADER, LARGEST, LEFT_ALONE, NOT_STORED, OPEN, TOO_LARGE, WRONG, Unfit

PORT = 11211
FEW = 3  # wrong answers until a server is left alone
MAGIC = b"ARC1"
ADDRESS = 20  # bytes of a hashed key


class SampleCache:
    """get and set, for threads, forked workers (each has connections of its own) and spawned ones (it can be pickled)."""

    def __init__(self, servers, user=None, password=None, deadline=0.05):
        try:
            import pymemcache  # noqa: F401
        except ImportError:
            raise UserError("the sample cache needs pymemcache: pip install .[cache]") from None
        if (user is None) != (password is None):
            raise UserError("a cache with a login needs both the user and the password, and one without needs neither")
        if any(character.isspace() for character in f"{user}{password}"):
            raise UserError("the user and the password of the cache may hold no space: memcached takes it for their border")
        self.servers, self.deadline = addresses(servers), deadline
        self.login = user and f"{user} {password}".encode()
        self.too_large = {}  # {server: the smallest size that it refused}
        self._secret = hashlib.sha256(password.encode()).digest() if password else b""
        self._start()

    def _start(self):
        self._said = mmap.mmap(-1, len(self.servers))  # a byte each, shared with forked workers: an outage is said once
        self._wrong = dict.fromkeys(self.servers, 0)
        self._no_help = set()
        self._start_process()

    def _start_process(self):
        self._process, self._thread, self._lock = os.getpid(), threading.local(), threading.Lock()

    def __getstate__(self):
        return {name: vars(self)[name] for name in ("servers", "deadline", "login", "too_large", "_secret")}

    def __setstate__(self, state):
        vars(self).update(state)
        self._start()

    def get(self, key):
        """The sample, or None."""
        return self.get_many([key])[key]

    def get_many(self, keys):
        """{key: the sample, or None}; one request to a server for all that it may have."""
        named = {key: self._named(key) for key in keys}
        found = self._fleet().get_many([address for address, _ in named.values()], seals=dict(named.values()))
        return {key: found.get(address) for key, (address, _) in named.items()}

    def set(self, key, content):
        """STORED, TOO_LARGE or NOT_STORED, of which a job needs to know nothing."""
        if len(content) > LARGEST:
            return TOO_LARGE
        address, seal = self._named(key)
        return self._fleet().set(address, self.header(seal, content) + content) or NOT_STORED

    def has(self, key):
        """Whether there is something under this key; it is neither transferred nor verified."""
        return bool(self._fleet().touch(self._named(key)[0]))

    def delete(self, key):
        """Whether there was something to delete."""
        return bool(self._fleet().delete(self._named(key)[0]))

    def status(self):
        """{server: what memcached says of itself, or None}"""
        found = {}
        for client in self._fleet().clients.values():
            client.socket_module.begin()
            try:
                found[client.server] = {name.decode(): value for name, value in client.stats().items()}
            except Exception:
                found[client.server] = None
        return found

    def unreached(self):
        """The servers that were no help the last time they were asked in this process."""
        return [server for server in self.servers if server in self._no_help]

    # --- Keys and values ---

    def _named(self, key):
        """(the key that the server sees, the secret of this key's checksum): no key of ours can hold a command."""
        key = key if isinstance(key, bytes) else key.encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(key, digest_size=ADDRESS + 32, key=self._secret, person=b"anyrank sample").digest()
        return digest[:ADDRESS].hex(), digest[ADDRESS:]

    def header(self, seal, content):
        """What has to stand before this content under this key; without the password nobody else can write it."""
        if self._secret:
            checksum = hmac.digest(seal, content, "sha256")[:16]
        else:
            checksum = zlib.crc32(content, int.from_bytes(seal[:4], "big")).to_bytes(16, "big")
        return HEADER.pack(MAGIC, len(content), checksum)

    # --- Servers ---

    def _fleet(self):
        if self._process != os.getpid():
            self._start_process()
        mine = getattr(self._thread, "fleet", None)
        if mine is None:
            mine = self._thread.fleet = memcached.connect(self)
        mine.network.begin()
        return mine

    def answered(self, server):
        """On a new connection: an outage is over, whichever process has spoken of it."""
        self._no_help.discard(server)
        place = self.servers.index(server)
        with self._lock:
            said = self._said[place] & DOWN
            self._said[place] &= ~DOWN
        if said:
            print(f"cache server {name_of(server)} answers again", flush=True)

    def is_down(self, server, error):
        self._no_help.add(server)
        what = f"does not answer ({one_line(error)[:100]}): the files are read instead, and it is asked again in {LEFT_ALONE} s"
        self._say(server, DOWN, what)

    def is_wrong(self, server, error):
        """One wrong answer is a miss; after a few the server is left alone, here and whenever it does so again."""
        self._wrong[server] += 1
        if self._wrong[server] % FEW == 0:
            self.leave_alone(server, WRONG, f"gives wrong answers ({one_line(error)[:100]}): the files are read instead")

    def leave_alone(self, server, kind, what):
        self._no_help.add(server)
        self._say(server, kind, what)
        raise Unfit(what)

    def asks_nobody(self, server):
        self._say(server, OPEN, "asks for no password: whoever reaches it can read and delete what it holds")

    def _say(self, server, kind, what):
        place = self.servers.index(server)
        with self._lock:
            said = self._said[place] & kind
            self._said[place] |= kind
        if not said:
            print(f"warning: cache server {name_of(server)} {what}", flush=True)


def addresses(iplist):
    """[(host, port)] of "host:port,host:port" or a list of such words; the port is memcached's own where none is given."""
    words = iplist.split(",") if isinstance(iplist, str) else iplist or []
    found = []
    for word in filter(None, (word.strip() for word in words)):
        host, colon, port = word.rpartition(":")
        if not colon or word.endswith("]"):
            host, port = word, str(PORT)
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not host or any(character.isspace() for character in host) or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(f"{one_line(word)!r} is no cache server: give host:port, several with commas between them")
        found.append((host, int(port)))
    if not found:
        raise UserError("no cache server is given: give host:port, several with commas between them, or set KSPEED_IPLIST")
    return list(dict.fromkeys(found))


def name_of(server):
    return "{}:{}".format(*server)
