"""Find, save and publish the checkpoints of a run, on the rank that writes.

They are written in the background: the training waits for the copy of the state and for the save before, not for the bucket.
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
        self, args: argparse.Namespace, classes: Sequence[str], say: Callable[[str], None], data_set: Optional[object] = None
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
        self._copies: list[Any] = []  # the bucket, if there is one and this rank writes
        self._damaged: set[int] = set()  # numbers newer than the checkpoint to go on from

    def note_data_digests(self) -> None:
        self.data_digests = data_digests(self._data_set)

    # --- Whose folder it is ---

    @property
    def _places(self) -> list[Any]:
        return [self._folder, *self._copies]

    def find(self) -> Optional[restore.Checkpoint]:
        """Return the checkpoint to go on from, or None, and take the folders over. On the rank that writes."""
        self._open_bucket()
        self._folder.open()
        before = self._there()
        found = restore.find_checkpoint(self._args, self._places, self.identity, self._say)
        afresh = not found and self._args.resume == "never"
        self._claim(afresh)  # now that nothing has been refused
        in_bucket = {number for number, start, _ in before if start}  # find_checkpoint() may have fetched them
        came = {(number, start, digest) for number, start, digest in self._there() - before if start or number not in in_bucket}
        if _beyond(found, came):  # another start was still writing
            if afresh:
                raise files.TakenOver(self._args.output_url or self._args.output_dir)
            found = restore.find_checkpoint(self._args, self._places, self.identity, self._say)
        self._delete_what_is_not_wanted(found, afresh)
        self._damaged = {number for number, _, _ in _beyond(found, self._there())}
        for copy in self._copies:
            if not afresh:
                copy.fetch_growing_files()
            copy.begin()
            if found:  # a killed start may have left a file without its manifest, and this one may save nothing
                copy.saved(self._surplus(found[1]))
        return found

    def _open_bucket(self):
        if self._args.output_url:
            from common.checkpoints.run_bucket import RunBucket

            self._copies = [RunBucket(self._args, self._say)]

    def _there(self):
        return set().union(*(place.manifests() for place in self._places))

    def _claim(self, afresh: bool) -> None:
        for place in self._places:
            place.claim(afresh)

    def _delete_what_is_not_wanted(self, found: Optional[restore.Checkpoint], afresh: bool) -> None:
        """Delete nodes.json; the whole run if `afresh`; checkpoints after PATH with --resume PATH --overwrite true."""
        files.remove(os.path.join(self._args.output_dir, "nodes.json"))
        for place in self._places if afresh else ():
            place.delete_run()
        if found and self._args.overwrite and self._args.resume not in ("auto", "never"):
            self._folder.delete_after(found[1]["samples_seen"])

    def take_over(self) -> None:
        """Take over the folders and the publishing from the rank that wrote them, which was lost (common/elastic)."""
        self._open_bucket()
        try:
            self._folder.open()
        except UserError as error:  # the lost rank may still hold the lock, on a frozen machine
            self._say(f"warning: {error}")
        self._claim(afresh=False)
        for copy in self._copies:
            try:
                copy.fetch_growing_files()
            except (UserError, TrainingFailed) as error:
                self._say(f"warning: {error}")
            copy.begin()

    def last_good(self) -> str:
        if numbers := checkpoint.numbers(self._args.checkpoint_dir):
            return f"last checkpoint {self._places[-1].address(numbers[-1])}"
        return "no checkpoint yet" if self._args.checkpoints else "no checkpoint, as --checkpoints false wants it"

    # --- Writing ---

    def save(
        self,
        state: Callable[[], dict],
        about: dict,
        weights_of_epoch: Optional[int] = None,
        check: Optional[Callable[[], None]] = None,
    ) -> None:
        """Copy the state and write it, with manifest `about`, in the background; `weights_of_epoch`: also write epoch_N.pth.

        `check`: called in that thread before. If it raises an error, nothing is written, and the next wait() raises it."""
        self.wait()  # so that there is one copy at a time
        self.saved_at = Position.of(about)
        self._pending = self._executor.submit(self._write, checkpoint.Snapshot(state()), about, weights_of_epoch, check)

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raise an error if that has failed and forgive_pending() was not called."""
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
            raise TrainingFailed(f"a checkpoint could not be written: {one_line(error)}; {self.last_good()}") from None

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
        folder = self._args.checkpoint_dir
        output_dir = self._args.output_dir
        state = snapshot.on_host()
        if check:
            check()
        if not checkpoint.finite(state["model"]):
            raise TrainingFailed(f"a weight is not a finite number after step {about['total_steps']}; {self.last_good()}")
        try:
            if weights_of_epoch:  # first, so that a checkpoint of a finished epoch never lacks its weights
                path = os.path.join(output_dir, names.weights(weights_of_epoch))
                write_weights(path, evaluated_weights(state), _of_the_epoch(state, about))
            checkpoint.write(folder, state, about)
            self._damaged.discard(about["samples_seen"])
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                error.strerror = f"{error.strerror}, {run_folder.describe_room(folder, checkpoint.size_of(state))}"
            raise
        try:
            checkpoint.prune(folder, output_dir, self._args.keep, about, self._damaged)
        except OSError as error:
            self._say(f"warning: what is no longer kept could not be removed: {one_line(error)}; the next save tries it again")
        for copy in self._copies:
            copy.saved(self._surplus(about))

    def _surplus(self, about: dict[str, Any]) -> Callable[..., Any]:
        return functools.partial(checkpoint.surplus, keep=self._args.keep, about=about, damaged=self._damaged)

    def require_ours(self) -> None:
        if any(place.is_taken_over() for place in self._places):
            raise files.TakenOver(self._args.output_url or self._args.output_dir)

    def require_published(self) -> None:
        """If the bucket has refused the results for longer than --patience, wait for the last save, and raise UserError."""
        for why in filter(None, [copy.refused() for copy in self._copies]):
            self.wait()
            raise UserError(why)

    def finish_publishing(self, in_a_hurry: bool) -> None:
        for copy in self._copies:
            copy.finish(in_a_hurry)


def _of_the_epoch(state: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of the JSON file beside the weights of an epoch."""
    row = state["run"]["history"][-1]
    options = about["arguments"]
    metrics = {name: value for name, value in row.items() if name not in ("epoch", "steps", "samples")}
    said = {name: options[name] for name in OPTIONS if options.get(name) is not None}
    return {"epoch": row["epoch"], "metrics": metrics, "classes": about["classes"], **said}


def _beyond(found: Optional[restore.Checkpoint], there: set[tuple]) -> set[tuple]:
    """Return the checkpoints in `there` that are newer than `found`, the one to go on from; all of them if it is None."""
    return {one for one in there if not found or one[0] > found[1]["samples_seen"]}


def names_of_classes(data_set: Optional[object]) -> list[str]:
    names = getattr(data_set, "classes", None)
    return [str(name) for name in names] if isinstance(names, (list, tuple)) else []


def data_digests(data_set: Optional[object]) -> dict[str, str]:
    """Return what the method digest() of a data set says, if it has one: texts that differ for other samples."""
    digest = getattr(data_set, "digest", None)
    if not callable(digest):
        return {}
    found: Any = digest()
    if not isinstance(found, dict) or not all(isinstance(word, str) for pair in found.items() for word in pair):
        raise TypeError(f"{type(data_set).__name__}.digest() gave {found!r:.80}: it has to give a dict of texts by name")
    return found
