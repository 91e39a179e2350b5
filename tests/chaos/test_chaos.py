"""Small slices of `make chaos`, so that a change which breaks restarts is seen at once."""

import subprocess
import sys

import pytest

from tests.chaos.victims import VICTIMS
from tests.tools.jobs import PATIENCE, ROOT, environment

RUNS = {"train": 3, "pack": 3}

pytestmark = pytest.mark.rehearsal


@pytest.mark.parametrize("job", VICTIMS)
def test_what_was_killed_at_random_ends_with_the_bits_of_the_untouched_one(tmp_path, job):
    runs, results = str(RUNS.get(job, 1)), tmp_path / "results"
    script = [sys.executable, "-m", "tests.chaos.kill", "--job", job, "--runs", runs, "--seed", "5", "--results", results]
    place = {} if job == "train_dpex" else {"TMPDIR": str(tmp_path)}  # the path of a socket of Ray has at most 107 letters
    done = subprocess.run(script, cwd=ROOT, env=environment(**place), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and f"| {job} | {runs} | {runs} |" in done.stdout, done.stdout + done.stderr
    again = subprocess.run(script, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert again.returncode == 0 and again.stdout.strip() == done.stdout[done.stdout.index("| what") :].strip(), again.stdout


def test_every_operation_on_the_disk_fails_once_in_the_smallest_job(tmp_path):
    script = [sys.executable, "-m", "tests.chaos.disk", "--job", "speedrun", "--results", tmp_path / "rows"]
    done = subprocess.run(
        script, cwd=ROOT, env=environment(TMPDIR=str(tmp_path)), capture_output=True, text=True, timeout=PATIENCE
    )
    ways = (
        "1 ends, 1 goes on, 1 silent"  # at the results, the watcher's memory, and Python's file that tries a temporary folder
    )
    assert done.returncode == 0 and f"| speedrun | write | {ways} | {ways} | 3 killed | 9 | 0 |" in done.stdout, (
        done.stdout + done.stderr
    )
