"""The job's logbook: goes on where the last start stopped, shows progress, saves when due, and stops when told to.

    run = Run(args, train_sampler, model, optimizer=optimizer)      # and anything else that has a state_dict
    run.resume()                                                    # restores what was named, from the newest checkpoint
    for epoch in run.epochs():
        for images, labels in run.steps(train_loader):
            ...                                                     # the training step, in full
            run.step(loss)
        run.end_epoch(accuracy=...)

Samples count as consumed after the step that used them. The random numbers of a step are a function of (seed, samples seen,
rank), so there is no generator to save. In a trial (--prof, --doctor) steps are taken and nothing is read or written.

Where nodes come and go (--min_nodes) all that the ranks exchange in a step or an evaluation, they exchange before it counts. If
one goes or comes meanwhile, those that are there form the next group (processes/members.py) and do it anew. A rank that had
already all it needed is ahead of the others by that step or evaluation: they take its state, which theirs would have become.
"""

import argparse
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

import torch

from common import devices, moments, world
from common.errors import STOP_SIGNALS, TrainingFailed, UserError
from common.processes import collectives
from common.run import checkpoint, facts, output, restore, timing
from common.run.agreement import Agreement
from common.run.clock import Clock
from common.run.evidence import Evidence
from common.run.losses import Losses
from common.run.observers import Facts, Observers
from common.run.plan import Plan
from common.run.position import Position
from common.run.results import Results
from common.run.saving import Saving
from common.run.scaler import Scaler
from common.run.scores import Scores
from common.run.seeds import seed_step
from common.run.spare import Spare
from common.stops import STOPS

UNCHANGED = "warning: no weight of the network has changed in this epoch: does optimizer.step() run, and --lr suit it?"
NO_SHARES = (
    "--min_nodes needs a step that can be taken again by other ranks: use jobs/train_ddp_exact.py or jobs/train_imagenet.py"
)


class Run:
    def __init__(
        self,
        args: argparse.Namespace,
        sampler: Any,
        model: torch.nn.Module,
        *,
        classes: Sequence[str] = (),
        test_samples: int = 0,
        best_by: str = "accuracy",
        best_is: Optional[str] = None,
        patience: Optional[int] = None,
        prof: Optional[int] = None,
        **parts: Any,
    ):
        """`classes`: their names, for who reads the checkpoints. `test_samples`: in an evaluation, to guess how long one takes.
        `best_by`: the metric of end_epoch by which the best checkpoint is kept; `best_is`: "highest" (unset) or "lowest".
        `patience`: the run ends after this many epochs without a better one. `prof`: measure this many steps, then end.
        `parts`: what else to save."""
        self.args, self.sampler, self.parts = args, sampler, parts
        self.position, self.results, self.plan = Position(), Results(best_by, best_is), Plan(args, sampler, patience)
        self.uses_all_gpus = isinstance(model, torch.nn.DataParallel)
        self.model = checkpoint.unwrapped(model)
        self.device = next(self.model.parameters()).device
        group = collectives.present()
        self.rank, self.world_size = group.rank, group.size
        self._members = collectives.GROUP.members  # where nodes come and go
        shows = self.rank == 0 and not (self._members and self._members.comes_later)
        if not collectives.grouped():
            world.require_one_device(args)
        self.trial = bool(args.trial or prof)
        self._spare = Spare(args.output_dir, shows, writes=shows and not self.trial)
        self.say = self._spare.say
        self._clock = Clock(args.print_freq, test_samples)
        may_write = self._spare.writes or (bool(self._members) and not self.trial)
        self._observers = Observers(args, self.device, self._spare, may_write)
        self.saving = Saving(args, classes, self.say)
        self._evidence = Evidence(args, self.say, self.saving.last_good)
        self._agreement = Agreement(args.max_hours, args.save_seconds)
        self._evaluates = False  # from the end of steps() to end_epoch()
        self._together = self._behind = False  # in an evaluation of all ranks; the others have finished it
        self._counted: Any = None  # (epoch, consumed, ids of all ranks) of the last step, where nodes come and go
        self._profile = timing.Profile(prof, self._clock, lambda: devices.synchronize(self.device)) if prof else None

    def register(self, **parts: Any) -> None:
        """Add state to save and restore, e.g. run.register(scaler=scaler); before resume()."""
        self.parts.update(parts)

    def resume(self) -> None:
        """Restore the checkpoint to go on from, if there is one; from here on a signal saves and stops."""
        restore.prepare(self.parts)
        self._shares: Any = self.parts.get("shares")  # exact.Shares, with which a step's loss is that of all ranks already
        self.losses = Losses(self.device, 0, 1) if self._shares else Losses(self.device, self.rank, self.world_size)
        self.saving.identity = restore.identity(self.args, self.sampler, self.model, self.parts)
        found = None if self.trial else self.saving.find(self._spare.writes)
        if found:
            restore.into(self, *found)
        if self._spare.writes and self.args.checkpoints:
            output.require_room(self.args, checkpoint.largest(self.state()))
        self._agreement.begin()
        if self._members:
            if not self._shares:
                raise UserError(NO_SHARES)
            self._shares.before_it_counts = self._exchange
            self._form()
        self.sampler.start_at(self.position.epoch, self.position.consumed)
        self.plan = dataclasses.replace(self.plan, began=self.position)
        writes = self._spare.writes
        self._evidence.keep(self.rank, attempt=writes, ledger=writes or not (self._members or self.trial))
        self._evidence.begin(self.position.epoch, self.position.consumed)
        self._show("start")
        self._tell("resumed")
        if not self.trial:
            for line in restore.first_lines(self, found, self._evidence.attempt):
                self.say(line)
            about = facts.of_this_start(self, found[2] if found else None) if writes else {}
            self._tell("began", about=about)
            self._enter(evaluation=False)
            STOPS.listen(self._stop_on, counts=self._members.told_to_stop if self._members else None)

    # --- Who looks on ---

    def picture(self, name: str, pixels: torch.Tensor, **what: Any) -> None:
        """Write uint8 (3, H, W) to examples/NAME.png and to TensorBoard. `what`: its rows and the names of its columns."""
        self._tell("picture", name=name, pixels=pixels, what=what)

    def _tell(self, moment, **more):
        self._observers.tell(moment, Facts(self.position, self.plan, self.results, self._clock.read()), **more)

    def _show(self, phase):
        self._clock.enter(phase, self.position.total_steps)

    # --- Where the run stands ---

    @property
    def global_batch(self) -> int:
        """Samples that all ranks together take in one step; a resumed run keeps the one it began with."""
        self._require_resumed("run.global_batch")
        return self.sampler.global_batch

    @property
    def progress(self) -> float:
        """Share of the run's samples seen, at the middle of the coming step: what a schedule should depend on."""
        self._require_resumed("run.progress")
        return self.plan.progress(self.position)

    @property
    def goes_on(self) -> bool:
        """Whether there was a checkpoint to go on from; also true in a trial, which leaves out what only a new run does."""
        self._require_resumed("run.goes_on")
        return self.saving.goes_on or self.plan.began.total_steps > 0 or self.trial

    def _require_resumed(self, asked):
        if self.plan.began is None:
            raise RuntimeError(f"{asked} was used before run.resume(): call that first, after the last run.register()")

    @property
    def epoch(self) -> int:
        """How many are done."""
        return self.position.epoch

    @property
    def total_steps(self) -> int:
        """How many the run has taken, of all its starts."""
        return self.position.total_steps

    @property
    def seconds(self) -> dict[str, float]:
        """Of this start, in each phase."""
        return self._clock.read()

    # --- The loop ---

    def epochs(self) -> Iterator[int]:
        self._require_resumed("run.epochs()")
        if limit := self.plan.limit(self.position):
            place = f"{self.epoch} epochs, {self.total_steps} steps"
            self.say(f"nothing to do: the run has done {place}; it goes on with more than {limit}")
        while not self.plan.limit(self.position):
            began = self.position
            self.sampler.start_at(began.epoch, began.consumed)
            left = len(self.sampler)
            self._clock.begin_lap()
            self._tell("epoch_began")
            sizes = sizes_of_weights(self.model) if left and self._spare.shows else []
            yield began.epoch
            if left and self.position.total_steps == began.total_steps:
                raise RuntimeError("an epoch without a step: the loop over run.epochs() has to go through run.steps(loader)")
            if self._evaluates:
                raise RuntimeError("the loop over run.epochs() has to call run.end_epoch() once, after run.steps()")
            if sizes and sizes == sizes_of_weights(self.model):
                self.say(UNCHANGED)
        self._close("limit" if self.plan.cut_short(self.position) else "finished", self.plan.limit(self.position))

    def steps(self, loader: Any) -> Iterator:
        if not hasattr(loader, "transfer_seconds"):
            raise TypeError(
                f"run.steps() was given a {type(loader).__name__}, which does not know the ids of its samples: "
                "give it a datasets.loader.DeviceLoader, as docs/your_own.md shows"
            )
        self._loader = loader
        others = moments.announce("batches", self, loader)
        batches = others or iter(loader)
        while others or not (self.plan.epoch_is_over(self.position) or self.plan.steps_used_up(self.position)):
            self._show("data")
            batch = next(batches)
            STOPS.alone, due = False, self.position.total_steps + 1
            self._show("step")
            self._clock.transferred(loader.transfer_seconds(), loader.beside)
            self._evidence.trying(self.position.epoch, self.position.consumed)
            if self._shares:
                yield from self._shares.of(batch, self.position.samples_seen)
                if self._shares.interrupted:
                    batches.close()
                    self._form()
                    self.sampler.start_at(self.position.epoch, self.position.consumed)
                    batches = iter(loader)
                    continue
            else:
                seed_step(self.args.seed, self.position.samples_seen, self.rank)
                yield batch
            if self.position.total_steps != due:
                raise RuntimeError("the loop over run.steps() has to call run.step(loss) once for every batch")
        self.losses.share()  # with the others, for the last time before the evaluation, in which one may have to save
        self._enter(evaluation=True)
        self._show("evaluate")

    # The order in step() is a contract: where a part fails, the run ends before what is below it (tests/test_step.py).
    #   1. the ledger of this rank has the samples of the step
    #   2. the step counts: the position moves, the loss is added
    #   3. who looks on is told; what fails there is left out, and the run goes on
    #   4. the ranks agree on what is due
    #   5. the state is saved, in the background, if all losses are numbers: what fails there, the next save says
    #   6. a stop is obeyed, when what was done is saved
    def step(self, loss: torch.Tensor) -> None:
        """Count a step that has been taken; report, save or stop if it is due."""
        loss, ids = loss.detach(), self._loader.ids
        self._evidence.taken(self.position.epoch, self.position.consumed, self._counted[2] if self._members else ids)
        self.position = self.position.after_step(self.sampler.global_batch)
        self.losses.add(loss, self.position.total_steps, ids)
        if self._members:
            self._tell_news()
        line_is_due = self._clock.stepped(self.sampler.global_batch, self.position.samples_seen - self.plan.began.samples_seen)
        speed = self._profile.step(self.sampler.global_batch) if self._profile else None
        if line_is_due and not self.args.trial:
            self._show_line(loss)
        if speed:
            self.say(speed)
            self._tell("ended")
            self._show("done")
            sys.exit(0)
        self._tell("stepped")
        if not self.trial:
            self._keep_up()

    def _show_line(self, loss):
        self.losses.check(self.args.lr, self.saving.last_good)
        left = self._clock.seconds_left(self.plan.samples_left(self.position), self.plan.evaluations_left(self.position))
        speed = self._clock.lap()
        if self._spare.shows or self._members:  # who has much to do
            self._show("start" if self.position.total_steps == self.plan.began.total_steps + 1 else "save")
        lr, overflowed = facts.rate(self.parts), skipped(self.parts)
        self._tell("line", loss=loss.item(), lr=lr, speed=speed, seconds_left=left, skipped=overflowed)
        self._show("step")

    def _keep_up(self):
        """Save or stop, if it is due."""
        if not self._members:
            self._agreement.exchange((lambda own: collectives.reduce(own, "MAX")) if self.world_size > 1 else None)
        stop_signal, hours_over, save = self._agreement.due()
        by_steps = self.args.save_steps and self.position.total_steps % self.args.save_steps == 0
        if (save or by_steps) and not self.plan.epoch_is_over(self.position):  # else end_epoch saves, after the evaluation
            self.save()
        self._enter(evaluation=False)
        if stop_signal:
            self._stop_on(stop_signal)
        if hours_over:
            self._stop(f"--max_hours {self.args.max_hours} is over", 0)

    def end_epoch(self, scores: Optional[Scores] = None, /, **metrics: float) -> None:
        """Write the epoch's metrics and its checkpoint; after an epoch cut short by --max_steps, only the checkpoint.

        `scores`: those of the evaluation, for the report.
        """
        if not self._evaluates and not self.position.consumed:
            raise RuntimeError("run.end_epoch() was called without a step since the last call: once, after run.steps()")
        self._enter(evaluation=False)
        self.losses.check(self.args.lr, self.saving.last_good)
        whole = self.plan.epoch_is_over(self.position)
        if whole:
            self.position = self.results.close_epoch(self.position, self.losses.close_epoch(), metrics)
            self._clock.evaluated()
        self._tell("epoch_ended", whole=whole, metrics=metrics, scores=scores, skipped=skipped(self.parts))
        self.save(weights_of_epoch=self.position.epoch if whole else None)
        if self._spare.shows:
            self._show("save")
        self._tell("saved", whole=whole)

    # --- Saving and restoring ---

    def save(self, weights_of_epoch: Optional[int] = None) -> None:
        """Copy the state, then write it in the background. Every rank calls this at the same step; rank 0 writes."""
        self.losses.check(self.args.lr, self.saving.last_good)
        self.losses.share()
        self._agreement.saved()
        if not self._spare.writes or not self.args.checkpoints:
            return  # a trial writes nothing, and rank 0 writes for all
        if self.position == self.saving.saved_at and not weights_of_epoch:
            return
        self._show("save")
        self.saving.save(self.state, facts.manifest(self), weights_of_epoch)

    def state(self) -> dict:
        """What a checkpoint holds."""
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state["model"] = checkpoint.plain_keys(self.model.state_dict())
        state["run"] = {**self.losses.state_dict(), "history": self.results.history}
        return state

    # --- Where nodes come and go ---

    def _form(self):
        """Become a member of the next group, or save and end where there will be none."""
        self._show("join")
        here = self.position
        place = 2 * here.total_steps + (here.total_steps > 0 and here.consumed == 0)  # an evaluation closes an epoch
        try:
            self._members.form(place, self._to_hand_over, self._take)
        except collectives.Stopped as stop:
            self._counted = None  # the others may go on, and have its line in the ledger
            self._let_one_write()
            self.plan = self.plan if self.plan.began else dataclasses.replace(self.plan, began=here)
            if number := self._members.told_to_stop():
                self._stop_on(number)
            self._stop(str(stop), TrainingFailed.exit_code)
        self.rank, self.world_size = self._members.rank, self._members.size
        self._shares.deal_again()
        self._agreement.begin()
        self._let_one_write()
        self._enter(self._evaluates)

    def together(self, work: Callable, *arguments: Any) -> Any:
        """The result of `work(*arguments)`, of which each rank does a part: again, when the ranks have changed meanwhile."""
        if not self._members:
            return work(*arguments)
        self._together, self._behind = True, False
        while True:
            try:
                with self._members.alone() if self._behind else contextlib.nullcontext():
                    self._shares.deal_tests()
                    result = work(*arguments)
                self._shares.deal_tests()
                self._together = False
                return result
            except collectives.Changed:
                self._form()

    def _to_hand_over(self):
        """All that a rank needs to go on from here."""
        return {"state": checkpoint.snapshot(self.state()), "about": facts.manifest(self), "counted": self._counted}

    def _take(self, given):
        about = given["about"]
        if self._together and about["total_steps"] == self.position.total_steps:
            self._behind = True  # by this evaluation alone: this rank does all of it, and then closes the epoch, too
            return
        restore.refuse_another_run(about["identity"], self.saving.identity, "what the other nodes train")
        restore.into(self, given["state"], about, "the state of the other nodes")
        self._counted = given["counted"]

    def _exchange(self):
        """What the ranks tell each other in a step: what is due, and, for the ledger, which samples they have taken."""
        gather = self._members.gather
        self._agreement.exchange(lambda own: torch.stack(gather(torch.tensor(own, dtype=torch.float64))).amax(dim=0).tolist())
        ids = self._loader.ids
        if self.args.ledger:
            padded = torch.full((self.sampler.global_batch,), -1)
            padded[: len(ids)] = ids
            ids = torch.cat(gather(padded))
        self._counted = [self.position.epoch, self.position.consumed, ids[ids >= 0]]

    def _let_one_write(self):
        """Who is to write the files from here on, and did not, begins with it."""
        if not self._members.writes or self.trial:
            return
        if not self._spare.writes:
            self._spare.writes = self._spare.shows = True
            self._tell("takes_over")
            self.saving.take_over()
            self._evidence.keep(self.rank, attempt=True, ledger=True)
            if self.plan.began:
                self._tell("began", about=facts.of_this_start(self, "the state of the other nodes"))
        if self._counted:  # its line may lack, if the one that was to write it has gone; now it counts once
            epoch, consumed, ids = self._counted
            self._evidence.begin(epoch, consumed)
            self._evidence.taken(epoch, consumed, ids)

    def _tell_news(self):
        if news := self._members.news:
            self._tell("nodes", news=news, ranks=self._members.size, pause=self._clock.since_step())
        self._members.step_counts()

    # --- Ending ---

    def _enter(self, evaluation):
        """Between two steps several ranks stop only if they agree on it; in an evaluation rank 0 can save for all of them."""
        self._evaluates = evaluation
        STOPS.alone = self.world_size == 1 or (evaluation and self._spare.writes)

    def _stop_on(self, number):
        number = signal.Signals(int(number))
        self._stop(f"stopped by {number.name}", STOP_SIGNALS[number])

    def _stop(self, why, code):
        self.save()
        self._close("stopped", why, in_a_hurry=code != 0)
        sys.exit(code)

    def _close(self, how, why, in_a_hurry=False):
        self._tell("ending", how=how, why=why)
        self._show("save")
        self.saving.wait()
        self._tell("ended")
        self._spare.retry()
        self._show("publish")
        self.saving.finish_publishing(in_a_hurry or bool(STOPS.noted))
        self._evidence.done()
        self._show("done")
        self._tell("left", how=how, why=why, last_good=self.saving.last_good())


def sizes_of_weights(network: torch.nn.Module) -> list[float]:
    """Of those that are trained: they tell whether an epoch has changed anything."""
    # Not sums: the gradients of a last layer add up to zero. In the widest type, in which small steps are seen.
    trained = [weight.detach() for weight in network.parameters() if weight.requires_grad]
    sizes = [torch.linalg.vector_norm(weight, dtype=devices.widest(weight.device)) for weight in trained]
    return torch.stack(sizes).tolist() if sizes else []


def skipped(parts: dict) -> int:
    """Steps whose gradients overflowed."""
    return parts["scaler"].skipped() if isinstance(parts.get("scaler"), Scaler) else 0
