"""The folders of a job: from its arguments, else from the platform's variables,
else below the current folder.

There are four, because platforms keep them apart: the data, the output (worth keeping at the end), the
checkpoints (must survive a restart) and the TensorBoard events. If a platform names only the output,
checkpoints and events are inside it.
"""

import argparse
import fnmatch
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from typing import Optional

from common.address import INPUT_DIR, is_address, local_folder
from common.errors import UserError, file_error, one_line
from common.secrets import BUCKETS

# The variables that name each place; the first that is not empty wins. A name with * stands for its matches
# in sorted order.
DATA = [
    "data_url",
    "SM_CHANNEL_TRAINING",
    "SM_CHANNEL_TRAIN",
    "SM_CHANNEL_*",
    "PAI_INPUT_TRAIN",
    "PAI_INPUT_*",
    "AIP_TRAINING_DATA_URI",
]
OUTPUT = ["output_dir", "train_url", "SM_MODEL_DIR", "PAI_OUTPUT_MODEL", "AIP_MODEL_DIR"]
CHECKPOINTS = ["PAI_OUTPUT_CHECKPOINTS", "AIP_CHECKPOINT_DIR"]
TENSORBOARD = ["AIP_TENSORBOARD_LOG_DIR", "PAI_OUTPUT_TENSORBOARD", "AIHC_TENSORBOARD_LOG_PATH"]

# {argument: the prefixes of the addresses that it accepts besides a folder}
ADDRESSES = {"data_url": (*BUCKETS, "https://", "http://"), "output_dir": BUCKETS}

# Folders of platforms. KEPT: {variable that the platform sets: folders whose files outlive the container}.
INPUTS = "/home/ma-user/modelarts/inputs"  # on ModelArts, with a subfolder for each input
KEPT = {
    "MA_JOB_DIR": ("/home/ma-user/modelarts/outputs",),
    "SM_MODEL_DIR": ("/opt/ml/model", "/opt/ml/checkpoints", "/opt/ml/output"),
}
# an extra disk that is lost with the container; files on any other mount are kept
LOST_DISKS = {"MA_JOB_DIR": "/cache"}

# SageMaker copies these two folders to and from S3, and names them in no variable.
SAGEMAKER_CHECKPOINTS = "/opt/ml/checkpoints"
SAGEMAKER_TENSORBOARD = "/opt/ml/output/tensorboard"


def resolve(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Optional[str]]:
    """Return {data_url, input_dir, output_url, output_dir, checkpoint_dir, tensorboard_dir};
    either URL may be None."""
    output = args.output_dir or _first_value(environ, OUTPUT)
    checkpoints = tensorboard = None
    if not args.output_dir:  # with --output_dir, the checkpoints and events are in that folder too
        checkpoints = _first_value(environ, CHECKPOINTS)
        tensorboard = _first_value(environ, TENSORBOARD)
        if "SM_MODEL_DIR" in environ:
            checkpoints = checkpoints or SAGEMAKER_CHECKPOINTS
            tensorboard = tensorboard or SAGEMAKER_TENSORBOARD
    output = _checked_path("output_dir", output) or _default_output(args)
    url = output if is_address(output) else None
    if url:  # the run writes to a local folder, which is published to the bucket
        output = local_folder(url, "output_dir")
    return {
        "data_url": _checked_path("data_url", args.data_url or _first_value(environ, DATA)),
        "input_dir": _checked_path("input_dir", args.input_dir) or _default_input(environ),
        "output_url": url,
        "output_dir": output,
        "checkpoint_dir": _checked_path(
            "checkpoint folder", checkpoints or os.path.join(output, "checkpoints")
        ),
        "tensorboard_dir": _checked_path(
            "TensorBoard folder", tensorboard or os.path.join(output, "tensorboard")
        ),
    }


def _default_input(environ: Mapping[str, str]) -> str:
    """Return INPUT_DIR, on ModelArts' /cache if that is writable and larger than the disk of the working
    folder.

    The disks' total size decides, not their free space, which changes during a fetch: all ranks and restarts
    must choose alike.
    """
    disk = LOST_DISKS["MA_JOB_DIR"]
    if "MA_JOB_DIR" in environ and os.access(disk, os.W_OK) and _size(disk) > _size("."):
        return os.path.join(disk, INPUT_DIR)
    return INPUT_DIR


def _size(folder: str) -> int:
    return shutil.disk_usage(folder).total


def _default_output(args: argparse.Namespace) -> str:
    return os.path.join("output_dir", args.job)


def refuse_other_names(
    args: argparse.Namespace, options: Mapping[str, str], environ: Mapping[str, str]
) -> None:
    """Raise UserError if the platform names an input or output by an unknown name only,
    so that the job would not use it.

    `args`: has the values of resolve() and custom_data; `options`: {name: value} of options that the job does
    not declare.
    """
    values = {**{f"--{name}": value for name, value in options.items()}, **environ}
    outputs = {name: value for name, value in values.items() if _is_below(value, KEPT["MA_JOB_DIR"])}
    known_names = {*OUTPUT, *CHECKPOINTS, *TENSORBOARD}
    outputs.update(
        {
            name: value
            for name, value in environ.items()
            if name.startswith("PAI_OUTPUT_") and name not in known_names
        }
    )
    inputs = {name: value for name, value in values.items() if _is_below(value, (INPUTS,))}
    is_default = not args.output_url and args.output_dir == _default_output(args)
    if inputs and not (args.data_url or args.custom_data):
        name, value = min(inputs.items())
        raise UserError(
            f"{name} is {one_line(value)[:200]}, an input that this job does not read: call it data_url"
        )
    if outputs and is_default:
        name, value = min(outputs.items())
        expected_name = "model" if name.startswith("PAI_OUTPUT_") else "train_url"
        raise UserError(
            f"{name} is {one_line(value)[:200]}, an output that this job does not write to: call it "
            f"{expected_name}"
        )


def require_writable(folder: str) -> None:
    """Raise an error unless a file can be written in the folder or, where that is missing,
    in its nearest existing parent."""
    parent = os.path.abspath(folder)
    while not os.path.isdir(parent):
        if os.path.lexists(parent):
            raise UserError(
                f"cannot write to {one_line(folder)}: {one_line(parent)} is no folder; give another "
                "--output_dir"
            )
        parent = os.path.dirname(parent)
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise file_error(
            error, f"cannot write to {one_line(folder)}: {error.strerror}; give another --output_dir"
        ) from None


def is_platform_path(value: str) -> bool:
    """Whether a value is a path in ModelArts' inputs or outputs,
    which ModelArts passes as options of any name."""
    return _is_below(value, (INPUTS, *KEPT["MA_JOB_DIR"]))


def why_results_would_be_lost(args: argparse.Namespace, environ: Mapping[str, str]) -> Optional[str]:
    """Return why ModelArts or SageMaker would lose the results with the container; None if not,
    or on another platform.

    Folders that the platform keeps are in KEPT; a mount of the user's own is kept, too. What is on the
    container's own disks (/ and LOST_DISKS) ends with it."""
    for variable, folders in KEPT.items():
        kept = list(folders)
        if environ.get("SM_MODEL_DIR"):
            kept.append(environ["SM_MODEL_DIR"])
        if variable in environ and not args.output_url and not _is_below(args.output_dir, kept):
            mount = os.path.abspath(args.output_dir)
            while not os.path.ismount(mount):
                mount = os.path.dirname(mount)
            if mount in ("/", LOST_DISKS.get(variable)):
                return (
                    f"the platform does not keep {one_line(args.output_dir)}: it keeps what is in "
                    f"{', '.join(kept)}"
                )
    return None


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return os.path.isabs(path) and (os.path.normpath(path) + os.sep).startswith(
        tuple(f"{folder}{os.sep}" for folder in folders)
    )


def _first_value(environ: Mapping[str, str], names: Iterable[str]) -> Optional[str]:
    """Return the first value that is not empty of the variables that match these names; None without one."""
    values = (environ[match] for name in names for match in sorted(fnmatch.filter(environ, name)))
    return next(filter(None, values), None)


def _checked_path(name: str, path: Optional[str]) -> Optional[str]:
    """Return `path`; UserError if it is an address that `name` does not allow (ADDRESSES). gs:// becomes the
    mount /gcs/."""
    if path is None:
        return None
    if "\0" in path:
        raise UserError(f"{name} {one_line(path)[:80]!r} holds a zero byte: give a path without one")
    if path.startswith("gs://"):
        return "/gcs/" + path[len("gs://") :]
    allowed = ADDRESSES.get(name, ())
    if is_address(path) and not path.startswith(allowed):
        or_address = f"or an address that begins with {', '.join(allowed)}" if allowed else "no address"
        raise UserError(f"{name} is {one_line(path)[:200]}: give a folder, {or_address}")
    if path.startswith(("https://", "http://")) and re.search(r"[\s\x00-\x1f]", path):
        raise UserError(f"{name} has a space or a line end in its address: write a space as %20")
    return path


def can_be_made(folder: str) -> bool:
    """Whether this user may write to the folder, or may create it if it does not exist."""
    parent = os.path.abspath(folder)
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    return os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK)
