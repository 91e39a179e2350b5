"""The objects that submit sends to Kubeflow, as Kubeflow's own Python models read them."""

import importlib

import pytest

from launch.submit import kubernetes
from tests.tools.packages import python_package
from tests.tools.submitting import TRAIN_JOB, ask

pytestmark = pytest.mark.rehearsal  # two packages that have to be fetched first


def test_a_train_job_is_the_same_after_its_model_has_read_it(monkeypatch):
    """A field that the model does not know would be lost."""
    monkeypatch.syspath_prepend(python_package("kubeflow-trainer-api==2.3.0"))
    models = importlib.import_module("kubeflow_trainer_api.models")
    for changes in ({}, {"gpus": 0, "hours": None}, {"cpus": 8, "memory": 64}):
        body = kubernetes.build(ask("kubeflow", **{**TRAIN_JOB, **changes}))
        assert models.TrainerV1alpha1TrainJob.from_dict(body).to_dict() == body


def test_a_pytorch_job_has_only_fields_of_its_model(monkeypatch):
    """Down to the pods, which tests/launch/submit/test_sent.py compares with kubernetes' own model."""
    monkeypatch.syspath_prepend(python_package("kubeflow-training==1.9.4"))
    models = importlib.import_module("kubeflow.training.models")
    body = kubernetes.build(ask("kubeflow"))
    spec = body["spec"]
    parts = {"": body, "Spec": spec}
    known = {f"KubeflowOrgV1PyTorchJob{name}": part for name, part in parts.items()}
    known["KubeflowOrgV1RunPolicy"] = spec["runPolicy"]
    for replica in spec["pytorchReplicaSpecs"].values():
        for name, part in {**known, "KubeflowOrgV1ReplicaSpec": replica}.items():
            assert set(part) <= set(getattr(models, name).attribute_map.values()), name
