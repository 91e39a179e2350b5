"""The DDP job, started in every way there is: by itself, by torch, by a platform, by its own words."""

import json
import re
import subprocess
import sys

import pytest

from common import arguments, world
from datasets import cifar10
from launch import blocks, local
from tests.tools.every_job import SMALLER
from tests.tools.jobs import (
    PATIENCE,
    ROOT,
    TINY,
    Popen,
    assert_same_bits,
    command,
    environment,
    final_state,
    in_rehearsal,
    run,
    run_forked,
    run_job,
)
from tests.tools.objectstore import free_port
from tests.tools.ranks import TWO, check_ledger


def test_two_processes_do_what_one_does_only_faster(two_ranks):
    """Every sample once, one line per event, the learning rate stated, every test image counted once."""
    folder, printed = two_ranks
    check_ledger(folder / "out")
    assert "rank 0 of 2" in printed and "learning rate 0.2 for a global batch of 16" in printed
    assert printed.count("epoch=2/2 steps=8 accuracy=") == 1 and printed.count("done: ") == 1
    report = (folder / "out" / "report.txt").read_text()
    assert re.search(r"accuracy +0\.\d+ +64\.0", report), report
    assert json.loads((folder / "out" / "checkpoints" / "000000000128.json").read_text())["world_size"] == 2


@pytest.mark.rehearsal
@pytest.mark.parametrize("job", ["train_ddp", "train_imagenet", "train_restore"])
def test_one_rank_alone_needs_no_wrapper_and_has_the_same_bits(tmp_path, job):
    for name in ("common", "datasets"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = (ROOT / "jobs" / f"{job}.py").read_text()
    wrapped = re.sub(
        r"if (torch\.distributed\.get_world_size\(\)|distributed\.get_world_size\(\)|world_size) > 1:", "if True:", text
    )
    assert wrapped.count("if True:") == text.count("if True:") + 1
    (tmp_path / "jobs").mkdir()
    for name, source in (("plain", text), ("wrapped", wrapped)):
        (tmp_path / "jobs" / f"{name}.py").write_text(source)
        options = [*TINY, *SMALLER.get(job, []), "--max_steps", 4, "--output_dir", tmp_path / name / "out"]
        run_forked([tmp_path / "jobs" / f"{name}.py", *options], tmp_path)
    assert_same_bits(final_state(tmp_path / "plain"), final_state(tmp_path / "wrapped"))


@pytest.mark.rehearsal
def test_the_old_launcher_of_torch_in_its_new_form(two_ranks, tmp_path):
    """With --use_env; without it, and torchrun, are commands of the how-to-start block."""
    words = ["-m", "torch.distributed.launch", "--nproc_per_node", "2", "--master_port", str(free_port()), "--use_env"]
    done = run(
        [sys.executable, *words, *command("train_ddp", *TWO, "--output_dir", tmp_path / "out")[1:]],
        cwd=tmp_path,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))


@pytest.mark.rehearsal
def test_no_thread_of_gloo_outlives_the_process_group(tmp_path):
    """One that lets go of its last tensor while Python ends aborts the process, after all its work was done."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, glob\n"
        "atexit.register(lambda: print('THREADS', *[open(name).read().strip() for name in glob.glob('/proc/self/task/*/comm')]))\n"
    )
    env = {"PYTHONPATH": str(tmp_path), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = str(free_port())
    printed = run_job("train_ddp", tmp_path, *TINY, env=env, launcher=[sys.executable]).stdout
    (line,) = [line for line in printed.splitlines() if line.startswith("THREADS")]  # atexit's first is its last
    assert "gloo" not in line, line


def test_srun_starts_one_task_per_process(two_ranks, tmp_path):
    """What srun sets for two tasks on one node."""
    env = {"SLURM_JOB_ID": "9", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NODEID": "0",
           "SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_PORT": str(free_port())}  # fmt: skip
    script = [*command("train_ddp", *TWO), "--output_dir", str(tmp_path / "out")]
    tasks = [Popen(script, cwd=tmp_path, env=environment(**env, SLURM_PROCID=str(n), SLURM_LOCALID=str(n))) for n in range(2)]
    assert [task.wait(PATIENCE) for task in tasks] == [0, 0]
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))


@pytest.mark.parametrize("platform", local.PLATFORMS)
@pytest.mark.parametrize("nodes", [1, 2, 12])
def test_what_the_local_platform_injects_is_what_the_resolver_understands(platform, nodes):
    for number in range(nodes):
        injected, env = local.PLATFORMS[platform](number, nodes, 6666)
        args = arguments.parse(cifar10.parser(""), injected, {})
        here = world.resolve(args, {**env, "NPROC_PER_NODE": "2"}, 0, "host")
        assert (here.level, here.node_rank, here.num_nodes, here.world_size) == ("node", number, nodes, 2 * nodes)
        assert nodes == 1 or (here.master_addr, here.master_port) == (local.HOST, 6666)


@pytest.mark.parametrize("platform", in_rehearsal(["modelarts", "pai-dlc"], lambda platform: platform == "pai-dlc"))
def test_a_platform_that_starts_a_job_once_per_node(two_ranks, tmp_path, platform):
    job = [ROOT / "jobs" / "train_ddp.py", "--", *TWO, "--output_dir", tmp_path / "out"]
    done = run(
        [sys.executable, "-m", "launch", "local", "--nodes", 2, "--platform", platform, *job], cwd=ROOT, env=environment()
    )
    assert done.returncode == 0, done.stdout
    assert ", platform torchrun (" not in done.stdout, "the workers know what their parent recognised"
    assert "[node 1] node 1: starting rank 1 of 2" in done.stdout and "exit codes 0 0" in done.stdout
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))
    lines = done.stdout.splitlines()
    first = next(number for number, line in enumerate(lines) if " step=1/" in line)
    assert first < 15 and "left=? " in lines[first], lines
    story = " ".join(line for line in lines[:first] if line.startswith("[node 0]"))
    for words in (
        "starting rank",
        "rank 0 of 2",
        f"platform {platform}",
        "a new run: 2 epochs",
        "64 training samples of 10 classes",
        f"results in {tmp_path}/out",
    ):
        assert words in story, story
    endings = [line.partition("] ")[2] for line in lines if line.startswith("[node 0]")][-3:]
    assert [line.partition(":")[0] for line in endings] == ["done", "files", "next"]


def test_a_mistake_is_not_started_again(tmp_path):
    words = ["--restarts", "3", str(ROOT / "jobs" / "train_ddp.py"), "--", "--ephocs", "3"]
    script = [sys.executable, "-m", "launch", "local", *words]
    done = run(script, cwd=ROOT, env=environment())
    assert done.returncode == 2 and done.stdout.count("did you mean --epochs?") == 1, done.stdout + done.stderr


def test_who_reads_only_the_first_lines_sees_no_traceback():
    words = ["submit", "jobs/train.py", "--platform", "kubeflow", "--image", "i", "--code_url", "/mnt/c", "--volumes", "v:/mnt"]
    words += ["--output_url", "/mnt/o"]
    script = [sys.executable, "-m", "launch", *words, "--dry_run", "true"]
    process = subprocess.Popen(script, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() != 0


@pytest.mark.rehearsal
@pytest.mark.parametrize("path", [blocks.job_of(tag) for tag in ("DP", "DDP", "AMP")], ids=lambda path: path.name)
def test_the_commands_of_the_how_to_start_block_run(path, two_ranks, tmp_path):
    """Those of DDP, one of them torchrun's and one the old launcher's, all end with the bits of the same two ranks."""
    lines = [line.strip("# \n") for line in path.read_text().split("import os")[0].splitlines()]
    commands = [
        re.split(r"  +", line)[0] for line in lines if re.match(rf"(python|torchrun) .*{path.name}.*--custom_data true", line)
    ]
    several = path == blocks.job_of("DDP")
    assert len(commands) == 3 if several else commands
    for index, line in enumerate(commands):
        (folder := tmp_path / str(index)).mkdir()
        words = line.replace("torchrun", "python -m torch.distributed.run").split()
        words = [
            sys.executable if word == "python" else str(ROOT / word) if word.startswith("jobs/") else word for word in words
        ]
        script = [*words, *(TWO if several else [*TINY, "--epochs", "1"]), "--output_dir", str(folder / "out")]
        done = subprocess.run(script, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, (line, done.stderr)
        if several:
            assert_same_bits(final_state(folder), final_state(two_ranks[0]))
