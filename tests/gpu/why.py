"""What sets the figures: the parts of a step, of a start and of a checkpoint, each measured alone."""

import hashlib
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any, Callable

import torch
from torch import nn

from common.checkpoints import checkpoint
from tests.gpu import speed
from tests.gpu.rows import Row

GPU = torch.device("cuda")


def what_sets_the_figures(row: Row) -> None:
    """Norms of each type, the compiled step in four forms, the start to its last import, and what a checkpoint waits for."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        row.figures[f"batch norm of (256, 256, 56, 56), {dtype}"] = f"{norms(dtype):.2f} ms, forward and backward"
    compiled = [*speed.CIFAR, "--batch_size", speed.OF_A_BATCH, "--compile", "true"]
    forms = {
        "as it is": (compiled, {}),
        "one thread of OpenMP": (compiled, {"OMP_NUM_THREADS": "1"}),
        "half the batch": ([*compiled, "--batch_size", speed.OF_A_BATCH // 2], {}),
        "one batch over and over": (compiled, {"GPU_ONE_BATCH": "1"}),
    }
    for name, (options, environment) in forms.items():
        rates = speed.measured(row, 100, 700, "train_amp", *options, environment=environment)["images/s"]
        row.figures[f"train_amp.py --compile true, {name}"] = f"{statistics.median(rates):,.0f} images/s"
    for name, seconds in starts(row).items():
        row.figures[f"start, {name}"] = seconds
    for name, times in parts_of_a_checkpoint().items():
        row.figures[f"checkpoint of ResNet-50, {name}"] = times


def norms(dtype: torch.dtype) -> float:
    """Milliseconds of a batch norm's two passes over what the first block of ResNet-50 gives it."""
    norm = nn.BatchNorm2d(256).to(GPU)
    images = torch.randn(256, 256, 56, 56, device=GPU, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
    gradient = torch.ones_like(images)

    def both_passes() -> None:
        torch.autograd.grad(norm(images), [images, *norm.parameters()], gradient)

    return of_the_gpu(both_passes)


def of_the_gpu(work: Callable[[], object], times: int = 20) -> float:
    """Milliseconds that the GPU takes for `work`, between two events."""
    for _ in range(3):
        work()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(times):
        work()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / times


IMPORTS = """
import time
began = time.perf_counter()
import torch
print(f"import torch {time.perf_counter() - began:.2f} s", end="")
began = time.perf_counter()
import torch._dynamo
print(f", torch._dynamo {time.perf_counter() - began:.2f} s", end="")
began = time.perf_counter()
torch.ones(1, device="cuda").item()
print(f", the GPU's first operation {time.perf_counter() - began:.2f} s")
"""
BOTH_AT_ONCE = """
import time
import torch
from common.devices import choice
began = time.perf_counter()
choice._initialize_gpu(torch.device("cuda", 0))
print(f"torch._dynamo and the GPU's first operation {time.perf_counter() - began:.2f} s")
"""


def starts(row: Row) -> dict[str, str]:
    """The imports as they are, the same with a folder for bytecode that can be written to, and what a start of train.py spends where."""
    found = {"site-packages can be written to": str(os.access(os.path.dirname(torch.__file__), os.W_OK))}
    shutil.rmtree(row.folder / "bytecode", ignore_errors=True)  # of a row that was cut off
    kept = {"PYTHONPYCACHEPREFIX": str(Path(row.folder, "bytecode")), "PYTHONDONTWRITEBYTECODE": ""}
    for name, environment in (("as it is", {}), ("bytecode written", kept), ("bytecode read", kept)):
        found[name] = row.python(IMPORTS, environment=environment).strip().splitlines()[-1]
    found["at once, as the jobs do"] = row.python(BOTH_AT_ONCE).strip().splitlines()[-1]
    seconds = speed.measured(row, 3, 6, "train", *speed.CIFAR)["seconds to"]
    found["train.py, seconds after which it had"] = ", ".join(f"{name} {passed}" for name, passed in seconds.items())
    return found


def parts_of_a_checkpoint() -> dict[str, str]:
    """What brings the weights of ResNet-50 and their momentum to the host, and makes a file's bytes of them: three times each."""
    import torchvision

    weights = list(torchvision.models.resnet50().to(GPU).state_dict().values())
    tensors = weights + [tensor.clone() for tensor in weights if tensor.is_floating_point()]
    pinned = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    clones = [torch.empty_like(tensor) for tensor in tensors]
    state = checkpoint.snapshot({"tensors": tensors})
    kept: list[Any] = []  # as a checkpoint that is being written keeps its copies

    def copy_into_pinned() -> None:
        for target, tensor in zip(pinned, tensors):
            target.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    def clone_on_the_gpu() -> None:
        torch._foreach_copy_(clones, tensors)
        torch.cuda.synchronize()

    return {
        "copied as the jobs do, into new memory": of_the_host(lambda: kept.append(checkpoint.snapshot(tensors))),
        "copied into pinned memory that is used again": of_the_host(copy_into_pinned),
        "cloned on the GPU": of_the_host(clone_on_the_gpu),
        "made a file's bytes": of_the_host(lambda: checkpoint.encode(state)),
        "and their digest": of_the_host(lambda: hashlib.sha256(checkpoint.encode(state)).hexdigest()),
    }


def of_the_host(work: Callable[[], object]) -> str:
    """Milliseconds that the host takes for `work`, each of three times."""
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        found.append(1000 * (time.perf_counter() - began))
    return ", ".join(f"{milliseconds:.1f}" for milliseconds in found) + " ms"
