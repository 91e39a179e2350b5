"""--track: let a process of its own send what this run writes into its folder to MLflow,
W&B or SwanLab (common/track)."""

import argparse
import functools
import threading
import time

import torch

from common.alive.stops import STOPS
from common.machine.child import Child
from common.run.observers.observer import Facts, Observer
from common.run.side_files import SideFiles
from common.track import follow

# For the last rows.
END_SECONDS = 20  # at the end of the run
STOP_SECONDS = 5  # after a signal
FAILURE_SECONDS = 2  # after an error


class Tracker(Observer):
    def __init__(self, args: argparse.Namespace, _device: torch.device, side_files: SideFiles):
        self._tools = args.track
        self._folder = args.output_dir
        self._side_files = side_files
        # {tool: (process, thread that repeats what it says)}
        self._processes: dict[str, tuple[Child, threading.Thread]] = {}
        self._unavailable: set[str] = set()  # tools that take no rows at present

    def began(self, _facts: Facts, **_: object) -> None:
        if not self._side_files.writes or self._processes:
            return
        for tool in self._tools.split(","):
            child = Child(follow.__name__, self._folder, tool)
            self._processes[tool] = (
                child,
                child.start_reader(functools.partial(self._relay, tool), f"what {tool} says"),
            )

    def _relay(self, tool: str, line: str) -> None:
        if line.startswith("warning: "):
            self._unavailable = self._unavailable | {tool}
        else:
            self._unavailable = self._unavailable - {tool}
        self._side_files.say(line)

    def closed(self, _facts: Facts, **_: object) -> None:
        self._end(STOP_SECONDS if STOPS.noted else END_SECONDS)

    def failed(self, _facts: Facts, **_: object) -> None:
        self._end(FAILURE_SECONDS)

    def _end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for child, _ in self._processes.values():
            child.write_line("end")
        for tool, (child, reader) in self._processes.items():
            while child.poll() is None and tool not in self._unavailable and time.monotonic() < deadline:
                time.sleep(0.05)
            if child.poll() is None:
                child.kill()
                if tool not in self._unavailable:
                    advice = f"python -m launch track {self._folder} --to {tool} sends what it lacks"
                    self._side_files.say(
                        f"warning: {tool} has not taken all rows within {seconds} s; {advice}"
                    )
            reader.join(1)
        self._processes = {}
