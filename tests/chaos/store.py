"""What a bucket may do to a download, ours beside plain boto3; and eight ranks of a node whose downloader is killed.

    python -m tests.chaos.store [--part bodies|outage|stall|ranks] [--trials 100] [--seed 1]       (make chaos)

A real object store behind a proxy that damages its answers. `bodies`: 300 damaged answers, one for each object; `outage`:
60 s of 503; `stall`: answers that stop in the middle; `ranks`: eight processes start cold, the one that downloads is killed
0 to 3 times.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.tools.faultproxy import FaultProxy
from tests.tools.jobs import lock_holders
from tests.tools.objectstore import ObjectStore

FAULTS = ["flip", "short", "cut", "reset"]
BODIES, SIZE = 300, 50_000
OUTAGE_SECONDS = 60


def plain_boto3(folder):
    """What a user's own lines would be: the objects that came without an exception, and the exceptions."""
    import boto3

    client, failed = boto3.client("s3"), []
    for entry in client.list_objects_v2(Bucket="data", Prefix="set/")["Contents"]:
        try:
            client.download_file("data", entry["Key"], os.path.join(folder, os.path.basename(entry["Key"])))
        except Exception as error:
            failed.append(type(error).__name__)
    return failed


def ours(folder):
    from common import storage
    from common.errors import TrainingFailed, UserError

    try:
        storage.fetch("s3://data/set", folder, say=lambda text: None)
    except (UserError, TrainingFailed) as error:
        return [str(error)]
    return []


FORMS = {"ours": ours, "boto3": plain_boto3}


def fill(store, count):
    client = store.client()
    with contextlib.suppress(client.exceptions.ClientError):
        client.create_bucket(Bucket="data")
    for number in range(count):
        client.put_object(Bucket="data", Key=f"set/{number:03d}", Body=content(number))


def content(number):
    return random.Random(number).randbytes(SIZE)


def judge(folder, count):
    """(right, wrong, missing) files"""
    right = wrong = 0
    for number in range(count):
        with contextlib.suppress(FileNotFoundError):
            found = Path(folder, f"{number:03d}").read_bytes()
            right, wrong = right + (found == content(number)), wrong + (found != content(number))
    return right, wrong, count - right - wrong


def through(proxy, form, count):
    """(seconds, failures, right, wrong, missing)"""
    os.environ["AWS_ENDPOINT_URL_S3"] = proxy.endpoint
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        failed = FORMS[form](folder)
        return time.monotonic() - begun, failed, *judge(folder, count)


def bodies(store, _):
    fill(store, BODIES)
    print(
        f"\n| {BODIES} objects, the first answer for each is damaged | accepted damaged | right | refused |\n|---|---|---|---|"
    )
    for form in FORMS:
        seen = set()

        def plan(request, seen=seen):
            key = request.path
            if not request.is_object or key in seen:
                return None
            seen.add(key)
            return FAULTS[int(key[-3:]) % len(FAULTS)]

        proxy = FaultProxy(store.port, plan)
        _, _, right, wrong, missing = through(proxy, form, BODIES)
        proxy.stop()
        assert len(seen) == BODIES
        print(f"| {form} | {wrong} | {right} | {missing} |", flush=True)


def outage(store, _):
    fill(store, 10)
    print(f"\n| {OUTAGE_SECONDS} s of 503 SlowDown | seconds | files right | outcome |\n|---|---|---|---|")
    for form in FORMS:
        begun = time.monotonic()
        proxy = FaultProxy(
            store.port, lambda request, begun=begun: "503" if time.monotonic() - begun < OUTAGE_SECONDS else None
        )
        try:
            seconds, failed, right, _, _ = through(proxy, form, 10)
        except Exception as error:  # boto3 fails at the list already
            seconds, failed, right = time.monotonic() - begun, [type(error).__name__], 0
        proxy.stop()
        print(f"| {form} | {seconds:.0f} | {right} of 10 | {failed[0][:80] if failed else 'all fetched'} |", flush=True)


def stall(store, _):
    fill(store, 10)
    print("\n| the first answer stops in the middle | seconds until all is there | files right |\n|---|---|---|")
    for form in FORMS:
        stalled = []

        def plan(request, stalled=stalled):
            if request.is_object and not stalled:
                stalled.append(request)
                return "stall"
            return None

        proxy = FaultProxy(store.port, plan)
        seconds, _, right, _, _ = through(proxy, form, 10)
        proxy.stop()
        print(f"| {form} | {seconds:.0f} | {right} of 10 |", flush=True)


def fork_fetchers(folder, count):
    """Processes that wait for the store's address and then fetch; forked while this one has no threads. ({pid}, tell)"""
    from common import storage

    reader, writer = os.pipe()
    pids = []
    for _ in range(count):
        pids.append(os.fork())
        if pids[-1] == 0:
            code = 1
            try:
                os.close(writer)
                os.environ["AWS_ENDPOINT_URL_S3"] = os.read(reader, 100).decode().strip()
                storage.fetch("s3://data/set", folder, say=lambda text: None)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
    os.close(reader)

    def tell(endpoint):
        os.write(writer, f"{endpoint:<99}\n".encode() * count)
        os.close(writer)

    return pids, tell


def one_start_of_eight(store, folder, at):
    """Kill whoever downloads when that many objects have been asked for; (exit codes, moments of the kills, requests)"""
    pids, tell = fork_fetchers(folder, 8)
    killed = {}

    def plan(request):
        with proxy.lock:
            if not request.is_object or len(killed) == len(at) or len(proxy.objects()) < at[len(killed)]:
                return
            for owner in [pid for pid in lock_holders(f"{folder}/.fetching/fetch.lock") if pid in pids and pid not in killed]:
                killed[owner] = time.monotonic()
                os.kill(owner, signal.SIGKILL)

    proxy = FaultProxy(store.port, plan)
    tell(proxy.endpoint)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    proxy.stop()
    return codes, list(killed.values()), proxy


def ranks(store, options):
    count, draw, rows, pauses = 40, random.Random(options.seed), [], []
    fill(store, count)
    for _ in range(options.trials):
        kills = draw.randrange(4)
        with tempfile.TemporaryDirectory() as folder:
            codes, killed, proxy = one_start_of_eight(store, folder, sorted(draw.sample(range(1, count), kills)))
            right = judge(folder, count)[0] == count and sorted(codes) == [-9] * len(killed) + [0] * (8 - len(killed))
        lists = [request.at for request in proxy.log if "prefix" in request.query]
        pauses += [min(when for when in lists if when > kill) - kill for kill in killed if max(lists) > kill]
        rows.append((len(killed), right, len(proxy.objects())))
    print(f"\n| the downloader killed | trials | right on all ranks | requests for {count} objects, most |\n|---|---|---|---|")
    for number in range(4):
        mine = [row for row in rows if row[0] == number]
        if mine:
            print(f"| {number} times | {len(mine)} | {sum(row[1] for row in mine)} | {max(row[2] for row in mine)} |")
    if pauses:
        print(f"\nAfter a kill the next owner was at work in {statistics.median(pauses):.2f} s (at most {max(pauses):.2f} s).")


PARTS = {"bodies": bodies, "outage": outage, "stall": stall, "ranks": ranks}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="unset: all of them")
    parser.add_argument("--trials", type=int, default=100, help="of the eight ranks")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.part is None:  # each in a process of its own: `ranks` forks, which must not follow another part's threads
        words = [sys.executable, "-m", "tests.chaos.store", "--trials", str(options.trials), "--seed", str(options.seed)]
        return max(subprocess.run([*words, "--part", part]).returncode for part in PARTS)
    with tempfile.TemporaryDirectory() as folder:
        store = ObjectStore(Path(folder))
        os.environ.update(store.environment)
        try:
            PARTS[options.part](store, options)
        finally:
            store.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
