"""The rules of the leader (leader.py): which ranks are the next members,
and whether the remaining nodes may continue.

A node has certainly ended if its connection was closed or its worker was seen to end. It no longer counts. A
silent node still counts: it may be cut off, and may see the others as silent. The remaining nodes then
continue only if they are more than half.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from common.elastic.messages import NodeReport


@dataclasses.dataclass
class NextMembers:
    ranks: list[int]  # the members of a next generation
    missing: set[int]  # members of the last generation that are lost
    new: set[int]  # those of `ranks` that were not members of the last generation
    stuck: bool  # whether a member has broken off its step and waits for the next generation


def next_members(generation: int, last: list[int], reports: Iterable[NodeReport]) -> NextMembers:
    """Return the next group: living ranks of `last` (group number `generation`),
    and ranks of a new node once all wait."""
    ranks: list[int] = []
    stuck = False
    done = set()
    for report in reports:
        waiting = {
            rank for rank, awaited in report["workers"] if awaited > (generation if rank in last else 0)
        }
        living = {rank for rank, _ in report["workers"]}
        done |= set(report["done"])
        stuck = stuck or bool(waiting & set(last))
        if living <= waiting | set(last):
            ranks += living
        else:
            ranks += living & set(last)
    return NextMembers(sorted(ranks), set(last) - set(ranks) - done, set(ranks) - set(last), stuck)


def may_continue(previous: set[int], remaining: set[int], silent_nodes: set[int]) -> bool:
    """Whether `remaining` may go on: if nodes of `previous` are silent,
    over half of what may run must remain."""
    counted_nodes = previous & (remaining | silent_nodes)
    return not silent_nodes & previous or 2 * len(previous & remaining) > len(counted_nodes)


def start_lighthouse(address: str, size: int) -> Any:
    """Start and return torchft's server at which the members of a new group meet;
    it waits for `size` of them."""
    from torchft.coordination import LighthouseServer

    one_day_ms = 24 * 3600 * 1000  # longer than a group takes to meet
    return LighthouseServer(
        bind=f"{in_url(address)}:0",
        min_replicas=max(1, size),
        join_timeout_ms=one_day_ms,
        quorum_tick_ms=10,
        heartbeat_timeout_ms=one_day_ms,
    )


def in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def address_of(server: Any, address: str) -> str:
    """Return the URL of torchft's server with this address, as its own URL has the host's name;
    empty without a server."""
    return f"http://{in_url(address)}:{server.address().rpartition(':')[2]}" if server else ""
