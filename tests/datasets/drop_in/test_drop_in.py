"""The classes of the DALI article, as its scripts call them: what they give, how they end, what they say, what they leave behind."""

import gc
import importlib
import os
import re
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from common import devices
from common.errors import UserError
from datasets.drop_in import (
    DaliIterator,
    DaliIteratorCPU,
    DaliIteratorCPUNoPrefetch,
    DaliIteratorGPU,
    HybridTrainPipe,
    HybridValPipe,
    article,
)
from datasets.facade import Dataset, resident_bytes
from tests.tools.jobs import ROOT, environment

MEAN, STD = [0.485 * 255, 0.456 * 255, 0.406 * 255], [0.229 * 255, 0.224 * 255, 0.225 * 255]
TRAIN, VAL = 30, 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Photographs of three classes, of several sizes, whose colours say which file each is."""
    root = tmp_path_factory.mktemp("photographs")
    rows, columns = np.mgrid[0:60, 0:80]
    for number in range(TRAIN + VAL):
        where = root / ("train" if number < TRAIN else "val") / f"class{number % 3}"
        where.mkdir(parents=True, exist_ok=True)
        pixels = np.stack([rows * 2, columns + 40, np.full_like(rows, 6 * number)], axis=2).astype(np.uint8)
        Image.fromarray(pixels[: 50 + number % 7]).save(where / f"{number:02d}.jpg", quality=95)
    return root


def train_pipe(folder, **how):
    pipe = HybridTrainPipe(8, 2, 0, str(folder / "train"), 24, MEAN, STD, **how)
    pipe.build()
    return pipe


def val_pipe(folder, **how):
    pipe = HybridValPipe(4, 2, 0, str(folder / "val"), 24, 32, MEAN, STD, **how)
    pipe.build()
    return pipe


def numbers(images):
    """Which file each picture is of: its blue."""
    blue = images.float()[:, 2] * STD[2] + MEAN[2]
    return [round(value / 6) for value in blue.mean(dim=(1, 2)).tolist()]


@pytest.mark.parametrize("dali_cpu", [True, False])
@pytest.mark.parametrize("fp16", [True, False])
def test_an_epoch_is_every_photograph_once_with_its_label_normalised(folder, dali_cpu, fp16):
    pipe = train_pipe(folder, dali_cpu=dali_cpu, fp16=fp16)
    kind = DaliIteratorCPU if dali_cpu else DaliIteratorGPU
    loader = kind(pipelines=pipe, size=pipe.epoch_size("Reader"), fp16=fp16, mean=MEAN, std=STD, pin_memory=True)
    assert len(loader) == 4
    orders = []
    for _ in range(3):
        batches = list(loader)
        assert [len(images) for images, _ in batches] == [8, 8, 8, 6]
        assert all(images.shape[1:] == (3, 24, 24) and labels.dtype == torch.int64 for images, labels in batches)
        assert all(images.dtype == (torch.float16 if fp16 else torch.float32) for images, _ in batches)
        orders.append([number for images, _ in batches for number in numbers(images)])
        assert [number % 3 for number in orders[-1]] == [label for _, labels in batches for label in labels.tolist()]
        assert sorted(orders[-1]) == list(range(TRAIN))
    assert orders[0] != orders[1] != orders[2]


def test_the_validation_is_torchvisions_with_the_remainder_as_it_is(folder):
    transforms = torchvision.transforms
    plain = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(24), transforms.PILToTensor()])
    data = torchvision.datasets.ImageFolder(str(folder / "val"), plain)
    expected = torch.stack([image for image, _ in data]).float()
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) for value in (MEAN, STD))
    for dali_cpu, kind in ((True, DaliIteratorCPU), (False, DaliIteratorGPU)):
        loader = kind(pipelines=val_pipe(folder, dali_cpu=dali_cpu), size=VAL, mean=MEAN, std=STD)
        for _ in range(2):
            images, labels = (torch.cat(part) for part in zip(*loader))
            assert labels.tolist() == [label for _, label in data.samples]
            assert (images * std + mean - expected).abs().mean() < 1.5  # of 255; two decoders and resizes


@pytest.mark.parametrize("dali_cpu", [True, False])
def test_shards_share_the_photographs(folder, dali_cpu):
    kind = DaliIteratorCPU if dali_cpu else DaliIteratorGPU
    pipes = [val_pipe(folder, dali_cpu=dali_cpu, local_rank=rank, world_size=3) for rank in range(3)]
    loaders = [kind(pipelines=[pipe], size=VAL / 3, mean=MEAN, std=STD) for pipe in pipes]
    assert [len(loader) for loader in loaders] == [1, 1, 1]
    for _ in range(2):
        seen = [number for loader in loaders for images, _ in loader for number in numbers(images)]
        assert sorted(seen) == list(range(TRAIN, TRAIN + VAL))


def test_an_epoch_may_be_shorter_and_a_batch_of_one_has_a_list_of_labels(folder):
    loader = DaliIteratorCPU(pipelines=val_pipe(folder, dali_cpu=True), size=5, mean=MEAN, std=STD)
    assert [labels.shape for _, labels in loader] == [(4,), (1,)] and len(loader) == 2


def test_the_base_class_gives_what_the_pipeline_gives(folder):
    images, labels = next(DaliIterator(pipelines=val_pipe(folder, dali_cpu=True), size=VAL))
    assert images.shape == (4, 24, 24, 3) and images.dtype == torch.uint8 and labels.tolist() == [0] * 4


def test_a_photograph_that_dali_cannot_decode_is_an_error_and_no_hang(folder, tmp_path):
    shutil.copytree(folder / "val", tmp_path / "val")
    (tmp_path / "val" / "class2" / "99.jpg").write_bytes(b"no picture")
    loader = DaliIteratorCPU(pipelines=val_pipe(tmp_path, dali_cpu=True), size=VAL + 1)
    with pytest.raises(RuntimeError, match="nvImageCodec"):
        list(loader)


def test_without_a_thread_the_batches_are_the_same(folder):
    how = {"size": VAL, "fp16": True, "mean": MEAN, "std": STD, "pin_memory": False}
    ahead, plain = (
        kind(pipelines=val_pipe(folder, dali_cpu=True), **how) for kind in (DaliIteratorCPU, DaliIteratorCPUNoPrefetch)
    )
    threads = threading.active_count()
    next(plain)
    assert threading.active_count() == threads
    assert [len(images) for images, _ in plain] == [4, 2] and len(plain) == 3
    for (images, labels), (others, same) in zip(list(ahead), list(plain)):
        assert torch.equal(images, others) and torch.equal(labels, same)
    next(plain)
    plain.close()
    assert len(list(plain)) == 2  # what is left of that epoch, as with the thread


def used():
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task"))


def assert_nothing_was_left(before, after):
    """A thread that has been waited for may be seen by the kernel for a moment."""
    assert after[0] <= before[0] and after[1] <= before[1] and after[2] <= before[2] + 1


def test_50_epochs_with_new_pipelines_leave_nothing_behind(folder, capsys):
    """As the article has it: both pipelines are made anew in every epoch. In the original the memory grows."""
    resident, others = [], []
    for epoch in range(50):
        train = train_pipe(folder, dali_cpu=True)
        val = val_pipe(folder, dali_cpu=True)
        loaders = [
            DaliIteratorCPU(pipelines=pipe, size=size, mean=MEAN, std=STD) for pipe, size in ((train, TRAIN), (val, VAL))
        ]
        assert [sum(len(images) for images, _ in loader) for loader in loaders] == [TRAIN, VAL]
        del loaders, train, val
        if epoch % 10 == 9:
            gc.collect()  # pipelines are in circles
            resident.append(resident_bytes() / 2**20)
            others.append(used())
    assert max(resident[2:]) < max(resident[:2]) + 8, resident
    assert_nothing_was_left(others[0], others[-1])


def test_one_pipeline_over_50_epochs_leaves_nothing_behind(folder, capsys):
    loader = DaliIteratorCPU(pipelines=train_pipe(folder, dali_cpu=True), size=TRAIN, mean=MEAN, std=STD)
    resident, others = [], []
    for _ in range(50):
        assert sum(len(images) for images, _ in loader) == TRAIN
        resident.append(resident_bytes() / 2**20)
        others.append(used())
    assert max(resident[25:]) < max(resident[:25]) + 4, resident
    assert_nothing_was_left(others[10], others[-1])


def test_what_is_asked_of_dali_is_what_the_article_asks(folder, monkeypatch):
    """On a GPU, which is not here: the operators are asked for and no pipeline is built."""
    from nvidia.dali import fn

    asked = {}
    monkeypatch.setattr(article._Place, "__init__", gpu_place)
    monkeypatch.setattr(article, "_labels_on_device", lambda labels, place: labels)
    for module, name in ((fn.decoders, "image_random_crop"), (fn, "resize"), (fn, "crop_mirror_normalize")):
        monkeypatch.setattr(module, name, lambda *_, name=name, **how: asked.setdefault(name, how))
    pipe = HybridTrainPipe(8, 2, None, str(folder / "train"), 24, MEAN, STD, fp16=True, min_crop_size=0.3)
    with pipe:
        pipe.define_graph()
    decode, resize, normalise = asked["image_random_crop"], asked["resize"], asked["crop_mirror_normalize"]
    assert (decode["device"], decode["device_memory_padding"], decode["host_memory_padding"]) == ("mixed", 211025920, 140544512)
    assert (decode["random_aspect_ratio"], decode["random_area"], decode["num_attempts"]) == ([0.8, 1.25], [0.3, 1.0], 100)
    assert (resize["resize_x"], resize["resize_y"], resize["interp_type"].name) == (24, 24, "INTERP_TRIANGULAR")
    assert (normalise["dtype"].name, normalise["output_layout"], normalise["crop"]) == ("FLOAT16", "CHW", (24, 24))


def gpu_place(self, device_id, dali_cpu):
    self.device_id, self.rest, self.decoder = None, "gpu", {"device": "mixed"}
    self.padding = {"device_memory_padding": article.DEVICE_PADDING, "host_memory_padding": article.HOST_PADDING}


def test_the_place_is_the_gpu_where_there_is_one(monkeypatch, capsys):
    monkeypatch.setattr(article, "compute_device", lambda: torch.device("cuda", 0))
    place = article._Place(3, False)
    assert (place.device_id, place.rest, place.decoder["device"]) == (3, "gpu", "mixed")
    assert list(place.padding.values()) == [211025920, 140544512]
    assert (article._Place(3, True).rest, article._Place(None, False).device_id) == ("cpu", None)
    assert list(article._Place(3, True).padding.values()) == [0, 0]
    said = capsys.readouterr().out
    assert said.startswith('DALI "gpu" variant\nDALI "cpu" variant\nDALI "gpu" variant, on the CPU, as device_id is None\n')


def test_the_names_are_there_when_they_are_asked_for_and_importing_the_room_takes_nothing_in():
    script = "import sys\nimport datasets.drop_in\nassert not {'torch', 'nvidia', 'datasets.facade'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment(), check=True)
    room = importlib.import_module("datasets.drop_in")
    assert HybridTrainPipe is room.HybridTrainPipe and importlib.reload(room).HybridValPipe is HybridValPipe
    with pytest.raises(AttributeError, match=r"'datasets\.drop_in' has no attribute 'HybridPipe'"):
        _ = room.HybridPipe


def test_without_dali_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    monkeypatch.setattr(article, "_pipelines", article._pipelines.__wrapped__)
    with pytest.raises(UserError, match="pip install nvidia-dali"):
        _ = article.HybridTrainPipe


# --- The facade ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_dali", [True, False])
def test_the_articles_call_of_dataset_means_what_the_article_says(folder, tmp_path, monkeypatch, use_dali):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "available", lambda: True)
    monkeypatch.setattr(devices, "current", lambda: torch.device("cpu"))
    data_dir, batch_size, val_batch_size, workers, dali_cpu, fp16 = str(folder), 8, 4, 1, True, True
    dataset = Dataset(data_dir, batch_size, val_batch_size, workers, use_dali, dali_cpu, fp16)
    train_loader, val_loader = dataset.get_train_loader(), dataset.get_val_loader()
    images, _ = next(iter(train_loader))
    assert images.shape == (8, 3, 224, 224) and images.dtype == torch.float16
    assert [len(labels) for _, labels in val_loader] == [4, 4, 2]
    assert dataset.backend == ("dali-cpu" if use_dali else "pytorch")
    with pytest.raises(TypeError):
        Dataset(data_dir, batch_size, 224, val_batch_size, 256, 0.08, workers, 1)  # the order of the repository


def test_dataset_without_a_gpu_says_so_in_one_line(folder):
    with pytest.raises(UserError) as told:
        Dataset(str(folder), 8)
    assert re.fullmatch(r"cuda=True, but torch sees no GPU: .+; or give cuda=False to use the CPU", str(told.value))
