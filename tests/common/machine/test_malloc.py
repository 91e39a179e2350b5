"""The memory settings: glibc takes them, whoever starts workers sets them, and the user's stand."""

import shutil
import subprocess
import sys

import pytest

from common.machine import drivers, malloc
from tests.tools.jobs import ROOT, environment, run


def linker():
    return shutil.which("/lib64/ld-linux-x86-64.so.2")


glibc = pytest.mark.skipif(
    linker() is None or malloc.OLD_GLIBC, reason="needs glibc 2.35 or newer, whose loader is /lib64/ld-linux-x86-64.so.2"
)


@pytest.fixture
def on_a_cpu():
    if drivers.gpus():
        pytest.skip("this machine has a GPU, where nothing is set")


@glibc
def test_glibc_takes_every_setting():
    env = environment(GLIBC_TUNABLES=malloc.text())
    lines = subprocess.run([linker(), "--list-tunables"], env=env, capture_output=True, text=True, check=True).stdout
    taken = {line.split(":")[0]: int(line.split()[1], 0) for line in lines.splitlines() if line.startswith("glibc.malloc")}
    assert {name: taken[name] for name in malloc.SETTINGS} == malloc.SETTINGS


def test_by_hand_it_is_what_launch_local_sets(on_a_cpu):
    done = subprocess.run([sys.executable, "-m", "common.machine.malloc"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert malloc.tuned({}) == {"GLIBC_TUNABLES": done.stdout.strip()}


def test_what_the_user_has_set_stands():
    assert malloc.tuned({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}) == {}


def test_not_where_a_gpu_computes(monkeypatch):
    monkeypatch.setattr(drivers, "gpus", lambda: 1)
    assert malloc.tuned({}) == {}


JOB = """
import os, sys
sys.path.insert(0, {root!r})
from common import arguments
from common.alive import heartbeat
from common.ranks import group
from datasets import cifar10
parser = cifar10.parser("A job.")
group.add_options(parser)
args = arguments.parse(parser)
print("started with", os.environ.get("GLIBC_TUNABLES"), flush=True)
group.start_workers(args)
print("worker has", os.environ.get("GLIBC_TUNABLES"), flush=True)
heartbeat.of_this_process().set("done", 0)
"""


def test_launch_local_and_the_parent_of_a_node_set_it_for_those_they_start(on_a_cpu, tmp_path):
    job = tmp_path / "job.py"
    job.write_text(JOB.format(root=str(ROOT)))
    local = [sys.executable, "-m", "launch", "local", "--procs", "2", str(job)]
    said = run(local, cwd=ROOT, env=environment()).stdout
    assert said.count(f"worker has {malloc.text()}") == 2 and f"started with {malloc.text()}" in said
    alone = [sys.executable, str(job)]
    env = environment(NPROC_PER_NODE="2")
    said = run(alone, env=env).stdout
    assert "started with None" in said and said.count(f"worker has {malloc.text()}") == 2


LOADS = """
import ctypes
import torch
from datasets.loader import torch_batches
from datasets.sampler import InOrder

class Large:
    def __getitem__(self, _epoch_and_ids):
        sbrk = ctypes.CDLL(None).sbrk
        sbrk.restype, sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
        before = sbrk(0)
        pictures = [torch.empty((1 << 25) - (1 << 16), dtype=torch.uint8) for _ in range(8)]
        del pictures
        return (sbrk(0) - before) >> 20

print(next(iter(torch_batches(Large(), InOrder(1, 1)))))
"""


@glibc
def test_a_loader_without_processes_keeps_the_memory_of_a_sample_for_the_next():
    done = run([sys.executable, "-c", LOADS], cwd=ROOT, env=environment())
    assert int(done.stdout) > 100, done.stdout + done.stderr  # MiB by which the heap has grown, after all was given back
