"""Start the workers of a node if the platform has not,
and form the process group of a job on several GPUs or nodes.

group.add_options(parser)
group.start_workers(args)       # below this line there are world_size equal processes
group.join(args, device)        # they form a process group, and run the same code with the same arguments
"""

import argparse
import atexit
import ctypes
import datetime
import functools
import gc
import hashlib
import importlib
import json
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from common import arguments, devices, moments
from common.alive import heartbeat
from common.errors import UserError
from common.moments import REPLACED
from common.ranks.collectives import GROUP, longest_timeout, require_equal, require_one_device_each
from common.world import World, naming

ROOT = Path(__file__).resolve().parents[2]
MAX_OPEN_FILES = (
    # that a rank may have open: a stranger's connection to Gloo takes one, and Gloo aborts where none is left
    65_536
)
FOLDERS = ("common", "datasets")  # what a job imports

# Options that may differ from node to node.
OWN_OPTIONS = (
    "rank", "local_rank", "data_url", "input_dir", "output_dir", "output_url", "checkpoint_dir",
    "tensorboard_dir", "workers", "init_method",
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --nproc_per_node, --max_restarts, --join_seconds and --min_nodes."""
    add = parser.add_argument_group("several processes").add_argument
    restarts = arguments.number(int, at_least=0)
    add(
        "--nproc_per_node",
        type=arguments.WORKERS,
        help="workers on this node; unset: one per GPU, one on CPU",
    )
    add("--max_restarts", type=restarts, default=0, help="restarts in place after a worker has died")
    add(
        "--join_seconds",
        type=arguments.POSITIVE,
        default=900.0,
        help="how long the nodes wait for each other",
    )
    elastic = (
        "nodes may be lost and join, and the others go on while there are this many; unset: all stop "
        "(docs/elastic.md)"
    )
    add("--min_nodes", type=arguments.WORKERS, help=elastic)


def start_workers(args: argparse.Namespace) -> None:
    """If the platform started one process per node, become the parent of its workers and exit with their
    code.

    Return in a worker, once it ends with its parent or has a watcher, and in a single rank without restarts.
    """
    if heartbeat.has_parent():
        _exit_with_parent()
    elif "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # torchrun's agent, which may be killed: then nobody would stop its ranks
        _signal_at_parent_exit(signal.SIGTERM)
    world = args.world
    moments.announce("workers", args)
    if world.level == "process":
        if world.world_size > 1 and not heartbeat.has_parent():
            from common.alive import watcher

            announce_killed = functools.partial(moments.announce, "killed", args)
            GROUP.watcher = watcher.start(world, announce_killed, says_why=args.doctor)
        return
    if world.world_size == 1 and not args.max_restarts:
        return
    devices.require_enough_devices(args)
    if warning := devices.idle_devices_warning(args):
        print(f"warning: node {world.node_rank}: {warning}", flush=True)
    from common.alive.parent import Parent
    from common.alive.supervisor import Supervisor

    supervisor = Supervisor(world, args.max_restarts, args.join_seconds, _common_facts(args))
    parent = REPLACED.parent(args, supervisor) if REPLACED.parent else Parent(supervisor)
    moments.announce("supervisor", supervisor)
    code = parent.run()
    verdict = supervisor.loop.verdict
    if verdict and world.node_rank == 0:
        moments.announce("killed", args, supervisor.loop.start_time, verdict["text"])
    moments.announce("supervised", supervisor, code)
    sys.exit(code)


def join(args: argparse.Namespace, device: torch.device) -> None:
    """Form the process group (if elastic, of this rank).

    UserError if ranks differ in code or common options or share a GPU.
    """
    from common.world import network

    world = args.world
    if world.level == "node" and world.world_size > 1:
        raise UserError(
            f"{world.world_size} processes were asked for but only this one runs: call "
            "group.start_workers(args) first"
        )
    moments.announce("meeting", args)
    seconds = REPLACED.collective_seconds or longest_timeout().total_seconds()
    # Imported after the group is formed, as by DistributedDataParallel, it keeps the group as a default
    # argument. Then Gloo's threads outlive destroy_process_group, and a thread that releases its last tensor
    # too late aborts the process.
    importlib.import_module("torch.distributed.nn.functional")
    backend = devices.collective_backend(device)
    timeout = datetime.timedelta(seconds=seconds)
    if world.num_nodes > 1:
        if problem := network.interface_error(os.environ, backend):
            raise UserError(problem)
        if (
            devices.is_nvidia(device)
            and world.local_rank == 0
            and (warning := network.adapter_warning(os.environ))
        ):
            print(f"warning: node {world.node_rank}: {warning}", flush=True)
    network.allow_open_files(MAX_OPEN_FILES)
    GROUP.members = REPLACED.members(args, device) if REPLACED.members else None
    if world.level == "node" or GROUP.members:  # alone, or elastic: then the ranks meet later
        GROUP.store = distributed.HashStore()
        distributed.init_process_group(backend, store=GROUP.store, rank=0, world_size=1)
    else:
        from common.ranks import store

        os.environ.update({"MASTER_ADDR": world.master_addr, "MASTER_PORT": str(world.master_port)})
        own_address = "127.0.0.1" if world.num_nodes == 1 else network.route_to(world.master_addr)
        os.environ.update(network.group_environment(own_address))
        job_store = store.open_store(world, args.join_seconds)
        if missing := store.meet(world, job_store, args.join_seconds):
            raise UserError(
                f"{naming.describe_ranks(missing)} did not come within {args.join_seconds:.0f} s "
                "(--join_seconds)"
            )
        _let_watchers_meet(world, job_store)
        job_store.set_timeout(timeout)
        distributed.init_process_group(
            backend, store=job_store, rank=world.rank, world_size=world.world_size, timeout=timeout
        )
    atexit.register(_destroy_process_group)
    require_equal(_common_facts(args))
    require_one_device_each(devices.identity(device))


def _let_watchers_meet(world: World, job_store: Any) -> None:
    """Connect the ranks' watchers, if there are any: rank 0 puts its watcher's port and a new secret into the
    ranks' store."""
    if GROUP.watcher is None:
        return
    hello = {
        "app": "anyrank",
        "job": world.job_id,
        "host": socket.gethostname(),
        "node": world.rank,
        "nodes": world.world_size,
        "workers": 1,
        "alike": {},
    }
    if world.rank == 0:
        key = secrets.token_hex(16)
        port = GROUP.watcher.listen(key, hello=hello)
        job_store.set("anyrank/watcher", json.dumps([key, port]))
        return
    key, port = json.loads(job_store.get("anyrank/watcher"))
    address = "127.0.0.1" if world.num_nodes == 1 else world.master_addr
    GROUP.watcher.join(key=key, address=address, port=port, hello=hello)


def finished() -> None:
    """Report success at the end of a job without a Run: its end would else be taken for a failure."""
    heartbeat.of_this_process().set("done", 0)


def _common_facts(args: argparse.Namespace) -> dict[str, str]:
    """Return what has to be the same on all ranks: the code's digest, common options, torch's version."""
    options = {
        name: value for name, value in arguments.plain_values(vars(args)).items() if name not in OWN_OPTIONS
    }
    settings = " ".join(f"{name}={value}" for name, value in sorted(options.items()))
    return {
        "code": code_digest(os.path.abspath(sys.argv[0])),
        "arguments": settings,
        "torch": str(torch.__version__),
    }


def code_digest(job: str, root: Path = ROOT) -> str:
    """Return a digest of the job and of our modules below `root` with their paths,
    so that a node with old code is noticed.

    A bundled job holds its modules, and the cells of a notebook are in no file."""
    files = {os.path.basename(job): Path(job)} if os.path.isfile(job) else {}
    for folder in FOLDERS:
        paths = [path for path in (root / folder).rglob("*.py") if path.parent.name != "__pycache__"]
        files.update({path.relative_to(root).as_posix(): path for path in paths})
    digest = hashlib.sha256()
    for name in sorted(files):  # not in the order of the operating system
        content = files[name].read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _exit_with_parent():
    """On Linux, let this worker die with its parent, or it would write to the next start's folder and keep
    the GPU and port."""
    if sys.platform == "linux":
        _signal_at_parent_exit(signal.SIGKILL)
    if os.getppid() != int(os.environ[heartbeat.PARENT]):  # the parent had ended before that call
        os._exit(1)
    heartbeat.write_stacks()


def _signal_at_parent_exit(signal_number: int) -> None:
    ctypes.CDLL(None).prctl(1, int(signal_number))  # PR_SET_PDEATHSIG


def _destroy_process_group():
    """Destroy the process group.

    Garbage is collected first, or Gloo's threads would abort the process at its end.
    """
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()
