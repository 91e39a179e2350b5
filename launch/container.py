"""The line that starts the container of Alibaba's KSpeed document, with your folders in its places.

    python -m launch container /data/imagenet /home/me/anyrank

Both folders have the same path inside the container. The image is the vendor's own, for its clusters: with --image give
another that has CUDA and the packages of requirements.txt.
"""

import os
import shlex

from launch.options import exit_code, new_parser

IMAGE = "eflo-registry.cn-beijing.cr.aliyuncs.com/eflo/ngc-pytorch-kspeed-22.05-py38:v2.2.0"


def main(argv: list[str]) -> int:
    parser = new_parser("container", __doc__)
    parser.add_argument("imagenet", metavar="IMAGENET_FOLDER", help="the folder with train and val")
    parser.add_argument(
        "code", metavar="CODE_FOLDER", nargs="?", default=".", help="this repository; unset: the present folder"
    )
    parser.add_argument("--image", default=IMAGE, help=f"the image (default: {IMAGE})")
    options = parser.parse_args(argv)
    return exit_code(lambda: print(line(options.imagenet, options.code, options.image)))


def line(imagenet: str, code: str, image: str) -> str:
    folders = [os.path.abspath(folder) for folder in (imagenet, code)]
    mounts = [word for folder in folders for word in ("-v", f"{folder}:{folder}")]
    words = [
        "docker", "run", "-it", "--gpus", "all", "--name=resnet50_kspeed_test", "--net=host", "--ipc", "host",
        "--device=/dev/infiniband/", "--ulimit", "memlock=-1:-1", *mounts, image,
    ]  # fmt: skip
    return shlex.join(words)
