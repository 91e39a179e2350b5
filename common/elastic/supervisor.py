"""The parent process of a node in an elastic job (--min_nodes). It continues when a worker, a node or the leader is lost.

Node 0 leads; if it is lost, a remaining node leads (leader.py). Every node tells the leader which of its workers live and which
wait. The leader tells all nodes the members of the next generation; these workers form its process group (members.py).
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
from typing import Any, Optional

from common.alive import supervisor
from common.alive.judge import Judge
from common.alive.watch import OWN
from common.alive.wire import channel, hub, messages, secret
from common.alive.worker import cause
from common.devices.diagnosis import is_its_own_fault
from common.elastic import greeting, members
from common.elastic.leader import Leader
from common.elastic.messages import FORMS
from common.errors import STOP_SIGNALS, UserError, one_line, report_failure
from common.files import write_atomically

SEEK_SECONDS = 10.0  # how long a node looks for a run that goes on without node 0


class ElasticSupervisor(supervisor.Supervisor):
    def __init__(self, here: Any, min_nodes: int, join_seconds: float, alike: dict, output_dir: str):
        super().__init__(here, 0, join_seconds, alike)
        members.torchft()  # raises an error before anything is started, if it is not installed
        messages.FORMS.update(FORMS)
        self.min_nodes = min_nodes
        self._noted = os.path.join(output_dir, "nodes.json")  # the addresses of all nodes, for a later start of this one
        self.address = "127.0.0.1"  # of this node, as the others reach it
        self.listener = hub.listen(0)  # where the other nodes connect, if this node has to lead
        self.hello["more"] = {"listens": self.listener.getsockname()[1]}
        self.leader: Optional[Leader] = None  # set on the node that leads
        self.led_by = 0
        # The last generation: its members, which of them writes, and all nodes with their addresses.
        self.generation: dict[str, Any] = {"number": 0, "ranks": [], "writes": 0, "nodes": [], "why": "", "changes": []}
        self.causes: list[str] = []  # what has happened since the last generation, for the log
        self.lost_workers: list[str] = []  # how this node has lost workers, for the log
        self.ends: Optional[float] = None  # since when the workers save and end, because the run cannot go on
        self.told: Optional[int] = None  # the signal by which the platform takes this node away, or stops the job
        self.may_leave = False  # whether this node may end on that signal, as the others go on
        self.excluded = ""  # why the others go on without this node
        self.told_leader: Any = None  # what the leader was last told of the workers of this node

    @property
    def node(self) -> int:
        return self.here.node_rank

    # --- From start to end ---

    def _meet(self):
        here = self.here
        if here.num_nodes == 1:
            self.leader = Leader(self)
            return super()._meet()
        address, port = here.master_addr, here.master_port
        if self.node == 0:
            try:
                return self._meet_as_leader()
            except greeting.Elsewhere as elsewhere:
                address, port = elsewhere.args
        self.connection, go, leader = self._join(address, port)
        self.led_by = leader or 0
        self.address = self._own_address()
        if leader is not None:
            self.for_workers = {members.COMES_LATER: "1"}
            self.say(f"the run is under way, led by node {self.led_by} at {self.connection.peer}: this node joins it")
        return go

    def _join(self, address: str, port: int) -> tuple[channel.Connection, dict[str, Any], Optional[int]]:
        """Join the run through node 0 or, if that does not lead it, through a node that an earlier process here has noted."""
        how = self.hello, self.join_seconds, self.say, self.key
        connection = greeting.connect_to_leader(address, port)
        until = time.monotonic() + SEEK_SECONDS
        places = self._noted_places() if not connection else []
        for host, its_port in places:
            if time.monotonic() > until:  # each lost machine takes a second to try
                break
            if there := greeting.connect_to_leader(host, its_port):
                try:
                    return greeting.join(host, its_port, *how, there)
                except UserError as error:
                    self.say(f"warning: {error}")
        if places:
            self.say("no node of the run that this one was part of answers: it is over, or node 0 has yet to start it again")
        return greeting.join(address, port, *how, connection)

    def _noted_places(self):
        try:
            return [(str(address), int(port)) for _, address, port in json.loads(Path(self._noted).read_bytes())]
        except (OSError, ValueError, TypeError):
            return []

    def _note(self):
        """Try to write the nodes' addresses to a file, so that a node that comes back finds the run even without node 0."""
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self._noted), exist_ok=True)
            write_atomically(self._noted, json.dumps(self.generation["nodes"]).encode())

    def _meet_as_leader(self):
        if not self.key:
            self.say(secret.UNPROTECTED.format(port=self.here.master_port))
        self.hub = self._new_hub(hub.listen(self.here.master_port))
        try:
            self.hub.meet(self.join_seconds)
        except greeting.Elsewhere as elsewhere:
            self.hub.send(elsewhere=list(elsewhere.args))
            self.hub.close()
            self.hub = None
            raise
        except UserError:
            self.hub.close()
            raise
        self.address = self.hub.address()
        self.leader = Leader(self)
        return self._send_go(0)

    def _new_hub(self, listener: socket.socket) -> hub.Hub:
        return hub.Hub(listener, self.hello, self.say, self.key, stays_open=True, greet=greeting.greet)

    def _start_workers(self, go: dict[str, Any], folder: str) -> None:
        self.for_workers[members.ADDRESS] = self.address
        super()._start_workers(go, folder)

    def _watch(self):
        told = 0.0
        while True:
            for node, message in self.messages():
                self.hear(node, message)
            for worker in list(self.workers):
                worker.look()
                self.suspect(worker)
            now = time.monotonic()
            beat = now - told >= self.beat_seconds
            if beat and self.workers:
                told = now
                self.beat()
            self._tell(beat)
            if self.leader:
                self.leader.lead(now)
                if not self.stop_signal and self.ends is None:
                    self.decide(beat and self.generation["number"] > 0)
            code = self._ending(now)
            if code is not None:
                return code

    def _ending(self, now: float) -> Optional[int]:
        """Return the exit code if this node ends now, and log a failure; else None. Pass a stop signal on to the workers."""
        if self.verdict:
            return self._carry_out(self.verdict)
        if self.excluded:
            report_failure(self.excluded)
            return 1
        if self.told and self.may_leave:
            self.say(f"{signal.Signals(self.told).name}: this node leaves, and the others go on")
            return STOP_SIGNALS[signal.Signals(self.told)]
        if self.ends is not None:
            if all(worker.code is not None for worker in self.workers) or now - self.ends > supervisor.GRACE_SECONDS:
                report_failure(f"{self.generation['why']}; stopping")
                return 1
        elif self.stop_signal:
            for worker in self.workers:
                worker.pulse.put("stop", self.stop_signal)
            return self._continue_stop()
        elif not self.workers:
            report_failure("; ".join(self.lost_workers))
            return 1
        elif self._all_finished():
            if not self.own_finished():
                self.say("the others have finished the run before this node could take part")
            return 0
        return None

    def _on_signal(self, number: int, _frame: object) -> None:
        if not self.workers:
            sys.exit(STOP_SIGNALS[number])
        self.told = self.told or int(number)

    def _all_finished(self):
        if self.hub:
            return OWN in self.finished
        return self.own_finished() if self.leader else len(self.finished) >= self.nodes

    def others_finished(self) -> bool:
        return self.finished >= set(self.hub.connections) & self.nodes_of(self.generation["ranks"])

    def nodes_of(self, ranks: Iterable[int]) -> set[int]:
        return {rank // self.here.local_world_size for rank in ranks}

    def is_leading(self) -> bool:
        return self.leader is not None

    def stop_job(self, number: int) -> None:
        self.stop_signal = number

    def leave(self) -> None:
        self.may_leave = True

    # --- What happens to the workers and the other nodes ---

    def suspect(self, worker: Any) -> None:
        if self.generation["number"] == 0 or self.stop_signal or self.ends is not None:
            super().suspect(worker)
            return
        report = worker.fault(self.home)
        if report is None:
            return
        reported = worker.reported_fault() if worker.code is not None else None
        if reported and not reported["victim"] and not is_its_own_fault(reported["text"]):
            super().suspect(worker)  # another rank would fail in the same way
            return
        with contextlib.suppress(ProcessLookupError):
            worker.process.kill()  # it may still run, but be stopped (state T)
        self.workers.remove(worker)
        self.causes.append(report["text"])
        self.lost_workers.append(report["text"])
        if self.connection or self.hub:
            (self.connection.tell if self.connection else self.hub.send)(cause=report["text"])

    def _tell(self, beat: bool) -> None:
        """Tell the leader, at each `beat` or change, what the workers do, and at each beat whether this node is to stop."""
        mine = {
            "workers": [[worker.rank, worker.pulse.get("wanted")] for worker in self.workers if worker.code is None],
            "done": [worker.rank for worker in self.workers if worker.code == 0],
            "generation": self.generation["number"],
        }
        if self.leader:
            self.leader.hear(self.node, mine)
            if self.told:
                self.leader.told_to_stop(self.node, self.told)
        elif self.connection:
            if beat and self.told:
                self.connection.tell(stop=self.told)
            if beat or mine != self.told_leader:
                self.connection.tell(here=mine)
        self.told_leader = mine

    def hear(self, node: int, message: Optional[dict]) -> None:
        if message is None:
            self.lost(node)
        elif "here" in message and self.leader:
            self.leader.hear(node, message["here"])
        elif "stop" in message and self.leader:
            self.leader.told_to_stop(node, message["stop"])
        elif "cause" in message:
            self.causes.append(one_line(message["cause"]))
        elif "generation" in message:
            self.take(message["generation"])
        elif "leave" in message:
            self.leave()
        elif "excluded" in message:
            self.excluded = "this node was silent for so long that the others went on without it"
        else:
            super().hear(node, message)

    def take(self, generation: dict) -> None:
        """Accept a generation (group of ranks) if it is new; offer it to its ranks here, or to all ranks if it says stop."""
        if generation["number"] <= self.generation["number"]:
            return
        self.generation, self.causes = generation, []
        self.writer = generation["writes"]
        threading.Thread(target=self._note, daemon=True).start()  # the folder may be slow, and beats must not wait
        for worker in self.workers:
            if worker.code is None and (worker.rank in generation["ranks"] or generation["stop"]):
                write_atomically(f"{worker.files}.generation", json.dumps(generation).encode())
                worker.pulse.put("offered", generation["number"])
        if generation["stop"]:
            self.ends = time.monotonic()

    def lost(self, node: int) -> None:
        connection = self.connection or self.hub.connections[node]
        seconds = time.monotonic() - connection.heard
        silent = seconds > channel.SILENCE_SECONDS
        how = f"has been silent for {seconds:.0f} s (machine or network)" if silent else "is lost"
        if self.connection:
            self._leader_is_lost(silent, how)
            return
        if silent:
            connection.tell(excluded=True)
        self.hub.remove(node)
        self.judge.forget(node)
        if node in self.finished:
            return
        if self.generation["number"] == 0:
            self.judge.accuse(cause(f"{self.name_of(node)} {how}", restart=False))
        elif self.leader:
            self.leader.lost(node, silent, how)

    def _leader_is_lost(self, silent: bool, how: str) -> None:
        """Unless the run ends, lead it if this is the first node left; else join the first. If no node answers, fail."""
        lost = self.led_by
        self.connection.close()
        self.connection = None
        if self.stop_signal or self.ends is not None:
            return
        if self.own_finished():
            self.finished.update(range(self.nodes))
            return
        if not any(re.search(rf"\bnode {lost}\b", cause) for cause in self.causes):  # its own report says more
            self.causes.append(f"{self.name_of(lost)} {how}")
        for node, address, port in sorted(self.generation["nodes"]):
            if node == self.node:
                self.hub = self._new_hub(self.listener)
                self.hub.mark_complete()
                self.judge, self.finished = Judge(self.ranks), set()
                self.leader, self.led_by = Leader(self, after=lost, silent=silent), node
                return
            if node != lost:
                with contextlib.suppress(UserError):
                    self.connection, *_ = greeting.join(address, port, self.hello, 0, self.say, self.key)
                    self.led_by, self.told_leader = node, None
                    return
        self.verdict = cause("; ".join(self.causes), restart=False)
