"""The lines of docs/from.md for who comes from NVIDIA's ResNet-50 script or Alibaba's KSpeed patch of it."""

import json
import os
import re
import subprocess

import pytest
import torch
from PIL import Image

from common import arguments, progress
from common.checkpoints.pretrained import local_weights
from common.errors import UserError
from common.models.classifiers import classifier
from common.storage import once
from datasets import augment, dali, drop_in, imagenet
from datasets.drop_in import nvidia
from datasets.photos import tree
from datasets.photos.labelled import Photos
from datasets.sampler import EpochSampler
from launch import image, kspeed
from tests.pages.from_page import assert_each_is_checked, cells
from tests.tools.flagship import SMALL, photographs  # noqa: F401 (a fixture)
from tests.tools.jobs import NETWORK, ROOT, environment, module_of, run_job
from tests.tools.memcached import Memcached

TITLE = "KSpeed and NVIDIA's ResNet-50"
TRAINED = ["-a", NETWORK[1], "-b", 8, "--image-size", 32, "-j", 0, "--epochs", 2, "--lr", 0.1]


@pytest.fixture(scope="module")
def job():
    return module_of("train_imagenet")


@pytest.fixture(scope="module")
def trained(photographs, tmp_path_factory):
    """(folder, log) of a run that was typed in that script's words."""
    folder = tmp_path_factory.mktemp("nvidia")
    own = ["--raport-file", "raport.json", "-p", 2, "--jit", "script", "--num-classes", 5, "--memory-format", "nchw", "-v", 5]
    done = run_job("train_imagenet", folder, photographs, *TRAINED, *own, "--mixup", 0.2, "--augmentation", "autoaugment")
    return folder / "out", done.stdout


# --- The command line ----------------------------------------------------------------------------------------------------


def test_its_command_line_trains(trained):
    out, log = trained
    assert "learning rate 0.1 for a total batch of 8" in log and "--jit has no effect" in log
    assert (
        "--raport-file has no effect: metrics.jsonl, speed.jsonl and TensorBoard" in log and not (out / "raport.json").exists()
    )
    assert [int(number) for number in re.findall(r"step=(\d+)/6", log)] == [1, 3, 5, 1, 3, 5]
    assert torch.load(out / "epoch_2.pth")["fc.weight"].shape[0] == 5


def test_so_many_epochs_of_each_start(photographs, tmp_path):
    words = [photographs, *TRAINED, "--epochs", 3, "--run-epochs"]
    first = run_job("train_imagenet", tmp_path, *words, 2).stdout
    assert "done: " in first and "--run_epochs 2 is reached, 2 of 3 epochs are done: the same command goes on" in first
    assert json.loads((tmp_path / "out" / "state.json").read_text())["finished"] is False
    second = run_job("train_imagenet", tmp_path, *words, 2).stdout
    assert "epoch=3/3" in second and json.loads((tmp_path / "out" / "state.json").read_text())["finished"] is True


def test_without_checkpoints(photographs, tmp_path):
    log = run_job("train_imagenet", tmp_path, photographs, *TRAINED, "--no-checkpoints", "--epochs", 1).stdout
    assert "no checkpoint, as --checkpoints false wants it" in log and (tmp_path / "out" / "metrics.jsonl").exists()
    assert not list((tmp_path / "out").rglob("*.pt")) and not list((tmp_path / "out").rglob("*.pth"))


def test_the_options_of_the_page_mean_the_same(job):
    """Each of the first column, beside its place in the second."""
    compared = 0
    for theirs, ours, _ in cells(TITLE):
        if not (theirs.startswith("`-") and ours.startswith("`-")):
            continue
        pairs = [re.findall(r"`([^`]+)`", cell) for cell in (theirs, ours)]
        assert len(pairs[0]) == len(pairs[1]), (theirs, ours)
        for there, here in zip(*pairs):
            both = (arguments.parse(job.options(), words.split(), {}) for words in (there, here))
            given, meant = (arguments.replaced(args, arch=args.arch.replace("-", "_")) for args in both)
            known = {"--arch se-resnext101-32x4d", "--arch efficientnet-widese-b0", "--lr 2.048", "--pretrained"}
            others = ("data_backend", "interpolation", "changed", "given")
            same = {name: value for name, value in vars(given).items() if name not in others}
            assert there in known or same.items() <= vars(meant).items(), (there, here)
            compared += there not in known
    assert compared == 41


def test_what_it_prints_says_why_it_has_no_effect(job, capsys):
    for words in ("--checkpoint-filename FILE", "--jit script", "--topk 5", "--gpu-affinity socket", "--pretrained"):
        arguments.parse(job.options(), words.split(), {})
        assert f"{words.split()[0]} has no effect: " in "".join(capsys.readouterr())


@pytest.mark.parametrize("arch", ["resnext101-32x4d", "efficientnet-b0"])
def test_networks_by_its_names(arch):
    parameters = sum(weight.numel() for weight in classifier(arch, 1000, 64).parameters())
    assert parameters == {"resnext101-32x4d": 44_177_704, "efficientnet-b0": 5_288_548}[arch]


@pytest.mark.parametrize(
    "arch, nearest", [("se-resnext101-32x4d", "resnext101_32x4d"), ("efficientnet-widese-b4", "efficientnet_b4")]
)
def test_networks_that_are_not_here_name_the_nearest(arch, nearest):
    with pytest.raises(UserError, match=f"is none of torchvision's networks; the nearest: {nearest}"):
        classifier(arch, 10, 64)


def test_weights_out_of_a_bucket_are_verified(trained, store, reachable, tmp_path, monkeypatch):
    for name in ("epoch_2.pth", "epoch_2.pth.sha256"):
        store.client().put_object(Bucket="data", Key=f"weights/{name}", Body=(trained[0] / name).read_bytes())
    said, told = [], []
    monkeypatch.setattr(progress, "TELL_SECONDS", 0)
    monkeypatch.setattr(once.Lease, "tell", lambda _, text, _number=0: told.append(text))
    for _ in range(2):
        path = local_weights("s3://data/weights/epoch_2.pth", str(tmp_path / "in"), said.append)
        assert os.path.getsize(path) == (trained[0] / "epoch_2.pth").stat().st_size and os.path.exists(path + ".sha256")
    assert any(text.startswith("fetching s3://data/weights: ") for text in told)
    with pytest.raises(UserError, match=r"there is no epoch_9\.pth in s3://data/weights"):
        local_weights("s3://data/weights/epoch_9.pth", str(tmp_path / "in"), said.append)


# --- The pictures --------------------------------------------------------------------------------------------------------


def batches(photographs, backend="pytorch", workers=0, epoch=0, **how):
    photos = Photos(tree.load(str(photographs / "train")), 32, True, 7, **how)
    sampler = EpochSampler(len(photos), 8, seed=7)
    sampler.start_at(epoch, 0)
    return [images for images, _ in imagenet.loader(photos, sampler, torch.device("cpu"), workers, backend)]


@pytest.mark.parametrize("how", [{"augmentation": "autoaugment"}, {"mode": "bicubic"}], ids=str)
@pytest.mark.parametrize("backend, workers", [("pytorch", 2), ("dali-cpu", 1)])
def test_a_picture_looks_the_same_in_every_backend_that_can(photographs, tmp_path, monkeypatch, how, backend, workers):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    expected = batches(photographs, **how)
    assert torch.equal(torch.get_rng_state(), before)  # the training's own random numbers are left alone
    found = batches(photographs, backend, workers, **how)
    assert all(torch.allclose(one, other, atol=0.1) for one, other in zip(expected, found)) and len(found) == 6
    if backend == "pytorch":
        assert all(map(torch.equal, expected, found))
    assert not any(map(torch.equal, expected, batches(photographs)))
    assert not any(map(torch.equal, expected, batches(photographs, epoch=1, **how)))


def test_an_augmentation_depends_on_seed_epoch_and_sample_alone():
    picture = torch.randint(0, 256, (3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))

    def looks(seed, epoch):
        return torch.stack([augment.augmented("trivialaugment", picture, seed, epoch, number) for number in range(20)])

    first = looks(0, 0)
    assert torch.equal(first, looks(0, 0)) and len(torch.unique(first, dim=0)) > 5
    assert not torch.equal(first, looks(0, 1)) and not torch.equal(first, looks(1, 0))


def test_bicubic_is_pillows(tmp_path):
    from datasets.photos import decode

    draw = torch.Generator().manual_seed(0)
    smooth = torch.nn.functional.interpolate(torch.rand(1, 3, 8, 9, generator=draw) * 255, (90, 120), mode="bilinear")[0]
    picture = smooth.to(torch.uint8)
    theirs = Image.fromarray(picture.permute(1, 2, 0).numpy()).resize((40, 30), Image.Resampling.BICUBIC)
    ours = decode.resize(picture, 30, 40, "bicubic").permute(1, 2, 0)
    difference = (ours.int() - torch.tensor(list(theirs.get_flattened_data())).view(30, 40, 3)).abs()
    assert difference.max() <= 2 and difference.float().mean() < 0.5


def test_a_gpu_of_dali_refuses_what_it_cannot(photographs, monkeypatch):
    with pytest.raises(UserError, match="--data_backend dali-gpu makes the pictures on a GPU, without --augmentation and only"):
        batches(photographs, "dali-gpu", augmentation="randaugment")


# --- Its loaders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch):
    with Memcached() as server:
        monkeypatch.setenv("KSPEED_IPLIST", server.address)
        yield server


@pytest.mark.parametrize(
    "name", ["get_pytorch", "get_kspeed", "get_dali_kspeed", "get_dali_kspeed without kspeed", "get_dali", "get_synthetic"]
)
def test_its_loaders(photographs, tmp_path, monkeypatch, cache, name):
    monkeypatch.chdir(tmp_path)
    get_train, get_val = (getattr(drop_in, f"{name.split()[0]}_{split}_loader") for split in ("train", "val"))
    if "dali" in name:
        how = {"dali_cpu": True, **({"kspeed": False} if "without" in name else {})}
        get_train, get_val = get_train(**how), get_val(**how)
    train, steps = get_train(str(photographs), 32, 8, 5, False, workers=0)
    if name == "get_synthetic":
        images, targets = next(iter(train))
        assert images.shape == (8, 3, 32, 32) and steps == len(train) == imagenet.IMAGENET["train"] // 8
        return
    first, second = list(train), list(train)
    assert steps == len(train) == len(first) == 6 and not torch.equal(first[0][0], second[0][0])
    reference, _ = drop_in.get_pytorch_train_loader(str(photographs), 32, 8, 5, True, workers=0, start_epoch=1)
    for (images, targets), (others, one_hot) in zip(second, reference):
        assert torch.allclose(images, others, atol=0.1) and torch.equal(one_hot.argmax(1), targets) and one_hot.shape == (8, 5)
    val, steps = get_val(str(photographs), 32, 5, 5, False, workers=0)
    assert [len(images) for images, _ in val] == [5, 5, 2] and steps == 3


@pytest.mark.parametrize(
    "backend, cpu, on_gpu",
    [("dali_kspeed", True, False), ("dali_kspeed", False, True), ("dali", True, False), ("dali", False, True)],
)
def test_dali_decodes_where_the_argument_says(photographs, cache, monkeypatch, backend, cpu, on_gpu):
    """On an NVIDIA GPU: what DALI is told is looked at, as none is here."""
    told = []
    monkeypatch.setattr(nvidia.devices, "is_nvidia", lambda _: True)
    monkeypatch.setattr(dali, "DaliBatches", lambda *_, decode_on_gpu: told.append(decode_on_gpu) or iter(()))
    for split in ("train", "val"):
        getattr(drop_in, f"get_{backend}_{split}_loader")(dali_cpu=cpu)(str(photographs), 32, 8, 5, False, workers=0)
    assert told == [on_gpu, on_gpu]


def test_dali_with_the_cache_decodes_on_the_cpu_and_so_can_do_all(photographs, cache, monkeypatch):
    """As in the document, whose third command gives dali_cpu=True; on an NVIDIA GPU, too."""
    told = []
    monkeypatch.setattr(imagenet.devices, "is_nvidia", lambda _: True)
    monkeypatch.setattr(dali, "DaliBatches", lambda *_, decode_on_gpu: told.append(decode_on_gpu) or iter(()))
    batches(photographs, "dali-kspeed", augmentation="autoaugment")
    assert told == [False]


def test_its_names_of_backends(job):
    assert drop_in.DATA_BACKEND_CHOICES[:5] == ["pytorch", "syntetic", "kspeed", "dali-kspeed", "dali"]
    for name in drop_in.DATA_BACKEND_CHOICES:
        assert arguments.parse(job.options(), ["--data-backend", name], {}).data_backend == name


# --- Its scripts, its container and its cache ----------------------------------------------------------------------------


@pytest.mark.rehearsal
@pytest.mark.parametrize("backend", ["kspeed", "pytorch", "dali-kspeed"])
def test_the_script_of_the_document(photographs, tmp_path, cache, backend):
    script = ROOT / "launch" / "DGXA100_resnet50_AMP_multi.sh"
    smaller = [*TRAINED, "--optimizer-batch-size", 16, "--max_steps", 2, "--enable_gpu", "false", "--amp_dtype", "float32"]
    words = [script, backend, photographs, *smaller, "--workspace", tmp_path / "out"]
    own = {"NPROC_PER_NODE": "2", "KSPEED_IPLIST": cache.address, "PYTHON": os.sys.executable}
    done = subprocess.run(["bash", *map(str, words)], cwd=tmp_path, env=environment(**own), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 of 2" in done.stdout and "for a total batch of 16" in done.stdout


def test_the_script_says_what_it_needs():
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "DGXA100_resnet50_AMP_multi.sh"), "pytorch"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "BACKEND IMAGENET_FOLDER" in done.stderr


def test_the_line_of_its_container():
    """Docker is not here to run it. What the document gives its container is in this line, or the line says why not."""
    (row,) = [row for row in cells(TITLE) if row[0].startswith("`docker run")]
    its = (
        "-it",
        "--gpus all",
        "--net=host",
        "--ipc host",
        "--device=/dev/infiniband/",
        "--ulimit memlock=-1:-1",
        "-v FOLDER:FOLDER",
    )
    assert [option for option in its if option not in row[1]] == [option for option in its if option in row[2]]
    assert "-e KSPEED_IPLIST=" in row[1] and "Never run" in row[2]


def test_its_image_has_what_the_cache_needs(capsys):
    """`kspeed` and the jobs import these packages there; pyproject.toml has them as the extra `cache`."""
    extra = re.search(r"^cache = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert json.loads(extra[1]) == image.CACHE
    assert image.main(["--platform", "modelarts"]) == 0
    assert "-r /tmp/requirements.txt 'pymemcache>=4.0' 'isal>=1.0' -c /tmp/keep.txt" in capsys.readouterr().out


def test_the_verbs_of_its_cache(photographs, cache, capsys, tmp_path):
    folder, name = str(photographs), str(photographs / "val" / "class0" / "0.JPEG")
    kspeed.main(["preload", folder])
    capsys.readouterr()
    assert kspeed.main(["size", name]) == 0 and capsys.readouterr().out.split()[0] == str(os.path.getsize(name))
    assert kspeed.main(["get", name, str(tmp_path / "copy")]) == 0
    assert (tmp_path / "copy").read_bytes() == (photographs / "val" / "class0" / "0.JPEG").read_bytes()
    assert kspeed.main(["rm", folder]) == 0 and "60 images deleted" in capsys.readouterr().out
    assert kspeed.main(["get", name, str(tmp_path / "copy")]) == 1 and "is not in the cache" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["adduser", "deluser", "passwd"])
def test_what_its_service_had_and_memcached_has_not(verb, capsys):
    assert kspeed.main([verb, "me"]) == 2 and "memcached -Y" in capsys.readouterr().err


def test_its_classes_on_the_cache(photographs, cache):
    """As the document writes them, but for the import line; DALI's side is in test_kspeed.py."""
    from datasets import kspeed as KSpeedDataset

    folder = KSpeedDataset.KSpeedImageFolder(
        str(photographs / "val"), None, 2, cache.address, "admin", "admin", lambda picture: picture.size
    )
    assert len(folder) == 12 and folder.classes == ["class0", "class1", "class2"] and folder[0][1] == 0
    source = KSpeedDataset.KSpeedCallable(str(photographs / "train"), 8, 0, 1, cache.address)
    sample, label = source(type("Info", (), {"iteration": 0, "epoch_idx": 0, "idx_in_epoch": 0}))
    assert bytes(sample[:2]) == b"\xff\xd8" and label.shape == (1,)


# --- Each line of the page -----------------------------------------------------------------------------------------------

OPTIONS = test_the_options_of_the_page_mean_the_same
CHECKS = {
    "`bash ./resnet50v1.5/training/AMP/DGXA100_resnet50_AMP_multi.sh kspeed FOLDER`": test_the_script_of_the_document,
    "`docker run -it --gpus all --name=resnet50_kspeed_test ...`": test_the_line_of_its_container,
    "`python ./multiproc.py --nproc_per_node 8 ./main.py FOLDER`": test_the_script_of_the_document,
    "the folder `imagenet` with `train` and `val`": test_its_command_line_trains,
    "`--arch se-resnext101-32x4d`, `--arch efficientnet-widese-b0`": test_networks_that_are_not_here_name_the_nearest,
    "`--arch resnext101-32x4d`, `--arch efficientnet-b0`": test_networks_by_its_names,
    "`--augmentation autoaugment`": test_a_picture_looks_the_same_in_every_backend_that_can,
    "`--interpolation bicubic`, `--interpolation triangular`": test_bicubic_is_pillows,
    "`--epochs 90`, `--run-epochs 10`, `--early-stopping-patience 5`, `--prof 100`": test_so_many_epochs_of_each_start,
    "`--workspace FOLDER`, `--resume FILE`, `--no-checkpoints`": test_without_checkpoints,
    "`--checkpoint-filename FILE`, `--jit script`, `--topk 5`, `--raport-file raport.json`, `--gpu-affinity socket`": test_what_it_prints_says_why_it_has_no_effect,
    "`--pretrained`": test_weights_out_of_a_bucket_are_verified,
    "`from image_classification.dataloaders import get_pytorch_train_loader`": test_its_loaders,
    "`from image_classification.dataloaders import DATA_BACKEND_CHOICES`": test_its_names_of_backends,
    "`import kspeed.utils.data.kspeeddataset as KSpeedDataset`": test_its_classes_on_the_cache,
    "`from image_classification.kspeeddataloader import KSpeedCallable`": test_its_classes_on_the_cache,
    "`kspeed preload`, `load`, `display`, `rm`, `get`, `size`": test_the_verbs_of_its_cache,
    "`kspeed adduser`, `deluser`, `passwd`": test_what_its_service_had_and_memcached_has_not,
}


def test_each_line_of_the_page_is_checked():
    lines = [there for there, _, _ in cells(TITLE)]
    assert_each_is_checked(TITLE, {there: CHECKS.get(there, OPTIONS if there.startswith("`-") else None) for there in lines})
    assert set(CHECKS) <= set(lines)
