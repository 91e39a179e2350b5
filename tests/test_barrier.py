"""What the ranks ask of the store through which they meet and wait for each other, and what they agree on there."""

import threading
import time
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import distributed

from common.errors import TrainingFailed, UserError
from common.ranks import barrier, store
from common.ranks.barrier import POLL_SECONDS, Board
from common.ranks.store import meet
from tests.jobs import ROOT, forked

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


def in_all(stores, work):
    """What work(board, rank) returned or raised on each rank, which all call it at once."""
    begin = threading.Barrier(RANKS)

    def run(rank):
        begin.wait()
        try:
            return work(Board(stores[rank], "data", rank), rank)
        except (UserError, TrainingFailed) as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


def test_what_a_rank_asks_of_the_store_does_not_grow_with_their_number(stores):
    begun = time.monotonic()
    assert in_all(stores, lambda board, rank: board.wait(RANKS)) == [None] * RANKS
    looks = 1 + (time.monotonic() - begun) / POLL_SECONDS
    assert all(one.asked.keys() == {"add"} and one.asked["add"] <= 2 * (1 + looks) for one in stores[1:])
    assert RANKS < stores[0].asked["add"] <= 2 * (RANKS + looks)


def test_to_meet_asks_as_little(stores, monkeypatch):
    looked = threading.Semaphore(0)
    sleep = time.sleep
    monkeypatch.setattr(store.time, "sleep", lambda seconds: (looked.release(), sleep(seconds)))
    begun = time.monotonic()

    def work(_, rank):
        if rank == 1:
            for _ in range(5):
                looked.acquire(timeout=60)
            came.set()
        if rank:
            came.wait(60)  # nobody is there yet when rank 0 looks
        return meet(types.SimpleNamespace(rank=rank, world_size=RANKS), stores[rank], 60)

    came = threading.Event()
    assert in_all(stores, work) == [[]] * RANKS
    looks = 1 + (time.monotonic() - begun) / store.POLL_SECONDS
    assert all(one.asked == {"add": 1, "wait": 1, "get": 1} for one in stores[1:])
    assert RANKS + 5 < stores[0].asked["add"] <= 2 * RANKS + looks


def test_nobody_waits_for_one_that_has_failed(stores):
    def work(board, rank):
        if rank == 7:
            board.post_failure(UserError("no such folder"))
        else:
            board.wait(RANKS)

    found = in_all(stores, work)
    assert found.pop(7) is None and {str(error) for error in found} == {"no data: rank 7: no such folder"}
    assert all(isinstance(error, UserError) for error in found)


@pytest.mark.parametrize("late", [0, 7])
def test_one_that_takes_long_is_waited_for_and_named(stores, monkeypatch, capsys, late):
    waited = threading.Event()
    monkeypatch.setattr(barrier, "LINE_SECONDS", -1.0)
    own = barrier.heartbeat.of_this_process()
    monkeypatch.setattr(own, "set", lambda phase, looks: looks > 2 and waited.set())  # what says that one is not stuck

    def work(board, rank):
        if rank == late:
            assert waited.wait(60)
        board.wait(RANKS)
        return waited.is_set()

    assert in_all(stores, work) == [True] * RANKS
    assert ("waiting for rank 7 to have its data" in capsys.readouterr().out) == (late == 7)


GPUS = """
import os, sys
sys.path.insert(0, {root!r})
from torch import distributed
from common.errors import UserError
from common.ranks import collectives

rank = int(os.environ["RANK"])
collectives.GROUP.store = distributed.FileStore("store", 3)
distributed.init_process_group("gloo", store=distributed.PrefixStore("group", collectives.GROUP.store), rank=rank, world_size=3)
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
