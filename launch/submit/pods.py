"""The pods of a job on a Kubernetes cluster, alike for all kinds of jobs,
as the pod security standard "restricted" has them.

The job is the container's first process, with no shell before it, so that SIGTERM reaches it; it has
GRACE_SECONDS to save. It runs as USER in the folder SCRATCH, the only one beside /tmp that it may surely
write to. /dev/shm is a volume in memory, because a pod's own 64 MB are too few for NCCL and Ray. What else a
cluster wants is in the file of --patch (patches.py).
"""

from pathlib import Path
from typing import Any

from common.storage.bucket import ADDRESS, ENDPOINTS
from launch.submit import patches
from launch.submit import request as requests
from launch.submit.patches import Fields
from launch.submit.request import Request

CODE = "/code"  # where the code from a bucket is
SCRATCH = "/scratch"
SECRET_VARIABLE = "ANYRANK_SECRET"  # has the secret that the nodes share
SECRET_KEY = "secret"  # of this in the Secret
OWN_FOLDERS = {CODE, SCRATCH, "/dev/shm"}
GRACE_SECONDS = 300
GPU = "nvidia.com/gpu"
USER = 1000  # the user and the group of the processes, and the group of new files on volumes

OF_THE_POD = {
    "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip
OF_A_CONTAINER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def template(request: Request, **extra_fields: Any) -> Fields:
    """Return a pod template, changed by --patch; `extra_fields`: what the spec has for this kind of job."""
    pod = {**extra_fields, "securityContext": OF_THE_POD, "terminationGracePeriodSeconds": GRACE_SECONDS}
    if request.upload_url:
        pod["initContainers"] = [_fetcher(request)]
    pod["containers"] = [container(request)]
    pod["volumes"] = volumes(request)
    return patches.merged({"spec": pod}, patches.read(request.patch).get("template", {}))


def container(request: Request) -> Fields:
    """Return the container that runs the job."""
    assert request.code_url  # mistakes() has refused a request without it
    code = CODE if request.upload_url else request.code_url.rstrip("/")
    own_mounts = [("shm", "/dev/shm"), ("scratch", SCRATCH)]
    if request.upload_url:
        own_mounts.append(("code", CODE))
    own_mounts += mounted_claims(request)
    return {
        "name": "pytorch",  # the name that Kubeflow requires
        "image": request.image,
        "command": [
            _literal(word) for word in requests.command(request, code, request.data_url, request.output_url)
        ],
        "workingDir": SCRATCH,
        "env": [*_variables(request), *_secret_variable(request)],
        "resources": _resources(request),
        "securityContext": OF_A_CONTAINER,
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in own_mounts],
        **_secret(request),
    }


def _resources(request: Request) -> dict[str, dict[str, str]]:
    """Return what a pod gets: the limits are the requests, so that no neighbour takes memory from it,
    nor it from them."""
    sizes = {}
    if request.gpus:
        sizes[GPU] = str(request.gpus)
    if request.cores:
        sizes["cpu"] = str(request.cores)
    if request.gibibytes:
        sizes["memory"] = f"{request.gibibytes}Gi"
    return {"limits": sizes, "requests": sizes} if sizes else {}


def _fetcher(request: Request) -> Fields:
    """Return the init container that fetches the code from the bucket.

    It uses the job's image, which must have boto3.
    """
    address = ADDRESS.fullmatch(request.code_url or "")
    assert address  # mistakes() has refused any other address
    scheme, bucket, prefix = address.groups()
    program = (Path(__file__).with_name("boot") / "fetch_code.py").read_text()
    folder = f"{(prefix or '').rstrip('/')}/".lstrip("/")
    endpoint = ENDPOINTS.get(scheme)  # None for s3://, where boto3 finds the endpoint itself
    addressing = "virtual" if endpoint else "auto"
    command = ["python", "-c", program, bucket, folder, CODE, addressing]
    variables = _variables(request)
    if endpoint:
        variables.append({"name": "AWS_ENDPOINT_URL_S3", "value": endpoint.format(region=request.region)})
    return {
        "name": "fetch-code",
        "image": request.image,
        "command": [_literal(word) for word in command],
        "env": variables,
        "resources": _resources(request),
        "securityContext": OF_A_CONTAINER,
        "volumeMounts": [{"name": "code", "mountPath": CODE}, {"name": "scratch", "mountPath": SCRATCH}],
        **_secret(request),
    }


def _variables(request: Request) -> list[Fields]:
    """Return the variables of a container; its user may have neither a home nor a name in the image."""
    region = {"AWS_REGION": request.region} if request.region else {}
    defaults = {"PYTHONUNBUFFERED": "1", "HOME": SCRATCH, "USER": "anyrank"}
    variables = {**defaults, **node_variables(request), **region, **request.environment}
    return [{"name": name, "value": _literal(value)} for name, value in variables.items()]


def node_variables(request: Request) -> dict[str, str]:
    """Return the variables that a plain Job does not set itself; it does set JOB_COMPLETION_INDEX,
    the node."""
    if request.platform != "kubernetes":
        return {}
    master = (
        {"MASTER_ADDR": f"{request.name}-0.{request.name}", "MASTER_PORT": "23456"}
        if request.nodes > 1
        else {}
    )
    return {"WORLD_SIZE": str(request.nodes), **master, **request.workers}


def _literal(text: str) -> str:
    """Escape each $: in commands and values of variables, Kubernetes replaces $(NAME) with a variable,
    and $$ with $."""
    return text.replace("$", "$$")


def _secret_variable(request: Request) -> list[Fields]:
    """Return the variable with the secret by which nodes authenticate to each other (docs/security.md);
    empty for one node."""
    if request.nodes <= 1:
        return []
    reference = {"secretKeyRef": {"name": secret_name(request), "key": SECRET_KEY}}
    return [{"name": SECRET_VARIABLE, "valueFrom": reference}]


def secret_name(request: Request) -> str:
    return f"{request.name}-nodes"


def _secret(request: Request) -> Fields:
    return {"envFrom": [{"secretRef": {"name": request.secret}}]} if request.secret else {}


def mounts(request: Request) -> list[tuple[str, str]]:
    """Return (PersistentVolumeClaim, folder where it is mounted) for each of --volumes."""
    return [(claim, folder) for claim, _, folder in (volume.partition(":") for volume in request.volumes)]


def claims(request: Request) -> list[str]:
    """Return the PersistentVolumeClaims of --volumes, each once."""
    return list(dict.fromkeys(claim for claim, _ in mounts(request)))


def mounted_claims(request: Request) -> list[tuple[str, str]]:
    """Return (volume, folder) for each of --volumes. A claim may have a name that a volume may not have."""
    names = {claim: f"claim-{number}" for number, claim in enumerate(claims(request))}
    return [(names[claim], folder) for claim, folder in mounts(request)]


def volumes(request: Request) -> list[Fields]:
    """Return the volumes of a pod.

    What is in /dev/shm counts as memory of the pod, so it may take half of that.
    """
    memory = {"medium": "Memory"}
    if request.gibibytes:
        memory["sizeLimit"] = f"{request.gibibytes * 512}Mi"
    result: list[Fields] = [{"name": "shm", "emptyDir": memory}, {"name": "scratch", "emptyDir": {}}]
    if request.upload_url:
        result.append({"name": "code", "emptyDir": {}})
    for number, claim in enumerate(claims(request)):
        result.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
    return result
