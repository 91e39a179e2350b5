"""Every job and verb on the oldest torch that they run on, in an environment as a platform makes it: make engine

    python -m tests.engine                      all rows of the table, ten minutes; docs/platforms.md has what came out
    python -m tests.engine --only train.py      one of them

The environment is that of ModelArts' newest engine for GPUs: its torch, torchvision and numpy, then what bundles ask for,
which must leave those alone. It is kept in .tools; delete that to make it anew. Each row runs in a folder of its own, some
of its commands with the torch of today.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from launch.bundle import requirements
from tests.tools.jobs import PATIENCE, ROOT, TINY
from tests.tools.packages import TOOLS, missing

OWN = ["torch==2.1.0", "torchvision==0.16.0", "numpy==1.24.4", "pillow<11"]  # the engine's, and they have to stay
MORE = ["onnx>=1.16", "onnxscript>=0.5", "pymemcache>=4.0"]  # the extras that some verbs ask for
PYTHONS = ("python3.10", "python3.9", "python3.11")  # the engine's, that of Ascend, and the last that torch 2.1 was made for

SMALL = ["--custom_data", "true", "--max_samples", "32", "--batch_size", "8", "--epochs", "2", "--workers", "0"]
IMAGENET = ["--arch", "resnet18", "--image_size", "32", *SMALL]
RESTORE = ["--width", "16", *SMALL]
TWO = ["--nproc_per_node", "2"]
MID_EPOCH = ["--max_steps", "3"]  # it saves there and ends, and the command without it goes on
TODAY = "today"  # the first word of a command for the Python that runs this, and not the engine's

PHOTOS = """
import numpy, os
from PIL import Image
for part in ("train", "val"):
    for name in ("cat", "dog"):
        os.makedirs(f"photos/{part}/{name}")
        for number in range(8):
            noise = numpy.random.default_rng(number).integers(0, 255, (40, 48, 3), "uint8")
            Image.fromarray(noise).save(f"photos/{part}/{name}/{number}.JPEG")
"""
PROGRAM = """
import torch
torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), "program.pth")
"""
CACHE = """
import os, subprocess, sys
from tests.tools.memcached import Memcached
with Memcached() as server:
    os.environ["KSPEED_IPLIST"] = server.address
    sys.exit(subprocess.run(["python", "-m", "launch", "kspeed", "preload", "photos"]).returncode)  # the engine's
"""


NAMED = """
import hashlib, http.server, io, os, sys, threading, torch, torchvision
from launch import weights
buffer = io.BytesIO()
torch.save(torchvision.models.shufflenet_v2_x0_5().state_dict(), buffer)
name = f"shufflenet-{hashlib.sha256(buffer.getvalue()).hexdigest()[:8]}"
with open(f"{name}.pth", "wb") as file:
    file.write(buffer.getvalue())
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
torchvision.models.ShuffleNet_V2_X0_5_Weights.IMAGENET1K_V1.value.url = f"http://127.0.0.1:{server.server_port}/{name}.pth"
code = weights.main(["ShuffleNet_V2_X0_5_Weights.DEFAULT", "."]) or weights.main(["ShuffleNet_V2_X0_5_Weights.DEFAULT", "given"])
for ending in ("pth", "json"):
    os.rename(f"given/{name}.{ending}", f"given/weights.{ending}")
sys.exit(code)
"""


def job(name, *options, out="out"):
    return [f"{ROOT}/jobs/{name}.py", *options, "--output_dir", out]


def verb(name, *words):
    return ["-m", "launch", name, *words]


def alone(name, *options):
    """Stopped in mid-epoch, and started again."""
    return [job(name, *options, *MID_EPOCH), job(name, *options)]


def grouped(name, *options):
    """The same with two processes, then in the two forms of torch's launcher."""
    launched = [["-m", f"torch.distributed.{how}", *TWO, *job(name, *options, out=how)] for how in ("run", "launch")]
    return [*alone(name, *options, *TWO), *launched]


def handed_over(*options):
    """Begun by one torch and ended by the other, in both directions."""
    begun, whole = job(*options, *MID_EPOCH), job(*options)
    back, there = [*begun, "--output_dir", "back"], [*whole, "--output_dir", "back"]
    return [begun, [TODAY, *whole], [TODAY, *back], there]


# {row: words for Python, one command after the other}
JOBS = {
    "train.py": alone("train", *TINY),
    "train_amp.py": alone("train_amp", *TINY),
    "train_dali.py": alone("train_dali", *TINY),
    "train_ddp.py": grouped("train_ddp", *TINY),
    "train_ddp_amp.py": grouped("train_ddp_amp", *TINY),
    "train_ddp_exact.py": grouped("train_ddp_exact", *TINY),
    "train_dp.py": alone("train_dp", *TINY),
    "train_dpex.py": alone("train_dpex", *TINY, "--workers", "1"),
    "train_exact.py": alone("train_exact", *TINY, "--shares", "2"),
    "train_imagenet.py": grouped("train_imagenet", *IMAGENET),
    "train_restore.py": grouped("train_restore", *RESTORE),
    "speedrun.py": [job("speedrun", "--custom_data", "true", "--max_samples", "256", "--runs", "1")],
}
OPTIONS = {
    "--optimizer adam": alone("train", *TINY, "--optimizer", "adam", "--lr", "0.01"),
    "--amp_dtype float16, on a CPU": [job("train_amp", *TINY, "--amp_dtype", "float16")],
    "--compile true": [job("train", *TINY, "--compile", "true")],
    "--sync_bn true": alone("train_ddp", *TINY, *TWO, "--sync_bn", "true"),
    "--exact true of train_imagenet.py": alone("train_imagenet", *IMAGENET, *TWO, "--exact", "true"),
    "--min_nodes 1": [job("train_ddp_exact", *TINY, *TWO, "--shares", "2", "--min_nodes", "1")],
    "--profile true": [job("train", *TINY, "--profile", "true", "--max_samples", "1024")],
    "photographs, as they are and packed": [
        ["-c", PHOTOS],
        verb("pack", "photos", "packed"),
        job("train_imagenet", *IMAGENET[:4], *SMALL[4:], "--data_url", "photos"),
        job("train_imagenet", *IMAGENET[:4], *SMALL[4:], "--data_url", "packed", "--data_backend", "packed", out="from_pack"),
    ],
    "train.py, begun by one torch and ended by another": handed_over("train", *TINY),
    "the same with Adam": handed_over("train", *TINY, "--optimizer", "adam", "--lr", "0.01"),
    "the same with train_ddp_exact.py": handed_over("train_ddp_exact", *TINY, *TWO),
    "the same with train_imagenet.py": handed_over("train_imagenet", *IMAGENET, *TWO),
    "the same with train_restore.py": handed_over("train_restore", *RESTORE, *TWO),
    "hostile files in place of weights": [["-m", "tests.tools.hostile"]],
    "weights that are a program": [
        ["-c", PROGRAM],
        job("train_imagenet", *IMAGENET, "--evaluate", "true", "--weights", "program.pth"),
    ],
}  # fmt: skip
VERBS = {
    "blocks": [verb("blocks", "list"), verb("blocks", "compose", "DDP", "AMP")],
    "doctor": [verb("doctor", f"{ROOT}/jobs/train_ddp.py", "--", *TINY, *TWO, "--output_dir", "out")],
    "bundle": [
        verb("bundle", f"{ROOT}/jobs/train_ddp.py", "-o", "sent/train_ddp.py"),
        ["sent/train_ddp.py", *TINY, *TWO, "--output_dir", "out"],
        verb("bundle", f"{ROOT}/jobs/train.py", "--folder", "folder"),
        ["folder/jobs/train.py", *TINY, "--output_dir", "alone"],
    ],
    "report": [job("train", *TINY), verb("report", "out")],
    "track": [job("train", *TINY, "--track", "mlflow"), verb("track", "--help")],  # without the package
    "export": [
        job("train", *TINY),
        *(verb("export", "out", "--format", name, "--output", name) for name in ("safetensors", "onnx", "modelarts")),
    ],
    "pack": [["-c", PHOTOS], verb("pack", "photos", "packed"), verb("pack", "--verify", "packed")],
    "kspeed": [["-c", PHOTOS], [TODAY, "-c", CACHE]],
    "weights": [["-c", NAMED], job("train_imagenet", *SMALL, "--weights", "given/weights.pth", "--max_steps", "1")],
    "image": [verb("image", "--platform", "modelarts")],
    "submit": [verb("submit", "jobs/train.py", "--platform", "local", "--output_url", "out", "--", *TINY)],
    "local": [verb("local", "--nodes", "2", f"{ROOT}/jobs/train_ddp.py", "--", *TINY, "--output_dir", "out")],
}  # fmt: skip
ROWS = {**JOBS, **OPTIONS, **{f"launch {name}": commands for name, commands in VERBS.items()}}

# What ends with one line there: {row: (the torch that can, the words)}
REFUSED = {
    "--amp_dtype float16, on a CPU": ("2.4", "float16 on a CPU needs torch 2.4 or later"),
    "--min_nodes 1": ("2.7", "--min_nodes needs torchft, and that torch 2.7 or later"),
    "weights that are a program": ("", "program.pth holds no weights: it is a program of TorchScript"),
}


def made() -> Path:
    """The engine's Python, with the packages that a bundle asks for. Those change nothing that the engine has."""
    folder = TOOLS / OWN[0]
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        there = [
            name for name in PYTHONS if shutil.which(name) and not subprocess.run([name, "-V"], capture_output=True).returncode
        ]
        if not there:
            missing(f"needs one of {', '.join(PYTHONS)}: install it")
        print(f"making {folder} with {there[0]}, which takes minutes", flush=True)
        subprocess.run([there[0], "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*pip, *OWN], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (folder / "own.txt").write_text("".join(f"{path}\n" for path in sorted(site.iterdir())))
        before = subprocess.check_output([*pip[:3], "freeze"])
        for job in JOBS:
            (folder / "requirements.txt").write_text(requirements.text(f"jobs/{job}"))
            subprocess.run([*pip, "-r", folder / "requirements.txt"], check=True)
        after = subprocess.check_output([*pip[:3], "freeze"])
        changed = set(before.split()) - set(after.split())
        assert not changed, f"what bundles ask for has changed what the engine has: {changed}"
        subprocess.run([*pip, *OWN, *MORE], check=True)
        ready.touch()
    return python


def own() -> list[str]:
    """What the engine itself has in its site-packages."""
    return (made().parent.parent / "own.txt").read_text().splitlines()


def outcome(python: Path, row: str) -> str:
    """ "ran", or what was said in the end."""
    env = {"PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(ROOT)}
    env.update(RAY_ADDRESS="local", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        before = []
        for words in ROWS[row]:
            command = [sys.executable, *words[1:]] if words[0] == TODAY else [python, *words]
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE)
            if done.returncode:
                said = [line for line in done.stderr.splitlines() if line.strip()] or [""]
                errors = [line for line in said if line.startswith("error: ")]
                return f"exit code {done.returncode}: {(errors or said)[-1]}"
            if MID_EPOCH[0] in before and MID_EPOCH[0] not in words and "going on from" not in done.stdout:
                return f"began anew: {done.stdout[:200]!r}"
            before = words
    return "ran"


def as_expected(row: str, came: str) -> bool:
    return came.startswith(f"exit code 2: error: {REFUSED[row][1]}") if row in REFUSED else came == "ran"


def table() -> str:
    """As it stands in docs/platforms.md."""
    said = {row: f"refused{f', needs torch {since}' * bool(since)}: `{words}`" for row, (since, words) in REFUSED.items()}
    return "".join(f"| {row} | {said.get(row, 'ran')} |\n" for row in ROWS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), metavar="ROW", help=f"of: {', '.join(ROWS)}")
    rows = parser.parse_args().only or ROWS
    python = made()
    subprocess.run([python, "-c", "import sys, torch, numpy as np; print(sys.version, torch.__version__, np.__version__)"])
    wrong = []
    for row in rows:
        came = outcome(python, row)
        wrong += [] if as_expected(row, came) else [row]
        print(f"{row:55} {came}", flush=True)
    print(f"{len(rows)} rows, not as docs/platforms.md says: {', '.join(wrong) or 'none'}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
