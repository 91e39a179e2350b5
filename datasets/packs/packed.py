"""Photographs in uncompressed tar shards of a folder or bucket: each is read by its place in a shard.

    FOLDER/train-000000.tar ...   KEY.jpg and KEY.cls of each sample, as WebDataset names them, in a shuffled order
    FOLDER/train-index.npz        where each sample is, its label, size and checksum, in the order of the tree

`python -m launch pack` makes the shards. Numbers, labels and sizes are those of the packed tree, so a run may change from tree
to pack or back and see the same batches. If the pack has smaller pictures or pixels, the run sees the same parts of them.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, ClassVar, Optional, Protocol

import numpy as np

from common import storage
from common.address import INPUT_DIR, is_bucket, is_fetchable_name, local_folder
from common.errors import TrainingFailed, UserError, naming_what_is_in_the_way, one_line
from common.files import read_note, sha256, write_atomically
from common.progress import Progress
from common.storage import bucket, index, once
from datasets.crc import crc32
from datasets.photos import decode, tiles, tree

# {form: format of its index}. A reader of format 1 must refuse 2: it would take a smaller picture for the original.
FORMATS = {"original": 1, "tiled": 1, "320": 2, "256": 2, "raw": 2}
OPEN_SHARDS = 256  # files that a process keeps open; the usual limit is 1,024
PER_SAMPLE = {
    "labels": np.int64, "widths": np.int32, "heights": np.int32, "special": np.bool_,
    "shard": np.int32, "offset": np.int64, "length": np.int64, "checksum": np.uint32,
}  # fmt: skip
STORED = {"stored_widths": np.int32, "stored_heights": np.int32}  # in format 2; in format 1 they equal widths and heights


class Arriving(Protocol):
    """What a Packed asks for its samples while its shards come from a bucket: an arrival.Arrival."""

    def announced(self, batches: Iterable[np.ndarray], number: np.ndarray) -> Iterator[np.ndarray]: ...

    def wait(self, number: int) -> Optional[bytes]: ...

    def growing(self, shard: dict[str, Any]) -> str: ...


@dataclasses.dataclass
class Packed(tree.Tree):
    """A split of a pack: where each sample is in the shards, and how it is read."""

    in_files: ClassVar[bool] = False

    shard: np.ndarray  # index in `shards` of a sample's shard
    offset: np.ndarray  # of its first byte there
    length: np.ndarray
    checksum: np.ndarray  # CRC-32 of its bytes
    shards: list[dict]  # each with "name", "size" and "sha256"
    identity: str  # digest of what was packed, and how
    form: str  # original, or what launch/pack/forms.py made of it
    stored_widths: np.ndarray  # of the pictures in the pack; 0 for one that could not be decoded
    stored_heights: np.ndarray
    number: np.ndarray  # of each sample of this split, among those of all splits
    arrival: Optional[Arriving]  # while the shards come from a bucket

    def crc(self, number: int) -> int:
        return int(self.checksum[number])

    def digest(self) -> dict[str, str]:
        known = super().digest()
        if self.form != "original":
            known.pop("bytes", None)  # they are not those of the files
        return known

    def shard_path(self, number: int) -> str:
        """Return the path of the shard that holds a sample."""
        return os.path.join(self.folder, self.shards[self.shard[number]]["name"])

    def path(self, number: int) -> str:
        return f"{self.shard_path(number)}:{self.names[number]}"

    def stored(self, number: int) -> tuple[int, int]:
        return int(self.stored_heights[number]), int(self.stored_widths[number])

    def describe(self) -> str:
        return super().describe() + (f"; in the form {self.form}" if self.form != "original" else "")

    def announced(self, batches: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        return self.arrival.announced(batches, self.number) if self.arrival else iter(batches)

    def _reader_of(self, number: int) -> Callable[[int, int], bytes]:
        """Wait until a sample is there. Return read(begin, length) for parts of it, where `begin` is a place in the shard."""
        path = self.shard_path(number)
        growing = None  # where the shard's file is until it is whole, if it still arrives
        if self.arrival:
            passed_through = self.arrival.wait(int(self.number[number]))
            if passed_through is not None:
                first = int(self.offset[number])
                return lambda begin, length: passed_through[begin - first :][:length]
            growing = self.arrival.growing(self.shards[self.shard[number]])
        return lambda begin, length: _from_file(path, begin, length, growing)

    def read(self, number: int) -> bytes:
        """Return the bytes of a sample; OSError if they do not match its checksum."""
        content = self._reader_of(number)(int(self.offset[number]), int(self.length[number]))
        if crc32(content) != self.checksum[number]:
            raise OSError(f"{one_line(self.path(number))} is damaged: its bytes are not those that were packed")
        return content

    def content(self, number: int) -> decode.Content:
        """Return what the picture is decoded from. Of raw pixels only the rows that are needed are read, unchecked, as to check
        all would take two thirds longer. Of tiles, only the rows that are needed are checked."""
        if self.form == "tiled":
            content = self._reader_of(number)(int(self.offset[number]), int(self.length[number]))
            return decode.Tiled(content) if tiles.is_tiled(content) else self.read(number)
        if self.form != "raw":
            return self.read(number)
        height, width = self.stored(number)
        begin = int(self.offset[number] + self.length[number]) - 3 * height * width  # after the header
        read = self._reader_of(number)
        return decode.Pixels(height, width, lambda at, length: read(begin + at, length))

    def find_damage(self, shard_number: int) -> Optional[str]:
        """Return a text that names the shard and up to five of its damaged samples; None if nothing in it is damaged."""
        shard = self.shards[shard_number]
        path = os.path.join(self.folder, shard["name"])
        digest = hashlib.sha256()
        damaged = []
        with contextlib.suppress(OSError), open(path, "rb") as file:  # a file that cannot be read has another digest
            while content := file.read(1 << 20):
                digest.update(content)
        for sample in np.flatnonzero(self.shard == shard_number).tolist():
            try:
                self.read(sample)
            except OSError:
                damaged.append(one_line(self.names[sample]))
        if digest.hexdigest() == shard["sha256"] and not damaged:
            return None
        return f"{one_line(path)}, and in it {len(damaged)} samples: {', '.join(damaged[:5])}".rstrip(": ")


def load(folder: str, split: str) -> Packed:
    """Return the samples of a split in a folder. One in a bucket is read while it arrives (arrival.py)."""
    files = read_index(local_index(folder, split, INPUT_DIR), folder, split)
    for shard in files.shards:
        path = os.path.join(folder, shard["name"])
        if not os.path.isfile(path) or os.path.getsize(path) != shard["size"]:
            raise UserError(
                f"{one_line(path)} is missing or has not the {shard['size']} bytes that its index says; "
                f"python -m launch pack ROOT {one_line(folder)} makes it again"
            )
    forget_open_files()
    return files


def local_index(place: str, split: str, inputs: str) -> str:
    """Return the local path of a split's index; UserError if there is none.

    `place`: a folder, or a bucket, whose index is fetched to a folder below `inputs`.
    """
    path = _fetch_index(place, split, inputs) if is_bucket(place) else index_path(place, split)
    if not path or not os.path.isfile(path):
        shown = one_line(place)
        raise UserError(
            f"{shown} has no finished pack of {split}: python -m launch pack ROOT {shown} makes it, or completes it"
        )
    return path


def verify_once(files: Packed) -> None:
    """Raise a UserError if a shard of raw pixels differs from its SHA-256. Shards are read once per node and after a change."""
    if files.form != "raw":
        return
    note = os.path.join(index.notes(files.folder), f"{files.shards[0]['name']}.verified.json")

    def verify_unless_noted(lease: once.Lease) -> None:
        identities = _identities(files)  # before they are read, so that a later change is seen
        if read_note(note) == identities:
            return
        _compare_digests(files, lease)
        with naming_what_is_in_the_way(note):
            write_atomically(note, json.dumps(identities).encode())

    once.once_per_node(note, verify_unless_noted)


def _compare_digests(files: Packed, lease: once.Lease) -> None:
    """Read all shards. UserError for the first whose SHA-256 is not that of the index. Who waits is told how far it is."""
    size = sum(shard["size"] for shard in files.shards)
    paths = [os.path.join(files.folder, shard["name"]) for shard in files.shards]
    with ThreadPoolExecutor(8) as pool, Progress("verifying shards", len(paths), "shards", size, lease.tell) as progress:
        for shard, path, digest in zip(files.shards, paths, pool.map(sha256, paths)):
            if digest != shard["sha256"]:
                raise UserError(
                    f"{one_line(path)} has the size that its index says and another SHA-256: publish the pack again"
                )
            progress.add(1, shard["size"])


def _identities(files: Packed) -> dict[str, list]:
    """Return, for each shard, its SHA-256 in the index and its file's size and time, by which a later call sees a change."""
    known = {}
    for shard in files.shards:
        status = os.stat(os.path.join(files.folder, shard["name"]))
        known[shard["name"]] = [shard["sha256"], status.st_size, status.st_mtime_ns]
    return known


def refuse_folders(files: Packed) -> None:
    """Raise UserError if there is a folder where a shard belongs."""
    for shard in files.shards:
        path = os.path.join(files.folder, shard["name"])
        if os.path.isdir(path):
            raise UserError(f"{one_line(path)} is a folder, and a shard belongs there: move it away")


# --- The bytes of a sample ---------------------------------------------------------------------------------------------


def _from_file(path: str, begin: int, length: int, growing: Optional[str] = None) -> bytes:
    """Read a part of a shard with pread, which does not move the file position that threads and forked workers share."""
    shard = _opened(path, growing)  # this reference keeps the file open if the cache drops it meanwhile
    try:
        return os.pread(shard.fileno(), length, begin)
    except OSError as error:
        error.filename = path
        raise


@functools.lru_cache(OPEN_SHARDS)
def _opened(path: str, growing: Optional[str]) -> io.FileIO:
    """Open a shard's file or, until that is whole, the one from which it grows; a rename does not concern open files."""
    if growing is None:
        return open(path, "rb", buffering=0)
    for place in (path, growing, path):  # the last time, for one that was renamed between the first two
        with contextlib.suppress(FileNotFoundError):
            return open(place, "rb", buffering=0)
    raise TrainingFailed(f"{one_line(path)} is gone: start again to go on")


def forget_open_files() -> None:
    """Close the shards: a pack that was made again has other files under the same names."""
    _opened.cache_clear()


# --- The index ---------------------------------------------------------------------------------------------------------


def index_path(folder: str, split: str) -> str:
    return os.path.join(folder, f"{split}-index.npz")


def has_index(url: str, split: str, inputs: str) -> bool:
    """Return whether a bucket has the index of a split, which is fetched then."""
    return _fetch_index(url, split, inputs) is not None


def _fetch_index(url: str, split: str, inputs: str) -> Optional[str]:
    """Fetch the index of a split from a bucket and return its local path, or None if the bucket has none."""
    address = index_path(url, split)
    store = bucket.Bucket(address)
    key = store.prefix
    if not any(item.key == key for item in store.items(key)):
        return None
    # Not into the folder of the pack, where an index says that all shards are there.
    folder = local_folder(os.path.join(url, split), os.path.join(inputs, "index"))
    return index_path(storage.fetch(address, folder), split)


def _kinds(form: str) -> dict[str, type]:
    """Return {name of an array: its dtype} for the index of a pack in this form."""
    return PER_SAMPLE if FORMATS[form] == 1 else {**PER_SAMPLE, **STORED}


def write_index(folder: str, split: str, files: tree.Tree, about: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Write a split's index.

    `about`: its "shards", "identity" and "form"; `arrays`: values for each sample, in place of those of `files` or beside them.
    """
    described = {**about, "format": FORMATS[about["form"]], "split": split}
    described.update(classes=files.classes, left_out=files.left_out)
    stored: dict[str, Any] = {
        "about": np.frombuffer(json.dumps(described).encode(), np.uint8),
        "names": np.frombuffer("\0".join(files.names).encode("utf-8", "surrogateescape"), np.uint8),
    }
    for name, kind in _kinds(about["form"]).items():
        values = arrays[name] if name in arrays else getattr(files, name)
        stored[name] = np.asarray(values, kind)
    buffer = io.BytesIO()
    np.savez(buffer, **stored)
    write_atomically(index_path(folder, split), buffer.getbuffer())


def read_index(path: str, folder: str, split: str) -> Packed:
    """Return the samples that the index at `path` lists, in the shards of `folder`; UserError if it is damaged or unknown."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in stored.zip.infolist()):
                raise ValueError("it is compressed")
            about = json.loads(bytes(stored["about"]))
            names = bytes(stored["names"]).decode("utf-8", "surrogateescape").split("\0")
            if (about["format"], about["split"]) != (FORMATS.get(about["form"]), split):
                raise ValueError(f"it is not an index of {split} in a known format")
            arrays = {name: stored[name] for name in _kinds(about["form"])}
        _check(about, names, arrays)
        words = {name: about[name] for name in ("classes", "left_out", "shards", "identity", "form")}
        arrays = {"stored_widths": arrays["widths"], "stored_heights": arrays["heights"], **arrays}
    except Exception as error:  # a damaged file can fail in any way
        reason = f"it lacks {error}" if isinstance(error, KeyError) else one_line(error)[:200]
        raise UserError(
            f"{one_line(path)} is damaged ({reason}): fetch it again, or have python -m launch pack ROOT OUT make it again"
        ) from None
    return Packed(folder, names=names, **words, **arrays, number=np.arange(len(names)), arrival=None)


def _check(about: dict[str, Any], names: list[str], arrays: dict[str, np.ndarray]) -> None:
    """Raise a ValueError if the index contradicts itself, or leads out of the folder or out of a shard."""
    for shard in about["shards"]:
        _check_shard(shard)
    for words in (about["classes"], *about["left_out"].values()):
        if not (isinstance(words, list) and words and all(isinstance(word, str) for word in words)):
            raise ValueError("a list of names is empty or has something else in it")
    _check_arrays(about, len(names), arrays)


def _check_shard(shard: dict[str, Any]) -> None:
    if not re.fullmatch(r"[^./][^/]*\.tar", shard["name"]) or not is_fetchable_name(shard["name"]):
        raise ValueError(f"{shard['name'][:80]!r} is not the name of a shard")
    has_size = type(shard["size"]) is int and 0 < shard["size"] < 1 << 62
    if not has_size or not re.fullmatch(r"[0-9a-f]{64}", shard["sha256"]):
        raise ValueError(f"it has no size or no SHA-256 of {shard['name']}")


def _check_arrays(about: dict[str, Any], samples: int, arrays: dict[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        kind = np.dtype(_kinds(about["form"])[name])
        if array.dtype != kind or array.shape != (samples,):
            raise ValueError(f"its {name} are {array.dtype} {array.shape}, not {kind} ({samples},)")
    for name, array in arrays.items():
        least = 1 if name in ("widths", "heights", "length") else 0
        if array.dtype.kind == "i" and array.min() < least:
            raise ValueError(f"one of its {name} is {array.min()}")
    for name, count in (("labels", len(about["classes"])), ("shard", len(about["shards"]))):
        if arrays[name].max() >= count:
            raise ValueError(f"one of its {name} is {arrays[name].max()}, and there are {count}")
    for name in STORED.keys() & arrays.keys():
        if (arrays[name] > arrays[name[len("stored_") :]]).any():
            raise ValueError(f"one of its {name} is larger than that of the original")
    if about["form"] == "raw":
        pixels = 3 * arrays["stored_widths"].astype(np.int64) * arrays["stored_heights"]
        if (pixels > arrays["length"]).any():
            raise ValueError("a sample has fewer bytes than its pixels")
    sizes = np.array([shard["size"] for shard in about["shards"]])[arrays["shard"]]
    if (arrays["offset"] > sizes - arrays["length"]).any():
        raise ValueError("a sample is beyond the end of its shard")
