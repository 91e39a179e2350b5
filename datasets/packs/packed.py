"""Photographs in uncompressed tar shards of a folder or bucket: each is read by its place in a shard.

    FOLDER/train-000000.tar ...  KEY.jpg and KEY.cls of each sample, as WebDataset names them, shuffled
    FOLDER/train-index.npz       where each sample is, its label, size and checksum, in the order of the tree

`python -m launch pack` makes the shards. Numbers, labels and sizes are those of the packed tree, so a run may
change from tree to pack or back and see the same batches. If the pack has smaller pictures or pixels, the run
sees the same parts of them.
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
from common.errors import TrainingFailed, UserError, one_line, raising_path_conflict
from common.files import read_json_dict, sha256, write_atomically
from common.progress import Progress
from common.storage import bucket, index, once
from datasets.crc import crc32
from datasets.photos import decode, tiles, tree

# {form: format of its index}. A reader of format 1 must refuse 2: it would take a smaller picture for the
# original.
FORMATS = {"original": 1, "tiled": 1, "320": 2, "256": 2, "raw": 2}
OPEN_SHARDS = 256  # files that a process keeps open; the usual limit is 1,024
PER_SAMPLE = {
    "labels": np.int64, "widths": np.int32, "heights": np.int32, "special": np.bool_,
    "shard": np.int32, "offset": np.int64, "length": np.int64, "checksum": np.uint32,
}  # fmt: skip
# in format 2; in format 1 they equal widths and heights
STORED = {"stored_widths": np.int32, "stored_heights": np.int32}


class Arriving(Protocol):
    """What a Packed asks for its samples while its shards come from a bucket: an arrival.Arrival."""

    def announced(self, batches: Iterable[np.ndarray], state_numbers: np.ndarray) -> Iterator[np.ndarray]: ...

    def wait(self, number: int) -> Optional[bytes]: ...

    def growing_path(self, shard: dict[str, Any]) -> str: ...


@dataclasses.dataclass
class Packed(tree.Tree):
    """A split of a pack: where each sample is in the shards, and how it is read."""

    has_sample_files: ClassVar[bool] = False

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
        digests = super().digest()
        if self.form != "original":
            digests.pop("bytes", None)  # they are not those of the files
        return digests

    def shard_path(self, number: int) -> str:
        """Return the path of the shard that holds a sample."""
        return os.path.join(self.folder, self.shards[self.shard[number]]["name"])

    def path(self, number: int) -> str:
        return f"{self.shard_path(number)}:{self.names[number]}"

    def stored_size(self, number: int) -> tuple[int, int]:
        return int(self.stored_heights[number]), int(self.stored_widths[number])

    def describe(self) -> str:
        text = super().describe()
        if self.form != "original":
            text += f"; in the form {self.form}"
        return text

    def announced(self, batches: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        return self.arrival.announced(batches, self.number) if self.arrival else iter(batches)

    def _reader_of(self, number: int) -> Callable[[int, int], bytes]:
        """Wait for a sample. Return read(begin, length) for parts of it; `begin`: an offset in the shard."""
        path = self.shard_path(number)
        growing_path = None  # where the shard's file is until it is whole, if it still arrives
        if self.arrival:
            passing_content = self.arrival.wait(int(self.number[number]))
            if passing_content is not None:
                sample_begin = int(self.offset[number])
                return lambda begin, length: passing_content[begin - sample_begin :][:length]
            growing_path = self.arrival.growing_path(self.shards[self.shard[number]])
        return lambda begin, length: _read_part(path, begin, length, growing_path)

    def read(self, number: int) -> bytes:
        """Return the bytes of a sample; OSError if they do not match its checksum."""
        content = self._reader_of(number)(int(self.offset[number]), int(self.length[number]))
        if crc32(content) != self.checksum[number]:
            raise OSError(
                f"{one_line(self.path(number))} is damaged: its bytes are not those that were packed"
            )
        return content

    def content(self, number: int) -> decode.Content:
        """Return what the picture is decoded from.

        Of raw pixels only the rows that are needed are read, unchecked, as to check all would take two thirds
        longer. Of tiles, only the rows that are needed are checked."""
        if self.form == "tiled":
            content = self._reader_of(number)(int(self.offset[number]), int(self.length[number]))
            return decode.Tiled(content) if tiles.is_tiled(content) else self.read(number)
        if self.form != "raw":
            return self.read(number)
        height, width = self.stored_size(number)
        begin = int(self.offset[number] + self.length[number]) - 3 * height * width  # after the header
        read = self._reader_of(number)
        return decode.Pixels(height, width, lambda at, length: read(begin + at, length))

    def find_damage(self, shard_number: int) -> Optional[str]:
        """Return a text that names the shard and up to five of its damaged samples;
        None if nothing in it is damaged."""
        shard = self.shards[shard_number]
        path = os.path.join(self.folder, shard["name"])
        digest = hashlib.sha256()
        damaged = []
        # a file that cannot be read has another digest
        with contextlib.suppress(OSError), open(path, "rb") as file:
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
    pack = read_index(local_index(folder, split, INPUT_DIR), folder, split)
    for shard in pack.shards:
        path = os.path.join(folder, shard["name"])
        if not os.path.isfile(path) or os.path.getsize(path) != shard["size"]:
            raise UserError(
                f"{one_line(path)} is missing or has not the {shard['size']} bytes that its index says; "
                f"python -m launch pack ROOT {one_line(folder)} makes it again"
            )
    close_shards()
    return pack


def local_index(source: str, split: str, inputs: str) -> str:
    """Return the local path of a split's index; UserError if there is none.

    `source`: a folder, or a bucket, whose index is fetched to a folder below `inputs`.
    """
    path = _fetch_index(source, split, inputs) if is_bucket(source) else index_path(source, split)
    if not path or not os.path.isfile(path):
        display_name = one_line(source)
        raise UserError(
            f"{display_name} has no finished pack of {split}: python -m launch pack ROOT {display_name} "
            "makes it, or completes it"
        )
    return path


def verify_once(pack: Packed) -> None:
    """Raise a UserError if a shard of raw pixels differs from its SHA-256.

    Shards are read once per node and after a change.
    """
    if pack.form != "raw":
        return
    note_path = os.path.join(
        index.make_records_folder(pack.folder), f"{pack.shards[0]['name']}.verified.json"
    )

    def verify_unless_noted(lease: once.Lease) -> None:
        identities = _identities(pack)  # before they are read, so that a later change is seen
        if read_json_dict(note_path) == identities:
            return
        _compare_digests(pack, lease)
        with raising_path_conflict(note_path):
            write_atomically(note_path, json.dumps(identities).encode())

    once.once_per_node(note_path, verify_unless_noted)


def _compare_digests(pack: Packed, lease: once.Lease) -> None:
    """Read all shards; UserError for one whose SHA-256 is not that of the index. `lease`: shows progress."""
    size = sum(shard["size"] for shard in pack.shards)
    paths = [os.path.join(pack.folder, shard["name"]) for shard in pack.shards]
    with (
        ThreadPoolExecutor(8) as pool,
        Progress("verifying shards", len(paths), "shards", size, lease.tell) as progress,
    ):
        for shard, path, digest in zip(pack.shards, paths, pool.map(sha256, paths)):
            if digest != shard["sha256"]:
                raise UserError(
                    f"{one_line(path)} has the size that its index says and another SHA-256: publish "
                    "the pack again"
                )
            progress.add(1, shard["size"])


def _identities(pack: Packed) -> dict[str, list]:
    """Return, for each shard, its SHA-256 in the index and its file's size and time,
    by which a later call sees a change."""
    identities = {}
    for shard in pack.shards:
        status = os.stat(os.path.join(pack.folder, shard["name"]))
        identities[shard["name"]] = [shard["sha256"], status.st_size, status.st_mtime_ns]
    return identities


def refuse_folders(pack: Packed) -> None:
    """Raise UserError if there is a folder where a shard belongs."""
    for shard in pack.shards:
        path = os.path.join(pack.folder, shard["name"])
        if os.path.isdir(path):
            raise UserError(f"{one_line(path)} is a folder, and a shard belongs there: move it away")


# --- The bytes of a sample ----------------------------------------------------------------------------------


def _read_part(path: str, begin: int, length: int, growing_path: Optional[str] = None) -> bytes:
    """Read a part of a shard with pread, which does not move the file position that threads and forked
    workers share."""
    # this reference keeps the file open if the cache drops it meanwhile
    shard = _open_shard(path, growing_path)
    try:
        return os.pread(shard.fileno(), length, begin)
    except OSError as error:
        error.filename = path
        raise


@functools.lru_cache(OPEN_SHARDS)
def _open_shard(path: str, growing_path: Optional[str]) -> io.FileIO:
    """Open a shard's file or, until that is whole, the one from which it grows;
    a rename does not concern open files."""
    if growing_path is None:
        return open(path, "rb", buffering=0)
    # the last time, for one that was renamed between the first two
    for candidate in (path, growing_path, path):
        with contextlib.suppress(FileNotFoundError):
            return open(candidate, "rb", buffering=0)
    raise TrainingFailed(f"{one_line(path)} is gone: start again to go on")


def close_shards() -> None:
    """Close the shards: a pack that was made again has other files under the same names."""
    _open_shard.cache_clear()


# --- The index ----------------------------------------------------------------------------------------------


def index_path(folder: str, split: str) -> str:
    """Return the path of a split's index in a folder, or its address in a bucket."""
    return os.path.join(folder, f"{split}-index.npz")


def has_index(url: str, split: str, inputs: str) -> bool:
    """Fetch the index of a split from a bucket. Return whether it has one."""
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


def _dtypes(form: str) -> dict[str, type]:
    """Return {name of an array: its dtype} for the index of a pack in this form."""
    return PER_SAMPLE if FORMATS[form] == 1 else {**PER_SAMPLE, **STORED}


def write_index(
    folder: str, split: str, source: tree.Tree, metadata: dict[str, Any], arrays: dict[str, Any]
) -> None:
    """Write a split's index.

    `metadata`: its "shards", "identity" and "form". `arrays`: {name: a value of each sample}, for names of
    _dtypes(form); the others are taken from `source`.
    """
    full_metadata = {**metadata, "format": FORMATS[metadata["form"]], "split": split}
    full_metadata.update(classes=source.classes, left_out=source.left_out)
    stored: dict[str, Any] = {
        "about": np.frombuffer(json.dumps(full_metadata).encode(), np.uint8),
        "names": np.frombuffer("\0".join(source.names).encode("utf-8", "surrogateescape"), np.uint8),
    }
    for name, dtype in _dtypes(metadata["form"]).items():
        values = arrays[name] if name in arrays else getattr(source, name)
        stored[name] = np.asarray(values, dtype)
    buffer = io.BytesIO()
    np.savez(buffer, **stored)
    write_atomically(index_path(folder, split), buffer.getbuffer())


def read_index(path: str, folder: str, split: str) -> Packed:
    """Return the samples that the index at `path` lists, in the shards of `folder`;
    UserError if it is damaged or unknown."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in stored.zip.infolist()):
                raise ValueError("it is compressed")
            metadata = json.loads(bytes(stored["about"]))
            names = bytes(stored["names"]).decode("utf-8", "surrogateescape").split("\0")
            if (metadata["format"], metadata["split"]) != (FORMATS.get(metadata["form"]), split):
                raise ValueError(f"it is not an index of {split} in a known format")
            arrays = {name: stored[name] for name in _dtypes(metadata["form"])}
        _check(metadata, names, arrays)
        fields = {name: metadata[name] for name in ("classes", "left_out", "shards", "identity", "form")}
        arrays = {"stored_widths": arrays["widths"], "stored_heights": arrays["heights"], **arrays}
    except Exception as error:  # a damaged file can fail in any way
        reason = f"it lacks {error}" if isinstance(error, KeyError) else one_line(error)[:200]
        raise UserError(
            f"{one_line(path)} is damaged ({reason}): fetch it again, or have python -m launch pack "
            "ROOT OUT make it again"
        ) from None
    return Packed(folder, names=names, **fields, **arrays, number=np.arange(len(names)), arrival=None)


def _check(metadata: dict[str, Any], names: list[str], arrays: dict[str, np.ndarray]) -> None:
    """Raise a ValueError if the index contradicts itself, or leads out of the folder or out of a shard."""
    for shard in metadata["shards"]:
        _check_shard(shard)
    for texts in (metadata["classes"], *metadata["left_out"].values()):
        if not (isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)):
            raise ValueError("a list of names is empty or has something else in it")
    _check_arrays(metadata, len(names), arrays)


def _check_shard(shard: dict[str, Any]) -> None:
    """Raise a ValueError if a shard has no safe file name, no size or no SHA-256."""
    if not re.fullmatch(r"[^./][^/]*\.tar", shard["name"]) or not is_fetchable_name(shard["name"]):
        raise ValueError(f"{shard['name'][:80]!r} is not the name of a shard")
    has_size = type(shard["size"]) is int and 0 < shard["size"] < 1 << 62
    if not has_size or not re.fullmatch(r"[0-9a-f]{64}", shard["sha256"]):
        raise ValueError(f"it has no size or no SHA-256 of {shard['name']}")


def _check_arrays(metadata: dict[str, Any], num_samples: int, arrays: dict[str, np.ndarray]) -> None:
    """Raise a ValueError if an array has a wrong type or shape, or an impossible value: a class or shard that
    is not there, a picture larger than its original, a sample beyond its shard."""
    for name, array in arrays.items():
        dtype = np.dtype(_dtypes(metadata["form"])[name])
        if array.dtype != dtype or array.shape != (num_samples,):
            raise ValueError(f"its {name} are {array.dtype} {array.shape}, not {dtype} ({num_samples},)")
    for name, array in arrays.items():
        minimum = 1 if name in ("widths", "heights", "length") else 0
        if array.dtype.kind == "i" and array.min() < minimum:
            raise ValueError(f"one of its {name} is {array.min()}")
    for name, count in (("labels", len(metadata["classes"])), ("shard", len(metadata["shards"]))):
        if arrays[name].max() >= count:
            raise ValueError(f"one of its {name} is {arrays[name].max()}, and there are {count}")
    for name in STORED.keys() & arrays.keys():
        if (arrays[name] > arrays[name.removeprefix("stored_")]).any():
            raise ValueError(f"one of its {name} is larger than that of the original")
    if metadata["form"] == "raw":
        pixels = 3 * arrays["stored_widths"].astype(np.int64) * arrays["stored_heights"]
        if (pixels > arrays["length"]).any():
            raise ValueError("a sample has fewer bytes than its pixels")
    sizes = np.array([shard["size"] for shard in metadata["shards"]])[arrays["shard"]]
    if (arrays["offset"] > sizes - arrays["length"]).any():
        raise ValueError("a sample is beyond the end of its shard")
