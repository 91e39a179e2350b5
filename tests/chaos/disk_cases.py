"""What the matrix of disk.py runs: every job, small, and the programs around them; and what must be the same after a restart."""

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Callable, Optional

from tests.chaos.victims import digest
from tests.tools.jobs import ROOT, final_state

CIFAR = ["--custom_data", "true", "--max_samples", 128, "--batch_size", 32, "--width", 2, "--epochs", 2, "--save_steps", 2,
         "--keep", 1, "--ledger", "true"]  # fmt: skip
PHOTOS = ["--data_url", "{work}/photos", "--arch", "resnet18", "--image_size", 32, "--batch_size", 8, "--epochs", 2, "--workers", 0,
          "--save_steps", 1, "--keep", 1, "--ledger", "true"]  # fmt: skip
PAIRS = ["--custom_data", "true", "--max_samples", 32, "--batch_size", 8, "--width", 4, "--epochs", 2, "--workers", 0,
         "--save_steps", 2, "--keep", 1, "--ledger", "true"]  # fmt: skip


def state(folder):
    return digest(final_state(folder))


@dataclasses.dataclass
class Case:
    """A program and its options. `before`: options of a run that is there when the program starts, or None for an empty folder;
    `fault`: what ended that run, as an order of disk.c. `same(folder)`: what must not depend on faults. `only`: the paths whose
    operations fail, where other rows have the rest. `reason`: why it cannot be run in this form. `ray`: it joins the Ray cluster
    of all points, and its temporary files are not watched, as the paths of its sockets would be too long."""

    program: str
    options: list
    same: Callable[[Path], str] = state
    before: Optional[list] = None
    fault: tuple = ()
    only: str = ""
    reason: str = ""
    ray: bool = False
    seconds: int = 300

    def words(self, folder, work, options=None):
        filled = [str(word).format(work=work) for word in (options or self.options)]
        return [str(ROOT / self.program), *filled, *([] if "pack" in filled else ["--output_dir", str(folder / "out")])]


def last_row(folder):
    """Of runs.jsonl, every line of which must be whole."""
    row = [json.loads(line) for line in (folder / "out" / "runs.jsonl").read_text().splitlines()][-1]
    del row["seconds"]
    return json.dumps(row)


def evaluation(folder):
    row = json.loads((folder / "out" / "evaluation.json").read_text())
    return json.dumps({name: value for name, value in row.items() if "latency" not in name and name != "weights"}) + state(
        folder
    )


def all_bytes(folder):
    """Of a pack; the notes hold the times of the photographs, which are the same ones in every run."""
    result = hashlib.sha256()
    for path in sorted((folder / "out").rglob("*")):
        if path.is_file():
            result.update(path.name.encode() + path.read_bytes())
    return result.hexdigest()


TORN = ("rename", "out/checkpoints/*.json", 2, "killed")  # a save that is cut off between its two names
CASES = {
    "train": Case("jobs/train.py", [*CIFAR, "--profile", "true"]),
    "train, going on": Case("jobs/train.py", CIFAR, before=CIFAR, fault=TORN),
    "train_ddp": Case("jobs/train_ddp.py", CIFAR),
    "train_ddp, 2 workers": Case("jobs/train_ddp.py", [*CIFAR, "--nproc_per_node", 2], only=r"tmp/anyrank.*|out/ledger/rank_1.*"),
    "train_dp": Case("jobs/train_dp.py", CIFAR),
    "train_amp": Case("jobs/train_amp.py", CIFAR),
    "train_dali": Case("jobs/train_dali.py", CIFAR),
    "train_dpex": Case("jobs/train_dpex.py", CIFAR, ray=True),
    "train_ddp_amp": Case("jobs/train_ddp_amp.py", CIFAR),
    "train_imagenet": Case("jobs/train_imagenet.py", PHOTOS),
    "train_imagenet --evaluate": Case("jobs/train_imagenet.py", [*PHOTOS, "--evaluate", "true"], evaluation, before=PHOTOS),
    "train_restore": Case("jobs/train_restore.py", PAIRS),
    "speedrun": Case("jobs/speedrun.py", ["--custom_data", "true", "--net", "small", "--max_samples", 256], last_row),
    "launch pack": Case(
        "launch/__main__.py", ["pack", "{work}/photos", "out", "--shard_mb", 0.05, "--form", "raw", "--workers", 1], all_bytes
    ),
}  # fmt: skip


def make_photographs(folder):
    """{train,val}/{cat,dog}/N.png, of noise."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for label in ("cat", "dog"):
            (place := folder / split / label).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                Image.fromarray(draw.integers(0, 255, (40, 48, 3), np.uint8)).save(place / f"{number}.png")


def kind(path):
    """Files that are written alike: checkpoints of any number, epochs, ranks."""
    return re.sub(r"\d+", "N", pattern(path))


def pattern(path):
    """The path as another run has it: without the time, the process and what is drawn at random."""
    path = re.sub(r"(/\.(?:start|rank_\d+))-[0-9a-f]{12}", r"\1-*", path)
    path = re.sub(r"(events\.out\.tfevents)\.[^/]*", r"\1.*", path)
    path = re.sub(r"(/logs/anyrank)_[a-z0-9_]{8}", r"\1_*", path)
    return re.sub(r"(tmp/[a-z-]*?-?)[^/.]*(?=/|$)", r"\1*", path) if path.startswith("tmp/") else path


def left(folder):
    """The names of all files that a run has left, as another run would have them."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted({pattern(path) for path in paths if not path.startswith("tmp/") and not path.startswith("printed")})
