"""The runner of `make gpu`, and that each of its checks fails where a number is wrong: no GPU is needed for either."""

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile

import numpy as np
import pytest
import torch

from datasets import cifar10
from tests.gpu import __main__ as runner
from tests.gpu import judge, measured, report, rows, runs, table
from tests.gpu.table import ROWS, SLICES
from tests.tools import jobs
from tests.tools.jobs import PATIENCE, TINY

ONES, NAN = torch.ones(3), torch.tensor([1.0, 1.0, float("nan")])
FELL = ([8.0, 4.0, 4.0], [False, False, True])  # the scale before and after two steps, and whether the weights moved

# (a verdict of judge.py, what is right, what is wrong)
CHECKS = [
    (judge.same_bits, (ONES, ONES.clone()), [(ONES, ONES + 1e-7), (ONES, NAN), (ONES, ONES.double()), (ONES, ONES[:2])]),
    (judge.below, (0.5, 1), [(1, 1), (2, 1), (float("nan"), 1), (float("-inf"), 1)]),
    (judge.at_least, (1, 1), [(0.99, 1), (float("nan"), 1), (float("inf"), 1)]),
    (judge.equal, ("a", "a"), [("a", "b"), (None, "b")]),
    (judge.close, (1.0, 1.05, 0.1), [(1.0, 1.2, 0.1), (float("nan"), 1.0, 0.1)]),
    (judge.says, ("all is done", "all", "done"), [("all is done", "all", "over"), ("", "done")]),
    (
        judge.scale_fell_and_steps_were_skipped,
        (*FELL, 1),
        [
            (*FELL, 0),  # not counted
            (*FELL, 2),  # counted twice
            (FELL[0], [False, True, True], 1),  # the weights moved in the skipped step
            (FELL[0], [False, False, False], 1),  # and not in the other
            ([8.0, 8.0, 8.0], [False, True, True], 0),  # the scale never fell
        ],
    ),
]


@pytest.mark.parametrize(("check", "right", "wrong"), CHECKS, ids=lambda value: getattr(value, "__name__", None))
def test_a_check_fails_where_a_number_is_wrong(check, right, wrong):
    assert check(*right) is None
    for values in wrong:
        assert check(*values), values


def test_no_check_is_left_out():
    functions = {function for _, function in inspect.getmembers(judge, inspect.isfunction)}
    assert functions == {check for check, *_ in CHECKS}


def answer(*judged, **more):
    return {"judged": [dict(zip(("what", "wrong", "number"), one)) for one in judged], "figures": {}, **more}


GOOD, WRONG, MISBEHAVED = ("a", None, True), ("b", "2 is not below 1", True), ("c", "does not say 'done'", False)


@pytest.mark.parametrize(
    ("found", "on_a_gpu", "rehearsed"),
    [
        (answer(GOOD), "passed", "not judged"),
        (answer(GOOD, WRONG), "failed", "not judged"),
        (answer(GOOD, MISBEHAVED), "failed", "failed"),
        (answer(), "passed", "passed"),
        (answer(GOOD, error="ValueError: no"), "failed", "failed"),
        (answer(missing="not installed: nvidia.dali"), "missing", "missing"),
    ],
)
def test_numbers_are_judged_on_a_gpu_and_not_on_a_stand_in(found, on_a_gpu, rehearsed, monkeypatch):
    monkeypatch.delenv("REHEARSAL_GPUS", raising=False)
    assert runner.verdict(found)["verdict"] == on_a_gpu
    monkeypatch.setenv("REHEARSAL_GPUS", "1")
    assert runner.verdict(found)["verdict"] == rehearsed


def run(folder, *words):
    words = ["-m", "tests.gpu", "--out", folder, "--work", folder / "work", *words]
    return jobs.run([sys.executable, *words], cwd=runner.ROOT, env={**os.environ, "REHEARSAL_GPUS": "0"})


def test_a_row_that_has_passed_is_not_done_again_and_a_failed_one_is_the_exit_code(tmp_path):
    rows = [
        {"row": name, "verdict": verdict, "seconds": 1.0, "judged": []}
        for name, verdict in (("step", "passed"), ("dali", "missing"))
    ]
    results = tmp_path / "rows.jsonl"
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(tmp_path, "--only", "step", "dali")
    assert done.returncode == 0 and "1 passed, 1 missing" in done.stdout and results.read_text().count("\n") == 2
    results.write_text(json.dumps({**rows[0], "verdict": "failed", "why": "2 is not below 1"}) + "\n")
    done = run(tmp_path, "--only", "step", "--budget", "0.01")
    assert done.returncode == 1 and "2 is not below 1" in done.stdout
    assert "no time left; the same command goes on from here" in done.stdout and results.read_text().count("\n") == 1


@pytest.mark.rehearsal
def test_a_slice_leaves_two_files_with_its_rows_and_their_logs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setitem(runner.SLICES, "behaviour", table.Slice("", [["quality"], ["dali"]], minutes=PATIENCE / 60))
    monkeypatch.setattr(runner.report, "facts", lambda: {"gpu": "none"})
    monkeypatch.setattr(
        sys, "argv", ["", "--slice", "behaviour", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    )
    with pytest.raises(SystemExit) as ended:
        runner.main()
    assert ended.value.code == 1 and sorted(path.name for path in (tmp_path / "out").iterdir()) == ["logs.tgz", "rows.jsonl"]
    rows = runner.read(tmp_path / "out" / "rows.jsonl")
    assert {row["row"] for row in rows} == {"quality", "dali"} and all(row["gpu"] == "none" for row in rows)
    with tarfile.open(tmp_path / "out" / "logs.tgz") as logs:
        assert {"quality/log", "dali/log", "quality/result.json"} <= set(logs.getnames())


def test_the_slices_have_every_row_once_and_are_listed(capsys, monkeypatch):
    rows = [row for part in SLICES.values() for lane in part.lanes for row in lane]
    assert sorted(rows) == sorted(ROWS) and all(part.minutes <= 9.5 for part in SLICES.values())
    monkeypatch.setattr(sys, "argv", ["", "--slice"])
    runner.main()
    assert all(re.search(rf"^{name} +7.5 minutes: ", capsys.readouterr().out, re.MULTILINE) for name in list(SLICES)[:1])


def test_a_row_ends_with_its_time_and_what_it_has_started_ends_with_it(tmp_path):
    row = runner.result_of("quality", 0.01, tmp_path / "quality", dict(os.environ))
    assert row["verdict"] == "cut off" and "see quality/log" in row["why"]


def test_what_a_row_has_found_before_it_is_cut_off_is_kept(tmp_path, monkeypatch):
    hangs = """
import os, pathlib, signal, sys
from tests.gpu.rows import Row
row = Row("quality", pathlib.Path(sys.argv[2]), figures={"first": "7 images/s"})
row.run("true")
os.kill(os.getpid(), signal.SIGABRT)
"""
    monkeypatch.setattr(runner, "ONE", ["-c", hangs])
    row = runner.result_of("quality", PATIENCE, tmp_path, dict(os.environ))
    assert row["verdict"] == "cut off" and row["figures"] == {"first": "7 images/s"}


def test_the_slices_run_where_pytest_is_missing():
    program = "import sys; sys.modules['pytest'] = None; import tests.gpu.__main__, tests.gpu.rows, tests.gpu.runs"
    done = jobs.run([sys.executable, "-c", program], cwd=runner.ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.rehearsal
def test_a_row_without_a_gpu_fails_with_its_reason(tmp_path):
    row = runner.result_of("quality", PATIENCE, tmp_path / "quality", {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert row["verdict"] == "failed" and row["why"]


def test_a_wheel_may_come_in_pieces(tmp_path):
    wheels, name = tmp_path / "wheels", "handed_over-1.0-py3-none-any.whl"
    wheels.mkdir()
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        wheel.writestr("handed_over.py", "here = 1\n")
        wheel.writestr("handed_over-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: handed_over\nVersion: 1.0\n")
        wheel.writestr("handed_over-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("handed_over-1.0.dist-info/RECORD", "")
    whole = (tmp_path / name).read_bytes()
    for number, first in enumerate(range(0, len(whole), 100)):
        (wheels / f"{name}.{number:02}").write_bytes(whole[first : first + 100])
    out = tmp_path / "out"
    out.mkdir()
    environment = runner.with_wheels(argparse.Namespace(wheels=wheels, work=out))
    code = "import handed_over; print(handed_over.here)"
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout == "1\n"


WITH = {"driver": "580", "torch": "2.11.0", "cudnn": 91000, "python": "3.12.3", "cpu": "a Xeon", "commit": "abc1234"}
FOUND = {"verdict": "passed", "seconds": 9.0, "judged": [{}, {}], "figures": {"error": 1}, **WITH}


def test_the_page_has_the_newest_row_of_each_name_and_gpu(tmp_path):
    rows = [
        {**FOUND, "row": "step", "gpu": "NVIDIA H100", "at": "2026-01-02 03:04"},
        {
            **FOUND,
            "row": "step",
            "gpu": "NVIDIA H100",
            "at": "2026-01-03 03:04",
            "verdict": "failed",
            "why": "2 is not below 1",
        },
        {**FOUND, "row": "step", "gpu": "NVIDIA H200", "at": "2026-01-01 03:04"},
        {**FOUND, "row": "quality", "gpu": "Rehearsal GPU", "at": "2026-01-01 03:04"},
    ]
    kept, page = tmp_path / "gpu.jsonl", tmp_path / "GPU.md"
    report.keep(rows[:1], kept, page)
    report.keep(rows[1:], kept, page)
    report.keep(rows, kept, page)  # nothing twice
    assert [json.loads(line) for line in kept.read_text().splitlines()] == rows[:3]
    text = page.read_text()
    assert text.count("| step |") == 2 and "quality" not in text and text.index("## NVIDIA H100") < text.index("## NVIDIA H200")
    assert (
        "| step | failed | 9 | 2 is not below 1; error 1 | 2026-01-03 03:04, torch 2.11.0, cuDNN 91000, driver 580, Python 3.12.3, a Xeon, abc1234 |"
        in text
    )


def test_the_page_answers_what_a_person_asks_first(tmp_path):
    speeds = {
        "train_imagenet.py, float16, --compile true": "5,686 images/s (5,684 to 5,687)",
        "torchvision's loop, float16": "4,615 images/s (1 to 9)",
        "peak memory": "1 MiB",
    }
    rows = [
        {**FOUND, "row": "resnet50 speed", "gpu": "NVIDIA H100", "at": "2026-01-02 03:04", "figures": speeds},
        {**FOUND, "row": "kills", "gpu": "NVIDIA H100", "at": "2026-01-02 03:04", "figures": {"kills during the training": 10}},
        {
            **FOUND,
            "row": "jobs",
            "gpu": "NVIDIA H100",
            "at": "2026-01-02 03:04",
            "verdict": "failed",
            "why": "train |\n waits",
            "figures": {},
        },
    ]
    report.keep(rows, tmp_path / "gpu.jsonl", page := tmp_path / "GPU.md")
    first = page.read_text().split("## All rows")[0]
    assert (
        "train_imagenet.py, float16, --compile true 5,686 images/s | torchvision's loop, float16 4,615 images/s | 2026-01-02, 2.11.0 |"
        in first
    )
    assert "| yes, 2 checks hold<br>kills during the training 10 |  |" in first and "| failed: train / waits |  |" in first
    assert first.count("| not measured yet | | |") == len(report.QUESTIONS) - 3 and "peak memory" not in first


def test_each_question_is_about_a_row_that_there_is():
    assert {question.row for question in report.QUESTIONS} <= set(ROWS)


def test_the_page_is_that_of_the_rows_that_are_kept(tmp_path):
    report.keep([], report.KEPT, tmp_path / "GPU.md")
    assert (tmp_path / "GPU.md").read_text() == report.PAGE.read_text()


@pytest.mark.rehearsal
def test_an_epoch_that_ends_in_a_measured_window_is_an_error_and_not_a_figure(tmp_path):
    words = [sys.executable, "-m", "tests.gpu.measured", 3, 9, "jobs/train.py", *TINY, "--max_samples", 160, "--batch_size", 32]
    done = jobs.run([*words, "--output_dir", tmp_path / "out"], cwd=runner.ROOT)
    assert done.returncode == 1 and "an epoch ended after step 5, which lies in the measured window from 3 to 9" in done.stderr


@pytest.mark.rehearsal
def test_a_job_is_measured_in_three_windows(tmp_path):
    words = [sys.executable, "-m", "tests.gpu.measured", 3, 9, "jobs/train.py", *TINY, "--max_samples", 160, "--batch_size", 16]
    done = jobs.run([*words, "--output_dir", tmp_path / "out"], cwd=runner.ROOT)
    found = rows.last_json(done.stdout)
    assert done.returncode == 0 and len(found["images/s"]) == 3 and min(found["images/s"]) > 0, done.stderr


def test_one_batch_comes_over_and_over_from_a_loader_that_is_else_as_it_was():
    class Loader(list):
        beside = "its own"

    loader = measured.OneBatch(Loader(["first", "second"]))
    batches = iter(loader)
    assert [next(batches) for _ in range(4)] == 4 * ["first"] and len(loader) == 2 and loader.beside == "its own"


def test_one_epoch_of_cifar_has_as_many_images_as_the_window_takes():
    images = np.arange(5 * 12, dtype=np.uint8).reshape(5, 3, 2, 2)
    data = cifar10.ImageArrays(images, np.arange(5), ["a"])
    train, test = measured.repeated(lambda args: (data, data), 12)(None)
    assert len(train) == 12 and len(test) == 5 and train.labels.tolist() == [*range(5), *range(5), 0, 1]
    assert torch.equal(train.images[7], data.images[2]) and train.images.is_contiguous(memory_format=torch.channels_last)


def test_what_is_printed_behind_the_result_does_not_hide_it():
    assert rows.last_json('{"a": 1}\n[W1127] a warning\n') == {"a": 1}
    with pytest.raises(RuntimeError, match="no line is JSON: nothing"):
        rows.last_json("nothing")


def test_each_row_fits_in_a_slice_of_nine_minutes():
    assert all(0 < row.seconds <= 540 for row in ROWS.values())


@pytest.mark.parametrize("command", runs.COMMANDS)
def test_the_commands_of_the_row_of_pages_stand_in_a_page(command):
    pages = [runner.ROOT / "README.md", *(runner.ROOT / "docs").glob("*.md")]
    assert any(command in page.read_text() for page in pages)
