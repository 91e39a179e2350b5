"""jobs/plain_ddp.py: one file without anything of ours, as it is uploaded; its images are few here, and its network small."""

import ast
import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys

import pytest
import torch

from launch import blocks, bundle
from launch.bundle import imports
from tests.tools.cifar import archive  # noqa: F401 (a fixture)
from tests.tools.jobs import PATIENCE, ROOT, environment, wait_for
from tests.tools.jobs import run as start
from tests.tools.objectstore import free_port
from tests.tools.ranks import processes_of

JOB = ROOT / "jobs" / "plain_ddp.py"
SMALLER = {"BATCH = 512": "BATCH = 32", "WIDTH = 64": "WIDTH = 8", "6000": "160", "5000": "128"}
ARCHIVES_ARE_SMALLER = {"BATCH = 512": "BATCH = 4", "WIDTH = 64": "WIDTH = 8"}


@pytest.fixture
def empty(tmp_path):
    """A folder that has the file and nothing else."""
    return small(tmp_path, JOB.read_text(), SMALLER)


def small(folder, text, changes):
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    (folder / "plain_ddp.py").write_text(text)
    return folder


def run(folder, *words, before=(), env=None, check=0):
    """What it printed, from a folder in which Python finds nothing of ours."""
    command = [sys.executable, *before, "plain_ddp.py", *map(str, words)]
    done = start(command, cwd=folder, env={**environment(**(env or {})), "PYTHONPATH": "", "OMP_NUM_THREADS": "1"})
    assert done.returncode == check, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout if not check else done.stderr


def one_rank():
    """What torchrun sets."""
    return {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def epochs_of(printed):
    """{epoch: (loss of the first step, mean loss, accuracy)}."""
    rows = re.findall(r"^epoch=(\d+) first_loss=(\S+) train_loss=(\S+) accuracy=(\S+)$", printed, re.MULTILINE)
    return {int(epoch): tuple(map(float, scores)) for epoch, *scores in rows}


def test_it_is_one_page_of_torch_and_python():
    text = JOB.read_text()
    tree = ast.parse(text)
    found = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {
        name.split(".")[0]
        for node in found
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
    }
    assert names == {"argparse", "os", "pickle", "sys", "tarfile", "torch"}
    assert len(text.splitlines()) < 200
    assert imports.modules_of(JOB) == []


def test_one_process_two_and_the_reverted_job_begin_alike(empty, tmp_path):
    """The same samples in each step, and every test image once: with two processes started by torch.distributed.launch."""
    words = ["--custom_data", "true", "--epochs", "2", "--output_dir"]
    launcher = ["-m", "torch.distributed.launch", "--nproc_per_node", "2", "--master_port", str(free_port())]
    two = epochs_of(run(empty, *words, "two", before=launcher))
    base, found = blocks.read(empty / "plain_ddp.py")
    assert {block.tag for block in found} == {"DDP"} and not any(block.replaced for block in found), "they only add lines"
    (empty / "plain_ddp.py").write_text("\n".join(base))
    assert "distributed" not in "\n".join(base).split('"""')[2]
    one = epochs_of(run(empty, *words, "one"))
    assert one.keys() == two.keys() == {1, 2}
    assert one[1][0] == pytest.approx(two[1][0], abs=2e-4) and one[1][1] == pytest.approx(two[1][1], abs=5e-3)
    assert all((32 * accuracy) == pytest.approx(round(32 * accuracy), abs=2e-3) for _, _, accuracy in two.values())
    ours, theirs = (torch.load(empty / name / "made_up.pth", weights_only=True) for name in ("one", "two"))
    assert ours.keys() == theirs.keys() and int(ours["epochs_done"]) == 2
    assert all(torch.allclose(ours[name], theirs[name], atol=2e-3) for name in ours)


def test_as_modelarts_starts_it_with_the_archive_and_again(archive, tmp_path):
    folder = small(tmp_path, JOB.read_text(), ARCHIVES_ARE_SMALLER)
    platform = ["--init_method", f"tcp://127.0.0.1:{free_port()}", "--rank", "0", "--world_size", "1", "--num_gpus", "8"]
    words = ["--data_url", archive.parent, "--train_url", folder / "out", "--enable_gpu", "false"]
    printed = run(folder, *words, "--epochs", "1", *platform)  # it becomes torchrun, which starts it from nothing: 6 s
    assert (
        "ignored: --num_gpus 8" in printed
        and "1 x cpu: 20 images, 0 of 1 epochs are done" in printed
        and epochs_of(printed).keys() == {1}
    )
    printed = run(folder, *words, "--epochs", "2", env=one_rank())
    assert "20 images, 1 of 2 epochs are done" in printed and epochs_of(printed).keys() == {2}
    assert [path.name for path in (folder / "out").iterdir()] == ["plain_ddp.pth"]


@pytest.mark.parametrize(
    "words, line",
    [
        (["--data_url", "nowhere"], "error: --data_url nowhere has neither cifar-10-batches-py nor cifar-10-python.tar.gz"),
        (["--custom_data", "true", "--enable_gpu", "true"], "error: --enable_gpu true, and torch sees no GPU"),
        (["--custom_data", "true", "--world_size", "2"], "error: --init_method None:None is not the address of node 0"),
        (
            ["--custom_data", "true", "--world_size", "2", "--init_method", "env://"],
            "error: --init_method env:// is not the address",
        ),
    ],
)
def test_a_users_mistake_is_one_line_before_anything_is_started(monkeypatch, words, line):
    monkeypatch.setattr(sys, "argv", [str(JOB), *words])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(JOB), run_name="__main__")
    assert ended.value.code.startswith(line) and "\n" not in ended.value.code


def test_files_of_cifar_that_hold_anything_else_are_not_run(monkeypatch, tmp_path):
    evil = b"cos\nsystem\n(S'touch " + str(tmp_path / "run").encode() + b"'\ntR."
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(evil)
    job = runpy.run_path(str(JOB))
    monkeypatch.setattr(sys, "argv", ["plain_ddp.py", "--data_url", str(tmp_path)])
    with pytest.raises(Exception, match=r"os\.system does not belong into a file of CIFAR-10"):
        job["load"](job["options"]())
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_network_is_named(empty, monkeypatch):
    """As after a change of the file; the job is that of one device here."""
    base, _ = blocks.read(empty / "plain_ddp.py")
    (empty / "plain_ddp.py").write_text("\n".join(base))
    (empty / "out").mkdir()
    torch.save({"epochs_done": torch.tensor(3)}, empty / "out" / "made_up.pth")
    monkeypatch.setattr(sys, "argv", ["plain_ddp.py", "--custom_data", "true", "--output_dir", str(empty / "out")])
    with pytest.raises(AssertionError, match=r"made_up\.pth is of another network: remove it, or give another --output_dir"):
        runpy.run_path(str(empty / "plain_ddp.py"), run_name="__main__")


def test_it_needs_no_bundle_and_has_one(tmp_path, capsys):
    assert bundle.main([str(JOB), "-o", str(tmp_path / "plain_ddp.py")]) == 0
    assert (tmp_path / "plain_ddp.py").read_text().startswith(JOB.read_text())


@pytest.mark.rehearsal
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_killed_after_an_epoch_it_goes_on_with_four_processes(empty, launcher):
    job = empty / "plain_ddp.py"
    local = [sys.executable, "-m", "launch", "local", "--nodes", "2", "--procs", "2", job, "--"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4", job]
    words = ["--custom_data", "true", "--epochs"]
    command = [*(local if launcher == "local" else torchrun), *words]

    def finish(out, epochs):
        last = ["--output_dir", empty / out]
        given = [str(word) for word in [*command, epochs, *last]]
        done = subprocess.run(
            given, cwd=ROOT, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "4 x cpu: 128 images, 0 of 4 epochs are done" in finish("whole", 4)
    with open(empty / "log", "w") as log:
        process = subprocess.Popen([str(word) for word in [*command, 400, "--output_dir", empty / "out"]], cwd=ROOT, stdout=log, stderr=log,
                                   env=environment(OMP_NUM_THREADS="1"))  # fmt: skip
    wait_for((empty / "out" / "made_up.pth").exists, process, "the checkpoint of the first epoch")
    for number in processes_of(empty):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait(PATIENCE)
    done = int(torch.load(empty / "out" / "made_up.pth", weights_only=True)["epochs_done"])
    printed = finish("out", done + 2)
    assert f"{done} of {done + 2} epochs are done" in printed and printed.count("first_loss") == 2
    assert int(torch.load(empty / "out" / "made_up.pth", weights_only=True)["epochs_done"]) == done + 2


AT_THE_MEETING = """
import runpy, sys
from torch import distributed
meet = distributed.init_process_group
def init_process_group(*words):
    print("functions:", "torch.distributed.nn.functional" in sys.modules)
    meet(*words)
distributed.init_process_group = init_process_group
runpy.run_path("plain_ddp.py", run_name="__main__")
"""


def test_the_module_that_would_keep_the_group_is_there_before_it(empty):
    """DDP imports it, and its functions' default arguments are the group of that moment, which then never ends."""
    (empty / "meets.py").write_text(AT_THE_MEETING)
    words = [sys.executable, "meets.py", "--custom_data", "true", "--epochs", "1", "--output_dir", "out"]
    done = subprocess.run(
        words, cwd=empty, env={**environment(**one_rank()), "PYTHONPATH": ""}, capture_output=True, text=True, timeout=PATIENCE
    )
    assert "functions: True\n" in done.stdout and done.returncode == 0, done.stderr
