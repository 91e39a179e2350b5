"""A process of the project, to which lines go and from which they come."""

import signal

from common.machine.child import Child
from tests.tools.jobs import PATIENCE

ECHO = """
import sys

def main(*greeting):
    print(*greeting, flush=True)
    for line in sys.stdin:
        print("heard", line.strip(), flush=True)
"""


def echo(tmp_path, monkeypatch):
    (tmp_path / "echo_for_tests.py").write_text(ECHO)
    monkeypatch.syspath_prepend(tmp_path)
    return Child("echo_for_tests", "good", "evening")


def test_it_is_told_lines_and_heard_until_its_input_ends(tmp_path, monkeypatch):
    said = []
    child = echo(tmp_path, monkeypatch)
    hears = child.start_reader(said.append, "what it says")
    child.write_line("one")
    child.write_line("größer")
    child.end_input()
    assert child.wait(PATIENCE) == 0
    hears.join(PATIENCE)
    assert said == ["good evening", "heard one", "heard größer"]


def test_one_that_has_ended_is_told_nothing(tmp_path, monkeypatch):
    child = echo(tmp_path, monkeypatch)
    child.kill()
    assert child.wait(PATIENCE) == -signal.SIGKILL
    child.write_line("one")
    child.end_input()
    child.stdout.close()
