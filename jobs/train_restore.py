"""Train a network to sharpen blurry pictures, on pairs {train,test}/{blurry,sharp}/SUB/IMAGE.

    python jobs/train_restore.py --custom_data true --epochs 12      pairs of its own: half a minute
    python jobs/train_restore.py --data_url /data/deblur --resize 0  crops of the pictures as they are
    torchrun --nproc_per_node 8 jobs/train_restore.py --data_url /data/deblur --data_backend dali-gpu

Every GPU of every node works, in half precision. After each epoch: PSNR, SSIM, loss over the test pairs;
examples (input, output, target) in the output folder and in TensorBoard. Started again, it goes on where it
stopped.
"""

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
from torch import distributed

from common import arguments, devices
from common.job import run_job
from common.models.restorer import Restorer, psnr, ssim
from common.ranks import group
from common.run import Run, Scaler
from common.run.timing import Stopwatch
from datasets import pairs
from datasets.sampler import EpochSampler, InOrder

EXAMPLES = 4


def main():
    watch = Stopwatch()
    args = arguments.parse(options())
    group.start_workers(args)  # one process per GPU on every node; each of them runs the lines below
    device = devices.choose(args)
    group.join(args, device)
    args = arguments.replaced(args, workers=devices.loader_workers(args))
    rank = distributed.get_rank()
    world_size = distributed.get_world_size()
    torch.manual_seed(args.seed)
    watch.lap("parameters")

    train_set, test_set = pairs.load(args)
    train_sampler = EpochSampler(len(train_set), args.batch_size, seed=args.seed)
    test_sampler = InOrder(len(test_set), args.batch_size)
    train_sampler.shard(rank, world_size)
    test_sampler.shard(rank, world_size)
    train_loader = pairs.loader(train_set, train_sampler, device, args.workers, args.data_backend)
    test_loader = pairs.loader(test_set, test_sampler, device, args.workers, args.data_backend)
    watch.lap("data")

    network = Restorer(args.width).to(device).to(memory_format=devices.layout(device))
    model = network
    if distributed.get_world_size() > 1:
        model = torch.nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    loss_fn = torch.nn.L1Loss()
    devices.compile_network(args, model, loss_fn=loss_fn)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=args.lr, weight_decay=args.weight_decay, **devices.fused(device)
    )

    # Half precision on a GPU. float16 has a small range, so its gradients are scaled up; bfloat16 needs no
    # scaling.
    amp_dtype = (
        devices.half_precision(args, device) if args.amp_dtype or device.type != "cpu" else torch.float32
    )
    autocast = devices.autocast(device, amp_dtype)
    scaler = Scaler(device.type, enabled=amp_dtype == torch.float16)

    run = Run(
        args, train_sampler, model, optimizer=optimizer, scaler=scaler,
        data_set=train_set, test_samples=len(test_set), best_by="psnr", best_is="highest",
    )  # fmt: skip
    run.resume()  # from the newest checkpoint in the output folder, if there is one
    if not run.goes_on:
        metrics, _ = evaluate(run.model, test_loader, len(test_set))
        run.say("the blurry pictures themselves: psnr={psnr:.4f} ssim={ssim:.4f}".format(**metrics))
    watch.lap("model")

    for epoch in run.epochs():
        model.train()

        for blurry, sharp in run.steps(train_loader):
            for parameters in optimizer.param_groups:  # up for the first tenth of the run, then down to zero
                parameters["lr"] = args.lr * min(run.progress / 0.1, (1 - run.progress) / 0.9)

            with autocast:
                loss = loss_fn(model(blurry), sharp)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

            run.step(loss)

        metrics, strips = evaluate(run.model, test_loader, len(test_set))
        if strips:
            run.picture(
                f"epoch_{epoch + 1}",
                torch.cat(strips, dim=1),
                rows=len(strips),
                columns=["blurry", "restored", "sharp"],
            )
        run.end_epoch(**metrics)

    watch.lap("training")
    run.say(watch.summary(run.seconds))


def options():
    parser = arguments.general_parser(__doc__, data=pairs.DATA, workers=None)
    parser.set_defaults(epochs=100, batch_size=8, lr=1e-3, weight_decay=0.0)
    arguments.explain(
        parser, lr="learning rate at its highest, after a tenth of the run; the same for any number of ranks"
    )
    pairs.add_options(parser)
    group.add_options(parser)
    training = arguments.group(parser, "training")
    arguments.add_compile(training)
    training.add_argument(
        "--amp_dtype",
        choices=["bfloat16", "float16", "float32"],
        help="unset: on a GPU bfloat16, or float16 where it has no bfloat16; float32 on a CPU",
    )
    training.add_argument(
        "--width", type=arguments.number(int, at_least=1, below=1025), default=48, help="channels inside"
    )
    return parser


@torch.no_grad()
def evaluate(model, loader, count):
    """Return the metrics over all ranks' `count` test pairs, and this rank's first examples: blurry,
    restored, sharp."""
    model.eval()
    sums = torch.zeros(3, dtype=devices.widest(loader.device), device=loader.device)
    rows = []
    for blurry, sharp in loader:
        restored = model(blurry).clamp(-1, 1)
        loss = (restored - sharp).abs().mean(dim=(1, 2, 3))
        blurry, restored, sharp = ((images + 1) / 2 for images in (blurry, restored, sharp))
        sums += torch.stack([psnr(restored, sharp), ssim(restored, sharp), loss]).sum(1)
        if len(rows) < EXAMPLES:
            strips = torch.cat([blurry, restored, sharp], dim=3)
            rows += list((strips * 255).round().to("cpu", torch.uint8))
    distributed.all_reduce(sums)
    metrics = dict(zip(("psnr", "ssim", "loss"), (sums / count).tolist()))
    return metrics, rows[:EXAMPLES]


if __name__ == "__main__":
    run_job(main)
