"""Ascend without an Ascend machine: the rank table, the card of each process, and which versions go together.

What trains on a stand-in for the device is in test_npu.py.
"""

import copy
import json
import re
import socket
import types
import zlib

import pytest
from packaging.requirements import Requirement

from common.devices import diagnosis
from common.doctor import checks
from common.errors import UserError
from common.machine import drivers
from common.world import network
from launch import local
from tests.tools.jobs import ROOT, TINY, command, run_forked
from tests.tools.worlds import MODELARTS, resolve

TABLE = {
    "status": "completed",
    "version": "1.0",
    "server_count": "2",
    "server_list": [
        {"server_id": "node_1", "host_ip": "10.0.0.2",
         "device": [{"device_id": "0", "device_ip": "29.0.0.3", "rank_id": "2"}, {"device_id": "1", "rank_id": "3"}]},
        {"server_id": "node_0", "host_ip": "10.0.0.1",
         "device": [{"device_id": "1", "rank_id": "1"}, {"device_id": "0", "device_ip": "29.0.0.1", "rank_id": "0"}]},
    ],
}  # fmt: skip
PORT = 20000 + zlib.crc32(b"job") % 12000


def placed(tmp_path, table, env, gpus=2):
    path = tmp_path / "table.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    found = resolve({}, {"RANK_TABLE_FILE": str(path), **env}, gpus)
    place = f"{found.node_rank}/{found.num_nodes} {found.local_rank}/{found.local_world_size} {found.rank}/{found.world_size}"
    return f"{found.platform} {found.level} {place} {found.master_addr}:{found.master_port}", found


def card(rank, **more):
    return {**MODELARTS, "RANK_ID": str(rank), "RANK_SIZE": "4", "ASCEND_DEVICE_ID": "1" if rank in (1, 3) else "0", **more}


def changed(**fields):
    return {**copy.deepcopy(TABLE), **fields}


def without_addresses():
    table = changed(version="1.2")
    for server in table["server_list"]:
        del server["host_ip"]
    return table


def one_card():
    return {**changed(server_count="1"), "server_list": [{"server_id": "a", "device": [{"device_id": "0", "rank_id": "0"}]}]}


@pytest.mark.parametrize(
    "table, env, expected",
    [
        (TABLE, card(0), f"ascend process 0/2 0/2 0/4 10.0.0.1:{PORT}"),
        (TABLE, card(1), f"ascend process 0/2 1/2 1/4 10.0.0.1:{PORT}"),
        (TABLE, card(3), f"ascend process 1/2 1/2 3/4 10.0.0.1:{PORT}"),
        (TABLE, card(2, MASTER_PORT="6666"), "ascend process 1/2 0/2 2/4 10.0.0.1:6666"),
        (changed(version="1.2"), {"RANK_ID": "2"}, f"ascend process 1/2 0/2 2/4 10.0.0.1:{20000 + zlib.crc32(b'') % 12000}"),
        (without_addresses(), card(2), f"ascend process 1/2 0/2 2/4 job-worker-0.job:{PORT}"),
        (one_card(), {"RANK_ID": "0", "RANK_SIZE": "1", "MA_VJ_NAME": "job"}, f"ascend process 0/1 0/1 0/1 127.0.0.1:{PORT}"),
        # An image of one's own is started once for each node, whatever the table says, and starts a worker for each NPU.
        (TABLE, MODELARTS, "modelarts node 1/2 0/2 2/4 job-worker-0.job:6666"),
    ],
)
def test_the_place_of_a_card(tmp_path, table, env, expected):
    said, world = placed(tmp_path, table, env)
    assert said == expected
    assert world.level == "node" or world.gpus_promised == world.local_world_size


def damaged(change):
    table = copy.deepcopy(TABLE)
    change(table)
    return table


@pytest.mark.parametrize(
    "table, env, words",
    [
        ("{", card(0), "is damaged, it is no JSON"),
        ("[" * 100_000, card(0), "is damaged, it is no JSON"),
        ("[]", card(0), "does not have the documented form"),
        (changed(status="initializing"), card(0), "has the status 'initializing': the platform has not finished it"),
        (changed(version="0.1"), card(0), "has version 0.1; 1.0 and 1.2 are known"),
        (changed(server_count="3"), card(0), "server_count 3, 2 in the list"),
        (changed(server_list=[]), card(0), "does not have the documented form"),
        (damaged(lambda table: table["server_list"][0]["device"][0].pop("rank_id")), card(0), "rank_id"),
        (damaged(lambda table: table["server_list"][0]["device"][0].update(rank_id="1")), card(0), "ranks are not 0, 1, 2"),
        (damaged(lambda table: table["server_list"][0]["device"][0].update(device_id="1")), card(0), "a rank or card twice"),
        (TABLE, card(7), "RANK_ID is 7, which is not in the rank table: it has ranks 0 to 3"),
        (TABLE, card(0, RANK_SIZE="8"), "RANK_SIZE is 8 but the number of cards in the rank table is 4"),
        (TABLE, card(0, ASCEND_DEVICE_ID="1"), "ASCEND_DEVICE_ID is 1 but the card of this rank in the rank table is 0"),
        (without_addresses(), {"RANK_ID": "0"}, "has no host_ip: set MASTER_ADDR"),
        (TABLE, card("x"), "RANK_ID is 'x': a whole number was expected"),
    ],
)
def test_a_rank_table_that_cannot_be_right_is_a_sentence(tmp_path, table, env, words):
    with pytest.raises(UserError, match=re.escape(words)):
        placed(tmp_path, table, env)


def test_a_rank_table_that_is_missing_is_a_sentence():
    with pytest.raises(UserError, match=r"RANK_TABLE_FILE /none.json cannot be read \(No such file or directory\)"):
        resolve({}, {"RANK_TABLE_FILE": "/none.json", "RANK_ID": "0"})


def test_what_launch_local_writes_is_what_the_jobs_read(tmp_path):
    table = local.rank_table(2, 2)
    assert placed(tmp_path, table, {"RANK_ID": "3", "ASCEND_DEVICE_ID": "1", "RANK_SIZE": "4"})[0].startswith(
        "ascend process 1/2 1/2 3/4 127.0.0.1:"
    )


@pytest.mark.parametrize(
    "asked, words",
    [
        ({}, "the platform reports 1 NPU (ascend), but torch sees no NPU: torch_npu is not installed; install torch_npu"),
        ({"--device": "npu"}, "--device npu, but torch sees no NPU: torch_npu is not installed; install torch_npu"),
        ({"--device": "npu", "--enable_gpu": "false"}, "--enable_gpu false and --device npu: give one of them"),
        ({"--device": "mps"}, "--device mps, but torch sees no GPU: torch"),
    ],
)
def test_where_torch_knows_no_npu_the_job_says_what_to_install(tmp_path, asked, words):
    (tmp_path / "table.json").write_text(json.dumps(one_card()))
    env = {} if "--device" in asked else {"RANK_TABLE_FILE": str(tmp_path / "table.json"), "RANK_ID": "0"}
    options = [word for pair in asked.items() for word in pair]
    done = run_forked(command("train", *TINY, *options, "--output_dir", tmp_path / "out")[1:], tmp_path, env, check=2)
    assert f"error: {words}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "torch_version, torch_npu, cann, words",
    [
        ("2.7.1", "2.7.1.post2", "8.5.0", None),
        ("2.6.0", "2.6.0", "8.2.RC1", None),
        ("2.15.0", "2.15.0", "99.0", None),  # newer than the table
        ("2.6.0", "2.6.0", None, None),
        ("2.7.1", "2.6.0", "8.5.0", "torch_npu 2.6.0 is for another torch than 2.7.1"),
        ("2.9.0", "2.9.0.post2", "8.3.RC1", "torch_npu 2.9.0.post2 needs CANN 8.5 or later, and this is 8.3.RC1"),
    ],
)
def test_versions_that_do_not_go_together(torch_version, torch_npu, cann, words):
    said = diagnosis.version_mismatch(torch_version, torch_npu, cann)
    assert said is None if words is None else said.startswith(words)


def test_the_driver_and_cann_say_their_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(drivers, "ASCEND", tmp_path)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert (drivers.ascend(), drivers.cann()) == (None, None)
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "version.info").write_text("Version=24.1.rc2\nascendhal_version=7.35.23\n")
    latest = tmp_path / "ascend-toolkit" / "latest"
    (latest / "compiler").mkdir(parents=True)
    (latest / "compiler" / "version.info").write_text("Version=8.1.RC1\n")
    assert (drivers.ascend(), drivers.cann()) == ("24.1.rc2", "8.1.RC1")
    (latest / "version.cfg").write_text("# version: 1.0\nruntime_running_version=[8.2.0.1:8.2.RC1]\n")
    assert drivers.cann() == "8.2.RC1"


def test_the_npus_of_a_container_are_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(drivers, "DEVICES", tmp_path)
    for name in ("davinci0", "davinci7", "davinci_manager", "null"):
        (tmp_path / name).touch()
    assert drivers.npus() == 2 and local.devices("npu", {}) == ["0", "1"]
    assert local.devices("npu", {"ASCEND_RT_VISIBLE_DEVICES": "4,5,6"}) == ["4", "5", "6"]


def test_the_doctor_looks_at_hccls_ports_and_interface():
    place = types.SimpleNamespace(num_nodes=1, master_addr="127.0.0.1", level="process")
    found = checks.check_interface(place, {"HCCL_SOCKET_IFNAME": "eth77"})
    assert found.severity == "bad" and found.result.startswith("HCCL_SOCKET_IFNAME is eth77, this node has")
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        taken = network.port_error({"HCCL_IF_BASE_PORT": str(port)})
        assert taken and str(port) in taken.partition("; ")[0] and "give another HCCL_IF_BASE_PORT" in taken
        assert network.port_error({"HCCL_IF_BASE_PORT": str(port), "HCCL_HOST_SOCKET_PORT_RANGE": "auto"}) is None


def test_an_ascend_machine_installs_nothing_that_is_for_nvidia_alone():
    """Its machines are aarch64; and `torch` has a lower bound only, so that an image keeps its own."""
    wanted = [Requirement(line) for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    names = {each.name for each in wanted if not each.marker or each.marker.evaluate({"platform_machine": "aarch64"})}
    assert not any("nvidia" in name or "cuda" in name for name in names) and {"torch", "boto3", "tqdm"} <= names
    assert [str(each.specifier) for each in wanted if each.name == "torch"] == [">=2.1"]
