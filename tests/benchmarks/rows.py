"""The rows of the one table of make bench: what we claim, beside whom, by how much, and the command that measures just that.

Each benchmark prints its own figures and keeps a row for every claim; under `python -m tests.benchmarks` they end in one file.
"""

import datetime
import json
import os
import statistics
import sys

FILE = "ANYRANK_BENCH_ROWS"  # where the rows go; unset: nowhere


def keep(what, peer, ratios, only=""):
    """`ratios`: how many times faster we were, round by round. `only`: the option that measures this row alone."""
    low, *_, high = sorted([*ratios, *ratios])
    _write(what, peer, {"ratio": statistics.median(ratios), "low": low, "high": high, "rounds": len(ratios)}, only)


def missing(what, peer, why, only=""):
    _write(what, peer, {"missing": why}, only)


def _write(what, peer, found, only):
    if FILE not in os.environ:
        return
    module = sys.modules["__main__"].__spec__.name
    row = {
        "what": what,
        "peer": peer,
        **found,
        "command": f"python -m {module} {only}".strip(),
        "date": str(datetime.date.today()),
    }
    with open(os.environ[FILE], "a") as file:
        file.write(json.dumps(row) + "\n")
