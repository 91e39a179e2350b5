"""The log of a run as a story: few lines before the first step, what an epoch has changed, how long the rest takes, what comes next."""

import json
import platform
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from common.run import about, clock
from tests.tools.jobs import ROOT, TINY, command, environment, run_job

SAYS = "import sys; sys.path.insert(0, sys.argv[1]); from common import progress; [progress.say(text) for text in sys.argv[2:]]"


def test_what_an_epoch_has_changed_stands_behind_its_numbers(finished):
    folder, said = finished
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    told = re.findall(r"^\d\d:\d\d:\d\d epoch=\d/2 steps.* \((.*)\)$", said, re.MULTILINE)
    best = rows[0]
    assert told[0] == "the best so far"
    for before, row, words in zip(rows, rows[1:], told[1:]):
        best = row if row["accuracy"] > best["accuracy"] else best
        first = "the best so far" if best is row else f"best {best['accuracy']:.4f} in epoch {best['epoch']}"
        assert words == ", ".join(
            [first, *(f"{name} {row[name] - before[name]:+.4f}" for name in ("accuracy", "loss", "train_loss"))]
        )


def test_an_evaluation_in_mid_epoch_says_so_and_the_next_start_how_long_the_rest_takes(tmp_path):
    said = run_job("train", tmp_path, *TINY, "--max_steps", 5).stdout.splitlines()
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d epoch=2/2 steps=5 accuracy=\S+ loss=\S+ seconds=\S+ \(after 1 of its 4 steps\)", said[-4]
    )
    assert said[-1] == f"next: python {' '.join(map(str, command('train', *TINY, '--output_dir', tmp_path / 'out')[1:]))}"
    again = run_job("train", tmp_path, *TINY).stdout.splitlines()
    assert again[1].startswith("going on from ") and again[2].startswith("2 epochs of 4 steps, 64 training samples")
    assert re.fullmatch(r"about 0:00:\d\d left at the \d+ samples a second of the last start", again[4]), again
    less = run_job("train", tmp_path, *TINY, "--max_steps", 6).stdout
    assert "nothing to do: the run has done 2 epochs, 8 steps" in less and "left at the" not in less


def test_a_run_that_has_ended_says_which_files_are_where(finished):
    folder, said = finished
    assert re.search(rf"^files: report\.html, metrics\.jsonl, .* in {re.escape(str(folder))}/out", said, re.MULTILINE), said


def test_a_processor_without_a_name_as_on_arm_is_described_by_its_kind(monkeypatch):
    cpuinfo = types.SimpleNamespace(read_text=lambda errors: "processor\t: 0\nCPU part\t: 0xd40\n")
    monkeypatch.setattr(about, "Path", lambda _: cpuinfo)
    assert about.machine(torch.device("cpu"))["cpu"] == platform.machine()


@pytest.mark.parametrize("env, coloured", [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_are_for_a_terminal_that_wants_them(env, coloured):
    words = [sys.executable, "-c", SAYS, str(ROOT), "warning: a", "done: b", "epoch=1/2 loss=3"]
    pty = f"import pty, sys; sys.exit(pty.spawn({words!r}) >> 8)"
    env = {**{name: value for name, value in environment().items() if name != "NO_COLOR"}, "TERM": "xterm", **env}
    seen = subprocess.run([sys.executable, "-c", pty], env=env, capture_output=True, check=True).stdout.replace(b"\r", b"")
    plain = b"warning: a\ndone: b\nepoch=1/2 loss=3\n"
    assert seen == (b"\x1b[33mwarning: a\x1b[0m\n\x1b[32mdone: b\x1b[0m\nepoch=1/2 loss=3\n" if coloured else plain)
    assert subprocess.run(words, env=env, capture_output=True, check=True).stdout == plain, "a file has none"


# --- How long the rest takes ----------------------------------------------------------------------------------------------

PARTS = ("training", "evaluation", "saving")
RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())


PHASES = ("step", "evaluate", "save")  # of the heartbeat


def replayed(run, now):
    """(share of the time that has passed, seconds that were said to be left, seconds that were) after each step.

    `now`: the clock of the machine, in a list.
    """
    rows = [dict(zip(RECORDED["columns"], row)) for row in run["rows"]]
    left, whole = clock.Clock(test_samples=run["test_samples"]), sum(row[part] for row in rows for part in PARTS)
    for row in rows:
        for part, phase in zip(PARTS, PHASES):
            left.enter(phase, 0)
            now[0] += row[part]
        left.enter("start", 0)
        if row["step"]:
            left.count_step(1, row["samples"])
            samples = run["samples_per_epoch"] * run["epochs"] - row["samples"]
            yield now[0] / whole, left.seconds_left(samples, -(-samples // run["samples_per_epoch"])), whole - now[0]
        else:
            left.count_evaluation()


@pytest.mark.parametrize("name", RECORDED["runs"])
def test_the_time_left_is_true_within_a_tenth_after_the_first_tenth(name, at):
    """Of runs whose steps were recorded, on two cores of an AMD EPYC. In the last tenth a step more or less is more than a tenth of it.

    In the longest the machine itself changed: its steps took a fifth less from the middle on, which nobody could know before.
    """
    within = 0.15 if "40 epochs" in name else 0.1
    now = at([0.0], clock)
    told = [row for row in replayed(RECORDED["runs"][name], now) if 0.1 <= row[0] <= 0.9]
    assert len(told) > 20
    for passed, said, true in told:
        assert said == pytest.approx(true, rel=within), f"after {passed:.0%}"
