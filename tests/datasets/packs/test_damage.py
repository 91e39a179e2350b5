"""Packs with flipped bits, missing shards and indexes of strangers: all refused, by name."""

import contextlib
import io
import os
import pickle
import zipfile

import numpy as np
import pytest

from common.errors import UserError
from datasets.packs import packed
from tests.tools.packs import SMALL_SHARDS, contents, copied, elsewhere, first, flip, root, run, settings, whole, with_changes  # noqa: F401 (fixtures)


def test_a_flipped_bit_is_named(copied):
    samples = packed.load(str(copied), "train")
    number = 17
    flip(samples.shard_path(number), int(samples.offset[number] + samples.length[number] // 2))
    with pytest.raises(OSError, match=rf"train-\d+.tar:{samples.names[number]} is damaged"):
        samples.read(number)
    assert len([samples.read(other) for other in range(len(samples)) if other != number]) == len(samples) - 1
    flip(copied / "val-000000.tar", 0)  # in a header
    done = run("--verify", copied, check=1)
    assert f"and in it 1 samples: {samples.names[number]}" in done.stdout and "val-000000.tar, and in it 0" in done.stdout
    shards = len(list(copied.glob("*.tar")))
    assert f"error: 2 of {shards} shards are damaged: delete them" in done.stderr and done.stderr.count("\n") == 1


def test_a_whole_pack_is_verified_and_a_missing_shard_named(whole, copied):
    assert "73 images in" in run("--verify", whole).stdout
    (copied / "val-000000.tar").write_bytes(b"")
    with pytest.raises(UserError, match=r"val-000000.tar is missing or has not the \d+ bytes"):
        packed.load(str(copied), "val")
    (copied / "val-index.npz").unlink()
    with pytest.raises(UserError, match="has no finished pack of val: python -m launch pack ROOT"):
        packed.load(str(copied), "val")


def shard_named(name):
    return lambda about: {"shards": [{**about["shards"][0], "name": name}, *about["shards"][1:]]}


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("ran",)


HOSTILE = {
    "pickle": {"arrays": lambda arrays: {"labels": np.array([Bomb()] * len(arrays["labels"]), object)}},
    "parent": {"about": shard_named("../train-000000.tar")},
    "absolute": {"about": shard_named("/etc/passwd")},
    "line": {"about": shard_named("train-000000.tar\n")},
    "not a name": {"about": shard_named(5)},
    "size": {"about": lambda about: {"shards": [{**about["shards"][0], "size": 2**63}]}},
    "no shards": {"about": lambda about: {"shards": []}},
    "no classes": {"about": lambda about: {"classes": []}},
    "left out": {"about": lambda about: {"left_out": {"x": []}}},
    "format": {"about": lambda about: {"format": 99}},
    "beyond": {"arrays": first("offset", 10**6)},
    "far beyond": {"arrays": first("offset", 2**63 - 1)},
    "negative": {"arrays": first("offset", -1)},
    "longer": {"arrays": first("length", 2**62)},
    "empty": {"arrays": first("length", 0)},
    "label": {"arrays": first("labels", 3)},
    "shard": {"arrays": first("shard", 99)},
    "negative shard": {"arrays": first("shard", -1)},
    "flat": {"arrays": first("widths", 0)},
    "fewer": {"arrays": lambda arrays: {"checksum": arrays["checksum"][:-1]}},
    "floats": {"arrays": lambda arrays: {"offset": arrays["offset"].astype(float)}},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_index_is_refused_in_one_line(copied, tmp_path, kind):
    path = copied / "train-index.npz"
    with_changes(path, **HOSTILE[kind])
    with pytest.raises(UserError, match=r"train-index.npz is damaged \(.+\): fetch it again") as refused:
        packed.load(str(copied), "train")
    assert "\n" not in str(refused.value) and not (tmp_path / "ran").exists()


def test_a_flipped_bit_anywhere_in_an_index_is_refused_or_changes_nothing(copied):
    path, whole = copied / "train-index.npz", packed.load(str(copied), "train")
    content = path.read_bytes()
    for place in range(0, 8 * len(content), 41):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with contextlib.suppress(UserError):
            read = packed.load(str(copied), "train")
            assert (read.names, read.classes, read.shards) == (whole.names, whole.classes, whole.shards), place
            assert all(np.array_equal(getattr(read, name), getattr(whole, name)) for name in packed.PER_SAMPLE), place


def test_a_damaged_index_is_refused_in_one_line(copied):
    path = copied / "train-index.npz"
    content = path.read_bytes()
    np.savez_compressed(bomb := io.BytesIO(), labels=np.zeros(10**6))
    np.save(bare := io.BytesIO(), np.arange(3))
    with zipfile.ZipFile(lacking := io.BytesIO(), "w") as archive:
        archive.writestr("about.npy", b"")
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    pickled = pickle.dumps(Bomb())
    damaged = [
        content[:-50],
        content[:100],
        b"",
        b"PK\3\4",
        pickled,
        *(file.getvalue() for file in (bomb, bare, lacking)),
        flipped,
    ]
    for some in damaged:
        path.write_bytes(some)
        with pytest.raises(UserError, match=r"is damaged \(.+\): fetch it again, or have python -m launch pack") as refused:
            packed.load(str(copied), "train")
        assert "\n" not in str(refused.value)
    assert not os.path.exists("ran")


def test_killed_before_it_had_written_whose_pack_it_is_it_goes_on(root, whole, tmp_path):
    folder = tmp_path / "pack"
    folder.mkdir()
    (folder / ".train-pack.json.unfinished").write_bytes(b"{")
    run(root, folder, "--shard_mb", SMALL_SHARDS)
    assert contents(folder) == contents(whole) and not list(folder.glob("*.unfinished"))
