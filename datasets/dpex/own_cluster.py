"""A Ray cluster of our own on this machine, which the ranks of a job share.

An owner process starts it and shuts it down after its last user. Each user holds a lock on a file, which the kernel releases
when the user's process ends, however it ends. The cluster listens on the loopback interface only, requires a token, and has no
dashboard. Its folder holds that token, its address, its log, a copy of our modules, and the lock files `owner`, `users` and
`startup`.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from common.errors import UserError
from datasets.dpex.child import START_SECONDS, repository, start_python

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # with it Ray uses 127.0.0.1 for a cluster of one machine
PATIENT = {"RAY_health_check_timeout_ms": "60000", "RAY_worker_register_timeout_seconds": str(START_SECONDS)}  # a busy machine
EQUAL = {"RAY_worker_niceness": "0"}  # torch's workers have the rank's priority, too; Ray's give way to all that a machine does
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def join(leader: int) -> tuple[str, IO]:
    """(the address of the cluster that the ranks started by the process `leader` share, a lock file to keep open while using
    it). Sets what Ray has to know in the environment; the first rank starts the cluster."""
    folder = _folder(leader)
    lock = _become_user(folder)
    os.environ.pop("RAY_AUTH_TOKEN", None)  # another cluster's, which Ray would prefer to the file
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token"), **LOOPBACK})
    return (folder / "address").read_text(), lock


def _folder(leader):
    """The same for all ranks of one leader, and for no other job, also when the leader's process id is used again."""
    name = hashlib.sha256(f"{os.getuid()} {leader} {_start_time(leader)}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"anyrank-ray-{name}"


def _start_time(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""


def _become_user(folder):
    """Lock the file `users` as one of several; start the cluster's owner where there is none."""
    with _startup_lock(folder):
        users = open(folder / "users", "a")  # noqa: SIM115 (kept open while the cluster is used)
        with open(folder / "owner", "a") as owner:
            fcntl.flock(users, fcntl.LOCK_SH)  # waits for an owner that is shutting its cluster down
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if (folder / "address").exists():
                    return users
                fcntl.flock(owner, fcntl.LOCK_EX)
        _start_owner(folder)
    return users


def _startup_lock(folder):
    """A lock file that one rank at a time holds open. An owner that ends deletes the folder, perhaps before it is locked."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if folder.stat().st_uid != os.getuid() or folder.is_symlink():
                raise UserError(f"{folder} belongs to another user: set TMPDIR to a folder of your own")
            file = open(folder / "startup", "a")  # noqa: SIM115 (whoever holds the lock closes it)
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / "startup")):
                return file
            file.close()


def _start_owner(folder):
    (folder / "address").unlink(missing_ok=True)
    with open(os.open(folder / "token", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token"), **LOOPBACK, **PATIENT, **EQUAL, **QUIET}
    for name in ("common", "datasets"):  # a copy: the first rank's own files may be deleted before the cluster ends
        shutil.rmtree(folder / name, ignore_errors=True)  # of a former cluster
        shutil.copytree(os.path.join(repository(), name), folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), *(path for path in sys.path if path)])  # for the workers
    with open(folder / "log", "w") as log:
        process = start_python(__name__, str(folder), env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + START_SECONDS
    while not (folder / "address").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            last = ((folder / "log").read_text().strip().splitlines() or ["its log is empty"])[-1][:300]
            process.kill()
            raise UserError(f"Ray cannot be started on this machine: {last}; see {folder}/log")
        time.sleep(0.05)


def main(name: str) -> None:
    """The owner process of the cluster in this folder."""
    folder = Path(name)
    with open(folder / "owner", "a") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        import ray

        options = json.loads(os.environ.get("ANYRANK_RAY_OPTIONS", "{}"))  # of ray.init
        options = {"address": "local", "include_dashboard": False, "log_to_driver": False, **options}
        try:
            context = ray.init(**options)
        except Exception as error:  # Ray gives its processes half a minute, which on a busy machine may be too short
            print("starting Ray once more after", error, flush=True)
            ray.shutdown()
            context = ray.init(**options)
        unfinished = folder / "address.unfinished"
        unfinished.write_text(context.address_info["gcs_address"])  # pyright: ignore[reportAttributeAccessIssue] (a RayContext)
        unfinished.rename(folder / "address")
        with open(folder / "users", "a") as users:
            fcntl.flock(users, fcntl.LOCK_EX)  # waits for the last user to end
            (folder / "address").unlink()
            ray.shutdown()
            with contextlib.suppress(OSError), open(folder / "startup", "a") as startup:
                fcntl.flock(startup, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where a rank is about to start the next owner
                shutil.rmtree(folder)
