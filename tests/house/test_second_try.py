"""python -m tests: what fails is tried once more, alone."""

import subprocess
import sys

import pytest

from tests.__main__ import files_in, is_folder
from tests.tools.jobs import ROOT, environment, run

TESTS = """
import pathlib, pytest

@pytest.mark.parametrize("number", range({count}))
def test_fails(number):
    before = pathlib.Path(f"{{number}}")
    assert before.exists() and not {always}, before.touch()
"""


@pytest.mark.parametrize(
    "count, always, code, says",
    [
        (3, False, 0, "3 passed at the second try: test_some.py::test_fails[0], test_some.py::test_fails[1], test_some.py::test_fails[2]\n"),
        (1, True, 1, "once more, alone: test_some.py::test_fails[0]\n"),
        (4, False, 1, "4 failed; minutes: "),
    ],
)  # fmt: skip
def test_up_to_three_are_tried_again(tmp_path, count, always, code, says):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q -p no:hypothesispytest\n")
    (tmp_path / "test_some.py").write_text(TESTS.format(count=count, always=always))
    words = [sys.executable, "-m", "tests", "test_some.py"]
    done = run(words, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == code and says in done.stdout, done.stdout + done.stderr
    assert ("second try" in done.stdout) == (code == 0)


HANGS = """
import os, pytest, time

@pytest.mark.timeout(1)
def test_hangs():
    time.sleep(10_000)

def test_dies():
    os.abort()
"""


def test_one_that_hangs_fails_with_its_stack_and_one_that_dies_is_no_success(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q -p no:hypothesispytest\n")
    (tmp_path / "test_some.py").write_text(HANGS)
    words = [sys.executable, "-m", "tests", "test_some.py"]
    done = run([*words, "-k", "hangs"], cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == 1 and "time.sleep(10_000)" in done.stdout and "FAILED test_some.py::test_hangs\n" in done.stdout
    died = run([*words, "-k", "dies"], cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)))
    assert died.returncode == 1 and "FAILED test_some.py\n" in died.stdout and "in test_dies" in died.stdout, died.stdout


def test_a_room_that_is_mistyped_is_named_and_runs_nothing():
    words = [sys.executable, "-m", "tests", "tests/common/chekpoints"]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: there is no tests/common/chekpoints: ls tests shows the folders, one for each room\n"


def test_a_folder_stands_for_its_files_and_another_folders_name_for_itself():
    names = {path.rpartition("/")[2] for path in files_in("tests/common/machine")}
    assert names == {"test_child.py", "test_cores.py", "test_drivers.py"}
    assert [is_folder(word) for word in ("tests/common", "common", "tests/nothing")] == [True, False, False]
