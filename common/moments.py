"""What a job announces as it goes along. Whoever wants to know listens; who announces knows nothing of the listeners.

A listener is an object with a method for each moment that it wants to hear of:

    arguments(args)              the options are parsed, and nothing has been looked at; args may still be changed
    world(args)                  the place of this process is known
    supervisor(supervisor)       this process is about to start the workers of its node
    supervised(supervisor, code) they have ended
    meeting(args)                the ranks are about to form a process group
    joined(device)               they have
    data(args)                   the data are about to be fetched and opened
    batches(run, loader)         the first step of an epoch is about to be taken; who answers gives the batches in its place, as
                                 many as it wants, and then ends the job
    failure(error)               the job is about to end with this error: a few seconds to save what can be saved
"""

from typing import Any

_listeners: list = []


def listen(listener: object) -> None:
    _listeners.append(listener)


def announce(moment: str, *facts: Any) -> Any:
    """Tell all that listen, in the order in which they came; returns the last answer that is not None."""
    answer = None
    for listener in list(_listeners):
        hear = getattr(listener, moment, None)
        answer = hear(*facts) if hear else answer
    return answer
