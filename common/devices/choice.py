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
from common.devices.kinds import COMPILE, KINDS, count, mig_slices
from common.errors import UserError
from common.machine import cores

CPU_INSTEAD = "--enable_gpu false to train on the CPU"


class WorldLike(Protocol):
    """The fields of world.World that a choice of the device needs."""

    @property
    def local_rank(self) -> int: ...

    @property
    def level(self) -> str: ...

    @property
    def local_world_size(self) -> int: ...

    def owns_only_gpu(self, gpus: int) -> bool: ...


def choose(args: argparse.Namespace) -> torch.device:
    """Set up and return this rank's accelerator; the CPU if --enable_gpu is false,
    or unset and none is there or promised."""
    world = args.world
    mig_names = mig_slices()
    name = kinds.accelerator()
    _limit_threads(world)
    if world.local_rank < len(mig_names):
        os.environ["CUDA_VISIBLE_DEVICES"] = mig_names[world.local_rank]
    usable = args.enable_gpu is not False and kinds.available() and args.device in (None, name)
    if args.enable_gpu is not False and not usable and (args.enable_gpu or world.gpus_promised):
        from common.devices.diagnosis import diagnosis

        requested_kind = args.device or ("npu" if world.platform == "ascend" else name)
        noun = KINDS[requested_kind].noun
        alternative = CPU_INSTEAD
        if args.device:
            request = f"--device {requested_kind}"
            alternative = "--device cpu to train on the CPU"
        elif args.enable_gpu:
            request = "--enable_gpu true"
        else:
            request = f"the platform reports {errors.count(world.gpus_promised, noun)} ({world.platform})"
        raise UserError(
            f"{request}, but torch sees no {noun}: {diagnosis(requested_kind)}; or give {alternative}"
        )
    if args.enable_gpu is False:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that no other code in this process uses one
    if args.enable_gpu is False or not usable:
        return torch.device("cpu")
    device = (
        torch.device(name, _device_index(world, mig_names)) if KINDS[name].has_streams else torch.device(name)
    )
    for feature in (*args.needs, *args.input.needs):
        kinds.require_feature(device, feature)
    if args.compile:
        kinds.require_feature(device, COMPILE)
    if kinds.is_nvidia(device):
        from common.devices.diagnosis import unknown_architecture

        problem = unknown_architecture(torch.cuda.get_device_capability(device), torch.cuda.get_arch_list())
        if problem:
            raise UserError(f"{torch.cuda.get_device_name(device)} is {problem}; or give {CPU_INSTEAD}")
        _initialize_gpu(device)
    if KINDS[name].has_streams:
        kinds.module().set_device(device)
    _choose_algorithms(KINDS[name], args.deterministic)
    return device


def _initialize_gpu(gpu: torch.device) -> None:
    """Initialize the GPU in a thread while this thread imports torch._dynamo; each takes seconds."""

    def allocate() -> None:
        with contextlib.suppress(Exception):  # it comes again where the training uses the GPU
            torch.zeros(1, device=gpu)

    thread = threading.Thread(target=allocate, name="waking the GPU", daemon=True)
    thread.start()
    with contextlib.suppress(Exception):  # the same
        from torch import _dynamo  # noqa: F401
    thread.join()


def _limit_threads(world: WorldLike) -> None:
    """Limit the threads of a node's only process to its cores.

    A supervisor sets them for several processes.
    """
    # Of a container that is limited to the time of a few cores, torch sees all cores of the machine.
    num_cores = cores.count()
    is_alone = world.level == "node" or world.local_world_size == 1
    if is_alone and "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > num_cores:
        torch.set_num_threads(num_cores)


def _device_index(world: WorldLike, mig_names: Sequence[str]) -> int:
    num_devices = count()
    index = 0 if world.local_rank < len(mig_names) or world.owns_only_gpu(num_devices) else world.local_rank
    if index >= num_devices:
        reason = f"this process sees {num_devices}; start fewer processes"
        raise UserError(
            f"local rank {world.local_rank} has no {kinds.noun()}: {reason}, or give {CPU_INSTEAD}"
        )
    return index


def _choose_algorithms(kind: kinds.Kind, deterministic: bool) -> None:
    """If `deterministic`, let torch take only algorithms that give the same bits each time;
    else let cuDNN seek the fastest."""
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.update(kind.deterministic)  # the libraries read them at their first use
        torch.use_deterministic_algorithms(True)
        # To fill memory is slow and only helps to find mistakes. Pyright does not know this attribute.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def idle_devices_warning(args: argparse.Namespace) -> Optional[str]:
    """Return a warning if torch sees some accelerators, but fewer than the platform says that the node has,
    and not because the launcher gave this process only its own; else None."""
    world = args.world
    num_devices = count() if args.enable_gpu is not False else 0
    if not 0 < num_devices < world.gpus_promised or world.owns_only_gpu(num_devices):
        return None
    promised = f"{world.gpus_promised} {kinds.noun()}s"
    return (
        f"torch sees {num_devices} of the {promised} that {world.platform} says this node has: the others "
        "are idle"
    )


def require_enough_devices(args: argparse.Namespace) -> None:
    """Raise UserError in a node's parent if the node has accelerators, but fewer than workers,
    unless --enable_gpu is false."""
    num_devices = count()
    if args.enable_gpu is not False and 0 < num_devices < args.world.local_world_size:
        raise UserError(
            f"{args.world.local_world_size} processes on a node with "
            f"{errors.count(num_devices, kinds.noun())}: give --nproc_per_node {num_devices}, or "
            f"{CPU_INSTEAD}"
        )


def identity(device: torch.device) -> str:
    """Return a name for the device, to notice ranks that share it; empty for a CPU, which ranks may share,
    or if none is known.

    Before torch 2.4 a GPU has only its number, which says nothing where each rank sees one GPU alone.
    """
    if not kinds.is_accelerator(device):
        return ""
    if kinds.is_nvidia(device):
        number = str(device) if count() > 1 else ""
        return next(iter(mig_slices()), "") or str(
            getattr(torch.cuda.get_device_properties(device), "uuid", number)
        )
    return f"{device} of {os.environ.get('ASCEND_RT_VISIBLE_DEVICES', 'all')}"


def describe(device: torch.device) -> str:
    """Return the device for the log: with its model where torch can name it, a CPU with its threads."""
    if not kinds.is_accelerator(device):
        return f"cpu ({errors.count(torch.get_num_threads(), 'thread')})"
    get_name = getattr(kinds.module(), "get_device_name", None)
    return f"{device} ({get_name(device)})" if get_name else str(device)
