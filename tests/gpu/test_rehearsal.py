"""What is for GPUs, on a stand-in for the CUDA runtime: that it runs, on which device, and what it asks of the GPU in a step."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from common.devices.largest_batch import with_margin
from tests.benchmarks import libraries
from tests.gpu import rehearsal
from tests.gpu.rehearsal import costs
from tests.gpu.table import ROWS
from tests.tools.jobs import PATIENCE, ROOT, command, environment, saved, wait_for
from tests.tools.objectstore import free_port
from tests.tools.packages import packages_of, python_package, python_program

pytestmark = pytest.mark.rehearsal  # minutes

SMALL = ["--custom_data", "true", "--max_samples", "1024", "--batch_size", "64", "--epochs", "1"]
PHOTOS = ["--custom_data", "true", "--data_backend", "synthetic", "--arch", "resnet18", "--image_size", "64", "--batch_size", "16",
          "--epochs", "1", "--max_steps", "6"]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def stand_in():
    rehearsal.need_what_builds_it()


def rehearse(folder, *words, gpus=1, check=0, seconds=PATIENCE, **env):
    """What a command printed on so many GPUs."""
    env = environment(**rehearsal.environment(gpus, **env))
    words = [str(word) for word in words]
    done = subprocess.run(
        words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
    )
    assert done.returncode == check, f"exit code {done.returncode}\n{done.stdout}"
    return done.stdout


@pytest.mark.parametrize("name", costs.ROWS)
def test_a_step_costs_no_more_than_the_table_says(name):
    row, waits = costs.measure(name)
    assert costs.too_much(name, row) == [], f"{row}\nthe host waits here: {waits}"


def test_a_checkpoint_in_each_step_does_not_make_the_training_wait_for_the_gpu():
    row, waits = costs.measure("train", "--save_steps", "1")
    assert row["copies out"] > 100  # of the thread that writes
    assert [place for place in waits if place.startswith("MainThread")] == []


def test_choosing_a_gpu_sets_it_up_and_imports_what_optimizers_need(tmp_path):
    code = "from common import devices\nfrom jobs.train import cifar10, arguments\nimport sys, torch"
    code += "\ndevices.choose(arguments.parse(cifar10.parser('')))"
    code += "\nprint(torch.cuda.memory_reserved() > 0, 'torch._dynamo' in sys.modules)"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    assert rehearse(tmp_path, sys.executable, "-c", code, "--custom_data", "true").splitlines()[-1] == "True True"


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LOCAL = [sys.executable, "-m", "launch", "local", "--nodes", "2"]


@pytest.mark.parametrize(
    ("words", "gpus", "says"),
    [
        ([*TORCHRUN, "--nproc_per_node", "2", ROOT / "jobs" / "train_ddp.py", *SMALL], 2, "rank 0 of 2"),
        ([*LOCAL, ROOT / "jobs" / "train_ddp.py", "--", *SMALL], 2, "rank 0 of 2"),
        ([*LOCAL, ROOT / "jobs" / "train_ddp_amp.py", "--", *SMALL], 4, "rank 0 of 4"),
        (command("train_ddp", *SMALL), 2, "rank 0 of 2"),
        (
            command("train_restore", "--custom_data", "true", "--epochs", "1", "--max_steps", "4", "--deterministic", "true"),
            2,
            "rank 0 of 2",
        ),
        (command("train_imagenet", *PHOTOS, "--max_steps", "20", "--prof", "4"), 1, "Training speed was"),
        (
            command(
                "train_imagenet", *PHOTOS, "--amp_dtype", "float16", "--mixup", "0.2", "--ema", "0.9", "--deterministic", "true"
            ),
            2,
            "rank 0 of 2",
        ),
        (command("train_ddp", *SMALL, "--doctor", "true"), 2, "torch sees 2"),
        (command("train", *SMALL), 2, "1 of 2 GPUs are idle"),
        (
            command("train", *SMALL, "--max_samples", "2048", "--profile", "true", "--deterministic", "true"),
            1,
            "profile: 10 steps",
        ),
        (command("train_ddp", *SMALL, "--width", "4", "--nproc_per_node", "2", "--enable_gpu", "false"), 1, "cpu (1 thread)"),
    ],
    ids=lambda value: str(value[-1]) if isinstance(value, list) else None,
)
def test_a_job_runs_on_the_gpus_that_there_are(tmp_path, words, gpus, says):
    local = ["--output_dir", tmp_path / "out"]
    printed = rehearse(ROOT, *words, *local, gpus=gpus)
    assert says in printed and ("cuda:0 (Rehearsal GPU)" in printed) == (
        says not in ("torch sees 2", "cpu (1 thread)", "Training speed was")
    )


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_network_is_evaluated_alone(tmp_path, gpus):
    words = [*command("train_imagenet", *PHOTOS), "--output_dir", tmp_path / "out"]
    rehearse(tmp_path, *words, gpus=gpus)
    printed = rehearse(tmp_path, *words, "--evaluate", "true", gpus=gpus)
    assert "accuracy" in printed and (tmp_path / "out" / "evaluation.json").exists()


def test_two_slices_of_a_gpu_are_two_gpus(tmp_path):
    out = ["--output_dir", tmp_path / "out"]
    printed = rehearse(tmp_path, *command("train_ddp", *SMALL), *out, CUDA_VISIBLE_DEVICES="MIG-a,MIG-b")
    assert "starting ranks 0 to 1 of 2" in printed and "cuda:0 (Rehearsal GPU), rank 0 of 2" in printed


def test_more_workers_than_gpus_are_refused_in_a_sentence(tmp_path):
    printed = rehearse(tmp_path, *command("train_ddp", *SMALL, "--nproc_per_node", "2"), check=2)
    assert "2 processes on a node with 1 GPU: give --nproc_per_node 1, or --enable_gpu false to train on the CPU" in printed


def test_two_ranks_on_one_gpu_are_named(tmp_path):
    """As in a SLURM step whose processes see one GPU for all of them."""
    env = {"SLURM_JOB_ID": "9", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NODEID": "0",
           "SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_PORT": str(free_port()), **rehearsal.environment(1)}  # fmt: skip
    tasks = [
        subprocess.Popen(
            command("train_ddp", *SMALL, "--output_dir", tmp_path),
            env=environment(**env, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for task in tasks:
        assert "ranks 0 and 1 compute on the same GPU of host" in task.communicate(timeout=PATIENCE)[1] and task.returncode == 2


def test_a_stop_saves_and_the_next_start_goes_on(tmp_path):
    words = [*command("train", *SMALL, "--epochs", 50, "--save_steps", 4), "--output_dir", str(tmp_path / "out")]
    process = subprocess.Popen(words, cwd=tmp_path, env=environment(**rehearsal.environment()), stdout=subprocess.DEVNULL)
    wait_for(saved(tmp_path, 256), process, "the first checkpoint")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 143
    assert "going on from" in rehearse(tmp_path, *words, "--max_steps", 1)


CAPTURE = """
import json, torch
place, other = torch.ones(4, device="cuda"), torch.cuda.Stream()
found, graph = {}, torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    place.add_(1)
graph.replay()
for name, act in {"item": lambda: place.sum().item(), "wait": torch.cuda.synchronize, "pageable": lambda: torch.ones(4).to("cuda")}.items():
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            act()
        found[name] = "allowed"
    except RuntimeError as error:
        found[name] = str(error).splitlines()[0]
print(json.dumps(found))
"""


GRAPH = """
import ctypes, json, sys
import torch
from common.devices.graphs import one_graph
from common.devices.seeds import seed_step

GPU = torch.device("cuda", 0)
dropout, groups = float(sys.argv[1]), int(sys.argv[2])
layers = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)]
network = torch.nn.Sequential(layers[0], torch.nn.Dropout(dropout), layers[1]).to(GPU)
parts = [network] if groups == 1 else layers
optimizer = torch.optim.SGD([{"params": part.parameters()} for part in parts], lr=0.1, momentum=0.9, fused=True)
library = ctypes.CDLL(None)
sizes_seen_by_python, rates, hooks, losses, launches = [], [], [], [], []
optimizer.register_step_pre_hook(lambda *_: hooks.append("before"))
optimizer.register_step_post_hook(lambda *_: hooks.append("after"))

def train_step(images, labels):
    sizes_seen_by_python.append(len(images))
    rates.append(type(optimizer.param_groups[0]["lr"]).__name__)
    loss = torch.nn.functional.cross_entropy(network(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()

step = one_graph(GPU, train_step)
for number in range(8):
    size = 4 if number == 6 else 6
    images, labels = torch.empty(size, 8, device=GPU), torch.empty(size, dtype=torch.int64, device=GPU)
    seed_step(0, number, 0)
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (number + 1)
    library.rehearsal_forget()
    losses.append(step(images, labels))
    text = ctypes.create_string_buffer(4096)
    library.rehearsal_counts(text, 4096)
    counts = dict(line.rsplit("=", 1) for line in text.value.decode().splitlines())
    launches.append([int(counts.get(f"main {what}", 0)) for what in ("graphs", "launches")])
print(json.dumps({"python": sizes_seen_by_python, "rates": rates, "hooks": hooks, "launches": launches,
                  "losses": len({loss.data_ptr() for loss in losses}), "rate": optimizer.param_groups[0]["lr"]}))
"""


def graph_of_a_step(folder, dropout=0.5, groups=1):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{GRAPH}"
    return json.loads(rehearse(folder, sys.executable, "-c", code, dropout, groups).splitlines()[-1])


def test_a_step_is_recorded_at_the_fourth_call_and_another_size_goes_without_the_recording(tmp_path):
    found = graph_of_a_step(tmp_path)
    assert found["python"] == [6, 6, 6, 6, 4]
    assert [graphs for graphs, _ in found["launches"]] == [0, 0, 0, 1, 1, 1, 0, 1]


def test_losses_of_a_graph_are_kept_and_every_step_calls_the_optimizers_hooks(tmp_path):
    found = graph_of_a_step(tmp_path)
    assert found["losses"] == 8
    assert found["hooks"] == ["before", "after"] * 8


def test_a_graph_reads_its_rates_from_the_device_and_the_host_keeps_numbers(tmp_path):
    one, two = (graph_of_a_step(tmp_path, groups=groups) for groups in (1, 2))
    assert one["rates"] == [*["float"] * 3, "Tensor", "float"]  # a tensor where it was recorded
    assert one["rate"] == 0.1 / 8
    assert two["launches"][5][1] == one["launches"][5][1] + 1  # each replay fills the rate of each group


def test_a_graph_with_dropout_is_told_the_seed_of_its_step(tmp_path):
    with_dropout, without = (graph_of_a_step(tmp_path, dropout=share) for share in (0.5, 0.0))
    assert with_dropout["launches"][5][1] > without["launches"][5][1]


SNAPSHOT = """
import ctypes, json
import torch
from common.checkpoints.checkpoint import Snapshot

library = ctypes.CDLL(None)

def counted():
    text = ctypes.create_string_buffer(4096)
    library.rehearsal_counts(text, 4096)
    library.rehearsal_forget()
    return {what: int(number) for what, number in (line.rsplit("=", 1) for line in text.value.decode().splitlines())}

weights = torch.arange(2**23, dtype=torch.float32)  # 32 MiB
last = torch.device("cuda", torch.cuda.device_count() - 1)
model = {"weights": weights.to("cuda"), "steps": torch.tensor(3), "more": torch.ones(1).to(last)}
counted()
snapshot = Snapshot({"model": model, "history": [1, 2]})
while_training_waits = counted()
model["weights"].copy_(torch.zeros(2**23, device="cuda"))
model["steps"].zero_()
counted()
found = snapshot.on_host()
print(json.dumps({"training": while_training_waits, "writer": counted(), "history": found["history"],
                  "right": torch.equal(found["model"]["weights"], weights) and found["model"]["steps"].item() == 3,
                  "devices": [str(tensor.device) for tensor in found["model"].values()]}))
"""


@pytest.mark.parametrize(
    "mib, gpus, waits", [(256, 1, False), (80, 1, True), (256, 2, True)], ids=["room for two", "hardly room", "two GPUs"]
)
def test_the_training_waits_for_no_copy_of_its_state_if_the_gpu_has_room_for_another(tmp_path, mib, gpus, waits):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SNAPSHOT}"
    found = json.loads(rehearse(tmp_path, sys.executable, "-c", code, gpus=gpus, REHEARSAL_MIB=str(mib)).splitlines()[-1])
    assert found["right"] and found["history"] == [1, 2] and found["devices"] == ["cpu"] * 3
    assert ("main copies out" in found["training"]) == waits
    assert ("main synchronisations" in found["training"]) == waits
    assert ("main copies out" in found["writer"]) == (not waits)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_of_make_gpu_comes_to_its_end(tmp_path, row):
    """Numbers mean nothing here, so they are not judged; how the programs behave is."""
    more = {"out of memory": {"REHEARSAL_MIB": "2048"}}
    if row == "other libraries":
        folders = [packages_of(python_program("python", requirement)) for requirement in libraries.NEEDS.values()]
        path = [rehearsal.environment()["PYTHONPATH"], *folders, python_package("timm==1.0.31")]
        more[row] = {"PYTHONPATH": os.pathsep.join(map(str, path))}
    words = [
        sys.executable,
        "-m",
        "tests.gpu",
        "--out",
        tmp_path,
        "--work",
        tmp_path / "work",
        "--rounds",
        "1",
        "--slower",
        "4",
        "--only",
        row,
    ]
    printed = rehearse(ROOT, *words, seconds=2400, OMP_NUM_THREADS="2", **more.get(row, {}))
    (found,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert found["verdict"] in ("passed", "not judged"), printed


def test_what_waits_cannot_be_captured(tmp_path):
    found = json.loads(rehearse(tmp_path, sys.executable, "-c", CAPTURE).splitlines()[-1])
    assert all("captur" in found[name] for name in ("item", "wait")), found


def test_the_driver_is_asked_through_its_library(tmp_path):
    code = "from common.machine import drivers; print(drivers.nvidia(), drivers.gpus())"
    printed = rehearse(tmp_path, sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}", gpus=3)
    assert printed.split() == ["580.0", "3"]


# --- The largest batch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "job, words",
    [
        ("train_ddp", [*SMALL, "--max_samples", "5000"]),
        ("train_imagenet", [*PHOTOS, "--image_size", "96", "--total_batch", "64"]),
    ],
)
def test_a_gpu_with_more_memory_takes_more(tmp_path, job, words):
    found = {}
    for mib in (1024, 2048):
        printed = rehearse(
            tmp_path,
            *command(job, *words),
            "--find_max_batch",
            "true",
            "--output_dir",
            tmp_path / "out",
            gpus=2,
            REHEARSAL_MIB=str(mib),
        )
        tried = {
            int(size): fits for size, fits in re.findall(r"--batch_size (\d+) (fits|does not fit)$", printed, re.MULTILINE)
        }
        found[mib] = int(
            re.search(r"^done: take --batch_size (\d+): \d+ is the largest of which 3 steps fitted", printed, re.MULTILINE)[1]
        )
        largest_tried = max(size for size, fits in tried.items() if fits == "fits")
        assert found[mib] == with_margin(largest_tried) and "does not fit" in tried.values()
        assert not (tmp_path / "out").exists()
    assert 1.5 < found[2048] / found[1024] < 3


def test_where_the_data_end_first_that_is_said(tmp_path):
    printed = rehearse(tmp_path, *command("train", *SMALL), "--find_max_batch", "true", "--output_dir", tmp_path / "out")
    assert "is more than the data have" in printed and "fits, and the data have too few samples for a larger one" in printed


def test_the_flagship_goes_on_in_smaller_portions(tmp_path):
    words = [*command("train_imagenet", *PHOTOS), "--batch_size", "1024", "--output_dir", tmp_path / "out"]
    printed = rehearse(tmp_path, *words, REHEARSAL_MIB="1024")
    (line,) = re.findall("^warning: CUDA out of memory.*$", printed, re.MULTILINE)[-1:]
    assert (
        "in portions of" in line
        and "and the same total batch, as with --batch_size" in line
        and "for a total batch of 1024, in portions of 1024" in printed
    )
    assert "done: " in printed and printed.count("CUDA out of memory") <= 4
    printed = rehearse(tmp_path, *command("train_ddp", *SMALL, "--batch_size", "1024"), REHEARSAL_MIB="300", check=1)
    assert "lower --batch_size (--find_max_batch true finds the largest that fits)" in printed
