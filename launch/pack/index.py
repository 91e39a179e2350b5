"""The index of tar shards that WebDataset or another program has made, with which they are a pack.

Each sample is KEY.jpg (or .png and others) with its class in KEY.cls, in KEY.json as "label", or as the name
of KEY's folder.
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
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from common import storage
from common.address import is_bucket
from common.alive.patience import Patience
from common.errors import UserError, count, one_line, require_folder
from common.files import open_regular
from common.progress import Progress, say
from common.storage import bucket, ranges
from datasets import untrusted
from datasets.crc import crc32
from datasets.packs import packed
from datasets.photos import files, splits, tree
from launch.pack import labels
from launch.pack.threads import in_threads

PICTURES = (*(ending[1:] for ending in files.EXTENSIONS), "gif", "img")  # as a pack has them, too
WINDOW = 4 << 20  # bytes that are read at a time
LONGEST_LABEL = 1 << 20  # bytes
WORDS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "eval"),
    "test": ("test", "testing"),
}

ReadRange = Callable[[int, int], bytes]  # the bytes of a shard, from where and how many
# Label, name, place and length of a picture, its checksum, what it is.
Row = tuple[Optional[labels.Label], str, int, int, int, tree.Verdict]


@dataclasses.dataclass
class IndexedShard:
    name: str
    size: int
    sha256: str
    rows: list[Row]


def index(
    place: str,
    options: argparse.Namespace,
    names: Optional[dict[str, list[str]]] = None,
    classes: Sequence[str] = (),
) -> None:
    """Write the indexes beside the shards of a folder or bucket; without a shard for val, hold out a fifth.

    `names`: the shards of each split; `classes`: the names of the classes; those of the folder where it says
    them.
    """
    sizes, reader_of = (_list_bucket if is_bucket(place) else _list_folder)(place)
    if not options.overwrite and sizes.keys() & {packed.index_path("", split) for split in splits.SPLITS}:
        raise UserError(f"{one_line(place)} has an index: give --overwrite true to replace it")
    names = names or by_split(sorted(name for name in sizes if name.endswith(".tar")), place)
    if options.classes:
        classes = labels.read_names(options.classes)
    elif labels.NAMES in sizes:
        classes = labels.parse_names(reader_of(labels.NAMES)(0, sizes[labels.NAMES]), labels.NAMES) or classes
    shards = [name for shard_names in names.values() for name in shard_names]
    indexed: dict[str, IndexedShard] = {}

    def work(name: str, done: Callable[[int], None]) -> None:
        indexed[name] = _index_shard(f"{place}/{name}", name, sizes[name], reader_of(name))
        done(sizes[name])

    progress = Progress("indexing", len(shards), "shards", sum(sizes[name] for name in shards))
    in_threads(options.workers, work, shards, progress)
    examples: dict[labels.Label, str] = {}
    for shard in shards:
        for label, name, *_, verdict in indexed[shard].rows:
            if label is not None and not isinstance(verdict, str):
                examples.setdefault(label, f"{shard}:{name}")
    if not examples:
        raise UserError(
            f"{one_line(place)} has no picture with a class: each needs KEY.cls, KEY.json or a folder "
            "in its name"
        )
    classes, class_of = labels.number_classes(examples, classes, place)
    parts = {
        split: _packed_split(place, [indexed[name] for name in shard_names], classes, class_of)
        for split, shard_names in names.items()
    }
    if "val" not in parts:
        parts = dict(zip(splits.SPLITS, splits.hold_out(parts["train"], options.seed)))
    with tempfile.TemporaryDirectory() as folder:
        for split, part in parts.items():
            _write(folder, split, part)
            storage.publish(packed.index_path(folder, split), packed.index_path(place, split))
    counts = ", ".join(f"{len(part)} for {split}" for split, part in parts.items())
    for part in parts.values():
        for reason, omitted in part.left_out.items():
            say(f"left out, {reason}: {len(omitted)}, the first {one_line(omitted[0])}")
    print(
        (
            f"{one_line(place)}: {counts}, {len(classes)} classes, in {len(shards)} shards "
            f"({progress.describe()})"
        ),
        flush=True,
    )


def by_split(names: Sequence[str], place: str) -> dict[str, list[str]]:
    """Return {"train": names, "val": names} by the words in the names;
    all are for training if none has such a word."""
    names_of: dict[str, list[str]] = defaultdict(list)
    for name in names:
        words = re.findall("[a-z]+", os.path.basename(name).lower())
        split = next((split for split, split_words in WORDS.items() if {*words} & {*split_words}), "")
        names_of[split].append(name)
    unmarked = names_of.pop("", [])
    training = names_of.pop("train", [])
    if not names or (unmarked and (training or names_of)) or (names_of and not training):
        problem = f"{one_line((unmarked or names)[0])}, and none for training" if names else "no .tar"
        raise UserError(
            f"{one_line(place)} has {problem}: give files that all have train or val in their names, or "
            "none of them"
        )
    if "val" in names_of and "test" in names_of:
        say(
            f"left out, for testing: {count(len(names_of['test']), 'file')}, the first "
            f"{one_line(names_of['test'][0])}"
        )
    result = {"train": training or unmarked}
    if held_out := names_of["val"] or names_of["test"]:
        result["val"] = held_out
    return result


# --- Where the shards are -----------------------------------------------------------------------------------


def _list_folder(place: str) -> tuple[dict[str, int], Callable[[str], ReadRange]]:
    """Return ({name: size} of the visible files of a folder, a function from a name to its ReadRange);
    UserError if the folder is missing, or the index could not be written to it."""
    require_folder("the folder", place, "give the one that has the shards")
    with os.scandir(place) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".") and not entry.is_dir()]
    try:
        sizes = {entry.name: entry.stat().st_size for entry in visible}
    except OSError as error:  # a link to a shard that is gone
        raise files.unreadable_error(error) from None
    if not os.access(place, os.W_OK):
        raise UserError(
            f"{one_line(place)} cannot be written to, and the index belongs there: give a folder that can"
        )
    return sizes, functools.partial(_file_reader, place)


def _file_reader(place: str, name: str) -> ReadRange:
    def read_range(begin: int, length: int) -> bytes:
        with open_regular(os.path.join(place, name)) as file:
            file.seek(begin)
            return file.read(length)

    return read_range


def _list_bucket(place: str) -> tuple[dict[str, int], Callable[[str], ReadRange]]:
    """Return what _list_folder() returns, for the address of a bucket."""
    store = bucket.Bucket(place)
    items = {store.relative(item.key): item for item in store.items(store.key_prefix())}
    reader = ranges.Ranges(store, Patience())
    sizes = {name: item.size for name, item in items.items() if "/" not in name and not name.startswith(".")}
    return sizes, lambda name: functools.partial(reader.read, items[name])


# --- What is in a shard -------------------------------------------------------------------------------------


class _Stream(io.RawIOBase):
    """A shard from its beginning to its end, with the SHA-256 of what was read."""

    def __init__(self, size: int, read_range: ReadRange) -> None:
        self.digest = hashlib.sha256()
        self._position = 0
        self._size = size
        self._read_range = read_range

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._position)
        content = self._read_range(self._position, length) if length else b""
        self.digest.update(content)
        self._position += len(content)
        buffer[: len(content)] = content
        return len(content)


def _index_shard(path: str, name: str, size: int, read_range: ReadRange) -> IndexedShard:
    """Return the rows of a shard and its SHA-256; UserError if it is damaged, or a label in it is unclear."""
    stream = _Stream(size, read_range)
    samples = defaultdict(dict)
    try:
        for member, place, content in untrusted.in_tar(io.BufferedReader(stream, WINDOW), _is_wanted):
            key, kind = _key_and_kind(member)
            sample = samples[key]
            kind = "picture" if kind in PICTURES else kind
            if kind in sample:
                raise ValueError(f"{one_line(key)[:80]} has two of {kind}")
            if kind == "picture":
                verdict = tree.judge_open(io.BytesIO(content), f"{path}:{member}")
                sample[kind] = member, place, len(content), crc32(content), verdict
            elif kind in labels.FILES:
                sample[kind] = _label_in(member, kind, content)
            else:
                sample[kind] = None  # such as KEY.mask.png
        no_picture = 0, 0, 0, "without a picture KEY.jpg, or of another kind"
        rows = [
            (labels.of_sample(key, sample), *sample.get("picture", (key, *no_picture)))
            for key, sample in samples.items()
        ]
    except labels.Unclear as error:
        raise UserError(f"{one_line(path)}: {error}: correct it") from None
    except (*untrusted.DAMAGES, bucket.ObjectChanged) as error:
        reason = one_line(error) or "it changes while it is read"
        raise UserError(f"{one_line(path)} cannot be read: {reason[:200]}; make or fetch it again") from None
    return IndexedShard(name, size, stream.digest.hexdigest(), rows)


def _key_and_kind(member: str) -> tuple[str, str]:
    """Return WebDataset's key of a file, which ends at the first dot of its name,
    and what follows in lower case."""
    folder, name = os.path.split(member)
    key, _, kind = name.partition(".")
    return os.path.join(folder, key), kind.lower()


def _is_wanted(member: str) -> bool:
    kind = _key_and_kind(member)[1].rpartition(".")[2]
    return not os.path.basename(member).startswith(".") and kind in (*PICTURES, *labels.FILES)


def _label_in(member: str, kind: str, content: bytes) -> Optional[labels.Label]:
    """Return the label in KEY.cls or KEY.json; None if there is none."""
    name = one_line(member)[:80]
    if len(content) > LONGEST_LABEL:
        raise ValueError(f"{name} is too long for a label")
    text = content.decode("utf-8-sig")
    if kind == "cls":
        return labels.parse(text, name)
    row: object = json.loads(text)
    return labels.parse(row.get("label") if isinstance(row, dict) else None, name)


# --- All shards together ------------------------------------------------------------------------------------


class _Sample(NamedTuple):
    """A picture with a class.

    All fields but its name are arrays of the index, under these names (packed.PER_SAMPLE).
    """

    labels: int
    name: str
    shard: int
    offset: int
    length: int
    checksum: int
    special: int
    widths: int
    heights: int


def _packed_split(
    place: str, shards: list[IndexedShard], classes: list[str], class_of: dict[labels.Label, int]
) -> packed.Packed:
    """Return the samples of a split, sorted by class and name, from its shards;
    UserError if they have none."""
    samples, left_out = _samples_of(shards, class_of)
    if not samples:
        first_name = one_line(shards[0].name)
        raise UserError(
            f"{one_line(place)} has no picture with a class in {first_name} and the others like it"
        )
    samples.sort(key=lambda sample: (sample.labels, os.path.split(sample.name)))
    columns = dict(zip(_Sample._fields, zip(*samples)))
    names = list(columns.pop("name"))
    arrays = {name: np.array(values, packed.PER_SAMPLE[name]) for name, values in columns.items()}
    return packed.Packed(
        place,
        classes,
        names,
        **arrays,
        left_out=left_out,
        shards=[{"name": shard.name, "size": shard.size, "sha256": shard.sha256} for shard in shards],
        identity="",
        form="original",
        stored_widths=arrays["widths"],
        stored_heights=arrays["heights"],
        number=np.arange(len(names)),
        arrival=None,
    )


def _samples_of(
    shards: list[IndexedShard], class_of: dict[labels.Label, int]
) -> tuple[list[_Sample], dict[str, list[str]]]:
    """Return (samples, {reason: names of the pictures left out for it}) of these shards."""
    samples = []
    left_out = defaultdict(list)
    taken = set()
    for shard_index, shard in enumerate(shards):
        for label, name, begin, length, checksum, verdict in shard.rows:
            if name in taken:  # keys may begin anew in each shard
                name = f"{shard.name[:-4]}/{name}"
            taken.add(name)
            if isinstance(verdict, str):
                left_out[verdict].append(name)
            elif label is None:
                left_out["without a label"].append(name)
            else:
                samples.append(_Sample(class_of[label], name, shard_index, begin, length, checksum, *verdict))
    return samples, dict(left_out)


def _write(folder: str, split: str, samples: Any) -> None:
    """Write the index of a split; shards without samples of it are dropped from `samples`."""
    used = np.unique(samples.shard)  # others have samples that were left out, or are of the other split
    samples.shards = [samples.shards[number] for number in used]
    samples.shard = np.searchsorted(used, samples.shard)
    digest = hashlib.sha256(json.dumps([split, samples.shards, samples.classes, samples.names]).encode())
    digest.update(samples.labels.tobytes())
    packed.write_index(
        folder,
        split,
        samples,
        {"shards": samples.shards, "identity": digest.hexdigest(), "form": samples.form},
        {},
    )
