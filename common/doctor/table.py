"""A Finding of the doctor (how bad it is, what was found, what to do), and the table of all findings,
the worst first."""

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
    "place", "master", "ranks", "clock", "gpus", "driver", "interface", "secret", "shm", "disk", "output",
    "data", "script", "job",
)  # fmt: skip


class Finding(NamedTuple):
    """A result of the doctor: how bad it is, of which check (ORDER), what was found, and what to do."""

    severity: str
    check: str
    result: str
    remedy: str = ""


good = functools.partial(Finding, GOOD)
doubtful = functools.partial(Finding, DOUBTFUL)
bad = functools.partial(Finding, BAD)


def finding_of_error(check: str, error: object) -> Finding:
    """Return a bad Finding for an error; the last part of the text of a UserError or TrainingFailed is what
    to do."""
    if isinstance(error, SampleError):
        return bad(check, one_line(error.log_line), "see where it comes from in the log")
    if not isinstance(error, (UserError, TrainingFailed)):
        return bad(
            check, f"{type(error).__name__}: {one_line(error)[:300]}", "see where it comes from in the log"
        )
    text = one_line(error)
    result, _, remedy = text.rpartition("; ") if "; " in text else text.rpartition(": ")
    return bad(check, result or text, remedy if result else "")


# --- Words --------------------------------------------------------------------------------------------------


def format_size(number: float) -> str:
    """Return a number of bytes as text, in MiB or GiB."""
    return f"{number / MIB:.1f} MiB" if number < 10240 * MIB else f"{number / 1024 / MIB:.1f} GiB"


# --- The table ----------------------------------------------------------------------------------------------


def table(findings: Sequence[tuple[Optional[int], Finding]]) -> str:
    """Return the table as text, the worst findings first.

    A good finding is left out if a later one replaces it. Equal findings of several nodes share a line. So do
    all good findings of a check, with the text of the first node.
    """
    # e.g. the later of two checks of a disk
    latest = {(node, finding.check): finding for node, finding in findings}
    current = [
        entry
        for entry in findings
        if entry[1].severity != GOOD or latest[entry[0], entry[1].check] is entry[1]
    ]
    rows = {}
    for node, finding in sorted(current, key=_place_in_table):
        key = finding.check if finding.severity == GOOD else finding
        rows.setdefault(key, (finding, set()))[1].add(node)
    is_multi_node = any(node for node, _ in current)
    counts = [sum(finding.severity == severity for finding, _ in rows.values()) for severity in SEVERITIES]
    lines = ["doctor: " + ", ".join(f"{number} {severity}" for number, severity in zip(counts, SEVERITIES))]
    for finding, nodes in rows.values():
        nodes = sorted(nodes - {None}) if is_multi_node else []
        location = ""
        if nodes:
            noun = "node" if len(nodes) == 1 else "nodes"
            location = f"{noun} {naming.spans(nodes)}: "
        lines.append(f"{finding.severity:8}  {finding.check:9}  {location}{finding.result}")
        if finding.remedy:
            lines.append(f"{'':19}-> {finding.remedy}")
    return "\n".join(lines)


def _place_in_table(entry: tuple[Optional[int], Finding]) -> tuple[int, int, int]:
    node, finding = entry
    return SEVERITIES.index(finding.severity), ORDER.index(finding.check), node or 0
