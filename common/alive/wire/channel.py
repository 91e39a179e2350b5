"""The connections between the parents of a job's nodes, or between its watchers: how a node joins,
how a loss is noticed.

Node 0 listens on a port (hub.py), and the other nodes connect to it. Both sides prove that they have the
job's secret (secret.py) before any other message. Messages are lines of JSON whose form is checked; nothing
is unpickled. If the process of a node ends, its connection is closed, which is noticed at once. A cut link or
a frozen machine is noticed by its silence.
"""

import contextlib
import json
import select
import socket
import time
from typing import Any, Callable, Optional, TypedDict

from common.alive.wire import messages, secret
from common.errors import UserError, one_line
from common.progress import Waiting

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 5.0  # without a message from a node for this long, it or the network is lost
ANSWER_SECONDS = 4.0  # for an answer to the first messages, which another program on the port does not give
ATTEMPTS = 5  # to join, if node 0 closes the connection before the proof
LONGEST_MESSAGE = 1 << 20
LONGEST_PROOF = 4096
NOT_OURS = "it sends no messages of this program"

Message = dict[str, Any]  # {its kind: what it says} (messages.py)


class _Start(TypedDict):
    attempt: int  # how often the workers were started again
    address: str  # where their ranks meet
    port: int


class Go(_Start, total=False):
    """Node 0's message that starts the workers of all nodes."""

    more: dict[str, int]  # in an elastic job: which node leads (elastic/greeting.py)


def beat_seconds(nodes: int) -> float:
    """Return the seconds between two beats of a node: longer with thousands of nodes,
    or node 0 would do nothing else."""
    return max(BEAT_SECONDS, nodes / 2000)


class ConnectionLost(Exception):
    """The other side is closed or silent, or does not send messages of this program."""


class Closed(ConnectionLost):
    """The other side has closed the connection."""


class SecretsDiffer(ConnectionLost):
    """The other side has another secret."""


def checked(message: dict) -> dict:
    """Return the message; raise ConnectionLost if it is not valid (messages.py)."""
    if not messages.is_valid(message):
        raise ConnectionLost(NOT_OURS)
    return message


# --- A connection -------------------------------------------------------------------------------------------


class Connection:
    """Carries whole messages over a socket.

    Sending never blocks: a node that does not read its messages is lost.
    """

    def __init__(self, raw_socket: socket.socket):
        self.socket = raw_socket
        raw_socket.setblocking(False)
        raw_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self._longest = LONGEST_PROOF
        self.last_received = time.monotonic()
        self.has_proved = False
        self.node = -1  # the number of the node at the other end; set on node 0 when that node joins
        self.peer = ""  # the address of the other end
        with contextlib.suppress(OSError):  # the connection is lost already
            self.peer = raw_socket.getpeername()[0].replace("::ffff:", "")

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; raise ConnectionLost if the connection is broken or cannot take it at once."""
        content = json.dumps(message).encode() + b"\n"
        try:
            if self.socket.send(content) == len(content):
                return
            self.socket.shutdown(socket.SHUT_RDWR)  # what came after half a message would be no message
        except OSError as error:
            raise ConnectionLost(one_line(error)) from None
        raise ConnectionLost("it does not read what it is sent")

    def tell(self, **message: Any) -> None:
        """Send a message, and ignore a broken connection: the next receive(), or a long silence,
        will show that it is lost."""
        with contextlib.suppress(ConnectionLost):
            self.send(**message)

    def receive(self) -> list[dict]:
        """Return the messages that have come; raise ConnectionLost if the peer is gone or a message is no
        JSON object."""
        try:
            chunk = self.socket.recv(65536)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Closed(one_line(error)) from None
        if not chunk:
            raise Closed("it closed the connection")
        self.last_received = time.monotonic()
        *lines, self._received = (self._received + chunk).split(b"\n")
        if max(map(len, [*lines, self._received])) > self._longest:
            raise ConnectionLost(NOT_OURS)
        try:
            received = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise ConnectionLost(NOT_OURS) from None
        if not all(isinstance(message, dict) for message in received):
            raise ConnectionLost(NOT_OURS)
        return received

    def trust(self) -> None:
        """Note that the other end has proved that it has the secret, and accept longer messages from it."""
        self.has_proved = True
        self._longest = LONGEST_MESSAGE

    def wait(self, seconds: float) -> list[dict]:
        """Wait for the next messages and return them, unchecked (checked()); raise ConnectionLost after
        `seconds`, or if the connection is closed."""
        deadline = time.monotonic() + seconds
        while self.readable(deadline - time.monotonic()):
            if received := self.receive():
                return received
        raise ConnectionLost(f"no answer for {seconds:.0f} s")

    def readable(self, seconds: float) -> bool:
        """Whether data, or the end of the connection, can be received within `seconds`."""
        poller = select.poll()  # select() knows no descriptor above 1023
        poller.register(self, select.POLLIN)
        return bool(poller.poll(max(0.0, seconds) * 1000))

    def poll(self, seconds: float) -> list[tuple]:
        """Wait up to `seconds`, as Hub.poll() does: return [(0, message), ...], where 0 is the node at the
        other end, and each message is checked; [] if none came; [(0, None)] if that node is lost."""
        try:
            if self.readable(seconds):
                return [(0, checked(message)) for message in self.receive()]
        except ConnectionLost:
            return [(0, None)]
        return [(0, None)] if time.monotonic() - self.last_received > SILENCE_SECONDS else []

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


def port_is_closed(address: str, port: int) -> bool:
    """Return whether the host answers, but no process listens on this port any more."""
    try:
        socket.create_connection((address, port), timeout=0.3).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


# --- How a node joins ---------------------------------------------------------------------------------------


def connect(address: str, port: int, seconds: float, say: Callable) -> socket.socket:
    """Return a socket to node 0.

    Try until its port answers, or raise UserError after `seconds`; `say` logs the wait.
    """
    node_0 = f"node 0 at {address}:{port}"
    waiting = Waiting()
    while True:
        try:
            return socket.create_connection((address, port), timeout=SILENCE_SECONDS)
        except OSError as error:  # the name may not resolve yet, or the program not run yet
            if waiting.seconds >= seconds:
                hint = "see that the job has been started there, too, and that this port is open"
                raise UserError(
                    f"{node_0} did not answer within {seconds:.0f} s: {one_line(error)}; {hint}"
                ) from None
            if waiting.claim_line():
                say(f"waiting for {node_0}, {waiting.seconds:.0f} s: {one_line(error)}")
            time.sleep(0.2)


def join(
    address: str, port: int, hello: dict, seconds: float, say: Callable, key: bytes = b"",
    first_socket: Optional[socket.socket] = None, on_message: Optional[Callable[[dict], None]] = None,
) -> tuple[Connection, Go]:  # fmt: skip
    """Join node 0, and return (connection, start message); UserError if that fails or node 0 refuses.

    `seconds`: how long an attempt waits for the port of node 0, and then for the start message; `say`: logs
    the wait; `first_socket`: a connected socket for the first attempt; `on_message(message)`: called for each
    message that comes before the start message; it may raise an error.
    """
    for attempt in range(ATTEMPTS):
        connection = Connection(first_socket or connect(address, port, seconds, say))
        first_socket = None
        try:
            prove(connection, key)
            connection.send(**hello, clock=time.time())
            return connection, _wait_for_go(connection, seconds + SILENCE_SECONDS, on_message)
        except Closed as error:  # perhaps to make room, if strangers fill the port of node 0
            connection.close()
            why = error
            if connection.has_proved:
                raise UserError(
                    f"node 0 at {address}:{port} is gone ({why}): see its log, and start again"
                ) from None
            time.sleep(0.2 * attempt)
        except ConnectionLost as error:
            connection.close()
            why = error
            break
        except BaseException:
            connection.close()
            raise
    raise UserError(
        f"{address}:{port} answers but is not node 0 of this job ({why}): another program has the port, or "
        "the job has stopped; see the log of node 0, or give the job another port"
    )


def prove(connection: Connection, key: bytes) -> None:
    """Exchange proofs of the secret with node 0; raise UserError if node 0 refuses,
    ConnectionLost if its proof is wrong."""
    hub_nonce = _receive_field(connection, "nonce")
    node_nonce = secret.nonce()
    if not messages.text(64)(hub_nonce):
        raise ConnectionLost(NOT_OURS)
    connection.send(nonce=node_nonce, proof=secret.proof(key, "node", hub_nonce, node_nonce))
    if not secret.proves(_receive_field(connection, "proof"), key, "hub", hub_nonce, node_nonce):
        raise SecretsDiffer(secret.DIFFERS)
    connection.trust()


def _receive_field(connection: Connection, name: str) -> Any:
    """Wait for the next message, and return its value of this name; raise UserError if node 0 refuses."""
    message = connection.wait(ANSWER_SECONDS)[0]
    if "refused" in message:
        raise UserError(one_line(message["refused"])[:500])
    return message.get(name)


def _wait_for_go(
    connection: Connection, seconds: float, on_message: Optional[Callable[[dict], None]] = None
) -> Go:
    """Wait for the start message and return it; raise UserError if node 0 refuses, else ConnectionLost."""
    deadline = time.monotonic() + seconds
    answer_seconds = ANSWER_SECONDS
    while time.monotonic() < deadline:
        for message in connection.wait(answer_seconds):
            checked(message)
            if "refused" in message:
                raise UserError(one_line(message["refused"])[:500])
            if "go" in message:
                return message["go"]
            if on_message:
                on_message(message)
            answer_seconds = SILENCE_SECONDS  # node 0 sends beats while it waits for the others
        connection.send(waiting=True)
    raise ConnectionLost(f"it has not started the nodes for {seconds:.0f} s")
