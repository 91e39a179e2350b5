"""Train a small transformer to sort numbers, with the gradients of four batches added for each update."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from torch import nn
from torch.utils.data import TensorDataset

from common import arguments, devices
from common.job import run_job
from common.ranks import group
from common.run import Run
from datasets.loader import SampleLoader
from datasets.sampler import EpochSampler

ACCUMULATED = 4  # batches


def main():
    parser = arguments.general_parser(__doc__, data="is not used", workers=0)
    parser.set_defaults(epochs=4, batch_size=16, lr=0.001)
    group.add_options(parser)
    args = arguments.parse(parser)
    group.start_workers(args)
    device = devices.choose(args)
    group.join(args, device)
    torch.manual_seed(args.seed)
    numbers = torch.randint(0, 16, (160, 8))
    data = TensorDataset(numbers, numbers.sort(1).values)
    sampler = EpochSampler(len(data), args.batch_size, seed=args.seed)
    sampler.shard(torch.distributed.get_rank(), torch.distributed.get_world_size())
    loader = SampleLoader(data, sampler, device, args.workers)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(nn.Embedding(16, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 16)).to(device)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loss_fn = nn.CrossEntropyLoss()
    all_x, all_y = (tensor.to(device) for tensor in data.tensors)

    run = Run(args, sampler, model, best_by="loss", best_is="lowest", optimizer=optimizer)
    run.resume()
    for _ in run.epochs():
        model.train()
        for x, y in run.steps(loader):
            loss = loss_fn(model(x).flatten(0, 1), y.flatten())
            (loss / ACCUMULATED).backward()
            if run.updates(every=ACCUMULATED):
                optimizer.step()
                optimizer.zero_grad()
            run.step(loss)
        model.eval()
        with torch.no_grad():
            loss = loss_fn(run.model(all_x).flatten(0, 1), all_y.flatten())
        run.end_epoch(loss=loss.item())


if __name__ == "__main__":
    run_job(main)
