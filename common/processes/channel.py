"""The line between the parents of a job's nodes: how they find each other, and how each knows that the others live.

Node 0 listens on the platform's port, the others connect to it. Messages are lines of JSON, nothing is ever unpickled, and
nobody takes part who has not introduced itself as a node of this very job. A node that has gone is known by its closed
connection at once; one behind a cut link or on a frozen machine, by its silence.
"""

import contextlib
import errno
import json
import selectors
import socket
import time
from typing import Any, Callable

from common.errors import UserError, one_line

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 5.0  # without a word from a node for so long, it or the network is gone
ANSWER_SECONDS = 4.0  # a stranger on the port does not answer our greeting
WAITING_LINE_SECONDS = 10
LONGEST_MESSAGE = 1 << 20


class Gone(Exception):
    """The other end is closed, silent, or does not speak our language."""


class Line:
    """One connection: whole messages in and out, never blocking for long."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        connection.settimeout(SILENCE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self.heard = time.monotonic()

    def fileno(self):
        return self.connection.fileno()

    def send(self, **message: Any) -> None:
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Gone(one_line(error)) from None

    def receive(self) -> list:
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
            raise Gone("it does not speak our language")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise Gone("it does not speak our language") from None
        if not all(isinstance(message, dict) for message in messages):
            raise Gone("it does not speak our language")
        return messages

    def wait(self, seconds: float) -> list:
        """The next messages, or Gone after so long without any."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            deadline = time.monotonic() + seconds
            while True:
                if not selector.select(max(0, deadline - time.monotonic())):
                    raise Gone(f"no answer for {seconds:.0f} s")
                messages = self.receive()
                if messages:
                    return messages

    def close(self):
        with contextlib.suppress(OSError):
            self.connection.close()


def describe_nodes(nodes: list, workers: int) -> str:
    """ "node 1 (ranks 2-3)" for each, so that a person can find the machine in the console."""
    ranks = [f"{n * workers}-{n * workers + workers - 1}" if workers > 1 else str(n) for n in nodes]
    return ", ".join(f"node {n} (rank{'s' * (workers > 1)} {r})" for n, r in zip(nodes, ranks))


def first_difference(one: str, other: str) -> tuple:
    """The first differing words of two texts."""
    for left, right in zip(one.split(" "), other.split(" ")):
        if left != right:
            return left, right
    return one, other


class Hub:
    """Node 0's side: knows every other node by its number, and hears from all of them."""

    def __init__(self, port: int, hello: dict, say: Callable):
        self._hello, self._say = hello, say
        self.lines = {}
        self.hellos = {}  # of every node that has ever been one of us, and by how many seconds its clock is ahead of ours
        self._strangers = {}
        self._complete = False  # from then on nobody who comes can be one of us
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

    def poll(self, seconds: float) -> list:
        """[(node, message)], a message of None for a node that has gone."""
        found = []
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
                    found.append((node, None))
                continue
            if node is None and messages:
                self._introduce(line, messages[0])
            else:
                found += [(node, message) for message in messages]
        now = time.monotonic()
        gone = {node for node, message in found if message is None}
        silent = {node for node, line in self.lines.items() if now - line.heard > SILENCE_SECONDS}
        found += [(node, None) for node in sorted(silent - gone)]
        for line, since in list(self._strangers.items()):
            if now - since > ANSWER_SECONDS:
                self._drop(line)
        return found

    def send(self, **message):
        """To every node; one that cannot be reached is noticed by its silence."""
        for line in list(self.lines.values()):
            with contextlib.suppress(Gone):
                line.send(**message)

    def forget(self, node):
        self._drop(self.lines.pop(node))

    def close(self):
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
        """A node of this job is welcome; another job is sent away alone; a contradiction stops everyone, naming both."""
        mine, node = self._hello, hello.get("node")
        if hello.get("app") != mine["app"] or hello.get("job") != mine["job"]:
            with contextlib.suppress(Gone):
                line.send(
                    refused=f"this port belongs to another job, {mine['job']!r} on {mine['host']}; give yours another port"
                )
            self._say(f"sent away {one_line(hello.get('host'))[:80]}: it belongs to job {one_line(hello.get('job'))[:80]!r}")
            self._drop(line)
            return
        if self._complete:
            with contextlib.suppress(Gone):
                line.send(
                    refused=f"the job on this port, on {mine['host']}, has all its nodes already; give yours another port"
                )
            self._drop(line)
            return
        if not isinstance(node, int) or not 0 <= node < mine["nodes"]:
            claim = f"node {one_line(node)[:20]} of {one_line(hello.get('nodes'))[:20]}"
            theirs = f"host {one_line(hello.get('host'))[:80]} says it is {claim}"
            self._refuse_all(f"{theirs}, but host {mine['host']} counts {mine['nodes']} nodes", line)
        if node == 0 or node in self.lines:
            first = mine["host"] if node == 0 else self.lines[node].host
            self._refuse_all(f"duplicate rank: host {first} and host {hello.get('host')} both say they are node {node}", line)
        its = hello.get("alike") if isinstance(hello.get("alike"), dict) else {}
        different = [name for name in mine["alike"] if its.get(name) != mine["alike"][name]]
        if different:
            name = different[0]
            ours, theirs = first_difference(str(mine["alike"][name]), one_line(its.get(name)))
            there = f"{theirs[:200]} on node {node} (host {hello.get('host')})"
            self._refuse_all(f"{name} differs: {ours} on node 0 (host {mine['host']}), {there}", line)
        self._strangers.pop(line, None)
        line.host = one_line(hello.get("host"))[:80]
        self.lines[node] = line
        clock = hello.get("clock")
        self.hellos[node] = {**hello, "ahead": clock - time.time() if isinstance(clock, (int, float)) else 0.0}

    def _refuse_all(self, why, newcomer=None):
        for line in [*self.lines.values(), *([newcomer] if newcomer else [])]:
            with contextlib.suppress(Gone):
                line.send(refused=why)
        raise UserError(why)


def _listen(port):
    """A socket on the platform's port; for a moment it may still belong to the start before this one."""
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
                raise UserError(
                    f"port {port} on this node is taken by another program ({error.strerror}); give the job another port"
                ) from None
            time.sleep(0.2)


def connect(address: str, port: int, seconds: float, say: Callable) -> socket.socket:
    """A socket to node 0, once its name and port answer."""
    begun = told = time.monotonic()
    while True:
        try:
            return socket.create_connection((address, port), timeout=SILENCE_SECONDS)
        except OSError as error:  # its name may not resolve yet, its program may not run yet
            now = time.monotonic()
            if now - begun >= seconds:
                raise UserError(
                    f"node 0 at {address}:{port} did not answer within {seconds:.0f} s: {one_line(error)}"
                ) from None
            if now - told >= WAITING_LINE_SECONDS:
                told = now
                say(f"waiting for node 0 at {address}:{port}, {now - begun:.0f} s: {one_line(error)}")
            time.sleep(0.2)


def join(address: str, port: int, hello: dict, seconds: float, say: Callable) -> tuple:
    """Another node's side: the line to node 0, and what it said when all had come."""
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
                patience = SILENCE_SECONDS  # it beats while it waits for the others
            line.send(waiting=True)
    except Gone as gone:
        raise UserError(
            f"{address}:{port} answers but is not node 0 of this job ({gone}): another program has the port, or the job stopped"
        ) from None
