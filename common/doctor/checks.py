"""The doctor's checks of a node. Each returns a Finding: how bad it is, what was found, what to do."""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Optional

from common import devices
from common.alive.wire import secret
from common.devices import diagnosis
from common.doctor.table import Finding, bad, doubtful, good, size
from common.errors import count
from common.files import MIB
from common.machine import cores, drivers
from common.world import World, network

CLOCK_DOUBTFUL = 2  # seconds
CLOCK_BAD = 300  # seconds; stores refuse signatures that are 15 minutes off, some sooner
GPU_BUSY_MIB = 1024  # with more in use, a GPU is busy; a rank that has just started uses half of it
NCCL_SHM = 32 * MIB  # bytes of /dev/shm that NCCL may take for each rank
TOOLS = {"GPU": "nvidia-smi and CUDA_VISIBLE_DEVICES", "NPU": "npu-smi info and ASCEND_RT_VISIBLE_DEVICES"}


# --- The node -----------------------------------------------------------------------------------------------------------


def check_place(here: World) -> Finding:
    rule, _, advice = here.rule.partition("; ")
    nodes = count(here.num_nodes, "node")
    ranks = count(here.local_world_size, "rank")
    found = f"{here.platform} ({rule}): {nodes} of {ranks}"
    return doubtful("place", found, advice) if advice else good("place", found)


def check_gpus(enable_gpu: Optional[bool], here: World, in_use: list[tuple]) -> Finding:
    """Check that torch sees a device for each rank, unless the CPU is to compute. `in_use`: [(number, MiB, percent busy)]."""
    seen = devices.count()
    noun = devices.noun()
    if enable_gpu is False:
        return good("gpus", f"--enable_gpu false: the CPU computes, with {count(cores.count(), 'core')}")
    if not seen and (enable_gpu or here.gpus_promised):
        why, _, do = diagnosis.diagnosis().partition("; ")
        return bad("gpus", f"torch sees none: {why}", f"{do}; or --enable_gpu false trains on the CPU")
    if not seen:
        return good("gpus", f"this node has none: the CPU computes, with {count(cores.count(), 'core')}")
    tool = TOOLS.get(noun, "the driver's own tool")
    if seen < here.gpus_promised and not here.owns_the_only(seen):
        found = f"torch sees {seen}, {here.platform} says that this node has {here.gpus_promised}"
        return bad("gpus", found, f"look at {tool}; a {noun} may be broken or hidden: ask for another node")
    if here.local_world_size > seen and not here.owns_the_only(seen):
        return bad("gpus", f"{here.local_world_size} ranks on a node with {count(seen, noun)}", "lower --nproc_per_node")
    busy = [f"{noun} {name} has {used} MiB in use and is {percent} % busy" for name, used, percent in in_use
            if used > GPU_BUSY_MIB]  # fmt: skip
    if busy:
        return doubtful("gpus", "; ".join(busy), f"end the other program ({tool} shows it), or ask for another node")
    return good("gpus", f"torch sees {count(seen, noun)}" + (", no other program uses them" if in_use else ""))


def cards() -> list[tuple]:
    """Return [(number, MiB in use, percent busy)] of this process's devices; empty if nvidia-smi fails. NPUs count as idle."""
    if devices.is_ascend():  # no figure says how busy an NPU is
        return [(number, used // MIB, 0) for number, used in devices.memory_in_use()]
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_cards(done.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_cards(text: str, visible: Optional[str]) -> list[tuple]:
    """Return [(number, MiB in use, percent busy)] from nvidia-smi's output. `visible`: CUDA_VISIBLE_DEVICES; None for all."""
    gpus = []
    for line in text.splitlines():
        number, uuid, *use = (word.strip() for word in line.split(","))
        mine = visible is None or any(name == number or (name and uuid.startswith(name)) for name in visible.split(","))
        if mine and len(use) == 2:
            gpus.append((int(number), *(int(word) if word.isdigit() else 0 for word in use)))
    return gpus


def check_driver(enable_gpu: Optional[bool]) -> Finding:
    present = drivers.npus() if devices.is_ascend() else drivers.nvidia() is not None and drivers.gpus()
    if enable_gpu is False or not (present or devices.available()):
        return good("driver", "no GPU or NPU is needed, or this node has none")
    if devices.available() and not (wrong := diagnosis.versions_apart()):
        return good("driver", f"{drivers.nvidia() or drivers.ascend() or 'unknown'}, and {diagnosis.build()}")
    elif devices.available():
        found, _, do = wrong.partition("; ")
        return doubtful("driver", found, do)
    why, _, do = diagnosis.diagnosis().partition("; ")
    found = f"there is {'an NPU' if devices.is_ascend() else 'a GPU'} that torch cannot use: {why}"
    return bad("driver", found, f"{do}; or --enable_gpu false trains on the CPU")


def check_secret(given: bool, port: int) -> Finding:
    """Check whether the nodes have a common secret, without which strangers can join the job (docs/security.md)."""
    if given:
        return good("secret", "the nodes prove to each other that they belong to this job")
    do = f"set {secret.VARIABLE} or {secret.FILE} on every node, or let only the job's nodes reach that port"
    return doubtful("secret", f"the nodes have none in common: anybody who reaches port {port} can join", do)


def check_interface(here: World, environ: Mapping[str, str]) -> Finding:
    for backend in devices.BACKENDS:
        if wrong := network.not_here(environ, backend):
            found, _, do = wrong.partition("; ")
            return bad("interface", found, do)
    if here.num_nodes > 1 and devices.available() and (slow := network.no_adapter(environ)):
        found, _, do = slow.partition("; ")
        return doubtful("interface", found, do)
    if devices.is_ascend() and devices.available() and (taken := network.taken_ports(environ)):
        found, _, do = taken.partition("; ")
        return bad("interface", found, do)
    variable = f"{devices.backend().upper()}_SOCKET_IFNAME"
    if environ.get(variable):
        return good("interface", f"{environ[variable]}, by {variable}")
    if here.num_nodes == 1 or re.match(r"(127\.|::1$|localhost$)", here.master_addr):
        return good("interface", "lo: all ranks are on this machine")
    own = None
    with contextlib.suppress(OSError):  # the master's name may not resolve yet
        own = network.route_to(here.master_addr)
    name = network.interface_of(own)
    if name == "lo" and here.level == "process":
        found = f"the master's name, {here.master_addr}, is lo ({own}) on this node, which no other node can reach"
        return bad("interface", found, "set MASTER_ADDR to an address that the other nodes can reach, or correct /etc/hosts")
    known = name not in (None, "lo")  # otherwise the parent processes take that of the connection through which they met
    return good("interface", f"{name} ({own})" if known else "chosen when the nodes have met")


def check_clock(ahead: float, other: str) -> Finding:
    """Check a node's clock, which is `ahead` seconds ahead of the clock of `other`, or behind it if negative."""
    found = f"{abs(ahead):,.1f} s {'ahead of' if ahead > 0 else 'behind'} {other}"
    do = "set this node's clock (chrony, ntp), or ask for another node"
    if abs(ahead) > CLOCK_BAD:
        return bad("clock", found, f"{do}: stores and web servers refuse it")
    if abs(ahead) > CLOCK_DOUBTFUL:
        return doubtful("clock", found, f"{do}: the times in the logs cannot be compared")
    return good("clock", f"agrees with {other}")


def nccl_shm_bytes(args: argparse.Namespace) -> int:
    """Return the bytes of /dev/shm that NCCL may need on this node. Loaders' batches are not counted: they can use pipes."""
    ranks = args.world.local_world_size
    gpus = args.enable_gpu is not False and devices.available()
    return ranks * NCCL_SHM if gpus and ranks > 1 and not devices.is_ascend() else 0


def check_shm(need: int, folder: str = "/dev/shm") -> Finding:
    if not need:
        return good("shm", "nothing needs any")
    free = shutil.disk_usage(folder).free if os.path.isdir(folder) else 0
    found = f"{folder} has {size(free)} free, NCCL may need {size(need)}"
    if need > free:
        return doubtful("shm", found, "start the container with more (--shm-size, a memory volume at /dev/shm)")
    return good("shm", found)
