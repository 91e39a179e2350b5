"""Node 0's side of the connections (channel.py): it accepts the other nodes of its job,
and limits what strangers can do.

A stranger is a connection that has not yet proved that it has the job's secret. Few strangers may wait, each
for a short time, and a line of the log counts those that were refused. Whatever they send, the job goes on.
"""

import collections
import contextlib
import errno
import math
import selectors
import socket
import time
from typing import Any, Callable, Optional

from common.alive.wire import secret
from common.alive.wire.channel import (
    BEAT_SECONDS,
    NOT_OURS,
    SILENCE_SECONDS,
    Closed,
    Connection,
    ConnectionLost,
    SecretsDiffer,
    beat_seconds,
    checked,
)
from common.alive.wire.messages import HELLO, PROOF
from common.errors import UserError, count, one_line
from common.progress import Waiting
from common.world import naming, network

STRANGERS = 64  # connections that may wait without a proof, in addition to one for each node that is missing
STRANGER_SECONDS = 2.0
STRANGERS_LINE_SECONDS = 600
ACCEPTED_AT_ONCE = 256
PAUSE_SECONDS = 0.1  # for which no connection is accepted when there are no descriptors left
SPARE_DESCRIPTORS = 256  # for the other files of this process
# the errors for a lack of descriptors or memory
LACK = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Hub:
    """The connections to all other nodes, by their numbers."""

    def __init__(
        self, listener: socket.socket, hello: dict, say: Callable, key: bytes = b"",
        stays_open: bool = False, greet: Optional[Callable[[dict, bool], None]] = None,
    ):  # fmt: skip
        """`hello`: what this node tells of itself; `say`: prints a log line; `key`: the job's secret
        (secret.py);
        `stays_open`: nodes may also join after meet(). `greet(hello, complete)`: is told what each node of
        this job tells of itself, and whether all nodes had joined before; it raises ConnectionLost to refuse
        the node, or another error, which ends meet()."""
        self._hello = hello
        self._say = say
        self._key = key
        self._stays_open = stays_open
        self._greet = greet
        self.connections: dict[int, Connection] = {}
        # of each node that has ever joined; "ahead": seconds that its clock is ahead
        self.hellos: dict[int, dict] = {}
        # {connection: (since when it is connected, the nonce that it was sent)}
        self._strangers: dict[Connection, tuple[float, str]] = {}
        # {why, as _refuse() has it: how many connections}
        self._refused: collections.Counter = collections.Counter()
        self._refused_logged_at = -math.inf  # when the log last had a line of them
        # whether all nodes have joined; further ones are then refused, unless `stays_open`
        self._complete = False
        self._listener = listener
        self._accepts_again_at = 0.0  # 0: no pause
        listener.setblocking(False)
        listener.listen(4096)
        _reserve_descriptors(2 * hello["nodes"] + STRANGERS)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def meet(self, seconds: float) -> None:
        """Wait until every node has joined; after `seconds`,
        raise a UserError that names the missing nodes."""
        nodes = self._hello["nodes"]
        waiting = Waiting()
        last_beat = time.monotonic()
        while len(self.connections) < nodes - 1:
            for node, message in self.poll(BEAT_SECONDS):
                if message is None:
                    self._say(f"node {node} was lost while waiting for the others")
                    self.remove(node)
            now = time.monotonic()
            if now - last_beat >= beat_seconds(nodes):
                last_beat = now
                self.send(beat=True)
            if len(self.connections) == nodes - 1:
                break  # the last one has joined by this poll(): it is not too late, whatever the time
            if waiting.claim_line():
                self._say(f"waiting for {self._describe_missing()}, {waiting.seconds:.0f} s")
            if waiting.seconds >= seconds:
                raise self._ending(f"{self._describe_missing()} did not come within {seconds:.0f} s")
        self._complete = True

    def _describe_missing(self):
        missing = [node for node in range(1, self._hello["nodes"]) if node not in self.connections]
        return naming.describe_nodes(missing, self._hello["workers"])

    def mark_complete(self) -> None:
        """Mark the nodes as complete without meet(): the run is under way."""
        self._complete = True

    def poll(self, seconds: float) -> list[tuple]:
        """Wait up to `seconds`; return [(node, message)]. A message of None means that the node is lost."""
        received = []
        for key, _ in self._selector.select(
            min(seconds, PAUSE_SECONDS) if self._accepts_again_at else seconds
        ):
            connection: Any = key.fileobj
            if connection is self._listener:
                self._accept()
            elif connection in self._strangers:
                self._hear_stranger(connection)
            elif connection.node in self.connections:
                try:
                    received += [(connection.node, checked(message)) for message in connection.receive()]
                except ConnectionLost:
                    received.append((connection.node, None))
        now = time.monotonic()
        lost_nodes = {node for node, message in received if message is None}
        silent_nodes = {
            node
            for node, connection in self.connections.items()
            if now - connection.last_received > SILENCE_SECONDS
        }
        received += [(node, None) for node in sorted(silent_nodes - lost_nodes)]
        for connection, (since, _) in list(self._strangers.items()):
            if now - since <= STRANGER_SECONDS:
                break  # the others in this dict came later
            self._refuse(connection, "said nothing in time")
        if self._accepts_again_at and now > self._accepts_again_at:
            self._accepts_again_at = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        if now - self._refused_logged_at >= STRANGERS_LINE_SECONDS:
            self._log_refused()
        return received

    def send(self, **message: Any) -> None:
        """Send a message to all nodes; poll() reports those that are lost."""
        for connection in list(self.connections.values()):
            connection.tell(**message)

    def remove(self, node: int) -> None:
        """Close the connection to a node, and forget it."""
        self._close(self.connections.pop(node))

    def close(self) -> None:
        self._log_refused()
        for connection in [*self.connections.values(), *self._strangers]:
            connection.close()
        self._selector.close()
        self._listener.close()

    def address(self) -> str:
        """Return the address by which the others reach this node."""
        return next(iter(self.connections.values())).socket.getsockname()[0].replace("::ffff:", "")

    # --- Strangers ---

    def _accept(self):
        """Accept waiting connections as strangers, and send each a nonce; close the oldest if too many."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection = Connection(self._listener.accept()[0])
            except BlockingIOError:
                return
            except OSError as error:  # this connection is lost again, or descriptors are lacking
                if error.errno in LACK:
                    self._make_room()
                    return
                continue
            if not connection.peer:  # lost already
                connection.close()
                continue
            if len(self._strangers) >= STRANGERS + self._hello["nodes"] - 1 - len(self.connections):
                self._refuse(next(iter(self._strangers)), "made room for others")
            nonce = secret.nonce()
            self._strangers[connection] = time.monotonic(), nonce
            self._selector.register(connection, selectors.EVENT_READ)
            connection.tell(app="anyrank", nonce=nonce)

    def _make_room(self):
        """Close the oldest connection without proof, as descriptors are lacking; if there is none,
        pause accepting others."""
        if self._strangers:
            self._refuse(next(iter(self._strangers)), "made room for others")
        elif not self._accepts_again_at:
            self._accepts_again_at = time.monotonic() + PAUSE_SECONDS
            self._selector.unregister(self._listener)

    def _hear_stranger(self, connection: Connection) -> None:
        """Check the proof of a stranger, then its hello; close the connection if one of them is wrong."""
        try:
            for message in connection.receive():
                if connection.has_proved:
                    self._introduce(connection, message)
                    return
                self._examine(connection, message)
        except Closed:  # not counted: a check whether the port is open does this
            self._close(connection)
        except ConnectionLost as error:
            connection.tell(refused=str(error))
            if isinstance(error, SecretsDiffer):
                self._refuse(connection, secret.DIFFERS)
            else:
                self._refuse(connection, "sent something else")

    def _examine(self, connection: Connection, message: dict[str, Any]) -> None:
        """Check a stranger's proof, and prove to it that this node has the secret, too;
        ConnectionLost if it has not."""
        if not PROOF(message):
            raise ConnectionLost(NOT_OURS)
        nonces = self._strangers[connection][1], message["nonce"]
        if not secret.proves(message["proof"], self._key, "node", *nonces):
            raise SecretsDiffer(secret.DIFFERS)
        connection.send(proof=secret.proof(self._key, "hub", *nonces))
        connection.trust()

    def _introduce(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Accept the node that sent this `hello`, or refuse it.

        UserError if it does not fit while nodes still meet: it may be the right one, and those that came
        before it the wrong ones."""
        if not HELLO(hello):
            raise ConnectionLost(NOT_OURS)
        own_hello = self._hello
        host = one_line(hello["host"])[:80]
        if hello["app"] != own_hello["app"] or hello["job"] != own_hello["job"]:
            owner = f"{own_hello['job']!r} on {own_hello['host']}"
            connection.tell(refused=f"this port belongs to another job, {owner}; give yours another port")
            self._refuse(connection, f"belong to job {one_line(hello['job'])[:80]!r}, as that on host {host}")
            return
        if self._greet:  # before the node is refused, as it may have to be sent to another leader
            self._greet(hello, self._complete)
        if self._complete and not self._stays_open:
            connection.tell(
                refused=(
                    f"the job on this port, on {own_hello['host']}, has all its nodes already; give yours "
                    "another port"
                )
            )
            self._refuse(connection, "came when all nodes were there")
            return
        reason = self._reason_to_refuse(hello, host)
        if reason and not self._complete:
            raise self._ending(reason, connection)
        if reason:
            connection.tell(refused=reason)
            self._refuse(connection, "do not fit the others")
            return
        node = hello["node"]
        del self._strangers[connection]
        connection.node = node
        self.connections[node] = connection
        self.hellos[node] = {**hello, "host": host, "ahead": hello["clock"] - time.time()}

    def _reason_to_refuse(self, hello: dict[str, Any], host: str) -> Optional[str]:
        """Return why the node that sent this `hello` cannot join: its number is too large or taken, or one of
        its `alike` values is not that of this node. None if it can."""
        own_hello = self._hello
        own_host = own_hello["host"]
        node = hello["node"]
        if node >= own_hello["nodes"]:
            claim = f"host {host} says it is node {node} of {hello['nodes']}"
            return f"{claim}, but host {own_host} has a world size of {own_hello['nodes']} nodes"
        if node == own_hello["node"] or node in self.connections:
            first_host = own_host if node == own_hello["node"] else self.hellos[node]["host"]
            return f"duplicate rank: host {first_host} and host {host} both say they are node {node}"
        for name, value in own_hello["alike"].items():
            their_value = hello["alike"].get(name)
            if their_value != value:
                our_part, their_part = naming.first_difference(str(value), one_line(their_value))
                our_place = f"{our_part} on node {own_hello['node']} (host {own_host})"
                return f"{name} differs: {our_place}, {their_part[:200]} on node {node} (host {host})"
        return None

    def _refuse(self, connection: Connection, why: str) -> None:
        """Close a connection, and count it.

        `why` completes a line such as "3 connections: 2 said nothing in time".
        """
        if why not in self._refused and len(self._refused) >= 20:
            why = "of other kinds"
        self._refused[why] += 1
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()

    def _log_refused(self) -> None:
        """Log how many connections were refused since the last such line, and why;
        nothing if there were none."""
        if not self._refused:
            return
        kinds = ", ".join(f"{total} {why}" for why, total in self._refused.most_common(5))
        total = sum(self._refused.values())
        line = f"closed {count(total, 'connection')} that did not prove to belong to this job: {kinds}"
        self._say(line[:500])
        self._refused.clear()
        self._refused_logged_at = time.monotonic()

    def _ending(self, reason: str, *newcomers: Connection) -> UserError:
        """Tell all nodes that have joined, and these, that the job ends; return the error to raise."""
        for connection in [*self.connections.values(), *newcomers]:
            connection.tell(refused=reason)
        return UserError(reason)


def listen(port: int) -> socket.socket:
    """Return a socket that listens on this port.

    Try for 3 s, as an earlier process may hold it, then raise UserError.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    deadline = time.monotonic() + 3
    while True:
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)
        except OSError as error:
            if error.errno != errno.EADDRINUSE and family == socket.AF_INET6:
                family = socket.AF_INET  # a host whose IPv6 is switched off
                continue
            is_taken = error.errno == errno.EADDRINUSE
            if not is_taken or time.monotonic() > deadline:
                problem = f"port {port} on this node cannot be opened"
                if is_taken:
                    problem = f"port {port} on this node is taken by another program"
                raise UserError(f"{problem} ({error.strerror}); give the job another port") from None
            time.sleep(0.2)


def _reserve_descriptors(num_connections: int) -> None:
    """Allow this process so many connections besides its other files;
    raise UserError if the limit is too low."""
    needed = num_connections + SPARE_DESCRIPTORS
    allowed = network.allow_open_files(needed)
    if allowed < needed:
        raise UserError(
            f"node 0 needs {needed} open files for its connections, and may have {allowed}: raise the "
            "limit (ulimit -n)"
        )
