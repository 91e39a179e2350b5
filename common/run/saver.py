"""Writes a run's checkpoints in the background: the training waits for a copy of the state, not for the disk or the bucket."""

import argparse
import concurrent.futures
import contextlib
import errno
import os
from typing import Any, Callable, Optional

from common import moments
from common.errors import TrainingFailed, UserError, one_line
from common.run import checkpoint, output
from common.storage.upload import FAILURE_SECONDS, LAST_PATIENCE_SECONDS, STOP_PATIENCE_SECONDS, Publisher


class Writer:
    """Runs one function at a time in the background, in the order of the calls; an error is raised at the next call.

    `last_good()`: what is left where a file cannot be written.
    """

    def __init__(self, last_good: Callable[[], str]):
        self._last_good = last_good
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "checkpoint writer")
        self._pending: Optional[concurrent.futures.Future] = None

    def submit(self, work: Callable[[], None]) -> None:
        self.wait()
        self._pending = self._executor.submit(work)

    def wait(self) -> None:
        try:
            if self._pending:
                self._pending.result()
        except OSError as error:
            raise TrainingFailed(f"a checkpoint could not be written: {one_line(error)}; {self._last_good()}") from None
        finally:
            self._pending = None


class Saver:
    def __init__(self, args: argparse.Namespace, say: Callable):
        self._folder, self._output_dir, self._keep = args.checkpoint_dir, args.output_dir, args.keep
        self._none = "no checkpoint yet" if args.checkpoints else "no checkpoint, as --checkpoints false wants it"
        self._url, self._say = args.output_url, say
        self._writer = Writer(self.last_good)
        self._publisher: Any = None  # where the output goes to a bucket

    def start_publishing(self, goes_on_from: Optional[dict] = None) -> None:
        """On the rank that writes: start uploading, if the output goes to a bucket. `goes_on_from`: a checkpoint's manifest."""
        if self._url:
            self._publisher = Publisher(self._output_dir, self._url, self._say, output.LEFT_BY_A_RUN)
            self._publisher.start()
            if goes_on_from:  # a killed start may have left a file without its manifest, and this one may have nothing to save
                self._tell_surplus(goes_on_from)
            moments.listen(self)

    def failure(self, _error: BaseException) -> None:
        """The job is about to end: publish what can be published in a few seconds."""
        with contextlib.suppress(UserError, TrainingFailed):
            self._publisher.finish(FAILURE_SECONDS, at_most=FAILURE_SECONDS)

    def finish_publishing(self, in_a_hurry: bool) -> None:
        if self._publisher is None:
            return
        try:
            self._publisher.finish(STOP_PATIENCE_SECONDS if in_a_hurry else LAST_PATIENCE_SECONDS)
        except (UserError, TrainingFailed) as error:
            raise TrainingFailed(f"the results are in {self._output_dir}, but not all are in {self._url}: {error}") from None
        self._say(f"published to {self._url}")

    def save(self, state: dict, about: dict, weights_of_epoch: Optional[int] = None) -> None:
        """Save `state`, which must not change any more; and the weights alone, as epoch_N.pth."""
        self._writer.submit(lambda: self._write(state, about, weights_of_epoch))

    def wait(self) -> None:
        self._writer.wait()

    def last_good(self) -> str:
        numbers = checkpoint.numbers(self._folder)
        folder = f"{self._url.rstrip('/')}/checkpoints" if self._url else self._folder
        return f"last checkpoint {folder}/{numbers[-1]:012d}.pt" if numbers else self._none

    def _write(self, state, about, weights_of_epoch):
        if not checkpoint.finite(state["model"]):
            raise TrainingFailed(f"a weight is not a finite number after step {about['total_steps']}; {self.last_good()}")
        try:
            if weights_of_epoch:  # first, so that a checkpoint of a finished epoch never lacks it
                path = os.path.join(self._output_dir, f"epoch_{weights_of_epoch}.pth")
                checkpoint.write_weights(path, checkpoint.to_take_away(state))
            checkpoint.write(self._folder, state, about)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                error.strerror = f"{error.strerror}, {output.room_for(self._folder, checkpoint.size_of(state))}"
            raise
        try:
            checkpoint.prune(self._folder, self._output_dir, self._keep, about)
        except OSError as error:
            self._say(f"warning: what is no longer kept could not be removed: {one_line(error)}; the next save tries it again")
        if self._publisher:
            self._tell_surplus(about)

    def _tell_surplus(self, about):
        self._publisher.saved(lambda names: checkpoint.surplus(names, self._keep, about))
