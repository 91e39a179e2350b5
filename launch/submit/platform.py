"""A platform as data: how it is named, where its credentials are, and the functions that send,
follow and stop a job there.

The module of each platform ends with its record, PLATFORM; command.py lists them.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, Optional, Union

from common.errors import UserError, one_line
from common.secrets import is_secret, mask
from launch.submit.request import Request

Client = Any  # of the platform's own package
Body = Union[dict[str, Any], str]  # of the request that creates a job

LOG_LINES = 1000  # how many of the last lines of a job's log are requested


def no_lines(request: Request) -> Iterable[str]:
    """Return no line, for a platform without mistakes or warnings of its own."""
    return ()


def no_client(request: Request) -> None:
    """Return None, for a platform whose functions need no client."""


def as_text(request: Request, body: object) -> str:
    """Return the body of a request as --dry_run prints it: a string as it is, else JSON."""
    return body if isinstance(body, str) else json.dumps(body, indent=2, ensure_ascii=False)


@dataclasses.dataclass(frozen=True)
class Platform:
    """What submit knows of a platform: texts for its messages, and functions."""

    service: str  # its name in messages
    credentials: str  # how to give them, for a message where there are none
    has_credentials: Callable[[Mapping[str, str]], bool]  # whether this environment has them
    secrets: str  # how a job gets its secrets there, for a message about one in the request

    build: Callable[[Request], Body]  # without side effects
    # -> the job's id, or its exit code if it has run here
    send: Callable[[Client, Request, Body], Union[str, int]]
    console: Callable[[Request, str], str]  # (request, job's id) -> where a person sees the job
    # -> (state, exit code or None until the job ends)
    state: Callable[[Client, Request, str], tuple[str, Optional[int]]]
    # -> the last lines of the job's log; empty before there is one
    log: Callable[[Client, Request, str], list[str]]
    stop: Callable[[Client, Request, str], None]

    mistakes: Callable[[Request], Iterable[str]] = no_lines  # besides those that all platforms refuse
    warnings: Callable[[Request], Iterable[str]] = no_lines  # before the job is sent
    show: Callable[[Request, Body], str] = as_text  # -> what --dry_run prints
    connect: Callable[[Request], Client] = no_client  # -> the client that the functions above get


def in_environment(*variables: str, files: Sequence[str] = ()) -> Callable[[Mapping[str, str]], bool]:
    """Return the has_credentials of a platform that looks for credentials in these variables and files."""

    def has_credentials(environ: Mapping[str, str]) -> bool:
        is_set = any(environ.get(name) for name in variables)
        return is_set or any(os.path.exists(os.path.expanduser(file)) for file in files)

    return has_credentials


def not_installed(package: str, extra: str) -> UserError:
    """Return the error for a platform's package that is missing; `extra`: the extra of ours that has it."""
    return UserError(f"{package} is not installed: pip install .[{extra}]")


def describe(error: Exception, environ: Mapping[str, str]) -> str:
    """Return a platform's error as one line, without the secrets of this environment:
    some answers quote the request."""
    # each SDK has some of these
    names = ("status_code", "status", "error_code", "code", "error_msg", "message", "body")
    words = [getattr(error, name, None) for name in names]
    text = " ".join(dict.fromkeys(str(word) for word in words if word)) or str(error)
    text = mask(text, *(value for name, value in environ.items() if is_secret(name)))
    return one_line(f"{type(error).__name__}: {text}")[:600]
