"""A platform's engine: what its older torch lacks is bridged or refused, what is uploaded leaves its packages alone, and what its
name says. The jobs run on one by make engine."""

import io
import json
import re
import shutil
import subprocess
import sys
import types

import pytest
import torch

from common import devices
from common.checkpoints.pretrained import read_weights
from common.devices import kinds
from common.errors import UserError
from launch import bundle, engines, image
from launch.__main__ import VERBS
from launch.submit import modelarts
from tests import engine
from tests.tools.jobs import PATIENCE, ROOT, in_rehearsal
from tests.tools.submitting import ask

JOBS = sorted(path.name for path in (ROOT / "jobs").glob("*.py") if path.stem != "plain_ddp")  # which has nothing of ours
NEWEST, OLDEST, ASCEND = engines.MODELARTS
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def older(monkeypatch):
    def pretend(*version):
        for module in (kinds, devices):
            monkeypatch.setattr(module, "TORCH", version)

    return pretend


def test_the_page_has_the_table_and_the_table_has_every_job_and_verb():
    assert engine.table() in (ROOT / "docs" / "platforms.md").read_text()
    assert set(JOBS) == set(engine.JOBS)
    assert set(engine.VERBS) == set(VERBS)


def test_an_optimizer_is_fused_where_torch_has_such_a_kernel(older):
    weight = torch.nn.Parameter(torch.zeros(1))
    for version, on_cpu, on_gpu in (((2, 1), False, False), ((2, 3), False, True), ((2, 4), True, True)):
        older(*version)
        assert devices.fused(CPU) == ({"fused": True} if on_cpu else {})
        assert devices.fused(GPU) == ({"fused": True} if on_gpu else {})
        torch.optim.SGD([weight], lr=1, **devices.fused(CPU))


def test_half_precision_that_an_older_torch_has_not_got_is_refused(older):
    args = types.SimpleNamespace(amp_dtype="float16")
    assert devices.half_precision(args, CPU) == torch.float16
    older(2, 3)
    with pytest.raises(UserError, match=r"float16 on a CPU needs torch 2\.4 or later, .* give --amp_dtype bfloat16"):
        devices.half_precision(args, CPU)
    assert devices.half_precision(args, GPU) == torch.float16


@pytest.mark.filterwarnings("ignore:.*GradScaler:FutureWarning", "ignore:.*GradScaler:UserWarning")
def test_the_scaler_of_an_older_torch_is_told_its_device_all_the_same(older):
    older(2, 1)
    scaler = devices.grad_scaler()("npu", enabled=False, init_scale=8.0)
    assert isinstance(scaler, torch.cuda.amp.GradScaler) and not scaler.is_enabled()
    assert scaler._device == "npu", "where it counts the steps that it has left out"


def test_without_torch_accelerator_the_device_is_a_gpu_or_an_npu(older, monkeypatch):
    older(2, 5)
    monkeypatch.delattr(torch, "accelerator")
    assert (kinds.accelerator(), kinds.module()) == ("cuda", torch.cuda)
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(), raising=False)
    assert kinds.accelerator() == "npu"


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_a_program_in_place_of_weights_is_refused_before_torch_looks_at_it(older, monkeypatch, tmp_path):
    program = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), program)
    path = tmp_path / "weights.pth"
    path.write_bytes(program.getvalue())
    older(2, 1)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "load", lambda *_, **__: {"taken": torch.zeros(1)})
        with pytest.raises(UserError, match="holds no weights: it is a program of TorchScript"):
            read_weights(str(path))
    torch.save({"weight": torch.ones(2)}, path)
    assert torch.equal(read_weights(str(path))["weight"], torch.ones(2))


def test_nodes_that_come_and_go_need_a_torch_that_torchft_takes(older):
    members = pytest.importorskip("common.elastic.members", reason="the folder was taken out")
    older(2, 6)
    with pytest.raises(UserError, match=r"--min_nodes needs torchft, and that torch 2\.7 or later; this is .*: leave it out"):
        members.load_torchft()


# --- Packages -------------------------------------------------------------------------------------------------------------


def asked_for(text):
    return [re.split("[>;]", line)[0] for line in text.splitlines() if not line.startswith("#")]


def test_a_job_asks_for_what_it_cannot_train_without():
    wanted = {name: asked_for(bundle.requirements.text(f"jobs/{name}")) for name in JOBS}
    assert (wanted.pop("train_dali.py"), wanted.pop("train_dpex.py")) == (["nvidia-dali-cuda120"], ["ray"])
    assert not any(wanted.values())
    assert asked_for(bundle.requirements.text("jobs/train.py", ["boto3"])) == ["boto3"]


@pytest.mark.parametrize("job, package", [("train_dali.py", "nvidia-dali-cuda120"), ("train_dpex.py", "ray")])
def test_a_copy_under_another_name_asks_for_the_same(tmp_path, job, package):
    shutil.copy(ROOT / "jobs" / job, tmp_path / "mine.py")
    assert asked_for(bundle.requirements.text(tmp_path / "mine.py")) == [package]


@pytest.fixture(scope="module")
def pip_says(tmp_path_factory):
    """In a folder that plays an engine: the packages that pip would install there for a file of requirements."""
    folder = tmp_path_factory.mktemp("engine")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for name, version in (("torch", "2.1.0"), ("torchvision", "0.16.0"), ("torch-npu", "2.1.0"), ("numpy", "1.24.4")):
        about = site / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def say(text):
        (folder / "requirements.txt").write_text(text)
        pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check", "install"]
        words = [*pip, "--quiet", "--dry-run", "--report", "-", "-r", folder / "requirements.txt"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        return {row["metadata"]["name"].lower() for row in json.loads(done.stdout)["install"]}

    return say


ENGINES_OWN = {"torch", "torchvision", "torch-npu", "torch_npu", "numpy"}


@pytest.mark.parametrize(
    "job", in_rehearsal(["train_ddp.py", "train_dali.py", "train_dpex.py"], lambda job: job != "train_ddp.py")
)
def test_pip_changes_nothing_that_an_engine_has(pip_says, job):
    """The other jobs ask for what train_ddp.py asks for."""
    text = bundle.requirements.text(f"jobs/{job}", ["boto3"])
    new = pip_says(text)
    assert {name.lower() for name in asked_for(text)} <= new and not new & ENGINES_OWN


def test_pip_is_seen_to_change_what_an_engine_has(pip_says):
    assert pip_says("numpy>=1.25\n") == {"numpy"}


# --- Names ----------------------------------------------------------------------------------------------------------------


def test_a_name_says_what_the_engine_has():
    assert engines.parse(NEWEST) == ((2, 1), (3, 10), False)
    assert engines.parse(ASCEND) == ((2, 1), (3, 9), True)
    assert engines.parse("pytorch_2.8.0-cuda_12.8-py_3.12.3-ubuntu_24.04-x86_64") == ((2, 8), (3, 12), False), (
        "newer than the list"
    )


@pytest.mark.parametrize(
    "name, words",
    [
        (OLDEST, f"--engine {OLDEST} has torch 1.8, and a job needs 2.1 or later: give {NEWEST}, or an image of your own"),
        ("pytorch_2.1.0-cann_8.0-py_3.8-euler_2.10-aarch64-snt9b", f"has Python 3.8, and a job needs 3.9 or later: give {ASCEND}"),
        ("tensorflow_2.1.0-cuda_10.1-py_3.7-ubuntu_18.04-x86_64", "has tensorflow: a job needs PyTorch"),
        ("pytorch_2.1", "--engine pytorch_2.1 is no engine's name: give it as the console lists it, such as pytorch_2.1.0-cuda"),
    ],
)  # fmt: skip
def test_an_engine_that_cannot_train_is_refused_before_anything_is_written_or_sent(tmp_path, capsys, name, words):
    assert bundle.main([str(ROOT / "jobs" / "train.py"), "-o", str(tmp_path / "out.py"), "--engine", name]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --engine") and words in said and said.count("\n") == 1 and not list(tmp_path.iterdir())
    assert any(words in line for line in modelarts.mistakes(ask("modelarts", engine=name, image=None)))


def test_the_dockerfile_is_printed_and_the_commands_are_shown(capsys):
    assert image.main(["--platform", "modelarts", "--image", "swr.example.com/me/mine:1"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"FROM {image.BASE}\n") and "-c /tmp/keep.txt" in said.out
    assert re.findall(r"^docker (\w+).* swr.example.com/me/mine:1\b", said.err, re.MULTILINE) == ["build", "run", "push"]
    assert image.main(["--platform", "modelarts", "--base", "a b"]) == 2
    assert capsys.readouterr().err.startswith("error: --base is 'a b': give the name of an image")
