"""Elastic jobs, without a run: who is a member, who may go on, and what the nodes say to each other."""

import dataclasses
import json
import shutil
import socket
import struct
import sys
import threading
import types

import pytest

from common import moments
from common.alive import heartbeat
from common.alive.wire import channel, hub, messages
from common.elastic import greeting, job, members, quorum
from common.elastic.messages import FORMS
from common.errors import UserError
from tests.check_ledger import complaints, steps_that_count
from tests.common.alive.wire import test_strangers as strangers
from tests.tools.jobs import PATIENCE, ROOT, assert_same_bits, environment, final_state, run
from tests.tools.ranks import TWO


def said(workers, done=(), generation=1):
    return {"workers": [list(one) for one in workers], "done": list(done), "generation": generation}


# --- Who is a member, and who may go on --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "last, reports, ranks, missing, new, stuck",
    [
        ([], [said([(0, 1)]), said([(1, 1)])], [0, 1], set(), {0, 1}, False),  # all wait for the first generation
        ([], [said([(0, 1)]), said([(1, 0)])], [0], set(), {0}, False),  # one is not so far
        ([0, 1], [said([(0, 1)]), said([(1, 1)])], [0, 1], set(), set(), False),  # training
        ([0, 1], [said([(0, 2)])], [0], {1}, set(), True),  # one is lost, the other has broken off the step
        ([0, 1], [said([(0, 1)]), said([(1, 2)])], [0, 1], set(), set(), True),  # it has left the step for another reason
        ([0, 1], [said([(0, 1)]), said([], done=[1])], [0], set(), set(), False),  # it has finished the run
        ([0], [said([(0, 1)]), said([(2, 0), (3, 1)])], [0], set(), set(), False),  # a new node is not ready as a whole
        ([0], [said([(0, 1)]), said([(2, 1), (3, 1)])], [0, 2, 3], set(), {2, 3}, False),
        ([0, 2, 3], [said([(0, 1)]), said([(3, 1)])], [0, 3], {2}, set(), False),  # a worker of a node that goes on
    ],
)
def test_the_members_of_the_next_generation(last, reports, ranks, missing, new, stuck):
    there = quorum.next_members(1 if last else 0, last, reports)
    assert (there.ranks, there.missing, there.new, there.stuck) == (ranks, missing, new, stuck)


@pytest.mark.parametrize(
    "before, now, silent, may",
    [
        ({0, 1}, {0}, set(), True),  # the other has certainly ended
        ({0, 1}, {0}, {1}, False),  # it may think the same of this one
        ({0, 1, 2}, {0, 1}, {2}, True),
        ({0, 1, 2}, {2}, {0, 1}, False),
        ({0, 1, 2}, {1}, {2}, False),  # 0 has ended, 2 may be there: one of two
        ({0, 1, 2, 3}, {1, 2}, {3}, True),
        ({0, 1, 2, 3}, {0, 1}, {2, 3}, False),
        ({0, 1}, {0, 2}, {1}, False),  # a newcomer does not count
        ({0, 1}, {0, 1}, {7}, True),  # somebody who was no member is silent
    ],
)  # fmt: skip
def test_never_do_both_halves_of_a_broken_network_go_on(before, now, silent, may):
    assert quorum.may_continue(before, now, silent) is may
    if silent:
        assert not (may and quorum.may_continue(before, silent, now & before))


def test_who_looks_whether_a_port_is_open_is_no_stranger_and_who_says_something_else_is():
    said = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = hub.Hub(listener, strangers.hello(0), said.append, strangers.KEY)
        for word in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            other = socket.create_connection(listener.getsockname())
            while not one._strangers:
                one.poll(0.1)
            other.sendall(word)
            other.close()
            while one._strangers:
                one.poll(0.1)
        one.close()
    assert len(said) == 1 and said[0].startswith("closed 1 connection that did not prove"), said


def test_only_an_elastic_job_lets_itself_be_sent_elsewhere():
    for stays_open in (False, True):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            greet = greeting.greet if stays_open else None
            one = hub.Hub(listener, strangers.hello(0), print, strangers.KEY, stays_open, greet)
            one.port, one.said = listener.getsockname()[1], []
            polled = threading.Thread(
                target=strangers.join, args=(one,), kwargs={"more": {"listens": 2, "leads": ["127.0.0.1", 1]}}
            )
            polled.start()
            try:
                while not one.connections:
                    one.poll(0.1)
                assert not stays_open
            except greeting.Elsewhere as elsewhere:
                assert stays_open and elsewhere.args == ("127.0.0.1", 1)
            polled.join()
            one.close()


def test_a_node_follows_to_the_leader_that_it_is_told_of():
    with strangers.meeting() as leads, socket.create_server(("127.0.0.1", 0)) as listener:
        first = hub.Hub(listener, strangers.hello(0), print, strangers.KEY)

        def send_elsewhere():
            while not first.connections:
                first.poll(0.1)
            first.send(elsewhere=["127.0.0.1", leads.port])
            leads.thread.join()
            leads.send(go=strangers.GO)

        sends = threading.Thread(target=send_elsewhere)
        sends.start()
        connection, go, leader = greeting.join(
            "127.0.0.1", listener.getsockname()[1], strangers.hello(1), PATIENCE, print, strangers.KEY
        )
        assert (go, leader) == (strangers.GO, None) and connection.socket.getpeername()[1] == leads.port
        sends.join()
        connection.close()
        first.close()


def test_a_node_that_was_just_lost_is_still_known_by_its_address():
    """It may be in the list of nodes that is told to the others before its end is noticed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        connection = channel.Connection(listener.accept()[0])
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()
        with pytest.raises(channel.Closed):
            connection.wait(PATIENCE)
        assert connection.peer == "127.0.0.1"
        connection.close()


@pytest.fixture(autouse=True)
def nodes_say_more(monkeypatch):
    """Accept the messages of an elastic job, as the parent of its nodes does."""
    monkeypatch.setattr(messages, "FORMS", {**messages.FORMS, **FORMS})


@pytest.mark.parametrize(
    "message, valid",
    [
        ({"here": said([(0, 1)])}, True),
        ({"here": said([(0, -1)])}, False),
        ({"here": {**said([]), "more": 1}}, False),
        ({"here": said([(0, 1, 2)])}, False),
        ({"cause": "rank 1 was killed"}, True),
        ({"elsewhere": ["10.0.0.1", 6666]}, True),
        ({"elsewhere": ["10.0.0.1", 0]}, False),
        ({"elsewhere": ["a name", 6666]}, False),
        ({"go": {**strangers.GO, "more": {"led_by": 1}}}, True),  # to a node that joins a run that is under way
    ],
)
def test_what_nodes_say_has_a_form(message, valid):
    assert messages.is_valid(message) is valid


# --- Where it has no part, and where it is refused -----------------------------------------------------------------------


def options(least, level="node", ranks=4, restarts=0):
    here = types.SimpleNamespace(level=level, world_size=ranks, num_nodes=2, platform="slurm")
    return types.SimpleNamespace(min_nodes=least, max_restarts=restarts, world=here)


def test_a_job_that_has_settled_that_it_takes_no_steps_has_no_part_in_it():
    """train_imagenet.py sets --min_nodes to None with --evaluate true, when the options have been parsed."""
    job.workers(options(None, level="process"))
    assert dataclasses.astuple(moments.REPLACED) == (None,) * 4
    with pytest.raises(UserError):
        job.workers(options(1, level="process"))
    assert dataclasses.astuple(moments.REPLACED) == (job.parent, job.members, job.peers, None)


@pytest.mark.parametrize(
    "given, says",
    [
        (options(1, level="process"), "--min_nodes needs one process per node, and slurm starts one per rank"),
        (options(1, ranks=1), "--min_nodes is for several nodes or workers"),
        (options(3), "--min_nodes 3, but the job has 2 nodes"),
        (options(1, restarts=1), "with --min_nodes the others go on, and --max_restarts starts all workers again"),
    ],
)
def test_where_nodes_cannot_come_and_go_one_line_says_why(monkeypatch, given, says):
    monkeypatch.delenv(heartbeat.PARENT, raising=False)
    with pytest.raises(UserError, match=says):
        job.workers(given)
    monkeypatch.setenv(heartbeat.PARENT, "1")  # a worker, whose parent has looked
    assert job.workers(given) is None


# --- What is looked at afterwards ---------------------------------------------------------------------------------------


def test_a_line_of_a_ledger_counts_once_on_how_many_nodes_it_may_be(tmp_path):
    step = {"step": [0, 0], "ids": [0, 1], "t": 1.5}
    folders = [tmp_path / node / "ledger" for node in ("first", "came-later")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "rank_0.jsonl").write_text(json.dumps(step) + "\n")
    assert steps_that_count([folder.parent for folder in folders]) == {0: {0: [0, 1]}}
    (folders[1] / "rank_0.jsonl").write_text(json.dumps({**step, "t": 1.6}) + "\n")  # the step was taken twice
    assert list(complaints(steps_that_count([folder.parent for folder in folders]), 2, 2)) == [
        "epoch 1: 4 samples were trained on, 2 should have been",
        "epoch 1: 2 samples came twice",
    ]


# --- Without it ----------------------------------------------------------------------------------------------------------


def test_a_job_imports_nothing_of_it():
    look = (
        "import sys, common.job, common.run, common.ranks.group; assert not [n for n in sys.modules if 'common.elastic' in n]"
    )
    assert run([sys.executable, "-c", look], cwd=ROOT, env=environment()).returncode == 0


def test_without_its_folder_ranks_train_as_before_and_the_option_is_refused(two_ranks, tmp_path):
    for name in ("common", "datasets", "jobs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("elastic"))
    (tmp_path / "common" / "elastic" / "__pycache__").mkdir(parents=True)  # what git leaves of it
    script = [
        sys.executable,
        tmp_path / "jobs" / "train_ddp.py",
        *TWO,
        "--nproc_per_node",
        "2",
        "--output_dir",
        tmp_path / "out",
    ]
    assert run(script, cwd=tmp_path, env=environment()).returncode == 0
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))
    script = [sys.executable, tmp_path / "jobs" / "train_ddp_exact.py", *TWO, "--nproc_per_node", "2", "--min_nodes", "1"]
    done = run(script, cwd=tmp_path, env=environment())
    assert done.returncode == 2
    assert done.stderr == "error: --min_nodes needs the folder common/elastic, which is not there: leave the option out\n"


def test_the_state_is_served_without_asking_for_the_name_of_an_address(monkeypatch):
    """An answer may take the seconds of a timeout, in every generation."""
    asked = []
    monkeypatch.setattr(socket, "gethostbyaddr", lambda address: asked.append(address) or (address, [], [address]))
    members._transport("127.0.0.1").shutdown(wait=False)
    assert not asked
