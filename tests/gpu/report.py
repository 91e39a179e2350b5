"""The results of `make gpu` for a reader: a line while it runs, a table at its end, and tests/benchmarks/GPU.md."""

import platform
import subprocess

WHAT = """# On a GPU

Written by `make gpu` (`python -m tests.gpu --out FOLDER --budget MINUTES`). A row that is not here has not been run on a GPU.
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


def write(rows, path):
    lines = [WHAT, f"{machine()}; {min(row['at'] for row in rows)} to {max(row['at'] for row in rows)}.\n"]
    lines += ["| row | verdict | seconds | what was found |", "|---|---|---|---|"]
    for row in rows:
        figures = "; ".join(f"{name} {value}" for name, value in row.get("figures", {}).items())
        found = "; ".join(filter(None, [row.get("why", ""), figures])) or f"{len(row.get('judged', []))} checks hold"
        lines.append(f"| {row['row']} | {row['verdict']} | {row['seconds']:.0f} | {found.replace('|', '/')[:600]} |")
    path.write_text("\n".join(lines) + "\n")


def machine():
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")[0]
    except OSError:
        driver = "unknown"
    return f"{', '.join(gpus) or 'no GPU'}, driver {driver}, torch {torch.__version__}, Python {platform.python_version()}"
