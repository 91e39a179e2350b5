"""Huawei ModelArts: a training job of its version 2 interface, sent through huaweicloudsdkmodelarts.

The body is sent as a dictionary, because the SDK's class Output has no field for the download before the
start. Without this download, a job that is started again would have an empty output folder.
"""

import re
import shlex
from collections.abc import Iterator
from typing import Any, Optional

from common.errors import UserError
from common.storage import bucket
from launch import engines
from launch.submit import request as requests
from launch.submit.platform import Platform, in_environment, not_installed
from launch.submit.request import Request

# code_dir is copied into it, under the name of its last folder
CODE_FOLDER = "/home/ma-user/modelarts/user-job-dir"
MOST_HOURS = 72  # the limit of ModelArts' Auto Stop
ON_NPUS = r"ascend|cann|npu|snt9"  # in the names of engines and flavors for NPUs
ENDED = {"Completed": 0, "Failed": 1, "Abnormal": 1, "Terminated": 1}


def mistakes(request: Request) -> Iterator[str]:
    """Yield a line for each mistake that only ModelArts refuses."""
    if bool(request.image) == bool(request.engine):
        yield (
            "modelarts needs --engine, one of its own PyTorch images, or --image, one of yours: give one "
            "of them"
        )
    if request.engine:
        try:
            engines.parse(request.engine)
        except UserError as error:
            yield str(error)
    yield from _wrong_accelerator(request)
    if not request.region and not request.endpoint:
        yield "modelarts needs --region, such as cn-north-4, or --endpoint"
    if not 0 <= request.retries <= 3:
        yield f"--retries is {request.retries}: modelarts starts a job again 3 times at most"
    if request.hours is not None and request.hours != int(request.hours):
        yield f"--hours is {request.hours:g}: modelarts counts whole hours"
    if request.hours is not None and request.hours > MOST_HOURS:
        yield (
            f"--hours is {request.hours:g}: modelarts stops a job after {MOST_HOURS} at most: give the job "
            "--max_hours"
        )
    for name, value in request.environment.items():
        if "$" in value:
            yield f"--env {name}: modelarts takes no $ in a value"


def _wrong_accelerator(request: Request) -> Iterator[str]:
    """Yield a line if --accelerator is unknown, or does not match the engine or flavor:
    the job would fail minutes later."""
    if request.accelerator not in ("gpu", "npu"):
        yield f"--accelerator is {request.accelerator!r}: give gpu or npu"
        return
    for name in ("engine", "flavor"):
        value = getattr(request, name) or ""
        is_npu = request.accelerator == "npu"
        if re.search(ON_NPUS, value, re.IGNORECASE) and not is_npu:
            yield f"--{name} {value} is for NPUs: give --accelerator npu with it"
        if re.search("cuda|gpu", value, re.IGNORECASE) and is_npu:
            yield f"--{name} {value} is for GPUs: --accelerator npu needs an Ascend one"


def build(request: Request) -> dict[str, Any]:
    """Return the body of the request that creates a training job."""
    spec = requests.without_none(
        resource=requests.without_none(
            flavor_id=request.flavor, node_count=request.nodes, pool_id=request.pool
        ),
        log_export_path={"obs_url": _path(request.log_url)} if request.log_url else None,
        auto_stop={"time_unit": "HOURS", "duration": int(request.hours)} if request.hours else None,
        schedule_policy={"preemptible": True} if request.spot else None,
    )
    annotations = None
    if request.retries:
        annotations = {
            "fault-tolerance/job-retry-num": str(request.retries),
            "fault-tolerance/job-unconditional-retry": "true",
            "fault-tolerance/hang-retry": "true",
        }
    metadata = requests.without_none(
        name=request.name, workspace_id=request.workspace, annotations=annotations
    )
    return {"kind": "job", "metadata": metadata, "algorithm": _algorithm(request), "spec": spec}


def _algorithm(request: Request) -> dict[str, Any]:
    """Return the part of the request with the code, the folders, the variables and what is started."""
    assert request.code_url and request.output_url  # mistakes() has refused a request without them
    code = _path(request.code_url)
    # ModelArts appends the folders to a boot file's arguments, but not to an image's command, which gets them
    # as variables.
    access = "env" if request.image else "parameter"
    output = {
        **_channel("train_url", request.output_url, access),
        "mode": "upload_periodically",
        "period": 30,
        "prefetch_to_local": True,  # so that a restarted job finds what it has written
    }
    # The Ascend engine itself starts the boot file once for each card, so the job must not start more
    # processes.
    is_by_card = request.accelerator == "npu" and not request.image
    workers = {} if is_by_card else request.workers
    inputs = []
    if request.data_url:
        inputs.append(_channel("data_url", request.data_url, access))
    algorithm = {
        "code_dir": code,
        "inputs": inputs,
        "outputs": [output],
        "environments": {"PYTHONUNBUFFERED": "1", **workers, **request.environment},
    }
    if request.image:
        folder = f"{CODE_FOLDER}/{code.rstrip('/').rsplit('/', 1)[1]}"
        return {
            **algorithm,
            "engine": {"image_url": request.image},
            "command": shlex.join(requests.command(request, folder)),
        }
    return {
        **algorithm,
        "boot_file": code + request.job,
        "engine": {"engine_id": request.engine},
        "parameters": [{"name": name, "value": value} for name, value in request.pairs],
    }


def _channel(name: str, url: str, access: str) -> dict[str, Any]:
    return {"name": name, "access_method": access, "remote": {"obs": {"obs_url": _path(url)}}}


def _path(url: str) -> str:
    """Convert obs://bucket/folder to /bucket/folder/, the form that the API takes."""
    return url[len("obs:/") :].rstrip("/") + "/"


# --- Sending ------------------------------------------------------------------------------------------------


def connect(request: Request) -> Any:
    """Return a ModelArtsClient for --endpoint, else for --region; UserError for an unknown region."""
    try:
        from huaweicloudsdkcore.auth.provider import CredentialProviderChain
        from huaweicloudsdkmodelarts.v1 import ModelArtsClient
        from huaweicloudsdkmodelarts.v1.region.modelarts_region import ModelArtsRegion
    except ImportError:
        raise not_installed("huaweicloudsdkmodelarts", "modelarts") from None
    chain = CredentialProviderChain.get_basic_credential_provider_chain()
    builder = ModelArtsClient.new_builder().with_credentials(chain.get_credentials())
    if request.endpoint:
        return builder.with_endpoints([request.endpoint]).build()
    try:
        region: Any = ModelArtsRegion.value_of(request.region)
        return builder.with_region(region).build()
    except KeyError:
        raise UserError(
            f"ModelArts has no region {request.region!r}: check its name, or give --endpoint"
        ) from None


def send(client: Any, request: Request, body: Any) -> str:
    from huaweicloudsdkmodelarts.v1 import CreateTrainingJobRequest

    for name in ("code_url", "data_url", "output_url"):
        url = getattr(request, name)
        if url and (encryption := bucket.encryption(url)):
            raise UserError(
                f"--{name} {url}: the bucket is encrypted ({encryption}), which ModelArts' jobs cannot "
                "read: give another"
            )
    return client.create_training_job(CreateTrainingJobRequest(body=body)).metadata.id


def console(request: Request, job_id: str) -> str:
    return (
        f"https://console.huaweicloud.com/modelarts/?region={request.region or ''}#/trainingJobs, job "
        f"{job_id}"
    )


def state(client: Any, request: Request, job_id: str) -> tuple[str, Optional[int]]:
    from huaweicloudsdkmodelarts.v1 import ShowTrainingJobDetailsRequest

    phase = client.show_training_job_details(
        ShowTrainingJobDetailsRequest(training_job_id=job_id)
    ).status.phase
    return phase, ENDED.get(phase)


def log(client: Any, request: Request, job_id: str) -> list[str]:
    from huaweicloudsdkmodelarts.v1 import ShowTrainingJobLogsPreviewRequest

    query = ShowTrainingJobLogsPreviewRequest(training_job_id=job_id, task_id="worker-0")
    content: str = client.show_training_job_logs_preview(query).content or ""
    return content.splitlines()


def stop(client: Any, request: Request, job_id: str) -> None:
    from huaweicloudsdkmodelarts.v1 import JobActionType, StopTrainingJobRequest

    client.stop_training_job(
        StopTrainingJobRequest(training_job_id=job_id, body=JobActionType(action_type="terminate"))
    )


PLATFORM = Platform(
    service="ModelArts",
    credentials=(
        "set HUAWEICLOUD_SDK_AK, HUAWEICLOUD_SDK_SK and HUAWEICLOUD_SDK_PROJECT_ID, or write "
        "~/.huaweicloud/credentials"
    ),
    has_credentials=in_environment(
        "HUAWEICLOUD_SDK_AK",
        "HUAWEICLOUD_SDK_IDP_ID",
        "HUAWEICLOUD_OIDC_PROVIDER_URN",
        "HUAWEICLOUD_SDK_CREDENTIALS_FILE",
        files=("~/.huaweicloud/credentials",),
    ),
    secrets=(
        "give the job an agency that may read what it needs, or put the secret into a file that only its "
        "folders hold"
    ),
    build=build,
    send=send,
    console=console,
    state=state,
    log=log,
    stop=stop,
    mistakes=mistakes,
    connect=connect,
)
