"""A Ray cluster of several "hosts" as a user would have it: with a token, and raylets that cannot see the repository.

    cluster = RayHosts(folder, 2)      a head and two more; .address, .token, .raylets (process ids), .kill("head")

They are the raylets of Ray's own test utility, in a process of its own: Ray learns only once, when it is imported, that a token
is wanted.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

from tests.tools.jobs import PATIENCE, ROOT, environment


class RayHosts:
    def __init__(self, folder, nodes, store=0, head_cpus=1):
        self.headless = False
        self.token = folder / "token"
        self.token.write_text(secrets.token_hex(32))
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}
        more = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT)!r}); from {__name__} import main; main(*map(int, sys.argv[1:]))", str(nodes), str(store), str(head_cpus)], cwd=folder, env=environment(**self.variables, **more),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._learn()

    def _learn(self):
        for line in self._process.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                self.address, self.head, self.raylets = found["address"], found["head"], found["raylets"]
                return
        raise RuntimeError("the cluster did not start")

    def add(self):
        """One more host."""
        self._process.stdin.write("add\n")
        self._process.stdin.flush()
        self._learn()

    def kill(self, number):
        """All of the host of a raylet: its workers end with it."""
        os.kill(self.raylets[number], signal.SIGKILL)

    def kill_head(self):
        self.headless = True
        for process in self.head:
            os.kill(process, signal.SIGKILL)

    def workers(self):
        """{process id: its raylet} of the loader's workers."""
        known = {*self.raylets, *self.head}
        return {pid: parent for pid, parent, words in processes() if parent in known and words.startswith("ray::Actor")}

    def close(self):
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()


def processes():
    """(process id, that of its parent, its command line) of all there are."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            yield int(place.name), parent, (place / "cmdline").read_text(errors="replace").replace("\0", " ")


def main(nodes, store, head_cpus):
    import ray
    from ray.cluster_utils import Cluster

    how = {"num_cpus": 1, **({"object_store_memory": store} if store else {})}
    cluster = Cluster(initialize_head=True, head_node_args={**how, "num_cpus": head_cpus, "include_dashboard": False})
    hosts = [cluster.add_node(**how) for _ in range(nodes)]
    said = dict.fromkeys(["address"], cluster.address)

    def say():
        kinds = ray._private.ray_constants
        head = [
            cluster.head_node.all_processes[kind][0].process.pid
            for kind in (kinds.PROCESS_TYPE_GCS_SERVER, kinds.PROCESS_TYPE_RAYLET)
        ]
        raylets = [host.all_processes[kinds.PROCESS_TYPE_RAYLET][0].process.pid for host in hosts]
        print(json.dumps({**said, "head": head, "raylets": raylets}), flush=True)

    say()
    for _ in sys.stdin:
        hosts.append(cluster.add_node(**how))
        say()
    cluster.shutdown()
