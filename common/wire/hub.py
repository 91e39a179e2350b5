"""Node 0's side of the connections (channel.py): it meets the other nodes of its job, and keeps strangers from doing harm.

A stranger is a connection that has not yet proved that it belongs. Few of them may wait, each for a short time, and they are
counted in one line. Whatever they send, the job goes on.
"""

import collections
import contextlib
import errno
import math
import selectors
import socket
import time
from typing import Any, Callable

from common import naming
from common.errors import UserError, count, one_line
from common.wire import channel, network, secret
from common.wire.channel import BEAT_SECONDS, NOT_OURS, SILENCE_SECONDS, Closed, Gone, Line, beat_seconds, checked
from common.wire.messages import HELLO, PROOF

STRANGERS = 64  # as many connections may wait without a proof, beside those of the nodes that are still missing
STRANGER_SECONDS = 2.0
STRANGERS_LINE_SECONDS = 600
ACCEPTED_AT_ONCE = 256
PAUSE_SECONDS = 0.1  # without accepting, where there are no descriptors left
SPARE_DESCRIPTORS = 256  # for what else this process opens
LACK = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}  # of descriptors or memory


class Hub:
    """The connections to all other nodes, by their numbers."""

    def __init__(self, listener: socket.socket, hello: dict, say: Callable, key: bytes = b"", stays_open: bool = False):
        """`stays_open`: nodes may also join later, and whoever does not fit is refused alone."""
        self._hello, self._say, self._key, self._stays_open = hello, say, key, stays_open
        self.lines: dict[int, Line] = {}
        self.hellos: dict[int, dict] = {}  # of every node that has ever joined; "ahead": by how much its clock is ahead of ours
        self._strangers: dict[Line, tuple[float, str]] = {}  # since when each is connected, and the number that we have sent it
        self._refused: collections.Counter = collections.Counter()
        self._told = -math.inf
        self._complete = False  # all nodes have joined, further ones are refused
        self._listener, self._pause = listener, 0.0
        listener.setblocking(False)
        listener.listen(4096)
        _reserve_descriptors(2 * hello["nodes"] + STRANGERS)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def meet(self, seconds: float) -> None:
        """Wait until every node has introduced itself; name those that have not when the time is over."""
        nodes = self._hello["nodes"]
        begun = told = beaten = time.monotonic()
        while len(self.lines) < nodes - 1:
            for node, message in self.poll(BEAT_SECONDS):
                if message is None:
                    self._say(f"node {node} went away again while waiting for the others")
                    self.forget(node)
            now = time.monotonic()
            if now - beaten >= beat_seconds(nodes):
                beaten = now
                self.send(beat=True)
            if now - told >= channel.WAITING_LINE_SECONDS:
                told = now
                self._say(f"waiting for {self._missing()}, {now - begun:.0f} s")
            if now - begun >= seconds and len(self.lines) < nodes - 1:
                self._refuse_all(f"{self._missing()} did not come within {seconds:.0f} s")
        self._complete = True

    def _missing(self):
        missing = [node for node in range(1, self._hello["nodes"]) if node not in self.lines]
        return naming.describe_nodes(missing, self._hello["workers"])

    def is_complete(self) -> None:
        """From here on nobody is waited for."""
        self._complete = True

    def poll(self, seconds: float) -> list[tuple]:
        """[(node, message)], a message of None for a node that has gone."""
        received = []
        for key, _ in self._selector.select(min(seconds, PAUSE_SECONDS) if self._pause else seconds):
            line: Any = key.fileobj
            if line is self._listener:
                self._accept()
            elif line in self._strangers:
                self._hear_stranger(line)
            elif line.node in self.lines:
                try:
                    received += [(line.node, checked(message)) for message in line.receive()]
                except Gone:
                    received.append((line.node, None))
        now = time.monotonic()
        gone = {node for node, message in received if message is None}
        silent = {node for node, line in self.lines.items() if now - line.heard > SILENCE_SECONDS}
        received += [(node, None) for node in sorted(silent - gone)]
        for line, (since, _) in list(self._strangers.items()):
            if now - since <= STRANGER_SECONDS:
                break  # the others came later
            self._refuse(line, "said nothing in time")
        if self._pause and now > self._pause:
            self._pause = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._count_strangers(now)
        return received

    def send(self, **message: Any) -> None:
        """Send a message to every node."""
        for line in list(self.lines.values()):
            line.tell(**message)

    def forget(self, node: int) -> None:
        self._drop(self.lines.pop(node))

    def close(self) -> None:
        self._count_strangers(math.inf)
        for line in [*self.lines.values(), *self._strangers]:
            line.close()
        self._selector.close()
        self._listener.close()

    def address(self) -> str:
        """The address by which the others reach this node."""
        return next(iter(self.lines.values())).connection.getsockname()[0].replace("::ffff:", "")

    # --- Strangers ---

    def _accept(self):
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                line = Line(self._listener.accept()[0])
            except BlockingIOError:
                return
            except OSError as error:  # of one connection that has gone again, or of all
                if error.errno in LACK:
                    self._make_room()
                    return
                continue
            if not line.peer:  # gone already
                line.close()
                continue
            if len(self._strangers) >= STRANGERS + self._hello["nodes"] - 1 - len(self.lines):
                self._refuse(next(iter(self._strangers)), "made room for others")
            number = secret.nonce()
            self._strangers[line] = time.monotonic(), number
            self._selector.register(line, selectors.EVENT_READ)
            line.tell(app="anyrank", nonce=number)

    def _make_room(self):
        """Descriptors are lacking: close the connection of the oldest stranger, or accept no more for a moment."""
        if self._strangers:
            self._refuse(next(iter(self._strangers)), "made room for others")
        elif not self._pause:
            self._pause = time.monotonic() + PAUSE_SECONDS
            self._selector.unregister(self._listener)

    def _hear_stranger(self, line):
        try:
            for message in line.receive():
                if line.proved:
                    self._introduce(line, message)
                    return
                self._examine(line, message)
        except Closed:  # without a word, as what looks whether a port is open does
            self._drop(line)
        except Gone as gone:
            why = str(gone) if str(gone) == secret.DIFFERS else "sent something else"
            line.tell(refused=str(gone))
            self._refuse(line, why)

    def _examine(self, line, message):
        if not PROOF(message):
            raise Gone(NOT_OURS)
        numbers = self._strangers[line][1], message["nonce"]
        if not secret.proves(message["proof"], self._key, "node", *numbers):
            raise Gone(secret.DIFFERS)
        line.send(proof=secret.proof(self._key, "hub", *numbers))
        line.has_proved()

    def _introduce(self, line, hello):
        """Accept a node of this job, refuse one of another; where two nodes contradict each other, stop all and name both."""
        if not HELLO(hello):
            raise Gone(NOT_OURS)
        mine, node, host = self._hello, hello["node"], one_line(hello["host"])[:80]
        if hello["app"] != mine["app"] or hello["job"] != mine["job"]:
            line.tell(refused=f"this port belongs to another job, {mine['job']!r} on {mine['host']}; give yours another port")
            self._refuse(line, f"belong to job {one_line(hello['job'])[:80]!r}, as that on host {host}")
            return
        if "leads" in hello and self._stays_open and not self._complete:
            raise channel.Elsewhere(*hello["leads"])
        if self._complete and not self._stays_open:
            line.tell(refused=f"the job on this port, on {mine['host']}, has all its nodes already; give yours another port")
            self._refuse(line, "came when all nodes were there")
            return
        if node >= mine["nodes"]:
            theirs = f"host {host} says it is node {node} of {hello['nodes']}"
            self._refuse_all(f"{theirs}, but host {mine['host']} has a world size of {mine['nodes']} nodes", line)
            return
        if node == mine["node"] or node in self.lines:
            first = mine["host"] if node == mine["node"] else self.hellos[node]["host"]
            self._refuse_all(f"duplicate rank: host {first} and host {host} both say they are node {node}", line)
            return
        for name, value in mine["alike"].items():
            its = hello["alike"].get(name)
            if its != value:
                ours, theirs = naming.first_difference(str(value), one_line(its))
                there = f"{theirs[:200]} on node {node} (host {host})"
                self._refuse_all(f"{name} differs: {ours} on node {mine['node']} (host {mine['host']}), {there}", line)
                return
        del self._strangers[line]
        line.node = node
        self.lines[node] = line
        self.hellos[node] = {**hello, "host": host, "ahead": hello["clock"] - time.time()}

    def _refuse(self, line, why):
        self._refused[why if why in self._refused or len(self._refused) < 20 else "of other kinds"] += 1
        self._drop(line)

    def _drop(self, line):
        self._strangers.pop(line, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line)
        line.close()

    def _count_strangers(self, now):
        if self._refused and now - self._told >= STRANGERS_LINE_SECONDS:
            self._told = now
            kinds = ", ".join(f"{number} {why}" for why, number in self._refused.most_common(5))
            number = sum(self._refused.values())
            self._say(f"closed {count(number, 'connection')} that did not prove to belong to this job: {kinds}"[:500])
            self._refused.clear()

    def _refuse_all(self, why, newcomer=None):
        """Two nodes contradict each other: all stop, or only the newcomer where the others train already."""
        if newcomer and self._complete:
            newcomer.tell(refused=why)
            self._refuse(newcomer, "did not fit to the others")
            return
        for line in [*self.lines.values(), *([newcomer] if newcomer else [])]:
            line.tell(refused=why)
        raise UserError(why)


def listen(port: int) -> socket.socket:
    """A socket on the platform's port, which the start before this one may hold for another moment."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    deadline = time.monotonic() + 3
    while True:
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)
        except OSError as error:
            if error.errno != errno.EADDRINUSE and family == socket.AF_INET6:
                family = socket.AF_INET  # a host whose IPv6 is switched off
                continue
            if time.monotonic() > deadline:
                taken = f"port {port} on this node is taken by another program ({error.strerror})"
                raise UserError(f"{taken}; give the job another port") from None
            time.sleep(0.2)


def _reserve_descriptors(wanted: int) -> None:
    """Allow this process as many open files as the nodes and the strangers that may wait can take."""
    needed = wanted + SPARE_DESCRIPTORS
    allowed = network.allow_open_files(needed)
    if allowed < needed:
        raise UserError(
            f"node 0 needs {needed} open files for its connections, and may have {allowed}: raise the limit (ulimit -n)"
        )
