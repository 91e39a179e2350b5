"""Which photograph goes into which shard of a pack, and one shard written so that a kill leaves it whole or not there.

The same photographs and settings give the same bytes, whoever packs and in how many threads.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from common.errors import UserError, one_line
from common.files import MIB, TEMPORARY, write_atomically
from common.progress import say
from datasets.photos import packed, tree
from launch.pack import forms

BLOCK = tarfile.BLOCKSIZE
KINDS = {
    b"\xff\xd8": "jpg", b"\x89PNG": "png", b"RIFF": "webp", b"BM": "bmp", b"II*\0": "tif", b"MM\0*": "tif", b"GIF8": "gif",
    b"P6": "ppm",
}  # fmt: skip


MADE = ("offset", "length", "checksum", "stored_heights", "stored_widths")  # what is known of a sample when it is written


@dataclasses.dataclass
class Shard:
    name: str
    numbers: list  # of its samples, in their order here
    size: int = 0  # as expected, until it is made
    made: Any = None  # what its note says, once it is whole


class Plan:
    """Which sample of a split goes into which shard: a function of the files' names, sizes and the settings alone."""

    def __init__(self, root, split, folder, options):
        self.split, self.folder = split, folder
        self.files = tree.load(os.path.join(root, split), os.path.join(folder, ".tree"))
        self.lengths, self._changed = self._stat()
        self.form, self.settings = options.form, {"form": options.form, "shard_mb": options.shard_mb}
        words = [packed.FORMATS[self.form], split, self.settings, self.files.classes, self.files.names]
        digest = hashlib.sha256(json.dumps(words, sort_keys=True).encode())
        self.identity = _digest(digest, self.files.labels, self.lengths)
        self.shards = self._deal(int(options.shard_mb * MIB) // tarfile.RECORDSIZE * tarfile.RECORDSIZE)

    def _stat(self):
        """(bytes, time of the last change) of each file."""

        def stat(numbers):
            return [(found.st_size, found.st_mtime_ns) for found in map(os.stat, map(self.files.path, numbers))]

        parts = [range(begin, min(begin + 1000, len(self.files))) for begin in range(0, len(self.files), 1000)]
        with ThreadPoolExecutor(tree.THREADS) as pool:
            return np.array([pair for part in pool.map(stat, parts) for pair in part], np.int64).T

    def _deal(self, limit):
        """Shuffled, for a reader that streams a few shards should see all classes; RandomState never changes its numbers."""
        shards, full = [], limit
        known = zip(*(array.tolist() for array in (self.lengths, self.files.heights, self.files.widths)))
        lengths = [forms.expected(self.form, *of_sample) for of_sample in known]
        for sample in np.random.RandomState(0).permutation(len(self.files)).tolist():
            size = 3 * BLOCK + lengths[sample] + -lengths[sample] % BLOCK  # two headers, a label
            if not shards or full + size > limit:
                full = 2 * BLOCK  # the archive's end
                shards.append(Shard(f"{self.split}-{len(shards):06d}.tar", []))
            shards[-1].numbers.append(sample)
            full += size
            shards[-1].size = full + -full % tarfile.RECORDSIZE
        return shards

    def sources(self, shard):
        """What the shard was made of; another size or time of one file is another shard."""
        return _digest(hashlib.sha256(self.identity.encode()), self._changed[shard.numbers], np.array(shard.numbers))

    def note_path(self, shard):
        return os.path.join(self.folder, f".{shard.name[:-4]}.json")

    def missing(self):
        """The shards that are not there, or not of these files."""
        for shard in self.shards:
            shard.made = self._note(shard)
        return [shard for shard in self.shards if not shard.made]

    def _note(self, shard):
        """What was written down when the shard was whole, or None."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(self.note_path(shard)) as file:
            note = json.load(file)
            size = os.path.getsize(os.path.join(self.folder, shard.name))
            if (note["sources"], note["size"]) == (self.sources(shard), size):
                return note
        return None

    def write_index(self):
        arrays: dict = {name: np.empty(len(self.files), np.int64) for name in ("shard", *MADE)}
        for position, shard in enumerate(self.shards):
            arrays["shard"][shard.numbers] = position
            for name in MADE:
                arrays[name][shard.numbers] = shard.made[name]
        shards = [{"name": shard.name, **{name: shard.made[name] for name in ("size", "sha256")}} for shard in self.shards]
        about = {**self.settings, "identity": self.identity, "shards": shards}
        if self.form != "original":
            arrays["special"] = np.zeros(len(self.files))  # no more
        packed.write_index(self.folder, self.split, self.files, about, arrays)


def make(plan, shard, done):
    """The shard under its name, and then its note: by the note a later start knows that it is whole."""
    path = os.path.join(plan.folder, shard.name)
    digest, made = hashlib.sha256(), {name: [] for name in MADE}
    with open(path + TEMPORARY, "wb") as file:

        def write(content):
            file.write(content)
            digest.update(content)

        def member(name, content):
            header = tarfile.TarInfo(name)  # no time, no user: the same bytes whoever packs
            header.size = len(content)
            write(header.tobuf(tarfile.USTAR_FORMAT))
            write(content)
            write(bytes(-len(content) % BLOCK))

        for sample in shard.numbers:
            content = plan.files.read(sample)
            if len(content) != plan.lengths[sample]:
                raise UserError(
                    f"{one_line(plan.files.path(sample))} changed while it was packed: start again when it is at rest"
                )
            stored, *size = forms.stored(plan.form, content, plan.files.special[sample], *plan.files.whole(sample))
            if not min(size):
                name = one_line(plan.files.path(sample))
                say(f"warning: {name} cannot be decoded: it is packed as it is, and the next one will take its place")
            for name, value in zip(MADE, (file.tell() + BLOCK, len(stored), zlib.crc32(stored), *size)):
                made[name].append(value)
            key = f"{sample:08d}"  # unique, and without the dot that ends a key
            member(f"{key}.{_kind(stored)}", stored)
            member(f"{key}.cls", b"%d" % plan.files.labels[sample])
            done(len(content))
        write(bytes(2 * BLOCK))  # the archive's end
        write(bytes(-file.tell() % tarfile.RECORDSIZE))
        whole = file.tell()
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + TEMPORARY, path)
    shard.made = {"sources": plan.sources(shard), "sha256": digest.hexdigest(), "size": whole, **made}
    write_atomically(plan.note_path(shard), json.dumps(shard.made).encode())


def _kind(content):
    """The extension of what it is, whatever its file was called."""
    return next((kind for begin, kind in KINDS.items() if content.startswith(begin)), "img")


def _digest(digest, *arrays):
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
