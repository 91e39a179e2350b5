"""A job whose output nobody takes trains on: its reader has gone, the disk of its log is full, or there is no output at all."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from common import job
from common.job import run_job
from tests.tools.jobs import (
    PATIENCE,
    ROOT,
    TINY,
    Popen,
    after,
    assert_same_bits,
    command,
    environment,
    final_state,
    in_rehearsal,
    run,
    wait_for,
)

TWO_RANKS = ("--nproc_per_node", 2, "--batch_size", 8)
FULL = "/dev/full"  # every write to it fails as on a full disk


def run_into(redirection, folder, job, *options):
    """The job with its output where the shell puts it; what it says on the other stream is in `errors`."""
    words = [*command(job, *TINY, *options, "--output_dir", folder / "out")]
    script = f'"$@" {redirection}'
    with open(folder / "errors", "w") as errors:
        done = subprocess.run(
            ["sh", "-c", script, "sh", *words], cwd=folder, env=environment(), stderr=errors, timeout=PATIENCE
        )
    return done.returncode, (folder / "errors").read_text()


def run_with(folder, job, *options, **streams):
    """The same with these files as its streams, forked from a process that has done the imports."""
    words = [*command(job, *TINY, *options), "--output_dir", folder / "out"]
    with open(folder / "errors", "w") as errors:
        process = Popen(words, cwd=folder, env=environment(), **{"stderr": errors, **streams})
        if process.stdout:  # a reader that goes after the first line
            process.stdout.readline()
            process.stdout.close()
        return process.wait(timeout=PATIENCE), (folder / "errors").read_text()


@pytest.fixture
def full():
    with open(FULL, "w") as file:
        yield file


def assert_silent(code, errors):
    assert code == 0 and "Traceback" not in errors and "Exception ignored" not in errors, errors


@pytest.mark.rehearsal
def test_a_run_without_an_output_ends_with_the_same_bits(finished, tmp_path):
    assert_silent(*run_into(">&- 2>&- <&-", tmp_path, "train"))
    assert_same_bits(final_state(tmp_path), final_state(finished[0]))


HAS_ITS_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"


def in_a_terminal_that_is_closed(folder, job, *options):
    """The job as the leader of a session, whose terminal goes before the first step: the kernel sends it SIGHUP."""
    mine, its = pty.openpty()
    words = after(HAS_ITS_TERMINAL, [*command(job, *TINY, *options), "--output_dir", folder / "out"])
    process = Popen(words, cwd=folder, env=environment(), stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    with open(mine, buffering=1, errors="replace") as terminal:
        assert any("a new run: " in line for line in terminal)
    return process.wait(timeout=PATIENCE)


@pytest.mark.parametrize("job, options", [("train", ()), pytest.param("train_ddp", TWO_RANKS, marks=pytest.mark.rehearsal)])
def test_a_run_whose_terminal_is_closed_ends_with_the_same_bits(finished, tmp_path, job, options):
    assert in_a_terminal_that_is_closed(tmp_path, job, *options) == 0
    if job == "train":
        assert_same_bits(final_state(tmp_path), final_state(finished[0]))
    assert final_state(tmp_path)["position"]["total_steps"] == final_state(finished[0])["position"]["total_steps"]


@pytest.mark.parametrize("streams", in_rehearsal([["stdout"], ["stdout", "stderr"], []], lambda streams: streams == ["stdout"]))
def test_a_run_whose_output_cannot_be_written_ends_with_the_same_bits(finished, tmp_path, full, streams):
    given = dict.fromkeys(streams, full) or {"stdout": subprocess.PIPE}
    assert_silent(*run_with(tmp_path, "train", **given))
    assert_same_bits(final_state(tmp_path), final_state(finished[0]))


def test_so_do_two_ranks_and_their_parent(two_ranks, tmp_path, full):
    assert_silent(*run_with(tmp_path, "train_ddp", "--nproc_per_node", 2, stdout=full))
    assert (tmp_path / "out" / "epoch_2.pth").exists()


@pytest.mark.rehearsal
def test_two_ranks_and_their_parent_need_no_output(two_ranks, tmp_path):
    assert_silent(*run_into(">&- 2>&- <&-", tmp_path, "train_ddp", "--nproc_per_node", 2))
    assert (tmp_path / "out" / "epoch_2.pth").exists()


def test_an_error_has_its_exit_code_where_it_cannot_be_said(tmp_path, full):
    assert run_with(tmp_path, "train", "--ephocs", 3, stdout=full, stderr=full)[0] == 2
    assert run_with(tmp_path, "train", "--data_url", "/none", "--custom_data", "false", stdout=full, stderr=full)[0] == 2


def test_what_fits_is_printed_in_order_and_any_name_can_be(tmp_path):
    """In a process of its own, whose output becomes unwritable in the middle and writable again."""
    script = """
import os, sys
from common import job
job.ignore_write_errors()
print("one")
print("no UTF-8:", os.fsdecode(b"a\\xff"), flush=True)
kept = os.dup(1)
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
print("lost" * 10_000, flush=True)
os.dup2(kept, 1)
print("two")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "one\nno UTF-8: a\\udcff\ntwo\n", "")


def test_streams_that_others_have_replaced_are_left_alone(capsys):
    job.ignore_write_errors()
    print("seen")
    assert capsys.readouterr().out == "seen\n"


def test_a_file_of_the_run_never_takes_the_place_of_a_closed_stream(tmp_path):
    script = "import os; from common import job; job.ignore_write_errors(); print(os.open('x', os.O_CREAT | os.O_WRONLY), file=open('y', 'w'))"
    env = environment(PYTHONPATH=str(ROOT))
    subprocess.run(["sh", "-c", f'"{sys.executable}" -c "$1" >&- 2>&- <&-', "sh", script], cwd=tmp_path, env=env, check=True)
    assert int((tmp_path / "y").read_text()) > 2 and os.path.getsize(tmp_path / "x") == 0


OURS = sorted(path.stem for path in (ROOT / "jobs").glob("*.py") if path.stem != "plain_ddp")  # whose Ctrl-C is Python's own


@pytest.mark.parametrize("job", OURS)
def test_ctrl_c_during_the_imports_ends_a_job_without_a_traceback(tmp_path, job):
    """In the place of torch a module that says when it is imported, and then does nothing until the signal."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import signal\nopen('imports', 'w').close()\nsignal.pause()\n")
    words, env = command(job, *TINY), environment(PYTHONPATH=str(tmp_path))
    process = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for((tmp_path / "imports").exists, process, "import of torch")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE) == ("", "") and process.returncode == -signal.SIGINT


def test_ctrl_c_after_the_imports_is_the_jobs_own_again(capsys):
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended:
            run_job(lambda: os.kill(os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130


def test_a_program_that_imports_a_job_keeps_its_own_answer_to_ctrl_c():
    own = "import signal; own = signal.getsignal(signal.SIGINT)"  # which a shell may have made none, in the background
    code = f"{own}; import jobs.train, jobs.speedrun; print(signal.getsignal(signal.SIGINT) is own)"
    done = run([sys.executable, "-c", code], cwd=ROOT, env=environment())
    assert done.stdout == "True\n", done.stderr
