"""Train a GAN to draw points of a ring: two networks, two optimizers, a schedule, an average and noise of its own."""

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


class Saved:
    """A generator of random numbers, as Run can save it."""

    def __init__(self, generator):
        self.generator = generator

    def state_dict(self):
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["state"])


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs))


def main():
    parser = arguments.general_parser(__doc__, data="is not used", workers=0)
    parser.set_defaults(epochs=20, batch_size=64, lr=0.001)
    group.add_options(parser)
    args = arguments.parse(parser)
    group.start_workers(args)
    device = devices.choose(args)
    group.join(args, device)
    torch.manual_seed(args.seed)
    angle = torch.rand(1280) * 6.2832
    ring = TensorDataset(torch.stack([angle.cos(), angle.sin()], 1))
    sampler = EpochSampler(len(ring), args.batch_size, seed=args.seed)
    sampler.shard(torch.distributed.get_rank(), torch.distributed.get_world_size())
    loader = SampleLoader(ring, sampler, device, args.workers)
    generator = network(8, 2).to(device)
    discriminator = network(2, 1).to(device)
    net_g = nn.parallel.DistributedDataParallel(generator)
    net_d = nn.parallel.DistributedDataParallel(discriminator)
    average = torch.optim.swa_utils.AveragedModel(generator, avg_fn=lambda old, new, _: 0.99 * old + 0.01 * new)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    schedule_d = torch.optim.lr_scheduler.ExponentialLR(optimizer_d, 0.9)
    noise = torch.Generator().manual_seed(7)
    loss_fn = nn.BCEWithLogitsLoss()

    run = Run(args, sampler, net_g, best_by="radius_error", best_is="lowest", optimizer=optimizer_g, optimizer_d=optimizer_d,
              discriminator=discriminator, average=average, schedule_d=schedule_d, noise=Saved(noise))  # fmt: skip
    run.resume()
    for _ in run.epochs():
        for (real,) in run.steps(loader):
            fake = net_g(torch.randn(len(real), 8, generator=noise).to(device))
            is_real, is_fake = torch.ones(len(real), 1, device=device), torch.zeros(len(real), 1, device=device)
            loss_d = loss_fn(net_d(real), is_real) + loss_fn(net_d(fake.detach()), is_fake)
            optimizer_d.zero_grad()
            loss_d.backward()
            optimizer_d.step()
            loss = loss_fn(net_d(fake), is_real)
            optimizer_g.zero_grad()
            loss.backward()
            optimizer_g.step()
            average.update_parameters(generator)
            run.step(loss)
        schedule_d.step()
        with torch.no_grad():
            points = average(torch.randn(1000, 8, generator=torch.Generator().manual_seed(1)).to(device))
        run.end_epoch(radius_error=(points.norm(dim=1) - 1).abs().mean().item())


if __name__ == "__main__":
    run_job(main)
