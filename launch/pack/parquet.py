"""Pictures in parquet, as Hugging Face keeps them: a column `image` of bytes or {bytes, path}, and `label`, a number.

They are written as the shards of a pack in the order of the rows, some groups of rows to each; a shard that is there is kept.
"""

import argparse
import contextlib
import dataclasses
import glob
import hashlib
import importlib
import json
import os
from typing import Any

from common.errors import UserError, one_line
from common.files import MIB, TEMPORARY, create
from common.progress import Progress
from launch.pack import index, shards
from launch.pack.threads import Done, in_threads

ENDING = ".parquet"
COLUMNS = ["image", "label"]


@dataclasses.dataclass
class ShardOfRows:
    name: str
    groups: list[tuple[str, int]]  # a file and the number of a group of rows in it
    first: int  # number of its first row
    size: int = 0  # in bytes, as expected


@dataclasses.dataclass
class RowsPlan:
    """The groups of rows that make the shards of a split."""

    split: str
    shards: list[ShardOfRows]
    identity: str  # digest of the files and the settings


def files_of(root: str) -> list[str]:
    """Return the file of parquet that `root` is, or those in this folder or in the folder data below it."""
    if root.endswith(ENDING):
        return [root]
    return next(filter(None, (sorted(glob.glob(f"{glob.escape(root)}{below}/*{ENDING}")) for below in ("", "/data"))), [])


def plan(paths: list[str], options: argparse.Namespace) -> tuple[list[RowsPlan], list[str]]:
    """Return (what to make, names of the classes as the files say them)."""
    plans, classes = [], []
    for split, of_split in index.by_split(paths, os.path.dirname(paths[0]) or ".").items():
        digest = hashlib.sha256(json.dumps([split, options.shard_mb]).encode())
        made: list[ShardOfRows] = []
        rows = 0
        for path in of_split:
            with _opened(path) as file:
                classes = classes or _classes(file.schema_arrow)
                status = os.stat(path)
                digest.update(json.dumps([os.path.basename(path), status.st_size, status.st_mtime_ns]).encode())
                for number in range(file.num_row_groups):
                    group = file.metadata.row_group(number)
                    if not made or made[-1].size + group.total_byte_size > options.shard_mb * MIB:
                        made.append(ShardOfRows(f"{split}-{len(made):06d}.tar", [], rows))
                    made[-1].groups.append((path, number))
                    made[-1].size += group.total_byte_size
                    rows += group.num_rows
        plans.append(RowsPlan(split, made, digest.hexdigest()))
    return plans, classes


def make(plans: list[RowsPlan], folder: str, workers: int) -> None:
    """Write the shards that are missing."""
    missing = [one for plan in plans for one in plan.shards if not os.path.exists(os.path.join(folder, one.name))]
    progress = Progress("packing", len(missing), "shards", sum(one.size for one in missing))
    in_threads(workers, lambda one, done: _write(one, folder, done), missing, progress)


def _write(shard: ShardOfRows, folder: str, done: Done) -> None:
    path, row = os.path.join(folder, shard.name), shard.first
    with create(path + TEMPORARY) as out:
        for source, number in shard.groups:
            with _opened(source) as file:
                for pictures, labels in (map(_values, batch.columns) for batch in file.iter_batches(64, [number], COLUMNS)):
                    for picture, label in zip(pictures, labels):
                        content = picture.get("bytes") if isinstance(picture, dict) else picture
                        if content is not None:
                            out.write(shards.pair(row, content, -1 if label is None else label))
                        row += 1
        out.write(shards.end(out.tell()))
        out.flush()
        os.fsync(out.fileno())
    os.replace(path + TEMPORARY, path)
    done(shard.size)


def _values(column):
    return column.to_pylist()


@contextlib.contextmanager
def _opened(path: str) -> Any:
    """Open a file of parquet; UserError if it is damaged, or lacks a column."""
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UserError(f"{one_line(path)} needs pyarrow: pip install .[parquet] ({one_line(error)})") from None
    arrow: Any = importlib.import_module("pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            kinds = {field.name: field.type for field in file.schema_arrow}
            if not {*COLUMNS} <= kinds.keys() or not arrow.types.is_integer(kinds["label"]):
                there = one_line(", ".join(f"{name} ({kind})" for name, kind in kinds.items()))[:200]
                raise UserError(f"{one_line(path)} needs columns image, of bytes, and label, a number: it has {there}")
            yield file
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{one_line(path)} cannot be read: {one_line(error)[:200]}; fetch it again") from None


def _classes(schema) -> list[str]:
    """Return the names of the classes in what Hugging Face's datasets keeps with the columns; [] without it."""
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        names = json.loads(schema.metadata[b"huggingface"])["info"]["features"]["label"]["names"]
        return [str(name) for name in names]
    return []
