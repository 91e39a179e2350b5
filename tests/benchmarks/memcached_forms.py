"""pymemcache, the client of the sample cache, and what lies between them: the forms that memcached.py times."""

import functools
import socket
import statistics
import struct
import threading

import numpy as np
from pymemcache.client.base import Client
from pymemcache.client.hash import HashClient
from pymemcache.client.rendezvous import RendezvousHash

from datasets.kspeed import memcached
from datasets.kspeed.cache import SampleCache
from datasets.kspeed.servers import addresses
from datasets.kspeed.values import HEADER, STORED
from tests.tools.samples import listed

SIZES, SAMPLES, GETS, WARM_UP, THREADS = (110_000, 400_000), 20, 400, 40, 8
PATIENCE = 10  # both, where only the cost is measured: a busy machine is no bad server
SECONDS = 0.05  # the deadline; and the timeouts of the library


def plain(seconds):
    """The options of a pymemcache that does what ours does, as far as it can."""
    return {"timeout": seconds, "connect_timeout": seconds, "no_delay": True, "default_noreply": False}


def content(number, size):
    return np.random.default_rng([number, size]).bytes(size)


def text(values, digits=2):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def fill(servers, size):
    """[(key, the key that the servers see)]; every server has all of them, because each hash has its own choice."""
    cache, found = SampleCache(listed(servers)), []
    for number in range(SAMPLES):
        address, seal = cache.values.hashed(str(number))
        found.append((str(number), address))
        for one in servers:
            sample = content(number, size)
            assert Client(one.address, **plain(PATIENCE)).set(address, cache.values.header(seal, sample) + sample)
    return found


# --- The forms: each gives a function of (key, the key that the servers see) that gets a sample ---------------------------


def cached(servers):
    cache = SampleCache(listed(servers), deadline=PATIENCE)
    return lambda key, _: cache.get(key)


def client(servers, change=lambda _: None):
    """Ours without the checksum, which is the work of datasets/kspeed/values.py; `change` takes a part out, or puts one back."""
    mine = SampleCache(listed(servers), deadline=PATIENCE)._fleet()
    for one in mine.clients.values():
        one.get_many = lambda keys, one=one: Client.get_many(one, keys)
    change(mine)

    def get(_, address):
        mine.network.begin()
        return mine.get_many([address])[address]

    return get


def changed(change):
    return functools.partial(client, change=change)


def their_hash(mine):
    mine.hasher = RendezvousHash(nodes=mine.hasher.nodes)


def their_values(mine):
    for one in mine.clients.values():

        def extract(*given, one=one):
            key, value, rest = Client._extract_value(one, *given)
            return key, (value[: HEADER.size], value[HEADER.size :]), rest

        one._extract_value = extract


class _AnyTime(memcached._Socket):
    """Without the deadline: as pymemcache sets the timeouts, once for each connection."""

    def _in_time(self, call, what):
        return call(what)


def their_timeouts(mine):
    for one in mine.clients.values():
        one.timeout = one.connect_timeout = PATIENCE
    with_sockets(mine, _AnyTime)


# What ours had until 2026-11-21, each put back alone.


class _KernelsClock(memcached._Socket):
    """Blocking: the kernel ends every wait."""

    def connect(self, address):
        self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", PATIENCE, 0))
        super().connect(address)

    def sendall(self, content):
        if len(content) < 4096:
            return socket.socket.sendall(self, content)
        super().sendall(content)
        self.settimeout(None)

    def recv(self, count):
        self.network.remaining()
        return socket.socket.recv(self, count)


def kernels_clock(mine):
    with_sockets(mine, _KernelsClock)


class _OneValue(memcached._Socket):
    def into(self, memory):
        return self._in_time(super().recv_into, memory)


def memory_again(mine):
    """A value is received into memory that the next one uses again."""
    kept = [memoryview(bytearray(max(SIZES) + 1000))]

    def extract(_, line, begun, names, __, one):
        _, key, _, size = line.split()
        memory, have = kept[0][: int(size) + 2], len(begun)
        memory[:have] = begun
        while have < len(memory):
            have += one.sock.into(memory[have:])
        return names[key], (bytes(memory[: HEADER.size]), bytes(memory[HEADER.size : -2])), b""

    with_sockets(mine, _OneValue)
    for one in mine.clients.values():
        one._extract_value = functools.partial(extract, one=one)


def with_sockets(mine, kind):
    def made(*how):
        found = kind(*how)
        found.network = mine.network
        return found

    mine.network.socket = made


def connecting(change=lambda _: None):
    """A new connection for every sample."""

    def form(servers):
        kept = []
        get = client(servers, lambda mine: (change(mine), kept.extend(mine.clients.values())))

        def again(*key):
            for one in kept:
                one.close()
            return get(*key)

        return again

    return form


def their_names(mine):
    mine.network.getaddrinfo = socket.getaddrinfo


def hash_client(servers, **options):
    theirs = HashClient(addresses(listed(servers)), **plain(PATIENCE), **options)
    return lambda _, address: theirs.get(address)


def one_client(servers):
    theirs = Client(addresses(listed(servers))[0], **plain(PATIENCE))
    return lambda _, address: theirs.get(address)


OURS, LIBRARY, POOL = "ours, without the checksum", "pymemcache, HashClient", "pymemcache, HashClient with a pool"
FORMS = {
    "ours, SampleCache": cached,
    OURS: client,
    LIBRARY: hash_client,
    "pymemcache, Client, of one server": one_client,
    "ours, but pymemcache's hash": changed(their_hash),
    "ours, but values received and copied as pymemcache does it": changed(their_values),
    "ours, but pymemcache's timeouts": changed(their_timeouts),
    "ours, with the kernel's clock again": changed(kernels_clock),
    "ours, with memory that is used again": changed(memory_again),
}
CONNECTING = {
    OURS: client,
    "a new connection for each": connecting(),
    "the same, the name looked up by pymemcache": connecting(their_names),
}


def pooled(servers):
    return hash_client(servers, use_pooling=True, max_pool_size=THREADS)


def for_each_thread(form):
    """The form, made once in every thread: a fleet and a HashClient are no more than one thread's."""

    def made(servers):
        mine = threading.local()

        def get(*key):
            if not hasattr(mine, "get"):
                mine.get = form(servers)
            return mine.get(*key)

        return get

    return made


PARALLEL = {
    "ours, SampleCache": cached,
    OURS: for_each_thread(client),
    POOL: pooled,
    "pymemcache, HashClient for each thread": for_each_thread(hash_client),
}


def cached_set(servers):
    cache = SampleCache(listed(servers), deadline=PATIENCE)
    return lambda key, sample: cache.set(key, sample) == STORED


def client_set(servers, change=lambda _: None):
    cache = SampleCache(listed(servers), deadline=PATIENCE)
    mine = cache._fleet()
    change(mine)

    def put(key, sample):
        mine.network.begin()
        return mine.set(cache.values.hashed(key)[0], sample) == STORED

    return put


def hash_client_set(servers):
    theirs, cache = HashClient(addresses(listed(servers)), **plain(PATIENCE)), SampleCache(listed(servers))
    return lambda key, sample: theirs.set(cache.values.hashed(key)[0], sample)


SETS = {
    "ours, SampleCache": cached_set,
    OURS: client_set,
    LIBRARY: hash_client_set,
    "ours, but pymemcache's hash": functools.partial(client_set, change=their_hash),
    "ours, but pymemcache's timeouts": functools.partial(client_set, change=their_timeouts),
}
