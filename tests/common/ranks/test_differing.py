"""Two nodes with different code are noticed, wherever the difference is."""

import shutil
from pathlib import Path

import pytest

from common.ranks import group
from tests.tools.jobs import ROOT


@pytest.fixture
def copy(tmp_path):
    for folder in group.FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "jobs" / "train_ddp.py", tmp_path)
    return tmp_path


def digest(root):
    return group.code_digest(str(root / "train_ddp.py"), root)


def test_a_difference_in_a_subfolder_is_another_digest(copy):
    before = digest(copy)
    with open(copy / "common" / "checkpoints" / "checkpoint.py", "a") as file:
        file.write("# another state\n")
    assert digest(copy) != before


def test_a_file_that_moved_is_another_digest(copy):
    before = digest(copy)
    (copy / "common" / "address.py").rename(copy / "common" / "run" / "address.py")
    assert digest(copy) != before


def test_what_moved_from_one_file_to_the_next_is_another_digest(copy):
    (copy / "common" / "one.py").write_text("a = 1\nb = 2\n")
    (copy / "common" / "two.py").write_text("")
    before = digest(copy)
    (copy / "common" / "one.py").write_text("a = 1\n")
    (copy / "common" / "two.py").write_text("b = 2\n")
    assert digest(copy) != before


def test_neither_compiled_files_nor_the_order_of_the_system_matter(copy, monkeypatch):
    before = digest(copy)
    (copy / "common" / "run" / "__pycache__").mkdir()
    (copy / "common" / "run" / "__pycache__" / "run.cpython-311.py").write_text("compiled")
    (copy / "common" / "notes.txt").write_text("no code")
    rglob = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda folder, pattern: sorted(rglob(folder, pattern), reverse=True))
    assert digest(copy) == before
