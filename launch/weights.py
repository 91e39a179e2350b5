"""Fetch weights by name on a machine with Internet, for a platform that has none;
the option to use there is printed.

    python -m launch weights ResNet50_Weights.DEFAULT                       weights/resnet50-11ad3fa6.pth
    python -m launch weights timm/vit_small_patch16_224 obs://bucket/weights    to a bucket

Beside the file is a .json with the network and how its pictures are made, which a job obeys.
"""

import json
import os
import tempfile

from common import storage
from common.address import is_bucket
from common.files import write_atomically
from common.weights import by_name
from common.weights.files import beside
from launch.options import new_parser, run_for_exit_code


def main(argv: list[str]) -> int:
    parser = new_parser("weights", __doc__)
    parser.add_argument("name", metavar="NAME", help="KIND_Weights.NAME of torchvision, or timm/NAME")
    parser.add_argument(
        "to", metavar="FOLDER_OR_URL", nargs="?", default="weights", help="where to; unset: weights"
    )
    options = parser.parse_args(argv)
    return run_for_exit_code(lambda: fetch_weights(options.name, options.to.rstrip("/")))


def fetch_weights(name: str, destination: str) -> None:
    """Fetch the weights into a folder or bucket, and print the option --weights that names them there."""
    weights = by_name.find_by_full_name(name)
    if not is_bucket(destination):
        print(f"--weights {_write(weights, destination)}")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = _write(weights, folder)
        for file in (path, beside(path)):
            storage.publish(file, f"{destination}/{os.path.basename(file)}")
        print(f"--weights {destination}/{os.path.basename(path)}")


def _write(weights: by_name.NamedWeights, folder: str) -> str:
    path = by_name.fetch_into(weights, folder)
    about = {"arch": weights.arch, **weights.options}
    write_atomically(beside(path), json.dumps(about, indent=1).encode())
    return path
