"""ResNet-18 on CIFAR-10 to 80 % on one CPU core in the least time that we have found; 94 % on a GPU has not
been measured yet.

    ResNet-18     80.57 % (80.29 to 80.85)    600 CPU-seconds of an AMD EPYC (596 to 613), 5 runs; 2026-11-23
      before      79.99, 80.33 %              698 CPU-seconds of the EPYC, 2 runs
      before      80.48 % (80.38 to 80.59)    557 CPU-seconds of an Intel Xeon with AMX (552 to 568), 3 runs;
                                              2026-11-21
    --net small   81.08 % (80.94 to 81.19)    100 CPU-seconds of the EPYC (99 to 102), 3 runs
      before      80.68 % (80.57 to 80.80)     78 CPU-seconds of the Xeon (73 to 82), 3 runs

One core, torch 2.15.0, JPEG-compressed images, glibc's settings of docs/speed.md; "before" lacks the high
rate of norms and biases and first filters from patches.
The recipe of the ModelArts sample takes the Xeon 1,426 CPU-seconds for one epoch; stopped after 557 it is at
20.6 %.

    export OMP_NUM_THREADS=1                                               on a CPU: one core
    python jobs/speedrun.py --runs 3 --data_url /data/cifar10              ResNet-18 to 80 % (on a GPU: 94 %)
    python jobs/speedrun.py --runs 3 --data_url /data/cifar10 --net small  a network of 2 million parameters

Every run starts from nothing with another seed and is as long as RECIPES says. Nothing looks at the test
images before the one evaluation at the end: all 10,000, each once, as they are. The recipes' rates were
chosen with --held_out true, which trains on 45,000 of the training images and tests on the other 5,000; the
passes, so that several seeds reach 80 % on the test images.

A run's seconds are those of making the network and training it: CPU-seconds of all threads on a CPU,
wall-clock seconds on a GPU. Those of compiling are printed before the runs. A run that is stopped leaves
nothing, and has to start from the beginning.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import time

BEGUN = time.perf_counter()
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
from torch import nn
from torch.nn import functional

from common import arguments, devices, progress, storage, world
from common.checkpoints.run_bucket import RunBucket
from common.devices import graphs
from common.errors import UserError
from common.files import append, drop_partial_line
from common.job import run_job
from common.models import resnet18
from datasets import cifar10

# {(network, target): (batch size, label smoothing, momentum of the filters, {image size: passes over the
# training images})}. On a CPU, an image of half the size takes a quarter of the time, and at first the
# network learns nearly as much from it.
RECIPES = {
    ("resnet18", 0.80): (256, 0.0, 0.8, {16: 2.33, 24: 0.715, 32: 0.17}),
    ("resnet18", 0.94): (1024, 0.2, 0.6, {16: 2, 24: 4, 32: 8}),
    ("small", 0.80): (256, 0.0, 0.6, {32: 0.9}),
    ("small", 0.94): (1024, 0.2, 0.6, {32: 10}),
}
FILTER_RATE = 0.2  # of the convolutions; the rate falls to zero linearly
LAST_RATE = 0.12  # peak rate of the last layer, after a fifth of the run
OTHER_MOMENTUM = 0.9  # of all but filters
# peak rate of norms and biases, also after a fifth; with a usual one they would change little in so few steps
NORM_RATE = 2.0
SHIFT = 2  # pixels by which a training image is moved at most, in each direction
HELD_OUT = 5000
# 3 x 3 filter's tap for each (output, input) of 2 x 2 pixels
SEEN_OF_FOUR = [4, 5, 7, 8, 3, 4, 6, 7, 1, 2, 4, 5, 0, 1, 3, 4]


def main():
    args = parse_options()
    device = devices.choose(args)
    args = arguments.replaced(args, target=args.target or (0.80 if device.type == "cpu" else 0.94))
    print(
        (
            f"{devices.describe(device)}, torch {torch.__version__}: {time.perf_counter() - BEGUN:.1f} s to "
            "import"
        ),
        flush=True,
    )

    begun = clock(device)
    train, test = ((data.images.to(device), data.labels.to(device)) for data in cifar10.load(args))
    if args.held_out:
        if len(train[1]) <= HELD_OUT:
            raise UserError(
                f"--held_out true holds out {HELD_OUT} of the training images, and there are {len(train[1])}"
            )
        test = [part[-HELD_OUT:] for part in train]
        train = [part[:-HELD_OUT] for part in train]
    print(
        (
            f"{len(train[1])} images to train on, {len(test[1])} to test on: {clock(device, begun):.1f} s "
            "to load"
        ),
        flush=True,
    )
    training = Training(args, device, *train)
    if device.type != "cpu":
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs uncompiled
        begun = clock(device)
        training.run(seed=0, steps_of_a_size=graphs.WARM_UP + 1)
        print(f"{clock(device, begun):.1f} s to compile and to record", flush=True)

    rows = []
    for seed in range(args.seed, args.seed + args.runs):
        begun = clock(device)
        model = training.run(seed)
        trained = clock(device)
        row = {"seed": seed, "seconds": trained - begun, "accuracy": accuracy(model, *test)}
        tested = clock(device, trained)
        print(
            " ".join(f"{name}={value:.4g}" for name, value in row.items()),
            f"tested_in={tested:.1f}",
            flush=True,
        )
        record_run(args, device, row)
        rows.append(row)
    for name, form in (("accuracy", "{:.2%}"), ("seconds", "{:.1f}")):
        values = [row[name] for row in rows]
        low, middle, high = (
            form.format(value) for value in (min(values), statistics.mean(values), max(values))
        )
        print(f"{name}: {middle} in the mean of {len(values)}, {low} to {high}")
    outcome = "reached" if statistics.mean(row["accuracy"] for row in rows) >= args.target else "missed"
    print(
        f"done: {args.target:.0%} {outcome}; the runs are in {args.output_url or args.output_dir}", flush=True
    )


def parse_options():
    """Return the arguments; UserError if the job was started as several processes."""
    parser = arguments.bare_parser(__doc__, data=cifar10.DATA)
    parser.set_defaults(needs=(devices.CHANNELS_LAST,))
    training = arguments.group(parser, "training")
    targets = sorted({target for _, target in RECIPES})
    training.add_argument("--target", type=float, choices=targets, help="unset: 0.94 on a GPU, 0.8 on a CPU")
    training.add_argument(
        "--net", choices=sorted(NETS), default="resnet18", help="small: the layers of airbench94"
    )
    training.add_argument(
        "--runs", type=arguments.number(int, at_least=1), default=1, help="each with the next seed"
    )
    training.add_argument(
        "--held_out", type=arguments.boolean, default=False, help="test on training images held out"
    )
    training.add_argument("--doctor", type=refuse_doctor, help=argparse.SUPPRESS)
    args = arguments.parse(parser)
    world.require_one_device(args)
    return args


def refuse_doctor(_text):
    raise argparse.ArgumentTypeError(
        "speedrun.py makes no Run, where the doctor would end; have it look at train.py"
    )


def record_run(args, device, row):
    """Append the results of a run to runs.jsonl in the output folder,
    and upload the folder if that is in a bucket."""
    about = {
        "net": args.net,
        "target": args.target,
        "held_out": args.held_out,
        "device": devices.describe(device),
    }
    os.makedirs(args.output_dir, exist_ok=True)
    if args.output_url:
        RunBucket(args).fetch_growing_files()
    line = json.dumps({**row, **about, "torch": str(torch.__version__)}).encode()
    with open(os.path.join(args.output_dir, "runs.jsonl"), "a+b", buffering=0) as file:
        drop_partial_line(file)
        append(file, line + b"\n")
    if args.output_url:
        storage.publish(args.output_dir, args.output_url)


def clock(device, since=0.0):
    """Wait for the device and return a clock minus `since`: CPU-seconds of all threads on a CPU,
    else wall-clock seconds."""
    devices.synchronize(device)
    return (time.process_time() if device.type == "cpu" else time.perf_counter()) - since


# --- One run ------------------------------------------------------------------------------------------------


class Training:
    """A network, its optimizers, and a training step for each size of pictures,
    which all runs use one after the other.

    On a GPU the network is compiled, and each step is one CUDA graph, which the first steps of its size
    record.
    """

    def __init__(self, args, device, images, labels):
        self.args = args
        self.device = device
        self.images = images
        self.labels = labels
        batch, smoothing, momentum, passes = RECIPES[args.net, args.target]
        self.batch = batch
        self.passes = passes
        self.smoothing = smoothing
        self.model = self.new_network()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.muon = Muon([parameter for parameter in trained if parameter.ndim == 4], momentum)
        norms_and_biases = [parameter for parameter in trained if parameter.ndim == 1]
        last_layer = [parameter for parameter in trained if parameter.ndim == 2]
        parameter_groups = [
            {"params": norms_and_biases, "peak": NORM_RATE},
            {"params": last_layer, "peak": LAST_RATE, "weight_decay": 5e-4},
        ]
        self.sgd = torch.optim.SGD(
            parameter_groups, lr=LAST_RATE, momentum=OTHER_MOMENTUM, nesterov=True, **devices.fused(device)
        )
        if device.type != "cpu":
            self.model.compile(dynamic=False)
        self.steps = {
            size: graphs.one_graph(device, functools.partial(self.step, size)) for size in self.passes
        }

    def new_network(self):
        return NETS[self.args.net](self.images).to(self.device).to(memory_format=devices.layout(self.device))

    def run(self, seed, steps_of_a_size=None):
        """Train from nothing, and return the network.

        `steps_of_a_size` replaces the recipe's numbers of steps.
        """
        torch.manual_seed(seed)
        batch = self.batch
        count = len(self.images)
        steps = {
            size: steps_of_a_size or max(1, round(epochs * count / batch))
            for size, epochs in self.passes.items()
        }
        sizes = [size for size, number in steps.items() for _ in range(number)]
        order = torch.cat([torch.randperm(count) for _ in range(len(sizes) * batch // count + 1)])
        flipped = torch.rand(count) < 0.5
        # each pass those that the last one did not
        mirrored = flipped[order] ^ (torch.arange(len(order)) // count % 2 == 1)
        order = order.to(self.device)
        mirrored = mirrored.to(self.device)
        self.reset()

        self.model.train()
        batches = zip(
            progress.with_bar(sizes, f"seed {seed}", "step"), order.split(batch), mirrored.split(batch)
        )
        for number, (size, ids, batch_mirrored) in enumerate(batches):
            done = number / len(sizes)
            for group in self.sgd.param_groups:
                group["lr"] = group["peak"] * min((number + 1) / len(sizes) / 0.2, (1 - done) / 0.8)
            self.muon.rate.fill_(FILTER_RATE * (1 - done))
            self.steps[size](ids, batch_mirrored)
        measure_norms(self.model, self.images, order[: 8 * batch].split(batch))
        return self.model

    def reset(self):
        """Take new weights and forget the momentum, in place,
        because what was compiled and recorded reads them there."""
        new = self.new_network()
        self.model.load_state_dict(new.state_dict())
        for module, new_module in zip(self.model.modules(), new.modules()):
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = new_module.momentum  # which measure_norms has changed
        for velocities in (
            self.muon.velocities,
            [state["momentum_buffer"] for state in self.sgd.state.values()],
        ):
            for velocity in velocities:
                velocity.zero_()

    def step(self, size, ids, mirrored):
        """Train on the images `ids`, scaled to `size`, and return the loss."""
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(pictures(self.images, ids, mirrored, size))
            loss = functional.cross_entropy(logits, self.labels[ids], label_smoothing=self.smoothing)
        self.model.zero_grad()
        loss.backward()
        self.muon.step()
        self.sgd.step()
        return loss.detach()


def pictures(images, ids, mirrored, size):
    """Return the images `ids`: moved by up to SHIFT pixels, flipped where `mirrored`,
    scaled to `size` and normalised."""
    last = images.shape[-1] - 1
    along = torch.arange(last + 1, device=images.device)
    shifts = torch.randint(-SHIFT, SHIFT + 1, (2, len(ids), 1), device=images.device)
    rows = along + shifts[0]
    columns = torch.where(mirrored[:, None], last - along, along) + shifts[1]
    # reflected at the edges
    rows, columns = (last - (last - places.abs()).abs() for places in (rows, columns))
    batch = (
        images.permute(0, 2, 3, 1)[ids[:, None, None], rows[:, :, None], columns[:, None, :]]
        .permute(0, 3, 1, 2)
        .float()
    )
    if size < images.shape[-1]:
        batch = functional.interpolate(batch, size=size, mode="bilinear", antialias=True)
    return normalised(batch)


def normalised(images):
    """Return uint8 images as floats, less the mean of CIFAR-10 and divided by its deviation."""
    mean, std = constants(images.device)
    return images.float().sub(mean).div(std)


@functools.cache
def constants(device):
    """Return mean and std for uint8 values, cached because a copy in every step would make the host wait for
    the GPU."""
    return [
        255 * torch.tensor(value, device=device).view(1, 3, 1, 1) for value in (cifar10.MEAN, cifar10.STD)
    ]


def measure_norms(model, images, batches):
    """Replace the BatchNorms' running statistics with those of `batches` (image ids),
    unmoved and full-size as evaluated."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for number, ids in enumerate(batches, 1):
        for norm in norms:
            # the mean of all batches so far; torch's update_bn waits for the GPU at each norm
            norm.momentum = 1 / number
        with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16):
            # not model(), which would be compiled again for each momentum
            model.forward(normalised(images[ids]))


@torch.no_grad()
def accuracy(model, images, labels):
    """Return the share of the images that the network classifies right."""
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=images.device)
    for batch, targets in zip(images.split(500), labels.split(500)):
        with torch.autocast(images.device.type, torch.bfloat16):
            right += (model.forward(normalised(batch)).argmax(dim=1) == targets).sum()
    return right.item() / len(labels)


# --- The optimizer ------------------------------------------------------------------------------------------


class Muon:
    """SGD with Nesterov momentum and orthogonalised updates of convolution weights;
    those of one shape are updated together."""

    def __init__(self, parameters, momentum):
        shapes = sorted({parameter.shape for parameter in parameters})
        self.groups = [
            [parameter for parameter in parameters if parameter.shape == shape] for shape in shapes
        ]
        self.momentum = momentum
        self.rate = torch.zeros((), device=parameters[0].device)  # to be filled before a step
        self.velocities = [
            torch.stack([parameter.detach().flatten(1) for parameter in group]).zero_()
            for group in self.groups
        ]

    @torch.no_grad()
    def step(self):
        updates = orthogonal([self.direction(number) for number in range(len(self.groups))])
        for group, update in zip(self.groups, updates):
            banks = [parameter.detach().permute(0, 2, 3, 1) for parameter in group]
            stacked = torch.stack(banks).flatten(2)
            # a norm follows: length is free
            stacked *= stacked.shape[1] ** 0.5 / stacked.norm(dim=(1, 2), keepdim=True)
            torch._foreach_copy_(
                banks, stacked.sub_(update.float() * self.rate).view(-1, *banks[0].shape).unbind()
            )

    def direction(self, number):
        """Update the velocities of a group of weights and return its Nesterov updates,
        a matrix for each weight."""
        gradients = torch.stack(
            [parameter.grad.permute(0, 2, 3, 1).flatten(1) for parameter in self.groups[number]]
        )
        velocities = self.velocities[number]
        torch.add(gradients, velocities, alpha=self.momentum, out=velocities)
        return gradients.add_(velocities, alpha=self.momentum)


def orthogonal(groups):
    """Return the matrices with singular values near 1: three Newton-Schulz steps X -> P X,
    P a polynomial of G = X X'.

    The three factors P are multiplied first, as most are smaller than X; the next G is P G P. Consecutive
    groups whose matrices have the same number of rows are computed together.
    """
    scaled = [
        stack.bfloat16() / stack.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7).bfloat16() for stack in groups
    ]
    updates = []
    for _, alike in itertools.groupby(scaled, key=lambda matrices: matrices.shape[1]):
        alike = list(alike)
        gram = torch.cat([stack @ stack.mT for stack in alike])
        step = all_steps = polynomial(gram)
        for _ in range(2):
            gram = step @ gram @ step
            step = polynomial(gram)
            all_steps = step @ all_steps
        factors = all_steps.split([len(stack) for stack in alike])
        updates += [factor @ stack for factor, stack in zip(factors, alike)]
    return updates


def polynomial(gram):
    """Return 3.4445 I - 4.7750 G + 2.0315 G G; Muon's authors chose the coefficients."""
    result = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
    result.diagonal(dim1=1, dim2=2).add_(3.4445)
    return result


# --- The networks -------------------------------------------------------------------------------------------


def resnet(images):
    """Return the CIFAR jobs' ResNet-18.

    The last norm of each block begins at zero, so that a block begins as its shortcut. The first filters are
    the principal directions of image patches, their negatives, and random ones."""
    model = resnet18()
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3) and images.device.type == "cpu":
            module.forward = functools.partial(convolved, module)  # pyright: ignore[reportAttributeAccessIssue] (a method)
    first_weight = next(model.parameters()).detach()
    filters = patch_directions(images[:1000], 3)[1]
    random_filters = functional.normalize(first_weight.flatten(1)).view_as(first_weight)
    first_weight.copy_(torch.cat([filters, -filters, random_filters])[: len(first_weight)])
    for name, parameter in model.named_parameters():
        if name.endswith("residual_function.4.weight"):
            nn.init.zeros_(parameter)
    return model


def patch_directions(images, size):
    """Return the eigenvalues of the second moments of size x size patches,
    and the eigenvectors as filters of norm 1."""
    patches = functional.unfold(normalised(images.cpu()), size).transpose(1, 2).flatten(0, 1)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    return values, vectors.T.reshape(-1, 3, size, size)


def convolved(conv, images):
    """Return conv(images) for 3 x 3 filters without bias; outputs up to 4 x 4 as a matrix product,
    which is faster on a CPU."""
    stride = conv.stride[0]
    height, width = images.shape[2:]
    if width > 4 * stride:
        return nn.Conv2d.forward(conv, images)
    if (stride, height, width) == (1, 2, 2):  # each of the four outputs sees all four inputs
        blocks = conv.weight.permute(2, 3, 0, 1).flatten(0, 1).index_select(0, torch.tensor(SEEN_OF_FOUR))
        matrix = blocks.unflatten(0, (4, 4)).transpose(1, 2).flatten(2).flatten(0, 1)
        return (
            functional.linear(images.permute(0, 2, 3, 1).flatten(1), matrix)
            .view(-1, 2, 2, len(conv.weight))
            .permute(0, 3, 1, 2)
        )
    padded = functional.pad(images.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1)).flatten(1, 2)
    places = (
        torch.arange((height + 2) * (width + 2))
        .view(height + 2, width + 2)
        .unfold(0, 3, stride)
        .unfold(1, 3, stride)
    )
    taps = padded.index_select(1, places.flatten()).view(len(images), *places.shape[:2], -1)
    return functional.linear(taps, conv.weight.permute(0, 2, 3, 1).flatten(1)).permute(0, 3, 1, 2)


class Small(nn.Sequential):
    """The layers of airbench94: a convolution that whitens patches, then three groups of two convolutions."""

    def __init__(self, images):
        whiten = nn.Conv2d(3, 24, kernel_size=2)
        values, filters = patch_directions(images[:5000], 2)
        filters = filters / (values + 5e-4).sqrt().view(-1, 1, 1, 1)  # equal variance of all outputs
        whiten.weight.requires_grad_(False).copy_(torch.cat([filters, -filters]))
        super().__init__(whiten, nn.GELU(), *self.group(24, 64), *self.group(64, 256), *self.group(256, 256))
        self.extend([nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(256, 10)])

    @staticmethod
    def group(inputs, outputs):
        """Return two convolutions with their norms; between them the image is halved."""
        layers = [
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(outputs),
            nn.GELU(),
        ]
        return layers + [
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.GELU(),
        ]


NETS = {"resnet18": resnet, "small": Small}

if __name__ == "__main__":
    run_job(main)
