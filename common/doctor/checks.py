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
from common.doctor.table import Finding, bad, doubtful, format_size, good
from common.errors import count
from common.files import MIB
from common.machine import cores, drivers
from common.world import World, network

CLOCK_DOUBTFUL = 2  # seconds
CLOCK_BAD = 300  # seconds; stores refuse signatures that are 15 minutes off, some sooner
GPU_BUSY_MIB = 1024  # with more in use, a GPU is busy; a rank that has just started uses half of it
NCCL_SHM = 32 * MIB  # bytes of /dev/shm that NCCL may take for each rank
TOOLS = {"GPU": "nvidia-smi and CUDA_VISIBLE_DEVICES", "NPU": "npu-smi info and ASCEND_RT_VISIBLE_DEVICES"}


# --- The node -----------------------------------------------------------------------------------------------


def check_place(world: World) -> Finding:
    """Report the platform and the rule by which this process found its place among the nodes."""
    rule, _, advice = world.rule.partition("; ")
    nodes = count(world.num_nodes, "node")
    ranks = count(world.local_world_size, "rank")
    result = f"{world.platform} ({rule}): {nodes} of {ranks}"
    return doubtful("place", result, advice) if advice else good("place", result)


def check_gpus(enable_gpu: Optional[bool], world: World, in_use: list[tuple]) -> Finding:
    """Check that torch sees a device for each rank, unless the CPU is to compute.

    `in_use`: [(number, MiB, percent busy)].
    """
    num_devices = devices.count()
    noun = devices.noun()
    if enable_gpu is False:
        return good("gpus", f"--enable_gpu false: the CPU computes, with {count(cores.count(), 'core')}")
    if not num_devices and (enable_gpu or world.gpus_promised):
        reason, _, remedy = diagnosis.diagnosis().partition("; ")
        return bad("gpus", f"torch sees none: {reason}", f"{remedy}; or --enable_gpu false trains on the CPU")
    if not num_devices:
        return good("gpus", f"this node has none: the CPU computes, with {count(cores.count(), 'core')}")
    tool = TOOLS.get(noun, "the driver's own tool")
    if num_devices < world.gpus_promised and not world.owns_only_gpu(num_devices):
        result = f"torch sees {num_devices}, {world.platform} says that this node has {world.gpus_promised}"
        return bad("gpus", result, f"look at {tool}; a {noun} may be broken or hidden: ask for another node")
    if world.local_world_size > num_devices and not world.owns_only_gpu(num_devices):
        return bad(
            "gpus",
            f"{world.local_world_size} ranks on a node with {count(num_devices, noun)}",
            "lower --nproc_per_node",
        )
    busy = [f"{noun} {name} has {used} MiB in use and is {percent} % busy" for name, used, percent in in_use
            if used > GPU_BUSY_MIB]  # fmt: skip
    if busy:
        return doubtful(
            "gpus", "; ".join(busy), f"end the other program ({tool} shows it), or ask for another node"
        )
    result = f"torch sees {count(num_devices, noun)}"
    if in_use:
        result += ", no other program uses them"
    return good("gpus", result)


def gpu_usage() -> list[tuple]:
    """Return [(number, MiB in use, percent busy)] of this process's devices; empty if nvidia-smi fails.

    NPUs count as idle.
    """
    if devices.is_ascend():  # no figure says how busy an NPU is
        return [(number, used // MIB, 0) for number, used in devices.memory_in_use()]
    command = [
        "nvidia-smi",
        "--query-gpu=index,uuid,memory.used,utilization.gpu",
        "--format=csv,noheader,nounits",
    ]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpu_usage(process.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpu_usage(text: str, visible: Optional[str]) -> list[tuple]:
    """Return [(number, MiB in use, percent busy)] from nvidia-smi's output.

    `visible`: CUDA_VISIBLE_DEVICES; None for all.
    """
    gpus = []
    for line in text.splitlines():
        number, uuid, *usage = (word.strip() for word in line.split(","))
        is_visible = visible is None or any(
            name == number or (name and uuid.startswith(name)) for name in visible.split(",")
        )
        if is_visible and len(usage) == 2:
            gpus.append((int(number), *(int(word) if word.isdigit() else 0 for word in usage)))
    return gpus


def check_driver(enable_gpu: Optional[bool]) -> Finding:
    """Check that torch can use the GPUs or NPUs of this node with the driver that is installed."""
    if devices.is_ascend():
        noun = "an NPU"
        is_present = drivers.npus() > 0
    else:
        noun = "a GPU"
        is_present = drivers.nvidia() is not None and drivers.gpus() > 0
    if enable_gpu is False or not (is_present or devices.available()):
        return good("driver", "no GPU or NPU is needed, or this node has none")
    if devices.available():
        if mismatch := diagnosis.installed_mismatch():
            result, _, remedy = mismatch.partition("; ")
            return doubtful("driver", result, remedy)
        return good(
            "driver", f"{drivers.nvidia() or drivers.ascend() or 'unknown'}, and {diagnosis.describe_build()}"
        )
    reason, _, remedy = diagnosis.diagnosis().partition("; ")
    result = f"there is {noun} that torch cannot use: {reason}"
    return bad("driver", result, f"{remedy}; or --enable_gpu false trains on the CPU")


def check_secret(has_secret: bool, port: int) -> Finding:
    """Check whether the nodes have a common secret, without which strangers can join the job
    (docs/security.md)."""
    if has_secret:
        return good("secret", "the nodes prove to each other that they belong to this job")
    remedy = (
        f"set {secret.VARIABLE} or {secret.FILE} on every node, or let only the job's nodes reach that port"
    )
    return doubtful(
        "secret", f"the nodes have none in common: anybody who reaches port {port} can join", remedy
    )


def check_interface(world: World, environ: Mapping[str, str]) -> Finding:
    """Check the environment's settings of the network interface, of the InfiniBand adapter and of HCCL's
    ports; without any, find the interface that leads to the master."""
    problem = _problem_of_network_settings(world, environ)
    if problem:
        return problem
    variable = f"{devices.backend().upper()}_SOCKET_IFNAME"
    if environ.get(variable):
        return good("interface", f"{environ[variable]}, by {variable}")
    if world.num_nodes == 1 or re.match(r"(127\.|::1$|localhost$)", world.master_addr):
        return good("interface", "lo: all ranks are on this machine")
    address = None
    with contextlib.suppress(OSError):  # the master's name may not resolve yet
        address = network.route_to(world.master_addr)
    name = network.interface_of(address)
    # Where the platform starts each process, no parent finds another interface when the nodes meet.
    if name == "lo" and world.level == "process":
        result = (
            f"the master's name, {world.master_addr}, is lo ({address}) on this node, which no other node "
            "can reach"
        )
        return bad(
            "interface",
            result,
            "set MASTER_ADDR to an address that the other nodes can reach, or correct /etc/hosts",
        )
    if name in (None, "lo"):  # the parents then take that of the connection through which they met
        return good("interface", "chosen when the nodes have met")
    return good("interface", f"{name} ({address})")


def _problem_of_network_settings(world: World, environ: Mapping[str, str]) -> Optional[Finding]:
    texts = [(bad, network.interface_error(environ, backend)) for backend in devices.BACKENDS]
    if world.num_nodes > 1 and devices.available():
        texts.append((doubtful, network.adapter_warning(environ)))
    if devices.is_ascend() and devices.available():
        texts.append((bad, network.port_error(environ)))
    for finding_of, text in texts:
        if text:
            result, _, remedy = text.partition("; ")
            return finding_of("interface", result, remedy)
    return None


def check_clock(ahead: float, reference: str) -> Finding:
    """Check a node's clock, which is `ahead` seconds ahead of that of `reference`, or behind if negative."""
    result = f"{abs(ahead):,.1f} s {'ahead of' if ahead > 0 else 'behind'} {reference}"
    remedy = "set this node's clock (chrony, ntp), or ask for another node"
    if abs(ahead) > CLOCK_BAD:
        return bad("clock", result, f"{remedy}: stores and web servers refuse it")
    if abs(ahead) > CLOCK_DOUBTFUL:
        return doubtful("clock", result, f"{remedy}: the times in the logs cannot be compared")
    return good("clock", f"agrees with {reference}")


def nccl_shm_bytes(args: argparse.Namespace) -> int:
    """Return the bytes of /dev/shm that NCCL may need on this node.

    Loaders' batches are not counted: they can use pipes.
    """
    ranks = args.world.local_world_size
    uses_gpus = args.enable_gpu is not False and devices.available()
    return ranks * NCCL_SHM if uses_gpus and ranks > 1 and not devices.is_ascend() else 0


def check_shm(need: int, folder: str = "/dev/shm") -> Finding:
    """Check that /dev/shm has room for `need` bytes."""
    if not need:
        return good("shm", "nothing needs any")
    free = shutil.disk_usage(folder).free if os.path.isdir(folder) else 0
    result = f"{folder} has {format_size(free)} free, NCCL may need {format_size(need)}"
    if need > free:
        return doubtful(
            "shm", result, "start the container with more (--shm-size, a memory volume at /dev/shm)"
        )
    return good("shm", result)
