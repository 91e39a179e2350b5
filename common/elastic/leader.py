"""The leader of an elastic job: the parent process (parent.py) that decides which ranks are members,
and from when.

Each change begins a numbered generation: a list of ranks, and a lighthouse of torchft at which they meet
(members.py). torchft knows a rank only by its heartbeats. The leader decides what torchft cannot know:
whether a node has ended or is only silent, whether more than half of the nodes are on this side of a broken
network, and where the nodes meet when the leader is lost.
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

# for the nodes to come to a new leader: they notice the loss of the old one at different moments
GATHER_SECONDS = 3.5
# within which a platform that stops the job tells all nodes; if it takes nodes away, it tells only these
STOP_SECONDS = 1.5
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
    ending_since: Optional[float]  # since when the workers save and end

    @property
    def node(self) -> int: ...

    def nodes_of(self, ranks: Iterable[int]) -> set[int]: ...

    def accept(self, generation: Generation) -> None: ...

    def stop_job(self, number: int) -> None:
        """Let the workers of all nodes save and stop on this signal."""
        ...

    def leave(self) -> None:
        """Let this node end on the signal that it was told, as the others go on."""
        ...


class Leader:
    """Leads an elastic job, in the parent process of one node: keeps what the nodes report,
    and begins the generations."""

    def __init__(self, parent: LeadingNode, lost_leader: Optional[int] = None, is_silent: bool = False):
        """`lost_leader`: the node that led before, if it is lost; `is_silent`: it may still run."""
        self._parent = parent
        self._supervisor = parent.supervisor
        self._reports: dict[int, NodeReport] = {}  # {node: its last report of its workers}
        self._greeted = set(self._connections())
        # nodes lost since the last generation; they may be back as new ones
        self._lost_nodes: set[int] = set()
        self._silent: set[int] = set()  # those of the lost nodes that may still run
        if lost_leader is not None:
            self._lost_nodes.add(lost_leader)
            if is_silent:
                self._silent.add(lost_leader)
        self._gather_until = 0.0  # until when a new leader waits for reports; 0: it does not, or no longer
        if lost_leader is not None:
            self._gather_until = time.monotonic() + GATHER_SECONDS
        # {node: (when a stop signal came for it, the signal)}
        self._stop_requests: dict[int, tuple[float, int]] = {}
        self._leaving: set[int] = set()  # the nodes in _stop_requests that were told that they may leave
        self._stuck_since = 0.0  # since when a rank has broken off its step; 0: none has
        self._short_since = 0.0  # since when fewer than --min_nodes are left; 0: there are enough
        self._node_0_sought_at = 0.0
        self._tries = 0  # how often the same members were connected again
        self._lighthouse: Any = None  # of the last generation, at which its ranks meet
        # all earlier lighthouses: to delete one may wait for a host that is cut off
        self._old_lighthouses: list = []

    def _connections(self) -> dict[int, channel.Connection]:
        hub = self._supervisor.loop.hub
        return hub.connections if hub else {}

    def keep_report(self, node: int, report: NodeReport) -> None:
        self._reports[node] = report

    def note_stop(self, node: int, number: int) -> None:
        """Note that the platform stops a node with this signal; only the first time counts."""
        self._stop_requests.setdefault(node, (time.monotonic(), number))

    def handle_loss(self, node: int, is_silent: bool, description: str) -> None:
        """Note that a node is lost.

        `is_silent`: it may still run; `description`: what is known, for the log.
        """
        parent = self._parent
        report = self._reports.pop(node, None)
        self._greeted.discard(node)
        self._leaving.discard(node)
        self._lost_nodes.add(node)
        if is_silent:
            self._silent.add(node)
        stop = self._stop_requests.pop(node, None)
        if stop:
            parent.causes.append(
                f"{self._supervisor.name_of(node)} was told to stop ({signal.Signals(stop[1]).name})"
            )
        elif report and report["workers"]:  # else the end of its workers was reported already
            parent.causes.append(f"{self._supervisor.name_of(node)} {description}")

    def lead(self, now: float) -> None:
        """Greet nodes that join, answer stop signals, and begin a generation (group of ranks) if one is due.

        Called often.
        """
        parent = self._parent
        for node in set(self._connections()) - self._greeted:
            go = {
                "attempt": 0,
                "address": parent.address,
                "port": network.free_port(),
                "more": {"led_by": parent.node},
            }
            self._connections()[node].tell(go=go)
            self._greeted.add(node)
        self._seek_node_0(now)
        self._answer_stops(now)
        if not self._supervisor.loop.stop_signal and parent.ending_since is None:
            self._decide(now)

    # --- The next generation ---

    def _decide(self, now: float) -> None:
        """Form a new group when ranks start, join, are lost or break off a step;
        wait or stop if too few nodes are left."""
        parent = self._parent
        last = parent.generation
        ranks = [rank for rank in last["ranks"] if not parent.nodes_of([rank]) & self._lost_nodes]
        next_group = quorum.next_members(last["number"], ranks, self._reports.values())
        if last["number"] == 0:
            if len(next_group.ranks) == self._supervisor.world.world_size:
                self._announce(next_group.ranks, "")
            return
        if not self._finish_gathering(now):
            return
        if not next_group.stuck:
            self._stuck_since = 0.0
        elif not self._stuck_since:
            self._stuck_since = now
        is_stuck = self._stuck_since > 0 and now - self._stuck_since > CASCADE_SECONDS
        has_lost_ranks = len(ranks) < len(last["ranks"])
        if next_group.missing or next_group.new or is_stuck or has_lost_ranks:
            self._form(next_group, now)

    def _form(self, next_group: quorum.NextMembers, now: float) -> None:
        """Begin a generation of these members, or stop the run, or wait for more nodes."""
        parent = self._parent
        last = parent.generation
        joined = sorted(parent.nodes_of(next_group.new))
        causes = [*parent.causes, *(f"{self._supervisor.name_of(node)} has joined" for node in joined)]
        if causes:
            self._tries = 0
            why = "; ".join(causes)
        else:
            self._tries += 1
            why = "the connection between two ranks has broken"
        previous_nodes = parent.nodes_of(last["ranks"])
        remaining_nodes = parent.nodes_of(set(next_group.ranks) - next_group.new)
        if not quorum.may_continue(previous_nodes, remaining_nodes, self._silent):
            remaining_text = f"{len(remaining_nodes)} of {count(len(previous_nodes), 'node')}"
            why += f"; {remaining_text} cannot know whether the others go on"
            # only that rank saves, if it is here
            self._announce(next_group.ranks, why, stop=True, writer=last["writes"])
        elif self._tries > TRIES:
            self._announce(
                next_group.ranks, f"{why}, and {TRIES} tries to connect them have failed", stop=True
            )
        elif len(parent.nodes_of(next_group.ranks)) < parent.min_nodes:
            self._wait_for_more(next_group.ranks, why, now)
        else:
            self._announce(
                next_group.ranks, why, writer=min(set(next_group.ranks) - next_group.new, default=None)
            )

    def _finish_gathering(self, now: float) -> bool:
        """Return True once each node of the last generation has reported to this new leader or is lost: a
        node whose port is closed has ended, and one that has not come by `_gather_until` is silent. Always
        True for the first leader."""
        if not self._gather_until:
            return True
        parent = self._parent
        for node, address, port in parent.generation["nodes"]:
            if node in self._lost_nodes or node == parent.node or node in self._reports:
                continue
            if channel.port_is_closed(address, port):
                self._lost_nodes.add(node)
                parent.causes.append(f"{self._supervisor.name_of(node)} is lost")
            elif now < self._gather_until:
                return False
            else:
                self._silent.add(node)
                self._lost_nodes.add(node)
                parent.causes.append(f"{self._supervisor.name_of(node)} did not come")
        self._gather_until = 0.0
        return True

    def _wait_for_more(self, ranks: list[int], why: str, now: float) -> None:
        """Say, once, that too few nodes are left; after --join_seconds, stop the run."""
        parent = self._parent
        fewer = f"fewer than --min_nodes {parent.min_nodes}"
        limit = f"{self._supervisor.join_seconds:.0f} s"
        if not self._short_since:
            self._short_since = now
            self._supervisor.say(f"{why}; {fewer} remain: waiting for others up to {limit} (--join_seconds)")
        if now - self._short_since > self._supervisor.join_seconds:
            self._announce(ranks, f"{why}; {fewer} remained for {limit}", stop=True)

    def _announce(self, ranks: list[int], why: str, stop: bool = False, writer: Optional[int] = None) -> None:
        """Send the next generation (group of ranks), with these ranks, to all nodes.

        `stop`: the run is to end. `writer`: the rank that writes the files if the one before is lost; None:
        the first of the ranks."""
        parent = self._parent
        last = parent.generation
        self._replace_lighthouse(None if stop else len(ranks))
        last_writer = last["writes"]
        if last_writer in ranks and not parent.nodes_of([last_writer]) & self._lost_nodes:
            writer = last_writer
        elif writer is None:
            writer = min(ranks, default=0)
        self._begin_counting_anew()
        hub = self._supervisor.loop.hub
        nodes = [[parent.node, parent.address, _leader_port(self._supervisor.hello)]]
        if hub:
            nodes += [
                [node, connection.peer, _leader_port(hub.hellos[node])]
                for node, connection in hub.connections.items()
            ]
        number = 1 + max([last["number"], *(report["generation"] for report in self._reports.values())])
        generation: Generation = {
            "number": number, "ranks": ranks, "why": why[:8000], "stop": stop,
            "changes": [*last["changes"][1 - CHANGES :], [number, why[:8000]]],
            "writes": writer,
            "lighthouse": quorum.address_of(self._lighthouse, parent.address),
            "nodes": nodes,
        }  # fmt: skip
        if hub:
            hub.send(generation=generation)
        parent.accept(generation)

    def _replace_lighthouse(self, num_ranks: Optional[int]) -> None:
        """End the lighthouse of the last generation, and start one for so many ranks; None: start none."""
        if self._lighthouse:
            threading.Thread(target=self._lighthouse.shutdown, daemon=True).start()  # it may take long
            self._old_lighthouses.append(self._lighthouse)
        self._lighthouse = None
        if num_ranks is not None:
            self._lighthouse = quorum.start_lighthouse(self._parent.address, num_ranks)

    def _begin_counting_anew(self) -> None:
        """Forget what was noted since the last generation, as the next one takes account of it."""
        self._short_since = 0.0
        self._stuck_since = 0.0
        self._silent = set()
        self._lost_nodes = set()

    # --- Nodes that leave, and node 0 ---

    def _answer_stops(self, now: float) -> None:
        """Stop the job if too few nodes would remain without those told to stop;
        else let these leave after STOP_SECONDS."""
        parent = self._parent
        if not self._stop_requests or self._supervisor.loop.stop_signal:
            return
        remaining = {parent.node, *self._connections()} - set(self._stop_requests)
        if len(remaining) < parent.min_nodes:
            parent.stop_job(next(number for _, number in self._stop_requests.values()))
        elif now - min(since for since, _ in self._stop_requests.values()) > STOP_SECONDS:
            for node in set(self._stop_requests) - {parent.node} - self._leaving:
                self._connections()[node].tell(leave=True)
                self._leaving.add(node)
            if parent.node in self._stop_requests:
                number = self._stop_requests[parent.node][1]
                why = (
                    f"{self._supervisor.name_of(parent.node)} was told to stop "
                    f"({signal.Signals(number).name})"
                )
                for connection in self._connections().values():
                    connection.tell(cause=why)
                parent.leave()

    def _seek_node_0(self, now: float) -> None:
        """While node 0 is lost, try every SEEK_SECONDS to tell it which node leads: once restarted,
        it waits for the others."""
        if self._parent.node and 0 not in self._connections() and now - self._node_0_sought_at > SEEK_SECONDS:
            self._node_0_sought_at = now
            threading.Thread(target=self._redirect_node_0, daemon=True).start()

    def _redirect_node_0(self):
        """Join node 0 as a node that knows the leader, so that it follows. Errors are ignored."""
        parent = self._parent
        with contextlib.suppress(OSError, channel.ConnectionLost, UserError):
            node_0_address = self._supervisor.world.master_addr, self._supervisor.world.master_port
            connection = channel.Connection(socket.create_connection(node_0_address, timeout=SEEK_SECONDS))
            channel.prove(connection, self._supervisor.key)
            port = _leader_port(self._supervisor.hello)
            more = {"listens": port, "leads": [parent.address, port]}
            connection.send(**{**self._supervisor.hello, "more": more}, clock=time.time())
            connection.wait(SEEK_SECONDS)
            connection.close()


def _leader_port(hello: dict[str, Any]) -> int:
    """Return the port at which a node listens if it has to lead."""
    return hello["more"]["listens"]
