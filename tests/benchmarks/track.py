"""What --track mlflow costs a training: with a server that answers, and with one that freezes after its first rows (make bench).

    python -m tests.benchmarks.track [--rounds 3]

Seconds of the whole process, in turns with the same job without --track; one thread, the server on the same machine.
"""

import argparse
import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from tests.benchmarks import rows
from tests.benchmarks.base import machine
from tests.jobs import command, environment, wait_for
from tests.test_track import server_of

JOB = ["--custom_data", "true", "--max_samples", "2048", "--batch_size", "64", "--width", "8", "--epochs", "15"]


def seconds(folder, server, *options, freezes=False):
    """Of the job, which has to end well."""
    words = [*command("train", *JOB, *options), "--output_dir", folder / "out"]
    began = time.monotonic()
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(list(map(str, words)), cwd=folder, env=environment(**server.env), stdout=log, stderr=log)
    if freezes:
        wait_for((folder / "out" / "tracked-mlflow.json").exists, process, "the first rows")
        os.killpg(server.process.pid, signal.SIGSTOP)
    code, took = process.wait(), time.monotonic() - began
    if freezes:
        os.killpg(server.process.pid, signal.SIGCONT)
        wait_for(server.answers, None, "the server")
    assert code == 0 and (folder / "log").read_text().count("warning: mlflow") == int(freezes)
    return took


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tracked = ("--track", "mlflow")
    forms = {"without": ((), False), "it answers": (tracked, False), "it freezes": (tracked, True)}
    times = {name: [] for name in forms}
    with tempfile.TemporaryDirectory() as place, server_of(Path(place)) as server:
        for number in range(options.rounds):
            for name, (more, freezes) in forms.items():
                folder = Path(place, f"{name} {number}")
                folder.mkdir()
                times[name].append(seconds(folder, server, *more, freezes=freezes))
    print(
        f"{machine()}; one thread, {options.rounds} rounds, median (range)\n\n| MLflow | seconds | against without |\n|---|---|---|"
    )
    for name, found in times.items():
        ratios = sorted(plain / ours for plain, ours in zip(times["without"], found))
        if name != "without":
            rows.keep(f"a training with --track mlflow, {name}", "the same without", ratios)
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {name} | {statistics.median(found):.1f} ({min(found):.1f} to {max(found):.1f}) | {spread} |")


if __name__ == "__main__":
    main()
