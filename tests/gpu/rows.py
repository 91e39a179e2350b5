"""What a row of `make gpu` is, and what it may ask for. A row measures, and hands what it measured to a function of judge.py."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from tests.tools.jobs import ROOT, command

SMALL = ["--custom_data", "true", "--max_samples", "2048", "--epochs", "1"]  # a CIFAR job of a few seconds


class Missing(Exception):
    """What a row needs is not on this machine."""


@dataclass
class Row:
    name: str
    folder: Path
    judged: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def judge(self, what: str, wrong: Optional[str], number: bool = True) -> None:
        """`wrong`: a verdict of judge.py. `number`: it is about what the GPU has computed, not about how a program behaves."""
        self.judged.append({"what": what, "wrong": wrong, "number": number})

    def save(self, **more: str) -> None:
        """What was found so far, for the table."""
        temporary = self.folder / "result.json.writing"
        temporary.write_text(json.dumps({**more, "judged": self.judged, "figures": self.figures}))
        temporary.rename(self.folder / "result.json")

    def job(self, name: str, *options: object, **how: Any) -> str:
        """Run jobs/NAME.py, its output in folder/NAME; returns what it printed."""
        return self.run(*command(name, *options, "--output_dir", self.folder / name), **how)

    def run(self, *words: object, expect: int = 0, environment: Optional[dict[str, str]] = None) -> str:
        """What a command printed, which also stands in the row's log; it fails unless its exit code is `expect`.

        It ends with the time of its row.
        """
        began, words = time.monotonic(), tuple(map(str, words))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        env.update(environment or {})
        done = subprocess.run(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with open(self.folder / "log", "a") as log:
            print(f"$ {' '.join(words)}\n{done.stdout}\n[{done.returncode} after {time.monotonic() - began:.1f} s]", file=log)
        self.save()
        if done.returncode != expect:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stdout[-1500:]}")
        return done.stdout

    def python(self, code: str, *words: object, **how: Any) -> str:
        """Python code in a process of its own, from the project's folder."""
        return self.run(sys.executable, "-c", code, *words, **how)


def need(*modules: str) -> None:
    absent = [module for module in modules if not is_there(module)]
    if absent:
        raise Missing(f"not installed: {', '.join(absent)}")


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def last_json(printed: str) -> Any:
    """The last line of a program that is JSON: behind it may be a warning of what ends later."""
    for line in reversed(printed.strip().splitlines()):
        with contextlib.suppress(ValueError):
            return json.loads(line)
    raise RuntimeError(f"no line is JSON: {printed[-500:]}")


Measure = Callable[[Row], None]
