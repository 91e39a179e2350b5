"""Data from and results to stores whose answers differ from Swift's: moto and s3rver, real servers of others."""

from pathlib import Path

import pytest

from common import storage
from common.errors import TrainingFailed
from common.storage import index
from tests.tools.cifar import write_folder
from tests.tools.faultproxy import faults
from tests.tools.jobs import TINY, assert_same_bits, command, final_state, run_forked
from tests.tools.otherstores import Moto, S3rver
from tests.tools.stores import BIG, SMALL, fill, names_in, remote_names, same, store_environment

pytestmark = [pytest.mark.rehearsal, pytest.mark.usefixtures("reachable")]  # two programs that have to be fetched first


@pytest.fixture(scope="module", params=[Moto, S3rver])
def store(request, tmp_path_factory):
    write_folder(cifar := tmp_path_factory.mktemp("cifar") / "cifar-10-batches-py")
    running = request.param(tmp_path_factory.mktemp("store"))
    try:
        fill(running, cifar)
        yield running
    finally:
        running.stop()


def test_a_folder_is_fetched_whole_and_again_only_what_has_changed(store):
    folder = storage.fetch("s3://data/set", say=(said := []).append)
    assert same(folder) and said[-1].endswith("all verified"), said
    client = store.client()
    client.put_object(Bucket="data", Key="set/1/11.bin", Body=b"other")
    client.delete_object(Bucket="data", Key="set/2/22.bin")
    (wanted := dict(SMALL)).pop("set/2/22.bin")
    storage.fetch("s3://data/set", say=(said := []).append)
    assert same(folder, {**wanted, "set/1/11.bin": b"other"}) and said[-1].startswith("fetched 1 of 29 objects"), said
    for key in ("set/1/11.bin", "set/2/22.bin"):
        client.put_object(Bucket="data", Key=key, Body=SMALL[key])


def test_a_large_file_goes_there_and_back_in_parts(store, tmp_path):
    (tmp_path / "big").write_bytes(BIG)
    storage.publish(str(tmp_path / "big"), "s3://data/in/ü and space")
    assert store.client().head_object(Bucket="data", Key="in/ü and space")["ContentLength"] == len(BIG)
    assert Path(storage.fetch("s3://data/in/ü and space"), "ü and space").read_bytes() == BIG
    assert Path(storage.fetch("s3://data/big/one"), "one").read_bytes() == BIG  # put in one part


@pytest.mark.parametrize("store", [Moto], indirect=True)  # s3rver is older than checksums
@pytest.mark.parametrize(
    "kind, parts", [("CRC64NVME", 1), ("CRC32C", 1), ("CRC32", 1), ("SHA1", 1), ("SHA256", 1), ("CRC64NVME", 2), ("SHA256", 2)]
)
def test_the_stores_own_checksum_says_what_an_etag_of_an_encrypted_object_cannot(store, monkeypatch, tmp_path, kind, parts):
    key, client = f"checked/{kind}-{parts}", store.client()
    how = {"Bucket": "data", "Key": key, "ServerSideEncryption": "aws:kms", "ChecksumAlgorithm": kind}
    if parts == 1:
        client.put_object(Body=BIG, **how)
    else:
        upload = {"Bucket": "data", "Key": key, "UploadId": client.create_multipart_upload(**how)["UploadId"]}
        half, done = len(BIG) // 2, []
        for number, content in ((1, BIG[:half]), (2, BIG[half:])):
            answer = client.upload_part(PartNumber=number, Body=content, ChecksumAlgorithm=kind, **upload)
            done.append({"PartNumber": number, "ETag": answer["ETag"], f"Checksum{kind}": answer[f"Checksum{kind}"]})
        client.complete_multipart_upload(MultipartUpload={"Parts": done}, **upload)
    read_again, real = [], index.Parts.chunks
    monkeypatch.setattr(index.Parts, "chunks", lambda self, *which: read_again.append(which) or real(self, *which))
    folder = storage.fetch(f"s3://data/{key}", str(tmp_path / "got"), say=(said := []).append)
    assert Path(folder, f"{kind}-{parts}").read_bytes() == BIG
    assert bool(read_again) is (kind not in ("CRC64NVME", "CRC32C")), "these are computed of parts that come in any order"
    if (kind, parts) == ("SHA256", 2):  # moto does not say whether it is of the whole or of its parts' checksums
        assert said[-1].endswith("by size alone (the store gives no digest)"), said
        return
    assert said[-1].endswith("all verified"), said
    refused = pytest.raises(TrainingFailed, match="damaged there or on the way")
    with faults(store, lambda request: "flip" if request.is_object else None, monkeypatch), refused:
        storage.fetch(f"s3://data/{key}", str(tmp_path / "damaged"))
    assert names_in(tmp_path / "damaged") == []


def test_on_an_empty_disk_a_run_goes_on_from_the_bucket_to_the_same_bits(store, finished, tmp_path):
    options = [command("train")[1], *TINY, "--output_dir", "s3://data/run"]
    for name, more in {"first": ["--max_steps", 5], "second": []}.items():
        (tmp_path / name).mkdir()
        done = run_forked([*options, *more], tmp_path / name, store_environment())
        assert "published to s3://data/run" in done.stdout, done.stdout + done.stderr
    assert "fetched checkpoint" in done.stdout and "going on from" in done.stdout, done.stdout + done.stderr
    assert_same_bits(final_state(tmp_path / "second", "output_dir/s3/data/run"), final_state(finished[0]))
    assert "metrics.jsonl" in remote_names(store, "run/")
