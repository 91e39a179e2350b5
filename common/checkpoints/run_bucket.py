"""The bucket that gets what a run leaves in its output folder, and has it when the next start finds another disk."""

import argparse
import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any, Callable, Optional

from common import moments, storage
from common.address import local_folder
from common.checkpoints import checkpoint, names, run_folder, starts
from common.checkpoints.publisher import FAILURE_SECONDS, Publisher, Surplus
from common.errors import TrainingFailed, UserError
from common.files import TEMPORARY, TakenOver
from common.storage import bucket, download

FOLDERS = (names.FOLDER, starts.FOLDER)
GROWS = re.compile(r"(runs|speed|journal)\.jsonl|ledger/rank_\d+\.jsonl")
# An evaluation leaves them, and report.html shows them; and the record of what a tracker has.
OF_THE_PAGE = re.compile(r"report\.json|examples/\w+\.png|tracked-\w+\.json")


class RunBucket:
    """A place of a run, as a RunFolder is: each start has a number in it, 1 where there was none before."""

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None] = print):
        self._args = args
        self._say = say
        self._bucket = bucket.Bucket(args.output_url, say)
        self._starts = starts.Starts(self._bucket)
        self._publisher: Any = None  # from begin() on

    def address(self, samples: int) -> str:
        return f"{self._args.output_url.rstrip('/')}/checkpoints/{names.of_checkpoint(samples, 'pt', self._starts.number)}"

    def manifests(self) -> set[tuple[int, int, str]]:
        """Return {(samples seen, start, "")} of the manifests."""
        return {(samples, start, "") for start, samples in self._starts.checkpoints()}

    def claim(self, afresh: bool) -> None:
        """Keep earlier starts from writing here: take the next number. `afresh`: what they have written does not count."""
        self._starts.take(afresh)

    def is_taken_over(self) -> bool:
        return self._publisher is not None and self._publisher.taken_over

    def bring_newest(self, only_look: bool = False) -> bool:
        """Return whether there is a checkpoint; unless `only_look`, fetch the newest valid one if it is newer than those here.

        Raise UserError if the folder holds another run, or has no checkpoint and all fetched are damaged.
        """
        args = self._args
        place = self._bucket
        items = {place.relative(item.key): item for below in FOLDERS for item in place.items(place.below() + below)}
        there = starts.checkpoints(items)
        here = checkpoint.numbers(args.checkpoint_dir)
        if not there or only_look:
            return bool(there)
        if here:
            _refuse_another_history(place, there[-1], here[-1], args)
            there = [(start, samples) for start, samples in there if samples > here[-1]]
        for start, samples in reversed(there):
            try:
                _bring(place, items, start, samples, args.checkpoint_dir)
            except download.Damaged as error:  # any other failure says nothing about this checkpoint
                self._say(f"warning: {error}; trying the one before it")
                checkpoint.delete(args.checkpoint_dir, samples)
            else:
                self._say(f"fetched checkpoint {names.of_checkpoint(samples, 'pt', start)} from {args.output_url}")
                return True
        if there and not here:
            raise UserError(f"all {len(there)} checkpoints in {args.output_url} are damaged; {checkpoint.AFRESH}")
        return True

    def fetch_growing_files(self) -> None:
        """Fetch files that starts append to or report.html shows, if the disk lacks them or has less of what is appended to, as
        where another machine has gone on with the run: its own would replace these."""
        place = self._bucket
        folder = self._args.output_dir
        items = {place.relative(item.key): item for item in place.items(place.below())}
        copies = starts.copies(items)  # preferred, as a frozen earlier start may have overwritten the files themselves late
        wanted = [name for name in items if GROWS.fullmatch(name) or OF_THE_PAGE.fullmatch(name)]
        best = {name: items[copies.get(name, name)] for name in wanted}
        missing = {name: item for name, item in best.items() if _has_less(os.path.join(folder, name), item, name)}
        if missing:
            download.fetch_items(place, missing, folder)

    def delete_run(self) -> None:
        """Delete the files of a run, manifests first. The objects that number its starts, and other files, stay."""
        place = self._bucket
        there = [place.relative(item.key) for item in place.items(place.below())]
        ours = [name for name in there if run_folder.is_of_a_run(name.removesuffix(TEMPORARY))]
        for name in sorted(ours, key=lambda name: not name.removesuffix(TEMPORARY).endswith(".json")):
            place.ask("delete_object", place.below() + name)

    # --- Publishing ---

    def begin(self) -> None:
        """Publish the folder from now on, in the background."""
        self._publisher = Publisher(self._args.output_dir, self._args.output_url, self._say, self._starts)
        self._publisher.start()
        moments.listen(self, of_the_run=True)

    def saved(self, surplus: Surplus) -> None:
        """Publish soon, as a checkpoint was written or found. `surplus(names)`: those that are no longer kept."""
        self._publisher.saved(surplus)

    def refused(self) -> Optional[str]:
        """Return an error's text if the bucket has refused the results for longer than --patience."""
        why = self._publisher.failures.refused
        return why and (
            f"{self._args.output_url} refuses the results: {why}. Mend that and start again: the run "
            f"goes on from the newest checkpoint there, or on this machine from that in {self._args.checkpoint_dir}"
        )

    def failure(self, _error: BaseException) -> None:
        """Publish what can be published in a few seconds, as the job is about to fail (common/moments.py)."""
        with contextlib.suppress(UserError, TrainingFailed):
            self._publisher.finish(in_a_hurry=True, at_most=FAILURE_SECONDS)

    def finish(self, in_a_hurry: bool) -> None:
        """Publish the rest."""
        try:
            self._publisher.finish(in_a_hurry)
        except TakenOver:
            raise
        except (UserError, TrainingFailed) as error:
            there = self._args.output_dir
            wanted = self._args.output_url
            raise TrainingFailed(f"the results are in {there}, but not all are in {wanted}: {error}") from None
        self._say(f"published to {self._args.output_url}")


def _has_less(path: str, item: bucket.Item, name: str) -> bool:
    if not os.path.exists(path):
        return True
    return bool(GROWS.fullmatch(name)) and os.path.getsize(path) < item.size


def _bring(place: bucket.Bucket, items: dict[str, bucket.Item], start: int, samples: int, folder: str) -> None:
    """Fetch checkpoint N-START.pt (or N.pt) of the bucket as N.pt; raise Damaged if it is incomplete or damaged."""
    theirs = _files_of(names.of_checkpoint(samples, "pt", start))
    ours = _files_of(names.of_checkpoint(samples, "pt"))
    if names.FOLDER + theirs[0] not in items:
        raise download.Damaged(f"checkpoint {theirs[0]} is missing in {place.url(place.below())}")
    for there, here in zip(theirs, ours):  # the manifest last, as when it was written
        if names.FOLDER + there in items:
            download.fetch_items(place, {here: items[names.FOLDER + there]}, folder)
    try:
        checkpoint.read_verified(os.path.join(folder, ours[0]))
    except UserError as error:
        raise download.Damaged(str(error)) from None


def _files_of(name: str) -> list[str]:
    """Return the names of a checkpoint's files: tensors, a manifest that a killed start did not rename, and the manifest."""
    return [name, *(re.sub(r"pt$", ending, name) for ending in (names.UNFINISHED, "json"))]


def _refuse_another_history(place: bucket.Bucket, theirs: tuple[int, int], ours: int, args: argparse.Namespace) -> None:
    """Raise UserError if the manifests of checkpoints `theirs`, in the bucket, and `ours`, on the disk, name different runs."""
    key = place.below() + names.FOLDER + names.of_checkpoint(theirs[1], "json", theirs[0])
    content = place.ask("get_object", key, work=lambda answer: answer["Body"].read())
    mine = Path(checkpoint.path_of(args.checkpoint_dir, ours)).with_suffix(".json")
    if _run_id(content) != _run_id(mine.read_bytes()):
        raise UserError(
            f"{args.output_dir} holds another run than {args.output_url}: delete that folder, "
            "or start afresh with --resume never --overwrite true"
        )


def _run_id(manifest: bytes) -> Optional[str]:
    try:
        return json.loads(manifest).get("run")
    except (ValueError, AttributeError, RecursionError):
        return None


def fetched(path: str, inputs: str, say: Callable) -> str:
    """Fetch a checkpoint or an output folder from a bucket to `inputs`, and return its path there."""
    if not path.endswith(".pt"):
        return storage.fetch(path, say=say, inputs=inputs)
    url, name = os.path.split(path)
    place = bucket.Bucket(url, say)
    folder = local_folder(url, inputs)
    wanted = _files_of(name)
    items = {place.relative(item.key): item for item in place.items(place.below())}
    for needed in (wanted[0], wanted[-1]):
        if needed not in items:
            raise UserError(f"--resume {path}: there is no {needed} in {url}; give a .pt that has its .json there")
    os.makedirs(folder, exist_ok=True)
    download.fetch_items(place, {name: items[name] for name in wanted if name in items}, folder)
    return os.path.join(folder, name)
