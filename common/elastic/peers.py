"""The ranks that train together in an elastic job.

If a rank is lost or joins, they repeat the step or evaluation.

A step or an evaluation counts only after all its communication. If a rank is lost or joins before, the ranks
form the next group (members.py) and repeat it. A rank that had already received everything is ahead. If it
was a step, the others load its state, which is the one that they would have reached. If it was an evaluation,
each of the others repeats it alone.
"""

import argparse
import contextlib
import dataclasses
from typing import Any, Callable, Optional

import torch

from common.checkpoints import checkpoint, restore
from common.elastic.members import Members
from common.errors import TrainingFailed, UserError
from common.ranks import collectives
from common.run import Observer, Run
from common.run.about import facts_of_this_start, manifest_of
from common.run.peers import Fixed, Requests


class Elastic(Fixed):
    """The peers of a rank in an elastic job: the group is formed again when one is lost or joins."""

    each_has_a_ledger = False  # the rank that writes notes the samples of all ranks
    _run: Run  # from meet() on

    def __init__(self, args: argparse.Namespace, members: Members):
        super().__init__(args)
        self._members = members
        self.requested_signal = members.told_to_stop
        self.rank = members.rank
        self.size = members.size
        self.shows = self.rank == 0 and not members.comes_later
        self.may_write = True
        self._is_together = False  # whether an evaluation by all ranks is under way
        self._is_behind = False  # whether the others have finished that evaluation
        self._last_step: Any = None  # (epoch, consumed, ids of all ranks) of the last step

    def find(
        self, look: Callable[[], Optional[restore.Checkpoint]], identity: dict
    ) -> Optional[restore.Checkpoint]:
        return look() if self.shows else None  # the other ranks get the state of this one

    def meet(self, run: Run) -> None:
        if not run.shares:
            raise UserError(
                "--min_nodes needs a step that can be taken again by other ranks: use "
                "jobs/train_ddp_exact.py or jobs/train_imagenet.py"
            )
        self._run = run
        run.shares.before_step_counts = self._exchange
        self._form()

    def _form(self):
        """Join the next group of ranks; if the run is to stop instead, stop it and exit."""
        run = self._run
        position = self._run.position
        run.enter("join")
        progress = 2 * position.total_steps
        if position.total_steps > 0 and position.consumed == 0:  # a finished evaluation counts as well
            progress += 1
        try:
            self._members.form(progress, self._state_to_send, self._load_state)
        except collectives.Stopped as stop:
            self._last_step = None  # the others may go on, and their ledger then has this step
            self._write_if_chosen()
            run.plan = run.plan if run.plan.resumed_at else dataclasses.replace(run.plan, resumed_at=position)
            if number := self._members.told_to_stop():
                run.stop_on(number)
            run.stop(str(stop), TrainingFailed.exit_code)
        self.rank = self._members.rank
        self.size = self._members.size
        run.shares.deal_again()
        self.agreement.begin()
        self._write_if_chosen()
        run.due.allow_stop(run.due.is_evaluating)

    def regroup(self) -> None:
        self._form()
        self._run.sampler.start_at(self._run.position.epoch, self._run.position.consumed)

    def together(self, work: Callable, *arguments: object) -> Any:
        """Return the result of `work`, of which each rank does a part;
        do it again if the ranks change meanwhile."""
        deal_tests = self._run.shares.deal_tests
        self._is_together = True
        self._is_behind = False  # _form() sets it if the others have finished: then this rank does all alone
        while True:
            try:
                group = self._members.without_others() if self._is_behind else contextlib.nullcontext()
                with group:
                    deal_tests()
                    result = work(*arguments)
                deal_tests()  # to all ranks again
                self._is_together = False
                return result
            except collectives.RanksChanged:
                self._form()

    def _state_to_send(self) -> dict[str, Any]:
        """Return the state of the run for a rank that is behind or new."""
        state = checkpoint.snapshot(self._run.state())
        return {"state": state, "manifest": manifest_of(self._run), "last_step": self._last_step}

    def _load_state(self, received: dict[str, Any]) -> None:
        """Load the state of another rank, unless only an evaluation is missing here: there are no steps in
        one, so this rank, which is in it (`_is_together`), has taken as many as the other."""
        run = self._run
        manifest = received["manifest"]
        lacks_only_evaluation = self._is_together and manifest["total_steps"] == run.position.total_steps
        if lacks_only_evaluation:
            self._is_behind = True  # it repeats the evaluation alone, and then closes the epoch, too
            return
        restore.refuse_another_run(manifest, run.saving.identity, "what the other nodes train")
        run.load(received["state"], manifest, "the state of the other nodes")
        self._last_step = received["last_step"]

    def _exchange(self):
        """Agree on a due stop or save; for --ledger, gather all ranks' sample ids.

        Called before each step takes effect.
        """
        run = self._run
        gather = self._members.gather

        def maximum(values: list[float]) -> list[float]:
            gathered = gather(torch.tensor(values, dtype=torch.float64))
            return torch.stack(gathered).amax(dim=0).tolist()

        self.agreement.exchange(maximum)
        ids = run.sample_ids
        if run.args.ledger:
            padded = torch.full((run.sampler.global_batch,), -1)
            padded[: len(ids)] = ids
            ids = torch.cat(gather(padded))
        self._last_step = [run.position.epoch, run.position.consumed, ids[ids >= 0]]

    def agree_after_step(self) -> Requests:
        return self.agreement.requests  # exchanged before the step has counted

    def samples_of_step(self, ids: torch.Tensor) -> torch.Tensor:
        return self._last_step[2]

    def note_step(self) -> None:
        if news := self._members.news:
            self._run.notify(
                Observer.nodes_changed, news=news, ranks=self.size, pause=self._run.clock.seconds_since_step()
            )
        self._members.note_step()

    def _write_if_chosen(self):
        """If this rank is to write the files (not in a trial), take them over, once;
        note the last step in a ledger, if any."""
        run = self._run
        if not self._members.writes or run.trial:
            return
        if not run.side_files.writes:
            run.side_files.writes = run.side_files.shows = True
            run.notify(Observer.takes_over)
            run.saving.take_over()
            run.evidence.keep(self.rank, needs_attempt=True, needs_ledger=True)
            if run.plan.resumed_at:
                run.notify(Observer.began, about=facts_of_this_start(run, "the state of the other nodes"))
        if self._last_step:
            # the rank that noted it may be lost; a new start in the ledger lets it count once
            epoch, consumed, ids = self._last_step
            run.evidence.begin(epoch, consumed)
            run.evidence.note_step_counts(epoch, consumed, ids)
