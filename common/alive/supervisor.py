"""The workers of a node, in its parent process: how they are started, stopped and ended,
and what the log says of it.

torch's elastic launcher starts the processes. Its agent is not used: it lets the remaining workers hang for
30 s (grace) and 300 s (exit barrier), reports the victims of a crash as often as its cause, and gives
restarted workers other ranks. Here a policy (parent.py) decides, in a loop (loop.py) that watches the workers
and hears the other nodes.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any, Optional, Protocol

from common.alive import heartbeat
from common.alive.loop import Loop, Policy
from common.alive.wire import secret
from common.alive.wire.channel import Go
from common.alive.worker import Fault, Worker
from common.errors import STOP_SIGNALS, one_line, report_failure
from common.files import create_scratch_folder
from common.machine import cores
from common.world import PLATFORM, PROMISED, World, naming, network

KILLED_SECONDS = 10  # how long killed workers may take to end; a worker that the kernel blocks does not end
AGAIN = -1  # what train() returns in place of an exit code, if the workers are to be started again
GRACE_SECONDS = 25  # from a stop signal until the workers are killed; platforms allow 30


class NodePolicy(Policy, Protocol):
    """A policy of the parent of a node, for which a Supervisor acts."""

    def on_signal(self, number: int, frame: object, /) -> None: ...


class Supervisor:
    """The workers of a node and what their parent knows: who it is, its loop, its connections."""

    def __init__(self, world: World, max_restarts: int, join_seconds: float, alike: dict[str, Any]):
        host = socket.gethostname()
        self.world = world
        self.loop = Loop(world.num_nodes, world.world_size, f"node {world.node_rank}, host {host}")
        self.max_restarts = max_restarts
        self.join_seconds = join_seconds
        self.key = secret.of_this_job()
        self.hello: dict[str, Any] = {
            "app": "anyrank", "job": world.job_id, "host": host, "node": world.node_rank,
            "nodes": world.num_nodes, "workers": world.local_world_size,
            "alike": {"workers per node": world.local_world_size, **alike},
        }  # fmt: skip
        self.attempt = 0  # how often the workers were started again
        self.writer = 0  # the rank that saves
        self.extra_variables: dict[str, str] = {}  # further variables of their environment
        self._stop_began: Optional[float] = None

    def name_of(self, node: int) -> str:
        """Return the name of a node and its ranks, for the log."""
        return naming.describe_nodes([node], self.world.local_world_size)

    def say(self, text: str) -> None:
        """Print a line of the log, with the number of this node."""
        print(f"node {self.world.node_rank}: {one_line(text)}", flush=True)

    def warn_if_unprotected(self) -> None:
        """Log a warning if the job has no secret, so that anybody who reaches the port can join."""
        if not self.key:
            self.say(secret.UNPROTECTED.format(port=self.world.master_port))

    def prepare(self, policy: NodePolicy) -> None:
        """Do what may be slow or must come first, before the nodes meet and expect beats of each other."""
        for number in STOP_SIGNALS:
            signal.signal(number, policy.on_signal)
        import torch.distributed.elastic.multiprocessing  # noqa: F401

    def train(self, go: Go, policy: NodePolicy) -> int:
        """Start the workers, watch them until the policy ends it, and end those that still run;
        return the exit code."""
        folder = create_scratch_folder()
        try:
            self._start_workers(go, folder)
            return self.loop.run(policy)
        finally:
            self._kill_workers()
            shutil.rmtree(folder, ignore_errors=True)

    def send_go(self) -> Go:
        """Tell the other nodes to start their workers; return what they are told."""
        hub = self.loop.hub
        address = hub.address() if hub else "127.0.0.1"
        go: Go = {"attempt": self.attempt, "address": address, "port": network.free_port()}
        if hub:
            hub.send(go=go)
        return go

    def disconnect(self) -> None:
        """Close the connections to the other nodes."""
        for connections in (self.loop.hub, self.loop.connection):
            if connections:
                connections.close()

    # --- The workers ---

    def _start_workers(self, go: Go, folder: str) -> None:
        """Start a process for each rank of this node, with its files and logs in `folder`."""
        from torch.distributed.elastic.multiprocessing import SignalException

        world = self.world
        shared = self._variables_of_workers(go)
        environments = {}
        workers = []
        for index in range(world.local_world_size):
            worker = Worker(world.rank + index, os.path.join(folder, f"worker-{index}"))
            workers.append(worker)
            ranks = {"RANK": str(worker.rank), "LOCAL_RANK": str(world.local_rank + index)}
            environments[index] = {
                **shared,
                **ranks,
                heartbeat.FILES: worker.file_prefix,
                heartbeat.PARENT: str(os.getpid()),
            }
        self.loop.workers = workers
        self.loop.start_time = time.time()
        arguments = dict.fromkeys(environments, ("-u", *sys.argv))
        text = f"rank {world.rank}"
        if len(workers) > 1:
            text = f"ranks {world.rank} to {world.rank + len(workers) - 1}"
        self.say(f"starting {text} of {world.world_size} ({world.platform}: {world.rule})")
        handlers = {
            number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT)
        }
        try:
            processes = start_by_torch(arguments, environments, folder)
            for number, handler in handlers.items():  # the launcher has replaced them
                signal.signal(number, handler)
        except SignalException as stop:  # nothing has been trained yet, and the workers die with their parent
            sys.exit(STOP_SIGNALS.get(stop.sigval, 128 + stop.sigval))
        for index, worker in enumerate(workers):
            worker.process = processes.subprocess_handlers[index].proc

    def _variables_of_workers(self, go: Go) -> dict[str, str]:
        """Return the environment variables that all workers of this node get, as torchrun names them."""
        world = self.world
        threads = max(1, cores.count() // world.local_world_size)
        return {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads),
            "MASTER_ADDR": go["address"], "MASTER_PORT": str(go["port"]), "WORLD_SIZE": str(world.world_size),
            "LOCAL_WORLD_SIZE": str(world.local_world_size), "GROUP_RANK": str(world.node_rank),
            "NODE_RANK": str(world.node_rank),
            "TORCHELASTIC_RUN_ID": world.job_id or "anyrank", PLATFORM: f"{world.platform}: {world.rule}",
            PROMISED: str(world.gpus_promised),
            "TORCHELASTIC_RESTART_COUNT": str(world.restart_count + go["attempt"]),
            **network.interfaces(self.own_address()),
            **self.extra_variables,
        }  # fmt: skip

    def own_address(self) -> str:
        """Return the address by which the other nodes reach this one."""
        if self.loop.hub:
            return self.loop.hub.address()
        return self.loop.connection.socket.getsockname()[0] if self.loop.connection else "127.0.0.1"

    def workers_finished(self) -> bool:
        """Whether all workers of this node have finished the run."""
        workers = self.loop.workers
        return bool(workers) and all(worker.code == 0 and worker.progress[0] == "done" for worker in workers)

    def continue_stop(self) -> Optional[int]:
        """Pass the stop signal on.

        Return the exit code if this node need not wait for its workers any longer; else None.
        """
        loop = self.loop
        number = signal.Signals(loop.stop_signal)
        if self._stop_began is None:
            self._stop_began = time.monotonic()
            self._begin_stop(number)
        if loop.hub:
            loop.hub.send(stop=number)
        code = STOP_SIGNALS[number]
        late = [worker for worker in loop.workers if worker.code is None]
        if not late and not any(worker.code for worker in loop.workers):
            return 0  # the run has just ended
        for worker in loop.workers:
            fault = worker.reported_fault()
            if fault and not fault["victim"] and (not late or worker.rank == self.writer):
                report_failure(f"rank {worker.rank} could not stop as it should: {fault['text']}")
                return fault["code"]
        has_saved = any(worker.rank == self.writer and worker.code == code for worker in loop.workers)
        if not late or has_saved:  # late workers may wait for data, or for the rank that has saved
            return code
        if time.monotonic() - self._stop_began > GRACE_SECONDS:
            phases = ", ".join(f"rank {worker.rank} in phase {worker.progress[0]}" for worker in late)
            self.say(
                f"not stopped within {GRACE_SECONDS} s: {phases}; the run goes on from its last checkpoint"
            )
            return code
        return None

    def _begin_stop(self, number: signal.Signals) -> None:
        self.say(f"{number.name}: all ranks stop at the next common step")
        if self.loop.connection:
            self.loop.connection.tell(stop=number)
        for worker in self.loop.workers:
            if worker.code is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.send_signal(number)

    def carry_out(self, verdict: Fault) -> int:
        """Log the verdict and end the workers; return the exit code,
        or AGAIN if a restart may help and restarts are left."""
        loop = self.loop
        restart = verdict["restart"] and self.attempt < self.max_restarts and not loop.stop_signal
        for worker in loop.workers:
            if worker.rank == verdict.get("stack_of"):
                print(worker.stack(), end="", file=sys.stderr, flush=True)
        if restart:
            print(f"error: {one_line(loop.log_line(verdict))}", file=sys.stderr, flush=True)
        else:
            report_failure(loop.log_line(verdict))
        self._kill_workers()
        running_ranks = [
            worker.rank for worker in loop.workers if worker.process and worker.process.poll() is None
        ]
        if restart and running_ranks:
            report_failure(
                f"rank {running_ranks[0]} cannot be ended, so the job is not started again in place"
            )
        return AGAIN if restart and not running_ranks else verdict["code"]

    def _kill_workers(self) -> None:
        started = [worker for worker in self.loop.workers if worker.process]
        for worker in started:
            if worker.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.kill()
        deadline = time.monotonic() + KILLED_SECONDS
        for worker in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.1, deadline - time.monotonic()))


def start_by_torch(arguments: dict[int, tuple], environments: dict[int, dict[str, str]], folder: str) -> Any:
    """Let torch start a Python process for each key of the dicts, with its logs in `folder`/logs;
    return torch's handle."""
    from torch.distributed.elastic import multiprocessing

    logs = os.path.join(folder, "logs")
    os.mkdir(logs)
    specs: Any = getattr(multiprocessing, "DefaultLogsSpecs", None)  # since torch 2.3
    log_options: dict[str, Any] = {"logs_specs": specs(log_dir=logs)} if specs else {"log_dir": logs}
    return multiprocessing.start_processes("worker", sys.executable, arguments, environments, **log_options)
