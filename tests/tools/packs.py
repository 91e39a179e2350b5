"""Packs of photographs in the tests: made, in a store, damaged, and as they arrive."""

import contextlib
import filecmp
import io
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.machine.child import Child
from datasets.packs import arrival
from launch.pack import command as pack
from tests.tools.jobs import (
    NETWORK,
    ROOT,
    Popen,
    environment,
)

SMALL_SHARDS = 0.05  # MiB: about eight of the pictures below


def encoded(seed, form="JPEG", mode="RGB"):
    """Noise, so that a file has several kilobytes."""
    size = (30 + 3 * (seed % 11), 70 - seed % 7, 3)
    picture = Image.fromarray(np.random.default_rng(seed).integers(0, 256, size, np.uint8)).convert(mode)
    picture.save(buffer := io.BytesIO(), form)
    return buffer.getvalue()


def write_tree(root, count=60, other=0):
    for split, number in [("train", number) for number in range(count)] + [("val", number) for number in range(12)]:
        where = root / split / f"n{number % 3}.of.three" / ("deeper" if number % 5 == 0 else "")
        where.mkdir(parents=True, exist_ok=True)
        mode = "CMYK" if number == 7 else "RGB"
        form = {4: "PNG", 9: "WEBP"}.get(number, "JPEG")
        (where / f"picture.{number:02d}.JPEG").write_bytes(encoded(number + other, form, mode))
    (root / "train" / "n0.of.three" / "cut.JPEG").write_bytes(encoded(1)[:-500])
    (root / "train" / "n1.of.three" / "a\udcff.JPEG").write_bytes(encoded(2))
    (root / "val" / "n1.of.three" / "empty.png").write_bytes(b"")
    return root


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return write_tree(tmp_path_factory.mktemp("photographs"))


def settings(form="original", shard_mb=SMALL_SHARDS, workers=2, overwrite=False, max_megapixels=80, seed=0):
    return types.SimpleNamespace(**locals())


@pytest.fixture(scope="session")
def whole(root, tmp_path_factory):
    """A pack that nobody may change."""
    pack.pack(str(root), str(folder := tmp_path_factory.mktemp("pack")), settings())
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "pack"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def contents(folder):
    """{name: bytes} of what readers see."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")}


def run(*options, check=0):
    """(what the verb says, its errors)"""
    code, said, errors = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        try:
            code = pack.main([*map(str, options)])
        except SystemExit as ended:
            code = ended.code
    assert code == check, said.getvalue() + errors.getvalue()
    return types.SimpleNamespace(stdout=said.getvalue(), stderr=errors.getvalue())


def start(*script, cwd):
    return Popen([sys.executable, *script], env=environment(PYTHONPATH=str(ROOT)), cwd=cwd, stdout=subprocess.PIPE, text=True)


def flip(path, place):
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))


ENDLESS = """
import sys, threading
from datasets.photos import tree
from launch import pack
read, lock, count = tree.Tree.read, threading.Lock(), [0]
def slow(self, number):
    with lock:
        count[0] += 1
    if count[0] > {reads}:
        threading.Event().wait()
    return read(self, number)
tree.Tree.read = slow
pack.main(sys.argv[1:])
"""


@pytest.fixture
def reached(reachable, fetchers):
    """The store, a folder of one's own, and no process left that fetches."""
    return fetchers


def passing(url, split):
    """The samples of a split that are read in the bucket, of which nothing stays."""
    return arrival.begin(url, [split], "input_dir", starts_fetcher=True, keeps_shards=False)[0]


@pytest.fixture
def url(store, reached, whole):
    if not store.client().list_objects(Bucket="data", Prefix="pack/").get("Contents"):
        for name, content in contents(whole).items():
            store.client().put_object(Bucket="data", Key=f"pack/{name}", Body=content)
    return "s3://data/pack"


def with_changes(path, arrays=lambda arrays: {}, about=lambda about: {}):
    """The index in `path`, changed as somebody would who knows its form."""
    with np.load(path) as stored:
        words = json.loads(bytes(stored["about"]))
        found = {name: stored[name] for name in stored.files}
    found.update(arrays(found))
    words.update(about(words))
    found["about"] = np.frombuffer(json.dumps(words).encode(), np.uint8)
    np.savez(path, **found)


def first(name, value):
    def change(arrays):
        array = arrays[name].copy()
        array[0] = value
        return {name: array}

    return change


FORMS = ("original", "raw")


@pytest.fixture(scope="module")
def packs(tmp_path_factory, store):
    """{form: (folder of a pack, its address in a bucket)}"""
    root = write_tree(tmp_path_factory.mktemp("photographs"))
    made = {}
    for form in FORMS:
        folder = tmp_path_factory.mktemp(form)
        pack.pack(str(root), str(folder), settings(form, shard_mb=0.3 if form == "raw" else 0.1))
        made[form] = folder, publish(folder, store, f"arriving-{form}")
    return made


def publish(folder, store, name):
    store.client().create_bucket(Bucket=name)
    for path in folder.glob("[tv]*"):
        store.client().upload_file(str(path), name, f"pack/{path.name}")
    return f"s3://{name}/pack"


@pytest.fixture
def fetchers(monkeypatch):
    """The processes that begin() has started."""
    started = []
    monkeypatch.setattr(arrival, "Child", lambda *words, **how: started.append(Child(*words, **how)) or started[-1])
    yield started
    end(started)


def end(processes):
    for process in processes:
        process.kill()
        process.wait()


def size_of(folder):
    return sum(path.stat().st_size for path in folder.glob("[tv]*"))


def is_whole(folder, pack):
    """Whether it has the files of the pack, byte for byte, as the fetcher leaves it."""
    names = sorted(path.name for path in pack.glob("[tv]*"))
    there = sorted(path.name for path in folder.glob("[tv]*"))
    return there == names and filecmp.cmpfiles(folder, pack, names, shallow=False)[0] == names


WORDS = [*NETWORK, "--image_size", 32, "--epochs", 2, "--recipe", "imagenet", "--batch_size", 8, "--data_backend", "packed"]
