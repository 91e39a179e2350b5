"""A job of two nodes trains while strangers send whatever they like to the port of node 0.

    python -m tests.chaos.strangers [--messages 100000] [--connections 10000] [--rounds 1] [--epochs 400]     (make chaos FAULT=strangers)

The job is started with a secret and without one, beside the same job that nobody disturbs, in turn. It has one core, the strangers
have another one at the lowest priority. Shown are what was sent, how the job ended, whether it ended with the bits of the undisturbed
one, the memory of node 0's parent before and after, and the ratio of the speeds.
"""

import argparse
import contextlib
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from common.alive.wire import secret
from tests.benchmarks.base import machine
from tests.chaos.victims import digest
from tests.tools.jobs import ROOT, TINY, environment, final_state
from tests.tools.objectstore import free_port

OPTIONS = [*TINY[:4], "--batch_size", "8", *TINY[6:-1]]  # and the number of epochs
SECRET = "a secret of this program"


def nodes(folder, port, key, epochs):
    """Both nodes of the job, on the first core."""
    words = [
        "taskset",
        "-c",
        "0",
        sys.executable,
        str(ROOT / "jobs" / "train_ddp.py"),
        *OPTIONS,
        str(epochs),
        "--save_steps",
        "100000",
        "--output_dir",
        str(folder / "out"),
    ]
    words += ["--init_method", f"tcp://127.0.0.1:{port}", "--world_size", "2", "--rank"]
    env = environment(**({"ANYRANK_SECRET": key} if key else {}))
    logs = [open(folder / f"log{node}", "w") for node in range(2)]  # noqa: SIM115 (the processes own them)
    return [subprocess.Popen([*words, str(n)], cwd=folder, env=env, stdout=log, stderr=log) for n, log in enumerate(logs)]


def junk(draw):
    """A message of a stranger: noise, half of ours, ours with senseless values, or endless."""
    numbers = [draw.choice([-1, 0, 1, 2**63, 10**400, 1.5, True, None, "1"]) for _ in range(3)]
    hello = {
        "app": "anyrank",
        "job": draw.choice(["", "x" * 3000]),
        "node": numbers[0],
        "nodes": numbers[1],
        "clock": numbers[2],
    }
    ours = [
        hello,
        {"nonce": "1" * 32, "proof": "2" * 64},
        {"beat": True},
        {"go": {"port": -1}},
        {"status": []},
        {"stop": 15},
        {"end": True},
    ]
    words = json.dumps(draw.choice(ours)).encode() + b"\n"
    return draw.choice([words, words[: len(words) // 2], draw.randbytes(draw.randrange(1, 2000)), b"[" * 5000, b"\n"])


def prove(connection):
    """As a node without a secret does it: where there is none, what follows is read as a node's."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        theirs, mine = json.loads(connection.recv(4096))["nonce"], secret.nonce()
        proof = secret.proof(b"", "node", theirs, mine)
        connection.sendall(json.dumps({"nonce": mine, "proof": proof}).encode() + b"\n")
        connection.recv(4096)


def disturb(port, connections, messages, seed):
    """All of them, one connection after another; a tenth stays open and silent. Ends with the job."""
    draw, silent, sent = random.Random(seed), [], [0, 0]
    while sent[0] < connections:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=1)
        except ConnectionRefusedError:
            break
        except OSError:
            continue
        sent[0] += 1
        if sent[0] % 10 == 0:
            silent = [*silent[-500:], connection]
            continue
        if sent[0] % 7 == 0:
            prove(connection)
        with contextlib.suppress(OSError):
            for _ in range(messages // connections * 10 // 9 + 1):
                connection.sendall(junk(draw))
                sent[1] += 1
        connection.close()
    return sent


def at_lowest_priority():
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.nice(19)


def memory(process):
    with contextlib.suppress(OSError):
        return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1]) / 1024
    return 0.0


def run(key, options, disturbed):
    """{seconds, codes, digest, sent, before, after} of one job."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        both = nodes(folder, port, key, options.epochs)
        while "epoch=2/" not in (folder / "log0").read_text():
            if both[0].poll() is not None:
                raise RuntimeError((folder / "log0").read_text())
            time.sleep(0.05)
        before, sent = memory(both[0]), [0, 0]
        if disturbed:
            with ProcessPoolExecutor(1, initializer=at_lowest_priority) as pool:
                sent = pool.submit(disturb, port, options.connections, options.messages, options.seed).result()
        after = memory(both[0]) or before
        codes = [process.wait() for process in both]
        seconds = [float(one) for one in re.findall(r"epoch=\d+/\d+ steps=.* seconds=([\d.]+)", (folder / "log0").read_text())]
        return {"seconds": statistics.median(seconds[2:]), "codes": codes, "digest": digest(final_state(folder)), "sent": sent,
                "before": before, "after": after, "log": (folder / "log0").read_text()}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in (("messages", 100_000), ("connections", 10_000), ("rounds", 1), ("epochs", 400), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=number)
    options = parser.parse_args()
    print(f"{machine()}\n")
    print(
        "| the nodes | connections | messages | ended with | same bits | memory of node 0's parent, MB | speed, of undisturbed |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    good = True
    for what, key in (("have a secret", SECRET), ("have none", "")):
        pairs = [(run(key, options, False), run(key, options, True)) for _ in range(options.rounds)]
        ratios = [plain["seconds"] / disturbed["seconds"] for plain, disturbed in pairs]
        same = sum(plain["digest"] == disturbed["digest"] for plain, disturbed in pairs)
        connections, messages = (sum(disturbed["sent"][place] for _, disturbed in pairs) for place in (0, 1))
        codes = {code for _, disturbed in pairs for code in disturbed["codes"]}
        growth = f"{pairs[-1][1]['before']:.0f} -> {pairs[-1][1]['after']:.0f}"
        speed = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(
            f"| {what} | {connections:,} | {messages:,} | {codes} | {same} of {len(pairs)} | {growth} | {speed} |", flush=True
        )
        if connections < options.connections * len(pairs):
            print("the job ended before all of them had come: give more --epochs", file=sys.stderr)
            good = False
        good = good and codes == {0} and same == len(pairs)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
