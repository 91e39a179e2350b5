"""The results of `make gpu` for a reader: a line while it runs, a table at its end, and what is kept of them: gpu.jsonl and GPU.md."""

import json
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

from tests.jobs import ROOT

KEPT = ROOT / "tests" / "benchmarks" / "gpu.jsonl"
PAGE = KEPT.with_name("GPU.md")

WHAT = """# On a GPU

Made from gpu.jsonl by `python3 -m tests.gpu --page`: the newest row of each name on each GPU. A row that is not here has not been run on a
GPU. Two ranks on one GPU talk through Gloo, so nothing here shows NCCL with two ranks. The first rows, of 2026-11-27, were taken four at a time:
the times of them say little. A "start" reads a Python whose modules were not compiled to bytecode; "checkpoint stall" until 2026-11-28 saved so often that a
save waited for the one before.
"""


def line(row):
    checks = len(row.get("judged", []))
    what = row.get("why") or f"{checks} checks" + "".join(f", {name} {value}" for name, value in row.get("figures", {}).items())
    return f"{row['row']}: {row['verdict']} in {row['seconds']} s: {what}"


def table(rows):
    width = max([len(row["row"]) for row in rows], default=0)
    counts = {}
    for row in rows:
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    lines = [f"{row['row']:{width}}  {row['verdict']:10}  {row['seconds']:7.1f} s  {row.get('why', '')[:100]}" for row in rows]
    return "\n".join([*lines, ", ".join(f"{number} {verdict}" for verdict, number in counts.items())])


def keep(new, kept=KEPT, page=PAGE):
    """Add the rows that are not there yet, but none of a stand-in, and write the page."""
    rows = [json.loads(text) for text in kept.read_text().splitlines()] if kept.exists() else []
    rows += [row for row in new if row not in rows and "Rehearsal" not in row["gpu"]]
    kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
    newest = {(row["gpu"], row["row"]): row for row in sorted(rows, key=lambda row: row["at"])}
    lines = [WHAT, *([] if rows else ["No row has been run yet."])]
    for gpu in sorted({gpu for gpu, _ in newest}):
        lines += [f"## {gpu}\n", "| row | verdict | seconds | what was found | when, and with what |", "|---|---|---|---|---|"]
        lines += [cells(row) for (name, _), row in newest.items() if name == gpu]
        lines.append("")
    page.write_text("\n".join(lines).rstrip() + "\n")


def cells(row):
    figures = "; ".join(f"{name} {value}" for name, value in row.get("figures", {}).items())
    found = "; ".join(filter(None, [row.get("why", ""), figures])) or f"{len(row.get('judged', []))} checks hold"
    where = f"{row['at']}, torch {row['torch']}, cuDNN {row['cudnn']}, driver {row['driver']}, Python {row['python']}, {row['cpu']}, {row['commit']}"
    found, where = (re.sub(r"\s+", " ", text).replace("|", "/")[:600] for text in (found, where))
    return f"| {row['row']} | {row['verdict']} | {row['seconds']:.0f} | {found} | {where} |"


def facts():
    """What every row states of the machine; nothing here begins to use the GPU."""
    import torch

    query = output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    gpu, _, driver = query[0].partition(", ") if query else ("no GPU", "", "unknown")
    processor = re.search("^model name[^:]*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "gpu": gpu, "driver": driver, "torch": metadata.version("torch"), "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(), "cpu": processor[1] if processor else platform.machine(),
        "commit": output("git", "-C", ROOT, "describe", "--always", "--dirty").strip() or "unknown",
    }  # fmt: skip


def output(*words):
    try:
        return subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=30).stdout
    except OSError:
        return ""
