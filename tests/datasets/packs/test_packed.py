"""Photographs in tar shards: the samples of the tree byte for byte, packed the same by any number of threads, killed or not."""

import collections
import contextlib
import errno
import io
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import tarfile
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common import arguments
from common.alive import patience
from common.errors import TrainingFailed, UserError
from common.files import sha256 as digest_of
from common.storage import once
from datasets import imagenet
from datasets.packs import packed
from datasets.packs.state import State
from datasets.photos import splits, tree
from launch.pack import command as pack
from tests.tools import pictures
from tests.tools.faultproxy import faults
from tests.tools.jobs import PATIENCE, in_rehearsal, module_of, wait_for
from tests.tools.packs import (  # noqa: F401 (fixtures)
    ENDLESS,
    SMALL_SHARDS,
    contents,
    copied,
    elsewhere,
    fetchers,
    flip,
    passing,
    reached,
    root,
    run,
    settings,
    start,
    url,
    whole,
    write_tree,
)


def test_of_a_flat_folder_it_holds_out_what_a_job_does(tmp_path, capsys):
    pictures.make("shapes", "own", 60)
    (tmp_path / "own" / "circle" / "notes.txt").touch()
    assert "left out: named .txt: 1\n" in run("own", "pack", "--seed", 1).stdout
    held = splits.hold_out(tree.load("own", str(tmp_path)), seed=1)
    for split, expected in zip(splits.SPLITS, held):
        files = packed.load("pack", split)
        assert (files.names, files.labels.tolist()) == (expected.names, expected.labels.tolist())
    assert "are the pictures of own" in run("own", "--verify", "pack").stdout
    assert "has no folder val: give one" in run(shutil.move("own", "data/train") and "data", "other", check=2).stderr


# --- The samples -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_sample_is_that_of_the_tree(root, whole, tmp_path, split):
    ours, files = packed.load(str(whole), split), tree.load(str(root / split), str(tmp_path))
    assert (ours.names, ours.classes, ours.left_out, len(ours)) == (files.names, files.classes, files.left_out, len(files))
    for name in ("labels", "widths", "heights", "special"):
        assert (
            np.array_equal(getattr(ours, name), getattr(files, name))
            and getattr(ours, name).dtype == getattr(files, name).dtype
        )
    assert [ours.read(number) for number in range(len(ours))] == [files.read(number) for number in range(len(files))]
    assert ours.describe() == files.describe().replace(files.folder, str(whole)) and "left out" in ours.describe()
    assert ours.path(3).startswith(f"{whole}/{split}-00000") and ours.path(3).endswith(f".tar:{ours.names[3]}")
    some = ours.pick(np.array([5, 2]))
    assert [some.read(0), some.read(1)] == [files.read(5), files.read(2)] and list(some.labels) == list(files.labels[[5, 2]])
    assert len(some) == 2 and some.names == [files.names[5], files.names[2]]


def test_the_shards_are_those_of_webdataset(root, whole, tmp_path):
    """Read front to back by tarfile: a key's files lie together, its label is text, and a shard has several classes."""
    files, seen = tree.load(str(root / "train"), str(tmp_path)), []
    for path in sorted(whole.glob("train-*.tar")):
        groups = collections.defaultdict(dict)
        keys = []
        with tarfile.open(path, "r|") as shard:
            for member in shard:
                key, _, extension = member.name.partition(".")
                keys.append(key)
                groups[key][extension] = shard.extractfile(member).read()
                assert (member.mtime, member.uid, member.gid, member.uname, member.mode) == (0, 0, 0, "", 0o644)
        assert keys[::2] == keys[1::2] == list(groups), "a sample's files are neighbours"
        assert path.stat().st_size <= SMALL_SHARDS * (1 << 20) or len(groups) == 1
        for key, group in groups.items():
            label = int(group.pop("cls"))
            ((kind, content),) = group.items()
            assert (content, label) == (files.read(int(key)), files.labels[int(key)])
            assert kind == Image.open(io.BytesIO(content)).format.lower().replace("jpeg", "jpg")
        assert len(groups) < 5 or len({files.labels[int(key)] for key in groups}) > 1
        seen += map(int, groups)
    assert seen != sorted(seen) and sorted(seen) == list(range(len(files)))


class Reader(torch.utils.data.Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        return self.samples.read(number)


@pytest.mark.parametrize("method", in_rehearsal(["fork", "spawn"], lambda method: method == "spawn"))
def test_workers_and_threads_read_the_same(whole, monkeypatch, method):
    """With fewer open shards than there are, so that some are closed while others are read."""
    samples = packed.load(str(whole), "train")
    expected = [samples.read(number) for number in range(len(samples))]
    packed._open_shard.cache_clear()
    monkeypatch.setattr(packed, "_open_shard", packed.functools.lru_cache(2)(packed._open_shard.__wrapped__))
    found = [[] for _ in range(4)]

    def read(into):
        into += [samples.read(number) for number in range(len(samples))]

    threads = [threading.Thread(target=read, args=(into,)) for into in found]
    for thread in threads:
        thread.start()
    loader = torch.utils.data.DataLoader(Reader(samples), batch_size=None, num_workers=1, multiprocessing_context=method)
    assert list(loader) == expected
    for thread in threads:
        thread.join()
    assert found == [expected] * 4
    held = [path for path in open_files() if path.endswith(".tar")]
    assert len(held) <= 2, "those of shards that are no longer held are closed"
    assert pickle.loads(pickle.dumps(samples)).read(3) == expected[3]


def open_files():
    paths = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since, by another thread or by listdir itself
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
    return paths


# --- Making it ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["1", "5"])
def test_packed_again_it_has_the_same_bytes(root, whole, tmp_path, workers):
    words = [str(root), "again", "--shard_mb", str(SMALL_SHARDS), "--workers", workers]
    process = start("-m", "launch", "pack", *words, cwd=tmp_path)
    last = process.communicate(timeout=PATIENCE)[0].splitlines()[-1]
    assert process.returncode == 0
    assert contents(tmp_path / "again") == contents(whole)
    assert not (tmp_path / "again" / ".tree").exists() and os.listdir(tmp_path) == ["again"], "nothing is left elsewhere"
    shards = len(list(whole.glob("*.tar")))
    assert f"has 73 images, 0.2 MiB, in {shards} shards; made {shards} of them now" in last, last
    assert last.endswith("left out: cut off: 1, empty: 1")


@pytest.mark.parametrize("reads", [3, 30])
def test_killed_in_the_middle_it_goes_on_to_the_same_bytes(root, whole, tmp_path, reads):
    """The first is killed within the first shard, the second within a later one."""
    options = [str(root), str(tmp_path / "pack"), "--shard_mb", str(SMALL_SHARDS), "--workers", "1"]
    process = start("-c", ENDLESS.format(reads=reads), *options, cwd=tmp_path)
    awaited = ".train-000001.json" if reads == 30 else "train-000000.tar.unfinished"
    wait_for((tmp_path / "pack" / awaited).exists, process, "a part of the pack")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = {path: path.stat() for path in (tmp_path / "pack").glob(".*-0*.json")}
    kept = {tar: tar.stat() for tar in (path.with_name(path.name[1:].replace("json", "tar")) for path in kept)}
    assert bool(kept) == (reads == 30) and not list((tmp_path / "pack").glob("*.npz"))
    with pytest.raises(UserError, match="has no finished pack of train: python -m launch pack ROOT"):
        packed.load(str(tmp_path / "pack"), "train")
    run(*options)
    assert contents(tmp_path / "pack") == contents(whole)
    assert all((path.stat().st_ino, path.stat().st_mtime_ns) == (old.st_ino, old.st_mtime_ns) for path, old in kept.items())


def test_notes_that_are_nested_too_deeply_are_of_nothing(root, copied, whole):
    for path in [*copied.glob(".train-*.json"), *copied.glob(".val-*.json")]:
        path.write_text("[" * 200_000 + "]" * 200_000)
    pack.pack(str(root), str(copied), settings())
    assert contents(copied) == contents(whole)


def test_a_second_start_makes_only_what_is_missing_or_has_changed(root, copied, whole, tmp_path, capsys):
    own = Path(shutil.copytree(root, tmp_path / "root"))
    shutil.copy2(copied / "train-000001.tar", tmp_path / "kept")
    (copied / "train-000001.tar").unlink()
    (copied / "val-index.npz").write_bytes(b"damaged")
    pack.pack(str(own), str(copied), settings())
    assert "made 1 of them now" in capsys.readouterr().out and contents(copied) == contents(whole)
    path = next(path for path in (own / "train").rglob("*.08.JPEG"))
    flip(path, path.stat().st_size // 2)
    pack.pack(str(own), str(copied), settings())
    assert "made 1 of them now" in capsys.readouterr().out
    files = packed.load(str(copied), "train")
    assert files.read(files.names.index(str(path.relative_to(own / "train")))) == path.read_bytes()


def test_another_tree_or_setting_is_refused(root, copied, whole, tmp_path):
    other = write_tree(tmp_path / "other", count=20, other=100)
    before = contents(copied)
    for words in ((other, copied, "--shard_mb", SMALL_SHARDS), (root, copied, "--shard_mb", 1)):
        done = run(*words, check=2)
        assert "has a pack of other photographs or settings" in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert contents(copied) == before
    run(other, copied, "--shard_mb", SMALL_SHARDS, "--overwrite", "true")
    assert len(packed.load(str(copied), "train")) == 21 and len(contents(copied)) < len(before)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "train-000000.tar").write_bytes(b"of somebody else")
    with pytest.raises(UserError, match="give another folder, or --overwrite true"):
        pack.pack(str(root), str(tmp_path / "theirs"), settings())
    for path in copied.glob(".*"):  # as it comes from a bucket
        path.unlink()
    with pytest.raises(UserError, match="other photographs"):
        pack.pack(str(root), str(copied), settings())
    pack.pack(str(root), str(copied), settings(overwrite=True))
    for path in [*copied.glob("*.npz"), *copied.glob(".*-pack.json")]:  # nothing says any more what the shards are
        path.unlink()
    pack.pack(str(root), str(copied), settings(overwrite=True))
    assert contents(copied) == before


def test_what_cannot_be_is_said_in_one_line(root, tmp_path, monkeypatch, capsys):
    for words, said in (
        ((tmp_path, "out"), "has no folder for any class"),
        ((tmp_path / "none", "out"), "none does not exist"),
        ((root, root / "train" / "out"), "is in the folder whose files are to be packed: give a folder elsewhere"),
        ((root, f"{root}/../{root.name}"), "is the folder whose files are to be packed: give a folder elsewhere"),
        ((root,), "give ROOT and OUT, --index FOLDER, or --verify OUT"),
        ((root, "gs://x/y"), "is not a bucket's address"),
        (("--verify", tmp_path / "none"), "has no finished pack of train"),
    ):
        error = run(*words, check=2).stderr.splitlines()[-1]
        assert "error: " in error and said in error
    assert os.listdir(tmp_path) == []
    full = types.SimpleNamespace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(UserError, match=r"has 1 MiB free, the pack needs 64 MiB: give a folder on a larger disk"):
        pack.pack(str(root), str(tmp_path / "out"), settings())
    assert not [name for name in os.listdir(tmp_path / "out") if name.endswith((".tar", ".npz"))]
    full.free = 1 << 40
    with once.locked(str(tmp_path / "out" / ".pack"), ""), pytest.raises(UserError, match="another pack is being made"):
        pack.pack(str(root), str(tmp_path / "out"), settings())
    read = tree.Tree.read
    monkeypatch.setattr(tree.Tree, "read", lambda self, number: read(self, number) + b"x" * (number == 30))
    with pytest.raises(UserError, match="changed while it was packed: start again"):
        pack.pack(str(root), str(tmp_path / "out"), settings())


# --- In a bucket -------------------------------------------------------------------------------------------------------


def test_samples_are_read_out_of_a_bucket(url, store, whole, monkeypatch):
    local = packed.load(str(whole), "train")
    expected = [local.read(number) for number in range(len(local))]
    with faults(store, lambda request: None, monkeypatch) as proxy:
        samples = passing(url, "train")
        wait_for(lambda: State(samples.arrival.path, samples.arrival.samples).place.all(), None, "the list of the bucket")
        assert [request.path for request in proxy.objects()] == ["/data/pack/train-index.npz"], "no shard is fetched"
        assert samples.read(3) == expected[3] and proxy.objects()[-1].headers["Range"].startswith("bytes=")
        for method in ("fork", "spawn"):
            context = multiprocessing.get_context(method)
            loader = torch.utils.data.DataLoader(
                Reader(samples), batch_size=None, num_workers=1, multiprocessing_context=context
            )
            assert list(loader) == expected
    assert not list(Path("input_dir").rglob("*.tar"))
    with pytest.raises(
        UserError, match=r"s3://data/none has no finished pack of val: python -m launch pack ROOT s3://data/none makes it"
    ):
        passing("s3://data/none", "val")


@pytest.mark.parametrize(
    "fault", in_rehearsal(["flip", "short", "cut", "reset", "503"], lambda fault: fault not in ("flip", "cut"))
)
def test_a_store_that_stumbles_is_asked_again_and_damage_named(url, store, whole, reached, monkeypatch, fault):
    expected, faulty = packed.load(str(whole), "train"), [True, False]
    number = int(
        np.flatnonzero(expected.shard == 1)[np.argmin(expected.offset[expected.shard == 1])]
    )  # not before the zeros at an end
    plan = lambda request: fault if request.is_object and "train-0" in request.path and faulty.pop(0) else None  # noqa: E731
    with faults(store, plan, monkeypatch):
        assert passing(url, "train").read(number) == expected.read(number) and not faulty
        reached[0].kill()
        reached[0].wait()
        faulty += [True] * 10_000
        monkeypatch.setenv(patience.VARIABLE, "2")
        said = "arrived 8 times with others than its index says" if fault == "flip" else "no good answer for 2 s"
        with pytest.raises(TrainingFailed, match=said) as refused:
            passing(url, "train").read(number)
        assert "train-0" in str(refused.value) and "\n" not in str(refused.value)


def test_a_shorter_object_is_named(url, store):
    for name in ("val-index.npz", "val-000000.tar"):
        content = store.client().get_object(Bucket="data", Key=f"pack/{name}")["Body"].read()
        store.client().put_object(Bucket="data", Key=f"short/{name}", Body=content[: 10 if name.endswith("tar") else None])
    with pytest.raises(UserError, match=r"s3://data/short/val-000000\.tar is not what its index names: publish the pack again"):
        passing("s3://data/short", "val").read(0)


def test_a_wrong_shard_of_pixels_is_refused_after_the_fetch_and_a_right_one_verified_once(root, store, reached, monkeypatch):
    run(root, "s3://data/pixels", "--form", "raw", "--shard_mb", SMALL_SHARDS)
    words = ["--data_backend", "packed", "--data_url", "s3://data/pixels", "--fetch_first", "true", "--recipe", "imagenet"]
    args = arguments.parse(module_of("train_imagenet").options(), words, environ={})
    imagenet.load(args)
    with monkeypatch.context() as unread:
        unread.setattr(packed, "sha256", None)
        imagenet.load(args)
    shard = next(Path("input_dir").rglob("train-000000.tar"))
    with monkeypatch.context() as meanwhile:  # a shard changes while the others are read: it is not noted as it is then
        meanwhile.setattr(packed, "sha256", lambda path: (digest_of(path), os.utime(shard, (1, 1)))[0])
        os.utime(shard)
        imagenet.load(args)
        meanwhile.setattr(packed, "sha256", None)
        with pytest.raises(TypeError, match="not callable"):
            imagenet.load(args)
    imagenet.load(args)
    client = store.client()
    content = client.get_object(Bucket="data", Key="pixels/train-000001.tar")["Body"].read()
    client.put_object(Bucket="data", Key="pixels/train-000001.tar", Body=content[:-20000] + bytes(20000))
    with pytest.raises(UserError, match=r"train-000001\.tar has the size that its index says and another SHA-256"):
        imagenet.load(args)


def test_pictures_that_are_others_now_are_named_with_the_shards_to_delete(root, tmp_path):
    shutil.copytree(root, "changed")
    run("changed", "pack", "--shard_mb", SMALL_SHARDS)
    (path, *_) = sorted(Path("changed").glob("train/n1.of.three/*.JPEG"))
    status, content = path.stat(), path.read_bytes()
    path.write_bytes(content[:-40] + b"x" + content[-39:])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    error = run("changed", "--verify", "pack", check=1).stderr
    (shard,) = re.findall(r"delete the shards that have them, (train-\d{6}\.tar) and so on, and pack it again", error)
    Path("pack", shard).unlink()
    run("changed", "pack", "--shard_mb", SMALL_SHARDS)
    assert "are the pictures of changed" in run("changed", "--verify", "pack").stdout
    assert not pack._is_original(packed.load("pack", "train"), 0, "changed/one that is gone")


def test_an_error_of_the_system_names_what_was_asked_for(monkeypatch, capsys):
    def run(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pack, "run", run)
    for words, named in ((["root", "out"], "out"), (["--index", "shards"], "shards"), (["--verify", "pack"], "pack")):
        assert pack.main(words) == 1 and capsys.readouterr().err == f"error: {named}: No space left on device\n"


def test_packed_into_a_bucket_and_started_again(store, reached, root, whole, tmp_path, monkeypatch):
    words = [root, "s3://data/made", "--shard_mb", SMALL_SHARDS]
    with faults(store, lambda request: "denied" if "000003.tar" in request.path else None, monkeypatch):
        assert "403 AccessDenied" in run(*words, check=2).stderr
    names = [item["Key"] for item in store.client().list_objects(Bucket="data", Prefix="made/").get("Contents", [])]
    assert not [name for name in names if name.endswith("npz")], "the index comes last"
    missing = len(contents(whole)) - len(names)
    assert f"published {missing} files to s3://data/made" in run(*words).stdout
    there = store.client().list_objects(Bucket="data", Prefix="made/")["Contents"]
    found = {item["Key"][5:]: store.client().get_object(Bucket="data", Key=item["Key"])["Body"].read() for item in there}
    assert found == contents(whole) == contents(tmp_path / "output_dir/s3/data/made")
    other = write_tree(tmp_path / "other", count=20, other=100)
    shutil.rmtree(tmp_path / "output_dir")
    assert "s3://data/made has another pack" in run(other, *words[1:], check=2).stderr
    run(other, *words[1:], "--overwrite", "true")
    assert len(passing("s3://data/made", "train")) == 21
