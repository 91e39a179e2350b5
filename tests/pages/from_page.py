"""The tables of docs/from.md. Each of its documents has a file of tests, with one check for each line of its table."""

import re
import shlex

from tests.tools.jobs import ROOT

PAGE = ROOT / "docs" / "from.md"


def cells(title):
    """[(there, here, what differs)] of the table below this heading, as they are written."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")][2:]
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]
    assert all(len(row) == 3 for row in found), [row for row in found if len(row) != 3]
    return found


def typed_here(title, there):
    """The words of each span of code in the second cell of this line: commands, options or names."""
    (here,) = [row[1] for row in cells(title) if row[0] == there]
    return [shlex.split(span) for span in re.findall(r"`([^`]+)`", here)]


def assert_each_is_checked(title, checks):
    """`checks`: {what is typed there: the test function that types what the table has for it}."""
    assert sorted(row[0] for row in cells(title)) == sorted(checks), (
        "each line of the table needs a check, and each check a line"
    )
    assert all(callable(check) and check.__name__.startswith("test_") for check in checks.values())
