"""docs/from.md, Dpex: the document's scripts with one changed line, on CPUs and on the stand-in for GPUs."""

import inspect
import os
import re
import runpy
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from common.errors import UserError
from datasets.dpex import DpexDataLoader
from tests.datasets.dpex import test_dpex
from tests.gpu import rehearsal
from tests.pages.from_page import assert_each_is_checked, typed_here
from tests.pages.test_examples import commands, section
from tests.tools.jobs import PATIENCE, ROOT, TINY, environment, forked, run_forked
from tests.tools.objectstore import free_port

TITLE = "Dpex"
MODULE, CLASS = "`from Dpex import dataloader`", "`from Dpex.dataloader import DpexDataLoader`"
START = "`python -m torch.distributed.launch --nproc_per_node=2 pytorch_ddp.py`"

# The document's scripts, with what it leaves out filled in. They are run with fewer workers and samples.
SINGLE_CARD = """
from torchvision import datasets
from torchvision.transforms import ToTensor
from Dpex import dataloader

training_data = datasets.FashionMNIST(
    root="data",
    train=True,
    download=True,
    transform=ToTensor()
)
# use DpexDataLoader
train_loader = dataloader.DpexDataLoader(training_data, distribute_mode=True, num_workers=10, batch_size=100, shuffle=True)

for epoch in range(3):
    for index, (image, label) in enumerate(train_loader):
        print(epoch, index, tuple(image.shape), len(label))
"""
RANDOM = """
class RandomDataset(Dataset):
    def __init__(self, size, length):
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index):
        return self.data[index]

    def __len__(self):
        return self.len
"""
MODEL = """
class Model(nn.Module):
    def __init__(self, input_size, output_size):
        super(Model, self).__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, input):
        output = self.fc(input)
        print("  In Model: input size", input.size(),
              "output size", output.size())
        return output

model = Model(input_size, output_size)
"""
DATA_PARALLEL = f"""
import torch
import torch.nn as nn
from torch.autograd import Variable
from torch.utils.data import Dataset
from Dpex import dataloader
input_size, output_size, batch_size, data_size = 5, 2, 30, 90000
{RANDOM}
# use DpexDataLoader
data_loader = dataloader.DpexDataLoader(dataset=RandomDataset(input_size, data_size),
                                        distribute_mode=True, batch_size=batch_size, shuffle=True, num_workers=10)
{MODEL}
if torch.cuda.is_available():
    model.cuda()

if torch.cuda.device_count() > 1:
    model = nn.DataParallel(model)

for data in data_loader:
    input_var = Variable(data.cuda()) if torch.cuda.is_available() else Variable(data)
    output = model(input_var)
    print("Outside: input size", input_var.size(), "output_size", output.size())
"""
DDP = f"""
import torch
import torch.nn as nn
from torch.utils.data import Dataset
from Dpex.dataloader import DpexDataLoader
from torch.utils.data.distributed import DistributedSampler

torch.distributed.init_process_group(backend="nccl")

input_size = 5
output_size = 2
batch_size = 1
data_size = 90000

local_rank = torch.distributed.get_rank()
torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank)
{RANDOM}
dataset = RandomDataset(input_size, data_size)
rand_loader = DpexDataLoader(dataset=dataset, distribute_mode=True, batch_size=batch_size, sampler=DistributedSampler(dataset), num_workers=10)
{MODEL}
model.to(device)

if torch.cuda.device_count() > 1:
    print("Let's use", torch.cuda.device_count(), "GPUs!")
model = torch.nn.parallel.DistributedDataParallel(model,
                                                  device_ids=[local_rank],
                                                  output_device=local_rank)
for data in rand_loader:
    if torch.cuda.is_available():
        input_var = data
    else:
        input_var = data

    output = model(input_var)
    print("Outside: input size", input_var.size(), "output_size", output.size())
"""
SIZES = {"num_workers=10": "num_workers=1", "90000": "120", "batch_size = 1\n": "batch_size = 10\n"}
ON_A_CPU = {
    'backend="nccl"': 'backend="gloo"',
    "torch.cuda.set_device(local_rank)\n": "",
    'torch.device("cuda", local_rank)': 'torch.device("cpu")',
    "device_ids=[local_rank],": "",
    "output_device=local_rank)": ")",
}


def changed(script, changes):
    for old, new in changes.items():
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


def written(folder, script, line, **more):
    """The script with the page's line in the place of its own, and with smaller numbers."""
    (new,) = typed_here(TITLE, line)[:1]
    small = {old: new for old, new in SIZES.items() if old in script}
    path = folder / "pytorch_ddp.py"
    path.write_text(changed(script, {line.strip("`"): " ".join(new), **small, **more}))
    return path


@pytest.fixture(scope="module")
def cluster():
    """One of our own, which stays from one script to the next."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_ADDRESS", "local")
        yield DpexDataLoader(TensorDataset(torch.arange(3)), distribute_mode=True, num_workers=1)


@pytest.fixture
def run_here(cluster, tmp_path, monkeypatch, capsys):
    """Run a script as Python does, but in this process, where the cluster is; what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(path):
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_the_script_for_a_single_card(run_here, tmp_path):
    """Where FashionMNIST is there, torchvision downloads nothing."""
    raw = tmp_path / "data" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for split in ("train", "t10k"):
        for name, numbers in (
            ("images-idx3", np.zeros((250, 28, 28), np.uint8)),
            ("labels-idx1", np.arange(250, dtype=np.uint8)),
        ):
            head = bytes([0, 0, 8, numbers.ndim]) + struct.pack(f">{numbers.ndim}i", *numbers.shape)
            (raw / f"{split}-{name}-ubyte").write_bytes(head + numbers.tobytes())
    batches = [f"{index} ({count}, 1, 28, 28) {count}" for index, count in enumerate((100, 100, 50))]
    wanted = [f"{epoch} {batch}" for epoch in range(3) for batch in batches]
    assert run_here(written(tmp_path, SINGLE_CARD, MODULE)) == wanted


def test_the_script_for_data_parallel(run_here, tmp_path):
    printed = run_here(written(tmp_path, DATA_PARALLEL, MODULE))
    assert printed.count("Outside: input size torch.Size([30, 5]) output_size torch.Size([30, 2])") == 4
    assert printed.count("  In Model: input size torch.Size([30, 5]) output size torch.Size([30, 2])") == 4


@pytest.mark.rehearsal
def test_the_script_for_ddp_on_a_cpu(tmp_path):
    said = typed_here(TITLE, CLASS)
    assert said[0] == ["from", "datasets.dpex", "import", "DpexDataLoader"]
    path = written(tmp_path, DDP, CLASS, **ON_A_CPU)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    for done in forked([path], tmp_path, *({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2))):
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("Outside: input size torch.Size([10, 5]) output_size torch.Size([10, 2])") == 6


def rehearse(folder, *words):
    """What a command printed on two GPUs of the stand-in."""
    rehearsal.need_what_builds_it()
    env = environment(**rehearsal.environment(2))
    env["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.rehearsal
def test_the_script_for_ddp_on_two_gpus_as_it_is_started_there(tmp_path):
    written(tmp_path, DDP, CLASS)
    python, *words = typed_here(TITLE, START)[0]
    assert python == "python" and words[-1] == "pytorch_ddp.py"
    printed = rehearse(tmp_path, *words[:2], "--master_port", str(free_port()), *words[2:])
    assert printed.count("Let's use 2 GPUs!") == 2
    assert len(re.findall(r"Outside: input size torch\.Size\(\[10, 5\]\) output_size torch\.Size\(\[10, 2\]\)", printed)) == 12


@pytest.mark.rehearsal
def test_the_script_for_data_parallel_on_two_gpus(tmp_path):
    printed = rehearse(tmp_path, str(written(tmp_path, DATA_PARALLEL, MODULE)))
    assert printed.count("input size torch.Size([15, 5]) output size torch.Size([15, 2])") == 8
    assert printed.count("Outside: input size torch.Size([30, 5]) output_size torch.Size([30, 2])") == 4


# --- The loader ------------------------------------------------------------------------------------------------------------


def test_it_takes_what_torchs_loader_takes():
    name, _, value = typed_here(TITLE, '`head_address="auto"`')[0][0].partition("=")
    assert inspect.signature(DpexDataLoader).parameters[name].default == value
    data = TensorDataset(torch.arange(3))
    for name, value in (("persistent_workers", False), ("pin_memory", False), ("in_order", True), ("head_lost", "stop")):
        assert len(DpexDataLoader(data, **{name: value})) == 3
    with pytest.raises(TypeError):
        DpexDataLoader(data, no_such_argument=1)


def test_a_cluster_without_a_token_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=" ".join(typed_here(TITLE, "a Ray cluster")[0])):
        next(
            iter(
                DpexDataLoader(TensorDataset(torch.arange(3)), distribute_mode=True, head_address="127.0.0.1:1", num_workers=1)
            )
        )


# --- Jobs ------------------------------------------------------------------------------------------------------------------


@pytest.mark.rehearsal
def test_a_job_has_its_batches_from_ray(tmp_path):
    _, job, option, _ = typed_here(TITLE, "training with Dpex")[0]
    done = run_forked([ROOT / job, *TINY, option, 1, "--max_steps", 2, "--output_dir", tmp_path / "out"], tmp_path)
    assert "train_dpex: anyrank" in done.stdout


def test_its_benchmark_is_an_example_of_your_own_job():
    """tests/pages/test_examples.py runs it."""
    (words,) = typed_here(TITLE, "the FashionMNIST benchmark")
    assert words[1] in {job for _, (job, *_) in commands("my_digits")} and "dpex.batches" in section(
        "Its batches from a Ray cluster"
    )


CHECKS = {
    MODULE: test_the_script_for_a_single_card,
    CLASS: test_the_script_for_ddp_on_a_cpu,
    START: test_the_script_for_ddp_on_two_gpus_as_it_is_started_there,
    "`distribute_mode=True`": test_dpex.test_three_modes_give_the_same_batches,
    "`distribute_mode=False`": test_dpex.test_three_modes_give_the_same_batches,
    '`head_address="auto"`': test_it_takes_what_torchs_loader_takes,
    "a Ray cluster": test_a_cluster_without_a_token_is_refused,
    "`DataLoader` replaced by `DpexDataLoader`": test_it_takes_what_torchs_loader_takes,
    "the FashionMNIST benchmark": test_its_benchmark_is_an_example_of_your_own_job,
    "training with Dpex": test_a_job_has_its_batches_from_ray,
}


def test_each_line_of_the_page_is_run():
    assert_each_is_checked(TITLE, CHECKS)
