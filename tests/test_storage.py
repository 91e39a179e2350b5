"""Buckets: fetched whole and verified or not at all, whatever the store does; results published while the training goes on."""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from common import bucket, checkpoint, download, fast, fetched, lease, publisher, storage
from common import etag as etag_module
from common.errors import TrainingFailed, UserError
from tests.faultproxy import BODY_FAULTS, faults
from tests.jobs import ROOT, TINY, assert_same_bits, command, environment, final_state, lock_holders, run_job
from tests.objectstore import SECRET, ObjectStore
from tests.test_data import write_folder
from tests.test_train import wait_for

MIB = 1 << 20
BIG = bytes(range(256)) * (20 * MIB // 256)  # three parts of ours
SMALL = {f"set/{number // 10}/{number}.bin": bytes([number]) * (1000 + number) for number in range(30)}


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    running = ObjectStore(tmp_path_factory.mktemp("store"))
    client = running.client()
    client.create_bucket(Bucket="data")
    for key, content in SMALL.items():
        client.put_object(Bucket="data", Key=key, Body=content)
    client.put_object(Bucket="data", Key="big/one", Body=BIG)
    write_folder(folder := tmp_path_factory.mktemp("cifar") / "cifar-10-batches-py")
    upload(client, folder.parent, "cifar")
    yield running
    running.stop()


def upload(client, folder, prefix):
    for path in folder.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), "data", f"{prefix}/{path.relative_to(folder)}")


@pytest.fixture(autouse=True)
def reachable(store, monkeypatch, tmp_path):
    """As on a machine that has just this store and its key."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {**store.environment, "AWS_CONFIG_FILE": "/none", "AWS_SHARED_CREDENTIALS_FILE": "/none"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def the_secret_is_nowhere(capfd, tmp_path):
    """After every fault of this file: not in the output, not in a file, not in the list of processes."""
    yield
    places = {"output": "".join(capfd.readouterr()).encode()}
    places.update({path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size < MIB})
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            places[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
    assert not [place for place, content in places.items() if SECRET.encode() in content]


def same(folder, prefix="set/"):
    """Whether the folder holds what is in the bucket, and nothing else but our notes."""
    found = {
        os.path.relpath(os.path.join(where, name), folder): Path(where, name).read_bytes()
        for where, _, names in os.walk(folder)
        for name in names
        if not name.startswith(".")
    }
    return found == {key[len(prefix) :]: content for key, content in SMALL.items() if key.startswith(prefix)}


def names_in(folder):
    return sorted(name for _, _, names in os.walk(folder) for name in names if not name.startswith("."))


# --- Fetching ----------------------------------------------------------------------------------------------------------


def test_a_second_start_fetches_only_what_is_missing_or_changed(store, monkeypatch):
    client = store.client()
    with faults(store, lambda request: None, monkeypatch) as proxy:
        folder = storage.fetch("s3://data/set")
        assert folder == "input_dir/s3/data/set" and same(folder) and len(proxy.objects()) == 30
        os.unlink(f"{folder}/0/3.bin")
        with open(f"{folder}/0/4.bin", "a") as file:
            file.write("x")
        client.put_object(Bucket="data", Key="set/1/11.bin", Body=b"other")
        client.put_object(Bucket="data", Key="set/9/new.bin", Body=b"new")
        client.delete_object(Bucket="data", Key="set/2/22.bin")
        (wanted := dict(SMALL)).pop("set/2/22.bin")
        wanted.update({"set/1/11.bin": b"other", "set/9/new.bin": b"new"})
        monkeypatch.setitem(globals(), "SMALL", wanted)
        storage.fetch("s3://data/set")
        assert same(folder), "what is gone in the bucket is gone in the folder"
        assert sorted(request.path for request in proxy.objects()[30:]) == [
            "/data/set/0/3.bin", "/data/set/0/4.bin", "/data/set/1/11.bin", "/data/set/9/new.bin"
        ]  # fmt: skip
        storage.fetch("s3://data/set")
        assert len(proxy.objects()) == 34
    monkeypatch.undo()
    client.delete_object(Bucket="data", Key="set/9/new.bin")
    for key in ("set/1/11.bin", "set/2/22.bin"):
        client.put_object(Bucket="data", Key=key, Body=SMALL[key])


def test_one_object_a_whole_bucket_and_parts_of_any_size(store, monkeypatch, tmp_path):
    client = store.client()
    client.create_bucket(Bucket="whole")
    client.put_object(Bucket="whole", Key="a/empty", Body=b"")
    client.put_object(Bucket="whole", Key="a/folder/", Body=b"")
    client.put_object(Bucket="whole", Key="a/ü and\u2009space?#%41", Body=b"odd")
    (tmp_path / "big").write_bytes(BIG)
    storage.publish(str(tmp_path / "big"), "s3://whole/in/parts")
    assert client.head_object(Bucket="whole", Key="in/parts")["ETag"].strip('"').endswith("-2")
    folder = storage.fetch("s3://whole", say=(said := []).append)
    assert names_in(folder) == ["empty", "parts", "ü and\u2009space?#%41"]
    assert Path(f"{folder}/in/parts").read_bytes() == BIG
    assert said[-1].endswith("all verified"), said
    assert Path(storage.fetch("s3://data/big/one", "elsewhere") + "/one").read_bytes() == BIG


def test_a_large_object_goes_on_where_it_stopped(store, monkeypatch):
    with faults(store, lambda request: None, monkeypatch) as proxy:
        proxy.plan = lambda request: "denied" if request.headers.get("Range", "").startswith("bytes=16") else None
        with pytest.raises(UserError, match="403 AccessDenied"):
            storage.fetch("s3://data/big", "got")
        assert names_in("got") == ["one.part", "one.part.json"]
        before, proxy.plan = len(proxy.objects()), lambda request: None
        storage.fetch("s3://data/big", "got")
        assert len(proxy.objects()) == before + 1, "only the part that was missing"
    assert Path("got/one").read_bytes() == BIG and names_in("got") == ["one"]


@pytest.mark.parametrize("prefix", ["set", "big"])
@pytest.mark.parametrize("fault", [*BODY_FAULTS, "503", "500", "429"])
def test_a_damaged_answer_is_asked_for_again(store, monkeypatch, fault, prefix):
    """The first answers for every object are broken; a stall is noticed within 15 s."""
    monkeypatch.setattr(bucket, "LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(bucket, "READ_SECONDS", 1)
    monkeypatch.setattr(fast, "READ_SECONDS", 1)
    seen = set()

    def plan(request):
        first = request.is_object and (request.path, request.headers.get("Range")) not in seen
        seen.add((request.path, request.headers.get("Range")))
        return fault if first and (fault != "stall" or len(seen) % 3 == 1) else None

    with faults(store, plan, monkeypatch) as proxy:
        storage.fetch(f"s3://data/{prefix}", "got")
        assert sum(request.fault == fault for request in proxy.log) > 0
    assert same("got") if prefix == "set" else Path("got/one").read_bytes() == BIG


@pytest.mark.parametrize("fault", ["flip", "short"])
@pytest.mark.parametrize("key", ["set/0/1.bin", "big/one"])
def test_an_object_that_always_arrives_damaged_is_refused(store, monkeypatch, fault, key):
    monkeypatch.setattr(bucket, "LONGEST_PAUSE", 0.06)
    monkeypatch.setattr(bucket, "PATIENCE_SECONDS", 3)
    monkeypatch.setattr(download, "PATIENCE_SECONDS", 3)
    refused = pytest.raises(TrainingFailed, match=r"damaged there or on the way|no good answer for 3 s")
    with faults(store, lambda request: fault if request.is_object else None, monkeypatch), refused:
        storage.fetch(f"s3://data/{key}", "got")
    assert not [name for name in names_in("got") if not re.search(r"\.part(\.json)?$", name)]


@pytest.mark.parametrize("key", ["swap/small", "swap/large", "swap/grown", "swap/shrunk"])
def test_an_object_replaced_during_the_download_is_fetched_as_it_is_now(store, monkeypatch, key):
    client, little, other = store.client(), b"little" * 9, BIG[::-1] + b"x"
    old = {"small": b"old", "large": BIG, "grown": little, "shrunk": BIG}
    new = {"small": b"newer", "large": other, "grown": BIG, "shrunk": little}
    kind = key.split("/")[1]
    client.put_object(Bucket="data", Key=key, Body=old[kind])
    replaced = threading.Lock()

    def plan(request):
        if request.is_object and replaced.acquire(blocking=False):
            client.put_object(Bucket="data", Key=key, Body=new[kind])

    with faults(store, plan, monkeypatch):
        storage.fetch(f"s3://data/{key}", "got")
    assert Path(f"got/{kind}").read_bytes() == new[kind] and names_in("got") == [kind]


def test_one_refusal_among_many_large_objects_ends_the_fetch(store, monkeypatch):
    """With parts of the others waiting for their turn."""
    monkeypatch.setattr(download, "PART", 65536)
    for number in range(6):
        store.client().put_object(Bucket="data", Key=f"many/{number}", Body=BIG[: 4 * MIB])
    begun = time.monotonic()
    refused = pytest.raises(UserError, match="403 AccessDenied")
    with (
        faults(store, lambda request: "denied" if request.is_object and request.path.endswith("3") else None, monkeypatch),
        refused,
    ):
        storage.fetch("s3://data/many", "got")
    assert time.monotonic() - begun < 20


def test_a_write_that_takes_only_some_of_the_bytes_is_continued(tmp_path, monkeypatch):
    parts, real = fetched.Parts(str(tmp_path / "x"), bucket.Item("x", 5000, "e"), 8 * MIB), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, place: real(file, bytes(content[:700]), place))
    parts.write(0, bytes(range(250)) * 20)
    assert (tmp_path / "x.part").read_bytes() == bytes(range(250)) * 20


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/x, for s3://data/set, cannot be written to: Not a directory"):
        storage.fetch("s3://data/set", str(tmp_path / "file/x"))


def test_a_store_that_gives_no_digest_is_believed_by_size_and_says_so(monkeypatch, tmp_path):
    """An ETag that is no MD5, and parts of a size that nobody uses."""
    for etag, size in (("0x8DCA", 5), ("0" * 32 + "-3", 17)):
        hasher = etag_module.Hasher(bucket.Item("k", size, etag).digest, size, size)
        hasher.update(b"x" * size)
        assert hasher.right() is None
    content = os.urandom(25 * MIB)
    parts = b"".join(hashlib.md5(content[begin : begin + 10 * MIB]).digest() for begin in range(0, len(content), 10 * MIB))
    etag = hashlib.md5(parts).hexdigest() + "-3"
    for part_size, right in ((10 * MIB, True), (9 * MIB, False)):
        hasher = etag_module.Hasher(etag, len(content), part_size)
        for begin in range(0, len(content), 8 * MIB):
            hasher.update(content[begin : begin + 8 * MIB])
        assert hasher.right() is right


@pytest.mark.parametrize(
    "keys, words",
    [
        (["../x"], "cannot be the name of a file"),
        (["a//b"], "cannot be the name of a file"),
        (["a", "a/b"], "is an object and a folder"),
        ([".fetched.jsonl"], "cannot be the name of a file"),
    ],
)
def test_names_that_lead_elsewhere_are_refused(keys, words):
    place = bucket.Bucket("s3://data/p")
    with pytest.raises(UserError, match=words):
        download._named(place, [bucket.Item(f"p/{key}", 1, "e") for key in keys])


def test_a_full_disk_is_known_before_the_first_byte(store, monkeypatch):
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*real(path)[:3], 100, 100, *real(path)[5:]]))
    with faults(store, lambda request: None, monkeypatch) as proxy:
        with pytest.raises(
            UserError, match=r"0 MiB free, 20 MiB are to be fetched: start the job in a folder on a larger disk"
        ):
            storage.fetch("s3://data/big", "got")
        assert proxy.objects() == []


# --- What a person is told -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, env, fault, words",
    [
        ("s3://missing/x", {}, None, "404 NoSuchBucket: there is no such bucket"),
        ("s3://data/nothing", {}, None, "s3://data/nothing/ at http://127.0.0.1:.* holds nothing"),
        ("s3://data/set", {"AWS_SECRET_ACCESS_KEY": "wrong"}, None, "403 SignatureDoesNotMatch: the secret key does not"),
        ("s3://data/set", {"AWS_SECRET_ACCESS_KEY": ""}, None, "there is no credential: set AWS_ACCESS_KEY_ID"),
        ("s3://data/set", {}, "expired", "403 ExpiredToken: the temporary credential has expired"),
        ("s3://data/set", {}, "skewed", "403 RequestTimeTooSkewed: this machine's clock is wrong"),
        ("s3://data/set", {}, "denied", "403 AccessDenied: the credential lacks the right"),
        ("obs://data/set", {"AWS_ENDPOINT_URL_S3": "", "AWS_REGION": ""}, None, "obs:// needs to know the region"),
        ("s3://da\nta/set", {}, None, "is not a bucket's address"),
        ("s3://data/set", {"AWS_PROFILE": "none"}, None, r"profile \(none\) could not be found"),
    ],
)
def test_a_refusal_is_one_line_with_a_remedy_and_without_the_secret(store, monkeypatch, url, env, fault, words):
    with faults(store, lambda request: fault, monkeypatch):
        for name, value in env.items():
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
        begun = time.monotonic()
        with pytest.raises(UserError, match=words) as refused:
            storage.fetch(url, "got")
    assert time.monotonic() - begun < 10 and "\n" not in str(refused.value)
    assert SECRET not in str(refused.value) and "Signature=" not in str(refused.value)


def test_a_store_that_never_answers_is_given_up_with_the_reason(monkeypatch):
    monkeypatch.setattr(download, "PATIENCE_SECONDS", 1)
    monkeypatch.setattr(bucket, "PATIENCE_SECONDS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    said = []
    with pytest.raises(
        TrainingFailed, match=r"list_objects s3://data/set/ at http://127.0.0.1:9: no good answer for 1 s, the last"
    ):
        storage.fetch("s3://data/set", "got", say=said.append)
    assert re.search(r"warning: .* no connection; trying again", said[0])


@pytest.mark.parametrize(
    "url, env, host, path",
    [
        ("obs://bkt/k", {"AWS_REGION": "cn-north-4"}, "bkt.obs.cn-north-4.myhuaweicloud.com", "/k"),
        ("oss://bkt/k", {"AWS_REGION": "cn-hangzhou"}, "bkt.oss-cn-hangzhou.aliyuncs.com", "/k"),
        ("oss://bkt/k", {"AWS_DEFAULT_REGION": "oss-cn-hangzhou"}, "bkt.oss-cn-hangzhou.aliyuncs.com", "/k"),
        ("s3://bkt/k", {"AWS_REGION": "eu-west-1"}, "bkt.s3.eu-west-1.amazonaws.com", "/k"),
        ("s3://bkt/k", {"AWS_ENDPOINT_URL_S3": "http://10.0.0.7:9000"}, "10.0.0.7:9000", "/bkt/k"),
        ("obs://bkt/k", {"S3_ENDPOINT": "obs.internal.example", "AWS_REGION": "r"}, "bkt.obs.internal.example", "/k"),
    ],
)
@pytest.mark.parametrize("operation", ["put_object", "get_object", "delete_object", "upload_part", "list_objects"])
def test_the_requests_are_what_each_store_accepts(monkeypatch, url, env, host, path, operation):
    """Captured instead of sent: where they go, signed for which region, and nothing in them that OBS or OSS refuse."""
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.delenv("AWS_REGION")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    place, sent = bucket.Bucket(url), []

    def capture(request, **_):
        sent.append(request)
        raise UserError("captured")

    place.client.meta.events.register("before-send.s3", capture)
    words = {
        "put_object": {"Body": b"content", "ContentMD5": "mgNkuembtIDdJeHwKEyFVQ=="},
        "upload_part": {"Body": b"content", "ContentMD5": "mgNkuembtIDdJeHwKEyFVQ==", "PartNumber": 1, "UploadId": "u"},
        "list_objects": {"Prefix": "k"},
    }.get(operation, {})
    with pytest.raises(UserError, match="captured"):
        place.ask(operation, "k", key_named=operation != "list_objects", **words)
    headers = {name.lower(): str(value) for name, value in sent[0].headers.items()}
    where = re.match(r"https?://([^/]+)(/[^?]*)", sent[0].url)
    assert where[1] == host and where[2].rstrip("/") == (path if operation != "list_objects" else path[: -len("/k")])
    authorization = headers["authorization"].replace("b'", "")
    region = next((value for name, value in env.items() if "REGION" in name), "us-east-1").replace("oss-", "")
    assert (
        authorization.startswith("AWS4-HMAC-SHA256 Credential=test:tester/") and f"/{region}/s3/aws4_request" in authorization
    )
    assert "aws-chunked" not in headers.get("content-encoding", "") and "transfer-encoding" not in headers
    assert not any("checksum" in name or name == "x-amz-trailer" for name in headers), headers
    if "Body" in words:
        assert headers["content-length"] == "7" and headers["content-md5"].strip("b'") == words["ContentMD5"]


# --- Once per node -------------------------------------------------------------------------------------------------------

# A process of a node: fetches, and says when it is the one who does.
FETCHER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from common import lease, storage
print("done", os.path.getsize(os.path.join(storage.fetch("s3://data/set"), "2/29.bin")))
"""


def start_fetchers(count, folder, **env):
    words = [sys.executable, "-c", FETCHER, str(ROOT)]
    kept = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    return [
        subprocess.Popen(
            words, cwd=folder, env=environment(**kept, **env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("kills", [0, 2])
def test_eight_ranks_fetch_once_also_when_the_one_that_fetches_is_killed(store, monkeypatch, tmp_path, kills):
    """Whoever asks for an object is the owner; it is killed in the middle. A lock file of an earlier container is there."""
    (tmp_path / "input_dir/s3/data/set").mkdir(parents=True)
    (tmp_path / "input_dir/s3/data/set/.fetch.lock").write_text('{"state": "working", "at": 1e12}')
    killed, processes, lock = [], [], threading.Lock()

    def plan(request):
        with lock:
            if request.is_object and len(killed) < kills and request.path not in killed:
                pids = lock_holders(tmp_path / "input_dir/s3/data/set/.fetch.lock")
                for owner in [process for process in processes if process.pid in pids and process.poll() is None]:
                    killed.append(request.path)
                    owner.kill()
                    owner.wait()

    with faults(store, plan, monkeypatch) as proxy:
        processes += start_fetchers(8, tmp_path)
        texts = [process.communicate(timeout=120)[0] for process in processes]
        assert len(killed) == kills
        assert sorted(process.returncode for process in processes) == [-9] * kills + [0] * (8 - kills), texts
        assert same("input_dir/s3/data/set")
        if not kills:
            assert len(proxy.objects()) == 30


def test_a_failure_is_told_to_those_who_wait_and_not_to_a_later_start(store, monkeypatch, tmp_path):
    gate = threading.Event()

    def plan(request):
        if "prefix" in request.query:
            gate.wait(60)
            return "denied"

    with faults(store, plan, monkeypatch) as proxy:
        processes = start_fetchers(4, tmp_path)
        lock_file = tmp_path / "input_dir/s3/data/set/.fetch.lock"
        wait_for(lambda: lock_file.exists() and len(waiting_on(lock_file)) == 4, processes[0], "four processes at the lease")
        begun = time.monotonic()
        gate.set()
        texts = [process.communicate(timeout=60)[0] for process in processes]
        assert time.monotonic() - begun < 5
        assert all("403 AccessDenied" in text for text in texts), texts
        assert len(proxy.log) == 1, "nobody else asked"
        proxy.plan = lambda request: None
        assert same(storage.fetch("s3://data/set"))


@pytest.mark.parametrize("state", ["failed", "done"])
def test_what_was_said_before_is_not_believed(tmp_path, state):
    """Of an earlier start, of the time before a reboot, or of another machine that has the same disk."""
    (tmp_path / "x.lock").write_text(json.dumps({"state": state, "text": "old", "at": 1e12, "boot": "another"}))
    done = []
    lease.once_per_node(str(tmp_path / "x"), lambda held: done.append(1))
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


def test_those_who_wait_share_a_good_end_without_asking_the_store(store, monkeypatch, tmp_path):
    done = []

    def work(held):
        done.append(1)
        ready.wait(30)

    ready, path = threading.Event(), str(tmp_path / "x")
    threads = [threading.Thread(target=lease.once_per_node, args=(path, work)) for _ in range(3)]
    for thread in threads:
        thread.start()
    while (
        len(
            [
                fd
                for fd in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}") == f"{path}.lock"
            ]
        )
        < 3
    ):
        time.sleep(0.01)
    ready.set()
    for thread in threads:
        thread.join()
    assert done == [1]


def test_a_rank_without_data_stops_the_others_with_its_cause_before_any_collective(store, tmp_path):
    """Two nodes; the second one's key is wrong. Under the job's own parents and under torchrun."""
    port, own = 29671, {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for launcher in ("ours", "torchrun"):
        nodes = []
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
            env = environment(**{**own, **({"AWS_SECRET_ACCESS_KEY": "wrong"} if rank else {})})
            nodes.append(
                subprocess.Popen(script, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        texts = [node.communicate(timeout=90)[0] for node in nodes]
        assert all(node.returncode for node in nodes)
        assert all("403 SignatureDoesNotMatch: the secret key does not belong" in text for text in texts), texts
        port += 1


# --- Publishing ----------------------------------------------------------------------------------------------------------


def remote_names(store, prefix):
    answer = store.client().list_objects_v2(Bucket="data", Prefix=prefix)
    return sorted(entry["Key"][len(prefix) :] for entry in answer.get("Contents", []))


def test_a_reader_of_the_bucket_never_sees_half_a_checkpoint(store, monkeypatch, tmp_path):
    """In the order of the requests every manifest follows its file, and what is no longer kept loses its manifest first."""
    with faults(store, lambda request: None, monkeypatch) as proxy:
        env = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
        options = command("train", *TINY, "--epochs", 4, "--save_steps", 1, "--output_dir", "s3://data/runs/one")
        done = subprocess.run(options, cwd=tmp_path, env=environment(**env), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "published to s3://data/runs/one" in done.stdout, done.stdout + done.stderr
    there = set()
    for request in proxy.log:
        match = re.search(r"/checkpoints/(\d{12})\.(pt|json)$", request.path)
        if match and request.method == "PUT":
            assert match[2] == "pt" or f"{match[1]}.pt" in there, request
            there.add(f"{match[1]}.{match[2]}")
        if match and request.method == "DELETE":
            assert match[2] == "json" or f"{match[1]}.json" not in there, request
            there.discard(f"{match[1]}.{match[2]}")
    local = tmp_path / "output_dir/s3/data/runs/one"
    files = [os.path.relpath(os.path.join(where, name), local) for where, _, names in os.walk(local) for name in names]
    assert remote_names(store, "runs/one/") == sorted(name for name in files if not os.path.basename(name).startswith("."))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_on_an_empty_disk_the_run_goes_on_from_the_bucket_to_the_same_bits(store, monkeypatch, tmp_path, how):
    whole, first, second = tmp_path / "whole", tmp_path / "first", tmp_path / "second"
    for folder in (whole, first, second):
        folder.mkdir()
    run_job("train", whole, *TINY, "--epochs", 12)
    url = f"s3://data/runs/{how.name}"
    env = environment(**{name: os.environ[name] for name in os.environ if name.startswith("AWS_")})
    script = command("train", *TINY, "--epochs", 12, "--save_steps", 1, "--output_dir", url)
    process = subprocess.Popen(script, cwd=first, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(
        lambda: any(name.endswith(".json") for name in remote_names(store, f"runs/{how.name}/")),
        process,
        "a checkpoint in the bucket",
    )
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143}[how], errors
    done = subprocess.run(script, cwd=second, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "fetched checkpoint" in done.stdout and "going on from" in done.stdout, (
        done.stdout + done.stderr
    )
    link = second / "out"
    link.symlink_to(second / "output_dir/s3" / url[len("s3://") :])
    assert_same_bits(final_state(second), final_state(whole))
    assert remote_names(store, f"runs/{how.name}/metrics") == [".jsonl"]


def test_a_damaged_checkpoint_in_the_bucket_is_named_and_the_one_before_used(store, tmp_path):
    env = environment(**{name: os.environ[name] for name in os.environ if name.startswith("AWS_")})
    url = "s3://data/runs/damaged"
    for number, epochs in enumerate((2, 3)):
        folder = tmp_path / str(number)
        folder.mkdir()
        script = command("train", *TINY, "--epochs", epochs, "--output_dir", url)
        done = subprocess.run(script, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        names = [name for name in remote_names(store, "runs/damaged/checkpoints/") if name.endswith(".pt")]
        store.client().put_object(Bucket="data", Key=f"runs/damaged/checkpoints/{names[-1]}", Body=b"damaged")
    assert re.search(r"warning: checkpoint \S+000000000512.pt is damaged", done.stdout), done.stdout
    assert "going on from" in done.stdout and "000000000256.pt: epoch 2" in done.stdout


def test_starting_afresh_deletes_the_run_in_the_bucket_and_nothing_else(store, tmp_path):
    env = environment(**{name: os.environ[name] for name in os.environ if name.startswith("AWS_")})
    store.client().put_object(Bucket="data", Key="runs/fresh/notes.txt", Body=b"mine")
    script = command("train", *TINY, "--output_dir", "s3://data/runs/fresh")
    for folder, options, code in (
        ("a", [], 0),
        ("b", ["--resume", "never"], 2),
        ("c", ["--resume", "never", "--overwrite", "true", "--epochs", "1"], 0),
    ):
        (tmp_path / folder).mkdir()
        done = subprocess.run([*script, *options], cwd=tmp_path / folder, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr
        if code:
            assert "s3://data/runs/fresh holds a run and --resume is never" in done.stderr
    names = remote_names(store, "runs/fresh/")
    assert "notes.txt" in names and "epoch_1.pth" in names and "epoch_2.pth" not in names


def runs_here(tmp_path, *options, url="s3://data/runs/here", **extra):
    env = environment(**{name: os.environ[name] for name in os.environ if name.startswith("AWS_")}, **extra)
    script = command("train", *TINY, *options, "--output_dir", url)
    return subprocess.run(script, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)


def test_a_restart_on_an_empty_disk_goes_on_also_with_resume_never(store, tmp_path):
    """The platform gives the same command again; what it asked for was done the first time."""
    url, fresh = "s3://data/runs/again", ["--resume", "never", "--overwrite", "true"]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    assert runs_here(tmp_path / "first", *fresh, url=url).returncode == 0
    done = runs_here(tmp_path / "second", *fresh, "--epochs", 3, url=url, MA_SCHEDULE_CNT="2")
    assert done.returncode == 0 and "000000000512.pt: epoch 3" in done.stdout, done.stdout + done.stderr


def test_what_the_disk_has_beyond_the_bucket_is_kept_and_another_run_refused(store, tmp_path):
    """The store was away for the last saves; then somebody put another run into the bucket."""
    assert runs_here(tmp_path, "--epochs", 3).returncode == 0
    client, prefix = store.client(), "runs/here/"
    for name in remote_names(store, prefix):
        if "0768" in name or "0512" in name:
            client.delete_object(Bucket="data", Key=prefix + name)
    client.put_object(Bucket="data", Key=prefix + "checkpoints/000000000256.json", Body=(manifest := local_manifest(tmp_path)))
    done = runs_here(tmp_path, "--epochs", 4)
    assert done.returncode == 0 and "000000000768.pt: epoch 4" in done.stdout, done.stdout + done.stderr
    number = remote_names(store, prefix + "checkpoints/")[-1]
    client.put_object(
        Bucket="data",
        Key=prefix + "checkpoints/" + number.replace(".pt", ".json"),
        Body=manifest.replace(b'"run": "', b'"run": "x'),
    )
    done = runs_here(tmp_path, "--epochs", 5)
    assert done.returncode == 2 and "holds another run than s3://data/runs/here" in done.stderr, done.stderr


def local_manifest(tmp_path):
    return (tmp_path / "output_dir/s3/data/runs/here/checkpoints/000000000768.json").read_bytes()


def test_a_refusal_is_not_taken_for_damage(store, tmp_path, monkeypatch):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    url = "s3://data/runs/refused"
    assert runs_here(tmp_path / "a", url=url).returncode == 0
    with faults(store, lambda request: "denied" if request.path.endswith(".pt") else None, monkeypatch):
        done = runs_here(tmp_path / "b", url=url)
    assert done.returncode == 2 and "403 AccessDenied" in done.stderr and "damaged" not in done.stdout + done.stderr
    done = runs_here(tmp_path / "b", "--resume", f"{url}/checkpoints/000000000512.pt", "--epochs", 3, url="s3://data/runs/next")
    assert done.returncode == 0 and "000000000512.pt: epoch 3" in done.stdout, done.stdout + done.stderr


def test_only_what_a_run_leaves_is_ever_deleted(store, tmp_path):
    ours = [
        "checkpoints/000000000512.pt",
        "checkpoints/000000000512.json",
        "epoch_3.pth",
        "tensorboard/events.out.tfevents.1.host",
    ]
    theirs = [
        "checkpoints/pretrained.pt",
        "checkpoints/other/000000000512.json",
        "epoch_best/x.pth",
        "tensorboard/x/events.out.tfevents.1",
    ]
    assert [name for name in ours + theirs if checkpoint.LEFT_BY_A_RUN.fullmatch(name)] == ours
    client = store.client()
    for key in ("up/team/file", "up/checkpoints/000000000512.pt"):
        client.create_multipart_upload(Bucket="data", Key=key)
    (tmp_path / "checkpoints").mkdir()
    publishing = publisher.Publisher(str(tmp_path), "s3://data/up")
    publishing.start()
    left = [upload["Key"] for upload in client.list_multipart_uploads(Bucket="data", Prefix="up/").get("Uploads", [])]
    assert left == ["up/team/file"], "uploads of others go on"
    for number in (1, 2):
        (tmp_path / f"checkpoints/{number:012d}.pt").write_text("x")
        (tmp_path / f"checkpoints/{number:012d}.json").write_text("{}")
    publishing.saved(lambda names: [name for name in names if "000002" in name])  # as it was known before the second was there
    publishing.finish()
    assert len(remote_names(store, "up/checkpoints/")) == 4, "what is in the folder stays in the bucket"


def test_a_run_that_fails_still_publishes_what_it_has(store, tmp_path):
    done = runs_here(tmp_path, "--lr", "1e30", "--save_steps", 1, "--epochs", 9, url="s3://data/runs/nan")
    assert done.returncode == 1 and "error: " in done.stderr
    local = tmp_path / "output_dir/s3/data/runs/nan/checkpoints"
    assert remote_names(store, "runs/nan/checkpoints/") == sorted(
        name for name in os.listdir(local) if not name.startswith(".")
    )


def test_an_unreachable_bucket_refuses_the_start_and_a_lost_one_keeps_the_results_here(store, monkeypatch, tmp_path):
    env = environment(**{name: os.environ[name] for name in os.environ if name.startswith("AWS_")})
    script = command("train", *TINY, "--output_dir", "s3://nowhere/run")
    done = subprocess.run(script, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "404 NoSuchBucket" in done.stderr and len(done.stderr.splitlines()) == 1
    monkeypatch.setattr(bucket, "LONGEST_PAUSE", 0.1)
    (tmp_path / "results").mkdir()
    (tmp_path / "results/metrics.jsonl").write_text("{}")
    said = []
    with faults(store, lambda request: None, monkeypatch) as proxy:
        publishing = publisher.Publisher(str(tmp_path / "results"), "s3://data/lost", said.append)
        publishing.start()
        proxy.plan = lambda request: "503"
        with pytest.raises(TrainingFailed, match="no good answer for 1 s, the last was: 503 SlowDown"):
            publishing.finish(1)
        proxy.plan = lambda request: None
        publishing.finish(1)
    assert remote_names(store, "lost/") == ["metrics.jsonl"]


def test_a_failure_waits_for_a_slow_store_no_longer_than_it_may(store, monkeypatch, tmp_path):
    """The other ranks hear of it only afterwards."""
    (tmp_path / "metrics.jsonl").write_text("{}")
    with faults(store, lambda request: None, monkeypatch) as proxy:
        publishing = publisher.Publisher(str(tmp_path), "s3://data/slow")
        publishing.start()
        proxy.plan = lambda request: "503"
        with pytest.raises(TrainingFailed, match=r"there was no more time than 0\.5 s"):
            publishing.finish(60, at_most=0.5)


def test_a_wrong_body_is_refused_by_the_store(store):
    """The store compares what it got with Content-MD5, so damage on the way up is noticed there."""
    place = bucket.Bucket("s3://data/x")
    with pytest.raises((UserError, TrainingFailed)):
        place.ask("put_object", "x", bucket.Patience(0), Body=b"other", ContentMD5="mgNkuembtIDdJeHwKEyFVQ==")


def test_a_local_path_is_used_where_it_is_and_published_atomically(tmp_path):
    (tmp_path / "a").write_text("1")
    assert storage.fetch(str(tmp_path)) == str(tmp_path)
    storage.publish(str(tmp_path / "a"), str(tmp_path / "b/c"))
    assert (tmp_path / "b/c").read_text() == "1" and os.listdir(tmp_path / "b") == ["c"]
    with pytest.raises(UserError, match="only a folder or s3://, obs://, oss:// can be written to"):
        storage.publish(str(tmp_path / "a"), "https://example.com/x")
