"""The Dockerfile of an image of your own, and the three commands that build, check and push it.

    python -m launch image --platform modelarts > Dockerfile

writes the file and shows the commands. The file belongs beside requirements.txt. The base image keeps its own
torch and numpy: the packages are installed around them. Choose a base whose CUDA the driver of your resource
pool supports.
"""

import re
import sys

from common.errors import UserError, one_line
from launch.options import new_parser, run_for_exit_code

BASE = "pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime"
IMAGE = "swr.cn-north-4.myhuaweicloud.com/ORGANIZATION/anyrank"

DOCKERFILE = """\
FROM {base}

# ModelArts runs the container as ma-user, uid 1000; its group is 100.
RUN useradd --uid 1000 --gid 100 --create-home --shell /bin/bash ma-user

# The image's own torch stays: the packages are installed around it. Nothing is installed when a job runs.
# Of the extras of pyproject.toml it has the cache, for --data_backend kspeed and `python -m launch kspeed`.
COPY requirements.txt /tmp/requirements.txt
RUN pip list --format=freeze | grep -iE '^(torch|torchvision|torch[-_]npu|numpy)==' > /tmp/keep.txt && \\
    pip install --no-cache-dir -r /tmp/requirements.txt {cache} -c /tmp/keep.txt

# ma-user cannot write beside the packages: what is not compiled here would be compiled at each start.
RUN packages="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \\
    python -m compileall -qq -j 0 "$packages" || true

ENV PYTHONUNBUFFERED=1
USER ma-user
WORKDIR /home/ma-user
"""
CACHE = ["pymemcache>=4.0", "isal>=1.0"]  # tests compare them with the extra `cache`
COMMANDS = """
docker build -t {image} .
docker run --rm {image} python -c "import torch, torchvision, boto3, sklearn, tqdm; print(torch.__version__)"
docker push {image}
"""


def main(argv: list[str]) -> int:
    parser = new_parser("image", __doc__)
    parser.add_argument("--platform", required=True, choices=["modelarts"], help="where the image will run")
    parser.add_argument(
        "--base",
        default=BASE,
        metavar="IMAGE",
        help=f"the image to start from, which has torch (default: {BASE})",
    )
    parser.add_argument(
        "--image",
        default=IMAGE,
        help="the address of yours, in the registry of your region (default: an example)",
    )
    options = parser.parse_args(argv)
    return run_for_exit_code(lambda: show(options.base, options.image))


def show(base: str, image: str) -> None:
    """Print the Dockerfile, and to stderr the commands for it; UserError for what is no image's name."""
    for option, name in (("--base", base), ("--image", image)):
        if not re.fullmatch(r"\w[\w.:@-]*(/[\w.:@-]+)*", name, re.ASCII):
            raise UserError(f"{option} is {one_line(name)!r}: give the name of an image, such as {BASE}")
    cache = " ".join(f"'{package}'" for package in CACHE)
    print(DOCKERFILE.format(base=base, cache=cache), end="", flush=True)
    print(COMMANDS.format(image=image), end="", file=sys.stderr)
