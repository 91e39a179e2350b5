"""Small slices of `make chaos`, so that a change which breaks restarts is seen at once."""

import subprocess
import sys

import pytest

from tests.jobs import ROOT, environment


@pytest.mark.rehearsal
def test_three_runs_killed_at_random_end_with_the_bits_of_the_untouched_one(tmp_path):
    script = [sys.executable, "-m", "tests.chaos.kill", "--runs", "3", "--seed", "5"]
    done = subprocess.run(script, cwd=ROOT, env=environment(TMPDIR=str(tmp_path)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "| SAME | 3 |" in done.stdout, done.stdout + done.stderr


@pytest.mark.rehearsal
def test_every_operation_on_the_disk_fails_once_in_the_smallest_job(tmp_path):
    script = [sys.executable, "-m", "tests.chaos.disk", "--job", "speedrun", "--results", tmp_path / "rows"]
    done = subprocess.run(script, cwd=ROOT, env=environment(TMPDIR=str(tmp_path)), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "| speedrun | write | 1 ends | 1 ends | 1 killed | 3 | 0 |" in done.stdout, (
        done.stdout + done.stderr
    )
