"""SLURM: a batch script for sbatch, one task on each node, in a folder that all nodes see."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any, Optional

from common.errors import UserError
from common.world.folders import is_address
from launch.submit import request as requests
from launch.submit.request import Request

SERVICE = "SLURM"
CREDENTIALS = "sbatch is not on this machine; send the script from a login node"
WARNING_SECONDS = 120  # so long before the time limit the job is told to save; then the script queues itself again
ENDED = {"COMPLETED": 0, **dict.fromkeys(["FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"], 1)}

AGAIN = """\
trap 'stopped=1' TERM  # scancel: no new start
{run}
code=$?
# 2 is a mistake in the request, which another start would only repeat.
if [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ -z "$stopped" ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {retries} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def has_credentials(environ: Mapping[str, str]) -> bool:
    return shutil.which("sbatch", path=environ.get("PATH")) is not None


def mistakes(request: Request) -> Iterator[str]:
    if request.code_url and is_address(request.code_url):
        yield f"--code_url is {request.code_url}: slurm needs a folder that every node sees"
    for name in ("pool", "data_url", "output_url", "code_url"):
        if "\n" in (getattr(request, name) or ""):
            yield f"--{name} has a line end in it: leave it out"


def build(request: Request) -> str:
    """The text of the batch script."""
    code = os.path.abspath(request.code_url) if request.code_url else str(requests.ROOT)
    lines = {
        "job-name": request.name, "nodes": request.nodes, "ntasks-per-node": 1, "gpus-per-node": request.gpus or None,
        "partition": request.pool, "time": _clock(request.hours), "output": f"{request.name}-%j.log", "open-mode": "append",
        "signal": f"USR1@{WARNING_SECONDS}",
    }  # fmt: skip
    header = [f"#SBATCH --{name}={value}" for name, value in lines.items() if value is not None]
    header.append("#SBATCH --requeue" if request.retries else "#SBATCH --no-requeue")
    exports = [f"export {name}={shlex.quote(value)}" for name, value in request.environment.items()]
    words = requests.command(request, code, request.data_url, request.output_url)
    run = f"srun --kill-on-bad-exit=1 {shlex.join(words)}"
    return "\n".join(["#!/bin/bash", *header, *exports, AGAIN.format(run=run, retries=request.retries)])


def _clock(hours: Optional[float]) -> Optional[str]:
    hours_and_minutes = divmod(round((hours or 0) * 60), 60)
    return None if hours is None else "{}:{:02d}:00".format(*hours_and_minutes)


# --- Sending -----------------------------------------------------------------------------------------------------------


def connect(request: Request) -> None:
    """sbatch and its like find the cluster themselves."""


def _run(*words: str, text: Optional[str] = None) -> str:
    done = subprocess.run(words, input=text, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{words[0]} refused: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def send(client: Any, request: Request, body: Any) -> str:
    return _run("sbatch", "--parsable", text=body).strip().split(";")[0]


def console(request: Request, job_id: str) -> str:
    return f"squeue -j {job_id}"


def state(client: Any, request: Request, job_id: str) -> tuple[str, Optional[int]]:
    name = _fields(job_id).get("JobState", "UNKNOWN")
    return name, ENDED.get(name)


def _fields(job_id: str) -> dict[str, str]:
    """What scontrol says of a job, as {name: value}."""
    return dict(re.findall(r"(\w+)=(.*?)(?= \w+=|$)", _run("scontrol", "-o", "show", "job", job_id).strip()))


def log(client: Any, request: Request, job_id: str) -> list[str]:
    try:
        with open(_fields(job_id).get("StdOut", ""), errors="replace") as file:
            return file.read().splitlines()[-requests.LOG_LINES :]
    except OSError:
        return []


def stop(client: Any, request: Request, job_id: str) -> None:
    _run("scancel", job_id)
