"""A Finding of the doctor (how bad it is, what was found, what to do), and the table of all findings, the worst first."""

import functools
from collections.abc import Sequence
from typing import NamedTuple, Optional

from common.errors import SampleError, TrainingFailed, UserError, one_line
from common.files import MIB
from common.world import naming

BAD = "bad"
DOUBTFUL = "doubtful"
GOOD = "good"
SEVERITIES = (BAD, DOUBTFUL, GOOD)
ORDER = (
    "place", "master", "ranks", "clock", "gpus", "driver", "interface", "secret", "shm", "disk", "output", "data", "script",
    "job",
)  # fmt: skip


class Finding(NamedTuple):
    severity: str
    what: str
    found: str
    do: str = ""


good = functools.partial(Finding, GOOD)
doubtful = functools.partial(Finding, DOUBTFUL)
bad = functools.partial(Finding, BAD)


def refusal(what: str, error: object) -> Finding:
    """Return a bad Finding for an error; the last part of the text of a UserError or TrainingFailed is what to do."""
    if isinstance(error, SampleError):
        return bad(what, one_line(error.line), "see where it comes from in the log")
    if not isinstance(error, (UserError, TrainingFailed)):
        return bad(what, f"{type(error).__name__}: {one_line(error)[:300]}", "see where it comes from in the log")
    text = one_line(error)
    found, _, do = text.rpartition("; ") if "; " in text else text.rpartition(": ")
    return bad(what, found or text, do if found else "")


# --- Words --------------------------------------------------------------------------------------------------------------


def size(number: float) -> str:
    return f"{number / MIB:.1f} MiB" if number < 10240 * MIB else f"{number / 1024 / MIB:.1f} GiB"


# --- The table ----------------------------------------------------------------------------------------------------------


def table(findings: Sequence[tuple[Optional[int], Finding]]) -> str:
    """Return the table, the worst finding first, without good findings that a later one replaces. Equal findings of several
    nodes share a line. So do all good findings of a kind, with the text of the first node."""
    latest = {(node, finding.what): finding for node, finding in findings}  # e.g. the later of two checks of a disk
    lasting = [line for line in findings if line[1].severity != GOOD or latest[line[0], line[1].what] is line[1]]
    rows = {}
    for node, finding in sorted(lasting, key=_place_in_table):
        kind = finding.what if finding.severity == GOOD else finding
        rows.setdefault(kind, (finding, set()))[1].add(node)
    several = any(node for node, _ in lasting)
    numbers = [sum(finding.severity == severity for finding, _ in rows.values()) for severity in SEVERITIES]
    lines = ["doctor: " + ", ".join(f"{number} {severity}" for number, severity in zip(numbers, SEVERITIES))]
    for finding, nodes in rows.values():
        nodes = sorted(nodes - {None}) if several else []
        where = f"node{'s' * (len(nodes) > 1)} {naming.spans(nodes)}: " if nodes else ""
        lines.append(f"{finding.severity:8}  {finding.what:9}  {where}{finding.found}")
        if finding.do:
            lines.append(f"{'':19}-> {finding.do}")
    return "\n".join(lines)


def _place_in_table(line: tuple[Optional[int], Finding]) -> tuple[int, int, int]:
    node, finding = line
    return SEVERITIES.index(finding.severity), ORDER.index(finding.what), node or 0
