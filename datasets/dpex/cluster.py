"""The Ray cluster of a loader: join the user's cluster or start one on this machine,
and place workers on its nodes."""

import contextlib
import functools
import inspect
import logging
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Optional

from common.errors import UserError
from common.machine.child import START_SECONDS, repository

REACH_SECONDS = 2.0
# with it Ray uses 127.0.0.1 for a cluster of one machine
LOOPBACK_VARIABLES = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
TIMEOUT_VARIABLES = {
    "RAY_health_check_timeout_ms": "60000",
    "RAY_worker_register_timeout_seconds": str(START_SECONDS),
}  # a busy machine
PRIORITY_VARIABLES = {
    "RAY_worker_niceness": "0"
}  # the rank's own priority, as torch's workers have; Ray would give its workers a lower one
QUIET_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# Options of a cluster that we start. Workers reserve no CPU, and Ray starts an idle process for each CPU: one
# is enough.
OWN_CLUSTER_OPTIONS = {"address": "local", "num_cpus": 1, "include_dashboard": False}


def connect(head_address: str) -> "Cluster":
    """Join the cluster at `head_address`.

    For "local", or if "auto" finds none, start one that ends with this process.
    """
    address = _users_address(head_address)
    if address is None:
        _prepare_own_cluster()
        # try twice: Ray's half a minute may be too short on a busy machine
        with contextlib.suppress(UserError):
            return Cluster(_init(OWN_CLUSTER_OPTIONS, ""), is_own=True)
        return Cluster(_init(OWN_CLUSTER_OPTIONS, "cannot start Ray on this machine: {reason}"), is_own=True)
    _require_token()
    if not is_reachable(address):
        raise UserError(
            f"no Ray cluster answers at {address}: set head_address or RAY_ADDRESS to the host:port of "
            "its head, or to 'local'"
        )
    if address.startswith(("127.", "localhost:")):
        os.environ.update(LOOPBACK_VARIABLES)  # else Ray would look for it at this machine's external address
    message = (
        f"cannot join the Ray cluster at {address}: {{reason}}; this machine has to be a node of it (ray "
        f"start --address {address}) and use the same token"
    )
    return Cluster(_init({"address": address}, message), is_own=False)


def _prepare_own_cluster():
    """Replace the RAY_ variables (loopback interface only, a new token); give workers our import path."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:  # settings of another cluster
        del os.environ[name]
    os.environ.update(
        {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            **LOOPBACK_VARIABLES,
            **TIMEOUT_VARIABLES,
            **PRIORITY_VARIABLES,
        }
    )
    os.environ["PYTHONPATH"] = os.pathsep.join([repository(), *filter(None, sys.path)])


def _init(options: dict[str, Any], message: str) -> str:
    """Call ray.init(**options) and return the cluster's address.

    `message`: the UserError's text, with {reason} in it.
    """
    os.environ.update(QUIET_VARIABLES)
    import ray

    if tuple(map(int, ray.__version__.split(".")[:2])) < (2, 52):
        raise UserError(f"Ray {ray.__version__} does not support tokens: pip install 'ray>=2.52'")
    try:
        ray.init(logging_level=logging.ERROR, configure_logging=False, **options)
    except Exception as error:
        ray.shutdown()
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise UserError(message.format(reason=reason)) from None
    return ray.get_runtime_context().gcs_address


def _users_address(head_address: Optional[str]) -> Optional[str]:
    """Return the address of the user's cluster.

    None: there is none, or none is wanted, so we start our own.
    """
    if head_address not in ("auto", "local", None):
        return head_address
    variable = os.environ.get("RAY_ADDRESS", "auto")
    if head_address == "auto" and variable != "auto":
        return None if variable == "local" else variable
    address_file = (
        Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
    )  # written by `ray start`
    if head_address == "auto" and address_file.exists() and is_reachable(address_file.read_text().strip()):
        return address_file.read_text().strip()
    return None


def _require_token():
    """Make Ray use a token unless RAY_AUTH_MODE is set otherwise: Ray runs any code it is sent.

    UserError without a token.
    """
    has_token = "RAY_AUTH_TOKEN" in os.environ or os.path.exists(
        os.path.expanduser(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token"))
    )
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token" and not has_token:
        raise UserError(
            "there is no token for the Ray cluster: run ray get-auth-token --generate and copy the file "
            "~/.ray/auth_token to every node (or set RAY_AUTH_TOKEN_PATH); for a cluster without a token "
            "set RAY_AUTH_MODE=disabled"
        )


def is_reachable(address: str) -> bool:
    """Return whether a server accepts connections at host:port within REACH_SECONDS."""
    try:
        host, port = address.rsplit(":", 1)
        socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def raylet_address(node: dict[str, Any]) -> str:
    """Return host:port of the raylet, Ray's daemon on a node. `node`: an entry of ray.nodes()."""
    return f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"


class Cluster:
    """The cluster that this process has joined. `is_own`: this process has started it."""

    def __init__(self, address: str, is_own: bool):
        import ray

        self.address = address
        self.is_own = is_own
        self.node_id = ray.get_runtime_context().get_node_id()  # of this machine

    def choose_nodes(self, count: int, avoid: str = "") -> list[str]:
        """Return node ids for `count` workers, in proportion to the nodes' CPUs.

        Node `avoid` is used if no other is left.
        """
        nodes = _reachable_nodes()
        while not nodes:  # not even this machine's, and _watch() ends this process if that stays so
            time.sleep(REACH_SECONDS)
            nodes = _reachable_nodes()
        cpus = {node["NodeID"]: node["Resources"].get("CPU", 0) for node in nodes}
        if any(cpus.values()):  # a node declared without CPUs, usually the head, gets no worker
            cpus = {node_id: num_cpus for node_id, num_cpus in cpus.items() if num_cpus}
        if len(cpus) > 1:
            cpus.pop(avoid, None)
        chosen: list[str] = []

        def load_with_one_more(node_id: str) -> float:
            return (chosen.count(node_id) + 1) / max(cpus[node_id], 0.5)

        for _ in range(count):
            chosen.append(min(sorted(cpus), key=load_with_one_more))
        return chosen

    def start_worker(self, node: str, packages: Iterable[str], is_replacement: bool = False) -> Any:
        """Start a Ray actor on the node.

        `packages`: source folders to upload unless the cluster is our own.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = {
            "num_cpus": 0,  # it is placed by choose_nodes(), whatever else uses the node's CPUs
            "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        if not self.is_own:  # its nodes may be machines without our files
            options["runtime_env"] = _upload(packages)
        return ray.remote(Actor).options(**options).remote(is_replacement)


def _reachable_nodes() -> list[dict[str, Any]]:
    """Return the entries of ray.nodes() whose raylet can be reached:
    Ray takes a while to notice that a node is lost."""
    import ray

    return [node for node in ray.nodes() if node["Alive"] and is_reachable(raylet_address(node))]


def _upload(packages: Iterable[str]) -> dict[str, Any]:
    """Upload source folders to the cluster; return the runtime_env of an actor that imports them.

    Ray does this itself only in ray.init(), for all actors alike, and here the folders are known later; so
    its private function is called (tried with 2.60). Newer ones want to be told whether files that .gitignore
    names are left out."""
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed

    options: dict[str, Any] = {}
    if "include_gitignore" in inspect.signature(upload_py_modules_if_needed).parameters:
        options["include_gitignore"] = True
    with tempfile.TemporaryDirectory() as folder:
        return upload_py_modules_if_needed({"py_modules": sorted(packages)}, scratch_dir=folder, **options)


class Actor:
    """The worker as a Ray actor.

    It imports torch only where it runs: the process that starts it does not need torch.
    """

    def __init__(self, is_replacement: bool):
        from datasets.dpex.worker import LoaderWorker

        self._worker = LoaderWorker(is_replacement)

    def fetch(self, request: tuple) -> Any:
        """Return LoaderWorker.fetch(*request).

        One argument costs less than several, and Ray leaves the reference in it.
        """
        import ray

        index, task, *arguments = request
        return self._worker.fetch(index, functools.partial(ray.get, task), *arguments)
