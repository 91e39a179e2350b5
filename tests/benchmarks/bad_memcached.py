"""How long a bad memcached server holds up the client of the sample cache, and how long plain pymemcache (part of memcached.py)."""

import contextlib
import functools
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from pymemcache.client.hash import HashClient

from datasets.kspeed.cache import SampleCache
from datasets.kspeed.servers import addresses
from tests.benchmarks.memcached_forms import SAMPLES, SECONDS, SIZES, THREADS, content, plain, text
from tests.tools.memcached import Liar, Memcached

TRIALS = 20
WAIT = 3  # seconds after which a bad server is told to stop


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
