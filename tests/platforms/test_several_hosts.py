"""The DDP job on several hosts with disks of their own: train, resume at other sizes, and a host or a cable that is lost."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.tools.cifar import write_folder
from tests.tools.hosts import OUTSIDE, Hosts, wait_all
from tests.tools.jobs import PATIENCE, assert_same_bits, final_state, saved, wait_for
from tests.tools.objectstore import ObjectStore
from tests.tools.packages import namespaces
from tests.tools.ranks import LONG, TWO, check_ledger, run_ranks, workers_of


@pytest.fixture
def hosts(tmp_path):
    namespaces()
    made = []

    def make(count, **how):
        for last in made[-1:]:  # it has the same addresses
            last.close()
        made.append(Hosts(count, tmp_path / str(len(made)), **how))
        return made[-1]

    yield make
    for some in made[-1:]:
        some.close()


def run_everywhere(some, nodes, *options):
    codes, _ = wait_all([some.start(number, nodes, *options) for number in range(nodes)], PATIENCE)
    assert codes == [0] * nodes, [some.log(number) for number in range(nodes)]


@pytest.mark.rehearsal
def test_two_hosts_train_evaluate_save_and_resume_at_other_sizes(hosts, tmp_path):
    """2 ranks on 2 hosts, 1 on one, 4 on two. Only the first host's disk has the checkpoints; every sample is used once."""
    some = hosts(2)
    run_everywhere(some, 2, *TWO, "--max_steps", 3)
    reference = tmp_path / "reference"
    reference.mkdir()
    run_ranks(reference, *TWO, "--max_steps", 3)
    assert_same_bits(final_state(some.folders[0]), final_state(reference))
    run_everywhere(some, 1, *TWO, "--max_steps", 5)
    run_everywhere(some, 2, *TWO, "--nproc_per_node", 2)
    assert "rank 0 of 4" in some.log(0) and some.log(0).count("going on from") == 2
    assert not list((some.folders[1] / "out").glob("checkpoints/*.pt"))
    check_ledger(*(folder / "out" for folder in some.folders))


@pytest.mark.rehearsal
def test_three_hosts(hosts):
    some = hosts(3)
    run_everywhere(some, 3, *TWO, "--batch_size", 4, "--max_steps", 6)
    assert "rank 0 of 3" in some.log(0) and "4 of 64 samples" in some.log(0)


@pytest.mark.rehearsal
def test_a_busy_machine_raises_no_alarm(hosts):
    """Load 8 and more on the 2 cores of a small machine, over an evaluation and a save in every epoch."""
    some = hosts(2)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * len(os.sched_getaffinity(0)))]
    try:
        processes = [some.start(number, 2, *TWO, "--nproc_per_node", 2, "--batch_size", 4) for number in range(2)]
        codes, _ = wait_all(processes, PATIENCE)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert codes == [0, 0], some.log(0) + some.log(1)
    assert "error" not in some.log(0) + some.log(1)


def started(some, nodes):
    processes = [some.start(number, nodes, *LONG, "--save_steps", 1) for number in range(nodes)]
    wait_for(saved(some.folders[0], 2 * 8 * nodes), processes[0], "a few steps")
    return processes


def test_a_cut_cable_stops_both_sides_and_each_names_the_other(hosts):
    some = hosts(2, forked=True)
    processes = started(some, 2)
    some.cut(1)
    codes, _ = wait_all(processes, PATIENCE)  # how fast they are is for make chaos
    assert codes == [1, 1]
    assert re.search(r"error: node 1 \(rank 1\) has been silent for \d+ s \(machine or network\)", some.log(0)), some.log(0)
    assert re.search(r"error: node 0 \(rank 0\) has been silent for \d+ s \(machine or network\)", some.log(1)), some.log(1)


@pytest.mark.rehearsal
def test_a_worker_that_dies_restarts_the_workers_of_every_host(hosts):
    """In place: the parents meet again, and the run ends as it would have."""
    some = hosts(2)
    options = [*TWO, "--epochs", "4", "--save_steps", "1", "--max_restarts", "1"]
    processes = [some.start(number, 2, *options) for number in range(2)]
    wait_for(saved(some.folders[0], 32), processes[0], "a few steps")
    os.kill(workers_of(some.pids(1))[1], signal.SIGKILL)
    assert wait_all(processes, PATIENCE)[0] == [0, 0], some.log(0)
    for number in range(2):
        assert "error: rank 1 (node 1" in some.log(number) and "restart 1 of 1 from the last checkpoint" in some.log(number)
    check_ledger(*(folder / "out" for folder in some.folders))


@pytest.mark.rehearsal
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_is_lost_is_named_by_the_others(hosts, lost):
    some = hosts(3)
    processes = started(some, 3)
    some.kill(lost)
    codes, _ = wait_all(processes, PATIENCE)
    for number in {0, 1, 2} - {lost}:
        assert codes[number] == 1
        assert f"error: node {lost} (rank {lost}) is lost; stopping all 3 ranks" in some.log(number), some.log(number)


@pytest.mark.rehearsal
def test_data_and_output_in_a_bucket_killed_and_started_again_on_empty_disks(hosts, tmp_path):
    """Two hosts that share nothing but the store; the bits are those of a run that nobody touched."""
    store = ObjectStore(tmp_path / "store", OUTSIDE)
    try:
        client = store.client()
        client.create_bucket(Bucket="data")
        write_folder(tmp_path / "cifar-10-batches-py", count=64)
        for path in (tmp_path / "cifar-10-batches-py").iterdir():
            client.upload_file(str(path), "data", f"cifar/cifar-10-batches-py/{path.name}")
        options = [*TWO[2:], "--epochs", 6, "--save_steps", 1]
        (whole := tmp_path / "whole").mkdir()
        run_ranks(whole, *options, "--data_url", tmp_path)
        options += ["--data_url", "s3://data/cifar", "--output_dir", "s3://data/out"]

        def published():
            return [name for name in keys(client, "out/checkpoints/") if name.endswith(".json")]

        some = hosts(2, outside=True)
        processes = [some.start(number, 2, *options, output=None, env=store.environment) for number in range(2)]
        wait_for(lambda: len(published()) > 1, processes[0], "a checkpoint in the bucket")
        for number in range(2):
            some.kill(number)
        wait_all(processes, PATIENCE)
        again = hosts(2, outside=True)
        processes = [again.start(number, 2, *options, output=None, env=store.environment) for number in range(2)]
        assert wait_all(processes, PATIENCE)[0] == [0, 0], again.log(0) + again.log(1)
        assert "fetched checkpoint" in again.log(0) and "going on from" in again.log(0)
        assert_same_bits(final_state(again.folders[0], "output_dir/s3/data/out"), final_state(whole))
        ledgers = [folder / "output_dir/s3/data/out" for folder in again.folders]
        assert all((folder / "ledger").exists() for folder in ledgers)
    finally:
        store.stop()


def keys(client, prefix):
    return [entry["Key"] for entry in client.list_objects_v2(Bucket="data", Prefix=prefix).get("Contents", [])]
