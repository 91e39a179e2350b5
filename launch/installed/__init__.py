"""The module `anyrank`, where pip has installed this project. The command of that name is main().

    from anyrank import start, Run, run_job        in a script anywhere
    anyrank bundle my_script.py                    for python -m launch bundle my_script.py

It lets Python find the folders common, datasets and launch; a program can have no other packages of these
names.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.job import run_job
    from common.run import Run
    from common.start import start

__all__ = ["Run", "run_job", "start"]

_MODULES = {"start": "common.start", "Run": "common.run", "run_job": "common.job"}
_HERE = Path(__file__).resolve().parent


def _find_ours() -> None:
    """Let Python find our packages.

    They are in this folder, beside it in a bundle, or above it in the repository; but a program that has the
    repository on its path has them already."""
    if "common" in sys.modules and _is_ours(Path(str(sys.modules["common"].__file__)).parent.parent):
        return
    if _is_ours(Path(sys.path[0])):
        return
    for folder in (_HERE, _HERE.parent, _HERE.parent.parent):
        if _is_ours(folder):
            for name in ("common", "datasets", "launch"):
                _require_no_other(name, folder)
            sys.path.insert(0, str(folder))
            return


def _is_ours(folder: Path) -> bool:
    return (folder / "common" / "packages.py").is_file()


def _require_no_other(name: str, our_folder: Path) -> None:
    """Raise ImportError if a package or module of this name that is not ours is imported already, or lies
    beside the script."""
    module = sys.modules.get(name)
    module_folders = list(getattr(module, "__path__", []))
    script_folder = Path(sys.path[0]).resolve()
    beside_script = [script_folder / name / "__init__.py", script_folder / f"{name}.py"]
    if module is not None and str(our_folder / name) not in module_folders:
        conflict = next(iter(module_folders), getattr(module, "__file__", None) or "a module")
    elif script_folder != our_folder and any(path.exists() for path in beside_script):
        conflict = str(script_folder / name)
    else:
        return
    remedy = "rename it"
    if name == "datasets":
        remedy = (
            "if it is Hugging Face's, write what load_dataset() gives to files in another script, and read "
            "them in this one"
        )
    raise ImportError(f"anyrank has a package called {name}, and so has this program, {conflict}: {remedy}")


def __getattr__(name: str) -> object:
    """Import Run, run_job or start at its first use: torch takes seconds, and the command may not need it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'anyrank' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def main() -> int:
    """Run the command `anyrank`, which is python -m launch under another name."""
    return importlib.import_module("launch.__main__").main(sys.argv[1:])


_find_ours()
