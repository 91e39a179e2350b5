"""What these jobs do on the GPU of this machine, row by row.

    python3 -m tests.gpu --out FOLDER --budget MINUTES      all rows, the most important first; ONLY some with --only ROW ...
    python3 -m tests.gpu --slice behaviour --out FOLDER     rows that take up to ten minutes together; --slice alone lists the slices
    python3 -m tests.gpu --page FOLDER/rows.jsonl           add rows to tests/benchmarks/gpu.jsonl, and write GPU.md from it (no GPU needed)

Each row has a time limit, and its result is written to FOLDER/rows.jsonl at once, its log to FOLDER/logs.tgz; what a run writes
lies elsewhere. Called again, it goes on with the rows that have not passed, and returns 1 if a check has failed. What is not
installed is a row that says so; --wheels FOLDER installs wheels from there first, for this alone.
"""

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gpu import report
from tests.gpu.table import ROWS, SLICES
from tests.tools.jobs import ROOT

DONE = ("passed", "missing", "not judged")
ONE = ["-m", "tests.gpu.one"]
WRITING = threading.Lock()  # of the lanes


def main():
    args = asked()
    if args.slice == "":
        print("\n".join(f"{name:12} {part.minutes} minutes: {part.about}" for name, part in SLICES.items()))
        return
    if args.page is not None:
        report.keep([row for path in args.page for row in read(path)])
        return
    if not args.out:
        sys.exit("error: give --out FOLDER, where the results go")
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    environment = with_wheels(args) if args.wheels else dict(os.environ)
    environment |= {"GPU_ROUNDS": str(args.rounds), "PYTHONUNBUFFERED": "1"}
    if args.data:
        environment["GPU_DATA"] = str(args.data.resolve())
    part = SLICES.get(args.slice or "")
    lanes = part.lanes if part else [args.only or list(ROWS)]
    until = time.monotonic() + 60 * (part.minutes if part else args.budget)
    facts = report.facts()
    with ThreadPoolExecutor(len(lanes)) as pool:
        for lane in [pool.submit(run_rows, rows, args, until, environment, facts) for rows in lanes]:
            lane.result()
    newest = {row["row"]: row for row in read(args.out / "rows.jsonl")}
    print(report.table(list(newest.values())))
    sys.exit(any(row["verdict"] not in DONE for row in newest.values()))


def run_rows(names, args, until, environment, facts):
    """One row after the other, until the time is over."""
    done = {row["row"] for row in read(args.out / "rows.jsonl") if row["verdict"] in DONE}
    for name in names:
        left, limit = until - time.monotonic(), args.slower * ROWS[name].seconds
        if name in done:
            continue
        if left < min(30, limit):
            print(f"{name}: no time left; the same command goes on from here", flush=True)
            return
        row = facts | result_of(name, min(left, limit), args.work / name, environment)
        with WRITING:
            if row["verdict"] != "cut off" or left > limit:
                with open(args.out / "rows.jsonl", "a") as file:
                    file.write(json.dumps(row) + "\n")
            pack_logs(args)
            print(report.line(row), flush=True)


def pack_logs(args):
    """At every moment they lie in one file."""
    with tarfile.open(args.out / "logs.tgz.writing", "w:gz") as archive:
        for path in [*args.work.glob("*/log"), *args.work.glob("*/*.log"), *args.work.glob("*/result.json")]:
            archive.add(path, path.relative_to(args.work))
    (args.out / "logs.tgz.writing").rename(args.out / "logs.tgz")


def asked():
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where rows.jsonl and logs.tgz go")
    parser.add_argument("--budget", type=float, default=40, metavar="MINUTES", help="of this call (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--slice", nargs="?", const="", choices=["", *SLICES], metavar="NAME", help=", ".join(SLICES))
    parser.add_argument("--page", nargs="*", type=Path, metavar="FILE", help="rows to add to those that are kept")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="what the runs write (unset: a temporary folder)")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="with cifar-10-batches-py and imagenet/{train,val}; unset: noise"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="of processes for each benchmark (default: %(default)s)"
    )
    parser.add_argument("--slower", type=float, default=1, metavar="N", help="each row may take N times as long")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="*.whl, in pieces *.whl.00, *.whl.01 ... too")
    args = parser.parse_args()
    args.out = args.out and args.out.resolve()
    args.work = args.work or Path(tempfile.gettempdir(), f"anyrank-gpu-{os.getuid()}")
    return args


def read(results):
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def result_of(name, seconds, folder, environment):
    """The row in a process group of its own, which ends when its time is over."""
    folder.mkdir(parents=True, exist_ok=True)
    began, answer = time.monotonic(), folder / "result.json"
    answer.unlink(missing_ok=True)
    with open(folder / "log", "a") as log:
        words = [sys.executable, "-X", "faulthandler", *ONE, name, str(folder)]
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # the log then shows where it is
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        finally:
            end(process)
    row = {"row": name, "seconds": round(time.monotonic() - began, 1), "at": f"{datetime.datetime.now():%Y-%m-%d %H:%M}"}
    found = json.loads(answer.read_text()) if answer.exists() else {}
    if process.returncode == 0 and found:
        return row | verdict(found)
    return row | found | {"verdict": "cut off", "why": f"it had not ended after {row['seconds']} s; see {folder.name}/log"}


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
    target = args.work / "wheels"
    if not target.exists():
        for first in sorted(args.wheels.glob("*.whl.00")):
            pieces = sorted(args.wheels.glob(f"{first.name[:-3]}.[0-9][0-9]"))
            (args.work / first.name[:-3]).write_bytes(b"".join(piece.read_bytes() for piece in pieces))
        wheels = [*args.wheels.glob("*.whl"), *args.work.glob("*.whl")]
        words = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", target, *wheels]
        subprocess.run([sys.executable, *map(str, words)], check=True)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")]))}


if __name__ == "__main__":
    main()
