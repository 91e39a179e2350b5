"""SLURM: a batch script for sbatch, one task on each node, in a folder that all nodes see."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Optional

from common.address import is_address
from common.errors import UserError
from launch.submit import request as requests
from launch.submit.platform import LOG_LINES, Platform
from launch.submit.request import Request

WARNING_SECONDS = 120  # before the time limit: SLURM tells the job to save, and the script requeues itself
FAILED = [
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
    "REVOKED",
]
ENDED = {"COMPLETED": 0, **dict.fromkeys(FAILED, 1)}

RUN_AND_REQUEUE = """\
failures={failures} again= stopped=
trap 'stopped=1' TERM  # scancel: no new start
{run}
code=$?
case $code in
    0|2) ;;  # it is done, or there is a mistake in the request, which another start would only repeat
    143) again=1 ;;  # it has saved before the time limit: not a failure
    *) echo $code >> "$failures"; [ "$(wc -l < "$failures")" -le {retries} ] && again=1 ;;
esac
if [ -n "$again" ] && [ -z "$stopped" ] && [ {retries} -gt 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
else
    rm -f "$failures"
fi
exit $code
"""


def _has_credentials(environ: Mapping[str, str]) -> bool:
    return shutil.which("sbatch", path=environ.get("PATH")) is not None


def mistakes(request: Request) -> Iterator[str]:
    """Yield a line for each mistake that only SLURM refuses."""
    if request.code_url and is_address(request.code_url):
        yield f"--code_url is {request.code_url}: slurm needs a folder that every node sees"
    for name in ("pool", "data_url", "output_url", "code_url", "script_line"):
        if "\n" in "".join(getattr(request, name) or ""):
            yield f"--{name} has a line end in it: leave it out"


def build(request: Request) -> str:
    """Return the batch script."""
    code = os.path.abspath(request.code_url) if request.code_url else str(requests.ROOT)
    sizes = _sizes(request)
    lines = {
        "job-name": request.name, "nodes": request.nodes, "ntasks-per-node": 1,
        "gpus-per-node": request.gpus or None, **sizes, "partition": request.pool,
        "time": _clock(request.hours), "output": _log(request), "open-mode": "append",
        "signal": f"USR1@{WARNING_SECONDS}",
    }  # fmt: skip
    header = [
        f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in lines.items() if value is not None
    ]
    header.append("#SBATCH --requeue" if request.retries else "#SBATCH --no-requeue")
    if request.is_elastic:
        header.append("#SBATCH --no-kill")
    site_lines = sorted(
        request.script_line, key=lambda line: not line.startswith("#SBATCH")
    )  # sbatch ignores #SBATCH after a command
    # The nodes' secret is made when the job starts, so no stored or shown script contains it
    # (docs/security.md).
    exports = []
    if request.nodes > 1:
        exports.append('export ANYRANK_SECRET="$(od -An -tx1 -N32 /dev/urandom | tr -d " \\n")"')
    exports += [f"export {name}={shlex.quote(value)}" for name, value in request.environment.items()]
    words = requests.command(request, code, request.data_url, request.output_url, _python(request))
    # srun does not take them from the #SBATCH lines
    size_options = [f"--{name}={value}" for name, value in sizes.items()]
    kill = ["--kill-on-bad-exit=0", "--no-kill"] if request.is_elastic else ["--kill-on-bad-exit=1"]
    run = shlex.join(["srun", *kill, *size_options, *words])
    failures = f'{shlex.quote(os.path.join(_folder(request), f".{request.name}"))}-"$SLURM_JOB_ID".failures'
    return "\n".join(
        [
            "#!/bin/bash",
            *header,
            *site_lines,
            *exports,
            RUN_AND_REQUEUE.format(run=run, retries=request.retries, failures=failures),
        ]
    )


def _python(request: Request) -> str:
    """Return the interpreter that submits the job, or python, which the site's own lines may have chosen."""
    return "python" if any(not line.startswith("#SBATCH") for line in request.script_line) else sys.executable


def _sizes(request: Request) -> dict[str, str]:
    """Return the options for a node's cores and memory: without them,
    a cluster that binds tasks to cores gives only one."""
    sizes = {}
    if request.cores:
        sizes["cpus-per-task"] = str(request.cores)
    if request.gibibytes:
        sizes["mem"] = f"{request.gibibytes}G"
    return sizes


def _folder(request: Request) -> str:
    """Return the folder of the log: the output folder,
    or "" (the current folder) if the output is not in a folder."""
    return (
        ""
        if not request.output_url or is_address(request.output_url)
        else os.path.abspath(request.output_url)
    )


def _log(request: Request) -> str:
    return os.path.join(_folder(request).replace("%", "%%"), f"{request.name}-%j.log")


def _clock(hours: Optional[float]) -> Optional[str]:
    if hours is None:
        return None
    return "{}:{:02d}:00".format(*divmod(round(hours * 60), 60))


# --- Sending ------------------------------------------------------------------------------------------------


def _run(*words: str, text: Optional[str] = None) -> str:
    result = subprocess.run(words, input=text, capture_output=True, text=True)
    if result.returncode:
        reason = result.stderr.strip() or f"exit code {result.returncode}"
        raise UserError(f"{words[0]} refused: {reason}")
    return result.stdout


def send(client: object, request: Request, body: Any) -> str:
    """Submit the script and return the job's id; UserError if sbatch refuses it."""
    os.makedirs(_folder(request) or ".", exist_ok=True)  # sbatch does not create the folder of the log
    try:
        return _run("sbatch", "--parsable", text=body).strip().split(";")[0]
    except UserError as error:
        sizes = _sizes(request)
        if not re.search("node configuration|generic resource", str(error)) or not sizes:
            raise
        requested = (
            f"{sizes.get('cpus-per-task', 'some')} cores, {sizes.get('mem', '0G')[:-1]} GiB and "
            f"{request.gpus} GPUs"
        )
        hint = (
            f"each node has to have {requested}; --cpus 0 --memory 0 leave the first two to the cluster, "
            "--gpus 0 asks for none"
        )
        raise UserError(f"{error}: {hint}") from None


def console(request: Request, job_id: str) -> str:
    return f"squeue -j {job_id}"


def state(client: object, request: Request, job_id: str) -> tuple[str, Optional[int]]:
    """Return (state, exit code or None until the job ends).

    The state may have a reason, such as a lack of nodes.
    """
    fields = _fields(job_id)
    name = fields.get("JobState", "UNKNOWN")
    reason = fields.get("Reason", "None")
    return name if reason == "None" else f"{name} ({reason})", ENDED.get(name)


def _fields(job_id: str) -> dict[str, str]:
    """Return the output of `scontrol show job` as {name: value}."""
    return dict(re.findall(r"(\w+)=(.*?)(?= \w+=|$)", _run("scontrol", "-o", "show", "job", job_id).strip()))


def log(client: object, request: Request, job_id: str) -> list[str]:
    """Return the last lines of the job's output; empty before there is a file."""
    try:
        with open(_fields(job_id).get("StdOut", ""), errors="replace") as file:
            return file.read().splitlines()[-LOG_LINES:]
    except OSError:
        return []


def stop(client: object, request: Request, job_id: str) -> None:
    _run("scancel", job_id)


PLATFORM = Platform(
    service="SLURM",
    credentials="sbatch is not on this machine; send the script from a login node",
    has_credentials=_has_credentials,
    secrets="export it in the shell that submits, since sbatch passes that environment on",
    build=build,
    send=send,
    console=console,
    state=state,
    log=log,
    stop=stop,
    mistakes=mistakes,
)
