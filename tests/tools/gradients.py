"""The gradients of one batch in float64: alone, or as one of the ranks that were started (used by test_resume_at_other_sizes.py).

torchrun --nproc_per_node 2 tests/tools/gradients.py OUTPUT
"""

import gc
import sys
from pathlib import Path

import torch
from torch import distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.models.resnet import resnet18
from common.ranks import norms
from datasets import cifar10, synthetic

MODES = ["eval", "train", "synchronised", "kinds"]  # of BatchNorm


class Kinds(torch.nn.Module):
    """Every kind of batch norm, with every option."""

    def __init__(self):
        super().__init__()
        self.mean_of_all_batches = torch.nn.BatchNorm2d(3, momentum=None)
        self.without_weights = torch.nn.BatchNorm3d(3, affine=False)
        self.without_running_statistics = torch.nn.BatchNorm1d(3, track_running_stats=False)
        self.last = torch.nn.Sequential(torch.nn.Linear(12, 10), torch.nn.BatchNorm1d(10, eps=1e-3))

    def forward(self, images):
        images = self.mean_of_all_batches(images)
        images = self.without_weights(images.view(-1, 3, 4, 8, 32))
        images = self.without_running_statistics(images.reshape(-1, 3, 1024) ** 3)
        return self.last(images.view(-1, 12, 256).max(dim=2).values)


def parts(mode, count):
    """The network, and the batch in so many slices."""
    torch.manual_seed(0)
    data = cifar10.ImageArrays(*synthetic.cifar_like(32, "train"), classes=[])
    images, labels = data.images.double() / 255, data.labels
    network = Kinds() if mode == "kinds" else resnet18(width=4)
    return network.double().train(mode != "eval"), list(zip(images.chunk(count), labels.chunk(count)))


def alone(mode, world_size):
    """Of one process, and its statistics: in train mode as the mean over the slices of each rank, else from the whole batch."""
    count = world_size if mode == "train" else 1
    model, slices = parts(mode, count)
    for images, labels in slices:
        (torch.nn.functional.cross_entropy(model(images), labels) / count).backward()
    return [parameter.grad for parameter in model.parameters()], list(model.buffers())


def of_this_rank(mode):
    model, slices = parts(mode, distributed.get_world_size())
    images, labels = slices[distributed.get_rank()]
    if mode in ("synchronised", "kinds"):
        model = norms.synchronised(model)
    inside = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **norms.OWN_STATISTICS)
    torch.nn.functional.cross_entropy(inside(images), labels).backward()
    return [parameter.grad for parameter in model.parameters()], list(model.buffers())


def main():
    distributed.init_process_group("gloo")
    found = {mode: of_this_rank(mode) for mode in MODES}
    if distributed.get_rank() == 0:
        torch.save(found, sys.argv[1])
    distributed.barrier()
    gc.collect()  # the DDP modules first, or Gloo's threads may abort the process at its end
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
