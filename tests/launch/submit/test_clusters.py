"""The objects that submit makes for Kubernetes, as an administrator reads them: pod security, what a site adds, and that a pod of them trains."""

import copy
import importlib
import json
import os
import sys
import threading

import pytest
import yaml

from launch import local
from launch.submit import command as submit
from launch.submit import kubernetes, patches, pods
from launch.submit.secrets import secrets
from tests.launch.submit.test_sent import SECRETS, TRAINER, cluster_answers, conditions, sent  # noqa: F401 (a fixture)
from tests.tools.hosts import Hosts
from tests.tools.jobs import PATIENCE, ROOT, TINY
from tests.tools.packages import namespaces, python_package
from tests.tools.submitting import TRAIN_JOB, ask, words_of

KINDS = [
    ("kubernetes", {}),
    ("kubernetes", {"code_url": "s3://bkt/code", "secret": "keys"}),
    ("kubeflow", {}),
    ("kubeflow", TRAIN_JOB),
    ("volcano", {}),
]
every_kind = pytest.mark.parametrize(
    "platform, changes", KINDS, ids=["Job", "Job from a bucket", "PyTorchJob", "TrainJob", "vcjob"]
)


def pod_of(body):
    """The spec of its first pod."""
    spec = body["spec"]
    if "runtimePatches" in spec:
        (job,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        return job["template"]["spec"]["template"]["spec"]
    if "tasks" in spec:
        return spec["tasks"][0]["template"]["spec"]
    return spec.get("pytorchReplicaSpecs", {}).get("Master", spec).get("template")["spec"]


def containers_of(pod):
    return [*pod["containers"], *pod.get("initContainers", [])]


# --- The pod security standard "restricted" ------------------------------------------------------------------------------


def effective(pod, container, field):
    return container.get("securityContext", {}).get(field, pod.get("securityContext", {}).get(field))


OF_BASELINE = {"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}  # fmt: skip
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}

# A rule of https://kubernetes.io/docs/concepts/security/pod-security-standards/, as what it asks of a pod and a container.
RULES = {
    "host namespaces": lambda pod, one: not any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")),
    "privileged containers": lambda pod, one: not one["securityContext"].get("privileged"),
    "capabilities of baseline": lambda pod, one: set(one["securityContext"]["capabilities"].get("add", ())) <= OF_BASELINE,
    "host ports": lambda pod, one: not any(port.get("hostPort") for port in one.get("ports", ())),
    "AppArmor, SELinux": lambda pod, one: not {"appArmorProfile", "seLinuxOptions"} & {*pod["securityContext"], *one["securityContext"]},
    "/proc mount": lambda pod, one: one["securityContext"].get("procMount", "Default") == "Default",
    "sysctls": lambda pod, one: not pod["securityContext"].get("sysctls"),
    "volume types": lambda pod, one: all(set(volume) - {"name"} <= VOLUMES for volume in pod["volumes"]),
    "privilege escalation": lambda pod, one: one["securityContext"].get("allowPrivilegeEscalation") is False,
    "running as non-root": lambda pod, one: effective(pod, one, "runAsNonRoot") is True,
    "running as a non-root user": lambda pod, one: effective(pod, one, "runAsUser") != 0,
    "seccomp": lambda pod, one: effective(pod, one, "seccompProfile")["type"] in ("RuntimeDefault", "Localhost"),
    "capabilities of restricted": lambda pod, one: "ALL" in one["securityContext"]["capabilities"]["drop"]
    and set(one["securityContext"]["capabilities"].get("add", ())) <= {"NET_BIND_SERVICE"},
}  # fmt: skip

# What would break each rule, as a patch of the pod or of its container.
BREAKS = {
    "host namespaces": {"hostNetwork": True},
    "privileged containers": {"containers": {"securityContext": {"privileged": True}}},
    "capabilities of baseline": {"containers": {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}},
    "host ports": {"containers": {"ports": [{"containerPort": 1, "hostPort": 1}]}},
    "AppArmor, SELinux": {"securityContext": {"seLinuxOptions": {"user": "x"}}},
    "/proc mount": {"containers": {"securityContext": {"procMount": "Unmasked"}}},
    "sysctls": {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
    "volume types": {"volumes": [{"name": "shm", "hostPath": {"path": "/dev/shm"}, "emptyDir": None}]},
    "privilege escalation": {"containers": {"securityContext": {"allowPrivilegeEscalation": None}}},
    "running as non-root": {"securityContext": {"runAsNonRoot": None}},
    "running as a non-root user": {"securityContext": {"runAsUser": 0}},
    "seccomp": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
    "capabilities of restricted": {"containers": {"securityContext": {"capabilities": {"drop": None, "add": ["CHOWN"]}}}},
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_pods_pass_each_rule_of_restricted_unless_a_patch_breaks_it(rule, tmp_path):
    for platform, changes in KINDS:
        pod = pod_of(kubernetes.build(ask(platform, **changes)))
        assert all(RULES[rule](pod, one) for one in containers_of(pod)), (platform, rule)
    change = copy.deepcopy(BREAKS[rule])
    if "containers" in change:
        change["containers"] = [{"name": "pytorch", **change["containers"]}]
    broken = pod_of(kubernetes.build(ask("kubernetes", patch=written(tmp_path, template={"spec": change}))))
    with_null = {"drop": []} if rule == "capabilities of restricted" else {}
    broken["containers"][0]["securityContext"]["capabilities"] = {
        **with_null,
        **broken["containers"][0]["securityContext"]["capabilities"],
    }
    assert not RULES[rule](broken, broken["containers"][0])


# --- What a site adds ------------------------------------------------------------------------------------------------------


def written(tmp_path, **content):
    path = tmp_path / "patch.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


@every_kind
def test_a_patch_reaches_the_pods_and_the_jobs_metadata(platform, changes, tmp_path):
    name = "node" if changes is TRAIN_JOB else "pytorch"
    spec = {
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "registry"}],
        "securityContext": {"runAsUser": None, "fsGroup": 7},
        "volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "scratch", "$patch": "delete"}],
        "containers": [{"name": name, "env": [{"name": "NCCL_DEBUG", "value": "WARN"}, {"name": "MINE", "value": "1"}]}],
    }
    path = written(
        tmp_path, metadata={"labels": {"team": "vision"}}, template={"metadata": {"annotations": {"a": "b"}}, "spec": spec}
    )
    before, body = (kubernetes.build(ask(platform, **changes, patch=one)) for one in (None, path))
    assert body["metadata"]["labels"].items() >= {"team": "vision", **before["metadata"].get("labels", {})}.items()
    pod = pod_of(body)
    assert pod["tolerations"] == spec["tolerations"] and pod["imagePullSecrets"] == spec["imagePullSecrets"]
    assert pod["securityContext"] == {**{name: it for name, it in pods.OF_THE_POD.items() if name != "runAsUser"}, "fsGroup": 7}
    assert pod["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
    assert [volume["name"] for volume in pod["volumes"]] == [
        one["name"] for one in pod_of(before)["volumes"] if one["name"] != "scratch"
    ]
    env = {one["name"]: one.get("value") for one in (body["spec"].get("trainer") or pod["containers"][0])["env"]}
    assert (env["NCCL_DEBUG"], env["MINE"]) == ("WARN", "1") and len(pod["containers"]) == 1
    assert "env" not in pod["containers"][0] or changes is not TRAIN_JOB
    assert '"annotations": {"a": "b"}' in json.dumps(body)


@pytest.mark.parametrize(
    "text, line",
    [
        ("pod: {}", "the file may have metadata and template alone"),
        ("metadata: {name: x}", "metadata may have annotations and labels alone"),
        ("- 1", "the file may have metadata and template alone"),
        ("template: {spec: {containers: [{env: []}]}}", "an item of containers has no name: give each one"),
        ("template: {spec: {volumes: [x]}}", "an item of volumes has no name: give each one"),
        ("a: [", "cannot be read: while parsing"),
        ("metadata: {annotations: {since: 2026-01-01}}", "is not JSON serializable: put a date or the like in quotes"),
        ("template: {spec: {containers: null}}", "containers has to be a list"),
        ("template: {spec: null}", "the spec of template has to have fields"),
        ("template: {spec: {$patch: replace}}", "$patch: replace is not known: $patch: delete is"),
        ("template: {spec: {tolerations: [{key: x, $patch: delete}]}}", "$patch: delete is not known"),
        ("template: {spec: {containers: [{name: [a]}]}}", "an item of containers has no name: give each one"),
    ],
)
def test_what_is_no_patch_is_one_line(text, line, tmp_path):
    path = tmp_path / "patch.yaml"
    path.write_text(text)
    (said,) = patches.mistakes(str(path))
    assert line in said and "\n" not in said


@every_kind
def test_a_dry_run_is_yaml_with_all_that_would_be_made_and_what_has_to_be_there(platform, changes, sent, capsys):
    sent({})
    request = ask(platform, **changes)
    assert submit.main(["--dry_run", "true", *words_of(request)]) == 0
    printed = capsys.readouterr()
    objects = list(yaml.safe_load_all(printed.out))
    assert objects == [*([kubernetes.service(request)] if platform == "kubernetes" else []), kubernetes.build(request)]
    assert "# stringData:\n#   secret: '***'\n" in printed.out and printed.err == ""
    comments = "\n".join(line for line in printed.out.splitlines() if line.startswith("# "))
    assert "create secret generic run-7-nodes --from-literal=secret=$(openssl rand -hex 32)" in comments
    assert ("the Secret keys has to be there" in comments) == bool(request.secret)
    assert ("runtimePatches need Kubeflow Trainer 2.2" in comments) == (changes is TRAIN_JOB)
    assert "the PersistentVolumeClaim shared has to be there" in comments and "&" not in printed.out


def test_without_the_yaml_package_it_is_json_which_is_yaml(monkeypatch):
    request = ask("kubernetes")
    monkeypatch.setitem(sys.modules, "yaml", None)
    text = kubernetes.show(request, kubernetes.build(request))
    monkeypatch.undo()
    assert list(yaml.safe_load_all(text)) == [kubernetes.service(request), kubernetes.build(request)]


def test_what_a_patch_cannot_do_in_a_train_job_is_said_at_once(tmp_path):
    containers = [{"name": "pytorch", "image": "x"}, {"name": "node", "ports": [{"containerPort": 1}]}]
    request = ask(
        "kubeflow",
        **TRAIN_JOB,
        patch=written(tmp_path, template={"spec": {"priorityClassName": "p", "containers": containers}}),
    )
    (said,) = kubernetes.mistakes(request)
    assert "a TrainJob, whose container is node, cannot change priorityClassName, ports, a container pytorch" in said


def test_a_patch_may_leave_resources_to_the_runtime(tmp_path):
    path = written(tmp_path, template={"spec": {"containers": [{"name": "node", "resources": None}]}})
    assert "resourcesPerNode" not in kubernetes.build(ask("kubeflow", **TRAIN_JOB, patch=path))["spec"]["trainer"]


def test_another_unknown_field_is_no_older_trainer(sent, capsys):
    unknown = {"message": 'strict decoding error: unknown field "spec.runtimePatches[0].trainingRuntimeSpec.x"'}
    server = sent({("POST", TRAINER): (400, unknown)})
    assert submit.main(words_of(ask("kubeflow", **TRAIN_JOB))) == 2
    assert len(server.bodies("POST")) == 1 and "trainingRuntimeSpec.x" in capsys.readouterr().err


def test_a_secret_in_a_patch_is_refused(tmp_path):
    containers = [{"name": "pytorch", "env": [{"name": "HF_TOKEN", "value": "canary"}]}]
    patch = written(tmp_path, template={"spec": {"containers": containers}})
    (said,) = secrets(ask("kubernetes", patch=patch), better_way="")
    assert "--patch sets HF_TOKEN, which looks like a secret" in said and "canary" not in said


def test_a_patch_may_mount_the_folder_for_the_output(tmp_path):
    mounted = {"containers": [{"name": "pytorch", "volumeMounts": [{"name": "nfs", "mountPath": "/nfs"}]}]}
    for spec, count in (({"tolerations": []}, 1), (mounted, 0)):
        patches.read.cache_clear()
        request = ask("kubernetes", output_url="/nfs/runs/7", patch=written(tmp_path, template={"spec": spec}))
        assert len(list(kubernetes.mistakes(request))) == count


def test_a_pipe_is_read_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("template: {spec: {priorityClassName: p}}"), daemon=True)
    writer.start()
    request = ask("kubernetes", patch=str(pipe))
    assert list(kubernetes.mistakes(request)) == []
    assert pod_of(kubernetes.build(request))["priorityClassName"] == "p"


def test_a_folder_in_no_volume_is_said(sent, capsys):
    server = sent(cluster_answers("run-7", "/apis/batch/v1/namespaces/default/jobs", [{}], "run-7-0"))
    assert submit.main(words_of(ask("kubernetes", code_url="/workspace"))) == 0
    assert (
        "warning: --code_url /workspace is in no volume of --volumes, so the image has to have it\n" in capsys.readouterr().err
    )
    assert server.bodies("POST")


def test_k8s_is_told_which_three_it_may_be(capsys):
    with pytest.raises(SystemExit):
        submit.main(["--platform", "k8s", "jobs/train.py"])
    assert "k8s is kubernetes, or kubeflow or volcano where the cluster has one of them" in capsys.readouterr().err


def test_a_cluster_with_kubeflow_trainer_2_1_gets_what_it_knows(sent, tmp_path, capsys):
    unknown = {
        "message": 'TrainJob in version "v1alpha1" cannot be handled: strict decoding error: unknown field "spec.runtimePatches"'
    }
    answers = cluster_answers("job-1", TRAINER, conditions("Complete"), "job-1-node-0-0-x")
    server = sent({**answers, ("POST", TRAINER): [(400, unknown), answers["POST", TRAINER]], ("POST", SECRETS): (201, {})})
    path = written(tmp_path, template={"metadata": {"labels": {"a": "b"}}, "spec": {"tolerations": [{"operator": "Exists"}]}})
    asked = {**TRAIN_JOB, "patch": path, "name": "job-1"}
    assert submit.main(words_of(ask("kubeflow", **asked))) == 2
    assert "is older than 2.2, and has no time limit for a job: leave --hours out" in capsys.readouterr().err
    server.answers["POST", TRAINER] = [(400, unknown), answers["POST", TRAINER]]
    assert submit.main(words_of(ask("kubeflow", **asked, hours=None))) == 0
    _, (_, refused), (_, taken), _ = server.bodies("POST")
    assert "2.1, which takes no security contexts: they have to be in the runtime" in capsys.readouterr().err
    (override,) = taken["spec"].pop("podTemplateOverrides")
    assert taken["spec"] == {name: value for name, value in refused["spec"].items() if name != "runtimePatches"}
    assert override["targetJobs"] == [{"name": "node"}] and override["metadata"] == {"labels": {"a": "b"}}
    assert set(override["spec"]) == {"containers", "volumes", "tolerations"}
    assert [set(one) for one in override["spec"]["containers"]] == [{"name", "volumeMounts"}]


@pytest.mark.rehearsal  # a package of 22 MB
@pytest.mark.parametrize("version", ["1.29", "1.31", "1.33"])
def test_objects_are_valid_by_the_published_interface_of_kubernetes(version, monkeypatch):
    """Strictly: a field that this version does not know is refused, too."""
    for package in ("importlib_resources==6.5.2", "kubernetes-validate==1.37.0"):
        monkeypatch.syspath_prepend(python_package(package))
    validate = importlib.import_module("kubernetes_validate").validate
    for platform, changes in KINDS:
        request = ask(platform, **changes)
        for one in filter(None, (kubernetes.service(request), kubernetes.secret(request, "x"))):
            validate(one, version, strict=True)
        pod = pod_of(kubernetes.build(request))
        for container in pod["containers"]:
            container.setdefault("image", "x")  # which a TrainJob has elsewhere
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}, version, strict=True)
    validate(kubernetes.build(ask("kubernetes")), version, strict=True)


# --- A pod of it, started as a kubelet does ------------------------------------------------------------------------------


def started_as_by_a_kubelet(hosts, number, request):
    """The container of one pod of the Job, on a host that has its name."""
    (container,) = pod_of(kubernetes.build(request))["containers"]
    env = {one["name"]: one.get("value", "s" * 32) for one in container["env"]}
    env.update(JOB_COMPLETION_INDEX=str(number), HOME=str(hosts.folders[number]))
    words = [sys.executable if word == "python" else word for word in container["command"]]
    return hosts.run(number, *words, env=env)


@pytest.mark.parametrize("nodes", [1, 2])
def test_pods_of_an_indexed_job_find_each_other_and_train(nodes, tmp_path):
    namespaces()
    output = tmp_path / "out"
    request = ask(
        "kubernetes", nodes=nodes, gpus=1, code_url=str(ROOT), data_url=None, output_url=str(output), volumes=(f"shared:{tmp_path}", f"code:{ROOT}"),
        arguments=(*TINY, "--max_steps", "2"),
    )  # fmt: skip
    hosts = Hosts(nodes, tmp_path / "hosts", called=[f"run-7-{number}.run-7" for number in range(nodes)], forked=True)
    try:
        processes = [started_as_by_a_kubelet(hosts, number, request) for number in range(nodes)]
        assert [process.wait(PATIENCE) for process in processes] == [0] * nodes, hosts.log(0)
        log = hosts.log(0)
    finally:
        hosts.close()
    assert f"rank 0 of {nodes}, platform kubernetes (JOB_COMPLETION_INDEX and WORLD_SIZE count pods)" in log
    assert (output / "metrics.jsonl").exists() or os.listdir(output / "checkpoints")


def test_launch_local_gives_a_node_what_a_pod_has():
    injected = local.PLATFORMS["kubernetes"](1, 2, 23456)[1]
    assert set(injected) == {"JOB_COMPLETION_INDEX", *pods.node_variables(ask("kubernetes"))} - {"NPROC_PER_NODE"}
