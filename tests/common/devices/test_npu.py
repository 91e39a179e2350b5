"""Every job that can, on a stand-in for Ascend NPUs (tests/npu): its numbers are true, its device is not the CPU."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from launch import blocks, local
from tests import npu
from tests.launch.test_blocks_needed import without_block
from tests.tools.jobs import PATIENCE, ROOT, TINY, assert_same_bits, command, environment, final_state, saved, wait_for
from tests.tools.objectstore import free_port

pytestmark = pytest.mark.rehearsal

PHOTOS = ["--custom_data", "true", "--arch", "resnet18", "--image_size", "32", "--batch_size", "8", "--max_samples", "32",
          "--workers", "0", "--epochs", "1"]  # fmt: skip
PAIRS = ["--custom_data", "true", "--max_samples", "16", "--batch_size", "4", "--crop", "32", "--workers", "0", "--epochs", "1"]
JOBS = {
    "train": TINY,
    "train_amp": [*TINY, "--amp_dtype", "bfloat16"],
    "train_dpex": [*TINY, "--workers", "1"],
    "train_ddp": TINY,
    "train_ddp_amp": [*TINY, "--amp_dtype", "float16"],
    "train_ddp_exact": TINY,
    "train_imagenet": PHOTOS,
    "train_restore": PAIRS,
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]


def play(folder, *words, devices=2, check=0, **env):
    """What a command printed, where there are so many NPUs."""
    done = subprocess.run(
        [str(word) for word in words], cwd=folder, env=environment(**{**npu.environment(devices), **env}),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == check, f"exit code {done.returncode}\n{done.stdout}"
    return done.stdout


# Python that trains on the CPU in the layout and with the optimizer that NPUs have, so that only the device differs.
AS_ON_AN_NPU = """
import dataclasses, runpy, sys, torch
from common.devices import kinds
kinds.KINDS["cpu"] = dataclasses.replace(kinds.KINDS["cpu"], layout=torch.contiguous_format, has_fused_optimizers=False)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_weights_are_those_of_a_cpu_to_the_bit(tmp_path):
    printed = play(tmp_path, *command("train", *TINY, "--output_dir", tmp_path / "out"), devices=1)
    assert "npu:0 (Stand-in NPU)" in printed
    (tmp_path / "cpu").mkdir()
    job = command("train", *TINY, "--output_dir", tmp_path / "cpu" / "out")[1:]
    env = environment(PYTHONPATH=str(ROOT))
    subprocess.run([sys.executable, "-c", AS_ON_AN_NPU, *job], cwd=tmp_path, env=env, check=True, timeout=PATIENCE)
    ours, theirs = final_state(tmp_path), final_state(tmp_path / "cpu")
    for name in ("model", "optimizer", "position"):
        assert_same_bits(ours[name], theirs[name], name)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_trains_on_as_many_npus_as_it_can(tmp_path, name):
    printed = play(tmp_path, *command(name, *JOBS[name], "--output_dir", tmp_path / "out"))
    several = name not in ("train", "train_amp", "train_dpex")
    assert "npu:0 (Stand-in NPU)" in printed and ("rank 0 of 2" in printed) == several, printed
    assert several or "warning: 1 of 2 NPUs are idle: train_ddp.py uses all of them" in printed
    assert "done: " in printed


@pytest.mark.parametrize("name", ["own_accumulation", "own_gan"])  # of mse_loss, which others need, the stand-in has none
def test_the_pages_own_scripts_train_there(tmp_path, name):
    shutil.copy(ROOT / "tests" / "examples" / f"{name}.py", tmp_path)
    path = f"{npu.environment()['PYTHONPATH']}:{ROOT}"
    printed = play(tmp_path, sys.executable, f"{name}.py", "--epochs", "2", "--output_dir", "out", PYTHONPATH=path)
    assert "npu:0 (Stand-in NPU)" in printed and "done: " in printed, printed


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("train_dp", TINY, "DataParallel does not work on NPUs: take train_ddp.py"),
        ("speedrun", ["--custom_data", "true"], "the channels-last layout does not work on NPUs: take train.py"),
        (
            "train_imagenet",
            [*PHOTOS, "--memory_format", "nhwc", "--nproc_per_node", "1"],
            "the channels-last layout does not work on NPUs: take train.py, or --memory_format nchw",
        ),
        ("train_dali", TINY, "DALI does not work on NPUs: take train_ddp.py"),
        ("train_imagenet", [*PHOTOS, "--data_backend", "dali-cpu", "--nproc_per_node", "1"], "DALI does not work on NPUs"),
        ("train", [*TINY, "--compile", "true"], "--compile does not work on NPUs: leave it out"),
        ("train", [*TINY, "--device", "cuda"], "--device cuda, but torch sees no GPU"),
        ("train_ddp", [*TINY, "--nproc_per_node", "3"], "3 processes on a node with 2 NPUs: give --nproc_per_node 2"),
    ],
)
def test_what_an_npu_cannot_do_is_refused_before_anything_is_read(tmp_path, name, options, words):
    printed = play(tmp_path, *command(name, *options, "--output_dir", tmp_path / "out"), check=2)
    assert f"error: {words}" in printed.splitlines()[-1]
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_without_its_block_the_dp_job_is_not_refused_here(tmp_path):
    job = without_block(blocks.job_of("DP"), 0, tmp_path)
    done = subprocess.run(
        [sys.executable, job, *TINY, "--output_dir", tmp_path / "out"], cwd=tmp_path, env=environment(**npu.environment(2)),
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert "does not work on NPUs" not in done.stderr and "rank 0 of 1" in done.stdout


@pytest.mark.parametrize("there, back", [("npu", "cpu"), ("cpu", "npu")])
def test_a_run_goes_on_on_the_other_device(tmp_path, there, back):
    options = [*TINY, "--output_dir", tmp_path / "out", "--device"]
    play(tmp_path, *command("train", *options, there, "--max_steps", "5"), devices=1)
    printed = play(tmp_path, *command("train", *options, back), devices=1)
    assert "going on from" in printed and "step 5" in printed and f"anyrank {version()}, {back}" in printed


def version():
    from common import VERSION

    return VERSION


def test_by_torchrun(tmp_path):
    job = ROOT / "jobs" / "train_ddp.py"
    printed = play(tmp_path, *TORCHRUN, free_port(), job, *TINY, "--output_dir", tmp_path / "out")
    assert "npu:0 (Stand-in NPU), rank 0 of 2" in printed and "done: " in printed


def test_doctor_evaluate_and_prof(tmp_path):
    printed = play(tmp_path, *command("train_ddp", *TINY, "--doctor", "true", "--output_dir", tmp_path / "out"))
    assert re.search(r"good +gpus +torch sees 2 NPUs, no other program uses them", printed), printed
    assert f"torch_npu {torch.__version__.split('+')[0]}" in printed
    out = ["--output_dir", tmp_path / "out"]
    assert "Training speed was" in play(
        tmp_path, *command("train_imagenet", *PHOTOS, "--max_samples", "256", "--prof", "2", "--nproc_per_node", "1", *out)
    )
    play(tmp_path, *command("train_imagenet", *PHOTOS, *out, "--resume", "never", "--overwrite", "true"))
    weights = next((tmp_path / "out").glob("epoch_*.pth"))
    evaluated = play(
        tmp_path, *command("train_imagenet", *PHOTOS, "--evaluate", "true", "--weights", weights, "--nproc_per_node", "1", *out)
    )
    assert "top-1" in evaluated.lower() or "accuracy" in evaluated, evaluated


def test_a_signal_saves_and_the_next_start_goes_on(tmp_path):
    words = command("train", *TINY, "--epochs", "200", "--save_steps", "5", "--output_dir", tmp_path / "out")
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(words, cwd=tmp_path, env=environment(**npu.environment(1)), stdout=log, stderr=log)
        wait_for(saved(tmp_path, 80), job, "a checkpoint")
        job.send_signal(signal.SIGTERM)
        assert job.wait(PATIENCE) == 143
    printed = play(tmp_path, *words, "--max_steps", "30", devices=1)
    assert "going on from" in printed


# --- A job of two nodes with two cards each, from what ModelArts' Ascend engine sets ---------------------------------------


@contextlib.contextmanager
def cards(folder, *options):
    """Four processes, started one by one as the engine does; each prints into the file of its rank."""
    table = folder / "table.json"
    table.write_text(json.dumps(local.rank_table(2, 2)))
    started = []
    for rank in range(4):
        ours = {"RANK_TABLE_FILE": table, "RANK_ID": rank, "RANK_SIZE": 4, "ASCEND_DEVICE_ID": rank % 2, "MA_NUM_HOSTS": 2,
                "VC_TASK_INDEX": rank // 2, "VC_WORKER_HOSTS": "127.0.0.1,127.0.0.1", "MA_VJ_NAME": str(folder),
                "ASCEND_RT_VISIBLE_DEVICES": ("0,1", "2,3")[rank // 2]}  # fmt: skip
        env = environment(**npu.environment(4), **{name: str(value) for name, value in ours.items()})
        log = open(folder / f"log{rank}", "a")  # noqa: SIM115 (the process owns it)
        words = command("train_ddp", *options, "--output_dir", folder / "out")
        started.append(subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=log))
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


def logs(folder):
    return "\n".join((folder / f"log{rank}").read_text() for rank in range(4))


@pytest.mark.parametrize(
    "fault, said", [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "no progress|stopped|silent")]
)
def test_two_nodes_of_two_cards_end_and_go_on_when_a_rank_is_lost(tmp_path, fault, said):
    options = [*TINY, "--epochs", "400", "--save_steps", "5"]
    with cards(tmp_path, *options) as started:
        wait_for(saved(tmp_path, 5 * 64), started[0], "a checkpoint")
        os.kill(started[3].pid, fault)
        codes = [process.wait(PATIENCE) for process in started[:3]]
    assert all(codes) and re.search(f"error: rank 3 .*({said})", logs(tmp_path)), logs(tmp_path)
    assert re.search(
        r"npu:0 \(Stand-in NPU\), rank 0 of 4, platform ascend \(RANK_TABLE_FILE and RANK_ID count cards\)", logs(tmp_path)
    )
    with cards(tmp_path, *options, "--max_steps", "30") as started:
        assert [process.wait(PATIENCE) for process in started] == [0, 0, 0, 0], logs(tmp_path)
    assert "going on from" in logs(tmp_path)


def test_fewer_npus_than_the_platform_promises_are_a_warning_with_both_numbers(tmp_path):
    here = {"MA_NUM_HOSTS": "1", "VC_TASK_INDEX": "0", "MA_NUM_GPUS": "8"}
    printed = play(tmp_path, *command("train_ddp", *TINY, "--epochs", "1", "--output_dir", tmp_path / "out"), **here)
    assert "warning: node 0: torch sees 2 of the 8 NPUs that modelarts says this node has: the others are idle" in printed


def test_launch_local_plays_that_engine(tmp_path):
    words = [sys.executable, "-m", "launch", "local", "--accelerator", "npu", "--nodes", "2", "--procs", "2"]
    env = {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3"}
    printed = play(
        ROOT, *words, ROOT / "jobs" / "train_ddp.py", "--", *TINY, "--output_dir", tmp_path / "out", devices=4, **env
    )
    assert "rank 0 of 4, platform ascend" in printed and "all nodes have ended, exit codes 0 0 0 0" in printed


def test_an_image_of_ones_own_starts_a_worker_for_each_npu(tmp_path):
    words = [sys.executable, "-m", "launch", "local", "--accelerator", "npu", "--nodes", "2", "--platform", "modelarts-image"]
    env = {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3"}
    printed = play(
        ROOT, *words, ROOT / "jobs" / "train_ddp.py", "--", *TINY, "--output_dir", tmp_path / "out", devices=4, **env
    )
    assert "node 1: starting ranks 2 to 3 of 4 (modelarts: MA_NUM_HOSTS" in printed and "npu:0 (Stand-in NPU)" in printed


STRICT = """
import torch
images, weight = torch.randn(2, 3, 8, 8, device="npu"), torch.randn(4, 3, 3, 3, device="npu")
for dtype in (torch.float16, torch.bfloat16):
    with torch.autocast("npu", dtype):
        assert torch.nn.functional.conv2d(images, weight).dtype == dtype
        assert torch.nn.functional.log_softmax(images.to(dtype), 1).dtype == torch.float32
assert torch.ones(3).pin_memory().is_pinned() and not torch.ones(3).is_pinned()
began, ended = (torch.npu.Event(enable_timing=True) for _ in range(2))
began.record(torch.npu.current_stream())
ended.record(torch.npu.current_stream())
assert ended.query() and began.elapsed_time(ended) >= 0
refused = []
for wrong in (
    lambda: images + torch.randn(2, 3, 8, 8),
    lambda: images.to(memory_format=torch.channels_last),
    lambda: torch.ones(1, device="npu:2"),
):
    try:
        wrong()
    except RuntimeError as error:
        refused.append(str(error).splitlines()[0])
print(*refused, sep="\\n")
"""


def test_the_stand_in_is_as_strict_as_a_device(tmp_path):
    refused = play(tmp_path, sys.executable, "-c", STRICT).splitlines()
    assert "tensors to be on the same device" in refused[0] and "channels_last is not supported" in refused[1]
    assert "invalid device ordinal 2" in refused[2]
