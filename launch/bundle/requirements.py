"""The text of the requirements.txt that is uploaded with a job: what the platform installs before the job starts.

An engine's torch, torchvision, torch_npu and numpy fit each other and its driver, so they are never listed, nor are packages
that would bring another numpy. A job lists what it cannot train without; the rest is optional (common/optional.py).
"""

import os
import re
from pathlib import Path
from typing import Union

ROOT = Path(__file__).resolve().parent.parent.parent

# ModelArts' older pages have the second name, so there is one of each.
NAMES = ("requirements.txt", "pip-requirements.txt")

OF_IMPORTS = {"dali": "nvidia-dali-cuda120", "dpex": "ray"}  # {the module of datasets that a job imports itself: package}
OF_ADDRESSES = "boto3"

TEXT = """\
# Of {job}: what it cannot train without, and an engine for PyTorch lacks. Nothing here changes torch, torchvision or numpy.
# Left out where it is missing, with a line in the log: what matplotlib, tensorboard, scikit-learn and jinja2 make.
"""
MADE = re.compile("# Of .*: what it cannot train without, ")  # how a file of ours begins
UNUSED = "# For a job that reads or writes s3://, obs:// or oss:// itself: "


def text(job: Union[str, Path], at_addresses: bool = False) -> str:
    """Return the file for this job, a path below ROOT or a whole one. `at_addresses`: it reads or writes in a bucket itself."""
    imports = r"^\s*(from datasets import .*\b{name}\b|(from|import) datasets\.{name}\b)"
    source = (ROOT / job).read_text(encoding="utf-8")
    lines = [wanted(OF_IMPORTS[name]) for name in OF_IMPORTS if re.search(imports.format(name=name), source, re.MULTILINE)]
    lines.append(wanted(OF_ADDRESSES) if at_addresses else UNUSED + wanted(OF_ADDRESSES))
    return TEXT.format(job=os.path.basename(job)) + "".join(f"{line}\n" for line in lines)


def wanted(package: str) -> str:
    """Return the line for it in requirements.txt or in an extra of pyproject.toml, which say from which version on."""
    for file, line in (("requirements.txt", rf"^({package}[>=;].*)$"), ("pyproject.toml", rf'"({package}>=[^"]*)"')):
        if found := re.search(line, (ROOT / file).read_text(), re.MULTILINE):
            return found[1]
    raise LookupError(package)
