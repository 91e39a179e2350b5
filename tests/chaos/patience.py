"""A store or a mount is silent for minutes in the midst of a training, and comes back, or does not.

    python -m tests.chaos.patience [--seconds 100 150 250] [--only store mount] [--patience 300]        (make chaos FAULT=patience)

Each for one process and for two ranks, four trials at a time, as they mostly wait. Demanded is: after a silence that is shorter than
--patience the bits of the run that nobody disturbed, and one line of each rank that has waited; after a longer one an exit code and a
line that names what was waited for. The mount is bindfs, stopped by a signal: it needs /dev/fuse and root.
"""

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launch.pack import command as pack
from tests.tools.faultproxy import FaultProxy
from tests.tools.flagship import SMALL
from tests.tools.jobs import assert_same_bits, command, environment, final_state
from tests.tools.objectstore import ObjectStore
from tests.tools.packages import program
from tests.tools.packs import contents, settings, write_tree

RANKS = {1: [], 2: ["--nproc_per_node", "2"]}
# Small batches, so that what is read ahead is no whole epoch: then an evaluation would wait, which may take an hour.
JOB = [*SMALL, "--workers", "1", "--batch_size", "4", "--lr", "0.01", "--epochs", "8"]
AFTER = 4  # requests of the store: the pack, which passes through, is all asked for in the first epoch
SHARE, SLACK = 1.2, 30  # of --patience, and seconds: what hangs is found after a fifth of it, and a last attempt takes its time


class SilentStore:
    """The store behind a proxy that falls silent after some requests."""

    def __init__(self, store, seconds):
        self.began, self._seconds, self._count, self._over = None, seconds, 0, threading.Event()
        self._proxy = FaultProxy(store.port, self._plan)
        self.environment = {**store.environment, "AWS_ENDPOINT_URL_S3": self._proxy.endpoint}
        self.options = ["--data_url", "s3://data/pack", "--data_backend", "packed-remote"]
        self.names, self.says = (
            r"s3://data",
            r"warning: get_object s3://data/pack/\S+ at \S+: .*; trying again for \d+ s \(--patience\)",
        )

    def watch(self, _process, _log):
        pass

    def _plan(self, request):
        self._count += request.is_object
        if self._count > AFTER and not self.began:
            self.began = time.monotonic()
        return "stall" if self.began and time.monotonic() - self.began < self._seconds else None

    def stop(self):
        self._proxy.stop()


class SilentMount:
    """A folder behind a program that is stopped after the first epoch."""

    def __init__(self, pictures, place, seconds):
        self.began, self._seconds, self._place = None, seconds, place
        place.mkdir()
        self._program = subprocess.Popen(["bindfs", "-f", "-o", "direct_io", pictures, place])
        while not list(place.iterdir()):
            if self._program.poll() is not None:
                raise RuntimeError("bindfs has ended: does this machine have /dev/fuse, and is this root?")
            time.sleep(0.1)
        self.environment, self.options = {}, ["--data_url", place]
        self.names = "a disk or a mount"
        self.says = (
            r"warning: rank \d+ \(process \d+\) waits for a disk or a mount that does not answer, for \d+ s \(--patience\)"
        )

    def watch(self, process, log):
        while process.poll() is None:
            if not self.began and "epoch=1/8 steps" in log.read_text():
                self.began = time.monotonic()
                self._program.send_signal(signal.SIGSTOP)
            elif self.began and time.monotonic() - self.began > self._seconds:
                self._program.send_signal(signal.SIGCONT)
                return
            time.sleep(0.1)

    def stop(self):
        self._program.send_signal(signal.SIGCONT)
        self._program.terminate()
        self._program.wait()
        subprocess.run(["umount", "-l", self._place], capture_output=True)


def start(folder, silent, ranks, patience):
    folder.mkdir(exist_ok=True)
    words = command(
        "train_imagenet", *JOB, *silent.options, *RANKS[ranks], "--patience", patience, "--output_dir", folder / "out"
    )
    with open(folder / "log", "w") as log:
        return subprocess.Popen(
            list(map(str, words)), cwd=folder, env=environment(**silent.environment), stdout=log, stderr=log
        )


def play(folder, silent, seconds, ranks, patience, expected):
    """What is wrong after one trial."""
    process = start(folder, silent, ranks, patience)
    silent.watch(process, folder / "log")
    code = process.wait()
    ended, log = time.monotonic(), (folder / "log").read_text()
    silent.stop()
    if not silent.began:
        return [f"it was never silent: {log[-300:]}"]
    took, wrong = ended - silent.began, []
    if not 1 <= len(re.findall(f"^{silent.says}$", log, re.M)) <= ranks:
        wrong.append(f"lines of it: {re.findall('warning.*', log)}")
    if seconds > patience:
        last = log.splitlines()[-1]
        if code != 1 or silent.names not in last or not patience <= took <= SHARE * patience + SLACK:
            wrong.append(f"exit code {code} after {took:.0f} s: {last}")
        return [*wrong, log[-4000:]] if wrong else []
    if code:
        return [*wrong, f"exit code {code} after {took:.0f} s: {log[-300:]}"]
    try:
        assert_same_bits(final_state(folder), final_state(expected))
    except AssertionError as error:
        wrong.append(f"other bits: {error}")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, nargs="+", default=[100, 150, 250, 1000])
    parser.add_argument("--only", nargs="+", choices=("store", "mount"), default=["store", "mount"])
    parser.add_argument("--patience", type=float, default=300)
    options = parser.parse_args()
    if "mount" in options.only:
        program("bindfs")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        pictures = write_tree(place / "pictures")
        pack.pack(str(pictures), str(place / "pack"), settings())
        store = ObjectStore(place / "store")
        try:
            store.client().create_bucket(Bucket="data")
            for name, content in contents(place / "pack").items():
                store.client().put_object(Bucket="data", Key=f"pack/{name}", Body=content)
            return table(place, pictures, store, options)
        finally:
            store.stop()


def table(place, pictures, store, options):
    class Plain:
        environment, options = {}, ["--data_url", pictures]

    for ranks in RANKS:
        if start(place / f"expected{ranks}", Plain, ranks, 300).wait():
            sys.exit((place / f"expected{ranks}" / "log").read_text())

    def trial(number, what, seconds, ranks):
        folder = place / str(number)
        silent = SilentStore(store, seconds) if what == "store" else SilentMount(pictures, place / f"mount{number}", seconds)
        wrong = play(folder, silent, seconds, ranks, options.patience, place / f"expected{ranks}")
        print(f"{what} silent for {seconds:g} s, {ranks} rank{'s' * (ranks > 1)}: {wrong or 'right'}", flush=True)
        return wrong

    wanted = [(what, seconds, ranks) for what in options.only for seconds in options.seconds for ranks in RANKS]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda pair: trial(pair[0], *pair[1]), enumerate(wanted)))
    print(f"{found.count([])} of {len(found)}")
    return int(any(found))


if __name__ == "__main__":
    sys.exit(main())
