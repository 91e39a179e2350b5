"""The client of the sample cache beside plain pymemcache: what a sample costs, and how long a bad server holds one up.

    python -m tests.benchmarks.memcached [--rounds 9]       (make bench)

The forms take turns, each in a forked process of its own, so that its CPU time is the client's alone. The servers are memcached's
own, on this machine. Of what datasets/kspeed/memcached.py adds to pymemcache each part is also taken out alone, and what it once had is put back. Beside a bad
server ours has a deadline of 0.05 s and pymemcache its own two timeouts of 0.05 s; the costs are taken with 10 s.
"""

import argparse
import contextlib
import functools
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from pymemcache import __version__
from pymemcache.client.base import Client
from pymemcache.client.hash import HashClient
from pymemcache.client.rendezvous import RendezvousHash

from datasets.kspeed import memcached as fleet
from datasets.kspeed.cache import SampleCache, addresses
from tests.benchmarks import rows
from tests.benchmarks.base import machine
from tests.memcached import Liar, Memcached
from tests.packages import program
from tests.samples import listed

SIZES, SAMPLES, GETS, WARM_UP, THREADS = (110_000, 400_000), 20, 400, 40, 8
PATIENCE = 10  # both, where only the cost is measured: a busy machine is no bad server
SECONDS = 0.05  # the deadline; and the timeouts of the library
TRIALS = 20
WAIT = 3  # seconds after which a bad server is told to stop


def plain(seconds):
    """The options of a pymemcache that does what ours does, as far as it can."""
    return {"timeout": seconds, "connect_timeout": seconds, "no_delay": True, "default_noreply": False}


def content(number, size):
    return np.random.default_rng([number, size]).bytes(size)


def fill(servers, size):
    """[(key, the key that the servers see)]; every server has all of them, because each hash has its own choice."""
    cache, found = SampleCache(listed(servers)), []
    for number in range(SAMPLES):
        address, seal = cache._hashed(str(number))
        found.append((str(number), address))
        for one in servers:
            sample = content(number, size)
            assert Client(one.address, **plain(PATIENCE)).set(address, cache.header(seal, sample) + sample)
    return found


# --- The forms: each gives a function of (key, the key that the servers see) that gets a sample ---------------------------


def cached(servers):
    cache = SampleCache(listed(servers), deadline=PATIENCE)
    return lambda key, _: cache.get(key)


def client(servers, change=lambda _: None):
    """Ours without the checksum, which is the work of datasets/kspeed/cache.py; `change` takes a part out, or puts one back."""
    mine = fleet.connect(SampleCache(listed(servers), deadline=PATIENCE))
    for one in mine.clients.values():
        one.get_many = lambda keys, one=one: Client.get_many(one, keys)
    change(mine)

    def get(_, address):
        mine.network.begin()
        value = mine.get_many([address])[address]
        return value[: fleet.HEADER.size], value[fleet.HEADER.size :]

    return get


def changed(change):
    return functools.partial(client, change=change)


def their_hash(mine):
    mine.hasher = RendezvousHash(nodes=mine.hasher.nodes)


class _SmallPieces(fleet._Socket):
    def recv(self, count):
        return self._in_time(super(fleet._Socket, self).recv, count)


def their_pieces(mine):
    with_sockets(mine, _SmallPieces)


class _AnyTime(fleet._Socket):
    """Without the deadline: as pymemcache sets the timeouts, once for each connection."""

    def _in_time(self, call, what):
        return call(what)


def their_timeouts(mine):
    for one in mine.clients.values():
        one.timeout = one.connect_timeout = PATIENCE
    with_sockets(mine, _AnyTime)


# What ours had until 2026-11-21, each put back alone.


class _KernelsClock(fleet._Socket):
    """Blocking: the kernel ends every wait."""

    def connect(self, address):
        self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", PATIENCE, 0))
        super().connect(address)

    def sendall(self, content):
        if len(content) < 4096:
            return socket.socket.sendall(self, content)
        super().sendall(content)
        self.settimeout(None)

    def recv(self, _count):
        self.network.left()
        return socket.socket.recv(self, fleet.PIECE)


def kernels_clock(mine):
    with_sockets(mine, _KernelsClock)


class _OneValue(_SmallPieces):
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
        return names[key], bytes(memory[:-2]), b""

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
    "ours, but received in pieces of 4 KB, as pymemcache does it": changed(their_pieces),
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
    return lambda key, sample: cache.set(key, sample) == fleet.STORED


def client_set(servers, change=lambda _: None):
    mine, cache = fleet.connect(SampleCache(listed(servers), deadline=PATIENCE)), SampleCache(listed(servers))
    change(mine)

    def put(key, sample):
        mine.network.begin()
        return mine.set(cache._hashed(key)[0], sample) == fleet.STORED

    return put


def hash_client_set(servers):
    theirs, cache = HashClient(addresses(listed(servers)), **plain(PATIENCE)), SampleCache(listed(servers))
    return lambda key, sample: theirs.set(cache._hashed(key)[0], sample)


SETS = {
    "ours, SampleCache": cached_set,
    OURS: client_set,
    LIBRARY: hash_client_set,
    "ours, but pymemcache's hash": functools.partial(client_set, change=their_hash),
    "ours, but pymemcache's timeouts": functools.partial(client_set, change=their_timeouts),
}


# --- What they cost --------------------------------------------------------------------------------------------------------


def forked(function):
    """What the function returns, an array of floats, from a process of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.write(writing, np.array(function()).tobytes())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading, "rb") as file:
        found = np.frombuffer(file.read())
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("a form has failed, see above")
    return tuple(found)


def cost(call, all_of=lambda call, work: [bool(call(*one)) for one in work]):
    """(CPU, seconds on the clock) for one of the calls."""

    def measured(work):
        all_of(call, [work[number % len(work)] for number in range(WARM_UP)])
        begun, used = time.perf_counter(), time.process_time()
        found = all_of(call, [work[number % len(work)] for number in range(GETS)])
        times = time.process_time() - used, time.perf_counter() - begun
        if not all(found):
            raise RuntimeError(f"{sum(not one for one in found)} of {GETS} have failed")
        return [seconds / GETS for seconds in times]

    return measured


def in_turn(forms, rounds, work, servers, all_of=None):
    found = {form: [] for form in forms}
    for _ in range(rounds):
        for form, make in forms.items():
            found[form].append(forked(lambda make=make: cost(make(servers), *filter(None, [all_of]))(work)))
    return found


def ratios(found, form, base, place=0):
    return sorted(theirs[place] / mine[place] for mine, theirs in zip(found[base], found[form]))


def text(values, digits=2):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(what, found):
    lines = [f"| {what} | CPU, us | on the clock, us | CPU, of ours without the checksum |", "|---|---|---|---|"]
    for form, times in found.items():
        cpu, clock = ([1e6 * one[place] for one in times] for place in (0, 1))
        ratio = text(ratios(found, form, OURS)) if form != OURS else ""
        lines.append(f"| {form} | {text(cpu, 0)} | {statistics.median(clock):.0f} | {ratio} |")
    return "\n".join(lines) + "\n"


@functools.cache
def threads():
    return ThreadPoolExecutor(THREADS)


def in_threads(call, work):
    return list(threads().map(lambda one: bool(call(*one)), work))


def costs(rounds):
    for count, size in ((1, SIZES[0]), (3, SIZES[0]), (10, SIZES[0]), (1, SIZES[1])):
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(Memcached("-m", 128)) for _ in range(count)]
            work, what = fill(servers, size), f"{size // 1000} KB, {count} server{'s' * (count > 1)}"
            found = in_turn(FORMS, rounds, work, servers)
            print(table(f"get, {what}", found), flush=True)
            if count != 3:
                continue
            keep("get from memcached", "pymemcache's HashClient", ratios(found, LIBRARY, "ours, SampleCache"))
            keep("get from memcached, no checksum", "pymemcache's HashClient", ratios(found, LIBRARY, OURS))
            print(table(f"get, {what}", in_turn(CONNECTING, rounds, work, servers)), flush=True)
            found = in_turn(PARALLEL, rounds, work, servers, in_threads)
            print(table(f"get in {THREADS} threads, {what}", found), flush=True)
            keep(f"get from memcached in {THREADS} threads", POOL, ratios(found, POOL, "ours, SampleCache"))
            samples = [(key, content(number, size)) for number, (key, _) in enumerate(work)]
            print(table(f"set, {what}", in_turn(SETS, rounds, samples, servers)), flush=True)


def keep(what, peer, values):
    rows.keep(f"{what}, 110 KB, 3 servers, CPU", peer, values)


# --- What a bad server does to them ----------------------------------------------------------------------------------------


def value(key, content):
    return b"VALUE %s 0 %d\r\n%s\r\nEND\r\n" % (key, len(content), content)


def dripping(seconds):
    def drip(key, content, _):
        end = time.monotonic() + WAIT
        for byte in value(key, content):
            if time.monotonic() > end:
                raise ConnectionError
            yield bytes([byte])
            time.sleep(seconds)

    return drip


def never(*_):
    yield b""


def shorter(key, content, _):
    yield value(key, content[:-9])


def longer(key, content, _):
    yield b"VALUE %s 0 %d\r\n%s\r\nEND\r\n" % (key, len(content) + 9, content)


def garbage(*_):
    yield b"\0\xff nonsense\r\n\r\nEND\r\n"


def another(key, content, _):
    yield value(key, content[:-3] + b"xyz")


def no_sample(key, *_):
    yield b"VALUE %s 0 99999999999\r\n" % key


LIES = {
    "says nothing": never,
    "gives a byte a second": dripping(1),
    f"gives a byte every 10 ms (told to stop after {WAIT} s)": dripping(0.01),
    "gives a part as the whole": shorter,
    "names a length 9 bytes too large": longer,
    "names a length of 100 GB": no_sample,
    "gives garbage": garbage,
    "gives another value": another,
}


class Ours:
    def __init__(self, *servers):
        self.cache = SampleCache(",".join(servers), deadline=SECONDS)

    def put(self, key, sample):
        self.cache.set(key, sample)

    def get(self, key):
        return self.cache.get(key)


class Theirs:
    """A server that fails is left alone at once, as ours does it."""

    def __init__(self, *servers):
        pool = {"use_pooling": True, "max_pool_size": THREADS}
        self.client = HashClient(addresses(servers), **plain(SECONDS), **pool, ignore_exc=True, retry_attempts=0)

    def put(self, key, sample):
        self.client.set(key, sample)

    def get(self, key):
        return self.client.get(key)


@contextlib.contextmanager
def filled(kind, server, sample):
    one = kind(server.address)
    one.put("key", sample)
    yield one


@contextlib.contextmanager
def lying(lie, kind, sample):
    with Liar(lie) as liar, filled(kind, liar, sample) as one:
        yield one


@contextlib.contextmanager
def dead(kind, sample):
    with Memcached() as server, filled(kind, server, sample) as one:
        server.kill()
        yield one


@contextlib.contextmanager
def stopped(kind, sample):
    with Memcached() as server, filled(kind, server, sample) as one:
        server.stop()
        yield one


@contextlib.contextmanager
def restarted(kind, sample):
    with Memcached() as server, filled(kind, server, sample) as one:
        server.kill()
        server.start()
        with filled(kind, server, sample):
            yield one


@contextlib.contextmanager
def looked_up(kind, sample):
    """The first get from a server whose name takes a second to be found."""
    real = socket.getaddrinfo

    def slow(_, *how):
        time.sleep(1)
        return real("127.0.0.1", *how)

    with Memcached() as server, filled(kind, server, sample):
        try:
            socket.getaddrinfo = slow
            yield kind(f"cache.example:{server.port}")
        finally:
            socket.getaddrinfo = real


CASES = {
    "is dead": dead,
    "was restarted, and has the sample": restarted,
    "is stopped": stopped,
    "has a name that takes 1 s to be found": looked_up,
    **{what: functools.partial(lying, lie) for what, lie in LIES.items()},
}


def timed(case, kind, sample):
    """(seconds that a get lasts, what it gives)"""
    with case(kind, sample) as one:
        begun = time.perf_counter()
        found = one.get("key")
        seconds = time.perf_counter() - begun
    return seconds, "a miss" if found is None else "the sample" if found == sample else "a wrong sample"


def raises(kind):
    """Whether a get of 8 threads raises an exception while one of two servers dies."""
    with Memcached() as first, Memcached() as second:
        one, end = kind(first.address, second.address), time.monotonic() + 0.5
        for number in range(SAMPLES):
            one.put(str(number), b"sample")

        def gets(_):
            failed = 0
            while time.monotonic() < end:
                for number in range(SAMPLES):
                    try:
                        one.get(str(number))
                    except Exception:
                        failed += 1
            return failed

        with ThreadPoolExecutor(THREADS) as pool:
            found = pool.map(gets, range(THREADS))
            time.sleep(0.1)
            first.kill()
            return any(found)


def behaviour(rounds):
    lines = ["| a server that | ours, ms | gives | pymemcache, ms | gives |", "|---|---|---|---|---|"]
    sample = content(0, SIZES[0])
    for what, case in CASES.items():
        cells = []
        for kind in (Ours, Theirs):
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # ours says which server is no help
                found = [timed(case, kind, sample) for _ in range(rounds)]
            cells += [text([1000 * seconds for seconds, _ in found], 1), " or ".join(sorted({given for _, given in found}))]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    print("\n".join(lines) + "\n", flush=True)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        counts = [sum(raises(kind) for _ in range(TRIALS)) for kind in (Ours, Theirs)]
    print(
        f"One of two servers dies while {THREADS} threads get samples; an exception is raised, of {TRIALS} trials: ours {counts[0]}, "
        f"pymemcache's HashClient with a pool {counts[1]}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    version = subprocess.run([program("memcached"), "-V"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"{machine()}; pymemcache {__version__}, {version}; {options.rounds} rounds, median (range)\n")
    costs(options.rounds)
    behaviour(min(options.rounds, 3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
