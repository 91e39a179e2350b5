"""A real object store for the tests: OpenStack Swift with its S3 interface, on this machine, in one folder.

    python -m tests.tools.objectstore FOLDER PORT       runs until it is told to stop; prints "ready" when it answers

One device, one replica, four services that share the start: each is a fork of this program after the imports.
"""

import contextlib
import fcntl
import importlib
import os
import pwd
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KEY, SECRET = "test:tester", "canary-secret-5d41402abc4b"  # the tests look for the secret where it must not be
SERVICES = {"account": "account", "container": "container", "object": "obj", "proxy": "proxy"}

# In this order: s3api turns an S3 request into Swift's own, tempauth checks who signed it.
PIPELINE = "catch_errors gatekeeper listing_formats bulk s3api tempauth slo dlo versioned_writes symlink proxy-server"


class ObjectStore:
    """One running store, and the environment by which boto3 finds it."""

    def __init__(self, folder, address="127.0.0.1"):
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self.log = open(folder / "log", "w")  # noqa: SIM115
        words = [sys.executable, "-m", "tests.tools.objectstore", str(folder), str(self.port)]
        root = Path(__file__).resolve().parents[2]
        self.process = subprocess.Popen(words, cwd=root, stdout=subprocess.PIPE, stderr=self.log, text=True)
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the object store did not start: {(folder / 'log').read_text()[-2000:]}")
        self.endpoint = f"http://{address}:{self.port}"
        self.environment = {"AWS_ENDPOINT_URL_S3": self.endpoint, **credentials()}
        self._client = None

    def client(self):
        import boto3

        if not self._client:
            self._client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.port}", aws_access_key_id=KEY,
                                        aws_secret_access_key=SECRET, region_name="us-east-1")  # fmt: skip
        return self._client

    def stop(self):
        self.process.terminate()
        self.process.wait()
        self.log.close()


def credentials():
    return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}


def free_port():
    """One that no other test is given, nor the system to any connection: those begin at 32768."""
    with open(Path(tempfile.gettempdir()) / f"anyrank-port-{os.getuid()}", "a+") as given:
        fcntl.flock(given, fcntl.LOCK_EX)
        given.seek(0)
        number = int(given.read() or 9999)
        while True:
            number = number + 1 if number < 26000 else 10000
            with contextlib.suppress(OSError), socket.socket() as listener:
                listener.bind(("", number))
                given.truncate(0)
                given.write(str(number))
                return number


def configure(folder, port):
    """Write what the services read; return the ports of all of them."""
    from swift.common.ring import RingBuilder

    (folder / "devices" / "disk").mkdir(parents=True, exist_ok=True)
    (folder / "swift.conf").write_text(
        "[swift-hash]\nswift_hash_path_prefix = a\nswift_hash_path_suffix = b\n[storage-policy:0]\nname = only\ndefault = yes\n"
    )
    user = pwd.getpwuid(os.getuid()).pw_name
    common = f"[DEFAULT]\nswift_dir = {folder}\nuser = {user}\nworkers = 0\nlog_address = {folder}/none\nlog_level = ERROR\n"
    ports = [port]
    for service in ("account", "container", "object"):
        own = free_port()
        ports.append(own)
        ring = RingBuilder(part_power=2, replicas=1, min_part_hours=0)
        place = {"ip": "127.0.0.1", "port": own, "replication_ip": "127.0.0.1", "replication_port": own}
        ring.add_dev({"id": 0, "region": 1, "zone": 1, "device": "disk", "weight": 1.0, **place})
        ring.rebalance()
        ring.get_ring().save(str(folder / f"{service}.ring.gz"))
        (folder / f"{service}.conf").write_text(
            f"{common}bind_ip = 127.0.0.1\nbind_port = {own}\ndevices = {folder}/devices\nmount_check = false\n"
            f"disable_fallocate = true\n[pipeline:main]\npipeline = {service}-server\n"
            f"[app:{service}-server]\nuse = egg:swift#{service}\nmb_per_sync = 64\ncontainer_update_timeout = 30\n"
        )
    filters = {
        "s3api": "location = us-east-1\ns3_acl = false\nstorage_domain = localhost\ndns_compliant_bucket_names = true\n"
        "min_segment_size = 1",
        "tempauth": f"user_test_tester = {SECRET} .admin",
        "versioned_writes": "allow_object_versioning = true",
    }
    sections = [
        f"[filter:{name}]\nuse = egg:swift#{name}\n{filters.get(name, '')}\n"
        for name in PIPELINE.split()
        if "server" not in name
    ]
    (folder / "proxy.conf").write_text(
        f"{common}bind_ip = 0.0.0.0\nbind_port = {port}\n[pipeline:main]\npipeline = {PIPELINE}\n{''.join(sections)}"
        "[app:proxy-server]\nuse = egg:swift#proxy\nallow_account_management = true\naccount_autocreate = true\n"
    )
    return ports


def serve(service, folder):
    """In a child: become one of Swift's services."""
    main = importlib.import_module(f"swift.{SERVICES[service]}.server").main
    pid = os.fork()
    if pid:
        return pid
    try:
        os.dup2(2, 1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.argv = [service, str(folder / f"{service}.conf")]
        main()
    finally:
        os._exit(1)


def answers(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
        return True
    return False


def main():
    folder, port = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    ports = configure(folder, port)
    for service in SERVICES:
        importlib.import_module(f"swift.{SERVICES[service]}.server")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    children = [serve(service, folder) for service in SERVICES]
    try:
        deadline = time.monotonic() + 600
        while not all(map(answers, ports)):  # a proxy that finds one closed leaves that service alone for a minute
            if time.monotonic() > deadline or os.waitpid(-1, os.WNOHANG)[0]:
                sys.exit("a service ended or did not start")
            time.sleep(0.05)
        print("ready", flush=True)
        os.waitpid(-1, 0)  # a service that ends takes the store with it
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)


if __name__ == "__main__":
    main()
