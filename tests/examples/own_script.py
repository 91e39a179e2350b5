"""Train a small network on arrays of my own."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from common import arguments, devices
from common.job import run_job
from common.run import Run, Scores
from datasets import own_data
from datasets.sampler import EpochSampler, InOrder


def main():
    parser = arguments.general_parser(__doc__, data="folder or bucket with train/ and test/", workers=0)
    parser.add_argument("--hidden", type=int, default=16, help="an option of my own")
    args = arguments.parse(parser)
    device = devices.choose(args)
    torch.manual_seed(args.seed)

    train_set, test_set = own_data.load(args)
    train_sampler = EpochSampler(len(train_set), args.batch_size, seed=args.seed)
    test_sampler = InOrder(len(test_set), batch_size=500)
    train_loader = own_data.loader(train_set, train_sampler, device, args.workers)
    test_loader = own_data.loader(test_set, test_sampler, device)

    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, args.hidden, kernel_size=3, stride=2),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(args.hidden, len(train_set.classes)),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)

    run = Run(args, train_sampler, model, optimizer=optimizer)
    run.resume()
    for _ in run.epochs():
        model.train()
        for images, labels in run.steps(train_loader):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss)
        scores = evaluate(run.model, test_loader, test_set.classes)
        run.end_epoch(scores, accuracy=scores.accuracy)


@torch.no_grad()
def evaluate(model, loader, classes):
    model.eval()
    scores = Scores(classes, loader.device, loader.pixels)
    for images, labels in loader:
        scores.add(model(images), labels, loader.ids, images)
    return scores.all_reduce()


if __name__ == "__main__":
    run_job(main)
