"""The interface that Gloo and NCCL take, and what is said where a variable names one that is not there."""

import errno
import subprocess
import sys
import types

import pytest

from common import devices
from common.devices import TORCH
from common.doctor import checks
from common.world import network
from tests.tools.jobs import (
    ROOT,
    TINY,
    command,
    forked,
    run_forked,
)
from tests.tools.packages import namespaces

ADDRESSES = """
import os
from torch import distributed

distributed.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=int(os.environ["RANK"]), world_size=12)
distributed.barrier()
print(os.path.getsize("store"))
distributed.barrier()
distributed.destroy_process_group()
"""


@pytest.mark.skipif(TORCH < (2, 8), reason="its Gloo has no such settings")
def test_each_rank_tells_the_others_one_address(tmp_path):
    def told(**settings):
        folder = tmp_path / str(len(settings))
        folder.mkdir()
        found = forked(["-c", ADDRESSES], folder, *({"RANK": str(rank), **settings} for rank in range(12)))
        assert {done.returncode for done in found} == {0}, found
        return int(found[0].stdout)

    assert told(**network.group_environment("127.0.0.1")) < 0.8 * told(**network.interfaces("127.0.0.1"))


def test_the_interface_of_the_other_nodes_is_taken_unless_the_user_has_named_one(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert network.interfaces("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert network.interfaces("127.0.0.1") == {}


def test_each_address_of_an_interface_is_found():
    namespaces()
    addresses = "ip link set lo up; ip addr add 10.9.9.8/8 dev lo label lo:1; ip addr add 10.9.9.9/8 dev lo; ip addr add fd00::9/64 dev lo"
    asks = "import sys; from common.world.network import interface_of; print(*map(interface_of, sys.argv[1:]))"
    asked = ["127.0.0.1", "10.9.9.8", "10.9.9.9", "fd00::9", "10.9.9.7", "::ffff"]
    shell = f"{addresses}; exec {sys.executable} -c '{asks}' {' '.join(asked)}"
    done = subprocess.run(["unshare", "--net", "sh", "-ec", shell], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["lo", "lo", "lo", "lo", "None", "None"], done.stderr


def test_an_address_is_looked_for_where_there_is_no_ipv4(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(network.socket, "socket", refuse)
    assert network.interface_of("10.9.9.9") is None


def test_an_interface_that_this_node_has_not_ends_the_job_with_what_the_doctor_says(tmp_path):
    setting = {"GLOO_SOCKET_IFNAME": "eth77", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2",
               "LOCAL_RANK": "0", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # fmt: skip
    done = run_forked(command("train_ddp", *TINY, "--output_dir", tmp_path / "out")[1:], tmp_path, setting, check=2)
    assert "error: GLOO_SOCKET_IFNAME is eth77, this node has lo" in done.stderr, done.stderr
    assert checks.check_interface(types.SimpleNamespace(num_nodes=2, master_addr="h", level="node"), setting).severity == "bad"


@pytest.mark.parametrize(
    "setting, adapters, said",
    [
        ({}, (), None),
        ({"NCCL_IB_HCA": "mlx5"}, ("mlx5_0", "mlx5_1"), None),
        ({"NCCL_IB_HCA": "=mlx5_1:1"}, ("mlx5_0", "mlx5_1"), None),
        ({"NCCL_IB_HCA": "^mlx5_0"}, ("mlx5_0", "mlx5_1"), None),
        ({"NCCL_IB_HCA": "mlx5", "NCCL_IB_DISABLE": "1"}, (), None),
        (
            {"NCCL_IB_HCA": "mlx5"},
            (),
            "NCCL_IB_HCA is mlx5, this node has no InfiniBand adapter: NCCL takes TCP, which is slower",
        ),
        ({"NCCL_IB_HCA": "^mlx5_0"}, ("mlx5_0",), "NCCL_IB_HCA is ^mlx5_0, this node has mlx5_0: NCCL takes TCP"),
    ],
)
def test_infiniband_that_is_promised_and_missing_is_said(tmp_path, monkeypatch, setting, adapters, said):
    for name in adapters:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(network, "ADAPTERS", tmp_path)
    found = network.adapter_warning(setting)
    assert found is None if said is None else found.startswith(said)
    monkeypatch.setattr(devices, "available", lambda: True)
    if said:
        doctor = checks.check_interface(types.SimpleNamespace(num_nodes=2, master_addr="h", level="node"), setting)
        assert doctor.severity == "doubtful" and doctor.result.startswith(said)


@pytest.mark.parametrize(
    "error, advised",
    [
        ("NCCL error in: ProcessGroupNCCL.cpp:3, unhandled system error (run with NCCL_DEBUG=INFO for details)", True),
        ("NCCL error ... ncclInternalError: Internal check failed.\nLast error: Net/IB: ibv_modify_qp failed", True),
        ("NCCL communicator was aborted on rank 1", False),
        ("Connection closed by peer [127.0.0.1]:1", False),
    ],
)
def test_a_fault_of_nccl_comes_with_what_to_try(error, advised):
    assert ("NCCL_IB_DISABLE=1" in network.advice(RuntimeError(error))) == advised
