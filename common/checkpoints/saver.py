"""Find, save and publish the checkpoints of a run, on the rank that writes.

They are written in the background: the training waits for the copy of the state and for the save before, not
for the bucket.
"""

import argparse
import concurrent.futures
import errno
import functools
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from common import files
from common.checkpoints import checkpoint, names, restore, run_folder
from common.checkpoints.position import Position
from common.checkpoints.run_folder import RunFolder
from common.errors import TrainingFailed, UserError, one_line
from common.weights.files import OPTIONS, evaluated_weights, write_weights


class Saving:
    def __init__(
        self,
        args: argparse.Namespace,
        classes: Sequence[str],
        say: Callable[[str], None],
        data_set: Optional[object] = None,
    ):
        """`classes`: the names of the outputs; if there are none, those of `data_set`, what is trained on."""
        self._args = args
        self._say = say
        self._data_set = data_set
        self.id = uuid.uuid4().hex  # of the run; a later start takes it from the checkpoint
        self.identity: dict[str, Any] = {}  # what two starts must have in common to be one run
        self.classes = [str(name) for name in classes] if len(classes) else names_of_classes(data_set)
        self.data_digests: Mapping[str, str] = {}  # by which a later start sees other samples
        self.goes_on = False  # whether there is a checkpoint to go on from
        self.saved_at: Optional[Position] = None
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "checkpoint writer")
        self._pending: Optional[concurrent.futures.Future] = None
        self._is_forgiven = False  # whether its error is not to be raised
        self._folder = RunFolder(args)
        self._buckets: list[Any] = []  # the bucket, if there is one and this rank writes
        self._damaged: set[int] = set()  # numbers newer than the checkpoint to go on from

    def note_data_digests(self) -> None:
        self.data_digests = data_digests(self._data_set)

    # --- Whose folder it is ---

    @property
    def _places(self) -> list[Any]:
        return [self._folder, *self._buckets]

    def find(self) -> Optional[restore.Checkpoint]:
        """Return the checkpoint to go on from, or None, and take the folders over.

        On the rank that writes.
        """
        self._open_bucket()
        self._folder.open()
        manifests_before = self._manifests()
        chosen = restore.find_checkpoint(self._args, self._places, self.identity, self._say)
        starts_anew = not chosen and self._args.resume == "never"
        self._claim(starts_anew)  # now that nothing has been refused
        # find_checkpoint() may have fetched them
        bucket_numbers = {number for number, start, _ in manifests_before if start}
        new_manifests = {
            (number, start, digest)
            for number, start, digest in self._manifests() - manifests_before
            if start or number not in bucket_numbers
        }
        if _newer_than(chosen, new_manifests):  # another start was still writing
            if starts_anew:
                raise files.TakenOver(self._args.output_url or self._args.output_dir)
            chosen = restore.find_checkpoint(self._args, self._places, self.identity, self._say)
        self._delete_outdated(chosen, starts_anew)
        self._damaged = {number for number, _, _ in _newer_than(chosen, self._manifests())}
        for bucket in self._buckets:
            if not starts_anew:
                bucket.fetch_growing_files()
            bucket.begin()
            if chosen:
                # a killed start may have left a file without its manifest, and this one may save nothing
                bucket.publish_soon(self._surplus(chosen[1]))
        return chosen

    def _open_bucket(self):
        if self._args.output_url:
            from common.checkpoints.run_bucket import RunBucket

            self._buckets = [RunBucket(self._args, self._say)]

    def _manifests(self):
        return set().union(*(place.manifests() for place in self._places))

    def _claim(self, starts_anew: bool) -> None:
        for place in self._places:
            place.claim(starts_anew)

    def _delete_outdated(self, chosen: Optional[restore.Checkpoint], starts_anew: bool) -> None:
        """Delete nodes.json; the run if `starts_anew`; with --resume PATH --overwrite true, what is later."""
        files.remove(os.path.join(self._args.output_dir, "nodes.json"))
        if starts_anew:
            for place in self._places:
                place.delete_run()
        if chosen and self._args.overwrite and self._args.resume not in ("auto", "never"):
            self._folder.delete_after(chosen[1]["samples_seen"])

    def take_over(self) -> None:
        """Take over the folders and the publishing from the rank that wrote them,
        which was lost (common/elastic)."""
        self._open_bucket()
        try:
            self._folder.open()
        except UserError as error:  # the lost rank may still hold the lock, on a frozen machine
            self._say(f"warning: {error}")
        self._claim(starts_anew=False)
        for bucket in self._buckets:
            try:
                bucket.fetch_growing_files()
            except (UserError, TrainingFailed) as error:
                self._say(f"warning: {error}")
            bucket.begin()

    def last_good(self) -> str:
        """Return words for an error: where the newest checkpoint is, or that there is none."""
        if numbers := checkpoint.numbers(self._args.checkpoint_dir):
            return f"last checkpoint {self._places[-1].address(numbers[-1])}"
        return (
            "no checkpoint yet"
            if self._args.checkpoints
            else "no checkpoint, as --checkpoints false wants it"
        )

    # --- Writing ---

    def save(
        self,
        state: Callable[[], dict],
        about: dict,
        weights_of_epoch: Optional[int] = None,
        check: Optional[Callable[[], None]] = None,
    ) -> None:
        """Copy the state, and write it in the background with the manifest `about`.

        `weights_of_epoch`: also write epoch_N.pth. `check`: called in the background before writing; if it
        raises an error, nothing is written, and the next wait() raises it.
        """
        self.wait()  # so that there is one copy at a time
        self.saved_at = Position.of(about)
        self._pending = self._executor.submit(
            self._write, checkpoint.Snapshot(state()), about, weights_of_epoch, check
        )

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raise an error if that has failed and forgive_pending()
        was not called."""
        pending = self._pending
        is_forgiven = self._is_forgiven
        self._pending = None
        self._is_forgiven = False
        if pending is None:
            return
        try:
            pending.result()
        except (OSError, TrainingFailed) as error:
            self.saved_at = None
            if is_forgiven:
                return
            if isinstance(error, TrainingFailed):
                raise
            raise TrainingFailed(
                f"a checkpoint could not be written: {one_line(error)}; {self.last_good()}"
            ) from None

    @property
    def is_writing(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def forgive_pending(self) -> None:
        """Let wait() raise no error of the save that is being written: the run ends with another one."""
        self._is_forgiven = self._pending is not None

    def _write(
        self,
        snapshot: checkpoint.Snapshot,
        about: dict[str, Any],
        weights_of_epoch: Optional[int],
        check: Optional[Callable[[], None]],
    ) -> None:
        """Write a checkpoint and, for a finished epoch, its weights; then delete files that are not kept."""
        folder = self._args.checkpoint_dir
        output_dir = self._args.output_dir
        state = snapshot.on_host()
        if check:
            check()
        if not checkpoint.is_finite(state["model"]):
            raise TrainingFailed(
                f"a weight is not a finite number after step {about['total_steps']}; {self.last_good()}"
            )
        try:
            if weights_of_epoch:  # first, so that a checkpoint of a finished epoch never lacks its weights
                path = os.path.join(output_dir, names.weights(weights_of_epoch))
                write_weights(path, evaluated_weights(state), _describe_weights(state, about))
            checkpoint.write(folder, state, about)
            self._damaged.discard(about["samples_seen"])
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                error.strerror = (
                    f"{error.strerror}, {run_folder.describe_room(folder, checkpoint.size_of(state))}"
                )
            raise
        try:
            checkpoint.prune(folder, output_dir, self._args.keep, about, self._damaged)
        except OSError as error:
            self._say(
                f"warning: what is no longer kept could not be removed: {one_line(error)}; the next "
                "save tries it again"
            )
        for bucket in self._buckets:
            bucket.publish_soon(self._surplus(about))

    def _surplus(self, about: dict[str, Any]) -> Callable[..., Any]:
        return functools.partial(checkpoint.surplus, keep=self._args.keep, about=about, damaged=self._damaged)

    def require_not_taken_over(self) -> None:
        """Raise TakenOver if another start writes to the folder or the bucket by now."""
        if any(place.is_taken_over() for place in self._places):
            raise files.TakenOver(self._args.output_url or self._args.output_dir)

    def require_published(self) -> None:
        """If the bucket has refused the results for longer than --patience, wait for the last save,
        and raise UserError."""
        for bucket in self._buckets:
            reason = bucket.refusal()
            if reason:
                self.wait()
                raise UserError(reason)

    def finish_publishing(self, in_a_hurry: bool) -> None:
        """Publish the rest, if there is a bucket. `in_a_hurry`: wait only seconds for a silent store."""
        for bucket in self._buckets:
            bucket.finish(in_a_hurry)


def _describe_weights(state: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of the JSON file beside the weights of an epoch."""
    row = state["run"]["history"][-1]
    options = about["arguments"]
    metrics = {name: value for name, value in row.items() if name not in ("epoch", "steps", "samples")}
    model_options = {name: options[name] for name in OPTIONS if options.get(name) is not None}
    return {"epoch": row["epoch"], "metrics": metrics, "classes": about["classes"], **model_options}


def _newer_than(chosen: Optional[restore.Checkpoint], manifests: set[tuple]) -> set[tuple]:
    """Return the `manifests` that are newer than the `chosen` checkpoint; all of them if it is None."""
    return {entry for entry in manifests if not chosen or entry[0] > chosen[1]["samples_seen"]}


def names_of_classes(data_set: Optional[object]) -> list[str]:
    """Return the names in the attribute `classes` of a data set; [] if it has no such list or tuple."""
    classes = getattr(data_set, "classes", None)
    return [str(name) for name in classes] if isinstance(classes, (list, tuple)) else []


def data_digests(data_set: Optional[object]) -> dict[str, str]:
    """Return what a data set's digest() returns, texts that differ for other samples; {} without it."""
    digest = getattr(data_set, "digest", None)
    if not callable(digest):
        return {}
    digests: Any = digest()
    if not isinstance(digests, dict) or not all(
        isinstance(text, str) for pair in digests.items() for text in pair
    ):
        raise TypeError(
            f"{type(data_set).__name__}.digest() gave {digests!r:.80}: it has to give a dict of texts by name"
        )
    return digests
