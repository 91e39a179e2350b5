"""Whoever reaches the port of node 0 without the secret of the job neither joins it nor stops it."""

import contextlib
import errno
import json
import os
import random
import resource
import signal
import socket
import threading
import time
import types

import pytest

from common import progress
from common.alive.wire import channel, hub, secret
from common.errors import UserError
from common.ranks import store
from common.world import World, naming
from tests.tools.jobs import PATIENCE, Popen, after, command, environment, saved, start, wait_for
from tests.tools.objectstore import free_port
from tests.tools.ranks import LONG, LOOPBACK, children, listening, ports_of, rank_environments

KEY = b"0123456789abcdef"
GO = {"attempt": 0, "address": "127.0.0.1", "port": 29500}
REPORT = {"text": "", "direct": True, "code": 1, "restart": True}


def hello(node, nodes=2, **changes):
    same = {"app": "anyrank", "job": "", "host": f"host-{node}", "workers": 1, "alike": {"code": "1"}}
    return {**same, "node": node, "nodes": nodes, **changes}


@contextlib.contextmanager
def meeting(nodes=2, key=KEY, seconds=PATIENCE):
    """A hub that waits for its nodes in a thread, as `meet`; `said` is its log."""
    listener, said = socket.create_server(("127.0.0.1", 0)), []
    one = hub.Hub(listener, hello(0, nodes), said.append, key)
    one.port, one.said, one.error = listener.getsockname()[1], said, None

    def meet():
        try:
            one.meet(seconds)
        except UserError as error:
            one.error = str(error)

    one.thread = threading.Thread(target=meet)
    one.thread.start()
    try:
        yield one
    finally:
        one.thread.join(PATIENCE)
        one.close()


def join(one, node=1, key=KEY, seconds=PATIENCE, **changes):
    """Its connection, as soon as it has proved to belong; the hub's thread ends with the last node that is missing."""
    connection = channel.Connection(channel.connect("127.0.0.1", one.port, seconds, one.said.append))
    channel.prove(connection, key)
    connection.send(**hello(node, **changes), clock=time.time())
    return connection


def stranger(one):
    return socket.create_connection(("127.0.0.1", one.port), timeout=PATIENCE)


def read(connection):
    with contextlib.suppress(OSError):
        return connection.recv(65536)
    return b""


# --- The secret --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mine", [b"", b"another secret of the job"])
def test_without_the_secret_nobody_joins_and_both_say_so(mine):
    with meeting() as one:
        with pytest.raises(UserError, match="the secrets of the nodes differ: give every node the same ANYRANK_SECRET"):
            join(one, key=mine)
        assert not one.connections
        connection = join(one)
        one.thread.join(PATIENCE)
        assert list(one.connections) == [1]
        connection.close()
    assert any("1 the secrets of the nodes differ" in text for text in one.said), one.said


def test_a_node_notices_a_node_0_that_does_not_have_the_secret():
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend():
        connection = listener.accept()[0]
        connection.sendall(json.dumps({"app": "anyrank", "nonce": "1"}).encode() + b"\n")
        theirs = json.loads(read(connection))
        connection.sendall(json.dumps({"proof": theirs["proof"]}).encode() + b"\n")  # all it knows: what it was sent
        read(connection)

    threading.Thread(target=pretend, daemon=True).start()
    with pytest.raises(UserError, match=r"is not node 0 of this job .the secrets of the nodes differ"):
        channel.join("127.0.0.1", listener.getsockname()[1], hello(1), PATIENCE, print, KEY)


def test_a_node_0_that_has_ended_is_not_taken_for_another_program():
    listener = socket.create_server(("127.0.0.1", 0))

    def end_after_the_proof():
        connection = listener.accept()[0]
        connection.sendall(json.dumps({"app": "anyrank", "nonce": "1"}).encode() + b"\n")
        theirs = json.loads(read(connection))
        connection.sendall(json.dumps({"proof": secret.proof(KEY, "hub", "1", theirs["nonce"])}).encode() + b"\n")
        read(connection)
        connection.close()

    threading.Thread(target=end_after_the_proof, daemon=True).start()
    port = listener.getsockname()[1]
    with pytest.raises(UserError, match=rf"node 0 at 127.0.0.1:{port} is gone \(it closed the connection\): see its log"):
        channel.join("127.0.0.1", port, hello(1), PATIENCE, print, KEY)


def test_where_the_secret_comes_from(tmp_path):
    (tmp_path / "secret").write_text("of a file, long enough\n")
    env = {"ANYRANK_SECRET": " 0123456789abcdef ", "A": "b"}
    assert secret.of_this_job(env) == KEY and env == {"A": "b"}, "no child process has it"
    assert secret.of_this_job({"ANYRANK_SECRET_FILE": str(tmp_path / "secret")}) == b"of a file, long enough"
    assert secret.of_this_job({}) == b""
    for wrong, words in (
        ({"ANYRANK_SECRET": "short"}, "ANYRANK_SECRET has a secret of 5 characters: give at least 16"),
        ({"ANYRANK_SECRET_FILE": "/no/such"}, "ANYRANK_SECRET_FILE is '/no/such', which cannot be read"),
        ({"ANYRANK_SECRET": "x" * 20, "ANYRANK_SECRET_FILE": "/no"}, "are both set: give one of them"),
    ):
        with pytest.raises(UserError, match=words):
            secret.of_this_job(wrong)


# --- What strangers do -------------------------------------------------------------------------------------------------

LINES = [
    {**hello(1), "clock": 1.0},
    {**hello(1, job=""), "nodes": 99, "clock": 1.0},
    {"nonce": "1", "proof": "2"},
    {"nonce": "1", "proof": ["2"]},
    {"nonce": 10**400, "proof": "2"},
    {"beat": True},
    {"go": GO},
    {"verdict": REPORT},
    {"finished": True},
    {},
]


def test_what_a_stranger_says_stops_nobody():
    draw = random.Random(1)
    with meeting() as one:
        for number in range(500):
            words = json.dumps(draw.choice(LINES)).encode() if number % 2 else draw.randbytes(draw.randrange(1, 3000))
            words = words.replace(b'"2"', b"9" * 5000) if number % 7 == 0 else words
            words = b"[" * 100_000 if number % 50 == 0 else words
            with contextlib.suppress(OSError), stranger(one) as connection:
                connection.sendall(words + b"\n" * (number % 3))
                if number % 5 == 0:
                    read(connection)
        connection = join(one)
        one.thread.join(PATIENCE)
        assert not one.thread.is_alive() and list(one.connections) == [1] and not one.error
        connection.close()
    assert sum(text.startswith("closed ") for text in one.said) == 2, "the first at once, all others in one line"  # new


def test_idle_strangers_are_few_and_wait_for_a_short_time():
    """A thousand of them, and a process that may open only a few files more: the last node still joins."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with meeting() as one:
        held = []
        try:
            for _ in range(300):
                held.append(stranger(one))
            assert len(one._strangers) <= hub.STRANGERS + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, hard))
            spare = held.pop()  # the test itself needs a descriptor of this process
            spare.close()
            connection = join(one)
            one.thread.join(PATIENCE)
            assert list(one.connections) == [1] and not one.error
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for connection in held:
                connection.close()
        connection.close()
    assert sum(" made room for others" in text for text in one.said) >= 1, one.said


def test_accept_survives_every_error(monkeypatch):
    with meeting() as one:
        plain, errors = one._listener, [24, 23, 105, 12, 103, 1, 71]
        one._selector.unregister(plain)

        class Listener:
            def accept(self):
                if errors:
                    raise OSError(errors.pop(), "no")
                return plain.accept()

            fileno, close = plain.fileno, plain.close

        one._listener = Listener()
        one._selector.register(one._listener, 1)
        connection = join(one)
        one.thread.join(PATIENCE)
        assert list(one.connections) == [1] and not errors
        connection.close()


def test_a_port_that_may_not_be_opened_is_said_at_once_and_not_called_taken(monkeypatch):
    asked = []

    def refusing(address, family, **_):
        asked.append(family)
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refusing)
    with pytest.raises(
        UserError, match=r"port 80 on this node cannot be opened \(Permission denied\); give the job another port"
    ):
        hub.listen(80)
    assert len(asked) <= 2, "once for IPv6, once for IPv4"


def test_members_that_contradict_each_other_still_stop_all():
    with meeting(3) as one:
        first = join(one, 1, nodes=3)
        second = join(one, 1, nodes=3)
        one.thread.join(PATIENCE)
        assert one.error == "duplicate rank: host host-1 and host host-1 both say they are node 1"
        for connection in (first, second):
            with pytest.raises(UserError, match="duplicate rank"):
                channel._wait_for_go(connection, PATIENCE)
    assert channel.port_is_closed("127.0.0.1", one.port), "the next start needs it"  # new
    assert not channel.port_is_closed("255.255.255.255", one.port), "which cannot be found out"


# --- What a false node 0 answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "go",
    [
        {**GO, "port": -1}, {**GO, "port": 70000}, {**GO, "port": "29500"}, {**GO, "address": "a b"}, {**GO, "attempt": -1},
        {**GO, "attempt": True}, {**GO, "more": 1}, {"port": 29500}, [], "now", None,
    ],
)  # fmt: skip
def test_an_answer_that_makes_no_sense_starts_no_node(go):
    with meeting() as one:
        connection = join(one)
        one.thread.join(PATIENCE)
        one.send(go=go)
        with pytest.raises(channel.ConnectionLost, match="it sends no messages of this program"):
            channel._wait_for_go(connection, PATIENCE)
        connection.close()


@pytest.mark.parametrize("proof", ["0" * 64, 5, None, ["0"]])
def test_a_false_node_0_is_not_joined(proof):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:
        connection = channel.Connection(listener.accept()[0])

        def answer():
            other.sendall(b'{"nonce": "0"}\n')
            other.recv(4096)
            other.sendall(json.dumps({"proof": proof}).encode() + b"\n")

        answers = threading.Thread(target=answer)
        answers.start()
        with pytest.raises(channel.ConnectionLost) as refused:
            channel.prove(connection, KEY)
        assert str(refused.value) == secret.DIFFERS and not connection.has_proved
        answers.join()
        connection.close()


def test_who_only_sends_beats_makes_nobody_wait_for_ever():
    with meeting(3) as one:
        connection = join(one, 1, nodes=3)
        with pytest.raises(channel.ConnectionLost, match="it has not started the nodes for 1 s"):
            channel._wait_for_go(connection, 1)
        join(one, 2, nodes=3)
        one.thread.join(PATIENCE)


# --- Where a job listens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ["the parent of the node", "a platform that starts every rank"])
def test_a_job_on_one_node_listens_on_the_loopback_alone(tmp_path, launcher):
    options = [*LONG, "--save_steps", 1]
    if launcher == "the parent of the node":
        parents = [start(tmp_path, *options, "--nproc_per_node", 2, job="train_ddp")]
    else:
        words = [*command("train_ddp", *options), "--output_dir", str(tmp_path / "out")]
        parents = [Popen(words, cwd=tmp_path, env=environment(**env)) for env in rank_environments()]
    try:
        wait_for(saved(tmp_path, 64), parents[0], "a step")
        pids = [pid for parent in parents for pid in [parent.pid, *children(parent)]]
        assert listening(pids) == {LOOPBACK}
    finally:
        for parent in parents:
            parent.kill()
            parent.wait()


def test_idle_connections_to_the_ports_of_a_rank_do_not_end_it(tmp_path):
    """More than it may open files by the limit that it was started with: Gloo ends a process that cannot accept one."""
    soft, (_, hard) = 256, resource.getrlimit(resource.RLIMIT_NOFILE)
    words = [*command("train_ddp", *LONG, "--nproc_per_node", 2), "--output_dir", str(tmp_path / "out")]
    limited = after(f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))", words)
    with open(tmp_path / "log", "w") as log:
        job = Popen(limited, cwd=tmp_path, env=environment(), stdout=log, stderr=log, start_new_session=True)
    held = []
    try:
        wait_for(lambda: "epoch=2/" in (tmp_path / "log").read_text(), job, "an epoch")
        ports = ports_of(children(job))
        assert ports
        with contextlib.suppress(ConnectionError):  # as it was: the rank has ended
            for _ in range(soft):
                held += [socket.create_connection(("127.0.0.1", port)) for port in ports]
        reached = (tmp_path / "log").read_text().count("accuracy=")
        wait_for(lambda: (tmp_path / "log").read_text().count("accuracy=") > reached + 1, job, "further epochs")
        assert "restart" not in (tmp_path / "log").read_text()
    finally:
        for connection in held:
            connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def test_a_master_without_an_address_is_a_sentence():
    for name in ("no-such-host.invalid", "host..svc", "a" * 70 + ".svc"):
        here = World("slurm", "", "process", 0, 2, 0, 1, 0, 2, name, free_port())
        assert store._listener(here) is None


# --- Thousands of nodes ------------------------------------------------------------------------------------------------


def test_a_list_of_thousands_is_short():
    assert naming.describe_nodes([1], 1) == "node 1 (rank 1)"
    assert naming.describe_nodes([1], 2) == "node 1 (ranks 2-3)"
    assert naming.describe_nodes(list(range(1, 4096)), 8) == "nodes 1-4095 (ranks 8-32767)"
    scattered = naming.describe_nodes(list(range(1, 4096, 2)), 8)
    assert len(scattered) <= 200 and " and " in scattered and scattered.startswith("nodes 1, 3, 5")
    assert naming.spans([0, 1, 2, 5]) == "0-2, 5" and naming.spans([]) == ""


def test_a_connection_on_which_nothing_has_come_is_not_lost():
    """The kernel may wake a process although there is nothing to read."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:
        connection = channel.Connection(listener.accept()[0])
        assert connection.receive() == []
        other.sendall(b'{"beat": true}\n')
        assert connection.wait(PATIENCE) == [{"beat": True}]
        connection.close()


def test_a_connection_ends_with_half_a_message():
    """What was sent after it would be no message to the other end, which would take this one for a stranger."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        connection = channel.Connection(listener.accept()[0])
        connection.tell(says="x" * 2**26)
        with pytest.raises(channel.Closed):
            connection.receive()
        connection.close()


def test_a_node_that_had_to_make_room_before_its_proof_comes_again():
    """As node 0 closes the oldest connection without a proof, where strangers fill its port."""
    with meeting(seconds=30) as one, socket.create_server(("127.0.0.1", 0)) as full:
        starts = threading.Thread(target=lambda: one.thread.join() or one.send(go=GO))
        starts.start()
        opened = socket.create_connection(full.getsockname())
        full.accept()[0].close()
        connection, go = channel.join("127.0.0.1", one.port, hello(1), PATIENCE, print, KEY, opened)
        assert go == GO
        starts.join()
        connection.close()


def test_who_is_missing_is_said_every_ten_seconds(at, monkeypatch):
    clock, said = at([0.0], hub, progress), []

    def nobody_comes(_, seconds):
        clock[0] += seconds
        return []

    monkeypatch.setattr(hub.Hub, "poll", nobody_comes)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = hub.Hub(listener, hello(0, 4, workers=2), said.append)
        with pytest.raises(UserError, match=r"^nodes 1-3 \(ranks 2-7\) did not come within 25 s$"):
            one.meet(25)
        one.close()
    assert said == [f"waiting for nodes 1-3 (ranks 2-7), {seconds} s" for seconds in (10, 20)]


def test_who_comes_at_the_last_moment_is_not_said_to_be_missing(at, monkeypatch):
    clock, said = at([0.0], hub, progress), []

    def comes(self, seconds):
        clock[0] += seconds
        if clock[0] >= progress.LINE_SECONDS:
            self.connections[1] = types.SimpleNamespace(tell=lambda **_: None, close=lambda: None)
        return []

    monkeypatch.setattr(hub.Hub, "poll", comes)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = hub.Hub(listener, hello(0), said.append)
        one.meet(60)
        one.close()
    assert not said
