"""Show a run in its log: as a bar in a terminal, else as lines of key=value behind a time of day,
for regular expressions."""

import argparse
import datetime
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Optional

import torch

from common import devices, packages
from common.checkpoints import names, run_folder
from common.errors import UserError, count
from common.run.about import export_command, restart_command
from common.run.clock import TRAINING_PHASES, WARM_UP
from common.run.observers import bar
from common.run.observers.observer import Facts, Observer
from common.run.scores import Scores
from common.run.side_files import SideFiles

BAR_UPDATE_SECONDS = 1  # between two updates of the loss and the speed behind the bar
# {seconds that a start has trained: seconds between two lines, up to then}, unless --log_seconds says
# otherwise
LINE_SECONDS = {300: 5, 3600: 30, math.inf: 60}
# fraction of the time spent waiting for data, from which the log calls the loader the bottleneck
STARVED = 0.25


class Console(Observer):
    def __init__(self, args: argparse.Namespace, device: torch.device, side_files: SideFiles):
        self._args = args
        self._side_files = side_files
        self._say = side_files.say
        self._bar: Optional[bar.Bar] = None
        self._loss = devices.AsyncScalar(device)
        self._bar_updated_at = time.monotonic()
        self._steps_at_bar_update = 0
        self._expected_end: Optional[float] = None  # of the run
        self._began_at = time.monotonic()
        self._epoch_began_at = self._began_at
        self._last_line_at: Optional[float] = None
        self._has_advised = False
        self._has_imported = False
        self._has_scores = False

    def resumed(self, facts: Facts) -> None:
        if facts.plan.limit(facts.position) or facts.plan.epoch_is_over(facts.position):
            self._import_packages()

    def takes_over(self, _facts: Facts) -> None:
        self._import_packages()

    def _import_packages(self):
        """Except in a trial, import the packages that the files need, which takes seconds,
        and log which are missing."""
        self._has_imported = True
        is_trial = self._side_files.shows and not self._side_files.writes
        if is_trial:  # it leaves no files
            return
        if left_out := packages.describe_omitted_files():
            self._say(left_out)

    def epoch_began(self, facts: Facts) -> None:
        now = time.monotonic()
        sampler = facts.plan.sampler
        self._epoch_began_at = now
        self._begin_bar_update(facts, now)
        if not self._side_files.shows or facts.plan.epoch_is_over(facts.position):
            return
        done = facts.position.consumed // sampler.global_batch
        self._bar = bar.open_bar(
            f"epoch {facts.position.epoch + 1}/{self._args.epochs}", done + len(sampler), done
        )
        if self._bar is not None:
            self._bar.show_words([self._time_left(now)])

    def stepped(self, facts: Facts, loss: torch.Tensor) -> None:
        if self._bar is None:
            return
        self._bar.move_to(facts.position.consumed // facts.plan.sampler.global_batch)
        now = time.monotonic()
        if now - self._bar_updated_at >= BAR_UPDATE_SECONDS:
            self._bar.show_words(self._words(facts, loss, now))
            self._begin_bar_update(facts, now)

    def _begin_bar_update(self, facts: Facts, now: float) -> None:
        self._bar_updated_at = now
        self._steps_at_bar_update = facts.position.total_steps

    def _words(self, facts: Facts, loss: torch.Tensor, now: float) -> list[str]:
        """Return the words behind the bar, by importance. A GPU's loss is that of the last call."""
        steps_per_second = max(1, facts.position.total_steps - self._steps_at_bar_update) / (
            now - self._bar_updated_at
        )
        rate = (
            f"{steps_per_second:.1f} steps/s"
            if steps_per_second >= 1
            else f"{1 / steps_per_second:.1f} s/step"
        )
        samples_per_second = steps_per_second * facts.plan.sampler.global_batch
        if self._expected_end is None:  # a guess, until a line knows better
            self._expected_end = now + facts.plan.samples_left(facts.position) / samples_per_second
        previous_loss = self._loss.read()
        self._loss.start_copy(loss)
        newest_loss = self._loss.read()
        shown_loss = previous_loss if newest_loss is None else newest_loss
        words = [self._time_left(now)]
        if shown_loss is not None:
            words.append(f"loss {shown_loss:.4f}")
        return [*words, f"{samples_per_second:.0f} {facts.unit}/s", rate]

    def _time_left(self, now: float) -> str:
        if self._expected_end is None:
            return "? left"
        seconds = int(max(0, self._expected_end - now))
        return f"{datetime.timedelta(seconds=seconds)} left"

    def evaluation_began(self, _facts: Facts) -> None:
        self._close_bar()

    def evaluated(self, _facts: Facts, batches: int, total: int) -> None:
        is_another = self._bar is not None and (batches == 1 or self._bar.total != total)
        if is_another:  # as an evaluation begins anew when a node was lost
            self._close_bar()
        if self._bar is None and batches < total:
            self._bar = bar.open_bar("evaluation", total)
        if self._bar is not None:
            self._bar.move_to(batches)

    def log_due(
        self, facts: Facts, loss: float, lr: float, speed: dict, seconds_left: Optional[float], skipped: int
    ) -> None:
        """Without a bar, print a line of these figures, unless the last one is too recent; a bar only takes
        the time left from them. After the first ones, import what the files need; say once what helps a slow
        loader."""
        now = time.monotonic()
        step, steps = facts.plan.step_of_the_epoch(facts.position)
        self._expected_end = None if seconds_left is None else now + seconds_left
        if self._bar is None and self._line_is_due(step, now):
            self._last_line_at = now
            place = (
                f"epoch={facts.position.epoch + 1}/{self._args.epochs} "
                f"step={step}/{steps}{skipped_field(skipped)}"
            )
            rate = f"{facts.unit}_per_s={speed['images_per_s']:.0f}"
            remaining = "?" if seconds_left is None else datetime.timedelta(seconds=int(seconds_left))
            split = " ".join(f"{phase}={speed[phase]:.0%}" for phase in TRAINING_PHASES)
            self._say(
                f"{time_of_day()} {place} train_loss={loss:.4f} lr={lr:.6g} {rate} left={remaining} {split}"
            )
        if not self._has_imported:  # after the first line, which should not wait for it
            self._import_packages()
        self._advise_once(facts, speed["waiting_for_data"])

    def _advise_once(self, facts: Facts, waiting: float) -> None:
        """Say what helps a loader that the network waits for; the first steps of a start do not count."""
        steps_of_this_start = facts.position.total_steps - facts.plan.start_position.total_steps
        if self._has_advised or steps_of_this_start <= WARM_UP:
            return
        line = advice(self._args.input.remedies, waiting)
        if line:
            self._has_advised = True
            self._say(line)

    def _line_is_due(self, step: int, now: float) -> bool:
        """Whether a line is due after this step of its epoch.

        The first step has none, as its speed is that of one step alone, but for the first of a start."""
        if self._last_line_at is None or self._args.print_freq:
            return True
        default_interval = next(
            seconds for limit, seconds in LINE_SECONDS.items() if now - self._began_at <= limit
        )
        interval = default_interval if self._args.log_seconds is None else self._args.log_seconds
        return step > 1 and now - self._last_line_at >= interval

    def epoch_ended(
        self, facts: Facts, is_complete: bool, metrics: dict, scores: Optional[Scores], skipped: int
    ) -> None:
        self._close_bar()
        self._has_scores = scores is not None
        position = facts.position
        step, steps = facts.plan.step_of_the_epoch(position)
        if is_complete:
            epoch = position.epoch
            ending = facts.results.comparison(position)
        else:
            epoch = position.epoch + 1  # the position does not count it
            ending = f" (after {step} of its {steps} steps)"
        metric_fields = "".join(f" {name}={value:.4f}" for name, value in metrics.items())
        place = f"epoch={epoch}/{self._args.epochs} steps={position.total_steps}{skipped_field(skipped)}"
        seconds = time.monotonic() - self._epoch_began_at
        self._say(f"{time_of_day()} {place}{metric_fields} seconds={seconds:.1f}{ending}")
        if is_complete and scores is not None and (line := scores.nothing_learnt(position.epoch, self._args)):
            self._say(line)

    def nodes_changed(self, facts: Facts, news: str, ranks: int, pause: float) -> None:
        self._say(
            f"{news}: {count(ranks, 'rank')} went on with step {facts.position.total_steps} after "
            f"{pause:.1f} s"
        )

    def ended(self, _facts: Facts) -> None:
        self._close_bar()

    def failed(self, _facts: Facts, error: BaseException) -> None:
        self._close_bar()
        if not isinstance(error, UserError):
            self._say(f"next: {restart_command(self._args, sys.argv)}")

    def _close_bar(self):
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def closed(self, facts: Facts, outcome: str, reason: str, is_saved: bool, last_good: str) -> None:
        if outcome != "stopped":
            self._say(f"done: {self._summary(facts, outcome, reason)}{last_good}")
        elif is_saved:
            step = facts.position.total_steps
            self._say(f"{reason}; saved after step {step}: start again to go on. {last_good}")
        else:
            self._say(f"{reason}; nothing was saved. {last_good}")
        self._say(f"files: {run_folder.describe_files(self._args)}")
        self._say(f"next: {self._next(facts, outcome)}")

    def _summary(self, facts: Facts, outcome: str, reason: str) -> str:
        """Return sentences on the best epoch and, if the run is not finished, on what ended this start."""
        args = self._args
        at = facts.position
        name = names.weights((at.best or {}).get("epoch", 0))
        weights = name if os.path.exists(os.path.join(args.output_dir, name)) else None
        text = facts.results.summary(at, weights)
        if outcome != "finished":
            text += f"{reason} is reached, {at.epoch} of {args.epochs} epochs are done: the same command "
            if facts.plan.steps_used_up(at):
                text += "with more of them, or without it, "
            text += "goes on. "
        return text

    def _next(self, facts: Facts, outcome: str) -> str:
        """Return the command that goes on; of a finished run, what can be done with it."""
        if outcome != "finished":
            omit = ["max_steps"] if facts.plan.steps_used_up(facts.position) else []
            return restart_command(self._args, sys.argv, omit)
        text = "with more --epochs the same command trains longer"
        if self._has_scores and (command := export_command(self._args.output_dir)):
            text += f". A network for any program: {command}"
        return text


def time_of_day() -> str:
    return f"{datetime.datetime.now():%H:%M:%S}"


def skipped_field(skipped: int) -> str:
    """Return the field of a line of the log for steps whose gradients overflowed; empty if there are none."""
    return f" skipped_steps={skipped}" if skipped else ""


def advice(remedies: Sequence[str], waiting: float) -> Optional[str]:
    """Return a line with the remedies, if any; None if `waiting`, a fraction, is below STARVED."""
    if not remedies or waiting < STARVED:
        return None
    cause = f"the network waited for data {waiting:.0%} of the time, the loader is the bottleneck"
    return f"advice: {cause}: try {'; or '.join(remedies)}"
