"""The text of the requirements.txt that is uploaded with a job: what the platform installs before it starts.

An engine's torch, torchvision, torch_npu and numpy fit each other and its driver, so they are never listed,
nor are packages that would bring another numpy. A job lists what it cannot train without; the rest is
optional (common/packages.py).
"""

import importlib.metadata
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Union

from launch.bundle import imports

ROOT = Path(__file__).resolve().parent.parent.parent

# ModelArts' older pages have the second name, so there is one of each.
NAMES = ("requirements.txt", "pip-requirements.txt")

OF_AN_ENGINE = {"torch", "torchvision", "torch_npu", "numpy", "PIL"}
# Packages that modules of this repository import only if they are installed, or only for some jobs (OF_JOBS).
OF_OURS = {
    *("awscrt", "boto3", "botocore", "isal", "jinja2", "kspeed", "matplotlib", "mlflow", "nvidia", "obstore"),
    *(
        "pymemcache",
        "ray",
        "simplejpeg",
        "sklearn",
        "swanlab",
        "tensorboard",
        "timm",
        "torchft",
        "tqdm",
        "urllib3",
        "wandb",
    ),
}
# {module that a job imports: package that the job then needs}
OF_JOBS = {"datasets.dali": "nvidia", "datasets.dpex": "ray"}
OF_ADDRESSES = "boto3"
PACKAGES = {"nvidia": "nvidia-dali-cuda120", "sklearn": "scikit-learn"}

TEXT = """\
# Of {job}: what it cannot train without, and an engine for PyTorch lacks.
# Nothing here changes torch, torchvision or numpy. Left out where it is missing, with a line in the log: what
# matplotlib, tensorboard, scikit-learn and jinja2 make.
"""
GENERATED = re.compile("# Of .*: what it cannot train without, ")  # the beginning of a file that text() made
UNUSED = "# For a job that reads or writes s3://, obs:// or oss:// itself: "


def text(job: Union[str, Path], extra_packages: Collection[str] = ()) -> str:
    """Return the requirements.txt of a job; a relative path is below ROOT.

    `extra_packages`: those that its options need.
    """
    lines = [requirement(package_of(name)) for name in sorted({*needed(imports.ROOT / job), *extra_packages})]
    if (boto3 := requirement(OF_ADDRESSES)) not in lines:
        lines.append(UNUSED + boto3)
    return TEXT.format(job=os.path.basename(job)) + "".join(f"{line}\n" for line in lines)


def needed(job: Path) -> set[str]:
    """Return the import names of packages that the job cannot train without and an image may lack."""
    names = imports.packages_in(job)
    for module_path in imports.modules_of(job):
        names |= imports.packages_in(imports.path_of(module_path)) - OF_OURS
    imported = [f"{name}." for name in imports.names_in(job)]
    names |= {
        name
        for module, name in OF_JOBS.items()
        if any(dotted.startswith(f"{module}.") for dotted in imported)
    }
    return names - OF_AN_ENGINE


def package_of(name: str) -> str:
    """Return the name by which pip installs the package with this module; else the module's own."""
    if name in OF_OURS:
        return PACKAGES.get(name, name)
    installed = getattr(importlib.metadata, "packages_distributions", dict)()  # since Python 3.10
    return installed.get(name, [name])[0]


def requirement(package: str) -> str:
    """Return a package's line, with its lowest version, of requirements.txt or pyproject.toml, or a name."""
    for line in _requirement_lines():
        if re.match(rf"{package}[>=;]", line):
            return line
    return package


def _requirement_lines() -> Iterator[str]:
    """Yield the lines of requirements.txt and of the extras, also where pip has installed the project without
    these files."""
    if (ROOT / "requirements.txt").is_file():
        yield from (ROOT / "requirements.txt").read_text().splitlines()
        yield from re.findall(r'"([\w-]+>=[^"]*)"', (ROOT / "pyproject.toml").read_text())
    else:
        yield from (line.partition(";")[0].rstrip() for line in importlib.metadata.requires("anyrank") or [])
