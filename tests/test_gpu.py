"""The runner of `make gpu`, and that each of its checks fails where a number is wrong: no GPU is needed for either."""

import argparse
import inspect
import json
import os
import subprocess
import sys
import zipfile

import pytest
import torch

from tests.gpu import __main__ as runner
from tests.gpu import judge, report, runs
from tests.gpu.table import ROWS
from tests.jobs import PATIENCE

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
    words = [sys.executable, "-m", "tests.gpu", "--out", folder, *words]
    return subprocess.run(words, cwd=runner.ROOT, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, "REHEARSAL_GPUS": "0"})  # fmt: skip


def test_a_row_that_is_done_is_not_done_again_and_a_failed_one_is_the_exit_code(tmp_path):
    rows = [{"row": name, "verdict": "passed", "seconds": 1.0, "judged": []} for name in ("step", "quality")]
    results = tmp_path / "rows.jsonl"
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(tmp_path, "--only", "step", "quality")
    assert done.returncode == 0 and "2 passed" in done.stdout and results.read_text().count("\n") == 2
    results.write_text(json.dumps({**rows[0], "verdict": "failed", "why": "2 is not below 1"}) + "\n")
    done = run(tmp_path, "--only", "step")
    assert done.returncode == 1 and "2 is not below 1" in done.stdout


def test_without_time_nothing_begins(tmp_path):
    done = run(tmp_path, "--only", "step", "--budget", "0.01")
    assert "no time left; the same command goes on from here" in done.stdout and not (tmp_path / "rows.jsonl").exists()


def test_a_row_ends_with_its_time_and_what_it_has_started_ends_with_it(tmp_path):
    row = runner.result_of("quality", 0.01, tmp_path / "quality", dict(os.environ))
    assert row["verdict"] == "cut off" and "see quality/log" in row["why"]


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
    environment = runner.with_wheels(argparse.Namespace(wheels=wheels, out=out))
    code = "import handed_over; print(handed_over.here)"
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout == "1\n"


def test_the_page_has_a_line_for_each_row(tmp_path):
    rows = [
        {
            "row": "step",
            "verdict": "passed",
            "seconds": 9.0,
            "at": "2026-01-02 03:04",
            "judged": [{}, {}],
            "figures": {"error": 1},
        },
        {"row": "dali", "verdict": "missing", "seconds": 1.0, "at": "2026-01-02 03:05", "why": "not installed: nvidia.dali"},
    ]
    report.write(rows, tmp_path / "GPU.md")
    page = (tmp_path / "GPU.md").read_text()
    assert "| step | passed | 9 | error 1 |" in page and "| dali | missing | 1 | not installed: nvidia.dali |" in page
    assert f"torch {torch.__version__}" in page and "2026-01-02 03:04 to 2026-01-02 03:05" in page


def test_each_row_fits_in_a_slice_of_nine_minutes():
    assert all(0 < row.seconds <= 540 for row in ROWS.values())


@pytest.mark.parametrize("command", runs.COMMANDS)
def test_the_commands_of_the_row_of_pages_stand_in_a_page(command):
    pages = [runner.ROOT / "README.md", *(runner.ROOT / "docs").glob("*.md")]
    assert any(command in page.read_text() for page in pages)
