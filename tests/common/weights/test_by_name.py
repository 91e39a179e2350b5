"""Weights by name: of torchvision and timm, from a server of the test, as neither's files can be made here with the digests in their names."""

import hashlib
import io
import os
import types

import pytest
import torch
import torchvision

from common.errors import UserError
from common.weights import by_name
from tests.common.storage.test_https import serve  # noqa: F401 (a fixture)
from tests.tools.flagship import photographs  # noqa: F401 (a fixture)
from tests.tools.packages import python_package

KIND = torchvision.models.ShuffleNet_V2_X0_5_Weights


def weights_file(network):
    buffer = io.BytesIO()
    torch.save(network.state_dict(), buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def content():
    """Of a network that answers to what it sees, as one that has learnt does: its norms have the statistics of some noise."""
    torch.manual_seed(5)
    network = torchvision.models.shufflenet_v2_x0_5(num_classes=1000)
    for norm in [module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)]:
        norm.momentum = None
    with torch.no_grad():
        network(torch.rand(16, 3, 64, 64))
    return weights_file(network)


def file_name(content):
    return f"shufflenet-{hashlib.sha256(content).hexdigest()[:8]}.pth"


@pytest.fixture
def server(serve, content, monkeypatch, tmp_path):
    """Serves the file under a name that ends as torchvision's do; torch's own cache is empty."""
    one = serve(content)
    one.url = f"{one.url.rpartition('/')[0]}/models/{file_name(content)}"
    monkeypatch.setattr(KIND.IMAGENET1K_V1.value, "url", one.url)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return one


def arguments(**values):
    return types.SimpleNamespace(given={}, **values)


def test_a_name_stands_for_a_network_an_address_and_how_its_pictures_are_made():
    found = by_name.find("ResNet50_Weights.DEFAULT", "resnet18")
    assert (found.arch, found.url) == ("resnet50", "https://download.pytorch.org/models/resnet50-11ad3fa6.pth")
    assert found.options["image_size"] == 224 and int(224 / found.options["crop_pct"]) == 232
    assert (
        by_name.find("pretrained", "vit_b_16")
        == by_name.find("DEFAULT", "vit_b_16")
        == by_name.find("IMAGENET1K_V1", "vit_b_16")
    )
    swag = by_name.find("ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1", "resnet50").options
    assert (swag["image_size"], swag["interpolation"]) == (384, "bicubic") and int(384 / swag["crop_pct"]) == 384
    for text in ("epoch_3.pth", "s3://bucket/Weights.DEFAULT", "folder/DEFAULT", "weights"):
        assert not by_name.is_name(text)


@pytest.mark.parametrize(
    "text, arch, line",
    [
        ("IMAGENET1K_V9", "resnet50", "--weights IMAGENET1K_V9: resnet50 has IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT"),
        ("ResNet51_Weights.DEFAULT", "resnet50", "none of torchvision's; the nearest: ResNet50_Weights"),
        ("DEFAULT", "resnet51", "is a name of torchvision's, which has no network resnet51"),
        ("VGG16_Weights.IMAGENET1K_FEATURES", "vgg16", "is for features alone, without the last layers"),
    ],
)
def test_a_wrong_name_is_told_the_near_ones(text, arch, line):
    with pytest.raises(UserError, match=line):
        by_name.find(text, arch)


def test_a_fetch_that_was_cut_off_goes_on_and_is_made_once(server, content, tmp_path):
    server.cuts = [len(content) // 3]
    found = by_name.find("DEFAULT", "shufflenet_v2_x0_5")
    for _ in range(2):
        path = by_name.fetch(found, str(tmp_path / "inputs"))
    assert server.asked == [None, f"bytes={len(content) // 3}-"]
    with open(path, "rb") as file:
        assert file.read() == content
    cached = tmp_path / "torch" / "hub" / "checkpoints" / os.path.basename(server.url)
    cached.parent.mkdir(parents=True)
    cached.write_bytes(content)
    assert by_name.fetch(found, str(tmp_path / "other")) == str(cached)
    cached.write_bytes(content[:-1])  # damaged
    assert by_name.fetch(found, str(tmp_path / "inputs")) == path


def test_a_file_with_another_digest_is_thrown_away(server, content, tmp_path):
    server.body = content[:-1] + b"?"
    found = by_name.find("DEFAULT", "shufflenet_v2_x0_5")
    with pytest.raises(UserError, match=r"was damaged on the way: its SHA-256 is not that in its name; start again"):
        by_name.fetch(found, str(tmp_path))
    server.body = content
    assert os.path.getsize(by_name.fetch(found, str(tmp_path))) == len(content)


def test_weights_of_timm_come_from_the_hub_or_its_mirror_unless_there_is_no_internet(serve, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(python_package("timm==1.0.31"))
    mirror = serve(b"weights")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", mirror.url.rpartition("/")[0] + "/")
    found = by_name.find("pretrained", "timm/resnet18")
    assert found.url == f"{mirror.url.rpartition('/')[0]}/timm/resnet18.a1_in1k/resolve/main/model.safetensors"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        UserError, match=r"HF_HUB_OFFLINE is set, so .* is not fetched: put the file to .*/resnet18\.a1_in1k\.safetensors"
    ):
        by_name.fetch(found, str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with open(by_name.fetch(found, str(tmp_path)), "rb") as file:
        assert file.read() == b"weights"
    folder = tmp_path / "hf" / "hub" / "models--timm--resnet18.a1_in1k"
    for commit in ("1", "2"):
        kept = folder / "snapshots" / commit / "model.safetensors"
        kept.parent.mkdir(parents=True)
        kept.write_bytes(b"kept")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("2\n")
    found = by_name.find("pretrained", "timm/resnet18")
    assert by_name.fetch(found, str(tmp_path / "other")) == str(kept)
    with pytest.raises(UserError, match="is a name of torchvision's: give --weights pretrained for --arch timm/resnet18"):
        by_name.find("IMAGENET1K_V1", "timm/resnet18")
