"""make bench: every benchmark of a CPU after the other (those of a GPU are rows of `make gpu`), one table of all ratios that this project claims, and a picture of it.

    python -m tests.benchmarks [--data FOLDER] [--only base ddp ...] [--rows FILE] [--rounds N]

FOLDER has cifar-10-batches-py and imagenet/{train,val}/CLASS/*.JPEG; without it what needs them is left out. The rows are kept in FILE:
started again with the same one it measures what is missing. Ends with the table, FILE.md, and the picture, FILE.png, and names the
rows that are below 0.9 of what results/table.md has of them: another machine may have other ratios, the same one should not.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.base import machine
from tests.benchmarks.rows import FILE
from tests.tools.jobs import ROOT, environment

# In the order of the table; what each needs of the data.
BENCHMARKS = {
    "base": "cifar, if given", "images": "imagenet", "validation": "imagenet", "pairs": "", "ray": "", "storage": "", "memcached": "",
    "publishing": "", "arriving": "", "ddp": "", "libraries": "", "speedrun": "cifar", "growth": "",
}  # fmt: skip
WORDS = {"validation": ["images", "--validation"]}  # of the others, their name
RECORDED = Path(__file__).parent / "results" / "table.md"
FALLEN = 0.9  # of the recorded median


def measure(name, options):
    """Runs one benchmark; its rows, or what went wrong, are in the file afterwards."""
    module, *how = WORDS.get(name, [name])
    words = [sys.executable, "-m", f"tests.benchmarks.{module}", *how]
    words += ["--rounds", str(options.rounds)] if options.rounds else []
    if BENCHMARKS[name] and options.data:
        words += ["--data", str(options.data / "imagenet" if BENCHMARKS[name] == "imagenet" else options.data)]
    unfinished = options.rows.with_suffix(f".{name}")
    unfinished.unlink(missing_ok=True)
    done = subprocess.run(words, cwd=ROOT, env=environment(PYTHONPATH=str(ROOT), **{FILE: str(unfinished)}))
    if done.returncode:
        return False
    unfinished.touch()
    with open(options.rows, "a") as file:
        file.writelines(json.dumps({"benchmark": name, **json.loads(line)}) + "\n" for line in unfinished.open())
    unfinished.unlink()
    return True


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows):
    lines = ["| what | beside | faster, median (range) | date | measured by |", "|---|---|---|---|---|"]
    for row in rows:
        ratio = row.get("missing") or f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        lines.append(f"| {row['what']} | {row['peer']} | {ratio} | {row['date']} | `{row['command']}` |")
    return "\n".join(lines)


def recorded(text):
    """{(what, peer): the newest median} of the table of make bench, as results/table.md has it."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        medians = [match[1] for cell in cells[2:] if (match := re.fullmatch(r"([\d.]+) \([\d.]+ to [\d.]+\)", cell))]
        if medians and cells[-1].startswith("`python -m tests.benchmarks."):
            found[cells[0], cells[1]] = float(medians[-1])
    return found


def fallen(rows, known):
    """A line for each row that is clearly slower than it was."""
    return [
        f"{row['what']}, beside {row['peer']}: {row['ratio']:.2f}, recorded {known[row['what'], row['peer']]:.2f}"
        for row in rows
        if "ratio" in row and row["ratio"] < FALLEN * known.get((row["what"], row["peer"]), 0)
    ]


def draw(rows, path, caption):
    """A bar for each row, from 1, level with its peer, on a scale of factors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    rows = [row for row in rows if "ratio" in row][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 0.3 * len(rows) + 1.2))
    for place, row in enumerate(rows):
        better = row["ratio"] >= 1
        axes.barh(place, row["ratio"] - 1, left=1, color="#3b7dd8" if better else "#c8c8c8", height=0.7)
        axes.plot([row["low"], row["high"]], [place, place], color="#333333", linewidth=1)
        axes.text(max(row["high"], 1) * 1.03, place, f"{row['ratio']:.2f}", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [f"{row['what']}, beside {row['peer']}" for row in rows], fontsize=7)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xscale("log")
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20) if 0.4 < tick <= 1.3 * max(row["high"] for row in rows)]
    axes.set_xticks(ticks, [f"{tick:g} x" for tick in ticks], fontsize=7)
    axes.minorticks_off()
    axes.axvline(1, color="#333333", linewidth=0.8)
    axes.set_title(caption, fontsize=7)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    with Image.open(path) as drawn:  # of few colours: a third of the size
        drawn.convert("RGB").quantize(64).save(path, optimize=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="unset: what needs real images is left out")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--rows", type=Path, default=Path("output_dir/bench.jsonl"))
    parser.add_argument("--rounds", type=int, help="unset: as many as each benchmark thinks right")
    options = parser.parse_args()
    options.rows = options.rows.resolve()
    options.data = options.data.resolve() if options.data else None
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.only:
        if name in {row["benchmark"] for row in read(options.rows)}:
            print(f"{name}: its rows are in {options.rows}", flush=True)
        elif BENCHMARKS[name] in ("imagenet", "cifar") and not options.data:
            print(f"{name}: not measured, give --data FOLDER (make bench DATA=FOLDER)", flush=True)
        elif not measure(name, options):
            failed.append(name)
    rows = sorted(read(options.rows), key=lambda row: list(BENCHMARKS).index(row["benchmark"]))
    text = f"{machine()}; forms in turn, median (range) of the ratios\n\n{table(rows)}\n"
    options.rows.with_suffix(".md").write_text(text)
    if rows:
        draw(rows, options.rows.with_suffix(".png"), f"how many times faster; {machine()}")
    print("\n" + text)
    if slower := fallen(rows, recorded(RECORDED.read_text())):
        print("\n".join([f"slower than recorded ({RECORDED.relative_to(ROOT)}):", *slower]))
    if failed:
        print(f"error: {', '.join(failed)}: see above", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.pop(FILE, None)
    sys.exit(main())
