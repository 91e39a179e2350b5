"""The loader over Ray when something dies: a worker, a host, the head, in the middle of an epoch; and whole jobs with it."""

import os
import random
import signal
import subprocess
import time

import pytest
import torch

from common.errors import TrainingFailed
from datasets.dpex import DpexDataLoader
from tests.datasets.dpex.test_dpex import Squares, Stream
from tests.tools.jobs import PATIENCE, assert_same_bits, command, environment, final_state, wait_for
from tests.tools.ranks import TWO
from tests.tools.rayhosts import RayHosts

pytestmark = pytest.mark.rehearsal  # clusters that are lost and found

COUNT, STALL = 60, 30
STORE = 80 << 20  # bytes that each host has for batches


class Pictures(Squares):
    """Each batch is large enough for Ray's object store, and takes its time."""

    def __init__(self):
        super().__init__(2 * COUNT)

    def __getitem__(self, number):
        import datasets

        time.sleep(0.02)
        return torch.full((200, 200), float(number)), datasets.__path__[0], os.getpid()


@pytest.fixture(scope="module")
def clusters(tmp_path_factory):
    """A function that gives a cluster of a head and two more, none of which can see the repository, and a loader on it."""
    started = []

    def whole():
        if not started or started[-1][0].headless:
            cluster = RayHosts(tmp_path_factory.mktemp("cluster"), 2, store=STORE)
            os.environ.update(cluster.variables)
            loader = DpexDataLoader(Pictures(), distribute_mode=True, head_address=cluster.address, batch_size=2, num_workers=3)
            started.append((cluster, loader))
        return started[-1]

    before, folder = dict(os.environ), os.getcwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))  # Ray lets workers look where the program stands
    yield whole
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(before)
    for cluster, _ in started:
        cluster.close()


@pytest.fixture
def hosts(clusters):
    return clusters()[0]


@pytest.fixture
def loader(clusters):
    return clusters()[1]


def epoch(loader, fault=None, at=10):
    """Every batch is asserted; the longest wait for one, where the workers' `datasets` lay, and their processes."""
    longest, folders, workers = 0.0, set(), set()
    before = time.monotonic()
    for number, (images, places, processes) in enumerate(loader):
        longest = max(longest, time.monotonic() - before) if number else 0.0
        assert images[:, 0, 0].tolist() == [2 * number, 2 * number + 1] and images.shape == (2, 200, 200)
        folders, workers = folders | set(places), workers | set(processes.tolist())
        if number == at and fault:
            fault()
        before = time.monotonic()
    assert number == COUNT - 1
    return longest, folders, workers


def test_the_workers_are_on_all_hosts_and_get_our_packages_from_ray(loader, hosts):
    _, folders, workers = epoch(loader)
    assert all("py_modules" in folder for folder in folders)
    assert set(hosts.workers().values()) == {hosts.head[1], *hosts.raylets} and workers == set(hosts.workers())


@pytest.mark.parametrize("seed", [1, 2])
def test_a_killed_worker_is_replaced(loader, hosts, seed):
    draw = random.Random(seed)

    def kill():
        os.kill(draw.choice(sorted(hosts.workers())), signal.SIGKILL)

    with pytest.warns(UserWarning, match="made again; a transform that draws"):
        assert epoch(loader, kill, draw.randrange(5, 40))[0] < PATIENCE


class Slowly(Stream):
    def __iter__(self):
        for item in super().__iter__():
            time.sleep(0.02)
            yield item


def test_a_stream_goes_on_where_its_lost_worker_was_to_the_same_bits(hosts):
    def read(distributed, kill=False):
        torch.manual_seed(3)
        data = Slowly(160, shared=True, noise=True)
        batches = []
        for number, batch in enumerate(
            DpexDataLoader(data, distribute_mode=distributed, head_address=hosts.address, batch_size=4, num_workers=2)
        ):
            batches.append(batch)
            if kill and number == 7:
                os.kill(max(hosts.workers()), signal.SIGKILL)
        return batches

    expected = read(False)
    with pytest.warns(UserWarning, match="made again"):
        assert_same_bits(read(True, kill=True), expected)


class Large(Squares):
    def __getitem__(self, number):
        return torch.full((1 << 20,), float(number))


def test_more_is_on_its_way_than_the_hosts_have_room_for(hosts):
    """Batches of 24 MB, a dozen of them asked for, on hosts that hold three each."""
    made = DpexDataLoader(
        Large(96), distribute_mode=True, head_address=hosts.address, batch_size=6, num_workers=3, prefetch_factor=4
    )
    kept = []
    for number, batch in enumerate(made):
        kept.append(batch)  # what was given is the reader's, and no longer in the way
        assert batch.shape == (6, 1 << 20) and batch[:, -1].tolist() == list(range(6 * number, 6 * number + 6))
    assert len(kept) == 16 and kept[0][5, 0] == 5


def test_a_host_is_lost_and_another_one_comes(loader, hosts):
    with pytest.warns(UserWarning, match="was lost"):
        assert epoch(loader, lambda: hosts.kill(0))[0] < PATIENCE
    hosts.add()
    epoch(loader)
    assert hosts.raylets[-1] in hosts.workers().values()


def test_the_head_is_lost(loader, hosts):
    """One loader goes on on this machine, from the next batch; the other one stops, as it was asked to."""
    strict = iter(
        DpexDataLoader(
            Pictures(), distribute_mode=True, head_address=hosts.address, batch_size=2, num_workers=1, head_lost="stop"
        )
    )
    next(strict)
    with pytest.warns(UserWarning, match="the Ray cluster is lost: .* on this machine from here on"):
        _, folders, _ = epoch(loader, hosts.kill_head)  # how long it takes is for make chaos
    assert any("py_modules" not in folder for folder in folders)
    with pytest.raises(TrainingFailed, match="head_lost='stop' was asked for"):
        for _ in strict:
            pass
    assert epoch(loader)[0] < PATIENCE  # and so does the next epoch


# --- Jobs ------------------------------------------------------------------------------------------------------------------


def test_two_ranks_with_a_cluster_each_killed_and_resumed_end_with_the_bits_of_local_loading(two_ranks, tmp_path):
    """The composition of DDP and DPEX, started by hand as two processes would be by torchrun."""
    from launch import blocks
    from tests.tools.jobs import ROOT

    jobs = tmp_path / "jobs"
    jobs.mkdir()
    for name in ("common", "datasets"):
        (tmp_path / name).symlink_to(ROOT / name)
    (jobs / "train_ddp_dpex.py").write_text("\n".join(blocks.compose(["DDP", "DPEX"])))
    words = command("train_ddp", *TWO, "--save_steps", 1, "--nproc_per_node", 2, "--output_dir", tmp_path / "out")
    words[1] = str(jobs / "train_ddp_dpex.py")
    killed = subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    checkpoints = tmp_path / "out" / "checkpoints"
    wait_for(lambda: len(list(checkpoints.glob("*.json"))) > 1, killed, "two checkpoints")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and "going on from" in done.stdout, done.stdout + done.stderr
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))
