"""A Kubernetes cluster: Kubeflow's PyTorchJob and TrainJob, and Volcano's Job, sent through the kubernetes client.

The job is the container's first process, with no shell before it, so that SIGTERM reaches it; it has GRACE_SECONDS to save
(a TrainJob: what its runtime sets). /dev/shm is a volume in memory, because a pod's own 64 MB are too few for NCCL and Ray.
"""

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

from common.storage.bucket import ADDRESS, ENDPOINTS
from launch.submit import request as requests
from launch.submit.request import Request

SERVICE = "Kubernetes"
CREDENTIALS = "there is no ~/.kube/config: set KUBECONFIG, or write it with your cluster's own tool"
CODE = "/code"
VARIABLE, KEY = "ANYRANK_SECRET", "secret"  # the variable with the secret that the nodes share, and its key in the Secret
GRACE_SECONDS = 60
GPU = "nvidia.com/gpu"

# {kind of object: (API group, version, plural, name of its first pod or None if that has to be looked up)}
KINDS = {
    "PyTorchJob": ("kubeflow.org", "v1", "pytorchjobs", "{name}-master-0"),
    "TrainJob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs", None),
    "Job": ("batch.volcano.sh", "v1alpha1", "jobs", "{name}-master-0"),
}
ENDED = {"Succeeded": 0, "Complete": 0, "Completed": 0, **dict.fromkeys(["Failed", "Aborted", "Terminated"], 1)}


def has_credentials(environ: Mapping[str, str]) -> bool:
    return requests.credentials_in(environ, ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"), ["~/.kube/config"])


def mistakes(request: Request) -> Iterator[str]:
    code = request.code_url or ""
    if request.runtime and (request.upload_url or request.secret):
        yield "a TrainJob takes neither code from a bucket nor --secret: give --code_url /FOLDER of the image or of --volumes"
    if request.platform == "volcano" and request.hours and request.retries:
        given = f"--hours is {request.hours:g} and --retries is {request.retries}"
        yield f"{given}: volcano counts them anew in each start, {request.retries + 1} times: give --retries 0, or no --hours"
    if code.startswith(("obs://", "oss://")) and not request.region:
        yield f"--code_url is {code}: give --region, such as cn-north-4"


def kind_of(request: Request) -> str:
    return "Job" if request.platform == "volcano" else "TrainJob" if request.runtime else "PyTorchJob"


def build(request: Request) -> dict[str, Any]:
    kind = kind_of(request)
    group, version, _, _ = KINDS[kind]
    spec = {"PyTorchJob": _pytorch_job, "TrainJob": _train_job, "Job": _volcano_job}[kind](request)
    metadata = {"name": request.name, "namespace": request.namespace}
    return {"apiVersion": f"{group}/{version}", "kind": kind, "metadata": metadata, "spec": spec}


def _pytorch_job(request: Request) -> dict[str, Any]:
    """Return the spec of a PyTorchJob. With --retries, a container that fails is restarted in its pod, and the job resumes."""
    policy = requests.given(backoffLimit=request.retries, cleanPodPolicy="Running", activeDeadlineSeconds=request.seconds)
    replicas = {
        name: {"replicas": count, "restartPolicy": "OnFailure" if request.retries else "Never", "template": _template(request)}
        for name, count in _tasks(request).items()
    }
    processes = str(request.gpus) if request.gpus else None
    return requests.given(runPolicy=policy, pytorchReplicaSpecs=replicas, nprocPerNode=processes)


def _volcano_job(request: Request) -> dict[str, Any]:
    """Return a Volcano Job's spec. With --retries, a failure restarts all pods (--min_nodes: that pod), but not exit code 2."""
    pod = requests.given(**_template(request)["spec"], restartPolicy="Never", activeDeadlineSeconds=request.seconds)
    tasks: list[dict[str, Any]] = [
        {"name": name.lower(), "replicas": count, "template": {"spec": pod}} for name, count in _tasks(request).items()
    ]
    tasks[0]["policies"] = [{"event": "TaskCompleted", "action": "CompleteJob"}]  # the job is complete when its master is
    mistake = {"exitCode": 2, "action": "TerminateJob"}  # a mistake in the request, which a restart would only repeat
    restart = "RestartPod" if request.is_elastic else "RestartJob"
    fault = [{"event": event, "action": restart} for event in ("PodFailed", "PodEvicted")]
    again = [mistake, *fault] if request.retries else []
    return requests.given(
        schedulerName="volcano",
        minAvailable=request.nodes,  # start all pods or none
        maxRetry=request.retries,
        plugins={"pytorch": ["--master=master", "--worker=worker", "--port=23456"], "svc": [], "env": []},
        policies=again,
        tasks=tasks,
        queue=request.pool or None,
    )


def _train_job(request: Request) -> dict[str, Any]:
    """Return the spec of a TrainJob. Its --runtime sets restarts and the grace period; a patch adds volumes to the pods."""
    container = _container(request)
    trainer = requests.given(
        numNodes=request.nodes,
        resourcesPerNode=container["resources"],
        **{name: container[name] for name in ("image", "command", "env")},
        numProcPerNode=request.gpus or None,
    )
    pod = {"volumes": _volumes(request), "containers": [{"name": "node", "volumeMounts": container["volumeMounts"]}]}
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    patch = {"manager": "anyrank/submit", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    return requests.given(
        runtimeRef={"name": request.runtime},
        trainer=trainer,
        runtimePatches=[patch],
        activeDeadlineSeconds=request.seconds,
    )


def _tasks(request: Request) -> dict[str, int]:
    return {"Master": 1, **({"Worker": request.nodes - 1} if request.nodes > 1 else {})}


# --- The pod -----------------------------------------------------------------------------------------------------------


def _template(request: Request) -> dict[str, Any]:
    pod = {"terminationGracePeriodSeconds": GRACE_SECONDS, "containers": [_container(request)], "volumes": _volumes(request)}
    return {"spec": {**pod, "initContainers": [_fetcher(request)]} if request.upload_url else pod}


def _container(request: Request) -> dict[str, Any]:
    assert request.code_url  # mistakes() has refused a request without it
    code = CODE if request.upload_url else request.code_url.rstrip("/")
    mounts = {"shm": "/dev/shm", **({"code": CODE} if request.upload_url else {}), **_claims(request)}
    return {
        "name": "pytorch",  # the name that Kubeflow requires
        "image": request.image,
        "command": [_literal(word) for word in requests.command(request, code, request.data_url, request.output_url)],
        "env": [*_variables(request), *_secret_variable(request)],
        "resources": _resources(request),
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
        **_secret(request),
    }


def _resources(request: Request) -> dict[str, dict[str, str]]:
    """Return the container's resources. Cores and memory are requests without a limit: a job may use more of what is free."""
    sizes = {"cpu": request.cpus and str(request.cpus), "memory": request.memory and f"{request.memory}Gi"}
    kinds = {
        "limits": {GPU: str(request.gpus)} if request.gpus else {},
        "requests": {name: it for name, it in sizes.items() if it},
    }
    return {kind: asked for kind, asked in kinds.items() if asked}


def _fetcher(request: Request) -> dict[str, Any]:
    """Return the init container that fetches the code from the bucket. It uses the job's image, which must have boto3."""
    address = ADDRESS.fullmatch(request.code_url or "")
    assert address  # mistakes() has refused any other address
    scheme, bucket, prefix = address.groups()
    program = Path(__file__).with_name("fetch_code.py").read_text()
    folder = f"{(prefix or '').rstrip('/')}/".lstrip("/")
    endpoint = ENDPOINTS.get(scheme)  # None for s3://, where boto3 finds the endpoint itself
    command = ["python", "-c", program, bucket, folder, CODE, "virtual" if endpoint else "auto"]
    own_endpoint = [{"name": "AWS_ENDPOINT_URL_S3", "value": endpoint.format(region=request.region)}] if endpoint else []
    return {
        "name": "fetch-code",
        "image": request.image,
        "command": [_literal(word) for word in command],
        "env": [*_variables(request), *own_endpoint],
        "volumeMounts": [{"name": "code", "mountPath": CODE}],
        **_secret(request),
    }


def _variables(request: Request) -> list[dict[str, Any]]:
    region = {"AWS_REGION": request.region} if request.region else {}
    given = {"PYTHONUNBUFFERED": "1", **region, **request.environment}
    return [{"name": name, "value": _literal(value)} for name, value in given.items()]


def _literal(text: str) -> str:
    """Escape each $: in commands and values of variables, Kubernetes replaces $(NAME) with a variable, and $$ with $."""
    return text.replace("$", "$$")


def _secret_variable(request: Request) -> list[dict[str, Any]]:
    """Return the variable with the secret by which nodes authenticate to each other (docs/security.md); empty for one node."""
    kept = {"secretKeyRef": {"name": _secret_name(request), "key": KEY}}
    return [{"name": VARIABLE, "valueFrom": kept}] if request.nodes > 1 else []


def _secret_name(request: Request) -> str:
    return f"{request.name}-nodes"


def _secret(request: Request) -> dict[str, Any]:
    return {"envFrom": [{"secretRef": {"name": request.secret}}]} if request.secret else {}


def _claims(request: Request) -> dict[str, str]:
    """Return {name of a PersistentVolumeClaim: folder where it is mounted}. A volume has the name of its claim."""
    return dict(volume.split(":", 1) for volume in request.volumes)


def _volumes(request: Request) -> list[dict[str, Any]]:
    code = [{"name": "code", "emptyDir": {}}] if request.upload_url else []
    claims = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in _claims(request)]
    return [{"name": "shm", "emptyDir": {"medium": "Memory"}}, *code, *claims]


# --- Sending -----------------------------------------------------------------------------------------------------------


def connect(request: Request) -> Any:
    try:
        import kubernetes
    except ImportError:
        raise requests.not_installed("kubernetes", "kubernetes") from None
    if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
        kubernetes.config.load_incluster_config()
        return kubernetes.client.ApiClient()
    return kubernetes.config.new_client_from_config(os.environ.get("KUBECONFIG"))


def _where(request: Request) -> dict[str, str]:
    group, version, plural, _ = KINDS[kind_of(request)]
    return {"group": group, "version": version, "namespace": request.namespace, "plural": plural}


def _objects(client: object) -> Any:
    from kubernetes.client import CustomObjectsApi

    return CustomObjectsApi(client)


def send(client: object, request: Request, body: Any) -> str:
    """Create the job and, for several nodes, a Secret that their pods wait for; the cluster deletes the Secret with the job."""
    created = _objects(client).create_namespaced_custom_object(**_where(request), body=body)["metadata"]
    if request.nodes > 1:
        from kubernetes.client import CoreV1Api

        core: Any = CoreV1Api(client)
        owner = {"apiVersion": body["apiVersion"], "kind": body["kind"], "name": created["name"], "uid": created["uid"]}
        metadata = {"name": _secret_name(request), "ownerReferences": [owner]}
        try:
            core.create_namespaced_secret(request.namespace, {"metadata": metadata, "stringData": {KEY: secrets.token_hex(32)}})
        except Exception:
            stop(client, request, created["name"])
            raise
    return created["name"]


def console(request: Request, job_id: str) -> str:
    group, _, plural, _ = KINDS[kind_of(request)]
    return f"kubectl -n {request.namespace} describe {plural}.{group} {job_id}"


def state(client: object, request: Request, job_id: str) -> tuple[str, Optional[int]]:
    """Return (state, exit code or None until the job ends). The state is Volcano's phase, Kubeflow's condition or Created."""
    status = _objects(client).get_namespaced_custom_object(**_where(request), name=job_id).get("status") or {}
    true = [condition["type"] for condition in status.get("conditions", []) if condition.get("status") == "True"]
    name = status.get("state", {}).get("phase") or next((one for one in true if one in ENDED), true[-1] if true else "Created")
    return name, ENDED.get(name)


def log(client: object, request: Request, job_id: str) -> list[str]:
    """Return the last lines of the first pod's log, in which rank 0 prints the progress; empty if a TrainJob has no pod yet."""
    from kubernetes.client import CoreV1Api

    core: Any = CoreV1Api(client)
    pattern = KINDS[kind_of(request)][3]
    name = pattern.format(name=job_id) if pattern else _first_pod(core, request.namespace, job_id)
    if name is None:
        return []
    answer: Any = core.read_namespaced_pod_log(name, request.namespace, tail_lines=requests.LOG_LINES, _preload_content=False)
    return answer.data.decode(errors="replace").splitlines()


def _first_pod(core: Any, namespace: str, job_id: str) -> Optional[str]:
    """Look up the name of a TrainJob's first pod, which ends in random letters; None before the pod exists."""
    labels = f"jobset.sigs.k8s.io/jobset-name={job_id},batch.kubernetes.io/job-completion-index=0"
    answer = core.list_namespaced_pod(namespace, label_selector=labels, _preload_content=False)
    return next((pod["metadata"]["name"] for pod in json.loads(answer.data)["items"]), None)


def stop(client: object, request: Request, job_id: str) -> None:
    """Delete the job, which stops its pods: each gets SIGTERM, and is killed after its grace period."""
    _objects(client).delete_namespaced_custom_object(**_where(request), name=job_id)
