"""Nodes are lost and come back: how long does training stand still, which steps are done again, and do the bits stay the same?

    python -m tests.benchmarks.elastic [--events back cut first] [--forms ours torchrun ...] [--rounds 3] [--results FILE] [--figure FILE]

Four hosts (network namespaces, so this needs root), one worker each, and a device that takes 0.1 s for 8 images on each of them,
played by sleeping: four hosts share the cores of this machine. After the first and a half epoch of 12 a host is lost:

    back    the processes of the last host are killed; after 30 s the host is there again, and its program is started again
    cut     the cable of the last host is pulled out, for good
    first   as back, but it is the first host, where the others look for the rest

Beside `--min_nodes 2`: torchrun elastic as its documentation starts it, the same with the settings that serve it best here,
torchft alone, and a job of ours without --min_nodes, which is started again as soon as it has four hosts. A round of one form
takes 1 to 5 minutes.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.base import machine
from tests.benchmarks.elastic_peers import EPOCHS, NODES, SAMPLES, SHARE_SECONDS
from tests.chaos.victims import digest
from tests.tools.hosts import Hosts
from tests.tools.jobs import ROOT, final_state
from tests.tools.packages import namespaces

OPTIONS = ["--custom_data", "true", "--max_samples", SAMPLES, "--batch_size", 8, "--width", 4, "--epochs", EPOCHS, "--shares", 8,
           "--lr", 0.02, "--workers", 0, "--ledger", "true", "--augment", "false"]  # fmt: skip
EVENTS = ["back", "cut", "first"]
AWAY_SECONDS, LONGEST = 30, 300
LOST_AT = SAMPLES * 3 // 2  # images
LIGHTHOUSE, HOW_IT_WAITS = "10.77.0.1:29510", ["--min_replicas", 2, "--quorum_tick_ms", 100, "--join_timeout_ms", 10000]
FORMS = {
    "ours": "ours, --min_nodes 2",
    "torchrun": "torchrun elastic, c10d",
    "torchrun_tuned": "torchrun elastic, tuned",
    "torchft": "torchft alone",
    "restart": "ours, started again",
}


class Game:
    def __init__(self, form, folder):
        self.form, self.folder = form, folder
        self.hosts = Hosts(NODES, folder, called=[f"host{node}" for node in range(NODES)])
        self.shared = folder / "shared"
        self.shared.mkdir()
        if form in ("ours", "restart"):
            self.root = slow_jobs(folder)
        self.running = [self.start(node) for node in range(NODES)]

    def start(self, node):
        address, env = f"10.77.0.{node + 1}", {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        peers = ROOT / "tests" / "benchmarks" / "elastic_peers.py"
        if self.form in ("ours", "restart"):
            more = ["--min_nodes", 2] if self.form == "ours" else ["--join_seconds", 120]
            return self.hosts.start(node, NODES, *OPTIONS, *more, job="train_ddp_exact", root=self.root)
        if self.form == "torchft":
            env["RUST_LOG"] = "error"
            if node == 0:
                lighthouse = Path(sys.executable).parent / "torchft_lighthouse"
                self.hosts.run(0, lighthouse, "--bind", LIGHTHOUSE, *HOW_IT_WAITS, env=env)
            how = ["torchft", self.shared, node, address, f"http://{LIGHTHOUSE}"]
            return self.hosts.run(node, sys.executable, peers, *how, env=env)
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"2:{NODES}", "--nproc_per_node", 1, "--max-restarts", 10,
                 "--rdzv-backend", "c10d", "--rdzv-id", "elastic", "--rdzv-endpoint", "10.77.0.1:29400", "--local-addr", address]  # fmt: skip
        waits = ""
        if self.form == "torchrun_tuned":  # else it waits 30 s for more nodes, and one that comes later is never told the port
            waits, env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = ",last_call_timeout=1", "1"
        words += ["--rdzv-conf", f"is_host={int(node == 0)}{waits}"]  # these hosts have no names by which it would know that
        return self.hosts.run(node, *words, peers, "torchrun", self.shared, env=env)

    def steps(self):
        """[(second, images that the network has seen)] of every step, in their order."""
        if self.form not in ("ours", "restart"):
            path = self.shared / "steps"
            return sorted((line["t"], line["images"]) for line in lines(path)) if path.exists() else []
        found = [line for path in self.folder.glob("host*/out/ledger/rank_*.jsonl") for line in lines(path) if "step" in line]
        return sorted((line["t"], line["step"][0] * SAMPLES + line["step"][1] + 64) for line in found)

    def bits(self):
        if self.form in ("ours", "restart"):
            newest = max(self.folder.glob("host*/out/checkpoints/*.json"), key=lambda path: path.name).parents[2]
            return digest(final_state(newest))
        return (self.shared / "bits").read_text()

    def wait(self, condition, seconds=LONGEST):
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        return condition()

    def has_come_to(self, images):
        steps = self.steps()
        return bool(steps) and steps[-1][1] >= images

    def over(self):
        return self.has_come_to(SAMPLES * EPOCHS) and any(process.poll() == 0 for process in self.running)

    def hopeless(self):
        return all(process.poll() is not None for process in self.running)

    def lose(self, event):
        node = 0 if event == "first" else NODES - 1
        if event == "cut":
            self.hosts.cut(node)
        else:
            self.hosts.kill(node)
        return node

    def play(self, event):
        """{the second of the loss, that of the return, all steps}"""
        assert self.wait(lambda: self.has_come_to(LOST_AT)), "did not begin: " + self.hosts.log(0)[-2000:]
        lost, back = time.time(), None
        if event:
            node = self.lose(event)
            deadline = time.monotonic() + AWAY_SECONDS
            self.wait(lambda: time.monotonic() > deadline or self.over(), AWAY_SECONDS + 5)
            if event != "cut":
                back = time.time()
                if self.form == "restart":
                    self.wait(self.hopeless, 60)
                    self.running = [self.start(node) for node in range(NODES)]
                else:
                    self.running[node] = self.start(node)
            elif self.form == "restart":
                self.hosts.plug(node)  # or rather another host in its place
                self.wait(self.hopeless, 60)
                self.running = [self.start(node) for node in range(NODES)]
        self.wait(lambda: self.over() or (event and self.hopeless()))
        return {
            "lost": lost,
            "back": back,
            "steps": self.steps(),
            "ended": self.over(),
            "bits": self.bits() if self.over() else "",
        }


def slow_jobs(folder):
    """jobs/train_ddp_exact.py, with the device that computes a share for so long."""
    text, backward = (ROOT / "jobs" / "train_ddp_exact.py").read_text(), "            loss.backward()\n"
    assert text.count(backward) == 1
    (folder / "root" / "jobs").mkdir(parents=True)
    (folder / "root" / "jobs" / "train_ddp_exact.py").write_text(
        text.replace(backward, f"{backward}            __import__('time').sleep({SHARE_SECONDS})\n")
    )
    for name in ("common", "datasets"):
        (folder / "root" / name).symlink_to(ROOT / name)
    return folder / "root"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def gaps(row):
    """(seconds, steps that were done again) of the longest time without a step after the loss, and after the return."""
    steps = row["steps"]
    if row["form"] == "ours":  # who takes over the ledger writes its last line once more
        steps = [step for step, before in zip(steps, [(0, 0), *steps]) if step[1] != before[1]]

    def longest(begin, end):
        pairs = [pair for pair in zip(steps, steps[1:]) if begin <= pair[0][0] < end]
        (earlier, before), (later, after) = max(pairs, key=lambda pair: pair[1][0] - pair[0][0])
        return later - earlier, max(0, (before - after) // 64 + 1)

    if not row["ended"]:
        return None, None
    return longest(row["lost"] - 1, row["back"] or math.inf), longest(row["back"], math.inf) if row["back"] else None


def measured(form, event):
    with tempfile.TemporaryDirectory() as folder:
        game = Game(form, Path(folder))
        try:
            return {"form": form, "event": event, **game.play(event)}
        finally:
            game.hosts.close()


def table(rows):
    bits = {row["form"]: row["bits"] for row in rows if not row["event"]}
    yield "| lost | form | stands still after the loss, s | after the return, s | steps done again | the undisturbed run's bits |"
    yield "|---|---|---|---|---|---|"
    for event in EVENTS:
        for form, name in FORMS.items():
            some = [row for row in rows if (row["form"], row["event"]) == (form, event)]
            if not some:
                continue
            found = [gaps(row) for row in some]
            cells = [spread([pair[place][0] for pair in found if pair[place]]) for place in (0, 1)]
            again = [sum(part[1] for part in pair if part) for pair in found if pair[0]]
            if gone := found.count((None, None)):
                cells[0] = f"{cells[0]} never went on, {gone} of {len(some)}".strip()
            same = sum(row["bits"] == bits[form] for row in some)
            shown = " to ".join(map(str, sorted({min(again), max(again)}))) if again else ""
            yield f"| {event} | {name} | {cells[0]} | {cells[1]} | {shown} | {same} of {len(some)} |"


def spread(numbers):
    if len(numbers) < 2:
        return "".join(f"{number:.1f}" for number in numbers)
    return f"{statistics.median(numbers):.1f} ({min(numbers):.1f} to {max(numbers):.1f})"


def draw(rows, path):
    """Images over time of a run that loses a host and gets it back: ours above, torchrun's below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = {row["form"]: row for row in reversed(rows) if row["event"] == "back"}
    figure, both = pyplot.subplots(2, 1, figsize=(7, 4.2), sharex=True, sharey=True)
    for axes, forms in zip(both, (["ours"], ["torchrun", "torchrun_tuned"])):
        for form, colour in zip(forms, ("#3b7dd8" if forms == ["ours"] else "#444444", "#aaaaaa")):
            begun = first[form]["lost"]
            times, images = zip(*((when - begun, seen / 1000) for when, seen in first[form]["steps"]))
            axes.plot(times, images, color=colour, linewidth=1.6, label=FORMS[form])
        axes.axvspan(0, AWAY_SECONDS, color="#f3d9d9", label="one host of four is away")
        axes.set_ylabel("thousand images", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=7, loc="lower right", frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    both[1].set_xlabel("seconds since the loss", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", nargs="+", choices=EVENTS, default=EVENTS)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "anyrank-elastic-bench.jsonl")
    parser.add_argument("--figure", type=Path, help="a .png or .svg of images over time")
    options = parser.parse_args()
    namespaces()
    os.environ.pop("OMP_NUM_THREADS", None)
    rows = lines(options.results) if options.results.exists() else []
    for number in range(options.rounds):
        for form in options.forms:
            for event in ["", *options.events]:
                if sum(row["form"] == form and row["event"] == event for row in rows) <= (0 if not event else number):
                    rows.append(measured(form, event))
                    with options.results.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
                    print({name: value for name, value in rows[-1].items() if name != "steps"}, flush=True)
    print(f"\n{machine()}; median (range)\n", *table(rows), sep="\n")
    if options.figure:
        draw(rows, options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
