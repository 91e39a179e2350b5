"""Every operation on the disk fails once, in every job: with ENOSPC, with EIO, and the process is killed right there.

    python -m tests.chaos.disk [--job NAME] [--points N] [--seed 1] [--results FILE]        (make chaos FAULT=disk)

A library that is loaded before all others (disk.c) first writes down every operation of an undisturbed run below its folder,
then lets exactly one fail, in the process that does it. Of every kind of file each operation fails in each of the three ways
at least once; --points N takes more of them at random, until there are N of a job. Demanded is: no traceback; the run goes on,
or ends in one line with exit code 1; the next start goes on from the newest checkpoint that was whole, and ends with the bits
and the files of the undisturbed run. Each point is a line of the results file, so that the table can be filled in parts.
"""

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from datasets.dpex.cluster import LOOPBACK_VARIABLES
from tests.chaos import disk_cases, disk_point
from tests.chaos.disk_cases import CASES
from tests.tools import packages
from tests.tools.jobs import ROOT, environment

FAULTS = ("ENOSPC", "EIO", "killed")
OPERATIONS = ("mkdir", "open", "write", "fsync", "truncate", "rename", "unlink")
# What the jobs import of ours, so that a start need not; importing does nothing.
OURS = ["common.job", "common.run", "common.ranks.group", "datasets.cifar10", "datasets.imagenet", "datasets.pairs"]


def compiled(work):
    library = work / "disk.so"
    words = [
        packages.program("gcc"),
        "-O2",
        "-shared",
        "-fPIC",
        "-o",
        f"{library}.new",
        str(Path(__file__).with_suffix(".c")),
        "-ldl",
    ]
    subprocess.run(words, check=True)
    os.replace(f"{library}.new", library)
    return library


@contextlib.contextmanager
def ray_cluster(work):
    """The variables that lead a job to a Ray cluster for all points: starting and ending one for each took most of the time."""
    folder = tempfile.mkdtemp(prefix="disk-ray-")  # a short name: the paths of Ray's sockets have at most 107 letters
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), **LOOPBACK_VARIABLES}
    words = ["ray", "start", "--head", "--block", "--num-cpus", 64, "--include-dashboard", "false", "--temp-dir", folder]
    words += ["--node-ip-address", "127.0.0.1", "--port", address.split(":")[1]]
    with open(work / "ray.log", "w") as log:
        head = subprocess.Popen(list(map(str, words)), env=environment(**variables), stdout=log, stderr=log)
    try:
        while "Ray runtime started" not in (work / "ray.log").read_text():
            assert head.poll() is None, (work / "ray.log").read_text()
            time.sleep(0.1)
        yield {**variables, "RAY_ADDRESS": address}
    finally:
        head.terminate()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def points_of(job, recorded, options):
    """At least one for each kind of file, operation and fault; the rest at random."""
    draw, counts = random.Random(f"{options.seed}-{job}"), {}
    for line in recorded["log"]:
        operation, path = line.split(" ", 1)
        if not CASES[job].only or disk_cases.re.fullmatch(CASES[job].only, path):
            where = (operation, disk_cases.pattern(path))
            counts[where] = counts.get(where, 0) + 1
    every = [(operation, path, times) for (operation, path), count in counts.items() for times in range(1, count + 1)]
    kinds = {}
    for operation, path, times in every:
        kinds.setdefault((operation, disk_cases.kind(path)), []).append((operation, path, times))
    chosen = [disk_point.Point(job, *draw.choice(alike), fault) for alike in kinds.values() for fault in FAULTS]
    others = [disk_point.Point(job, *one, fault) for one in every for fault in FAULTS]
    draw.shuffle(others)
    there = set(chosen)
    return chosen + [one for one in others if one not in there][: max(0, options.points - len(chosen))]


def recordings(jobs, results, work, library, save):
    """{job: what its undisturbed run did}; where that is not known yet it is run now."""
    found = {row["recorded"]: row for row in results if "recorded" in row}
    for job in jobs:
        if job not in found and not CASES[job].reason:
            log, same, left, problems = disk_point.record(CASES[job], job, work, library)
            found[job] = {"recorded": job, "log": log, "same": same, "left": left, "unseen": problems}
            print(f"{job}: {len(log)} operations{''.join(f'; {problem}' for problem in problems)}", flush=True)
            if log:
                save(found[job])
    return {job: found[job] for job in jobs if job in found}


def side_by_side(tasks, processes):
    """Call each task in a fork of its own, so many at a time."""
    running = 0
    for task in tasks:
        if running >= processes:
            os.wait()
            running -= 1
        if os.fork() == 0:
            code = 1
            try:
                task()
                code = 0
            finally:
                sys.stdout.flush()
                os._exit(code)
        running += 1
    while running:
        os.wait()
        running -= 1


def table(rows, jobs):
    lines = ["| job | operation | ENOSPC | EIO | killed | points | failures |", "|---|---|---|---|---|---|---|"]
    for job in jobs:
        if CASES[job].reason:
            lines.append(f"| {job} | not run: {CASES[job].reason} | | | | | |")
        for operation in OPERATIONS:
            mine = [row for row in rows if (row["job"], row["operation"]) == (job, operation)]
            cells = []
            for fault in FAULTS:
                outcomes = [row["outcome"] for row in mine if row["fault"] == fault]
                cells.append(", ".join(f"{outcomes.count(name)} {name}" for name in sorted(set(outcomes))))
            if mine:
                failures = sum(bool(row["problems"]) for row in mine)
                lines.append(f"| {job} | {operation} | {' | '.join(cells)} | {len(mine)} | {failures} |")
    failures = sum(bool(row["problems"]) for row in rows)
    return "\n".join([*lines, f"| all | | | | | {len(rows)} | {failures} |"])


def parsed(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=CASES, action="append", help="unset: all of them; may be given several times")
    parser.add_argument("--points", type=int, default=0, help="of a job at least; each kind of file has its points anyway")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="points at a time")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "anyrank-disk.jsonl")
    return parser.parse_args(argv)


def main(argv=None):
    options = parsed(argv)
    work = Path(f"{options.results.resolve()}.work")
    work.mkdir(parents=True, exist_ok=True)
    if os.environ.get("LD_PRELOAD") != str(work / "disk.so"):
        library = compiled(work)
        words = [sys.executable, "-m", "tests.chaos.disk", *(sys.argv[1:] if argv is None else argv)]
        os.execve(sys.executable, words, environment(LD_PRELOAD=str(library), PYTHONPATH=str(ROOT)))
    with ray_cluster(work) if any(CASES[job].ray for job in options.job or CASES) else contextlib.nullcontext({}) as cluster:
        disk_point.CLUSTER.update(cluster)
        return fill(options, work)


def fill(options, work):
    from tests.tools.starter import IMPORTS

    if not (work / "photos").exists():
        disk_cases.make_photographs(work / "photos")
    for name in (*IMPORTS, *OURS):
        __import__(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not survive a fork"
    jobs, library = options.job or list(CASES), work / "disk.so"

    def save(row):
        with open(options.results, "a") as file:
            file.write(json.dumps(row) + "\n")

    def results():
        return [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []

    recorded = recordings(jobs, results(), work, library, save)
    points = [point for job in recorded for point in points_of(job, recorded[job], options)]
    done = {tuple(row["point"]) for row in results() if "point" in row}
    missing = [point for point in points if (point.job, *point.order()) not in done]
    random.Random(options.seed).shuffle(missing)  # so that a table that is not full yet has something of everything
    numbered = enumerate(missing, len(points) - len(missing) + 1)

    def task(number, point):
        def work_on():
            name = f"point-{os.getpid()}"
            row = disk_point.attempt(CASES[point.job], point, recorded[point.job], work, library, name)
            about = {"job": point.job, "operation": point.operation, "fault": point.fault}
            save({"point": [point.job, *point.order()], **about, **row})
            print(f"{number} of {len(points)}, {point}: {'; '.join([row['outcome'], *row['problems']])}", flush=True)
            if row["problems"]:
                print(row.get("printed", ""), flush=True)

        return work_on

    side_by_side((task(*pair) for pair in numbered), options.processes)
    wanted = {(point.job, *point.order()) for point in points}
    rows = [row for row in results() if "point" in row and tuple(row["point"]) in wanted]
    print(f"\n{len(rows)} of {len(points)} points\n\n{table(rows, jobs)}")
    silent = set(jobs) - set(recorded) - {job for job in jobs if CASES[job].reason}
    return 1 if len(rows) < len(points) or silent or any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
