"""python -m tests: what fails is tried once more, alone."""

import subprocess
import sys

import pytest

from tests.jobs import ROOT, environment

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
        (4, False, 1, "4 failed in "),
    ],
)  # fmt: skip
def test_up_to_three_are_tried_again(tmp_path, count, always, code, says):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q -p no:hypothesispytest\n")
    (tmp_path / "test_some.py").write_text(TESTS.format(count=count, always=always))
    words = [sys.executable, "-m", "tests"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True)
    assert done.returncode == code and says in done.stdout, done.stdout + done.stderr
    assert ("second try" in done.stdout) == (code == 0)
