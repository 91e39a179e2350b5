"""The moments of a job, events that it announces to listeners; and REPLACED, what a job may replace of
itself. The code that announces does not depend on the listeners.

A listener is an object with a method for each moment that it needs:
    arguments(args)              the options are parsed; args may be changed now or in `world`, and not later
    world(args)                  the place of this process is known
    workers(args)                start_workers() was called: in a worker, or in a node's parent before it
                                 starts workers
    supervisor(supervisor)       this process is about to start the workers of its node
    supervised(supervisor, code) the workers have ended; `code` is the exit code of this process
    meeting(args)                the ranks are about to form a process group
    data(args)                   the data are about to be fetched and opened
    run(args, find_unsaved)      a Run is about to resume: the data are open, and no step was taken;
                                 find_unsaved() returns [(name, kind)] of the optimizers, schedules, averages
                                 and scalers that it was not given
    said(text)                   a line of the log was printed for the user
    batch(number, loader)        the loop over a loader is done with its batch `number`
    row(row)                     a row of speed.jsonl is about to be written; a listener may add numbers
    written(folder, write)       rank 0 has written files of the report; `write(name, content)` adds one
    killed(args, since, why)     the watcher or parent of rank 0, which began to watch at `since`, knows why
                                 the job ends
    returned(code)               `main` has returned (code 0) or called sys.exit(code), also after an error
    paused()                     a cell of a notebook has ended, and the run may go on in another
    failure(error)               `main` has raised this error; a listener has a few seconds to save things
    leaving(code)                the process is about to end with this exit code, but not by os._exit()
"""

import argparse
import dataclasses
from typing import Any, Callable, NamedTuple, Optional


class _Listener(NamedTuple):
    listener: object
    ends_with_run: bool


_listeners: list[_Listener] = []


def listen(listener: object, ends_with_run: bool = False) -> None:
    """Call `listener` at each moment from now on; with `ends_with_run`, until the next Run begins."""
    _listeners.append(_Listener(listener, ends_with_run))


def begin_run() -> None:
    """End the previous Run, as if the job's `main` had returned, and drop its listeners."""
    previous_listeners = [entry.listener for entry in _listeners if entry.ends_with_run]
    for listener in previous_listeners:
        _call(listener, "returned", 0)
    _listeners[:] = [entry for entry in _listeners if not entry.ends_with_run]


def announce(moment: str, *args: object) -> None:
    """Call `moment(*args)` of each listener that has this method, in the order of listen()."""
    for entry in list(_listeners):
        _call(entry.listener, moment, *args)


def _call(listener: object, moment: str, *args: object) -> None:
    if method := getattr(listener, moment, None):
        method(*args)


@dataclasses.dataclass
class Replaced:
    """Factories for parts of a job; None: the default. Elastic jobs set the first three (elastic/job.py)."""

    # the policy of a node's parent, else Parent
    parent: Optional[Callable[[argparse.Namespace, Any], Any]] = None
    # ranks that meet later, and again after each change
    members: Optional[Callable[[argparse.Namespace, Any], Any]] = None
    peers: Optional[Callable[[argparse.Namespace], Any]] = None  # of a Run, else run.peers.Fixed
    collective_seconds: Optional[float] = None  # that a collective may take


REPLACED = Replaced()
