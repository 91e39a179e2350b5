"""The bridge: a process that uses Ray for one training process and passes the batches on.

Ray (2.60) ends the process that uses it: a minute after the head is lost or, if the Ray node of this machine
is lost, as soon as this node is needed. Only the bridge uses Ray, so the training process goes on. Ray's
threads, signal handlers and environment variables stay out of the training process, too. Each iterator of the
training process has its own connection.
"""

import os
import socket
import sys
import tempfile
import threading
import time

from datasets.dpex.cluster import Cluster, connect, is_reachable, raylet_address
from datasets.dpex.pool import Pool

PROBE_SECONDS = 1.0
PROBES = 3  # the cluster is lost after so many failed probes in a row


def main(head_address: str) -> None:
    """Print where the bridge listens, or an error, on stdout.

    Run until stdin has a line or ends, or the cluster is lost.
    """
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray's workers print goes to stderr
    joined = threading.Event()
    stop_requested = threading.Event()
    threading.Thread(target=_wait_for_stop, args=(joined, stop_requested), daemon=True).start()
    try:
        cluster = connect(head_address)
    except Exception as error:
        print("error", error, file=stdout, flush=True)
        os._exit(2)
    with (
        tempfile.TemporaryDirectory(prefix="anyrank-bridge-") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(os.path.join(folder, "socket"))
        listener.listen()
        threading.Thread(target=_serve, args=(listener, cluster), daemon=True).start()
        threading.Thread(target=_watch, args=(cluster,), daemon=True).start()
        print("ready", listener.getsockname(), cluster.address, file=stdout, flush=True)
        stdout.close()
        joined.set()
        stop_requested.wait()
    import ray

    ray.shutdown()
    sys.stdout.flush()
    os._exit(0)  # threads may still serve iterators


def _wait_for_stop(joined: threading.Event, stop_requested: threading.Event) -> None:
    """Wait for a line or the end of stdin, and report it in `stop_requested`; before the cluster is joined,
    end the process."""
    sys.stdin.readline()  # a line, as other children of the training process may hold stdin open; or EOF
    if not joined.is_set():
        os._exit(0)  # the training process no longer needs the cluster
    stop_requested.set()


def _serve(listener: socket.socket, cluster: Cluster) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=Pool(connection, cluster).serve, daemon=True).start()


def _watch(cluster: Cluster) -> None:
    """End this process within seconds after the head or this machine's node is lost;
    Ray would do so a minute later."""
    import ray

    addresses = [
        cluster.address,
        *(raylet_address(node) for node in ray.nodes() if node["NodeID"] == cluster.node_id),
    ]
    failures = 0
    while failures < PROBES:
        time.sleep(PROBE_SECONDS)
        failures = 0 if all(is_reachable(address) for address in addresses) else failures + 1
    os._exit(1)  # the training process sees its connections close
