"""Each marked block is needed: without it the job fails, or a run of it is wrong in a way that is named here."""

import re
import subprocess

import pytest
import torch

from launch import blocks
from tests.tools.jobs import ROOT, TINY, assert_same_bits, final_state, forked
from tests.tools.ranks import CHECK, TWO, fork_ranks, run_variant

pytestmark = pytest.mark.rehearsal  # each block left out in turn
FORGETS_PARTS = True  # without its block a part is not given to Run, as the journal says


def without_block(path, number, folder):
    """The job with its number-th code block taken out (the base's own lines restored), as a file that runs."""
    base, found = blocks.read(path)
    code = [block for block in found if block.code]
    gone = code[number]
    (folder / "jobs").mkdir()
    for name in ("common", "datasets"):
        (folder / name).symlink_to(ROOT / name)
    job = folder / "jobs" / path.name
    job.write_text("\n".join(blocks.apply(base, [block for block in found if block is not gone])))
    return job


DDP_FAILS = [
    "unknown option --sync_bn|unknown option --nproc_per_node|--nproc_per_node is for jobs of several devices|has no attribute|not defined",  # options
    "2 processes were asked for but only this one runs",  # start_workers
    "process group has not been initialized",  # join
    "all ranks would train on the same samples",  # shard
    "the tensors differ",  # wrap
    "no learning rate",  # learning rate
    "another network was evaluated",  # broadcast
]
STARTING = 3  # the first of them make two ranks of the job; the others are left out of two that a platform has started


def ddp_complaint(done, folder, reference):
    """What is wrong with a two-rank run, the first thing of all that the intact job satisfies; None for the intact one."""
    if done.returncode:
        return done.stderr
    ledger = subprocess.run([*CHECK, str(folder / "out")], capture_output=True, text=True)
    if ledger.returncode:
        return ledger.stdout
    if "another network was evaluated" in done.stdout:
        return "another network was evaluated"
    if "learning rate 0.2" not in done.stdout:
        return "no learning rate"
    try:
        assert_same_bits(final_state(folder)["model"], final_state(reference)["model"])
    except AssertionError as error:
        return str(error)
    return None


# The variant runs with a Run that looks whether both ranks have evaluated the same network.
WATCH_BUFFERS = """
import os, runpy, sys, torch
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(os.path.dirname(sys.argv[0])))
from common.run import Run
end = Run.end_epoch
def end_epoch(self, *scores, **metrics):
    mean = self.model.state_dict()["conv1.1.running_mean"]
    both = [torch.empty_like(mean) for _ in range(2)]
    torch.distributed.all_gather(both, mean)
    if not torch.equal(*both):
        print("another network was evaluated by rank 1")
    end(self, *scores, **metrics)
Run.end_epoch = end_epoch
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_two(job, folder):
    (folder / "watch.py").write_text(WATCH_BUFFERS)
    return fork_ranks(folder / "watch.py", folder, job, *TWO)


@pytest.mark.parametrize(
    "path", [path for path in blocks.feature_jobs() if path.stem.count("_") == 1], ids=lambda path: path.name
)
def test_without_its_first_block_the_help_of_a_job_does_not_say_how_to_start_it(path, tmp_path):
    base, found = blocks.read(path)
    words = found[0].text[2]  # the first line of what it says
    (tmp_path / "without.py").write_text(
        "\n".join(blocks.apply(base, found[1:])).replace(blocks_root(), f"sys.path.insert(0, {str(ROOT)!r})")
    )
    for job, there in ((path, True), (tmp_path / "without.py", False)):
        (done,) = forked([job, "--help"], tmp_path, {})
        assert done.returncode == 0 and (words in done.stdout) == there, done.stderr


def blocks_root():
    """The line by which a job finds the repository."""
    return next(line for line in blocks.BASE.read_text().splitlines() if line.startswith("sys.path.insert("))


@pytest.mark.parametrize("number", range(len(DDP_FAILS)))
def test_every_ddp_block_is_needed(number, two_ranks, tmp_path):
    job = without_block(blocks.job_of("DDP"), number, tmp_path)
    done = run_variant(job, tmp_path, *TWO, "--nproc_per_node", 2) if number < STARTING else run_two(job, tmp_path)
    complaint = ddp_complaint(done, tmp_path, two_ranks[0])
    assert complaint and re.search(DDP_FAILS[number], complaint), complaint


def test_the_intact_ddp_job_has_none_of_these_faults_and_no_other_block(two_ranks, tmp_path):
    done = run_two(blocks.job_of("DDP"), tmp_path)
    assert ddp_complaint(done, tmp_path, two_ranks[0]) is None
    assert len([block for block in blocks.read(blocks.job_of("DDP"))[1] if block.code]) == len(DDP_FAILS)


def amp_complaint(done, folder):
    """What is wrong with a float16 run of four steps."""
    if done.returncode:
        return done.stderr
    state = torch.load(folder / "out" / "checkpoints" / "000000000256.pt", weights_only=True)
    if "scaler" not in state:
        return "the scale is not in the checkpoint"
    if state["scaler"]["_growth_tracker"] != 4:
        return "the scaler did not see 4 steps"
    if "computed in half precision" not in done.stdout:
        return "computed in full precision"
    return None


AMP_FAILS = [
    "unknown option --amp_dtype|has no attribute 'amp_dtype'",
    "name 'amp_dtype' is not defined|name 'scaler' is not defined",
    "the scale is not in the checkpoint",
    "computed in full precision",
    "_scale is None",  # backward() of a loss that was not scaled
    "the loss is nan",  # a step with gradients that are still scaled
]

# The variant runs with a linear layer that says in which precision it computes.
WATCH_PRECISION = """
import runpy, sys, torch
linear = torch.nn.Linear.forward
def forward(self, x):
    out = linear(self, x)
    if out.dtype == torch.float16 and self.training:
        print("computed in half precision")
    return out
torch.nn.Linear.forward = forward
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_watched(program, job, folder, *options):
    """The job under another program, which runs it as its own."""
    (folder / "watch.py").write_text(program)
    return forked([folder / "watch.py", job, *TINY, *options, "--output_dir", folder / "out"], folder, {})[0]


def run_amp(job, folder):
    larger = [
        "--max_samples",
        256,
        "--batch_size",
        64,
    ]  # means over more pictures are smaller: nothing is beyond half precision
    return run_watched(WATCH_PRECISION, job, folder, "--amp_dtype", "float16", "--epochs", 1, *larger)


@pytest.mark.parametrize("number", range(len(AMP_FAILS)))
def test_every_amp_block_is_needed(number, tmp_path):
    job = without_block(blocks.job_of("AMP"), number, tmp_path)
    done = run_amp(job, tmp_path)
    complaint = amp_complaint(done, tmp_path)
    assert complaint and re.search(AMP_FAILS[number], complaint), complaint


def test_the_intact_amp_job_has_none_of_these_faults_and_no_other_block(tmp_path):
    done = run_amp(blocks.job_of("AMP"), tmp_path)
    assert amp_complaint(done, tmp_path) is None
    assert len([block for block in blocks.read(blocks.job_of("AMP"))[1] if block.code]) == len(AMP_FAILS)


EXACT_FAILS = [
    "unknown option --shares|name 'exact' is not defined",
    "name 'shares' is not defined",
    r"error: --shares: call run\.register\(shares=shares\) before run\.resume\(\)",
    "no learning rate",
    r"has to call run.step\(loss\) once for every batch",
]


def exact_complaint(done):
    """What is wrong with a run of two shares."""
    if done.returncode:
        return done.stderr
    return None if "lr=0.2 " in done.stdout else "no learning rate"


def run_exact(job, folder):
    more = ["--shares", 2, "--schedule", "constant", "--batch_size", 8]
    return forked([job, *TINY, *more, "--output_dir", folder / "out"], folder, {})[0]


@pytest.mark.parametrize("number", range(len(EXACT_FAILS)))
def test_every_exact_block_is_needed(number, tmp_path):
    complaint = exact_complaint(run_exact(without_block(blocks.job_of("EXACT"), number, tmp_path), tmp_path))
    assert complaint and re.search(EXACT_FAILS[number], complaint), complaint


def test_the_intact_exact_job_has_none_of_these_faults_and_no_other_block(tmp_path):
    assert exact_complaint(run_exact(blocks.job_of("EXACT"), tmp_path)) is None
    assert (
        len([block for block in blocks.read(blocks.job_of("EXACT"))[1] if block.code]) == len(EXACT_FAILS) + 1
    )  # tests/common/elastic/test_elastic.py has the last


@pytest.mark.parametrize("intact", [True, False])
def test_the_dp_block_is_needed(intact, tmp_path):
    """Without a GPU DataParallel changes nothing, so the variant runs with one that says when it is used."""
    watch = "import runpy, sys, torch\nclass Watched(torch.nn.DataParallel):\n    def forward(self, *x):\n        print('split over the GPUs'); return super().forward(*x)\n"
    watch += "torch.nn.DataParallel = Watched\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    job = blocks.job_of("DP") if intact else without_block(blocks.job_of("DP"), 1, tmp_path)
    done = run_watched(watch, job, tmp_path)
    assert done.returncode == 0 and ("split over the GPUs" in done.stdout) == intact
    assert (
        len([block for block in blocks.read(blocks.job_of("DP"))[1] if block.code]) == 2
    )  # the other: tests/common/devices/test_npu.py
