"""What ruins runs, a function for each, of the machine and the job: it says what it found, how bad that is and what to do."""

import contextlib
import glob
import os
import re
import shutil
import socket
import subprocess
import time

import torch

from common import cores, devices
from common.doctor.table import bad, count, doubtful, duration, good, size
from common.files import MIB
from common.processes import network
from common.run import STARVED

CLOCK_DOUBTFUL, CLOCK_BAD = 2, 300  # seconds; stores refuse signatures that are 15 minutes off, some sooner
GPU_IDLE_MIB = 1024  # a rank that has just started takes half of it
NCCL_SHM = 32 * MIB  # of /dev/shm that NCCL may take for each rank
PREFETCHED = 2  # batches that torch's loader keeps ready for each of its processes
LEFT_OUT = 0.1  # share of the samples that may fill no batch
EXCHANGE = 0.5  # share of a step that exchanging the gradients may take


# --- The node -----------------------------------------------------------------------------------------------------------


def check_place(here):
    rule, _, advice = here.rule.partition("; ")
    nodes, ranks = count(here.num_nodes, "node"), count(here.local_world_size, "rank")
    found = f"{here.platform} ({rule}): {nodes} of {ranks}"
    return doubtful("place", found, advice) if advice else good("place", found)


def check_gpus(enable_gpu, here, in_use):
    """`in_use`: what cards() says."""
    gpus = torch.cuda.device_count()
    if enable_gpu is False:
        return good("gpus", f"--enable_gpu false: the CPU computes, with {count(cores.count(), 'core')}")
    if not gpus and (enable_gpu or here.gpus_promised):
        why, _, do = devices.diagnosis().partition("; ")
        return bad("gpus", f"torch sees none: {why}", f"{do}; or --enable_gpu false trains on the CPU")
    if not gpus:
        return good("gpus", f"there is none: the CPU computes, with {count(cores.count(), 'core')}")
    if gpus < here.gpus_promised and not devices.shown_its_own(here):
        found = f"torch sees {gpus}, {here.platform} says that this node has {here.gpus_promised}"
        return bad("gpus", found, "look at CUDA_VISIBLE_DEVICES and nvidia-smi; a GPU may be broken: ask for another node")
    if here.local_world_size > gpus and not devices.shown_its_own(here):
        return bad("gpus", f"{here.local_world_size} ranks on a node with {count(gpus, 'GPU')}", "lower --nproc_per_node")
    busy = [f"GPU {name} has {used} MiB in use and is {percent} % busy" for name, used, percent in in_use
            if used > GPU_IDLE_MIB]  # fmt: skip
    if busy:
        return doubtful("gpus", "; ".join(busy), "end the other program (nvidia-smi shows it), or ask for another node")
    return good("gpus", f"torch sees {gpus}" + (", nobody else uses them" if in_use else ""))


def cards():
    """[(number, MiB in use, percent of the time busy)] of the GPUs that this process may use, as the driver's own tool says."""
    words = ["nvidia-smi", "--query-gpu=index,uuid,memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_cards(done.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_cards(text, visible):
    """`visible`: numbers or the beginnings of UUIDs; None for all."""
    found = []
    for line in text.splitlines():
        number, uuid, *use = (word.strip() for word in line.split(","))
        mine = visible is None or any(name == number or (name and uuid.startswith(name)) for name in visible.split(","))
        if mine and len(use) == 2:
            found.append((int(number), *(int(word) if word.isdigit() else 0 for word in use)))
    return found


def check_driver(enable_gpu):
    driver = devices.driver()
    if driver is None or enable_gpu is False or not glob.glob("/dev/nvidia[0-9]*"):
        return good("driver", "no GPU of NVIDIA's is needed or given to this node")
    if torch.cuda.is_available():
        return good("driver", f"{driver}, and torch {torch.__version__} was built for CUDA {torch.version.cuda}")
    why, _, do = devices.diagnosis().partition("; ")
    return bad("driver", f"there is a GPU that torch cannot use: {why}", f"{do}; or --enable_gpu false trains on the CPU")


def check_interface(here, environ):
    """Which one Gloo or NCCL will talk over."""
    names = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = environ.get(variable)
        if wanted and not any(_means(wanted, name, variable) for name in names):
            return bad("interface", f"{variable} is {wanted}, this node has {', '.join(names)}", f"unset {variable}")
        if wanted and variable.startswith("NCCL" if torch.cuda.is_available() else "GLOO"):
            return good("interface", f"{wanted}, by {variable}")
    if here.num_nodes == 1 or re.match(r"(127\.|::1$|localhost$)", here.master_addr):
        return good("interface", "lo: all ranks are on this machine")
    own = None
    with contextlib.suppress(OSError):  # its name may not be known yet
        own = network.route_to(here.master_addr)
    name = network.interface_of(own)
    if name == "lo" and here.level == "process":
        found = f"the master's name, {here.master_addr}, means lo ({own}) on this node, where no other node reaches it"
        return bad("interface", found, "set MASTER_ADDR to the address that the other nodes know, or correct /etc/hosts")
    known = name not in (None, "lo")  # the parents tell their ranks by which address they were reached
    return good("interface", f"{name} ({own})" if known else "chosen when the nodes have met")


def _means(wanted, name, variable):
    """NCCL takes the beginnings of names, =NAME for a whole one and ^NAME for all others; Gloo takes names."""
    listed = wanted.lstrip("^=").split(",")
    if variable.startswith("GLOO"):
        return name in wanted.split(",")
    return (name in listed if "=" in wanted[:2] else name.startswith(tuple(listed))) != wanted.startswith("^")


def check_clock(ahead, other):
    """`ahead`: by how many seconds this node's clock is ahead of that of `other`."""
    found = f"{abs(ahead):,.1f} s {'ahead of' if ahead > 0 else 'behind'} {other}"
    do = "set this node's clock (chrony, ntp), or ask for another node"
    if abs(ahead) > CLOCK_BAD:
        return bad("clock", found, f"{do}: stores and web servers refuse it")
    if abs(ahead) > CLOCK_DOUBTFUL:
        return doubtful("clock", found, f"{do}: the times in the logs do not fit together")
    return good("clock", f"agrees with {other}")


def shared_memory(args):
    """What the ranks of this node need in /dev/shm: (bytes for batches, of whom, bytes that NCCL may want beside them)"""
    ranks, gpus = args.world.local_world_size, args.enable_gpu is not False and torch.cuda.is_available()
    nccl = ranks * NCCL_SHM if gpus and ranks > 1 else 0
    if not args.input.shared_bytes:
        return 0, "", nccl
    workers = devices.loader_workers(args)
    users = f"{count(ranks * workers, 'loader process', 'loader processes')} with batches of {args.input.samples}"
    return ranks * (PREFETCHED * workers + 1) * args.input.shared_bytes, users, nccl


def check_shm(need, users, nccl, folder="/dev/shm"):
    if not need and not nccl:
        return good("shm", "no loader process needs any")
    free = shutil.disk_usage(folder).free if os.path.isdir(folder) else 0
    found = f"{folder} has {size(free)} free" + (f", {users} need {size(need)}" if need else "")
    do = "start the container with more (--shm-size, a memory volume at /dev/shm)"
    if need > free:
        return bad("shm", f"{found}: they would die of it, or hang", f"{do}, or lower --workers")
    if need + nccl > free:
        return doubtful("shm", f"{found}, NCCL may want {size(nccl)}", do)
    return good("shm", found)


# --- The job itself -----------------------------------------------------------------------------------------------------


def check_batches(samples, global_batch, ranks, epochs):
    """An epoch without a step is refused by the sampler itself."""
    steps, left = divmod(samples, global_batch)
    found = f"{count(steps, 'step')} of {global_batch} samples ({count(ranks, 'rank')}) in each of {count(epochs, 'epoch')}"
    if left > LEFT_OUT * samples:
        do = "lower --batch_size, or choose one that divides the samples better"
        return doubtful("batches", f"{found}, which leaves out {left} of {samples} ({left / samples:.0%})", do)
    return good("batches", found + (f"; {left} of {samples} are left out" if left else "; none is left out"))


def check_loader(remedies, load_seconds, step_seconds, samples, beside):
    """The seconds that a batch of so many takes to load and to train on; `beside`: the one goes on while the other does."""
    found = f"{samples / load_seconds:,.0f} images/s, the model takes {samples / step_seconds:,.0f} (each rank)"
    waiting = max(0, load_seconds - step_seconds) / load_seconds if beside else load_seconds / (load_seconds + step_seconds)
    if waiting < STARVED:
        return good("loader", found)
    do = "; or ".join(remedies) or "more cores for each rank"
    return doubtful("loader", f"{found}, and would wait for data {waiting:.0%} of the time", do)


def check_network(rate, gradients, step_seconds, ranks):
    """`rate`: bytes a second of an all-reduce; `gradients`: bytes of them, None where there is no model yet."""
    found = f"{rate / MIB:,.1f} MiB/s in an all-reduce of all ranks"
    if gradients is None:
        return good("network", found)
    exchange = 2 * (ranks - 1) / ranks * gradients / rate
    found += f"; {size(gradients)} of gradients take {1000 * exchange:.3g} ms of a step of {1000 * step_seconds:.3g} ms"
    if exchange < EXCHANGE * step_seconds:
        return good("network", found)
    do = "look at the interface, ask for nodes with a faster network, or raise --batch_size"
    return doubtful("network", found, do)


def check_time(seconds, limit):
    """`limit`: (seconds left, by what), or None where none is known."""
    found = f"about {duration(seconds)} of training"
    if limit and seconds > limit[0]:
        do = "start it again when it has ended, it goes on; or ask for more time, more GPUs"
        return doubtful("time", f"{found}, {duration(max(0, limit[0]))} left ({limit[1]})", do)
    left = f"{duration(limit[0])} left ({limit[1]})" if limit else "no limit is known"
    return good("time", f"{found}, {left}")


def time_limit(args, environ):
    """The nearest end that somebody has set."""
    limits = []
    if args.max_hours is not None:
        limits.append((args.max_hours * 3600, f"--max_hours {args.max_hours:g}"))
    if environ.get("SLURM_JOB_END_TIME", "").isdigit():
        limits.append((int(environ["SLURM_JOB_END_TIME"]) - time.time(), "SLURM_JOB_END_TIME"))
    return min(limits, default=None)
