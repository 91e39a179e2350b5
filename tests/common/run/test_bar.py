"""What is seen while a run trains: a bar that fits its terminal, and in a file lines that get rarer."""

import datetime
import fcntl
import os
import pty
import re
import struct
import sys
import termios

import pytest
import torch

from common import devices
from common.checkpoints.position import Position
from common.run.observers import bar, console
from common.run.side_files import SideFiles
from tests.tools import observed
from tests.tools.jobs import ROOT, TINY, Popen, environment, in_rehearsal

# A job whose bar looks at the run after each step.
RUN = """
import runpy, sys
sys.path.insert(0, {root!r})
from common.run.observers import console
console.BAR_UPDATE_SECONDS = 0
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def seen_at(columns, folder, *options):
    """What a job writes to a terminal that is so wide."""
    (folder / "run.py").write_text(RUN.format(root=str(ROOT)))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    words = [
        sys.executable,
        "-u",
        folder / "run.py",
        ROOT / "jobs" / "train.py",
        *TINY,
        *options,
        "--output_dir",
        folder / "out",
    ]
    process = Popen(words, stdout=theirs, stderr=theirs, env=environment(TERM="xterm"), cwd=folder)
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 65536):
            seen += part
    except OSError:  # the other end was closed
        pass
    os.close(ours)
    assert process.wait() == 0, seen.decode()
    return seen.decode().replace("\x1b[A", "")


@pytest.mark.parametrize("columns", in_rehearsal([60, 120], lambda columns: columns == 120))
def test_the_bar_fits_the_terminal_and_keeps_the_time_that_is_left(columns, tmp_path):
    seen = seen_at(columns, tmp_path, "--max_samples", "2048", "--batch_size", "512")  # and two batches of test images
    frames = [frame for frame in re.split(r"[\r\n]", seen) if re.match(r"epoch \d/2 \|", frame)]
    assert frames and [frame for frame in frames if len(frame) > columns] == []
    told = [frame for frame in frames if ", " in frame]
    assert all(re.search(r"\|.{10,}\| \d/4, (\?|\d+:\d\d:\d\d) left", frame) for frame in told), told
    with_loss = [frame for frame in told if re.search(r" left, loss \d+\.\d{4}", frame)]
    assert all(re.search(r"\d/4, \d+:\d\d:\d\d left", frame) for frame in with_loss), with_loss
    assert with_loss and {"images/s" in frame and "/s" in frame[-8:] for frame in with_loss} == {columns == 120}, with_loss
    assert any("images/s" in frame for frame in told) == any("/s" in frame for frame in told)
    assert set(re.findall(r"evaluation \|[^|]*\| \d/(\d)", seen)) == {"2"}
    assert "images_per_s=" not in seen and "evaluation |" in seen and seen.count(" epoch=2/2 steps=8 ") == 1


def test_words_fall_away_from_the_right_and_the_first_stays():
    words = ["0:12:33 left", "loss 1.2345", "346 images/s"]
    whole = "".join(f", {word}" for word in words)
    assert bar.words_that_fit(words, len(whole) + 1) == whole
    assert bar.words_that_fit(words, len(whole)) == ", 0:12:33 left, loss 1.2345"
    assert bar.words_that_fit(words, 20) == bar.words_that_fit(words, 0) == ", 0:12:33 left"
    assert bar.words_that_fit([], 80) == ""


class Drawn:
    """A bar of tqdm's."""

    def __init__(self, drawn, total, desc, initial=0, **_):
        self.n, self.name, self.is_closed = initial, f"{desc} of {total}", False
        drawn.append(self)

    def update(self, more):
        self.n += more

    def refresh(self):
        pass

    def close(self):
        self.is_closed = True


@pytest.fixture
def drawn(monkeypatch):
    """The bars that are drawn."""
    bars = []
    monkeypatch.setattr(bar.progress, "bar", lambda **options: Drawn(bars, **options))
    return bars


def test_an_evaluation_that_begins_anew_has_a_new_bar_and_none_counts_beyond_its_end(drawn, tmp_path):
    shown = observed.observer(console.Console, tmp_path, shows=True, writes=False)
    facts = observed.facts(tmp_path)
    shown.epoch_began(facts)
    shown.evaluation_began(facts)
    for batches, total in ((1, 3), (2, 3), (1, 3), (2, 3), (3, 3), (1, 5)):
        shown.evaluated(facts, batches=batches, total=total)
    assert [(one.name, one.n, one.is_closed) for one in drawn] == [
        ("epoch 1/2 of 15", 5, True), ("evaluation of 3", 2, True), ("evaluation of 3", 3, True), ("evaluation of 5", 1, False),
    ]  # fmt: skip


def test_an_epoch_whose_steps_are_all_done_has_no_bar(drawn, tmp_path):
    shown = observed.observer(console.Console, tmp_path, shows=True, writes=False)
    shown.epoch_began(observed.facts(tmp_path, Position(samples_seen=1280, total_steps=10, consumed=1280)))
    assert drawn == []


def test_the_width_is_that_of_the_terminal_that_the_bar_is_drawn_on(monkeypatch):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 61, 0, 0))
    monkeypatch.setenv("COLUMNS", "200")
    with open(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        assert bar.terminal_size().columns == 61
    os.close(ours)
    with open(os.devnull, "w") as nowhere, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", nowhere)
        assert bar.terminal_size() == bar.DEFAULT_SIZE


def test_a_late_number_is_the_last_that_was_asked_for():
    number = devices.AsyncScalar(torch.device("cpu"))
    assert number.read() is None
    number.start_copy(torch.tensor(2.5))
    number.start_copy(torch.tensor(1.5))
    assert number.read() == 1.5


class Event:
    def __init__(self):
        self.is_over = False

    def query(self):
        return self.is_over


def test_a_number_that_the_device_has_not_computed_is_not_waited_for(monkeypatch):
    events = [Event(), Event()]
    recorded = iter(events)
    work = sys.modules["common.devices.work"]
    monkeypatch.setattr(work.kinds, "has_streams", lambda device: True)
    monkeypatch.setattr(work, "current_stream", lambda device: None)
    monkeypatch.setattr(work, "record_event", lambda stream: next(recorded))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    number = devices.AsyncScalar(torch.device("cpu"))
    number.start_copy(torch.tensor(2.5))
    assert number.read() is None
    events[0].is_over = True
    assert number.read() == 2.5
    number.start_copy(torch.tensor(1.5))
    assert number.read() is None


HOURS = 8


def lines_of(seconds, epochs, tmp_path, monkeypatch, capsys, **options):
    """The lines of a run of this length in a file; the clock of the run gives one each five seconds."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    side_files = SideFiles(str(tmp_path), shows=True, writes=False)
    shown = console.Console(observed.options(tmp_path, **options), torch.device("cpu"), side_files)
    for epoch in range(epochs):
        facts = observed.facts(tmp_path, Position(epoch=epoch, consumed=640))
        shown.epoch_began(facts)
        for _ in range(int(seconds / epochs / 5)):
            now[0] += 5
            shown.log_due(facts, **observed.LINE)
        shown.epoch_ended(facts, **observed.EPOCH)
    return capsys.readouterr().out.splitlines()


def test_the_log_of_eight_hours_has_less_than_1500_lines(tmp_path, monkeypatch, capsys):
    lines = lines_of(HOURS * 3600, 90, tmp_path, monkeypatch, capsys)
    assert 500 < len(lines) < 1500
    assert sum(" steps=" in line for line in lines) == 90
    assert all(re.match(r"\d\d:\d\d:\d\d epoch=", line) for line in lines)
    assert abs(datetime.datetime.now().hour - int(lines[-1][:2])) in (0, 1, 23)


def test_the_first_step_of_an_epoch_has_no_line_but_for_the_first_of_a_start(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    shown = observed.observer(console.Console, tmp_path, shows=True, writes=False)
    for steps in (1, 5, 1, 5):
        now[0] += 60
        shown.log_due(observed.facts(tmp_path, Position(consumed=128 * steps)), **observed.LINE)
    assert re.findall(r"step=(\d)/10", capsys.readouterr().out) == ["1", "5", "5"]


def test_in_the_first_five_minutes_there_is_a_line_each_five_seconds(tmp_path, monkeypatch, capsys):
    assert len(lines_of(300, 1, tmp_path, monkeypatch, capsys)) == 60 + 1


def test_log_seconds_is_the_pause_whatever_has_passed(tmp_path, monkeypatch, capsys):
    assert len(lines_of(7200, 1, tmp_path, monkeypatch, capsys, log_seconds=10)) == 720 + 1
