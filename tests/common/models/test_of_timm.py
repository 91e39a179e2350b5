"""A network of timm: its own mean, crop and resize reach loader, evaluation, manifest and export; its weights go in and out to the bit."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from common.checkpoints import checkpoint, pretrained
from common.errors import UserError
from common.models import classifiers, of_timm
from common.ranks import norms
from datasets import imagenet
from datasets.photos import decode, tree
from launch import export
from launch.export import command, preprocess, safetensors
from tests.launch.export.test_export import answers, preprocess_of
from tests.tools.flagship import last_row, photographs  # noqa: F401 (a fixture)
from tests.tools.hostile import safe_of
from tests.tools.jobs import in_rehearsal, module_of, run_job
from tests.tools.packages import python_package

HALF = (0.5, 0.5, 0.5)  # the mean and the deviation of timm's vision transformers
NETWORK = ["--arch", "timm/test_vit", "--image_size", 32]
OPTIONS = [*NETWORK, "--recipe", "imagenet", "--batch_size", 8, "--epochs", 2, "--lr", 0.02, "--warmup", 0]


@pytest.fixture(scope="module")
def place():
    return python_package("timm==1.0.31")


@pytest.fixture
def timm(place, monkeypatch):
    monkeypatch.syspath_prepend(place)
    monkeypatch.syspath_prepend(python_package("safetensors==0.8.0"))  # with which timm reads
    return pytest.importorskip("timm")


def train(folder, place, *options, check=0):
    return run_job("train_imagenet", folder, *options, env={"PYTHONPATH": str(place)}, check=check)


@pytest.fixture(scope="module")
def run(photographs, place, tmp_path_factory):
    """(folder, log) of the second of two starts."""
    folder = tmp_path_factory.mktemp("timm")
    train(folder, place, "--data_url", photographs, *OPTIONS, "--run_epochs", 1)
    return folder, train(folder, place, "--data_url", photographs, *OPTIONS).stdout


def test_what_timm_says_of_the_pictures_reaches_the_run(run, place, photographs, timm, tmp_path):
    folder, log = run
    assert (
        "timm/test_vit: --image_size 32 --interpolation bicubic, with --resize short 0.95 of the short side; mean 0.5 0.5 0.5"
        in log
    )
    _, about, _ = checkpoint.newest(str(folder / "out" / "checkpoints"))
    kept = {name: about["arguments"][name] for name in ("mean", "std", "crop_pct", "interpolation", "image_size")}
    assert kept == {"mean": [*HALF], "std": [*HALF], "crop_pct": 0.95, "interpolation": "bicubic", "image_size": 32}
    accuracy = last_row(folder)["accuracy"]
    assert accuracy == pytest.approx(accuracy_by_hand(folder, photographs, timm), abs=1e-6)

    evaluated = train(
        tmp_path, place, "--data_url", photographs, "--evaluate", "true", "--weights", folder / "out" / "epoch_2.pth"
    )
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())["accuracy"]
    assert found == pytest.approx(accuracy, abs=1e-6) and "--interpolation bicubic" in evaluated.stdout
    again = train(folder, place, "--data_url", photographs, *OPTIONS, "--evaluate", "true").stdout
    assert f"accuracy={accuracy:.4f}" in again and "warning" not in again


def accuracy_by_hand(folder, photographs, timm):
    network = timm.create_model("test_vit", pretrained=False, num_classes=3, img_size=32).eval()
    network.load_state_dict(torch.load(folder / "out" / "epoch_2.pth"))
    files = tree.load(str(photographs / "val"))
    pictures = [
        decode.eval_picture(Path(files.path(n)).read_bytes(), False, 32, int(32 / 0.95), mode="bicubic")
        for n in range(len(files))
    ]
    with torch.no_grad():
        found = network((torch.stack(pictures) / 255 - 0.5) / 0.5).argmax(1)
    return (found.numpy() == files.labels).mean()


@pytest.mark.parametrize("form", in_rehearsal(["torch", "onnx", "safetensors"], lambda form: form == "onnx"))
def test_exported_it_answers_as_the_run_did(run, timm, photographs, tmp_path, form):
    assert export.main([str(run[0] / "out"), "--format", form, "--output", str(tmp_path)]) == 0
    how = json.loads((tmp_path / "preprocessing.json").read_text())
    assert (how["mean"], how["resize"], how["interpolation"]) == ([*HALF], 33, "bicubic")
    files = tree.load(str(photographs / "val"))
    pictures = np.stack([preprocess_of(tmp_path)(files.path(number)) for number in range(len(files))])
    network = timm.create_model("test_vit", pretrained=False, num_classes=3, img_size=32).eval()
    network.load_state_dict(command.find(str(run[0] / "out")).weights)
    scaled = (torch.from_numpy(pictures) / 255 - 0.5) / 0.5
    with torch.no_grad():
        expected = network(scaled).numpy()
        if form != "safetensors":
            assert np.abs(answers(tmp_path, pictures) - expected).max() < 1e-3
            return
        read = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
        assert np.array_equal(read(scaled).numpy(), expected)
    about = timm.data.resolve_data_config({}, model=read)
    assert tuple(about["mean"]) == HALF and tuple(about["input_size"]) == (3, 32, 32) and about["interpolation"] == "bicubic"
    assert read.pretrained_cfg["label_names"] == files.classes
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=7)  # which is where a next run begins
    assert torch.equal(other.cls_token, read.cls_token) and other.head.weight.shape == (7, 64)


def test_its_norms_with_an_activation_are_over_all_ranks(timm, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    one, other = (torch.nn.Sequential(timm.layers.BatchNormAct2d(3, drop_layer=torch.nn.Dropout)) for _ in range(2))
    over_all = norms.synchronised(other)
    images = torch.randn(2, 3, 4, 4)
    assert type(over_all[0]) is norms.SynchronisedNormAct2d and over_all.state_dict().keys() == one.state_dict().keys()
    assert torch.equal(over_all.eval()(images), one.eval()(images)) and (over_all(images) >= 0).all()


@pytest.mark.parametrize("resize", ["short", "whole"])
def test_timms_own_transform_cuts_a_photograph_as_the_evaluation_did(timm, resize):
    """The middle of it, or with --resize whole all of it; the decoders differ by 1 of 255."""
    kept = {"image_size": 32, "resize": resize, "crop_pct": 0.95, "interpolation": "bicubic", "mean": HALF, "std": HALF}
    found = SimpleNamespace(weights={}, arguments=kept)
    how = command.preprocessing(found, SimpleNamespace(image_size=None, format="safetensors"))
    config = safetensors.config("test_vit", how, ["a", "b", "c"], torch.nn.Sequential(torch.nn.Linear(4, 3)))
    about = timm.data.resolve_data_config(pretrained_cfg=config["pretrained_cfg"])
    rows, columns = np.mgrid[0:40, 0:90]
    photograph = Image.fromarray(np.stack([2 * columns, 5 * rows, rows + columns], axis=2).astype(np.uint8))
    theirs = (timm.data.create_transform(**about)(photograph) * 0.5 + 0.5) * 255
    assert np.abs(theirs.numpy() - preprocess.preprocess(photograph, how)).max() < 2


def test_timms_own_weights_begin_a_run_and_the_head_of_other_classes_is_new(timm, place, photographs, tmp_path):
    torch.manual_seed(0)
    theirs = timm.create_model("test_vit", pretrained=False, num_classes=1000, img_size=32)
    (tmp_path / "model.safetensors").write_bytes(safe_of(theirs.state_dict()))
    words = [
        "--data_url",
        photographs,
        *OPTIONS,
        "--weights",
        tmp_path / "model.safetensors",
        "--freeze_epochs",
        1,
        "--max_steps",
        1,
    ]
    log = train(tmp_path, place, *words).stdout
    assert "model.safetensors has no weights for these classes: head.weight and head.bias begin anew" in log
    _, _, path = checkpoint.newest(str(tmp_path / "out" / "checkpoints"))
    kept = checkpoint.read(path)[0]["model"]
    assert all(torch.equal(kept[name], tensor) for name, tensor in theirs.state_dict().items() if not name.startswith("head."))


HEADS = {
    "test_vit": ["head"],
    "deit_tiny_distilled_patch16_224": ["head", "head_dist"],
    "levit_128s": ["head", "head_dist"],
    "volo_d1_224": ["head", "aux_head"],
}


@pytest.mark.parametrize("name", HEADS)
def test_a_network_of_two_heads_has_two_last_layers(timm, name):
    with torch.device("meta"):
        network = timm.create_model(name, pretrained=False, num_classes=3)
    assert sorted(classifiers.last_layers(network)) == sorted(HEADS[name])
    frozen = {id(weight) for weight in module_of("train_imagenet").all_but_the_last_layer(network)}
    trained = {key for key, weight in network.named_parameters() if id(weight) not in frozen}
    assert {key.partition(".")[0] for key in trained} == {*HEADS[name]}


def test_weights_of_other_classes_begin_a_network_of_two_heads(timm):
    theirs, ours = (timm.create_model("deit_tiny_distilled_patch16_224", num_classes=count) for count in (7, 3))
    heads = ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]
    assert sorted(pretrained.fit(ours, theirs.state_dict(), "w.pth", new_head=True)) == sorted(heads)
    assert torch.equal(ours.cls_token, theirs.cls_token) and ours.head.weight.shape == (3, 192)
    without = {name: tensor for name, tensor in theirs.state_dict().items() if name not in heads}
    assert sorted(pretrained.fit(ours, without, "w.pth", new_head=True)) == sorted(heads)


def test_a_wrong_name_and_a_missing_package_are_a_line(timm, monkeypatch):
    with pytest.raises(
        UserError, match=r"--arch timm/resnet1 is none of the \d{3,4} networks of timm 1.0.31; the nearest: resnet"
    ):
        classifiers.require("timm/resnet1", 224)
    with pytest.raises(UserError, match="is none of the"):
        of_timm.config("timm/resnet18.of_nobody")
    with pytest.raises(UserError, match="--arch timm/test_vit takes no --image_size 40"):
        classifiers.classifier("timm/test_vit", 3, 40)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=re.escape("--arch timm/NAME needs timm: pip install .[timm]")):
        classifiers.require("timm/resnet18", 224)


def test_what_a_run_of_another_network_had_is_not_taken(timm):
    before = {"arch": "resnet50", "image_size": 48, "crop_pct": None, "mean": [0.1, 0.2, 0.3]}
    values, _ = of_timm.image_options(SimpleNamespace(arch="timm/test_vit", given={"image_size"}, image_size=64), before)
    assert (values["image_size"], values["crop_pct"], values["mean"]) == (64, 0.95, HALF)
    values, _ = of_timm.image_options(SimpleNamespace(arch="timm/test_vit", given={}), {**before, "arch": "timm/test_vit"})
    assert (values["image_size"], values["crop_pct"], values["mean"]) == (48, 0.95, (0.1, 0.2, 0.3))
    assert (
        of_timm.image_options(SimpleNamespace(arch="timm/volo_d4_448", given={}), {})[0]["crop_pct"] == 1
    )  # of 1.15: nothing is padded


def test_in_a_small_folder_its_residual_blocks_do_not_begin_at_0(timm):
    weights = {shallow: classifiers.classifier("timm/resnet10t", 3, 32, shallow).state_dict() for shallow in (True, False)}
    assert imagenet.MEAN != HALF and not torch.equal(*(weights[shallow]["layer1.0.bn2.weight"] for shallow in (True, False)))
