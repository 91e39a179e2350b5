"""Fit a network to tensors of my own."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from torch.utils.data import TensorDataset, random_split

from common import arguments, devices
from common.job import run_job
from common.ranks import group
from common.ranks.collectives import reduce
from common.run import Run
from datasets.loader import SampleLoader
from datasets.sampler import EpochSampler, InOrder


def main():
    parser = arguments.general_parser(__doc__, data="is not used", workers=0)
    parser.set_defaults(epochs=20, batch_size=64, lr=0.01, weight_decay=0.01)
    group.add_options(parser)
    args = arguments.parse(parser)
    group.start_workers(args)
    device = devices.choose(args)
    group.join(args, device)

    torch.manual_seed(args.seed)
    inputs = torch.randn(2000, 8)
    targets = inputs.sin().sum(dim=1, keepdim=True)
    train_set, val_set = random_split(TensorDataset(inputs, targets), [1600, 400])
    train_sampler = EpochSampler(len(train_set), args.batch_size, seed=args.seed)
    val_sampler = InOrder(len(val_set), batch_size=400)
    for sampler in (train_sampler, val_sampler):
        sampler.shard(torch.distributed.get_rank(), torch.distributed.get_world_size())
    train_loader = SampleLoader(train_set, train_sampler, device, args.workers)
    val_loader = SampleLoader(val_set, val_sampler, device)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    loss_fn = torch.nn.MSELoss()

    run = Run(
        args,
        train_sampler,
        model,
        best_by="loss",
        best_is="lowest",
        optimizer=optimizer,
        scheduler=scheduler,
    )
    run.resume()
    for _ in run.epochs():
        model.train()
        for x, y in run.steps(train_loader):
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            run.step(loss)
        scheduler.step()
        model.eval()
        with torch.no_grad():
            total = sum(loss_fn(run.model(x), y).item() * len(x) for x, y in val_loader)
        (total,) = reduce([total], "SUM")  # each process has seen its own part of them
        run.end_epoch(loss=total / len(val_set))


if __name__ == "__main__":
    run_job(main)
