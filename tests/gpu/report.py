"""The results of `make gpu` for a reader: a line while it runs, a table at its end, and what is kept of them: gpu.jsonl and GPU.md."""

import json
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from tests.tools.jobs import ROOT

KEPT = ROOT / "tests" / "benchmarks" / "gpu.jsonl"
PAGE = KEPT.with_name("GPU.md")

WHAT = """# On a GPU

What was measured on one GPU; images a second are the median of three windows, beside what ran there in the same minutes, all else was measured
once. Below are all rows as they were found, with their ranges; `make gpu` takes them on your machine ([how](../../CONTRIBUTING.md)). What is not
here has not been run on a GPU. Nothing shows NCCL with two ranks: two ranks on one GPU talk through Gloo.
"""

RAW = """## All rows

Made from gpu.jsonl by `python3 -m tests.gpu --page`: the newest row of each name on each GPU.
"""

# What a reader has to know of some rows: {(row, the beginning of its time): a remark}.
REMARKS = {
    **dict.fromkeys(
        [("kills", "2026-11-27"), ("jobs", "2026-11-27"), ("two ranks", "2026-11-27")], "taken beside three other rows"
    ),
    ("start", "2026-11-28"): "Python's modules were not compiled to bytecode",
    ("checkpoint stall", "2026-11-28"): "saved so often that a save waited for the one before",
    ("resnet50 speed", "2026-11-28"): "nothing compiled is among the peers",
    ("cifar speed", "2026-11-28"): "what was measured by hand is from the same hour",
}


class Question(NamedTuple):
    text: str
    row: str
    ours: str = "."  # a pattern of the names of figures
    peers: str = "$^"
    is_answered_by_yes: bool = False


# What a person with a GPU asks, the most frequent first.
QUESTIONS = [
    Question(
        "How many images a second does ResNet-50 train, with the images already on the GPU?",
        "resnet50 speed",
        r"^train_imagenet\.py,",
        "^torchvision",
    ),
    Question(
        "And in the libraries that I might take instead?",
        "other libraries",
        r"^train_imagenet\.py,",
        "^(accelerate|lightning|timm),",
    ),
    Question("And from photographs on a disk?", "photographs speed", r"^train_imagenet\.py$|^share", "^torchvision"),
    Question(
        "How many CIFAR-10 images a second do the small jobs train?",
        "cifar speed",
        r"train(_amp)?\.py( --compile true)?$",
        "^plain torch|^a CUDA graph",
    ),
    Question("How long is it to 94 % on CIFAR-10?", "speedrun", r"^speedrun\.py", "^airbench"),
    Question("How long to the first step, at first and then?", "start", r"\.py$"),
    Question("How long does a checkpoint hold a step up?", "checkpoint stall", "^longest step"),
    Question("Does a killed run end with the same bits?", "kills", is_answered_by_yes=True),
    Question("And with --compile true?", "compile, resumed", is_answered_by_yes=True),
    Question("How soon does a job end if one of its processes dies?", "two ranks"),
    Question("What if a batch does not fit?", "out of memory", "^(eager|compiled)"),
    Question("Does every job run, and does no step wait for the GPU?", "jobs", is_answered_by_yes=True),
    Question("Is a step that of a CPU?", "step", is_answered_by_yes=True),
]


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
    newest = {}
    for row in sorted(rows, key=lambda row: row["at"]):
        newest.setdefault(row["gpu"], {})[row["row"]] = row
    lines = [WHAT, *([] if rows else ["No row has been run yet."])]
    for gpu, found in sorted(newest.items()):
        lines += [f"## {gpu}\n", "| you ask | here | beside it | when, with torch |", "|---|---|---|---|"]
        lines += [answer(question, found) for question in QUESTIONS]
        lines.append("")
    lines += [RAW] if rows else []
    for gpu, found in sorted(newest.items()):
        lines += [f"### {gpu}\n", "| row | verdict | seconds | what was found | when, and with what |", "|---|---|---|---|---|"]
        lines += [cells(row) for row in found.values()]
        lines.append("")
    page.write_text("\n".join(lines).rstrip() + "\n")


def answer(question, found):
    """A question's line in the table of a GPU, from its {name: row}."""
    row = found.get(question.row)
    if not row:
        return f"| {question.text} | not measured yet | | |"
    figures = {name: re.sub(r" \([\d,.]+ to [\d,.]+\)", "", str(value)) for name, value in row.get("figures", {}).items()}
    here = matching(figures, question.ours)
    if row["verdict"] == "cut off":
        here.append("(the row was cut off)")
    elif row["verdict"] != "passed":
        here.insert(0, f"{row['verdict']}: {row.get('why', '')[:200]}")
    elif question.is_answered_by_yes:
        here.insert(0, f"yes, {len(row['judged'])} checks hold")
    here += [f"({remark})" for (name, date), remark in REMARKS.items() if name == row["row"] and row["at"].startswith(date)]
    beside = matching(figures, question.peers)
    texts = (question.text, "<br>".join(here), "<br>".join(beside), f"{row['at'].split()[0]}, {row['torch']}")
    return "| " + " | ".join(re.sub(r"\s+", " ", text).replace("|", "/") for text in texts) + " |"


def matching(figures: dict[str, str], pattern: str) -> list[str]:
    return [f"{name} {value}" for name, value in figures.items() if re.search(pattern, name)]


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
