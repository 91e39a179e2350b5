"""Photographs with labels from a manifest: a line of JSON for each, as ModelArts,
PAI iTAG or SageMaker Ground Truth writes it.

    {"source": "s3://b/1.jpg", "usage": "TRAIN", "annotation": [{"type": "modelarts/image_classification",
        "name": "rose"}]}
    {"data": {"source": "oss://b/1.jpg"}, "label-7": {"results": [{"type": "survey/value", "data": "rose"}]}}
    {"source-ref": "s3://b/1.jpg", "job-metadata": {"type": "groundtruth/image-classification",
        "class-name": "rose"}}

Each is one line. The name of a sample is its path below the folder that all labelled pictures have in common.
So a manifest of ROOT/CLASS/* gives the samples of ROOT in the same order, and the same ones are held out.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, Optional

import numpy as np

from common import storage
from common.address import INPUT_DIR, is_address, is_bucket, is_fetchable_name, local_folder
from common.errors import UserError, file_error, one_line
from common.files import open_regular
from datasets.photos import tree

LONGEST_LINE = 1 << 20  # bytes
MAX_PROBED = 100  # pictures that are looked for beside the manifest
STAGES = ("-verify", "-check", "")  # of iTAG, the last first: each corrects the one before it
UNLABELLED = "without a label"
UNUSED = "neither for TRAIN nor for EVAL"

Labelled = dict[str, tuple[str, bool]]  # {bucket and key, or path: (class, whether it is for EVAL)}


@dataclasses.dataclass
class LabelledTree(tree.Tree):
    """A Tree whose labels come from a manifest."""

    manifest: str

    def describe(self) -> str:
        return f"labels of {one_line(self.manifest)}: {super().describe()}"


def load(
    address: str, inputs: str = INPUT_DIR, index_folder: Optional[str] = None
) -> tuple[list[tree.Tree], bool]:
    """Return ([training, validation], False), or ([all], True) if no line is for EVAL.

    The pictures lie beside the manifest, or are fetched to `inputs` from the bucket that it names.
    """
    path = address
    if is_address(address):
        folder = storage.fetch(address, local_folder(address, os.path.join(inputs, "manifests")))
        path = os.path.join(folder, os.path.basename(address))
    labelled, left_out, schemes = _read(path, one_line(address))
    root = os.path.commonpath({os.path.dirname(key) for key in labelled})
    by_name = {}
    while labelled:  # a million of them need memory once, not twice
        key, value = labelled.popitem()
        by_name[key[len(root) :].lstrip("/")] = value
    folder = _folder_beside(os.path.dirname(path), root, by_name) or _fetch_pictures(
        address, schemes, root, by_name, inputs
    )
    classes = sorted({label for label, _ in by_name.values()})
    if len(classes) == 1:
        raise UserError(
            f"{one_line(address)} has one class, {one_line(classes[0])}: label pictures of another one, too"
        )
    numbers = {label: number for number, label in enumerate(classes)}
    entries = [(numbers[label], name) for name, (label, _) in by_name.items()]
    entries.sort(key=lambda entry: (entry[0], os.path.split(entry[1])))
    digest = hashlib.sha256(json.dumps(classes).encode())
    for number, name in entries:
        digest.update(f"{number} {name}\n".encode())
    mtimes = {
        subfolder: tree.mtime_ns(os.path.join(folder, subfolder))
        for subfolder in sorted(set(map(os.path.dirname, by_name)))
    }
    state = [digest.hexdigest(), mtimes]
    full_tree = tree.indexed(
        address, folder, classes, state, lambda _: entries, index_folder or inputs, _judge_if_exists
    )
    full_tree = LabelledTree(
        **{**vars(full_tree), "left_out": {**full_tree.left_out, **left_out}}, manifest=address
    )
    is_held_out = np.array([by_name[name][1] for name in full_tree.names])
    if not is_held_out.any():
        return [full_tree], True
    if is_held_out.all():
        raise UserError(f"{one_line(address)} has no picture for TRAIN that can be read")
    return [
        full_tree.pick(np.flatnonzero(~is_held_out)),
        dataclasses.replace(full_tree, left_out={}).pick(np.flatnonzero(is_held_out)),
    ], False


def _judge_if_exists(path: str) -> tree.Verdict:
    return tree.judge(path) if os.path.lexists(path) else "not there"


# --- Where the pictures lie ---------------------------------------------------------------------------------


def _folder_beside(folder: str, root: str, names: Iterable[str]) -> Optional[str]:
    """Return the folder of the pictures: `folder`, or one below it that ends as `root` does; else None."""
    words = root.split("/")
    probed_names = list(names)[:MAX_PROBED]
    candidates = (os.path.join(folder, *words[skip_count:]) for skip_count in range(len(words) + 1))
    return next(
        (
            candidate
            for candidate in candidates
            if any(os.path.exists(os.path.join(candidate, name)) for name in probed_names)
        ),
        None,
    )


def _fetch_pictures(address: str, schemes: set[str], root: str, names: Labelled, inputs: str) -> str:
    """Fetch the pictures from the bucket that the manifest names, or in which it is itself;
    return their folder."""
    if not schemes and not is_bucket(address):
        first_name = one_line(next(iter(names)))
        raise UserError(
            f"{one_line(address)}: {first_name} and the others are not in its folder: put it into the "
            "one that has them"
        )
    if schemes and not root:
        raise UserError(
            f"{one_line(address)} names pictures in several buckets: copy them into one, or into its "
            "own folder"
        )
    if not schemes:
        url = os.path.join(os.path.dirname(address), root)
    elif is_bucket(address):
        url = f"{address.partition('://')[0]}://{root}"
    elif len(schemes) == 1:
        url = f"{min(schemes)}://{root}"
    else:
        addresses = " and ".join(f"{scheme}://" for scheme in sorted(schemes))
        raise UserError(
            f"{one_line(address)} names pictures in {addresses}: copy them into one bucket, or into its "
            "own folder"
        )
    return storage.fetch(url, inputs=inputs, only=names)


# --- What a line says ---------------------------------------------------------------------------------------


class _Unusable(ValueError):
    """The line is in order, but no job here can train on it."""


def _read(path: str, display_name: str) -> tuple[Labelled, dict[str, list[str]], set[str]]:
    """Return the labelled pictures, {reason: those left out}, and the schemes of their addresses,
    empty if they are paths."""
    labelled: Labelled = {}
    left_out: dict[str, list[str]] = {}
    schemes = set()
    for number, line in _lines(path, display_name):
        try:
            source, labels, usage = _parse_row(json.loads(line.decode("utf-8-sig")))
            scheme, key = _split_address(source)
        except _Unusable as error:
            raise UserError(f"{display_name}, line {number}: {one_line(error)[:300]}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(
                f"{display_name}, line {number} is no line of a manifest of ModelArts, iTAG or Ground Truth"
            ) from None
        if usage not in ("TRAIN", "EVAL", "") or not labels:
            left_out.setdefault(UNUSED if labels else UNLABELLED, []).append(key)
            continue
        entries = [(label, usage == "EVAL") for label in labels]
        known_entry = labelled.setdefault(key, entries[0])
        for entry in entries:
            if entry != known_entry:
                both = f"{_shown_entry(*known_entry)} and {_shown_entry(*entry)}"
                raise UserError(
                    f"{display_name}, line {number}: {one_line(key)} is {both}: leave one of them"
                )
        schemes.add(scheme)
    if not labelled:
        reasons = ", ".join(f"{reason}: {len(names)}" for reason, names in left_out.items())
        raise UserError(f"{display_name} has no picture with a label ({reasons or 'no line'})")
    return labelled, left_out, set() if "" in schemes else schemes


def _shown_entry(label: str, is_for_eval: bool) -> str:
    """Return a label and its usage for an error."""
    if is_for_eval:
        return f"{one_line(label)} for EVAL"
    return one_line(label)


def _lines(path: str, display_name: str) -> Iterator[tuple[int, Any]]:
    """Yield (number, line) of each line of the manifest that is not blank. `display_name`: for errors."""
    try:
        with open_regular(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                if len(line) > LONGEST_LINE:
                    raise UserError(f"{display_name}, line {number} has more than {LONGEST_LINE >> 20} MiB")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise file_error(
            error, f"{display_name} cannot be read ({error.strerror}): give the path of a .manifest"
        ) from None


def _parse_row(row: dict) -> tuple[str, list[str], str]:
    """Return (source, labels, usage) of a row; KeyError, TypeError or ValueError if it is malformed."""
    if "source-ref" in row:
        source = row["source-ref"]
        labels = _of_ground_truth(row)
    elif "data" in row:
        source = row["data"]["source"]
        labels = _of_itag(row)
    else:
        source = re.sub("(?i)^s3://", "obs://", row["source"])  # it names OBS so
        labels = _of_modelarts(row)
    for text in (source, *labels):
        text.encode()  # an error for half a character
    return source, [label for label in labels if label], row.get("usage", "").upper()


def _of_modelarts(row: dict[str, Any]) -> list[str]:
    """Return the labels of a row of ModelArts; _Unusable if it is of another task."""
    for annotation in row.get("annotation", ()):
        if annotation["type"].rpartition("/")[2] != "image_classification":
            raise _Unusable(_wrong_task(annotation["type"]))
    return [annotation["name"] for annotation in row.get("annotation", ())]


def _of_itag(row: dict[str, Any]) -> list[str]:
    """Return the labels of a row of iTAG, from the last stage that has any; _Unusable for another task."""
    jobs = [key for key in row if key.startswith("label-")]
    for stage in STAGES:
        keys = [key for key in jobs if key.endswith(stage) and (stage or not key.endswith(STAGES[:-1]))]
        results = [result for key in keys for result in row[key]["results"]]
        for result in results:
            if result["type"] != "survey/value":
                raise _Unusable(_wrong_task(result["type"]))
        if labels := [result["data"] for result in results if result["data"]]:
            return labels
    return []


def _of_ground_truth(row: dict[str, Any]) -> list[str]:
    """Return the labels of a row of Ground Truth; _Unusable if it is of another task."""
    # Where a picture could not be labelled, there is a failure-reason in place of the type.
    all_metadata = [row[key] for key in row if key.endswith("-metadata") and "type" in row[key]]
    for metadata in all_metadata:
        if metadata["type"] != "groundtruth/image-classification":
            raise _Unusable(_wrong_task(metadata["type"]))
    return [metadata["class-name"] for metadata in all_metadata]


def _wrong_task(label_type: object) -> str:
    return f"{label_type} is not what is trained here, which is one class for each picture"


def _split_address(source: str) -> tuple[str, str]:
    """Return (scheme, bucket and key) of an address, or ("", path)."""
    scheme, _, key = (
        source.partition("://") if is_address(source) else ("", "", source.removeprefix("./").lstrip("/"))
    )
    if scheme.lower() not in ("", "s3", "obs", "oss"):
        raise _Unusable(f"{source} is neither in a bucket (s3://, obs://, oss://) nor a path")
    if not is_fetchable_name(key):
        raise _Unusable(f"{source} cannot be the name of a file below a folder")
    return scheme.lower(), re.sub(r"^([^/.]+)\.oss-[^/]+\.aliyuncs\.com/", r"\1/", key) if scheme else key
