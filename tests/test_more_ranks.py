"""Stopped or killed, then started again, a job ends with the bits of one that nobody disturbed: on one process and on many.

From three ranks on, the order in which they add their gradients decides the last bits.
"""

import signal
import sys

import pytest

from tests.jobs import ROOT, Popen, assert_same_bits, environment, final_state, in_rehearsal, run, wait_for

CIFAR = ["--max_samples", 96, "--batch_size", 8, "--width", 4, "--epochs", 2]
PHOTOS = ["--max_samples", 96, "--batch_size", 8, "--epochs", 2, "--arch", "shufflenet_v2_x0_5", "--image_size", 32]
PHOTOS += ["--workers", 0, "--training_only", "true"]
PAIRS = ["--max_samples", 48, "--batch_size", 4, "--width", 8, "--epochs", 2, "--workers", 0]
OWN = ROOT / "tests" / "examples" / "own_tensors.py"
JOBS = {
    "train_ddp": [ROOT / "jobs" / "train_ddp.py", *CIFAR],
    "train_ddp_amp": [ROOT / "jobs" / "train_ddp_amp.py", *CIFAR],
    "train_imagenet": [ROOT / "jobs" / "train_imagenet.py", *PHOTOS],
    "train_imagenet, in portions": [ROOT / "jobs" / "train_imagenet.py", *PHOTOS, "--batch_size", 2, "--total_batch", 24],
    "train_imagenet, averaged": [ROOT / "jobs" / "train_imagenet.py", *PHOTOS, "--ema", 0.9],
    "train_restore": [ROOT / "jobs" / "train_restore.py", *PAIRS],
    "a script of one's own": [OWN, "--epochs", 2, "--batch_size", 50],
}
PLACES = {  # the words that start a job on so many processes
    "1": ["--nproc_per_node", 1],
    "2": ["--nproc_per_node", 2],
    "3": ["--nproc_per_node", 3],
    "4": ["--nproc_per_node", 4],
    "2 x 2": ["--nodes", 2, "--procs", 2],
}
TABLE = [(job, ranks) for job in JOBS for ranks in PLACES]


def command(job, ranks, *more):
    """The words behind python."""
    script, *options = JOBS[job]
    synthetic = [] if job == "a script of one's own" else ["--custom_data", "true"]
    options = [*synthetic, *options, "--save_steps", 1, "--output_dir", "out", *more]
    if "x" in ranks:
        return ["-m", "launch", "local", *PLACES[ranks], script, "--", *options]
    return [script, *options, *PLACES[ranks]]


def finish(folder, words):
    folder.mkdir(exist_ok=True)
    done = run([sys.executable, *words], cwd=folder, env=environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def has_saved(folder, number):
    """Whether so many checkpoints of this run are whole; --keep 2 leaves the newest of them."""
    return lambda: len({path.stem for path in folder.glob("out/checkpoints/*.json")}) >= number


@pytest.mark.parametrize("row", in_rehearsal(TABLE, lambda row: row != ("train_ddp", "3")), ids=", ".join)
def test_stopped_and_killed_it_ends_with_the_same_bits(tmp_path, row):
    job, ranks = row
    whole, stopped, killed = (tmp_path / name for name in ("whole", "stopped", "killed"))
    finish(whole, command(job, ranks))

    finish(stopped, command(job, ranks, "--max_steps", 3))
    assert "going on from" in finish(stopped, command(job, ranks))
    assert_same_bits(final_state(stopped), final_state(whole))

    killed.mkdir()
    with open(killed / "log", "w") as log:
        words = [sys.executable, *command(job, ranks)]
        process = Popen(words, cwd=killed, env=environment(PYTHONPATH=str(ROOT)), stdout=log, stderr=log)
    wait_for(has_saved(killed, 2), process, "two checkpoints")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "going on from" in finish(killed, command(job, ranks))
    assert_same_bits(final_state(killed), final_state(whole))
