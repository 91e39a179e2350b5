"""The moments of a job: events that it announces to listeners. The code that announces does not depend on the listeners.

A listener is an object with a method for each moment that it needs:
    arguments(args)              the options are parsed; args may be changed now or in `world`, and not later
    world(args)                  the place of this process is known
    workers(args)                start_workers() was called: in a node's parent, before it starts workers, or in a worker
    parent(args, alike)          this process becomes a parent; a listener may return one in place of supervisor.Supervisor
    supervisor(supervisor)       this process is about to start the workers of its node
    supervised(supervisor, code) the workers have ended; `code` is the exit code of this process
    meeting(args)                the ranks are about to form a process group; a listener may return how many seconds
                                 one of their collectives may take
    members(args, device)        after `meeting`; a listener may return members that meet later, and again after each change
    data(args)                   the data are about to be fetched and opened
    peers(args)                  a Run is being made; a listener may return its peers, in place of run.peers.Fixed
    said(text)                   a line of the log was printed for the user
    written(folder, write)       rank 0 has written files of the report; `write(name, content)` adds an optional file
    killed(args, since, why)     the watcher or parent of rank 0, which began to watch at `since`, knows why the job ends
    failure(error)               `main` has raised this error; a listener has a few seconds to save what can be saved
    leaving(code)                the process is about to end with this exit code; not announced before os._exit()
"""

from typing import Any

_listeners: list = []


def listen(listener: object) -> None:
    _listeners.append(listener)


def announce(moment: str, *facts: Any) -> Any:
    """Call `moment(*facts)` of each listener that has this method, in the order of listen(). Return the last result or None."""
    answer = None
    for listener in list(_listeners):
        hear = getattr(listener, moment, None)
        answer = hear(*facts) if hear else answer
    return answer
