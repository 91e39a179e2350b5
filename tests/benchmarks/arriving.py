"""A pack in a bucket behind a line of a known rate: when the first step begins and how fast two epochs go, by way of reading it.

    python -m tests.benchmarks.arriving [--rates 40 100 400] [--compute 1] [--rounds 2] [--first_step] [--bound]       (make bench)

local: the pack in a folder. first: --fetch_first true. remote: --data_backend packed-remote. arriving: --fetch_first false. 6,000 JPEGs of 110 KB
that cost little to decode; two loader processes, batches of 64; a step sleeps for its share of `--compute` x the pictures that the
line carries in a second. rclone is the store, a relay in a process of its own the line, with 10 ms before each answer; data in
memory. The forms take turns, each in a process of its own on an empty folder. --bound: beside what two epochs cannot be faster
than, max(2 x computing, computing + transfer), where computing is an epoch of the folder, and transfer obstore alone.
"""

import argparse
import io
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from tests.benchmarks import rows
from tests.benchmarks.base import machine
from tests.benchmarks.storage import KEY, SECRET, get_programs, serve
from tests.jobs import ROOT, environment, module_of
from tests.line import Line

PICTURES, SIZE, BATCH, CLASSES = 6000, 110_000, 64, 10
FORMS, TRANSFER = ("local", "first", "remote", "arriving"), "transfer"
PART = 8 << 20
MB = 10**6


def fill(folder, pictures=PICTURES, shard_mb=64):
    """Pictures of 64 x 64 with noise in their headers, as a pack."""
    draw = np.random.default_rng(0)
    for number in range(pictures + 64):
        place = folder / "root" / ("train" if number < pictures else "val") / f"{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), np.uint8)).resize((64, 64)).save(
            buffer := io.BytesIO(), "JPEG", quality=60
        )
        noise = draw.bytes(SIZE // 2 - 1200)
        segment = b"\xff\xef" + (len(noise) + 2).to_bytes(2, "big") + noise
        (place / f"{number:05d}.jpg").write_bytes(buffer.getvalue()[:2] + 2 * segment + buffer.getvalue()[2:])
    pack = [sys.executable, "-m", "launch", "pack", folder / "root", folder / "data" / "pack", "--shard_mb", shard_mb]
    subprocess.run(list(map(str, pack)), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(folder / "root")


def line(port, rate, connection):
    """The relay, until it is told to stop; tells its address and, at the end, what it has carried."""
    with Line(port, rate, pause=0.01) as one:
        connection.send(one.url)
        connection.recv()
        connection.send(one.down)


def read(form, address, compute, epochs):
    """In a process of its own: seconds to the first batch, and those of each epoch."""
    import torch

    from common import arguments
    from datasets import imagenet
    from datasets.sampler import EpochSampler

    backend = "packed-remote" if form == "remote" else "packed"
    words = [
        "--data_url",
        address,
        "--data_backend",
        backend,
        "--image_size",
        "64",
        "--recipe",
        "imagenet",
        "--input_dir",
        "input_dir",
    ]
    args = arguments.parse(module_of("train_imagenet").options(), [*words, "--fetch_first", str(form != "arriving").lower()])
    began = time.monotonic()
    args, train, _ = imagenet.load(args)
    sampler = EpochSampler(len(train), BATCH, seed=0)
    loader = imagenet.loader(train, sampler, torch.device("cpu"), workers=2, backend=backend)
    first, seconds = None, []
    for epoch in range(epochs):
        sampler.start_at(epoch, 0)
        since, due = time.monotonic(), 0.0
        for _ in loader:
            first = first or time.monotonic() - began
            due = max(time.monotonic(), due) + (BATCH / compute if compute else 0)
            time.sleep(max(0.0, due - time.monotonic()))
            if not compute:
                break
        seconds.append(time.monotonic() - since)
    print(json.dumps([first, seconds]), flush=True)
    os._exit(0)


def transfer(address):
    """In a process of its own: seconds in which obstore alone gets all of the pack, 16 parts of 8 MiB at a time."""
    import obstore

    from common.storage.bucket import Bucket

    settings = Bucket(address).settings
    keys = {"access_key_id": KEY, "secret_access_key": SECRET, "region": settings.region}
    store = obstore.store.S3Store("data", endpoint=settings.endpoint, client_options={"allow_http": True}, **keys)
    began = time.monotonic()
    items = [(item["path"], item["size"]) for page in obstore.list(store) for item in page]
    parts = [(path, begin, min(PART, size - begin)) for path, size in items if size > PART for begin in range(0, size, PART)]
    with ThreadPoolExecutor(16) as pool:
        got = pool.map(lambda part: len(obstore.get_range(store, part[0], start=part[1], length=part[2])), parts)
        small = [len(obstore.get(store, path).bytes()) for path, size in items if size <= PART]
        assert sum(got) + sum(small) == sum(size for _, size in items)
    print(json.dumps([0.0, [time.monotonic() - began]]), flush=True)


def measure(form, folder, port, rate, compute, epochs):
    """(seconds to the first batch, of each epoch, bytes through the line)"""
    ours, theirs = multiprocessing.Pipe()
    relay = multiprocessing.Process(target=line, args=(port, rate * MB, theirs))
    relay.start()
    url = ours.recv()
    work = folder / "work"
    work.mkdir()
    env = environment(
        AWS_ENDPOINT_URL_S3=url,
        AWS_ACCESS_KEY_ID=KEY,
        AWS_SECRET_ACCESS_KEY=SECRET,
        AWS_REGION="us-east-1",
        PYTHONPATH=str(ROOT),
    )
    address = str(folder / "data" / "pack") if form == "local" else "s3://data/pack"
    words = [sys.executable, "-m", "tests.benchmarks.arriving", "--read", form, address, str(compute), str(epochs)]
    done = subprocess.run(words, cwd=work, env=env, capture_output=True, text=True)
    ours.send("stop")
    down = ours.recv()
    relay.join()
    time.sleep(0.6)  # its fetcher looks so often whether the job is there
    shutil.rmtree(work)
    if done.returncode:
        raise RuntimeError(f"{form}: {done.stderr[-2000:]}")
    return (*json.loads(done.stdout.splitlines()[-1]), down)


def main():
    if sys.argv[1:3] == ["--read", TRANSFER]:
        return transfer(sys.argv[3])
    if sys.argv[1:2] == ["--read"]:
        return read(sys.argv[2], sys.argv[3], float(sys.argv[4]), int(sys.argv[5]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[40, 100, 400], help="MB/s")
    parser.add_argument(
        "--compute", type=float, nargs="+", default=[1.0], help="pictures a second, in those that the line carries"
    )
    parser.add_argument("--only", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--first_step", action="store_true", help="measure the first step alone")
    parser.add_argument("--bound", action="store_true", help="local and arriving beside what cannot be faster")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if options.bound:
        options.only = ["local", "arriving", TRANSFER]
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory() as programs, tempfile.TemporaryDirectory(dir=shm) as place:
        folder = Path(place)
        rclone, _ = get_programs(Path(programs))
        fill(folder)
        size = sum(path.stat().st_size for path in (folder / "data" / "pack").iterdir())
        server, url = serve(rclone, folder)
        try:
            print(f"{machine()}; the pack has {size / MB:.0f} MB; {options.rounds} rounds, median (range)\n")
            for rate in options.rates:
                for compute in [0.0] if options.first_step else options.compute:
                    one_rate(options, folder, int(url.rpartition(":")[2]), rate, compute * rate * MB / SIZE, size)
        finally:
            server.kill()
            server.wait()


def one_rate(options, folder, port, rate, compute, size):
    print(f"{rate} MB/s, a step {'of no time' if not compute else f'of {BATCH / compute * 1000:.0f} ms'}\n")
    found = {form: [] for form in options.only}
    for _ in range(options.rounds):
        for form in options.only:
            found[form].append(measure(form, folder, port, rate, compute, 1 if options.first_step else 2))
    print("| | first step, s | epochs, s | through the line, of the pack |\n|---|---|---|---|")
    for form, taken in found.items():
        firsts, epochs, downs = zip(*taken)
        shown = " + ".join(f"{statistics.median(times):.1f}" for times in zip(*epochs)) if compute else ""
        print(
            f"| {form} | {statistics.median(firsts):.1f} ({min(firsts):.1f} to {max(firsts):.1f}) | {shown} | {statistics.median(downs) / size:.2f} |"
        )
    print(flush=True)
    if options.bound:
        bounded(found, rate, compute * SIZE / rate / MB)
    if {"first", "arriving"} <= found.keys():
        only = f"--rates {rate}" + " --first_step" * options.first_step
        firsts = [one[0] / other[0] for one, other in zip(found["first"], found["arriving"])]
        rows.keep(f"the first step of a pack in a bucket, {rate} MB/s", "fetching it first", firsts, only)
        if compute:
            totals = [sum(one[1]) + one[0] for form in ("first", "arriving") for one in found[form]]
            half = len(totals) // 2
            rows.keep(
                f"two epochs of it, {rate} MB/s",
                "fetching it first",
                [a / b for a, b in zip(totals[:half], totals[half:])],
                only,
            )


def bounded(found, rate, share):
    """Compare two epochs with what they cannot be faster than, and the second one with that of the folder."""
    ratios, seconds = [], []
    for (_, (local, again), _), (_, ours, _), (_, (line,), _) in zip(*found.values()):
        computing = (local + again) / 2
        ratios.append(max(2 * computing, computing + line) / sum(ours))
        seconds.append(again / ours[1])
    shown = [f"{statistics.median(these):.3f} ({min(these):.3f} to {max(these):.3f})" for these in (ratios, seconds)]
    print(f"{rate} MB/s, C/N = {share:g}: bound / two epochs {shown[0]}; local / second epoch {shown[1]}\n", flush=True)
    only = f"--rates {rate} --compute {share:g} --bound"
    rows.keep(
        f"two epochs of a pack that arrives, {rate} MB/s, {share:g} of its pictures computed",
        "what cannot be faster",
        ratios,
        only,
    )


if __name__ == "__main__":
    main()
