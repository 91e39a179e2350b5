"""Read the versions of torch and Python from the name of a platform's engine,
and check that a job can use them."""

import re
from typing import NamedTuple

from common.errors import UserError, one_line
from common.packages import PYTHON, TORCH, major_minor

# ModelArts' engines with PyTorch, as its page listed them on 2026-07-02: the newest for GPUs, an older one,
# one for NPUs.
MODELARTS = (
    "pytorch_2.1.0-cuda_12.1-py_3.10.6-ubuntu_22.04-x86_64",
    "pytorch_1.8.0-cuda_10.2-py_3.7-ubuntu_18.04-x86_64",
    "pytorch_2.1.0-cann_7.0.1.1-py_3.9-euler_2.10.7-aarch64-snt3p",
)
FORM = re.compile(
    r"(\w+?)_([\d.]+)\w*-(?:(cuda|cann)_[\w.]+-)?py_([\d.]+)-\w+_[\w.]+-(?:x86_64|aarch64)(?:-\w+)?", re.ASCII
)


class Engine(NamedTuple):
    torch: tuple[int, ...]
    python: tuple[int, ...]
    for_npus: bool


def parse(name: str) -> Engine:
    """Return the versions in an engine's name; UserError, which suggests another engine,
    if a job cannot use it."""
    match = FORM.fullmatch(name)
    if not match:
        raise UserError(
            f"--engine {one_line(name)} is no engine's name: give it as the console lists it, such as "
            f"{MODELARTS[0]}"
        )
    framework, torch, toolkit, python = match.groups()
    engine = Engine(major_minor(torch), major_minor(python), toolkit == "cann")
    suggestion = MODELARTS[2] if engine.for_npus else MODELARTS[0]
    if framework != "pytorch":
        raise UserError(f"--engine {name} has {framework}: a job needs PyTorch, such as {suggestion}")
    for package, present, lowest in (("torch", engine.torch, TORCH), ("Python", engine.python, PYTHON)):
        if present < lowest:
            old, needed = (".".join(map(str, version)) for version in (present, lowest))
            raise UserError(
                f"--engine {name} has {package} {old}, and a job needs {needed} or later: "
                f"give {suggestion}, or an image of your own (python -m launch image)"
            )
    return engine
