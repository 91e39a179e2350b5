"""The doctor: every fault of its list, made for real, is found and named; and a healthy job has none."""

import argparse
import functools
import http.server
import os
import re
import shutil
import socketserver
import sys
import threading
import types

import pytest
import torch
from torch import distributed

from common import arguments, world
from common.doctor import checks, examination, stores, table
from common.doctor.table import BAD, DOUBTFUL, GOOD, bad, good
from common.ranks import collectives, group
from common.world import World
from common.world.network import free_port
from datasets import cifar10
from tests.tools.hosts import Hosts, wait_all
from tests.tools.jobs import PATIENCE, ROOT, TINY, after, command, environment, forked, run
from tests.tools.packages import namespaces, program
from tests.tools.ranks import TWO
from tests.tools.starter import NEW_MOUNTS

DOCTOR = ["--doctor", "true"]
WITHOUT_LEDGER = TWO[: TWO.index("--ledger")]  # for nodes that share a folder, where each would try to write
ALWAYS = {"place", "gpus", "driver", "shm", "disk", "output"}
ON_NODES = ALWAYS | {"master", "ranks", "clock", "interface"}


def lines(text):
    """{what: [(severity, the rest, what to do)]} of the table in this output."""
    assert text.count("doctor: ") == 1, text
    found = {}
    for severity, what, rest, do in re.findall(r"^(bad|doubtful|good) +(\w+) +(.+)$(?:\n {19}-> (.+)$)?", text, re.MULTILINE):
        found.setdefault(what, []).append((severity, rest, do))
    return found


def faults(text):
    """The same of what is not good, in the table's order; each has something to do, and stands before all that is good."""
    found = lines(text)
    severities = re.findall(r"^(bad|doubtful|good) ", text, re.MULTILINE)
    assert severities == sorted(severities, key=table.SEVERITIES.index), text
    assert all(do for rows in found.values() for severity, _, do in rows if severity != GOOD), text
    return {what: rows[0] for what, rows in found.items() if rows[0][0] != GOOD}


def assert_healthy(done, whats):
    assert done.returncode == 0 and faults(done.stdout) == {}, done.stdout + done.stderr
    assert set(lines(done.stdout)) == whats


# --- Healthy jobs -------------------------------------------------------------------------------------------------------


def test_one_process(tmp_path):
    """Nor does it leave anything behind."""
    (done,) = forked([*command("train", *TINY, *DOCTOR)[1:], "--output_dir", tmp_path / "out", "--workers", 2], tmp_path, {})
    assert_healthy(done, ALWAYS)
    assert list(tmp_path.iterdir()) == []


def test_two_nodes(tmp_path):
    port = free_port()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "ANYRANK_SECRET": "a secret of the test"}
    nodes = [{**shared, "RANK": str(rank)} for rank in range(2)]
    done, other = forked(
        [*command("train_ddp", *WITHOUT_LEDGER, *DOCTOR)[1:], "--output_dir", tmp_path / "out"], tmp_path, *nodes
    )
    assert_healthy(done, ON_NODES | {"secret"})
    assert other.returncode == 0 and "the doctor's findings are in the log of node 0" in other.stdout
    assert list(tmp_path.iterdir()) == []


def test_two_nodes_whose_platform_starts_every_rank(tmp_path):
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    ranks = [{**shared, "RANK": str(rank), "GROUP_RANK": str(rank)} for rank in range(2)]
    done, other = forked(
        [*command("train_ddp", *WITHOUT_LEDGER, *DOCTOR)[1:], "--output_dir", tmp_path / "out"], tmp_path, *ranks
    )
    assert_healthy(done, ON_NODES)
    assert other.returncode == 0 and "doctor: " not in other.stdout


# --- Faults of one node -------------------------------------------------------------------------------------------------


def in_a_room_of_its_own(script, folder, *options):
    """The verb where mounts are nobody else's; `script` makes them."""
    namespaces()
    words = [sys.executable, ROOT / "launch" / "__main__.py", "doctor", ROOT / "jobs" / "train.py", "--", *options]
    private = f"mount --make-rprivate /\n{script}"
    prelude = f"import ctypes, subprocess\nassert ctypes.CDLL(None).unshare({NEW_MOUNTS}) == 0\nsubprocess.run(['sh', '-ec', {private!r}], check=True)"
    words = after(prelude, [*words, "--output_dir", folder / "out"])
    return run(words, cwd=folder, env=environment(PYTHONPATH=str(ROOT)))


def test_a_read_only_output_and_a_batch_that_no_data_fill(tmp_path):
    """Batches of 6 MiB, and no room for one in /dev/shm, so that they go through pipes."""
    script = f"mount -t tmpfs -o size=4m none /dev/shm\nmkdir {tmp_path}/out\nmount -t tmpfs -o ro none {tmp_path}/out"
    done = in_a_room_of_its_own(script, tmp_path, *TINY, "--workers", 2, "--batch_size", 2048)
    found = faults(done.stdout)
    assert done.returncode == 1 and set(found) == {"output", "job"}, done.stdout + done.stderr
    assert found["output"][:2] == (BAD, f"cannot write to {tmp_path}/out: Read-only file system")
    assert "an epoch would have no step: 64 samples are fewer than one global batch of 2048" in found["job"][1]
    assert found["job"][2] == "lower --batch_size"


def test_a_full_disk_and_no_data(tmp_path):
    script = f"mkdir {tmp_path}/out\nmount -t tmpfs -o size=64k none {tmp_path}/out\ncat /dev/zero > {tmp_path}/out/all || true"
    done = in_a_room_of_its_own(script, tmp_path, "--data_url", tmp_path / "none")
    found = faults(done.stdout)
    assert done.returncode == 1 and set(found) == {"disk", "output", "job"}, done.stdout + done.stderr
    assert found["disk"][:2] == (BAD, f"0.0 MiB free in {tmp_path}/out, the results need 64.0 MiB")
    assert "No space left on device" in found["output"][1]
    assert found["job"][1] == f"--data_url {tmp_path}/none does not exist" and "give a folder with CIFAR-10" in found["job"][2]


def test_a_rank_that_refuses_the_job_in_a_process_of_its_own(tmp_path):
    words = [
        *command("train_ddp", *TINY, *DOCTOR)[1:],
        "--max_restarts",
        1,
        "--batch_size",
        512,
        "--output_dir",
        tmp_path / "out",
    ]
    (done,) = forked(words, tmp_path, {})
    found = faults(done.stdout)
    assert done.returncode == 1 and set(found) == {"job"} and "an epoch would have no step" in found["job"][1], done.stdout
    assert found["job"][2] == "lower --batch_size"


# --- Faults between nodes -----------------------------------------------------------------------------------------------


def test_nodes_and_ranks_that_are_missing_or_whose_master_is_closed(tmp_path):
    """Each of these four processes is alone: as a node's, or as a rank that the platform has started."""
    shared = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "3", "ANYRANK_SECRET": "a secret of the test"}
    environments = [
        {**shared, "MASTER_PORT": str(free_port()), "RANK": rank, **level}
        for level in ({}, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
        for rank in ("0", "2")
    ]
    words = [*command("train_ddp", *WITHOUT_LEDGER, *DOCTOR)[1:], "--doctor_seconds", 2, "--output_dir", tmp_path / "out"]
    every = forked(words, tmp_path, *environments)
    assert [done.returncode for done in every] == [1] * 4
    found = [faults(done.stdout) for done in every]
    who = [r"nodes 1-2 \(ranks 1-2\)", "ranks 1-2"]
    for missing, closed, names, env in zip(found[::2], found[1::2], who, environments[::2]):
        assert set(missing) == {"ranks"} and set(closed) == {"master"}
        assert re.fullmatch(f"({names}) did not come within 2 s", missing["ranks"][1]), missing
        assert f"reaches port {env['MASTER_PORT']} of 127.0.0.1" in missing["ranks"][2]
        assert "did not answer within 2 s: [Errno 111] Connection refused" in closed["master"][1]
        assert "firewall" in closed["master"][2]


def test_what_a_node_has_found_is_shown_although_another_does_not_come(tmp_path):
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "3",
        "ANYRANK_SECRET": "a secret of the test",
    }
    words = [*command("train_ddp", *WITHOUT_LEDGER, *DOCTOR)[1:], "--doctor_seconds", 6, "--output_dir", tmp_path / "out"]
    first, _ = forked(words, tmp_path, *({**shared, "RANK": rank} for rank in ("0", "1")))
    assert faults(first.stdout)["ranks"][1].startswith("node 0: node 2 (rank 2) did not come")
    assert [where for _, where, _ in lines(first.stdout)["clock"]] and re.search(
        r"^good +clock +node 1: ", first.stdout, re.MULTILINE
    )


# faketime does not know the sleep of newer Pythons, which asks for an absolute time of the clock that it leaves alone.
SLEEP = "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds)\n"


@pytest.mark.rehearsal
def test_a_node_with_a_wrong_clock(tmp_path):
    namespaces()
    (tmp_path / "sitecustomize.py").write_text(SLEEP)
    hosts = Hosts(2, tmp_path)
    try:
        job = [ROOT / "jobs" / "train_ddp.py", *TWO, *DOCTOR, "--workers", 1]
        job += ["--init_method", "tcp://10.77.0.1:6666", "--world_size", 2, "--rank"]
        first = hosts.run(0, sys.executable, *job, 0)
        late = [program("faketime"), "--exclude-monotonic", "-f", "+1h", sys.executable, *job, 1]
        second = hosts.run(1, *late, env={"PYTHONPATH": str(tmp_path)})
        codes, _ = wait_all([first, second], PATIENCE)
        found = faults(hosts.log(0))
        # Node 1 found nothing wrong itself; what is, stands in the table of node 0.
        assert codes == [1, 0] and set(faults(hosts.log(0))) == {"clock"}, hosts.log(0) + hosts.log(1)
        assert re.fullmatch(r"node 1: 3,[56]\d\d\.\d s ahead of node 0", found["clock"][1]), found
    finally:
        hosts.close()


# --- Buckets ------------------------------------------------------------------------------------------------------------


def test_a_bucket_that_can_be_read_and_written_and_data_that_are_not_fetched(reachable, store, tmp_path):
    env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    words = [*command("train", *DOCTOR)[1:], "--data_url", "s3://data/cifar", "--output_dir", "s3://data/doctor"]
    good_one, wrong_key = forked(words, tmp_path, env, {**env, "AWS_SECRET_ACCESS_KEY": "wrong"})
    assert_healthy(good_one, ALWAYS | {"data", "clock"})
    assert "one was read" in good_one.stdout and "one was written and deleted" in good_one.stdout
    assert list(tmp_path.rglob("data_batch*")) == []
    assert "Contents" not in store.client().list_objects_v2(Bucket="data", Prefix="doctor/")
    found = faults(wrong_key.stdout)
    assert wrong_key.returncode == 1 and set(found) == {"data", "output"}
    assert all("403 SignatureDoesNotMatch" in rest and "AWS_SECRET_ACCESS_KEY" in do for _, rest, do in found.values()), found


@pytest.mark.parametrize(
    "url, env, found",
    [
        ("s3://nobody/cifar", {}, "there is no such bucket"),
        ("s3://data/nothing", {}, "holds nothing"),
        ("s3://data/cifar", {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "there is no credential"),
        ("s3://data/cifar", {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}, "the last was: no connection"),
    ],
)
def test_a_bucket_that_cannot_be_read(reachable, monkeypatch, url, env, found):
    if "127.0.0.1:9" in "".join(env.values()):
        monkeypatch.setattr(stores, "ANSWER_SECONDS", 0.5)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    (finding,) = stores.check_bucket(url, "data", inputs="input_dir")
    assert finding.severity == BAD and found in f"{finding.result}: {finding.remedy}" and finding.remedy


def test_a_bucket_larger_than_the_disk(reachable, monkeypatch):
    monkeypatch.setattr(stores, "SPARE", 1 << 60)
    found = list(stores.check_bucket("s3://data/cifar", "data", inputs="input_dir"))
    assert [finding.severity for finding in found] == [GOOD, GOOD, BAD] and "objects to be fetched need" in found[-1].result
    *_, passes = stores.check_bucket("s3://data/cifar", "data", inputs="input_dir", is_streamed=True)
    assert (
        passes.severity == DOUBTFUL
        and passes.result == found[-1].result
        and passes.remedy.endswith("comes again in every epoch")
    )


def test_a_web_server(tmp_path):
    (tmp_path / "file.tar.gz").write_bytes(b"some")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with socketserver.TCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert checks_of(f"{url}/file.tar.gz") == GOOD and checks_of(f"{url}/no/such/file") == BAD
        assert checks_of(url + "/") == BAD, "a page is no data"
        server.shutdown()
    assert checks_of(url) == BAD


def checks_of(url):
    return stores.check_web(url).severity


# --- What cannot be made here -------------------------------------------------------------------------------------------


def here(*argv, env=None, gpus=0):
    return world.resolve(arguments.parse(cifar10.parser(""), list(argv), {}), env or {}, gpus, "host")


def test_gpus_that_are_missing_or_busy(monkeypatch):
    """As torch and the driver's tool would answer."""
    assert checks.check_gpus(True, here(), []).severity == BAD
    assert checks.check_gpus(None, here(env={"MA_NUM_HOSTS": "1", "MA_NUM_GPUS": "8"}), []).severity == BAD
    assert checks.check_gpus(False, here(env={"MA_NUM_HOSTS": "1", "MA_NUM_GPUS": "8"}), []).severity == GOOD
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    text = "0, GPU-aa, 4, 0\n1, GPU-bb, 70000, 99\n2, GPU-cc, 5, [N/A]\n"
    assert checks.parse_gpu_usage(text, None) == [(0, 4, 0), (1, 70000, 99), (2, 5, 0)]
    assert checks.parse_gpu_usage(text, "0,GPU-cc") == [(0, 4, 0), (2, 5, 0)]
    assert checks.check_gpus(None, here(gpus=2), checks.parse_gpu_usage(text, "0,2")).severity == GOOD
    busy = checks.check_gpus(None, here(gpus=2), checks.parse_gpu_usage(text, None))
    assert busy.severity == DOUBTFUL and "GPU 1 has 70000 MiB in use" in busy.result
    lost = checks.check_gpus(None, here(gpus=2, env={"MA_NUM_HOSTS": "1", "MA_NUM_GPUS": "8"}), [])
    assert lost.severity == BAD and "torch sees 2, modelarts says that this node has 8" in lost.result


@pytest.mark.parametrize(
    "env, severity, words",
    [
        ({}, GOOD, "lo: all ranks are on this machine"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, GOOD, "lo, by GLOO_SOCKET_IFNAME"),
        ({"GLOO_SOCKET_IFNAME": "eth77"}, BAD, "GLOO_SOCKET_IFNAME is eth77, this node has lo"),
        ({"NCCL_SOCKET_IFNAME": "ib,bond"}, BAD, "NCCL_SOCKET_IFNAME is ib,bond"),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, GOOD, "lo"),
        ({"NCCL_SOCKET_IFNAME": "=l"}, BAD, "=l"),
    ],
)
def test_the_interface(env, severity, words):
    place = types.SimpleNamespace(num_nodes=1, master_addr="127.0.0.1", level="node")
    found = checks.check_interface(place, env)
    assert found.severity == severity and words in found.result


def test_a_batch_script_of_slurm_that_forgot_srun():
    found = checks.check_place(here(env={"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4"}))
    assert found.severity == DOUBTFUL and "start the job with srun" in found.remedy


def test_another_node_may_remove_the_folders_that_it_made_from_under_this_one(tmp_path, monkeypatch):
    folder, others, real = str(tmp_path / "shared" / "disk"), 5, os.mkdir

    def mkdir(path, *how):
        nonlocal others
        if path == folder and others:
            others -= 1
            os.rmdir(os.path.dirname(path))
        real(path, *how)

    monkeypatch.setattr(os, "mkdir", mkdir)
    assert stores.check_output([folder]).severity == GOOD and not others
    assert os.listdir(tmp_path) == []


def test_shared_memory_for_nccl(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    for need, severity in ((0, GOOD), (free // 2, GOOD), (2 * free, DOUBTFUL)):
        assert checks.check_shm(need, tmp_path).severity == severity
    found = checks.check_shm(1, tmp_path / "none")
    assert found.severity == DOUBTFUL and "--shm-size" in found.remedy


def test_nodes_without_a_common_secret():
    assert checks.check_secret(True, 6666).severity == GOOD
    found = checks.check_secret(False, 6666)
    assert found.severity == DOUBTFUL and "port 6666" in found.result and "ANYRANK_SECRET" in found.remedy


@pytest.mark.parametrize("ahead, severity", [(0.4, GOOD), (-3, DOUBTFUL), (3600, BAD), (-301, BAD)])
def test_a_clock(ahead, severity):
    assert checks.check_clock(ahead, "node 0").severity == severity


# --- The table ----------------------------------------------------------------------------------------------------------


def test_the_table_is_short_however_many_nodes_there_are():
    found = [(node, good("disk", f"{node} GiB free")) for node in range(64)]
    found += [(node, bad("shm", "64.0 MiB", "more")) for node in (0, 3, 4, 5)]
    assert table.table(found) == (
        "doctor: 1 bad, 0 doubtful, 1 good\n"
        "bad       shm        nodes 0, 3-5: 64.0 MiB\n"
        "                   -> more\n"
        "good      disk       nodes 0-63: 0 GiB free"
    )


def test_what_another_node_says_cannot_forge_a_line():
    ((node, finding),) = examination.decode([[1, ["good", "disk", "enough\nbad  everything", ""]]])
    assert node == 1 and "\n" not in finding.result


class Formed(Exception):
    pass


def test_the_doctor_waits_minutes_for_a_collective_and_not_half_an_hour(monkeypatch):
    def form(*_, timeout, **__):
        raise Formed(timeout.total_seconds())

    monkeypatch.setattr(distributed, "init_process_group", form)
    monkeypatch.setattr(collectives.GROUP, "store", None)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # to which variables of the group are added
    examination.Examination(argparse.Namespace(doctor_seconds=30, evaluate=False))
    here = World("slurm", "", "process", 0, 1, 0, 1, 0, 1, "127.0.0.1", free_port())
    with pytest.raises(Formed) as formed:
        group.join(argparse.Namespace(world=here, join_seconds=30), torch.device("cpu"))
    assert 60 <= formed.value.args[0] < 600
