"""Train ResNet-18 on CIFAR-10. train.py is the base, on one device; other jobs add features in marked blocks.

    python jobs/train.py --custom_data true --epochs 2  synthetic images: no data, no network, no GPU needed
    python jobs/train.py --data_url /data/cifar10       a folder with CIFAR-10's files, or with its archive
    python jobs/train.py                                downloads CIFAR-10 into input_dir first

Started again, it goes on where it stopped. The recipe of the ModelArts sample: --optimizer adam --lr 0.01
--schedule constant --weight_decay 0 --label_smoothing 0 --augment false --epochs 100
"""

### DDP: how to start it, and when ###
__doc__ = f"""{__doc__}
Whenever there is more than one GPU: every GPU of every node works, one process each, and the gradients are
averaged.

    python jobs/train_ddp.py --custom_data true --nproc_per_node 2  two processes on this machine
    torchrun --nproc_per_node 2 jobs/train_ddp.py --custom_data true
    python -m torch.distributed.launch --nproc_per_node 2 jobs/train_ddp.py --custom_data true

On a platform, upload it and choose the nodes: it is started once per node and finds the rest out by itself.
By hand, on each node:

    python jobs/train_ddp.py --init_method tcp://FIRST_NODE:PORT --rank NODE --world_size NODES
"""
### end DDP ###
### EXACT: how to start it, and when ###
__doc__ = f"""{__doc__}
Where the result must not depend on how many GPUs there are, also when that changes between two starts of a
run: the same weights and metrics, bit for bit. The global batch is cut into --shares parts; a rank computes
one or more of them, each with batch norm statistics and random numbers of its own, and all gradients are
added in one order (docs/exact.md).

    python jobs/train_exact.py --custom_data true --shares 4                         all shares in one process
    python jobs/train_ddp_exact.py --custom_data true --shares 4 --nproc_per_node 2  the same bits, with two
"""
### end EXACT ###
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
    ### DDP: how many processes on this node, and what to do when one of them dies ###
    from common.ranks import group, norms

    group.add_options(parser)
    norms.add_options(parser)
    ### end DDP ###
    ### EXACT: how many shares ###
    from common import exact

    exact.add_options(parser)
    ### end EXACT ###

    args = arguments.parse(parser)
    ### DDP: one process per GPU on every node; below this block there are world_size equal ones ###
    group.start_workers(args)
    ### end DDP ###

    device = devices.choose(args)
    ### DDP: the processes find each other, and make sure that all of them run the same thing ###
    group.join(args, device)
    ### end DDP ###

    torch.manual_seed(args.seed)

    # The order of the samples depends only on (seed, epoch), so a restarted run goes on with the next one.
    train_set, test_set = cifar10.load(args)
    train_sampler = EpochSampler(len(train_set), args.batch_size, seed=args.seed)
    test_sampler = InOrder(len(test_set), batch_size=500)
    ### DDP: each rank takes its part of every global batch, and its part of the test images ###
    train_sampler.shard(torch.distributed.get_rank(), torch.distributed.get_world_size())
    test_sampler.shard(torch.distributed.get_rank(), torch.distributed.get_world_size())
    ### end DDP ###

    # Batches of (images, labels), normalised on the device; --augment crops and flips those of the training.
    train_loader = cifar10.loader(train_set, train_sampler, device, args.augment, args.seed, args.workers)

    test_loader = cifar10.loader(test_set, test_sampler, device)

    # The fastest memory layout for convolutions: channels last, except on NPUs.
    layout = devices.layout(device)
    model = resnet18(num_classes=len(train_set.classes), width=args.width).to(device).to(memory_format=layout)
    ### DDP: every rank starts from rank 0's weights, and backward() averages the gradients over all ranks ###
    if norms.over_all_ranks(args):
        model = norms.synchronised(model)
    if torch.distributed.get_world_size() > 1:
        ddp_settings = {"gradient_as_bucket_view": True, **norms.OWN_STATISTICS}
        model = torch.nn.parallel.DistributedDataParallel(model, **ddp_settings)
    ### end DDP ###
    ### EXACT: the global batch is that of all shares; this rank computes some; test batches stay whole ###
    shares = exact.Shares(args, model, train_sampler, test_sampler)
    ### end EXACT ###

    loss_fn = torch.nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)

    settings = {"lr": args.lr, "weight_decay": args.weight_decay, **devices.fused(device)}
    if args.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), **settings)
    else:
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, **settings)

    # The run: shows progress, saves, and stops when it is told to.
    run = Run(args, train_sampler, model, data_set=train_set, test_samples=len(test_set), optimizer=optimizer)
    ### EXACT: run.steps() gives one of this rank's shares after the other; a run keeps their number ###
    run.register(shares=shares)
    ### end EXACT ###

    # Resumes, by default from the newest checkpoint in the output folder, if there is one.
    run.resume()

    # With --compile true: faster steps after slow first ones.
    devices.compile_network(args, model, loss_fn=loss_fn)

    peak = args.lr
    ### DDP: a step sees more samples, so it may be larger ###
    peak *= arguments.growth(args, run.global_batch)
    run.say(f"learning rate {peak:g} for a global batch of {run.global_batch}")
    ### end DDP ###
    ### EXACT: a step sees the samples of all shares, so it may be larger ###
    peak = shares.learning_rate(run)
    run.say(shares.first_line)
    ### end EXACT ###
    for epoch in run.epochs():
        model.train()

        for images, labels in run.steps(train_loader):
            for parameters in optimizer.param_groups:
                parameters["lr"] = learning_rate(args, peak, run.progress)

            loss = loss_fn(model(images), labels)

            optimizer.zero_grad()
            loss.backward()
            ### EXACT: after this rank's last share, the gradients are the means of all shares ###
            loss = shares.mean(loss)
            if loss is None:
                continue
            ### end EXACT ###
            optimizer.step()

            run.step(loss)

        ### EXACT: again, if the ranks have changed meanwhile (--min_nodes) ###
        # was: scores = evaluate(run.model, test_loader, test_set.classes)
        scores = run.together(evaluate, run.model, test_loader, test_set.classes)
        ### end EXACT ###
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
    ### DDP: each rank has running statistics of its own; the checkpoint has rank 0's ###
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer, 0)
    ### end DDP ###
    scores = Scores(classes, loader.device, loader.pixels)
    for images, labels in loader:
        scores.add(model(images), labels, loader.ids, images)

    return scores.all_reduce()  # each rank has evaluated its own part of the samples


if __name__ == "__main__":
    run_job(main)
