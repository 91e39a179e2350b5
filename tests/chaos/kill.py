"""Kill a training job again and again, and compare what it ends with to a run that nobody touched.

    python -m tests.chaos.kill --runs 100 --seed 1        (make chaos)

Each run is a small job, killed with SIGKILL 1 to 3 times, at a moment drawn at random: after some time, or the moment an
unfinished file of a save appears. Then it is left to finish. The SHA-256 over weights, optimizer, position and metrics has
to be that of the uninterrupted run. Every start is a process of its own, forked from one that has only imported torch, so
that the kills fall into the training and not into the imports.
"""

import argparse
import hashlib
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.jobs import ROOT

JOB = [str(ROOT / "jobs" / "train.py"), "--custom_data", "true", "--max_samples", "512", "--batch_size", "32", "--width", "4",
       "--epochs", "3", "--save_steps", "2"]  # fmt: skip


def digest(folder):
    """SHA-256 over everything that must not depend on how often the run was killed."""
    from tests.jobs import final_state

    result = hashlib.sha256()

    def add(value):
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                result.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        elif hasattr(value, "numpy"):
            result.update(value.contiguous().numpy().tobytes())
        else:
            result.update(repr(value).encode())

    add(final_state(folder))
    return result.hexdigest()


def in_child(function):
    """Fork, run `function`, leave without the parent's clean-up; returns the process id."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            function()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    return process


def start(folder):
    """One start of the job, in a process group of its own."""

    def job():
        os.setsid()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        import torch

        torch.set_num_threads(1)
        sys.argv = [*JOB, "--output_dir", str(folder / "out")]
        runpy.run_path(JOB[0], run_name="__main__")

    return in_child(job)


def ended(process):
    """The exit code of a child that has ended (negative for a signal), else None."""
    found, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def kill_once(folder, draw, seconds):
    """Start the job and kill it at a random moment; returns where the kill fell: "save", "run" or "late"."""
    process, deadline = start(folder), time.monotonic() + draw.uniform(0, seconds)
    in_save = draw.random() < 0.5
    checkpoints = folder / "out" / "checkpoints"
    while True:
        if ended(process) is not None:
            return "late"
        if time.monotonic() >= deadline and (not in_save or list(checkpoints.glob("*.unfinished"))):
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return "save" if list(checkpoints.glob("*.unfinished")) else "run"
        time.sleep(0.0005)


def finish(folder):
    code = None
    process = start(folder)
    while code is None:
        code = ended(process)
        time.sleep(0.005)
    return code


def one_run(reference, seconds, draw, folder):
    """(SAME, DIFFERENT or the exit code; where the kills fell)"""
    count = draw.randrange(1, 4)
    kills = [kill_once(folder, draw, 0.8 * seconds / count) for _ in range(count)]
    code = finish(folder)
    return ("SAME" if digest_in_child(folder) == reference else "DIFFERENT") if code == 0 else f"EXIT {code}", kills


def digest_in_child(folder):
    """The parent of all forks must not compute with tensors: their threads do not survive a fork."""
    target = folder / "digest"
    os.waitpid(in_child(lambda: target.write_text(digest(folder))), 0)
    return target.read_text()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    import torch._dynamo  # noqa: F401 (the first optimizer imports it; here once for all starts)

    sys.path.insert(0, str(ROOT))
    counts, falls = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        untouched = Path(temporary) / "untouched"
        untouched.mkdir()
        begun = time.monotonic()
        assert finish(untouched) == 0, (untouched / "log").read_text()
        seconds = time.monotonic() - begun
        reference = digest_in_child(untouched)
        print(f"uninterrupted: {seconds:.1f} s, {reference}")
        for number in range(options.runs):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            outcome, kills = one_run(reference, seconds, random.Random(f"{options.seed}-{number}"), folder)
            counts[outcome] = counts.get(outcome, 0) + 1
            for kill in kills:
                falls[kill] = falls.get(kill, 0) + 1
            print(f"run {number}: killed {len(kills)} times ({', '.join(kills)}): {outcome}", flush=True)
            if outcome == "SAME":
                shutil.rmtree(folder)
            else:
                print((folder / "log").read_text())
    print("\n| outcome | runs |\n|---|---|\n" + "\n".join(f"| {name} | {count} |" for name, count in sorted(counts.items())))
    print(
        "\n| the kill fell into | times |\n|---|---|\n"
        + "\n".join(f"| {name} | {count} |" for name, count in sorted(falls.items()))
    )
    return 0 if set(counts) == {"SAME"} else 1


if __name__ == "__main__":
    sys.exit(main())
