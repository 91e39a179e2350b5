"""Find what looks like a secret in a request: platforms store requests in plain text, and show them in consoles and logs."""

import dataclasses
from collections.abc import Iterator

from common.secrets import is_secret, reasons
from launch.submit import patches
from launch.submit.request import CLUSTERS, Request

# How a job gets a secret on each platform.
WAYS = {
    "modelarts": "give the job an agency that may read what it needs, or put the secret into a file that only its folders hold",
    "pai-dlc": "give the job's workspace a RAM role, or put the secret into a file in one of the job's folders",
    "sagemaker": "let --role read it from AWS Secrets Manager when the job starts",
    **dict.fromkeys(CLUSTERS, "keep it in a Secret of the cluster, whose NAME is given with --secret"),
    "slurm": "export it in the shell that submits, since sbatch passes that environment on",
    "local": "export it in this shell, since the job gets this environment",
}


def secrets(request: Request) -> Iterator[str]:
    """Yield a line for each name or value in the request that looks like a secret; no line shows the value."""
    for what, why in _found(request):
        yield f"{what} {why}, which the request would show: {WAYS[request.platform]}"


def _found(request: Request) -> Iterator[tuple[str, str]]:
    for name in request.environment:
        if is_secret(name):
            yield f"--env {name}", "looks like a secret"
    for name, _ in request.pairs:
        if is_secret(name):
            yield f"the job's --{name}", "looks like a secret"
    for name, text in patches.variables(request.patch):
        if is_secret(name) or any(reasons(text)):
            yield f"--patch sets {name}, which", "looks like a secret"
    given = [(f"--{field.name}", getattr(request, field.name)) for field in dataclasses.fields(request) if field.metadata]
    texts = [(name, text) for name, value in given for text in (value if isinstance(value, tuple) else [value])]
    texts = [(name, text.partition("=")[2] if name == "--env" else text) for name, text in texts if isinstance(text, str)]
    for name, text in [*texts, *((f"the job's --{name}", value or "") for name, value in request.pairs)]:
        yield from ((name, why) for why in dict.fromkeys(reasons(text)))
