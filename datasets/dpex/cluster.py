"""Which Ray cluster datasets.dpex works on: one that the user started, or one of its own on this machine.

One of its own is shared by the ranks of this machine. It belongs to a keeper, a process that starts it and ends it when the
last of them has gone, however they went: each holds a lock on a file, and the kernel lets go of it with the process. It listens
on the loopback interface alone, wants a token of everybody, and has no dashboard.
"""

import atexit
import contextlib
import fcntl
import functools
import hashlib
import inspect
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common.errors import UserError

START_SECONDS = 120
REACH_SECONDS = 2.0
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray's switch for a node that is nobody's but this machine's
PATIENT = {"RAY_health_check_timeout_ms": "60000", "RAY_worker_register_timeout_seconds": str(START_SECONDS)}  # a busy machine
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def connect(head_address, leader):
    """Join the cluster; (its address, whether it is our own, what must be kept open for as long as we use it).

    `leader`: the process whose ranks share one of our own.
    """
    address = _users_address(head_address)
    if address:
        _need_token()
        if not reachable(address):
            raise UserError(f"nobody listens at {address}: give the address of the Ray cluster's head, host:port, or 'local'")
        if address.startswith(("127.", "localhost:")):
            os.environ.update(LOOPBACK)  # else Ray would look for it at this machine's other address
        _init(address, own=False)
        return address, False, None
    folder = _own_folder(int(leader))
    lock = _join(folder)
    os.environ.pop("RAY_AUTH_TOKEN", None)  # another cluster's; Ray would prefer it
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token"), **LOOPBACK})
    address = (folder / "address").read_text()
    _init(address, own=True)
    return address, True, lock


def _init(address, own):
    os.environ.update(QUIET)
    import logging

    try:
        import ray
    except ImportError:
        raise UserError("Ray is missing: pip install .[ray], or take a job or backend without") from None
    if tuple(map(int, ray.__version__.split(".")[:2])) < (2, 52):
        raise UserError(f"Ray {ray.__version__} cannot ask for a token: pip install 'ray>=2.52'")
    try:
        ray.init(address=address, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise UserError(
            f"cannot join the Ray cluster at {address}: {reason}; this machine has to be a node of it (ray start --address "
            f"{address}), with the same token" + (" (its own cluster)" if own else "")
        ) from None


def _users_address(head_address):
    """Where the user's cluster is, or None: then there is none, and we start our own."""
    if head_address not in ("auto", "local", None):
        return head_address
    asked = os.environ.get("RAY_ADDRESS", "auto")
    if head_address == "auto" and asked != "auto":
        return None if asked == "local" else asked
    noted = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"  # by `ray start`
    if head_address == "auto" and noted.exists() and reachable(noted.read_text().strip()):
        return noted.read_text().strip()
    return None


def _need_token():
    """Ray runs what it is sent; so a cluster that takes it from everybody is used only where the user says so himself."""
    given = "RAY_AUTH_TOKEN" in os.environ or os.path.exists(
        os.path.expanduser(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token"))
    )
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token" and not given:
        raise UserError(
            "there is no token for the Ray cluster: ray get-auth-token --generate, and the same file ~/.ray/auth_token on "
            "every node (or RAY_AUTH_TOKEN_PATH); RAY_AUTH_MODE=disabled for a cluster without"
        )


def reachable(address):
    """Whether anyone listens there: host:port, or the path of a socket."""
    try:
        if "/" in address:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(REACH_SECONDS)
                probe.connect(address)
        else:
            host, port = address.rsplit(":", 1)
            socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


# --- Its nodes and workers --------------------------------------------------------------------------------------------


def raylet(node):
    return f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"


class Cluster:
    """Where workers can be."""

    def __init__(self, address, own, lock):
        self.address, self.own, self._lock = address, own, lock

    def places(self, taken, count, avoid=None):
        """`count` nodes for workers beside those that are on `taken` nodes: as many on each as its CPUs say."""
        import ray

        alive = [node for node in ray.nodes() if node["Alive"] and reachable(raylet(node))]  # Ray may not know yet
        cpus = {node["NodeID"]: node["Resources"].get("CPU", 0) for node in alive}
        if any(cpus.values()):  # a head without CPUs is to be left alone
            cpus = {name: number for name, number in cpus.items() if number}
        if len(cpus) > 1:
            cpus.pop(avoid, None)
        taken, chosen = list(taken), []
        for _ in range(count):
            chosen.append(min(sorted(cpus), key=lambda name: (taken.count(name) + 1) / max(cpus[name], 0.5)))
            taken.append(chosen[-1])
        return chosen

    def start_worker(self, node, paths):
        """Asks for no CPU: how many workers there are is the user's business, and on a full cluster they must not wait."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        how = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
        if not self.own:  # its nodes may be machines that have never seen our files
            from ray._private.runtime_env.py_modules import upload_py_modules_if_needed

            known = inspect.signature(upload_py_modules_if_needed).parameters
            others = {"include_gitignore": True} if "include_gitignore" in known else {}
            with tempfile.TemporaryDirectory() as folder:
                how["runtime_env"] = upload_py_modules_if_needed({"py_modules": sorted(paths)}, scratch_dir=folder, **others)
        return ray.remote(Actor).options(**how).remote()


class Actor:
    """The worker, imported where it runs: this process has no use for torch."""

    def __init__(self):
        from datasets.dpex.worker import Worker

        self._worker = Worker()

    def begin(self, parts, *how):
        import ray

        header, *buffers = ray.get(parts[0])
        self._worker.begin(header, buffers, *how)

    def resume(self):
        self._worker.resume()

    def fetch(self, index):
        return self._worker.fetch(index)


# --- Our own ---------------------------------------------------------------------------------------------------------------


def _own_folder(leader):
    """The same for all ranks that one parent started on this machine, and for nobody else."""
    name = hashlib.sha256(f"{os.getuid()} {leader} {_started(leader)}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"anyrank-ray-{name}"


def _started(process):
    """When it was, so that another process which gets the same number later is not taken for it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""


def _join(folder):
    """Take part in the cluster of this folder; whoever comes first starts its keeper. Returns the file that says so."""
    with _turn(folder):
        users = open(folder / "users", "a")  # noqa: SIM115 (open for as long as we use the cluster)
        with open(folder / "keeper", "a") as keeper:
            fcntl.flock(users, fcntl.LOCK_SH)  # waits where a keeper is just ending its cluster
            try:
                fcntl.flock(keeper, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if (folder / "address").exists():
                    return users
                fcntl.flock(keeper, fcntl.LOCK_EX)
        _start_keeper(folder)
    return users


@contextlib.contextmanager
def _turn(folder):
    """One at a time; a keeper that ends takes the folder away with it."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.is_symlink():
            raise UserError(f"{folder} belongs to somebody else: set TMPDIR to a folder of your own")
        with _opened(folder / "turn") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if _is_still(folder / "turn", turn):
                yield
                return


def _opened(path):
    while True:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return open(path, "a")


def _is_still(path, file):
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _start_keeper(folder):
    (folder / "address").unlink(missing_ok=True)
    with open(os.open(folder / "token", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token"), **LOOPBACK, **PATIENT, **QUIET}
    for name in ("common", "datasets"):  # a copy: the files of whoever came first may go before the cluster does
        shutil.rmtree(folder / name, ignore_errors=True)  # of a cluster that is gone
        shutil.copytree(os.path.join(repository(), name), folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), *(path for path in sys.path if path)])  # workers see what we see
    with open(folder / "log", "w") as log:
        process = start_python(__name__, str(folder), env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + START_SECONDS
    while not (folder / "address").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            last = ((folder / "log").read_text().strip().splitlines() or ["no word of it"])[-1][:300]
            process.kill()
            raise UserError(f"Ray cannot be started on this machine: {last}; see {folder}/log")
        time.sleep(0.05)


@functools.lru_cache(maxsize=1)
def repository():
    """The folder of `common` and `datasets`; a job that was bundled into one file writes them out first."""
    sources = getattr(__spec__.loader, "sources", None)
    if sources is None:
        return str(Path(__file__).resolve().parents[2])
    folder = tempfile.mkdtemp(prefix="anyrank-modules-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for place, source in sources.items():
        path = Path(folder, place)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return folder


def start_python(module, *arguments, **how):
    """A module of ours as a process that finds what this one finds, and is not interrupted with it by Ctrl-C."""
    begin = f"import sys; sys.path[:] = {json.dumps([repository(), *map(os.path.abspath, sys.path)])}; "
    begin += f"from {module} import main; main(*sys.argv[1:])"
    return subprocess.Popen([sys.executable, "-c", begin, *arguments], start_new_session=True, **how)


def main(folder):
    """The keeper."""
    folder = Path(folder)
    with open(folder / "keeper", "a") as keeper:
        fcntl.flock(keeper, fcntl.LOCK_EX)
        import ray

        options = json.loads(os.environ.get("ANYRANK_RAY_OPTIONS", "{}"))  # of ray.init
        options = {"address": "local", "include_dashboard": False, "log_to_driver": False, **options}
        try:
            started = ray.init(**options)
        except Exception as error:  # Ray waits half a minute for itself, which on a busy machine may be too short
            print("once more, because of", error, flush=True)
            ray.shutdown()
            started = ray.init(**options)
        unfinished = folder / "address.unfinished"
        unfinished.write_text(started.address_info["gcs_address"])
        unfinished.rename(folder / "address")
        with open(folder / "users", "a") as users:
            fcntl.flock(users, fcntl.LOCK_EX)  # until the last of them has gone
            (folder / "address").unlink()
            ray.shutdown()
            with contextlib.suppress(OSError), open(folder / "turn", "a") as turn:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else somebody is about to start it anew
                shutil.rmtree(folder)
