"""What the jobs are measured beside: the loops that people write, on batches that are on the GPU already.

Each returns images a second, in three windows. The reference loop is that of torchvision's documentation: SGD, label smoothing, autocast, channels last.
"""

import json
import multiprocessing
import os
import time

import torch

from common.models import resnet18
from tests.benchmarks import libraries

GPU = torch.device("cuda")
WARM_UP = 20
SECONDS = 1.2  # of warming up, until the clocks are high, and of each window


def rate(step, images):
    """`step()` over and over, timed after some that warm up."""
    timed(step, 3)  # what is tuned at first
    steps, seconds = timed(step, WARM_UP)
    steps, seconds = timed(step, max(5, int(SECONDS * steps / seconds)))
    count = max(5, int(SECONDS * steps / seconds))
    return [count * images / timed(step, count)[1] for _ in range(3)]


def timed(step, count):
    """(count, the seconds that so many took)"""
    began = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return count, time.perf_counter() - began


def show(figures):
    """Print them and end at once. Autograd's thread may still have to let go of a Python object of the last backward pass; where the
    interpreter is taken apart at that moment, the process is aborted. Loader workers would hold the pipe until they notice."""
    print(json.dumps(figures), flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


def cifar(batch, half):
    """(network, images, labels, step) of train.py or train_amp.py in plain torch."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = resnet18().to(GPU).to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 32, 32, device=GPU).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,), device=GPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    loss_fn = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = loss_fn(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def plain_cifar(batch=128, half=False):
    return rate(cifar(batch, half), batch)


def captured_cifar(batch=128, half=False):
    """The same step as one CUDA graph."""
    step, beside = cifar(batch, half), torch.cuda.Stream()
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return rate(graph.replay, batch)


def reference(batches, classes=1000, dtype="float16", compiled=False):
    """torchvision's reference loop in half precision, with a scaler for float16, on these (images, labels)."""
    import torchvision

    model = torchvision.models.resnet50(num_classes=classes).to(GPU).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    loss_fn, scaler = torch.nn.CrossEntropyLoss(label_smoothing=0.1), torch.amp.GradScaler("cuda", enabled=dtype == "float16")
    torch.backends.cudnn.benchmark = True
    if compiled:
        model.compile()
    seen = 0

    def step():
        nonlocal seen
        images, labels = next(batches)
        seen = len(images)
        images, labels = images.to(GPU, non_blocking=True), labels.to(GPU, non_blocking=True)
        with torch.autocast("cuda", getattr(torch, dtype)):
            loss = loss_fn(model(images.to(memory_format=torch.channels_last)), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    step()
    return rate(step, seen)


def in_library(name: str, batch: int, dtype: str = "bfloat16", compiled: bool = False) -> None:
    """Train ResNet-50 on noise in the loop of another library, show images a second in three windows, and end."""
    import torchvision

    torch.backends.cudnn.benchmark = True
    if name == "timm":
        import timm

        network = timm.create_model("resnet50")
    else:
        network = torchvision.models.resnet50()
    network = libraries.ChannelsLast(network).to(GPU)
    if compiled:
        network.compile()
    measure = libraries.Steps(WARM_UP, 80, batch, torch.cuda.synchronize, lambda figures: show(figures["images/s"]))
    training = libraries.Training(
        network=network,
        loss_fn=torch.nn.CrossEntropyLoss(label_smoothing=0.1),
        batches=noise(batch),
        device=GPU,
        precision=dtype,
        after_step=measure,
    )
    libraries.LOOPS[name](training)


def noise(batch, size=224):
    """The same batch, over and over."""
    images, labels = torch.randn(batch, 3, size, size, device=GPU), torch.randint(1000, (batch,), device=GPU)
    while True:
        yield images, labels


def photographs(folder, batch, workers):
    """Of torchvision's ImageFolder, over and over, as its documentation trains on them."""
    from torchvision import datasets, transforms

    normalise = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    cut = transforms.Compose(
        [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalise]
    )
    data = datasets.ImageFolder(folder, cut)
    loader = torch.utils.data.DataLoader(
        data, batch, shuffle=True, num_workers=workers, pin_memory=True, drop_last=True, persistent_workers=workers > 0
    )
    while True:
        yield from loader


def loading(batches, seconds):
    """Of a loader alone, each batch on the GPU."""
    next(batches)
    rates = []
    for _ in range(3):
        began, seen = time.perf_counter(), 0
        while time.perf_counter() - began < seconds / 3:
            images, labels = next(batches)
            images.to(GPU, non_blocking=True), labels.to(GPU, non_blocking=True)
            seen += len(images)
        torch.cuda.synchronize()
        rates.append(seen / (time.perf_counter() - began))
    return rates


def decoding(folder, batch=128):
    """torchvision's decoder on the GPU: whole pictures, neither cut nor resized."""
    from pathlib import Path

    from torchvision import io

    files = [io.read_file(str(path)) for path in sorted(Path(folder).glob("train/*/*.JPEG"))[:1024]]

    def step():
        io.decode_jpeg(files[:batch], device="cuda")

    return rate(step, min(batch, len(files)))
