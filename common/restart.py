"""Starting again in a folder that has a run in it: which checkpoint to go on from, what may differ, and what may not."""

import fcntl
import hashlib
import io
import os
import struct
import time

import torch

from common import checkpoint, group, lease, remote, world
from common.errors import UserError

# May be changed between two starts of one run; the new value counts from then on, and a warning lists it.
CHANGEABLE = [
    "epochs", "lr", "schedule", "batch_size", "weight_decay", "label_smoothing", "augment", "amp_dtype",
    "total_batch", "warmup", "end_lr", "momentum", "bn_weight_decay", "mixup", "ema", "image_size", "resize", "crop",
    "data_backend",
]  # fmt: skip

LOCK_SECONDS = 10  # the start before this one may be dying just now


def identity(args, sampler, model, parts):
    """What makes two runs different runs, in words that can stand in an error."""
    tensors = [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    digest = hashlib.sha256(repr(tensors).encode()).hexdigest()[:8]
    synthetic = getattr(args, "custom_data", False) or getattr(args, "data_backend", None) in ("synthetic", "syntetic")
    return {
        "model": f"{type(model).__name__} of {parameters:,} parameters ({digest})",
        "data set": f"{'synthetic' if synthetic else 'real'}, {sampler.num_samples} samples",
        "seed": args.seed,
        "optimizer": type(parts["optimizer"]).__name__ if "optimizer" in parts else None,
    }


def prepare(parts):
    """A scaler may skip the first step, after which torch's fused SGD goes on from memory that nobody has written."""
    if "scaler" in parts and parts["scaler"].is_enabled():
        for group in parts["optimizer"].param_groups:
            if isinstance(parts["optimizer"], torch.optim.SGD) and group["momentum"]:
                for parameter in group["params"]:
                    parts["optimizer"].state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def complete(optimizer):
    """RMSprop looks for the momentum that a run without had none of."""
    for options in optimizer.param_groups if isinstance(optimizer, torch.optim.RMSprop) else []:
        for parameter in options["params"] if options["momentum"] else []:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def choose(args, ours, say):
    """(state, about, path) to go on from, or None for a first start; refuses what cannot go on."""
    folder = args.checkpoint_dir
    here = world.here(args)
    afresh = args.resume == "never" and not here.restart_count
    in_bucket = bool(args.output_url) and remote.bring_newest(args, say, only_look=afresh)
    has_run = bool(checkpoint.numbers(folder)) or in_bucket
    if in_bucket and args.ledger and not afresh:
        remote.bring_what_grows(args, say)
    if has_run and here.restart_count:  # the same command again: whatever it asked for was done the first time
        found = checkpoint.newest(folder, say)
        if args.resume != "never" or found[1].get("job", "") == here.job_id:  # else the first time ended before it came here
            _refuse_another_run(found[1]["identity"], ours, found[2])
            return found
    if args.resume == "never":
        if has_run and not args.overwrite:
            raise UserError(
                f"{args.output_url or args.output_dir} holds a run and --resume is never: "
                "give another --output_dir, or --overwrite true to delete that run"
            )
        _delete_run(args)
        if args.output_url:
            remote.delete(args, say)
        return None
    if args.resume == "auto":
        found = checkpoint.newest(folder, say)
    else:
        found = _from_path(args, say)
        own = checkpoint.newest(folder, say) if has_run and not _inside(found[2], folder) else None
        if own and own[1]["run"] == found[1]["run"]:  # this start, or the one before, has gone on from there
            say(f"{args.output_dir} already went on from --resume {args.resume}")
            found = own
        elif own:
            raise UserError(
                f"{args.output_dir} holds another run than --resume {args.resume}: give another --output_dir, "
                "or first delete that run with --resume never --overwrite true"
            )
    if found:
        _refuse_another_run(found[1]["identity"], ours, found[2])
    return found


def from_rank_0(choose):
    """What rank 0 chose, on every rank: only its disk has the checkpoints. Its refusal reaches the others too."""

    def encoded():
        if torch.distributed.get_rank() != 0:
            return b""
        try:
            return bytes(checkpoint.encode({"found": choose(), "refused": None}))
        except UserError as error:
            return bytes(checkpoint.encode({"found": None, "refused": str(error)}))

    content = lease.on_every_rank("checkpoint", encoded)  # it may come from a bucket, and take its time
    answer = torch.load(io.BytesIO(group.broadcast(content)), map_location="cpu", weights_only=True)
    if answer["refused"]:
        raise UserError(answer["refused"])
    return answer["found"]


def to_evaluate(args, say):
    """(state, about, path) of the checkpoint of --resume PATH, else of the newest of the output folder; or None."""
    if args.resume not in ("auto", "never"):
        return _named(args, say)
    if args.output_url:
        remote.bring_newest(args, say)
    return checkpoint.newest(args.checkpoint_dir, say)


def _from_path(args, say):
    """The checkpoint that the user named, and to go on from: newer ones in its folder would be a run of their own."""
    state, about, path = _named(args, say)
    newer = (
        [n for n in checkpoint.numbers(args.checkpoint_dir) if n > about["samples_seen"]]
        if _inside(path, args.checkpoint_dir)
        else []
    )
    if newer and not args.overwrite:
        raise UserError(
            f"--resume {path} goes back behind {len(newer)} newer checkpoints in its folder: --overwrite true deletes those"
        )
    for number in newer:
        for suffix in (".json", ".pt"):
            os.unlink(os.path.join(args.checkpoint_dir, f"{number:012d}{suffix}"))
    return state, about, path


def _named(args, say):
    """The checkpoint that the user named: a file, or a folder whose newest is meant."""
    path = remote.local_checkpoint(args.resume, say)
    if os.path.isdir(path):
        inner = os.path.join(path, "checkpoints")
        found = checkpoint.newest(inner if os.path.isdir(inner) else path, say)
        if not found:
            raise UserError(
                f"--resume {path} holds no checkpoint: "
                "give a .pt file that has its .json beside it, or the output folder of a run"
            )
        return found
    if not os.path.isfile(path):
        raise UserError(f"--resume {path} does not exist: give auto, never, or the path of a checkpoint")
    return (*checkpoint.read(path), path)


def _inside(path, folder):
    return os.path.dirname(os.path.realpath(path)) == os.path.realpath(folder)


def _refuse_another_run(theirs, ours, path):
    different = [f"{what} is {ours[what]} here but {theirs.get(what)} there" for what in ours if ours[what] != theirs.get(what)]
    if different:
        raise UserError(
            f"{path} belongs to another run: {'; '.join(different)}; "
            "give another --output_dir, or --resume never --overwrite true"
        )


def changes(then, now):
    """["lr 0.1 -> 0.2", ...] for what the user gave differently this time."""
    return [
        f"{name} {then[name]} -> {now[name]}" for name in CHANGEABLE if name in then and name in now and then[name] != now[name]
    ]


def make_folders(args):
    """The output folders, or one line saying that they cannot be written to."""
    for folder in (args.output_dir, args.checkpoint_dir, args.tensorboard_dir):
        try:
            os.makedirs(folder, exist_ok=True)
            probe = os.path.join(folder, ".writable")
            checkpoint.write_atomically(probe, b"")
            os.unlink(probe)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}; give another --output_dir") from None


def _delete_run(args):
    """Remove what a run of ours left in the folders, and nothing else."""
    folders = {"": args.output_dir, "checkpoints/": args.checkpoint_dir, "tensorboard/": args.tensorboard_dir}
    folders.update({f"{name}/": os.path.join(args.output_dir, name) for name in ("examples", "ledger")})
    for place, folder in folders.items():
        for name in os.listdir(folder) if os.path.isdir(folder) else []:
            whole = name[: -len(checkpoint.TEMPORARY)] if name.endswith(checkpoint.TEMPORARY) else name
            if checkpoint.LEFT_BY_A_RUN.fullmatch(place + whole):
                os.unlink(os.path.join(folder, name))


def lock(folder):
    """Hold the run's folder for this process, so that two runs never write into one; released by any kind of death."""
    file = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(f"{folder} is in use by another job that is still running: give another --output_dir") from None
            time.sleep(0.1)
        except OSError:
            return file  # a mounted store that knows no locks


class Attempt:
    """Remembers, through any kind of death, which step was under way, and whether the death before was in the same one."""

    _FORM = struct.Struct(
        "<4q"
    )  # epoch and consumed of the step under way (-1: none), and of the step that the last start died in

    def __init__(self, folder, active):
        self.died_twice_in = self._file = None
        if not active:
            return
        self._path = os.path.join(folder, ".attempt")
        last = (-1, -1, -1, -1)
        if os.path.exists(self._path):
            with open(self._path, "rb") as file:
                content = file.read()
            if len(content) == self._FORM.size:
                last = self._FORM.unpack(content)
        died_in, before = last[:2], last[2:]
        self.died_twice_in = died_in if died_in[0] >= 0 and died_in == before else None
        self._died_in = died_in if died_in[0] >= 0 else before
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        self.set(-1, -1)

    def set(self, epoch, consumed):
        if self._file is not None:
            os.pwrite(self._file, self._FORM.pack(epoch, consumed, *self._died_in), 0)

    def done(self):
        """The run ends as it should: nothing to remember."""
        if self._file is not None:
            os.close(self._file)
            os.unlink(self._path)
