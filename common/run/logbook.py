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
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

import torch

from common import arguments, devices, heartbeat, moments, optional, world
from common.errors import STOP_SIGNALS, TrainingFailed, UserError, count
from common.processes import collectives
from common.run import bucket_run, checkpoint, facts, output, restore, timing
from common.run.agreement import Agreement
from common.run.display import Display
from common.run.journal import Course, Journal
from common.run.losses import Losses
from common.run.plan import Plan
from common.run.position import Position
from common.run.results import Results
from common.run.saver import Saver
from common.run.scaler import Scaler
from common.run.scores import Scores
from common.run.seeds import seed_step


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
        self.args, self.sampler, self._parts, self.classes = args, sampler, parts, list(classes)
        self.position, self.results, self._patience = Position(), Results(best_by, best_is), patience
        self.plan: Any = None  # a Plan, once the run has resumed
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
        self._writes = shows and not self.trial
        self._display = Display(args.output_dir, args.tensorboard_dir, shows, self._writes, args.print_freq)
        self.say = self._display.say
        self._heartbeat = heartbeat.of_this_process()
        self._course, self._journal = Course(), Journal(args.output_dir, self.say, self._display.written)
        self._time_left = timing.TimeLeft(test_samples)
        if self._writes:
            self._journal.listen()
        self._saver = Saver(args, self.say)
        self._agreement = Agreement(args.max_hours, args.save_seconds)
        self._advised, self._goes_on, self._id = None, False, uuid.uuid4().hex
        self._busy, self._evaluating = True, False
        self._together = self._behind = False  # in an evaluation of all ranks; the others have finished it
        self._counted: Any = None  # (epoch, consumed, ids of all ranks) of the last step, where nodes come and go
        self.seconds = (0.0,) * len(timing.PHASES)  # of this start, in each phase of its steps
        self._profile = timing.Profile(prof, lambda: devices.synchronize(self.device)) if prof else None
        self._trace = timing.Trace(args.output_dir, self.device, self.say) if args.profile and self._writes else None

    def register(self, **parts: Any) -> None:
        """Add state to save and restore, e.g. run.register(scaler=scaler); before resume()."""
        self._parts.update(parts)

    def resume(self) -> None:
        """Restore the checkpoint to go on from, if there is one; from here on a signal saves and stops."""
        restore.prepare(self._parts)
        if not any(weight.requires_grad for weight in self.model.parameters()):
            self.say("warning: no weight of the network requires a gradient: nothing is trained")
        self._shares: Any = self._parts.get("shares")  # exact.Shares, with which a step's loss is that of all ranks already
        self._losses = Losses(self.device, 0, 1) if self._shares else Losses(self.device, self.rank, self.world_size)
        self._attempt = output.Attempt(self.args.checkpoint_dir, self.say, active=False)
        self._ledger = self._new_ledger(active=False)
        found = None if self.trial else self._find()
        if found:
            self._restore(*found)
        if self._writes and self.args.checkpoints:
            parts = [part.state_dict() for part in self._parts.values()]
            # An optimizer will have as much as the weights, which lie beside the checkpoint as well.
            output.require_room(self.args, 3 * checkpoint.size_of(self.model.state_dict()) + checkpoint.size_of(parts))
        self._agreement.begin()
        self._last_step = time.monotonic()
        if self._members:
            if not self._shares:
                raise UserError(
                    "--min_nodes needs a step that can be taken again by other ranks: use jobs/train_ddp_exact.py or "
                    "jobs/train_imagenet.py"
                )
            self._shares.before_it_counts = self._exchange
            self._form()
        self._goes_on = bool(found) or self.position.total_steps > 0
        self._display.begin()
        self._epoch_began, self._row_of = time.monotonic(), self.position.epoch + 1
        self._saved_at = self.position if found else None
        self.sampler.start_at(self.position.epoch, self.position.consumed)
        self.plan = Plan(self.args, self.sampler, self.position, self._patience)
        if self.plan.limit(self.position) or self.plan.epoch_is_over(self.position):
            self._import_packages()
        self._ledger = self._new_ledger(active=self._writes or not self._members)
        self._ledger.start(self.position.epoch, self.position.consumed)
        if self._writes and not self._attempt.active:
            self._attempt = output.Attempt(self.args.checkpoint_dir, self.say, active=True)
        if not self.trial:
            for line in restore.first_lines(self, found, self._attempt):
                self.say(line)
            if self._writes:
                self._begin_journal(found[2] if found else None)
            self._display.metrics(self.results.history)
            self._tell_state()
            for number in STOP_SIGNALS:
                signal.signal(number, self._on_signal)
        self._busy = False

    def _new_ledger(self, active):
        keeps = active and self.args.ledger and not self.trial
        return output.Ledger(self.args.output_dir, self.rank, keeps, self._saver.last_good)

    def _begin_journal(self, goes_on_from):
        self._journal.begin()
        self._journal.event("start", run=self._id, goes_on_from=goes_on_from, **facts.of_this_start(self))

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
        return self._goes_on or self.trial

    def _require_resumed(self, asked):
        if self.plan is None:
            raise RuntimeError(f"{asked} was used before run.resume(): call that first, after the last run.register()")

    @property
    def epoch(self) -> int:
        """How many are done."""
        return self.position.epoch

    @property
    def total_steps(self) -> int:
        """How many the run has taken, of all its starts."""
        return self.position.total_steps

    # --- The loop ---

    def epochs(self) -> Iterator[int]:
        self._require_resumed("run.epochs()")
        if limit := self.plan.limit(self.position):
            place = f"{self.epoch} epochs, {self.total_steps} steps"
            self.say(f"nothing to do: the run has done {place}; it goes on with more than {limit}")
        while not self.plan.limit(self.position):
            began, self._epoch_began = self.position, time.monotonic()
            self.sampler.start_at(began.epoch, began.consumed)
            left, done = len(self.sampler), began.consumed // self.sampler.global_batch
            self._display.start_epoch(began.epoch, self.args.epochs, done + left, done)
            sizes = sizes_of_weights(self.model) if self._display.active else []
            yield began.epoch
            if left and self.position.total_steps == began.total_steps:
                raise RuntimeError("an epoch without a step: the loop over run.epochs() has to go through run.steps(loader)")
            if self._evaluating:
                raise RuntimeError("the loop over run.epochs() has to call run.end_epoch() once, after run.steps()")
            if sizes and sizes == sizes_of_weights(self.model):
                self.say(
                    "warning: no weight of the network has changed in this epoch: does optimizer.step() run, and --lr suit it?"
                )
        self._finish()

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
            asked = time.monotonic()
            self._show("data")
            batch = next(batches)
            self._given, moved = time.monotonic(), loader.transfer_seconds()
            self._waited = (self._given - asked - (0 if loader.beside else moved), moved)
            self._busy, due = True, self.position.total_steps + 1
            self._show("step")
            self._course.transferred(moved, loader.beside)
            self._attempt.set(self.position.epoch, self.position.consumed)
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
        self._losses.share()
        self._evaluating = True
        self._show("evaluate")
        if self._agreement.signal:
            self._on_signal(self._agreement.signal, None)

    def step(self, loss: torch.Tensor) -> None:
        """Count a step that has been taken; report, save or stop if it is due."""
        loss, ids = loss.detach(), self._loader.ids
        self._ledger.step(self.position.epoch, self.position.consumed, self._counted[2] if self._members else ids)
        self.position = self.position.after_step(self.sampler.global_batch)
        self._losses.add(loss, self.position.total_steps, ids)
        self._time_left.mark(self.position.samples_seen - self.plan.began.samples_seen, self._course.read()["training"])
        if self._members:
            self._tell_news()
        self._attempt.set(-1, -1)
        seconds = (*self._waited, time.monotonic() - self._given)
        self.seconds = tuple(map(sum, zip(self.seconds, seconds)))
        if self._display.step(self.sampler.global_batch, seconds) and not self.args.trial:
            self._line(loss)
        speed = self._profile.step(self.sampler.global_batch, seconds) if self._profile else None
        if speed:
            self.say(speed)
            self._display.close()
            self._show("done")
            sys.exit(0)
        if self._trace:
            self._trace.step(self._waited[0])
        if not self.trial:
            self._keep_up()

    def _keep_up(self):
        """Save or stop, if it is due."""
        if not self._members:
            self._agreement.exchange((lambda own: collectives.reduce(own, "MAX")) if self.world_size > 1 else None)
        stop_signal, hours_over, save = self._agreement.due()
        by_steps = self.args.save_steps and self.position.total_steps % self.args.save_steps == 0
        if (save or by_steps) and not self.plan.epoch_is_over(self.position):  # else end_epoch saves, after the evaluation
            self.save()
        self._busy = False
        if stop_signal:
            self._stop_on(stop_signal)
        if hours_over:
            self._stop(f"--max_hours {self.args.max_hours} is over", 0)

    def end_epoch(self, scores: Optional[Scores] = None, /, **metrics: float) -> None:
        """Write the epoch's metrics and its checkpoint; after an epoch cut short by --max_steps, only the checkpoint.

        `scores`: those of the evaluation, for the report.
        """
        if not self._evaluating and not self.position.consumed:
            raise RuntimeError("run.end_epoch() was called without a step since the last call: once, after run.steps()")
        self._busy, self._evaluating = True, False
        self._display.end_epoch()
        self._losses.check(self.args.lr, self._saver.last_good)
        number, whole = self.position.epoch + 1, self.plan.epoch_is_over(self.position)
        what = f" (within epoch {number}, after {self._step_of_the_epoch(' of its ')} steps)"
        if whole:
            self.position = self.results.close_epoch(self.position, self._losses.close_epoch(), metrics)
            self._display.metrics(self.results.history)
            self._time_left.epoch()
            what = self.results.news(self.position)
        shown = "".join(f" {name}={value:.4f}" for name, value in metrics.items())
        seconds, epoch, steps = time.monotonic() - self._epoch_began, self.position.epoch, self.position.total_steps
        self.say(f"epoch={epoch}/{self.args.epochs} steps={steps}{self._skipped()}{shown} seconds={seconds:.1f}{what}")
        self._display.scalars(steps, {f"test/{name}": value for name, value in metrics.items()})
        if scores is not None:
            self._display.scores = scores
            if whole and (line := scores.nothing_learnt(epoch, self.args)):
                self.say(line)
            if self.plan.limit(self.position):  # before the checkpoint, after which a start does not evaluate again
                self._display.report()
        self.save(weights_of_epoch=epoch if whole else None)
        if self._display.curves_are_due():
            self._display.curves(self.results.history)
        self._speed_row(None, None, number)
        self._report(if_due=True)
        self._busy = False
        if self._agreement.signal and self.world_size == 1:
            self._stop_on(self._agreement.signal)

    def picture(self, name: str, pixels: torch.Tensor, **what: Any) -> None:
        """Write uint8 (3, H, W) to examples/NAME.png and to TensorBoard. `what`: its rows and the names of its columns."""
        self._display.picture(name, pixels, self.position.total_steps)
        self._journal.event("picture", name=name, **what)

    def _speed_row(self, loss, lr, epoch):
        self._row_of = epoch
        trained, memory = self.position.samples_seen - self.plan.began.samples_seen, devices.peak_memory(self.device)
        self._journal.speed(self._course.read(), memory, trained, loss, lr, **self.position.row(epoch))

    def _line(self, loss):
        self._losses.check(self.args.lr, self._saver.last_good)
        place = f"epoch={self.position.epoch + 1}/{self.args.epochs} step={self._step_of_the_epoch()}{self._skipped()}"
        lr = self._lr()
        left, evaluations = self.plan.samples_left(self.position), self.plan.evaluations_left(self.position)
        speeds = self._display.line(place, loss.item(), lr, self._time_left.seconds(left, evaluations, self._course.read()))
        steps = self.position.total_steps - self.plan.began.total_steps
        if steps == 1:
            self._import_packages()
        shown = {"train/loss": loss.item(), "train/lr": lr, **{f"speed/{name}": value for name, value in speeds.items()}}
        self._display.scalars(self.position.total_steps, shown)
        self._speed_row(loss.item(), lr, self.position.epoch + 1)
        self._report(if_due=True)
        if not self._advised and steps > timing.WARM_UP:
            self._advised = timing.advice(self.args.input.remedies, speeds["waiting_for_data"])
            if self._advised:
                self.say(self._advised)

    def _import_packages(self):
        """What the files need: after the first step, so that this does not wait, or where none comes before the first file."""
        if self._writes or (self._members and not self.trial):  # then this rank may have to write later, without delay
            began = time.monotonic()
            self._show("start")  # no phase of the training
            if left_out := optional.left_out():
                self.say(left_out)
            self._display.leave_out(began)

    def _step_of_the_epoch(self, of="/"):
        step, steps = (place // self.global_batch for place in (self.position.consumed, self.sampler.samples_per_epoch))
        return f"{step}{of}{steps}"

    def _lr(self):
        return self._parts["optimizer"].param_groups[0]["lr"] if "optimizer" in self._parts else 0.0

    def _skipped(self):
        """Of the steps, those whose gradients overflowed."""
        scaler = self._parts.get("scaler")
        number = scaler.skipped() if isinstance(scaler, Scaler) else 0
        return f" skipped_steps={number}" if number else ""

    # --- Saving and restoring ---

    def save(self, weights_of_epoch: Optional[int] = None) -> None:
        """Copy the state, then write it in the background. Every rank calls this at the same step; rank 0 writes."""
        self._losses.check(self.args.lr, self._saver.last_good)
        self._losses.share()
        self._agreement.saved()
        if not self._writes or not self.args.checkpoints:
            return  # a trial writes nothing, and rank 0 writes for all
        if self.position == self._saved_at and not weights_of_epoch:
            return
        self._saved_at = self.position
        self._show("save")
        self._saver.wait()
        manifest = {**self._about(), "job": self.args.world.job_id, "classes": self.classes, "versions": facts.versions()}
        self._saver.save(checkpoint.snapshot(self.state()), manifest, weights_of_epoch)

    def _about(self):
        return {
            **vars(self.position),
            "global_batch": self.sampler.global_batch,
            "world_size": self.world_size,
            "run": self._id,
            "lr": self._lr(),
            "identity": self._identity,
            "asked": arguments.plain(self.args.given),
            "arguments": arguments.plain(vars(self.args)),
        }

    def state(self) -> dict:
        """What a checkpoint holds."""
        state = {name: part.state_dict() for name, part in self._parts.items()}
        state["model"] = checkpoint.plain_keys(self.model.state_dict())
        state["run"] = {**self._losses.state_dict(), "history": self.results.history}
        return state

    def _find(self):
        """The checkpoint to go on from. The nodes have separate disks, so rank 0 looks for it and sends it to all."""
        self._identity = restore.identity(self.args, self.sampler, self.model, self._parts)
        if self._members:
            return self._choose() if self._writes else None  # the others get its state
        if self.world_size > 1:
            collectives.compare(self._identity)
        return restore.from_rank_0(self._choose)

    def _choose(self):
        output.make_folders(self.args)
        output.lock(self.args.checkpoint_dir)  # until this process ends
        checkpoint.sweep(self.args.checkpoint_dir)
        found = restore.choose(self.args, self._identity, self.say)
        self._saver.start_publishing(found[1] if found else None)
        return found

    def _restore(self, state, about, path):
        self.model.load_state_dict(state["model"])
        restore.load(self._parts, state, path, self.say)
        self.position = Position.of(about)
        self._id = about.get("run", self._id)
        self._losses.load_state_dict(state["run"])
        self.results.history = state["run"]["history"]
        sizes = [(given.get("batch_size"), given.get("total_batch")) for given in (about["arguments"], vars(self.args))]
        if sizes[0] == sizes[1]:
            self.sampler.set_global_batch(about["global_batch"])

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
            if number := self._members.told_to_stop():
                self._stop_on(number)
            self._stop(str(stop), TrainingFailed.exit_code)
        self.rank, self.world_size = self._members.rank, self._members.size
        self._shares.deal_again()
        self._agreement.begin()
        self._let_one_write()

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
        return {"state": checkpoint.snapshot(self.state()), "about": self._about(), "counted": self._counted}

    def _take(self, given):
        about = given["about"]
        if self._together and about["total_steps"] == self.position.total_steps:
            self._behind = True  # by this evaluation alone: this rank does all of it, and then closes the epoch, too
            return
        restore.refuse_another_run(about["identity"], self._identity, "what the other nodes train")
        self._restore(given["state"], about, "the state of the other nodes")
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
        if not self._writes:
            self._writes = True
            self._display.take_over()
            if left_out := optional.left_out():
                self.say(left_out)
            self._journal.listen()
            output.make_folders(self.args)
            try:
                output.lock(self.args.checkpoint_dir)  # until this process ends
            except UserError as error:  # by the one that had to do it, on a machine that is frozen
                self.say(f"warning: {error}")
            self._bring_what_grows()
            self._saver.start_publishing()
            self._attempt = output.Attempt(self.args.checkpoint_dir, self.say, active=True)
            self._display.metrics(self.results.history)
            self._ledger = self._new_ledger(active=True)
            if self.plan:
                self._begin_journal("the state of the other nodes")
        if self._counted:  # its line may lack, if the one that was to write it has gone; now it counts once
            epoch, consumed, ids = self._counted
            self._ledger.start(epoch, consumed)
            self._ledger.step(epoch, consumed, ids)

    def _bring_what_grows(self):
        """From the bucket, where the one that has gone has published its lines."""
        if self.args.output_url:
            try:
                bucket_run.bring_what_grows(self.args, self.say)
            except (UserError, TrainingFailed) as error:
                self.say(f"warning: {error}")

    def _tell_news(self):
        now, here, size, news = time.monotonic(), self.position, self._members.size, self._members.news
        if news:
            pause = now - self._last_step
            self.say(f"{news}: {count(size, 'rank')} went on with step {here.total_steps} after {pause:.1f} s")
            self._journal.event("nodes", text=news, ranks=size, pause=round(pause, 1), samples=here.samples_seen)
        self._members.step_counts()
        self._last_step = now

    # --- Ending ---

    def _show(self, phase):
        first = phase in heartbeat.TRAINING and self.position.total_steps == self.plan.began.total_steps
        self._heartbeat.set("compile" if first else phase, self.position.total_steps)
        self._course.enter(phase)

    def _finish(self):
        limit, cut_short = self.plan.limit(self.position), self.plan.cut_short(self.position)
        self._close("limit" if cut_short else "finished", limit)
        more = ""
        if cut_short:
            more = f"{limit} is reached, {self.position.epoch} of {self.args.epochs} epochs are done: "
            again = "with more of them, or without it, " if self.plan.steps_used_up(self.position) else ""
            more += f"the same command {again}goes on. "
        self.say(f"done: {self.results.summary(self.position)}{more}{self._saver.last_good()}")
        self._tell_what_is_there(goes_on=cut_short)

    def _on_signal(self, number, _frame):
        if self._members and not self._members.told_to_stop():  # of this node alone, whose parent decides what that means
            return
        self._agreement.signal = number
        # Several ranks must agree on a step; in an evaluation, which all ranks have reached, rank 0 can save for all of them.
        if not self._busy and (self.world_size == 1 or (self._evaluating and self._writes)):
            self._stop_on(number)

    def _stop_on(self, number):
        number = signal.Signals(int(number))
        self._stop(f"stopped by {number.name}", STOP_SIGNALS[number])

    def _stop(self, why, code):
        self._busy = True
        self.save()
        self._close("stopped", why, in_a_hurry=code != 0)
        saved = f"saved after step {self.position.total_steps}: start again to go on"
        self.say(f"{why}; {saved if self.args.checkpoints else 'nothing was saved'}. {self._saver.last_good()}")
        self._tell_what_is_there(goes_on=True)
        sys.exit(code)

    def _close(self, how, why, in_a_hurry=False):
        self._busy = True
        self._journal.event("end", how=how, why=why, **self.position.row(self.position.epoch))
        if self._trace:
            self._trace.close()
        self._show("save")
        self._saver.wait()
        self._display.curves(self.results.history)
        self._speed_row(None, None, self._row_of)
        self._tell_state()
        self._report()
        self._display.close()
        self._show("publish")
        self._saver.finish_publishing(in_a_hurry)
        self._attempt.done()
        self._show("done")

    def _tell_state(self):
        self._display.state(finished=self.plan.finished(self.position), epoch=self.position.epoch, epochs=self.args.epochs)

    def _report(self, if_due=False):
        """report.html, from the files that are there."""
        if not if_due or self._display.report_is_due():
            self._show("save")
            self._display.written()

    def _tell_what_is_there(self, goes_on):
        self.say(f"files: {output.what_is_there(self.args)}")
        without = ["max_steps"] if self.plan.steps_used_up(self.position) else []
        longer = "with more --epochs the same command trains longer"
        self.say(f"next: {facts.command(self.args, sys.argv, without) if goes_on else longer}")


def sizes_of_weights(network: torch.nn.Module) -> list[float]:
    """Of those that are trained: they tell whether an epoch has changed anything."""
    # Not sums: the gradients of a last layer add up to zero. In the widest type, in which small steps are seen.
    trained = [weight.detach() for weight in network.parameters() if weight.requires_grad]
    sizes = [torch.linalg.vector_norm(weight, dtype=devices.widest(weight.device)) for weight in trained]
    return torch.stack(sizes).tolist() if sizes else []
