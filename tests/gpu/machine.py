"""The machine, and the numbers that a GPU computes, beside those of the CPU."""

import copy
import functools
import subprocess

import numpy as np
import torch

from common.devices.graphs import one_graph
from common.devices.seeds import seed_step
from common.models import resnet18
from common.models.restorer import psnr, ssim
from datasets import cifar10, imagenet
from datasets.photos import tree
from datasets.photos.labelled import Photos
from datasets.sampler import EpochSampler
from tests.gpu import judge, runs, speed
from tests.gpu.rows import SMALL, Missing, need
from tests.tools.jobs import command

GPU = torch.device("cuda")
CPU = torch.device("cpu")


def the_doctor_sees_what_the_driver_says(row):
    """Names, numbers and versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Missing(f"nvidia-smi: {error}") from error
    cards = [[word.strip() for word in line.split(",")] for line in driver.splitlines()]
    row.judge("torch and the driver count", judge.equal(torch.cuda.device_count(), len(cards)))
    total = torch.cuda.get_device_properties(0).total_memory / 2**20
    row.judge("the memory, in MiB", judge.close(total, float(cards[0][2]), 0.05 * float(cards[0][2])))
    examined = row.job("train_ddp", *SMALL, "--doctor", "true", "--nproc_per_node", 1)
    row.judge("the doctor", judge.says(examined, f"torch sees {len(cards)}", cards[0][1], "0 bad"), number=False)
    row.figures["machine"] = ", ".join(cards[0])


def batches_are_those_of_the_cpu(row):
    """train.py's loader, augmented, over two epochs."""
    for number, (ours, theirs) in enumerate(zip(batches(GPU), batches(CPU))):
        for what, one, other in zip(("images", "labels"), ours, theirs):
            wrong = judge.same_bits(one, other)
            if wrong or number == 0:
                row.judge(f"{what} of batch {number}", wrong)
            if wrong:
                return
    row.judge("batches", judge.equal(number, 79))


def batches(device, samples=5120, batch=128, workers=0, epochs=2):
    data = pictures(samples)
    sampler = EpochSampler(len(data), batch, seed=3)
    loader = cifar10.loader(data, sampler, device, augment=True, seed=3, workers=workers)
    for epoch in range(epochs):
        sampler.start_at(epoch, 0)
        yield from loader


def pictures(samples):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (samples, 3, 32, 32), dtype=np.uint8)
    return cifar10.ImageArrays(images, random.integers(0, 10, samples), [str(name) for name in range(10)])


def a_step_is_that_of_the_cpu(row):
    """Its loss, and by how much it moves the weights, beside the same in float64, in which the weights themselves would hide a
    wrong gradient. The first gradients of so deep a network magnify what is rounded: a CPU's update is 0.013 away in float32, 0.11 in
    float16, which has the digits of TF32, and 0.31 in bfloat16. The limits are 1.5 times these."""
    (images, labels), *_ = batches(CPU, samples=128)
    torch.manual_seed(0)
    model = resnet18().to(memory_format=torch.channels_last)
    exact = one_step(model.double(), images.double(), labels, CPU)
    model = model.float()
    tensor_cores = torch.backends.cudnn.allow_tf32
    for name, dtype, of_the_loss, of_the_update, tf32 in (
        ("float32", None, 1e-3, 0.02, False),
        ("float32 as the jobs have it", None, 2e-2, 0.165, tensor_cores),
        ("bfloat16", torch.bfloat16, 1e-1, 0.465, tensor_cores),
    ):
        torch.backends.cudnn.allow_tf32 = tf32
        loss, moved = one_step(model, images, labels, GPU, dtype)
        row.judge(f"{name}: the loss", judge.below(abs(loss - exact[0]) / exact[0], of_the_loss))
        row.judge(f"{name}: the update", judge.below(distance(moved, exact[1]), of_the_update))
        row.figures[f"{name}: error of the update"] = f"{distance(moved, exact[1]):.2g}"
    torch.backends.cudnn.allow_tf32 = tensor_cores


def one_step(model, images, labels, device, dtype=None):
    """(loss, what a step adds to the weights)"""
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
    with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
    loss.backward()
    before = weights_of(model)
    optimizer.step()
    return loss.item(), weights_of(model) - before


def a_graph_of_a_step_has_its_bits(row):
    """Ten steps with dropout, another rate and seed each, one with a smaller batch: as they are, and recorded."""
    weights = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.3), torch.nn.GELU(), torch.nn.Linear(256, 10))
        model = model.to(GPU)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
        step = functools.partial(step_of, model, optimizer)
        step = one_graph(GPU, step) if recorded else step
        losses = []
        for number in range(10):
            images = torch.randn(16 if number == 7 else 32, 64, generator=torch.Generator().manual_seed(number)).to(GPU)
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (number + 1)
            seed_step(1, number, 0)
            losses.append(step(images, images.argmax(1) % 10))
        weights.append(torch.cat([torch.stack(losses).double().cpu(), weights_of(model)]))
    row.judge("losses and weights", judge.same_bits(*weights))


def step_of(model, optimizer, images, labels):
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def weights_of(model):
    return torch.cat([parameter.detach().flatten().double().cpu() for parameter in model.parameters()])


def distance(one, other):
    return ((one - other).norm() / other.norm()).item()


def buffers_are_not_read_after_they_were_given_back(row):
    """2,000 batches by 16 processes; each is overwritten as soon as its sum was asked for, beside the loader's own stream."""
    sums = []
    for images, labels in batches(GPU, samples=12800, batch=64, workers=16, epochs=10):
        sums.append(torch.stack([images.view(torch.int32).sum(), labels.sum()]))
        images.fill_(torch.nan)
        labels.fill_(-1)
        del images, labels
    torch.set_num_threads(1)  # for so small operations 16 threads take many times as long
    expected = [
        torch.stack([images.view(torch.int32).sum(), labels.sum()]) for images, labels in batches(CPU, 12800, 64, epochs=10)
    ]
    row.judge("batches", judge.equal(len(sums), 2000))
    row.judge("their bits", judge.same_bits(torch.stack(sums), torch.stack(expected)))


def quality_is_that_of_the_cpu(row):
    """PSNR and SSIM, in whatever precision the GPU prefers for convolutions."""
    random = torch.Generator().manual_seed(0)
    one = torch.rand(8, 3, 128, 128, generator=random)
    other = (one + 0.1 * torch.randn(one.shape, generator=random)).clamp(0, 1)
    for name, measure in (("PSNR", psnr), ("SSIM", ssim)):
        there, here = measure(one.to(GPU), other.to(GPU)).cpu(), measure(one, other)
        row.judge(name, judge.below((there - here).abs().max().item(), 1e-4))


def dali_gives_the_same_batches(row):
    """CIFAR's to the bit; photographs nearly, with the difference; and jobs that train and validate on what it decodes."""
    need("nvidia.dali")
    row.figures["pixels of photographs"] = photographs_by_dali(row)
    row.python(runs.NO_WAITING, *command("train_dali", *SMALL, "--output_dir", row.folder / "train_dali")[1:])
    row.judge("no step of train_dali.py waits", None, number=False)  # it would have ended with an error
    for job, options in (("train_imagenet", ["--arch", "resnet18"]), ("train_restore", [])):
        words = [
            "--custom_data",
            "true",
            "--epochs",
            1,
            "--max_steps",
            8,
            "--batch_size",
            16,
            "--data_backend",
            "dali-gpu",
            *options,
        ]
        printed = row.job(job, *words, "--resume", "never", "--overwrite", "true")
        row.judge(job, judge.says(printed, "epoch=1/1", "done"), number=False)
    from datasets.dali import cifar_loader

    data = pictures(5120)
    for epoch in range(2):
        loaders = []
        for make in (cifar_loader, cifar10.loader):
            sampler = EpochSampler(len(data), 128, seed=3)
            sampler.start_at(epoch, 0)
            loaders.append(make(data, sampler, GPU, augment=True, seed=3))
        for number, (ours, theirs) in enumerate(zip(*loaders)):
            wrong = judge.same_bits(ours[0], theirs[0]) or judge.same_bits(ours[1], theirs[1])
            if wrong or number == 0:
                row.judge(f"epoch {epoch}, batch {number}", wrong)
            if wrong:
                return


def photographs_by_dali(row):
    """How far its pixels are from nvImageCodec's, after the same crops and resizes."""
    data = Photos(tree.load(str(speed.photographs(row, number=256) / "train")), 224, True, 0)
    pixels = []
    for backend in ("pytorch", "dali-gpu"):
        sampler = EpochSampler(len(data), 64, seed=0)
        sampler.start_at(0, 0)
        loader = imagenet.loader(data, sampler, torch.device("cuda", 0), 2, backend, mean=[0, 0, 0], std=[1 / 255] * 3)
        pixels.append(torch.cat([images.cpu() for images, _ in loader]))
    away = (pixels[0] - pixels[1]).abs()
    row.judge("the mean distance, of 255", judge.below(away.mean().item(), 2.0))
    return f"{away.mean():.3f} of 255 away in the mean, {away.max():.0f} at most"
