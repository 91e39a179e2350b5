"""Assign the photographs of a pack to shards, and write the shards.

After a kill, a shard is there whole or not at all.

The same photographs and settings give the same bytes, whatever the user and the number of threads.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import numpy as np

from common.errors import UserError, one_line
from common.files import MIB, TEMPORARY, create, read_json_dict, write_atomically
from common.progress import say
from datasets.crc import crc32
from datasets.packs import packed
from datasets.photos import remarks, tree
from launch.pack import forms

BLOCK = tarfile.BLOCKSIZE
KINDS = {
    b"\xff\xd8": "jpg", b"\x89PNG": "png", b"RIFF": "webp", b"BM": "bmp", b"II*\0": "tif", b"MM\0*": "tif",
    b"GIF8": "gif", b"P6": "ppm",
}  # fmt: skip
# noted of each sample when it is written
SAMPLE_FIELDS = ("offset", "length", "checksum", "stored_heights", "stored_widths")


@dataclasses.dataclass
class Shard:
    """A shard of a split's plan: the samples that it is to hold and, once it was written, its note."""

    name: str
    numbers: list[int]  # of its samples, in their order in the shard
    size: int = 0  # in bytes, as expected
    # what its note says; empty until the shard is whole
    note: dict[str, Any] = dataclasses.field(default_factory=dict)


class ShardPlan:
    """The assignment of a split's samples to shards, which depends on the files and the settings alone."""

    def __init__(self, files: tree.Tree, split: str, folder: str, options: argparse.Namespace) -> None:
        """Ask for size and time of every file.

        The plan's identity is of names, labels, sizes and settings, not of times.
        """
        self.files = files
        self.split = split
        self.folder = folder
        self.lengths, self._changed = self._stat()
        self.form = options.form
        self.settings = {"form": options.form, "shard_mb": options.shard_mb}
        described = [packed.FORMATS[self.form], split, self.settings, self.files.classes, self.files.names]
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
        self.identity = _digest(digest, self.files.labels, self.lengths)
        self.shards = self._assign_samples(
            int(options.shard_mb * MIB) // tarfile.RECORDSIZE * tarfile.RECORDSIZE
        )

    def _stat(self) -> np.ndarray:
        """Return an array of two rows: sizes in bytes and times of the last change in ns of the files."""

        def stat(numbers: range) -> list[tuple[int, int]]:
            return [
                (status.st_size, status.st_mtime_ns) for status in map(os.stat, map(self.files.path, numbers))
            ]

        parts = [
            range(begin, min(begin + 1000, len(self.files))) for begin in range(0, len(self.files), 1000)
        ]
        with ThreadPoolExecutor(tree.THREADS) as pool:
            return np.array([pair for part in pool.map(stat, parts) for pair in part], np.int64).T

    def _assign_samples(self, limit: int) -> list[Shard]:
        """Assign samples in a shuffled order to shards of about `limit` bytes at most;
        a larger sample has its own shard."""
        shards: list[Shard] = []
        filled = limit
        dimensions = zip(*(array.tolist() for array in (self.lengths, self.files.heights, self.files.widths)))
        lengths = [forms.expected_length(self.form, *values) for values in dimensions]
        # alike in every version of numpy
        for sample in np.random.RandomState(0).permutation(len(self.files)).tolist():
            # two headers and the label, a block each
            size = 3 * BLOCK + lengths[sample] + -lengths[sample] % BLOCK
            if not shards or filled + size > limit:
                filled = 2 * BLOCK  # the archive's end
                shards.append(Shard(f"{self.split}-{len(shards):06d}.tar", []))
            shards[-1].numbers.append(sample)
            filled += size
            shards[-1].size = filled + -filled % tarfile.RECORDSIZE
        return shards

    def sources(self, shard: Shard) -> str:
        """Return a digest of the pack's settings and the shard's files;
        it differs if the size or time of a file does."""
        return _digest(
            hashlib.sha256(self.identity.encode()), self._changed[shard.numbers], np.array(shard.numbers)
        )

    def note_path(self, shard: Shard) -> str:
        return os.path.join(self.folder, f".{shard.name[:-4]}.json")

    def missing(self) -> list[Shard]:
        """Read the notes of all shards into shard.note;
        return the shards that are missing or were made of other files."""
        for shard in self.shards:
            shard.note = self._note(shard)
        return [shard for shard in self.shards if not shard.note]

    def _note(self, shard: Shard) -> dict[str, Any]:
        """Return the shard's JSON note; {} if it is missing,
        or if the shard's size or files are not those that it states."""
        note = read_json_dict(self.note_path(shard))
        with contextlib.suppress(OSError):
            size = os.path.getsize(os.path.join(self.folder, shard.name))
            if (note.get("sources"), note.get("size")) == (self.sources(shard), size):
                return note
        return {}

    def write_index(self) -> None:
        """Write the index of the split, from the notes of all shards, which have to be there."""
        arrays: dict[str, np.ndarray] = {
            name: np.empty(len(self.files), np.int64) for name in ("shard", *SAMPLE_FIELDS)
        }
        for position, shard in enumerate(self.shards):
            arrays["shard"][shard.numbers] = position
            for name in SAMPLE_FIELDS:
                arrays[name][shard.numbers] = shard.note[name]
        shards = [
            {"name": shard.name, **{name: shard.note[name] for name in ("size", "sha256")}}
            for shard in self.shards
        ]
        about = {**self.settings, "identity": self.identity, "shards": shards}
        if packed.FORMATS[self.form] != 1:
            arrays["special"] = np.zeros(len(self.files))  # none any more: such pictures were decoded here
        packed.write_index(self.folder, self.split, self.files, about, arrays)


def make(plan: ShardPlan, shard: Shard, done: Callable[[int], None]) -> None:
    """Write the shard, calling done(file size) after each sample;
    then a note by which a later start knows that it is whole."""
    path = os.path.join(plan.folder, shard.name)
    digest = hashlib.sha256()
    columns = {name: [] for name in SAMPLE_FIELDS}
    with create(path + TEMPORARY) as file:

        def write(content: bytes) -> None:
            file.write(content)
            digest.update(content)

        for sample in shard.numbers:
            content = plan.files.read(sample)
            if len(content) != plan.lengths[sample]:
                raise UserError(
                    f"{one_line(plan.files.path(sample))} changed while it was packed: start again when "
                    "it no longer changes"
                )
            source = functools.partial(plan.files.path, sample)
            with remarks.report_warnings(source, lambda text: say(f"warning: {text}")):
                stored, *size = forms.stored(
                    plan.form, content, plan.files.special[sample], *plan.files.original_size(sample)
                )
            if not min(size):
                name = one_line(source())
                say(
                    f"warning: {name} cannot be decoded: it is packed as it is, and a job takes the "
                    "next one instead"
                )
            for name, value in zip(SAMPLE_FIELDS, (file.tell() + BLOCK, len(stored), crc32(stored), *size)):
                columns[name].append(value)
            write(pair(sample, stored, int(plan.files.labels[sample])))
            done(len(content))
        write(end(file.tell()))
        total_size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + TEMPORARY, path)
    shard.note = {"sources": plan.sources(shard), "sha256": digest.hexdigest(), "size": total_size, **columns}
    write_atomically(plan.note_path(shard), json.dumps(shard.note).encode())


def pair(number: int, content: bytes, label: int) -> bytes:
    """Return a picture and its label as they are in a shard. The picture's own bytes begin after BLOCK."""
    key = f"{number:08d}"  # unique, and without a dot, at which WebDataset ends a key
    return _member(f"{key}.{_kind(content)}", content) + _member(f"{key}.cls", b"%d" % label)


def _member(name: str, content: bytes) -> bytes:
    header = tarfile.TarInfo(name)  # no time, no user: the same bytes whoever packs
    header.size = len(content)
    return header.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % BLOCK)


def end(size: int) -> bytes:
    """Return the end of an archive that has `size` bytes without it."""
    return bytes(2 * BLOCK + -(size + 2 * BLOCK) % tarfile.RECORDSIZE)


def _kind(content: bytes) -> str:
    """Return the file extension for the kind of picture that `content` is by its first bytes;
    img if the kind is unknown."""
    return next((kind for prefix, kind in KINDS.items() if content.startswith(prefix)), "img")


def _digest(digest: Any, *arrays: np.ndarray) -> str:
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
