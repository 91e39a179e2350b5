"""Data from a bucket: fetched whole and verified or not at all, whatever the store does."""

import collections
import contextlib
import hashlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from common import progress, storage
from common.address import FETCHING, local_folder
from common.alive import patience
from common.errors import TrainingFailed, UserError
from common.storage import bucket, download, index, listing, obstore
from common.storage import etag as etag_module
from tests.tools.faultproxy import BODY_FAULTS, faults
from tests.tools.jobs import ROOT, environment
from tests.tools.stores import BIG, MIB, SMALL, names_in, same

pytestmark = pytest.mark.usefixtures("reachable", "the_secret_is_nowhere")


def test_importing_it_loads_neither_torch_nor_boto3():
    script = "import sys, common.storage; heavy = {'torch', 'boto3', 'common.run'} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment(), check=True)


def test_a_second_start_fetches_only_what_is_missing_or_changed(store, monkeypatch):
    client = store.client()
    with faults(store, lambda request: None, monkeypatch) as proxy:
        folder = storage.fetch("s3://data/set")
        assert folder == "input_dir/s3/data/set" and same(folder) and len(proxy.objects()) == 30
        os.unlink(f"{folder}/0/3.bin")
        with open(f"{folder}/0/4.bin", "a") as file:
            file.write("x")
        client.put_object(Bucket="data", Key="set/1/11.bin", Body=b"other")
        client.put_object(Bucket="data", Key="set/9/new.bin", Body=b"new")
        client.delete_object(Bucket="data", Key="set/2/22.bin")
        (wanted := dict(SMALL)).pop("set/2/22.bin")
        wanted.update({"set/1/11.bin": b"other", "set/9/new.bin": b"new"})
        storage.fetch("s3://data/set")
        assert same(folder, wanted), "what is gone in the bucket is gone in the folder"
        assert sorted(request.path for request in proxy.objects()[30:]) == [
            "/data/set/0/3.bin", "/data/set/0/4.bin", "/data/set/1/11.bin", "/data/set/9/new.bin"
        ]  # fmt: skip
        storage.fetch("s3://data/set")
        assert len(proxy.objects()) == 34
    client.delete_object(Bucket="data", Key="set/9/new.bin")
    for key in ("set/1/11.bin", "set/2/22.bin"):
        client.put_object(Bucket="data", Key=key, Body=SMALL[key])


def test_one_object_a_whole_bucket_and_parts_of_any_size(store, monkeypatch, tmp_path):
    client = store.client()
    client.create_bucket(Bucket="whole")
    client.put_object(Bucket="whole", Key="a/empty", Body=b"")
    client.put_object(Bucket="whole", Key="a/folder/", Body=b"")
    client.put_object(Bucket="whole", Key="a/ü and\u2009space?#%41", Body=b"odd")
    (tmp_path / "big").write_bytes(BIG)
    storage.publish(str(tmp_path / "big"), "s3://whole/in/parts")
    assert client.head_object(Bucket="whole", Key="in/parts")["ETag"].strip('"').endswith("-2")
    folder = storage.fetch("s3://whole", say=(said := []).append)
    assert names_in(folder) == ["empty", "parts", "ü and\u2009space?#%41"]
    assert Path(f"{folder}/in/parts").read_bytes() == BIG
    assert said[-1].endswith("all verified"), said
    assert Path(storage.fetch("s3://data/big/one", "elsewhere") + "/one").read_bytes() == BIG


def test_an_object_as_large_as_one_part_is_fetched_as_those_that_are_a_byte_smaller_and_larger(store, monkeypatch, capfd):
    monkeypatch.setattr(download, "PART", len(SMALL["set/1/15.bin"]))
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    assert same(storage.fetch("s3://data/set"))
    count = str(len(SMALL))
    assert re.findall(r"fetching .*: (\d+) of (\d+) objects", capfd.readouterr().out)[-1] == (count, count)


def test_a_large_object_goes_on_where_it_stopped(store, monkeypatch):
    with faults(store, lambda request: None, monkeypatch) as proxy:
        proxy.plan = lambda request: "denied" if request.headers.get("Range", "").startswith("bytes=16") else None
        with pytest.raises(UserError, match="403 AccessDenied"):
            storage.fetch("s3://data/big", "got")
        assert names_in("got") == [] and {index.hashed_name("one") + end for end in (".part", ".part.json")} < set(
            os.listdir(f"got/{FETCHING}")
        )
        before, proxy.plan = len(proxy.objects()), lambda request: None
        storage.fetch("s3://data/big", "got")
        assert len(proxy.objects()) == before + 1, "only the part that was missing"
    assert Path("got/one").read_bytes() == BIG and names_in("got") == ["one"]


DAMAGES = [*itertools.product(BODY_FAULTS, ("set", "big")), ("500", "set"), ("429", "set"), ("503", "big")]


@pytest.mark.parametrize("fault, prefix", [*DAMAGES, ("flip", "big without obstore"), ("stall", "big without obstore")])
def test_a_damaged_answer_is_asked_for_again(store, monkeypatch, fault, prefix):
    """The first answers for every object are broken; a stall is noticed within 15 s."""
    prefix, _, without = prefix.partition(" ")
    if without:
        monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr(patience, "LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(bucket, "read_timeout", lambda: 1)
    monkeypatch.setattr(obstore, "read_timeout", lambda: 1)
    seen = set()

    def plan(request):
        first = request.is_object and (request.path, request.headers.get("Range")) not in seen
        seen.add((request.path, request.headers.get("Range")))
        return fault if first and (fault != "stall" or len(seen) % 3 == 1) else None

    with faults(store, plan, monkeypatch) as proxy:
        storage.fetch(f"s3://data/{prefix}", "got")
        assert sum(request.fault == fault for request in proxy.log) > 0
    assert same("got") if prefix == "set" else Path("got/one").read_bytes() == BIG


def test_obstore_signs_for_the_region_of_a_profile_which_it_does_not_read(store, monkeypatch, tmp_path):
    (tmp_path / "config").write_text("[default]\nregion = cn-north-4\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_REGION")
    with faults(store, lambda request: None, monkeypatch) as proxy:
        storage.fetch("s3://data/set", "got")
        fast = [request for request in proxy.log if "object_store" in request.headers.get("User-Agent", "")]
        assert fast and all("/cn-north-4/s3/" in request.headers["Authorization"] for request in fast)


@pytest.mark.parametrize("fault", ["flip", "short"])
@pytest.mark.parametrize("key", ["set/0/1.bin", "big/one"])
def test_an_object_that_always_arrives_damaged_is_refused(store, monkeypatch, fault, key):
    monkeypatch.setattr(patience, "LONGEST_PAUSE", 0.06)
    monkeypatch.setenv(patience.VARIABLE, "3" if fault == "flip" else "1")
    refused = pytest.raises(TrainingFailed, match=r"damaged there or on the way|no good answer for [13] s")
    with faults(store, lambda request: fault if request.is_object else None, monkeypatch), refused:
        storage.fetch(f"s3://data/{key}", "got")
    assert names_in("got") == []


@pytest.mark.parametrize("key", ["swap/small", "swap/large", "swap/grown", "swap/shrunk"])
def test_an_object_replaced_during_the_download_is_fetched_as_it_is_now(store, monkeypatch, key):
    client, little, other = store.client(), b"little" * 9, BIG[::-1] + b"x"
    old = {"small": b"old", "large": BIG, "grown": little, "shrunk": BIG}
    new = {"small": b"newer", "large": other, "grown": BIG, "shrunk": little}
    kind = key.split("/")[1]
    client.put_object(Bucket="data", Key=key, Body=old[kind])
    replaced = threading.Lock()

    def plan(request):
        if request.is_object and replaced.acquire(blocking=False):
            client.put_object(Bucket="data", Key=key, Body=new[kind])

    with faults(store, plan, monkeypatch):
        storage.fetch(f"s3://data/{key}", "got")
    assert Path(f"got/{kind}").read_bytes() == new[kind] and names_in("got") == [kind]


def test_one_refusal_among_many_large_objects_ends_the_fetch(store, monkeypatch):
    """With parts of the others waiting for their turn."""
    monkeypatch.setattr(download, "PART", 65536)
    for number in range(6):
        store.client().put_object(Bucket="data", Key=f"many/{number}", Body=BIG[: 4 * MIB])
    refused = pytest.raises(UserError, match="403 AccessDenied")
    plan = lambda request: "denied" if request.is_object and request.path.endswith("3") else None  # noqa: E731
    with faults(store, plan, monkeypatch) as proxy, refused:
        storage.fetch("s3://data/many", "got")
    asked = collections.Counter(request.headers["Range"] for request in proxy.log if request.fault)
    assert asked and max(asked.values()) <= 2, "by either client once, and not again for three minutes"


def test_of_a_part_that_was_cut_off_only_what_is_there_is_read(tmp_path):
    parts = index.Parts(str(tmp_path / "x"), bucket.Item("x", 5000, "e"), 8 * MIB)
    parts.write(0, bytes(range(250)) * 20)
    os.truncate(tmp_path / "x.part", 1234)
    assert b"".join(map(bytes, parts.chunks(0, 1000))) == (bytes(range(250)) * 20)[:1234]


def test_a_write_that_takes_only_some_of_the_bytes_is_continued(tmp_path, monkeypatch):
    parts, real = index.Parts(str(tmp_path / "x"), bucket.Item("x", 5000, "e"), 8 * MIB), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, place: real(file, bytes(content[:700]), place))
    parts.write(0, bytes(range(250)) * 20)
    assert (tmp_path / "x.part").read_bytes() == bytes(range(250)) * 20


def test_an_object_that_has_come_keeps_no_file_open(tmp_path):
    """A process may have a thousand of them, and a bucket has more large objects."""
    index.Parts(str(tmp_path / "x"), bucket.Item("x", 5000, "e"), 8 * MIB).close()
    assert not [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}").startswith(str(tmp_path))]


def test_what_was_sent_in_parts_of_another_size_than_is_guessed_is_fetched_twice_and_then_compared_by_its_size(
    store, monkeypatch, capfd
):
    store.client().put_object(Bucket="data", Key="guessed/x", Body=(content := random.Random(0).randbytes(2500)))
    monkeypatch.setattr(etag_module, "PART_SIZES", [1000])
    monkeypatch.setattr(download, "PART", 1000)
    attempts, usual = [], download.Transfer._fetch_parts
    monkeypatch.setattr(download.Transfer, "_fetch_parts", lambda *given: attempts.append(1) or usual(*given))
    monkeypatch.setattr(
        download.Transfer,
        "_make_hasher",
        lambda _, item: etag_module.Hasher(f"{'0' * 32}-3", item.size, item.size, hashlib.md5),
    )
    assert (Path(storage.fetch("s3://data/guessed")) / "x").read_bytes() == content
    assert len(attempts) == 2 and "1 of them by size alone" in capfd.readouterr().out


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"{tmp_path}/file is a file, and a folder belongs there: move it away"):
        storage.fetch("s3://data/set", str(tmp_path / "file/x"))


def test_a_store_that_gives_no_digest_is_believed_by_size_and_says_so(monkeypatch, tmp_path):
    """An ETag that is no MD5, and parts of a size that nobody uses."""
    for etag, size in (("0x8DCA", 5), ("0" * 32 + "-3", 17)):
        hasher = etag_module.Hasher(bucket.Item("k", size, etag).digest, size, size)
        hasher.update(b"x" * size)
        assert hasher.matches() is None
    content = os.urandom(25 * MIB)
    parts = b"".join(hashlib.md5(content[begin : begin + 10 * MIB]).digest() for begin in range(0, len(content), 10 * MIB))
    etag = hashlib.md5(parts).hexdigest() + "-3"
    for part_size, right in ((10 * MIB, True), (9 * MIB, False)):
        hasher = etag_module.Hasher(etag, len(content), part_size)
        for begin in range(0, len(content), 8 * MIB):
            hasher.update(content[begin : begin + 8 * MIB])
        assert hasher.matches() is right


@pytest.mark.parametrize(
    "keys, words",
    [
        (["../x"], "cannot be the name of a file"),
        (["a//b"], "cannot be the name of a file"),
        (["a", "a/b"], "is an object and a folder"),
        ([".fetching/index.jsonl"], "cannot be the name of a file"),
        (["a/.Fetching/b"], "cannot be the name of a file"),
    ],
)
def test_names_that_lead_elsewhere_are_refused(keys, words):
    place = bucket.Bucket("s3://data/p")
    with pytest.raises(UserError, match=words):
        listing.items_by_path(place, [bucket.Item(f"p/{key}", 1, "e") for key in keys])


def test_an_object_may_have_the_longest_name_that_a_store_has():
    place, longest = bucket.Bucket("s3://data"), "/".join(["x" * 204] * 5)  # 1024 bytes
    assert list(listing.items_by_path(place, [bucket.Item(longest, 1, "e")])) == [longest]
    with pytest.raises(UserError, match="cannot be the name of a file"):
        listing.items_by_path(place, [bucket.Item(f"{longest}x", 1, "e")])


# --- Names, notes and links that somebody else has put there -------------------------------------------------------------


def put(store, name, contents):
    client = store.client()
    with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
        client.create_bucket(Bucket=name)
    for key, content in contents.items():
        client.put_object(Bucket=name, Key=key, Body=content)


def all_below(folder):
    return {
        os.path.relpath(os.path.join(where, name), folder): Path(where, name).read_bytes()
        for where, folders, names in os.walk(folder)
        if os.path.basename(where) != FETCHING
        for name in names
    }


def test_no_object_has_the_name_of_a_temporary_file(store):
    contents = {f"{number}{end}": f"{number}{end}".encode() for number in range(8) for end in ("", ".part", ".part.json")}
    contents.update({"big": BIG, "big.part": b"a", "big.part.json": b"b", ".fetch.lock": b"c", "x.unfinished": b"e"})
    put(store, "names", contents)
    for _ in range(2):
        assert all_below(storage.fetch("s3://names")) == contents


def test_notes_among_the_data_are_not_believed(store, tmp_path):
    """An object with the name under which a fetch kept its notes, below a folder that is fetched by itself later."""
    (tmp_path / "victim").write_text("mine")
    line = json.dumps({"name": "../" * 5 + "victim", "size": 1, "etag": "e", "mtime": 0}) + "\n"
    put(store, "planted", {f"set/{name}": line.encode() for name in ("index.jsonl", "a")})
    storage.fetch("s3://planted")
    assert os.path.samefile("input_dir/s3/planted/set/../../../../victim", tmp_path / "victim")
    storage.fetch("s3://planted/set")
    assert (tmp_path / "victim").read_text() == "mine"


def test_names_in_the_notes_are_judged_as_those_of_a_bucket(store, tmp_path):
    (tmp_path / "victim").write_text("mine")
    folder = storage.fetch("s3://data/set")
    with open(f"{folder}/{FETCHING}/index.jsonl", "a") as file:
        for entry in ("../" * 4 + "victim", str(tmp_path / "victim"), ["a"], None, f"{FETCHING}/lock"):
            file.write(json.dumps({"name": entry, "size": 1, "etag": "e", "mtime": 0}) + "\n")
        file.write("[" * 200_000 + "\n{}\n7\n\0\n")
    storage.fetch("s3://data/set")
    assert (tmp_path / "victim").read_text() == "mine" and same(folder)


@pytest.mark.parametrize("prefix, content", [("set", SMALL), ("big", {"set/one": BIG}), ("parts", {"set/in": BIG})])
def test_what_another_program_has_copied_is_verified_and_not_fetched(store, monkeypatch, tmp_path, prefix, content):
    """No notes are there. A file that is not what the store has is fetched."""
    if prefix == "parts":
        (tmp_path / "big").write_bytes(BIG)
        storage.publish(str(tmp_path / "big"), "s3://data/parts/in")
    folder = storage.fetch(f"s3://data/{prefix}", say=lambda text: None)
    os.unlink(f"{folder}/{FETCHING}/index.jsonl")
    damaged = sorted(content)[0].partition("/")[2]
    status = os.stat(f"{folder}/{damaged}")
    with faults(store, lambda request: None, monkeypatch) as proxy:
        storage.fetch(f"s3://data/{prefix}", say=(said := []).append)
        assert proxy.objects() == [] and f"{len(content)} were there" in said[-1], said
        os.unlink(f"{folder}/{FETCHING}/index.jsonl")
        with open(f"{folder}/{damaged}", "r+b") as file:
            file.write(b"other")
        os.utime(f"{folder}/{damaged}", ns=(status.st_atime_ns, status.st_mtime_ns))
        storage.fetch(f"s3://data/{prefix}", say=said.append)
        assert {request.path for request in proxy.objects()} == {f"/data/{prefix}/{damaged}"}
    assert same(folder, content)


@pytest.mark.parametrize("end, other", [(".part", "big/one.part"), (".part.json", "set/0/1.bin.part")])
def test_a_link_at_a_temporary_name_is_not_followed(store, tmp_path, end, other):
    contents = {"set/0/1.bin": SMALL["set/0/1.bin"], "big/one": BIG}
    put(store, "links", contents)
    (tmp_path / "victim").write_bytes(b"mine")
    for place in (*(f"{FETCHING}/{index.hashed_name(name)}{end}" for name in contents), other):
        (tmp_path / "got" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "got" / place).symlink_to(tmp_path / "victim")
    storage.fetch("s3://links", "got")
    assert (tmp_path / "victim").read_bytes() == b"mine"
    for name, content in contents.items():
        assert Path("got", name).read_bytes() == content and not Path("got", name).is_symlink()


@pytest.mark.parametrize("place", [FETCHING, f"{FETCHING}/index.jsonl", f"{FETCHING}/fetch.lock", "0"])
def test_a_link_in_place_of_our_notes_or_of_a_folder_is_refused(store, tmp_path, place):
    (outside := tmp_path / "outside").mkdir()
    (victim := outside / "victim").write_bytes(b"mine")
    (tmp_path / "got" / place).parent.mkdir(parents=True)
    (tmp_path / "got" / place).symlink_to(victim if "/" in place else outside)
    with pytest.raises(UserError, match=rf"got/{place} is a link"):
        storage.fetch("s3://data/set", "got")
    assert victim.read_bytes() == b"mine" and os.listdir(outside) == ["victim"]


def test_a_file_that_is_gone_at_the_end_is_named(store, monkeypatch):
    """Another program, or a disk that cannot tell A from a, takes a file away while others are fetched."""
    first = Path("got/0/0.bin")

    def plan(request):
        if request.path.endswith("2/29.bin"):
            while not first.exists():
                time.sleep(0.01)
            first.unlink()

    failed = pytest.raises(TrainingFailed, match=r"1 of 30 objects of s3://data/set are not in got, the first is 0/0.bin")
    with faults(store, plan, monkeypatch), failed:
        storage.fetch("s3://data/set", "got")
    storage.fetch("s3://data/set", "got")
    assert same("got")


@pytest.mark.parametrize("url", [f"https://h/a/{FETCHING}", "https://h/a/.."])
def test_a_file_that_would_be_our_notes_is_refused(url):
    with pytest.raises(UserError, match="cannot be the name of a f"):
        storage.fetch(url)


ADDRESSES = [
    "s3://b/a", "s3://b/a/b", "s3://b//a", "s3://b/a//b", "s3://b/a/./b", "s3://b/a/../b", "s3://B/a", "obs://b/a",
    "s3://b/lr#0.1", "s3://b/lr#0.01", "s3://b/lr", "s3://b/lr?0.1", "s3://b/lr?0.01", "s3://b/%", "s3://b/%25", "s3://b/",
    f"s3://b/{FETCHING}/x", f"s3://b/%{FETCHING}/x", "s3://b/%/x", "https://h/a.gz?v=1", "https://h/a.gz?v=2", "https://h/d/a.gz",
    "https://h:81/a.gz", "https://h:82/a.gz", "s3://b/token=1", "s3://b/token=2",
]  # fmt: skip


def test_of_two_addresses_nothing_is_in_one_folder():
    found = {local_folder(url, "root") for url in ADDRESSES}
    assert len(found) == len(ADDRESSES)
    for folder in found:
        assert os.path.normpath(folder) == folder and folder.startswith("root/") and FETCHING not in folder.split("/")
    assert local_folder("s3://b/a/", "root") == local_folder("s3://b/a", "root") == "root/s3/b/a"


def test_keys_with_any_signs_are_each_fetched(store):
    for number, key in enumerate(("odd/lr#0.1/x", "odd/lr#0.01/x", "odd/g//x", "odd/h/x", "odd/q?1/x", "odd/./x")):
        store.client().put_object(Bucket="data", Key=key, Body=b"%d" % number)
        folder = storage.fetch(f"s3://data/{key[:-1]}")
        assert Path(folder, "x").read_bytes() == b"%d" % number


def test_what_an_unfinished_file_has_is_no_more_than_its_object(tmp_path):
    item = bucket.Item("data", 100, "")
    path = Path(index.unfinished_path(str(tmp_path), "data") + ".part")
    path.parent.mkdir()
    path.write_bytes(b"ten bytes ")
    assert 10 <= listing._bytes_on_disk(str(tmp_path), "data", item, ".part") <= 100


def test_a_full_disk_is_known_before_the_first_byte(store, monkeypatch):
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*real(path)[:3], 100, 100, *real(path)[5:]]))
    with faults(store, lambda request: None, monkeypatch) as proxy:
        with pytest.raises(
            UserError, match=r"0 MiB free, 20 MiB are to be fetched: start the job in a folder on a larger disk"
        ):
            storage.fetch("s3://data/big", "got")
        assert proxy.objects() == []


def test_a_large_object_of_which_the_store_gives_no_digest_is_compared_by_its_size(store, monkeypatch):
    """As one that is encrypted, without a checksum."""
    monkeypatch.setattr(etag_module, "is_encrypted", lambda answer: True)
    monkeypatch.setattr(etag_module, "checksum", lambda answer: None)
    storage.fetch("s3://data/big", "got", say=(said := []).append)
    assert Path("got/one").read_bytes() == BIG and said[-1].endswith("by size alone (the store gives no digest)"), said
