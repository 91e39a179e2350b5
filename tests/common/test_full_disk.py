"""A disk that is full or fails: a run goes on without what it can do without, and ends in one line where it cannot."""

import argparse
import errno
import json
import os
import re
import shutil
import struct
import subprocess
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common import files, job
from common.alive import heartbeat
from common.checkpoints import checkpoint, evidence, run_folder
from common.checkpoints.position import Position
from common.errors import SampleError, TrainingFailed, UserError
from common.run import side_files
from common.run.observers import tensorboard
from datasets.loader import DeviceLoader, torch_batches
from datasets.packs import packed
from datasets.photos import decode
from datasets.photos import files as photo_files
from datasets.sampler import InOrder
from jobs import speedrun
from launch.pack import command as pack
from tests.check_ledger import steps_that_count
from tests.tools import observed
from tests.tools.jobs import FIGURES, ROOT, TINY, assert_same_bits, command, environment, final_state, run_forked, run_job


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def run_full_once(paths, folder, *options, **how):
    """The job so that each of these files, once, finds no room."""
    script = [
        ROOT / "tests" / "tools" / "full_once.py",
        ",".join(f"{path}.unfinished" for path in paths),
        *command("train", *TINY, *options, "--output_dir", folder / "out")[1:],
    ]
    return run_forked(script, folder, **how)


def test_what_is_appended_to_a_file_that_could_not_be_replaced_comes_behind_its_new_content(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old\n")
    own = side_files.SideFiles(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(side_files, "write_atomically", full)
        own.write("file", b"new")
        own.append("file", b" and more")
    own.retry()
    assert (tmp_path / "file").read_bytes() == b"new and more"


def test_a_file_that_another_start_has_taken_over_is_not_written_again(tmp_path, monkeypatch, capsys):
    own = side_files.SideFiles(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(side_files, "write_atomically", full)
        own.write("file", b"content")

    def is_taken_over(path, *_):
        raise files.TakenOver(path)

    monkeypatch.setattr(side_files, "write_atomically", is_taken_over)
    own.retry()
    own.retry()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: ") and not (tmp_path / "file").exists()


def test_a_run_goes_on_without_what_it_can_do_without_and_tries_it_again(finished, tmp_path):
    names = ("metrics.jsonl", "curves.png", "report.txt", "report.html", "report.json")
    paths = [tmp_path / "out" / name for name in names]
    done = run_full_once([*paths, tmp_path / "out" / "checkpoints" / ".attempt"], tmp_path, env=FIGURES)
    assert len(re.findall(r"\.attempt cannot be written: .*; a step that kills the job may go unnoticed", done.stdout)) == 1
    for path in paths:
        said = [line for line in done.stdout.splitlines() if path.name in line and not line.startswith("files: ")]
        warning = f"warning: {path} cannot be written: No space left on device; the run goes on and tries it again"
        assert said == [warning, f"{path} is written again"] and path.stat().st_size
    assert not done.stderr
    assert_same_bits(final_state(tmp_path), final_state(finished[0]))


def test_files_of_another_kind_are_a_line_each(finished, tmp_path):
    shutil.copytree(finished[0] / "out", tmp_path / "out")
    checkpoints, speed = tmp_path / "out" / "checkpoints", tmp_path / "out" / "speed.jsonl"
    for name in ("of_others", "000000099999.json"):
        (checkpoints / name).symlink_to("nowhere")
    for path in (speed, checkpoints / ".attempt"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    log = run_job("train", tmp_path, *TINY, "--epochs", 3).stdout
    warnings = [line for line in log.splitlines() if line.startswith("warning")]
    assert re.fullmatch(r"warning: checkpoint \S+/000000099999.pt is damaged: .*; trying the one before it", warnings.pop(0))
    assert [line for line in warnings if "speed.jsonl" in line] == [
        f"warning: {speed} cannot be written: it is not a regular file; the run goes on and tries it again"
    ]
    assert speed.is_fifo() and (checkpoints / "of_others").is_symlink()


def test_numbers_that_no_run_has_written_name_no_step(tmp_path):
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    (tmp_path / "out" / "checkpoints" / ".attempt").write_bytes(struct.pack("<4q", 2**62, 2**62, 2**62, 2**62))
    assert "done: " in run_job("train", tmp_path, *TINY, "--max_steps", 1).stdout


def test_no_event_of_tensorboard_is_lost_when_the_disk_has_room_again(tmp_path, monkeypatch, capsys):
    (tmp_path / "tensorboard").mkdir()
    monkeypatch.setattr(tensorboard, "file_name", lambda: "events.out.tfevents.1.host")
    path = tmp_path / "tensorboard" / "events.out.tfevents.1.host"
    told, append = observed.observer(tensorboard.TensorBoard, tmp_path), side_files.append
    for step in (1, 2, 3):
        monkeypatch.setattr(side_files, "append", append if step == 3 else full)
        told.epoch_ended(observed.facts(tmp_path, Position(total_steps=step)), metrics={"accuracy": step / 10})
    assert capsys.readouterr().out.splitlines() == [
        f"warning: {path} cannot be written: No space left on device; the run goes on and tries it again",
        f"{path} is written again",
    ]
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert read.file_version == 2, "or TensorBoard takes steps that come late for those of another start, and drops others"
    assert [(event.step, round(event.value, 4)) for event in read.Scalars("test/accuracy")] == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_weights_that_cannot_be_written_end_the_run_in_one_line_with_the_last_good_checkpoint(finished, tmp_path):
    done = run_full_once([tmp_path / "out" / "epoch_2.pth"], tmp_path, check=1)
    last = f"last checkpoint {tmp_path}/out/checkpoints/000000000064.pt"
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: a checkpoint could not be written: [Errno 28] No space left on device, ") and said.endswith(
        last
    )
    assert "going on from" in run_job("train", tmp_path, *TINY).stdout
    assert_same_bits(final_state(tmp_path), final_state(finished[0]))


def test_a_ledger_that_cannot_be_written_ends_the_run_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "replace_with_copy", full)
    kept = evidence.Evidence(argparse.Namespace(output_dir=str(tmp_path), ledger=True), print, lambda: "no checkpoint yet")
    with pytest.raises(TrainingFailed, match=r"^the ledger cannot be written: No space left on device; no checkpoint yet$"):
        kept.keep(1, needs_attempt=False, needs_ledger=True)


@pytest.mark.parametrize("half", [b'{"step": [0, 0], "ids": [1, 2', b"{"])
def test_half_a_line_of_a_ledger_is_dropped(tmp_path, half):
    for _ in range(2):
        with open(tmp_path / "rank_0.jsonl", "ab") as file:
            file.write(half)
        (tmp_path / "ledger").mkdir(exist_ok=True)
        os.replace(tmp_path / "rank_0.jsonl", tmp_path / "ledger" / "rank_0.jsonl")
        kept = evidence.Evidence(argparse.Namespace(output_dir=str(tmp_path), ledger=True), print, lambda: "no checkpoint yet")
        kept.keep(0, needs_attempt=False, needs_ledger=True)
        kept.begin(0, 0)
        (tmp_path / "rank_0.jsonl").write_bytes((tmp_path / "ledger" / "rank_0.jsonl").read_bytes())
    lines = [json.loads(line) for line in (tmp_path / "ledger" / "rank_0.jsonl").open()]
    assert [line["start"] for line in lines] == [[0, 0], [0, 0]] and steps_that_count([tmp_path]) == {}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EMFILE])
def test_any_other_file_is_one_line_too(number, capsys, monkeypatch):
    monkeypatch.delenv(heartbeat.FILES, raising=False)

    def main():
        raise OSError(number, os.strerror(number), "/data/x")

    with pytest.raises(SystemExit) as ended:
        job.run_job(main)
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        f"error: /data/x: {os.strerror(number)}; mend that and start again: the run goes on from its last checkpoint\n"
    )


NO_FILES = """
import resource, sys
sys.path.insert(0, {root!r})
from common.job import run_job

def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    opened = []
    while True:
        opened.append(open("/dev/null"))

run_job(main)
"""


def test_without_files_to_open_the_line_is_printed_too():
    """Nothing can be imported then."""
    done = subprocess.run(
        [sys.executable, "-c", NO_FILES.format(root=str(ROOT))], capture_output=True, text=True, env=environment()
    )
    assert (done.returncode, done.stderr) == (1, f"error: /dev/null: {os.strerror(errno.EMFILE)}; mend that and start again: the run "
                                              "goes on from its last checkpoint\n"), done.stderr  # fmt: skip


def failing(monkeypatch, name, number=errno.ENOSPC):
    """From now on this function of os finds the disk full."""

    def fail(*given, **how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)


def test_a_file_that_cannot_get_its_name_leaves_nothing(tmp_path, monkeypatch):
    failing(monkeypatch, "replace")
    for save in (files.write_atomically, lambda path, _: checkpoint.write(str(tmp_path), {}, {"samples_seen": 1})):
        with pytest.raises(OSError):
            save(str(tmp_path / "file"), b"content")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", ["fsync", "mkdir"])  # of a file on trial; of the folder through which this start writes
@pytest.mark.parametrize(
    "number, kind", [(errno.ENOSPC, TrainingFailed), (errno.EIO, TrainingFailed), (errno.EACCES, UserError)]
)
def test_only_a_folder_that_was_given_wrongly_is_a_mistake(tmp_path, monkeypatch, change, number, kind):
    """A platform does not start a job with a mistake again."""
    failing(monkeypatch, change, number)
    args = argparse.Namespace(output_dir=str(tmp_path), checkpoint_dir=str(tmp_path), tensorboard_dir=str(tmp_path))
    with pytest.raises(kind, match=f"cannot write to {tmp_path}: {os.strerror(number)}"):
        run_folder.make_folders(args)
        run_folder.RunFolder(args).claim(starts_anew=False)


def test_a_note_of_the_step_that_a_start_could_not_write_to_goes_at_the_end(tmp_path, monkeypatch):
    evidence.Attempt(str(tmp_path), print).set(0, 64)
    with monkeypatch.context() as full:
        failing(full, "open")
        attempt = evidence.Attempt(str(tmp_path), print)
    attempt.remove()
    assert not list(tmp_path.iterdir())


KILLED = """
import os, runpy, signal, sys
from common.run.observers.files import Files
from common.run.observers.report import Report
from common.checkpoints.saver import Saving
save = Saving.save
Saving.save = lambda self, *given: (save(self, *given), self.wait())
kind = {"write_text": Report, "draw_curves": Files}[sys.argv[1]]
setattr(kind, sys.argv[1], lambda *given: os.kill(os.getpid(), signal.SIGKILL))
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("moment", ["write_text", "draw_curves"])  # before the last checkpoint; after it
def test_what_a_run_writes_at_its_end_is_there_after_a_kill_and_another_start(finished, tmp_path, moment):
    (tmp_path / "killed.py").write_text(KILLED)
    words = [tmp_path / "killed.py", moment, *command("train", *TINY, "--output_dir", tmp_path / "out")[1:]]
    run_forked(words, tmp_path, {"PYTHONPATH": str(ROOT)}, check=-9)
    run_job("train", tmp_path, *TINY)
    for name in ("report.txt", "report.json", "examples/mistakes.png"):
        assert (tmp_path / "out" / name).read_bytes() == (finished[0] / "out" / name).read_bytes()


def test_half_a_line_that_a_kill_has_left_of_a_speedrun_is_dropped(tmp_path):
    (tmp_path / "runs.jsonl").write_text('{"seed": 1}\n{"se')
    args = argparse.Namespace(net="small", target=0.8, held_out=False, output_dir=str(tmp_path), output_url=None)
    speedrun.record_run(args, torch.device("cpu"), {"seed": 2})
    assert [json.loads(line)["seed"] for line in (tmp_path / "runs.jsonl").open()] == [1, 2]


def test_a_pack_that_was_killed_before_it_was_marked_is_not_taken_for_another_one(tmp_path, monkeypatch):
    monkeypatch.setattr(pack.packed, "read_index", lambda *given: pytest.fail("there is none"))
    (tmp_path / ".train-pack.json.unfinished").write_text('{"ident')
    pack._clear(str(tmp_path), {"train": "1"}, overwrite=False)
    assert not list(tmp_path.iterdir())


# --- Reading ------------------------------------------------------------------------------------------------------------


class Unreadable:
    """A data set of which the second batch cannot be read."""

    def __init__(self, number):
        self._number = number

    def __getitem__(self, place):
        if 0 not in place[1]:
            raise OSError(self._number, os.strerror(self._number), "/data/photographs/2.jpg")
        return torch.zeros(1, 3, 4, 4, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_a_loader_process_cannot_read_is_one_line_that_names_it(workers, capfd, monkeypatch):
    monkeypatch.delenv(heartbeat.FILES, raising=False)
    sampler = InOrder(2, 1)
    batches = torch_batches(Unreadable(errno.EIO), sampler, workers)
    loader = DeviceLoader(batches, sampler, torch.device("cpu"), (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(SystemExit) as ended:
        job.run_job(lambda: [None for _ in loader] and None)
    assert ended.value.code == 1
    assert capfd.readouterr().err == (
        "error: /data/photographs/2.jpg: Input/output error; mend that and start again: the run goes on from its last checkpoint\n"
    )


def test_any_other_failure_of_a_loader_process_keeps_its_traceback():
    batches = torch_batches(Unreadable(errno.ENOENT), InOrder(2, 1), 1)
    with pytest.raises(SampleError, match=r"in __getitem__(.|\n)*sample 1: FileNotFoundError"):
        list(batches)


def test_no_sample_takes_the_place_of_one_that_a_failing_disk_does_not_give(monkeypatch):
    def read(number):
        return packed._read_part("/proc/self/mem", 0, 8)  # where nothing is mapped

    with pytest.raises(OSError) as raised:
        decode.Substitutes("images", 3).decode(0, 5, read, str)
    assert raised.value.errno == errno.EIO and raised.value.filename == "/proc/self/mem"


def test_a_photograph_that_a_failing_disk_does_not_give_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.jpg").write_bytes(b"x")
    monkeypatch.setattr(photo_files, "open_limited", lambda path: os.fdopen(os.open(path, os.O_WRONLY), "rb", buffering=0))
    with pytest.raises(OSError) as raised:
        photo_files.read(tmp_path / "a.jpg")
    assert raised.value.errno == errno.EBADF and raised.value.filename == tmp_path / "a.jpg"


# --- The lock -----------------------------------------------------------------------------------------------------------


def test_the_lock_ends_with_its_process_although_one_that_it_has_forked_lives_on(tmp_path, monkeypatch):
    """As loader processes do that wait for data, when their job is killed."""
    silence, speak = os.pipe()
    if not (job_of_its_own := os.fork()):
        try:
            run_folder.lock(str(tmp_path))
            if not os.fork():
                os.close(speak)
                os.read(silence, 1)
        finally:
            os._exit(0)
    os.waitpid(job_of_its_own, 0)
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0)
    run_folder.lock(str(tmp_path))
    os.close(speak)  # which ends it
    os.close(silence)


def test_the_lock_is_kept_by_a_process_that_forks(tmp_path, monkeypatch, capsys):
    run_folder.lock(str(tmp_path))
    if not (loads := os.fork()):
        os._exit(0)
    os.waitpid(loads, 0)
    run_folder.lock(str(tmp_path))  # once more, as a second run of this process does
    monkeypatch.setattr(run_folder, "_locked", set())  # as another process has it
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.3)
    monkeypatch.setattr(run_folder, "QUIET_SECONDS", 0)
    with pytest.raises(UserError, match="is in use by another job that is still running"):
        run_folder.lock(str(tmp_path))
    assert capsys.readouterr().out == f"{tmp_path} is in use by another job or start: waiting up to 0.3 s for its end\n"


def test_a_folder_that_cannot_be_locked_is_named(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match=f"cannot write to {tmp_path}: Is a directory; give another --output_dir"):
        run_folder.lock(str(tmp_path))
