"""Submissions sent: through each platform's SDK to a server on this machine, and run as the platform would run them."""

import dataclasses
import hashlib
import json
import re
import sys
from pathlib import Path

import pytest

from launch.submit import command as submit
from launch.submit import kubernetes, sagemaker
from launch.submit import request as requests
from tests.tools.jobs import environment, run
from tests.tools.objectstore import ObjectStore
from tests.tools.platformserver import PlatformServer
from tests.tools.submitting import REMOTE_PLATFORMS, TRAIN_JOB, ask, words_of

CANARY = "canary-5d41402abc4b"  # a secret; it must be in a signature and nowhere else
LOG = ["epoch=1/2 step=1/2 train_loss=2.3", "epoch=1/2 step=2/2 train_loss=2.2", "done: run-7"]


def modelarts_answers(job):
    jobs = "/v2/project/training-jobs"
    return {
        ("POST", f"{jobs}/{job}/actions"): "",
        ("POST", jobs): (201, {"kind": "job", "metadata": {"id": job}, "status": {"phase": "Creating"}}),
        ("GET", f"{jobs}/{job}/tasks/worker-0/logs/preview"): [{"content": "\n".join(LOG[:n])} for n in (1, 2, 3)],
        ("GET", f"{jobs}/{job}"): [{"status": {"phase": name}} for name in ("Pending", "Running", "Completed")],
    }


def pai_answers(job):
    pods = [{"PodId": f"{job}-worker-0"}, {"PodId": f"{job}-master-0"}]
    states = [{"Status": name, "Pods": pods} for name in ("Queuing", "Queuing", "Running", "Running", "Succeeded", "Succeeded")]
    return {
        ("POST", f"/api/v1/jobs/{job}/stop"): {"JobId": job},
        ("POST", "/api/v1/jobs"): {"JobId": job},
        ("GET", f"/api/v1/jobs/{job}/pods/{job}-master-0/logs"): [{"Logs": LOG[:n]} for n in (1, 2, 3)],
        ("GET", f"/api/v1/jobs/{job}"): states,
    }


def sagemaker_answers(job):
    states = [("InProgress", "Starting"), ("InProgress", "Training"), ("Completed", "Completed")]
    return {
        ("POST", "SageMaker.CreateTrainingJob"): {
            "TrainingJobArn": f"arn:aws:sagemaker:eu-west-1:123456789012:training-job/{job}"
        },
        ("POST", "SageMaker.DescribeTrainingJob"): [{"TrainingJobStatus": a, "SecondaryStatus": b} for a, b in states],
        ("POST", "SageMaker.StopTrainingJob"): "{}",
        ("POST", "DescribeLogStreams"): {"logStreams": [{"logStreamName": f"{job}/algo-1-1700000000"}]},
        ("POST", "GetLogEvents"): [{"events": [{"message": line} for line in LOG[:n]]} for n in (1, 2, 3)],
    }


def cluster_answers(job, objects, states, pod):
    pods = "/api/v1/namespaces/default/pods"
    return {
        ("POST", objects): (201, {"metadata": {"name": job, "uid": f"uid of {job}"}}),
        ("POST", SECRETS): (201, {}),
        ("POST", SERVICES): (201, {}),
        ("GET", f"{objects}/{job}"): [{"status": status} for status in states],
        ("DELETE", f"{objects}/{job}"): {"kind": "Status", "status": "Success"},
        ("GET", f"{pods}/{pod}/log"): ["\n".join(LOG[:n]) for n in (1, 2, 3)],
        ("GET", f"{pods}?labelSelector="): {"items": pods_named(f"{pod}-before", pod)},
    }


def pods_named(*names):
    """The later ones were made later."""
    times = [f"2026-11-30T10:00:{number:02d}Z" for number in range(len(names))]
    return [{"metadata": {"name": name, "creationTimestamp": time}} for name, time in zip(names, times)]


def conditions(last):
    made = {"type": "Created", "status": "True"}
    return [
        {},
        {"conditions": [made, {"type": "Running", "status": "True"}]},
        {"conditions": [made, {"type": last, "status": "True"}]},
    ]


SECRETS, SERVICES = "/api/v1/namespaces/default/secrets", "/api/v1/namespaces/default/services"
KUBEFLOW, TRAINER = (
    "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs",
    "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs",
)
JOBS = "/apis/batch/v1/namespaces/default/jobs"
COUNTS = [
    {},
    {"active": 2, "ready": 2},
    {"conditions": [{"type": one, "status": "True"} for one in ("SuccessCriteriaMet", "Complete")]},
]
NODES = [{}, {"jobsStatus": [{"name": "node", "ready": 1}]}, {"conditions": [{"type": "Complete", "status": "True"}]}]
VOLCANO = "/apis/batch.volcano.sh/v1alpha1/namespaces/default/jobs"
PHASES = [{"state": {"phase": name}} for name in ("Pending", "Running", "Completed")]

# what | platform | asked for beside | its answers | the path of the request | its signature | where it is to be seen | its states
PLACES = [
    ("ModelArts", "modelarts", {}, modelarts_answers("job-1"), "/v2/project/training-jobs",
     r"SDK-HMAC-SHA256 Access=key, SignedHeaders=[a-z;-]*x-sdk-date, Signature=[0-9a-f]{64}", "console.huaweicloud.com", ["Pending", "Running", "Completed"]),
    ("PAI-DLC", "pai-dlc", {}, pai_answers("job-1"), "/api/v1/jobs",
     r"ACS3-HMAC-SHA256 Credential=key,SignedHeaders=[a-z0-9;-]*x-acs-content-sha256;[a-z0-9;-]*,Signature=[0-9a-f]{64}", "pai.console.aliyun.com", ["Queuing", "Running", "Succeeded"]),
    ("SageMaker", "sagemaker", {"name": "job-1"}, sagemaker_answers("job-1"), "/",
     r"AWS4-HMAC-SHA256 Credential=key/\d{8}/eu-west-1/sagemaker/aws4_request, SignedHeaders=[a-z;-]*x-amz-target, Signature=[0-9a-f]{64}", "eu-west-1.console.aws.amazon.com",
     ["InProgress (Starting)", "InProgress (Training)", "Completed (Completed)"]),
    ("PyTorchJob", "kubeflow", {"name": "job-1", "code_url": "/mnt/code"}, cluster_answers("job-1", KUBEFLOW, conditions("Succeeded"), "job-1-master-0"), KUBEFLOW,
     f"Bearer {CANARY}", "kubectl -n default describe pytorchjobs.kubeflow.org job-1", ["Created", "Running", "Succeeded"]),
    ("TrainJob", "kubeflow", {"name": "job-1", **TRAIN_JOB}, cluster_answers("job-1", TRAINER, NODES, "job-1-node-0-0-x7f2p"), TRAINER,
     f"Bearer {CANARY}", "kubectl -n default describe trainjobs.trainer.kubeflow.org job-1", ["Created", "Running", "Complete"]),
    ("Job", "kubernetes", {"name": "job-1"}, cluster_answers("job-1", JOBS, COUNTS, "job-1-0-x7f2p"), JOBS,
     f"Bearer {CANARY}", "kubectl -n default describe jobs.batch job-1", ["Created", "Running", "Complete"]),
    ("vcjob", "volcano", {"name": "job-1"}, cluster_answers("job-1", VOLCANO, PHASES, "job-1-master-0"), VOLCANO,
     f"Bearer {CANARY}", "kubectl -n default describe jobs.batch.volcano.sh job-1", ["Pending", "Running", "Completed"]),
]  # fmt: skip


@pytest.fixture
def sent(monkeypatch, tmp_path):
    """Starts a server with these answers, and puts its address and a secret where each SDK looks for them."""
    servers = []

    def start(answers):
        servers.append(server := PlatformServer(answers))
        cluster = {
            "name": "c",
            "cluster": {"server": server.url},
            "user": {"token": CANARY},
            "context": {"cluster": "c", "user": "c"},
        }
        config = {kind: [{"name": "c", kind[:-1]: cluster[kind[:-1]]}] for kind in ("clusters", "users", "contexts")}
        (tmp_path / "kubeconfig").write_text(
            json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "c", **config})
        )
        found = {
            "HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "kubeconfig"), "AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": CANARY, "HUAWEICLOUD_SDK_AK": "key", "HUAWEICLOUD_SDK_SK": CANARY,
            "HUAWEICLOUD_SDK_PROJECT_ID": "project", "ALIBABA_CLOUD_ACCESS_KEY_ID": "key", "ALIBABA_CLOUD_ACCESS_KEY_SECRET": CANARY,
        }  # fmt: skip
        for name, value in found.items():
            monkeypatch.setenv(name, value)
        if "alibabacloud_credentials.utils.auth_util" in sys.modules:  # it reads the environment when it is imported
            util = sys.modules["alibabacloud_credentials.utils.auth_util"]
            monkeypatch.setattr(util, "environment_access_key_id", "key")
            monkeypatch.setattr(util, "environment_access_key_secret", CANARY)
        monkeypatch.setattr(submit, "FOLLOW_SECONDS", 0)
        monkeypatch.setattr(submit, "upload", lambda *_: None)  # what is uploaded has tests of its own
        return server

    yield start
    for server in servers:
        server.stop()


def here(request, server):
    """The same request with the server's address, where that is an option."""
    return dataclasses.replace(request, endpoint=server.url) if request.platform in ("modelarts", "pai-dlc") else request


@pytest.mark.parametrize(
    "what, platform, changes, answers, path, signature, console, states", PLACES, ids=[row[0] for row in PLACES]
)
def test_a_job_is_sent_followed_and_stopped(what, platform, changes, answers, path, signature, console, states, sent, capsys):
    server = sent(answers)
    request = here(ask(platform, **changes), server)
    words = words_of(request)
    assert submit.main(["--follow", "true", *words]) == 0
    looks = {"/bkt?encryption"} if platform == "modelarts" else set()  # whether ModelArts can read the buckets
    assert {asked for _, asked, *_ in server.asked if "encryption" in asked} == looks
    method, asked, headers, body = next(row for row in server.asked if row[1] not in looks)
    headers = {name.lower(): value for name, value in headers.items()}
    asked, _, strict = asked.partition("?")
    assert (method, asked) == ("POST", path)
    assert strict == ("fieldValidation=Strict" if path.startswith("/apis") else "")
    assert re.fullmatch(signature, headers["authorization"]), headers["authorization"]
    if "x-acs-content-sha256" in headers:
        assert headers["x-acs-content-sha256"] == hashlib.sha256(body).hexdigest()
    assert without_empty_lists(json.loads(body)) == without_empty_lists(REMOTE_PLATFORMS[platform].build(request))
    printed = capsys.readouterr()
    assert printed.out.startswith("submitted job-1\nsee it at ") and console in printed.out
    assert [line for line in printed.out.splitlines() if line.startswith("job-1 is ")] == [
        f"job-1 is {state}" for state in states
    ]
    assert [line for line in printed.out.splitlines() if line in LOG] == LOG

    before = len(server.asked)
    stop_words = words[: words.index("--")]
    assert submit.main([*stop_words, "--stop", "job-1"]) == 0
    stopped = server.asked[before]
    assert (stopped[0], "job-1" in stopped[1] or b"job-1" in stopped[3]) == (
        "DELETE" if path.startswith("/apis") else "POST",
        True,
    )
    if path.startswith("/apis"):  # without it, the pods of a plain Job would go on
        assert "propagationPolicy=Background" in stopped[1]
    assert submit.main(["--dry_run", "true", *words]) == 0
    assert len(server.asked) == before + 1  # the dry run has sent nothing
    assert CANARY not in capsys.readouterr().out + printed.out + printed.err


@pytest.mark.parametrize("row", [row for row in PLACES if row[4].startswith("/apis")], ids=lambda row: row[0])
def test_the_nodes_of_a_cluster_get_a_secret_of_their_own(row, sent, capsys):
    """A Secret that belongs to the job, new for each, which no printed request shows; without it there is no job."""
    _, platform, changes, answers, path, *_ = row
    found = []
    for answer in ((201, {}), (201, {}), (403, {"message": "no right to create secrets"})):
        server = sent({**answers, ("POST", SECRETS): answer})
        request = ask(platform, **changes)
        code = submit.main(words_of(request))
        (_, job), *others, (where, made) = server.bodies("POST")
        assert where == SECRETS and made["metadata"]["name"] == "job-1-nodes"
        assert [(owner["name"], owner["uid"]) for owner in made["metadata"]["ownerReferences"]] == [("job-1", "uid of job-1")]
        found.append(made["stringData"]["secret"])
        named = [(place, one["metadata"]["name"], one["metadata"]["ownerReferences"][0]["uid"]) for place, one in others]
        assert named == [(SERVICES, "job-1", "uid of job-1")] * (platform == "kubernetes")
        variable = {"name": "ANYRANK_SECRET", "valueFrom": {"secretKeyRef": {"name": "job-1-nodes", "key": "secret"}}}
        assert json.dumps(variable) in json.dumps(job)
        stopped = [asked for method, asked, *_ in server.asked if method == "DELETE"]
        stopped = [asked.partition("?")[0] for asked in stopped]
        assert (code, stopped) == ((0, []) if answer[0] == 201 else (2, [f"{path}/job-1"]))
    assert len(set(found)) == 3 and all(len(secret) == 64 for secret in found)
    assert not any(secret in "".join(capsys.readouterr()) for secret in found)
    assert "ANYRANK_SECRET" not in json.dumps(
        REMOTE_PLATFORMS[platform].build(dataclasses.replace(ask(platform, **changes), nodes=1))
    )


def without_empty_lists(body):
    """Alibaba's SDK sends an empty list for each that it could have."""
    if isinstance(body, dict):
        return {name: without_empty_lists(value) for name, value in body.items() if value != []}
    return [without_empty_lists(value) for value in body] if isinstance(body, list) else body


@pytest.mark.parametrize("row", PLACES, ids=[row[0] for row in PLACES])
def test_a_refusal_is_one_line_without_the_secret(row, sent, capsys):
    """Some answers quote what was sent."""
    said = f"no right to\ndo this, signed with {CANARY}"
    codes = {"error_code": "ModelArts.0102", "Code": "Forbidden", "__type": "AccessDenied"}
    refusal = {**codes, **dict.fromkeys(["error_msg", "Message", "message"], said)}
    server = sent({("POST", ""): (403, refusal)})
    assert submit.main(words_of(here(ask(row[1], **row[2]), server))) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1, printed
    assert "no right to" in printed.err and CANARY not in printed.err


def test_a_failed_job_gives_1_and_an_interrupt_leaves_it_running(sent, capsys, monkeypatch):
    server = sent({**modelarts_answers("job-1"), ("GET", "/v2/project/training-jobs/job-1"): {"status": {"phase": "Failed"}}})
    words = ["--follow", "true", *words_of(here(ask("modelarts"), server))]
    assert submit.main(words) == 1

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "new_lines", interrupt)
    server.answers = modelarts_answers("job-1")
    assert submit.main(words) == 130
    assert "job-1 goes on; --stop job-1 stops it" in capsys.readouterr().err
    assert not [path for path, _ in server.bodies("POST") if path.endswith("/actions")]


def test_a_look_that_fails_does_not_end_the_following(sent, capsys, monkeypatch):
    answers = modelarts_answers("job-1")
    answers["GET", "/v2/project/training-jobs/job-1"].insert(1, (400, {"error_code": "X", "error_msg": "not now"}))
    server = sent(answers)
    words = ["--follow", "true", *words_of(here(ask("modelarts"), server))]
    assert submit.main(words) == 0
    printed = capsys.readouterr()
    assert printed.err.count("warning: ModelArts: ") == 1 and "not now; trying again" in printed.err
    monkeypatch.setattr(submit, "FAILED_LOOKS", 2)
    server.answers["GET", "/v2/project/training-jobs/job-1"] = (400, {"error_code": "X", "error_msg": "no such job"})
    assert submit.main(words) == 2
    assert capsys.readouterr().err.count("no such job") == 3


class Logs:
    """CloudWatch, as far as it is asked: the streams of a group in the order of their names, and the lines of one."""

    def __init__(self, *streams):
        self.streams = sorted(streams)

    def describe_log_streams(self, logGroupName, logStreamNamePrefix=""):
        return {"logStreams": [{"logStreamName": name} for name in self.streams if name.startswith(logStreamNamePrefix)]}

    def get_log_events(self, logGroupName, logStreamName, **_):
        return {"events": [{"message": f"a line of {logStreamName}"}]}


def test_the_log_that_sagemaker_shows_is_that_of_the_last_start_on_the_jobs_own_first_host():
    of_others = ("a-run/algo-1-17", "run-70/algo-1-17")
    clients = {"logs": Logs(*of_others, "run-7/algo-1-17", "run-7/algo-1-18", "run-7/algo-10-19", "run-7/algo-2-17")}
    assert sagemaker.log(clients, ask("sagemaker"), "run-7") == ["a line of run-7/algo-1-18"]
    assert sagemaker.log({"logs": Logs(*of_others)}, ask("sagemaker"), "run-7") == []


# --- Against what each SDK knows of its service ------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"engine": None, "image": "i", "spot": True, "log_url": "obs://bkt/log"}])
def test_modelarts_request_has_only_fields_of_its_interface(changes):
    from huaweicloudsdkmodelarts.v1 import model

    # The service's, but in no model of the SDK: the console's "predownload" and its two companions, as its answers show them.
    unknown_to_the_sdk = {("Output", "mode"), ("Output", "period"), ("Output", "prefetch_to_local")}

    def check(kind, value):
        listed, mapped = re.fullmatch(r"list\[(.+)\]", kind), re.fullmatch(r"dict\(str, (.+)\)", kind)
        if listed or mapped:
            for one in value if listed else value.values():
                check((listed or mapped)[1], one)
        elif kind in ("str", "int", "bool"):
            assert type(value).__name__ == kind, (kind, value)
        else:
            known = getattr(model, kind, None) or getattr(__import__("huaweicloudsdkmodelarts.v1", fromlist=[kind]), kind)
            names = {wire: name for name, wire in known.attribute_map.items()}
            for name, one in value.items():
                if (kind, name) not in unknown_to_the_sdk:
                    check(known.openapi_types[names[name]], one)

    check("Job", REMOTE_PLATFORMS["modelarts"].build(ask("modelarts", **changes)))


@pytest.mark.parametrize("changes", [{}, {"spot": True}, {"flavor": None, "pool": "quota1"}])
def test_pai_request_has_only_fields_of_its_interface(changes):
    from alibabacloud_pai_dlc20201203.models import CreateJobRequest

    body = REMOTE_PLATFORMS["pai-dlc"].build(ask("pai-dlc", **changes))
    read = CreateJobRequest().from_map(body)  # drops what it does not know
    read.validate()
    assert without_empty_lists(read.to_map()) == body


@pytest.mark.parametrize("changes", [{}, {"spot": True}, {"data_url": None, "retries": 0}])
def test_sagemaker_accepts_the_request_by_its_own_model(changes):
    import boto3
    from botocore.stub import Stubber

    client = boto3.client("sagemaker", region_name="eu-west-1", aws_access_key_id="key", aws_secret_access_key=CANARY)
    body = REMOTE_PLATFORMS["sagemaker"].build(ask("sagemaker", **changes))
    with Stubber(client) as stub:  # checks names, types and lengths of the request
        stub.add_response(
            "create_training_job", {"TrainingJobArn": "arn:aws:sagemaker:eu-west-1:123456789012:training-job/run-7"}, body
        )
        assert sagemaker.send({"sagemaker": client}, None, body) == "run-7"
    for word in [*body["AlgorithmSpecification"]["ContainerEntrypoint"], *body["AlgorithmSpecification"]["ContainerArguments"]]:
        assert len(word) <= 256


# The fields of each kind's spec, from the types that its controller publishes.
CRDS = {
    "PyTorchJob": {"elasticPolicy", "runPolicy", "pytorchReplicaSpecs", "nprocPerNode"},
    "PyTorchJob.runPolicy": {"cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "suspend"},
    "PyTorchJob.replica": {"replicas", "template", "restartPolicy"},
    "TrainJob": {"runtimeRef", "initializer", "trainer", "runtimePatches", "suspend", "activeDeadlineSeconds", "managedBy"},
    "TrainJob.trainer": {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"},
    "TrainJob.pod": {
        "serviceAccountName",
        "volumes",
        "initContainers",
        "containers",
        "nodeSelector",
        "affinity",
        "tolerations",
        "imagePullSecrets",
        "securityContext",
        "schedulingGates",
    },
    "Job": {"schedulerName", "minAvailable", "volumes", "tasks", "policies", "plugins", "queue", "maxRetry"},
    "Job.task": {"name", "replicas", "minAvailable", "template", "policies"},
}


def typed(kind, value):
    """What kubernetes' own model of this kind makes of it, as JSON again: unknown fields are lost."""
    from kubernetes.client import ApiClient

    client = ApiClient()
    return client.sanitize_for_serialization(client._ApiClient__deserialize(value, kind))


@pytest.mark.parametrize(
    "platform, changes",
    [
        ("kubeflow", {}),
        ("kubeflow", {"gpus": 0, "nodes": 1, "hours": None}),
        ("volcano", {}),
        ("kubeflow", TRAIN_JOB),
        ("kubernetes", {}),
    ],
)
def test_objects_of_a_cluster_have_only_fields_of_their_definition(platform, changes):
    body = kubernetes.build(ask(platform, **changes))
    kind, spec = body["kind"], body["spec"]
    if platform == "kubernetes":
        for one in (body, kubernetes.service(ask(platform)), kubernetes.secret(ask(platform), "x")):
            assert typed(f"V1{one['kind']}", one) == one
        return
    assert set(body) == {"apiVersion", "kind", "metadata", "spec"} and set(spec) <= CRDS[kind]
    if kind == "TrainJob":
        (job,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = job["template"]["spec"]["template"]["spec"]
        assert set(spec["trainer"]) <= CRDS["TrainJob.trainer"] and set(pod) <= CRDS["TrainJob.pod"]
        assert typed("V1PodSpec", pod) == pod
        assert typed(
            "V1Container", {"name": "x", "env": spec["trainer"]["env"], "resources": spec["trainer"]["resourcesPerNode"]}
        )
        return
    if kind == "PyTorchJob":
        replicas = list(spec["pytorchReplicaSpecs"].values())
        assert set(spec["runPolicy"]) <= CRDS["PyTorchJob.runPolicy"] and set(replicas[0]) == CRDS["PyTorchJob.replica"]
    else:
        replicas = spec["tasks"]
        assert all(set(task) <= CRDS["Job.task"] for task in replicas)
    assert sum(replica["replicas"] for replica in replicas) == ask(platform, **changes).nodes
    for replica in replicas:
        assert typed("V1PodTemplateSpec", replica["template"]) == replica["template"]


def in_the_pod(text):
    """What a container gets, by the rule of the API reference of `command`, `args` and the value of a variable."""
    return re.sub(
        r"\$(\$|\((.*?)\))", lambda found: "$" if found[1] == "$" else {"HOME": "/root"}.get(found[2], found[0]), text
    )


@pytest.mark.parametrize(
    "platform, changes", [("kubeflow", {"code_url": "s3://code/$$/b"}), ("volcano", {}), ("kubeflow", TRAIN_JOB)]
)
def test_a_pod_gets_what_was_typed(platform, changes):
    assert [in_the_pod(text) for text in ("$(HOME)", "$$(HOME)", "$(NO)", "a$$b$")] == ["/root", "$(HOME)", "$(NO)", "a$b$"]
    values = {"/runs/$(HOME)", "a$$b$", "$$$(HOME)$$", "$HOME"}
    words = [f"--option{number}={value}" for number, value in enumerate(values)]
    asked = ask(platform, arguments=words, env=("PASSWORD=p$$w$(HOME)$",), **changes)
    spec = kubernetes.build(asked)["spec"]
    if "trainer" in spec:
        containers = [spec["trainer"]]
    else:
        replica = spec["tasks"][0] if platform == "volcano" else spec["pytorchReplicaSpecs"]["Master"]
        pod = replica["template"]["spec"]
        containers = [*pod["containers"], *pod.get("initContainers", [])]
    assert values < set(map(in_the_pod, containers[0]["command"]))
    for container in containers:
        (password,) = (one["value"] for one in container["env"] if one["name"] == "PASSWORD")
        assert in_the_pod(password) == "p$$w$(HOME)$"
    if len(containers) == 2:
        words = list(map(in_the_pod, containers[1]["command"]))
        assert "$$/b/" in words and (Path(kubernetes.__file__).with_name("boot") / "fetch_code.py").read_text() in words


# --- The code, up and down ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    running = ObjectStore(tmp_path_factory.mktemp("store"))
    running.client().create_bucket(Bucket="code")
    yield running
    running.stop()


def test_the_code_goes_through_a_bucket_into_a_pod(store, tmp_path, monkeypatch, capsys):
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_REGION")
    submit.upload("jobs/train.py", "s3://code/a/b", "us-east-1")
    assert capsys.readouterr().out == "the code is at s3://code/a/b\n"
    template = kubernetes.build(ask("kubeflow", code_url="s3://code/a/b"))["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
    (container,) = template["spec"]["initContainers"]
    words = [str(tmp_path / "pod") if word == "/code" else word for word in container["command"]]
    done = run([sys.executable, *words[1:]], env=environment(**store.environment))
    assert done.returncode == 0, done.stderr
    requests.stage("jobs/train.py", tmp_path / "own")
    assert files_of(tmp_path / "pod") == files_of(tmp_path / "own")
    words[words.index("a/b/")] = "none/"
    assert run([sys.executable, *words[1:]], env=environment(**store.environment)).returncode == 1


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
