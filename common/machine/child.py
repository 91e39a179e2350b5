"""Start a module of this project as another Python process."""

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

START_SECONDS = 120  # a process, such as one that uses Ray, may take this long to start


def start_python(module: str, *arguments: str, **options: Any) -> subprocess.Popen:
    """Run the module's main(*arguments) in a new process and session, which Ctrl-C does not reach. `options`: for Popen."""
    code = f"import sys; sys.path[:] = {json.dumps([repository(), *map(os.path.abspath, sys.path)])}; "
    code += f"from {module} import main; main(*sys.argv[1:])"
    return subprocess.Popen([sys.executable, "-c", code, *arguments], start_new_session=True, **options)


@functools.lru_cache(maxsize=1)
def repository() -> str:
    """Return the folder that holds `common` and `datasets`. A job in one file first writes them to a temporary folder."""
    sources = getattr(__spec__.loader, "sources", None)
    if sources is None:
        return str(Path(__file__).resolve().parents[2])
    folder = tempfile.mkdtemp(prefix="anyrank-modules-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, source in sources.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return folder
