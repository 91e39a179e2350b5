"""The index of tar shards that WebDataset or another program has made, with which they are a pack.

Each sample is KEY.jpg (or jpeg, png, webp) with its class in KEY.cls, in KEY.json as "label", or as the name of KEY's folder.
"""

import argparse
import dataclasses
import functools
import hashlib
import io
import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, Union

import numpy as np

from common import storage
from common.alive.patience import Patience
from common.errors import UserError, count, one_line, require_folder
from common.files import open_regular
from common.progress import Progress, say
from common.storage import bucket, ranges
from common.world.folders import is_bucket
from datasets import untrusted
from datasets.crc import crc32
from datasets.photos import packed, splits, tree
from launch.pack.threads import in_threads

PICTURES = ("jpg", "jpeg", "png", "webp")
LABELS = ("cls", "json")
WINDOW = 4 << 20  # bytes that are read at a time
LONGEST_LABEL = 1 << 20  # bytes
MOST_CLASSES = 100_000  # where nothing names them
WORDS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "eval"), "test": ("test", "testing")}
NAMES = "classnames.txt"  # the file beside the shards that names their classes, one a line

Part = Callable[[int, int], bytes]  # the bytes of a shard, from where and how many
Label = Union[int, str, None]
Row = tuple[Label, str, int, int, int, tree.Verdict]  # label, name, place and length of a picture, its checksum, what it is


@dataclasses.dataclass
class Indexed:
    name: str
    size: int
    sha256: str
    rows: list[Row]


def index(place: str, options: argparse.Namespace, classes: Sequence[str] = ()) -> None:
    """Write the indexes beside the shards of a folder or bucket, of all of which a fifth is held out if no name says val.

    `classes`: their names, if the caller knows them.
    """
    sizes, part_of = (_of_bucket if is_bucket(place) else _of_folder)(place)
    if not options.overwrite and sizes.keys() & {packed.index_path("", split) for split in splits.SPLITS}:
        raise UserError(f"{one_line(place)} has an index: give --overwrite true to replace it")
    names = by_split(sorted(name for name in sizes if name.endswith(".tar")), place)
    shards = [name for of_split in names.values() for name in of_split]
    found: dict[str, Indexed] = {}

    def work(name: str, done: Callable[[int], None]) -> None:
        found[name] = _read(f"{place}/{name}", name, sizes[name], part_of(name))
        done(sizes[name])

    progress = Progress("indexing", len(shards), "shards", sum(sizes[name] for name in shards))
    in_threads(options.workers, work, shards, progress)
    classes = _class_names(options.classes, NAMES in sizes and part_of(NAMES)(0, sizes[NAMES])) or classes
    classes, numbers = _numbered({row[0] for shard in found.values() for row in shard.rows}, classes, place)
    parts = {split: _part(place, [found[name] for name in of_split], classes, numbers) for split, of_split in names.items()}
    if "val" not in parts:
        parts = dict(zip(splits.SPLITS, splits.hold_out(parts["train"], options.seed)))
    with tempfile.TemporaryDirectory() as folder:
        for split, part in parts.items():
            _write(folder, split, part)
            storage.publish(packed.index_path(folder, split), packed.index_path(place, split))
    counts = ", ".join(f"{len(part)} for {split}" for split, part in parts.items())
    for part in parts.values():
        for reason, left in part.left_out.items():
            say(f"left out, {reason}: {len(left)}, the first {one_line(left[0])}")
    print(f"{one_line(place)}: {counts}, {len(classes)} classes, in {len(shards)} shards ({progress.describe()})", flush=True)


def by_split(names: Sequence[str], place: str) -> dict[str, list[str]]:
    """Return {"train": names, "val": names} by the words in them; all are for training if no name says anything."""
    said: dict[str, list[str]] = defaultdict(list)
    for name in names:
        words = re.findall("[a-z]+", os.path.basename(name).lower())
        said[next((split for split, its in WORDS.items() if {*words} & {*its}), "")].append(name)
    silent, training = said.pop("", []), said.pop("train", [])
    if not names or (silent and (training or said)) or (said and not training):
        wrong = f"{one_line((silent or names)[0])}, and none for training" if names else "no .tar"
        raise UserError(f"{one_line(place)} has {wrong}: give files that all have train or val in their names, or none of them")
    if "val" in said and "test" in said:
        say(f"left out, for testing: {count(len(said['test']), 'file')}, the first {one_line(said['test'][0])}")
    held = said["val"] or said["test"]
    return {"train": training or silent, **({"val": held} if held else {})}


# --- Where the shards are ----------------------------------------------------------------------------------------------


def _of_folder(place):
    """Return ({name: size}, a function that returns the Part of a name)."""
    require_folder("the folder", place, "give the one that has the shards")
    with os.scandir(place) as entries:
        sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file() and not entry.name.startswith(".")}
    return sizes, functools.partial(_part_of_file, place)


def _part_of_file(place, name):
    def part(begin, length):
        with open_regular(os.path.join(place, name)) as file:
            file.seek(begin)
            return file.read(length)

    return part


def _of_bucket(place):
    store = bucket.Bucket(place)
    items = {store.relative(item.key): item for item in store.items(store.below())}
    reader = ranges.Ranges(store, Patience())
    sizes = {name: item.size for name, item in items.items() if "/" not in name and not name.startswith(".")}
    return sizes, lambda name: functools.partial(reader.read, items[name])


# --- What is in a shard ------------------------------------------------------------------------------------------------


class _Stream(io.RawIOBase):
    """A shard from its beginning to its end, with the SHA-256 of what was read."""

    def __init__(self, size: int, part: Part) -> None:
        self.digest = hashlib.sha256()
        self._at, self._size = 0, size
        self._part = part

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._at)
        content = self._part(self._at, length) if length else b""
        self.digest.update(content)
        self._at += len(content)
        buffer[: len(content)] = content
        return len(content)


def _read(path, name, size, part) -> Indexed:
    stream, samples = _Stream(size, part), defaultdict(dict)
    try:
        for member, place, content in untrusted.in_tar(io.BufferedReader(stream, WINDOW), _is_wanted):
            key, kind = _key_and_kind(member)
            its, kind = samples[key], "picture" if kind in PICTURES else kind
            if kind in its:
                raise ValueError(f"{one_line(key)[:80]} has two of {kind}")
            if kind == "picture":
                verdict = tree.judge_open(io.BytesIO(content), f"{path}:{member}")
                its[kind] = member, place, len(content), crc32(content), verdict
            elif len(content) > LONGEST_LABEL:
                raise ValueError(f"{one_line(member)[:80]} is too long for a label")
            else:
                its[kind] = content
        rows = [(_label(key, its), *its["picture"]) for key, its in samples.items() if "picture" in its]
    except (*untrusted.DAMAGES, bucket.ObjectChanged) as error:
        reason = one_line(error) or "it changes while it is read"
        raise UserError(f"{one_line(path)} cannot be read: {reason[:200]}; make or fetch it again") from None
    return Indexed(name, size, stream.digest.hexdigest(), rows)


def _key_and_kind(member):
    """Return WebDataset's key of a file, which ends at the first dot of its name, and what follows in lower case."""
    folder, name = os.path.split(member)
    key, _, kind = name.partition(".")
    return os.path.join(folder, key), kind.lower()


def _is_wanted(member):
    return not os.path.basename(member).startswith(".") and _key_and_kind(member)[1] in (*PICTURES, *LABELS)


def _label(key, its) -> Label:
    said: Any = its["cls"].decode().strip() if "cls" in its else None
    if said is None and "json" in its:
        row = json.loads(its["json"])
        said = row.get("label") if isinstance(row, dict) else None
    if said is None:
        return os.path.basename(os.path.dirname(key)) or None
    if isinstance(said, bool) or not isinstance(said, (int, str)):
        raise ValueError(f"the label of {one_line(key)[:80]} is neither a number nor a name")
    if re.fullmatch("-?[0-9]{1,9}", str(said)):
        return int(said) if int(said) >= 0 else None  # -1: it is not known
    return said or None


# --- All shards together -----------------------------------------------------------------------------------------------


def _class_names(path, beside):
    """Return the names of --classes, or of the file beside the shards."""
    content = Path(path).read_bytes() if path else beside or b""
    return [line for line in map(str.strip, content.decode("utf-8-sig").splitlines()) if line]


def _numbered(labels, classes, place):
    """Return (names of the classes, {label: its number})."""
    labels = labels - {None}
    if not labels:
        raise UserError(f"{one_line(place)} has no picture with a class: each needs KEY.cls, KEY.json or a folder in its name")
    if all(isinstance(label, int) for label in labels):
        most = max(labels) + 1
        if most > (len(classes) or MOST_CLASSES):
            named = f"{len(classes)} names of classes"
            raise UserError(f"{one_line(place)} has class {most - 1}, and {named}: give --classes FILE")
        return classes or [str(number) for number in range(most)], {label: label for label in labels}
    unnamed = labels - {*classes} if classes else {label for label in labels if isinstance(label, int)}
    if unnamed:
        name = one_line(min(map(str, unnamed)))
        raise UserError(f"{one_line(place)} has class {name}, which is not named as the others are: give --classes FILE")
    classes = classes or sorted(labels)
    return classes, {label: number for number, label in enumerate(classes)}


def _part(place, shards, classes, numbers) -> packed.Packed:
    left_out, rows, where = defaultdict(list), [], {}
    for number, shard in enumerate(shards):
        for label, name, begin, length, checksum, verdict in shard.rows:
            if where.setdefault(name, shard.name) != shard.name:
                both = f"{one_line(where[name])} and {one_line(shard.name)}"
                raise UserError(f"{one_line(place)} has {one_line(name)[:80]} twice, in {both}: each key is one picture's")
            if label is None or isinstance(verdict, str):
                left_out["without a label" if label is None else verdict].append(name)
            else:
                rows.append((numbers[label], name, number, begin, length, checksum, *verdict))
    if not rows:
        first = one_line(shards[0].name)
        raise UserError(f"{one_line(place)} has no picture with a class in {first} and the others like it")
    rows.sort(key=lambda row: (row[0], os.path.split(row[1])))
    order = ("labels", "names", "shard", "offset", "length", "checksum", "special", "widths", "heights")
    columns = dict(zip(order, zip(*rows)))
    names = list(columns.pop("names"))
    arrays = {name: np.array(values, packed.PER_SAMPLE[name]) for name, values in columns.items()}
    about = [{"name": shard.name, "size": shard.size, "sha256": shard.sha256} for shard in shards]
    return packed.Packed(
        place, classes, names, **arrays, left_out=dict(left_out), shards=about, identity="", form="original",
        stored_widths=arrays["widths"], stored_heights=arrays["heights"], number=np.arange(len(names)), arrival=None,
    )  # fmt: skip


def _write(folder, split, part):
    used = np.unique(part.shard)  # others have samples that were left out, or are of the other split
    part.shards, part.shard = [part.shards[number] for number in used], np.searchsorted(used, part.shard)
    digest = hashlib.sha256(json.dumps([split, part.shards, part.classes, part.names]).encode())
    digest.update(part.labels.tobytes())
    packed.write_index(folder, split, part, {"shards": part.shards, "identity": digest.hexdigest(), "form": part.form}, {})
