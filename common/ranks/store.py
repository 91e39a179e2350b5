"""The key-value store of a job, through which all ranks meet and form the process group.

Rank 0 or torchrun's agent hosts it. torch's store accepts keys from anybody who reaches it (docs/security.md), so the store of
rank 0 listens only on the address to which the other ranks connect, where that is possible.
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
CAME = "anyrank/came"
ALL = "anyrank/missing"


def of_all_ranks(here: World, seconds: float) -> Any:
    """Return the store of this job, opened once per process; `seconds`: how long to wait for it, and then for a key."""
    if GROUP.store is None:
        GROUP.store = _opened(here, seconds)
    GROUP.store.set_timeout(datetime.timedelta(seconds=seconds))
    return GROUP.store


def meet(here: World, store: Any, seconds: float) -> list[int]:
    """Wait until all ranks have come. Return the same list on each: the ranks that did not come within `seconds`."""
    if store.add(f"{CAME}/{here.rank}", 1) > 1:
        raise UserError(f"two processes say that they are rank {here.rank}; give each process its own RANK")
    if here.rank:
        try:
            store.wait([ALL], datetime.timedelta(seconds=2 * seconds))
        except RuntimeError:
            raise UserError(f"rank 0 did not answer within {2 * seconds:.0f} s; see its log") from None
        return json.loads(store.get(ALL))

    def those_missing():
        return [rank for rank in range(1, here.world_size) if not store.add(f"{CAME}/{rank}", 0)]

    waiting = Waiting()
    for rank in range(1, here.world_size):
        while not store.add(f"{CAME}/{rank}", 0) and waiting.seconds <= seconds:
            if waiting.takes_line():
                missing = naming.describe_ranks(those_missing() or [rank])
                print(f"waiting for {missing}, {waiting.seconds:.0f} s", flush=True)
            time.sleep(POLL_SECONDS)
    missing = those_missing()
    store.set(ALL, json.dumps(missing))
    return missing


def _opened(here: World, seconds: float) -> Any:
    where = (here.master_addr, here.master_port)
    timeout = datetime.timedelta(seconds=seconds)
    with_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    keeps = here.rank == 0 and not with_agent
    listener = _listener(here) if keeps else None
    if here.rank and not with_agent:  # connect() says what it waits for, and torch does not
        channel.connect(*where, seconds, lambda text: print(f"rank {here.rank}: {text}", flush=True)).close()
    more: Any = {} if listener is None else {"master_listen_fd": listener.detach()}
    try:
        keys = distributed.TCPStore(*where, is_master=keeps, timeout=timeout, wait_for_workers=False, **more)
    except RuntimeError as error:
        place = f"{here.master_addr}:{here.master_port}"
        raise UserError(f"the ranks cannot meet at {place}, {one_line(error)[:200]}; see MASTER_ADDR and MASTER_PORT") from None
    return distributed.PrefixStore(f"start {here.restart_count}", keys)  # torchrun's agent keeps the keys of earlier starts


def _listener(here: World) -> Optional[socket.socket]:
    """Return a socket that listens at the master's address only; None if impossible: torch then listens at all addresses."""
    try:
        found = socket.getaddrinfo(here.master_addr, here.master_port, type=socket.SOCK_STREAM)
        family, *_, address = found[0]
        if here.num_nodes > 1 and any(ipaddress.ip_address(place[0]).is_loopback for *_, place in found):
            return None
        return socket.create_server(address[:2], family=family, backlog=4096)
    except OSError:  # a service's address, which no interface has; or, as torch will say, no address or a port that is taken
        return None
