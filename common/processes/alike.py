"""Are all nodes the same? The code and the arguments of a job as texts that two nodes, or two ranks, can compare."""

import hashlib
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("common", "datasets")  # what a job imports

# Options that may differ from node to node.
OWN_OPTIONS = (
    "rank",
    "local_rank",
    "data_url",
    "output_dir",
    "output_url",
    "checkpoint_dir",
    "tensorboard_dir",
    "workers",
    "init_method",
)


def code_digest(job: str, root: Path = ROOT) -> str:
    """A digest of the job and of our modules below `root` with their paths, so that a node with old code is noticed."""
    files = {os.path.basename(job): Path(job)}  # a bundled job holds its modules
    for folder in FOLDERS:
        for where, folders, names in os.walk(root / folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            paths = [Path(where, name) for name in names if name.endswith(".py")]
            files.update({path.relative_to(root).as_posix(): path for path in paths})
    digest = hashlib.sha256()
    for name in sorted(files):  # not in the order of the operating system
        with open(files[name], "rb") as file:
            content = file.read()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
