"""The leader of an elastic job: the parent process (parent.py) that decides which ranks are members, and from when.

Each change begins a numbered generation: a list of ranks, and a lighthouse of torchft at which they meet (members.py). torchft
knows a rank only by its heartbeats. The leader decides what torchft cannot know: whether a node has ended or is only silent,
whether more than half of the nodes are on this side of a broken network, and where the nodes meet when the leader is lost.
"""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, Optional, Protocol

from common.alive.judge import CASCADE_SECONDS
from common.alive.supervisor import Supervisor
from common.alive.wire import channel
from common.elastic import quorum
from common.elastic.messages import Generation, NodeReport
from common.errors import UserError, count
from common.world import network

GATHER_SECONDS = 3.5  # for the nodes to come to a new leader: they notice the loss of the old one at different moments
STOP_SECONDS = 1.5  # within which a platform that stops the job tells all nodes; if it takes nodes away, it tells only these
TRIES = 5  # to form a group of the same members again
CHANGES = 20  # the latest that a generation lists: several generations may end before a step counts
SEEK_SECONDS = 2.0  # between two looks for a node 0 that has come back


class LeadingNode(Protocol):
    """What a Leader needs of the parent process that it is a part of."""

    supervisor: Supervisor
    min_nodes: int
    address: str  # of this node, as the others reach it
    generation: Generation  # the last one
    causes: list[str]  # what has happened since the last generation, for the log
    ends: Optional[float]  # since when the workers save and end

    @property
    def node(self) -> int: ...

    def nodes_of(self, ranks: Iterable[int]) -> set[int]: ...

    def take(self, generation: Generation) -> None: ...

    def stop_job(self, number: int) -> None:
        """Let the workers of all nodes save and stop on this signal."""
        ...

    def leave(self) -> None:
        """Let this node end on the signal that it was told, as the others go on."""
        ...


class Leader:
    """The part of a parent that leads the job. `after`: the leader before, which is lost; `silent`: it may still run."""

    def __init__(self, parent: LeadingNode, after: Optional[int] = None, silent: bool = False):
        self._parent = parent
        self._supervisor = parent.supervisor
        self._reports: dict[int, NodeReport] = {}  # {node: what it last said of its workers (messages.HERE)}
        self._greeted = set(self._connections())
        self._silent: set[int] = {after} if after is not None and silent else set()  # lost nodes that may still run
        self._lost: set[int] = set() if after is None else {after}  # lost since the last generation; may be back as new nodes
        self._gather_until = 0.0 if after is None else time.monotonic() + GATHER_SECONDS
        self._stops: dict[int, tuple[float, int]] = {}  # {node: (when it was told to stop, by which signal)}
        self._leaving: set[int] = set()  # the nodes in _stops that were told that they may leave
        self._stuck_since = self._short_since = self._sought = 0.0
        self._tries = 0
        self._lighthouse: Any = None
        self._kept: list = []  # all earlier lighthouses: to delete one may wait for a host that is cut off

    def _connections(self) -> dict[int, channel.Connection]:
        hub = self._supervisor.loop.hub
        return hub.connections if hub else {}

    def hear(self, node: int, report: NodeReport) -> None:
        self._reports[node] = report

    def told_to_stop(self, node: int, number: int) -> None:
        self._stops.setdefault(node, (time.monotonic(), number))

    def lost(self, node: int, silent: bool, how: str) -> None:
        """Note that a node is lost. `silent`: it may still run; `how`: what is known of the loss, for the log."""
        parent = self._parent
        report = self._reports.pop(node, None)
        self._greeted.discard(node)
        self._leaving.discard(node)
        self._lost.add(node)
        if silent:
            self._silent.add(node)
        stop = self._stops.pop(node, None)
        if stop:
            parent.causes.append(f"{self._supervisor.name_of(node)} was told to stop ({signal.Signals(stop[1]).name})")
        elif report and report["workers"]:  # else the end of its workers was reported already
            parent.causes.append(f"{self._supervisor.name_of(node)} {how}")

    def lead(self, now: float) -> None:
        """Greet nodes that join, answer stop signals, and begin a generation (group of ranks) if one is due. Called often."""
        parent = self._parent
        for node in set(self._connections()) - self._greeted:
            go = {"attempt": 0, "address": parent.address, "port": network.free_port(), "more": {"led_by": parent.node}}
            self._connections()[node].tell(go=go)
            self._greeted.add(node)
        self._seek_node_0(now)
        self._answer_stops(now)
        if not self._supervisor.loop.stop_signal and parent.ends is None:
            self._decide(now)

    # --- The next generation ---

    def _decide(self, now: float) -> None:
        """Form a new group when ranks start, join, are lost or break off a step; wait or stop if too few nodes are left."""
        parent = self._parent
        last = self._parent.generation
        ranks = [rank for rank in last["ranks"] if not parent.nodes_of([rank]) & self._lost]
        there = quorum.next_members(last["number"], ranks, self._reports.values())
        if last["number"] == 0:
            if len(there.ranks) == self._supervisor.here.world_size:
                self._announce(there.ranks, "")
            return
        if not self._gather(now):
            return
        self._stuck_since = (self._stuck_since or now) if there.stuck else 0.0
        stuck = self._stuck_since and now - self._stuck_since > CASCADE_SECONDS
        if not there.missing and not there.new and not stuck and len(ranks) == len(last["ranks"]):
            return
        why = [*parent.causes, *(f"{self._supervisor.name_of(node)} has joined" for node in sorted(parent.nodes_of(there.new)))]
        self._tries = 0 if why else self._tries + 1
        why = "; ".join(why or ["the connection between two ranks has broken"])
        before = parent.nodes_of(last["ranks"])
        now_there = parent.nodes_of(set(there.ranks) - there.new)
        if not quorum.may_continue(before, now_there, self._silent):
            of = f"{len(now_there)} of {count(len(before), 'node')}"
            why += f"; {of} cannot know whether the others go on"
            self._announce(there.ranks, why, stop=True, writes=last["writes"])  # only that rank saves, if it is here
        elif self._tries > TRIES:
            self._announce(there.ranks, f"{why}, and {TRIES} tries to connect them have failed", stop=True)
        elif len(parent.nodes_of(there.ranks)) < parent.min_nodes:
            self._wait_for_more(there.ranks, why, now)
        else:
            self._announce(there.ranks, why, writes=min(set(there.ranks) - there.new, default=None))

    def _gather(self, now: float) -> bool:
        """Whether a new leader has waited enough for reports of the nodes; nodes that ended or are late are marked as lost."""
        parent = self._parent
        for node, address, port in parent.generation["nodes"] if self._gather_until else ():
            if node in self._lost or node == parent.node or node in self._reports:
                continue
            if channel.port_is_closed(address, port):
                self._lost.add(node)
                parent.causes.append(f"{self._supervisor.name_of(node)} is lost")
            elif now < self._gather_until:
                return False
            else:
                self._silent.add(node)
                self._lost.add(node)
                parent.causes.append(f"{self._supervisor.name_of(node)} did not come")
        self._gather_until = 0.0
        return True

    def _wait_for_more(self, ranks: list[int], why: str, now: float) -> None:
        parent = self._parent
        fewer = f"fewer than --min_nodes {parent.min_nodes}"
        seconds = f"{self._supervisor.join_seconds:.0f} s"
        if not self._short_since:
            self._short_since = now
            self._supervisor.say(f"{why}; {fewer} remain: waiting for others up to {seconds} (--join_seconds)")
        if now - self._short_since > self._supervisor.join_seconds:
            self._announce(ranks, f"{why}; {fewer} remained for {seconds}", stop=True)

    def _announce(self, ranks: list[int], why: str, stop: bool = False, writes: Optional[int] = None) -> None:
        """Send the next generation (group of ranks), with these ranks, to all nodes. `stop`: the run is to end.
        `writes`: the rank that writes the files from now on, if the one before is lost; None: the first of the ranks."""
        parent = self._parent
        last = self._parent.generation
        if self._lighthouse:
            threading.Thread(target=self._lighthouse.shutdown, daemon=True).start()
            self._kept.append(self._lighthouse)
        self._lighthouse = None if stop else quorum.lighthouse(parent.address, len(ranks))
        still_there = last["writes"] in ranks and not parent.nodes_of([last["writes"]]) & self._lost
        self._short_since = 0.0
        self._stuck_since = 0.0
        self._silent = set()
        self._lost = set()
        hub = self._supervisor.loop.hub
        nodes = [[parent.node, parent.address, _listens(self._supervisor.hello)]]
        if hub:
            nodes += [[node, at.peer, _listens(hub.hellos[node])] for node, at in hub.connections.items()]
        number = 1 + max([last["number"], *(report["generation"] for report in self._reports.values())])
        generation: Generation = {
            "number": number, "ranks": ranks, "why": why[:8000], "stop": stop,
            "changes": [*last["changes"][1 - CHANGES :], [number, why[:8000]]],
            "writes": last["writes"] if still_there else min(ranks, default=0) if writes is None else writes,
            "lighthouse": quorum.address_of(self._lighthouse, parent.address),
            "nodes": nodes,
        }  # fmt: skip
        if hub:
            hub.send(generation=generation)
        parent.take(generation)

    # --- Nodes that leave, and node 0 ---

    def _answer_stops(self, now: float) -> None:
        """Stop the job if too few nodes would remain without those told to stop; else let these leave after STOP_SECONDS."""
        parent = self._parent
        if not self._stops or self._supervisor.loop.stop_signal:
            return
        remaining = {parent.node, *self._connections()} - set(self._stops)
        if len(remaining) < parent.min_nodes:
            parent.stop_job(next(number for _, number in self._stops.values()))
        elif now - min(since for since, _ in self._stops.values()) > STOP_SECONDS:
            for node in set(self._stops) - {parent.node} - self._leaving:
                self._connections()[node].tell(leave=True)
                self._leaving.add(node)
            if parent.node in self._stops:
                number = self._stops[parent.node][1]
                why = f"{self._supervisor.name_of(parent.node)} was told to stop ({signal.Signals(number).name})"
                for connection in self._connections().values():
                    connection.tell(cause=why)
                parent.leave()

    def _seek_node_0(self, now: float) -> None:
        """While node 0 is lost, try every SEEK_SECONDS to tell it which node leads: once restarted, it waits for the others."""
        if self._parent.node and 0 not in self._connections() and now - self._sought > SEEK_SECONDS:
            self._sought = now
            threading.Thread(target=self._tell_node_0, daemon=True).start()

    def _tell_node_0(self):
        parent = self._parent
        with contextlib.suppress(OSError, channel.ConnectionLost, UserError):
            place = self._supervisor.here.master_addr, self._supervisor.here.master_port
            connection = channel.Connection(socket.create_connection(place, timeout=SEEK_SECONDS))
            channel.prove(connection, self._supervisor.key)
            listens = _listens(self._supervisor.hello)
            more = {"listens": listens, "leads": [parent.address, listens]}
            connection.send(**{**self._supervisor.hello, "more": more}, clock=time.time())
            connection.wait(SEEK_SECONDS)
            connection.close()


def _listens(hello: dict[str, Any]) -> int:
    """Return the port at which a node listens if it has to lead."""
    return hello["more"]["listens"]
