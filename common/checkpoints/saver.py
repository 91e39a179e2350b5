"""Find, save and publish the checkpoints of a run, on the rank that writes.

They are written in the background: the training waits for the copy of the state and for the save before, not for the bucket.
"""

import argparse
import concurrent.futures
import contextlib
import errno
import os
import re
import uuid
from collections.abc import Sequence
from typing import Any, Callable, Optional

from common import files, moments
from common.checkpoints import bucket_run, checkpoint, names, output, restore, starts
from common.checkpoints.position import Position
from common.checkpoints.publisher import FAILURE_SECONDS, Publisher
from common.errors import TrainingFailed, UserError, one_line
from common.storage import bucket


class Saving:
    def __init__(self, args: argparse.Namespace, classes: Sequence[str], say: Callable[[str], None]):
        self._args, self._say = args, say
        self.id = uuid.uuid4().hex  # of the run; a later start takes it from the checkpoint
        self.identity: dict[str, Any] = {}  # what two starts must have in common to be one run
        self.classes = list(classes)
        self.goes_on = False  # whether there is a checkpoint to go on from
        self.saved_at: Optional[Position] = None
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "checkpoint writer")
        self._pending: Optional[concurrent.futures.Future] = None
        self._publisher: Any = None  # a Publisher, if the output goes to a bucket
        self._starts: Any = None  # starts.Starts of that bucket
        self._damaged: set[int] = set()  # numbers newer than the checkpoint to go on from

    # --- Whose folder it is ---

    def find(self, peers: Any) -> Optional[restore.Checkpoint]:
        """Return the checkpoint that this rank has to restore, or None. On the rank that writes, also take the folders over."""
        if found := peers.find(self._look, self.identity):
            self.goes_on, self.saved_at = True, Position.of(found[1])
        return found

    def _look(self):
        folder = self._args.checkpoint_dir
        output.make_folders(self._args)
        output.lock(folder)  # until this process ends
        if self._args.output_url:
            self._starts = starts.Starts(bucket.Bucket(self._args.output_url, self._say))
        before = self._there()
        found = restore.find_checkpoint(self._args, self.identity, self._say)
        afresh = not found and self._args.resume == "never"
        self._claim(afresh)  # now that nothing has been refused
        in_bucket = {number for number, start, _ in before if start}  # find_checkpoint() may have fetched them
        came = {(number, start, digest) for number, start, digest in self._there() - before if start or number not in in_bucket}
        if _beyond(found, came):  # another start was still writing
            if afresh:
                raise files.TakenOver(self._args.output_url or self._args.output_dir)
            found = restore.find_checkpoint(self._args, self.identity, self._say)
        self._delete_what_is_not_wanted(found, afresh)
        self._damaged = {number for number, _, _ in _beyond(found, self._there())}
        self._start_publishing()
        if found and self._publisher:  # a killed start may have left a file without its manifest, and this one may save nothing
            self._tell_surplus(found[1])
        return found

    def _there(self):
        """Return {(samples seen, 0, digest)} of the manifests on the disk, and {(samples seen, start, "")} of the bucket's."""
        folder, there = self._args.checkpoint_dir, set()
        for number in checkpoint.numbers(folder):
            with contextlib.suppress(OSError):  # another start has just removed it
                there.add((number, 0, files.sha256(re.sub(r"pt$", "json", checkpoint.path_of(folder, number)))))
        return there | {(samples, start, "") for start, samples in self._starts.checkpoints()} if self._starts else there

    def _claim(self, afresh):
        left = output.claim_folders(self._args)
        if not afresh:
            checkpoint.sweep(self._args.checkpoint_dir, left)
        files.tidy()
        if self._starts:
            self._starts.take(afresh)

    def _delete_what_is_not_wanted(self, found, afresh):
        """Delete nodes.json; the whole run if `afresh`; checkpoints after PATH with --resume PATH --overwrite true."""
        files.remove(os.path.join(self._args.output_dir, "nodes.json"))
        if afresh:
            output.delete_run(self._args)
            if self._args.output_url:
                bucket_run.delete(self._args, self._say)
        if found and self._args.overwrite and self._args.resume not in ("auto", "never"):
            for number in checkpoint.numbers(self._args.checkpoint_dir):
                if number > found[1]["samples_seen"]:
                    checkpoint.delete(self._args.checkpoint_dir, number)

    def take_over(self) -> None:
        """Take over the folders and the publishing from the rank that wrote them, which was lost (common/elastic)."""
        output.make_folders(self._args)
        try:
            output.lock(self._args.checkpoint_dir)
        except UserError as error:  # the lost rank may still hold the lock, on a frozen machine
            self._say(f"warning: {error}")
        if self._args.output_url:
            self._starts = starts.Starts(bucket.Bucket(self._args.output_url, self._say))
        self._claim(afresh=False)
        bucket_run.fetch_growing_files_if_possible(self._args, self._say)
        self._start_publishing()

    def last_good(self) -> str:
        url, folder = self._args.output_url, self._args.checkpoint_dir
        if numbers := checkpoint.numbers(folder):
            name = names.of_checkpoint(numbers[-1], "pt", self._starts.number if self._starts else 1)
            return f"last checkpoint {url.rstrip('/') + '/checkpoints' if url else folder}/{name}"
        return "no checkpoint yet" if self._args.checkpoints else "no checkpoint, as --checkpoints false wants it"

    # --- Writing ---

    def save(self, state: Callable[[], dict], about: dict, weights_of_epoch: Optional[int] = None) -> None:
        """Copy the state and write it, with manifest `about`, in the background; `weights_of_epoch`: also write epoch_N.pth."""
        self.saved_at = Position.of(about)
        self.wait()  # so that there is one copy at a time
        self._pending = self._executor.submit(self._write, checkpoint.snapshot(state()), about, weights_of_epoch)

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raise an error if that has failed."""
        pending, self._pending = self._pending, None
        try:
            if pending:
                pending.result()
        except OSError as error:
            raise TrainingFailed(f"a checkpoint could not be written: {one_line(error)}; {self.last_good()}") from None

    def _write(self, state, about, weights_of_epoch):
        folder, output_dir = self._args.checkpoint_dir, self._args.output_dir
        if not checkpoint.finite(state["model"]):
            raise TrainingFailed(f"a weight is not a finite number after step {about['total_steps']}; {self.last_good()}")
        try:
            if weights_of_epoch:  # first, so that a checkpoint of a finished epoch never lacks its weights
                path = os.path.join(output_dir, names.weights(weights_of_epoch))
                checkpoint.write_weights(path, checkpoint.evaluated_weights(state), _of_the_epoch(state, about))
            checkpoint.write(folder, state, about)
            self._damaged.discard(about["samples_seen"])
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                error.strerror = f"{error.strerror}, {output.describe_room(folder, checkpoint.size_of(state))}"
            raise
        try:
            checkpoint.prune(folder, output_dir, self._args.keep, about, self._damaged)
        except OSError as error:
            self._say(f"warning: what is no longer kept could not be removed: {one_line(error)}; the next save tries it again")
        if self._publisher:
            self._tell_surplus(about)

    def require_ours(self) -> None:
        if files.is_taken_over() or (self._publisher and self._publisher.taken_over):
            raise files.TakenOver(self._args.output_url or self._args.output_dir)

    def require_published(self) -> None:
        """If the bucket has refused the results for longer than --patience, wait for the last save, and raise UserError."""
        if self._publisher and (why := self._publisher.failures.refused):
            self.wait()
            raise UserError(
                f"{self._args.output_url} refuses the results: {why}. Mend that and start again: the run "
                f"goes on from the newest checkpoint there, or on this machine from that in {self._args.checkpoint_dir}"
            )

    # --- Publishing ---

    def _start_publishing(self):
        if self._starts:
            where = self._args.output_dir, self._args.output_url
            self._publisher = Publisher(*where, self._say, self._starts)
            self._publisher.start()
            moments.listen(self)

    def _tell_surplus(self, about):
        def choose(there):
            return checkpoint.surplus(there, self._args.keep, about, self._damaged)

        self._publisher.saved(lambda there: self._starts.surplus(there, choose))

    def failure(self, _error: BaseException) -> None:
        """Publish what can be published in a few seconds, as the job is about to fail (common/moments.py)."""
        with contextlib.suppress(UserError, TrainingFailed):
            self._publisher.finish(in_a_hurry=True, at_most=FAILURE_SECONDS)

    def finish_publishing(self, in_a_hurry: bool) -> None:
        if self._publisher is None:
            return
        try:
            self._publisher.finish(in_a_hurry)
        except files.TakenOver:
            raise
        except (UserError, TrainingFailed) as error:
            there, wanted = self._args.output_dir, self._args.output_url
            raise TrainingFailed(f"the results are in {there}, but not all are in {wanted}: {error}") from None
        self._say(f"published to {self._args.output_url}")


def _of_the_epoch(state, about):
    """Return the contents of the JSON file beside the weights of an epoch."""
    row, options = state["run"]["history"][-1], about["arguments"]
    metrics = {name: value for name, value in row.items() if name not in ("epoch", "steps", "samples")}
    said = {name: options[name] for name in checkpoint.OPTIONS if options.get(name) is not None}
    return {"epoch": row["epoch"], "metrics": metrics, "classes": about["classes"], **said}


def _beyond(found, there):
    """Return the checkpoints in `there` that are newer than `found`, the one to go on from; all of them if it is None."""
    return {one for one in there if not found or one[0] > found[1]["samples_seen"]}
