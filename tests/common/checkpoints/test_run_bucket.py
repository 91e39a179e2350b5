"""Results in a bucket: published while the training goes on, and a run that starts again from there."""

import argparse
import contextlib
import itertools
import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from common import storage
from common.address import FETCHING
from common.alive import patience
from common.alive.stops import STOPS
from common.checkpoints import checkpoint, publisher, run_bucket, run_folder, saver
from common.checkpoints.run_bucket import RunBucket
from common.errors import TrainingFailed, UserError
from common.storage import bucket, upload
from tests.common.run.test_mistakes import END, trained  # noqa: F401 (a fixture)
from tests.tools.faultproxy import faults
from tests.tools.jobs import (
    PATIENCE,
    TINY,
    Popen,
    assert_same_bits,
    command,
    environment,
    final_state,
    run,
    run_forked,
    wait_for,
)
from tests.tools.permissions import of_anybody
from tests.tools.ranks import check_ledger
from tests.tools.stores import remote_names, store_environment

pytestmark = pytest.mark.usefixtures("reachable", "the_secret_is_nowhere")


def run_here(folder, url, *options, check=0, **env):
    """The base job in `folder` with its output in a bucket; returns the finished process, its exit code asserted."""
    folder.mkdir(exist_ok=True)
    script = command("train", *TINY, *options, "--output_dir", url)
    env = {**store_environment(), **env}
    if not check:
        return run_forked(script[1:], folder, env)
    done = run(script, cwd=folder, env=environment(**env))
    assert done.returncode == check, done.stdout + done.stderr
    return done


def test_a_reader_of_the_bucket_never_sees_half_a_checkpoint(store, monkeypatch, tmp_path):
    """In the order of the requests every manifest follows its file and the weights of its epoch, and what is no longer kept
    loses its manifest first."""
    with faults(store, lambda request: None, monkeypatch) as proxy:
        done = run_here(tmp_path, "s3://data/runs/one", "--epochs", 4, "--save_steps", 1)
        assert "published to s3://data/runs/one" in done.stdout, done.stdout + done.stderr
    there, weights = set(), set()
    for request in proxy.log:
        weights.add(request.path.rpartition("/")[2])
        match = re.search(r"/checkpoints/(\d{12})\.(pt|json)$", request.path)
        if match and request.method == "PUT":
            assert match[2] == "pt" or f"{match[1]}.pt" in there, request
            epoch, rest = divmod(int(match[1]), 64)
            assert match[2] == "pt" or rest or f"epoch_{epoch}.pth.sha256" in weights, request
            there.add(f"{match[1]}.{match[2]}")
        if match and request.method == "DELETE":
            assert match[2] == "json" or f"{match[1]}.json" not in there, request
            there.discard(f"{match[1]}.{match[2]}")
    local = tmp_path / "output_dir/s3/data/runs/one"
    files = [os.path.relpath(os.path.join(where, name), local) for where, _, names in os.walk(local) for name in names]
    there = [name for name in remote_names(store, "runs/one/") if not name.startswith(".starts/")]
    assert there == sorted(name for name in files if not os.path.basename(name).startswith("."))


def test_a_good_checkpoint_is_in_the_bucket_at_every_moment_while_its_number_is_saved_again(store, tmp_path, monkeypatch):
    """Each time the job is dead from one change of the bucket on, and the next start has an empty disk."""
    found = []
    for number in range(9):
        folder, url = tmp_path / f"{number}", f"s3://data/runs/twice-{number}"
        for value in (1.0, 2.0):
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            checkpoint.write(str(folder / "checkpoints"), {"model": torch.full((50,), value)}, {"samples_seen": 512})
            changes = itertools.count() if value == 2.0 else itertools.repeat(-1)

            def plan(request, changes=changes, number=number):
                return "denied" if request.method != "GET" and next(changes) >= number else None

            with faults(store, plan, monkeypatch), contextlib.suppress(UserError):
                publisher.Publisher(str(folder), url).finish()
        (empty := tmp_path / f"{number}-next").mkdir()
        assert RunBucket(argparse.Namespace(output_url=url, output_dir=str(folder), checkpoint_dir=str(empty))).fetch_newest()
        state, _, _ = checkpoint.newest(str(empty))
        found.append(state["model"][0].item())
    assert found == sorted(found) and {1.0, 2.0} == set(found)
    assert remote_names(store, "runs/twice-8/checkpoints/") == ["000000000512.json", "000000000512.pt"]


def test_who_takes_the_run_over_and_has_no_way_into_the_bucket_ends(tmp_path, monkeypatch):
    """Otherwise it would go on, and nothing of it would be published."""

    def refuses(*_):
        raise UserError("there is no credential")

    monkeypatch.setattr(run_bucket, "RunBucket", refuses)
    folders = dict.fromkeys(("output_dir", "checkpoint_dir", "tensorboard_dir"), str(tmp_path))
    saving = saver.Saving(argparse.Namespace(output_url="s3://data/run", **folders), (), print)
    with pytest.raises(UserError, match="no credential"):
        saving.take_over()


@pytest.mark.rehearsal
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_on_an_empty_disk_the_run_goes_on_from_the_bucket_to_the_same_bits(store, untouched, tmp_path, how):
    first, second, url = tmp_path / "first", tmp_path / "second", f"s3://data/runs/{how.name}"
    whole, _printed = untouched("train", *TINY, "--epochs", 12)
    first.mkdir()
    options = ["--epochs", 12, "--save_steps", 1, "--ledger", "true"]
    script, env = command("train", *TINY, *options, "--output_dir", url), environment(**store_environment())
    process = Popen(script, cwd=first, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(
        lambda: any(name.endswith(".json") for name in remote_names(store, f"runs/{how.name}/")),
        process,
        "a checkpoint in the bucket",
    )
    process.send_signal(how)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143}[how], errors
    done = run_here(second, url, *options)
    assert "fetched checkpoint" in done.stdout and "going on from" in done.stdout, done.stdout + done.stderr
    assert_same_bits(final_state(second, f"output_dir/s3/data/runs/{how.name}"), final_state(whole))
    assert remote_names(store, f"runs/{how.name}/metrics") == [".jsonl"]
    if how == signal.SIGTERM:  # after the other one, steps may lack that were done since the last upload
        check_ledger(second / f"output_dir/s3/data/runs/{how.name}")


@pytest.fixture(scope="module")
def published(store, tmp_path_factory):
    """{name: content} of a run of two epochs in a bucket."""
    script = command("train", *TINY, "--output_dir", "s3://data/runs/published")
    run_forked(script[1:], tmp_path_factory.mktemp("published"), store.environment)
    get = store.client().get_object
    names = remote_names(store, "runs/published/")
    return {name: get(Bucket="data", Key=f"runs/published/{name}")["Body"].read() for name in names}


def put_run(store, published, name):
    """A copy of it, and its address."""
    for key, content in published.items():
        store.client().put_object(Bucket="data", Key=f"runs/{name}/{key}", Body=content)
    return f"s3://data/runs/{name}"


def test_a_damaged_checkpoint_in_the_bucket_is_named_and_the_one_before_used(store, published, tmp_path):
    url = put_run(store, published, "damaged")
    store.client().put_object(Bucket="data", Key="runs/damaged/checkpoints/000000000128.pt", Body=b"damaged")
    done = run_here(tmp_path, url, "--epochs", 3)
    assert re.search(r"warning: checkpoint \S+000000000128.pt is damaged", done.stdout), done.stdout
    assert "going on from" in done.stdout and "000000000064.pt: epoch 2" in done.stdout


def test_what_a_killed_start_left_without_a_manifest_goes_though_the_next_has_nothing_to_save(store, published, tmp_path):
    url = put_run(store, published, "left")
    names = remote_names(store, "runs/left/checkpoints/")
    store.client().put_object(
        Bucket="data", Key="runs/left/checkpoints/000000000016.pt", Body=b"whole, but without its manifest"
    )
    assert "nothing to do" in run_here(tmp_path, url).stdout
    assert remote_names(store, "runs/left/checkpoints/") == [name.replace("128.", "128-2.") for name in names]
    left = ["checkpoints/000000000128.pt", "checkpoints/000000000192.pt", "checkpoints/000000000192.json"]
    assert (
        checkpoint.surplus(left, 2, {"best": {"samples_seen": 128}, "samples_seen": 192}) == left[:1]
    )  # though it was the best


def test_starting_afresh_deletes_the_run_in_the_bucket_and_nothing_else(store, published, tmp_path):
    store.client().put_object(Bucket="data", Key="runs/fresh/notes.txt", Body=b"mine")
    url, never = put_run(store, published, "fresh"), ["--resume", "never"]
    refused = run_here(tmp_path / "b", url, *never, check=2)
    assert "s3://data/runs/fresh holds a run and --resume is never" in refused.stderr
    run_here(tmp_path / "c", url, *never, "--overwrite", "true", "--epochs", 1)
    names = remote_names(store, "runs/fresh/")
    assert "notes.txt" in names and "epoch_1.pth" in names and "epoch_2.pth" not in names


def test_a_restart_on_an_empty_disk_goes_on_also_with_resume_never(store, tmp_path):
    """The platform gives the same command again; what it asked for was done the first time."""
    url, fresh = "s3://data/runs/again", ["--resume", "never", "--overwrite", "true"]
    run_here(tmp_path / "first", url, *fresh)
    done = run_here(tmp_path / "second", url, *fresh, "--epochs", 3, MA_SCHEDULE_CNT="2")
    assert "000000000128.pt: epoch 3" in done.stdout, done.stdout + done.stderr
    # Another job, whose first start ended before it could delete anything.
    done = run_here(tmp_path / "other", url, *fresh, MA_SCHEDULE_CNT="2", MA_VJ_NAME="another-job")
    assert "going on from" not in done.stdout and "epoch=1/2 " in done.stdout, done.stdout + done.stderr


def test_what_the_disk_has_beyond_the_bucket_is_kept_and_another_run_refused(store, tmp_path):
    """The store was away for the last saves; then somebody put another run into the bucket."""
    client, prefix, url = store.client(), "runs/here/", "s3://data/runs/here"
    run_here(tmp_path, url, "--epochs", 3)
    for name in remote_names(store, prefix):
        if "0192" in name or "0128" in name:
            client.delete_object(Bucket="data", Key=prefix + name)
    client.put_object(Bucket="data", Key=prefix + "checkpoints/000000000064.json", Body=(manifest := local_manifest(tmp_path)))
    done = run_here(tmp_path, url, "--epochs", 4)
    assert "000000000192.pt: epoch 4" in done.stdout, done.stdout + done.stderr
    number = remote_names(store, prefix + "checkpoints/")[-1]
    client.put_object(
        Bucket="data",
        Key=prefix + "checkpoints/" + number.replace(".pt", ".json"),
        Body=manifest.replace(b'"run": "', b'"run": "x'),
    )
    done = run_here(tmp_path, url, "--epochs", 5, check=2)
    assert "holds another run than s3://data/runs/here" in done.stderr, done.stderr


def local_manifest(tmp_path):
    return (tmp_path / "output_dir/s3/data/runs/here/checkpoints/000000000192.json").read_bytes()


def test_a_refusal_is_not_taken_for_damage(store, published, tmp_path, monkeypatch):
    url = put_run(store, published, "refused")
    with faults(store, lambda request: "denied" if request.path.endswith(".pt") else None, monkeypatch):
        done = run_here(tmp_path / "b", url, check=2)
    assert "403 AccessDenied" in done.stderr and "damaged" not in done.stdout + done.stderr
    done = run_here(tmp_path / "b", "s3://data/runs/next", "--resume", f"{url}/checkpoints/000000000128.pt", "--epochs", 3)
    assert "000000000128.pt: epoch 3" in done.stdout, done.stdout + done.stderr


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
    assert [name for name in ours + theirs if run_folder.is_run_file(name)] == ours
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
    publishing.publish_soon(
        lambda names: [name for name in names if "000002" in name]
    )  # as it was known before the second was there
    publishing.finish()
    assert len(remote_names(store, "up/checkpoints/")) == 4, "what is in the folder stays in the bucket"


def test_a_large_file_that_the_store_refuses_leaves_no_parts_to_pay_for(store, monkeypatch, tmp_path):
    monkeypatch.setattr(upload, "PART", 1000)
    (tmp_path / "large").write_bytes(bytes(2500))
    plan = lambda request: "denied" if request.query.get("partNumber") == ["2"] else None  # noqa: E731
    with faults(store, plan, monkeypatch), pytest.raises(UserError, match="403 AccessDenied"):
        storage.publish(str(tmp_path / "large"), "s3://data/refused")
    assert not store.client().list_multipart_uploads(Bucket="data", Prefix="refused").get("Uploads")


def test_the_output_folder_of_a_run_in_a_bucket_is_fetched_to_the_inputs(store, tmp_path):
    store.client().put_object(Bucket="data", Key="runs/theirs/metrics.jsonl", Body=b"{}")
    found = run_bucket.fetch_resume_path("s3://data/runs/theirs", str(tmp_path / "inputs"), print)
    assert found == str(tmp_path / "inputs/s3/data/runs/theirs") and "metrics.jsonl" in os.listdir(found)


def test_a_run_that_fails_still_publishes_what_it_has(store, tmp_path):
    done = run_here(tmp_path, "s3://data/runs/nan", "--lr", "1e30", "--save_steps", 1, "--epochs", 9, check=1)
    assert "error: " in done.stderr
    local = tmp_path / "output_dir/s3/data/runs/nan/checkpoints"
    assert remote_names(store, "runs/nan/checkpoints/") == sorted(
        name for name in os.listdir(local) if not name.startswith(".")
    )


def test_an_unreachable_bucket_refuses_the_start_and_a_lost_one_keeps_the_results_here(store, monkeypatch, tmp_path):
    done = run_here(tmp_path, "s3://nowhere/run", check=2)
    assert "404 NoSuchBucket" in done.stderr and len(done.stderr.splitlines()) == 1
    monkeypatch.setattr(patience, "LONGEST_PAUSE", 0.1)
    (tmp_path / "results").mkdir()
    (tmp_path / "results/metrics.jsonl").write_text("{}")
    said = []
    with faults(store, lambda request: None, monkeypatch) as proxy:
        publishing = publisher.Publisher(str(tmp_path / "results"), "s3://data/lost", said.append)
        publishing.start()
        proxy.plan = lambda request: "503"
        monkeypatch.setattr(publisher, "STOP_SECONDS", 1)
        with pytest.raises(TrainingFailed, match="no good answer for 1 s, the last was: 503 SlowDown"):
            publishing.finish(in_a_hurry=True)
        proxy.plan = lambda request: None
        publishing.finish()
    assert remote_names(store, "lost/") == ["metrics.jsonl"]


def test_a_failure_waits_for_a_slow_store_no_longer_than_it_may(store, monkeypatch, tmp_path):
    """The other ranks hear of it only afterwards."""
    (tmp_path / "metrics.jsonl").write_text("{}")
    with faults(store, lambda request: None, monkeypatch) as proxy:
        publishing = publisher.Publisher(str(tmp_path), "s3://data/slow")
        before = threading.enumerate()
        publishing.start()
        begun = [thread for thread in threading.enumerate() if thread not in before]
        assert all(thread.daemon for thread in begun), "a process that ends without finish(), as at Ctrl-C, would never end"
        proxy.plan = lambda request: "503"
        with pytest.raises(TrainingFailed, match=r"there was no more time than 0\.5 s|no good answer for 0\.5 s"):
            publishing.finish(timeout=0.5)
        assert all(thread.daemon for thread in threading.enumerate() if thread not in before), "nor one that fails"
        proxy.plan = lambda request: None
        publishing.finish()  # its thread would go on in the tests after this one


def test_a_job_that_fails_waits_for_its_bucket_for_seconds_and_not_as_after_a_stop(store, monkeypatch, tmp_path):
    monkeypatch.setattr(publisher, "STOP_SECONDS", 10**6)
    monkeypatch.setattr(run_bucket, "FAILURE_SECONDS", 0.3)
    with faults(store, lambda request: None, monkeypatch) as proxy:
        place = RunBucket(argparse.Namespace(output_dir=str(tmp_path), output_url="s3://data/runs/fails"))
        place.begin()
        proxy.plan = lambda request: "503"
        place.failure(ValueError("of the job"))
        proxy.plan = lambda request: None
        place.finish(in_a_hurry=False)


def test_a_credential_that_expires_is_one_warning_and_then_the_end(store, monkeypatch, tmp_path):
    monkeypatch.setattr(publisher, "INTERVAL_SECONDS", 0.02)
    fault, said, pause = [None], [], threading.Event()
    folders = dict.fromkeys(("output_dir", "checkpoint_dir", "tensorboard_dir"), str(tmp_path))
    with faults(store, lambda request: fault[0], monkeypatch):
        saving = saver.Saving(argparse.Namespace(output_url="s3://data/runs/expires", **folders), (), said.append)
        saving.take_over()  # which begins to publish
        monkeypatch.setenv(patience.VARIABLE, "1")  # now: a request of its client keeps the time that it usually has
        fault[0] = "expired"
        monkeypatch.setattr(bucket, "_client", None)  # whatever goes wrong where a new credential is looked for
        refused = r"^s3://data/runs/expires refuses the results: 403 ExpiredToken.* Mend that and start again"
        with pytest.raises(UserError, match=refused):
            for number in range(600):
                (tmp_path / f"{number}").write_text("another file to send each time")
                saving.require_published()
                pause.wait(0.05)
        assert [line[:60] for line in said] == ["warning: results cannot be published now, the next attempt f"]
        fault[0] = None
        saving.finish_publishing(in_a_hurry=False)
    assert f"{number}" in remote_names(store, "runs/expires/")


@pytest.mark.rehearsal
def test_a_job_whose_credential_expires_saves_and_ends_and_goes_on_with_another(store, monkeypatch, tmp_path):
    with faults(store, lambda request: "expired" if expired(proxy) else None, monkeypatch) as proxy:
        words = ["--epochs", 3000, "--save_steps", 2, "--patience", 10]
        done = run_here(tmp_path, "s3://data/runs/renewed", *words, check=2)
    assert done.stderr.splitlines()[-1].startswith("error: s3://data/runs/renewed refuses the results: 403 ExpiredToken")
    assert done.stdout.count("warning: results cannot be published") == 1
    (trained,) = re.findall(r" epoch=(\d+)/3000 steps.*", done.stdout, re.MULTILINE)[-1:]
    again = run_here(tmp_path, "s3://data/runs/renewed", "--epochs", int(trained) + 1)
    assert "going on from" in again.stdout and "published to s3://data/runs/renewed" in again.stdout


def expired(proxy):
    return sum(request.method == "PUT" and "/checkpoints/" in request.path for request in proxy.log) > 4


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


def test_a_file_that_goes_while_its_folder_is_read_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "_paths", lambda folder, _: [f"{folder}/gone"])
    errors = []
    assert upload.changed_files(str(tmp_path), {}, errors) == {} and not errors


PUBLISHING = {"folder": storage.publish, "run": lambda folder, url: publisher.Publisher(folder, url).finish()}


@pytest.mark.parametrize("what", PUBLISHING)
def test_what_cannot_be_read_is_named_and_everything_else_is_published(store, tmp_path, what):
    """A folder that may not be listed, a file that may not be opened, a link that leads nowhere but to itself; and a pipe,
    which is no result and must not block."""
    for name in ("a/1", "locked/2", "b/secret", "c/3.part"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text(name)
    os.mkfifo(tmp_path / "out" / "pipe")
    (tmp_path / "out" / "c" / "loop").symlink_to("loop")
    (tmp_path / "out" / FETCHING).mkdir()
    (tmp_path / "out" / FETCHING / "notes").touch()
    os.chmod(tmp_path / "out" / "locked", 0)
    os.chmod(tmp_path / "out" / "b" / "secret", 0)
    first = "(locked: Permission denied|loop: Too many levels of symbolic links)"
    refused = pytest.raises(TrainingFailed, match=rf"3 files or folders of \S+out cannot be read.*{first}")
    with of_anybody(), refused:
        PUBLISHING[what](str(tmp_path / "out"), f"s3://data/locked-{what}")
    assert remote_names(store, f"locked-{what}/") == ["a/1", "c/3.part"]


def test_a_link_at_the_name_of_an_unfinished_file_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "new").write_text("new")
    (tmp_path / "there.unfinished").symlink_to(tmp_path / "victim")
    storage.publish(str(tmp_path / "new"), str(tmp_path / "there"))
    assert (tmp_path / "victim").read_text() == "mine" and (tmp_path / "there").read_text() == "new"
    assert not (tmp_path / "there").is_symlink()


def test_who_takes_the_run_over_goes_on_with_the_journal_that_is_in_the_bucket(store, tmp_path):
    """It has a disk of its own, and its journal would replace the one of the rank that was lost."""
    store.client().put_object(Bucket="data", Key="runs/taken/journal.jsonl", Body=b'{"event": "began"}\n')
    folders = dict.fromkeys(("output_dir", "checkpoint_dir", "tensorboard_dir"), str(tmp_path / "out"))
    saving = saver.Saving(argparse.Namespace(output_url="s3://data/runs/taken", **folders), (), print)
    saving.take_over()
    assert (tmp_path / "out" / "journal.jsonl").read_bytes() == b'{"event": "began"}\n'
    saving.finish_publishing(in_a_hurry=False)


def test_what_the_disk_has_is_not_fetched_again(store, tmp_path):
    """Nor replaced, though the one in the bucket is damaged."""
    (folder := tmp_path / "checkpoints").mkdir()
    checkpoint.write(str(folder), {"model": torch.ones(1)}, {"samples_seen": 512, "run": "1"})
    publisher.Publisher(str(tmp_path), "s3://data/runs/both").finish()
    store.client().put_object(Bucket="data", Key="runs/both/checkpoints/000000000512.pt", Body=b"damaged")
    said = []
    args = argparse.Namespace(output_url="s3://data/runs/both", output_dir=str(tmp_path), checkpoint_dir=str(folder))
    assert RunBucket(args, said.append).fetch_newest()
    assert checkpoint.newest(str(folder), said.append)[1]["samples_seen"] == 512 and not said
    (empty := tmp_path / "empty").mkdir()
    args.checkpoint_dir = str(empty)
    assert RunBucket(args, said.append).fetch_newest(check_only=True) and not os.listdir(empty) and not said


def test_who_goes_back_to_an_older_checkpoint_leaves_no_later_one_in_the_bucket(store, tmp_path):
    url, folder = "s3://data/runs/back", tmp_path / "checkpoints"
    folder.mkdir()
    for number in (100, 200, 300):
        about = {"samples_seen": number, "epoch": 0, "best": None, "run": "1", "identity": {}}
        checkpoint.write(str(folder), {"model": torch.zeros(1)}, about)
    publisher.Publisher(str(tmp_path), url).finish()
    args = argparse.Namespace(
        output_dir=str(tmp_path), checkpoint_dir=str(folder), tensorboard_dir=str(tmp_path), output_url=url, keep=2,
        resume=str(folder / "000000000200.pt"), overwrite=True, world=argparse.Namespace(restart_count=0),
    )  # fmt: skip
    saving = saver.Saving(args, (), print)
    assert saving.find()[1]["samples_seen"] == 200
    saving.finish_publishing(in_a_hurry=False)
    left = [f"000000000{number}-2.{ending}" for number in (100, 200) for ending in ("json", "pt")]
    assert remote_names(store, "runs/back/checkpoints/") == left


def test_a_stop_that_comes_while_the_last_results_are_sent_hurries_them(store, monkeypatch, tmp_path):
    """A store that does not answer is waited for --patience seconds, and the platform kills the job in half a minute."""
    monkeypatch.setattr(patience, "LONGEST_PAUSE", 0.1)
    monkeypatch.setattr(publisher, "STOP_SECONDS", 1)
    (tmp_path / "metrics.jsonl").write_text("{}")

    def plan(_request):
        monkeypatch.setattr(STOPS, "noted", signal.SIGTERM)  # as its handler does
        return "503"

    with faults(store, plan, monkeypatch), pytest.raises(TrainingFailed, match="no good answer for 1 s"):
        publisher.Publisher(str(tmp_path), "s3://data/stopped").finish()


@pytest.mark.parametrize("on_the_disk, kept", [("a\n", "a\nb\n"), ("a\nc\n", "a\nc\n"), ("a\nb\nc\n", "a\nb\nc\n")])
def test_a_disk_that_was_left_behind_does_not_replace_what_another_machine_has_added(store, tmp_path, on_the_disk, kept):
    """But the newest lines of its own run are those on the disk: they are not in the bucket yet."""
    url, place, folder = f"s3://data/runs/left-{len(on_the_disk)}", tmp_path / "out", tmp_path / "out" / "checkpoints"
    folder.mkdir(parents=True)
    about = {"samples_seen": 100, "epoch": 0, "best": None, "run": "1", "identity": {}}
    checkpoint.write(str(folder), {"model": torch.zeros(1)}, about)
    (place / "journal.jsonl").write_text("a\nb\n")
    publisher.Publisher(str(place), url).finish()
    (place / "journal.jsonl").write_text(on_the_disk)
    folders = {"output_dir": str(place), "checkpoint_dir": str(folder), "tensorboard_dir": str(place)}
    world = argparse.Namespace(restart_count=0)
    args = argparse.Namespace(output_url=url, resume="auto", overwrite=False, keep=2, world=world, **folders)
    saving = saver.Saving(args, (), print)
    assert saving.find()[1]["samples_seen"] == 100
    assert (place / "journal.jsonl").read_text() == kept
    saving.finish_publishing(in_a_hurry=False)


def test_a_loop_that_is_left_has_its_last_epoch_in_a_checkpoint_in_the_bucket_too(trained, store, tmp_path):
    done = trained((END, END + "        break\n"), output="s3://data/runs/left-loop", **store_environment())
    assert "published to s3://data/runs/left-loop" in done.stdout
    for there in (
        {path.name for path in tmp_path.rglob("*")},
        {Path(name).name for name in remote_names(store, "runs/left-loop/")},
    ):
        assert {"epoch_1.pth", "000000000064.json", "000000000064.pt"} <= there and "epoch_2.pth" not in there
