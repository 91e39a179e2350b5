"""What several files of tests share: runs that nobody disturbed, made once for all, and an object store."""

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import sys
import tarfile
import time
import types
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests run side by side, and threads that wait spin

import pytest

from common import files, moments
from common.alive import heartbeat, patience
from common.alive.stops import STOPS, Stops
from tests.tools.cifar import write_folder
from tests.tools.jobs import FIGURES, ROOT, TINY, run_job
from tests.tools.objectstore import SECRET, ObjectStore
from tests.tools.packages import only_what_was_asked_for
from tests.tools.ranks import TWO
from tests.tools.stores import MIB, fill

sys.addaudithook(only_what_was_asked_for)

JOURNALS_SEEN: set[Path] = set()  # by an earlier module
LONGEST = 1800  # seconds, for a test of make rehearsal


def pytest_collection_modifyitems(items):
    """The others have the limit of pyproject.toml."""
    for item in items:
        if item.get_closest_marker("rehearsal"):
            item.add_marker(pytest.mark.timeout(LONGEST))


@pytest.fixture(autouse=True)
def nobody_listens_any_more(monkeypatch):
    """A test that calls a job in its own process leaves no listener, which would start a watcher for each that parses arguments."""
    monkeypatch.setattr(moments, "_listeners", [])
    for field in dataclasses.fields(moments.REPLACED):
        monkeypatch.setattr(moments.REPLACED, field.name, None)
    vars(STOPS).update(vars(Stops()))  # nor a stop
    monkeypatch.setattr(files, "CLAIMED", {})  # nor a folder that is its own
    heartbeat._PULSES.clear()  # nor what it waits for
    monkeypatch.setenv(patience.VARIABLE, str(patience.DEFAULT))  # nor for how long


@pytest.fixture(scope="module", autouse=True)
def no_run_is_told_that_it_forgets_a_part(request, tmp_path_factory):
    """A module whose runs do has FORGETS_PARTS."""
    yield
    for journal in {*tmp_path_factory.getbasetemp().rglob("journal.jsonl")} - JOURNALS_SEEN:
        JOURNALS_SEEN.add(journal)
        if not getattr(request.module, "FORGETS_PARTS", False):
            said = [line for line in journal.read_text(errors="replace").splitlines() if "a restart begins it anew" in line]
            assert not said, f"{journal}: {said}"


@pytest.fixture
def at(monkeypatch):
    """at(NOW, MODULES): for these it is NOW[0]. For nobody else: an object that is deleted meanwhile may wait for its processes."""

    def at(now, *modules):
        for module in modules:
            monkeypatch.setattr(module, "time", types.SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0]}))
        return now

    return at


@pytest.fixture(scope="session")
def untouched(tmp_path_factory):
    """untouched(JOB, *OPTIONS): the folder of a finished run, and what it printed. To be read only: other tests have it too."""
    shared = Path(os.environ.get("SHARED", tmp_path_factory.getbasetemp()))  # by all processes of python -m tests

    def run(job, *options):
        folder = shared / "untouched" / re.sub(r"\W+", "_", " ".join(map(str, (job, *options))))
        folder.mkdir(parents=True, exist_ok=True)
        printed = folder / "printed"
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not printed.exists():
                shutil.rmtree(folder / "out", ignore_errors=True)  # of a run that failed
                printed.write_text(run_job(job, folder, *options, env=FIGURES).stdout)
        return folder, printed.read_text()

    return run


@pytest.fixture(scope="session")
def finished(untouched):
    """The base job: two epochs of four steps."""
    return untouched("train", *TINY)


@pytest.fixture(scope="session")
def two_ranks(untouched):
    """The DDP job with two processes, which together do what the base job does."""
    return untouched("train_ddp", *TWO, "--nproc_per_node", 2)


# --- An object store ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    write_folder(cifar := tmp_path_factory.mktemp("cifar") / "cifar-10-batches-py")
    running = ObjectStore(tmp_path_factory.mktemp("store"))
    try:
        fill(running, cifar)
        yield running
    finally:
        running.stop()


@pytest.fixture
def reachable(store, monkeypatch, tmp_path):
    """As on a machine that has just this store and its key."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {**store.environment, "AWS_CONFIG_FILE": "/none", "AWS_SHARED_CREDENTIALS_FILE": "/none"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def the_secret_is_nowhere(capfd, tmp_path):
    """After every fault that a test makes: not in the output, not in a file, not in the list of processes."""
    yield
    places = {"output": "".join(capfd.readouterr()).encode()}
    places.update({path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size < MIB})
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            places[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
    assert not [place for place, content in places.items() if SECRET.encode() in content]


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """The real photographs, 240 to train and 60 to evaluate, where they are beside the project."""
    archive = ROOT.parent / "shared" / "data" / "imagenet-300.tar"
    if not archive.exists():
        pytest.skip("the real photographs are not beside the project")
    folder = tmp_path_factory.mktemp("real")
    with tarfile.open(archive) as members:
        members.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # since Python 3.11.4
    return folder / "imagenet"
