"""python -m launch weights: a file for a platform without Internet, with what a job has to know of it."""

import json
import os

import pytest

from common.checkpoints import pretrained
from launch import weights
from tests.common.storage.test_https import serve  # noqa: F401 (a fixture)
from tests.common.weights.test_by_name import content, server  # noqa: F401 (fixtures)
from tests.tools.flagship import photographs  # noqa: F401 (a fixture)
from tests.tools.jobs import run_job
from tests.tools.packages import python_package

NAME = "ShuffleNet_V2_X0_5_Weights.DEFAULT"


def test_the_option_that_it_prints_is_all_that_a_job_needs(server, photographs, tmp_path, capsys):
    assert weights.main([NAME, str(tmp_path / "weights")]) == 0
    option, path = capsys.readouterr().out.splitlines()[-1].split()
    assert option == "--weights" and os.path.dirname(path) == str(tmp_path / "weights")
    assert pretrained.about_weights(path)["arch"] == "shufflenet_v2_x0_5"
    done = run_job(
        "train_imagenet", tmp_path, "--data_url", photographs, option, path, "--epochs", 1, "--max_steps", 1, "--batch_size", 4,
        "--recipe", "imagenet",
    )  # fmt: skip
    assert "--arch shufflenet_v2_x0_5 --image_size 224 --resize short --interpolation bilinear" in done.stdout
    assert len(server.asked) == 1


def test_weights_of_timm_have_names_of_their_own(serve, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(python_package("timm==1.0.31"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", serve(b"weights").url.rpartition("/")[0])
    for name in ("timm/resnet50.a1_in1k", "timm/resnet50.a2_in1k"):
        assert weights.main([name, str(tmp_path / "weights")]) == 0
    there = {path.name for path in (tmp_path / "weights").iterdir() if path.is_file()}
    assert {"resnet50.a1_in1k.safetensors", "resnet50.a2_in1k.safetensors"} <= there


def test_a_bucket_gets_the_file_and_what_is_beside_it(server, content, tmp_path, monkeypatch, capsys):
    sent = {}

    def publish(path, url):
        with open(path, "rb") as file:
            sent[url] = file.read()

    monkeypatch.setattr(weights.storage, "publish", publish)
    assert weights.main([NAME, "obs://bucket/weights/"]) == 0
    name = os.path.basename(server.url)
    assert capsys.readouterr().out.splitlines()[-1] == f"--weights obs://bucket/weights/{name}"
    assert sent.pop(f"obs://bucket/weights/{name}") == content
    (about,) = sent.values()
    assert json.loads(about)["image_size"] == 224


@pytest.mark.parametrize("name", ["DEFAULT", "resnet50", "ResNet51_Weights.DEFAULT"])
def test_what_is_no_name_is_refused_with_one_that_is(name, capsys):
    assert weights.main([name]) == 2
    assert "ResNet50_Weights" in capsys.readouterr().err
