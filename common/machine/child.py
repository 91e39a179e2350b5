"""A module of this project as another Python process, and where it finds the project."""

import atexit
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Callable, Optional

START_SECONDS = 120  # a process, such as one that uses Ray, may take this long to start


class Child(subprocess.Popen):
    """A module of this project that runs as another process, in a session of its own,
    which Ctrl-C does not reach.

    Lines of text go to it by write_line(), and come from it to start_reader() or `stdout`.
    """

    stdin: IO[str]
    stdout: IO[str]

    def __init__(self, module: str, *arguments: str, env: Optional[Mapping[str, str]] = None) -> None:
        """Run the module's main(*arguments). `env`: in place of this process's variables."""
        code = f"import sys; sys.path[:] = {json.dumps([repository(), *map(os.path.abspath, sys.path)])}; "
        code += f"from {module} import main; main(*sys.argv[1:])"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        super().__init__([sys.executable, "-c", code, *arguments], start_new_session=True, env=env, **pipes)

    def write_line(self, line: str) -> None:
        """Send a line, unless the process has ended. Not after end_input()."""
        with contextlib.suppress(OSError):
            self.stdin.write(f"{line}\n")
            self.stdin.flush()

    def end_input(self) -> None:
        """Close the input of the process; it may have ended before."""
        with contextlib.suppress(OSError):
            self.stdin.close()

    def start_reader(self, on_line: Callable[[str], None], name: str) -> threading.Thread:
        """Start a thread of this name that calls on_line(line) with each line from the process;
        return the thread."""

        def read_lines() -> None:
            for line in self.stdout:
                on_line(line.rstrip("\n"))

        thread = threading.Thread(target=read_lines, name=name, daemon=True)
        thread.start()
        return thread


@functools.lru_cache(maxsize=1)
def repository() -> str:
    """Return the folder that holds `common` and `datasets`.

    A job in one file first writes them to a temporary folder.
    """
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
