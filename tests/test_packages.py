"""tests/packages.py knows every program that the tests start, and no other."""

import subprocess

import pytest

from tests import packages
from tests.jobs import ROOT


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
