"""Optional packages, and which files a run leaves out if one is missing or broken."""

import functools
import importlib
from typing import Optional

from common.errors import one_line

BAR, PAGE, FIGURES, TABLE = "tqdm", "jinja2", "matplotlib.figure", "sklearn.metrics"
EVENTS = "tensorboard.summary.writer.record_writer"
LEAVES_OUT = {
    FIGURES: "curves.png and the report's figures",
    EVENTS: "TensorBoard's events",
    TABLE: "report.txt's table of classes",
    PAGE: "report.html",
}


def left_out() -> Optional[str]:
    """Return a line on the files that a run will not have, and why, or None. Imports the packages, which takes seconds."""
    parts = [f"{what} ({why})" for name, what in LEAVES_OUT.items() if (why := trouble(name))]
    return f"left out: {', '.join(parts)}" if parts else None


def there(name: str) -> bool:
    return trouble(name) is None


@functools.cache
def trouble(name: str) -> Optional[str]:
    """Import a module once; return why that is impossible, or None."""
    package = name.partition(".")[0].replace("sklearn", "scikit-learn")
    try:
        importlib.import_module(name)
    except Exception as error:  # mostly of a package that does not fit numpy, which may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]:
            return f"{package} is not installed"
        return f"{package} cannot be imported: {type(error).__name__}: {one_line(error)[:200]}"
    return None
