"""This machine: the request is run as it would be sent, from a copy of what would be uploaded, by `launch local`."""

import os
import tempfile
import types

from common.errors import UserError
from launch import local
from launch.submit import request as requests

SERVICE = "this machine"
CREDENTIALS = "none is needed"


def has_credentials(environ):
    return True


def mistakes(request):
    return []


def build(request):
    """The arguments of `launch local`, and what is added to the environment; CODE stands for the copy."""
    processes = ["--procs", str(request.gpus)] if request.gpus else []
    options = [word for name, value in request.pairs for word in (f"--{name}", value)]
    places = requests.places(request.data_url, request.output_url)
    words = ["--nodes", str(request.nodes), *processes, "--restarts", str(request.retries)]
    return {"launch local": [*words, f"CODE/{request.job}", "--", *options, *places], "environment": request.environment}


def upload_to(request):
    return None


def connect(request):
    return types.SimpleNamespace(exit_code=None)


def send(client, request, body):
    """Runs to the end; there is no job to name."""
    with tempfile.TemporaryDirectory(prefix="anyrank-code-") as code:
        requests.stage(request.job, code)
        os.environ.update(body["environment"])
        job = f"CODE/{request.job}"
        client.exit_code = local.main(
            [os.path.join(code, request.job) if word == job else word for word in body["launch local"]]
        )


def stop(client, request, job_id):
    raise UserError("--stop: a job on this machine has no id; stop it with Ctrl-C")
