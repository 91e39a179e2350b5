"""What these jobs do on the GPU of this machine, row by row: python -m tests.gpu --out FOLDER --budget MINUTES

The most important rows come first. Each has a time limit, and its result is written to FOLDER/rows.jsonl at once; called again,
it goes on with the rows that have no result. At the end it prints a table, writes tests/benchmarks/GPU.md, and returns 1 if a
check has failed. What is not installed is a row that says so; --wheels FOLDER installs wheels from there first, for this alone.
"""

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.gpu import report
from tests.gpu.table import ROWS
from tests.jobs import ROOT


def main():
    args = asked()
    args.out.mkdir(parents=True, exist_ok=True)
    results, began = args.out / "rows.jsonl", time.monotonic()
    environment = with_wheels(args) if args.wheels else dict(os.environ)
    environment["GPU_ROUNDS"] = str(args.rounds)
    if args.data:
        environment["GPU_DATA"] = str(args.data.resolve())
    done = {row["row"] for row in read(results)}
    for name in args.only or ROWS:
        left, limit = 60 * args.budget - (time.monotonic() - began), args.slower * ROWS[name].seconds
        if name in done:
            continue
        if left < min(30, limit):
            print("no time left; the same command goes on from here")
            break
        row = result_of(name, min(left, limit), args.out / name, environment)
        if row["verdict"] == "cut off" and left < limit:
            print(f"{name}: cut off at the end of --budget; it is done again in the next call")
            break
        with open(results, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(report.line(row), flush=True)
    rows = read(results)
    print(report.table(rows))
    if rows and os.environ.get("REHEARSAL_GPUS") is None:
        report.write(rows, ROOT / "tests" / "benchmarks" / "GPU.md")
    sys.exit(any(row["verdict"] in ("failed", "cut off") for row in rows))


def asked():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--budget", type=float, default=40, metavar="MINUTES", help="of this call (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="with cifar-10-batches-py and imagenet/{train,val}; unset: noise"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each benchmark (default: %(default)s)")
    parser.add_argument("--slower", type=float, default=1, metavar="N", help="each row may take N times as long")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="*.whl, in pieces *.whl.00, *.whl.01 ... too")
    args = parser.parse_args()
    args.out = args.out.resolve()
    return args


def read(results):
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def result_of(name, seconds, folder, environment):
    """The row in a process group of its own, which ends when its time is over."""
    folder.mkdir(parents=True, exist_ok=True)
    began, answer = time.monotonic(), folder / "result.json"
    answer.unlink(missing_ok=True)
    with open(folder / "log", "a") as log:
        words = [sys.executable, "-m", "tests.gpu.one", name, str(folder)]
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end(process)
    row = {"row": name, "seconds": round(time.monotonic() - began, 1), "at": f"{datetime.datetime.now():%Y-%m-%d %H:%M}"}
    if answer.exists():
        return row | verdict(json.loads(answer.read_text()))
    return row | {"verdict": "cut off", "why": f"no result after {row['seconds']} s; see {folder.name}/log"}


def end(process):
    """Also what the row has started and left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def verdict(answer):
    """On a stand-in no number means anything: what is wrong with one is `not judged`."""
    rehearsed = "REHEARSAL_GPUS" in os.environ
    wrong = [check for check in answer["judged"] if check["wrong"] and not (check["number"] and rehearsed)]
    if answer.get("missing"):
        return answer | {"verdict": "missing", "why": answer["missing"]}
    if answer.get("error") or wrong:
        why = answer.get("error") or "; ".join(f"{check['what']}: {check['wrong']}" for check in wrong)
        return answer | {"verdict": "failed", "why": why}
    not_judged = rehearsed and any(check["number"] for check in answer["judged"])
    return answer | {"verdict": "not judged" if not_judged else "passed"}


def with_wheels(args):
    """An environment in which what was handed over is installed; the pieces of a large wheel are put together first."""
    target = args.out / "wheels"
    if not target.exists():
        for first in sorted(args.wheels.glob("*.whl.00")):
            pieces = sorted(args.wheels.glob(f"{first.name[:-3]}.[0-9][0-9]"))
            (args.out / first.name[:-3]).write_bytes(b"".join(piece.read_bytes() for piece in pieces))
        wheels = [*args.wheels.glob("*.whl"), *args.out.glob("*.whl")]
        words = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", target, *wheels]
        subprocess.run([sys.executable, *map(str, words)], check=True)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")]))}


if __name__ == "__main__":
    main()
