"""Pictures in parquet, as Hugging Face keeps them: a column `image` of bytes or {bytes, path}, and `label`,
a number.

They are written as the shards of a pack in the order of the rows, some groups of rows to each; a shard that
is there is kept.
"""

import contextlib
import dataclasses
import glob
import hashlib
import importlib
import json
import os
from collections.abc import Iterator
from typing import Any, Callable, Optional

from common.errors import UserError, file_error, one_line
from common.files import MIB, TEMPORARY, create
from launch.pack import index, labels, shards
from launch.pack.threads import Done

ENDING = ".parquet"
PER_ROW = 2048  # bytes of a shard, at most, that are not of the picture
COLUMNS = ["image", "label"]


@dataclasses.dataclass
class Rows:
    """The rows of one or more files that become one shard."""

    split: str
    name: str  # of the shard
    first_row: int  # number of the first row
    count: int = 0
    size: int = 0  # in bytes, as expected
    # a file, and the number of a group of rows in it
    groups: list[tuple[str, int]] = dataclasses.field(default_factory=list)


def files_of(root: str) -> list[str]:
    """Return `root` if it is a file of parquet; of a folder, the files of parquet in it, else those in its
    folder data. A folder with others (but .cache and .git), such as one of photographs, has none.

    UserError if there are some in both: they may be two data sets.
    """
    if root.endswith(ENDING) and os.path.isfile(root):
        return [root]
    if not os.path.isdir(root):
        return []
    folders = {entry.name for entry in os.scandir(root) if entry.is_dir()}
    has_others = bool(folders - {"data", ".cache", ".git"})
    if has_others:
        return []
    in_root, in_data = (
        sorted(glob.glob(f"{glob.escape(folder)}/*{ENDING}")) for folder in (root, f"{root}/data")
    )
    if in_root and in_data:
        raise UserError(f"{one_line(root)} and its folder data both have files of parquet: give one of them")
    return in_root or in_data


def plan(paths: list[str], shard_mb: float, classes_file: Optional[str]) -> tuple[list[Rows], list[str], str]:
    """Return (the shards to make, names of the classes, a digest of the setting and the files).

    The names are those of `classes_file`, else those that the files say. The digest has the names, sizes and
    labels of the files, not the pictures, which are long.
    """
    place = os.path.dirname(paths[0]) or "."
    tables = index.by_split(paths, place)
    classes = _names_of_classes(
        [path for split_paths in tables.values() for path in split_paths], classes_file
    )
    planned: list[Rows] = []
    examples: dict[labels.Label, str] = {}
    digest = hashlib.sha256(str(shard_mb).encode())
    for split, split_paths in tables.items():
        planned.append(Rows(split, f"{split}-000000.tar", 0))
        first_index = len(planned) - 1
        for path in split_paths:
            with _open_table(path) as file:
                row_labels = _call_arrow(path, lambda: file.read(["label"])).column("label").to_pylist()
                examples.update(dict.fromkeys(_labels_in({*row_labels}, path), path))
                digest.update(
                    json.dumps([split, os.path.basename(path), os.path.getsize(path), row_labels]).encode()
                )
                for number in range(file.num_row_groups):
                    group = file.metadata.row_group(number)
                    last = planned[-1]
                    if last.groups and last.size + group.total_byte_size > shard_mb * MIB:
                        last = Rows(
                            split,
                            f"{split}-{len(planned) - first_index:06d}.tar",
                            last.first_row + last.count,
                        )
                        planned.append(last)
                    last.groups.append((path, number))
                    last.count += group.num_rows
                    last.size += group.total_byte_size + PER_ROW * group.num_rows
    labels.number_classes(examples, classes, place)  # an error before hours of work
    return planned, classes, digest.hexdigest()


def _names_of_classes(paths: list[str], classes_file: Optional[str]) -> list[str]:
    """Return the names of the classes from `classes_file`, else from the tables, which have to agree;
    [] without any."""
    names = []
    for path in paths:
        with _open_table(path) as file:
            names.append(_class_names(file.schema_arrow))
        if names[-1] != names[0]:
            raise UserError(
                f"{one_line(path)} names other classes than {one_line(paths[0])}: they do not belong together"
            )
    if classes_file:
        return labels.read_names(classes_file)
    labels.require_distinct_names(names[0], paths[0])
    return names[0]


def _labels_in(values: set[Optional[int]], path: str) -> Iterator[labels.Label]:
    """Yield the labels of a column of the table at `path`, without those that are for no class."""
    for value in values:
        try:
            label = labels.parse(value, one_line(path))
        except labels.Unclear as error:
            raise UserError(f"{error}: correct the table") from None
        if label is not None and label != labels.NO_CLASS:
            yield label


def write(rows: Rows, folder: str, done: Done) -> None:
    """Write a shard."""
    path = os.path.join(folder, rows.name)
    number = rows.first_row
    with create(path + TEMPORARY) as out:
        for source, group in rows.groups:
            with _open_table(source) as file:
                table = _call_arrow(source, lambda: file.read_row_group(group, COLUMNS))  # noqa: B023
            for picture, label in zip(*(column.to_pylist() for column in table.columns)):
                content = picture.get("bytes") if isinstance(picture, dict) else picture
                class_number = labels.NO_CLASS if label is None else label
                out.write(shards.pair(number, content or b"", class_number))
                number += 1
        out.write(shards.end(out.tell()))
        out.flush()
        os.fsync(out.fileno())
    os.replace(path + TEMPORARY, path)
    done(rows.size)


def _open_table(path: str) -> Any:
    """Open a file of parquet; UserError if it is damaged, or lacks a column."""
    try:
        arrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    except ImportError as error:
        raise UserError(
            f"{one_line(path)} needs pyarrow: pip install .[parquet] ({one_line(error)})"
        ) from None
    types: Any = arrow.types
    file = _call_arrow(path, lambda: parquet.ParquetFile(path))
    kinds = {field.name: field.type for field in file.schema_arrow}
    image, label = (kinds.get(name) for name in COLUMNS)
    if image and types.is_struct(image):
        image = {field.name: field.type for field in image}.get("bytes")
    if (
        not image
        or not (types.is_binary(image) or types.is_large_binary(image))
        or not label
        or not types.is_integer(label)
    ):
        columns = one_line(", ".join(f"{name} ({kind})" for name, kind in kinds.items()))[:200]
        raise UserError(
            f"{one_line(path)} needs columns image, of bytes, and label, a number: it has {columns}"
        )
    return file


def _call_arrow(path: str, call: Callable[[], Any]) -> Any:
    """Return call(); raise an error of the file or of pyarrow as a UserError that names the file."""
    arrow: Any = importlib.import_module("pyarrow")
    try:
        return call()
    except (arrow.ArrowException, OSError) as error:
        text = f"{one_line(path)} cannot be read: {one_line(error)[:200]}; fetch it again"
        if isinstance(error, OSError):
            raise file_error(error, text) from None
        raise UserError(text) from None


def _class_names(schema: Any) -> list[str]:
    """Return the names of the classes in what Hugging Face's datasets keeps with the columns;
    [] without it."""
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, RecursionError):
        names = json.loads(schema.metadata[b"huggingface"])["info"]["features"]["label"]["names"]
        if isinstance(names, list):
            return [str(name) for name in names]
    return []
