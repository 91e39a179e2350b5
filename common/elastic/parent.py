"""The parent process of a node in an elastic job (--min_nodes).

It continues when a worker, a node or the leader is lost.

Node 0 leads; if it is lost, a remaining node leads (leader.py). Every node tells the leader which of its
workers live and which wait. The leader tells all nodes the members of the next generation; these workers form
its process group (members.py).
"""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Optional

from common.alive.loop import THIS_NODE, Loop
from common.alive.supervisor import GRACE_SECONDS, Supervisor
from common.alive.wire import channel, hub, messages
from common.alive.worker import Fault, Worker, cause
from common.devices.diagnosis import is_device_error
from common.elastic import greeting, members
from common.elastic.leader import Leader
from common.elastic.messages import FORMS, NONE_YET, Generation, NodeReport
from common.errors import STOP_SIGNALS, UserError, one_line, report_failure
from common.files import write_atomically

SEEK_SECONDS = 10.0  # how long a node looks for a run that goes on without node 0


class ElasticParent:
    """The policy (alive/loop.py) of the parent of a node: if a worker, a node or the leader is lost,
    the others go on."""

    def __init__(self, supervisor: Supervisor, min_nodes: int, output_dir: str):
        members.load_torchft()  # raises an error before anything is started, if it is not installed
        messages.FORMS.update(FORMS)
        self.supervisor = supervisor
        self.min_nodes = min_nodes
        # the addresses of all nodes, for a later start of this one
        self._nodes_path = os.path.join(output_dir, "nodes.json")
        self.address = "127.0.0.1"  # of this node, as the others reach it
        self._listener = hub.listen(0)  # where the other nodes connect, if this node has to lead
        supervisor.hello["more"] = {"listens": self._listener.getsockname()[1]}
        self._leader: Optional[Leader] = None  # set on the node that leads
        self._led_by = 0
        self.generation = NONE_YET
        self.causes: list[str] = []  # what has happened since the last generation, for the log
        self._lost_workers: list[str] = []  # how this node has lost workers, for the log
        # since when the workers save and end, because the run cannot go on
        self.ending_since: Optional[float] = None
        # the signal by which the platform takes this node away, or stops the job
        self._own_signal: Optional[int] = None
        self._may_leave = False  # whether this node may end on that signal, as the others go on
        self._excluded = ""  # why the others go on without this node
        # what the leader was last told of the workers of this node
        self._last_report: Optional[NodeReport] = None

    @property
    def _loop(self) -> Loop:
        return self.supervisor.loop

    @property
    def node(self) -> int:
        return self.supervisor.world.node_rank

    # --- How the nodes meet ---

    def run(self) -> int:
        """Start the workers, and return the exit code of this node when they have finished,
        or cannot go on."""
        self.supervisor.prepare(self)
        go = self._meet()
        self.supervisor.extra_variables[members.ADDRESS] = self.address
        code = self.supervisor.train(go, self)
        self.supervisor.disconnect()
        return code

    def _meet(self) -> channel.Go:
        """Wait for the other nodes, or join a run under way; return the start message."""
        world = self.supervisor.world
        address = world.master_addr
        port = world.master_port
        if self.node == 0:
            try:
                if world.num_nodes > 1:
                    self._meet_others()
                self._leader = Leader(self)
                return self.supervisor.send_go()
            except greeting.Elsewhere as elsewhere:
                address, port = elsewhere.args
        self._loop.connection, go, leader = self._join(address, port)
        self._led_by = leader or 0
        self.address = self.supervisor.own_address()
        if leader is not None:
            self.supervisor.extra_variables[members.COMES_LATER] = "1"
            leader_place = f"led by node {leader} at {self._loop.connection.peer}"
            self.supervisor.say(f"the run is under way, {leader_place}: this node joins it")
        return go

    def _meet_others(self) -> None:
        """On node 0, wait until all nodes have joined; raise Elsewhere if another node leads."""
        self.supervisor.warn_if_unprotected()
        new_hub = self._new_hub(hub.listen(self.supervisor.world.master_port))
        # set even if a node is missing: the doctor shows the findings of those that have joined
        self._loop.hub = new_hub
        try:
            new_hub.meet(self.supervisor.join_seconds)
        except greeting.Elsewhere as elsewhere:
            new_hub.send(elsewhere=list(elsewhere.args))
            new_hub.close()
            self._loop.hub = None
            raise
        except UserError:
            new_hub.close()
            raise
        self.address = new_hub.address()

    def _new_hub(self, listener: socket.socket) -> hub.Hub:
        supervisor = self.supervisor
        return hub.Hub(
            listener, supervisor.hello, supervisor.say, supervisor.key, stays_open=True, greet=greeting.greet
        )

    def _join(self, address: str, port: int) -> tuple[channel.Connection, channel.Go, Optional[int]]:
        """Join the run through node 0 or, if that does not lead it,
        through a node that an earlier process here has noted."""
        supervisor = self.supervisor
        join_arguments = supervisor.hello, supervisor.join_seconds, supervisor.say, supervisor.key
        connection = greeting.connect_to_leader(address, port)
        deadline = time.monotonic() + SEEK_SECONDS
        addresses = self._read_addresses() if not connection else []
        for host, other_port in addresses:
            if time.monotonic() > deadline:  # each lost machine takes a second to try
                break
            if leader_socket := greeting.connect_to_leader(host, other_port):
                try:
                    return greeting.join(host, other_port, *join_arguments, leader_socket)
                except UserError as error:
                    supervisor.say(f"warning: {error}")
        if addresses:
            supervisor.say(
                "no node of the run that this one was part of answers: it is over, or node 0 has yet "
                "to start it again"
            )
        return greeting.join(address, port, *join_arguments, connection)

    def _read_addresses(self):
        """Return (address, port) of each node that an earlier process has written; [] without a file."""
        try:
            return [
                (str(address), int(port))
                for _, address, port in json.loads(Path(self._nodes_path).read_bytes())
            ]
        except (OSError, ValueError, TypeError):
            return []

    def _write_addresses(self):
        """Try to write the nodes' addresses to a file,
        so that a node that comes back finds the run even without node 0."""
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self._nodes_path), exist_ok=True)
            write_atomically(self._nodes_path, json.dumps(self.generation["nodes"]).encode())

    # --- The policy ---

    def on_signal(self, number: int, _frame: object) -> None:
        """Note the first stop signal of the platform; exit at once if there are no workers yet."""
        if not self._loop.workers:
            sys.exit(STOP_SIGNALS[signal.Signals(number)])
        self._own_signal = self._own_signal or int(number)

    def hear(self, node: int, message: channel.Message) -> None:
        """Take a message that only elastic jobs have, or a stop signal."""
        if "here" in message and self._leader:
            self._leader.keep_report(node, message["here"])
        elif "stop" in message and self._leader:
            self._leader.note_stop(node, message["stop"])
        elif "stop" in message:
            self._loop.stop_signal = self._loop.stop_signal or message["stop"]
        elif "cause" in message:
            self.causes.append(one_line(message["cause"]))
        elif "generation" in message:
            self.accept(message["generation"])
        elif "leave" in message:
            self.leave()
        elif "excluded" in message:
            self._excluded = "this node was silent for so long that the others went on without it"

    def look_at(self, worker: Worker) -> None:
        """End and forget a worker that is lost to this run alone; report one whose fault another would have,
        too."""
        if self.generation["number"] == 0 or self._loop.stop_signal or self.ending_since is not None:
            if worker.was_stopped() and not worker.reported:
                self._own_signal = self._own_signal or signal.SIGTERM
            self._loop.report(worker)
            return
        fault = worker.fault(self._loop.location)
        if fault is None:
            return
        reported = worker.reported_fault() if worker.code is not None else None
        if reported and not reported["victim"] and not is_device_error(reported["text"]):
            self._loop.report(worker)  # another rank would fail in the same way
            return
        with contextlib.suppress(ProcessLookupError):
            worker.process.kill()  # it may still run, but be stopped (state T)
        self._loop.workers.remove(worker)
        self.causes.append(fault["text"])
        self._lost_workers.append(fault["text"])
        if self._loop.connection:
            self._loop.connection.tell(cause=fault["text"])
        elif self._loop.hub:
            self._loop.hub.send(cause=fault["text"])

    def handle_loss(self, node: int, is_silent: bool, description: str) -> None:
        """Let the leader go on without a node; if the leader itself is lost, find another one."""
        loop = self._loop
        if not loop.hub:
            self._go_on_without_leader(is_silent, description)
            return
        if is_silent:
            loop.hub.connections[node].tell(excluded=True)
        loop.hub.remove(node)
        loop.judge.forget(node)
        if node in loop.finished:
            return
        if self.generation["number"] == 0:
            loop.judge.accuse(cause(f"{self.supervisor.name_of(node)} {description}", restart=False))
        elif self._leader:
            self._leader.handle_loss(node, is_silent, description)

    def workers_finished(self) -> bool:
        return self.supervisor.workers_finished()

    def other_nodes_finished(self) -> bool:
        connected_nodes = set(self._loop.hub.connections) if self._loop.hub else set()
        return self._loop.finished >= connected_nodes & self.nodes_of(self.generation["ranks"])

    def find_cause(self, stalls: bool) -> Optional[Fault]:
        if self._loop.stop_signal or self.ending_since is not None:
            return None
        return self._loop.judge.verdict(stalls and self.generation["number"] > 0)

    def tell(self, is_beat: bool) -> None:
        self._report_workers(is_beat)
        if self._leader:
            self._leader.lead(time.monotonic())

    def _report_workers(self, is_beat: bool) -> None:
        """Tell the leader, at each beat or change, how the workers are; at each beat, a stop signal."""
        loop = self._loop
        report: NodeReport = {
            "workers": [
                [worker.rank, worker.pulse.get("wanted")] for worker in loop.workers if worker.code is None
            ],
            "done": [worker.rank for worker in loop.workers if worker.code == 0],
            "generation": self.generation["number"],
        }
        if self._leader:
            self._leader.keep_report(self.node, report)
            if self._own_signal:
                self._leader.note_stop(self.node, self._own_signal)
        elif loop.connection:
            if is_beat and self._own_signal:
                loop.connection.tell(stop=self._own_signal)
            if is_beat or report != self._last_report:
                loop.connection.tell(here=report)
        self._last_report = report

    def end_turn(self) -> Optional[int]:
        """Return the exit code if this node ends now, and log a failure; else None.

        Pass a stop signal on to the workers.
        """
        workers = self._loop.workers
        if self._loop.verdict:
            return self.supervisor.carry_out(self._loop.verdict)
        if self._excluded:
            report_failure(self._excluded)
            return 1
        if self._own_signal and self._may_leave:
            number = signal.Signals(self._own_signal)
            self.supervisor.say(f"{number.name}: this node leaves, and the others go on")
            return STOP_SIGNALS[number]
        if self.ending_since is not None:
            if (
                all(worker.code is not None for worker in workers)
                or time.monotonic() - self.ending_since > GRACE_SECONDS
            ):
                report_failure(f"{self.generation['why']}; stopping")
                return 1
        elif self._loop.stop_signal:
            for worker in workers:
                worker.pulse.put("stop", self._loop.stop_signal)
            return self.supervisor.continue_stop()
        elif not workers:
            report_failure("; ".join(self._lost_workers))
            return 1
        elif self._all_finished():
            if not self.workers_finished():
                self.supervisor.say("the others have finished the run before this node could take part")
            return 0
        return None

    def _all_finished(self) -> bool:
        if self._loop.hub:
            return THIS_NODE in self._loop.finished
        return self.workers_finished() if self._leader else len(self._loop.finished) >= self._loop.nodes

    # --- A new generation, and a new leader ---

    def nodes_of(self, ranks: Iterable[int]) -> set[int]:
        """Return the nodes of these ranks."""
        return {rank // self.supervisor.world.local_world_size for rank in ranks}

    def accept(self, generation: Generation) -> None:
        """Accept a generation (group of ranks) if it is new; offer it to its ranks here,
        or to all ranks if it says stop."""
        if generation["number"] <= self.generation["number"]:
            return
        self.generation = generation
        self.causes = []
        self.supervisor.writer = generation["writes"]
        # the folder may be slow, and beats must not wait
        threading.Thread(target=self._write_addresses, daemon=True).start()
        for worker in self._loop.workers:
            if worker.code is None and (worker.rank in generation["ranks"] or generation["stop"]):
                write_atomically(f"{worker.file_prefix}.generation", json.dumps(generation).encode())
                worker.pulse.put("offered", generation["number"])
        if generation["stop"]:
            self.ending_since = time.monotonic()

    def stop_job(self, number: int) -> None:
        self._loop.stop_signal = number

    def leave(self) -> None:
        self._may_leave = True

    def _go_on_without_leader(self, is_silent: bool, description: str) -> None:
        """Unless the run ends, lead it if this is the first node left; else join the first.

        If no node answers, fail.
        """
        loop = self._loop
        supervisor = self.supervisor
        lost_node = self._led_by
        if loop.connection:
            loop.connection.close()
            loop.connection = None
        if loop.stop_signal or self.ending_since is not None:
            return
        if self.workers_finished():
            loop.finished.update(range(loop.nodes))
            return
        if not any(re.search(rf"\bnode {lost_node}\b", text) for text in self.causes):
            # its own report says more
            self.causes.append(f"{supervisor.name_of(lost_node)} {description}")
        for node, address, port in sorted(self.generation["nodes"]):
            if node == self.node:
                loop.hub = self._new_hub(self._listener)
                loop.hub.mark_complete()
                loop.forget()
                self._leader = Leader(self, lost_leader=lost_node, is_silent=is_silent)
                self._led_by = node
                return
            if node != lost_node:
                with contextlib.suppress(UserError):
                    loop.connection, *_ = greeting.join(
                        address, port, supervisor.hello, 0, supervisor.say, supervisor.key
                    )
                    self._led_by = node
                    self._last_report = None
                    return
        loop.verdict = cause("; ".join(self.causes), restart=False)
