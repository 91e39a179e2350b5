"""The shared sample cache on real memcached servers: its answers, and what it does when a server fails or lies."""

import multiprocessing
import pickle
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.errors import UserError
from datasets.kspeed import KSpeedFolder, fleet, memcached, samples
from datasets.kspeed.cache import SampleCache
from datasets.kspeed.servers import MAX_WRONG_ANSWERS, addresses
from datasets.kspeed.values import HEADER, NOT_STORED, STORED, TOO_LARGE
from tests.tools.jobs import PATIENCE, in_rehearsal
from tests.tools.memcached import Liar
from tests.tools.samples import LOGIN, PATIENT, folder, images_below, listed, locked, patient, rewrite_unseen, server, servers  # noqa: F401 (fixtures)

# --- The cache itself ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("login", [{}, LOGIN], ids=["open", "keyed"])
def test_what_is_set_is_got(servers, login):
    cache = patient(*servers, **login)
    generator = random.Random(0)
    values = {f"key {size}": generator.randbytes(size) for size in (0, 1, 27, 28, 99, 100, 101, 128, 5000, 110_000, 900_000)}
    for key, content in values.items():
        assert cache.get(key) is None and not cache.has(key)
        assert cache.set(key, content) == STORED
    for number in range(60):
        cache.set(f"more {number}", b"1")
    for key, content in values.items():
        stored = cache.get(key)
        assert stored == content and type(stored) is bytes and cache.has(key)
    assert all(told["curr_items"] for told in cache.status().values()), "every server has a part"
    assert cache.delete("key 1") and cache.get("key 1") is None and not cache.delete("key 1")


def test_a_key_can_hold_anything_and_command_nothing(server):
    cache = patient(server)
    keys = ["a b", "a\r\nflush_all\r\n", "\0", "x" * 5000, "\udcff/ä", b"\xff\xfe", "", " ", "a"]
    for number, key in enumerate(keys):
        assert cache.set(key, b"%d" % number) == STORED
    assert [cache.get(key) for key in keys] == [b"%d" % number for number in range(len(keys))]
    assert cache.status()[addresses(server.address)[0]]["curr_items"] == len(keys)


def test_what_a_server_takes_for_too_large_is_not_cached_and_not_sent_again(server, monkeypatch):
    cache = patient(server)
    assert cache.set("large", bytes(3 << 20)) == TOO_LARGE
    assert cache.get("large") is None and cache.set("small", b"1") == STORED
    before = cache.status()[cache.servers.addresses[0]]["bytes_read"]
    assert cache.set("larger", bytes(4 << 20)) == TOO_LARGE
    with ThreadPoolExecutor(1) as another_thread:
        assert another_thread.submit(cache.set, "larger", bytes(4 << 20)).result() == TOO_LARGE
    assert pickle.loads(pickle.dumps(cache)).set("larger", bytes(4 << 20)) == TOO_LARGE
    assert cache.status()[cache.servers.addresses[0]]["bytes_read"] - before < 1000
    monkeypatch.setattr("datasets.kspeed.cache.LARGEST", 10)
    assert cache.set("larger than any", bytes(11)) == TOO_LARGE


def test_threads_have_connections_of_their_own(servers):
    cache = patient(*servers)
    contents = {str(number): random.Random(number).randbytes(5000 + number) for number in range(60)}
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(cache.set, contents, contents.values())) == {STORED}
        for _ in range(3):
            assert list(pool.map(cache.get, contents)) == list(contents.values())


def _gets(cache, keys, queue):
    queue.put([cache.get(key) for key in keys])


def test_forked_and_pickled_workers_get_the_same(servers):
    cache = patient(*servers, **LOGIN)
    contents = {str(number): random.Random(number).randbytes(3000) for number in range(20)}
    for key, content in contents.items():
        cache.set(key, content)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    workers = [context.Process(target=_gets, args=(cache, list(contents), queue)) for _ in range(2)]
    with cache.servers._lock:  # which the forks do not wait for
        for worker in workers:
            worker.start()
    assert [cache.get(key) for key in contents] == list(contents.values())  # while they use what they inherited
    assert [queue.get() for _ in workers] == [list(contents.values())] * 2
    for worker in workers:
        worker.join()
    again = pickle.loads(pickle.dumps(cache))
    assert [again.get(key) for key in contents] == list(contents.values())
    assert LOGIN["password"] not in repr(cache) + str(cache)


@pytest.mark.parametrize(
    "iplist, expected",
    [
        ("10.0.0.7", [("10.0.0.7", 11211)]),
        (" a:1, b:2,a:1,", [("a", 1), ("b", 2)]),
        (["a", "b:12"], [("a", 11211), ("b", 12)]),
        ("[::1]:7,[::1],[fe80::1%eth0]:8", [("::1", 7), ("::1", 11211), ("fe80::1%eth0", 8)]),
    ],
)
def test_servers_are_named_by_host_and_port(iplist, expected):
    assert addresses(iplist) == expected


@pytest.mark.parametrize("iplist", ["a:b", "a:0", "a:65536", ":1", "a b:1", "a:1\r\nx", ["a:-1"], "", ",", None, []])
def test_what_is_no_server_is_refused(iplist):
    with pytest.raises(UserError, match=r"no cache server"):
        addresses(iplist)


def test_mistakes_are_said_in_a_line(monkeypatch, tmp_path):
    for login, words in (
        ({"user": "a"}, "both"),
        ({"password": "a"}, "both"),
        ({"user": "a b", "password": "c"}, "contains a space"),
    ):
        with pytest.raises(UserError, match=words):
            SampleCache("a", **login)
    monkeypatch.delenv("KSPEED_PASSWORD", raising=False)
    with pytest.raises(UserError, match="set KSPEED_PASSWORD"):
        samples.open_cache("a", "admin")
    with pytest.raises(UserError, match="second argument"):
        KSpeedFolder(tmp_path, "array", 4, "a")
    monkeypatch.setitem(sys.modules, "pymemcache", None)
    with pytest.raises(UserError, match=r"pip install \.\[cache\]"):
        SampleCache("a")


# --- What a server may do --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("login", in_rehearsal([{}, LOGIN], lambda login: not login), ids=["open", "keyed"])
def test_of_ten_thousand_damaged_values_none_is_accepted(server, login, monkeypatch):
    from pymemcache.client.base import Client

    monkeypatch.setattr("datasets.kspeed.servers.MAX_WRONG_ANSWERS", 10**9)
    cache, generator, raw = patient(server, **login), random.Random(1), Client(server.address)
    intruder = patient(server, **({"user": "admin", "password": "guess"} if login else {}))
    content, other = generator.randbytes(400), generator.randbytes(400)
    cache.set("key", content)
    cache.set("other", other)
    (address, seal), (elsewhere, _) = cache.values.hashed("key"), cache.values.hashed("other")
    good, swapped = raw.get(address), raw.get(elsewhere)
    assert good.endswith(content) and swapped.endswith(other)

    def flipped():
        place = generator.randrange(8 * len(good))
        return good[: place // 8] + bytes([good[place // 8] ^ 1 << place % 8]) + good[place // 8 + 1 :]

    kinds = [
        flipped,
        lambda: good[: generator.randrange(len(good))],
        lambda: good + generator.randbytes(generator.randrange(1, 50)),
        lambda: generator.randbytes(len(good)),
        lambda: good[: HEADER.size] + generator.randbytes(400),
        lambda: good[: HEADER.size] + other,
        lambda: swapped,
        lambda: b"",
        lambda: intruder.values.header(generator.randbytes(32), other) + other,
        lambda: content,
    ]
    if login:  # all is known but the password
        kinds.append(lambda: intruder.values.header(intruder.values.hashed("key")[1], other) + other)
        kinds.append(lambda: SampleCache(server.address).values.header(seal, other) + other)
    for number in range(10_000):
        raw.set(address, kinds[number % len(kinds)](), noreply=False)
        assert cache.get("key") is None, number % len(kinds)
    raw.set(address, good, noreply=False)
    assert cache.get("key") == content


def wrong_bytes(key, value, _):
    yield b"VALUE %s 0 %d\r\n%s\r\nEND\r\n" % (key, len(value), value[:-3] + b"xyz")


def truncated(key, value, _):
    yield b"VALUE %s 0 %d\r\n%s\r\nEND\r\n" % (key, len(value) - 9, value[:-9])


def another_key(key, value, values):
    other = next((content for name, content in values.items() if name != key), value[:-1])
    yield b"VALUE %s 0 %d\r\n%s\r\nEND\r\n" % (key, len(other), other)


def another_name(_, value, __):
    yield b"VALUE somebody 0 %d\r\n%s\r\nEND\r\n" % (len(value), value)


def drip(key, value, _):
    for byte in b"VALUE %s 0 %d\r\n%s\r\nEND\r\n" % (key, len(value), value):
        yield bytes([byte])
        time.sleep(0.005)


def drip_in_the_value(key, value, _):
    yield b"VALUE %s 0 %d\r\n%s" % (key, len(value), value[:50])
    yield from drip(b"", value[50:], None)


def garbage(*_):
    yield b"\0\xff nonsense\r\n\r\nEND\r\nVALUE\r\n"


def no_number(key, *_):
    yield b"VALUE %s 0 -17\r\n" % key


def a_line_without_end(*_):
    while True:
        yield b"x" * 10_000


def a_value_without_end(key, *_):
    yield b"VALUE %s 0 67000000\r\n" % key
    while True:
        yield bytes(100_000)


def more_than_memory(key, *_):
    yield b"VALUE %s 0 99999999999999999999\r\n" % key


def no_end(key, value, _):
    yield b"VALUE %s 0 %d\r\n%sVALUES..." % (key, len(value), value)


def an_error(*_):
    yield b"SERVER_ERROR out of everything\r\n"


def silence(*_):
    yield b""


def hangs_up(key, value, _):
    yield b"VALUE %s 0 %d\r\n%s" % (key, len(value), value[:100])
    raise ConnectionError


LIES = [wrong_bytes, truncated, another_key, another_name, drip, drip_in_the_value, garbage, no_number, a_line_without_end,
        a_value_without_end, more_than_memory, no_end, an_error, silence, hangs_up]  # fmt: skip


TIMED = [drip, drip_in_the_value, a_line_without_end, a_value_without_end, silence]  # they are ended by the deadline alone


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_server_that_lies_does_no_harm(folder, server, capsys, lie):
    with Liar(lie) as liar:
        data = KSpeedFolder(str(folder), None, 0, f"{server.address},{liar.address}")
        data.cache, paths = patient(server, liar), images_below(folder)
        data.preload(paths)  # the liar has none of it: a miss is not a lie
        data.cache = SampleCache(listed([server, liar]), deadline=0.3 if lie in TIMED else PATIENT)
        for path in paths * 3:
            assert data.getBIN(path) == Path(path).read_bytes()
        assert 0 < liar.gets <= 2 * MAX_WRONG_ANSWERS
    assert capsys.readouterr().out.count(f"warning: cache server {liar.address}") == 1


class InPieces:
    """A connection on which an answer comes in these pieces."""

    def __init__(self, *pieces):
        self.left = b"".join(pieces)
        self.ends = [len(b"".join(pieces[number:])) for number in range(1, len(pieces) + 1)]  # counted from the end

    def sendall(self, _):
        pass

    def recv(self, count):
        length = min(count, len(self.left) - next(end for end in self.ends if end < len(self.left)))
        piece, self.left = self.left[:length], self.left[length:]
        return piece


def test_a_sample_is_whole_wherever_the_network_cuts_an_answer(server):
    cache = SampleCache(server.address, deadline=PATIENT)
    samples, answer = {"empty": b"", "one": b"\n", "ends": b"\r\nVALUE\r\n", "long": random.Random(1).randbytes(60)}, b""
    for key, content in samples.items():
        name, seal = cache.values.hashed(key)
        answer += b"VALUE %s 0 %d\r\n%s%s\r\n" % (
            name.encode(),
            HEADER.size + len(content),
            cache.values.header(seal, content),
            content,
        )
    answer += b"END\r\n"
    (connection,) = cache._fleet().clients.values()
    for cut in range(1, len(answer)):
        for pieces in ((answer[:cut], answer[cut:]), (answer[:cut], answer[cut : cut + 1], answer[cut + 1 :])):
            connection.sock = InPieces(*filter(None, pieces))
            assert cache.get_many(samples) == samples, pieces
    connection.sock = InPieces(*(answer[number : number + 1] for number in range(len(answer))))
    assert cache.get_many(samples) == samples


def test_an_operation_ends_with_its_deadline(server):
    """On the whole: a byte now and then does not prolong it, nor does a server that takes nothing."""
    content = bytes(200_000)  # which drips for 1,000 s
    for lie in (drip, drip_in_the_value, silence, a_line_without_end):
        with Liar(lie) as liar:
            assert patient(liar).set("key", content) == STORED
            cache = SampleCache(liar.address, deadline=0.1)
            assert cache.get("key") is None and liar.gets == 1
    cache = SampleCache(server.address, deadline=0.1)
    cache.set("key", content)
    server.stop()
    assert cache.set("key", bytes(30 << 20)) == NOT_STORED


def test_a_slow_name_server_costs_no_more_than_the_deadline(server, monkeypatch):
    real, answers = memcached.socket.getaddrinfo, threading.Event()

    def slow(host, *how):
        answers.wait(PATIENCE)
        return real("127.0.0.1", *how)

    monkeypatch.setattr(memcached.socket, "getaddrinfo", slow)
    monkeypatch.setattr(fleet, "PAUSE_SECONDS", 0)
    cache = SampleCache(f"cache.example:{server.port}", deadline=0.1)
    assert cache.set("key", b"1") == NOT_STORED
    answers.set()
    cache.deadline = PATIENT
    assert until(lambda: cache.set("key", b"1") == STORED) and cache.get("key") == b"1"


def test_an_address_that_is_known_is_not_waited_for(server, monkeypatch):
    """The name server answered once, and then no more: a new connection takes the address of before."""
    real, stopped, end = memcached.socket.getaddrinfo, threading.Event(), threading.Event()

    def stops(host, *how):
        if stopped.is_set():
            end.wait(PATIENCE)
        return real("127.0.0.1", *how)

    monkeypatch.setattr(memcached.socket, "getaddrinfo", stops)
    cache = SampleCache(f"cache.example:{server.port}", deadline=PATIENT)
    assert cache.set("key", b"1") == STORED
    stopped.set()
    cache.deadline = 1
    for client in cache._fleet().clients.values():
        client.close()
    assert cache.get("key") == b"1"
    end.set()


def until(condition, seconds=PATIENCE):
    """Whether it comes true; it is asked again and again."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("fault", ["killed", "stopped", "restarted empty", "all killed", "never there"])
def test_the_bytes_are_those_of_the_files_whatever_happens_to_a_server(folder, servers, fault, capsys):
    victims = {"all killed": servers, "never there": []}.get(fault, servers[:1])
    data = KSpeedFolder(str(folder), None, 0, listed(servers) + ",127.0.0.1:1" * (fault == "never there"))
    data.cache.deadline = 5  # which a healthy server on a busy machine does not miss
    paths = images_below(folder)

    def read():
        for path in paths:
            assert data.getBIN(path) == Path(path).read_bytes()
        for number in range(60):  # so that every server is asked
            data.cache.get(str(number))

    read()
    for victim in victims:
        victim.stop() if fault == "stopped" else victim.kill()
        if fault == "restarted empty":
            assert victim.start()
    read()
    read()
    for victim in victims:
        victim.go_on() if fault == "stopped" else victim.start() if fault != "restarted empty" else None
    data.cache._fleet().dead_timeout = 0  # the time to ask again has come
    read()
    read()
    assert [server for server in data.cache.servers.failing() if server[1] != 1] == []
    said = capsys.readouterr().out
    for one in servers:
        down = one in victims and fault != "restarted empty"
        assert said.count(f"warning: cache server {one.address} does not answer") == down
        assert said.count(f"cache server {one.address} answers again") == down


def test_what_a_dead_server_held_finds_room_on_the_others(servers):
    cache = patient(*servers)
    keys = [str(number) for number in range(40)]
    for key in keys:
        cache.set(key, b"1")
    servers[0].kill()
    missed = [key for key in keys if cache.get(key) is None]
    assert 0 < len(missed) < 30
    assert {cache.set(key, b"2") for key in missed} == {STORED}
    assert all(cache.get(key) for key in keys)


def _asks(cache):
    cache.get("key")


def test_an_outage_is_said_once_for_all_forked_workers_and_again_the_next_time(server, monkeypatch, capfd):
    monkeypatch.setattr(fleet, "PAUSE_SECONDS", 0)
    cache = patient(server)
    cache.set("key", b"1")
    for outage in (1, 2):
        server.kill()
        for _ in range(3):
            worker = multiprocessing.get_context("fork").Process(target=_asks, args=(cache,))
            worker.start()
            worker.join()
        server.start()
        assert cache.get("new") is None and until(lambda: cache.set("key", b"1") == STORED)
        said = capfd.readouterr().out
        assert (said.count("warning"), said.count("answers again")) == (1, 1), outage


# --- Logging in -------------------------------------------------------------------------------------------------------------


def test_the_right_password_opens(locked, capsys):
    cache = patient(locked, **LOGIN)
    assert cache.set("key", b"1") == STORED and cache.get("key") == b"1"
    locked.kill()
    locked.start()
    assert cache.get("key") is None and cache.set("key", b"2") == STORED and cache.get("key") == b"2"  # logged in again
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "login, words",
    [({"user": "admin", "password": "admin"}, "refuses the user or the password"), ({}, "wants a user and a password")],
)
def test_a_wrong_password_is_one_warning_that_says_so(locked, capsys, login, words):
    cache = patient(locked, **login)
    for number in range(5):
        assert cache.set(str(number), b"1") == NOT_STORED and cache.get(str(number)) is None
    said = capsys.readouterr().out
    assert said.count("warning") == 1 and words in said and "admin admin" not in said
    assert cache.servers.failing() == cache.servers.addresses


def test_a_server_that_asks_for_no_password_is_not_told_it(server, capsys):
    from pymemcache.client.base import Client

    cache = patient(server, **LOGIN)
    assert cache.set("key", b"1") == STORED and cache.get("key") == b"1"
    assert Client(server.address).get("login") is None and Client(server.address).stats()[b"curr_items"] == 1
    assert capsys.readouterr().out.count("asks for no password") == 1
    assert patient(server).get("key") is None, "another password, other keys"
