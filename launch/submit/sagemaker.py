"""AWS SageMaker: a training job, sent through boto3.

The container starts boot_sagemaker.py, which replaces itself with the job, so that SIGTERM (a stop, or the
loss of a spot machine) reaches the job; SageMaker's toolkit never passes SIGTERM on. Any image with Python
and torch will do.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Optional

from common.world.folders import SAGEMAKER_CHECKPOINTS, SAGEMAKER_TENSORBOARD
from launch.submit import request as requests
from launch.submit.platform import LOG_LINES, Platform
from launch.submit.request import Request

CODE = "/opt/ml/input/data/code"
DAY = 24 * 3600
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
ENDED = {"Completed": 0, "Failed": 1, "Stopped": 1}

# {metric: its regular expression in the lines that a job prints (common/run/observers/console.py)};
# docs/platforms.md has them.
OF_AN_EPOCH = ("accuracy", "balanced_accuracy", "top5", "loss", "psnr", "ssim")
OF_A_STEP = ("train_loss", "lr", "images_per_s", "samples_per_s", "waiting_for_data")
METRICS = {name: rf"(?:^| ){name}=([0-9.e-]+)" for name in (*OF_AN_EPOCH, *OF_A_STEP)}


def _has_credentials(environ: Mapping[str, str]) -> bool:
    import boto3

    return boto3.Session().get_credentials() is not None


def mistakes(request: Request) -> Iterator[str]:
    """Yield a line for each mistake that only SageMaker refuses."""
    if request.flavor and not request.flavor.startswith("ml."):
        yield f"--flavor is {request.flavor}: give a type that begins with ml., such as ml.g5.48xlarge"
    if request.role and not request.role.startswith("arn:aws"):
        yield f"--role is {request.role}: give the role's ARN, arn:aws:iam::ACCOUNT:role/NAME"
    if len(request.pairs) > 100:
        yield f"the job has {len(request.pairs)} options: sagemaker takes 100 at most"
    for name, value in request.pairs:
        if value is not None and len(value) > 2500:
            yield f"--{name} has {len(value)} characters: sagemaker takes 2500 at most"


def build(request: Request) -> dict[str, Any]:
    """Return the arguments of create_training_job()."""
    assert request.code_url and request.output_url  # mistakes() has refused a request without them
    seconds = request.seconds or DAY
    longest_wait = seconds + DAY if request.spot else None
    output = request.output_url.rstrip("/")
    channels = [_channel("code", request.code_url)]
    if request.data_url:
        channels.append(_channel("training", request.data_url))
    return requests.without_none(
        TrainingJobName=request.name,
        RoleArn=request.role,
        AlgorithmSpecification={
            "TrainingImage": request.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["python", f"{CODE}/boot_sagemaker.py"],
            "ContainerArguments": [request.job],
            "MetricDefinitions": [{"Name": name, "Regex": regex} for name, regex in METRICS.items()],
        },
        HyperParameters=dict(request.pairs),
        InputDataConfig=channels,
        OutputDataConfig={"S3OutputPath": f"{output}/"},
        # SageMaker gives the saved checkpoints to this job when it restarts it, and to a later job with the
        # same address.
        CheckpointConfig={"S3Uri": f"{output}/checkpoints/", "LocalPath": SAGEMAKER_CHECKPOINTS},
        TensorBoardOutputConfig={
            "S3OutputPath": f"{output}/tensorboard/",
            "LocalPath": SAGEMAKER_TENSORBOARD,
        },
        ResourceConfig={
            "InstanceType": request.flavor,
            "InstanceCount": request.nodes,
            "VolumeSizeInGB": 100,
        },
        StoppingCondition=requests.without_none(
            MaxRuntimeInSeconds=seconds, MaxWaitTimeInSeconds=longest_wait
        ),
        Environment={"PYTHONUNBUFFERED": "1", **request.workers, **request.environment},
        EnableManagedSpotTraining=request.spot,
        RetryStrategy={"MaximumRetryAttempts": request.retries} if request.retries else None,
    )


def _channel(name: str, url: str) -> dict[str, Any]:
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": url.rstrip("/") + "/",
        "S3DataDistributionType": "FullyReplicated",
    }
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


# --- Sending ------------------------------------------------------------------------------------------------


def connect(request: Request) -> Any:
    """Return {service: boto3 client}, one for the jobs and one for their logs."""
    import boto3

    session = boto3.Session(region_name=request.region)
    return {name: session.client(name) for name in ("sagemaker", "logs")}


def send(clients: Any, request: Request, body: Any) -> str:
    clients["sagemaker"].create_training_job(**body)
    return body["TrainingJobName"]


def console(request: Request, job_id: str) -> str:
    region = request.region or "us-east-1"
    return f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}#/jobs/{job_id}"


def state(clients: Any, request: Request, job_id: str) -> tuple[str, Optional[int]]:
    description = clients["sagemaker"].describe_training_job(TrainingJobName=job_id)
    status = description["TrainingJobStatus"]
    return f"{status} ({description.get('SecondaryStatus', '')})", ENDED.get(status)


def log(clients: Any, request: Request, job_id: str) -> list[str]:
    """Return the last lines of the first host's newest log, in which rank 0 prints the progress;
    empty before there is one."""
    logs = clients["logs"]
    streams = logs.describe_log_streams(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job_id}/algo-1-")[
        "logStreams"
    ]
    if not streams:
        return []
    stream = streams[-1]["logStreamName"]  # its name ends with the time of this start
    events = logs.get_log_events(
        logGroupName=LOG_GROUP, logStreamName=stream, limit=LOG_LINES, startFromHead=False
    )
    return [event["message"] for event in events["events"]]


def stop(clients: Any, request: Request, job_id: str) -> None:
    clients["sagemaker"].stop_training_job(TrainingJobName=job_id)


PLATFORM = Platform(
    service="SageMaker",
    credentials="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    has_credentials=_has_credentials,
    secrets="let --role read it from AWS Secrets Manager when the job starts",
    build=build,
    send=send,
    console=console,
    state=state,
    log=log,
    stop=stop,
    mistakes=mistakes,
    connect=connect,
)
