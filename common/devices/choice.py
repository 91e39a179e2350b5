"""Choose the device of this process. If the requested device is missing, the error says what to do."""

import argparse
import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Optional, Protocol

import torch

from common import errors
from common.devices import kinds
from common.devices.kinds import COMPILE, KINDS, count, slices
from common.errors import UserError
from common.machine import cores

TO_THE_CPU = "--enable_gpu false to train on the CPU"


class Place(Protocol):
    """What a choice needs to know of where this process is (world.World)."""

    @property
    def local_rank(self) -> int: ...

    @property
    def level(self) -> str: ...

    @property
    def local_world_size(self) -> int: ...

    def owns_the_only(self, gpus: int) -> bool: ...


def choose(args: argparse.Namespace) -> torch.device:
    """Set up and return this rank's accelerator; the CPU if --enable_gpu is false, or unset and none is there or promised."""
    here = args.world
    cut = slices()
    name = kinds.accelerator()
    _limit_threads(here)
    if here.local_rank < len(cut):
        os.environ["CUDA_VISIBLE_DEVICES"] = cut[here.local_rank]
    usable = args.enable_gpu is not False and kinds.available() and args.device in (None, name)
    if args.enable_gpu is not False and not usable and (args.enable_gpu or here.gpus_promised):
        from common.devices.diagnosis import diagnosis

        wanted = args.device or ("npu" if here.platform == "ascend" else name)
        noun = KINDS[wanted].noun
        promised = f"the platform reports {errors.count(here.gpus_promised, noun)} ({here.platform})"
        given = f"--device {wanted}" if args.device else "--enable_gpu true" if args.enable_gpu else promised
        instead = "--device cpu to train on the CPU" if args.device else TO_THE_CPU
        raise UserError(f"{given}, but torch sees no {noun}: {diagnosis(wanted)}; or give {instead}")
    if args.enable_gpu is False:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that no other code in this process uses one
    if args.enable_gpu is False or not usable:
        return torch.device("cpu")
    device = torch.device(name, _number(here, cut)) if KINDS[name].queues else torch.device(name)
    for need in (*args.needs, *args.input.needs, *([COMPILE] if args.compile else [])):
        kinds.require_feature(device, need)
    if kinds.is_nvidia(device):
        from common.devices.diagnosis import unknown_architecture

        wrong = unknown_architecture(torch.cuda.get_device_capability(device), torch.cuda.get_arch_list())
        if wrong:
            raise UserError(f"{torch.cuda.get_device_name(device)} is {wrong}; or give {TO_THE_CPU}")
        _wake(device)
    if KINDS[name].queues:
        kinds.module().set_device(device)
    _choose_algorithms(KINDS[name], args.deterministic)
    return device


def _wake(gpu: torch.device) -> None:
    """Set the GPU up in a thread, which takes seconds, while this one imports what every optimizer of torch needs."""

    def touch() -> None:
        with contextlib.suppress(Exception):  # it comes again where the training uses the GPU
            torch.zeros(1, device=gpu)

    touching = threading.Thread(target=touch, name="waking the GPU", daemon=True)
    touching.start()
    with contextlib.suppress(Exception):  # the same
        from torch import _dynamo  # noqa: F401
    touching.join()


def _limit_threads(here: Place) -> None:
    """Let a node's only process compute in no more threads than it may use cores. A supervisor tells each of several."""
    # Of a container that is limited to the time of a few cores, torch sees all cores of the machine.
    mine = cores.count()
    is_alone = here.level == "node" or here.local_world_size == 1
    if is_alone and "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > mine:
        torch.set_num_threads(mine)


def _number(here: Place, cut: Sequence[str]) -> int:
    seen = count()
    number = 0 if here.local_rank < len(cut) or here.owns_the_only(seen) else here.local_rank
    if number >= seen:
        sees = f"this process sees {seen}; start fewer processes"
        raise UserError(f"local rank {here.local_rank} has no {kinds.noun()}: {sees}, or give {TO_THE_CPU}")
    return number


def _choose_algorithms(kind: kinds.Kind, deterministic: bool) -> None:
    """If `deterministic`, let torch take only algorithms that give the same bits each time; else let cuDNN seek the fastest."""
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.update(kind.deterministic)  # the libraries read them at their first use
        torch.use_deterministic_algorithms(True)
        # To fill memory is slow and only helps to find mistakes. Pyright does not know this attribute.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def fewer_than_promised(args: argparse.Namespace) -> Optional[str]:
    """Return a sentence if torch sees some accelerators, but for no known reason fewer than the platform says; else None."""
    here = args.world
    seen = count() if args.enable_gpu is not False else 0
    if not 0 < seen < here.gpus_promised or here.owns_the_only(seen):
        return None
    what = f"{here.gpus_promised} {kinds.noun()}s"
    return f"torch sees {seen} of the {what} that {here.platform} says this node has: the others are idle"


def require_one_each(args: argparse.Namespace) -> None:
    """Raise UserError in a node's parent if the node has accelerators, but fewer than workers, unless --enable_gpu is false."""
    seen = count()
    if args.enable_gpu is not False and 0 < seen < args.world.local_world_size:
        raise UserError(
            f"{args.world.local_world_size} processes on a node with {errors.count(seen, kinds.noun())}: "
            f"give --nproc_per_node {seen}, or {TO_THE_CPU}"
        )


def identity(device: torch.device) -> str:
    """Return a name for the device, to notice ranks that share it; empty for a CPU, which ranks may share, or if none is known.

    Before torch 2.4 a GPU has only its number, which says nothing where each rank sees one GPU alone.
    """
    if not kinds.is_accelerator(device):
        return ""
    if kinds.is_nvidia(device):
        number = str(device) if count() > 1 else ""
        return next(iter(slices()), "") or str(getattr(torch.cuda.get_device_properties(device), "uuid", number))
    return f"{device} of {os.environ.get('ASCEND_RT_VISIBLE_DEVICES', 'all')}"


def describe(device: torch.device) -> str:
    if not kinds.is_accelerator(device):
        return f"cpu ({errors.count(torch.get_num_threads(), 'thread')})"
    name = getattr(kinds.module(), "get_device_name", None)
    return f"{device} ({name(device)})" if name else str(device)
