"""Every form of upload, from the console's fields to what is in OBS afterwards, as the manual describes it (tests/tools/console.py)."""

import json
import re
import shutil
import subprocess

import pytest

from launch import bundle
from tests.tools.cifar import write_folder
from tests.tools.console import Console, of_engine, of_image
from tests.tools.jobs import ROOT
from tests.tools.packages import namespaces, program

pytestmark = pytest.mark.rehearsal
TYPED = {"epochs": " 1 ", "batch_size": "4 ", "lr": " 0.01", "width": " 2", "workers": "0 ", "deterministic": " False "}


def uploads(folder):
    """{form: (code directory, boot file)}"""
    job = ROOT / "jobs" / "train_ddp.py"
    one, several, whole = folder / "file", folder / "folder", folder / "whole"
    one.mkdir()
    assert bundle.main([str(job), "-o", str(one / "train_ddp.py")]) == bundle.main([str(job), "--folder", str(several)]) == 0
    listed = subprocess.run([program("git"), "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (whole / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, whole / name)
    return {
        "file": (one, "train_ddp.py"),
        "folder": (several, "jobs/train_ddp.py"),
        "this folder": (whole, "jobs/train_ddp.py"),
    }


@pytest.fixture
def console(tmp_path):
    namespaces()
    write_folder(tmp_path / "data" / "cifar-10-batches-py", 16)
    made = []

    def make(container):
        made.append(Console(tmp_path / "console", tmp_path / "data", container))
        return made[0]

    yield make
    made[0].close()


@pytest.mark.parametrize("form", ["file", "folder"])
def test_the_newest_engine_trains_with_what_it_has(tmp_path, console, form):
    """torch 2.1.0 and numpy of its time stay; what the bundle can do without is left out, with a line."""
    console, (code, boot) = console(of_engine()), uploads(tmp_path)[form]
    codes, logs = console.play(code, boot, **TYPED)
    assert codes == [0, 0], "\n".join(logs)
    assert "torch 2.1.0" in logs[0] and "Successfully installed" not in logs[0]
    (said,) = re.findall("left out: .*", logs[0])
    assert all(package in said for package in ("matplotlib", "tensorboard", "scikit-learn"))
    assert json.loads((console.obs / "state.json").read_text())["finished"] is True
    assert {"checkpoints", "metrics.jsonl", "report.html", "report.txt"} <= {path.name for path in console.obs.iterdir()}
    assert not re.search("^error|Traceback", "".join(logs), re.MULTILINE)


@pytest.mark.parametrize("form, image", [("file", False), ("folder", False), ("this folder", False), ("file", True)])
def test_what_is_uploaded_trains_on_two_nodes_and_its_results_are_in_obs(tmp_path, console, form, image):
    console, (code, boot) = console(of_image()), uploads(tmp_path)[form]
    codes, logs = console.play(code, boot, image=image, **TYPED)
    assert codes == [0, 0], "\n".join(logs)
    installed = "Successfully installed tqdm" in logs[0] and "Requirement already satisfied: torch" in logs[0]
    assert installed == (form == "this folder")
    rule = "MA_NUM_HOSTS and VC_TASK_INDEX" if image else "--init_method, --rank and --world_size count nodes"
    assert f"node 0: starting rank 0 of 2 (modelarts: {rule})" in logs[0], logs[0]
    assert json.loads((console.obs / "state.json").read_text())["finished"] is True
    assert {"checkpoints", "metrics.jsonl", "curves.png", "report.txt"} <= {path.name for path in console.obs.iterdir()}
    assert not re.search("^error|Traceback", "".join(logs), re.MULTILINE)
    if form != "folder":
        return
    again, logs = console.play(code, boot, image=image, starts=2, **{**TYPED, "epochs": " 2"})
    assert again == [0, 0] and "going on from /home/ma-user/modelarts/outputs/train_url_0" in logs[0], "\n".join(logs)
