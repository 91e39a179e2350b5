"""Send a job to a platform: check and build its request, show it or upload the code and send it, follow it,
stop it.

    python -m launch submit --platform modelarts jobs/train_ddp.py --nodes 2 --gpus 8 --region cn-north-4 \\
        --flavor FLAVOR --engine pytorch_2.1.0-cuda_12.1-py_3.10.6-ubuntu_22.04-x86_64 \\
        --code_url obs://bucket/code --data_url obs://bucket/cifar10 --output_url obs://bucket/runs/7 \\
        -- --epochs 30
    python -m launch submit --platform local jobs/train_ddp.py --nodes 2 --gpus 8 ...  the same, here
    python -m launch submit --platform modelarts --region cn-north-4 --stop JOB_ID

With --dry_run true, or without --dry_run where there is no credential, the request is printed and nothing is
sent. Credentials come from where each platform's own SDK looks for them, never from an option.
"""

import argparse
import contextlib
import dataclasses
import datetime
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from common import storage
from common.arguments import boolean
from common.errors import TrainingFailed, UserError, one_line
from common.secrets import HIDDEN, mask
from launch.options import new_parser, run_for_exit_code, split_words
from launch.submit import kubernetes, local, modelarts, pai_dlc, sagemaker, slurm
from launch.submit.platform import Platform, describe
from launch.submit.request import BOUNDS, CLUSTERS, REMOTE, Request, mistakes, stage
from launch.submit.secrets import secrets

PLATFORMS = {
    "modelarts": modelarts.PLATFORM,
    "pai-dlc": pai_dlc.PLATFORM,
    "sagemaker": sagemaker.PLATFORM,
    **dict.fromkeys(CLUSTERS, kubernetes.PLATFORM),
    "slurm": slurm.PLATFORM,
    "local": local.PLATFORM,
}
YES_OR_NO = "true|false"
FOLLOW_SECONDS = 5  # between two requests for a job's state
FAILED_LOOKS = 10  # requests in a row that may fail: a job runs for days, and a network fails now and then


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this verb; each field of Request made by option() is an option of it."""
    verb_parser = new_parser("submit", __doc__, allow_abbrev=False)
    verb_parser.add_argument(
        "job", nargs="?", help="the job's file, such as jobs/train_ddp.py; its own options come after --"
    )
    platform_help = "where the job is to run; local: on this machine"
    verb_parser.add_argument(
        "--platform", type=platform_name, choices=PLATFORMS, required=True, help=platform_help
    )
    for field in dataclasses.fields(Request):
        if not field.metadata:
            continue
        kind = field.metadata["kind"]
        default = field.default
        kwargs: dict[str, Any] = {"action": "append"} if default == () else {"type": kind}
        if isinstance(default, bool):
            kwargs = {"type": boolean, "metavar": YES_OR_NO}
        default_note = "" if default in (None, ()) else f" (default: {str(default).lower()})"
        bounds = "{:g} to {:g}".format(*BOUNDS[field.name]) if field.name in BOUNDS else ""
        help_text = ", ".join(filter(None, [field.metadata["help"], bounds]))
        verb_parser.add_argument(
            f"--{field.name}", help=help_text + default_note + platform_note(field.metadata), **kwargs
        )
    dry_run_help = "print the request and send nothing; unset: only where there is no credential"
    verb_parser.add_argument("--dry_run", type=boolean, metavar=YES_OR_NO, help=dry_run_help)
    help_text = "print the state and the log until the job ends (default: false)"
    verb_parser.add_argument("--follow", type=boolean, metavar=YES_OR_NO, default=False, help=help_text)
    verb_parser.add_argument("--stop", metavar="JOB_ID", help="stop this job")
    return verb_parser


def platform_name(text: str) -> str:
    """Return the text, as a type for argparse; k8s is refused with the names to choose from."""
    if text == "k8s":
        raise argparse.ArgumentTypeError(
            "k8s is kubernetes, or kubeflow or volcano where the cluster has one of them"
        )
    return text


def platform_note(about: Mapping[str, Any]) -> str:
    """Return a note such as " [only A; needed by B]" for an option's help,
    or "" if neither restriction applies."""
    used, needed = (", ".join(about[name]) for name in ("used_by", "needed_by"))
    words = []
    if about["used_by"] != REMOTE and used != needed:
        words.append(f"only {used}")
    if needed:
        words.append(f"needed by {needed}")
    return f" [{'; '.join(words)}]" if words else ""


def main(argv: list[str]) -> int:
    verb_words, arguments = split_words(argv)
    options = build_parser().parse_args(verb_words)
    return run_for_exit_code(lambda: run(options, arguments))


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Submit the job, or stop the one of --stop, and return an exit code."""
    if not options.job and not options.stop:
        raise UserError("give a job, such as jobs/train_ddp.py, or --stop JOB_ID")
    platform = PLATFORMS[options.platform]
    request = request_from(options, arguments, datetime.datetime.now())
    return stop(platform, request, options.stop) if options.stop else submit(platform, request, options)


def request_from(options: argparse.Namespace, arguments: list[str], now: datetime.datetime) -> Request:
    """Return the Request that these options describe.

    Without --name, it is named after the job's file and the time.
    """
    values = {
        name: value
        for name, value in vars(options).items()
        if name in Request.__dataclass_fields__ and value is not None
    }
    tuples = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    stem = os.path.splitext(os.path.basename(options.job or "job"))[0].lower().replace("_", "-")
    job = os.path.normpath(options.job or "job")
    default = {"name": f"{stem}-{now:%m%d-%H%M%S}"}
    return Request(**{**default, **values, **tuples, "job": job, "arguments": tuple(arguments)})


def submit(platform: Platform, request: Request, options: argparse.Namespace) -> int:
    """Check a request, then send it, or print it if it is a dry run; return an exit code."""
    errors = [*mistakes(request), *platform.mistakes(request), *secrets(request, platform.secrets)]
    for line in errors:
        print(f"error: {one_line(line)}", file=sys.stderr)
    if errors:
        return 2
    body = platform.build(request)
    dry_run = options.dry_run
    if dry_run is None and not platform.has_credentials(os.environ):
        dry_run = True
        print(f"nothing is sent, because there is no credential: {platform.credentials}", file=sys.stderr)
    if dry_run:
        shown = masked(body)
        print(platform.show(request, shown))
        if shown != body:
            print(f"what is shown as {HIDDEN} would be sent as it was given", file=sys.stderr)
        return 0
    for line in platform.warnings(request):
        print(f"warning: {one_line(line)}", file=sys.stderr)
    client = connect(platform, request)
    if request.upload_url:
        upload(request.job, request.upload_url, request.region, request.arguments)
    job_id = call_platform(platform, platform.send, client, request, body)
    if isinstance(job_id, int):  # --platform local has run the job, and this is its exit code
        return job_id
    print(f"submitted {job_id}", flush=True)
    print(f"see it at {one_line(platform.console(request, job_id))}", flush=True)
    return follow(platform, client, request, job_id) if options.follow else 0


def masked(body: object) -> Any:
    """Return a copy of a request for display, in which secrets are masked in every string
    (common/secrets.py)."""
    if isinstance(body, dict):
        return {name: masked(value) for name, value in body.items()}
    if isinstance(body, list):
        return [masked(value) for value in body]
    return mask(body) if isinstance(body, str) else body


def stop(platform: Platform, request: Request, job_id: str) -> int:
    """Ask the platform to stop a job and return the exit code 0."""
    client = connect(platform, request)
    call_platform(platform, platform.stop, client, request, job_id)
    print(f"asked {request.platform} to stop {one_line(job_id)}")
    return 0


def connect(platform: Platform, request: Request) -> Any:
    """Return the platform's client; UserError if there is no credential or the platform refuses it."""
    if not platform.has_credentials(os.environ):
        raise UserError(f"there is no credential: {platform.credentials}")
    return call_platform(platform, platform.connect, request)


def call_platform(platform: Platform, function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of the platform. An exception of its SDK is raised as a UserError of one line."""
    try:
        return function(*arguments)
    except (UserError, TrainingFailed):
        raise
    except Exception as error:
        raise UserError(f"{platform.service}: {describe(error, os.environ)}") from None


def upload(job: str, url: str, region: Optional[str], arguments: Sequence[str] = ()) -> None:
    """Upload the bundled job, its requirements and SageMaker's boot program;
    set AWS_REGION to `region` if it is unset."""
    if region:
        os.environ.setdefault("AWS_REGION", region)  # the bucket is in the region of the job
    with tempfile.TemporaryDirectory(prefix="anyrank-code-") as folder:
        stage(job, folder, arguments)
        storage.publish(folder, url)
    print(f"the code is at {one_line(url)}", flush=True)


def follow(platform: Platform, client: object, request: Request, job_id: str) -> int:
    """Print new states and log lines until the job ends; return 0 if it succeeded, 1 if it did not,
    130 after Ctrl-C."""
    previous = None
    failures = 0
    shown: list[str] = []
    try:
        while True:
            try:
                state, code = call_platform(platform, platform.state, client, request, job_id)
                failures = 0
            except UserError as error:
                failures += 1
                if failures > FAILED_LOOKS:
                    raise
                print(f"warning: {one_line(error)}; trying again", file=sys.stderr, flush=True)
                time.sleep(FOLLOW_SECONDS)
                continue
            if state != previous:
                print(f"{job_id} is {state}", flush=True)
                previous = state
            with contextlib.suppress(UserError):  # there is no log yet, or it has been deleted
                lines = call_platform(platform, platform.log, client, request, job_id)
                for line in new_lines(shown, lines):
                    print(one_line(line.replace("\t", "    ")), flush=True)
                shown = lines
            if code is not None:
                return code
            time.sleep(FOLLOW_SECONDS)
    except KeyboardInterrupt:
        print(f"\n{job_id} goes on; --stop {job_id} stops it", file=sys.stderr)
        return 130


def new_lines(shown: list[str], lines: list[str]) -> list[str]:
    """Return the lines that were not shown yet.

    A platform returns the last lines of a log, some of them again.
    """
    overlap = next(
        (size for size in range(min(len(shown), len(lines)), 0, -1) if shown[-size:] == lines[:size]), 0
    )
    return lines[overlap:]
