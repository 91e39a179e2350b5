"""The Ray cluster of a loader: join the user's own or the one that we start, place workers on its nodes."""

import inspect
import logging
import os
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Optional

from common.errors import UserError
from datasets.dpex import own_cluster

REACH_SECONDS = 2.0


def connect(head_address: str, leader: int) -> "Cluster":
    """Join the cluster. `leader`: the process whose ranks share a cluster of our own."""
    address = _users_address(head_address)
    if address is None:
        address, lock = own_cluster.join(leader)
        _init(address, own=True)
        return Cluster(address, True, lock)
    _require_token()
    if not reachable(address):
        raise UserError(
            f"no Ray cluster answers at {address}: set head_address or RAY_ADDRESS to the host:port of its head, or to 'local'"
        )
    if address.startswith(("127.", "localhost:")):
        os.environ.update(own_cluster.LOOPBACK)  # else Ray would look for it at this machine's external address
    _init(address, own=False)
    return Cluster(address, False)


def _init(address, own):
    os.environ.update(own_cluster.QUIET)
    import ray

    if tuple(map(int, ray.__version__.split(".")[:2])) < (2, 52):
        raise UserError(f"Ray {ray.__version__} does not support tokens: pip install 'ray>=2.52'")
    try:
        ray.init(address=address, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise UserError(
            f"cannot join the Ray cluster at {address}: {reason}; this machine has to be a node of it (ray start --address "
            f"{address}) and use the same token" + (" (the cluster was started by this job)" if own else "")
        ) from None


def _users_address(head_address):
    """Where the user's cluster is; None: there is none, and we start our own."""
    if head_address not in ("auto", "local", None):
        return head_address
    variable = os.environ.get("RAY_ADDRESS", "auto")
    if head_address == "auto" and variable != "auto":
        return None if variable == "local" else variable
    note = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"  # of `ray start`
    if head_address == "auto" and note.exists() and reachable(note.read_text().strip()):
        return note.read_text().strip()
    return None


def _require_token():
    """Ray runs the code that it is sent, so a cluster that accepts everybody is used only where the user says so."""
    given = "RAY_AUTH_TOKEN" in os.environ or os.path.exists(
        os.path.expanduser(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token"))
    )
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token" and not given:
        raise UserError(
            "there is no token for the Ray cluster: run ray get-auth-token --generate and copy the file ~/.ray/auth_token to "
            "every node (or set RAY_AUTH_TOKEN_PATH); for a cluster without a token set RAY_AUTH_MODE=disabled"
        )


def reachable(address: str) -> bool:
    """Whether a server listens there: host:port, or the path of a socket."""
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


def raylet(node: dict[str, Any]) -> str:
    """The address of the raylet of an entry of ray.nodes()."""
    return f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"


class Cluster:
    """A cluster that this process has joined, until it ends. `lock`: see own_cluster.join."""

    def __init__(self, address: str, own: bool, lock: Optional[IO] = None):
        import ray

        self.address, self.own, self._lock = address, own, lock
        self.node = ray.get_runtime_context().get_node_id()  # of this machine

    def choose_nodes(self, taken: Iterable[str], count: int, avoid: Optional[str] = None) -> list[str]:
        """The nodes of `count` more workers, besides those on the `taken` nodes: in proportion to the CPUs of each."""
        import ray

        alive = [node for node in ray.nodes() if node["Alive"] and reachable(raylet(node))]  # Ray may not know yet
        cpus = {node["NodeID"]: node["Resources"].get("CPU", 0) for node in alive}
        if any(cpus.values()):  # a node declared without CPUs, usually the head, gets no worker
            cpus = {name: number for name, number in cpus.items() if number}
        if len(cpus) > 1:
            cpus.pop(avoid, None)
        taken, chosen = list(taken), []
        for _ in range(count):
            chosen.append(min(sorted(cpus), key=lambda name: (taken.count(name) + 1) / max(cpus[name], 0.5)))
            taken.append(chosen[-1])
        return chosen

    def start_worker(self, node: str, packages: Iterable[str]) -> Any:
        """An actor on that node. It reserves no CPU: on a full cluster it would wait. The user chooses how many there are."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
        if not self.own:  # its nodes may be machines without our files
            from ray._private.runtime_env.py_modules import upload_py_modules_if_needed

            known = inspect.signature(upload_py_modules_if_needed).parameters
            more: dict[str, Any] = {"include_gitignore": True} if "include_gitignore" in known else {}
            with tempfile.TemporaryDirectory() as folder:
                modules = {"py_modules": sorted(packages)}
                options["runtime_env"] = upload_py_modules_if_needed(modules, scratch_dir=folder, **more)
        return ray.remote(Actor).options(**options).remote()


class Actor:
    """The worker as a Ray actor. Imports torch only where it runs: the process that starts it does not need it."""

    def __init__(self):
        from datasets.dpex.worker import Worker

        self._worker = Worker()

    def begin(self, task: list, *how: Any) -> None:
        """`task`: a reference, in a list so that Ray does not resolve it, to the pickled task and its buffers."""
        import ray

        header, *buffers = ray.get(task[0])
        self._worker.begin(header, buffers, *how)

    def resume(self) -> None:
        self._worker.resume()

    def fetch(self, index: list, key: int) -> Optional[list]:
        return self._worker.fetch(index, key)
