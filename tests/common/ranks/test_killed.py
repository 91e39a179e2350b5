"""Stopped or killed, then started again, a job ends with the bits of one that nobody disturbed: on one process and on many.

From three ranks on, the order in which they add their gradients decides the last bits.
"""

import shutil

import pytest

from tests.tools.jobs import ROOT, in_rehearsal
from tests.tools.restarts import OWN, PLACES, SYNTHETIC, assert_a_restart_changes_no_bits, words_of

CIFAR = [*SYNTHETIC, "--max_samples", 96, "--batch_size", 8, "--width", 4, "--epochs", 2]
PHOTOS = [*SYNTHETIC, "--max_samples", 96, "--batch_size", 8, "--epochs", 2, "--arch", "shufflenet_v2_x0_5", "--image_size", 32]
PHOTOS += ["--workers", 0, "--training_only", "true"]
PAIRS = [*SYNTHETIC, "--max_samples", 48, "--batch_size", 4, "--width", 8, "--epochs", 2, "--workers", 0]
JOBS = {
    "train_ddp": [ROOT / "jobs" / "train_ddp.py", *CIFAR],
    "train_ddp_amp": [ROOT / "jobs" / "train_ddp_amp.py", *CIFAR],
    "train_imagenet": [ROOT / "jobs" / "train_imagenet.py", *PHOTOS],
    "train_imagenet, in portions": [ROOT / "jobs" / "train_imagenet.py", *PHOTOS, "--batch_size", 2, "--total_batch", 24],
    "train_imagenet, averaged": [ROOT / "jobs" / "train_imagenet.py", *PHOTOS, "--ema", 0.9],
    "train_restore": [ROOT / "jobs" / "train_restore.py", *PAIRS],
    "a script of one's own": [OWN, "--epochs", 2, "--batch_size", 50],
}
TABLE = [(job, ranks) for job in JOBS for ranks in PLACES]

STEP = """            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
"""
ACCUMULATES = """            updates = (run.total_steps + 1) % {count} == 0
            with contextlib.nullcontext() if updates else model.no_sync():
                loss = loss_fn(model(x), y)
                loss.backward()
            if updates:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize("job, ranks", in_rehearsal(TABLE, lambda row: row != ("train_ddp", "3")))
def test_a_restart_changes_no_bits(tmp_path, job, ranks):
    script, *options = JOBS[job]
    if script == OWN:  # as a user has it: beside tests/common it would take that for ours
        script = shutil.copy(OWN, tmp_path)
    assert_a_restart_changes_no_bits(tmp_path, words_of([script, *options], ranks), stop_after=2)


@pytest.mark.rehearsal
@pytest.mark.parametrize("ranks", ["2", "3"])
@pytest.mark.parametrize("count", [3, 4, 7])
def test_each_rank_gets_back_what_it_has_accumulated(tmp_path, count, ranks):
    """Under no_sync() each has gradients of its own, of which some wait for their update at the end of an epoch."""
    script = tmp_path / "accumulates.py"
    own = OWN.read_text()
    assert own.count(STEP) == 1
    script.write_text(
        own.replace(STEP, ACCUMULATES.format(count=count)).replace("import os\n", "import contextlib\nimport os\n")
    )
    words = words_of([script, "--epochs", 3, "--batch_size", 50], ranks)
    steps = 1600 // (50 * int(ranks))  # in an epoch
    assert_a_restart_changes_no_bits(tmp_path, words, stop_after=steps + (steps % count == 0))
