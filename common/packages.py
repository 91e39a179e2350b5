"""What a job needs of Python and of other packages: what is too old or missing is one line, before anything needs it.

An old Python reads this file, too, so it has nothing in it that came later.
"""

import importlib.util
import re
import sys

PYTHON, TORCH = (3, 9), (2, 1)
PACKAGES = {
    "numpy": "numpy",
    "torchvision": "torchvision",
    "tqdm": "tqdm",
    "tensorboard": "tensorboard",
    "matplotlib": "matplotlib",
    "sklearn": "scikit-learn",
}

ENGINE = (
    "choose an engine or image that has them, such as ModelArts' engine pytorch_2.1.0-cuda_12.1-py_3.10.6-ubuntu_22.04-x86_64"
)
INSTALL = (
    "on a platform's image requirements.txt (on ModelArts also as pip-requirements.txt) has to lie at the root of the code "
    "directory; in an image of your own nothing is installed at the start, so install it when you build the image"
)


def too_old(python, torch):
    """What the jobs cannot run with, in a sentence, or None."""
    if python < PYTHON:
        return f"this is Python {python[0]}.{python[1]}, and the jobs need Python 3.9 and torch 2.1, or later: {ENGINE}"
    if first_two(torch) < TORCH:
        return f"torch is {torch}, and the jobs need torch 2.1 or later: {ENGINE}"
    return None


def first_two(version):
    """(2, 1) of 2.1.0a0+git1234, (8, 3) of 8.3.RC1."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def not_installed(is_there):
    """The same for what is missing."""
    missing = [package for module, package in sorted(PACKAGES.items()) if not is_there(module)]
    return f"not installed: {', '.join(missing)}; {INSTALL}" if missing else None


def check_versions():
    """In a job, which imports torch first, end with 2 where it cannot run."""
    if hasattr(sys.modules.get("torch"), "__version__"):
        _end_with(too_old(sys.version_info[:2], str(sys.modules["torch"].__version__)))


def check_installed():
    """The same for packages; only for the job itself, as a machine that loads for it needs few of them."""
    _end_with(not_installed(importlib.util.find_spec))


def _end_with(sentence):
    if sentence:
        sys.stderr.write(f"error: {sentence}\n")
        sys.exit(2)
