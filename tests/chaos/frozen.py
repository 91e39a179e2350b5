"""A machine stands still in the midst of a write, another start goes on with the run, and the first one wakes up.

    python -m tests.chaos.frozen [--trials 100] [--seed 1]        (make chaos FAULT=frozen)

Drawn at random: whether the results go to a folder or a bucket; whether the job is one process, is started once for a node with
two workers, or by torchrun for each rank; the operation before which all of its processes are stopped; whether they are let go
on while the other start trains, or when it has finished. Demanded is: the bits, the numbers and the checkpoints of the run that
nobody disturbed; nothing of it is lost, mixed or left over, and whoever starts the run once more has nothing to do.
"""

import argparse
import itertools
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from common.checkpoints import checkpoint
from common.errors import UserError
from tests.chaos.victims import digest
from tests.tools.frozen import Start, frozen, held, left_in, let_go, wait_until_held
from tests.tools.jobs import TINY, final_state
from tests.tools.objectstore import ObjectStore, free_port
from tests.tools.ranks import TWO
from tests.tools.stores import copied

SAVES = ["--save_steps", "1", "--epochs", "3", "--ledger", "true"]
HOW = {
    "one process": ("train", [*TINY, *SAVES]),
    "once for a node": ("train_ddp", [*TWO, *SAVES, "--nproc_per_node", "2"]),
    "once for each rank": ("train_ddp", [*TWO, *SAVES]),
}
# What to stop before: the operation, and what its path or key matches. Numbers of samples come in steps of 16.
MOMENTS = {
    "in a rename": [("rename", "*/checkpoints/*.pt"), ("rename", "*/epoch_*.pth"), ("rename", "*/metrics.jsonl"),
                    ("rename", "*/state.json"), ("rename", "*/report.json"), ("rename", "*/journal.jsonl")],
    "between file and manifest": [("rename", "*/checkpoints/*.json")],
    "at its beginning": [("mkdir", "*/checkpoints/.start-*"), ("upload", "*/.starts/*")],
    "in a prune": [("delete", "*/checkpoints/*.json"), ("delete", "*/checkpoints/*.pt"), ("delete", "*/epoch_*.pth")],
    "in an upload": [("upload", "*/checkpoints/*.pt"), ("upload", "*/checkpoints/*.json"), ("upload", "*/metrics.jsonl"),
                     ("upload", "*/report.json"), ("DeleteObject", "*/checkpoints/*")],
}  # fmt: skip
STEPS = 12


def launcher_of(how):
    port = str(free_port())
    return ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port] if how.endswith("rank") else []


def play(folder, draw, store, expected):
    """(what was drawn, what is wrong) of one trial."""
    how, moment = draw.choice(list(HOW)), draw.choice([name for name in MOMENTS if store or name != "in an upload"])
    operation, pattern = draw.choice(MOMENTS[moment])
    number, later = draw.randint(1, 4), draw.choice([False, True])
    job, options = HOW[how]
    output = f"s3://data/{folder.name}" if store else folder / "out"
    with_env = {"env": store.environment} if store else {}
    drawn = f"{'bucket' if store else 'folder'}, {how}, {operation} {pattern} {number}, {'finished' if later else 'training'}"
    try:
        asleep = frozen(folder / "asleep", f"{operation} {pattern} {number}", job, options, output,
                        launcher=launcher_of(how), **with_env)  # fmt: skip
    except AssertionError as error:
        if "the job ended before" not in str(error):
            raise
        return drawn, None  # there is no such moment in it
    start = (folder / "other", job, options, output) if later else (folder / "other", STEPS - 1, job, options, output)
    other = (Start if later else held)(*start, launcher=launcher_of(how), **with_env)
    later = later or not wait_until_held(other)
    if not later:
        asleep.signal(signal.SIGCONT)
        asleep.ends()
        let_go(other)
    codes = [other.ends()]
    asleep.signal(signal.SIGCONT)
    codes.append(asleep.ends())
    wrong = judge(folder, store, output, how, expected)
    told = "another start of this run writes there by now"
    if how.endswith("rank") and codes[0] == 0 != codes[1]:  # its ranks may take each other for lost, after so long a sleep
        fine, wrong = True, [text for text in wrong if not text.startswith("hidden") or moment != "at its beginning"]
    elif moment == "at its beginning":  # the one that wakes up is the later one then, and goes on with what there is
        fine = codes == [0, 0] if later else 0 in codes and any(told in start.log() for start in (asleep, other))
    else:
        fine = codes == [0, 2] and told in asleep.log()
    if not fine:
        wrong.append(f"exit codes {codes}: {asleep.log()[-300:]} {other.log()[-300:]}")
    return drawn, wrong


def judge(folder, store, output, how, expected):
    left = left_in(in_a_folder(store, folder) if store else folder / "out")
    wrong = [
        f"{name} is {left[name]!r:.200}" for name in left if left[name] != expected[how]["left"][name] and name != "checkpoints"
    ]
    job, options = HOW[how]
    again = Start(folder / "again", job, options, output, launcher=launcher_of(how), env=store.environment if store else None)
    if again.ends() or "nothing to do" not in again.log():
        wrong.append(f"the next start: {again.log()[-500:]}")
    names = left_in(in_a_folder(store, folder) if store else folder / "out")["checkpoints"]
    if names != expected[how]["left"]["checkpoints"]:  # what a start has sent late to a bucket is gone by now
        wrong.append(f"the checkpoints are {names}")
    place = folder / "again" / "output_dir/s3/data" / folder.name if store else folder / "out"
    if digest(final_state(place.parent, place.name)) != expected[how]["bits"]:
        wrong.append("other bits")
    for path in (place / "checkpoints").glob("*.json"):
        try:
            checkpoint.read(str(path.with_suffix(".pt")))
        except UserError as error:
            wrong.append(str(error))
    return wrong


def in_a_folder(store, folder):
    shutil.rmtree(folder / "bucket", ignore_errors=True)
    return copied(store.client(), f"{folder.name}/", folder / "bucket")


def undisturbed(folder, how):
    job, options = HOW[how]
    start = Start(folder / "start", job, options, folder / "out", launcher=launcher_of(how))
    assert start.ends() == 0, start.log()
    return {"bits": digest(final_state(folder)), "left": left_in(folder / "out")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the trial of this number alone")
    options = parser.parse_args()
    bad, done, numbers = 0, 0, itertools.count() if options.only is None else iter([options.only])
    with tempfile.TemporaryDirectory(prefix="frozen-") as top:
        expected = {}
        for number, how in enumerate(HOW):
            (folder := Path(top, f"undisturbed-{number}")).mkdir()
            expected[how] = undisturbed(folder, how)
        (Path(top) / "store").mkdir()
        store = ObjectStore(Path(top) / "store")
        store.client().create_bucket(Bucket="data")
        try:
            for number in numbers:
                draw = random.Random(f"{options.seed}-{number}")
                with tempfile.TemporaryDirectory(dir=top, prefix="trial-") as folder:
                    drawn, wrong = play(Path(folder), draw, draw.choice([None, store]), expected)
                if wrong is not None:
                    done, bad = done + 1, bad + bool(wrong)
                    print(f"{number}: {drawn}: {'; '.join(wrong) or 'good'}", flush=True)
                if done == options.trials:
                    break
        finally:
            store.stop()
    print(f"{done - bad} of {done}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
