"""The shared sample cache, on real memcached servers: whatever they do, a job gets the bytes of its files."""

import contextlib
import dataclasses
import io
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from common.errors import UserError
from datasets import cache as cache_module
from datasets import fleet, imagenet, kspeed, tree
from datasets.cache import SampleCache, addresses
from launch import kspeed as verb
from tests.jobs import ROOT, environment
from tests.memcached import Liar, Memcached

LOGIN = {"user": "admin", "password": "canary-5d41402a"}
PATIENT = 10  # a deadline that a loaded machine does not miss


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """train/ and val/ with two classes each; the first names are the same in both."""
    monkeypatch.chdir(tmp_path)
    for variable in ("KSPEED_IPLIST", "KSPEED_PASSWORD"):
        monkeypatch.delenv(variable, raising=False)
    for split, count in (("train", 8), ("val", 2)):
        for label in ("cat", "dog"):
            for number in range(count):
                where = tmp_path / "photos" / split / label
                where.mkdir(parents=True, exist_ok=True)
                pixels = np.random.default_rng([len(split), len(label), ord(label[0]), number]).integers(
                    0, 255, (40, 50, 3), np.uint8
                )
                Image.fromarray(pixels).save(where / f"{number}.jpg", quality=80 + number)
    return tmp_path / "photos"


@pytest.fixture
def servers():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Memcached("-m", 64)) for _ in range(3)]


@pytest.fixture
def server():
    with Memcached() as one:
        yield one


def listed(servers):
    return ",".join(one.address for one in servers)


def patient(*servers, **login):
    return SampleCache(listed(servers), deadline=PATIENT, **login)


def images_below(folder):
    return sorted(str(path) for path in folder.rglob("*.jpg"))


def rewrite_unseen(path):
    """Other bytes, and the same name, size and time: who still gets the old ones got them from the cache."""
    about, old = os.stat(path), Path(path).read_bytes()
    Path(path).write_bytes(bytes(len(old)))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    return old


# --- The cache itself ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("login", [{}, LOGIN], ids=["open", "keyed"])
def test_what_is_set_is_got(servers, login):
    cache = patient(*servers, **login)
    generator = random.Random(0)
    values = {f"key {size}": generator.randbytes(size) for size in (0, 1, 27, 28, 99, 100, 101, 128, 5000, 110_000, 900_000)}
    for key, content in values.items():
        assert cache.get(key) is None and not cache.has(key)
        assert cache.set(key, content) == fleet.STORED
    for number in range(60):
        cache.set(f"more {number}", b"1")
    for key, content in values.items():
        found = cache.get(key)
        assert found == content and type(found) is bytes and cache.has(key)
    assert all(told["curr_items"] for told in cache.status().values()), "every server has a part"
    assert cache.delete("key 1") and cache.get("key 1") is None and not cache.delete("key 1")


def test_a_key_can_hold_anything_and_command_nothing(server):
    cache = patient(server)
    keys = ["a b", "a\r\nflush_all\r\n", "\0", "x" * 5000, "\udcff/ä", b"\xff\xfe", "", " ", "a"]
    for number, key in enumerate(keys):
        assert cache.set(key, b"%d" % number) == fleet.STORED
    assert [cache.get(key) for key in keys] == [b"%d" % number for number in range(len(keys))]
    assert cache.status()[addresses(server.address)[0]]["curr_items"] == len(keys)


def test_what_a_server_takes_for_too_large_is_not_cached_and_not_sent_again(server, monkeypatch):
    cache = patient(server)
    assert cache.set("large", bytes(3 << 20)) == fleet.TOO_LARGE
    assert cache.get("large") is None and cache.set("small", b"1") == fleet.STORED
    before = cache.status()[cache.servers[0]]["bytes_read"]
    assert cache.set("larger", bytes(4 << 20)) == fleet.TOO_LARGE
    assert cache.status()[cache.servers[0]]["bytes_read"] - before < 1000
    monkeypatch.setattr(cache_module, "LARGEST", 10)
    assert cache.set("larger than any", bytes(11)) == fleet.TOO_LARGE


def test_threads_have_connections_of_their_own(servers):
    cache = patient(*servers)
    contents = {str(number): random.Random(number).randbytes(5000 + number) for number in range(60)}
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(cache.set, contents, contents.values())) == {fleet.STORED}
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
    for login, words in (({"user": "a"}, "both"), ({"password": "a"}, "both"), ({"user": "a b", "password": "c"}, "no space")):
        with pytest.raises(UserError, match=words):
            SampleCache("a", **login)
    monkeypatch.delenv("KSPEED_PASSWORD", raising=False)
    with pytest.raises(UserError, match="set KSPEED_PASSWORD"):
        kspeed.open_cache("a", "admin")
    with pytest.raises(UserError, match="second argument"):
        kspeed.KSpeedFolder(tmp_path, "array", 4, "a")
    monkeypatch.setitem(sys.modules, "pymemcache", None)
    with pytest.raises(UserError, match=r"pip install \.\[cache\]"):
        SampleCache("a")


# --- What a server may do --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("login", [{}, LOGIN], ids=["open", "keyed"])
def test_of_ten_thousand_damaged_values_none_is_accepted(server, login, monkeypatch):
    from pymemcache.client.base import Client

    monkeypatch.setattr(cache_module, "FEW", 10**9)
    cache, generator, raw = patient(server, **login), random.Random(1), Client(server.address)
    intruder = patient(server, **({"user": "admin", "password": "guess"} if login else {}))
    content, other = generator.randbytes(400), generator.randbytes(400)
    cache.set("key", content)
    cache.set("other", other)
    (address, seal), (elsewhere, _) = cache._named("key"), cache._named("other")
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
        lambda: good[: fleet.HEADER.size] + generator.randbytes(400),
        lambda: good[: fleet.HEADER.size] + other,
        lambda: swapped,
        lambda: b"",
        lambda: intruder.header(generator.randbytes(32), other) + other,
        lambda: content,
    ]
    if login:  # all is known but the password
        kinds.append(lambda: intruder.header(intruder._named("key")[1], other) + other)
        kinds.append(lambda: SampleCache(server.address).header(seal, other) + other)
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
        data = kspeed.KSpeedFolder(str(folder), None, 0, f"{server.address},{liar.address}")
        data.cache, paths = patient(server, liar), images_below(folder)
        data.preload(paths)  # of what it does not have it says so, and lies about the rest
        data.cache = SampleCache(listed([server, liar]), deadline=0.3 if lie in TIMED else PATIENT)
        for path in paths * 3:
            assert data.getBIN(path) == Path(path).read_bytes()
        assert 0 < liar.gets <= 2 * cache_module.FEW
    assert capsys.readouterr().out.count(f"warning: cache server {liar.address}") == 1


def test_an_operation_ends_with_its_deadline(server):
    """On the whole: a byte now and then does not prolong it, nor does a server that takes nothing."""
    content = bytes(2000)  # which drips for 10 s
    for lie in (drip, drip_in_the_value, silence, a_line_without_end):
        with Liar(lie) as liar:
            assert patient(liar).set("key", content) == fleet.STORED
            cache = SampleCache(liar.address, deadline=0.1)
            began = time.monotonic()
            assert cache.get("key") is None
            assert time.monotonic() - began < 4 and liar.gets == 1
    cache = SampleCache(server.address, deadline=0.1)
    cache.set("key", content)
    server.stop()
    began = time.monotonic()
    assert cache.set("key", bytes(30 << 20)) == fleet.NOT_STORED
    assert time.monotonic() - began < 4


def test_a_slow_name_server_costs_no_more_than_the_deadline(server, monkeypatch):
    real, answers = fleet.socket.getaddrinfo, threading.Event()

    def slow(host, *how):
        answers.wait(60)
        return real("127.0.0.1", *how)

    monkeypatch.setattr(fleet.socket, "getaddrinfo", slow)
    monkeypatch.setattr(fleet, "LEFT_ALONE", 0)
    cache = SampleCache(f"cache.example:{server.port}", deadline=0.1)
    began = time.monotonic()
    assert cache.set("key", b"1") == fleet.NOT_STORED and time.monotonic() - began < 2
    answers.set()
    cache.deadline = PATIENT
    assert until(lambda: cache.set("key", b"1") == fleet.STORED) and cache.get("key") == b"1"


def until(condition, seconds=20):
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
    data = kspeed.KSpeedFolder(str(folder), None, 0, listed(servers) + ",127.0.0.1:1" * (fault == "never there"))
    data.cache.deadline = 1
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
    assert [server for server in data.cache.unreached() if server[1] != 1] == []
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
    assert {cache.set(key, b"2") for key in missed} == {fleet.STORED}
    assert all(cache.get(key) for key in keys)


def _asks(cache):
    cache.get("key")


def test_an_outage_is_said_once_for_all_forked_workers_and_again_the_next_time(server, monkeypatch, capfd):
    monkeypatch.setattr(fleet, "LEFT_ALONE", 0)
    cache = patient(server)
    cache.set("key", b"1")
    for outage in (1, 2):
        server.kill()
        for _ in range(3):
            worker = multiprocessing.get_context("fork").Process(target=_asks, args=(cache,))
            worker.start()
            worker.join()
        server.start()
        assert cache.get("new") is None and until(lambda: cache.set("key", b"1") == fleet.STORED)
        said = capfd.readouterr().out
        assert (said.count("warning"), said.count("answers again")) == (1, 1), outage


# --- Logging in -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def locked(tmp_path):
    (tmp_path / "users").write_text("{user}:{password}\n".format(**LOGIN))
    with Memcached("-Y", tmp_path / "users") as one:
        yield one


def test_the_right_password_opens(locked, capsys):
    cache = patient(locked, **LOGIN)
    assert cache.set("key", b"1") == fleet.STORED and cache.get("key") == b"1"
    locked.kill()
    locked.start()
    assert cache.get("key") is None and cache.set("key", b"2") == fleet.STORED and cache.get("key") == b"2"  # logged in again
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "login, words",
    [({"user": "admin", "password": "admin"}, "refuses the user or the password"), ({}, "wants a user and a password")],
)
def test_a_wrong_password_is_one_warning_that_says_so(locked, capsys, login, words):
    cache = patient(locked, **login)
    for number in range(5):
        assert cache.set(str(number), b"1") == fleet.NOT_STORED and cache.get(str(number)) is None
    said = capsys.readouterr().out
    assert said.count("warning") == 1 and words in said and "admin admin" not in said
    assert cache.unreached() == cache.servers


def test_a_server_that_asks_for_no_password_is_not_told_it(server, capsys):
    from pymemcache.client.base import Client

    cache = patient(server, **LOGIN)
    assert cache.set("key", b"1") == fleet.STORED and cache.get("key") == b"1"
    assert Client(server.address).get("login") is None and Client(server.address).stats()[b"curr_items"] == 1
    assert capsys.readouterr().out.count("asks for no password") == 1
    assert patient(server).get("key") is None, "another password, other keys"


# --- Data sets ----------------------------------------------------------------------------------------------------------------


def test_it_stands_in_for_imagefolder(folder, server):
    arguments = (None, 2, server.address, None, None)
    ours = kspeed.KSpeedImageFolder(str(folder / "train"), *arguments, torchvision.transforms.PILToTensor())
    theirs = torchvision.datasets.ImageFolder(str(folder / "train"), torchvision.transforms.PILToTensor())
    ours.folder.cache.deadline = PATIENT
    assert isinstance(ours, torchvision.datasets.ImageFolder) and len(ours) == len(theirs) == 16
    for name in ("classes", "class_to_idx", "samples", "imgs", "targets", "extensions", "root"):
        assert getattr(ours, name) == getattr(theirs, name)
    for data in (ours, pickle.loads(pickle.dumps(ours))):  # the first fills, the second is answered
        for (image, label), (expected, target) in zip(data, theirs):
            assert torch.equal(image, expected) and label == target
    assert ours.loader(ours.samples[0][0]).mode == "RGB"
    path = ours.samples[3][0]
    old = rewrite_unseen(path)
    assert ours.folder.getBIN(path) == old and ours.folder.size(path) == len(old)
    assert np.array_equal(ours.folder.getPIL(path), Image.open(io.BytesIO(old)).convert("RGB"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_gives_the_same_batches(folder, servers, workers):
    transform = torchvision.transforms.PILToTensor()
    ours = kspeed.KSpeedImageFolder(str(folder / "train"), None, 5, listed(servers), None, None, transform)
    ours.folder.cache.deadline = PATIENT
    ours.preload()
    for path, _ in ours.samples:
        assert ours.folder.cache.has(kspeed.sample_key(ours.root, path, os.stat(path)))
    theirs = torchvision.datasets.ImageFolder(str(folder / "train"), transform)
    expected = list(torch.utils.data.DataLoader(theirs, 5))
    for path, _ in ours.samples:
        rewrite_unseen(path)
    for (images, labels), (one, other) in zip(torch.utils.data.DataLoader(ours, 5, num_workers=workers), expected):
        assert torch.equal(images, one) and torch.equal(labels, other)


def test_a_changed_file_is_read_again(folder, server):
    data = kspeed.KSpeedFolder(folder / "train", iplist=[server.address])
    data.cache.deadline = PATIENT
    path = str(folder / "train" / "cat" / "0.jpg")
    first = data.getBIN(path)
    Path(path).write_bytes(b"x" * len(first))
    os.utime(path, ns=(1, 1))
    assert data.getBIN(path) == b"x" * len(first)
    Path(path).write_bytes(b"longer" * len(first))
    os.utime(path, ns=(1, 1))
    assert data.getBIN(path) == b"longer" * len(first)
    os.remove(path)
    with pytest.raises(FileNotFoundError):
        data.getBIN(path)


def test_nothing_is_kept_of_a_file_that_is_being_written(folder, server):
    cache, path = patient(server), str(folder / "train" / "cat" / "0.jpg")

    def read():
        content = Path(path).read_bytes()
        Path(path).write_bytes(content + b"more")
        return content

    content = Path(path).read_bytes()
    assert kspeed.read_through(cache, str(folder), path, read) == content
    assert cache.status()[cache.servers[0]]["curr_items"] == 0


def test_two_files_of_one_name_size_and_time_are_told_apart(folder, server):
    one, other = (kspeed.KSpeedFolder(folder / split, iplist=server.address) for split in ("train", "val"))
    for data, content in ((one, b"1"), (other, b"2")):
        data.cache.deadline = PATIENT
        path = os.path.join(data.root, "cat", "0.jpg")
        Path(path).write_bytes(content)
        os.utime(path, ns=(1, 1))
    for _ in range(2):
        assert one.getBIN(os.path.join(one.root, "cat", "0.jpg")) == b"1"
        assert other.getBIN(os.path.join(other.root, "cat", "0.jpg")) == b"2"


def test_however_the_folder_is_written_the_key_is_the_same(folder, monkeypatch):
    path = folder / "train" / "cat" / "0.jpg"
    about = os.stat(path)
    expected = kspeed.sample_key(str(folder / "train"), str(path), about)
    monkeypatch.chdir(folder)
    assert kspeed.sample_key("train", "train/cat/0.jpg", about) == expected
    assert kspeed.sample_key("./train/", "./train//cat/0.jpg", about) == expected
    os.symlink(folder, folder.parent / "elsewhere")
    assert kspeed.sample_key(str(folder.parent / "elsewhere" / "train"), str(path), about) != expected


def test_a_tree_gives_its_photographs_through_the_cache(folder, servers):
    plain = tree.load(str(folder / "train"))
    cached = kspeed.CachedTree.of(plain, patient(*servers))
    assert (cached.folder, cached.names, len(cached), cached.describe()) == (
        plain.folder,
        plain.names,
        len(plain),
        plain.describe(),
    )
    expected = [plain.read(number) for number in range(len(plain))]
    assert [cached.read(number) for number in range(len(plain))] == expected
    for name in plain.names:
        rewrite_unseen(os.path.join(plain.folder, name))
    assert (
        [cached.read(number) for number in range(len(plain))]
        == expected
        != [plain.read(number) for number in range(len(plain))]
    )
    some = pickle.loads(pickle.dumps(imagenet.spread(cached, 4)))
    assert [some.read(number) for number in range(4)] == expected[::4]
    assert dataclasses.replace(cached, folder="elsewhere").cache is cached.cache
    data = kspeed.KSpeedFolder(folder / "train", iplist=listed(servers))
    data.cache.deadline = PATIENT
    assert [data.getBIN(plain.path(number)) for number in range(len(plain))] == expected, "the keys are the same"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_photo_jobs_batches_are_the_same(folder, servers, workers):
    plain = tree.load(str(folder / "train"))
    cached = kspeed.CachedTree.of(plain, patient(*servers))
    ids = np.arange(10)
    for files in (plain, cached, cached):
        data = imagenet.Photos(files, 24, True, 3)
        batches = torch.utils.data.DataLoader(data, sampler=[(0, ids), (1, ids)], batch_size=None, num_workers=workers)
        found = [images for images, _, _ in batches]
        if files is plain:
            expected = found
        assert all(map(torch.equal, found, expected))


# --- DALI -----------------------------------------------------------------------------------------------------------------------


def epoch_of(callable_, batch_size, epoch):
    """The labels and contents that it gives in an epoch, as DALI asks for them."""
    found = []
    for number in range(10**6):
        try:
            found.append(callable_(types.SimpleNamespace(idx_in_epoch=number, iteration=number // batch_size, epoch_idx=epoch)))
        except StopIteration:
            return [(sample.tobytes(), int(label[0])) for sample, label in found]


@pytest.mark.parametrize("shards, batch_size", [(1, 4), (2, 3), (3, 2), (3, 5), (16, 1)])
def test_the_shards_of_the_callable_are_disjoint_and_all_of_an_epoch(folder, server, shards, batch_size):
    root = folder / "train"
    parts = [kspeed.KSpeedCallable(str(root), batch_size, shard, shards, server.address) for shard in range(shards)]
    files = tree.load(str(root))
    known = {files.read(number): (number, files.labels[number]) for number in range(len(files))}
    assert len(known) == 16
    orders = []
    for epoch in (0, 1, 0):
        numbers = []
        for part in parts:
            found = epoch_of(part, batch_size, epoch)
            assert len(found) == part.full_iters * batch_size == 16 // shards // batch_size * batch_size
            assert all(known[content][1] == label for content, label in found)
            numbers.append([known[content][0] for content, _ in found])
        whole = [number for part in numbers for number in part]
        assert len(set(whole)) == len(whole)
        order = np.random.default_rng(seed=42 + epoch).permutation(16)
        assert numbers == [order[16 // shards * shard :][: len(numbers[0])].tolist() for shard in range(shards)]
        orders.append(whole)
    assert orders[0] == orders[2] != orders[1]


def test_too_few_images_for_a_batch_are_refused(folder):
    with pytest.raises(UserError, match="16 images make no batch of 9 for each of 2 shards"):
        kspeed.KSpeedCallable(str(folder / "train"), 9, 0, 2, "127.0.0.1:1")


def test_dali_asks_it_in_spawned_workers(folder, servers):
    from nvidia.dali import fn, pipeline_def, types

    callback = kspeed.KSpeedCallable(str(folder / "train"), 4, 1, 2, listed(servers), **LOGIN)
    callback.cache.deadline = PATIENT

    @pipeline_def(batch_size=4, num_threads=1, device_id=None, py_num_workers=1, py_start_method="spawn")
    def build():
        samples, labels = fn.external_source(
            source=callback, num_outputs=2, batch=False, parallel=True, dtype=[types.UINT8, types.INT32], device="cpu"
        )
        return samples, labels

    pipeline = build()
    pipeline.build()
    files, asked = tree.load(str(folder / "train")), set()
    for epoch in range(2):
        order = np.random.default_rng(seed=42 + epoch).permutation(16)[8:].tolist()
        for batch in (order[:4], order[4:]):
            samples, labels = pipeline.run()
            for place, number in enumerate(batch):
                assert np.array(samples.at(place)).tobytes() == files.read(number)
                assert np.array(labels.at(place)).tolist() == [files.labels[number]]
        with pytest.raises(StopIteration):
            pipeline.run()
        pipeline.reset()
        asked.update(order)
    cached = sum(told["curr_items"] for told in callback.cache.status().values())
    assert len(asked) <= cached <= 16, "the workers went through the cache"


# --- The vendor's own ---------------------------------------------------------------------------------------------------------------


def test_the_vendors_package_is_used_where_it_is(folder, tmp_path, monkeypatch):
    assert kspeed.engine() is kspeed
    package = tmp_path / "site" / "kspeed" / "utils" / "data"
    package.mkdir(parents=True)
    for place in (package, package.parent, package.parent.parent):
        (place / "__init__.py").touch()
    (package / "kspeeddataset.py").write_text(
        "class KSpeedFolder:\n    def __init__(self, *arguments):\n        self.arguments = arguments\n"
        "    def getBIN(self, path):\n        return b'vendor ' + path.encode()\n"
        "class KSpeedImageFolder(KSpeedFolder):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    try:
        assert kspeed.engine().KSpeedImageFolder.__module__ == "kspeed.utils.data.kspeeddataset"
        part = kspeed.KSpeedCallable(str(folder / "train"), 4, 0, 1, "127.0.0.1:1", **LOGIN)
        sample, _ = part(types.SimpleNamespace(idx_in_epoch=0, iteration=0, epoch_idx=0))
        assert sample.tobytes().startswith(b"vendor " + os.fsencode(folder / "train"))
        assert part.dataset.arguments == (str(folder / "train"), None, 0, "127.0.0.1:1", *LOGIN.values())
        (package / "kspeeddataset.py").write_text("import a_part_of_the_vendors_that_is_missing\n")
        forget_vendors()
        with pytest.raises(ModuleNotFoundError, match="a_part_of_the_vendors"):
            kspeed.engine()
    finally:
        forget_vendors()


def forget_vendors():
    for name in [name for name in sys.modules if name.split(".")[0] == "kspeed"]:
        del sys.modules[name]


# --- python -m launch kspeed ------------------------------------------------------------------------------------------------------------


def run(capsys, *words):
    """(exit code, stdout, stderr)"""
    code = verb.main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_a_tree_is_preloaded_loaded_displayed_and_removed(folder, servers, capsys):
    there = ["--iplist", listed(servers)]
    other = patient(*servers)
    other.set("of somebody else", b"1")
    code, out, err = run(capsys, "preload", folder, *there)
    assert (code, err) == (0, "") and out.startswith("20 images, ") and "0 were there, 20 put there" in out
    assert "20 were there, 0 put there" in run(capsys, "preload", folder, *there)[1]
    plain = kspeed.KSpeedFolder(folder / "train", iplist=listed(servers))
    paths = images_below(folder / "train")
    expected = {path: rewrite_unseen(path) for path in paths}
    plain.cache.deadline = PATIENT
    assert {path: plain.getBIN(path) for path in paths} == expected, "what was preloaded is what a job asks for"
    for path, content in expected.items():
        about = os.stat(path)
        Path(path).write_bytes(content)
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))

    code, out, err = run(capsys, "display", folder, *there)
    assert (code, err) == (0, "") and len(out.splitlines()) == 4 and "20 of 20 images" in out
    for one, line in zip(servers, out.splitlines()):
        assert line.startswith(one.address) and " up " in line and "evictions 0, memcached 1." in line and "of 67.1 MB" in line

    key = kspeed.sample_key(str(folder / "train"), paths[0], os.stat(paths[0]))
    other.delete(key)
    assert "19 hits, 1 misses, 1 put there" in run(capsys, "load", folder, *there)[1]
    code, out, err = run(capsys, "remove", folder, *there)
    assert (code, err) == (0, "") and out.startswith("20 images deleted") and other.get("of somebody else") == b"1"
    assert "0 of 20 images" in run(capsys, "display", folder, *there)[1]


def test_load_notices_a_damaged_value_and_preload_does_not(folder, server, capsys):
    from pymemcache.client.base import Client

    run(capsys, "preload", folder / "val", "--iplist", server.address)
    path = images_below(folder / "val")[0]
    cache = patient(server)
    key = kspeed.sample_key(str(folder / "val"), path, os.stat(path))
    Client(server.address).set(cache._named(key)[0], b"damaged", noreply=False)
    assert "4 were there, 0 put there" in run(capsys, "preload", folder / "val", "--iplist", server.address)[1]
    assert "3 hits, 1 misses, 1 put there" in run(capsys, "load", folder / "val", "--iplist", server.address)[1]
    assert cache.get(key) == Path(path).read_bytes()


def test_what_is_too_large_or_unreadable_is_counted(folder, server, capsys):
    (folder / "val" / "cat" / "large.jpg").write_bytes(bytes(2_000_000))
    (folder / "val" / "cat" / "gone.jpg").symlink_to("nowhere")
    code, out, _ = run(capsys, "preload", folder / "val", "--iplist", server.address)
    assert code == 0 and "4 put there, 1 refused as too large (memcached -I), 1 unreadable" in out


def test_a_server_that_cannot_be_reached_is_exit_code_1(folder, servers, capsys):
    servers[0].kill()
    code, out, err = run(capsys, "preload", folder, "--iplist", listed(servers[:2]))
    assert code == 1 and "20 put there" in out and err == f"error: no help from {servers[0].address}\n"
    code, out, err = run(capsys, "display", "--iplist", listed(servers[:2]))
    assert code == 1 and f"{servers[0].address:24} down\n" in out and " up " in out
    code, out, err = run(capsys, "load", folder, "--iplist", servers[0].address)
    assert code == 1 and err == "error: no cache server answers\n"


def test_mistakes_of_the_user_are_exit_code_2(folder, capsys, monkeypatch):
    (folder / "empty").mkdir()
    for words, expected in (
        (["preload", folder], "no cache server is given"),
        (["preload", folder, "--iplist", "a:b"], "'a:b' is no cache server"),
        (["load", folder, "--iplist", "a", "--user", "admin"], "the password of the cache's user admin is missing"),
    ):
        code, _, err = run(capsys, *words)
        assert code == 2 and err.startswith(f"error: {expected}") and err.count("\n") == 1
    with Memcached() as server:
        for root, expected in (("nowhere", "does not exist"), (folder / "empty", "holds no image")):
            code, _, err = run(capsys, "remove", root, "--iplist", server.address)
            assert code == 2 and expected in err
    for words in (["preload"], ["preload", folder, "--threads", 0]):
        with pytest.raises(SystemExit) as left:
            run(capsys, *words)
        assert left.value.code == 2


def test_it_is_a_verb_and_takes_the_password_from_the_environment(folder, locked, capsys, monkeypatch):
    env = environment(KSPEED_PASSWORD=LOGIN["password"], KSPEED_IPLIST=locked.address)
    command = [sys.executable, "-m", "launch", "kspeed", "preload", folder, "--user", "admin"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "20 put there" in done.stdout and LOGIN["password"] not in done.stdout + done.stderr
    monkeypatch.setenv("KSPEED_PASSWORD", "wrong")
    code, out, err = run(capsys, "load", folder, "--user", "admin", "--iplist", locked.address)
    assert code == 1 and "refuses the user or the password" in out and err == "error: no cache server answers\n"
