"""A real mpirun starts the DDP job: one process, two on one host, and one on each of two hosts."""

import subprocess

import pytest

from tests.tools.hosts import Hosts
from tests.tools.jobs import PATIENCE, TINY, assert_same_bits, command, environment, final_state
from tests.tools.packages import namespaces, program
from tests.tools.ranks import TWO, check_ledger

pytestmark = pytest.mark.rehearsal  # a package of the system

ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="module")
def mpirun():
    return [program("mpirun"), "--oversubscribe"]


def run(folder, *words, check=0, **env):
    words = list(map(str, words))
    done = subprocess.run(
        words, cwd=folder, env=environment(**ROOT_MAY, **env), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == check, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_two_processes(mpirun, two_ranks, tmp_path):
    printed = run(tmp_path, *mpirun, "-np", 2, *command("train_ddp", *TWO, "--output_dir", tmp_path / "out"))
    assert "rank 0 of 2, platform openmpi (OMPI_COMM_WORLD_SIZE)" in printed
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))


@pytest.mark.parametrize("job", ["train_ddp", "train"])
def test_one_process(mpirun, finished, job, tmp_path):
    """Also of the job for one device, which refuses to be one of several."""
    printed = run(tmp_path, *mpirun, "-np", 1, *command(job, *TINY, "--output_dir", tmp_path / "out"))
    assert "rank 0 of 1, platform openmpi (OMPI_COMM_WORLD_SIZE)" in printed
    assert_same_bits(final_state(tmp_path)["model"], final_state(finished[0])["model"])


def test_the_job_for_one_device_refuses_to_be_one_of_two(mpirun, tmp_path):
    printed = run(tmp_path, *mpirun, "-np", 2, *command("train", *TINY, "--output_dir", tmp_path / "out"), check=2)
    assert "but train.py trains on one device: start train_ddp.py instead" in printed


def test_two_hosts(mpirun, two_ranks, tmp_path):
    """mpirun reaches the other host by a program in place of ssh. It tells nobody who is first: without MASTER_ADDR that is said."""
    namespaces()
    hosts = Hosts(2, tmp_path / "hosts", called=["node0", "node1"])
    try:
        remote = tmp_path / "remote"
        remote.write_text(f'#!/bin/sh\nshift\nexec ip netns exec {hosts.names[1]} unshare --uts sh -c "hostname node1 && $*"\n')
        remote.chmod(0o755)
        words = hosts.words(0, *mpirun, "-np", 2, "--host", "node0,node1", "--mca", "plm_rsh_agent", remote)
        job = command("train_ddp", *TWO, "--output_dir", tmp_path / "out")
        printed = run(tmp_path, *words, *job, check=2)
        assert "error: Open MPI gives no master address: set MASTER_ADDR, e.g. mpirun -x MASTER_ADDR=FIRST_HOST" in printed
        printed = run(tmp_path, *words, "-x", "MASTER_ADDR=node0", *job)
        assert "rank 0 of 2, platform openmpi" in printed
    finally:
        hosts.close()
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))
    check_ledger(tmp_path / "out")
