"""Imitate a training platform on this machine: each node is one process with the arguments and variables of
the platform.

    python -m launch local --nodes 2 --procs 2 jobs/train_ddp.py -- --custom_data true
    python -m launch local --nodes 2 --platform pai-dlc jobs/train_ddp.py -- --custom_data true
    python -m launch local --nodes 2 --procs 2 --accelerator npu jobs/train_ddp.py -- --custom_data true \\
        --enable_gpu false
    python -m launch local --nodes 2 --kill 1@8 --restarts 1 jobs/train_ddp.py -- --custom_data true
    python -m launch local --nodes 2 --lose 1@20 --return 1@30 jobs/train_ddp_exact.py -- \\
        --custom_data true --min_nodes 1

The fourth command kills node 1 after 8 seconds and then starts the whole job again, as a platform would. In
the last one the other node goes on, and only node 1 is started again. Ctrl-C and SIGTERM reach every node, as
a platform's stop does. Every line of output begins with its node.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import IO, Callable, NamedTuple

from common import arguments
from common.errors import count
from common.machine import cores, drivers
from launch.options import missing_job, new_parser, split_words

HOST = "127.0.0.1"
# by which each node gets a part of the devices
VISIBLE = {"gpu": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
Injected = tuple[list[str], dict[str, str]]  # the arguments and variables that a platform gives a node


def modelarts(node: int, nodes: int, port: int) -> Injected:
    """Return what ModelArts gives a node if the job runs on one of its own engines."""
    return ["--init_method", f"tcp://{HOST}:{port}", "--rank", str(node), "--world_size", str(nodes)], {}


def modelarts_image(node: int, nodes: int, port: int) -> Injected:
    """Return what ModelArts gives a node if the job runs on an image of the user's."""
    hosts = ",".join([HOST] * nodes)
    return [], {
        "MA_NUM_HOSTS": str(nodes),
        "VC_TASK_INDEX": str(node),
        "VC_WORKER_HOSTS": hosts,
        "MASTER_PORT": str(port),
    }


def pai_dlc(node: int, nodes: int, port: int) -> Injected:
    return [], {"RANK": str(node), "WORLD_SIZE": str(nodes), "MASTER_ADDR": HOST, "MASTER_PORT": str(port)}


def kubeflow(node: int, nodes: int, port: int) -> Injected:
    return [], {
        "PET_NNODES": str(nodes),
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": HOST,
        "PET_MASTER_PORT": str(port),
    }


def kubernetes(node: int, nodes: int, port: int) -> Injected:
    """Return what a pod of an indexed Job has, with the variables that launch submit adds."""
    master = {"MASTER_ADDR": HOST, "MASTER_PORT": str(port)}
    return [], {"JOB_COMPLETION_INDEX": str(node), "WORLD_SIZE": str(nodes), **master}


def volcengine(node: int, nodes: int, port: int) -> Injected:
    node_variables = {"MLP_ROLE_INDEX": str(node), "MLP_WORKER_NUM": str(nodes)}
    return [], {**node_variables, "MLP_WORKER_0_HOST": HOST, "MLP_WORKER_0_PORT": str(port)}


def sagemaker(node: int, nodes: int, port: int) -> Injected:
    hosts = [f"algo-{number + 1}" for number in range(nodes)]
    node_variables = {"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": hosts[node]}
    return [], {**node_variables, "SM_MASTER_ADDR": HOST, "SM_MASTER_PORT": str(port)}


def vertex(node: int, nodes: int, port: int) -> Injected:
    cluster = {"workerpool0": [f"{HOST}:{port}"], "workerpool1": [f"{HOST}:{port}"] * (nodes - 1)}
    task = {"type": "workerpool1" if node else "workerpool0", "index": max(0, node - 1)}
    return [], {"CLUSTER_SPEC": json.dumps({"cluster": cluster, "task": task})}


def slurm(node: int, nodes: int, port: int) -> Injected:
    node_variables = {
        "SLURM_JOB_ID": "1",
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node),
        "SLURM_LOCALID": "0",
    }
    step_variables = {
        "SLURM_STEP_NUM_TASKS": str(nodes),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": HOST,
    }
    return [], {
        **node_variables,
        **step_variables,
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{nodes})",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
    }


PLATFORMS: dict[str, Callable[[int, int, int], Injected]] = {
    "modelarts": modelarts, "modelarts-image": modelarts_image, "pai-dlc": pai_dlc, "kubeflow": kubeflow,
    "kubernetes": kubernetes, "volcengine": volcengine, "sagemaker": sagemaker, "vertex": vertex,
    "slurm": slurm,
}  # fmt: skip


def ascend(node: int, nodes: int, port: int, card: int, cards: int, table_path: str) -> Injected:
    """Return (arguments, variables) that ModelArts' Ascend engine gives a card's process.

    `table_path`: path of the rank table.
    """
    rank = str(node * cards + card)
    size = str(nodes * cards)
    card_variables = {
        "RANK_TABLE_FILE": table_path,
        "RANK_ID": rank,
        "RANK_SIZE": size,
        "ASCEND_DEVICE_ID": str(card),
    }
    return [], {**modelarts_image(node, nodes, port)[1], **card_variables}


def rank_table(nodes: int, cards: int) -> dict:
    """Return the content of the Ascend engine's RANK_TABLE_FILE, with every server on this machine."""
    servers = [
        {"server_id": f"node_{node}", "host_ip": HOST,
         "device": [{"device_id": str(card), "rank_id": str(node * cards + card)} for card in range(cards)]}
        for node in range(nodes)
    ]  # fmt: skip
    return {"status": "completed", "version": "1.0", "server_count": str(nodes), "server_list": servers}


def start(
    options: argparse.Namespace, node: int, card: int, port: int, secret: str, table_path: str
) -> "subprocess.Popen[bytes]":
    """Start a process of a node as the platform would, in its own process group.

    `table_path`: path of the Ascend rank table.
    """
    if options.cards:
        injected, env = ascend(node, options.nodes, port, card, options.cards, table_path)
    else:
        injected, env = PLATFORMS[options.platform](node, options.nodes, port)
        if options.procs:
            env["NPROC_PER_NODE"] = str(options.procs)
    workers = options.procs or options.cards or 1
    threads = cores.count() // (options.nodes * workers)  # all nodes share the cores of this machine
    env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(max(1, threads))
    if "ANYRANK_LAUNCHER" not in os.environ:
        env["ANYRANK_LAUNCHER"] = command(options)
    if "ANYRANK_SECRET_FILE" not in os.environ:
        env["ANYRANK_SECRET"] = secret
    if options.nodes > 1 and options.devices:
        per_node = len(options.devices) // options.nodes
        env[VISIBLE[options.accelerator]] = ",".join(options.devices[node * per_node : (node + 1) * per_node])
    words = [sys.executable, "-u", os.path.abspath(options.job), *options.arguments, *injected]
    return subprocess.Popen(
        words,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def command(options: argparse.Namespace) -> str:
    """Return the `launch local` command that starts the job again, without kills and restarts;
    the job's messages show it."""
    words = ["--nodes", str(options.nodes)]
    if options.procs:
        words += ["--procs", str(options.procs)]
    words += ["--platform", options.platform]
    if options.accelerator == "npu":
        words += ["--accelerator", "npu"]
    return shlex.join(["python", "-m", "launch", "local", *words, options.job, "--", *options.arguments])


def relay(node: int, output: IO[bytes]) -> None:
    """Print the output of a process until it ends, each line with the number of its node."""
    for line in output:
        print(f"[node {node}] {line.decode(errors='replace')}", end="", flush=True)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and all others of its process group, if they still run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def start_once(
    options: argparse.Namespace, kill_at: list[tuple[int, float]], return_at: list[tuple[int, float]]
) -> list[int]:
    """Run all nodes; return exit codes, 0 for a killed node if the others succeed.

    `kill_at`, `return_at`: (node, seconds).
    """
    port = port_of_node_0()
    # by which the nodes know each other (docs/security.md)
    secret = os.environ.get("ANYRANK_SECRET") or secrets.token_hex(32)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as table_file:
        json.dump(rank_table(options.nodes, options.cards), table_file)
        table_file.flush()
        cards = range(options.cards or 1)
        return _run_nodes(
            options.nodes,
            kill_at,
            return_at,
            lambda node: [start(options, node, card, port, secret, table_file.name) for card in cards],
        )


def port_of_node_0() -> int:
    """Return a free port below those that the system gives to connections,
    one of which could take it before node 0 listens."""
    while True:
        port = random.randrange(10000, 32768)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def _run_nodes(
    nodes: int,
    kill_at: list[tuple[int, float]],
    return_at: list[tuple[int, float]],
    start_node: Callable[[int], list[subprocess.Popen[bytes]]],
) -> list[int]:
    """Run the nodes until all have ended; return their exit codes.

    A stop signal is passed on to every process.
    """
    processes: dict[int, list[subprocess.Popen[bytes]]] = {}
    relays = []

    def begin(*numbers: int) -> None:
        for node in numbers:
            kill_node(node)  # its earlier processes, if they still run
            processes[node] = start_node(node)
        for node in numbers:
            for process in processes[node]:
                relays.append(threading.Thread(target=relay, args=(node, process.stdout)))
                relays[-1].start()

    def kill_node(node: int) -> None:
        for process in processes.get(node, ()):
            kill(process)

    def pass_on(signal_number: int, _frame: object) -> None:
        for node_processes in processes.values():
            for process in node_processes:
                if process.poll() is None:
                    process.send_signal(signal_number)

    handlers = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        begin(*range(nodes))
        events = [Event(seconds, node, kill_node) for node, seconds in kill_at]
        events += [Event(seconds, node, begin) for node, seconds in return_at]
        events.sort(key=lambda event: (event.seconds, event.node))
        _act_until_all_have_ended(processes, events)
    finally:
        for node in processes:
            kill_node(node)
        for thread in relays:
            thread.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return _exit_codes(processes, {node for node, _ in kill_at})


class Event(NamedTuple):
    """Something that is done to a node."""

    seconds: float  # after the start
    node: int
    action: Callable[[int], None]


def _act_until_all_have_ended(
    processes: dict[int, list[subprocess.Popen[bytes]]], events: Sequence[Event]
) -> None:
    """Do the events when they are due, until no process runs any more; later events are dropped."""
    began = time.monotonic()
    pending = collections.deque(events)
    while any(process.poll() is None for node_processes in processes.values() for process in node_processes):
        if pending and time.monotonic() - began > pending[0].seconds:
            event = pending.popleft()
            event.action(event.node)
        time.sleep(0.02)


def _exit_codes(
    processes: dict[int, list[subprocess.Popen[bytes]]], killed_nodes: Collection[int]
) -> list[int]:
    """Return the exit codes of all processes.

    SIGKILL of a node of `killed_nodes` counts as 0 if all others succeeded.
    """
    codes = {
        node: [process.returncode for process in node_processes] for node, node_processes in processes.items()
    }
    survivors = [node for node in codes if node not in killed_nodes]
    others_succeeded = bool(survivors) and all(code == 0 for node in survivors for code in codes[node])
    if others_succeeded:  # they finished without the killed nodes
        for node in killed_nodes:
            codes[node] = [0 if code == -signal.SIGKILL else code for code in codes[node]]
    return [code for node_codes in codes.values() for code in node_codes]


def node_at(text: str) -> tuple[int, float]:
    """Return (node, seconds) of the text NODE@SECONDS, as a type for argparse."""
    match = re.fullmatch(r"(\d{1,6})@(\d{1,6}(?:\.\d{1,6})?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form NODE@SECONDS, such as 1@8")
    return int(match[1]), float(match[2])


def main(argv: list[str]) -> int:
    parser = new_parser("local", __doc__)
    parser.add_argument(
        "job", help="the job's file, such as jobs/train_ddp.py; its own options come after --"
    )
    parser.add_argument(
        "--nodes", type=arguments.WORKERS, default=1, help="how many nodes to start (default: 1)"
    )
    parser.add_argument(
        "--procs", type=arguments.WORKERS, help="workers of each node; unset: one per GPU, or one on a CPU"
    )
    platform_help = "whose arguments or environment the nodes get (default: modelarts)"
    parser.add_argument("--platform", choices=PLATFORMS, default="modelarts", help=platform_help)
    accelerator_help = (
        "of the nodes; npu with --platform modelarts: one process for each card, as its Ascend engine "
        "starts them"
    )
    parser.add_argument(
        "--accelerator", choices=VISIBLE, default="gpu", help=accelerator_help + " (default: gpu)"
    )
    kill_help = "kill a node so many seconds after the first start; may be given again"
    parser.add_argument(
        "--kill", "--lose", type=node_at, action="append", default=[], metavar="NODE@SECONDS", help=kill_help
    )
    return_help = (
        "start that node again so many seconds after the first start, while the others run on "
        "(docs/elastic.md)"
    )
    parser.add_argument(
        "--return",
        dest="back",
        type=node_at,
        action="append",
        default=[],
        metavar="NODE@SECONDS",
        help=return_help,
    )
    restarts_help = "how often a failed job is started again (default: 0)"
    parser.add_argument("--restarts", type=arguments.number(int, at_least=0), default=0, help=restarts_help)
    verb_words, job_arguments = split_words(argv)
    options = parser.parse_args(verb_words)
    options.arguments = job_arguments
    if message := missing_job(options.job):
        parser.error(message)
    for name, events in (("--kill", options.kill), ("--return", options.back)):
        for node, _ in events:
            if node >= options.nodes:
                parser.error(
                    f"{name} names node {node}: --nodes {options.nodes} has nodes 0 to {options.nodes - 1}"
                )
    options.devices = devices(options.accelerator, os.environ)
    if 0 < len(options.devices) < options.nodes:
        devices_text = count(len(options.devices), options.accelerator.upper())
        print(f"{devices_text} for {options.nodes} nodes: all of them train on the CPU", flush=True)
    is_by_card = options.accelerator == "npu" and options.platform == "modelarts"
    options.cards = (options.procs or len(options.devices) // options.nodes or 1) if is_by_card else 0
    return run_with_restarts(options)


def devices(accelerator: str, environ: Mapping[str, str]) -> list[str]:
    """Return the devices that CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES names; if it is unset,
    the numbers of all."""
    visible = environ.get(VISIBLE[accelerator])
    count_devices = drivers.npus if accelerator == "npu" else drivers.gpus
    names = map(str, range(count_devices())) if visible is None else visible.split(",")
    return [name.strip() for name in names if name.strip() not in ("", "-1")]


def run_with_restarts(options: argparse.Namespace) -> int:
    """Run the job; restart it at most --restarts times after a failure,
    but not after exit code 2 or a stop of all nodes."""
    codes: list[int] = []
    kill_at = options.kill
    return_at = options.back
    for number in range(options.restarts + 1):
        codes = start_once(options, kill_at, return_at)
        kill_at = []  # a restart kills no node
        return_at = []
        print(f"all nodes have ended, exit codes {' '.join(map(str, codes))}", flush=True)
        if not any(codes) or 2 in codes or all(code in (130, 143) for code in codes):
            # 2: a mistake that a restart repeats
            break
        if number < options.restarts:
            print(f"restart {number + 1} of {options.restarts}, as the platform would", flush=True)
    return next((code if code > 0 else 1 for code in codes if code), 0)
