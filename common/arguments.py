"""What was asked of a job: its options, their groups and defaults, and what to do with options nobody knows.

    parser = arguments.general_parser(__doc__, ...)      # a job may add options of its own here: parser.add_argument(...)
    args = arguments.parse(parser)                       # args.world: where this process is; args.input: what it will read

Consoles pass every value as a string, as `--x v` or `--x=v`, know no bare flags, and append options that no job declared.
So booleans are spelled out (`--custom_data true`), what platforms are known to append is tolerated, what looks like a
mistyped option of ours is refused with the right name, and the rest is reported once.
"""

import argparse
import dataclasses
import difflib
import math
import os
import sys
from collections.abc import Mapping
from typing import Any, Callable, Optional

from common import moments, world
from common.errors import UserError, one_line
from common.world import folders

# Options that platforms are known to append and that no job needs: accepted without a word.
PLATFORM_OPTIONS = {
    "task_index", "num_gpus", "job_name", "ps_hosts", "worker_hosts", "cluster_spec", "model_dir", "log_dir",
    "num_workers_per_node", "local_data_root", "sagemaker_program", "sagemaker_region",
}  # fmt: skip


def boolean(text: str) -> bool:
    """Consoles send 'true', 'True', '1'; anything else is a mistake worth a message."""
    value = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.strip().lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"{one_line(text)[:80]!r} is neither true nor false")
    return value


def number(
    kind: type, at_least: Optional[float] = None, above: Optional[float] = None, below: Optional[float] = None
) -> Callable:
    """A type for argparse: a finite `kind` (int or float) inside the stated bounds."""

    def parse(text):
        try:
            value = kind(text)
        except (ValueError, OverflowError):
            value = None
        inside = (
            value is not None
            and math.isfinite(value)
            and (at_least is None or value >= at_least)
            and (above is None or value > above)
            and (below is None or value < below)
        )
        if not inside:
            name = {int: "a whole number", float: "a number"}[kind]
            bounds = [(at_least, "at least"), (above, "above"), (below, "below")]
            wanted = " and ".join(f"{word} {bound}" for bound, word in bounds if bound is not None)
            raise argparse.ArgumentTypeError(f"{one_line(text)[:80]!r} is not {name} {wanted}".rstrip())
        return value

    return parse


@dataclasses.dataclass(frozen=True)
class Input:
    """What a job will read, as far as its arguments tell: for those who look before anything is opened."""

    address: Optional[str] = None  # of data that do not lie in a folder
    fetched: bool = True  # whether they are copied to this machine before the training
    synthetic: bool = False
    shared_bytes: int = 0  # of a batch of one rank, where loader processes hand it over in shared memory
    samples: int = 0  # in that batch
    remedies: tuple = ()  # in words, what could make the loader faster


class Parser(argparse.ArgumentParser):
    """`reads(args)` says what the job will read: it belongs to the data set, and a loader that works otherwise replaces it."""

    reads: Callable = staticmethod(lambda args: Input())

    def error(self, message):
        self.exit(2, f"error: {message}; --help lists every option\n")


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The job's own docstring, and a default behind every option that has one."""

    def _get_help_string(self, action):
        if action.type is boolean and action.default is not None:
            return f"{action.help} (default: {str(action.default).lower()})"
        return action.help if action.default is None else super()._get_help_string(action)

    def _get_default_metavar_for_optional(self, action):
        return "true|false" if action.type is boolean else super()._get_default_metavar_for_optional(action)


def add_label_smoothing(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--label_smoothing",
        type=number(float, at_least=0, below=1),
        default=0.1,
        help="share of the target spread over all classes",
    )


def bare_parser(doc: Optional[str], data: str) -> Parser:
    """What a program needs that trains in its own way: its device and seed, data and output, what platforms append."""
    parser = Parser(description=doc, formatter_class=_Help, allow_abbrev=False)
    parser.set_defaults(doctor=False, evaluate=False, nproc_per_node=None, trial=False)  # what only some jobs have options for
    _device_options(parser.add_argument_group("training"))
    _data_options(parser.add_argument_group("data"), data)
    parser.add_argument_group("output and restart").add_argument(
        "--output_dir",
        "--train_url",
        help="folder or bucket (s3://, obs://, oss://) for what the job leaves; unset: output_dir/JOB",
    )
    _distributed_options(parser.add_argument_group("distributed (the platform sets these; you need not)"))
    parser.add_argument_group("short runs, and looking before or while it runs").add_argument(
        "--max_samples", type=number(int, at_least=1), help="use only so many of the training and of the test images"
    )
    return parser


def general_parser(doc: Optional[str], data: str, workers: Optional[int]) -> Parser:
    """The options of every job; `data` says what --data_url has to hold. A job sets its own defaults with set_defaults."""
    parser = bare_parser(doc, data)
    _training_options(group(parser, "training"))
    _loader_options(group(parser, "data"), workers)
    _restart_options(group(parser, "output"))
    _short_run_options(group(parser, "short runs"))
    return parser


def explain(parser: Parser, **texts: str) -> None:
    """Other help for options that mean something else in this job."""
    for action in parser._actions:
        action.help = texts.get(action.dest, action.help)


def group(parser: Parser, title: str) -> argparse._ArgumentGroup:
    """The group of options whose title begins so."""
    return next(group for group in parser._action_groups if (group.title or "").startswith(title))


def _device_options(group):
    group.add_argument("--enable_gpu", type=boolean, help="true: GPU or stop; false: CPU; unset: the GPU if there is one")
    group.add_argument(
        "--seed", type=number(int, at_least=0, below=2**31), default=0, help="of weights, order and augmentation"
    )


def _training_options(group):
    group.add_argument("--epochs", type=number(int, at_least=1), default=30, help="passes over the training images")
    group.add_argument("--batch_size", type=number(int, at_least=1), default=128, help="samples a step, per device")
    group.add_argument("--lr", type=number(float, above=0), default=0.1, help="learning rate, at its highest")
    group.add_argument("--weight_decay", type=number(float, at_least=0), default=5e-4, help="pull of the weights towards zero")


def _data_options(group, data):
    group.add_argument(
        "--custom_data",
        type=boolean,
        default=False,
        help="train on synthetic images instead; what it reaches means nothing",
    )
    group.add_argument("--data_url", help=data)


def _loader_options(group, workers):
    group.add_argument(
        "--workers",
        type=number(int, at_least=0, below=257),
        default=workers,
        help="loader processes of each rank; 0 loads in the rank's own"
        + ("; unset: this node's cores, shared by its ranks" if workers is None else ""),
    )


def _restart_options(group):
    group.add_argument(
        "--resume",
        default="auto",
        help="auto: go on from the newest valid checkpoint; never: start afresh; or the PATH of one",
    )
    group.add_argument(
        "--overwrite",
        type=boolean,
        default=False,
        help="with --resume never: delete the run that is in the output folder; with --resume PATH: its later checkpoints",
    )
    group.add_argument("--save_steps", type=number(int, at_least=1), help="also save a checkpoint every so many steps")
    group.add_argument(
        "--save_seconds",
        type=number(float, above=0),
        default=300.0,
        help="also save a checkpoint every so many seconds",
    )
    group.add_argument(
        "--keep", type=number(int, at_least=1), default=2, help="checkpoints kept: so many of the last, and the best"
    )
    group.add_argument(
        "--max_hours", type=number(float, above=0), help="save and exit 0 after so long; the same command goes on"
    )
    group.add_argument(
        "--ledger", type=boolean, default=False, help="write the ids of the trained samples, step by step, to ledger/"
    )


def _distributed_options(group):
    group.add_argument("--init_method", help="tcp://HOST:PORT of the first node")
    group.add_argument("--rank", type=number(int, at_least=0), help="this node's number")
    group.add_argument("--world_size", type=number(int, at_least=1), help="the number of nodes")
    group.add_argument("--local_rank", "--local-rank", type=number(int, at_least=0), help="set by torch.distributed.launch")


def _short_run_options(group):
    group.add_argument(
        "--max_steps", type=number(int, at_least=1), help="stop after so many steps of the run, then evaluate and save"
    )
    group.add_argument(
        "--profile", type=boolean, default=False, help="true: what took the time in steps 11 to 20, as a table and as a trace "
        "for ui.perfetto.dev in the output folder",
    )  # fmt: skip
    group.add_argument(
        "--doctor",
        type=boolean,
        default=False,
        help="look for what ruins runs, on every node, print one table of it, the worst first, and end before training",
    )
    group.add_argument(
        "--doctor_seconds", type=number(float, above=0), default=30.0, help="how long the doctor waits for the other nodes"
    )


def parse(parser: Parser, argv: Optional[list] = None, environ: Mapping = os.environ) -> argparse.Namespace:
    """The arguments, with the folders and the place of this process as the platform gives them. Exits with 2 on a mistake."""
    args, unknown = parser.parse_known_args(argv)
    _judge_unknown(parser, unknown)
    args.job = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    try:
        vars(args).update(folders.resolve(args, environ))
    except UserError as error:
        parser.error(one_line(error))
    moments.announce("arguments", args)
    args.world = world.here(args, environ)
    args.input = parser.reads(args)
    moments.announce("world", args)
    return args


def plain(args: argparse.Namespace) -> dict[str, Any]:
    """What was given or defaulted, as it can be written down."""
    return {name: value for name, value in vars(args).items() if isinstance(value, (str, int, float, bool, type(None)))}


def _judge_unknown(parser, unknown):
    known = [option.lstrip("-") for action in parser._actions for option in action.option_strings]
    strange = []
    for word in unknown:
        name = word.split("=")[0]
        if not name.startswith("--") or name.lstrip("-") in PLATFORM_OPTIONS:
            continue
        begins = [option for option in known if len(name) > 4 and option.startswith(name.lstrip("-").replace("-", "_"))]
        nearest = begins or difflib.get_close_matches(name.lstrip("-").replace("-", "_")[:64], known, n=1, cutoff=0.75)
        if nearest:
            parser.error(f"unknown option {one_line(name)[:80]}: did you mean --{nearest[0]}?")
        strange.append(one_line(name)[:80])
    if strange:
        print(
            f"warning: options this job does not know, left alone: {' '.join(strange)[:500]}",
            file=sys.stderr,
            flush=True,
        )
