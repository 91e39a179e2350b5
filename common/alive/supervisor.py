"""The parent process of a node: it starts the workers, watches them and the other nodes, and ends all when one has died.

torch's elastic launcher starts the processes. Its agent is not used: it lets the remaining workers hang for 30 s (grace) and
300 s (exit barrier), reports the victims of a crash as often as its cause, and gives restarted workers other ranks. Here the
parents of all nodes are connected to node 0 (channel.py), which decides what happened (judge.py).
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any, Optional

from common import world
from common.alive import heartbeat
from common.alive.judge import Judge
from common.alive.watch import Watch
from common.alive.wire import channel, hub, secret
from common.alive.worker import Fault, Worker
from common.errors import STOP_SIGNALS, TrainingFailed, UserError, one_line, report_failure
from common.files import scratch_folder
from common.machine import cores, malloc
from common.world import World, naming, network

KILLED_SECONDS = 10  # how long killed workers may take to end; a worker that the kernel blocks does not end
GRACE_SECONDS = 25  # from a stop signal until the workers are killed; platforms allow 30


class Supervisor(Watch):
    def __init__(self, here: World, max_restarts: int, join_seconds: float, alike: dict):
        host = socket.gethostname()
        super().__init__(here.num_nodes, here.world_size, f"node {here.node_rank}, host {host}")
        self.here = here
        self.max_restarts, self.join_seconds = max_restarts, join_seconds
        self.key = secret.of_this_job()
        self.hello = {
            "app": "anyrank", "job": here.job_id, "host": host, "node": here.node_rank, "nodes": here.num_nodes,
            "workers": here.local_world_size, "alike": {"workers per node": here.local_world_size, **alike},
        }  # fmt: skip
        self.attempt = 0
        self.stop_began: Any = None
        self.writer = 0  # the rank that saves
        self.for_workers: dict[str, str] = {}  # further variables of their environment

    def name_of(self, node: int) -> str:
        return naming.describe_nodes([node], self.here.local_world_size)

    def stopped(self) -> None:
        self._on_signal(signal.SIGTERM, None)

    def say(self, text: str) -> None:
        print(f"node {self.here.node_rank}: {one_line(text)}", flush=True)

    # --- From start to end ---

    def run(self) -> int:
        """Start the workers; restart them after a fault if that may help and restarts are left. Return the job's exit code."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        import torch.distributed.elastic.multiprocessing  # noqa: F401 (slow, so before the nodes expect beats)

        go = self._meet()
        while True:
            folder = scratch_folder()
            try:
                self._start_workers(go, folder)
                code = self._watch()
            finally:
                self._kill_workers()
                shutil.rmtree(folder, ignore_errors=True)
            if code is not None:
                self._part()
                return code
            go = self._meet_again(go)

    def _meet(self):
        here = self.here
        if here.num_nodes == 1:
            return {"attempt": 0, "address": "127.0.0.1", "port": network.free_port()}
        if here.node_rank:
            self.connection, go = channel.join(
                here.master_addr, here.master_port, self.hello, self.join_seconds, self.say, self.key
            )
            return go
        if not self.key:
            self.say(secret.UNPROTECTED.format(port=here.master_port))
        self.hub = hub.Hub(hub.listen(here.master_port), self.hello, self.say, self.key)
        try:
            self.hub.meet(self.join_seconds)
        except UserError:
            self.hub.close()
            raise
        return self._send_go(0)

    def _send_go(self, attempt: int) -> dict[str, Any]:
        go = {"attempt": attempt, "address": self.hub.address(), "port": network.free_port()}
        self.hub.send(go=go)
        return go

    def _meet_again(self, go: dict[str, Any]) -> dict[str, Any]:
        """Wait until all nodes have ended their workers; return the next attempt's start message, or raise TrainingFailed."""
        self.verdict, self.judge = None, Judge(self.ranks)
        self.finished, ready = set(), set()
        self.attempt = attempt = go["attempt"] + 1
        self.say(f"restart {attempt} of {self.max_restarts} from the last checkpoint")
        if self.here.num_nodes == 1:
            return {**go, "attempt": attempt, "port": network.free_port()}
        deadline = time.monotonic() + self.join_seconds
        while time.monotonic() < deadline:
            if self.connection:
                self.connection.tell(ready=attempt)
            else:
                self.hub.send(beat=True)
            if self.stop_signal:
                sys.exit(STOP_SIGNALS[self.stop_signal])
            for node, message in self.messages():
                if message is None:
                    raise TrainingFailed(f"node {node} is lost, so the job cannot be restarted in place; start it again")
                if "stop" in message:
                    self.stop_signal = message["stop"]
                if "go" in message:
                    return message["go"]
                if message.get("ready") == attempt:
                    ready.add(node)
            if self.hub and len(ready) == self.here.num_nodes - 1:
                return self._send_go(attempt)
        raise TrainingFailed(f"the nodes did not meet again within {self.join_seconds:.0f} s (--join_seconds)")

    def _start_workers(self, go: dict[str, Any], folder: str) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        here = self.here
        shared = {
            "MASTER_ADDR": go["address"], "MASTER_PORT": str(go["port"]), "WORLD_SIZE": str(here.world_size),
            "LOCAL_WORLD_SIZE": str(here.local_world_size), "GROUP_RANK": str(here.node_rank), "NODE_RANK": str(here.node_rank),
            "TORCHELASTIC_RUN_ID": here.job_id or "anyrank", world.PLATFORM: f"{here.platform}: {here.rule}",
            "TORCHELASTIC_RESTART_COUNT": str(here.restart_count + go["attempt"]),
            **network.interfaces(self._own_address()),
            **malloc.tuned(os.environ), **self.for_workers,
        }  # fmt: skip
        threads = max(1, cores.count() // here.local_world_size)
        shared.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS") or str(threads))
        environments = {}
        self.workers, self.since = [], time.time()
        for index in range(here.local_world_size):
            worker = Worker(here.rank + index, os.path.join(folder, f"worker-{index}"))
            self.workers.append(worker)
            ranks = {"RANK": str(worker.rank), "LOCAL_RANK": str(here.local_rank + index)}
            environments[index] = {**shared, **ranks, heartbeat.FILES: worker.files, heartbeat.PARENT: str(os.getpid())}
        arguments = dict.fromkeys(environments, ("-u", *sys.argv))
        ranks = f"rank {here.rank}" if len(self.workers) == 1 else f"ranks {here.rank} to {here.rank + len(self.workers) - 1}"
        self.say(f"starting {ranks} of {here.world_size} ({here.platform}: {here.rule})")
        handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT)}
        try:
            started = start_by_torch(arguments, environments, folder)
            for number, handler in handlers.items():  # the launcher has replaced them
                signal.signal(number, handler)
        except SignalException as stop:  # nothing has been trained yet, and the workers die with their parent
            sys.exit(STOP_SIGNALS.get(stop.sigval, 128 + stop.sigval))
        for index, worker in enumerate(self.workers):
            worker.process = started.subprocess_handlers[index].proc

    def _own_address(self):
        if self.hub:
            return self.hub.address()
        return self.connection.socket.getsockname()[0] if self.connection else "127.0.0.1"

    # --- Watching ---

    def _watch(self):
        """Watch until the workers have finished, stopped or failed; return the exit code, or None to start them again."""
        told = 0.0
        while True:
            for node, message in self.messages():
                self.hear(node, message)
            for worker in self.workers:
                worker.look()
                self.suspect(worker)
            now = time.monotonic()
            beat = now - told >= self.beat_seconds
            if beat:
                told = now
                self.beat()
            if self.stop_signal and not self.verdict:
                code = self._continue_stop()
                if code is not None:
                    return code
            elif self._all_finished():
                return 0
            if not self.connection and not self.stop_signal:
                self.decide(beat)
            if self.verdict:
                return self._carry_out(self.verdict)

    def _carry_out(self, verdict: Fault) -> Optional[int]:
        restart = verdict["restart"] and self.attempt < self.max_restarts and not self.stop_signal
        for worker in self.workers:
            if worker.rank == verdict.get("stack_of"):
                print(worker.stack(), end="", file=sys.stderr, flush=True)
        if restart:
            print(f"error: {one_line(self.line(verdict))}", file=sys.stderr, flush=True)
        else:
            report_failure(self.line(verdict))
        self._kill_workers()
        held = [worker.rank for worker in self.workers if worker.process and worker.process.poll() is None]
        if restart and held:
            report_failure(f"rank {held[0]} cannot be ended, so the job is not started again in place")
        return None if restart and not held else verdict["code"]

    # --- Ending ---

    def _all_finished(self):
        return self.own_finished() if self.here.num_nodes == 1 else len(self.finished) == self.here.num_nodes

    def _on_signal(self, number: int, _frame: object) -> None:
        if not self.workers:  # still waiting for the other nodes: there is nothing to save
            sys.exit(STOP_SIGNALS[number])
        if self.stop_signal is None:
            self.stop_signal = int(number)

    def _continue_stop(self):
        """Pass a stop signal on. Return the exit code if this node need not wait for its workers any longer; else None."""
        now = time.monotonic()
        if self.stop_began is None:
            self.stop_began = now
            self.say(f"{signal.Signals(self.stop_signal).name}: all ranks stop at the next common step")
            if self.connection:
                self.connection.tell(stop=self.stop_signal)
            for worker in self.workers:
                if worker.code is None:
                    with contextlib.suppress(ProcessLookupError):
                        worker.process.send_signal(self.stop_signal)
        if self.hub and self.stop_signal:
            self.hub.send(stop=self.stop_signal)
        code, late = STOP_SIGNALS[signal.Signals(self.stop_signal)], [worker for worker in self.workers if worker.code is None]
        if not late and not any(worker.code for worker in self.workers):
            return 0  # the run has just ended
        for worker in self.workers:
            fault = worker.reported_fault()
            if fault and not fault["victim"] and (not late or worker.rank == self.writer):
                report_failure(f"rank {worker.rank} could not stop as it should: {fault['text']}")
                return fault["code"]
        saved = any(worker.rank == self.writer and worker.code == code for worker in self.workers)
        if not late or saved:  # late workers may wait for data, or for the rank that has saved
            return code
        if now - self.stop_began > GRACE_SECONDS:
            phases = ", ".join(f"rank {worker.rank} in phase {worker.last[0]}" for worker in late)
            self.say(f"not stopped within {GRACE_SECONDS} s: {phases}; the run goes on from its last checkpoint")
            return code
        return None

    def _kill_workers(self):
        for worker in self.workers:
            if worker.process and worker.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.kill()
        deadline = time.monotonic() + KILLED_SECONDS
        for worker in self.workers:
            if worker.process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.1, deadline - time.monotonic()))

    def _part(self):
        if self.hub:
            self.hub.close()
        if self.connection:
            self.connection.close()


def start_by_torch(arguments: dict[int, tuple], environments: dict[int, dict[str, str]], folder: str) -> Any:
    """Let torch start a Python process for each key of the dicts, with its logs in `folder`/logs; return torch's handle."""
    from torch.distributed.elastic import multiprocessing

    logs = os.path.join(folder, "logs")
    os.mkdir(logs)
    specs: Any = getattr(multiprocessing, "DefaultLogsSpecs", None)  # since torch 2.3
    where: dict[str, Any] = {"logs_specs": specs(log_dir=logs)} if specs else {"log_dir": logs}
    return multiprocessing.start_processes("worker", sys.executable, arguments, environments, **where)
