"""The run of a job: it goes on where the last start stopped, shows progress, saves when due, and stops when told to.

    run = Run(args, train_sampler, model, optimizer=optimizer)      # and anything else that has a state_dict
    run.resume()                                                    # restores what was named, from the newest checkpoint
    for epoch in run.epochs():
        for images, labels in run.steps(train_loader):
            ...                                                     # the training step, in full
            run.step(loss)
        run.end_epoch(accuracy=...)

A checkpoint is made when the loop asks for its next batch or epoch, so it includes what the lines after run.step() and
run.end_epoch() have changed; where gradients are accumulated over several steps, it is made after the update. Samples count as
consumed after the step that used them. The random numbers of a step are a function of (seed, samples seen, rank), so the state
of no generator is saved. In a trial (--prof, --find_max_batch) steps are taken, but no checkpoint is read and no file
is written.
"""

import argparse
import dataclasses
import signal
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

import torch

from common import devices, files, moments
from common.alive.stops import STOPS
from common.checkpoints import checkpoint, parts, restore, run_folder
from common.checkpoints.evidence import Evidence
from common.checkpoints.position import Position
from common.checkpoints.saver import Saving
from common.devices.seeds import EVALUATION, HEAD, TAIL, seed_step
from common.errors import STOP_SIGNALS, UserError
from common.moments import REPLACED
from common.run import first_lines
from common.run.about import facts_of_this_start, learning_rate, manifest_of
from common.run.clock import Clock
from common.run.gradients import Gradients
from common.run.losses import Losses, Scaler
from common.run.observers import Facts, Observer, Observers
from common.run.peers import Fixed
from common.run.plan import Plan, Results
from common.run.scores import Scores
from common.run.side_files import SideFiles
from common.run.unsaved import STEPS_WATCHED, Unsaved
from common.weights.files import unwrapped

NOT_APPLIED = (
    "warning: the last gradients of the epoch that was resumed in its middle were not applied in it, unlike those of others, "
    "so the restart has changed the weights: ask run.updates(every=...) when to update them, and do not count batches"
)
END = object()  # in place of a batch, where there is none
UNCHANGED = "warning: no weight of the network has changed in this epoch: does optimizer.step() run, and --lr suit it?"


class Run:
    def __init__(
        self,
        args: argparse.Namespace,
        sampler: Any,
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
        """`data_set`: what is trained on; a restart compares its `classes` and its `digest()`, if it has them, with those of
        before. `classes`: the names of the outputs, if they are not those of data_set.classes.
        `test_samples`: samples of an evaluation, to estimate its time.
        `best_by`: the metric by which the best checkpoint is kept; `best_is`: "highest" (unset), or "lowest", as for a loss.
        `patience`: the run ends after this many epochs without a better one. `prof`: measure this many steps, then end.
        `saved`: other objects with a state_dict, saved under these names. `unsaved`: what is trained and meant to begin anew in
        each start, so that no warning names it."""
        self.args = args
        self.sampler = sampler
        self.parts = {}
        self.register(**saved)
        self.position = Position()
        self.results = Results(best_by, best_is)
        self.plan = Plan(args, sampler, patience)
        self.uses_all_gpus = isinstance(model, torch.nn.DataParallel)
        self.model = unwrapped(model)
        self.device = next(self.model.parameters()).device
        if args.find_max_batch and not devices.is_accelerator(self.device):
            raise UserError("--find_max_batch true looks at the memory of a GPU, and this job computes on a CPU")
        self.peers: Fixed = (REPLACED.peers or Fixed)(args)
        self.trial = bool(prof) or args.find_max_batch
        self.side_files = SideFiles(args.output_dir, self.peers.shows, writes=self.peers.shows and not self.trial)
        self.clock = Clock(args.print_freq, test_samples)
        self._observers = Observers(args, self.device, self.side_files, self.peers.may_write and not self.trial)
        self._data_set = data_set
        self.saving = Saving(args, classes if len(classes) else names_of_classes(data_set), self.say)
        self.evidence = Evidence(args, self.say, self.saving.last_good)
        self.unsaved = Unsaved(lambda: [self.model, *self.parts.values()], unsaved, self.say)
        self.loader: Any = None  # of the training, from the first steps() on
        self.evaluates = False  # from the end of steps() to end_epoch()
        self.made: dict[str, Any] = {}  # settings of the parts as this start has made them, before a checkpoint is loaded
        self.groups: dict[str, int] = {}  # of the weights of each optimizer, when the epoch began
        self.changed: dict[str, str] = {}  # settings of the parts that differ from the checkpoint
        self.restored: Any = None  # the checkpoint, until run.steps() of an epoch that an earlier start has begun
        self._has_begun = False  # whether there was a step in this start
        self._ended: Optional[bool] = None  # whether an ended epoch was a whole one, until its checkpoint is made
        self._due = [0.0, 0.0, 0.0]  # what the peers have agreed on (Fixed.due), kept until the weights are updated
        self._profile: Any = None
        if prof:
            from common.run.timing import Profile

            self._profile = Profile(prof, self.clock, lambda: devices.synchronize(self.device))

    def say(self, text: str) -> None:
        self.side_files.say(text)

    def register(self, **saved: Any) -> None:
        """Add objects to save and restore, e.g. run.register(scaler=scaler). Call it before resume()."""
        parts.require_savable(saved)
        self.parts.update(saved)

    # --- Observers ---

    def picture(self, name: str, pixels: torch.Tensor, **what: Any) -> None:
        """If this rank writes, put `pixels`, uint8 (3, H, W), in examples/NAME.png and TensorBoard, `what` in the journal."""
        self.tell(Observer.picture, name=name, pixels=pixels, what=what)

    def tell(self, moment: Callable[..., None], **more: Any) -> None:
        self._observers.tell(moment, Facts(self.position, self.plan, self.results, self.clock.read(), self.unit), **more)

    def enter(self, phase: str) -> None:
        self.clock.enter(phase, self.position.total_steps)

    # --- Where the run stands ---

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one step. A resumed run keeps the number if --batch_size and --total_batch are unchanged."""
        self._require_resumed("run.global_batch")
        return self.sampler.global_batch

    @property
    def progress(self) -> float:
        """Fraction of the samples of all --epochs seen at the middle of the coming step, to schedule the learning rate."""
        self._require_resumed("run.progress")
        return self.plan.progress(self.position)

    def updates(self, every: int) -> bool:
        """Whether to update the weights in this step, if gradients are accumulated over `every` batches: in each `every`-th
        step of an epoch, and in its last one. The same after a restart in the middle of an epoch. Ask it before run.step()."""
        if every < 1:
            raise ValueError(f"run.updates(every={every}): give the number of batches, 1 or more")
        if self.shares:
            raise RuntimeError(
                "run.updates() is not for exact training, whose steps discard the gradients: give a larger batch"
            )
        after = self.position.after_step(self.global_batch)
        return after.consumed // self.global_batch % every == 0 or self.plan.epoch_is_over(after)

    @property
    def goes_on(self) -> bool:
        """Whether this start goes on with a run that had begun; also true in a trial, which skips what only a new run does."""
        self._require_resumed("run.goes_on")
        return self.saving.goes_on or self.plan.resumed_at.total_steps > 0 or self.trial

    def _require_resumed(self, asked: str) -> None:
        if self.plan.resumed_at is None:
            raise RuntimeError(f"{asked} was used before run.resume(): call that first, after the last run.register()")

    @property
    def shares(self) -> Any:
        """The exact.Shares of an exact job, whose mean() returns the loss of all ranks for step(); None in other jobs."""
        return self.parts.get("shares")

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
        return self.loader.unit if hasattr(self.loader, "unit") else "samples"

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that this start has spent in each phase."""
        return self.clock.read()

    # --- From here to the end: the course of a run ---

    def resume(self) -> None:
        """Restore the checkpoint to go on from, if any, and let stop signals save and end the run. A trial does neither."""
        moments.announce("run", self.args, self.unsaved.not_given)
        restore.create_momentum_buffers(self.parts)
        self.losses = Losses(self.device, 0, 1) if self.shares else Losses(self.device, self.peers.rank, self.peers.size)
        self.saving.identity = restore.identity(self.args, self.sampler, self.model, self.parts, self.saving.classes)
        if self.peers.may_write and not self.trial:
            self.saving.data_digests = data_digests(self._data_set)
        self.made, self.groups = parts.made(self), parts.groups(self)
        self.gradients = Gradients(parts.named_weights(self), parts.optimizers(self))
        found = None if self.trial else self.peers.find(self.saving.find, self.saving.identity)
        if found:
            self.load(*found)
            self.saving.goes_on, self.saving.saved_at = True, self.position
        if self.side_files.writes and self.args.checkpoints:
            run_folder.require_room(self.args, checkpoint.estimated_size(state := self.state()))
            checkpoint.require_plain(checkpoint.snapshot({name: state[name] for name in self.parts}))
        self.peers.meet(self)
        if self.peers.size > 1 and len(getattr(self.sampler, "own", ())) == getattr(self.sampler, "shares", None):
            raise RuntimeError("all ranks would train on the same samples: call sampler.shard(rank, world_size) before Run()")
        moments.listen(types.SimpleNamespace(returned=self._leave))
        self.sampler.start_at(self.position.epoch, self.position.consumed)
        self.plan = dataclasses.replace(self.plan, resumed_at=self.position)
        writes = self.side_files.writes
        self.evidence.keep(self.peers.rank, attempt=writes, ledger=writes or (self.peers.each_has_a_ledger and not self.trial))
        self.evidence.begin(self.position.epoch, self.position.consumed)
        self.enter("start")
        self.tell(Observer.resumed)
        if not self.trial:
            for line in first_lines.of_run(self, found, self.evidence.attempt):
                self.say(line)
            about = facts_of_this_start(self, found[2] if found else None) if writes else {}
            self.tell(Observer.began, about=about)
            if self.side_files.shows and self.args.checkpoints:
                self.unsaved.begin()
            self.allow_stop()
            STOPS.listen(self.stop_on, counts=self.peers.told_to_stop)

    def epochs(self) -> Iterator[int]:
        self._require_resumed("run.epochs()")
        if limit := self.plan.limit(self.position):
            place = f"{self.epoch} epochs, {self.total_steps} steps"
            self.say(f"nothing to do: the run has done {place}; it goes on with more than {limit}")
        while not self.plan.limit(self.position):
            began = self.position
            self.sampler.start_at(began.epoch, began.consumed)
            left = len(self.sampler)
            seed_step(self.args.seed, began.epoch, HEAD)
            self.groups = parts.groups(self)
            self.clock.begin_lap()
            self.tell(Observer.epoch_began)
            sizes = sizes_of_weights(self.model) if left and self.side_files.shows else []
            yield began.epoch
            if left and self.position.total_steps == began.total_steps:
                raise RuntimeError("an epoch without a step: the loop over run.epochs() has to go through run.steps(loader)")
            if self.evaluates:
                raise RuntimeError("the loop over run.epochs() has to call run.end_epoch() once, after run.steps()")
            self._save_epoch()
            if sizes and sizes == sizes_of_weights(self.model):
                self.say(UNCHANGED)
        self._close("limit" if self.plan.cut_short(self.position) else "finished", self.plan.limit(self.position))

    def steps(self, loader: Any) -> Iterator:
        if not hasattr(loader, "transfer_seconds"):
            raise TypeError(
                f"run.steps() was given a {type(loader).__name__}, which does not say which samples it gives, so a restart "
                "would repeat some: give it SampleLoader(data_set, train_sampler, device) of datasets.loader, which takes "
                "any data set and a collate_fn (docs/your_own.md)"
            )
        if self.restored and self.position.consumed:
            self.load(*self.restored, again=True)
        self.loader, self.restored = loader, None
        if not self._has_begun:
            self.peers.before_first_step(self.say)
            self._has_begun = True
        self.gradients.observe()
        batches = iter(loader)
        while not (self.plan.epoch_is_over(self.position) or self.plan.steps_used_up(self.position)):
            self.enter("data")
            batch = next(batches, END)
            if batch is END:
                seen = self.position.consumed
                expected = self.sampler.samples_per_epoch
                raise RuntimeError(
                    f"the loader ended after {seen} of the {expected} samples of this epoch: give it every batch of "
                    "the sampler that Run() was given"
                )
            STOPS.may_end, due = False, self.position.total_steps + 1
            self.enter("step")
            self.clock.transferred(loader.transfer_seconds(), loader.beside)
            self.evidence.note_step_begins(self.position.epoch, self.position.consumed)
            self.gradients.begin_step()
            self.unsaved.begin_step()
            if self.shares:
                yield from self.shares.of(batch, self.position.samples_seen)
                if self.shares.interrupted:
                    batches.close()
                    self.peers.form_again()
                    batches = iter(loader)
                    continue
            else:
                seed_step(self.args.seed, self.position.samples_seen, self.peers.rank)
                yield batch
            if self.position.total_steps != due:
                raise RuntimeError("the loop over run.steps() has to call run.step(loss) once for every batch")
            if not self.trial:
                self._keep_up()
        if self.plan.epoch_is_over(self.position) and self.gradients.note_end_of_epoch(
            self.plan.began_this_epoch(self.position)
        ):
            self.say(NOT_APPLIED)
        self._gather()  # in the evaluation, rank 0 may have to save without the other ranks
        if not (self.trial or self.plan.epoch_is_over(self.position)):
            self.save()  # the epoch is incomplete, and the next start continues it from here
        self._fingerprint = self._mark()
        seed_step(self.args.seed, self.position.epoch, EVALUATION)
        self.allow_stop(evaluates=True)
        self.enter("evaluate")

    # The order of a step is a contract: where a part fails, the run ends before what is below it (test_step.py).
    #   1. the ledger of this rank has the samples of the step
    #   2. the step counts: the position moves, the loss is added
    #   3. the observers are told; one that fails is dropped, and the run goes on
    #      ... the loop asks for its next batch ...
    #   4. the ranks agree on what is due
    #   5. the state is saved in the background, if all losses are numbers; the next save reports an error of this one;
    #      after the last step of an epoch the save comes after end_epoch(), which has the results of the evaluation
    #   6. the run stops if told to, after it has been saved
    def step(self, loss: torch.Tensor) -> None:
        """Count and report the step just taken; the last step of --prof exits. A due save or stop comes with the next batch."""
        loss, ids = loss.detach(), self.loader.ids
        self.evidence.note_step_counts(self.position.epoch, self.position.consumed, self.peers.samples_of_step(ids))
        self.position = self.position.after_step(self.sampler.global_batch)
        self.losses.add(loss, self.position.total_steps, ids)
        self.gradients.end_step()
        self.unsaved.end_step()
        self.peers.counted()
        trained = self.position.samples_seen - self.plan.resumed_at.samples_seen
        line_is_due = self.clock.stepped(self.sampler.global_batch, trained)
        speed = self._profile.step(self.sampler.global_batch) if self._profile else None
        if line_is_due:
            self._show_line(loss)
        if speed:
            self.say(speed)
            self.tell(Observer.ended)
            self.enter("done")
            sys.exit(0)
        if self.args.find_max_batch:
            self._end_a_trial_of_a_batch()
        self.tell(Observer.stepped)

    def _end_a_trial_of_a_batch(self) -> None:
        from common.devices import largest_batch

        steps = self.position.total_steps
        largest_batch.end_of_step(self.args, steps, self.sampler, lambda: devices.synchronize(self.device))

    def _show_line(self, loss: torch.Tensor) -> None:
        if self.position.total_steps > self.plan.resumed_at.total_steps + STEPS_WATCHED:
            self.unsaved.say_what_is_found("a line of the log")
        self.losses.check(self.args.lr, self.saving.last_good)
        left = self.clock.seconds_left(self.plan.samples_left(self.position), self.plan.evaluations_left(self.position))
        speed = self.clock.lap()
        self.enter("start" if self.position.total_steps == self.plan.resumed_at.total_steps + 1 else "save")
        rate, overflowed = learning_rate(self.parts), skipped(self.parts)
        self.tell(Observer.line, loss=loss.item(), lr=rate, speed=speed, seconds_left=left, skipped=overflowed)
        self.enter("step")

    def _keep_up(self):
        """Save or stop if that is due; while gradients accumulate, first wait for the update of the weights."""
        stop_signal, hours_over, save = self.peers.due()
        by_steps = self.args.save_steps and self.position.total_steps % self.args.save_steps == 0
        self._due = [max(pair) for pair in zip(self._due, (stop_signal, hours_over, save or bool(by_steps)))]
        waits = self.gradients.update_wait()
        if any(self._due):
            waits = self.peers.all_agree(waits)
        if waits:
            return
        (stop_signal, hours_over, save), self._due = self._due, [0.0, 0.0, 0.0]
        if save and not self.plan.epoch_is_over(self.position):
            self.save()
        self.allow_stop()
        if stop_signal:
            self.stop_on(stop_signal)
        if hours_over:
            self.stop(f"--max_hours {self.args.max_hours} is over", 0)

    def end_epoch(self, scores: Optional[Scores] = None, /, **metrics: float) -> None:
        """Show an epoch's metrics, and its `scores` in the report; count it unless --max_steps cut it short. The checkpoint
        is made when the loop asks for the next epoch."""
        if not self.evaluates and not self.position.consumed:
            raise RuntimeError("run.end_epoch() was called without a step since the last call: once, after run.steps()")
        self.evaluates = STOPS.may_end = False  # until what belongs to this epoch is complete
        self.gradients.invalidate_collected()  # lines between run.steps() and here may have computed others
        self.losses.check(self.args.lr, self.saving.last_good)
        whole = self.plan.epoch_is_over(self.position)
        if whole:
            if line := self.results.warning_of_best_by(metrics):
                self.say(line)
            self.position = self.results.close_epoch(self.position, self.losses.close_epoch(), metrics)
            self.clock.evaluated()
        self.tell(Observer.epoch_ended, whole=whole, metrics=metrics, scores=scores, skipped=skipped(self.parts))
        self._ended = whole
        seed_step(self.args.seed, self.position.epoch, TAIL)

    def _leave(self, code: object) -> None:
        if self._ended is not None and not code:  # the loop over run.epochs() was left
            self._save_epoch()
            self.saving.wait()
            self.enter("publish")
            self.saving.finish_publishing(in_a_hurry=bool(STOPS.noted))
            self.enter("done")

    def _save_epoch(self):
        whole, self._ended = self._ended, None
        self.allow_stop()
        self.save(weights_of_epoch=self.position.epoch if whole else None)
        if self.side_files.shows:
            self.enter("save")
        self.tell(Observer.saved, whole=whole)

    def together(self, work: Callable, *arguments: Any) -> Any:
        """Return `work(*arguments)`, in which every rank takes part. An elastic job repeats it if ranks change meanwhile."""
        return self.peers.together(work, *arguments)

    # --- Saving and restoring ---

    def load(self, state: dict, about: dict, path: str, again: bool = False) -> None:
        """Restore the run from a checkpoint. `again`: once more, as the job may have changed the parts before run.steps()."""
        self.restored = None if again else (state, about, path)
        parts.restore(self, state, path, within_epoch=about["consumed"] > 0 and not again)
        self.gradients.load_state_dict(state["run"])
        self.position = Position.of(about)
        self.saving.id = about.get("run", self.saving.id)
        self.losses.load_state_dict(state["run"])
        self.results.history = state["run"]["history"]
        sizes = [(given.get("batch_size"), given.get("total_batch")) for given in (about["arguments"], vars(self.args))]
        if sizes[0] == sizes[1]:
            self.sampler.set_global_batch(about["global_batch"])

    def save(self, weights_of_epoch: Optional[int] = None) -> None:
        """Save in the background, unless done already, in a trial or with --checkpoints false. Every rank has to call this."""
        self.losses.check(self.args.lr, self.saving.last_good)
        self._gather()
        self.peers.agreement.saved()
        if not self.side_files.writes:
            return  # a trial writes nothing, and rank 0 writes for all
        self.saving.require_ours()
        if not self.args.checkpoints:
            return
        if self.position == self.saving.saved_at and not weights_of_epoch:
            return
        self.enter("save")
        self.saving.save(self.state, manifest_of(self), weights_of_epoch)
        if not STOPS.noted:
            self.unsaved.say_what_is_found("the end of an epoch" if weights_of_epoch else "a save")
        self.saving.require_published()

    def _gather(self):
        """Bring to rank 0 what a checkpoint holds of the other ranks. All ranks call it, if there was a step since they did."""
        self.losses.all_reduce()
        if self.args.checkpoints and not self.trial:
            self.gradients.collect()

    def _mark(self):
        """Return what differs if something was changed that a checkpoint holds."""
        return parts.fingerprint([parts.states(self), self.gradients.state_dict()])

    def state(self) -> dict:
        of_the_run = {**self.losses.state_dict(), **self.gradients.state_dict(), **parts.of_the_run(self)}
        return {**parts.states(self), "run": {**of_the_run, "history": self.results.history}}

    # --- Ending ---

    def allow_stop(self, evaluates: bool = False) -> None:
        """Let a stop signal end this process at once where that is safe: always with one rank; with several, on the one that
        writes, in an evaluation. Between steps, several ranks first agree to stop (peers.due())."""
        self.evaluates = evaluates
        STOPS.may_end = self.peers.size == 1 or (evaluates and self.side_files.writes)

    def stop_on(self, number: float) -> None:
        number = signal.Signals(int(number))
        self.stop(f"stopped by {number.name}", STOP_SIGNALS[number])

    def stop(self, why: str, code: int) -> None:
        # What the evaluation has changed is not saved: the next start repeats the evaluation, and would change it twice.
        if not self.evaluates or self._fingerprint == self._mark():
            self.save()
        self._close("stopped", why, in_a_hurry=code != 0)
        sys.exit(code)

    def _close(self, how: str, why: Optional[str], in_a_hurry: bool = False) -> None:
        self.tell(Observer.ending, how=how, why=why)
        self.enter("save")
        self.saving.wait()
        self.tell(Observer.ended)
        self.side_files.retry()
        self.enter("publish")
        self.saving.finish_publishing(in_a_hurry or bool(STOPS.noted))
        self.evidence.remove_attempt()
        if self.side_files.writes:
            self.saving.require_ours()
        self.enter("done")
        saved = self.saving.saved_at == self.position
        self.tell(Observer.left, how=how, why=why, saved=saved, last_good=self.saving.last_good())
        files.release()


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


def sizes_of_weights(network: torch.nn.Module) -> list[float]:
    """Return the norm of each trainable weight, to notice an epoch that changes none of them."""
    # Not the sum: the gradients of a last layer add up to zero. In the widest type, so that small updates are noticed.
    trained = [weight.detach() for weight in network.parameters() if weight.requires_grad]
    sizes = [torch.linalg.vector_norm(weight, dtype=devices.widest(weight.device)) for weight in trained]
    return torch.stack(sizes).tolist() if sizes else []


def skipped(parts: dict) -> int:
    """Return the number of steps that were skipped because their gradients overflowed; 0 if the run saves no Scaler."""
    return parts["scaler"].skipped() if isinstance(parts.get("scaler"), Scaler) else 0
