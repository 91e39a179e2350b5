"""--gpu_affinity: each rank on the cores near its GPU, as the driver knows them, in the modes of NVIDIA's scripts.

socket                    all cores of the GPU's socket
socket_single             one core of them
socket_single_unique      one core of them, which no other rank has
socket_unique_continuous  a part of them, neighbouring cores, which no other rank has
socket_unique_interleaved a part of them, every n-th core, which no other rank has
"""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import torch

from common import drivers
from common.devices import kinds
from common.errors import UserError

MODES = [
    "none", "socket", "socket_single", "socket_single_unique", "socket_unique_continuous", "socket_unique_interleaved",
]  # fmt: skip
TOPOLOGY = Path("/sys/devices/system/cpu")


def bind(args: argparse.Namespace, device: torch.device) -> Optional[str]:
    """Bind this process, and so its loader processes; returns a sentence for the log."""
    if args.gpu_affinity == "none":
        return None
    if not kinds.is_nvidia(device):
        raise UserError("--gpu_affinity binds ranks to the cores near their GPUs, and this process has no GPU of NVIDIA's")
    near = [_near(number) for number in range(kinds.count())]
    if "unique" in args.gpu_affinity and len(near) < args.world.local_world_size:
        raise UserError(
            f"--gpu_affinity {args.gpu_affinity}: each of {args.world.local_world_size} ranks sees {len(near)} GPUs, so no "
            "rank knows which cores are the others': take socket"
        )
    place = device.index if len(near) > 1 else 0
    cores = share(args.gpu_affinity, [_whole(cores) for cores in near], place)
    os.sched_setaffinity(0, {core for whole in cores for core in whole})
    return f"rank {args.world.rank} runs on {len(cores)} cores near its GPU (--gpu_affinity {args.gpu_affinity})"


def share(mode: str, near: Sequence[Sequence[tuple[int, ...]]], place: int) -> Sequence[tuple[int, ...]]:
    """The cores of the GPU `place`; `near`: those of each GPU. A core is the tuple of its threads."""
    own = near[place]
    beside = [number for number, cores in enumerate(near) if cores == own]  # the GPUs of the same socket
    position, count = beside.index(place), len(beside)
    if mode.endswith(("unique", "continuous", "interleaved")) and len(own) < count:
        raise UserError(f"--gpu_affinity {mode}: {count} GPUs share {len(own)} cores, so take socket")
    if mode == "socket":
        return own
    if mode == "socket_single":
        return own[:1]
    if mode == "socket_single_unique":
        return own[position : position + 1]
    if mode == "socket_unique_interleaved":
        return own[position::count]
    return own[position * len(own) // count : (position + 1) * len(own) // count]


def _near(number):
    """The logical cores near this GPU that this process may use; all of those where the driver does not know."""
    allowed = os.sched_getaffinity(0)
    name = f"GPU-{torch.cuda.get_device_properties(number).uuid}"
    return sorted(allowed & drivers.cores_near(name) or allowed)


def _whole(logical):
    """The cores whose threads these are, each with the threads that are among them."""
    cores = {}
    for thread in logical:
        file = TOPOLOGY / f"cpu{thread}" / "topology" / "thread_siblings_list"
        siblings = file.read_text().strip() if file.exists() else str(thread)
        cores.setdefault(re.sub(r"\D.*", "", siblings), []).append(thread)
    return [tuple(threads) for threads in cores.values()]
