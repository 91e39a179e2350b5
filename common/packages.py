"""The packages that a job needs, which are checked before torch is imported,
and those without which it leaves files out.

An old Python must be able to read this file, too.
"""

import functools
import importlib.util
import os
import re
import signal
import sys
from typing import Callable, Optional

PYTHON = (3, 9)
TORCH = (2, 1)
FOR_NUMPY_2 = (2, 3)  # the first torch that was built for numpy 2

# a platform's engine has them; a bundle that is uploaded never installs them
NEEDED = ("numpy", "torch", "torchvision")

ENGINE = (
    "choose an engine or image that has them, such as ModelArts' engine "
    "pytorch_2.1.0-cuda_12.1-py_3.10.6-ubuntu_22.04-x86_64"
)

# Optional packages, and which files a run leaves out if one is missing or broken.
BAR = "tqdm"
PAGE = "jinja2"
FIGURES = "matplotlib.figure"
TABLE = "sklearn.metrics"
EVENTS = "tensorboard.summary.writer.record_writer"
OMITTED_FILES = {
    FIGURES: "curves.png and the report's figures",
    EVENTS: "TensorBoard's events",
    TABLE: "report.txt's table of classes",
    PAGE: "report.html",
}


def check():
    """Exit with 2 if Python is too old, or a package is missing or unfit.

    Until run_job(), Ctrl-C prints no traceback.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    check_python()
    _exit_on_error(missing_error(importlib.util.find_spec))
    _exit_on_error(version_error(version("torch"), version("numpy")))


def require_datasets():
    """Raise ImportError unless the package `datasets` is the folder beside `common`;
    Hugging Face's has the same name."""
    try:
        spec = importlib.util.find_spec("datasets")
    except ValueError:  # it is imported, and nobody knows from where
        spec = None
    locations = [*(spec.submodule_search_locations or [])] if spec else []
    if os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "datasets") not in locations:
        conflict = f"; {locations[0]} is another package of that name" if locations else ""
        raise ImportError(f"the folder datasets is missing beside common{conflict}")


def check_python():
    """Exit with 2 if Python is too old."""
    _exit_on_error(python_error(sys.version_info[:2]))


def version(name: str) -> Optional[str]:
    """Return the version of an installed package without importing it; None if it has no metadata."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def python_error(python: "tuple[int, ...]") -> Optional[str]:
    """Return an error text if this version of Python, such as (3, 8), is too old for the jobs; else None."""
    if python < PYTHON:
        return (
            f"this is Python {python[0]}.{python[1]}, and the jobs need Python 3.9 and torch 2.1, or later: "
            f"{ENGINE}"
        )
    return None


def missing_error(is_installed: Callable[[str], object]) -> Optional[str]:
    """Return an error text that names the needed packages that are not installed; None if all are."""
    names = [name for name in NEEDED if not is_installed(name)]
    return f"not installed: {', '.join(names)}; {ENGINE}" if names else None


def version_error(torch: Optional[str], numpy: Optional[str]) -> Optional[str]:
    """Return an error text if torch is too old, or was built for numpy 1 and numpy is 2 or later;
    else None."""
    if torch is None:  # it has no metadata; perhaps it was built by hand
        return None
    if major_minor(torch) < TORCH:
        return f"torch is {torch}, and the jobs need torch 2.1 or later: {ENGINE}"
    if major_minor(torch) < FOR_NUMPY_2 and numpy and major_minor(numpy) >= (2, 0):
        return (
            f"numpy {numpy} does not work with torch {torch}, which was built for numpy 1: pip install "
            "'numpy<2'"
        )
    return None


def major_minor(version: str) -> "tuple[int, ...]":
    """Return the first two numbers of a version: (2, 1) of 2.1.0a0+git1234, (8, 3) of 8.3.RC1."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _exit_on_error(message: Optional[str]) -> None:
    if message:
        sys.stderr.write(f"error: {message}\n")
        sys.exit(2)


# --- Optional packages ---


def describe_omitted_files() -> Optional[str]:
    """Return a line on the files that a run will not have, and why, or None.

    Imports the packages, which takes seconds.
    """
    parts = [f"{files} ({import_error(name)})" for name, files in OMITTED_FILES.items() if import_error(name)]
    if not parts:
        return None
    return f"left out: {', '.join(parts)}"


def is_available(name: str) -> bool:
    """Whether the module can be imported."""
    return import_error(name) is None


@functools.lru_cache(64)  # functools.cache is younger than some Pythons that read this file
def import_error(name: str) -> Optional[str]:
    """Import a module once; return why that is impossible, or None."""
    from common.errors import one_line

    package = name.partition(".")[0].replace("sklearn", "scikit-learn")
    try:
        importlib.import_module(name)
    except Exception as error:  # mostly of a package that does not fit numpy, which may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]:
            return f"{package} is not installed"
        return f"{package} cannot be imported: {type(error).__name__}: {one_line(error)[:200]}"
    return None
