"""Who is with me: what a job with several processes does besides training. Used by every job that runs on several.

group.add_options(parser)
group.start_workers(args)       # below this line there are world_size equal processes
group.join(args, device)        # they have found each other, and run the same thing
"""

import atexit
import ctypes
import datetime
import faulthandler
import gc
import hashlib
import json
import os
import signal
import socket
import sys

import torch
from torch import distributed

from common import network, pulse, world
from common.arguments import number
from common.channel import first_difference
from common.errors import UserError

TIMEOUT = datetime.timedelta(minutes=30)  # of a collective; the parents notice a dead peer within seconds
WORD_BYTES = 4096  # of what a rank says of itself when they compare

# Options that may differ from node to node.
OWN_OPTIONS = (
    "rank",
    "local_rank",
    "data_url",
    "output_dir",
    "output_url",
    "checkpoint_dir",
    "tensorboard_dir",
    "workers",
    "init_method",
)


def add_options(parser):
    group = parser.add_argument_group("several processes")
    group.add_argument(
        "--nproc_per_node", type=number(int, at_least=1), help="workers on this node; unset: one per GPU, one on CPU"
    )
    group.add_argument(
        "--max_restarts", type=number(int, at_least=0), default=0, help="restarts in place after a worker has died"
    )
    group.add_argument(
        "--join_seconds", type=number(float, above=0), default=900.0, help="how long the nodes wait for each other"
    )


def start_workers(args):
    """Where the platform started one process per node, become the parent of its workers; in a worker, do nothing."""
    if pulse.has_parent():
        _die_with_the_parent()
    if args.doctor:
        from common import doctor

        doctor.begin(args)
    here = world.here(args)
    if here.level == "process" or (here.world_size == 1 and not args.max_restarts):
        return
    from common.parent import Parent

    alike = {"code": code_digest(), "arguments": settings(args), "torch": str(torch.__version__)}
    if args.doctor:
        sys.exit(doctor.of_this_process().of_all_nodes(alike))
    sys.exit(Parent(here, args.max_restarts, args.join_seconds, alike).run())


def join(args, device):
    """Find the other processes and make sure that all run the same thing."""
    here = world.here(args)
    if here.level == "node" and here.world_size > 1:
        raise UserError(
            f"{here.world_size} processes were asked for but only this one runs: call group.start_workers(args) first"
        )
    backend, timeout, examination = "nccl" if device.type == "cuda" else "gloo", TIMEOUT, None
    if args.doctor:
        from common import doctor, trial

        examination, timeout = doctor.of_this_process(), datetime.timedelta(seconds=trial.HANG_SECONDS + 30)
        examination.meet()
    if here.level == "node":
        join.store = distributed.HashStore()
        distributed.init_process_group(backend, store=join.store, rank=0, world_size=1)
    else:
        os.environ.update({"MASTER_ADDR": here.master_addr, "MASTER_PORT": str(here.master_port)})
        os.environ.update(network.interfaces("127.0.0.1" if here.num_nodes == 1 else network.route_to(here.master_addr)))
        join.store, _, _ = next(distributed.rendezvous("env://", here.rank, here.world_size, timeout=timeout))
        distributed.init_process_group(backend, store=join.store, rank=here.rank, world_size=here.world_size, timeout=timeout)
    atexit.register(_leave)
    compare({"code": code_digest(), "arguments": settings(args), "torch": str(torch.__version__)})
    if examination:
        examination.joined(device)


def finished():
    """This rank has done what it had to do, and no Run says so: its parent would take the end of the process for a failure."""
    pulse.of_this_process().set("done", 0)


def store():
    """(the keys and values that all ranks share, rank, world size); the keys are None where there is one process."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None, 0, 1
    return join.store, distributed.get_rank(), distributed.get_world_size()


def _die_with_the_parent():
    """An orphan would train on into the folder of the next start, and hold its GPU and its port."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ[pulse.PARENT]):  # it was gone before we asked
        os._exit(1)
    faulthandler.register(signal.SIGUSR2, file=open(f"{os.environ[pulse.FILES]}.stack", "w"))  # noqa: SIM115


def _leave():
    """Collected first and in this order, or Gloo's threads abort the process at its end."""
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()


# --- Are we the same? --------------------------------------------------------------------------------------------------


def code_digest():
    """Of the job and every module of ours that it can use, so that a stale upload on one node is noticed."""
    job = os.path.abspath(sys.argv[0])
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = [job] + [
        os.path.join(root, folder, name) for folder in ("common", "datasets") for name in _sources(os.path.join(root, folder))
    ]
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(os.path.basename(path).encode() + file.read())
    return digest.hexdigest()[:16]


def _sources(folder):
    return sorted(name for name in os.listdir(folder) if name.endswith(".py")) if os.path.isdir(folder) else []


def settings(args):
    """The arguments that have to be alike on every rank, as text."""
    return " ".join(f"{name}={value}" for name, value in sorted(vars(args).items()) if name not in OWN_OPTIONS)


def compare(words):
    """Stop every rank, naming two offenders, unless all say the same."""
    mine = json.dumps({"host": socket.gethostname(), **{name: str(value)[:1000] for name, value in words.items()}}).encode()
    if distributed.get_world_size() == 1:
        return
    told = torch.zeros(WORD_BYTES, dtype=torch.uint8)
    told[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    everyone = [torch.zeros_like(told) for _ in range(distributed.get_world_size())]
    distributed.all_gather(everyone, told, group=control())
    said = [json.loads(bytes(tensor.numpy()).rstrip(b"\0")) for tensor in everyone]
    for name in words:
        for rank, other in enumerate(said):
            if other[name] != said[0][name]:
                ours, theirs = first_difference(said[0][name], other[name])
                raise UserError(
                    f"{name} differs: {ours} on rank 0 (host {said[0]['host']}), {theirs} on rank {rank} (host {other['host']})"
                )


# --- Talking on the CPU ------------------------------------------------------------------------------------------------


def control():
    """A Gloo group of all ranks, for what is not a gradient; the main one where that is Gloo."""
    if distributed.get_backend() == "gloo":
        return distributed.group.WORLD
    if not hasattr(control, "group"):
        control.group = distributed.new_group(backend="gloo", timeout=TIMEOUT)
    return control.group


def reduce(values, operation):
    """Element by element over all ranks: a list of float64 in, a list out."""
    tensor = torch.tensor(values, dtype=torch.float64)
    distributed.all_reduce(tensor, op=getattr(distributed.ReduceOp, operation), group=control())
    return tensor.tolist()


def broadcast(content):
    """Rank 0's bytes on every rank, verified; `content` counts on rank 0 only."""
    header = torch.zeros(32, dtype=torch.uint8)
    length = torch.zeros(1, dtype=torch.int64)
    if distributed.get_rank() == 0:
        length[0] = len(content)
        header[:] = torch.frombuffer(bytearray(hashlib.sha256(content).digest()), dtype=torch.uint8)
    distributed.broadcast(length, 0, group=control())
    distributed.broadcast(header, 0, group=control())
    body = torch.frombuffer(bytearray(content), dtype=torch.uint8) if distributed.get_rank() == 0 and len(content) else None
    if body is None:
        body = torch.zeros(int(length), dtype=torch.uint8)
    if len(body):
        distributed.broadcast(body, 0, group=control())
    received = body.numpy().tobytes()
    if hashlib.sha256(received).digest() != bytes(header[:].numpy()):
        raise RuntimeError("the bytes that rank 0 sent arrived changed")
    return received
