"""What was asked of a job: its options, their groups and defaults, and what to do with options nobody knows.

    parser = arguments.parser(__doc__)      # a job may add options of its own here: parser.add_argument(...)
    args = arguments.parse(parser)

Consoles pass every value as a string, as `--x v` or `--x=v`, know no bare flags, and append options that no job declared.
So booleans are spelled out (`--custom_data true`), what platforms are known to append is tolerated, what looks like a
mistyped option of ours is refused with the right name, and the rest is reported once.
"""

import argparse
import contextlib
import difflib
import math
import os
import re
import sys

from common import paths
from common.errors import one_line

# Options that platforms are known to append and that no job needs: accepted without a word.
PLATFORM_OPTIONS = {
    "task_index", "num_gpus", "job_name", "ps_hosts", "worker_hosts", "cluster_spec", "model_dir", "log_dir",
    "num_workers_per_node", "local_data_root", "sagemaker_program", "sagemaker_region",
}  # fmt: skip


def boolean(text):
    """Consoles send 'true', 'True', '1'; anything else is a mistake worth a message."""
    value = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.strip().lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"{one_line(text)[:80]!r} is neither true nor false")
    return value


def number(kind, at_least=None, above=None, below=None):
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


class _Parser(argparse.ArgumentParser):
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


CIFAR = (
    "folder or bucket (s3://, obs://, oss://) with cifar-10-batches-py or cifar-10-python.tar.gz, or the archive's "
    "https:// address; unset: downloaded to input_dir"
)


def parser(doc):
    """The options that every CIFAR job shares, described by the job's docstring."""
    parser = general_parser(doc + _how_to_start(sys.argv[0]), data=CIFAR, workers=0)
    training = group(parser, "training")
    training.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd", help="sgd has Nesterov momentum 0.9")
    schedules = ["one_cycle", "constant"]
    training.add_argument(
        "--schedule",
        choices=schedules,
        default="one_cycle",
        help="learning rate; one_cycle: up to --lr in the first fifth of the run, then down to zero",
    )
    add_label_smoothing(training)
    training.add_argument("--augment", type=boolean, default=True, help="random crop and flip of the training images")
    group(parser, "short runs").add_argument(
        "--width", type=number(int, at_least=1, below=1025), default=64, help="channels of the network's first stage"
    )
    return parser


def _how_to_start(job):
    """What the blocks of a feature job say below its docstring, which is the base's: its --help has it too."""
    with contextlib.suppress(OSError, UnicodeDecodeError), open(job, encoding="utf-8") as file:
        found = re.findall(r"^### \w+: how to start it, and when ###\n((?:#.*\n)+?)### end", file.read(), re.MULTILINE)
        return "".join("\n" + re.sub(r"^# ?", "", text, flags=re.MULTILINE) for text in found)
    return ""


def add_label_smoothing(group):
    group.add_argument(
        "--label_smoothing",
        type=number(float, at_least=0, below=1),
        default=0.1,
        help="share of the target spread over all classes",
    )


def bare_parser(doc, data):
    """What a program needs that trains in its own way: its device and seed, data and output, what platforms append."""
    parser = _Parser(description=doc, formatter_class=_Help, allow_abbrev=False)
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


def general_parser(doc, data, workers):
    """The options of every job; `data` says what --data_url has to hold. A job sets its own defaults with set_defaults."""
    parser = bare_parser(doc, data)
    _training_options(group(parser, "training"))
    _loader_options(group(parser, "data"), workers)
    _restart_options(group(parser, "output"))
    _short_run_options(group(parser, "short runs"))
    return parser


def explain(parser, **texts):
    """Other help for options that mean something else in this job."""
    for action in parser._actions:
        action.help = texts.get(action.dest, action.help)


def group(parser, title):
    """The group of options whose title begins so."""
    return next(group for group in parser._action_groups if group.title.startswith(title))


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


def parse(parser, argv=None, environ=None):
    """The parsed arguments, with the data and output folders found as the platform gives them. Exits with 2 on a mistake."""
    environ = os.environ if environ is None else environ
    args, unknown = parser.parse_known_args(argv)
    _judge_unknown(parser, unknown)
    args.job = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    try:
        vars(args).update(paths.resolve(args, environ))
    except ValueError as error:
        parser.error(one_line(error))
    return args


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
