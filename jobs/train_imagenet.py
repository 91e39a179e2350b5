"""Train ResNet-50, or another of torchvision's networks, on ImageNet or any folder of photographs by class.

    python jobs/train_imagenet.py --custom_data true --arch resnet18 --image_size 64 \\
        --batch_size 32 --epochs 2
    python jobs/train_imagenet.py --data_url /data/imagenet            a folder with {train,val}/CLASS/*.JPEG
    python jobs/train_imagenet.py --data_url /data/flowers             with CLASS/*.jpg: a fifth is held out
    torchrun --nproc_per_node 8 jobs/train_imagenet.py --data_url obs://bucket/imagenet \\
        --total_batch 2048 --workers 12
    python jobs/train_imagenet.py --data_url /data/imagenet --evaluate true --weights resnet50.pth
    python jobs/train_imagenet.py --data_backend synthetic --prof 100  the speed of everything but the input

Every GPU of every node works, in half precision. Started again, it goes on where it stopped, on any number of
GPUs that divides the total batch. The recipe is the usual one of 90 epochs; --mixup 0.2 --ema 0.9999 --epochs
250 goes further. For up to 5,000 pictures there is another one, which the log spells out (docs/data.md). The
options of NVIDIA's ResNet-50 script are understood as well: train_imagenet.py FOLDER -a resnet50 -b 256 --amp
(docs/from.md).
"""

import json
import math
import os
import sys
import time
from typing import Any

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

from common import arguments, devices, exact
from common.arguments import COUNT, POSITIVE, boolean, number
from common.checkpoints import restore
from common.checkpoints.pretrained import about_weights, fit, load_weights, local_weights
from common.devices import portions
from common.errors import UserError, one_line
from common.files import write_atomically
from common.job import run_job
from common.models import classifiers
from common.models.average import Average
from common.progress import say
from common.ranks import barrier, group, norms
from common.run import Run, Scaler, Scores
from common.weights.files import OPTIONS, beside, evaluated_weights
from datasets import imagenet, recipe
from datasets.drop_in import spellings
from datasets.sampler import EpochSampler, InOrder

LAYOUTS = {"nhwc": torch.channels_last, "nchw": torch.contiguous_format}
BALANCED = "balanced_accuracy"
LATENCIES = 20  # batches of an evaluation that are timed; after each of these the host waits for the device


def main():
    args = with_implied_options(arguments.parse(options()))
    group.start_workers(args)  # one process per GPU on every node; each of them runs the lines below
    device = devices.choose(args)
    group.join(args, device)
    if args.memory_format == "nhwc":
        devices.require_feature(device, devices.CHANNELS_LAST)
    args = arguments.replaced(args, workers=devices.loader_workers(args))
    rank = distributed.get_rank()
    world_size = distributed.get_world_size()
    if args.weights:
        args = with_options_of_weights(args)
    classifiers.require(args.arch, args.image_size)
    torch.manual_seed(args.seed)

    # Half precision on a GPU. float16 has a small range, so its gradients are scaled up; the others need no
    # scaling.
    amp_dtype = (
        devices.half_precision(args, device) if args.amp_dtype or device.type != "cpu" else torch.float32
    )
    autocast = devices.autocast(device, amp_dtype)
    scaler = Scaler(device.type, enabled=amp_dtype == torch.float16, **scaling(args))

    # The samples and their order. Each rank takes its part of every total batch, in micro-batches of at most
    # batch_size.
    args, train_set, val_set = imagenet.load(args)
    train_sampler = EpochSampler(len(train_set), 1, seed=args.seed)
    val_sampler = InOrder(len(val_set), args.val_batch_size or args.batch_size)
    train_sampler.shard(rank, world_size)
    val_sampler.shard(rank, world_size)
    if not (args.exact or args.min_nodes or args.evaluate):
        # With shares, they set it; in an evaluation nothing is trained.
        train_sampler.set_global_batch(args.total_batch or args.batch_size * world_size)
    layout = LAYOUTS[args.memory_format] if args.memory_format else devices.layout(device)
    settings = {
        "backend": args.data_backend,
        "prefetch": args.prefetch,
        "layout": layout,
        "mean": args.mean,
        "std": args.std,
    }
    train_loader = imagenet.loader(
        train_set, train_sampler, device, args.workers, erasing=args.random_erasing, **settings
    )
    val_loader = imagenet.loader(val_set, val_sampler, device, args.workers, **settings)

    network = build(args, len(train_set.classes)).to(device).to(memory_format=layout)
    if norms.over_all_ranks(args):
        network = norms.synchronised(network)
    ema = Average(network, args.ema) if args.ema else None
    model: Any = network
    if world_size > 1:  # averages the gradients over all ranks
        model = torch.nn.parallel.DistributedDataParallel(
            network, gradient_as_bucket_view=True, **norms.OWN_STATISTICS
        )
    accumulates = (args.total_batch or 0) > args.batch_size * max(world_size, args.shares or 0)
    loss_fn = imagenet.loss_fn(args, train_set, device)
    devices.compile_network(args, model, accumulates, loss_fn)
    # --exact true gives the same bits on any number of ranks: each computes some shares of the total batch,
    # and all shares are added in one order. With --min_nodes alone the order is not fixed; shares are dealt
    # anew when ranks are lost or join.
    has_shares = args.exact or args.min_nodes
    shares = (
        exact.Shares(args, model, train_sampler, val_sampler, args.total_batch, args.exact)
        if has_shares
        else None
    )

    optimizer = build_optimizer(args, network)
    frozen = all_but_the_last_layer(network)

    classes = [
        *val_set.classes,
        *(f"output {number}" for number in range(len(val_set.classes), args.num_classes or 0)),
    ]
    if args.evaluate:
        return evaluate_alone(args, network, val_loader, val_set.classes, classes, autocast)

    run = Run(args, train_sampler, model, data_set=train_set, classes=classes,
              test_samples=0 if args.training_only else len(val_set), patience=args.early_stopping_patience,
              prof=args.prof, best_by=args.best_by, optimizer=optimizer, scaler=scaler)  # fmt: skip
    if ema:
        run.register(ema=ema)
    if shares:
        run.register(shares=shares)  # run.steps() yields the shares of this rank one at a time
    run.resume()  # from the newest checkpoint in the output folder, if there is one

    def add_gradients(portion, images, labels, other_labels, weight):
        """Return the loss of this rank's part of the total batch,
        in micro-batches of at most `portion` images.

        Their gradients are added within one step of the run; run.updates() is for a script whose updates take
        several steps.
        """
        count = -(-len(images) // portion)
        if shares:
            shares.passes = count
        micro_batches = list(zip(*(tensor.tensor_split(count) for tensor in (images, labels, other_labels))))
        total = torch.zeros((), device=device)

        optimizer.zero_grad()
        for position, (micro_images, targets, other_targets) in enumerate(micro_batches, 1):
            # the ranks exchange their gradients once
            model.require_backward_grad_sync = position == count and not shares
            with autocast:
                output = model(micro_images)
                loss = loss_fn(output, targets)
                if weight < 1:  # images were mixed
                    loss = weight * loss + (1 - weight) * loss_fn(output, other_targets)
            loss = loss * (len(micro_images) / len(images))
            scaler.scale(loss).backward()
            total += loss.detach()
        return total

    portion = args.batch_size
    steps = 0  # of this start
    # Of several ranks, one that has no memory cannot go back: others have sent their gradients. Half of a
    # share has other bits, and what was compiled for one portion does not add several.
    halves_portions = world_size == 1 and not (shares or args.compile or args.find_max_batch)
    peak = args.lr * (run.global_batch / args.lr_batch if args.lr_batch else 1)
    run.say(
        f"learning rate {peak:g} for a total batch of {run.global_batch}, in portions of "
        f"{args.batch_size} on each device"
    )
    if shares:
        run.say(shares.first_line)
    for epoch in run.epochs():
        model.train()

        for images, labels in run.steps(train_loader):
            for parameters in optimizer.param_groups:
                parameters["lr"] = learning_rate(args, peak, epochs=run.progress * args.epochs)

            mixed = imagenet.mix(images, labels, args.mixup, args.cutmix)
            steps += 1
            if halves_portions and steps <= portions.FIRST_STEPS:
                total, portion = portions.halved_until_it_fits(
                    lambda size, mixed=mixed: add_gradients(size, *mixed),
                    min(portion, len(images)),
                    device,
                    [*network.buffers()],
                    run.say,
                )
            else:
                total = add_gradients(portion, *mixed)
            if shares:
                total = shares.mean(total)
                if total is None:
                    continue
            if epoch < args.freeze_epochs:
                for weight in frozen:
                    weight.grad = None  # so the optimizer passes it over
            if args.clip_grad:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(network.parameters(), args.clip_grad)
            scaler.step(optimizer)
            scaler.update()

            if ema:
                ema.update(network)

            run.step(total)

        if args.training_only:
            run.end_epoch()
        else:
            scores, _ = run.together(evaluate, ema.module if ema else network, val_loader, classes, autocast)
            run.end_epoch(scores, **epoch_metrics(scores, args.best_by))


def with_implied_options(args):
    """Return the arguments with the values that follow from other options;
    contradicting options raise UserError."""
    if args.early_stopping_patience and args.training_only:
        raise UserError(
            "--early_stopping_patience needs the accuracy that --training_only true leaves out: give "
            "one of them"
        )
    if args.freeze_epochs and not args.weights:
        raise UserError(
            "--freeze_epochs trains the last layer of a network that has learnt before: give --weights "
            "FILE, too"
        )
    if args.evaluate:
        args = arguments.replaced(args, min_nodes=None)  # there are no steps
    if args.exact or args.min_nodes:
        args = exact.settled(args, same_bits=args.exact)
    elif args.shares:
        raise UserError(
            f"--shares {args.shares} is for --exact true, or for --min_nodes: give one of them, too"
        )
    if args.min_nodes and args.data_backend.startswith("dali"):
        raise UserError(
            f"--min_nodes deals the photographs anew, which --data_backend {args.data_backend} cannot: "
            "use pytorch"
        )
    return args


def options():
    parser = arguments.general_parser(__doc__, data=imagenet.DATA, workers=None)
    parser.set_defaults(epochs=90, batch_size=256, lr=0.1, weight_decay=5e-5)
    arguments.explain(
        parser, lr="learning rate behind the warm-up, for a total batch of --lr_batch; it grows with that"
    )
    parser.recipes = recipe.RECIPES
    parser.respell = spellings.respell
    imagenet.add_options(parser)
    group.add_options(parser)
    norms.add_options(parser)
    training = arguments.group(parser, "training")
    arguments.add_label_smoothing(training)
    arguments.add_compile(training)
    add_training(training.add_argument)
    add_output(arguments.group(parser, "output").add_argument)
    add_short_runs(arguments.group(parser, "short runs").add_argument)
    return parser


def add_training(add):
    add("--arch", default="resnet50", help="a classification network of torchvision, or timm/NAME")
    add(
        "--weights",
        help="weights to begin with: a file, also in a bucket, or a name, as ResNet50_Weights.DEFAULT",
    )
    freeze_epochs_help = (
        "with --weights: train the last layer alone for so many epochs, then all of the network"
    )
    add("--freeze_epochs", type=number(int, at_least=0), default=0, help=freeze_epochs_help)
    add("--num_classes", type=COUNT, help="outputs of the network; unset: the classes of the data")
    add("--val_batch_size", type=COUNT, help="photographs in a batch of the evaluation; unset: batch_size")
    total_batch_help = (
        "images a step, of all devices together; larger than batch_size x devices, the gradients are "
        "accumulated"
    )
    add("--total_batch", type=COUNT, help=f"{total_batch_help}; unset: batch_size x devices")
    add("--exact", type=boolean, default=False, help="the same bits on any number of devices (docs/exact.md)")
    add("--shares", type=COUNT, help=f"with --exact true or --min_nodes: {exact.SHARES}")
    lr_batch_help = "the total batch that --lr is meant for; 0: --lr is for the one that is used"
    add("--lr_batch", type=number(int, at_least=0), default=256, help=lr_batch_help)
    schedule_help = "learning rate after the warm-up; step: a tenth after 1/3, 2/3 and 8/9 of the run"
    add("--schedule", choices=["cosine", "linear", "step", "constant"], default="cosine", help=schedule_help)
    add(
        "--warmup",
        type=number(float, at_least=0),
        default=5,
        help="epochs of linear warm-up, half of the run at most",
    )
    add("--end_lr", type=number(float, at_least=0), default=0, help="where cosine and linear end")
    add(
        "--optimizer",
        choices=["sgd", "adamw", "rmsprop"],
        default="sgd",
        help="how the gradients change the weights",
    )
    add("--momentum", type=number(float, at_least=0, below=1), default=0.9, help="of sgd and rmsprop")
    add("--nesterov", type=boolean, default=True, help="Nesterov's momentum for sgd")
    add("--bn_weight_decay", type=boolean, default=False, help="weight decay on norms and biases, too")
    add("--mixup", type=number(float, at_least=0), default=0, help="strength; 0.2 is usual, 0 is off")
    cutmix_help = (
        "strength of CutMix; 1 is usual, 0 is off; with --mixup, one of them is drawn for each batch"
    )
    add("--cutmix", type=number(float, at_least=0), default=0, help=cutmix_help)
    add("--clip_grad", type=POSITIVE, help="the largest norm of all gradients together; unset: any")
    add(
        "--class_weights",
        choices=["none", "balanced"],
        default="none",
        help="in the loss; balanced: classes count alike",
    )
    ema_help = (
        "decay of averaged weights, e.g. 0.9999, which are evaluated and given away instead; unset: none"
    )
    add("--ema", type=number(float, above=0, below=1), help=ema_help)
    amp_dtype_help = "unset: on a GPU bfloat16, or float16 where it has no bfloat16; float32 on a CPU"
    add("--amp_dtype", choices=["bfloat16", "float16", "float32"], help=amp_dtype_help)
    loss_scale_help = (
        "of float16: the scale of the loss at first, and for good without --growth_interval; unset: 65536, "
        "which grows"
    )
    add("--static_loss_scale", type=POSITIVE, help=loss_scale_help)
    add(
        "--growth_interval",
        type=COUNT,
        help="of float16: steps without an overflow until the scale doubles; unset: 2000",
    )
    add("--memory_format", choices=list(LAYOUTS), help="of images and network; unset: the device's fastest")
    best_by_help = f"chooses the best epoch; {BALANCED} is the mean over the classes"
    add("--best_by", choices=["accuracy", BALANCED], default="accuracy", help=best_by_help)
    add(
        "--early_stopping_patience",
        type=COUNT,
        help="end after so many epochs without a better one, by --best_by",
    )
    recipes_help = "; ".join(
        f"{name} has {recipe.spelled(values)}" for name, values in recipe.RECIPES.items()
    )
    unset_help = (
        f"unset: small for a folder of at most {recipe.SMALL_SET} pictures, which the log then spells out, "
        "else imagenet"
    )
    add("--recipe", choices=recipe.NAMES, help=f"the defaults of other options: {recipes_help}; {unset_help}")


def add_output(add):
    add("--print_freq", type=COUNT, help="a line in the log for so many steps; unset: as --log_seconds says")
    add(
        "--checkpoints",
        type=boolean,
        default=True,
        help="false: save none, so that no start can go on from them",
    )


def add_short_runs(add):
    prof_help = (
        "the throughput of so many steps, after 10 that warm up: images a second and where the time went"
    )
    add("--prof", type=COUNT, help=f"{prof_help}; saves nothing and ends")
    evaluate_help = "only evaluate: --weights, the checkpoint of --resume, or the newest in the output folder"
    add(
        "--evaluate",
        type=boolean,
        default=False,
        help=f"{evaluate_help}; what is found is in evaluation.json there",
    )
    add("--training_only", type=boolean, default=False, help="no evaluation")
    add("--run_epochs", type=COUNT, help="stop after so many epochs of this start; the same command goes on")


def with_options_of_weights(args):
    """Return the arguments with options from the file beside --weights, unless they are given.

    These are --arch, --image_size and, for --evaluate or weights of another program, how its pictures are
    made. For weights with a name, all options for the pictures are set too, and the path takes the place of
    the name.
    """
    from common.weights import by_name

    if by_name.is_name(args.weights):
        return by_name.resolved(args, say if distributed.get_rank() == 0 else lambda line: None)
    path = local_weights(args.weights, args.input_dir, say)
    about = about_weights(path)
    of_another_program = "epoch" not in about  # its pictures are made as it made them, also for training
    names = OPTIONS if args.evaluate or of_another_program else ("arch", "image_size")
    file_options = {name: about[name] for name in names if name in about and name not in args.given}
    file_options = {
        name: tuple(value) if isinstance(value, list) else value for name, value in file_options.items()
    }
    if file_options and distributed.get_rank() == 0:
        shown = (
            f"--{name} {value}"
            for name, value in file_options.items()
            if name not in ("mean", "std", "crop_pct")
        )
        say(one_line(f"as {beside(path)} says: {' '.join(shown)}"))
    return arguments.replaced(args, **file_options, given={**args.given, **file_options})


def build(args, classes):
    """Return the network, with --weights if given; for weights of other classes,
    a new last layer or (--evaluate) UserError."""
    if args.num_classes and args.num_classes < classes:
        raise UserError(
            f"--num_classes {args.num_classes} are fewer than the {classes} classes of the data: leave "
            "the option out"
        )
    network = classifiers.classifier(
        args.arch, args.num_classes or classes, args.image_size, shallow=args.recipe != "small"
    )
    if args.weights:
        path = local_weights(args.weights, args.input_dir, say)
        new_layers = load_weights(network, path, new_head=not args.evaluate)
        if new_layers and distributed.get_rank() == 0:
            say(f"{args.weights} has no weights for these classes: {' and '.join(new_layers)} begin anew")
    return network


def scaling(args):
    """Return the options of the GradScaler for float16; empty to keep torch's defaults."""
    settings = {}
    growth_interval = args.growth_interval
    if args.static_loss_scale:
        settings["init_scale"] = args.static_loss_scale
        growth_interval = growth_interval or 2**31 - 1  # never
    if growth_interval:
        settings["growth_interval"] = growth_interval
    return settings


def build_optimizer(args, network):
    """Return the optimizer, without weight decay on norms and biases unless --bn_weight_decay is true."""
    weights = [parameter for parameter in network.parameters() if parameter.ndim > 1]
    norms_and_biases = [parameter for parameter in network.parameters() if parameter.ndim <= 1]
    norm_decay = args.weight_decay if args.bn_weight_decay else 0
    parameters = [
        {"params": weights, "weight_decay": args.weight_decay},
        {"params": norms_and_biases, "weight_decay": norm_decay},
    ]
    if args.optimizer == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=args.lr, alpha=0.9, eps=1e-3, momentum=args.momentum)
    fused = devices.fused(weights[0].device)
    if args.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=args.lr, **fused)
    nesterov = args.nesterov and args.momentum > 0
    return torch.optim.SGD(parameters, lr=args.lr, momentum=args.momentum, nesterov=nesterov, **fused)


def all_but_the_last_layer(network):
    """Return the weights that --freeze_epochs leaves as they are."""
    last = tuple(f"{name}." for name in classifiers.last_layers(network))
    return [weight for name, weight in network.named_parameters() if not name.startswith(last)]


def learning_rate(args, peak, epochs):
    """Return the learning rate after `epochs`, a float: a linear warm-up to `peak`,
    then as --schedule says."""
    warmup = min(args.warmup, args.epochs / 2)
    if epochs < warmup:
        return peak * epochs / warmup
    done = (epochs - warmup) / (args.epochs - warmup)
    if args.schedule == "step":
        drops = [begin for begin in (1 / 3, 2 / 3, 8 / 9) if epochs >= begin * args.epochs]
        return peak * 0.1 ** len(drops)
    factor = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1}[args.schedule]
    return args.end_lr + (peak - args.end_lr) * factor


def evaluate_alone(args, network, loader, classes, outputs, autocast):
    """Evaluate --weights, the checkpoint of --resume or the output folder's newest one;
    rank 0 writes evaluation.json.

    `outputs`: the names of all outputs of the network, of which the `classes` of the data are the first.
    """
    path = local_weights(args.weights, args.input_dir, say) if args.weights else ""
    about = about_weights(path) if args.weights else {}
    if not args.weights:
        checkpoint = barrier.from_rank_0(lambda: restore.to_evaluate(args, print))
        if not checkpoint:
            raise UserError(
                "--evaluate true has no weights: give --weights FILE, --resume PATH, or the output "
                "folder of a run"
            )
        state, about, path = checkpoint
        fit(network, evaluated_weights(state), path, new_head=False)
        for name in ("image_size", "resize"):
            trained = about["arguments"].get(name, vars(args)[name])
            if trained != vars(args)[name] and distributed.get_rank() == 0:
                say(f"warning: its run had --{name} {trained}, and this is evaluated with {vars(args)[name]}")
    if not args.input.synthetic:
        restore.refuse_other_classes(about.get("classes", ()), classes, args.weights or path)
    scores, latency = evaluate(network, loader, outputs, autocast)
    if distributed.get_rank() == 0:
        metrics = {**epoch_metrics(scores, args.best_by), **latency}
        row = {"weights": args.weights or path, "epoch": about.get("epoch"), **metrics}
        say(" ".join(f"{name}={value:.4f}" for name, value in metrics.items()) + f" of {row['weights']}")
        os.makedirs(args.output_dir, exist_ok=True)
        write_atomically(os.path.join(args.output_dir, "evaluation.json"), json.dumps(row).encode())
    group.finished()


@torch.no_grad()
def evaluate(model, loader, classes, autocast):
    """Return all ranks' scores on the validation samples,
    and quantiles of the latency of this rank's first batches in ms."""
    model.eval()
    # every rank evaluates with rank 0's running statistics, which the checkpoint has
    for buffer in model.buffers():
        distributed.broadcast(buffer, 0)
    scores = Scores(classes, loader.device, loader.pixels, loader.file_of)
    seconds = []
    for images, labels in loader:
        began = time.perf_counter()
        with autocast:
            output = model(images)
        if len(seconds) < LATENCIES:
            devices.synchronize(loader.device)
            seconds.append(time.perf_counter() - began)
        scores.add(output, labels, loader.ids, images)

    scores.all_reduce()
    quantiles = torch.tensor([0.5, 0.95, 0.99, 1.0], dtype=torch.float64)
    latency = 1000 * torch.tensor(seconds or [0.0], dtype=torch.float64).quantile(quantiles)
    return scores, dict(zip(("latency_p50", "latency_p95", "latency_p99", "latency_max"), latency.tolist()))


def epoch_metrics(scores, best_by="accuracy"):
    """Return {metric: value}, with the mean over the classes if they differ in size or --best_by asks for
    it."""
    metrics = {"accuracy": scores.accuracy}
    if len(scores.classes) > 5:
        metrics["top5"] = scores.top5
    sizes, recalls = zip(*((count, recall) for _, count, recall in scores.per_class() if count))
    if len(set(sizes)) > 1 or best_by == BALANCED:
        metrics[BALANCED] = sum(recalls) / len(recalls)
    metrics["loss"] = scores.loss
    return metrics


if __name__ == "__main__":
    run_job(main)
