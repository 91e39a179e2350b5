"""Kill a program again and again, and compare what it ends with to what it makes when nobody touches it.

    python -m tests.chaos.kill --runs 100 --seed 1        (make chaos)
    python -m tests.chaos.kill --job pack --runs 5        one of them; with --results FILE a later call goes on

Each run is killed with SIGKILL 1 to 3 times, at a moment drawn at random: after some time, or the moment an unfinished file
appears; three times in four not before it has saved something. Then it is left to finish. A kill counts if the next start has
gone on from a checkpoint. What is killed, and what is compared, is in victims.py.
"""

import argparse
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: no thread survives a fork

from tests.chaos.victims import VICTIMS, write_result
from tests.tools.starter import IMPORTS

POLL_SECONDS = 0.0005


def in_child(function):
    """Fork, run `function`, leave without the parent's clean-up; returns the process id."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return process


class Start:
    """One start of a victim: its processes, in a process group of their own."""

    def __init__(self, victim, folder, words=None):
        self._codes, self._group = {}, 0
        number = len(list(folder.glob("log-*-0.1")))
        for rank, env in enumerate(victim.environments()):
            process = in_child(lambda rank=rank, env=env: self._run(victim, folder, env, f"log-{number}-{rank}", words))
            self._group = self._group or process
            os.setpgid(process, self._group)
            self._codes[process] = None

    def _run(self, victim, folder, env, log, words):
        os.setpgid(0, self._group)
        victim.run(folder, env, folder / log, words)

    def ended(self):
        """Whether all its processes have."""
        for process in [process for process, code in self._codes.items() if code is None]:
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                self._codes[process] = os.waitstatus_to_exitcode(status)
        return None not in self._codes.values()

    def wait(self):
        """The exit codes."""
        while not self.ended():
            time.sleep(0.005)
        return list(self._codes.values())

    def kill(self, draw):
        """All of it; or one of several processes, and the others up to a second later, as launchers do."""
        living = [process for process, code in self._codes.items() if code is None]
        if len(living) > 1 and draw.random() < 0.5:
            os.kill(draw.choice(living), signal.SIGKILL)
            time.sleep(draw.uniform(0, 1))
        if not self.ended():
            os.killpg(self._group, signal.SIGKILL)
        self.wait()


def kill_once(victim, folder, draw, seconds):
    """Start it and kill it at a random moment; returns where the kill fell: "save", "run" or "late"."""
    start, deadline = Start(victim, folder), time.monotonic() + draw.uniform(0, seconds)
    in_save = draw.random() < 0.5
    has_saved = draw.random() < 0.25
    while not start.ended():
        has_saved = has_saved or victim.has_saved(folder)
        if has_saved and time.monotonic() >= deadline and (not in_save or victim.unfinished(folder)):
            start.kill(draw)
            return "save" if victim.unfinished(folder) else "run"
        time.sleep(POLL_SECONDS)
    return "late"


def finish(victim, folder):
    """Let it end; {what: digest} of what it ends with, or why there is nothing."""
    for words in victim.endings(folder):
        codes = Start(victim, folder, words).wait()
        if any(codes):
            return f"ENDED WITH {codes}"
    os.waitpid(in_child(lambda: write_result(victim, folder)), 0)
    return json.loads((folder / "result").read_text()) if (folder / "result").exists() else "NO RESULT"


def one_run(victim, expected, seconds, draw, folder):
    """{outcome, kills, and of these starts, one after each kill, how many went on from a checkpoint}"""
    folder.mkdir()
    kills = []
    count = draw.randrange(1, 4)
    for _ in range(count):
        kills.append(kill_once(victim, folder, draw, 0.8 * seconds / count))
        victim.lose(folder, draw)
    found = finish(victim, folder)
    gone_on = sum(went_on(folder, start) for start, kill in enumerate(kills, 1) if kill != "late")
    if isinstance(found, str):
        return {"outcome": found, "kills": kills, "gone_on": gone_on}
    differ = sorted({name for name, _ in expected.items() ^ found.items()})
    return {"outcome": f"DIFFERENT: {', '.join(differ)}"[:300] if differ else "SAME", "kills": kills, "gone_on": gone_on}


def went_on(folder, start):
    """Whether this start of a run, counted from 0, has gone on from a checkpoint."""
    return any("going on from" in path.read_text() for path in folder.glob(f"log-{start}-*.1"))


def trials(name, options, results, temporary):
    """Fill the results of one victim up to the wanted number."""
    done = sum((row["job"], row["seed"]) == (name, options.seed) for row in results)
    if done >= options.runs:
        return
    victim = VICTIMS[name]
    victim.open(temporary)
    try:
        untouched = temporary / f"{name}-untouched"
        untouched.mkdir()
        begun = time.monotonic()
        expected, seconds = finish(victim, untouched), time.monotonic() - begun
        if isinstance(expected, str):
            raise RuntimeError(f"{expected}\n{printed(untouched)}")
        print(f"{name}, uninterrupted: {seconds:.1f} s, {len(expected)} digests", flush=True)
        for number in range(done, options.runs):
            folder = temporary / f"{name}-{number}"
            found = one_run(victim, expected, seconds, random.Random(f"{options.seed}-{name}-{number}"), folder)
            results.append({"job": name, "seed": options.seed, **found})
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
            kills = found["kills"]
            print(
                f"{name}, run {number}: killed {len(kills)} times ({', '.join(kills)}), went on from a checkpoint "
                f"{found['gone_on']} times: {found['outcome']}",
                flush=True,
            )
            if found["outcome"] != "SAME":
                print(printed(folder))
            shutil.rmtree(folder)
    finally:
        victim.close()


def printed(folder):
    """What all starts of a run have printed."""
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(folder.glob("log-*")) if path.stat().st_size)


def table(results):
    columns = ["what is killed", "runs", "the same in the end", "kills after which a checkpoint was gone on from, and runs with one",
               "killed while it writes a file", "at another moment", "too late"]  # fmt: skip
    rows = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for name in VICTIMS:
        mine = [row for row in results if row["job"] == name]
        falls = [kill for row in mine for kill in row["kills"]]
        same = sum(row["outcome"] == "SAME" for row in mine)
        counts = " | ".join(str(falls.count(fall)) for fall in ("save", "run", "late"))
        gone_on = [row["gone_on"] for row in mine if row["gone_on"]]
        if mine:
            rows.append(f"| {name} | {len(mine)} | {same} | {sum(gone_on)} in {len(gone_on)} | {counts} |")
    return "\n".join(rows)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=VICTIMS, help="unset: all of them")
    parser.add_argument("--runs", type=int, default=100, help="of each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="a file with a line for each run; those that it has are not done again")
    options = parser.parse_args(argv)
    for name in IMPORTS:
        __import__(name)
    gc.freeze()  # so that no fork looks through all of it
    has = options.results and options.results.exists()
    results = [json.loads(line) for line in options.results.read_text().splitlines()] if has else []
    for name in [options.job] if options.job else VICTIMS:
        temporary = Path(tempfile.mkdtemp())  # a TemporaryDirectory would be deleted at the end of each fork, too
        try:
            trials(name, options, results, temporary)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    print("\n" + table(results))
    return 0 if all(row["outcome"] == "SAME" for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
