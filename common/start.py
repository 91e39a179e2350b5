"""A plain training script becomes a job by ten lines: start(), and what it returns in place of a few of them.

    job = start(__doc__, epochs=20, batch_size=64)      # defaults of options; what follows is the job
    train_loader = job.loader(train_set, shuffle=True)  # for DataLoader(train_set, batch_size=64, ...)
    val_loader = job.loader(val_set, batch_size=400)
    model = job.parallel(model)                         # on the device, in DistributedDataParallel if needed
    run = job.run(model, optimizer=optimizer)           # goes on where the last start stopped
    for epoch in run.epochs():
        for x, y in run.steps(train_loader):
            ...                                         # as it was
            run.step(loss)
        run.end_epoch(loss=job.sum(val_loss))           # of all processes

It makes the objects that jobs/train_ddp.py makes line by line, for whoever wants to have them otherwise.
"""

import argparse
import math
import multiprocessing
import os
import random
import runpy
import sys
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Callable, Optional

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import default_collate

from common import arguments, devices, progress
from common.errors import UserError
from common.job import begin_in_notebook, is_running, run_job
from common.ranks import group, norms
from common.ranks.collectives import reduce
from common.run import Run, Scores, TrainLoader
from common.weights.files import unwrapped
from datasets.loader import SampleLoader
from datasets.sampler import EpochSampler, InOrder


def start(
    doc: Optional[str], options: Optional[Callable[[arguments.Parser], object]] = None, **defaults: object
) -> "Job":
    """Parse the options, start a process for each GPU, and let the processes of all nodes meet.

    Return the job.

    `doc`: what --help says; `options(parser)`: adds options of the script; `defaults`: of any option, such as
    epochs=20. The script then runs from its first line again, within run_job(), which turns errors into lines
    and exit codes: call start() before anything that takes long. In a notebook, which has no options but
    `defaults`, the cell goes on, on one device.
    """
    if progress.in_notebook():
        begin_in_notebook()
        if not _is_a_script(sys.argv[0]):
            sys.argv = [os.environ.get("JPY_SESSION_NAME", "notebook")]  # in place of the kernel's
        defaults.setdefault("nproc_per_node", 1)
    elif not is_running():
        run_job(_run_the_script)
        sys.exit(0)
    parser = arguments.general_parser(doc, data="is not used, unless the script does", workers=0)
    group.add_options(parser)
    norms.add_options(parser)
    if options:
        options(parser)
    option_names = {action.dest for action in arguments.declared.actions(parser)}
    for name in defaults:
        if name not in option_names:
            raise TypeError(
                f"start({name}=...): there is no option --{name}; add one of your own by options="
            )
    parser.set_defaults(**defaults)
    args = arguments.parse(parser)
    if progress.in_notebook():
        _require_one_process(args)
    group.start_workers(args)
    device = devices.choose(args)
    group.join(args, device)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    return Job(args, device)


def _run_the_script() -> None:
    _require_a_script()
    runpy.run_path(os.path.abspath(sys.argv[0]), run_name="__main__")


def _require_a_script() -> None:
    """Raise UserError unless this process runs a script by its path, from its first line."""
    if multiprocessing.parent_process() is not None:
        advice = 'put its lines below if __name__ == "__main__":'
        raise UserError(f"start() was called in a loader process, which imports the script: {advice}")
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        raise UserError(
            "start() needs a script that is started by its path: python my_script.py, and not python -m"
        )
    if not _is_a_script(sys.argv[0]):
        raise UserError(
            "start() needs a script in a file of its own, python my_script.py, or a cell of a notebook"
        )


def _is_a_script(path: str) -> bool:
    """Whether the file is the script that this process runs."""
    script_path = getattr(sys.modules["__main__"], "__file__", None)
    return (
        bool(script_path)
        and os.path.exists(script_path)
        and os.path.exists(path)
        and os.path.samefile(script_path, path)
    )


def _require_one_process(args: argparse.Namespace) -> None:
    """Raise UserError unless a notebook just trains on one device; end the group of its Run before,
    if there is one."""
    if args.world.world_size > 1 or args.max_restarts or args.min_nodes or args.doctor or args.find_max_batch:
        raise UserError(
            "a notebook trains on one device, without --nproc_per_node, --max_restarts, --min_nodes, "
            "--doctor and --find_max_batch: write its cells to a script for these"
        )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Job:
    """One of the equal processes of a job. It owns the sampler of the training, and knows its networks."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args = args
        self.device = device
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        self._train_set: Optional[Sized] = None
        self._train_sampler: Optional[EpochSampler] = None
        self._lengths: set[int] = set()  # of the data sets that are evaluated
        self._networks: list[nn.Module] = []  # whose buffers rank 0 sends to all before an evaluation
        self._averaged: set[nn.Parameter] = set()  # weights whose gradients are averaged over the processes

    def loader(
        self, data_set: Sized, *, shuffle: bool = False, batch_size: Optional[int] = None,
        collate_fn: Callable[[list], Any] = default_collate, workers: Optional[int] = None,
    ) -> SampleLoader:  # fmt: skip
        """Return batches, on the device, of any data set that has a length and gives sample number i as
        data_set[i].

        With `shuffle` it is the loader of the training: each process takes its part of every batch of the
        job, in an order that a restart goes on with. Without, each process takes its part of the samples,
        each sample once, and every process has to begin each pass. `batch_size`: of each process; if not
        given, that of --batch_size. `workers`: loader processes; if not given, --workers.
        """
        size = self.args.batch_size if batch_size is None else batch_size
        processes = self.args.workers if workers is None else workers
        if not shuffle:
            self._lengths.add(len(data_set))
            in_order = InOrder(len(data_set), size)
            in_order.shard(self.rank, self.world_size)
            return _EvaluationLoader(self._networks, data_set, in_order, self.device, processes, collate_fn)
        if self._train_sampler is not None:
            raise RuntimeError(
                "job.loader(shuffle=True) was called twice: a run goes on with the samples of one loader"
            )
        self._train_set = data_set
        self._train_sampler = EpochSampler(len(data_set), size, seed=self.args.seed)
        self._train_sampler.shard(self.rank, self.world_size)
        return SampleLoader(data_set, self._train_sampler, self.device, processes, collate_fn)

    def parallel(self, network: nn.Module) -> nn.Module:
        """Return the network on the device of this process; if there are several processes, in
        DistributedDataParallel, unless none of its weights is trained. --sync_bn, or few samples a process,
        makes its batch norms synchronised ones."""
        network = network.to(self.device)
        if norms.over_all_ranks(self.args):
            network = norms.synchronised(network)
        self._networks.append(network)
        trained = [weight for weight in network.parameters() if weight.requires_grad]
        self._averaged.update(trained)
        if self.world_size == 1 or not trained:
            return network
        return nn.parallel.DistributedDataParallel(
            network, gradient_as_bucket_view=True, **norms.OWN_STATISTICS
        )

    def run(self, network: nn.Module, **parts: object) -> Run:
        """Return the Run of the training, which has gone back to its newest checkpoint, if there is one.

        `parts`: what else changes in training and is saved, under names of your choice, and what Run() takes
        besides.
        """
        if self._train_sampler is None:
            raise RuntimeError(
                "job.run() needs the loader of the training: call job.loader(train_set, shuffle=True) "
                "before it"
            )
        if self.world_size > 1:
            self._require_parallel(network, parts)
        settings: dict[str, Any] = {"data_set": self._train_set}
        for name, part in parts.items():
            settings[name] = _without_parallel(part)
            if isinstance(part, AveragedModel):
                self._networks.append(part)
        run = _CheckedRun(self.args, self._train_sampler, network, **settings)
        run.resume()
        devices.compile_network(self.args, network, accumulates=True)  # as a script may accumulate
        return run

    def _require_parallel(self, network: nn.Module, parts: Mapping[str, object]) -> None:
        """Raise UserError if processes would train apart."""
        is_trained = any(weight.requires_grad for weight in network.parameters())
        if is_trained and not isinstance(network, nn.parallel.DistributedDataParallel):
            raise UserError(
                f"{self.world_size} processes would train apart: give job.run() what "
                "job.parallel(network) has returned"
            )
        for name, part in parts.items():
            if not isinstance(part, torch.optim.Optimizer):
                continue
            weights = [weight for group in part.param_groups for weight in group["params"]]
            if any(weight.requires_grad and weight not in self._averaged for weight in weights):
                raise UserError(
                    f"{name} has weights of a network that was not given to job.parallel(): processes "
                    "would train apart"
                )

    def sum(self, value: float) -> float:
        """Return the sum of the values of all processes. Every process calls it."""
        (total,) = reduce([float(value)], "SUM")
        return total

    def mean(self, total: float, samples: int) -> float:
        """Return the mean over a data set that is evaluated. Every process calls it.

        `total`: the sum over the samples of this process; `samples`: the length of the whole data set.
        """
        if samples not in self._lengths:
            lengths = " or ".join(map(str, sorted(self._lengths)))
            raise ValueError(
                f"job.mean(total, {samples}): give the length of the data set that is evaluated: "
                f"{lengths or 'none is'}"
            )
        return self.sum(total) / samples

    def say(self, text: str) -> None:
        """Print a line of the log, once for all processes."""
        if self.rank == 0:
            progress.say(text)


class _CheckedRun(Run):
    """A Run that refuses any loader but the training's, and metrics that differ between processes."""

    def steps(self, loader: TrainLoader) -> Iterator[Any]:
        """Yield the batches of the training's loader; raise UserError for any other loader."""
        if getattr(loader, "sampler", None) is not self.sampler:
            kind = type(loader).__name__
            raise UserError(
                f"run.steps() was given another {kind} than job.loader(train_set, shuffle=True) has returned"
            )
        yield from super().steps(loader)

    def end_epoch(self, scores: Optional[Scores] = None, /, **metrics: float) -> None:
        """End the epoch; raise UserError if the value of a metric differs between processes."""
        for name, value in metrics.items():
            lowest, highest = reduce([float(value), -float(value)], "MIN")
            if lowest != -highest and not math.isnan(lowest):
                raise UserError(
                    f"run.end_epoch({name}=...) was given {lowest:g} by one process and {-highest:g} by "
                    "another: add the parts of all processes up by job.sum() or job.mean()"
                )
        super().end_epoch(scores, **metrics)


class _EvaluationLoader(SampleLoader):
    """Before each pass, copies the buffers of rank 0, which the checkpoint has, to all processes."""

    def __init__(self, networks: list[nn.Module], *args: Any):
        super().__init__(*args)
        self._networks = networks

    def __iter__(self) -> Iterator[Any]:
        for network in self._networks:
            for buffer in network.buffers():
                torch.distributed.broadcast(buffer, 0)
        yield from super().__iter__()


def _without_parallel(part: object) -> object:
    """Return the part without what wraps a network (DistributedDataParallel, DataParallel, torch.compile), so
    that the names in a checkpoint are the same on any number of processes. In an AveragedModel the network is
    unwrapped in place."""
    if isinstance(part, AveragedModel):
        part.module = unwrapped(part.module)
        return part
    return unwrapped(part) if isinstance(part, nn.Module) else part
