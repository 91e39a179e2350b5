"""Whole runs of the jobs on a GPU: that they wait for nothing, survive kills, and hand their checkpoints to a CPU and back."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import torch

from tests.gpu import judge
from tests.gpu.rows import SMALL, last_json
from tests.tools.jobs import ROOT, command, final_state
from tests.tools.overflow import overflowing

PHOTOS = ["--custom_data", "true", "--data_backend", "synthetic", "--epochs", 1]

# Every job, small: (its name, its options).
JOBS = {
    "train": ("train", SMALL),
    "train_dp": ("train_dp", SMALL),
    "train_ddp": ("train_ddp", [*SMALL, "--nproc_per_node", 1]),
    "train_amp": ("train_amp", SMALL),
    "train_amp, float16": ("train_amp", [*SMALL, "--amp_dtype", "float16"]),
    "train_ddp_amp": ("train_ddp_amp", [*SMALL, "--nproc_per_node", 1]),
    "train_exact": ("train_exact", [*SMALL, "--shares", 2]),
    "train_imagenet": ("train_imagenet", [*PHOTOS, "--max_steps", 40, "--batch_size", 32]),
    "train_imagenet, mixup, EMA": (
        "train_imagenet",
        [*PHOTOS, "--max_steps", 40, "--batch_size", 32, "--mixup", 0.2, "--ema", 0.99],
    ),
    "train_restore": ("train_restore", ["--custom_data", "true", "--epochs", 1, "--max_steps", 40]),
}

# Around a step of a job, from when its batch was given until run.step: what makes the host wait there is an error.
NO_WAITING = """
import os, runpy, sys
import torch
sys.argv = sys.argv[1:]
sys.path.insert(0, os.getcwd())
from common.run import Run
steps, step = Run.steps, Run.step

def strict_steps(self, loader):
    for batch in steps(self, loader):
        torch.cuda.set_sync_debug_mode("error" if self.total_steps >= 5 else "default")
        yield batch
        torch.cuda.set_sync_debug_mode("default")

def relaxed_step(self, loss):
    torch.cuda.set_sync_debug_mode("default")
    step(self, loss)

Run.steps, Run.step = strict_steps, relaxed_step
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# The same for the speedrun, which has no Run: between two steps of its optimizer, after everything has been compiled.
NO_WAITING_IN_SPEEDRUN = """
import os, runpy, sys
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
sys.argv = sys.argv[1:]
sys.path.insert(0, os.getcwd())
steps = 0

def count(*_):
    global steps
    steps += 1
    if steps in (45, 57):
        torch.cuda.set_sync_debug_mode("error" if steps == 45 else "default")

register_optimizer_step_post_hook(count)
runpy.run_path(sys.argv[0], run_name="__main__")
assert steps > 57, steps
"""


def every_job_runs_and_no_step_waits(row):
    """Each says on which device; one that waits ends with an error."""
    for name, (job, options) in JOBS.items():
        words = command(job, *options, "--output_dir", row.folder / name, "--resume", "never", "--overwrite", "true")
        row.judge(name, judge.says(row.python(NO_WAITING, *words[1:]), "cuda:0", "done"), number=False)
    words = command("speedrun", "--custom_data", "true", "--max_samples", 4096, "--output_dir", row.folder / "speedrun")[1:]
    row.python(NO_WAITING_IN_SPEEDRUN, *words)
    row.judge("speedrun", None, number=False)


def killed_runs_end_with_the_same_bits(row, kills=10, compiled="false"):
    options = [
        *SMALL,
        "--max_samples",
        4096,
        "--epochs",
        3,
        "--save_steps",
        5,
        "--deterministic",
        "true",
        "--compile",
        compiled,
    ]
    shutil.rmtree(row.folder / "train", ignore_errors=True)  # of a row that was cut off
    row.job("train", *options)
    undisturbed = row.folder / "undisturbed"
    shutil.rmtree(undisturbed, ignore_errors=True)
    (row.folder / "train").rename(undisturbed)
    chance, done = random.Random(1), 0
    words = command("train", *options, "--output_dir", row.folder / "train")
    for _ in range(kills):
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        first = next((line for line in process.stdout if " epoch=" in line), "")
        time.sleep(chance.uniform(0, 1.5))  # a moment of the training drawn at random
        process.kill()
        done += process.wait() == -signal.SIGKILL
        process.stdout.close()
        if not first:
            break
    row.job("train", *options)
    row.figures["kills during the training"] = done
    row.judge("kills", judge.at_least(done, 1), number=False)
    ours, theirs = (weights(final_state(row.folder, name)) for name in ("train", "undisturbed"))
    row.judge("weights", judge.same_bits(ours, theirs))


def compiled_runs_go_on(row):
    """The same with --compile true: the next process finds the compiled kernels, or compiles the network again."""
    killed_runs_end_with_the_same_bits(row, kills=2, compiled="true")


OF_AN_IMAGE = 44 * 2**20  # bytes that ResNet-50 takes in half precision
LEFT = 16 * 2**30  # bytes of the GPU that a job may have here, so that a batch of 1,024 is too large


def a_batch_that_does_not_fit(row):
    """Twice what the memory holds: the flagship goes on in smaller portions, and says with --compile true which option helps."""
    free, _ = torch.cuda.mem_get_info()
    left = min(free, LEFT)
    occupied = torch.empty(free - left, dtype=torch.uint8, device="cuda")
    batch = 2 ** math.ceil(math.log2(2 * left / OF_AN_IMAGE))
    words = command("train_imagenet", "--data_backend", "synthetic", "--batch_size", batch, "--prof", 5)
    printed = row.run(*words)
    smaller = "and the same total batch"
    row.judge("eager", judge.says(printed, "out of memory", smaller, "Training speed was"), number=False)
    row.figures["eager"] = next((line for line in printed.splitlines() if smaller in line), "it fitted")
    printed = row.run(*words, "--compile", "true", expect=1)
    row.judge("compiled", judge.says(printed, "out of memory", "lower --batch_size"), number=False)
    row.figures["compiled"] = printed.strip().splitlines()[-1]
    row.figures["free beside them"] = f"{free - occupied.numel():,} bytes, a batch of {batch}"


def weights(state):
    return torch.cat([tensor.detach().cpu().double().flatten() for tensor in state["model"].values()])


def a_checkpoint_goes_on_on_the_other_device(row):
    for first, then in (("true", "false"), ("false", "true")):
        small = [*SMALL, "--max_samples", 256, "--batch_size", 64, "--width", 4]
        shutil.rmtree(row.folder / "train", ignore_errors=True)
        row.job("train", *small, "--enable_gpu", first)
        printed = row.job("train", *small, "--epochs", 2, "--enable_gpu", then)
        row.judge(f"--enable_gpu {first}, then {then}", judge.says(printed, "going on from", "epoch=2/2", "done"), number=False)


def a_trace_of_the_gpu(row):
    printed = row.job("train", *SMALL, "--epochs", 2, "--profile", "true", "--resume", "never", "--overwrite", "true")
    row.judge("the summary", judge.says(printed, "trace"), number=False)
    row.judge("a kernel's name", judge.says(printed.lower(), "kernel"))


def overflowing_gradients_skip_steps(row):
    scales, moved, scaler = overflowing("cuda", scale=2.0**20)
    row.judge("scale and steps", judge.scale_fell_and_steps_were_skipped(scales, moved, scaler.skipped()))
    row.figures["steps skipped"] = scaler.skipped()
    printed = row.job("train_amp", *SMALL, "--amp_dtype", "float16")
    row.judge("train_amp", judge.says(printed, "done"), number=False)


# Two ranks compute on the one GPU, and talk through Gloo: NCCL refuses two ranks on one GPU.
TWO_ON_ONE = """
import os, sys
sys.path.insert(0, os.getcwd())
import torch
from common import devices
from common.ranks import group
join = group.join
devices.choose = lambda args: torch.device("cuda", 0)
devices.require_enough_devices = lambda args: None
group.join = lambda args, device: join(args, torch.device("cpu"))
exec(open("jobs/JOB.py").read())  # in this file, which the workers run too
"""


def two_on_one(row, job):
    """The script of this job for two ranks on one GPU."""
    script = row.folder / f"{job}_two_on_one.py"
    script.write_text(TWO_ON_ONE.replace("JOB", job))
    return script


def exact_shares_have_the_same_bits_on_one_and_two_ranks(row):
    options = [*SMALL, "--shares", 4, "--batch_size", 32, "--resume", "never", "--overwrite", "true"]
    row.job("train_exact", *options)
    row.run(
        sys.executable, two_on_one(row, "train_ddp_exact"), *options, "--nproc_per_node", 2, "--output_dir", row.folder / "two"
    )
    ours, theirs = (weights(final_state(row.folder, name)) for name in ("two", "train_exact"))
    row.judge("weights", judge.same_bits(ours, theirs))


def two_ranks_of_which_one_is_lost(row):
    """Killed, then stopped: the others are down within ten seconds."""
    script = two_on_one(row, "train_ddp")
    for name, what in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        log, options = row.folder / f"{name}.log", [*SMALL, "--epochs", 50, "--nproc_per_node", 2]
        words = [
            sys.executable,
            script,
            *options,
            "--output_dir",
            row.folder / name,
            "--resume",
            "never",
            "--overwrite",
            "true",
        ]
        with open(log, "w") as output:
            process = subprocess.Popen(list(map(str, words)), cwd=ROOT, stdout=output, stderr=output)
        wait_for(lambda log=log: "step=1/" in log.read_text(), process, 300)
        os.kill(children(process.pid)[-1], what)
        began = time.monotonic()
        code = process.wait(120)
        row.figures[f"down after one was {name}"] = f"{time.monotonic() - began:.1f} s"
        row.judge(f"{name}: seconds until all are down", judge.below(time.monotonic() - began, 10))
        row.judge(f"{name}: the exit code", judge.equal(code != 0, True), number=False)


def children(pid):
    path = f"/proc/{pid}/task/{pid}/children"
    return [int(word) for word in open(path).read().split()] if os.path.exists(path) else []


def wait_for(condition, process, seconds):
    until = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"it ended with {process.poll()} or did not begin within {seconds} s")
        time.sleep(0.1)  # two programs that know nothing of each other


# Runs a job, and says how many graphs torch.compile had made after the first epoch, and at the end; the losses of the first steps; and
# how often no CUDA graph could be made.
COUNT_GRAPHS = """
import atexit, json, os, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.getcwd())
import torch._dynamo
from common.run import Run
graphs, losses, end_epoch, step = [], [], Run.end_epoch, Run.step

def noted(self, loss):
    if len(losses) < 5:
        losses.append(float(loss))
    step(self, loss)

def count(self, *scores, **metrics):
    end_epoch(self, *scores, **metrics)
    graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

def found():
    return {"graphs": graphs, "losses": losses, "skipped": torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]}

Run.end_epoch, Run.step = count, noted
atexit.register(lambda: print(json.dumps(found()), flush=True))
runpy.run_path(sys.argv[0], run_name="__main__")
"""

FLAGSHIP = [*PHOTOS, "--epochs", 2, "--max_samples", 640, "--batch_size", 32, "--warmup", 0]
COMPILED = {  # name: (job, options)
    "train": ("train", [*SMALL, "--epochs", 2, "--lr", 0.01, "--augment", "false"]),
    "train_imagenet": ("train_imagenet", FLAGSHIP),
    "accumulated gradients": ("train_imagenet", [*FLAGSHIP, "--arch", "resnet18", "--total_batch", 64]),
}


def compiled_jobs_learn_the_same_and_are_compiled_once(row):
    """The losses of the first steps, and the mean loss of the last epoch, with --compile true and without."""
    for name, (job, options) in COMPILED.items():
        losses, first = {}, {}
        for compile in ("false", "true"):
            folder = row.folder / f"{name} {compile}"
            shutil.rmtree(folder, ignore_errors=True)
            words = command(job, *options, "--compile", compile, "--output_dir", folder)[1:]
            found = last_json(row.python(COUNT_GRAPHS, *words))
            graphs, first[compile] = found["graphs"], found["losses"]
            losses[compile] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["train_loss"]
        row.judge(f"{name}: graphs after each epoch", judge.equal(graphs[-1], graphs[0]), number=False)
        row.judge(f"{name}: it was compiled", judge.at_least(graphs[0], 1), number=False)
        row.judge(f"{name}: the loss", judge.close(losses["true"], losses["false"], 5e-2 * abs(losses["false"])))
        for number, (ours, plain) in enumerate(zip(first["true"], first["false"]), 1):
            row.judge(f"{name}: the loss of step {number}", judge.close(ours, plain, 1e-2 * abs(plain)))
        row.judge(f"{name}: networks that could have no CUDA graph", judge.equal(found["skipped"], 0), number=False)


# Commands of the pages that do something else where there is a GPU, and what one of them prints; {} is a folder of its own.
COMMANDS = {
    "python jobs/train_dp.py --custom_data true": "accuracy",
    "python jobs/train_imagenet.py --data_backend synthetic --prof 100": "Training speed was",
    "python jobs/train_imagenet.py --custom_data true --arch resnet18 --image_size 64 --batch_size 32 --epochs 2": "accuracy",
    "python jobs/train_restore.py --custom_data true --epochs 12": "psnr",
    "python jobs/train.py --custom_data true --epochs 4 --max_samples 256 --batch_size 32 --width 4 --profile true": "profile: 10 steps",
    "python -m launch local --nodes 2 --procs 2 jobs/train_ddp.py -- --custom_data true --max_steps 9 --width 4 --lr 0.01": (
        "all of them train on the CPU"
    ),
}


def commands_of_the_pages(row):
    """As they stand there."""
    for text, says in COMMANDS.items():
        words = [sys.executable if word == "python" else word for word in text.split()]
        printed = row.run(*words, *([] if "--prof" in words else ["--output_dir", tempfile.mkdtemp(dir=row.folder)]))
        row.judge(text, judge.says(printed, says), number=False)
    refused = row.run(
        *command("train_ddp", "--custom_data", "true", "--nproc_per_node", torch.cuda.device_count() + 1), expect=2
    )
    row.judge("more processes than GPUs", judge.says(refused, "give --nproc_per_node", "--enable_gpu false"), number=False)
