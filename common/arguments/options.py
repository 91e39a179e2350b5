"""The options that jobs have: their groups and defaults, and what parse() makes of a command line."""

import argparse
import contextlib
import dataclasses
import math
import operator
import os
import sys
from collections.abc import Mapping
from typing import Any, Callable, NoReturn, Optional

from common import VERSION, moments, secrets, world
from common.alive import heartbeat, patience
from common.arguments import declared, typed
from common.arguments.typed import boolean
from common.errors import UserError, one_line, report_failure
from common.world import folders

TRACKERS = ("mlflow", "wandb", "swanlab")  # of --track
LARGEST = 2**53  # whole numbers stay below it, so that a float holds each of them exactly


def number(
    kind: type,
    at_least: Optional[float] = None,
    above: Optional[float] = None,
    below: Optional[float] = None,
    at_most: Optional[float] = None,
) -> Callable[[str], Any]:
    """Return an argparse `type` for finite numbers of this kind within these bounds.

    A whole number must also be nearer to 0 than 2**53, up to which a float holds each."""
    bounds = [
        ("at least", at_least, operator.ge),
        ("above", above, operator.gt),
        ("below", below, operator.lt),
        ("at most", at_most, operator.le),
    ]
    bounds = [(word, limit, holds) for word, limit, holds in bounds if limit is not None]

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError, OverflowError):
            value = kind(text)
            is_within_bounds = all(holds(value, limit) for _, limit, holds in bounds)
            if is_within_bounds and kind is int and abs(value) >= LARGEST:
                raise argparse.ArgumentTypeError(f"{one_line(text)[:80]!r} is too long: 2**53 is not exact")
            if is_within_bounds and math.isfinite(value):
                return value
        name = {int: "a whole number", float: "a number"}[kind]
        limits = " and ".join(f"{word} {limit}" for word, limit, _ in bounds)
        raise argparse.ArgumentTypeError(f"{one_line(text)[:80]!r} is not {name} {limits}".rstrip())

    return parse


COUNT = number(int, at_least=1)
WORKERS = number(int, at_least=1, below=1025)
POSITIVE = number(float, above=0)


@dataclasses.dataclass(frozen=True)
class Input:
    """The data that a job will read, as far as its arguments tell before anything is opened."""

    address: Optional[str] = None  # of the data, if they are in a bucket or on a web server
    # when they are copied to this machine: before training, "during" it as far as there is room, or ""
    fetched: str = "before"
    synthetic: bool = False
    remedies: tuple[str, ...] = ()  # suggestions that could make the loader faster
    needs: tuple[str, ...] = ()  # features that its loader needs of the device, as in common/devices/kinds.py


class Arguments(argparse.Namespace):
    """The parsed options of a job.

    They cannot be set, so that no part of a job changes them for another; see replaced().
    """

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"args.{name} cannot be set: args stay as they were given; what you compute has a name of its own"
        )


class Parser(argparse.ArgumentParser):
    """The parser of a job's options.

    The module of the data set or loader sets `reads(args)`, which returns the Input.

    `recipes`: {value of --recipe: {option: default}}. `respell(parser, words)` translates the options of
    another program. It returns the words for this parser, and remarks on options that have no effect here.
    """

    reads: Callable[..., Input] = staticmethod(lambda args: Input())
    recipes: Mapping[str, Mapping[str, Any]] = {}
    respell: Callable[..., tuple[list[str], list[str]]] = staticmethod(lambda parser, words: (words, []))

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 after one line that says what is wrong."""
        if len(message) > 1000:
            message = f"{message[:800]}... (and {len(message) - 800:,} letters more)"
        report_failure(f"{message}; --help lists every option")
        sys.exit(2)


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Formats --help: the job's docstring as it is written, and the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> Optional[str]:
        if action.type is boolean and action.default is not None:
            return f"{action.help} (default: {str(action.default).lower()})"
        return action.help if action.default is None else super()._get_help_string(action)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "true|false" if action.type is boolean else super()._get_default_metavar_for_optional(action)


def add_label_smoothing(group: declared.Group) -> None:
    """Add --label_smoothing."""
    fraction = number(float, at_least=0, below=1)
    group.add_argument(
        "--label_smoothing", type=fraction, default=0.1, help="fraction of the target spread over all classes"
    )


def add_compile(group: declared.Group) -> None:
    """Add --compile, for jobs that call devices.compile_network()."""
    compile_help = "torch.compile the network and the loss: faster steps, after first ones that take a minute"
    group.add_argument("--compile", type=boolean, default=False, help=compile_help)


def bare_parser(doc: Optional[str], data: str) -> Parser:
    """Return a parser with the options that every job has.

    `doc`: the text of --help; `data`: the help of --data_url.
    """
    parser = Parser(description=doc, formatter_class=_Help, allow_abbrev=False)
    defaults = {
        "doctor": False,
        "find_max_batch": False,
        "evaluate": False,
        "deterministic": False,
        "nproc_per_node": None,
        "min_nodes": None,
        "compile": False,
        "checkpoints": True,
        "print_freq": None,
        "run_epochs": None,
        "largest_growth": None,
    }
    # For jobs that have no such options, need no special device, or do not describe their data for the
    # report.
    parser.set_defaults(**defaults, needs=(), data=None)
    rank = number(int, at_least=0)
    seed = number(int, at_least=0, below=2**31)

    add = parser.add_argument_group("training").add_argument
    gpu_help = (
        "true: the GPU (or NPU, XPU), an error without one; false: the CPU; unset: the GPU if there is one"
    )
    add("--enable_gpu", type=boolean, help=gpu_help)
    kinds = ("cuda", "npu", "xpu", "mps", "cpu")
    add(
        "--device",
        choices=kinds,
        help="the kind of device, an error without one; unset: --enable_gpu decides",
    )
    add(
        "--seed",
        type=seed,
        default=0,
        help="seed of the first weights, the order of the samples and the augmentation",
    )

    add = parser.add_argument_group("data").add_argument
    add(
        "--custom_data",
        type=boolean,
        default=False,
        help="train on synthetic images instead; their accuracy means nothing",
    )
    add("--data_url", help=data)
    add(
        "--input_dir",
        help=(
            "where data are fetched to, and indexes kept; unset: input_dir, on ModelArts that of /cache if "
            "larger"
        ),
    )

    add = parser.add_argument_group("output and restart").add_argument
    output_help = "folder or bucket (s3://, obs://, oss://) for the results of the job; unset: output_dir/JOB"
    add("--output_dir", "--train_url", help=output_help)
    patience_help = (
        "seconds to wait for a store or a mount that does not answer; a training without a step hangs "
        "after a fifth of it"
    )
    add("--patience", type=number(float, at_least=10), default=patience.DEFAULT, help=patience_help)

    add = parser.add_argument_group("distributed (set by the platform)").add_argument
    add("--init_method", help="tcp://HOST:PORT of the first node")
    add("--rank", type=rank, help="this node's number")
    add("--world_size", type=COUNT, help="the number of nodes")
    add("--local_rank", "--local-rank", type=rank, help="set by torch.distributed.launch")

    add = parser.add_argument_group("short runs and diagnosis").add_argument
    add("--max_samples", type=COUNT, help="use only the first N training images and the first N test images")
    ignore_help = (
        "an option that the platform adds and this job does not have; several with commas between them"
    )
    add("--ignore", action="append", default=[], metavar="NAME", help=ignore_help)
    add("--version", action="version", version=f"anyrank {VERSION}", help="print the version and end")
    return parser


def general_parser(doc: Optional[str], data: str, workers: Optional[int]) -> Parser:
    """Return a parser with the options of a training job.

    `data`: help of --data_url; `workers`: default of --workers.
    """
    parser = bare_parser(doc, data)

    add = group(parser, "training").add_argument
    add("--epochs", type=COUNT, default=30, help="passes over the training images")
    add("--batch_size", type=COUNT, default=128, help="samples per step and device")
    add("--lr", type=POSITIVE, default=0.1, help="highest learning rate of the schedule")
    add(
        "--weight_decay",
        type=number(float, at_least=0),
        default=5e-4,
        help="decay of the weights towards zero",
    )
    deterministic_help = (
        "take the algorithms of a GPU that give the same bits in every run, which are slower; a CPU's "
        "always do"
    )
    add("--deterministic", type=boolean, default=False, help=deterministic_help)

    add = group(parser, "data").add_argument
    workers_default = "; unset: this node's cores, divided among its ranks" if workers is None else ""
    workers_help = f"loader processes of each rank; 0: the rank's own process loads{workers_default}"
    add("--workers", type=number(int, at_least=0, below=257), default=workers, help=workers_help)

    add = group(parser, "output").add_argument
    resume_help = (
        "auto: go on from the newest valid checkpoint; never: start afresh; or the PATH of a checkpoint"
    )
    overwrite_help = (
        "with --resume never: delete the run that is in the output folder; with --resume PATH: its later "
        "checkpoints"
    )
    add("--resume", default="auto", help=resume_help)
    add("--overwrite", type=boolean, default=False, help=overwrite_help)
    add("--save_steps", type=COUNT, help="also save a checkpoint every N steps")
    log_help = (
        "seconds between two lines of a log, not of a terminal: 5 or more; unset: 5, later 30, after an "
        "hour 60"
    )
    add("--log_seconds", type=number(float, at_least=5), help=log_help)
    add("--save_seconds", type=POSITIVE, default=300.0, help="also save a checkpoint every N seconds")
    add("--keep", type=COUNT, default=2, help="how many checkpoints to keep: the last N, and the best")
    add("--max_hours", type=POSITIVE, help="save and exit with 0 after N hours; the same command goes on")
    track_help = (
        "send the curves to mlflow, wandb or swanlab (several with commas), whose own variables have "
        "address and key"
    )
    add("--track", type=_trackers, help=track_help)
    add(
        "--ledger",
        type=boolean,
        default=False,
        help="write the ids of the trained samples, step by step, to ledger/",
    )

    add = group(parser, "short runs").add_argument
    doctor_help = (
        "check every node for what makes runs fail, print one table, the worst first, and end before training"
    )
    profile_help = (
        "a trace of what each operation took in steps 11 to 20, for ui.perfetto.dev in the output folder, "
        "and a table of it in the log; the run goes on"
    )
    add("--max_steps", type=COUNT, help="stop after N steps of the run, then evaluate and save")
    add("--doctor", type=boolean, default=False, help=doctor_help)
    add("--doctor_seconds", type=POSITIVE, default=30.0, help="how long the doctor waits for the other nodes")
    add("--profile", type=boolean, default=False, help=profile_help)
    max_batch_help = (
        "only find the largest --batch_size that a GPU has memory for, by steps of this job with more and "
        "more samples"
    )
    add("--find_max_batch", type=boolean, default=False, help=max_batch_help)
    return parser


def _trackers(text: str) -> str:
    names = dict.fromkeys(text.split(","))
    if unknown := [name for name in names if name not in TRACKERS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(TRACKERS)}")
    return ",".join(names)


def growth(args: argparse.Namespace, global_batch: int) -> float:
    """Return the factor by which --lr grows with the batch, from --batch_size to `global_batch`;
    a recipe may limit it."""
    factor = global_batch / args.batch_size
    return min(factor, args.largest_growth) if args.largest_growth else factor


def explain(parser: Parser, **texts: str) -> None:
    """Replace the help of options whose meaning differs in this job: option=text."""
    for action in declared.actions(parser):
        action.help = texts.get(action.dest, action.help)


def add_aliases(parser: Parser, names: Mapping[str, str]) -> None:
    """Accept other names for options: {other name: option}, both without dashes."""
    for name, option in names.items():
        action = declared.option(parser, f"--{option}")
        assert action is not None, option
        declared.add_name(parser, action, f"--{name}")


def group(parser: Parser, title: str) -> declared.Group:
    """Return the group of options whose title begins with `title`."""
    return next(group for group in declared.groups(parser) if (group.title or "").startswith(title))


def parse(
    parser: Parser, argv: Optional[list[str]] = None, environ: Mapping[str, str] = os.environ
) -> Arguments:
    """Parse the options; find the folders and this process's place.

    A wrong option exits with code 2, or raises UserError.
    """
    words, remarks = parser.respell(parser, sys.argv[1:] if argv is None else argv)
    words = typed.normalize(parser, words)
    defaults = {action.dest: parser.get_default(action.dest) for action in declared.actions(parser)}
    recipes = [word.partition("=")[2] for word in words if word.startswith("--recipe=")]
    if recipes:
        parser.set_defaults(**parser.recipes.get(recipes[-1], {}))
    args, unknown = parser.parse_known_args(words)
    actions = (declared.option(parser, word.partition("=")[0]) for word in words)
    given_names = {action.dest for action in actions if action}
    args.given = {name: value for name, value in vars(args).items() if name in given_names}
    args.changed = {
        name: defaults[name]
        for name, value in vars(args).items()
        if name in defaults and value != defaults[name]
    }
    extra_options = typed.unknown_options(parser, unknown, args.ignore)
    patience.use(args.patience)
    args.job = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    try:
        _resolve_device(args)
        vars(args).update(folders.resolve(args, environ))
        folders.refuse_other_names(args, extra_options, environ)
    except UserError as error:
        parser.error(one_line(error))
    typed.refuse_unknown(
        parser, [name for name, value in extra_options.items() if not folders.is_platform_path(value)]
    )
    moments.announce("arguments", args)
    args.world = world.find_place(args, environ)
    if args.world.rank == 0 and not heartbeat.has_parent():
        for remark in remarks:
            print(remark, flush=True)
        if not args.doctor:  # the doctor reports it in its table
            folders.require_writable(args.output_dir)
    args.input = parser.reads(args)
    moments.announce("world", args)
    return Arguments(**vars(args))


def replaced(args: argparse.Namespace, **values: Any) -> Arguments:
    """Return a copy of the arguments with these values replaced or added.

    They do not enter args.given, the typed options.
    """
    return Arguments(**{**vars(args), **values})


def _resolve_device(args: argparse.Namespace) -> None:
    """Set --enable_gpu according to --device, if that is given;
    raise UserError if the two contradict each other."""
    if args.device and args.enable_gpu in (None, args.device != "cpu"):
        args.enable_gpu = args.device != "cpu"
    elif args.device:
        raise UserError(
            f"--enable_gpu {str(args.enable_gpu).lower()} and --device {args.device}: give one of them"
        )


def plain_values(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of vars(args) or args.given that are a string, number, boolean, None or tuple,
    with secrets masked."""
    values: dict[str, Any] = {}
    for name, value in args.items():
        if isinstance(value, str):
            values[name] = secrets.HIDDEN if secrets.is_secret(name) else secrets.mask(value)
        elif value is None or isinstance(value, (int, float, tuple)):  # a bool is an int
            values[name] = value
    return values
