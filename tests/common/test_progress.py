"""One way to show how far a long piece of work is: on a terminal, in a log, and to those who wait for it."""

import io
import threading

import pytest

from common import progress
from common.files import MIB
from common.progress import Progress, Waiting


@pytest.fixture
def clock(at):
    """A clock that goes on only when the test says so."""
    return at([100.0], progress)


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(progress.sys, "stderr", io.StringIO())


# what is counted | what is added in 10 seconds | the line
LINES = [
    (
        {"total": 40, "unit": "objects", "total_bytes": 40 * MIB},
        [{"things": 10, "size": 20 * MIB}],
        "work: 10 of 40 objects, 20 of 40 MiB, 2.0 MiB/s, 10 s left",
    ),
    (
        {"total": 40, "unit": "objects", "total_bytes": 40 * MIB},
        [{"size": 10 * MIB, "old": True}, {"things": 10, "size": 10 * MIB}],
        "work: 10 of 40 objects, 20 of 40 MiB, 1.0 MiB/s, 20 s left",
    ),
    ({"total": 50, "unit": "images"}, [{"things": 20}], "work: 20 of 50 images, 2 images/s, 15 s left"),
    (
        {"total": 50, "unit": "images"},
        [{"things": 20, "size": 5 * MIB}],
        "work: 20 of 50 images, 5 MiB, 0.5 MiB/s, 15 s left",
    ),
    ({"total_bytes": 40 * MIB}, [{"size": 20 * MIB}], "work: 20 of 40 MiB, 2.0 MiB/s, 10 s left"),
    ({}, [{"size": 20 * MIB}], "work: 20 MiB, 2.0 MiB/s"),
    ({"total_bytes": 40 * MIB}, [{"size": 20 * MIB}, {"size": -20 * MIB}], "work: 0 of 40 MiB, 0.0 MiB/s"),
]


@pytest.mark.parametrize("counted, added, line", LINES, ids=[line for _, _, line in LINES])
def test_a_log_has_a_line_every_ten_seconds(log, clock, capsys, counted, added, line):
    with Progress("work", **counted) as shown:
        clock[0] += 9.9
        shown.add()
        assert capsys.readouterr().out == ""
        for words in added[:-1]:
            shown.add(**words)
        clock[0] += 0.1
        shown.add(**added[-1])
        shown.add()
        assert capsys.readouterr().out == f"{line}\n"


def test_those_who_wait_hear_of_it_once_a_second_and_its_number_changes(log, clock, capsys):
    told = []
    shown = Progress("work", total=9, unit="images", tell=lambda text, number: told.append((text, number)))
    for _ in range(4):
        clock[0] += 0.5
        shown.add(1, size=100)
    assert told == [
        ("work: 2 of 9 images, 0 MiB, 0.0 MiB/s, 4 s left", 202),
        ("work: 4 of 9 images, 0 MiB, 0.0 MiB/s, 2 s left", 404),
    ]
    assert capsys.readouterr().out == ""


def test_a_terminal_has_a_bar_and_no_lines(monkeypatch, clock, capsys):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    with Progress("work\n" + "x" * 99, total=4, unit="objects", total_bytes=4 * MIB) as shown:
        clock[0] += 60
        shown.add(1, size=2 * MIB)
        progress.say("a line above the bar")
    assert "work\\nxxx" in terminal.getvalue() and "x" * 40 not in terminal.getvalue()
    assert " 50%" in terminal.getvalue() and "1 of 4 objects" in terminal.getvalue()
    assert capsys.readouterr().out == "a line above the bar\n"


def test_threads_may_add_at_the_same_time(log):
    shown = Progress("work", unit="images")

    def work():
        for _ in range(1000):
            shown.add(1, size=3)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shown.text().startswith("work: 8000 images, 0 MiB, ") and shown.describe().startswith("0.0 MiB in ")


def test_a_url_cannot_forge_a_line(log):
    assert Progress("fetching s3://a\nerror: all is lost", unit="objects").text().count("\n") == 0


def test_a_wait_takes_a_line_every_ten_seconds(clock):
    waiting = Waiting()
    taken = []
    for _ in range(25):
        clock[0] += 1
        if waiting.claim_line():
            taken.append(waiting.seconds)
    assert taken == [10, 20]
