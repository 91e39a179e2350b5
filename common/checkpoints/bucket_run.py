"""For a run whose output folder is in a bucket: fetch what the next start needs to this machine's disk, or delete the run."""

import argparse
import json
import os
import re
from pathlib import Path
from typing import Callable

from common import storage
from common.checkpoints import checkpoint, names, output, starts
from common.errors import TrainingFailed, UserError
from common.files import TEMPORARY
from common.storage import bucket, download, index, once
from common.world.folders import local_folder

FOLDERS = (names.FOLDER, starts.FOLDER)
GROWS = re.compile(r"(runs|speed|journal)\.jsonl|ledger/rank_\d+\.jsonl")
OF_THE_PAGE = re.compile(r"report\.json|examples/\w+\.png")  # an evaluation leaves them, and report.html shows them


def bring_newest(args: argparse.Namespace, say: Callable, only_look: bool = False) -> bool:
    """Fetch the newest valid checkpoint of the bucket, unless `only_look`, or the checkpoint folder has one that is as new.

    Return whether the bucket has any. Raise UserError if the folder holds another run, or has none and all fetched are damaged.
    """
    place = bucket.Bucket(args.output_url, say)
    items = {place.relative(item.key): item for below in FOLDERS for item in place.items(place.below() + below)}
    there, here = starts.checkpoints(items), checkpoint.numbers(args.checkpoint_dir)
    if not there or only_look:
        return bool(there)
    if here:
        _refuse_another_history(place, there[-1], here[-1], args)
        there = [(start, samples) for start, samples in there if samples > here[-1]]
    for start, samples in reversed(there):
        try:
            _bring(place, items, start, samples, args.checkpoint_dir)
        except download.Damaged as error:  # any other failure says nothing about this checkpoint
            say(f"warning: {error}; trying the one before it")
            checkpoint.delete(args.checkpoint_dir, samples)
        else:
            say(f"fetched checkpoint {names.of_checkpoint(samples, 'pt', start)} from {args.output_url}")
            return True
    if there and not here:
        raise UserError(f"all {len(there)} checkpoints in {args.output_url} are damaged; {checkpoint.AFRESH}")
    return True


def _bring(place, items, start, samples, folder):
    """Fetch checkpoint N-START.pt (or N.pt) of the bucket as N.pt; raise Damaged if it is incomplete or damaged."""
    theirs, ours = _files_of(names.of_checkpoint(samples, "pt", start)), _files_of(names.of_checkpoint(samples, "pt"))
    if names.FOLDER + theirs[0] not in items:
        raise download.Damaged(f"checkpoint {theirs[0]} is missing in {place.url(place.below())}")
    for there, here in zip(theirs, ours):  # the manifest last, as when it was written
        if names.FOLDER + there in items:
            download.fetch_items(place, {here: items[names.FOLDER + there]}, folder)
    try:
        checkpoint.read_verified(os.path.join(folder, ours[0]))
    except UserError as error:
        raise download.Damaged(str(error)) from None


def _files_of(name):
    """Return the names of a checkpoint's files: tensors, a manifest that a killed start did not rename, and the manifest."""
    return [name, *(re.sub(r"pt$", ending, name) for ending in (names.UNFINISHED, "json"))]


def _refuse_another_history(place, theirs, ours, args):
    """Raise UserError if the manifests of checkpoints `theirs`, in the bucket, and `ours`, on the disk, name different runs."""
    key = place.below() + names.FOLDER + names.of_checkpoint(theirs[1], "json", theirs[0])
    content = place.ask("get_object", key, work=lambda answer: answer["Body"].read())
    mine = Path(checkpoint.path_of(args.checkpoint_dir, ours)).with_suffix(".json")
    if _run_id(content) != _run_id(mine.read_bytes()):
        raise UserError(
            f"{args.output_dir} holds another run than {args.output_url}: delete that folder, "
            "or start afresh with --resume never --overwrite true"
        )


def _run_id(manifest):
    try:
        return json.loads(manifest).get("run")
    except (ValueError, AttributeError, RecursionError):
        return None


def local_checkpoint(path: str, inputs: str, say: Callable) -> str:
    """Return `path` if it is local; else fetch the checkpoint or output folder to `inputs`, and return its path there."""
    if not bucket.is_address(path):
        return path
    if not path.endswith(".pt"):
        return storage.fetch(path, say=say, inputs=inputs)
    url, name = os.path.split(path)
    place, folder = bucket.Bucket(url, say), local_folder(url, inputs)
    wanted = _files_of(name)
    items = {place.relative(item.key): item for item in place.items(place.below())}
    for needed in (wanted[0], wanted[-1]):
        if needed not in items:
            raise UserError(f"--resume {path}: there is no {needed} in {url}; give a .pt that has its .json there")
    os.makedirs(folder, exist_ok=True)
    download.fetch_items(place, {name: items[name] for name in wanted if name in items}, folder)
    return os.path.join(folder, name)


def local_weights(path: str, inputs: str, say: Callable) -> str:
    """Return `path`, or the local path of weights in a bucket: one process per node fetches them, their .sha256 and .json."""
    if not bucket.is_address(path):
        return path
    url, name = os.path.split(path)
    folder = local_folder(url, inputs)

    def bring(_lease):
        place = bucket.Bucket(url, say)
        items = {place.relative(item.key): item for item in place.items(place.below() + name.removesuffix(".pth"))}
        wanted = {here: items[here] for here in (name, name + checkpoint.DIGEST, checkpoint.beside(name)) if here in items}
        if name not in wanted:
            raise UserError(f"--weights {path}: there is no {name} in {url}")
        os.makedirs(folder, exist_ok=True)
        download.fetch_items(place, wanted, folder, remembered=True)

    once.once_per_node(os.path.join(index.notes(folder), name), bring)
    return os.path.join(folder, name)


def fetch_growing_files(args: argparse.Namespace, say: Callable = print) -> None:
    """Fetch files that starts append to or report.html shows, if the disk lacks them: new ones would replace the bucket's."""
    place = bucket.Bucket(args.output_url, say)
    items = {place.relative(item.key): item for item in place.items(place.below())}
    copies = starts.copies(items)  # preferred to the files themselves, which a frozen earlier start may have overwritten late
    wanted = [name for name in items if GROWS.fullmatch(name) or OF_THE_PAGE.fullmatch(name)]
    missing = [name for name in wanted if not os.path.exists(os.path.join(args.output_dir, name))]
    if missing:
        download.fetch_items(place, {name: items[copies.get(name, name)] for name in missing}, args.output_dir)


def fetch_growing_files_if_possible(args: argparse.Namespace, say: Callable) -> None:
    """If the run has a bucket, fetch the files that starts append to and this disk lacks; a failure is only a warning."""
    try:
        if args.output_url:
            fetch_growing_files(args, say)
    except (UserError, TrainingFailed) as error:
        say(f"warning: {error}")


def delete(args: argparse.Namespace, say: Callable) -> None:
    """Delete the files of a run from the bucket, manifests first. The objects that number its starts, and other files, stay."""
    place = bucket.Bucket(args.output_url, say)
    there = [place.relative(item.key) for item in place.items(place.below())]
    ours = [name for name in there if output.is_of_a_run(name.removesuffix(TEMPORARY))]
    for name in sorted(ours, key=lambda name: not name.removesuffix(TEMPORARY).endswith(".json")):
        place.ask("delete_object", place.below() + name)
