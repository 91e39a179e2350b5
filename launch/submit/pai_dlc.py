"""Alibaba PAI-DLC: a PyTorchJob, sent through alibabacloud_pai_dlc20201203.

OSS folders appear as folders of the container.
"""

import json
import shlex
import urllib.parse
from collections.abc import Iterator
from typing import Any, Optional

from common.errors import UserError
from launch.submit import request as requests
from launch.submit.platform import LOG_LINES, Platform, in_environment, not_installed
from launch.submit.request import Request

CODE = "/mnt/code"
DATA = "/mnt/data"
OUTPUT = "/mnt/output"
ENDED = {"Succeeded": 0, "SucceededReserving": 0, "Failed": 1, "FailedReserving": 1, "Stopped": 1}
NO_REGION = "pai-dlc needs --region, such as cn-hangzhou"
LARGEST = 65536  # bytes of a request
# from the stop signal to the kill; a job kills its own workers earlier (common/alive/supervisor.py)
GRACE_SECONDS = 60


def mistakes(request: Request) -> Iterator[str]:
    """Yield a line for each mistake that only PAI-DLC refuses."""
    if not request.flavor and not request.pool:
        yield "pai-dlc needs --flavor, such as ecs.gn7i-c8g1.2xlarge, or --pool, the id of a resource quota"
    if request.flavor and (request.cpus or request.memory):
        yield "--flavor says which cores and memory a machine has: leave out --cpus and --memory"
    if not request.region:
        yield NO_REGION
    if not any(requests.mistakes(request)) and len(json.dumps(build(request)).encode()) > LARGEST:
        yield f"the request is larger than {LARGEST} bytes: give less in --env or to the job"


def build(request: Request) -> dict[str, Any]:
    """Return the body of POST /api/v1/jobs; the first worker is the master."""
    worker = requests.without_none(
        Type="Worker",
        PodCount=request.nodes,
        Image=request.image,
        EcsSpec=request.flavor or None,
        ResourceConfig=None if request.flavor else _resources(request) or None,
        SpotSpec={"SpotStrategy": "SpotAsPriceGo"} if request.spot else None,
    )
    folders = {CODE: request.code_url, DATA: request.data_url, OUTPUT: request.output_url}
    return requests.without_none(
        DisplayName=request.name,
        JobType="PyTorchJob",
        WorkspaceId=request.workspace,
        JobSpecs=[worker],
        UserCommand=_command(request),
        DataSources=[
            {"Uri": _uri(url, request.region), "MountPath": path} for path, url in folders.items() if url
        ],
        Envs={"PYTHONUNBUFFERED": "1", **request.environment},
        Settings={**_restarts(request.retries), "TerminationGracePeriodSeconds": GRACE_SECONDS},
        ResourceId=request.pool or None,
        JobMaxRunningTimeMinutes=round(request.hours * 60) if request.hours else None,
    )


def _resources(request: Request) -> dict[str, str]:
    resources = {"GPU": request.gpus, "CPU": request.cpus, "Memory": request.memory and f"{request.memory}Gi"}
    return {name: str(value) for name, value in resources.items() if value}


def _restarts(retries: int) -> dict[str, Any]:
    """Return the settings with which PAI's AIMaster restarts the whole job after a failure or a hang;
    empty without retries."""
    if not retries:
        return {}
    arguments = (
        f"--enable-job-restart True --max-num-of-job-restart {retries} "
        "--job-execution-mode Sync --enable-job-hang-detection True"
    )
    return {"EnableErrorMonitoringInAIMaster": True, "ErrorMonitoringArgs": arguments}


def _command(request: Request) -> str:
    """Return a shell line that installs packages and ends in exec,
    so that a stop signal reaches the job and not the shell."""
    data = request.data_url and DATA
    output = request.output_url and OUTPUT
    words = requests.command(request, CODE, data, output)
    return f"pip install -q -r {CODE}/requirements.txt && exec {shlex.join(words)}"


def _uri(url: str, region: Optional[str]) -> str:
    """Convert oss://bucket/folder to oss://bucket.oss-REGION-internal.aliyuncs.com/folder/,
    whose traffic is free."""
    bucket, _, folder = url[len("oss://") :].partition("/")
    return f"oss://{bucket}.oss-{region}-internal.aliyuncs.com/{folder.rstrip('/')}/"


# --- Sending ------------------------------------------------------------------------------------------------


def connect(request: Request) -> Any:
    """Return a client of PAI-DLC for the region of the request; UserError if it has none."""
    if not request.region:  # mistakes() is not called for --stop
        raise UserError(NO_REGION)
    try:
        from alibabacloud_credentials.client import Client as Credentials
        from alibabacloud_pai_dlc20201203.client import Client
        from alibabacloud_tea_openapi.models import Config
    except ImportError:
        raise not_installed("alibabacloud_pai_dlc20201203", "pai-dlc") from None
    url = urllib.parse.urlsplit(request.endpoint or f"https://pai-dlc.{request.region}.aliyuncs.com")
    config = Config(
        credential=Credentials(), region_id=request.region, endpoint=url.netloc, protocol=url.scheme
    )
    return Client(config)


def send(client: Any, request: Request, body: Any) -> str:
    from alibabacloud_pai_dlc20201203.models import CreateJobRequest

    return client.create_job(CreateJobRequest().from_map(body)).body.job_id


def console(request: Request, job_id: str) -> str:
    return f"https://pai.console.aliyun.com/?regionId={request.region}&workspaceId={request.workspace}#/dlc/jobs/{job_id}"


def state(client: object, request: Request, job_id: str) -> tuple[str, Optional[int]]:
    status = _job(client, job_id).status
    return status, ENDED.get(status)


def _job(client: Any, job_id: str) -> Any:
    from alibabacloud_pai_dlc20201203.models import GetJobRequest

    return client.get_job(job_id, GetJobRequest()).body


def log(client: Any, request: Request, job_id: str) -> list[str]:
    """Return the last lines of the log of the master or first pod, in which rank 0 prints the progress;
    empty without a pod."""
    from alibabacloud_pai_dlc20201203.models import GetPodLogsRequest

    pods = sorted(pod.pod_id for pod in _job(client, job_id).pods or [])
    if not pods:
        return []
    main_pod = next((pod for pod in pods if "master" in pod), pods[0])
    return client.get_pod_logs(job_id, main_pod, GetPodLogsRequest(max_lines=LOG_LINES)).body.logs or []


def stop(client: Any, request: Request, job_id: str) -> None:
    client.stop_job(job_id)


PLATFORM = Platform(
    service="PAI-DLC",
    credentials=(
        "set ALIBABA_CLOUD_ACCESS_KEY_ID and ALIBABA_CLOUD_ACCESS_KEY_SECRET, or run `aliyun configure`"
    ),
    has_credentials=in_environment(
        "ALIBABA_CLOUD_ACCESS_KEY_ID",
        "ALIBABA_CLOUD_CREDENTIALS_URI",
        "ALIBABA_CLOUD_ECS_METADATA",
        "ALIBABA_CLOUD_ROLE_ARN",
        files=("~/.alibabacloud/credentials", "~/.alibabacloud/credentials.ini", "~/.aliyun/config.json"),
    ),
    secrets="give the job's workspace a RAM role, or put the secret into a file in one of the job's folders",
    build=build,
    send=send,
    console=console,
    state=state,
    log=log,
    stop=stop,
    mistakes=mistakes,
    connect=connect,
)
