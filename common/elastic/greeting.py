"""How a node joins an elastic job: whom it asks, if node 0 may be lost,
and how it is sent on to the node that leads."""

import contextlib
import socket
from typing import Any, Callable, Optional

from common.alive.wire import channel
from common.alive.wire.messages import PORT, RANK, each, is_address, record
from common.errors import UserError

GREETING_SECONDS = 1.0  # for the first message of a leader
MOST_LEADERS = 5  # that a node is sent to, one after the other

# What a node of an elastic job tells of itself, as "more": its port, if it has to lead; who leads, which node
# 0 is told.
HELLO = record(optional=("leads",), listens=PORT, leads=each(is_address, PORT))
# What a leader adds to its start message for a node that joins a run under way.
GO = record(led_by=RANK)


class Elsewhere(Exception):
    """Another node leads the run, at this address and port."""


def greet(hello: dict[str, Any], complete: bool) -> None:
    """Raise Elsewhere if a leader has told node 0, which still waits for its nodes,
    that the run goes on without it."""
    more = hello.get("more")
    if more is None:
        return  # a node whose job is not elastic, which is refused for its other options
    if not HELLO(more):
        raise channel.ConnectionLost(channel.NOT_OURS)
    if "leads" in more and not complete:
        raise Elsewhere(*more["leads"])


def connect_to_leader(address: str, port: int) -> Optional[socket.socket]:
    """Return a socket to the node if it leads a run, else None:
    a leader sends a first message to each new connection."""
    with contextlib.suppress(OSError):
        connection = socket.create_connection((address, port), timeout=GREETING_SECONDS)
        with contextlib.suppress(OSError):
            if connection.recv(1, socket.MSG_PEEK):
                return connection
        connection.close()
    return None


def join(
    address: str, port: int, hello: dict[str, Any], seconds: float, say: Callable[[str], None],
    key: bytes = b"", first_socket: Optional[socket.socket] = None,
) -> tuple[channel.Connection, channel.Go, Optional[int]]:  # fmt: skip
    """Join node 0, or the leader that it names. Return (connection, start message, leader).

    `leader`: the node that leads, if the run is under way, else None; `first_socket`: for the first attempt.
    """
    for _ in range(MOST_LEADERS):
        try:
            connection, go = channel.join(
                address, port, hello, seconds, say, key, first_socket, _raise_elsewhere
            )
        except Elsewhere as elsewhere:
            address, port = elsewhere.args
            first_socket = None
            continue
        more = go.get("more")
        if more is not None and not GO(more):
            connection.close()
            raise UserError(f"{address}:{port} answers but is not node 0 of this job ({channel.NOT_OURS})")
        return connection, go, more["led_by"] if more else None
    raise UserError(
        f"{address}:{port} is the {MOST_LEADERS}th node to which this one is sent: start the job again"
    )


def _raise_elsewhere(message: dict[str, Any]) -> None:
    if "elsewhere" in message:
        raise Elsewhere(*message["elsewhere"])
