"""A Kubernetes cluster: an indexed Job, Kubeflow's PyTorchJob and TrainJob, and Volcano's Job,
by the kubernetes client.

Their pods are in pods.py. What the pods need besides, a Secret and a Service, is made after the job and
deleted with it.
"""

import contextlib
import json
import os
import re
import secrets
import sys
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, Optional

from common.errors import UserError
from common.secrets import HIDDEN
from launch.submit import patches, pods
from launch.submit import request as requests
from launch.submit.patches import Fields
from launch.submit.platform import LOG_LINES, Platform, in_environment, not_installed
from launch.submit.request import Request

QUEUE = "kueue.x-k8s.io/queue-name"
ENDED = {
    "Succeeded": 0,
    "Complete": 0,
    "Completed": 0,
    **dict.fromkeys(["Failed", "Aborted", "Terminated"], 1),
}
MISTAKE = 2  # the exit code of a job that another start would not help

# What changes the pods of a TrainJob: since Kubeflow Trainer 2.2, and in 2.1, which has no security contexts.
PATCHES = "runtimePatches"
OVERRIDES = "podTemplateOverrides"
SINCE_2_2 = {"securityContext"}
HAS_NO_PATCHES = re.compile(r'unknown field \\*"spec\.runtimePatches\\*"')  # what a cluster with 2.1 answers
# The fields of a pod and of its container that these may change, and those of a container that a TrainJob has
# elsewhere.
OF_A_PATCHED_POD = {
    "serviceAccountName", "volumes", "initContainers", "containers", "imagePullSecrets", "securityContext",
    "nodeSelector", "affinity", "tolerations", "schedulingGates",
}  # fmt: skip
OF_A_PATCHED_CONTAINER = {"name", "volumeMounts", "securityContext"}
OF_A_TRAINER = {"image", "command", "args", "env", "resources"}
LONGEST_TRAIN_JOB = 45  # letters of a name that leave room for what JobSet adds


class JobKind(NamedTuple):
    """A kind of object that runs a job: its API, how its spec is made, and how its first pod is found."""

    name: str
    group: str
    version: str
    plural: str
    spec: Callable[[Request], Fields]
    first_pod: str  # its name
    labels: str = ""  # of the first pod, where its name ends in random letters


def mistakes(request: Request) -> Iterator[str]:
    """Yield a line for each mistake that only a cluster refuses; one in --patch hides the others."""
    wrong_patch = list(patches.mistakes(request.patch))
    yield from wrong_patch or _option_mistakes(request)


def _option_mistakes(request: Request) -> Iterator[str]:
    """Yield a line for each mistake in the options of a cluster; --patch has to be valid."""
    code_url = request.code_url or ""
    if request.runtime and (request.upload_url or request.secret):
        yield (
            "a TrainJob takes neither code from a bucket nor --secret: give --code_url /FOLDER of the "
            "image or of --volumes"
        )
    if request.platform == "volcano" and request.hours and request.retries:
        limits = f"--hours is {request.hours:g} and --retries is {request.retries}"
        yield (
            f"{limits}: volcano counts them anew in each start, {request.retries + 1} times: give --retries "
            "0, or no --hours"
        )
    if code_url.startswith(("obs://", "oss://")) and not request.region:
        yield f"--code_url is {code_url}: give --region, such as cn-north-4"
    if taken := pods.OWN_FOLDERS & {folder.rstrip("/") for _, folder in pods.mounts(request)}:
        yield f"--volumes: {taken.pop()} is a folder of the pod itself: mount the claim elsewhere"
    if _is_lost_with_the_pod(request, request.output_url):
        option = f"--output_url {request.output_url}"
        yield (
            f"{option} is in no volume, so it is lost with the pod: give --volumes claim:/FOLDER, or a bucket"
        )
    if request.runtime:
        yield from _mistakes_of_a_train_job(request)


def _mistakes_of_a_train_job(request: Request) -> Iterator[str]:
    """Yield a line for a name that is too long, and for fields of --patch that only the runtime can set."""
    if len(request.name or "") > LONGEST_TRAIN_JOB:
        yield f"--name is {request.name}: a TrainJob takes {LONGEST_TRAIN_JOB} letters at most"
    if not request.patch:
        return
    pod = _pod_of_a_train_job(request)
    node, *extra_containers = pod["containers"]
    refused = sorted({*pod} - OF_A_PATCHED_POD) + sorted({*node} - OF_A_PATCHED_CONTAINER - OF_A_TRAINER)
    refused += [f"a container {container['name']}" for container in extra_containers]
    if refused:
        yield (
            f"--patch: a TrainJob, whose container is node, cannot change {', '.join(refused)}: its runtime "
            "has to have it"
        )


def warnings(request: Request) -> Iterator[str]:
    """Yield a line for each folder that is in no volume, so that only the image can have it."""
    for name in ("code_url", "data_url"):
        if _is_lost_with_the_pod(request, getattr(request, name)):
            yield (
                f"--{name} {getattr(request, name)} is in no volume of --volumes, so the image has to have it"
            )


def _is_lost_with_the_pod(request: Request, folder: Optional[str]) -> bool:
    """Whether the place is a folder of the pod or the image, and in no volume, also of --patch."""
    if not folder or not folder.startswith("/") or not request.code_url:
        return False
    container = {**pods.container(request), "name": "node" if request.runtime else "pytorch"}
    change = patches.read(request.patch).get("template", {}).get("spec", {}).get("containers", [])
    merged = patches.merged([container], change, "containers")
    paths = {mount["mountPath"].rstrip("/") for mount in merged[0].get("volumeMounts", [])} - pods.OWN_FOLDERS
    return not f"{folder}/".startswith(tuple(f"{path}/" for path in paths))


# --- The kinds of jobs --------------------------------------------------------------------------------------


def _indexed_job(request: Request) -> Fields:
    """Return the spec of a Job whose completion index is the node.

    With --retries, a pod that fails is started again. A pod that the cluster has evicted does not count as a
    failure then."""
    exit_codes = {"containerName": "pytorch", "operator": "In", "values": [MISTAKE]}
    rules: list[Fields] = [{"action": "FailJob", "onExitCodes": exit_codes}]
    if request.retries:
        rules.append(
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        )
    return requests.without_none(
        completionMode="Indexed",
        completions=request.nodes,
        parallelism=request.nodes,
        backoffLimit=request.retries * request.nodes,  # it counts pods
        activeDeadlineSeconds=request.seconds,
        podFailurePolicy={"rules": rules},
        template=pods.template(request, restartPolicy="Never", subdomain=request.name),
    )


def _pytorch_job(request: Request) -> Fields:
    """Return the spec of a PyTorchJob.

    With --retries, a container that fails is restarted in its pod, and the job resumes.
    """
    policy = requests.without_none(
        backoffLimit=request.retries, cleanPodPolicy="Running", activeDeadlineSeconds=request.seconds
    )
    restart = "OnFailure" if request.retries else "Never"
    template = pods.template(request)
    replicas = {
        name: {"replicas": count, "restartPolicy": restart, "template": template}
        for name, count in _tasks(request).items()
    }
    processes = str(request.gpus) if request.gpus else None
    return requests.without_none(runPolicy=policy, pytorchReplicaSpecs=replicas, nprocPerNode=processes)


def _volcano_job(request: Request) -> Fields:
    """Return a Volcano Job's spec.

    With --retries, a failure restarts all pods (--min_nodes: that pod), but not exit code 2.
    """
    template = pods.template(
        request, restartPolicy="Never", **requests.without_none(activeDeadlineSeconds=request.seconds)
    )
    tasks: list[Fields] = [
        {"name": name.lower(), "replicas": count, "template": template}
        for name, count in _tasks(request).items()
    ]
    # the job is complete when its master is
    tasks[0]["policies"] = [{"event": "TaskCompleted", "action": "CompleteJob"}]
    policies: list[Fields] = []
    if request.retries:
        # MISTAKE is a mistake in the request, which a restart would only repeat.
        policies.append({"exitCode": MISTAKE, "action": "TerminateJob"})
        restart = "RestartPod" if request.is_elastic else "RestartJob"
        policies += [{"event": event, "action": restart} for event in ("PodFailed", "PodEvicted")]
    return requests.without_none(
        schedulerName="volcano",
        minAvailable=request.nodes,  # start all pods or none
        maxRetry=request.retries,
        plugins={"pytorch": ["--master=master", "--worker=worker", "--port=23456"], "svc": [], "env": []},
        policies=policies,
        tasks=tasks,
        queue=request.pool or None,
    )


def _train_job(request: Request) -> Fields:
    """Return the spec of a TrainJob.

    Its --runtime sets restarts and the grace period; a patch changes the runtime's pods.
    """
    pod = _pod_of_a_train_job(request)
    container = pod["containers"][0]
    trainer = requests.without_none(
        numNodes=request.nodes,
        resourcesPerNode=container.get("resources") or None,
        **{name: container[name] for name in ("image", "command", "args", "env") if name in container},
        numProcPerNode=request.gpus or None,
    )
    patched = {name: value for name, value in container.items() if name in OF_A_PATCHED_CONTAINER}
    metadata = patches.read(request.patch).get("template", {}).get("metadata")
    template = requests.without_none(metadata=metadata, spec={**pod, "containers": [patched]})
    jobs = [{"name": "node", "template": {"spec": {"template": template}}}]
    patch = {
        "manager": "anyrank/submit",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
    }
    return requests.without_none(
        runtimeRef={"name": request.runtime},
        trainer=trainer,
        **{PATCHES: [patch]},
        activeDeadlineSeconds=request.seconds,
    )


def _pod_of_a_train_job(request: Request) -> Fields:
    """Return what the pods of a runtime are changed to, as --patch has it;
    the container also has what goes elsewhere."""
    container = {**pods.container(request), "name": "node"}
    del container["workingDir"]
    pod = {"securityContext": pods.OF_THE_POD, "containers": [container], "volumes": pods.volumes(request)}
    return patches.merged(pod, patches.read(request.patch).get("template", {}).get("spec", {}))


def _tasks(request: Request) -> dict[str, int]:
    """Return {name of a task: number of its pods}; one pod is the master, the others are workers."""
    tasks = {"Master": 1}
    if request.nodes > 1:
        tasks["Worker"] = request.nodes - 1
    return tasks


INDEX = "batch.kubernetes.io/job-completion-index=0"  # a label since Kubernetes 1.28
JOB_LABELS = f"batch.kubernetes.io/job-name={{name}},{INDEX}"
TRAIN_JOB_LABELS = f"jobset.sigs.k8s.io/jobset-name={{name}},{INDEX}"
JOB = JobKind("Job", "batch", "v1", "jobs", _indexed_job, "", JOB_LABELS)
PYTORCH_JOB = JobKind("PyTorchJob", "kubeflow.org", "v1", "pytorchjobs", _pytorch_job, "{name}-master-0")
TRAIN_JOB = JobKind(
    "TrainJob", "trainer.kubeflow.org", "v1alpha1", "trainjobs", _train_job, "", TRAIN_JOB_LABELS
)
VOLCANO_JOB = JobKind("Job", "batch.volcano.sh", "v1alpha1", "jobs", _volcano_job, "{name}-master-0")


def kind_of(request: Request) -> JobKind:
    if request.platform == "kubeflow":
        return TRAIN_JOB if request.runtime else PYTORCH_JOB
    return VOLCANO_JOB if request.platform == "volcano" else JOB


def build(request: Request) -> Fields:
    """Return the object that runs the job, as the API of the cluster takes it."""
    kind = kind_of(request)
    metadata: Fields = {"name": request.name, "namespace": request.namespace}
    if request.queue:
        metadata["labels"] = {QUEUE: request.queue}
    metadata = patches.merged(metadata, patches.read(request.patch).get("metadata", {}))
    return {
        "apiVersion": f"{kind.group}/{kind.version}",
        "kind": kind.name,
        "metadata": metadata,
        "spec": kind.spec(request),
    }


def service(request: Request) -> Optional[Fields]:
    """Return the Service that gives each pod of a plain Job a name;
    None for one node or another kind of job."""
    if request.nodes == 1 or kind_of(request) is not JOB:
        return None
    spec = {
        "clusterIP": "None",  # an address for each pod instead
        "publishNotReadyAddresses": True,  # the nodes look for the first before it is ready
        "selector": {"batch.kubernetes.io/job-name": request.name},
    }
    metadata = {"name": request.name, "namespace": request.namespace}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def secret(request: Request, value: str) -> Optional[Fields]:
    """Return the Secret by which several nodes authenticate to each other (docs/security.md);
    None for one node."""
    if request.nodes == 1:
        return None
    metadata = {"name": pods.secret_name(request), "namespace": request.namespace}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "stringData": {pods.SECRET_KEY: value},
    }


def show(request: Request, body: Any) -> str:
    """Return all objects as YAML for `kubectl apply -f -`; comments above say what they need,
    and show the Secret."""
    comments = list(_needs(request))
    if hidden := secret(request, HIDDEN):
        comments += _documents([hidden]).splitlines()
    objects = [body]
    if named := service(request):
        objects.insert(0, named)
    return "".join(f"# {line}\n" for line in comments) + _documents(objects)


def _needs(request: Request) -> Iterator[str]:
    """Yield a line for each thing that has to be there before the objects are applied by hand."""
    yield from warnings(request)
    if request.upload_url:
        yield f"the code is uploaded to {request.upload_url} before"
    for claim in pods.claims(request):
        yield f"the PersistentVolumeClaim {claim} has to be there"
    if request.secret:
        yield f"the Secret {request.secret} has to be there"
    if kind_of(request) is PYTORCH_JOB and request.nodes > 1:
        yield (
            "Kubeflow 1 adds an init container without a security context to the workers, which a "
            "restricted namespace refuses: give --platform kubernetes there"
        )
    if request.runtime:
        yield (
            f"{PATCHES} need Kubeflow Trainer 2.2; a cluster with 2.1 is sent {OVERRIDES}, without the "
            "security contexts"
        )
    if request.nodes > 1:
        name = pods.secret_name(request)
        create_secret = (
            f"create secret generic {name} --from-literal={pods.SECRET_KEY}=$(openssl rand -hex 32)"
        )
        yield (
            f"this Secret is made as the job is sent; by hand: kubectl -n {request.namespace} {create_secret}"
        )


def _documents(objects: list[Fields]) -> str:
    try:
        import yaml
    except ImportError:  # JSON is YAML
        return "---\n".join(f"{json.dumps(item, indent=2)}\n" for item in objects)
    copies = json.loads(json.dumps(objects))  # without anchors for parts that occur twice
    return yaml.safe_dump_all(copies, sort_keys=False, allow_unicode=True, width=120)


# --- Sending ------------------------------------------------------------------------------------------------


def connect(request: Request) -> Any:
    """Return an ApiClient, by the kubeconfig, or inside a cluster without KUBECONFIG by the service
    account."""
    try:
        import kubernetes
    except ImportError:
        raise not_installed("kubernetes", "kubernetes") from None
    if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
        kubernetes.config.load_incluster_config()
        return kubernetes.client.ApiClient()
    return kubernetes.config.new_client_from_config(os.environ.get("KUBECONFIG"))


def _api_arguments(request: Request) -> dict[str, str]:
    kind = kind_of(request)
    return {
        "group": kind.group,
        "version": kind.version,
        "namespace": request.namespace,
        "plural": kind.plural,
    }


def _custom_objects(client: object) -> Any:
    from kubernetes.client import CustomObjectsApi

    return CustomObjectsApi(client)


def send(client: object, request: Request, body: Any) -> str:
    """Create the job, then its Service and its Secret, for which the pods wait;
    the cluster deletes both with the job."""
    created = _create(client, request, body)
    owner = {
        "apiVersion": body["apiVersion"],
        "kind": body["kind"],
        "name": created["name"],
        "uid": created["uid"],
    }
    try:
        for extra in (service(request), secret(request, secrets.token_hex(32))):
            if extra:
                extra["metadata"]["ownerReferences"] = [owner]
                _create_extra(client, request, extra)
    except BaseException:
        with contextlib.suppress(Exception):
            stop(client, request, created["name"])
        raise
    return created["name"]


def _create(client: object, request: Request, body: Fields) -> Fields:
    """Create the job, and return its metadata.

    A field that the cluster does not know is refused, and not left out unseen.
    """
    from kubernetes.client.exceptions import ApiException

    def create(form: Fields) -> Fields:
        created = _custom_objects(client).create_namespaced_custom_object(
            **_api_arguments(request), body=form, field_validation="Strict"
        )
        return created["metadata"]

    try:
        return create(body)
    except ApiException as error:
        if not HAS_NO_PATCHES.search(str(error.body)):
            raise
    message = (
        "the cluster has Kubeflow Trainer 2.1, which takes no security contexts: they have to be in the "
        "runtime"
    )
    print(f"warning: {message}", file=sys.stderr)
    return create({**body, "spec": _for_trainer_2_1(body["spec"])})


def _for_trainer_2_1(spec: Fields) -> Fields:
    """Return the spec of a TrainJob with podTemplateOverrides in place of runtimePatches, without security
    contexts, which the first cannot hold; UserError for a time limit, which Kubeflow Trainer 2.1 does not
    know."""
    if "activeDeadlineSeconds" in spec:
        raise UserError(
            "the cluster's Kubeflow Trainer is older than 2.2, and has no time limit for a job: leave "
            "--hours out"
        )
    (patch,) = spec[PATCHES]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template = job["template"]["spec"]["template"]
    containers = [_without(container, SINCE_2_2) for container in template["spec"]["containers"]]
    pod = {**_without(template["spec"], SINCE_2_2), "containers": containers}
    override = {"targetJobs": [{"name": job["name"]}], **template, "spec": pod}
    return {**_without(spec, {PATCHES}), OVERRIDES: [override]}


def _without(fields: Fields, names: set[str]) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}


def _create_extra(client: object, request: Request, body: Fields) -> None:
    from kubernetes.client import CoreV1Api

    core: Any = CoreV1Api(client)
    if body["kind"] == "Service":
        core.create_namespaced_service(request.namespace, body)
    else:
        core.create_namespaced_secret(request.namespace, body)


def console(request: Request, job_id: str) -> str:
    kind = kind_of(request)
    return f"kubectl -n {request.namespace} describe {kind.plural}.{kind.group} {job_id}"


def state(client: object, request: Request, job_id: str) -> tuple[str, Optional[int]]:
    """Return (state, exit code or None until the job ends): Volcano's phase, the newest condition,
    or whether pods run."""
    status = (
        _custom_objects(client)
        .get_namespaced_custom_object(**_api_arguments(request), name=job_id)
        .get("status")
        or {}
    )
    true_conditions = [
        condition["type"] for condition in status.get("conditions", []) if condition.get("status") == "True"
    ]
    ended = next((condition for condition in true_conditions if condition in ENDED), None)
    # Without a condition: a Job, or a TrainJob.
    is_running = any(entry.get("ready") for entry in [status, *status.get("jobsStatus", [])])
    default = "Running" if is_running else "Created"
    name = (
        status.get("state", {}).get("phase") or ended or (true_conditions[-1] if true_conditions else default)
    )
    return name, ENDED.get(name)


def log(client: object, request: Request, job_id: str) -> list[str]:
    """Return the last lines of the first pod's log, in which rank 0 prints the progress;
    empty if it has no pod yet."""
    from kubernetes.client import CoreV1Api

    core: Any = CoreV1Api(client)
    kind = kind_of(request)
    name = kind.first_pod.format(name=job_id) or _newest_pod(
        core, request.namespace, kind.labels.format(name=job_id)
    )
    if name is None:
        return []
    answer: Any = core.read_namespaced_pod_log(
        name, request.namespace, tail_lines=LOG_LINES, _preload_content=False
    )
    return answer.data.decode(errors="replace").splitlines()


def _newest_pod(core: Any, namespace: str, labels: str) -> Optional[str]:
    """Return the name of the newest pod with these labels; None before there is one."""
    answer = core.list_namespaced_pod(namespace, label_selector=labels, _preload_content=False)
    metadata = [pod["metadata"] for pod in json.loads(answer.data)["items"]]
    if not metadata:
        return None
    return max(metadata, key=lambda pod: pod["creationTimestamp"])["name"]


def stop(client: object, request: Request, job_id: str) -> None:
    """Delete the job, which stops its pods: each gets SIGTERM, and is killed after its grace period."""
    _custom_objects(client).delete_namespaced_custom_object(
        **_api_arguments(request), name=job_id, propagation_policy="Background"
    )


PLATFORM = Platform(
    service="Kubernetes",
    credentials="there is no ~/.kube/config: set KUBECONFIG, or write it with your cluster's own tool",
    has_credentials=in_environment("KUBECONFIG", "KUBERNETES_SERVICE_HOST", files=("~/.kube/config",)),
    secrets="keep it in a Secret of the cluster, whose NAME is given with --secret",
    build=build,
    send=send,
    console=console,
    state=state,
    log=log,
    stop=stop,
    mistakes=mistakes,
    connect=connect,
    warnings=warnings,
    show=show,
)
