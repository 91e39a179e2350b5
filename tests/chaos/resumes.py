"""Interrupt a job where a kill at a random moment seldom falls, let the next start go on, and compare the bits.

    python -m tests.chaos.resumes [--only WORDS]        (make chaos FAULT=resumes)

Three processes unless a row says otherwise. A row is the same only if a start has gone on from a checkpoint of the interrupted run and
has ended with the bits of a run that nobody disturbed.
"""

import argparse
import filecmp
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.chaos.victims import digest, unfinished
from tests.tools.jobs import PATIENCE, ROOT, final_state, wait_for
from tests.tools.objectstore import ObjectStore, free_port
from tests.tools.ranks import children, workers_of
from tests.tools.restarts import SYNTHETIC, assert_goes_on_to, finish, has_saved, start, words_of
from tests.tools.stores import copied

CIFAR = [*SYNTHETIC, "--max_samples", 192, "--batch_size", 8, "--width", 4, "--epochs", 6]
DDP = [ROOT / "jobs" / "train_ddp.py", *CIFAR]
PHOTOS = [ROOT / "jobs" / "train_imagenet.py", *SYNTHETIC, "--max_samples", 112, "--arch", "shufflenet_v2_x0_5", "--image_size", 32,
          "--workers", 0, "--training_only", "true", "--epochs", 3]  # fmt: skip
EXACT = [ROOT / "jobs" / "train_ddp_exact.py", *CIFAR, "--shares", 4, "--min_nodes", 1]

# Where a rank of a copy of train_ddp.py kills itself: {place: (the line before which it does, which it may lack)}.
BEFORE = {
    "evaluation": "        scores = evaluate(",
    "end of an epoch": "        run.end_epoch(",
    "end": "\n\ndef learning_rate(",
}
DIE = """{indent}if os.environ.get("DIE") == f"{place}, rank {{torch.distributed.get_rank()}}, step {{run.total_steps}}":
{indent}    os.kill(os.getpid(), 9)
"""
STEPS = 8  # in an epoch of DDP with three ranks


def copy_that_dies(folder):
    """The job with places at which a rank kills itself, as DIE says."""
    text = DDP[0].read_text()
    for place, line in BEFORE.items():
        assert text.count(line) == 1, line
        indent = "    " if place == "end" else "        "
        die = DIE.format(indent=indent, place=place)
        text = text.replace(line, f"\n{die}{line}" if place == "end" else f"{die}{line}")
    folder.mkdir(exist_ok=True)
    path = folder / "train_ddp.py"
    path.write_text(text)
    return [path, *CIFAR]


def whole(folder, words, **variables):
    finish(folder / "whole", words, **variables)
    return folder / "whole"


def dies_at(place, rank, step):
    """A rank is killed there; the others end, and a start goes on."""

    def row(folder):
        words = words_of(copy_that_dies(folder), "3")
        undisturbed, broken = whole(folder, words), folder / "broken"
        process = start(broken, words, DIE=f"{place}, rank {rank}, step {step}")
        code = process.wait(PATIENCE)
        assert code and f"rank {rank}" in (broken / "log").read_text(), (broken / "log").read_text()
        assert_goes_on_to(broken, words, undisturbed)
        return f"exit code {code}"

    return row


def in_a_save(folder):
    """Rank 0 is killed while it writes a checkpoint, after another one. A wide network takes some milliseconds to be written."""
    words = words_of([*DDP, "--epochs", 2, "--width", 32], "3")
    undisturbed, broken = whole(folder, words), folder / "broken"
    process = start(broken, words)
    wait_for(has_saved(broken), process, "a checkpoint")
    writer = workers_of(children(process))[0]
    while not unfinished(broken / "out"):
        assert process.poll() is None, "the job ended before an unfinished file was seen"
    os.kill(writer, signal.SIGKILL)
    code = process.wait(PATIENCE)
    assert_goes_on_to(broken, words, undisturbed)
    return f"exit code {code}"


def portions(count):
    """train_imagenet.py on two ranks, each of which computes its part of the total batch in so many portions."""

    def row(folder):
        words = words_of([*PHOTOS, "--batch_size", 2, "--total_batch", 4 * count], "2")
        undisturbed, broken = whole(folder, words), folder / "broken"
        process = start(broken, words)
        wait_for(has_saved(broken, 2), process, "two checkpoints")
        process.kill()
        process.wait()
        assert_goes_on_to(broken, words, undisturbed)
        return "killed"

    return row


def max_hours(folder):
    words = words_of([*DDP, "--epochs", 30], "3")
    undisturbed, broken = whole(folder, words), folder / "broken"
    starts = 0
    while "is over; saved" in finish(broken, [*words, "--max_hours", 3 / 3600]):
        starts += 1
        assert starts < 50
    assert starts > 1, "the run was over before --max_hours"
    assert "going on from" in (broken / "log").read_text()
    assert digest(final_state(broken)) == digest(final_state(undisturbed))
    return f"{starts} starts were ended by it"


def each_rank(folder, ranks=3):
    """The processes of ranks that a platform starts by itself, each with a watcher."""
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    words = [DDP[0], *CIFAR, "--epochs", 60, "--save_steps", 1, "--output_dir", folder / "out"]
    processes = []
    for rank in range(ranks):
        own = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        processes.append(start(folder / f"rank{rank}", words, **own))
    return processes


def watcher(number, rank):
    """The watcher of a rank gets this signal; whoever then still trains is killed."""

    def row(folder):
        undisturbed = folder / "whole"
        undisturbed.mkdir()
        assert all(process.wait(PATIENCE) == 0 for process in each_rank(undisturbed))
        broken = folder / "broken"
        broken.mkdir()
        processes = each_rank(broken)
        wait_for(has_saved(broken, 2), processes[0], "two checkpoints")
        (pid,) = children(processes[rank])
        os.kill(pid, number)
        begun = time.monotonic()
        while time.monotonic() - begun < 15 and any(process.poll() is None for process in processes):
            time.sleep(0.1)
        running = [process for process in processes if process.poll() is None]
        for process in running:
            process.kill()
            process.wait()
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGKILL)
        codes = {process.returncode for process in processes}
        again = each_rank(broken)
        assert all(process.wait(PATIENCE) == 0 for process in again)
        assert "going on from" in (broken / "rank0" / "log").read_text()
        assert digest(final_state(broken)) == digest(final_state(undisturbed))
        return f"{len(running)} of 3 ranks trained on for 15 s" if running else f"all ended, exit codes {sorted(codes)}"

    return row


def parent(number, ranks="3"):
    """The parent of a node gets this signal; where that stops it, it wakes up after 9 s."""

    def row(folder):
        words = words_of([*DDP, "--epochs", 30], ranks)
        undisturbed, broken = whole(folder, words), folder / "broken"
        process = start(broken, words)
        wait_for(has_saved(broken, 2), process, "two checkpoints")
        parents = children(process) if "x" in ranks else [process.pid]
        os.kill(parents[-1], number)
        if number == signal.SIGSTOP:
            time.sleep(9)
            os.kill(parents[-1], signal.SIGCONT)
        code = process.wait(PATIENCE)
        if code or number == signal.SIGTERM:
            assert_goes_on_to(broken, words, undisturbed)
            return f"exit code {code}"
        assert digest(final_state(broken)) == digest(final_state(undisturbed))
        return "trained on to its end"

    return row


def elastic_and_exact(folder):
    """Two nodes, of which each may be lost; all are killed, and another start goes on."""
    words = words_of([*EXACT, "--epochs", 8], "2 x 2")
    undisturbed, broken = whole(folder, words), folder / "broken"
    process = start(broken, words)
    wait_for(has_saved(broken, 2), process, "two checkpoints")
    os.kill(children(process)[1], signal.SIGKILL)
    time.sleep(1)
    for pid in [*children(process), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert_goes_on_to(broken, words, undisturbed)
    return "a node was killed, then all"


def verb(name, *more):
    """`launch export` and `launch bundle` are killed at ten moments, and then left to end."""

    def row(folder):
        draw = random.Random(1)
        finish(folder / "run", words_of([*DDP, "--epochs", 1], "3"))
        words = ["-m", "launch", name, "run/out" if name == "export" else DDP[0], *more]
        begun = time.monotonic()
        finish(folder, [*words, "whole"])
        seconds = time.monotonic() - begun
        kills = 0
        for _ in range(10):
            process = start(folder, [*words, "broken"])
            time.sleep(draw.uniform(0, seconds))
            kills += process.poll() is None
            process.kill()
            process.wait()
        finish(folder, [*words, "broken"])
        assert_same_files(folder / "whole", folder / "broken")
        return f"{kills} kills"

    return row


def assert_same_files(one, other):
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    different = [name for name in names if not filecmp.cmp(one / name, other / name, shallow=False)]
    assert not different, different


def two_starts_in_a_bucket(folder):
    """One start stands still, another goes on from the bucket and trains on, the first wakes up; then a third one ends the run."""
    store = ObjectStore(folder / "store")
    client = store.client()
    client.create_bucket(Bucket="data")
    try:

        def words(name):
            return [*words_of([*DDP, "--epochs", 15], "3")[:-1], f"s3://data/{name}"]

        finish(folder / "whole", words("whole"), **store.environment)
        first = start(folder / "first", words("broken"), **store.environment)
        saved = lambda: len(client.list_objects_v2(Bucket="data", Prefix="broken/checkpoints/").get("Contents", [])) > 3  # noqa: E731
        wait_for(saved, first, "checkpoints in the bucket")
        family = [first.pid, *children(first)]
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        said = finish(folder / "second", [*words("broken"), "--max_steps", 100], **store.environment)
        assert "going on from" in said, said
        for pid in reversed(family):
            os.kill(pid, signal.SIGCONT)
        code = first.wait(PATIENCE)
        assert "going on from" in finish(folder / "third", words("broken"), **store.environment)
        for name in ("whole", "broken"):
            copied(client, f"{name}/", folder / "found" / name / "out")
        assert digest(final_state(folder / "found" / "broken")) == digest(final_state(folder / "found" / "whole"))
        return f"the one that woke up ended with {code}"
    finally:
        store.stop()


ROWS = {
    "rank 1 killed in an evaluation": dies_at("evaluation", 1, 2 * STEPS),
    "rank 0 killed in an evaluation": dies_at("evaluation", 0, 2 * STEPS),
    "rank 2 killed at the end of an epoch": dies_at("end of an epoch", 2, 2 * STEPS),
    "rank 0 killed at the very end": dies_at("end", 0, 6 * STEPS),
    "rank 1 killed at the very end": dies_at("end", 1, 6 * STEPS),
    "rank 0 killed in a save": in_a_save,
    "--total_batch, 2 ranks, 4 portions": portions(4),
    "--total_batch, 2 ranks, 7 portions": portions(7),
    "--max_hours": max_hours,
    "watcher of rank 1 killed": watcher(signal.SIGKILL, 1),
    "watcher of rank 0 killed": watcher(signal.SIGKILL, 0),
    "watcher of rank 1 frozen": watcher(signal.SIGSTOP, 1),
    "watcher of rank 0 frozen": watcher(signal.SIGSTOP, 0),
    "SIGTERM to the parent": parent(signal.SIGTERM),
    "SIGSTOP to the parent, which wakes up": parent(signal.SIGSTOP),
    "SIGTERM to the parent of node 1, 2 x 2": parent(signal.SIGTERM, "2 x 2"),
    "SIGSTOP to the parent of node 1, 2 x 2": parent(signal.SIGSTOP, "2 x 2"),
    "elastic with exact, 2 x 2": elastic_and_exact,
    "launch export": verb("export", "--format", "safetensors", "--output"),
    "launch bundle": verb("bundle", "--overwrite", "true", "--folder"),
    "two starts of one run in a bucket": two_starts_in_a_bucket,
}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name has these words")
    options = parser.parse_args(argv)
    failed = 0
    print("| what is interrupted | what happened | after going on |\n|---|---|---|")
    for name, row in ROWS.items():
        if options.only not in name:
            continue
        folder = Path(tempfile.mkdtemp())
        try:
            happened, result = row(folder), "the same bits"
        except Exception:
            traceback.print_exc()
            failed += 1
            happened, result = "", "NOT THE SAME, OR NOT GONE ON"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"| {name} | {happened} | {result} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
