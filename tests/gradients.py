"""The gradients of one batch in float64: alone, or as one of the ranks that torchrun starts (used by test_ddp.py).

python tests/gradients.py eval|train WORLD_SIZE OUTPUT
"""

import os
import sys

import torch
from torch import distributed

from common.resnet import resnet18
from datasets import cifar10, synthetic


def main():
    mode, world_size, output = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.manual_seed(0)
    data = cifar10.ImageArrays(*synthetic.cifar_like(32, "train"), classes=[])
    images, labels = data.images.double() / 255, data.labels
    model = resnet18(width=4).double().train(mode == "train")
    loss_fn = torch.nn.CrossEntropyLoss()
    slices = list(zip(images.chunk(world_size), labels.chunk(world_size)))
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
        inside = torch.nn.parallel.DistributedDataParallel(model)
        part_images, part_labels = slices[distributed.get_rank()]
        loss_fn(inside(part_images), part_labels).backward()
    elif mode == "eval":
        loss_fn(model(images), labels).backward()
    else:
        for part_images, part_labels in slices:
            (loss_fn(model(part_images), part_labels) / world_size).backward()
    if os.environ.get("RANK", "0") == "0":
        torch.save([parameter.grad for parameter in model.parameters()], output)
    if "RANK" in os.environ:
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
