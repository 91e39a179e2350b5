"""python -m launch weights: a file for a platform without Internet, with what a job has to know of it."""

import json
import os

import pytest

from common.checkpoints import pretrained
from launch import weights
from launch.bundle import command as bundle
from tests.common.storage.test_https import serve  # noqa: F401 (a fixture)
from tests.common.weights.test_by_name import content, server  # noqa: F401 (fixtures)
from tests.tools.flagship import photographs  # noqa: F401 (a fixture)
from tests.tools.hostile import safe_of
from tests.tools.jobs import ROOT, run_forked, run_job
from tests.tools.packages import python_package

NAME = "ShuffleNet_V2_X0_5_Weights.DEFAULT"
FILE = "test_vit.r160_in1k.safetensors"


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


def test_a_folder_takes_weights_along_and_its_job_finds_them_by_name(serve, photographs, tmp_path, monkeypatch, capsys):
    place = python_package("timm==1.0.31")
    monkeypatch.syspath_prepend(place)
    timm = pytest.importorskip("timm")
    hub = serve(safe_of(timm.create_model("test_vit").state_dict()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bundle, "try_out", lambda boot, needed: "")  # it trains below
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url.rpartition("/")[0])
    words = [str(ROOT / "jobs" / "train_imagenet.py"), "--weights", "timm/test_vit"]
    assert bundle.main(words) == 2
    assert "--weights go along in a folder, as one file cannot hold them: give --folder FOLDER" in capsys.readouterr().err
    assert bundle.main([str(ROOT / "jobs" / "train.py"), *words[1:], "--folder", "code"]) == 2
    assert "train.py has no option --weights" in capsys.readouterr().err
    assert bundle.main([*words, "--folder", "code"]) == 0
    assert "with the weights of timm/test_vit, which the job finds by this name" in capsys.readouterr().out
    assert "timm>=" in (tmp_path / "code" / "requirements.txt").read_text()
    cached = tmp_path / "hf" / "hub" / "models--timm--test_vit.r160_in1k" / "snapshots" / "1" / "model.safetensors"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(hub.body)
    (cached.parents[2] / "refs").mkdir()
    (cached.parents[2] / "refs" / "main").write_text("1")
    bundle.write_folder(words[0], "of_the_cache", weights="timm/test_vit")
    assert all((tmp_path / code / "weights" / FILE).read_bytes() == hub.body for code in ("code", "of_the_cache"))
    assert len(hub.asked) == 1
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = [tmp_path / "code" / "jobs" / "train_imagenet.py", "--data_url", photographs, "--arch", "timm/test_vit"]
    words += ["--weights", "pretrained", "--epochs", 1, "--max_steps", 1, "--batch_size", 4]
    done = run_forked(words, elsewhere, {"PYTHONPATH": str(place), "HF_HUB_OFFLINE": "1"})
    assert f"{tmp_path / 'code' / 'weights' / FILE} has no weights for these classes" in done.stdout


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
