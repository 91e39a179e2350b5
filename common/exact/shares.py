"""Exact training: the global batch is divided into shares,
and the result does not depend on the number of ranks.

    shares = Shares(args, model, train_sampler, test_sampler)
    run.register(shares=shares)
    for images, labels in run.steps(train_loader):  # one share of this rank after the other
        ...                                         # its forward and backward pass
        loss = shares.mean(loss)
        if loss is None:
            continue                                # it has more shares, or the ranks have changed
        optimizer.step()
        run.step(loss)

Each share has its own batch norm statistics and its own random numbers. Its gradients, its loss and the
changes that its forward pass makes to the network's buffers are averaged along a tree over the numbers of the
shares (common/exact/sums.py).
"""

import argparse
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable, Optional, Protocol

import torch

from common import arguments, devices
from common.devices.seeds import seed_step
from common.errors import UserError
from common.ranks import collectives, norms
from common.ranks.collectives import RanksChanged

SHARES = (
    "parts of the global batch: as many as there will ever be ranks, or more; unset: the ranks of the "
    "first start"
)
PART_BYTES = 8 << 20  # of gradients that are exchanged together


def add_options(parser: arguments.Parser) -> None:
    """Add --shares, and default to --deterministic true and --sync_bn false,
    for the same bits on any number of ranks."""
    arguments.group(parser, "training").add_argument("--shares", type=arguments.COUNT, help=SHARES)
    parser.set_defaults(deterministic=True, sync_bn=False)


def settled(args: argparse.Namespace, same_bits: bool) -> argparse.Namespace:
    """Return the arguments for training with shares: --sync_bn false if unset and, with `same_bits`,
    --deterministic true."""
    return arguments.replaced(args, deterministic=args.deterministic or same_bits, sync_bn=bool(args.sync_bn))


class TrainSampler(Protocol):
    """What shares need of the sampler of the training (datasets/sampler.py)."""

    global_batch: int

    def deal(self, own_shares: range, shares: int, global_batch: int) -> None: ...


class EvaluationSampler(Protocol):
    """What shares need of the sampler of the evaluation (datasets/sampler.py)."""

    def shard(self, rank: int, world_size: int, whole_batches: bool = False) -> None: ...


class Shares:
    """Divides each global batch into shares, deals them to the ranks, and averages what they give,
    in the shares' order.

    It hooks each weight, to send gradients while the last share is still computed. A part of an exchange is a
    group of tensors that are sent together (sums.Part)."""

    def __init__(
        self, args: argparse.Namespace, model: torch.nn.Module, train_sampler: TrainSampler,
        test_sampler: EvaluationSampler, global_batch: Optional[int] = None, in_order: bool = True,
    ):  # fmt: skip
        """Deal the shares and the samples to the ranks.

        `global_batch`: samples of a step; unset: batch_size for each share.

        `in_order`: give the same bits on any number of ranks, for which torch gets one thread on a CPU;
        otherwise the communication library adds in an order of its own.
        """
        if any(isinstance(module, norms.SynchronisedNorm) for module in model.modules()):
            raise UserError(
                "--sync_bn true has one statistic for all samples of a step, and each share has its "
                "own: leave it out"
            )
        self._args = args
        self._model = model
        self._sampler = train_sampler
        self._global_batch = global_batch
        self._test_sampler = test_sampler
        self._group = collectives.current()
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._device = self._weights[0].device
        self._float_buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._buffers = [
            *self._float_buffers,
            *(buffer for buffer in model.buffers() if not buffer.is_floating_point()),
        ]
        self._in_order = in_order
        if in_order and not devices.is_accelerator(self._device):
            torch.set_num_threads(1)  # sums over two threads have other bits than over one
        self.passes = 1  # backward passes for each share
        self.was_interrupted = False  # whether the ranks have changed in this step, which is then repeated
        self.before_step_counts: Optional[Callable[[], None]] = None  # called before a step counts
        # Of the step under way: this rank's share, {part: how many of its gradients have come}, the parts
        # whose gradients have all come, how many parts were sent, and the buffers as they were before the
        # step.
        self._share = -1  # before of(): none
        self._pass_counts: dict[object, int] = {}
        self._complete_parts: set[object] = set()
        self._sent_count = 0
        self._saved_buffers: list[torch.Tensor] = []
        self._deal(args.shares or self._group.size)
        for weight in self._weights:
            weight.register_post_accumulate_grad_hook(self._on_gradient)

    def deal_again(self) -> None:
        """Deal the same number of shares to the ranks that take part by now."""
        self._deal(self.number)

    def _deal(self, shares: int) -> None:
        """Deal the shares to the ranks, and group the tensors to exchange: the gradients, last weight first,
        then the rest."""
        from common.exact import sums

        rank = self._group.rank
        ranks = self._group.size
        if ranks > shares:
            raise UserError(
                f"{ranks} ranks for {shares} shares: each rank computes one or more, so use {shares} ranks "
                "at most, or begin another run with more --shares"
            )
        self.deal_tests()
        self.number = shares
        self._own_shares = sums.shares_of(rank, ranks, shares)
        self.was_interrupted = False
        self._sampler.deal(self._own_shares, shares, self._global_batch or self._args.batch_size * shares)
        self._loss = torch.zeros((), device=self._device)
        groups = [*_group_tensors(self._weights[::-1]), *_group_tensors([*self._float_buffers, self._loss])]
        kind = sums.Part if self._in_order else sums.AnyOrder
        self._parts = [kind(tensors, shares, self._group) for tensors in groups]
        self._part_of = {tensor: part for part in self._parts for tensor in part.tensors}

    def deal_tests(self) -> None:
        """Deal the samples of the evaluation to the ranks."""
        self._test_sampler.shard(self._group.rank, self._group.size, whole_batches=True)

    @property
    def first_line(self) -> str:
        """The line about the shares with which a log begins."""
        count = self.number
        size = self._sampler.global_batch // self.number
        if not self._in_order:
            return (
                f"{count} shares of {size} samples, for 1 to {count} ranks; the bits of the result depend "
                "on who takes part"
            )
        unit = "one device"
        if not devices.is_accelerator(self._device):
            unit = "one thread, as CPUs add in another order with more"
        return (
            f"exact: {count} shares of {size} samples, the same bits on 1 to {count} ranks, each with "
            f"{unit}; a new run needs --shares for the most ranks that will ever take part"
        )

    def learning_rate(self, run: Any) -> float:
        """Return --lr, grown with the global batch of the run."""
        return self._args.lr * arguments.growth(self._args, run.global_batch)

    def of(self, batch: Sequence[torch.Tensor], samples_seen: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield this rank's batch share by share.

        Before each, reset the buffers, set .grad to None and seed the generators.
        """
        no_sync = getattr(self._model, "no_sync", contextlib.nullcontext)  # of DistributedDataParallel
        self._saved_buffers = [buffer.clone() for buffer in self._buffers]
        self._complete_parts = set()
        self._sent_count = 0
        for share, tensors in zip(
            self._own_shares, zip(*(tensor.tensor_split(len(self._own_shares)) for tensor in batch))
        ):
            self._share = share
            self._pass_counts = dict.fromkeys(self._parts, 0)
            if self._buffers and share != self._own_shares[0]:
                torch._foreach_copy_(self._buffers, self._saved_buffers)
            for weight in self._weights:
                weight.grad = None
            seed_step(self._args.seed, samples_seen, share)
            with no_sync():
                yield tensors

    def _on_gradient(self, weight: torch.Tensor) -> None:
        """Hook after each gradient: in this rank's last share, begin to send complete groups of gradients,
        in their order."""
        if self._share != self._own_shares[-1] or self.number == 1:
            return
        part = self._part_of[weight]
        self._pass_counts[part] += 1
        if self._pass_counts[part] == len(part.tensors) * self.passes:
            part.add(self._share, [tensor.grad for tensor in part.tensors])
            self._complete_parts.add(part)
            self._send()
        elif part in self._complete_parts:
            raise RuntimeError(f"a share has more backward passes than shares.passes, which is {self.passes}")

    def _send(self):
        """Send the complete groups up to the first that is incomplete,
        so that all ranks send in the same order."""
        while self._sent_count < len(self._parts) and self._parts[self._sent_count] in self._complete_parts:
            self._parts[self._sent_count].send()
            self._sent_count += 1

    @torch.no_grad()
    def mean(self, loss: torch.Tensor) -> Optional[torch.Tensor]:
        """Add the results of a share after its backward pass, and return None.

        After this rank's last share, make gradients and float buffers the means over all shares of all ranks,
        and return the mean loss, or None if the ranks have changed."""
        if self._share < 0:
            raise UserError(
                "--shares: call run.register(shares=shares) before run.resume(), so that run.steps() gives "
                "the shares"
            )
        if self.number == 1:
            return loss.detach()
        saved_buffers = self._saved_buffers[: len(self._float_buffers)]
        changes = torch._foreach_sub(self._float_buffers, saved_buffers) if saved_buffers else ()
        values: dict[torch.Tensor, Optional[torch.Tensor]] = {weight: weight.grad for weight in self._weights}
        values.update(zip(self._float_buffers, changes))
        values[self._loss] = loss.detach()
        for part in self._parts:
            if part not in self._complete_parts:
                part.add(self._share, [values[tensor] for tensor in part.tensors])
        if self._share != self._own_shares[-1]:
            return None
        try:
            means = self._exchange()
        except RanksChanged:  # the step has no result, and has changed nothing
            self.was_interrupted = True
            if saved_buffers:
                torch._foreach_copy_(self._buffers, self._saved_buffers)
            return None
        for weight in self._weights:
            weight.grad = means[weight]
        if saved_buffers:
            torch._foreach_copy_(
                self._float_buffers,
                torch._foreach_add(saved_buffers, [means[buffer] for buffer in self._float_buffers]),
            )
        return means[self._loss].clone()

    def _exchange(self):
        """Return {tensor: its mean over all shares}; raise RanksChanged if a rank was lost or has joined."""
        if self._group.has_changed():
            raise RanksChanged
        self._complete_parts = set(self._parts)
        self._send()
        for part in self._parts:
            part.finish()
        means = {tensor: mean for part in self._parts for tensor, mean in zip(part.tensors, part.means())}
        if self.before_step_counts:
            self.before_step_counts()
        return means

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self._args.shares not in (None, state["number"]):
            raise UserError(
                f"--shares {self._args.shares}, but the run has {state['number']}: leave the option "
                "out, or begin another run"
            )
        self._deal(state["number"])


def _group_tensors(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split the tensors, in their order, into lists of one dtype,
    each of which is full once it has PART_BYTES."""
    groups: list[list[torch.Tensor]] = []
    for tensor in tensors:
        last = groups[-1] if groups else []
        is_full = sum(member.nbytes for member in last) >= PART_BYTES
        if not last or is_full or last[-1].dtype != tensor.dtype:
            groups.append(last := [])
        last.append(tensor)
    return groups
