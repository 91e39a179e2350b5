"""tests/tools/packages.py knows every program that the tests start, and no other."""

import subprocess
import sys

import pytest

from tests.tools import packages
from tests.tools.jobs import ROOT


def test_a_program_that_nobody_has_asked_for_is_not_started():
    with pytest.raises(AssertionError, match="fallocate is started, and nobody has asked"):
        subprocess.run(["fallocate", "--version"])


def test_a_program_that_is_listed_is_started_by_somebody():
    text = "\n".join(
        path.read_text() for path in (ROOT / "tests").rglob("*.py") if path.stem not in ("packages", "test_packages")
    )
    listed = [*packages.FROM_DEBIAN, *packages.WITH_DEBIAN - {"apt-get", "nvidia-smi"}]
    assert [name for name in listed if f'"{name}"' not in text] == []


def test_in_ci_what_is_missing_is_a_failure_and_elsewhere_a_skip(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    for how, ends in (("1", pytest.fail.Exception), ("", pytest.skip.Exception)):
        monkeypatch.setenv("CI", how)
        with pytest.raises(ends, match="needs jpegtran: apt-get install libjpeg-turbo-progs"):
            packages.program("jpegtran")


def test_launch_says_that_python_is_too_old_before_it_meets_what_that_cannot_read():
    script = "import runpy, sys; sys.version_info, sys.argv = (3, 8, 18), ['launch', 'report']; runpy.run_module('launch', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: this is Python 3.8, and the jobs need Python 3.9")
    assert len(done.stderr.splitlines()) == 1
