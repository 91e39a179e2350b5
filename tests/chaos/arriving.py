"""A pack arrives while a job trains on it, and the line, the store, the disk or a process fails.

    python -m tests.chaos.arriving [--only damaged kills outage ...] [--trials 50]        (make chaos FAULT=arriving)

Demanded is: the bits of the run on a folder and, in the end, the files of the pack; or the exit code and the line that docs/storage.md
names, and that the next start goes on. Root is needed: another boot and a full disk are made in a mount namespace of the job.
"""

import argparse
import contextlib
import filecmp
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from common.address import local_folder
from common.storage import listing
from datasets.packs import packed, passing
from datasets.packs.shards import growing_path as path_until_whole
from datasets.packs.state import ARRIVED_COLUMNS, ON_DISK
from launch.pack import command as pack
from tests.benchmarks.arriving import fill
from tests.tools.faultproxy import FaultProxy
from tests.tools.jobs import assert_same_bits, command, environment, final_state, lock_holders
from tests.tools.line import Line
from tests.tools.objectstore import ObjectStore
from tests.tools.packs import WORDS, is_whole, publish, settings, size_of, write_tree
from tests.tools.ranks import children, workers_of

PICTURES, RATE = 600, 300_000  # of the pack, and bytes a second of the line: it arrives for some ten seconds
KINDS = ("flip", "short", "cut", "reset")
LOST = 65  # seconds in which a fetcher that is gone has to be noticed
PATIENCE = 300  # of the jobs, as without the option


class Setting:
    """A pack in a folder and in a store, and what a job on the folder leaves."""

    def __init__(self, place, store, folder, name):
        self.place, self.store, self.count = place, store, 0
        self.pack, self.url = folder, publish(folder, store, name)
        self.size, self.expected = size_of(folder), {}

    def bits(self, ranks):
        if ranks not in self.expected:
            job = Job(self, f"expected {ranks}", {}, ranks, data=self.pack)
            if job.wait():
                sys.exit(job.log())
            self.expected[ranks] = final_state(job.folder, job.name)
        return self.expected[ranks]

    def folder(self):
        self.count += 1
        (folder := self.place / f"trial {self.count}").mkdir()
        return folder


class Job:
    """A start of train_imagenet in a folder."""

    def __init__(self, setting, name, env, ranks=1, data=None, folder=None, more=(), before=()):
        self.setting, self.name, self.ranks = setting, name, ranks
        self.folder = folder or setting.folder()
        words = [*WORDS, "--batch_size", 64 // ranks, "--workers", 1, "--data_url", data or setting.url, *more]
        words = command("train_imagenet", *words, "--nproc_per_node", ranks, "--output_dir", self.folder / name)
        env = environment(**{**setting.store.environment, **env})
        with open(self.folder / f"{name}.log", "a") as log:
            words = list(map(str, [*before, *words]))
            self.process = subprocess.Popen(words, cwd=self.folder, env=env, stdout=log, stderr=log, start_new_session=True)
        self.began = time.monotonic()

    def wait(self):
        code = self.process.wait(2000)
        self.took = time.monotonic() - self.began
        return code

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log(self):
        return (self.folder / f"{self.name}.log").read_text()

    @property
    def came(self):
        return self.folder / local_folder(self.setting.url, "input_dir")

    def fetcher(self):
        """The process that fetches, once there is one."""
        while self.process.poll() is None:
            with contextlib.suppress(OSError):
                for lock in (self.came / ".fetching").glob("*.fetcher.lock"):
                    for pid in lock_holders(lock):
                        if (
                            b"datasets.packs.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
                        ):  # others look whether it is free
                            return pid
            time.sleep(0.01)
        sys.exit(f"the job ended before it was disturbed: {self.log()}")

    def wrong(self, whole=True):
        """What is wrong after a good end. Where a job ends before its pack has come, the fetcher ends, too."""
        if code := self.wait():
            return [f"exit code {code}: {self.log()[-500:]}"]
        found = []
        try:
            assert_same_bits(final_state(self.folder, self.name), self.setting.bits(self.ranks))
        except AssertionError as error:
            found.append(f"other bits: {str(error)[:300]}")
        if whole and "\narrived: " in self.log() and not is_whole(self.came, self.setting.pack):
            found.append("the folder is not the pack's")
        if whole:
            names = [path.name for path in self.came.glob("[tv]*")]
            found += filecmp.cmpfiles(self.came, self.setting.pack, names, shallow=False)[1]
        return found

    def refused(self, code, words, within=None):
        """What is wrong after a bad end, of which these words are to be the last line."""
        came, last = self.wait(), self.log().strip().splitlines()[-1]
        found = [] if came == code and re.search(words, last) else [f"exit code {came}: {last}"]
        return found + [f"after {self.took:.0f} s"] * bool(within and self.took > within)


def half(setting, line):
    while line.down < 0.5 * setting.size:
        time.sleep(0.01)


def through(line):
    return {"AWS_ENDPOINT_URL_S3": line.url}


# --- The faults: each yields (what was done, what was wrong) ------------------------------------------------------------


def damaged(setting, trials):
    """6 x trials answers that are flipped, short, cut or reset, a quarter of all, as long as that takes."""
    draw, done = random.Random(0), []

    def plan(request):
        if request.is_object and ".tar" in request.path and draw.random() < 0.25 and len(done) < 6 * trials:
            done.append(draw.choice(KINDS))
            return done[-1]
        return None

    while len(done) < 6 * trials:
        proxy, before = FaultProxy(setting.store.port, plan), len(done)
        yield f"damaged answers from {before} on", Job(setting, "out", {"AWS_ENDPOINT_URL_S3": proxy.endpoint}).wrong()
        proxy.stop()
    print({kind: done.count(kind) for kind in KINDS})


def kills(setting, trials):
    """Of the fetcher, beside a second job; of a rank; of all."""
    draw = random.Random(1)
    for number in range(trials):
        kind = ("fetcher", "rank", "all")[number % 3]
        with Line(setting.store.port, RATE) as line:
            folder, moment = setting.folder(), draw.uniform(0.05, 0.9) * setting.size
            ranks = 2 if kind == "rank" else 1
            more = ["--max_restarts", 1] if kind == "rank" else ()
            jobs = [
                Job(setting, f"out{one}", through(line), ranks, None, folder, more) for one in range(1 + (kind == "fetcher"))
            ]
            pid = jobs[0].fetcher()
            while line.down < moment:
                time.sleep(0.005)
            if kind == "fetcher":
                os.kill(pid, signal.SIGKILL)
            elif kind == "rank":
                os.kill(draw.choice(list(workers_of(children(jobs[0].process)).values())), signal.SIGKILL)
            else:
                jobs[0].kill()
                jobs = [Job(setting, "out0", through(line), folder=folder)]
            yield f"{kind} killed after {moment / setting.size:.0%}", [text for job in jobs for text in job.wrong()]


def frozen(setting, _):
    """The fetcher is stopped by a signal or killed; with one job, and with two."""
    for number, name in ((signal.SIGSTOP, "frozen"), (signal.SIGKILL, "killed")):
        with Line(setting.store.port, RATE) as line:
            job = Job(setting, "out", through(line))
            pid = job.fetcher()
            half(setting, line)
            job.began = time.monotonic()
            os.kill(pid, number)
            words = "sign of life" if name == "frozen" else "has ended"
            yield f"{name} fetcher, one job", job.refused(1, f"error: the process that fetches s3://.*{words}", LOST)
            print(f"  ended after {job.took:.0f} s")
            line.rate = None
            yield "  the next start", Job(setting, "out", through(line), folder=job.folder).wrong()
    with Line(setting.store.port, RATE) as line:
        folder = setting.folder()
        jobs = [Job(setting, f"out{one}", through(line), folder=folder) for one in range(2)]
        pid = jobs[0].fetcher()
        half(setting, line)
        os.kill(pid, signal.SIGSTOP)
        yield "frozen fetcher, two jobs", [text for job in jobs for text in job.wrong()]


def outage(setting, _):
    """The line is silent for 150 and for 1,000 s; --patience is 300."""
    for seconds in (150, 1000):
        with Line(setting.store.port, RATE) as line:
            job = Job(setting, "out", through(line))
            half(setting, line)
            line.open.clear()
            job.began = time.monotonic()
            while time.monotonic() - job.began < seconds and job.process.poll() is None:
                time.sleep(0.1)
            line.open.set()
            wrong = (
                job.wrong()
                if seconds < PATIENCE
                else job.refused(1, "get_object s3://.*no good answer for 300 s", 1.2 * PATIENCE)
            )
            lines = re.findall(r"^warning: get_object.*trying again.*", job.log(), re.M)
            if len(lines) != 1:
                wrong.append(f"lines of it: {lines}")
            if seconds < PATIENCE:
                rows = [json.loads(row) for row in (job.folder / "out" / "speed.jsonl").read_text().splitlines()]
                waited = sum(row["waiting_for_storage"] for row in rows)
                print(f"  waiting_for_storage {waited:.0f} s")
                wrong += [f"waiting_for_storage is {waited}"] * (waited < 140)
            yield f"silent for {seconds} s", wrong


def changed(setting, _):
    """A shard is replaced in mid-epoch."""
    url = publish(setting.pack, setting.store, "changed")
    replaced = []

    def plan(request):
        if request.is_object and "train-000003.tar" in request.path and not replaced:
            content = (setting.pack / "train-000003.tar").read_bytes()[::-1]
            replaced.append(setting.store.client().put_object(Bucket="changed", Key="pack/train-000003.tar", Body=content))

    proxy = FaultProxy(setting.store.port, plan)
    job = Job(setting, "out", {"AWS_ENDPOINT_URL_S3": proxy.endpoint}, data=url)
    wrong = job.refused(2, r"error: s3://changed/pack/train-000003\.tar has changed since this run began")
    proxy.stop()
    came = job.folder / local_folder(url, "input_dir")
    growing = Path(path_until_whole(str(came), "train-000003.tar", packed.load(str(setting.pack), "train").shards[3]["sha256"]))
    if (came / "train-000003.tar").exists() or (growing.exists() and any(growing.read_bytes())):
        wrong.append("something of it is in the folder")
    yield "a shard replaced", wrong


def power_cut(setting, _):
    """All is killed, a part of what had come is zeros, and the machine has another boot."""
    boots = []
    for number in (1, 2):
        (setting.place / f"boot{number}").write_text(f"{number}{os.urandom(8).hex()}\n")
        mount = f"mount --bind '{setting.place}/boot{number}' /proc/sys/kernel/random/boot_id && exec \"$@\""
        boots.append(["unshare", "-m", "sh", "-c", mount, "-"])
    with Line(setting.store.port, RATE) as line:
        job = Job(setting, "out", through(line), before=boots[0])
        half(setting, line)
        job.kill()
        time.sleep(1)  # its fetcher has ended, too
        zeroed = 0
        for growing in (job.came / ".fetching").glob("*.arriving"):
            content = growing.read_bytes()
            blocks = [place for place in range(0, len(content), 4096) if any(content[place : place + 4096])]
            with open(growing, "r+b") as file:
                for place in blocks[::3]:
                    file.seek(place)
                    file.write(bytes(min(4096, len(content) - place)))
                    zeroed += 1
        line.rate = None
        again = Job(setting, "out", through(line), folder=job.folder, before=boots[1])
        wrong = again.wrong() + ["nothing was zeroed"] * (not zeroed)
        wrong += ["both boots have one state"] * (len(list((job.came / ".fetching").glob("*.state"))) != 2)
    yield f"power cut, {zeroed} blocks zeroed", wrong


def full_disk(setting, _):
    """The disk of the data becomes full after the room for all was checked."""
    folder = setting.folder()
    (data := folder / "data").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={(80 << 20) + setting.size}", "none", data], check=True)
    try:
        with Line(setting.store.port, RATE) as line:
            job = Job(setting, "out", through(line), folder=folder, more=["--input_dir", data])
            while line.down < 0.3 * setting.size:
                time.sleep(0.01)
            with open(data / "filler", "wb") as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))
            yield "full disk", job.refused(1, f"error: .*{data}.*No space left on device")
            (data / "filler").unlink()
            line.rate = None
            yield (
                "  the next start",
                Job(setting, "out", through(line), folder=folder, more=["--input_dir", data]).wrong(whole=False),
            )
    finally:
        subprocess.run(["umount", "-l", data], check=True)


def little_room(setting, _):
    """The disk of the data has room for 0.4 of the pack; a job, two at once, and one that is killed and started again."""
    setting = larger(setting)
    for jobs, killed in ((1, False), (2, False), (1, True)):
        folder = setting.folder()
        (data := folder / "data").mkdir()
        size = int((listing.SPARE + 0.4 * setting.size) / (1 - 2 / passing.SHARE))
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", data], check=True)
        try:
            with Line(setting.store.port, 50 * RATE) as line:
                more = ["--input_dir", data]
                running = [Job(setting, f"out{one}", through(line), folder=folder, more=more) for one in range(jobs)]
                if killed:
                    half(setting, line)
                    running[0].kill()
                    running = [Job(setting, "out0", through(line), folder=folder, more=more)]
                wrong = [text for job in running for text in job.wrong(whole=False)]
                rows = [json.loads(row) for row in (folder / "out0" / "speed.jsonl").read_text().splitlines()]
                again = sum(row.get(name, 0) for row in rows if row["epoch"] == 2 for name in ARRIVED_COLUMNS[:ON_DISK])
                print(f"  in the second epoch {again * 2**20 / setting.size:.2f} of the pack came")
        finally:
            subprocess.run(["umount", "-l", data], check=True)
        yield f"room for 0.4 of the pack, {jobs} {'job' if jobs == 1 else 'jobs'}{', killed' * killed}", wrong


def headers(setting, _):
    """A shard in the bucket has another header between its samples, which its index does not know."""
    shutil.copytree(setting.pack, folder := setting.folder() / "pack")
    files = packed.read_index(str(folder / "train-index.npz"), str(folder), "train")
    with open(folder / "train-000001.tar", "r+b") as file:
        file.seek(int(files.offset[np.flatnonzero(files.shard == 1)[0]]) - 512)
        file.write(b"another name")
    url = publish(folder, setting.store, "headers")
    with Line(setting.store.port, RATE) as line:
        job = Job(setting, "out", through(line), data=url)
        wrong = job.wrong(whole=False)
    if not re.search(
        r"^warning: s3://headers/pack/train-000001\.tar is not what its index says, between its samples$", job.log(), re.M
    ):
        wrong.append(f"no warning: {job.log()[-300:]}")
    if (job.folder / local_folder(url, "input_dir") / "train-000001.tar").exists():
        wrong.append("it has its name")
    yield "other headers", wrong


@functools.lru_cache(1)
def larger(setting):
    """With pictures of 110 KB: what is counted has headers of HTTP in it."""
    (place := setting.place / "larger").mkdir()
    fill(place, 600, 2)
    return Setting(place, setting.store, place / "data" / "pack", "larger")


def together(setting, _):
    """Two jobs of four ranks start at once on an empty folder."""
    setting = larger(setting)
    with Line(setting.store.port) as line:
        folder = setting.folder()
        jobs = [Job(setting, f"out{one}", through(line), 4, folder=folder) for one in range(2)]
        wrong = [text for job in jobs for text in job.wrong()]
        share = line.down / setting.size
    yield f"8 ranks of two jobs: {share:.3f} of the pack", wrong + ["too much came"] * (share > 1.05)


FAULTS = (damaged, kills, frozen, outage, changed, power_cut, full_disk, little_room, headers, together)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[fault.__name__ for fault in FAULTS])
    parser.add_argument("--trials", type=int, default=50, help="kills; six times as many answers are damaged")
    options = parser.parse_args()
    count = bad = 0
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        store = ObjectStore(place / "store")
        try:
            pack.pack(str(write_tree(place / "pictures", count=PICTURES)), str(place / "pack"), settings(shard_mb=0.05))
            setting = Setting(place, store, place / "pack", "arriving")
            for fault in FAULTS:
                for what, wrong in (
                    fault(setting, options.trials) if fault.__name__ in (options.only or [fault.__name__]) else ()
                ):
                    count, bad = count + 1, bad + bool(wrong)
                    print(f"{what}: {wrong or 'right'}", flush=True)
        finally:
            store.stop()
    print(f"{count - bad} of {count}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
