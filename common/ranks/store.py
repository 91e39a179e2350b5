"""The key-value store of a job, through which all ranks meet and form the process group.

Rank 0 or torchrun's agent hosts it. torch's store accepts keys from anybody who reaches it
(docs/security.md), so the store of rank 0 listens only on the address to which the other ranks connect, where
that is possible.
"""

import datetime
import ipaddress
import json
import os
import socket
import time
from typing import Any, Optional

from torch import distributed

from common.alive.wire import channel
from common.errors import UserError, one_line
from common.progress import Waiting
from common.ranks.collectives import GROUP
from common.world import World, naming

POLL_SECONDS = 0.05
# Keys.
ARRIVED_KEY = "anyrank/came"
MISSING_KEY = "anyrank/missing"


def open_store(world: World, seconds: float) -> Any:
    """Return the store of this job, opened once per process; `seconds`: how long to wait for it,
    and then for a key."""
    if GROUP.store is None:
        GROUP.store = _open(world, seconds)
    GROUP.store.set_timeout(datetime.timedelta(seconds=seconds))
    return GROUP.store


def meet(world: World, store: Any, seconds: float) -> list[int]:
    """Wait for all ranks; return on each the list of those that did not arrive within `seconds`."""
    if store.add(f"{ARRIVED_KEY}/{world.rank}", 1) > 1:
        raise UserError(f"two processes say that they are rank {world.rank}; give each process its own RANK")
    if world.rank:
        try:
            store.wait([MISSING_KEY], datetime.timedelta(seconds=2 * seconds))
        except RuntimeError:
            raise UserError(f"rank 0 did not answer within {2 * seconds:.0f} s; see its log") from None
        return json.loads(store.get(MISSING_KEY))

    def find_missing():
        return [rank for rank in range(1, world.world_size) if not store.add(f"{ARRIVED_KEY}/{rank}", 0)]

    waiting = Waiting()
    for rank in range(1, world.world_size):
        while not store.add(f"{ARRIVED_KEY}/{rank}", 0) and waiting.seconds <= seconds:
            if waiting.claim_line():
                missing = naming.describe_ranks(find_missing() or [rank])
                print(f"waiting for {missing}, {waiting.seconds:.0f} s", flush=True)
            time.sleep(POLL_SECONDS)
    missing = find_missing()
    store.set(MISSING_KEY, json.dumps(missing))
    return missing


def _open(world: World, seconds: float) -> Any:
    """Return the store at the address of the master; rank 0 hosts it, unless torchrun's agent does."""
    host_and_port = (world.master_addr, world.master_port)
    timeout = datetime.timedelta(seconds=seconds)
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    is_host = world.rank == 0 and not has_agent
    listener = _listener(world) if is_host else None
    if world.rank and not has_agent:  # connect() says what it waits for, and torch does not
        channel.connect(
            *host_and_port, seconds, lambda text: print(f"rank {world.rank}: {text}", flush=True)
        ).close()
    options: Any = {} if listener is None else {"master_listen_fd": listener.detach()}
    try:
        tcp_store = distributed.TCPStore(
            *host_and_port, is_master=is_host, timeout=timeout, wait_for_workers=False, **options
        )
    except RuntimeError as error:
        address = f"{world.master_addr}:{world.master_port}"
        raise UserError(
            f"the ranks cannot meet at {address}, {one_line(error)[:200]}; see MASTER_ADDR and MASTER_PORT"
        ) from None
    return distributed.PrefixStore(
        f"start {world.restart_count}", tcp_store
    )  # torchrun's agent keeps the keys of earlier starts


def _listener(world: World) -> Optional[socket.socket]:
    """Return a socket that listens at the master's address only, or None if that cannot be: torch then
    listens at all addresses, or says what is wrong."""
    try:
        addresses = socket.getaddrinfo(world.master_addr, world.master_port, type=socket.SOCK_STREAM)
        family, *_, address = addresses[0]
        # /etc/hosts may give this node's own name an address of the loopback, where no other node can
        # connect.
        is_loopback = any(ipaddress.ip_address(candidate[0]).is_loopback for *_, candidate in addresses)
        if world.num_nodes > 1 and is_loopback:
            return None
        return socket.create_server(address[:2], family=family, backlog=4096)
    except (
        OSError,
        UnicodeError,
    ):  # such as a service's address, which no interface has, or a name that is none
        return None
