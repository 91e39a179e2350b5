"""The connections between the parents of a job's nodes: how they meet, and how each notices that another is gone.

Node 0 listens on the platform's port, the others connect to it. Messages are lines of JSON, nothing is ever unpickled, and
only a process that introduces itself as a node of this job takes part. A node that has gone is noticed by its closed
connection at once; a node with a cut link or a frozen machine, by its silence.
"""

import contextlib
import errno
import json
import select
import selectors
import socket
import time
from typing import Any, Callable

from common.errors import UserError, one_line

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 5.0  # without a message from a node for this long, it or the network is gone
ANSWER_SECONDS = 4.0  # another program on the port does not answer our first message
WAITING_LINE_SECONDS = 10
LONGEST_MESSAGE = 1 << 20
NOT_OURS = "it sends no messages of this program"


class Gone(Exception):
    """The other end is closed, silent, or sends something else than our messages."""


class Line:
    """One connection: whole messages in and out, never blocking for long."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        connection.settimeout(SILENCE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self.heard = time.monotonic()

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, **message: Any) -> None:
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Gone(one_line(error)) from None

    def tell(self, **message: Any) -> None:
        """As send(), but a broken connection is left to be noticed when it is read, or by its silence."""
        with contextlib.suppress(Gone):
            self.send(**message)

    def receive(self) -> list[dict]:
        """The messages that have arrived; call it when the connection is readable."""
        try:
            chunk = self.connection.recv(65536)
        except OSError as error:
            raise Gone(one_line(error)) from None
        if not chunk:
            raise Gone("it closed the connection")
        self.heard = time.monotonic()
        *lines, self._received = (self._received + chunk).split(b"\n")
        if len(self._received) > LONGEST_MESSAGE:
            raise Gone(NOT_OURS)
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise Gone(NOT_OURS) from None
        if not all(isinstance(message, dict) for message in messages):
            raise Gone(NOT_OURS)
        return messages

    def wait(self, seconds: float) -> list[dict]:
        """The next messages; Gone after `seconds` without any."""
        deadline = time.monotonic() + seconds
        while self.readable(deadline - time.monotonic()):
            if messages := self.receive():
                return messages
        raise Gone(f"no answer for {seconds:.0f} s")

    def readable(self, seconds: float) -> bool:
        return bool(select.select([self], [], [], max(0, seconds))[0])

    def poll(self, seconds: float) -> list[tuple]:
        """[(0, message)] of node 0, as Hub.poll() of the others."""
        try:
            if self.readable(seconds):
                return [(0, message) for message in self.receive()]
        except Gone:
            return [(0, None)]
        return [(0, None)] if time.monotonic() - self.heard > SILENCE_SECONDS else []

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.close()


def describe_nodes(nodes: list[int], workers: int) -> str:
    """ "node 1 (ranks 2-3)" for each, so that a person can find the machine in the console."""
    ranks = [f"{n * workers}-{n * workers + workers - 1}" if workers > 1 else str(n) for n in nodes]
    return ", ".join(f"node {n} (rank{'s' * (workers > 1)} {r})" for n, r in zip(nodes, ranks))


def first_difference(one: str, other: str) -> tuple[str, str]:
    """The first words in which two texts differ."""
    for left, right in zip(one.split(" "), other.split(" ")):
        if left != right:
            return left, right
    return one, other


class Hub:
    """Node 0's side: the connections to all other nodes, by their numbers."""

    def __init__(self, port: int, hello: dict, say: Callable):
        self._hello, self._say = hello, say
        self.lines = {}
        self.hellos = {}  # of every node that has ever joined; "ahead": by how many seconds its clock is ahead of ours
        self._strangers = {}  # connections that have not introduced themselves, and since when they are open
        self._complete = False  # all nodes have joined, further ones are refused
        self._listener = _listen(port)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def meet(self, seconds: float) -> None:
        """Wait until every node has introduced itself; name those that have not when the time is over."""
        begun = told = time.monotonic()
        while len(self.lines) < self._hello["nodes"] - 1:
            self.send(beat=True)
            for node, message in self.poll(BEAT_SECONDS):
                if message is None:
                    self._say(f"node {node} went away again while waiting for the others")
                    self.forget(node)
            now = time.monotonic()
            missing = [n for n in range(1, self._hello["nodes"]) if n not in self.lines]
            if now - told >= WAITING_LINE_SECONDS:
                told = now
                self._say(f"waiting for {describe_nodes(missing, self._hello['workers'])}, {now - begun:.0f} s")
            if now - begun >= seconds and missing:
                self._refuse_all(f"{describe_nodes(missing, self._hello['workers'])} did not come within {seconds:.0f} s")
        self._complete = True

    def poll(self, seconds: float) -> list[tuple]:
        """[(node, message)], a message of None for a node that has gone."""
        received = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
                continue
            line: Any = key.fileobj
            node = next((n for n, other in self.lines.items() if other is line), None)
            try:
                messages = line.receive()
            except Gone:
                if node is None:
                    self._drop(line)
                else:
                    received.append((node, None))
                continue
            if node is None and messages:
                self._introduce(line, messages[0])
            else:
                received += [(node, message) for message in messages]
        now = time.monotonic()
        gone = {node for node, message in received if message is None}
        silent = {node for node, line in self.lines.items() if now - line.heard > SILENCE_SECONDS}
        received += [(node, None) for node in sorted(silent - gone)]
        for line, since in list(self._strangers.items()):
            if now - since > ANSWER_SECONDS:
                self._drop(line)
        return received

    def send(self, **message: Any) -> None:
        """To every node."""
        for line in list(self.lines.values()):
            line.tell(**message)

    def forget(self, node: int) -> None:
        self._drop(self.lines.pop(node))

    def close(self) -> None:
        for line in [*self.lines.values(), *self._strangers]:
            line.close()
        self._listener.close()

    def address(self) -> str:
        """The address by which the others reach this node."""
        return next(iter(self.lines.values())).connection.getsockname()[0].replace("::ffff:", "")

    def _accept(self):
        connection, _ = self._listener.accept()
        line = Line(connection)
        self._strangers[line] = time.monotonic()
        self._selector.register(line, selectors.EVENT_READ)

    def _drop(self, line):
        self._strangers.pop(line, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line)
        line.close()

    def _introduce(self, line, hello):
        """Accept a node of this job, refuse one of another; where two nodes contradict each other, stop all and name both."""
        mine, node = self._hello, hello.get("node")
        if hello.get("app") != mine["app"] or hello.get("job") != mine["job"]:
            line.tell(refused=f"this port belongs to another job, {mine['job']!r} on {mine['host']}; give yours another port")
            self._say(f"refused host {one_line(hello.get('host'))[:80]}: it belongs to job {one_line(hello.get('job'))[:80]!r}")
            self._drop(line)
            return
        if self._complete:
            line.tell(refused=f"the job on this port, on {mine['host']}, has all its nodes already; give yours another port")
            self._drop(line)
            return
        if not isinstance(node, int) or not 0 <= node < mine["nodes"]:
            claim = f"node {one_line(node)[:20]} of {one_line(hello.get('nodes'))[:20]}"
            theirs = f"host {one_line(hello.get('host'))[:80]} says it is {claim}"
            self._refuse_all(f"{theirs}, but host {mine['host']} has a world size of {mine['nodes']} nodes", line)
        if node == 0 or node in self.lines:
            first = mine["host"] if node == 0 else self.lines[node].host
            self._refuse_all(f"duplicate rank: host {first} and host {hello.get('host')} both say they are node {node}", line)
        its = hello.get("alike") if isinstance(hello.get("alike"), dict) else {}
        for name, value in mine["alike"].items():
            if its.get(name) != value:
                ours, theirs = first_difference(str(value), one_line(its.get(name)))
                there = f"{theirs[:200]} on node {node} (host {hello.get('host')})"
                self._refuse_all(f"{name} differs: {ours} on node 0 (host {mine['host']}), {there}", line)
        self._strangers.pop(line, None)
        line.host = one_line(hello.get("host"))[:80]
        self.lines[node] = line
        clock = hello.get("clock")
        self.hellos[node] = {**hello, "ahead": clock - time.time() if isinstance(clock, (int, float)) else 0.0}

    def _refuse_all(self, why, newcomer=None):
        for line in [*self.lines.values(), *([newcomer] if newcomer else [])]:
            line.tell(refused=why)
        raise UserError(why)


def _listen(port):
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


def connect(address: str, port: int, seconds: float, say: Callable) -> socket.socket:
    """A socket to node 0, once its name resolves and its port answers."""
    begun, node_0 = time.monotonic(), f"node 0 at {address}:{port}"
    told = begun
    while True:
        try:
            return socket.create_connection((address, port), timeout=SILENCE_SECONDS)
        except OSError as error:  # the name may not resolve yet, or the program not run yet
            now = time.monotonic()
            if now - begun >= seconds:
                raise UserError(f"{node_0} did not answer within {seconds:.0f} s: {one_line(error)}") from None
            if now - told >= WAITING_LINE_SECONDS:
                told = now
                say(f"waiting for {node_0}, {now - begun:.0f} s: {one_line(error)}")
            time.sleep(0.2)


def join(address: str, port: int, hello: dict, seconds: float, say: Callable) -> tuple[Line, dict]:
    """Another node's side: the line to node 0, and the message with which it starts all nodes."""
    line = Line(connect(address, port, seconds, say))
    try:
        line.send(**hello, clock=time.time())
        patience = ANSWER_SECONDS
        while True:
            for message in line.wait(patience):
                if "refused" in message:
                    raise UserError(one_line(message["refused"])[:500])
                if "go" in message:
                    return line, message["go"]
                patience = SILENCE_SECONDS  # node 0 sends beats while it waits for the others
            line.send(waiting=True)
    except Gone as gone:
        raise UserError(
            f"{address}:{port} answers but is not node 0 of this job ({gone}): another program has the port, or the job has "
            "stopped; see the log of node 0, or give the job another port"
        ) from None
