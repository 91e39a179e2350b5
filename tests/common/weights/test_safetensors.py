"""Weights in files of safetensors, as the package and timm write them: read to the bit, or refused in a line."""

import random

import pytest
import torch
import torchvision

from common.checkpoints.pretrained import load_weights, read_weights
from common.errors import UserError
from common.weights import plain, tensors
from tests.tools.hostile import ONE, mutated, network, refused_in_a_line, safe, safe_of
from tests.tools.jobs import assert_same_bits
from tests.tools.packages import python_package


@pytest.fixture
def package(monkeypatch):
    monkeypatch.syspath_prepend(python_package("safetensors==0.8.0"))
    return pytest.importorskip("safetensors.torch")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of_every_kind():
    torch.manual_seed(0)
    found = {f"of {name}": torch.randn(3, 5).mul(3).to(kind) for name, kind in tensors.SAFE_TYPES.items() if name != "BOOL"}
    more = {"truths": torch.tensor([True, False]), "one": torch.tensor(2.5), "none": torch.zeros(0, 3), "ünï": torch.ones(1)}
    return {**found, **more}


def test_what_the_package_writes_is_read_to_the_bit(package, here):
    state = of_every_kind()
    package.save_file(state, "weights.safetensors", metadata={"format": "pt"})
    found = read_weights("weights.safetensors")
    assert_same_bits(dict(sorted(found.items())), dict(sorted(state.items())))
    assert all(tensor.is_contiguous() and tensor.dtype == state[name].dtype for name, tensor in found.items())
    assert_same_bits(dict(sorted(package.load(safe_of(state)).items())), dict(sorted(state.items())))  # ours, read by theirs


def test_a_network_with_weights_of_the_package_answers_as_it_did(package, here, capsys):
    torch.manual_seed(1)
    theirs, images = torchvision.models.resnet18(num_classes=3), torch.randn(2, 3, 64, 64)
    package.save_model(theirs, "model.safetensors")
    ours = torchvision.models.resnet18(num_classes=3)
    assert load_weights(ours, "model.safetensors") == []
    with torch.no_grad():
        assert torch.equal(ours.eval()(images), theirs.eval()(images))
    assert "model.safetensors is unverified: there is no model.safetensors.sha256" in capsys.readouterr().out


def test_of_500_damaged_files_each_is_refused_in_a_line_or_read_as_the_package_reads_it(package, here):
    good, draw, refused, stricter = safe_of(network()), random.Random(2), 0, 0
    for _ in range(500):
        content = mutated(good[: draw.choice([600, len(good)])] if draw.random() < 0.1 else good, draw)
        with open("weights.safetensors", "wb") as file:
            file.write(content)
        try:
            theirs = package.load(content)
        except Exception:
            theirs = None
        try:
            found = read_weights("weights.safetensors")
        except UserError as error:
            refused += 1
            stricter += theirs is not None
            assert str(error).isprintable() and len(str(error)) < 400
        else:
            assert theirs is not None and found.keys() == theirs.keys()
            assert all(found[name].numpy().tobytes() == theirs[name].numpy().tobytes() for name in found)
    assert 200 < refused < 490 and stricter < 10


def test_a_hostile_one_is_refused_and_without_the_attack_it_is_read(here):
    assert torch.equal(tensors.read(safe(), verified=False)["weight"], torch.tensor([1.0, 2, 3, 4]))
    assert tensors.read(safe(b"{}", b""), verified=False) == {}
    as_zip = int.from_bytes(b"PK", "little")  # this length of a header begins as an archive of torch.save
    assert tensors.read(safe(ONE + b" " * (as_zip - len(ONE))), verified=False)["weight"].tolist() == [1.0, 2, 3, 4]
    with pytest.raises(plain.Refused, match="it holds a tensor of F8_E4M3, which is not read here"):
        tensors.read(safe(b'{"w":{"dtype":"F8_E4M3","shape":[16],"data_offsets":[0,16]}}'), verified=False)
    assert refused_in_a_line(safe(data=b"x"))


def test_a_vision_transformer_of_timm_goes_into_torchvisions(here, monkeypatch):
    monkeypatch.syspath_prepend(python_package("timm==1.0.31"))
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    theirs = timm.create_model("vit_base_patch32_224", pretrained=False, num_classes=3, img_size=64, depth=2).eval()
    how = {"image_size": 64, "patch_size": 32, "num_layers": 2, "num_heads": 12, "hidden_dim": 768, "mlp_dim": 3072}
    ours, images = torchvision.models.VisionTransformer(**how, num_classes=3).eval(), torch.randn(2, 3, 64, 64)
    with open("vit.safetensors", "wb") as file:
        file.write(safe_of(theirs.state_dict()))
    assert load_weights(ours, "vit.safetensors") == []
    with torch.no_grad():
        assert torch.allclose(ours(images), theirs(images), atol=1e-5)
    other = torchvision.models.VisionTransformer(**how, num_classes=5)
    assert load_weights(other, "vit.safetensors") == ["heads.head.weight", "heads.head.bias"]
    theirs.reset_classifier(0)
    with open("without_head.safetensors", "wb") as file:
        file.write(safe_of(theirs.state_dict()))
    assert load_weights(ours, "without_head.safetensors") == ["heads.head.weight", "heads.head.bias"]
    with pytest.raises(UserError, match=r"heads.head.bias, heads.head.weight and so on do not fit"):
        load_weights(ours, "without_head.safetensors", new_head=False)
    larger = torchvision.models.VisionTransformer(**{**how, "image_size": 96}, num_classes=3)
    with pytest.raises(UserError, match=r"encoder.pos_embedding and so on do not fit; give .* --image_size"):
        load_weights(larger, "vit.safetensors")  # no place of the larger picture would be what was learnt
