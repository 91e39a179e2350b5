"""How long thousands of nodes take to meet, and what they cost node 0 afterwards.

    python -m tests.benchmarks.meeting [--nodes 64 256 1024 4096] [--seconds 10]

Node 0 is the real parent of a job's workers, with a worker that does nothing. One other process plays all the other nodes over
loopback: it has their sockets and says what they would say. So the seconds are those of two cores that do the work of thousands.
"""

import argparse
import json
import multiprocessing
import os
import resource
import selectors
import socket
import sys
import time

from common.alive.judge import summarize
from common.alive.parent import Parent
from common.alive.supervisor import Supervisor
from common.alive.wire import channel, hub, secret
from common.world import World
from tests.benchmarks.base import machine

KEY = b"a secret of this benchmark"
STATUS = {"rank": 1, "phase": "step", "steps": 7, "idle": 0.1, "median": 0.1, "waits": "", "waiting": False}


class Idle:
    """A worker that trains for ever."""

    code, reported, progress = None, False, ("step", 7)

    def look(self):
        pass

    def was_stopped(self):
        return False

    def fault(self, _home):
        return None

    def status(self):
        return STATUS


class Node:
    """One of the others: answers the challenge, says hello, then its status with every beat of its own."""

    def __init__(self, number, port, hello):
        self.number, self.hello, self.state = number, hello, "new"
        self.connection = channel.Connection(socket.create_connection(("127.0.0.1", port)))

    def hear(self):
        for message in self.connection.receive():
            if self.state == "new":
                mine = secret.nonce()
                self.connection.send(nonce=mine, proof=secret.proof(KEY, "node", message["nonce"], mine))
                self.state = "proved"
            elif self.state == "proved":
                self.connection.send(**self.hello, node=self.number, clock=time.time())
                self.state = "waiting"
            elif "refused" in message:
                raise RuntimeError(message["refused"])


def play(port, count, hello, beats):
    """The nodes 1 to count - 1, until node 0 closes the connections."""
    _allow(2 * count)
    selector, nodes = selectors.DefaultSelector(), []
    words, told = json.dumps({"status": summarize([STATUS])}).encode() + b"\n", time.monotonic()
    try:
        while True:
            for _ in range(64 if len(nodes) < count - 1 else 0):
                if len(nodes) < count - 1:
                    nodes.append(Node(len(nodes) + 1, port, hello))
                    selector.register(nodes[-1].connection, selectors.EVENT_READ, nodes[-1])
            for key, _ in selector.select(0.01 if len(nodes) < count - 1 else 0.2):
                key.data.hear()
            if time.monotonic() - told > beats:
                told = time.monotonic()
                for node in nodes:
                    if node.state == "waiting":
                        node.connection.socket.send(words)
    except channel.ConnectionLost:
        os._exit(0)


def _allow(files):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, files + 200), hard))


def measured(count, seconds):
    """(seconds until all have met, the share of a core that node 0 then takes)"""
    port = 29600 + count % 97
    here = World("plain", "", "node", 0, count, 0, 1, 0, count, "127.0.0.1", port)
    os.environ[secret.VARIABLE] = KEY.decode()
    supervisor = Supervisor(here, 0, 60.0, {})
    loop = supervisor.loop
    hello = {name: value for name, value in supervisor.hello.items() if name != "node"}
    loop.hub = hub.Hub(hub.listen(port), supervisor.hello, print, KEY)
    players = multiprocessing.get_context("fork").Process(target=play, args=(port, count, hello, loop.beat_seconds))
    begun = time.perf_counter()
    players.start()
    loop.hub.meet(60)
    met = time.perf_counter() - begun
    loop.workers = [Idle()]
    end, used, began = time.monotonic() + seconds, time.process_time(), time.perf_counter()

    def until_the_end():
        if time.monotonic() > end:
            raise TimeoutError
        return messages()

    messages, loop.messages = loop.messages, until_the_end
    try:
        loop.run(Parent(supervisor))
        raise RuntimeError(f"the job has ended: {loop.verdict}")
    except TimeoutError:
        share = (time.process_time() - used) / (time.perf_counter() - began)
    loop.hub.close()
    players.join()
    return met, share


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    print(f"{machine()}\n\n| nodes | meet within, s | then node 0 takes, cores |\n|---|---|---|")
    for count in options.nodes:
        met, share = measured(count, options.seconds)
        print(f"| {count:,} | {met:.2f} | {share:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
