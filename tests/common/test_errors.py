"""The line that says why a job failed, where platforms show it: in a file of the platform's, and at the end of the log."""

import os
import sys
import time

import pytest

from common import errors
from common.alive import heartbeat
from tests.tools import jobs
from tests.tools.jobs import ROOT, environment

# A job that writes where a platform would look, in a folder of the test; what it does is the test's.
JOB = """
import sys
sys.path.insert(0, {root!r})
from common import arguments, errors
from common.job import run_job
errors.FAILURE_FILES = {{{ml!r} + "/failure": {ml!r}, {log!r}: {log!r}}}
from common.ranks import group

def main():
    parser = arguments.general_parser(None, data="", workers=0)
    group.add_options(parser)
    args = arguments.parse(parser)
    group.start_workers(args)
    {does}

if __name__ == "__main__":
    run_job(main)
"""


@pytest.fixture
def platform(tmp_path):
    """run(WHAT, OPTIONS): the job on a platform that has both places; its stderr, and what stands in the places."""
    ml, log = tmp_path / "ml", tmp_path / "termination-log"
    ml.mkdir()
    log.write_text("")

    def run(does, *options):
        job = tmp_path / "job.py"
        job.write_text(JOB.format(root=str(ROOT), ml=str(ml), log=str(log), does=does))
        words = [sys.executable, str(job), *options, "--enable_gpu", "false"]
        done = jobs.run(words, cwd=tmp_path, env=environment())
        places = [path.read_text() if path.exists() else None for path in (ml / "failure", log)]
        return done, places

    return run


@pytest.mark.parametrize(
    ("does", "options", "code", "line"),
    [
        ("raise errors.UserError('no such folder')", [], 2, "error: no such folder"),
        ("raise errors.TrainingFailed('the loss is nan')", [], 1, "error: the loss is nan"),
        (
            "pass",
            ["--epochs", "none"],
            2,
            "error: argument --epochs: 'none' is not a whole number at least 1; --help lists every option",
        ),
        ("{}['key']", [], 1, "error: KeyError: 'key'"),
        ("raise errors.SampleError('sample 17: KeyError: 1')", [], 1, "error: sample 17: KeyError: 1"),
        (
            "raise errors.TrainingFailed('gone')",
            ["--nproc_per_node", "1", "--max_restarts", "1"],
            1,
            "error: rank 0 (node 0, host ",
        ),
        ("raise errors.UserError('bad value')", ["--nproc_per_node", "2"], 2, "error: rank "),
    ],
    ids=[
        "a mistake",
        "a failed training",
        "an option",
        "any other error",
        "a sample",
        "a worker, after a restart",
        "one of two workers",
    ],
)
def test_the_reason_stands_at_the_end_of_the_log_and_where_the_platform_looks(does, options, code, line, platform):
    done, places = platform(does, *options)
    assert done.returncode == code, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(line) and places == [last + "\n"] * 2


def test_a_job_that_ends_well_says_nothing_there(platform):
    done, places = platform("print('well')")
    assert done.returncode == 0 and places == [None, ""], done.stderr


def test_a_place_that_does_not_exist_is_not_made(tmp_path, monkeypatch, capsys):
    missing, log = tmp_path / "ml", tmp_path / "log"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(
        errors, "FAILURE_FILES", {f"{missing}/failure": str(missing), str(log): str(log), str(link): str(tmp_path)}
    )
    errors.report_failure("why\nnot")
    assert capsys.readouterr().err == "error: why\\nnot\n"
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_of_processes_started_one_by_one_the_first_cause_stays_and_that_of_an_earlier_start_goes(tmp_path, monkeypatch):
    place = tmp_path / "failure"
    monkeypatch.setattr(errors, "FAILURE_FILES", {str(place): str(tmp_path)})
    place.write_text("error: of a start an hour ago, and longer than what comes\n")
    os.utime(place, (time.time() - 3600,) * 2)
    for cause in ("first", "second"):
        errors.report_failure(cause)
    assert place.read_text() == "error: first\n"


def test_a_rank_that_finds_the_disk_full_says_itself_why_it_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(heartbeat.FILES, str(tmp_path / "worker"))
    (tmp_path / "worker.writing").symlink_to("/dev/full")  # every write to it fails as on a full disk
    heartbeat.report_fault("no such folder", 2, victim=False)
    assert capsys.readouterr().err == "error: no such folder\n" and not (tmp_path / "worker.fault").exists()
