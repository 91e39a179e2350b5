"""The worker's side of an elastic job (--min_nodes): its process group and collectives, on torchft.

In each generation (leader.py) torchft lets the members meet, forms their process group, and sends the state
of the most advanced member to those that are behind or new. A waiting worker also watches the number of the
generation. Otherwise it would wait for minutes for a frozen machine, or for a group that a dead member never
joins.
"""

import contextlib
import datetime
import http.server
import json
import logging
import os
import socket
import socketserver
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from common import devices, moments
from common.alive import heartbeat
from common.elastic import quorum
from common.elastic.stream import read_stream
from common.errors import UserError, one_line
from common.ranks.collectives import ExitAtOnce, RanksChanged, Stopped

ADDRESS = "ANYRANK_ADDRESS"  # of this node, as the others reach it: set by its parent
COMES_LATER = "ANYRANK_COMES_LATER"  # set by the parent of a node that joins a run under way
SHORTEST_NAP = 0.0001  # seconds between two looks at a collective
LONGEST_NAP = 0.004
# to connect two members; the parents notice what takes longer
CONNECT_SECONDS = datetime.timedelta(seconds=10)
STATE_SECONDS = datetime.timedelta(minutes=10)  # for handing over the state
# in effect, no timeout: a rank stops waiting when there is a new generation
FOREVER = datetime.timedelta(hours=24)


class Members:
    """The present process group of this rank.

    A collective raises RanksChanged if a member was lost or has joined.
    """

    def __init__(self, rank: int, size: int, device: torch.device):
        # Of the present generation, once there is one.
        self.rank = rank
        self.size = size
        self.writes = False  # whether this rank shows the progress and writes the files
        self.news = ""  # which nodes were lost or have joined since the last step that counted
        self._counted_number = 0  # the generation of the last step that counted
        self.comes_later = COMES_LATER in os.environ  # whether this rank joins a run that is under way
        self._job_rank = rank  # its rank in the job, which never changes
        self._device = device
        self._number = 0  # of the last generation that this rank has tried
        self._pulse = heartbeat.of_this_process()
        self._manager: Any = None  # torchft's
        self._group: Any = None
        # all groups and managers so far: deleting one waits for members, which may be cut off
        self._old_groups: list = []
        moments.listen(ExitAtOnce())

    def form(self, progress: int, get_state: Callable[[], dict], load_state: Callable[[dict], None]) -> None:
        """Join the process group of the next generation, again and again until one is formed; set `rank`,
        `size` and `news`. Raise Stopped if the run is to end.

        `progress`: how many steps this rank has done. If another member has done more, `load_state` is called
        with what its `get_state()` has returned.
        """
        _group_class(self._device)  # raises an error at once, if torchft has none
        while True:
            offer = self._next_offer()
            received: list[dict] = []
            formed: list[tuple] = []
            faults: list[str] = []
            thread = threading.Thread(
                target=self._try, args=(offer, progress, get_state, received, formed, faults), daemon=True
            )
            thread.start()
            while thread.is_alive() and not self.has_changed():
                thread.join(SHORTEST_NAP * 10)
            if formed and not self.has_changed():
                break
            if faults and not self.has_changed():
                # mostly because a member has just died, which the parents report
                print(
                    f"warning: rank {self._job_rank} could not join the others: {faults[0]}",
                    file=sys.stderr,
                    flush=True,
                )
        if self._manager:  # in a thread: it waits for members that may be gone
            threading.Thread(target=self._manager.shutdown, args=(False,), daemon=True).start()
        ((self._manager, self._group),) = formed
        self.rank = offer["ranks"].index(self._job_rank)
        self.size = len(offer["ranks"])
        self.news = "; ".join(
            why for number, why in offer["changes"] if number > self._counted_number and why
        )
        if received:
            load_state(received[0])

    def _next_offer(self):
        """Wait until the parents offer a new generation (group of ranks), and return it;
        raise Stopped if the run is to end."""
        self._pulse.put("wanted", self._number + 1)
        while not self.has_changed():
            if self.told_to_stop():
                raise Stopped
            time.sleep(LONGEST_NAP)
        offer = json.loads(Path(f"{os.environ[heartbeat.FILES]}.generation").read_text())
        self._number = offer["number"]
        self.writes = offer["writes"] == self._job_rank
        if offer["stop"]:
            raise Stopped(offer["why"])
        return offer

    def _try(
        self,
        offer: dict[str, Any],
        progress: int,
        get_state: Any,
        received: Any,
        formed: list,
        faults: list[str],
    ) -> None:
        """Form a group: append (manager, group) to `formed`, or an error to `faults`.

        Run in a thread, as it may never end.
        """
        address = os.environ[ADDRESS]
        try:
            devices.use(self._device)
            store = _store(address)
            group = _group_class(self._device)(timeout=CONNECT_SECONDS)
            self._old_groups += [group, store]
            manager = _manager_class(address)(
                pg=group, state_dict=get_state, load_state_dict=received.append, min_replica_size=1,
                use_async_quorum=False, timeout=STATE_SECONDS, quorum_timeout=FOREVER,
                connect_timeout=CONNECT_SECONDS, rank=0, world_size=1, store_addr=address,
                store_port=store.port, lighthouse_addr=offer["lighthouse"], hostname=quorum.in_url(address),
                replica_id=f"{self._job_rank:08d}", checkpoint_transport=_transport(address),
            )  # fmt: skip
            self._old_groups.append(manager)
            manager.load_state_dict({"step": progress, "batches_committed": 0})
            manager.start_quorum()
            if not manager.errored() and manager.num_participants() == len(offer["ranks"]):
                self._old_groups.append(group.parent)
                formed.append((manager, group.parent))
            else:
                faults.append(one_line(manager.errored() or "not all of them came"))
        except Exception as error:  # the next generation will be another try
            faults.append(one_line(error))

    def note_step(self) -> None:
        """Note that all ranks of the group have finished a step.

        Clear `news`, the nodes lost or joined before that step.
        """
        self.news = ""
        self._counted_number = self._number

    @contextlib.contextmanager
    def without_others(self) -> Iterator[None]:
        """Within this context, have rank 0 and size 1,
        to compute alone what the other members have finished already."""
        saved = self.rank, self.size
        self.rank = 0
        self.size = 1
        try:
            yield
        finally:
            self.rank, self.size = saved

    def told_to_stop(self) -> int:
        """Return the signal by which the job is stopped, or 0."""
        return self._pulse.get("stop")

    def has_changed(self) -> bool:
        """Whether the parents offer a new generation (group of ranks) that this rank has not tried to join
        yet."""
        return self._pulse.get("offered") > self._number

    # --- Collectives of the present members ---

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes: list[int], sent_sizes: list[int]
    ) -> "Work":
        """Begin torch.distributed.all_to_all_single() among the members."""
        options = _with_timeout(distributed_c10d.AllToAllOptions())
        return Work(
            self, lambda group: group.alltoall_base(received, sent, received_sizes, sent_sizes, options)
        )

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> "Work":
        """Begin torch.distributed.all_gather_into_tensor() among the members."""
        options = _with_timeout(distributed_c10d.AllgatherOptions())
        return Work(self, lambda group: group._allgather_base(output, tensor, options))

    def all_reduce(self, tensor: torch.Tensor) -> "Work":
        """Begin to sum the tensors of all members, in place."""
        options = _with_timeout(distributed_c10d.AllreduceOptions())
        return Work(self, lambda group: group.allreduce([tensor], options))

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum the tensors of all members, in place; raise RanksChanged if a member was lost or has joined."""
        self.all_reduce(tensor).wait()

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all members, in the order of their ranks; all must have the same shape."""
        flat = tensor.to(self._device).contiguous().view(-1)
        output = flat.new_empty(self.size * flat.numel())
        self.all_gather(output, flat).wait()
        return list(output.view(self.size, *tensor.shape).to(tensor.device))


class Work:
    """A collective under way.

    If it could not begin, because a member was lost, wait() raises RanksChanged.
    """

    def __init__(self, members: Members, begin: Callable[[Any], Any]):
        self._members = members
        self._work: Optional[Any] = None
        with contextlib.suppress(RuntimeError):
            self._work = begin(members._group)

    def wait(self) -> None:
        """Wait until the collective has ended; raise RanksChanged if it failed or the members change."""
        nap = SHORTEST_NAP
        while self._work is not None and not self._work.is_completed():
            if self._members.has_changed():
                raise RanksChanged
            time.sleep(nap)
            nap = min(LONGEST_NAP, nap * 1.1)
        try:
            is_done = self._work is not None and self._work.wait()
        except RuntimeError:  # the connection to a member has broken
            is_done = False
        if not is_done:
            raise RanksChanged


def load_torchft() -> Any:
    """Import and return torchft; UserError if it is missing or torch too old.

    Its own log is silenced: what fails there is tried again, and what matters we report.
    """
    if devices.TORCH < (2, 7):  # what torchft 0.2 asks for, so that installing it would replace torch
        raise UserError(
            f"--min_nodes needs torchft, and that torch 2.7 or later; this is {torch.__version__}: "
            "leave it out"
        )
    os.environ.setdefault("RUST_LOG", "error")
    try:
        import torchft.manager
        import torchft.process_group
    except ImportError:
        raise UserError("--min_nodes needs torchft: pip install .[elastic]") from None
    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    return torchft


def _group_class(device: torch.device) -> Any:
    """Return torchft's class of process groups for the device; raise UserError if it has none."""
    backend = devices.collective_backend(device)
    name = "ProcessGroupGloo" if backend == "gloo" else f"ProcessGroup{backend.upper()}"
    process_groups = load_torchft().process_group
    if not hasattr(process_groups, name):
        raise UserError(
            f"--min_nodes needs torchft to have a process group for {backend}, which it lacks: leave "
            "the option out"
        )
    return getattr(process_groups, name)


def _store(address: str) -> distributed.TCPStore:
    """Return a TCPStore that listens at this address only; by default it listens on all interfaces."""
    listener = socket.create_server((address, 0), family=_family(address))
    port = listener.getsockname()[1]
    return distributed.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _manager_class(address: str) -> Any:
    """Return torchft's Manager, made to listen at this address only:
    any client that reaches it can end this process."""
    module = load_torchft().manager
    from torchft.coordination import ManagerServer

    def server_at_address(**options: Any) -> Any:
        return ManagerServer(**{**options, "bind": f"{quorum.in_url(address)}:0"})

    module.ManagerServer = server_at_address
    return module.Manager


def _with_timeout(options: Any) -> Any:
    options.timeout = FOREVER
    return options


def _transport(address: str) -> Any:
    """Return torchft's transport for the state, made to listen at this address only and to announce it.

    By default it listens on all interfaces, announces the host's name, and unpickles what it receives."""
    from torchft.checkpointing import HTTPTransport, http_transport

    class TransportServer(http.server.ThreadingHTTPServer):
        address_family = _family(address)
        request_queue_size = 1024

        def server_bind(self):
            """Bind without the look-up of the address's name that HTTPServer makes, which may take long."""
            socketserver.TCPServer.server_bind(self)
            self.server_name = address
            self.server_port = self.server_address[1]

    http_transport._IPv6HTTPServer = lambda _everywhere, handler: TransportServer((address, 0), handler)

    class OfThisNode(HTTPTransport):
        def address(self):
            return f"http://{quorum.in_url(address)}:{self._server.socket.getsockname()[1]}/checkpoint/"

        @classmethod
        def _load_from_address(cls, address: str, timeout: datetime.timedelta) -> Any:
            without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with without_proxy.open(address, timeout=timeout.total_seconds()) as answer:
                return read_stream(answer)

    transport = OfThisNode(timeout=STATE_SECONDS, num_chunks=0)
    transport._server.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[method-assign]
    return transport
