"""The moments of a job: events that it announces to listeners. The code that announces does not depend on the listeners.

A listener is an object with a method for each moment that it needs:
    arguments(args)              the options are parsed; args may still be changed, and not after the next moment
    world(args)                  the place of this process is known
    workers(args)                the workers of this node are about to be started, or this process is a worker
    parent(args, alike)          a listener may return another parent, in place of watching.supervisor.Supervisor
    supervisor(supervisor)       this process is about to start the workers of its node
    supervised(supervisor, code) the workers have ended
    meeting(args)                the ranks are about to form a process group; a listener may return how many seconds
                                 one of their collectives may take
    members(args, device)        as `meeting`; a listener may return members that meet later, and again after each change
    joined(device)               the ranks have formed the process group
    data(args)                   the data are about to be fetched and opened
    peers(args)                  a run is made; a listener may return its peers, in place of peers.Fixed
    batches(run, loader)         the first step of an epoch is about to be taken; a listener may return an iterator of batches
                                 to train on instead, and must end the job after the last one
    said(text)                   a line of the log that a person should see
    written(folder, write)       rank 0 has written the files of a run; `write(name, content)` adds an optional file
    killed(args, since, why)     the watcher or the parent of rank 0, since when it is there, has found why the job ends
    failure(error)               the job is about to end with this error: a few seconds to save what can be saved
    leaving(code)                the process is about to end
"""

from typing import Any

_listeners: list = []


def listen(listener: object) -> None:
    _listeners.append(listener)


def announce(moment: str, *facts: Any) -> Any:
    """Call all listeners in the order in which they were added; returns the result of the last one that has this method."""
    answer = None
    for listener in list(_listeners):
        hear = getattr(listener, moment, None)
        answer = hear(*facts) if hear else answer
    return answer
