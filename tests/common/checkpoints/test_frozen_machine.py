"""A machine that stands still and wakes up, while another start has gone on with the run, destroys nothing."""

import errno
import re
import signal

import pytest

from common import files
from common.checkpoints import checkpoint, publisher, starts
from common.storage import bucket
from tests.tools.frozen import Start, frozen, held, left_in, let_go, wait_until_held
from tests.tools.jobs import TINY, assert_same_bits, command, final_state, in_rehearsal, run_forked
from tests.tools.ranks import TWO
from tests.tools.stores import remote_names, store_environment

OPTIONS = [*TINY, "--save_steps", "2"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run_forked(command("train", *OPTIONS, "--output_dir", folder / "out")[1:], folder)
    return folder


def wakes(start, where):
    """It ends with one line, and exit code 2: to start it again would end the other one."""
    start.signal(signal.SIGCONT)
    assert start.ends() == 2, start.log()
    said = [line for line in start.log().splitlines() if "error: " in line]
    assert len(said) == 1 and f"{where}: another start of this run writes there by now, so this one ends" in said[0], said


@pytest.mark.parametrize(
    "moment",
    in_rehearsal(
        [
            "rename */000000000032.pt 1",
            "rename */000000000032.json 1",
            "delete */000000000032.json 1",
            "rename */metrics.jsonl 1",
            "rename */ledger/rank_0.jsonl 1",
        ],
        lambda moment: moment != "rename */000000000032.json 1",
    ),
)
def test_it_wakes_up_when_the_run_is_finished(undisturbed, tmp_path, moment):
    options = [*OPTIONS, *(["--ledger", "true"] if "ledger" in moment else [])]
    asleep = frozen(tmp_path / "asleep", moment, "train", options, tmp_path / "out")
    other = Start(tmp_path / "other", "train", options, tmp_path / "out")
    assert other.ends() == 0, other.log()
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    wakes(asleep, tmp_path / "out")
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
    assert_same_bits(final_state(tmp_path), final_state(undisturbed))
    assert left_in(tmp_path / "out") == left_in(undisturbed / "out")


@pytest.mark.parametrize(
    "moment", in_rehearsal(["mkdir */checkpoints/.start-* 1", "upload */.starts/* 1"], lambda moment: "mkdir" in moment)
)
def test_before_it_has_claimed_anything_it_is_the_later_start_and_goes_on_with_what_there_is(request, tmp_path, moment):
    in_bucket = moment.startswith("upload")
    if in_bucket:
        request.getfixturevalue("reachable")
    output = "s3://data/runs/before" if in_bucket else tmp_path / "out"
    env = store_environment() if in_bucket else {}
    asleep = frozen(tmp_path / "asleep", moment, "train", OPTIONS, output, env=env)
    other = Start(tmp_path / "other", "train", OPTIONS, output, env=env)
    assert other.ends() == 0, other.log()
    asleep.signal(signal.SIGCONT)
    assert asleep.ends() == 0 and "nothing to do: the run has done 2 epochs" in asleep.log(), asleep.log()


@pytest.mark.rehearsal
@pytest.mark.parametrize(
    "moment", in_rehearsal(["rename */000000000032.json 1", "delete */000000000032.json 1"], lambda moment: "delete" in moment)
)
def test_two_ranks_wake_up_while_others_train(two_ranks, tmp_path, moment):
    options = [*TWO, "--nproc_per_node", 2, "--save_steps", 2]
    asleep = frozen(tmp_path / "asleep", moment, "train_ddp", options, tmp_path / "out")
    other = held(tmp_path / "other", 7, "train_ddp", options, tmp_path / "out")
    assert wait_until_held(other), other.log()
    wakes(asleep, tmp_path / "out")
    let_go(other)
    assert other.ends() == 0, other.log()
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))
    best = final_state(tmp_path)["position"]["best"]["samples_seen"]
    names = [f"{samples:012d}.{ending}" for samples in sorted({best, 96, 128}) for ending in ("json", "pt")]
    assert (left_in(tmp_path / "out")["checkpoints"], left_in(tmp_path / "out")["hidden"]) == (names, [])


@pytest.mark.parametrize(
    "moment",
    in_rehearsal(
        ["checkpoints/000000000064.json", "checkpoints/000000000128.pt", "metrics.jsonl"], lambda moment: "64" not in moment
    ),
)
def test_an_upload_that_comes_late_changes_no_result(undisturbed, store, reachable, tmp_path, moment):
    url = f"s3://data/runs/late-{moment.replace('/', '-')}"
    env, where = store_environment(), url.removeprefix("s3://data/")
    asleep = frozen(tmp_path / "asleep", f"upload */{moment} 1", "train", OPTIONS, url, env=env)
    other = Start(tmp_path / "other", "train", OPTIONS, url, env=env)
    assert other.ends() == 0, other.log()
    before = contents(store, where)
    wakes(asleep, url)
    after = contents(store, where)
    late = {name for name in after if after[name] != before.get(name) and not name.startswith("tensorboard/")}
    of_the_first = re.compile(r"checkpoints/\d{12}\.(pt|json|json\.unfinished)")
    assert [name for name in late if not of_the_first.fullmatch(name)] == []
    assert not set(before) - set(after)
    again = Start(tmp_path / "again", "train", OPTIONS, url, env=env)
    assert again.ends() == 0 and "nothing to do: the run has done 2 epochs" in again.log(), again.log()
    assert_same_bits(final_state(tmp_path / "again", f"output_dir/s3/data/{where}"), final_state(undisturbed))
    for name in ("metrics.jsonl", "state.json"):
        assert contents(store, where)[name] == (undisturbed / "out" / name).read_bytes()


def test_a_bucket_with_the_last_checkpoint_has_the_report_and_a_later_start_leaves_it_as_it_is(store, reachable, tmp_path):
    """It has nothing to do, so it evaluates nothing. The first one stands still behind its checkpoint, and sends the rest later."""
    url, env, options = "s3://data/runs/whole", {**store_environment(), "WITHOUT": "matplotlib"}, [*TINY, "--epochs", 1]
    asleep = frozen(tmp_path / "asleep", "upload */metrics.jsonl 1", "train", options, url, env=env)
    other = Start(tmp_path / "other", "train", options, url, env=env)
    assert other.ends() == 0 and "nothing to do: the run has done 1 epochs" in other.log(), other.log()
    there = contents(store, "runs/whole")
    for name in ("report.txt", "report.json"):
        assert there.get(name) == (tmp_path / "asleep/output_dir/s3/data/runs/whole" / name).read_bytes(), name
    assert b'id="confusion"' in there["report.html"], "of an evaluation that only the first start has seen"
    wakes(asleep, url)
    assert {
        name: content for name, content in contents(store, "runs/whole").items() if not name.startswith("tensorboard/")
    } == {name: content for name, content in there.items() if not name.startswith("tensorboard/")}


def contents(store, where):
    client = store.client()
    names = remote_names(store, f"{where}/")
    return {name: client.get_object(Bucket="data", Key=f"{where}/{name}")["Body"].read() for name in names}


# --- The rules -----------------------------------------------------------------------------------------------------------


def test_what_a_start_tries_after_another_one_has_claimed_the_folder_fails(tmp_path, monkeypatch):
    (tmp_path / "kept").write_text("of the first")
    files.claim(str(tmp_path))
    grows = files.replace_with_copy(str(tmp_path / "grows"))
    first = dict(files.CLAIMED)
    files.write_aside(str(tmp_path / "late"), b"of the first")
    files.CLAIMED.clear()
    (left,) = files.claim(str(tmp_path))
    assert left.endswith("late.unfinished")
    files.tidy()
    with files.replace_with_copy(str(tmp_path / "grows")) as its:
        its.write(b"of the second\n")
    grows.write(b"of the first\n")
    monkeypatch.setattr(files, "CLAIMED", first)
    assert files.is_taken_over()
    for tries in (files.give_name, files.remove, files.replace_with_copy, lambda path: files.write_atomically(path, b"")):
        with pytest.raises(files.TakenOver, match="another start of this run writes there by now"):
            tries(str(tmp_path / "late"))
    assert (tmp_path / "grows").read_text() == "of the second\n" and (tmp_path / "kept").read_text() == "of the first"
    assert not (tmp_path / "late").exists()


def test_a_folder_that_was_moved_or_cleaned_is_not_taken_for_another_start(tmp_path):
    (tmp_path / "out").mkdir()
    files.claim(str(tmp_path / "out"))
    (tmp_path / "out").rename(tmp_path / "moved")
    for folder_is_there in (False, True):
        if folder_is_there:
            (tmp_path / "out").mkdir()
        with pytest.raises(files.TakenOver, match="the folder was moved or deleted, so this one ends"):
            files.write_atomically(str(tmp_path / "out" / "metrics.jsonl"), b"")


def test_a_disk_that_fails_is_no_other_start(tmp_path, monkeypatch):
    files.claim(str(tmp_path))

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.os, "stat", fails)
    monkeypatch.setattr(files.os, "replace", fails)
    assert not files.is_taken_over()
    with pytest.raises(OSError, match="Input/output error"):
        files.give_name(str(tmp_path / "name"))


def test_a_folder_inside_that_is_on_another_disk_or_a_link_is_written_to_as_before(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "examples").symlink_to(tmp_path / "elsewhere")
    files.claim(str(tmp_path / "out"))
    files.write_atomically(str(tmp_path / "out" / "examples" / "1.png"), b"1")
    files.write_atomically(str(tmp_path / "elsewhere" / ".." / "out" / "2.png"), b"2")
    assert (tmp_path / "elsewhere" / "1.png").read_bytes() == b"1" and (tmp_path / "out" / "2.png").read_bytes() == b"2"


NAMES = [".starts/1-00000000", ".starts/2-11111111", "checkpoints/000000000064.json", "checkpoints/000000000128.json",
         "checkpoints/000000000128.pt", "checkpoints/000000000128-2.json", "checkpoints/000000000128-2.pt",
         "checkpoints/000000001024.json", ".starts/2/metrics.jsonl"]  # fmt: skip


def test_of_a_bucket_the_newest_start_counts_and_what_came_late_does_not():
    assert starts.checkpoints(NAMES) == [(1, 64), (1, 128), (2, 128)]
    assert starts.checkpoints([*NAMES, ".starts/3-22222222-afresh"]) == []
    assert starts.copies(NAMES) == {"metrics.jsonl": ".starts/2/metrics.jsonl"}
    assert starts.copies([*NAMES, ".starts/3-22222222-afresh"]) == {}


HALF = ["checkpoints/000000000128.json", "checkpoints/000000000128.pt", "checkpoints/000000000128-2.pt"]  # as a kill leaves it


def test_a_start_deletes_nothing_of_a_later_one_and_what_is_there_twice():
    def seen(number, there=NAMES):
        start = starts.Starts(None)
        start.number = number
        return start.surplus(there, lambda names: [name for name in names if "064" in name or "1024" in name])

    assert seen(1) == ["checkpoints/000000000064.json", "checkpoints/000000001024.json"]
    assert seen(2) == [
        f"checkpoints/000000000{number}.{end}" for number, end in ((128, "json"), (128, "pt"), ("064", "json"))
    ] + ["checkpoints/000000001024.json"]
    assert seen(2, HALF) == seen(3, HALF) == [], "the one of the first start is the only whole one"


def test_what_the_last_look_has_overwritten_is_made_good(store, reachable, tmp_path):
    """It has just seen that no start came after it, and then stands still."""
    (tmp_path / "metrics.jsonl").write_text("of the first")
    one, other = (starts.Starts(bucket.Bucket("s3://data/runs/good")) for _ in range(2))
    one.take(starts_anew=False)
    late = publisher.Publisher(str(tmp_path), "s3://data/runs/good", starts=one)
    look = late._upload_changes

    def stands_still(background):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "metrics.jsonl").write_text("of the second")
        other.take(starts_anew=False)
        publisher.Publisher(str(tmp_path / "other"), "s3://data/runs/good", starts=other).finish()
        look(background)

    late._upload_changes = stands_still
    with pytest.raises(files.TakenOver):
        late.finish()
    assert contents(store, "runs/good")["metrics.jsonl"] == b"of the second"


def test_what_is_no_longer_kept_has_no_copy_of_any_start(store, reachable, tmp_path):
    url, env = "s3://data/runs/copies", store_environment()
    for epochs in (1, 2, 3):  # each on an empty disk, so that it sends no weights but its own
        start = Start(tmp_path / f"{epochs}", "train", [*OPTIONS, "--epochs", epochs, "--keep", 1], url, env=env)
        assert start.ends() == 0, start.log()
    names = remote_names(store, "runs/copies/")
    copied = {name.split("/", 2)[2] for name in names if name.startswith(".starts/") and name.count("/") > 1}
    assert {"epoch_3.pth", "metrics.jsonl"} <= copied <= set(names)
    assert not [name for name in names if name.endswith("/metrics.jsonl") and name != ".starts/3/metrics.jsonl"]


def test_two_starts_have_two_numbers_and_a_copy_of_a_bucket_goes_on(store, reachable, tmp_path):
    url, env = "s3://data/runs/copied", store_environment()
    one, other = (starts.Starts(bucket.Bucket("s3://data/runs/numbers")) for _ in range(2))
    one.take(starts_anew=False)
    other.take(starts_anew=False)
    assert (one.number, other.number, one.has_later(bucket.Patience(1)), other.has_later(bucket.Patience(1))) == (
        1,
        2,
        True,
        False,
    )
    for name, epochs in (("first", 2), ("second", 3)):
        assert (start := Start(tmp_path / name, "train", [*OPTIONS, "--epochs", epochs], url, env=env)).ends() == 0, start.log()
    copied = tmp_path / "copied"
    for name, content in contents(store, "runs/copied").items():
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        (copied / name).write_bytes(content)
    start = Start(tmp_path / "third", "train", [*OPTIONS, "--epochs", 4], copied)
    assert start.ends() == 0 and "000000000192-2.pt: epoch 4" in start.log(), start.log()
    assert (
        checkpoint.numbers(str(copied / "checkpoints"))[-1] == 256
        and checkpoint.newest(str(copied / "checkpoints"))[1]["epoch"] == 4
    )
    assert not list((copied / "checkpoints").glob("*-2.*"))
