"""Train ResNet-18 on CIFAR-10. train.py is the base, on one device; other jobs add features in marked blocks.

    python jobs/train.py --custom_data true --epochs 2  synthetic images: no data, no network, no GPU needed
    python jobs/train.py --data_url /data/cifar10       a folder with CIFAR-10's files, or with its archive
    python jobs/train.py                                downloads CIFAR-10 into input_dir first

Started again, it goes on where it stopped. The recipe of the ModelArts sample: --optimizer adam --lr 0.01
--schedule constant --weight_decay 0 --label_smoothing 0 --augment false --epochs 100
"""

### AMP: how to start it, and when ###
__doc__ = f"""{__doc__}
On GPUs with tensor cores, and on CPUs with bfloat16 arithmetic: half the memory traffic and several times the
speed for heavy networks, little for light ones. bfloat16 where the hardware has it, float16 with scaled
gradients elsewhere.

    python jobs/train_amp.py --custom_data true
    python jobs/train_amp.py --custom_data true --amp_dtype bfloat16
"""
### end AMP ###
import os
import sys

# Consoles start this file from any folder.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
try:
    from common import packages

    packages.require_datasets()
except ImportError as error:  # this file was uploaded alone, or without a part of its folder
    advice = "upload common and datasets too, or a bundle: python -m launch bundle JOB"
    sys.stderr.write(f"error: {error}: {advice}\n")
    sys.exit(2)
if __name__ == "__main__":
    packages.check()  # before torch is imported, to report a missing or outdated package in one line

import torch

from common import arguments, devices
from common.job import run_job
from common.models import resnet18
from common.run import Run, Scores
from datasets import cifar10
from datasets.sampler import EpochSampler, InOrder


def main():
    parser = cifar10.parser(__doc__)
    ### AMP: which half precision ###
    dtype_help = "unset: bfloat16, or float16 on a GPU without it"
    parser.add_argument("--amp_dtype", choices=["bfloat16", "float16"], help=dtype_help)
    ### end AMP ###

    args = arguments.parse(parser)

    device = devices.choose(args)
    ### AMP: float16 has a small range, so its gradients are scaled up; bfloat16 needs no scaling ###
    from common.run import Scaler

    amp_dtype = devices.half_precision(args, device)
    scaler = Scaler(device.type, enabled=amp_dtype == torch.float16)
    ### end AMP ###

    torch.manual_seed(args.seed)

    # The order of the samples depends only on (seed, epoch), so a restarted run goes on with the next one.
    train_set, test_set = cifar10.load(args)
    train_sampler = EpochSampler(len(train_set), args.batch_size, seed=args.seed)
    test_sampler = InOrder(len(test_set), batch_size=500)

    # Batches of (images, labels), normalised on the device; --augment crops and flips those of the training.
    train_loader = cifar10.loader(train_set, train_sampler, device, args.augment, args.seed, args.workers)

    test_loader = cifar10.loader(test_set, test_sampler, device)

    # The fastest memory layout for convolutions: channels last, except on NPUs.
    layout = devices.layout(device)
    model = resnet18(num_classes=len(train_set.classes), width=args.width).to(device).to(memory_format=layout)

    loss_fn = torch.nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)

    settings = {"lr": args.lr, "weight_decay": args.weight_decay, **devices.fused(device)}
    if args.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), **settings)
    else:
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, **settings)

    # The run: shows progress, saves, and stops when it is told to.
    run = Run(args, train_sampler, model, data_set=train_set, test_samples=len(test_set), optimizer=optimizer)
    ### AMP: the scale is part of what a restart goes on from ###
    run.register(scaler=scaler)
    ### end AMP ###

    # Resumes, by default from the newest checkpoint in the output folder, if there is one.
    run.resume()

    # With --compile true: faster steps after slow first ones.
    devices.compile_network(args, model, loss_fn=loss_fn)

    peak = args.lr
    for epoch in run.epochs():
        model.train()

        for images, labels in run.steps(train_loader):
            for parameters in optimizer.param_groups:
                parameters["lr"] = learning_rate(args, peak, run.progress)

            ### AMP: forward pass in half precision ###
            # was: loss = loss_fn(model(images), labels)
            with torch.autocast(device.type, dtype=amp_dtype):
                loss = loss_fn(model(images), labels)
            ### end AMP ###

            optimizer.zero_grad()
            ### AMP: backward on the scaled loss ###
            # was: loss.backward()
            scaler.scale(loss).backward()
            ### end AMP ###
            ### AMP: step() unscales the gradients, and leaves out a step in which they overflowed ###
            # was: optimizer.step()
            scaler.step(optimizer)
            scaler.update()
            ### end AMP ###

            run.step(loss)

        scores = evaluate(run.model, test_loader, test_set.classes)
        accuracy = (scores.confusion.diagonal().sum() / scores.confusion.sum()).item()

        run.end_epoch(scores, accuracy=accuracy, loss=scores.loss)


def learning_rate(args, peak, progress):
    """Return the rate: `peak`; with one_cycle, rising to it for a fifth of the run, then falling to zero."""
    scale = 1 if args.schedule == "constant" else min(progress / 0.2, (1 - progress) / 0.8)
    return peak * scale


@torch.no_grad()
def evaluate(model, loader, classes):
    """Return the network's scores on the test samples of all ranks, each sample counted once."""
    model.eval()
    scores = Scores(classes, loader.device, loader.pixels)
    for images, labels in loader:
        scores.add(model(images), labels, loader.ids, images)

    return scores.all_reduce()  # each rank has evaluated its own part of the samples


if __name__ == "__main__":
    run_job(main)
