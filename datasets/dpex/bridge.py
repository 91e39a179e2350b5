"""The bridge: a process next to each training process that talks to Ray for it and passes the batches on.

Ray ends every process that uses it: at once where the Ray node of this machine is lost, after a minute where the head is. Only
the bridge uses Ray, so the training process survives. Ray's threads, signal handlers and environment variables stay out of it,
too. Each iterator of the training process has a connection to the bridge.
"""

import os
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Listener

from datasets.dpex.cluster import Cluster, connect, raylet, reachable
from datasets.dpex.near import Near
from datasets.dpex.pool import Pool

PROBE_SECONDS, PROBES = 1.0, 3  # the head is lost when that many probes in a row failed


def main(head_address: str, leader: str) -> None:
    """Prints on stdout where it listens, or what is wrong; runs until its stdin is closed."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # from here on stdout has what the workers print
    joined, left = threading.Event(), threading.Event()
    threading.Thread(target=_wait_for_the_end, args=(joined, left), daemon=True).start()
    try:
        cluster = connect(head_address, int(leader))
    except Exception as error:
        print("error", error, file=answer, flush=True)
        os._exit(2)
    with tempfile.TemporaryDirectory(prefix="anyrank-bridge-") as folder, Listener(os.path.join(folder, "socket")) as listener:
        threading.Thread(target=_serve, args=(listener, cluster, folder), daemon=True).start()
        threading.Thread(target=_watch, args=(cluster,), daemon=True).start()
        print("ready", listener.address, cluster.address, file=answer, flush=True)
        answer.close()
        joined.set()
        left.wait()
    import ray

    ray.shutdown()
    sys.stdout.flush()
    os._exit(0)  # iterators may still listen, at sockets that were removed with the folder


def _wait_for_the_end(joined, left):
    sys.stdin.readline()  # a line, or the end of the training process: its other children may hold our stdin open
    if not joined.is_set():
        os._exit(0)  # the training process no longer needs the cluster
    left.set()


def _serve(listener, cluster, folder):
    while True:
        connection = listener.accept()
        threading.Thread(target=Pool(connection, cluster, Near(folder)).serve, daemon=True).start()


def _watch(cluster: Cluster) -> None:
    """End this process soon after the head or this machine's node is lost; Ray would do it a minute later."""
    import ray

    addresses = [cluster.address, *(raylet(node) for node in ray.nodes() if node["NodeID"] == cluster.node)]
    failed = 0
    while failed < PROBES:
        time.sleep(PROBE_SECONDS)
        failed = 0 if all(reachable(address) for address in addresses) else failed + 1
    os._exit(1)  # the training process sees its connections close
