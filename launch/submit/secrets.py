"""Find what looks like a secret in a request: platforms store requests in plain text,
and show them in consoles and logs."""

import dataclasses
from collections.abc import Iterator

from common.secrets import is_secret, reasons
from launch.submit import patches
from launch.submit.request import Request


def secrets(request: Request, better_way: str) -> Iterator[str]:
    """Yield a line for each name or value in the request that looks like a secret; no line shows the value.

    `better_way`: how a job gets a secret on this platform.
    """
    for subject, reason in _suspects(request):
        yield f"{subject} {reason}, which the request would show: {better_way}"


def _suspects(request: Request) -> Iterator[tuple[str, str]]:
    """Yield (an option or variable, what looks like a secret in it)."""
    for name in request.environment:
        if is_secret(name):
            yield f"--env {name}", "looks like a secret"
    for name, _ in request.pairs:
        if is_secret(name):
            yield f"the job's --{name}", "looks like a secret"
    for name, text in patches.variables(request.patch):
        if is_secret(name) or any(reasons(text)):
            yield f"--patch sets {name}, which", "looks like a secret"
    options = [
        (f"--{field.name}", getattr(request, field.name))
        for field in dataclasses.fields(request)
        if field.metadata
    ]
    texts = [
        (name, text) for name, value in options for text in (value if isinstance(value, tuple) else [value])
    ]
    texts = [
        (name, text.partition("=")[2] if name == "--env" else text)
        for name, text in texts
        if isinstance(text, str)
    ]
    for name, text in [*texts, *((f"the job's --{name}", value or "") for name, value in request.pairs)]:
        yield from ((name, reason) for reason in dict.fromkeys(reasons(text)))
