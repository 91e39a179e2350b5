"""Data come once per node, and nobody goes on before all have theirs."""

import errno
import fcntl
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading

import pytest

from common import progress, storage
from common.alive import heartbeat
from common.errors import TrainingFailed, UserError
from common.storage import once
from tests.tools.faultproxy import faults
from tests.tools.jobs import PATIENCE, ROOT, TINY, Popen, command, environment, in_rehearsal, lock_holders, wait_for
from tests.tools.objectstore import free_port
from tests.tools.stores import same, store_environment

pytestmark = pytest.mark.usefixtures("reachable", "the_secret_is_nowhere")


# A process of a node: fetches, and says when it is the one who does.
FETCHER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from common import storage
from common.errors import UserError
print("done", os.path.getsize(os.path.join(storage.fetch("s3://data/set"), "2/29.bin")))
"""


def start_fetchers(count, folder, **env):
    words = [sys.executable, "-c", FETCHER, str(ROOT)]
    return [
        Popen(
            words,
            cwd=folder,
            env=environment(**store_environment(), **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(count)
    ]


def test_on_a_store_that_knows_no_locks_the_lease_is_a_file_of_this_machine(monkeypatch, tmp_path):
    """Lustre and NFS may be mounted so; the folder here is made to answer as they do."""
    (own := tmp_path / "own").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    flock, done = fcntl.flock, []

    def refusing(file, how):
        if os.readlink(f"/proc/self/fd/{file}").startswith(str(tmp_path / "data")):
            raise OSError(errno.ENOSYS, "Function not implemented")
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", refusing)

    def work(_lease):
        (path,) = own.iterdir()
        with open(path) as other, pytest.raises(BlockingIOError):
            flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        done.append(1)

    once.once_per_node(str(tmp_path / "data" / "set"), work)
    assert done == [1]


def test_who_looks_is_not_taken_for_a_holder_by_others_who_look_or_want_it(tmp_path):
    path = str(tmp_path / "work")
    held = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_SH)  # somebody is looking just now
    assert once.is_free(path)
    os.close(held)
    over, seen = threading.Event(), []

    def look():
        while not over.is_set():
            seen.append(once.is_free(path))

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(20):
            with once.locked(path, "somebody else holds it"):
                pass
    finally:
        over.set()
        for looker in lookers:
            looker.join()
    with once.locked(path, "somebody else holds it"):
        assert not once.is_free(path)
    assert once.is_free(path) and seen


def test_a_lock_is_taken_once_those_that_look_at_it_have_let_go_and_refused_at_once_while_it_is_held(tmp_path, monkeypatch):
    path = str(tmp_path / "work")
    looked_at = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(looked_at, fcntl.LOCK_SH)
    waits = iter(range(20))
    monkeypatch.setattr(once.time, "sleep", lambda _: next(waits) == 19 and os.close(looked_at))
    with once.locked(path, "somebody else holds it"):
        assert next(waits, None) is None
        with pytest.raises(UserError, match="somebody else holds it"), once.locked(path, "somebody else holds it"):
            raise AssertionError("both were let in")  # a wait would end in StopIteration


@pytest.mark.parametrize("kills", in_rehearsal([0, 2], lambda kills: kills == 0))
def test_eight_ranks_fetch_once_also_when_the_one_that_fetches_is_killed(store, monkeypatch, tmp_path, kills):
    """Whoever asks for an object is the owner; it is killed in the middle. A lock file of an earlier container is there."""
    (tmp_path / "input_dir/s3/data/set/.fetching").mkdir(parents=True)
    (tmp_path / "input_dir/s3/data/set/.fetching/fetch.lock").write_text('{"state": "working", "at": 1e12}')
    killed, processes, lock, started = [], [], threading.Lock(), threading.Event()

    def plan(request):
        started.wait(PATIENCE)
        with lock:
            if request.is_object and len(killed) < kills and request.path not in killed:
                pids = lock_holders(tmp_path / "input_dir/s3/data/set/.fetching/fetch.lock")
                for owner in [process for process in processes if process.pid in pids and process.poll() is None]:
                    killed.append(request.path)
                    owner.kill()
                    owner.wait()

    with faults(store, plan, monkeypatch) as proxy:
        processes += start_fetchers(8, tmp_path)
        started.set()
        texts = [process.communicate(timeout=PATIENCE)[0] for process in processes]
        assert len(killed) == kills
        assert sorted(process.returncode for process in processes) == [-9] * kills + [0] * (8 - kills), texts
        assert same("input_dir/s3/data/set")
        if not kills:
            assert len(proxy.objects()) == 30


def test_a_failure_is_told_to_those_who_wait_and_not_to_a_later_start(store, monkeypatch, tmp_path):
    gate = threading.Event()

    def plan(request):
        if "prefix" in request.query:
            gate.wait(PATIENCE)
            return "denied"

    with faults(store, plan, monkeypatch) as proxy:
        processes = start_fetchers(4, tmp_path)
        lock_file = tmp_path / "input_dir/s3/data/set/.fetching/fetch.lock"
        wait_for(lambda: lock_file.exists() and len(waiting_on(lock_file)) == 4, processes[0], "four processes at the lease")
        gate.set()
        texts = [process.communicate(timeout=PATIENCE)[0] for process in processes]
        assert all("403 AccessDenied" in text for text in texts), texts
        assert len(proxy.log) == 1, "nobody else asked"
        proxy.plan = lambda request: None
        assert same(storage.fetch("s3://data/set"))


@pytest.mark.parametrize("state", ["failed", "done"])
def test_what_was_said_before_is_not_believed(tmp_path, state):
    """Of an earlier start, of the time before a reboot, or of another machine that has the same disk."""
    (tmp_path / "x.lock").write_text(json.dumps({"state": state, "text": "old", "at": 1e12, "boot": "another"}))
    done = []
    once.once_per_node(str(tmp_path / "x"), lambda held: done.append(1))
    assert done == [1]


def waiting_on(lock_file):
    """The processes that have the lease's file open."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        if str(lock_file) in links:
            found.append(int(pid))
    return found


def opened(path):
    """How many times this process has the file open."""
    return [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")].count(os.path.realpath(path))


@pytest.mark.parametrize("kind", [None, UserError, TrainingFailed])
def test_those_who_wait_share_a_good_end_and_an_error_of_the_same_kind_and_do_not_try_it_again(tmp_path, kind):
    """The kind decides on the exit code."""
    path, fails, did, ends = str(tmp_path / "fetch"), threading.Event(), [], []

    def work(_held):
        did.append(1)
        fails.wait(PATIENCE)
        if kind:
            raise kind("there is no such bucket")

    def start():
        try:
            once.once_per_node(path, work, "some of its objects")
        except (UserError, TrainingFailed) as error:
            ends.append((type(error), str(error)))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: opened(f"{path}.lock") == 3, None, "three threads at the lease")
    fails.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert ends == ([(kind, "there is no such bucket")] * 3 if kind else []) and did == [1]


def test_those_who_wait_and_the_watcher_see_how_far_it_is(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(once, "TELL_SECONDS", -1.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    path, printed = str(tmp_path / "x"), []
    other = threading.Thread(target=once.once_per_node, args=(path, lambda _: None))

    def work(held):
        held.tell("3 of 9 objects", 3)
        assert heartbeat.of_this_process().read() == ("fetch", 3)
        other.start()
        wait_for(lambda: printed.append(capfd.readouterr().out) or any(printed), None, "a line of the one that waits")

    once.once_per_node(path, work)
    other.join(PATIENCE)
    assert "waiting for another process of this node: 3 of 9 objects\n" in "".join(printed)


def test_a_rank_without_data_stops_the_others_with_its_cause_before_any_collective(store, tmp_path):
    """Two nodes; the second one's key is wrong. Under the job's own parents and under torchrun."""
    for launcher in ("ours", "torchrun"):
        nodes, port = [], free_port()
        for rank in range(2):
            folder = tmp_path / f"{launcher}{rank}"
            folder.mkdir()
            options = [*TINY[2:], "--custom_data", "false", "--data_url", "s3://data/cifar", "--output_dir", folder / "out"]
            script = command("train_ddp", *options)
            if launcher == "ours":
                script += ["--init_method", f"tcp://127.0.0.1:{port}", "--rank", str(rank), "--world_size", "2"]
            else:
                words = ["--nnodes", "2", "--node_rank", str(rank), "--master_addr", "127.0.0.1", "--master_port", str(port)]
                script = [sys.executable, "-m", "torch.distributed.run", *words, *script[1:]]
            env = environment(**{**store_environment(), **({"AWS_SECRET_ACCESS_KEY": "wrong"} if rank else {})})
            nodes.append(Popen(script, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        texts = [node.communicate(timeout=PATIENCE)[0] for node in nodes]
        assert all(node.returncode for node in nodes)
        assert all("403 SignatureDoesNotMatch: the secret key does not belong" in text for text in texts), texts


def test_who_wants_something_else_of_a_place_does_not_take_that_for_done(tmp_path, monkeypatch):
    did, waits, path, wait = [], queue.SimpleQueue(), str(tmp_path / "fetch"), once._wait
    monkeypatch.setattr(once, "_wait", lambda *how: waits.put(how) or wait(*how))
    works, ends = threading.Event(), threading.Event()
    first = threading.Thread(target=once.once_per_node, args=(path, lambda _: works.set() or ends.wait(), "one"))
    others = [
        threading.Thread(target=once.once_per_node, args=(path, lambda _, what=what: did.append(what), what))
        for what in ("one", "two")
    ]
    first.start()
    assert works.wait(PATIENCE)
    for thread in others:
        thread.start()
    for _ in range(3):
        waits.get(timeout=PATIENCE)
    ends.set()
    for thread in (first, *others):
        thread.join(PATIENCE)
    assert did.count("two") == 1, "and one may have looked again, after it"
