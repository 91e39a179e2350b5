"""The bucket that gets what a run leaves in its output folder,
and has it when the next start finds another disk."""

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
GROWING_FILE = re.compile(r"(runs|speed|journal)\.jsonl|ledger/rank_\d+\.jsonl")
# An evaluation leaves them, and report.html shows them; and the record of what a tracker has.
REPORT_FILE = re.compile(r"report\.json|examples/\w+\.png|tracked-\w+\.json")


class RunBucket:
    """The bucket as a place of the run, used like RunFolder. Each start has a number in it; the first, 1."""

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None] = print):
        self._args = args
        self._say = say
        self._bucket = bucket.Bucket(args.output_url, say)
        self._starts = starts.Starts(self._bucket)
        self._publisher: Any = None  # from begin() on

    def address(self, samples: int) -> str:
        """Return the URL that this start's checkpoint after so many samples has."""
        name = names.of_checkpoint(samples, "pt", self._starts.number)
        return f"{self._args.output_url.rstrip('/')}/checkpoints/{name}"

    def manifests(self) -> set[tuple[int, int, str]]:
        """Return {(samples seen, start, "")} of the manifests."""
        return {(samples, start, "") for start, samples in self._starts.checkpoints()}

    def claim(self, starts_anew: bool) -> None:
        """Take the next number, so that earlier starts overwrite nothing; `starts_anew`: discard theirs."""
        self._starts.take(starts_anew)

    def is_taken_over(self) -> bool:
        return self._publisher is not None and self._publisher.is_taken_over

    def fetch_newest(self, check_only: bool = False) -> bool:
        """Return whether there is a checkpoint; unless `check_only`, fetch the newest that the disk lacks.

        Raise UserError if the folder holds another run, or has no checkpoint and all fetched are damaged.
        """
        args = self._args
        remote = self._bucket
        items = {
            remote.relative(item.key): item
            for folder in FOLDERS
            for item in remote.items(remote.key_prefix() + folder)
        }
        in_bucket = starts.checkpoints(items)
        on_disk = checkpoint.numbers(args.checkpoint_dir)
        if not in_bucket or check_only:
            return bool(in_bucket)
        if on_disk:
            _refuse_another_run(remote, in_bucket[-1], on_disk[-1], args)
            in_bucket = [(start, samples) for start, samples in in_bucket if samples > on_disk[-1]]
        for start, samples in reversed(in_bucket):
            try:
                _fetch_checkpoint(remote, items, start, samples, args.checkpoint_dir)
            except download.Damaged as error:  # any other failure says nothing about this checkpoint
                self._say(f"warning: {error}; trying the one before it")
                checkpoint.delete(args.checkpoint_dir, samples)
            else:
                self._say(
                    f"fetched checkpoint {names.of_checkpoint(samples, 'pt', start)} from {args.output_url}"
                )
                return True
        if in_bucket and not on_disk:
            raise UserError(
                f"all {len(in_bucket)} checkpoints in {args.output_url} are damaged; "
                f"{checkpoint.DEFAULT_REMEDY}"
            )
        return True

    def fetch_growing_files(self) -> None:
        """Fetch the files that every start appends to, if the disk lacks them or has fewer bytes, and those
        that report.html shows, if the disk lacks them.

        Otherwise this start, on another machine than the last, would replace them in the bucket by its own.
        """
        remote = self._bucket
        folder = self._args.output_dir
        items = {remote.relative(item.key): item for item in remote.items(remote.key_prefix())}
        # preferred, as a frozen earlier start may have overwritten the files themselves late
        copies = starts.copies(items)
        file_names = [name for name in items if GROWING_FILE.fullmatch(name) or REPORT_FILE.fullmatch(name)]
        newest_items = {name: items[copies.get(name, name)] for name in file_names}
        missing = {
            name: item
            for name, item in newest_items.items()
            if _needs_fetch(os.path.join(folder, name), item, name)
        }
        if missing:
            download.fetch_items(remote, missing, folder)

    def delete_run(self) -> None:
        """Delete the files of a run, manifests first.

        The objects that number its starts, and other files, stay.
        """
        remote = self._bucket
        file_names = [remote.relative(item.key) for item in remote.items(remote.key_prefix())]
        run_files = [name for name in file_names if run_folder.is_run_file(name.removesuffix(TEMPORARY))]
        for name in sorted(run_files, key=lambda name: not name.removesuffix(TEMPORARY).endswith(".json")):
            remote.ask("delete_object", remote.key_prefix() + name)

    # --- Publishing ---

    def begin(self) -> None:
        """Publish the folder from now on, in the background."""
        self._publisher = Publisher(self._args.output_dir, self._args.output_url, self._say, self._starts)
        self._publisher.start()
        moments.listen(self, ends_with_run=True)

    def publish_soon(self, surplus: Surplus) -> None:
        """Publish soon, as there is a new checkpoint. `surplus(names)`: returns those that are not kept."""
        self._publisher.publish_soon(surplus)

    def refusal(self) -> Optional[str]:
        """Return an error's text once the bucket has refused the results for longer than --patience."""
        reason = self._publisher.failures.refusal
        if not reason:
            return None
        return (
            f"{self._args.output_url} refuses the results: {reason}. Mend that and start again: the run goes "
            "on from the newest checkpoint there, or on this machine from that in "
            f"{self._args.checkpoint_dir}"
        )

    def failure(self, _error: BaseException) -> None:
        """Publish what can be published in a few seconds, as the job is about to fail (common/moments.py)."""
        with contextlib.suppress(UserError, TrainingFailed):
            self._publisher.finish(in_a_hurry=True, timeout=FAILURE_SECONDS)

    def finish(self, in_a_hurry: bool) -> None:
        """Publish the rest."""
        try:
            self._publisher.finish(in_a_hurry)
        except TakenOver:
            raise
        except (UserError, TrainingFailed) as error:
            folder = self._args.output_dir
            url = self._args.output_url
            raise TrainingFailed(f"the results are in {folder}, but not all are in {url}: {error}") from None
        self._say(f"published to {self._args.output_url}")


def _needs_fetch(path: str, item: bucket.Item, name: str) -> bool:
    if not os.path.exists(path):
        return True
    return bool(GROWING_FILE.fullmatch(name)) and os.path.getsize(path) < item.size


def _fetch_checkpoint(
    remote: bucket.Bucket, items: dict[str, bucket.Item], start: int, samples: int, folder: str
) -> None:
    """Fetch the checkpoint after `samples` samples that start number `start` wrote, with its manifest, under
    names without the number of the start; Damaged if a file is missing or damaged. (The names in the bucket
    have none either if it is 0.)"""
    remote_names = _files_of(names.of_checkpoint(samples, "pt", start))
    local_names = _files_of(names.of_checkpoint(samples, "pt"))
    if names.FOLDER + remote_names[0] not in items:
        raise download.Damaged(
            f"checkpoint {remote_names[0]} is missing in {remote.url(remote.key_prefix())}"
        )
    # the manifest last, as when it was written
    for remote_name, local_name in zip(remote_names, local_names):
        if names.FOLDER + remote_name in items:
            download.fetch_items(remote, {local_name: items[names.FOLDER + remote_name]}, folder)
    try:
        checkpoint.read_verified(os.path.join(folder, local_names[0]))
    except UserError as error:
        raise download.Damaged(str(error)) from None


def _files_of(name: str) -> list[str]:
    """Return the names of a checkpoint's files: tensors, a manifest that a killed start did not rename,
    and the manifest."""
    base = re.sub(r"pt$", "", name)
    return [name, base + names.UNFINISHED, base + "json"]


def _refuse_another_run(
    remote: bucket.Bucket, newest_remote: tuple[int, int], newest_local: int, args: argparse.Namespace
) -> None:
    """Raise UserError if the newest checkpoints in the bucket and on the disk are of different runs."""
    key = remote.key_prefix() + names.FOLDER + names.of_checkpoint(newest_remote[1], "json", newest_remote[0])
    content = remote.ask("get_object", key, work=lambda answer: answer["Body"].read())
    manifest_path = Path(checkpoint.path_of(args.checkpoint_dir, newest_local)).with_suffix(".json")
    if _run_id(content) != _run_id(manifest_path.read_bytes()):
        raise UserError(
            f"{args.output_dir} holds another run than {args.output_url}: delete that folder, "
            "or start afresh with --resume never --overwrite true"
        )


def _run_id(manifest: bytes) -> Optional[str]:
    try:
        return json.loads(manifest).get("run")
    except (ValueError, AttributeError, RecursionError):
        return None


def fetch_resume_path(path: str, inputs: str, say: Callable) -> str:
    """Fetch a checkpoint or an output folder from a bucket to `inputs`, and return its path there."""
    if not path.endswith(".pt"):
        return storage.fetch(path, say=say, inputs=inputs)
    url, name = os.path.split(path)
    remote = bucket.Bucket(url, say)
    folder = local_folder(url, inputs)
    file_names = _files_of(name)
    items = {remote.relative(item.key): item for item in remote.items(remote.key_prefix())}
    for required in (file_names[0], file_names[-1]):
        if required not in items:
            raise UserError(
                f"--resume {path}: there is no {required} in {url}; give a .pt that has its .json there"
            )
    os.makedirs(folder, exist_ok=True)
    download.fetch_items(remote, {name: items[name] for name in file_names if name in items}, folder)
    return os.path.join(folder, name)
