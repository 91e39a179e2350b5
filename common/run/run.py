"""The run of a job: it goes on where the last start stopped, shows progress, saves when due,
and stops when told to.

    run = Run(args, train_sampler, model, optimizer=optimizer)  # and anything else that has a state_dict
    run.resume()                                                # restores them from the newest checkpoint
    for epoch in run.epochs():
        for images, labels in run.steps(train_loader):
            ...                                                 # the training step, in full
            run.step(loss)
        run.end_epoch(accuracy=...)

A checkpoint is made when the loop asks for its next batch or epoch, so it includes what the lines after
run.step() and run.end_epoch() have changed; where gradients are accumulated over several steps, it is made
after the update. Samples count as consumed after the step that used them. The random numbers of a step are a
function of (seed, samples seen, rank), so the state of no generator is saved. In a trial (--prof,
--find_max_batch) steps are taken, but no checkpoint is read and no file is written.
"""

import argparse
import dataclasses
import functools
import signal
import sys
import types
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Callable, NoReturn, Optional, Protocol, Union

import torch

from common import devices, files, moments
from common.alive.stops import STOPS
from common.checkpoints import checkpoint, restore, run_folder
from common.checkpoints.evidence import Evidence
from common.checkpoints.parts import SavedParts
from common.checkpoints.position import Position
from common.checkpoints.saver import Saving
from common.devices.seeds import EVALUATION, HEAD, TAIL, seed_step
from common.errors import STOP_SIGNALS, TrainingFailed
from common.moments import REPLACED
from common.run import first_lines
from common.run.about import facts_of_this_start, manifest_of
from common.run.clock import Clock
from common.run.due import Due
from common.run.gradients import Gradients
from common.run.losses import Losses, Scaler
from common.run.observers import Facts, Observer, Observers
from common.run.peers import Fixed
from common.run.plan import Plan, Results, Sampler
from common.run.scores import Scores
from common.run.side_files import SideFiles
from common.run.unsaved import STEPS_WATCHED, Unsaved

if TYPE_CHECKING:
    from common.devices.largest_batch import BatchTrial
    from common.run.timing import Profile

NOT_APPLIED_WARNING = (
    "warning: the last gradients of the epoch that was resumed in its middle were not applied in it, unlike "
    "those of others, so the restart has changed the weights: ask run.updates(every=...) when to update "
    "them, and do not count batches"
)
NO_BATCH = object()  # in place of a batch, where there is none
UNCHANGED_WARNING = (
    "warning: no weight of the network has changed in this epoch: does optimizer.step() run, and --lr suit "
    "it?"
)


class TrainLoader(Protocol):
    """What a run needs of the loader of its training data (datasets/loader.py)."""

    ids: torch.Tensor  # of the samples of the batch that it gave last
    beside: bool  # whether the transfer to the device overlaps the computing

    def transfer_seconds(self) -> float:
        """Return the seconds of transfer to the device since the last call."""
        ...

    def __iter__(self) -> Iterator[Any]: ...


class Run:
    """What a training loop calls: it goes on where the last start stopped, counts, shows, saves and stops."""

    def __init__(
        self,
        args: argparse.Namespace,
        sampler: Sampler,
        model: torch.nn.Module,
        *,
        data_set: Optional[object] = None,
        classes: Sequence[str] = (),
        test_samples: int = 0,
        best_by: str = "accuracy",
        best_is: Optional[str] = None,
        patience: Optional[int] = None,
        prof: Optional[int] = None,
        unsaved: Sequence[object] = (),
        **saved: Any,
    ):
        """`data_set`: what is trained on; a restart compares its `classes` and its `digest()`, if it has
        them, with those of before. `classes`: the names of the outputs, if they are not those of
        data_set.classes.
        `test_samples`: samples of an evaluation, to estimate its time.
        `best_by`: the metric by which the best checkpoint is kept; `best_is`: "highest" (unset), or "lowest",
        as for a loss.
        `patience`: the run ends after this many epochs without a better one. `prof`: measure this many steps,
        then end.
        `saved`: other objects with a state_dict, saved under these names. `unsaved`: what is trained and
        meant to begin anew in each start, so that no warning names it."""
        moments.begin_run()
        self.args = args
        self.sampler = sampler
        self.loader: Optional[TrainLoader] = None  # that the last steps() was given
        self.parts = SavedParts(model, self.say)
        self.register(**saved)
        self.device = next(self.parts.network.parameters()).device
        self.position = Position()
        self.plan = Plan(args, sampler, patience)
        self.results = Results(best_by, best_is)
        self.clock = Clock(args.print_freq, test_samples)
        self.trial = _trial(args, prof, sampler, self.device, self.clock)
        self.peers: Fixed = (REPLACED.peers or Fixed)(args)
        self.side_files = SideFiles(
            args.output_dir, self.peers.shows, writes=self.peers.shows and not self.trial
        )
        self.due = Due(args, self.peers, self.side_files)
        self.losses = Losses(self.device, self.peers.rank, self.peers.size)
        self.gradients = Gradients({}, {})  # of no weights before resume()
        self.saving = Saving(args, classes, self.say, data_set)
        self.evidence = Evidence(args, self.say, self.saving.last_good)
        self.unsaved = Unsaved(lambda: [self.model, *self.parts.by_name.values()], unsaved, self.say)
        self._observers = Observers(
            args, self.device, self.side_files, self.peers.may_write and not self.trial
        )
        self._ended_epoch_is_complete: Optional[bool] = None  # None: no ended epoch waits for its checkpoint

    @property
    def model(self) -> torch.nn.Module:
        """The network, without what wraps it."""
        return self.parts.network

    def say(self, text: str) -> None:
        """Print a line of the log, on the rank that shows it."""
        self.side_files.say(text)

    def register(self, **saved: Any) -> None:
        """Add objects to save and restore, e.g. run.register(scaler=scaler). Call it before resume()."""
        self.parts.add(saved)

    # --- Observers ---

    def picture(self, name: str, pixels: torch.Tensor, **details: Any) -> None:
        """If this rank writes, put `pixels`, uint8 (3, H, W), in examples/NAME.png and TensorBoard.

        `details` go into the journal."""
        self.notify(Observer.picture, name=name, pixels=pixels, details=details)

    def notify(self, moment: Callable[..., None], **details: Any) -> None:
        """Call `moment`, a method of Observer, of each observer of this run, with these details."""
        seconds = self.clock.read()
        facts = Facts(self.position, self.plan, self.results, seconds, self.unit, self.due.is_evaluating)
        self._observers.notify(moment, facts, **details)

    def enter(self, phase: str) -> None:
        """Begin a phase of the clock and of the heartbeat."""
        self.clock.enter(phase, self.position.total_steps)

    # --- Where the run stands ---

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one step.

        A resumed run keeps the number if --batch_size and --total_batch are unchanged.
        """
        self._require_resumed("run.global_batch")
        return self.sampler.global_batch

    @property
    def progress(self) -> float:
        """Fraction of the samples of all --epochs seen at the middle of the coming step,
        to schedule the learning rate."""
        self._require_resumed("run.progress")
        return self.plan.progress(self.position)

    def updates(self, every: int) -> bool:
        """Whether to update the weights in this step, if gradients are accumulated over `every` batches: in
        each `every`-th step of an epoch, and in its last one. The same after a restart in the middle of an
        epoch, if the global batch is the same. Ask it before run.step()."""
        if every < 1:
            raise ValueError(f"run.updates(every={every}): give the number of batches, 1 or more")
        if self.shares:
            raise RuntimeError(
                "run.updates() is not for exact training, whose steps discard the gradients: give a "
                "larger batch"
            )
        next_position = self.position.after_step(self.global_batch)
        steps_of_epoch = next_position.consumed // self.global_batch
        return steps_of_epoch % every == 0 or self.plan.epoch_is_over(next_position)

    @property
    def goes_on(self) -> bool:
        """Whether this start goes on with a run that had begun; also true in a trial,
        which skips what only a new run does."""
        self._require_resumed("run.goes_on")
        return self.saving.goes_on or self.plan.start_position.total_steps > 0 or self.trial is not None

    def _require_resumed(self, name: str) -> None:
        if self.plan.resumed_at is None:
            raise RuntimeError(
                f"{name} was used before run.resume(): call that first, after the last run.register()"
            )

    @property
    def shares(self) -> Any:
        """The exact.Shares of an exact job, whose mean() returns the loss of all ranks for step();
        None in other jobs."""
        return self.parts.by_name.get("shares")

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.position.epoch

    @property
    def total_steps(self) -> int:
        """Number of steps that the run has taken, in all of its starts."""
        return self.position.total_steps

    @property
    def unit(self) -> str:
        """What the loader of the training gives: "images", or "samples" of another kind."""
        return getattr(self.loader, "unit", "samples")

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that this start has spent in each phase."""
        return self.clock.read()

    # --- From here to the end: the course of a run ---

    def resume(self) -> None:
        """Restore the checkpoint to go on from, if any, and let stop signals save and end the run.

        A trial (--prof, --find_max_batch) does neither.

        Call it after the last run.register(), on every rank."""
        # before all else: the doctor ends the process here
        moments.announce("run", self.args, self.unsaved.unsaved_parts)
        self._prepare_parts()
        resumed_from = None if self.trial else self.peers.find(self.saving.find, self.saving.identity)
        if resumed_from:
            self.load(*resumed_from)
            self.saving.goes_on = True
            self.saving.saved_at = self.position
        if self.side_files.writes and self.args.checkpoints:
            self._require_saveable()
        self.peers.meet(self)  # after the folder was found to be good: else the others would wait for rank 0
        self._require_sharded_sampler()
        self._listen_for_end()
        self.sampler.start_at(self.position.epoch, self.position.consumed)
        # From here on the run stands where it goes on, and may be asked for it.
        self.plan = dataclasses.replace(self.plan, resumed_at=self.position)
        self._begin_evidence()
        self.enter("start")
        self.notify(Observer.resumed)
        if not self.trial:
            self._announce_start(resumed_from)
            if self.side_files.shows and self.args.checkpoints:
                self.unsaved.begin()
            self.due.allow_stop()
            self._listen_for_stops()

    def _listen_for_end(self) -> None:
        """Save the last epoch when a cell of a notebook, or the job, has ended."""
        listener = types.SimpleNamespace(paused=self._save_ended_epoch, returned=self._finish_after_break)
        moments.listen(listener, ends_with_run=True)

    def _listen_for_stops(self) -> None:
        if not self.trial:
            STOPS.listen(self.stop_on, counts=self.peers.requested_signal)

    def _prepare_parts(self) -> None:
        """Set up what depends on the registered parts, and note their state in this start."""
        restore.create_momentum_buffers(self.parts.by_name.get("optimizer"))
        if self.shares:  # whose loss of a step is that of all ranks
            self.losses = Losses(self.device, 0, 1)
        self.saving.identity = restore.identity(
            self.args, self.sampler.num_samples, self.parts, self.saving.classes
        )
        if self.peers.may_write and not self.trial:
            self.saving.note_data_digests()
        self.parts.note_initial_options()
        self.parts.begin_epoch()
        self.gradients = Gradients(self.parts.named_weights(), self.parts.optimizers())

    def _require_sharded_sampler(self) -> None:
        own_shares = len(getattr(self.sampler, "own_shares", ()))  # parts of a step that this rank takes
        if self.peers.size > 1 and own_shares == getattr(self.sampler, "shares", None):
            raise RuntimeError(
                "all ranks would train on the same samples: call sampler.shard(rank, world_size) before Run()"
            )

    def _require_saveable(self) -> None:
        state = self.state()
        run_folder.require_room(self.args, checkpoint.estimated_size(state))
        checkpoint.require_plain(checkpoint.snapshot({name: state[name] for name in self.parts.by_name}))

    def _begin_evidence(self) -> None:
        writes = self.side_files.writes
        each_rank_writes = self.peers.each_has_a_ledger and not self.trial
        self.evidence.keep(self.peers.rank, needs_attempt=writes, needs_ledger=writes or each_rank_writes)
        self.evidence.begin(self.position.epoch, self.position.consumed)

    def _announce_start(self, resumed_from: Optional[restore.Checkpoint]) -> None:
        for line in first_lines.of_run(self, resumed_from, self.evidence.attempt):
            self.say(line)
        about = {}
        if self.side_files.writes:
            path = resumed_from[2] if resumed_from else None
            about = facts_of_this_start(self, path)
        self.notify(Observer.began, about=about)

    def epochs(self) -> Iterator[int]:
        """Yield the number of each epoch that is left, from 0;
        the first may be one that an earlier start has begun.

        In each, go through run.steps() and then call run.end_epoch(), once. What the job changes outside of
        the steps, such as a schedule that steps once an epoch, belongs before run.end_epoch() or after it;
        the lines before run.steps() run again in a start that goes on within the epoch. The checkpoint of an
        epoch is made when the next one is asked for."""
        self._require_resumed("run.epochs()")
        self._listen_for_stops()  # once more, in a notebook, whose cells end with the signals as they were
        if limit := self.plan.limit(self.position):
            done = f"{self.epoch} epochs, {self.total_steps} steps"
            self.say(f"nothing to do: the run has done {done}; it goes on with more than {limit}")
        while not self.plan.limit(self.position):
            epoch_start = self.position
            self.sampler.start_at(epoch_start.epoch, epoch_start.consumed)
            has_steps = len(self.sampler) > 0
            seed_step(self.args.seed, epoch_start.epoch, HEAD)
            self.parts.begin_epoch()
            self.clock.begin_epoch()
            self.notify(Observer.epoch_began)
            norms = norms_of_weights(self.model) if has_steps and self.side_files.shows else []
            yield epoch_start.epoch
            if has_steps and self.position.total_steps == epoch_start.total_steps:
                raise RuntimeError(
                    "an epoch without a step: the loop over run.epochs() has to go through run.steps(loader)"
                )
            if self.due.is_evaluating:
                raise RuntimeError(
                    "the loop over run.epochs() has to call run.end_epoch() once, after run.steps()"
                )
            self._save_epoch()
            if norms and norms == norms_of_weights(self.model):
                self.say(UNCHANGED_WARNING)
        outcome = "limit" if self.plan.is_cut_short(self.position) else "finished"
        self._close(outcome, self.plan.limit(self.position))

    def steps(self, loader: TrainLoader) -> Iterator[Any]:
        """Yield the batches of this epoch that are left, on the device.

        Take a training step with each, and call run.step(loss) once after it, on every rank.

        Before each batch the random generators are seeded, and when the next one is asked for, a checkpoint
        may be made: what a step changes and a later one needs has to be in the network or in what Run() was
        given. With exact.Shares, it yields this rank's shares of a batch, and run.step(loss) follows the last
        of them."""
        self._require_resumed("run.steps()")
        if not hasattr(loader, "transfer_seconds"):
            raise TypeError(
                f"run.steps() was given a {type(loader).__name__}, which does not say which samples it "
                "gives, so a restart would repeat some: give it SampleLoader(data_set, train_sampler, "
                "device) of datasets.loader, which takes any data set and a collate_fn (docs/your_script.md)"
            )
        if self.parts.restored and self.position.consumed:
            self._restore_again(*self.parts.restored)
        self.parts.forget_restored()
        self.loader = loader
        self.peers.fix_gradient_order(self.say)
        self.gradients.observe()
        batches = iter(loader)
        while not (self.plan.epoch_is_over(self.position) or self.plan.steps_used_up(self.position)):
            self.enter("data")
            batch = next(batches, NO_BATCH)
            if batch is NO_BATCH:
                raise self._too_few_batches_error()
            steps_before = self.position.total_steps
            self._begin_step(loader)
            if self.shares:
                yield from self.shares.of(batch, self.position.samples_seen)
                if self.shares.was_interrupted:
                    close_batches(batches)
                    self.peers.regroup()
                    batches = iter(loader)
                    continue
            else:
                seed_step(self.args.seed, self.position.samples_seen, self.peers.rank)
                yield batch
            if self.position.total_steps != steps_before + 1:
                raise RuntimeError(
                    "the loop over run.steps() has to call run.step(loss) once for every batch"
                )
            if not self.trial:
                self._save_or_stop_if_due()
        self._end_steps()

    def _restore_again(self, state: dict[str, Any], manifest: dict[str, Any], path: str) -> None:
        """Restore the parts again: the lines before run.steps() may have changed them,
        e.g. given weights to an optimizer."""
        self.parts.restore(state, manifest, path, within_epoch=False)
        self.gradients.load_state_dict(state["run"])
        self._keep_global_batch(manifest)

    def _too_few_batches_error(self) -> RuntimeError:
        return RuntimeError(
            f"the loader ended after {self.position.consumed} of the {self.sampler.samples_per_epoch} "
            "samples of this epoch: give it every batch of the sampler that Run() was given"
        )

    def _begin_step(self, loader: TrainLoader) -> None:
        self.due.begin_step()
        self.enter("step")
        self.clock.add_transfer(loader.transfer_seconds(), loader.beside)
        self.evidence.note_step_begins(self.position.epoch, self.position.consumed)
        self.gradients.begin_step()
        self.unsaved.begin_step()

    def _end_steps(self) -> None:
        """End this start's steps of an epoch: save an incomplete epoch, and begin the evaluation."""
        epoch_is_over = self.plan.epoch_is_over(self.position)
        if epoch_is_over and self.gradients.note_end_of_epoch(self.plan.began_this_epoch(self.position)):
            self.say(NOT_APPLIED_WARNING)
        self._gather()  # in the evaluation, rank 0 may have to save without the other ranks
        if not (self.trial or epoch_is_over):
            self.save()  # the epoch is incomplete, and the next start continues it from here
        self.parts.note_state(self.gradients.state_dict())
        seed_step(self.args.seed, self.position.epoch, EVALUATION)
        self.due.allow_stop(is_evaluating=True)
        self.enter("evaluate")
        self.notify(Observer.evaluation_began)

    # The order of a step is a contract: if one of these fails, the run ends before those below it
    # (test_step.py).
    #   1. the ledger of this rank has the samples of the step
    #   2. the step counts: the position moves, the loss is added; if a line is due, the losses are looked at
    #   3. the observers are told; one that fails is dropped, and the run goes on
    #      ... the loop asks for its next batch ...
    #   4. the ranks agree on what is due
    #   5. the state is saved in the background, if all losses are numbers; the next save reports an error of
    #      this one; after the last step of an epoch the save comes after end_epoch(), which has the results
    #      of the evaluation
    #   6. the run stops if told to, after it has been saved
    def step(self, loss: torch.Tensor) -> None:
        """Count and report the step just taken; the last one of a trial exits.

        A due save or stop comes with the next batch.
        """
        loss = loss.detach()
        ids = self.sample_ids
        self.evidence.note_step_counts(
            self.position.epoch, self.position.consumed, self.peers.samples_of_step(ids)
        )
        self.position = self.position.after_step(self.sampler.global_batch)
        self.losses.add(loss, self.position.total_steps, ids)
        self.gradients.end_step()
        self.unsaved.end_step()
        self.peers.note_step()
        samples_of_this_start = self.position.samples_seen - self.plan.start_position.samples_seen
        line_is_due = self.clock.count_step(self.sampler.global_batch, samples_of_this_start)
        result = self.trial.after_step(self.position.total_steps) if self.trial else None
        if line_is_due:
            self._log_line(loss)
        if result:
            self._end_trial(result)
        self.notify(Observer.stepped, loss=loss)

    @property
    def sample_ids(self) -> torch.Tensor:
        """The ids of the samples of this rank's batch."""
        if self.loader is None:
            raise RuntimeError("there is no batch yet: take one from run.steps(loader) before run.step()")
        return self.loader.ids

    def _end_trial(self, result: str) -> NoReturn:
        self.say(result)
        self.notify(Observer.ended)
        self.enter("done")
        sys.exit(0)

    def _log_line(self, loss: torch.Tensor) -> None:
        steps_of_this_start = self.position.total_steps - self.plan.start_position.total_steps
        if steps_of_this_start > STEPS_WATCHED:
            self.unsaved.warn_of_changes("a line of the log")
        self._check_losses()
        seconds_left = self.clock.seconds_left(
            self.plan.samples_left(self.position), self.plan.evaluations_left(self.position)
        )
        speed = self.clock.lap()
        self.enter("start" if steps_of_this_start == 1 else "save")
        self.notify(
            Observer.log_due,
            loss=loss.item(),
            lr=self.parts.learning_rate(),
            speed=speed,
            seconds_left=seconds_left,
            skipped=self._skipped_steps(),
        )
        self.enter("step")

    def _skipped_steps(self) -> int:
        """Return how many steps were skipped because their gradients overflowed;
        0 if the run saves no Scaler."""
        scaler = self.parts.by_name.get("scaler")
        return scaler.skipped() if isinstance(scaler, Scaler) else 0

    def _save_or_stop_if_due(self) -> None:
        requests = self.due.after_step(self.position.total_steps, self.gradients.should_wait())
        if requests is None:
            return
        if requests.save and not self.plan.epoch_is_over(self.position):
            self.save()
        self.due.allow_stop()
        if requests.stop_signal:
            self.stop_on(requests.stop_signal)
        if requests.hours_are_over:
            self.stop(f"--max_hours {self.args.max_hours} is over", 0)

    def end_epoch(self, scores: Optional[Scores] = None, /, **metrics: float) -> None:
        """Show an epoch's metrics, and its `scores` in the report; count it unless --max_steps cut it short.

        The checkpoint is made when the loop asks for the next epoch. Every rank calls it, once, after
        run.steps()."""
        if not self.due.is_evaluating and not self.position.consumed:
            raise RuntimeError(
                "run.end_epoch() was called without a step since the last call: once, after run.steps()"
            )
        self.due.end_evaluation()
        self.gradients.invalidate_collected()  # lines between run.steps() and here may have computed others
        self._check_losses()
        is_complete = self.plan.epoch_is_over(self.position)
        if is_complete:
            if warning := self.results.warning_if_best_by_is_missing(metrics):
                self.say(warning)
            self.position = self.results.close_epoch(self.position, self.losses.close_epoch(), metrics)
            self.clock.count_evaluation()
        self.notify(
            Observer.epoch_ended,
            is_complete=is_complete,
            metrics=metrics,
            scores=scores,
            skipped=self._skipped_steps(),
        )
        self._ended_epoch_is_complete = is_complete
        seed_step(self.args.seed, self.position.epoch, TAIL)

    def _save_ended_epoch(self) -> None:
        """Save the last epoch if the loop over run.epochs() was left at its end, which a notebook may enter
        again. Wait for it, or for the save before: an error of that is raised."""
        if self._ended_epoch_is_complete is not None:
            self._save_epoch()
        if self.saving.is_writing:
            self.enter("save")
        self.saving.wait()

    def _finish_after_break(self, code: object) -> None:
        """At the end of the job, if it has left its loop over run.epochs(): save and publish the last epoch.

        Not if the job has failed (`code`): what belongs to the epoch may be incomplete.
        """
        if code:
            self._ended_epoch_is_complete = None
            self.saving.forgive_pending()
            return
        has_unsaved_epoch = self._ended_epoch_is_complete is not None
        self._save_ended_epoch()
        if has_unsaved_epoch:
            self.enter("publish")
            self.saving.finish_publishing(in_a_hurry=bool(STOPS.noted))
            self.evidence.remove_attempt()
            self.enter("done")

    def _save_epoch(self) -> None:
        """Save what end_epoch() has ended, with the weights of the epoch if it is a whole one."""
        is_complete = self._ended_epoch_is_complete
        self._ended_epoch_is_complete = None
        self.due.allow_stop()
        weights_of_epoch = self.position.epoch if is_complete else None
        self.save(weights_of_epoch=weights_of_epoch)
        if self.side_files.shows:
            self.enter("save")
        self.notify(Observer.saved, is_complete=is_complete)

    def together(self, work: Callable, *arguments: object) -> Any:
        """Return `work(*arguments)`, in which every rank takes part.

        An elastic job repeats it if ranks change meanwhile.
        """
        return self.peers.together(work, *arguments)

    # --- Saving and restoring ---

    def load(self, state: dict[str, Any], manifest: dict[str, Any], path: str) -> None:
        """Restore the run from a checkpoint: its state and manifest. `path`: its name in messages."""
        # In an elastic job, a rank that has resumed already has the parameter groups that the job has added
        # in this epoch.
        has_no_groups_of_epoch = self.plan.resumed_at is None and manifest["consumed"] > 0
        self.parts.restore(state, manifest, path, within_epoch=has_no_groups_of_epoch)
        self.gradients.load_state_dict(state["run"])
        self.position = Position.of(manifest)
        self.saving.id = manifest.get("run", self.saving.id)
        self.losses.load_state_dict(state["run"])
        self.results.history = state["run"]["history"]
        self._keep_global_batch(manifest)

    def _keep_global_batch(self, manifest: dict[str, Any]) -> None:
        saved_options = manifest["arguments"]
        options = vars(self.args)
        if all(options.get(name) == saved_options.get(name) for name in ("batch_size", "total_batch")):
            self.sampler.set_global_batch(manifest["global_batch"])

    def save(self, weights_of_epoch: Optional[int] = None) -> None:
        """Write a checkpoint in the background.

        Every rank calls it, as each has gradients and losses of its own; one of them writes. In a trial, and
        with --checkpoints false, none does.

        A position that is saved already is not saved again, unless `weights_of_epoch` is given, the number of
        an epoch whose weights go to a file of their own, too."""
        if not self._losses_can_wait():
            self._check_losses()
        self._gather()
        self.peers.agreement.note_save()
        if self.side_files.writes:
            self._write_checkpoint(weights_of_epoch)

    def _write_checkpoint(self, weights_of_epoch: Optional[int]) -> None:
        """Begin to write a checkpoint, if one is to be written: see save()."""
        # also without checkpoints, as the folder has other files of the run
        self.saving.require_not_taken_over()
        is_saved_already = self.position == self.saving.saved_at and not weights_of_epoch
        if is_saved_already or not self.args.checkpoints:
            return
        self.enter("save")
        losses = self.losses.hand_over()
        check = functools.partial(losses.check, self.args.lr, self.saving.last_good)
        self.saving.save(self.state, manifest_of(self), weights_of_epoch, check)
        if not STOPS.noted:
            moment = "the end of an epoch" if weights_of_epoch else "a save"
            self.unsaved.warn_of_changes(moment)
        self.saving.require_published()

    def _check_losses(self) -> None:
        try:
            self.losses.check(self.args.lr, self.saving.last_good)
        except TrainingFailed:
            self.saving.forgive_pending()  # mostly it has the same
            raise

    def _losses_can_wait(self) -> bool:
        """Whether a save leaves it to the thread that writes to look at the losses, so that a GPU's queue
        does not run empty. Of several ranks all have to raise the error in the same save."""
        return self.peers.size == 1 and self.args.checkpoints and devices.is_nvidia(self.device)

    def _gather(self) -> None:
        """Bring to rank 0 what a checkpoint holds of the other ranks. All ranks call it.

        Until the next step or end_epoch(), further calls do nothing, so rank 0 may save alone."""
        self.losses.all_reduce()
        if self.args.checkpoints and not self.trial:
            self.gradients.collect()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint of this position holds. Call _gather() before, on all ranks."""
        run_state = {**self.losses.state_dict(), **self.gradients.state_dict(), **self.parts.settings()}
        return {**self.parts.states(), "run": {**run_state, "history": self.results.history}}

    # --- Ending ---

    def stop_on(self, signal_number: float) -> None:
        """Save and exit because of the stop signal with this number."""
        stop_signal = signal.Signals(int(signal_number))
        self.stop(f"stopped by {stop_signal.name}", STOP_SIGNALS[stop_signal])

    def stop(self, reason: str, code: int) -> None:
        """Save, close the run and exit with `code`. `reason`: for the log."""
        self._check_losses()
        # What the evaluation has changed is not saved: the next start repeats the evaluation, and would
        # change it twice.
        if not self.due.is_evaluating or self.parts.is_unchanged(self.gradients.state_dict()):
            self.save()
        self._close("stopped", reason, in_a_hurry=code != 0)
        sys.exit(code)

    def _close(self, outcome: str, reason: Optional[str], in_a_hurry: bool = False) -> None:
        """Wait for the last save, publish, notify the observers and release the output folder.

        `outcome`: finished, limit or stopped; `reason`: the option or the signal.
        """
        self.notify(Observer.ending, outcome=outcome, reason=reason)
        self.enter("save")
        self.saving.wait()
        self.notify(Observer.ended)
        self.side_files.retry()
        self.enter("publish")
        self.saving.finish_publishing(in_a_hurry or bool(STOPS.noted))
        self.evidence.remove_attempt()
        if self.side_files.writes:
            self.saving.require_not_taken_over()
        self.enter("done")
        is_saved = self.saving.saved_at == self.position
        self.notify(
            Observer.closed,
            outcome=outcome,
            reason=reason,
            is_saved=is_saved,
            last_good=self.saving.last_good(),
        )
        files.release()


def _trial(
    args: argparse.Namespace, prof: Optional[int], sampler: Sampler, device: torch.device, clock: Clock
) -> "Union[Profile, BatchTrial, None]":
    """Return the trial that the options ask for, of the largest batch or the speed; else None."""
    if args.find_max_batch:
        from common.devices.largest_batch import BatchTrial

        return BatchTrial(args, sampler, device)
    if prof:
        from common.run.timing import Profile

        return Profile(prof, sampler, device, clock)
    return None


def close_batches(batches: Iterator[Any]) -> None:
    """End what a loader has begun, before a batch is asked for again."""
    close = getattr(batches, "close", None)  # of a generator
    if close:
        close()


def norms_of_weights(network: torch.nn.Module) -> list[float]:
    """Return the norm of each trainable weight, to notice an epoch that changes none of them."""
    # Not the sum: the gradients of a last layer add up to zero. In the widest type, so that small updates are
    # noticed.
    weights = [weight.detach() for weight in network.parameters() if weight.requires_grad]
    norms = [torch.linalg.vector_norm(weight, dtype=devices.widest(weight.device)) for weight in weights]
    return torch.stack(norms).tolist() if norms else []
