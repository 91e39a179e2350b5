"""A pack that is read while it arrives from a bucket: the same bits, each byte once, and whole files in the end, killed or not."""

import contextlib
import dataclasses
import errno
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest

from common import progress, report, storage
from common.address import local_folder
from common.alive import heartbeat, patience
from common.errors import TrainingFailed, UserError
from common.files import MIB
from common.storage import bucket, listing, once, ranges
from datasets.crc import crc32
from datasets.packs import arrival, fetcher, packed, process
from datasets.packs import state as shared
from datasets.packs.passing import Passing, choose_passing_shards
from datasets.packs.plan import BadIndex, Content, FetchPlan
from datasets.packs.shards import growing_path
from datasets.packs.state import SignsOfLife, State, lease, passing_folder
from launch.pack import command as pack
from tests.tools.faultproxy import faults
from tests.tools.jobs import (
    PATIENCE,
    ROOT,
    Popen,
    assert_same_bits,
    command,
    environment,
    final_state,
    in_rehearsal,
    lock_holders,
    run_job,
    wait_for,
)
from tests.tools.line import Line
from tests.tools.packs import (  # noqa: F401 (fixtures)
    FORMS,
    WORDS,
    end,
    fetchers,
    is_whole,
    packs,
    publish,
    reached,
    settings,
    size_of,
    with_changes,
    write_tree,
)
from tests.tools.ranks import fork_ranks


def through(line, store):
    return {**store.environment, "AWS_ENDPOINT_URL_S3": line.url}


def bytes_in(folder):
    sizes = []
    for file in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # it was deleted just now
            sizes.append(file.stat().st_size)
    return sum(sizes)


def growing_file(came, files, name):
    """The path of a shard until it is whole."""
    (shard,) = [shard for shard in files.shards if shard["name"] == name]
    return growing_path(str(came), name, shard["sha256"])


@pytest.mark.parametrize("form", in_rehearsal(FORMS, lambda form: form == "raw"))
def test_each_sample_is_read_before_its_shard_is_whole_and_each_byte_comes_once(packs, store, reached, monkeypatch, form):
    folder, url = packs[form]
    with Line(store.port, rate=300_000) as line:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", line.url)
        parts = arrival.begin(url, ["train", "val"], "input_dir", starts_fetcher=True)
        came = Path(local_folder(url, "input_dir"))
        wanted = [packed.load(str(folder), split) for split in ("train", "val")]
        some = np.random.default_rng(0).permutation(len(parts[0]))
        next(parts[0].announced([some[:8]]))
        first = parts[0].read(int(some[0]))
        assert not list(came.glob("*-index.npz")), "it is not whole yet"
        assert first == wanted[0].read(int(some[0]))
        for ours, there in zip(parts, wanted):
            for number in np.random.default_rng(1).permutation(len(ours)):
                assert ours.read(int(number)) == there.read(int(number))
        wait_for(lambda: is_whole(came, folder), None, "the whole pack")
        assert line.down < 1.05 * size_of(folder) + 20_000, (line.down, size_of(folder))  # the headers of some requests
    assert storage.fetch(url) == str(came), "which has nothing to fetch"
    pack.verify(str(came), None, 2)


@pytest.mark.parametrize("form", in_rehearsal(FORMS, lambda form: form == "original"))
def test_what_the_disk_has_no_room_for_comes_again_in_each_epoch(packs, store, reached, monkeypatch, form, capsys):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    folder, url = packs[form]
    parts = arrival.begin(url, ["train", "val"], "input_dir", starts_fetcher=False)
    state = State(parts[0].arrival.path, parts[0].arrival.samples)
    came = Path(local_folder(url, "input_dir"))
    whole = packed.read_index(str(folder / "train-index.npz"), str(came), "train").shards
    passing = sum(shard["size"] for shard in whole[1:])
    room = int(1.1 * whole[0]["size"])
    disk = types.SimpleNamespace(f_bavail=room + listing.SPARE, f_blocks=room // 2, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    goes_on, said = threading.Event(), []
    goes_on.set()
    path = parts[0].arrival.path
    indexes = [packed.local_index(url, split, "input_dir") for split in ("train", "val")]
    life = SignsOfLife(state)
    fetches = fetcher.Fetcher(url, str(came), indexes, path, state, life)
    runs = threading.Thread(target=lambda: said.append(fetches.run(goes_on.is_set)), daemon=True)
    over = threading.Event()
    threading.Thread(target=life.beat, args=(over,), daemon=True).start()
    runs.start()
    wanted, before = [packed.load(str(folder), split) for split in ("train", "val")], 0
    for epoch in range(3):
        order = np.random.default_rng(epoch).permutation(len(parts[0])).reshape(-1, 1)
        for (number,) in parts[0].announced(iter(order)):
            if form == "raw":
                assert (parts[0].content(int(number)).cut(None) == wanted[0].content(int(number)).cut(None)).all()
            else:
                assert parts[0].read(int(number)) == wanted[0].read(int(number))
        wait_for(lambda: bytes_in(Path(passing_folder(path))) <= room // 40, None, "room")
        fetched = int(state.arrived[: shared.ON_DISK].sum())
        if epoch:
            assert 0.8 * passing < fetched - before <= passing, "but for what was still there, and what is no sample"
        before = fetched
    life.last_progress = 0.0
    wait_for(lambda: life.last_progress, None, "a sign of life though nobody wants anything")
    goes_on.clear()
    runs.join(PATIENCE)
    over.set()
    assert f"arriving {url}: 0 of 1 shard, " in capsys.readouterr().out
    assert said == [False] and (came / "train-000000.tar").exists() and not (came / "train-000001.tar").exists()
    again = Passing(path, state)
    assert not again.drop() and not list(Path(passing_folder(path)).glob("*")), "the next start begins anew"


@pytest.mark.parametrize("form", in_rehearsal(FORMS, lambda form: form == "raw"))
def test_what_has_gone_or_changed_on_the_disk_is_not_believed(packs, reached, fetchers, form):
    folder, url = packs[form]
    came = Path(local_folder(url, "input_dir"))
    wanted = packed.load(str(folder), "train")
    cut = Path(growing_file(came, packed.load(str(folder), "val"), "val-000000.tar"))
    cut.parent.mkdir(parents=True)
    content = bytearray((folder / "val-000000.tar").read_bytes())
    content[:100] = bytes(100)  # a kill between a sample and its header
    cut.write_bytes(content)
    for change in (lambda _: None, os.unlink, damage):
        if (came / "train-000001.tar").exists():
            change(came / "train-000001.tar")
        (came / "train-index.npz").unlink(missing_ok=True)
        ours = arrival.begin(url, ["train", "val"], "input_dir", starts_fetcher=True)[0]
        assert not State(ours.arrival.path, ours.arrival.samples).requested_at.any(), "what an earlier start wanted"
        for number in np.flatnonzero(ours.shard == 1):
            assert ours.read(int(number)) == wanted.read(int(number))
        wait_for(lambda: is_whole(came, folder), None, "the whole pack")
        end(fetchers)


@pytest.mark.parametrize("there", ["in part", "fetched"])
def test_bytes_that_are_not_those_of_the_index_are_never_read(packs, store, reached, tmp_path, there):
    """Neither from the bucket nor from what a kill has left on the disk, nor what the store's digest has verified there."""
    shutil.copytree(packs["raw"][0], folder := tmp_path / "wrong")
    ours = packed.load(str(folder), "train")
    place = int(np.flatnonzero(ours.shard == 0)[0])
    with open(ours.shard_path(place), "r+b") as file:
        file.seek(ours.offset[place] + ours.length[place] - 1)
        last = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last[0] ^ 1]))
    url = publish(folder, store, f"arriving-wrong-{there.replace(' ', '-')}")
    half = Path(growing_file(Path(local_folder(url, "input_dir")), ours, "train-000000.tar"))
    half.parent.mkdir(parents=True)
    if there == "fetched":
        storage.fetch(url)
    else:
        shutil.copy(ours.shard_path(place), half)
    part = arrival.begin(url, ["train"], "input_dir", starts_fetcher=True)[0]
    with pytest.raises(
        TrainingFailed, match=r"train-000000\.tar, \d+ bytes from \d+ on, arrived 8 times with others than its index"
    ):
        part.content(place).cut(None)
    assert not State(part.arrival.path, part.arrival.samples).place[place]


def test_the_longest_wanted_come_first_with_their_neighbours(packs, reached):
    url = packs["original"][1]
    part = arrival.begin(url, ["train"], "input_dir", starts_fetcher=False)[0]
    state = State(part.arrival.path, part.arrival.samples)
    index = packed.local_index(url, "train", "input_dir")
    ours = fetcher.Fetcher(url, local_folder(url, "input_dir"), [index], part.arrival.path, state, SignsOfLife(state))
    plan = FetchPlan(ours._samples, state)
    order = np.lexsort((part.offset, part.shard))
    now = time.monotonic_ns()
    for since, places in ((now + 2, [0, 1]), (now + 1, [20]), (now, [40])):
        state.requested_at[order[places]] = since
    assert [(unit.start, unit.stop) for unit in plan.take_wanted(True)] == [(40, 41), (20, 21), (0, 2)]
    assert not list(plan.take_wanted(True)), "they are asked for"
    plan = FetchPlan(ours._samples, state)
    state.requested_at[:] = 0
    state.requested_at[order[[3, 30, 50]]] = [shared.WAITING, time.monotonic_ns(), time.monotonic_ns() - 601 * 10**9]
    state.place[order[20:]] = shared.PASSING
    ours._passing.count(0, 1)
    assert not ours._passing.has_room()
    assert [unit.start for unit in plan.take_wanted(False)] == [3], "there is no room for more that passes through"
    ours._passing.most_bytes = 1
    assert ours._passing.has_room()
    assert [unit.start for unit in plan.take_wanted(True)] == [30], "and what was wanted long ago is no longer"


def damage(path):
    """As a file of the right size and time, of which nothing is recorded."""
    status = path.stat()
    path.write_bytes(bytes(status.st_size))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    for notes in ("arrived.json", "index.jsonl"):
        (path.parent / ".fetching" / notes).unlink()


WAYS = [("original", 1, 2), *(pytest.param(form, ranks, workers, marks=pytest.mark.rehearsal) for form in FORMS
                              for ranks in (1, 2, 3) for workers in (0, 2) if (form, ranks, workers) != ("original", 1, 2))]  # fmt: skip


@pytest.mark.parametrize(("form", "ranks", "workers"), WAYS)
def test_the_bits_are_those_of_the_folder(packs, store, tmp_path, form, ranks, workers):
    folder, url = packs[form]
    states = []
    for place, source in (("folder", [folder]), ("arriving", [url, "--fetch_first", "false"])):
        (tmp_path / place).mkdir()
        run_job("train_imagenet", tmp_path / place, *WORDS, "--workers", workers, "--nproc_per_node", ranks, "--data_url", *source,
                env=store.environment)  # fmt: skip
        states.append(final_state(tmp_path / place))
    assert_same_bits(*states)
    rows = [json.loads(line) for line in (tmp_path / "arriving/out/speed.jsonl").read_text().splitlines()]
    came = sum(sum(row.get(name, 0) for name in shared.ARRIVED_COLUMNS) for row in rows) * MIB
    shards = sum(path.stat().st_size for path in folder.glob("*.tar"))
    assert 0.5 * shards < came < 1.01 * shards, "all of them, unless the job has ended before"
    pages = [report.of_one(report.RunFiles.read(str(tmp_path / place / "out"))) for place in ("arriving", "folder")]
    assert ["Where the data came from" in page for page in pages] == [True, False]


def test_a_second_start_asks_for_nothing_that_is_there(packs, store, tmp_path):
    folder, url = packs["original"]
    words = [*WORDS, "--workers", 0, "--data_url", url, "--fetch_first", "false", "--epochs", 1]
    came = tmp_path / local_folder(url, "input_dir")
    for most in (1.05, 0.01):
        with Line(store.port) as line:
            (tmp_path / "out").exists() and (tmp_path / "out").rename(tmp_path / "before")
            done = run_job("train_imagenet", tmp_path, *words, env=through(line, store))
        assert line.down < most * size_of(folder) + 60_000, (line.down, done.stdout)
        wait_for(lambda: is_whole(came, folder), None, "the whole pack")


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), pytest.param(2, 1, marks=pytest.mark.rehearsal)])
def test_a_job_that_waits_for_a_batch_saves_and_ends_when_it_is_told_to(store, tmp_path, ranks, workers):
    pack.pack(str(write_tree(tmp_path / "photographs")), str(folder := tmp_path / "pack"), settings(shard_mb=0.01))
    url = publish(folder, store, f"arriving-told-{ranks}")
    samples = sum(len(packed.load(str(folder), split)) for split in ("train", "val"))
    words = [*WORDS, "--workers", workers, "--nproc_per_node", ranks, "--data_url", url, "--output_dir", tmp_path / "out"]
    with Line(store.port, rate=30_000) as line, open(tmp_path / "log", "w") as log:
        process = Popen(
            command("train_imagenet", *words), cwd=tmp_path, env=environment(**through(line, store)), stdout=log, stderr=log
        )
        wait_for(lambda: line.down > 0.6 * size_of(folder), process, "half of the pack")
        line.open.clear()
        (path,) = (tmp_path / local_folder(url, "input_dir") / ".fetching").glob("*.state")
        state = State(str(path), samples)
        wait_for(lambda: ((state.requested_at == 1) & (state.place == 0)).any(), process, "a wait for a sample")
        process.send_signal(signal.SIGTERM)
        if ranks > 1:  # they stop after a step that all have done
            wait_for(lambda: "all ranks stop at the next common step" in (tmp_path / "log").read_text(), process, "its line")
            line.open.set()
        assert process.wait(PATIENCE) == 143
    assert "stopped by SIGTERM; saved after step" in (tmp_path / "log").read_text()


@pytest.mark.rehearsal
def test_twenty_kills_cost_no_bits_and_what_is_there_is_not_fetched_again(store, tmp_path):
    pack.pack(str(write_tree(tmp_path / "photographs", count=2000)), str(folder := tmp_path / "pack"), settings(shard_mb=0.05))
    url = publish(folder, store, "arriving-killed")
    words = [*WORDS, "--batch_size", 64, "--workers", 2, "--data_url"]
    (tmp_path / "folder").mkdir()
    run_job("train_imagenet", tmp_path / "folder", *words, folder)
    words += [url, "--fetch_first", "false"]
    arrived, draw, early = [0], random.Random(0), 0
    with Line(store.port, rate=300_000) as line:
        for _ in range(20):
            start = [*command("train_imagenet", *words), "--output_dir", tmp_path / "out"]
            process = subprocess.Popen(
                list(map(str, start)), cwd=tmp_path, env=environment(**through(line, store)), stdout=subprocess.DEVNULL
            )
            until = line.down + draw.uniform(0.03, 0.06) * size_of(folder)  # some is under way, which a kill loses
            wait_for(lambda until=until: line.down > until or process.poll() is not None, None, "a moment")  # noqa: B023
            process.kill()
            process.wait()
            early += process.returncode == -signal.SIGKILL
            time.sleep(1)  # the fetcher looks twice a second whether the job is there, and the line may still carry something
            arrived.append(bytes_there(tmp_path / local_folder(url, "input_dir"), folder))
        before, line.rate = line.down, None
        run_job("train_imagenet", tmp_path, *words, env=through(line, store))
    missing = size_of(folder) - arrived[-1]
    assert early == 20 and arrived == sorted(arrived) and 0.2 * size_of(folder) < arrived[-1] < size_of(folder), arrived
    assert line.down - before < 1.05 * missing + 150_000, (line.down - before, missing)  # indexes and the list of the bucket
    assert_same_bits(final_state(tmp_path), final_state(tmp_path / "folder"))


def bytes_there(came, pack):
    """Of the samples that have come, whether their shards are whole or not."""
    found = 0
    for split in ("train", "val"):
        files = packed.read_index(str(pack / f"{split}-index.npz"), str(came), split)
        for number in range(len(files)):
            place = Path(files.shard_path(number))
            place = place if place.exists() else Path(growing_file(came, files, place.name))
            if place.exists():
                with open(place, "rb") as file:
                    content = os.pread(file.fileno(), files.length[number], files.offset[number])
                found += len(content) * (crc32(content) == files.checksum[number])
    return found


def test_what_the_process_imports(tmp_path):
    code = "import sys, datasets.packs.process; print([name for name in ('torch', 'boto3', 'obstore', 'PIL') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout == "[]\n"


def test_where_memory_cannot_be_shared_the_pack_is_fetched_first(packs, reached, monkeypatch, capsys):
    def make(*_):
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(State, "make", make)
    folder, url = packs["original"]
    args = types.SimpleNamespace(data_url=url, input_dir="input_dir", data_backend="packed", fetch_first=False, evaluate=False)
    args.world, args.min_nodes = types.SimpleNamespace(local_rank=0), None
    unfinished = Path(growing_path(local_folder(url, "input_dir"), "train-000000.tar", "its SHA-256"))
    unfinished.parent.mkdir(parents=True)
    unfinished.write_bytes(b"of an earlier start")
    train, val = arrival.find(args)
    assert not unfinished.exists()
    assert "warning: input_dir has no memory that processes can share (" in capsys.readouterr().out
    assert not train.arrival and not val.arrival and is_whole(Path(local_folder(url, "input_dir")), folder)


@pytest.mark.rehearsal
def test_ranks_that_read_two_packs_are_refused(packs, tmp_path):
    for rank, form in enumerate(FORMS):
        (tmp_path / f"pack{rank}").symlink_to(packs[form][0])
    job = str(ROOT / "jobs" / "train_imagenet.py")
    own = "import os, sys; sys.argv += ['--data_url', 'pack' + os.environ['RANK']]; "
    own += f"exec(open({job!r}).read(), dict(__name__='__main__', __file__={job!r}))"
    (tmp_path / "job.py").write_text(own)
    done = fork_ranks(tmp_path / "job.py", tmp_path, *WORDS, "--workers", 0)
    assert done.returncode == 2 and "the pack in --data_url differs: " in done.stderr


def test_the_faster_reader_rests_after_a_failure_and_is_tried_again(store, reached, monkeypatch):
    store.client().create_bucket(Bucket="ranges")
    store.client().put_object(Bucket="ranges", Key="thing", Body=b"0123456789")
    place = bucket.Bucket("s3://ranges")
    (thing,) = place.items("thing")
    both, now, asked = ranges.Ranges(place, patience.Patience()), [1000.0], []
    whole = both._fast_reader.read_part

    def part(*given):
        asked.append(now[0])
        return len(asked) > 2 and whole(*given)

    monkeypatch.setattr(both._fast_reader, "read_part", part)
    monkeypatch.setattr(ranges, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    for seconds in (1000, 1001, 1029, 1031, 1090, 1092, 1093):  # it fails at first, and again after half a minute
        now[0] = float(seconds)
        assert both.read(thing, 3, 4) == b"3456"
    assert asked == [1000, 1031, 1092, 1093]


def test_an_error_of_the_disk_is_none_of_the_reader(store, reached):
    store.client().create_bucket(Bucket="full")
    store.client().put_object(Bucket="full", Key="thing", Body=b"0123456789")
    place = bucket.Bucket("s3://full")
    (thing,) = place.items("thing")
    both = ranges.Ranges(place, patience.Patience())

    def fill(_offset, _piece):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        both.stream(thing, 3, 4, fill)
    assert both.read(thing, 3, 4) == b"3456" and both.stream(thing, 3, 4, lambda *_: None)  # and it goes on being used


def test_what_the_faster_reader_brings_ends_a_row_of_failures(store, reached):
    store.client().create_bucket(Bucket="row")
    store.client().put_object(Bucket="row", Key="thing", Body=b"0123456789")
    place = bucket.Bucket("s3://row")
    (thing,) = place.items("thing")
    both = ranges.Ranges(place, patience.Patience(60))
    assert both._fast_reader and both.patience.failed("s3://row", time.monotonic() - 61)
    assert both.read(thing, 3, 4) == b"3456" and not both.patience.failed("s3://row", time.monotonic())


def test_batches_are_wanted_before_they_are_loaded(waiting, tmp_path):
    State.make(path := str(tmp_path / "larger"), 4000)
    reader, state = dataclasses.replace(waiting[0], path=path, samples=4000), State(path, 4000)
    number = np.arange(4000)[::-1]  # of a sample in the pack
    batches = np.random.default_rng(0).permutation(4000).reshape(40, 100)
    for place, batch in enumerate(reader.announced(iter(batches), number)):
        assert (batch == batches[place]).all()
        until = min(40, place + 11)  # 1,024 samples ahead
        assert set(np.flatnonzero(state.requested_at)) == set(number[batches[:until].ravel()].tolist())
        assert state.bell >= state.requested_at.max(), "the process that fetches is woken after each"
    first, later = (state.requested_at[number[batches[place]]] for place in (0, 9))
    assert place == 39 and first.max() < later.min()
    few = [np.array([sample]) for sample in range(8)]
    assert next(reader.announced(iter(few), number)) == [0] and state.requested_at[number[4]], "of small ones at least four"


def holder(part):
    """The process that fetches."""
    wait_for(lambda: State(part.arrival.path, part.arrival.samples).pulse > part.arrival.since, None, "a sign of life")
    (pid,) = lock_holders(f"{lease(part.arrival.path)}.lock")
    return pid


def test_another_job_of_the_node_goes_on_where_a_fetcher_was_killed(packs, store, reached, monkeypatch, fetchers):
    folder, url = packs["original"]
    with Line(store.port, rate=100_000) as line:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", line.url)
        parts = [arrival.begin(url, ["train", "val"], "input_dir", starts_fetcher=True)[0] for _ in range(2)]
        first = holder(parts[0])
        os.kill(first, signal.SIGKILL)
        wanted = packed.load(str(folder), "train")
        for part in parts:
            for number in range(len(part)):
                assert part.read(number) == wanted.read(number)
        wait_for(lambda: is_whole(Path(local_folder(url, "input_dir")), folder), None, "the whole pack")
    assert sorted(process.wait(PATIENCE) for process in fetchers if process.pid == first) == [-signal.SIGKILL]


def test_another_start_costs_a_job_nothing_whose_pack_has_come(packs, reached, fetchers, capsys):
    folder, url = packs["original"]
    (part,) = arrival.begin(url, ["train"], "input_dir", starts_fetcher=True)
    state = State(part.arrival.path, part.arrival.samples)
    wait_for(lambda: state.is_whole, None, "the whole split")
    said, line = [], f"arrived: {len(part.shards)} shards of {url}: .*; none were there; all verified\n"
    wait_for(lambda: said.append(capsys.readouterr().out) or re.search(line, "".join(said)), fetchers[0], "its line")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):  # they are meant for the job
        fetchers[0].send_signal(number)
    arrival.begin(url, ["train"], "input_dir", starts_fetcher=True)
    assert state.place.all(), "nothing that has come is forgotten"
    assert holder(part) == fetchers[0].pid and fetchers[0].poll() is None
    fetchers[0].kill()
    wait_for(lambda: lock_holders(f"{lease(part.arrival.path)}.lock") == [fetchers[1].pid], None, "another holder")
    assert state.place.all() and state.is_whole
    assert [part.read(number) for number in range(3)] == [packed.load(str(folder), "train").read(number) for number in range(3)]


def test_an_index_that_was_replaced_since_is_not_that_of_this_run(packs, reached):
    url = packs["original"][1]
    (part,) = arrival.begin(url, ["train"], "input_dir", starts_fetcher=False)
    state, index = State(part.arrival.path, part.arrival.samples), Path(packed.local_index(url, "train", "input_dir"))
    index.write_bytes(index.read_bytes() + b" ")
    words = [str(os.getpid()), "this node", url, part.arrival.folder]
    child = arrival.Child(process.__name__, *words)
    child.write_line(json.dumps([part.arrival.path, part.arrival.samples, True, str(index)]))
    wait_for(lambda: state.failure(0), None, "its end")
    assert str(state.failure(0)) == f"{url} has another index since this run began: start again"
    assert not state.failure(0, "another node") and state.failure(0, "this node") and not state.place.any()


def test_a_start_that_finds_no_pack_leaves_no_process(packs, store, reached, fetchers):
    url = f"{packs['original'][1]}-that-is-not-there"
    with pytest.raises(UserError):
        arrival.begin(url, ["train"], "input_dir", starts_fetcher=True)
    assert [process.wait(PATIENCE) for process in fetchers] == [0]


def test_two_versions_of_a_pack_do_not_mix_in_one_folder(packs, store, reached, fetchers):
    url = publish(packs["original"][0], store, "arriving-twice")
    (first,) = arrival.begin(url, ["train"], "input_dir", starts_fetcher=True)
    wait_for(lambda: State(first.arrival.path, first.arrival.samples).is_whole, None, "all of the first")
    for path in packs["raw"][0].glob("[tv]*"):
        store.client().upload_file(str(path), "arriving-twice", f"pack/{path.name}")
    (second,) = arrival.begin(url, ["train"], "input_dir", starts_fetcher=True)
    with pytest.raises(UserError, match=f"a job on this node reads another version of {url}: start when it has ended, or give"):
        second.read(0)
    end(fetchers)
    (third,) = arrival.begin(url, ["train"], "input_dir", starts_fetcher=True)
    assert third.read(0) == packed.load(str(packs["raw"][0]), "train").read(0)


def test_an_evaluation_needs_no_training_pictures(packs, store, reached, tmp_path):
    shutil.copytree(packs["original"][0], tmp_path / "val", ignore=shutil.ignore_patterns("train-*"))
    args = types.SimpleNamespace(data_url=publish(tmp_path / "val", store, "arriving-val"), input_dir="input_dir", evaluate=True,
                                 data_backend="packed", fetch_first=False, min_nodes=None)  # fmt: skip
    args.world = types.SimpleNamespace(local_rank=0)
    (val,) = arrival.find(args)
    assert val.read(3) == packed.load(str(packs["original"][0]), "val").read(3)
    args.evaluate = False
    with pytest.raises(UserError, match="arriving-val/pack has no finished pack of train"):
        arrival.find(args)
    args.evaluate = True
    store.client().copy_object(
        Bucket="arriving-val", Key="other/train-index.npz", CopySource="arriving-original/pack/train-index.npz"
    )
    args.data_url = "s3://arriving-val/other"
    with pytest.raises(UserError, match="arriving-val/other has no finished pack of val"):
        arrival.find(args)


def test_any_rank_of_an_elastic_job_may_be_the_one_that_is_lost(monkeypatch):
    starts = []
    monkeypatch.setattr(arrival, "begin", lambda *given, **_: starts.append(given[3]))
    args = types.SimpleNamespace(
        data_url="s3://a/b", input_dir="input_dir", data_backend="packed", fetch_first=False, evaluate=False
    )
    for rank, args.min_nodes in ((0, None), (1, None), (0, 1), (1, 1)):
        args.world = types.SimpleNamespace(local_rank=rank)
        arrival.find(args)
    assert starts == [True, False, True, True], "which start a process that fetches or stands by"


def test_a_process_that_waits_kills_a_frozen_one_alone(packs, reached, monkeypatch, fetchers):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")  # nobody answers
    url = packs["original"][1]
    monkeypatch.setattr(packed, "local_index", lambda _, split, __: str(packs["original"][0] / f"{split}-index.npz"))
    part = arrival.begin(url, ["train"], "input_dir", starts_fetcher=True)[0]
    state = State(part.arrival.path, part.arrival.samples)
    holder(part)
    killed, kill = [], os.kill
    monkeypatch.setattr(os, "kill", lambda *given: killed.append(given) or kill(*given))
    process._FrozenHolder(state, url).kill_if_frozen()
    monkeypatch.setattr(process, "FROZEN_SECONDS", -1)
    process._FrozenHolder(state, "s3://another/pack").kill_if_frozen()
    assert not killed
    process._FrozenHolder(state, url).kill_if_frozen()
    assert killed == [(fetchers[0].pid, signal.SIGKILL)] and fetchers[0].wait(PATIENCE) == -signal.SIGKILL


def test_an_object_that_changes_in_mid_run_ends_it_and_nothing_of_it_is_read(
    packs, store, reached, tmp_path, monkeypatch, fetchers
):
    shutil.copytree(packs["raw"][0], folder := tmp_path / "before")
    url = publish(folder, store, "arriving-changed")
    other, changes = (folder / "train-000000.tar").read_bytes()[::-1], []

    def plan(request):
        if request.is_object and "train-000000.tar" in request.path and not changes:
            changes.append(store.client().put_object(Bucket="arriving-changed", Key="pack/train-000000.tar", Body=other))

    with faults(store, plan, monkeypatch):
        part = arrival.begin(url, ["train"], "input_dir", starts_fetcher=True)[0]
        number = int(np.flatnonzero(part.shard == 0)[0])
        with pytest.raises(UserError, match=r"arriving-changed/pack/train-000000\.tar has changed since this run began"):
            part.content(number).cut(None)
        assert fetchers[0].wait(PATIENCE) == 0
    assert not list(Path(part.arrival.folder).glob("train-000000.tar"))
    unfinished = Path(part.arrival.growing_path(part.shards[0]))
    assert not unfinished.exists() or not set(unfinished.read_bytes()) - {0}, "nothing of it is on the disk"


@pytest.fixture
def waiting(tmp_path):
    """(what a reader knows of a pack of which nothing comes, its state)"""
    State.make(path := str(tmp_path / "state"), 3)
    return arrival.Arrival("s3://none/pack", str(tmp_path), path, 3, time.monotonic()), State(path, 3)


def test_a_sample_that_somebody_has_deleted_is_not_waited_for_for_ever(waiting, monkeypatch):
    reader, state = waiting
    monkeypatch.setattr(arrival, "NO_FILE_SECONDS", 0.01)
    state.place[2] = shared.IN_ITS_FILE
    with pytest.raises(TrainingFailed, match=r"samples in \S+/state\.passing are gone: start again to go on"):
        reader.wait(2)


def test_what_ends_the_fetcher_ends_the_readers_with_its_line(waiting):
    reader, state = waiting
    state.set_failure(UserError("s3://none/pack/train-000000.tar has changed since this run began: start again"))
    with pytest.raises(UserError, match="has changed since this run began"):
        reader.wait(1)
    assert state.requested_at.tolist() == [0, 1, 0]
    state.set_failure(TrainingFailed("no good answer"))
    with pytest.raises(TrainingFailed, match="no good answer"):
        reader.wait(1)
    later = dataclasses.replace(reader, since=time.monotonic())  # the next start: that was the last one's
    state.place[1] = 1
    later.wait(1)


def test_a_loader_process_whose_rank_was_killed_waits_no_longer(waiting, tmp_path):
    def load():
        with pytest.raises(TrainingFailed, match=r"the rank of loader process \d+ has ended"):
            waiting[0].wait(0)
        (tmp_path / "said").touch()

    def train():
        multiprocessing.get_context("fork").Process(target=load).start()
        os._exit(0)

    multiprocessing.get_context("fork").Process(target=train).start()
    wait_for((tmp_path / "said").exists, None, "the end of the loader process")


def test_a_fetcher_that_is_gone_or_frozen_is_named(waiting, monkeypatch):
    reader, state = waiting
    monkeypatch.setattr(arrival, "START_SECONDS", -1)
    with pytest.raises(TrainingFailed, match="the process that fetches s3://none/pack has ended: start again to go on"):
        reader.wait(0)
    over = threading.Event()
    over.set()
    SignsOfLife(state).beat(over)
    assert state.pulse > reader.since
    monkeypatch.setattr(arrival, "LOST_SECONDS", 1)
    with once.when_free(lease(reader.path), lambda: True) as held:
        assert held
        with pytest.raises(
            TrainingFailed, match=r"fetches s3://none/pack has shown no sign of life for \d+ s: start again to go"
        ):
            reader.wait(0)


def test_a_fetcher_that_gets_nothing_for_very_long_shows_no_sign_of_life(waiting, monkeypatch):
    _, state = waiting
    monkeypatch.setattr(shared, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(shared, "STUCK_SECONDS", 0.2)
    monkeypatch.setenv(patience.VARIABLE, "0.3")
    began, over = time.monotonic(), threading.Event()
    life = SignsOfLife(state)
    threading.Thread(target=life.beat, args=(over,), daemon=True).start()
    wait_for(lambda: 0 < state.pulse < time.monotonic() - 0.5, None, "the end of the signs")
    assert state.pulse > began + 0.4
    life.note_progress()  # something has come after all
    wait_for(lambda: time.monotonic() - state.pulse < 0.5, None, "a sign of life")
    over.set()


def fetched_by_a_child(reader, monkeypatch):
    """Its exit code."""
    monkeypatch.setattr(process, "state_path", lambda *_: reader.path)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([reader.path, 3, True])))
    if not (child := os.fork()):
        try:
            process.main(str(os.getppid()), "here", reader.url, reader.folder)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_defect_that_ends_the_fetcher_is_told_to_its_readers(waiting, monkeypatch):
    reader, state = waiting

    def fetch(*_):
        raise ValueError("a defect")

    monkeypatch.setattr(process, "_fetch", fetch)
    assert fetched_by_a_child(reader, monkeypatch) == 0
    assert str(state.failure(reader.since)) == f"cannot fetch {reader.url} to {reader.folder}: ValueError('a defect')"


def test_a_fetcher_that_waits_for_long_looks_whether_the_other_one_is_frozen(waiting, monkeypatch):
    monkeypatch.setattr(process, "FROZEN_SECONDS", -1)
    monkeypatch.setattr(process._FrozenHolder, "kill_if_frozen", lambda _: os._exit(17))
    with once.when_free(lease(waiting[0].path), lambda: True) as held:
        assert held and fetched_by_a_child(waiting[0], monkeypatch) == 17


def test_what_passed_through_for_another_boot_is_deleted_after_a_day(packs, reached):
    url = packs["original"][1]
    (part,) = arrival.begin(url, ["train"], "input_dir", starts_fetcher=False)
    paths = {name: str(Path(part.arrival.path).with_name(f"{name}.state")) for name in ("old", "held", "new")}
    for name, path in paths.items():
        State.make(path, 1)
        os.utime(path, (time.time() - 3600 * (23 if name == "new" else 25),) * 2)
        os.mkdir(passing_folder(path))
    index, state = packed.local_index(url, "train", "input_dir"), State(part.arrival.path, part.arrival.samples)
    with once.when_free(lease(paths["held"]), lambda: True):
        fetcher.Fetcher(url, part.arrival.folder, [index], part.arrival.path, state, SignsOfLife(state)).run(lambda: False)
    assert [name for name, path in paths.items() if os.path.exists(passing_folder(path))] == ["held", "new"]


def test_a_pack_whose_samples_overlap_has_to_be_published_again(packs, store, reached, tmp_path):
    def one_on_the_other(arrays):
        first, second = np.lexsort((arrays["offset"], arrays["shard"]))[:2]
        return {"offset": np.where(np.arange(len(arrays["offset"])) == second, arrays["offset"][first], arrays["offset"])}

    shutil.copytree(packs["original"][0], folder := tmp_path / "overlapping")
    with_changes(folder / "train-index.npz", arrays=one_on_the_other)
    url = publish(folder, store, "arriving-overlapping")
    (part,) = arrival.begin(url, ["train"], "input_dir", starts_fetcher=False)
    index, state = packed.local_index(url, "train", "input_dir"), State(part.arrival.path, part.arrival.samples)
    with pytest.raises(UserError, match=f"{url}: in its indexes samples overlap, or a shard has none: publish the pack again"):
        fetcher.Fetcher(url, part.arrival.folder, [index], part.arrival.path, state, SignsOfLife(state))


def test_what_the_fetcher_waits_for_is_no_wait_of_its_rank(packs, reached, monkeypatch, fetchers, tmp_path, capsys):
    """Which may hang meanwhile, in a step whose samples are there, and is ended after the time limit of a step."""
    pulse = heartbeat.create(str(tmp_path / "worker"))
    monkeypatch.setenv(heartbeat.FILES, str(tmp_path / "worker"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")  # nobody answers
    monkeypatch.setattr(packed, "local_index", lambda _, split, __: str(packs["original"][0] / f"{split}-index.npz"))
    arrival.begin(packs["original"][1], ["train"], "input_dir", starts_fetcher=True)
    said = []
    wait_for(lambda: said.append(capsys.readouterr().out) or "; trying again for " in "".join(said), fetchers[0], "its wait")
    assert pulse.store.text() == ""


def test_soon_after_a_boot_what_is_wanted_is_asked_for_and_what_was_read_is_dropped(waiting, monkeypatch):
    reader, state = waiting
    monkeypatch.setattr(time, "monotonic_ns", lambda: 60 * 10**9)  # a machine that has run for a minute
    reader.request(np.array([0, 2]))
    assert state.requested_at.tolist() == [60 * 10**9, 0, 60 * 10**9] and state.bell == 60 * 10**9
    passing = Passing(reader.path, state)
    for number in (0, 1):
        passing.write(number, b"a picture")
        passing.count(number, 9)
    assert passing.drop() == [1], "the other is wanted"


def test_an_error_that_no_reader_will_find_is_said(waiting, monkeypatch, capfd):
    reader, state = waiting

    def fetch(*_):
        state.place[:] = shared.IN_ITS_SHARD
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(process, "_fetch", fetch)
    assert fetched_by_a_child(reader, monkeypatch) == 0
    assert (
        f"warning: cannot fetch {reader.url} to {reader.folder}: No space left on device; all samples are there"
        in capfd.readouterr().out
    )


def test_who_takes_over_is_not_killed_by_another_that_stands_by(waiting, monkeypatch):
    """It has found the one before frozen, and then looks who holds the lease."""
    _, state = waiting
    killed = []
    monkeypatch.setattr(process, "FROZEN_SECONDS", -1)
    monkeypatch.setattr(process, "_kill_fetcher", lambda pid, _: killed.append(pid))
    holders = iter([7, 8])
    monkeypatch.setattr(State, "holder", property(lambda _: next(holders)))
    process._FrozenHolder(state, "s3://none/pack").kill_if_frozen()
    assert killed == [7]


def test_indexes_that_describe_a_shard_in_two_ways_are_refused(packs):
    indexes = [(packs["original"][0] / f"{split}-index.npz").read_bytes() for split in ("train", "val")]
    with np.load(io.BytesIO(indexes[1])) as stored:
        arrays = dict(stored)
    about = json.loads(bytes(arrays["about"]))
    with np.load(io.BytesIO(indexes[0])) as stored:
        about["shards"][0] = {**json.loads(bytes(stored["about"]))["shards"][0], "size": 1}
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez(changed := io.BytesIO(), **arrays)
    with pytest.raises(BadIndex, match=r"train-\d+\.tar has two descriptions"):
        Content.of([indexes[0], changed.getvalue()])


def test_what_another_pack_has_left_makes_room_before_it_is_measured(packs, reached, monkeypatch):
    url = packs["original"][1]
    (part,) = arrival.begin(url, ["train"], "input_dir", starts_fetcher=False)
    others = Path(growing_path(part.arrival.folder, "train-000000.tar", "another pack's"))
    others.write_bytes(b"much")
    measured = []
    disk = os.statvfs

    def statvfs(folder):
        measured.append(others.exists())
        return disk(folder)

    monkeypatch.setattr(os, "statvfs", statvfs)
    state = State(part.arrival.path, part.arrival.samples)
    index = packed.local_index(url, "train", "input_dir")
    fetcher.Fetcher(url, part.arrival.folder, [index], part.arrival.path, state, SignsOfLife(state)).run(lambda: False)
    assert measured == [False]


def test_who_has_waited_for_a_sample_of_a_shard_wants_it_no_longer(waiting):
    reader, state = waiting
    state.place[1] = shared.IN_ITS_SHARD
    state.requested_at[1] = shared.WAITING
    assert reader.wait(1) is None and not state.requested_at.any()


GIB = 1 << 30


@pytest.mark.parametrize(
    "free, missing, keeps, expected",
    [
        (1 << 20, [], True, (0, [])),  # all is there, on a disk that is nearly full
        (1 << 20, [], False, (0, [])),
        (1 << 20, [0], True, (0, [False])),  # all bytes of its file are there, and not yet verified
        (GIB, [GIB, GIB], False, (GIB // 2 - listing.SPARE // 2, [True, True])),  # of a large disk with little room
        (10 * GIB, [6 * GIB, 6 * GIB], True, (GIB, [True, True])),  # 1/20 of the disk is for others
        (100 * GIB, [60 * GIB, 60 * GIB], True, (GIB, [True, True])),
        (165 * GIB, [60 * GIB, 60 * GIB, 60 * GIB], True, (GIB, [False, True, True])),
    ],
)
def test_what_passes_through_is_chosen_by_the_room_of_the_disk(monkeypatch, free, missing, keeps, expected):
    disk = types.SimpleNamespace(f_bavail=free, f_blocks=2000 * GIB, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    shards = [Shard(size) for size in missing]
    most_bytes = choose_passing_shards(shards, "folder", 200 * GIB, keeps)
    assert (most_bytes, [shard.is_passing for shard in shards]) == expected


class Shard:
    def __init__(self, size):
        self.size = size
        self.is_passing = False

    def bytes_to_come(self):
        return self.size


def test_the_half_of_a_shard_for_which_there_is_no_room_any_more_is_deleted(packs, reached):
    url = packs["original"][1]
    (part,) = arrival.begin(url, ["train"], "input_dir", starts_fetcher=False)
    state = State(part.arrival.path, part.arrival.samples)
    index = packed.local_index(url, "train", "input_dir")
    fetches = fetcher.Fetcher(url, part.arrival.folder, [index], part.arrival.path, state, SignsOfLife(state))
    half = Path(fetches.shards[0].growing_path)
    half.write_bytes(b"half of it")
    fetches.run(lambda: False, keeps_shards=False)
    assert not half.exists()
