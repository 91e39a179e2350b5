"""Data from and results to stores whose answers differ from Swift's: moto and s3rver, real servers of others."""

from pathlib import Path

import pytest

from common import storage
from tests.jobs import TINY, assert_same_bits, command, final_state, run_forked
from tests.otherstores import Moto, S3rver
from tests.stores import BIG, SMALL, fill, remote_names, same, store_environment
from tests.test_data import write_folder

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


def test_on_an_empty_disk_a_run_goes_on_from_the_bucket_to_the_same_bits(store, finished, tmp_path):
    options = [command("train")[1], *TINY, "--output_dir", "s3://data/run"]
    for name, more in {"first": ["--max_steps", 5], "second": []}.items():
        (tmp_path / name).mkdir()
        done = run_forked([*options, *more], tmp_path / name, store_environment())
        assert "published to s3://data/run" in done.stdout, done.stdout + done.stderr
    assert "fetched checkpoint" in done.stdout and "going on from" in done.stdout, done.stdout + done.stderr
    assert_same_bits(final_state(tmp_path / "second", "output_dir/s3/data/run"), final_state(finished[0]))
    assert "metrics.jsonl" in remote_names(store, "run/")
