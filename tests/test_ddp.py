"""The DDP job as real processes: every way to start it, the same samples at every size, and each block needed."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common import arguments, world
from launch import blocks, local
from tests.jobs import ROOT, TINY, assert_same_bits, command, environment, final_state, run_job
from tests.test_train import saved, start, wait_for

TWO = [*TINY[:4], "--batch_size", "32", *TINY[6:], "--ledger", "true"]  # two ranks: a global batch of 64, as in TINY
CHECK = [sys.executable, str(ROOT / "tests" / "check_ledger.py"), "--samples", "256", "--global_batch", "64"]


def check_ledger(*folders):
    done = subprocess.run([*CHECK, *map(str, folders)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    return folder, run_job("train_ddp", folder, *TWO, "--nproc_per_node", 2).stdout


# --- Started in every way ----------------------------------------------------------------------------------------------


def test_two_processes_do_what_one_does_only_faster(two_ranks):
    """Every sample once, one line per event, the learning rate stated, every test image counted once."""
    folder, printed = two_ranks
    check_ledger(folder / "out")
    assert "rank 0 of 2" in printed and "learning rate 0.2 for a global batch of 64" in printed
    assert printed.count("epoch=2/2 steps=8 accuracy=") == 1 and printed.count("done: ") == 1
    report = (folder / "out" / "report.txt").read_text()
    assert re.search(r"accuracy +0\.\d+ +256\.0", report), report
    assert json.loads((folder / "out" / "checkpoints" / "000000000512.json").read_text())["world_size"] == 2


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
LAUNCH = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node", "2", "--master_port"]


@pytest.mark.parametrize(
    "launcher",
    [[*TORCHRUN, "29621"], [*LAUNCH, "29622"], [*LAUNCH, "29623", "--use_env"]],
    ids=["torchrun", "launch", "use_env"],
)
def test_torchs_own_launchers(two_ranks, tmp_path, launcher):
    run_job("train_ddp", tmp_path, *TWO, launcher=launcher)
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))


def test_srun_starts_one_task_per_process(two_ranks, tmp_path):
    """What srun sets for two tasks on one node."""
    env = {"SLURM_JOB_ID": "9", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NODEID": "0",
           "SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_PORT": "29624"}  # fmt: skip
    script = [*command("train_ddp", *TWO), "--output_dir", str(tmp_path / "out")]
    tasks = [
        subprocess.Popen(script, cwd=tmp_path, env=environment(**env, SLURM_PROCID=str(n), SLURM_LOCALID=str(n)))
        for n in range(2)
    ]
    assert [task.wait(120) for task in tasks] == [0, 0]
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))


@pytest.mark.parametrize("platform", local.PLATFORMS)
@pytest.mark.parametrize("nodes", [1, 2, 12])
def test_what_the_local_platform_injects_is_what_the_resolver_understands(platform, nodes):
    for number in range(nodes):
        injected, env = local.PLATFORMS[platform](number, nodes, 6666)
        args = arguments.parse(arguments.parser(""), injected, {})
        here = world.resolve(args, {**env, "NPROC_PER_NODE": "2"}, 0, "host")
        assert (here.level, here.node_rank, here.num_nodes, here.world_size) == ("node", number, nodes, 2 * nodes)
        assert nodes == 1 or (here.master_addr, here.master_port) == (local.HOST, 6666)


@pytest.mark.parametrize("platform", ["modelarts", "pai-dlc"])
def test_a_platform_that_starts_a_job_once_per_node(two_ranks, tmp_path, platform):
    script = [
        sys.executable,
        "-m",
        "launch",
        "local",
        "--nodes",
        "2",
        "--platform",
        platform,
        str(ROOT / "jobs" / "train_ddp.py"),
        "--",
        *TWO,
    ]
    done = subprocess.run(
        [*script, "--output_dir", str(tmp_path / "out")],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert ", platform torchrun (" not in done.stdout, "the workers know what their parent recognised"
    assert "[node 1] node 1: starting rank 1 of 2" in done.stdout and "exit codes 0 0" in done.stdout
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))


@pytest.mark.parametrize("path", [blocks.job_of(tag) for tag in ("DP", "DDP", "AMP")], ids=lambda path: path.name)
def test_the_commands_of_the_how_to_start_block_run(path, tmp_path):
    lines = [line.strip("# \n") for line in path.read_text().split("import os")[0].splitlines()]
    commands = [
        re.split(r"  +", line)[0] for line in lines if re.match(rf"(python|torchrun) .*{path.name}.*--custom_data true", line)
    ]
    assert commands
    for index, line in enumerate(commands):
        words = line.replace("torchrun", "python -m torch.distributed.run").split()
        words = [
            sys.executable if word == "python" else str(ROOT / word) if word.startswith("jobs/") else word for word in words
        ]
        script = [*words, *TINY, "--epochs", "1", "--output_dir", str(tmp_path / str(index))]
        done = subprocess.run(script, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, (line, done.stderr)


# --- The same samples at every size ------------------------------------------------------------------------------------


def test_resumed_at_another_size_no_sample_is_lost_or_repeated(tmp_path):
    """4 ranks, killed in mid-epoch; 1 rank, stopped; 2 ranks to the end. The global batch stays that of the first start."""
    four = [*TINY[:4], "--batch_size", "16", *TINY[6:], "--ledger", "true", "--save_steps", "1"]
    process = start(tmp_path, *four, "--nproc_per_node", 4, job="train_ddp")
    wait_for(saved(tmp_path, 64), process, "a checkpoint in mid-epoch")
    process.kill()
    process.wait()
    done = run_job("train_ddp", tmp_path, *four, "--max_steps", 7)
    assert "going on from" in done.stdout
    assert "learning rate 0.4 for a global batch of 64" in done.stdout
    run_job("train_ddp", tmp_path, *four, "--nproc_per_node", 2)
    check_ledger(tmp_path / "out")
    refused = run_job("train_ddp", tmp_path, *four, "--epochs", 3, "--nproc_per_node", 3, check=2)
    assert "a global batch of 64 does not divide among 3 ranks; use one of [1, 2, 4, 8, 16, 32, 64] ranks" in refused.stderr


def test_killed_and_resumed_at_the_same_size_the_bits_are_the_same(two_ranks, tmp_path):
    process = start(tmp_path, *TWO, "--save_steps", 1, "--nproc_per_node", 2, job="train_ddp")
    wait_for(saved(tmp_path, 192), process, "a checkpoint in mid-epoch")
    process.kill()
    process.wait()
    done = run_job("train_ddp", tmp_path, *TWO, "--nproc_per_node", 2)
    assert "going on from" in done.stdout
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))
    check_ledger(tmp_path / "out")


def test_sigterm_saves_a_step_that_all_ranks_have_done(two_ranks, tmp_path):
    process = start(tmp_path, *TWO, "--save_steps", 1, "--nproc_per_node", 2, job="train_ddp")
    wait_for(saved(tmp_path, 64), process, "the first checkpoint")
    process.send_signal(signal.SIGTERM)
    assert process.wait(40) == 143, (tmp_path / "log").read_text()
    assert "stopped by SIGTERM; saved after step" in (tmp_path / "log").read_text()
    run_job("train_ddp", tmp_path, *TWO, "--nproc_per_node", 2)
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))
    check_ledger(tmp_path / "out")


def test_sigterm_under_the_users_own_torchrun_saves_too(two_ranks, tmp_path):
    log = open(tmp_path / "log", "w")  # noqa: SIM115
    script = [*TORCHRUN, "29631", *command("train_ddp", *TWO, "--save_steps", 1, "--output_dir", tmp_path / "out")[1:]]
    process = subprocess.Popen(script, cwd=tmp_path, env=environment(), stdout=log, stderr=log)
    wait_for(saved(tmp_path, 64), process, "the first checkpoint")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1  # torchrun's own
    assert "stopped by SIGTERM; saved after step" in (tmp_path / "log").read_text()
    run_job("train_ddp", tmp_path, *TWO, "--nproc_per_node", 2)
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_gradients_of_w_ranks_are_those_of_one_process(world_size, mode, tmp_path):
    """float64, to 1e-10: with BatchNorm in eval mode the whole batch at once, in train mode its W slices averaged."""
    script = str(ROOT / "tests" / "gradients.py")
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world_size), "--master_port", "29641", script]
    for words, name in ((run, "ranks"), ([sys.executable, script], "alone")):
        done = subprocess.run(
            [*words, mode, str(world_size), str(tmp_path / name)],
            env=environment(PYTHONPATH=str(ROOT)),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    ranks, alone = (torch.load(tmp_path / name, weights_only=True) for name in ("ranks", "alone"))
    assert len(ranks) == 62
    for one, other in zip(ranks, alone):
        assert one.dtype == torch.float64 and torch.allclose(one, other, rtol=0, atol=1e-10)


# --- Each block is needed ----------------------------------------------------------------------------------------------


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


def run_variant(job, folder, *options, check=None):
    script = [sys.executable, str(job), *map(str, options), "--output_dir", str(folder / "out")]
    done = subprocess.run(script, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)
    return done


DDP_FAILS = [
    "unknown option --nproc_per_node|has no attribute|not defined",  # options
    "2 processes were asked for but only this one runs",  # start_workers
    "process group has not been initialized",  # join
    "samples came twice",  # shard
    "the tensors differ",  # wrap
    "no learning rate",  # learning rate
    "half of the test images",  # all_reduce
]


def ddp_complaint(done, folder, reference):
    """What is wrong with a two-rank run, the first thing of all that the intact job satisfies; None for the intact one."""
    if done.returncode:
        return done.stderr
    ledger = subprocess.run([*CHECK, str(folder / "out")], capture_output=True, text=True)
    if ledger.returncode:
        return ledger.stdout
    if "learning rate 0.2" not in done.stdout:
        return "no learning rate"
    if "256.0" not in (folder / "out" / "report.txt").read_text():
        return "half of the test images"
    try:
        assert_same_bits(final_state(folder)["model"], final_state(reference)["model"])
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.parametrize("number", range(len(DDP_FAILS)))
def test_every_ddp_block_is_needed(number, two_ranks, tmp_path):
    job = without_block(blocks.job_of("DDP"), number, tmp_path)
    complaint = ddp_complaint(run_variant(job, tmp_path, *TWO, "--nproc_per_node", 2), tmp_path, two_ranks[0])
    assert complaint and re.search(DDP_FAILS[number], complaint), complaint


def test_the_intact_ddp_job_has_none_of_these_faults_and_no_other_block(two_ranks):
    done = subprocess.CompletedProcess([], 0, two_ranks[1], "")
    assert ddp_complaint(done, *[two_ranks[0]] * 2) is None
    assert len([block for block in blocks.read(blocks.job_of("DDP"))[1] if block.code]) == len(DDP_FAILS)


def amp_complaint(done, folder):
    """What is wrong with a float16 run of two epochs of four steps."""
    if done.returncode:
        return done.stderr
    state = torch.load(folder / "out" / "checkpoints" / "000000000512.pt", weights_only=True)
    if "scaler" not in state:
        return "the scale is not in the checkpoint"
    if state["scaler"]["_growth_tracker"] != 8:
        return "the scaler did not see 8 steps"
    if "computed in half precision" not in done.stdout:
        return "computed in full precision"
    return None


AMP_FAILS = [
    "unknown option --amp_dtype|has no attribute 'amp_dtype'",
    "name 'amp_dtype' is not defined|name 'scaler' is not defined",
    "the scale is not in the checkpoint",
    "computed in full precision",
    "the scaler did not see 8 steps",
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


def run_amp(job, folder):
    script = [
        sys.executable,
        "-c",
        WATCH_PRECISION,
        str(job),
        *TINY,
        "--amp_dtype",
        "float16",
        "--output_dir",
        str(folder / "out"),
    ]
    return subprocess.run(script, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("number", range(len(AMP_FAILS)))
def test_every_amp_block_is_needed(number, tmp_path):
    job = without_block(blocks.job_of("AMP"), number, tmp_path)
    complaint = amp_complaint(run_amp(job, tmp_path), tmp_path)
    assert complaint and re.search(AMP_FAILS[number], complaint), complaint


def test_the_intact_amp_job_has_none_of_these_faults_and_no_other_block(tmp_path):
    assert amp_complaint(run_amp(blocks.job_of("AMP"), tmp_path), tmp_path) is None
    assert len([block for block in blocks.read(blocks.job_of("AMP"))[1] if block.code]) == len(AMP_FAILS)


@pytest.mark.parametrize("intact", [True, False])
def test_the_dp_block_is_needed(intact, tmp_path):
    """Without a GPU DataParallel changes nothing, so the variant runs with one that says when it is used."""
    watch = "import runpy, sys, torch\nclass Watched(torch.nn.DataParallel):\n    def forward(self, *x):\n        print('split over the GPUs'); return super().forward(*x)\n"
    watch += "torch.nn.DataParallel = Watched\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    job = blocks.job_of("DP") if intact else without_block(blocks.job_of("DP"), 0, tmp_path)
    script = [sys.executable, "-c", watch, str(job), *TINY, "--output_dir", str(tmp_path / "out")]
    done = subprocess.run(script, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and ("split over the GPUs" in done.stdout) == intact


# --- Half precision ----------------------------------------------------------------------------------------------------


def test_amp_resumed_in_mid_epoch_equals_the_uninterrupted_run(tmp_path):
    for dtype in ("bfloat16", "float16"):
        whole, parts = tmp_path / dtype / "whole", tmp_path / dtype / "parts"
        for folder, steps in ((whole, []), (parts, ["--max_steps", 2]), (parts, [])):
            folder.mkdir(parents=True, exist_ok=True)
            run_job("train_amp", folder, *TINY, "--epochs", 1, "--amp_dtype", dtype, *steps)
        assert_same_bits(final_state(whole), final_state(parts))


@pytest.mark.parametrize(
    "gpu, capability, expected",
    [
        ("V100", (7, 0), torch.float16),
        ("T4", (7, 5), torch.float16),
        ("P100", (6, 0), torch.float16),
        ("A100", (8, 0), torch.bfloat16),
        ("H200", (9, 0), torch.bfloat16),
        ("L4", (8, 9), torch.bfloat16),
    ],
)
def test_bfloat16_where_the_hardware_has_it(monkeypatch, gpu, capability, expected):
    import types

    from common import devices

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: types.SimpleNamespace(major=capability[0], name=gpu))
    args = types.SimpleNamespace(amp_dtype=None)
    assert devices.half_precision(args, torch.device("cuda")) == expected
    assert devices.half_precision(types.SimpleNamespace(amp_dtype="float16"), torch.device("cuda")) == torch.float16
    assert devices.half_precision(args, torch.device("cpu")) == torch.bfloat16


# --- A dead peer never hangs the rest ----------------------------------------------------------------------------------


def children(process):
    """The processes that this one has started."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def workers_of(pids):
    """{rank: pid} of those processes that are workers."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, KeyError):
            env = dict(word.partition("=")[::2] for word in Path(f"/proc/{pid}/environ").read_text().split("\0"))
            found[int(env["RANK"])] = pid
    return found


LONG = [*TWO, "--epochs", "200"]


@pytest.mark.parametrize(
    "number, line",
    [
        (signal.SIGKILL, r"rank 1 \(node 0, host \S+\) was killed by SIGKILL, perhaps for want of memory after step \d+"),
        (signal.SIGSTOP, r"rank 1 \(node 0, host \S+\) is stopped \(state T\) after step \d+"),
    ],
)
def test_a_killed_or_stopped_rank_is_named_and_everyone_stops(tmp_path, number, line):
    process = start(tmp_path, *LONG, "--nproc_per_node", 2, "--save_steps", 1, job="train_ddp")
    wait_for(saved(tmp_path, 128), process, "a few steps")
    workers = workers_of(children(process))
    assert sorted(workers) == [0, 1]
    os.kill(workers[1], number)
    begun = time.monotonic()
    assert process.wait(30) == 1
    assert time.monotonic() - begun < 10
    log = (tmp_path / "log").read_text()
    assert re.search(rf"error: {line}, in phase \w+; stopping all 2 ranks", log), log
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers.values())


def test_a_worker_that_dies_is_started_again_from_the_last_checkpoint(tmp_path):
    options = [*TWO, "--epochs", 12, "--nproc_per_node", 2]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    run_job("train_ddp", whole, *options)
    process = start(
        parts, *options, "--save_steps", 1, "--max_restarts", 1, "--resume", "never", "--overwrite", "true", job="train_ddp"
    )
    wait_for(saved(parts, 128), process, "a few steps")
    os.kill(workers_of(children(process))[1], signal.SIGKILL)
    assert process.wait(60) == 0
    assert "restart 1 of 1 from the last checkpoint" in (parts / "log").read_text()
    assert_same_bits(final_state(parts), final_state(whole))
    check_ledger(parts / "out")


def test_a_users_mistake_is_one_line_however_many_ranks(tmp_path):
    done = run_job("train_ddp", tmp_path, *TWO, "--nproc_per_node", 2, "--batch_size", 256, check=2)
    assert len(done.stderr.splitlines()) == 1 and "fewer than one global batch of 512" in done.stderr, done.stderr


# --- Nodes that do not fit together ------------------------------------------------------------------------------------


def node(folder, port, rank, world_size, *options, env=None, script=None):
    words = [
        *TWO,
        "--init_method",
        f"tcp://127.0.0.1:{port}",
        "--rank",
        rank,
        "--world_size",
        world_size,
        "--join_seconds",
        30,
        *options,
    ]
    own = folder / f"node{rank}-{len(list(folder.iterdir()))}"
    own.mkdir()
    words = [sys.executable, script or str(ROOT / "jobs" / "train_ddp.py"), *map(str, words), "--output_dir", str(own / "out")]
    return subprocess.Popen(
        words, cwd=own, env=environment(**(env or {})), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def listening(port):
    return any(f":{port:04X} " in line and " 0A " in line for line in Path("/proc/net/tcp6").read_text().splitlines())


def outcome(process):
    text, _ = process.communicate(timeout=90)
    assert "Traceback" not in text, text
    return process.returncode, text.splitlines()[-1]


def test_a_node_that_never_comes_is_named(tmp_path):
    nodes = [node(tmp_path, 29651, rank, 3, "--join_seconds", 4) for rank in (0, 2)]
    for process in nodes:
        code, line = outcome(process)
        assert code == 2 and "node 1 (rank 1) did not come within 4 s" in line


def test_a_stop_while_waiting_for_the_other_nodes_ends_at_once(tmp_path):
    process = node(tmp_path, 29657, 0, 2)
    wait_for(lambda: listening(29657), process, "listening for the others")
    process.terminate()
    assert process.wait(20) == 143


def test_two_nodes_with_the_same_rank_are_both_named(tmp_path):
    nodes = [node(tmp_path, 29652, rank, 3) for rank in (0, 1, 1)]
    for process in nodes:
        code, line = outcome(process)
        assert code == 2 and re.search(r"duplicate rank: host \S+ and host \S+ both say they are node 1", line), line


def test_a_port_that_another_program_has_stops_every_node(tmp_path):
    with __import__("socket").create_server(("", 29653)):
        nodes = [node(tmp_path, 29653, rank, 2) for rank in (0, 1)]
        (code0, line0), (code1, line1) = (outcome(process) for process in nodes)
    assert code0 == 2 and "port 29653 on this node is taken by another program" in line0
    assert code1 == 2 and "answers but is not node 0 of this job" in line1


def test_a_second_job_on_the_same_port_is_sent_away_and_the_first_goes_on(tmp_path):
    first = node(tmp_path, 29654, 0, 2, env={"MA_VJ_NAME": "mine"})
    intruder = node(tmp_path, 29654, 1, 2, env={"MA_VJ_NAME": "yours"})
    code, line = outcome(intruder)
    assert code == 2 and "this port belongs to another job, 'mine'" in line
    second = node(tmp_path, 29654, 1, 2, env={"MA_VJ_NAME": "mine"})
    assert [outcome(process)[0] for process in (first, second)] == [0, 0]


@pytest.mark.parametrize("what", ["arguments", "code"])
def test_a_node_that_runs_something_else_is_named(tmp_path, what):
    script, options = None, []
    if what == "arguments":
        options = ["--lr", "0.3"]
    else:
        (tmp_path / "other" / "jobs").mkdir(parents=True)
        for name in ("common", "datasets"):
            (tmp_path / "other" / name).symlink_to(ROOT / name)
        script = tmp_path / "other" / "jobs" / "train_ddp.py"
        script.write_text((ROOT / "jobs" / "train_ddp.py").read_text() + "\n# stale upload\n")
    nodes = [node(tmp_path, 29655, 0, 2), node(tmp_path, 29655, 1, 2, *options, script=script and str(script))]
    for process in nodes:
        code, line = outcome(process)
        expected = (
            r"arguments differs: lr=0.1 on node 0 .*, lr=0.3 on node 1"
            if what == "arguments"
            else r"code differs: \w+ on node 0 .* on node 1"
        )
        assert code == 2 and re.search(expected, line), line


def test_under_torchrun_the_ranks_themselves_compare(tmp_path):
    """One node's torchrun got another learning rate."""
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc_per_node",
        "1",
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        "29656",
    ]
    nodes = []
    for rank in range(2):
        script = command("train_ddp", *TWO, "--lr", 0.1 + 0.1 * rank, "--output_dir", tmp_path / str(rank))[1:]
        nodes.append(
            subprocess.Popen(
                [*words, "--node_rank", str(rank), *script],
                cwd=tmp_path,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for process in nodes:
        text, _ = process.communicate(timeout=90)
        assert process.returncode and "arguments differs: lr=0.1 on rank 0" in text and "lr=0.2 on rank 1" in text, text
