"""Submit a job to this machine: `launch local` runs the request,
from a copy of the code as it would be uploaded."""

import os
import shlex
import sys
import tempfile
from typing import Any, NoReturn

from common.errors import UserError
from launch import local
from launch.submit import request as requests
from launch.submit.platform import Platform
from launch.submit.request import Request


def build(request: Request) -> dict[str, Any]:
    """Return the arguments and variables for `launch local`;
    send() replaces CODE by the folder to which it copies the code."""
    words = ["--nodes", str(request.nodes)]
    if request.gpus:
        words += ["--procs", str(request.gpus)]
    words += ["--restarts", str(request.retries)]
    places = requests.folder_options(request.data_url, request.output_url)
    return {
        "launch local": [*words, f"CODE/{request.job}", "--", *request.options, *places],
        "environment": request.environment,
    }


def send(client: object, request: Request, body: Any) -> int:
    """Run the job to its end and return its exit code, since it has no id."""
    with tempfile.TemporaryDirectory(prefix="anyrank-code-") as code:
        requests.stage(request.job, code, request.arguments)
        os.environ.update(
            body["environment"], ANYRANK_LAUNCHER=shlex.join(["python", "-m", "launch", *sys.argv[1:]])
        )
        job = f"CODE/{request.job}"
        return local.main(
            [os.path.join(code, request.job) if word == job else word for word in body["launch local"]]
        )


def _refuse(*_: object) -> NoReturn:
    """Raise UserError: the job has ended when send() returns, so it can be neither followed nor stopped."""
    raise UserError("--stop is not for --platform local: stop the job with Ctrl-C")


PLATFORM = Platform(
    service="this machine",
    credentials="none is needed",
    has_credentials=lambda environ: True,
    secrets="export it in this shell, since the job gets this environment",
    build=build,
    send=send,
    console=_refuse,
    state=_refuse,
    log=_refuse,
    stop=_refuse,
)
