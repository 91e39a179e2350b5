"""Nodes of a run are lost and come back, at random; it has to end with the bits of the run that nobody touched.

    python -m tests.chaos.elastic [--runs 200] [--seed 1] [--results FILE] [--plan "killed 1@3 returns 1@9"]     (make chaos FAULT=elastic)

Two to four hosts as network namespaces, so this needs root. Each run has one to four events: a worker killed or stopped, a host
killed, cut off, or cut off and back, two hosts killed at once, a host that comes back as a platform would start it again. All
leave enough nodes for the others to go on. Every fourth run publishes to a bucket. Looked at are the bits in the end, the
ledger, who is named in the log, and the pauses.
"""

import argparse
import collections
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.victims import digest
from tests.check_ledger import complaints, steps_that_count
from tests.tools.hosts import OUTSIDE, Hosts
from tests.tools.jobs import final_state, run_job
from tests.tools.objectstore import ObjectStore
from tests.tools.packages import namespaces
from tests.tools.ranks import workers_of

SHARES, SAMPLES, EPOCHS = 8, 320, 40
OPTIONS = ["--custom_data", "true", "--max_samples", str(SAMPLES), "--batch_size", "8", "--width", "4", "--epochs", str(EPOCHS),
           "--shares", str(SHARES), "--lr", "0.02"]  # fmt: skip
ELASTIC = [*OPTIONS, "--ledger", "true"]
TIMEOUT = 240


class Play:
    """A run on some hosts, and what happens to them."""

    def __init__(self, folder, nodes, workers, draw, publishes):
        self.nodes, self.workers, self.draw = nodes, workers, draw
        self.hosts = Hosts(nodes, folder, outside=publishes, forked=True)
        self.store = ObjectStore(folder / "store", OUTSIDE) if publishes else None
        self.output = "out"  # of each host
        if publishes:
            self.output = "output_dir/s3/bucket/run"
            create_bucket(self.store.client())
        self.running = {node: self.start(node) for node in range(nodes)}
        self.down = set()  # nodes that have been lost and not come back
        self.coming = {}  # node that was started again: how often it had joined before
        self.hurt = collections.defaultdict(dict)  # node: {worker of it that was lost: the signal}
        self.culprits = []  # patterns that the log has to have
        self.back = {}  # node: when its cable is plugged in again

    def start(self, node):
        more = ["--nproc_per_node", self.workers, "--min_nodes", 1, "--workers", self.workers - 1]
        how = {"output": "s3://bucket/run", "env": self.store.environment} if self.store else {"output": self.output}
        return self.hosts.start(node, self.nodes, *ELASTIC, *more, job="train_ddp_exact", **how)

    def close(self):
        self.hosts.close()
        if self.store:
            self.store.stop()

    def logs(self):
        return "\n".join(self.hosts.log(node) for node in range(self.nodes) if (self.hosts.folders[node] / "log").exists())

    def steps(self):
        return len(re.findall(r"^\S+ epoch=\d+/\d+ ", self.logs(), re.MULTILINE))

    def pauses(self):
        return len(re.findall("went on with step", self.logs()))

    def joined(self, node):
        return len(re.findall(rf"node {node} \([^)]*\) has joined", self.logs()))

    def alive(self):
        """The nodes that have the run's state: what comes back counts when it has got that."""
        self.coming = {node: joined for node, joined in self.coming.items() if self.joined(node) == joined}
        return sorted(set(self.running) - self.down - set(self.coming))

    def over(self):
        codes = [process.poll() for process in self.running.values()]
        return 0 in codes or None not in codes

    def ended(self):
        """All but those that are cut off, which may take long to notice."""
        return all(process.poll() is not None for node, process in self.running.items() if node not in self.back)

    # --- Events: each makes it happen, and says who the log has to name ---

    def killed(self, node, number=signal.SIGKILL, how="was killed by SIGKILL"):
        rank = node * self.workers + self.draw.randrange(self.workers)
        ours = workers_of(self.hosts.pids(node))
        if rank in ours and self.hurt[node].get(rank) != signal.SIGKILL:
            if rank in self.hurt[node]:
                self.forget_what_was_not_noticed(node)
            os.kill(ours[rank], number)
            self.hurt[node][rank] = number
            if len(self.hurt[node]) == self.workers:
                self.down.add(node)
            self.culprits.append(rf"rank {rank} \(node {node}, .*{how}")

    def stopped(self, node):
        self.killed(node, signal.SIGSTOP, "is stopped")

    def lost(self, node):
        self.forget_what_was_not_noticed(node)
        self.hosts.kill(node)
        self.down.add(node)
        self.culprits.append(rf"node {node} \(ranks? [-\d]+\) is lost")

    def cut(self, node):
        self.forget_what_was_not_noticed(node)
        self.hosts.cut(node)
        self.back[node] = None
        self.down.add(node)
        self.culprits.append(rf"node {node} \(ranks? [-\d]+\) (has been silent|did not come)")

    def frozen(self, node):
        """The whole machine stands still, its parent too; to others as if it were cut off. With --plan."""
        self.forget_what_was_not_noticed(node)
        for pid in self.hosts.pids(node):
            os.kill(pid, signal.SIGSTOP)
        self.back[node] = None
        self.down.add(node)
        self.culprits.append(rf"node {node} \(ranks? [-\d]+\) (has been silent|did not come)")

    def forget_what_was_not_noticed(self, node):
        """A worker that has just been stopped is lost in another way before anybody could see it."""
        log = self.logs()
        self.culprits = [one for one in self.culprits if f"(node {node}," not in one.replace("\\", "") or re.search(one, log)]

    def away(self, node):
        """Cut off, and back before its process has noticed, or after."""
        self.cut(node)
        self.back[node] = time.monotonic() + self.draw.uniform(6, 9)

    def returns(self, node):
        self.coming[node] = self.joined(node)
        self.running[node] = self.start(node)
        self.down.discard(node)
        self.hurt[node] = {}
        self.culprits.append(rf"node {node} \(ranks? [-\d]+\) has joined")

    def possible(self):
        """The events after which enough nodes are left, with the nodes they may happen to."""
        alive = self.alive()
        away = [node for node in sorted(self.down - set(self.back)) if self.running[node].poll() is not None]
        found = 0 in (*alive, *self.coming, *away)  # node 0 comes first: the others look for it
        events = [("returns", node) for node in away[:1] if found] * 2
        if len(alive) >= 2:
            events += [(name, node) for name in ("killed", "stopped", "lost") for node in alive]
        if len(alive) >= 3:
            events += [(name, node) for name in ("cut", "away") for node in alive] + [("two", node) for node in alive]
        return events

    def do(self, name, node):
        if name == "two":
            other = self.draw.choice([other for other in self.alive() if other != node])
            self.lost(node)
            self.lost(other)
        else:
            getattr(self, name)(node)

    def look_after(self):
        for node, when in list(self.back.items()):
            if when and time.monotonic() > when:
                self.hosts.plug(node)
                del self.back[node]

    def wait(self, condition, seconds):
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self.look_after()
            time.sleep(0.02)
        return condition()


def create_bucket(client):
    """The store refuses requests while the machine is busy."""
    for attempt in range(20):
        try:
            return client.create_bucket(Bucket="bucket")
        except client.exceptions.ClientError:
            if attempt == 19:
                raise
            time.sleep(1)


def play(folder, draw, publishes, plan=None, nodes=None):
    """{same, named, pauses, events, ...} of one run."""
    nodes, workers = nodes or draw.choice([2, 3, 3, 4]), draw.choice([1, 1, 2])
    game = Play(folder, nodes, workers, draw, publishes)
    events = []
    try:
        if not game.wait(lambda: game.steps() >= 3 or game.over(), TIMEOUT):
            return {"events": events, "wrong": "did not begin"}
        begun = time.monotonic()
        for number in range(len(plan) if plan else draw.randint(1, 4)):
            if plan:
                name, node, when = plan[number]
                game.wait(lambda moment=begun + when: time.monotonic() > moment, 120)
            else:
                game.wait(game.over, draw.choice([0.0, 0.3, 2.0, 4.0]) * draw.uniform(0.5, 1.5))
                possible = game.possible()
                if not possible:
                    break
                name, node = draw.choice(possible)
            if game.over():
                break
            events.append(f"{name} {node} after {game.steps()} lines")
            before = game.pauses()
            game.do(name, node)
            if name in ("cut", "away"):  # one more lost before the others know, and no half is left
                game.wait(lambda: game.pauses() > before or game.over(), 30)  # noqa: B023
        ended = game.wait(lambda: game.over() and game.ended(), TIMEOUT)
        return {"nodes": nodes, "workers": workers, "publishes": publishes, "events": events, **judge(game, ended)}
    finally:
        game.close()


def judge(game, ended):
    log = game.logs()
    pauses = [float(seconds) for seconds in re.findall(r"went on with step \d+ after ([\d.]+) s", log)]
    unnamed = [pattern for pattern in game.culprits if not re.search(pattern, log)]
    if not ended:
        return {"wrong": "did not end", "pauses": pauses, "unnamed": unnamed, "log": log}
    outputs = [host / game.output for host in game.hosts.folders]
    newest = max((path for output in outputs for path in output.glob("checkpoints/*.json")), key=place)
    bits = digest(final_state(newest.parents[1], "."))
    wrong = list(complaints(steps_that_count(outputs), SAMPLES, 8 * SHARES))[:3]
    if game.store:
        client = game.store.client()
        listed = client.list_objects_v2(Bucket="bucket", Prefix="run/checkpoints/")["Contents"]
        there = max((Path(one["Key"]) for one in listed if one["Key"].endswith(".json")), key=place)
        for path in (newest, newest.with_suffix(".pt")):
            key = there.with_suffix(path.suffix).as_posix()
            if client.get_object(Bucket="bucket", Key=key)["Body"].read() != path.read_bytes():
                wrong.append(f"{key} in the bucket is not {path.name} on the disk")
    phases = sorted(phase for _, phase in set(re.findall(r"(rank \d+) \([^)]*\).* in phase (\w+)", log)))
    return {"bits": bits, "wrong": wrong or None, "pauses": pauses, "phases": phases, "unnamed": unnamed, "log": log}


def place(manifest):
    """How far the run was, and which start of it that was: N.json, or N-START.json in a bucket after another one took over."""
    samples, _, start = manifest.stem.partition("-")
    return int(samples), int(start or 1)


def undisturbed():
    with tempfile.TemporaryDirectory() as folder:
        run_job("train_exact", Path(folder), *OPTIONS)
        return digest(final_state(Path(folder)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "anyrank-elastic.jsonl")
    parser.add_argument(
        "--plan", help='events to play instead, such as "lost 0@3 returns 0@9", in seconds after the first steps'
    )
    parser.add_argument("--nodes", type=int, help="with --plan")
    parser.add_argument("--logs", type=Path, help="a folder for the logs of runs with a fault")
    options = parser.parse_args()
    namespaces()
    words = (options.plan or "").split()
    plan = [(name, int(at.split("@")[0]), float(at.split("@")[1])) for name, at in zip(words[::2], words[1::2])]
    rows = (
        [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() and not plan else []
    )
    kept = options.results.with_suffix(".bits")
    if not kept.exists():
        kept.write_text(undisturbed())
    expected = kept.read_text()
    for number in sorted(set(range(options.runs)) - {row["run"] - 1 for row in rows}):
        with tempfile.TemporaryDirectory() as folder:
            publishes = number % 4 == 3
            row = play(Path(folder), random.Random(f"{options.seed}-{number}"), publishes, plan, options.nodes)
        row = {"same": row.pop("bits", "") == expected, "run": number + 1, **row}
        log = row.pop("log", "")
        bad = row.get("wrong") or not row["same"] or row.get("unnamed")
        if bad and options.logs:
            options.logs.mkdir(exist_ok=True)
            (options.logs / f"{options.seed}-{number}.log").write_text(log)
        rows.append(row)
        if not plan:
            with options.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    pauses = [pause for row in rows for pause in row.get("pauses", ())]
    good = [row for row in rows if row["same"] and not row.get("wrong")]
    print(
        f"\n{len(good)} of {len(rows)} the same, {sum(not row.get('unnamed') for row in rows)} with the right names; ", end=""
    )
    print(
        f"pauses: median {statistics.median(pauses):.1f} s, at most {max(pauses):.1f} s, {len(pauses)} of them"
        if pauses
        else ""
    )
    return 0 if len(good) == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
