"""A pack in a bucket behind a line of a known rate: when the first step begins and how fast two epochs go, by way of reading it.

    python -m tests.benchmarks.arriving [--rates 40 100 400] [--compute 1] [--rounds 2] [--first_step]     (make bench)
    python -m tests.benchmarks.arriving --bound    beside what two epochs cannot be faster than, max(2 x computing, computing + transfer)
    python -m tests.benchmarks.arriving --peers [--picture FILE]    beside what else reads pictures from a bucket, see streams.py
    python -m tests.benchmarks.arriving --killed   each form killed in its first epoch: what it leaves behind, and its next start

local: the pack in a folder. first: --fetch_first true. remote: --data_backend packed-remote. arriving: --fetch_first false. transfer:
obstore alone. 6,000 JPEGs of 110 KB that cost little to decode; two loader processes, batches of 64; a step sleeps for its share of
`--compute` x the pictures that the line carries in a second. nginx is the store, a relay in a process of its own the line, with
10 ms before each answer; data in memory. The forms take turns, each in a process of its own on an empty folder.
"""

import argparse
import contextlib
import http.server
import io
import json
import multiprocessing
import os
import shutil
import signal
import stat
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from tests.benchmarks import rows
from tests.benchmarks.base import machine
from tests.benchmarks.storage import KEY, SECRET, get_programs, started
from tests.benchmarks.streams import BATCH, MARK, NEEDS, Taken, paced, show
from tests.tools.jobs import ROOT, environment, module_of
from tests.tools.line import Line
from tests.tools.objectstore import free_port
from tests.tools.packages import program, python_program

PICTURES, SIZE, CLASSES = 6000, 110_000, 10
FORMS, TRANSFER = ("local", "first", "remote", "arriving"), "transfer"
PEERS = {
    "mosaic": "mosaic",
    "mosaic, blocks of 1,000": "mosaic",
    "litdata": "litdata",
    "s3torch": "s3torch",
    "webdataset": "webdataset",
}
NAMES = {"local": "from a folder", "first": "fetched first", "remote": "packed-remote", "arriving": "while it arrives"}
MB = 10**6
LONGEST = 120  # seconds of two epochs, then a form is ended


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


NGINX = """
user root; daemon off; pid {folder}/nginx.pid; error_log stderr; worker_processes 2; events {{}}
http {{
    access_log off; sendfile on;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port}; root {folder};
        location / {{ if ($args ~ "prefix=|list-type") {{ proxy_pass http://127.0.0.1:{lists}; }} }}
    }}
}}
"""
LIST = """<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{bucket}</Name><MaxKeys>100000</MaxKeys>
<KeyCount>{count}</KeyCount><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"""
ENTRY = """<Contents><Key>{key}</Key><LastModified>2026-11-28T00:00:00.000Z</LastModified><ETag>&quot;{etag}&quot;</ETag>
<Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"""


class Lists(http.server.BaseHTTPRequestHandler):
    """Answers what is in a bucket, a folder of `root`, with the ETags of nginx."""

    root: Path

    def do_GET(self):
        asked = urllib.parse.urlsplit(self.path)
        bucket, prefix = asked.path.strip("/"), urllib.parse.parse_qs(asked.query).get("prefix", [""])[0]
        paths = {str(path.relative_to(self.root / bucket)): path.stat() for path in sorted((self.root / bucket).rglob("[!.]*"))}
        found = {key: status for key, status in paths.items() if key.startswith(prefix) and stat.S_ISREG(status.st_mode)}
        entries = [
            ENTRY.format(key=key, etag=f"{int(status.st_mtime):x}-{status.st_size:x}", size=status.st_size)
            for key, status in found.items()
        ]
        answer = LIST.format(bucket=bucket, count=len(found), entries="".join(entries)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def serve_objects(folder):
    """(process, port) of nginx as a store that costs next to nothing: each folder is a bucket, and a thread lists what is in it."""
    lists = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Lists", (Lists,), {"root": folder}))
    threading.Thread(target=lists.serve_forever, daemon=True).start()
    port = free_port()
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port, lists=lists.server_port))
    process, _ = started([program("nginx"), "-c", folder / "nginx.conf"], port)
    return process, port


def line(port, rate, connection, carried):
    """The relay, until it is ended; tells its address, and all the time how many bytes it has carried."""
    with Line(port, rate, pause=0.01) as one:
        connection.send(one.url)
        while True:
            carried.value = one.down
            time.sleep(0.05)


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
    show(paced(loader, epochs, compute, began, lambda epoch: sampler.start_at(epoch, 0)))


def transfer(address):
    """In a process of its own: seconds in which obstore alone gets all of the pack, 16 objects at a time."""
    import obstore

    from common.storage.bucket import Bucket

    settings = Bucket(address).settings
    keys = {"access_key_id": KEY, "secret_access_key": SECRET, "region": settings.region}
    store = obstore.store.S3Store("data", endpoint=settings.endpoint, client_options={"allow_http": True}, **keys)
    began = time.monotonic()
    items = [(item["path"], item["size"]) for page in obstore.list(store) for item in page]
    with ThreadPoolExecutor(16) as pool:
        got = pool.map(lambda item: len(obstore.get(store, item[0]).bytes()), items)
        assert sum(got) == sum(size for _, size in items)
    show(Taken(0.0, [], [], time.monotonic() - began))


def write_for_peers(folder, forms):
    """What each of them reads, in a bucket of its name; those that cannot be installed, with the reason."""
    without = {}
    for name in {PEERS[form] for form in forms}:
        python, target = python_program("python", NEEDS[name]), folder / name / "train"
        words = [str(python), "-m", "tests.benchmarks.streams", name, "write", str(folder / "root"), str(target)]
        done = subprocess.run(words, cwd=folder, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True)
        if done.returncode:
            without |= {form: done.stderr.strip().splitlines()[-1] for form in forms if PEERS[form] == name}
    return without


@contextlib.contextmanager
def through_the_line(port, rate):
    """(its address, a Value with the bytes that it has carried)"""
    ours, theirs = multiprocessing.Pipe()
    carried = multiprocessing.Value("q", 0)
    relay = multiprocessing.Process(target=line, args=(port, rate * MB, theirs, carried))
    relay.start()
    try:
        yield ours.recv(), carried
    finally:
        relay.terminate()
        relay.join()


def start(form, folder, work, url, compute, epochs):
    """The process that reads."""
    peer = PEERS.get(form)
    address = f"s3://{peer}/train" if peer else str(folder / "data" / "pack") if form == "local" else "s3://data/pack"
    words = ["-m", "tests.benchmarks.streams", peer, "read"] if peer else ["-m", "tests.benchmarks.arriving", "--read", form]
    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
    more = {"S3_ENDPOINT_URL": url, "S5CMD": str(folder / "s5cmd")}
    if peer == "webdataset":
        more["WEBDATASET_SHARDS"] = " ".join(sorted(path.name for path in (folder / peer / "train").iterdir()))
    if "1,000" in form:
        more["MOSAIC_BLOCK"] = "1000"
    env = environment(AWS_ENDPOINT_URL_S3=url, **keys, **more, PYTHONPATH=str(ROOT), HOME=str(work), **{MARK: str(work)})
    python = python_program("python", NEEDS[peer]) if peer else sys.executable
    words = [str(python), *words, address, str(compute), str(epochs)]
    return subprocess.Popen(words, cwd=work, env=env, stdout=subprocess.PIPE, stderr=open(work / "stderr", "w"), text=True)


def end(work):
    """All processes of a form that hangs."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={work}".encode() in (path / "environ").read_bytes().split(b"\0"):
                os.kill(int(path.name), signal.SIGKILL)


def measure(form, folder, port, rate, compute, epochs):
    """A Taken."""
    work = folder / "work"
    work.mkdir()
    with through_the_line(port, rate) as (url, carried):
        process = start(form, folder, work, url, compute, epochs)
        try:
            answer = process.communicate(timeout=LONGEST)[0]
        except subprocess.TimeoutExpired:
            end(work)
            process.communicate()
        time.sleep(0.1)  # the relay says how much that was
        down = carried.value
    said = (work / "stderr").read_text().strip().splitlines()
    time.sleep(0.6)  # its fetcher looks so often whether the job is there
    shutil.rmtree(work)
    if process.returncode:
        ended = f"not ready after {LONGEST} s" if process.returncode == -signal.SIGKILL else f"exit code {process.returncode}"
        raise RuntimeError(f"{form}: {ended}: {''.join(said[-1:])}")
    return Taken(*json.loads(answer.splitlines()[-1]))._replace(carried=down)


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
    parser.add_argument("--only", nargs="+", choices=[*FORMS, *PEERS])
    parser.add_argument("--first_step", action="store_true", help="measure the first step alone")
    parser.add_argument("--bound", action="store_true", help="local and arriving beside what cannot be faster")
    parser.add_argument("--peers", action="store_true", help="beside other libraries")
    parser.add_argument("--picture", help="a PNG of pictures over time, of the last rate")
    parser.add_argument("--killed", action="store_true", help="what a kill leaves behind, and the next start")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    forms = ["local", "arriving", TRANSFER] if options.bound else [*FORMS, *(PEERS if options.peers or options.killed else [])]
    forms = options.only or forms
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory() as programs, tempfile.TemporaryDirectory(dir=shm) as place:
        folder = Path(place)
        _, s5cmd = get_programs(Path(programs))
        fill(folder)
        (folder / "s5cmd").symlink_to(s5cmd)
        without = write_for_peers(folder, [form for form in forms if form in PEERS])
        forms = [form for form in forms if form not in without]
        shutil.rmtree(folder / "root")
        size = sum(path.stat().st_size for path in (folder / "data" / "pack").iterdir())
        server, port = serve_objects(folder)
        try:
            print(f"{machine()}; the pack has {size / MB:.0f} MB; {options.rounds} rounds, median (range)\n")
            for form, why in without.items():
                print(f"{form} cannot be measured: {why}\n")
                rows.missing("two epochs of a pack in a bucket", form, why, "--peers")
            for rate in options.rates:
                for compute in [0.0] if options.first_step else options.compute:
                    if options.killed:
                        killed(forms, folder, port, rate, compute * rate * MB / SIZE, size)
                    else:
                        one_rate(options, forms, folder, port, rate, compute * rate * MB / SIZE, size)
        finally:
            server.terminate()
            server.wait()


def one_rate(options, forms, folder, port, rate, compute, size):
    print(f"{rate} MB/s, a step {'of no time' if not compute else f'of {BATCH / compute * 1000:.0f} ms'}\n")
    found = {form: [] for form in forms}
    for _ in range(options.rounds):
        for form in list(found):
            try:
                found[form].append(measure(form, folder, port, rate, compute, 1 if options.first_step else 2))
            except RuntimeError as error:
                if form not in PEERS:
                    raise
                print(f"{error}\n", flush=True)
                del found[form]
    print("| | first step, s | pictures/s, first epoch | second | two epochs, s | CPU, s | through the line, of the pack |")
    print("|---|---|---|---|---|---|---|")
    for form, taken in found.items():
        firsts, totals = ([one[place] for one in taken] for place in (0, 3))
        rates = [
            statistics.median(one.pictures[epoch] / one.epochs[epoch] for one in taken) for epoch in range(len(taken[0].epochs))
        ]
        shown = " | ".join(f"{rate:.0f}" if compute else "" for rate in (*rates, *rates)[:2])
        cpu, carried = (statistics.median(one[place] for one in taken) for place in (4, 5))
        print(f"| {form} | {spread(firsts)} | {shown} | {spread(totals)} | {cpu:.0f} | {carried / size:.2f} |")
    print(flush=True)
    if options.picture:
        draw({form: taken[-1] for form, taken in found.items()}, rate, options.picture)
    if options.bound:
        return bounded(found, rate, compute * SIZE / rate / MB)
    only = f"--rates {rate}"
    for form in {"first", *PEERS} & found.keys() if "arriving" in found else ():
        beside = f"{form} ({NEEDS[PEERS[form]]})" if form in PEERS else "fetching it first"
        more = only + (" --first_step" if options.first_step else " --peers" if form in PEERS else "")
        for what, place in (("the first step", 0), ("two epochs", 3)):
            if compute or place == 0:
                ratios = [one[place] / other[place] for one, other in zip(found[form], found["arriving"])]
                rows.keep(f"{what} of a pack in a bucket, {rate} MB/s", beside, ratios, more)


def spread(values):
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def draw(found, rate, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for form, taken in sorted(found.items(), key=lambda pair: pair[1].seconds):
        trained = [BATCH * (number + 1) for number in range(len(taken.trained))]
        how = {"local": {"color": "#999999", "linestyle": ":"}, "arriving": {"color": "#c1121f", "linewidth": 2.5}}.get(
            form, {}
        )
        axes.plot(
            [0, *taken.trained],
            [0, *trained],
            label=f"{NAMES.get(form, form)}, {taken.seconds:.0f} s",
            **{"linewidth": 1.3, **how},
        )
    axes.axhline(PICTURES, color="#dddddd", linewidth=1, zorder=0)
    axes.set(
        xlabel="seconds after the start",
        ylabel="pictures trained, two epochs",
        title=f"A pack in a bucket, {rate} MB/s",
        ylim=0,
        xlim=0,
    )
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def bounded(found, rate, share):
    """Compare two epochs with what they cannot be faster than, and the second one with that of the folder."""
    ratios, seconds = [], []
    for folder, ours, carried in zip(*found.values()):
        computing = sum(folder.epochs) / 2
        ratios.append(max(2 * computing, computing + carried.seconds) / sum(ours.epochs))
        seconds.append(folder.epochs[1] / ours.epochs[1])
    shown = [f"{statistics.median(these):.3f} ({min(these):.3f} to {max(these):.3f})" for these in (ratios, seconds)]
    print(f"{rate} MB/s, C/N = {share:g}: bound / two epochs {shown[0]}; local / second epoch {shown[1]}\n", flush=True)
    what = f"two epochs of a pack that arrives, {rate} MB/s, {share:g} of its pictures computed"
    rows.keep(what, "what cannot be faster", ratios, f"--rates {rate} --compute {share:g} --bound")


def killed(forms, folder, port, rate, compute, size):
    """Each is killed, the process that reads alone, when 0.3 of the pack has come, and is started once more on the same folder."""
    print(
        "| | left in /dev/shm and /tmp | in the folder, MB | the next start | it carried, of the pack |\n|---|---|---|---|---|"
    )
    for form in forms:
        if form == "local":
            continue
        work, before = folder / "work", names_outside(folder)
        work.mkdir()
        with through_the_line(port, rate) as (url, carried):
            process = start(form, folder, work, url, compute, 2)
            while carried.value < 0.3 * size and process.poll() is None:
                time.sleep(0.05)
            process.kill()
            process.communicate()
            time.sleep(10)  # what watches its parent has seen that it is gone
            left = sorted(names_outside(folder) - before)
            there = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
            first = carried.value
            again = start(form, folder, work, url, compute, 1)
            again.communicate()
            said = "works" if not again.returncode else (work / "stderr").read_text().strip().splitlines()[-1][:100]
            print(
                f"| {form} | {len(left)}: {', '.join(left)[:80]} | {there / MB:.0f} | {said} | {(carried.value - first) / size:.2f} |",
                flush=True,
            )
        shutil.rmtree(work)


def names_outside(folder):
    return {str(path) for place in ("/dev/shm", "/tmp") for path in Path(place).iterdir() if path != folder}


if __name__ == "__main__":
    main()
