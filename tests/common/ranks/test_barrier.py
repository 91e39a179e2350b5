"""What the ranks ask of the store through which they meet and wait for each other, and what they agree on there."""

import socket
import threading
import time
import types
from collections import Counter

import pytest
from torch import distributed

from common import progress
from common.errors import UserError
from common.ranks import barrier, collectives, store
from common.ranks.barrier import Board
from common.world import World
from tests.tools.jobs import PATIENCE, ROOT, forked, wait_for

RANKS = 40


class Counted:
    """The store of all ranks, as one of them sees it."""

    def __init__(self, store):
        self._store, self.asked = store, Counter()

    def __getattr__(self, name):
        self.asked[name] += 1
        return getattr(self._store, name)


@pytest.fixture
def stores():
    shared = distributed.HashStore()
    return [Counted(shared) for _ in range(RANKS)]


@pytest.fixture
def naps(monkeypatch):
    """{name of a thread: how often it has waited a moment}"""
    naps, sleep = Counter(), time.sleep

    def nap(seconds):
        naps[threading.current_thread().name] += 1
        sleep(seconds)

    monkeypatch.setattr(barrier.time, "sleep", nap)
    return naps


def in_all(stores, work):
    """What work(board, rank) returned or raised on each rank, which all call it at once, each in a thread of this name."""
    begin, found = threading.Barrier(RANKS), {}

    def run(rank):
        begin.wait()
        try:
            found[rank] = work(Board(stores[rank], "data", rank), rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank), daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(RANKS)]


def test_what_a_rank_asks_of_the_store_does_not_grow_with_their_number(stores, naps):
    assert in_all(stores, lambda board, rank: board.wait(RANKS)) == [None] * RANKS
    for rank, one in enumerate(stores):  # it is ready, each look, that it has seen all
        looks = 2 * naps[str(rank)] + (1 if rank else RANKS - 1)
        assert one.asked == {"add": 2 + looks}, rank


def test_to_meet_asks_as_little(stores, naps):
    def work(_, rank):
        if rank:  # nobody is there yet when rank 0 looks
            wait_for(lambda: naps["0"] > 5, None, "looks of rank 0")
        return store.meet(types.SimpleNamespace(rank=rank, world_size=RANKS), stores[rank], 60)

    assert in_all(stores, work) == [[]] * RANKS
    assert all(one.asked == {"add": 1, "wait": 1, "get": 1} for one in stores[1:])
    assert stores[0].asked == {"add": 1 + 2 * (RANKS - 1) + naps["0"], "set": 1}


def test_nobody_waits_for_one_that_has_failed(monkeypatch):
    def data():
        if threading.current_thread().name == "7":
            raise UserError("no such folder")

    monkeypatch.setattr(barrier, "rank_and_size", lambda: (int(threading.current_thread().name), RANKS))
    monkeypatch.setattr(collectives.GROUP, "store", shared := distributed.HashStore())
    found = in_all([shared] * RANKS, lambda *_: barrier.on_every_rank("data", data))
    assert str(found.pop(7)) == "no such folder" and {str(error) for error in found} == {"no data: rank 7: no such folder"}
    assert all(isinstance(error, UserError) for error in found)


def test_one_that_comes_soon_is_not_spoken_of(stores, naps, at, capsys):
    at([0.0], progress)  # no second passes

    def work(board, rank):
        if rank == 7:
            wait_for(lambda: naps["0"], None, "a look of rank 0")
        board.wait(RANKS)

    assert in_all(stores, work) == [None] * RANKS and capsys.readouterr().out == ""


def test_a_rank_0_that_never_says_who_has_come_is_named():
    with pytest.raises(UserError, match="rank 0 did not answer within 0 s; see its log"):
        store.meet(types.SimpleNamespace(rank=1, world_size=2), distributed.HashStore(), 0.01)


def test_a_port_that_another_program_has_is_named_by_rank_0(monkeypatch):
    monkeypatch.setattr(collectives.GROUP, "store", None)
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        here = World("slurm", "", "process", 0, 1, 0, 2, 0, 2, "127.0.0.1", port)
        with pytest.raises(UserError, match=f"the ranks cannot meet at 127.0.0.1:{port}, .*; see MASTER_ADDR and MASTER_PORT"):
            store.open_store(here, PATIENCE)


@pytest.mark.parametrize("late", [0, 7])
def test_one_that_takes_long_is_waited_for_and_rank_0_names_it(stores, naps, monkeypatch, late):
    said, alive = [], []
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    monkeypatch.setattr(barrier, "print", lambda text, **_: said.append(text), raising=False)
    monkeypatch.setattr(barrier.heartbeat.of_this_process(), "set", lambda phase, looks: alive.append(phase))

    def work(board, rank):
        if rank == late:
            named = "waiting for rank 7 to have its data"
            wait_for(
                (lambda: named in said) if rank else (lambda: all(naps[str(one)] for one in range(1, RANKS))), None, "a wait"
            )
            found.append(len(said))
        board.wait(RANKS)

    found = []
    assert in_all(stores, work) == [None] * RANKS
    assert "fetch" in alive and (found == [0] if late == 0 else found[0] > 0)


GPUS = """
import os, sys
sys.path.insert(0, {root!r})
from torch import distributed
from common.errors import UserError
from common.ranks import collectives

rank = int(os.environ["RANK"])
collectives.GROUP.store = distributed.FileStore("store", 3)
keys = distributed.PrefixStore("group", collectives.GROUP.store)
distributed.init_process_group("cuda:gloo", store=keys, rank=rank, world_size=3)  # as NCCL, it takes tensors of GPUs alone
collectives.require_one_device_each("")
collectives.require_one_device_each("gpu " + "abc"[rank])
try:
    collectives.require_one_device_each("gpu " + "ded"[rank])
except UserError as error:
    print(error)
distributed.destroy_process_group()
"""


def test_two_ranks_on_one_gpu_are_named_on_every_rank(tmp_path):
    found = forked(["-c", GPUS.format(root=str(ROOT))], tmp_path, *({"RANK": str(rank)} for rank in range(3)))
    for done in found:
        assert done.stdout.startswith("ranks 0 and 2 compute on the same GPU of host ") and done.returncode == 0, done.stderr
