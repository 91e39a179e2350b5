"""Restore a run from its folder: which checkpoint to load, and which options may differ from those of the run."""

import argparse
import datetime
import hashlib
import os
import re
from collections.abc import Iterator
from typing import Any, Callable, Optional

import torch

from common import arguments, devices
from common.errors import UserError, count
from common.ranks.barrier import on_every_rank
from common.ranks.collectives import broadcast, has_process_group, rank_and_size
from common.run.observers import journal
from common.run.position import Position
from common.run.saving import bucket_run, checkpoint, output, parts
from common.run.saving.evidence import Attempt
from common.tensors import read as read_tensors
from common.version import VERSION
from common.world import folders

Checkpoint = tuple[dict, dict, str]  # (state, about, path)

# Options whose changes between two starts of one run are listed in a warning; the new value counts from then on.
CHANGEABLE = [
    "epochs", "lr", "schedule", "batch_size", "weight_decay", "label_smoothing", "augment", "amp_dtype",
    "total_batch", "warmup", "end_lr", "momentum", "bn_weight_decay", "mixup", "ema", "image_size", "resize", "crop",
    "crop_scale", "data_backend",
]  # fmt: skip


def identity(args: argparse.Namespace, sampler: Any, model: torch.nn.Module, parts: dict) -> dict:
    """Return what two starts must have in common to belong to one run, as values that an error can quote."""
    tensors = [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    digest = hashlib.sha256(repr(tensors).encode()).hexdigest()[:8]
    return {
        "model": f"{type(model).__name__} of {parameters:,} parameters ({digest})",
        "data set": f"{'synthetic' if args.input.synthetic else 'real'}, {sampler.num_samples} samples",
        "seed": args.seed,
        "optimizer": type(parts["optimizer"]).__name__ if "optimizer" in parts else None,
    }


def create_momentum_buffers(parts: dict) -> None:
    """Create the momentum buffers of SGD as zeros. Torch's fused SGD needs one for all weights or none, but in the first step,
    some may have no gradient; and if a scaler skips that step, the buffers would be uninitialised memory."""
    if isinstance(parts.get("optimizer"), torch.optim.SGD):
        for group in parts["optimizer"].param_groups:
            for parameter in group["params"] if group["momentum"] else []:
                parts["optimizer"].state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def into(run: Any, state: dict, about: dict, path: str, again: bool = False) -> None:
    """Restore the run from a checkpoint. `again`: once more, as the job may have changed the parts before run.steps()."""
    run.restored = None if again else (state, about, path)
    parts.restore(run, state, path, within_epoch=about["consumed"] > 0 and not again)
    run.position = Position.of(about)
    run.saving.id = about.get("run", run.saving.id)
    run.losses.load_state_dict(state["run"])
    run.results.history = state["run"]["history"]
    sizes = [(given.get("batch_size"), given.get("total_batch")) for given in (about["arguments"], vars(run.args))]
    if sizes[0] == sizes[1]:
        run.sampler.set_global_batch(about["global_batch"])


def find_checkpoint(args: argparse.Namespace, ours: dict, say: Callable) -> Optional[Checkpoint]:
    """Return the checkpoint to go on from, or None to begin anew. UserError if another run or the options forbid it."""
    folder, here = args.checkpoint_dir, args.world
    afresh = args.resume == "never" and not here.restart_count
    in_bucket = bool(args.output_url) and bucket_run.bring_newest(args, say, only_look=afresh)
    has_run = bool(checkpoint.numbers(folder)) or in_bucket
    if in_bucket and not afresh:
        bucket_run.fetch_growing_files(args, say)
    if has_run and here.restart_count:  # a restart of the same command: the first start has obeyed --resume and --overwrite
        found = checkpoint.newest(folder, say)
        # With --resume never, a checkpoint of another job means that the first start ended before it wrote one.
        if found and (args.resume != "never" or found[1].get("job", "") == here.job_id):
            refuse_another_run(found[1]["identity"], ours, f"checkpoint {found[2]}")
            return found
    if args.resume == "never":
        if has_run and not args.overwrite:
            raise UserError(
                f"{args.output_url or args.output_dir} holds a run and --resume is never: "
                "give another --output_dir, or --overwrite true to delete that run"
            )
        return None
    if args.resume == "auto":
        found = checkpoint.newest(folder, say)
    else:
        found = _from_path(args, say)
        own = checkpoint.newest(folder, say) if has_run and not _inside(found[2], folder) else None
        if own and own[1]["run"] == found[1]["run"]:  # an earlier start of this command has gone on from there
            say(f"{args.output_dir} already went on from --resume {args.resume}")
            found = own
        elif own:
            raise UserError(
                f"{args.output_dir} holds another run than --resume {args.resume}: give another --output_dir, "
                "or first delete that run with --resume never --overwrite true"
            )
    if found:
        refuse_another_run(found[1]["identity"], ours, f"checkpoint {found[2]}")
    return found


def from_rank_0(choose: Callable[[], Optional[Checkpoint]], what: str = "checkpoint") -> Optional[Checkpoint]:
    """Call choose() on rank 0, whose disk has the checkpoints; every rank returns its result or raises its UserError."""
    if rank_and_size()[1] == 1:
        return choose()

    def encoded():
        if torch.distributed.get_rank() != 0:
            return b""
        try:
            return bytes(checkpoint.encode({"found": choose(), "refused": None}))
        except UserError as error:
            return bytes(checkpoint.encode({"found": None, "refused": str(error)}))

    content = on_every_rank(what, encoded)  # no collective waits for it, as fetching may take long
    answer = read_tensors(broadcast(content), verified=True)
    if answer["refused"]:
        raise UserError(answer["refused"])
    return answer["found"]


def to_evaluate(args: argparse.Namespace, say: Callable) -> Optional[Checkpoint]:
    """Return the checkpoint of --resume PATH, else the newest in the output folder or its bucket; None if there is none."""
    if args.resume not in ("auto", "never"):
        return _named(args, say)
    if args.output_url:
        bucket_run.bring_newest(args, say)
    return checkpoint.newest(args.checkpoint_dir, say)


def settings_before(args: argparse.Namespace, say: Callable) -> dict:
    """Return, on every rank, the arguments of the run that this start continues; {} for a new run or with --doctor."""
    if args.doctor or (args.resume == "never" and not args.world.restart_count):
        return {}

    def look():
        found = to_evaluate(args, say)
        return ({}, {"arguments": found[1]["arguments"]}, found[2]) if found else None

    found = from_rank_0(look, "settings")
    return found[1]["arguments"] if found else {}


def _from_path(args, say):
    """Return the checkpoint of --resume PATH; UserError if this run's folder has it and later ones, without --overwrite."""
    state, about, path = _named(args, say)
    later = [number for number in checkpoint.numbers(args.checkpoint_dir) if number > about["samples_seen"]]
    newer = later if _inside(path, args.checkpoint_dir) else []
    if newer and not args.overwrite:
        raise UserError(
            f"--resume {path} has {len(newer)} later checkpoints in its folder: "
            "give --overwrite true to delete those, or another --output_dir"
        )
    return state, about, path


def _named(args, say):
    """Return the checkpoint of --resume PATH: a file, or the newest in a folder."""
    path = bucket_run.local_checkpoint(args.resume, args.input_dir, say)
    if os.path.isdir(path):
        inner = os.path.join(path, "checkpoints")
        found = checkpoint.newest(inner if os.path.isdir(inner) else path, say)
        if not found:
            raise UserError(
                f"--resume {path} holds no checkpoint: "
                "give a .pt file that has its .json next to it, or the output folder of a run"
            )
        return found
    if not os.path.isfile(path):
        raise UserError(f"--resume {path} does not exist: give auto, never, or the path of a checkpoint")
    return (*checkpoint.read(path), path)


def _inside(path, folder):
    return os.path.dirname(os.path.realpath(path)) == os.path.realpath(folder)


def refuse_another_run(theirs, ours, path):
    different = [f"{what} is {ours[what]} here but {theirs.get(what)} there" for what in ours if ours[what] != theirs.get(what)]
    if different:
        raise UserError(
            f"{path} belongs to another run: {'; '.join(different)}; "
            "give another --output_dir, or --resume never --overwrite true"
        )


def changes(then: dict, now: dict) -> list[str]:
    """Return ["lr 0.1 -> 0.2", ...] for the options of CHANGEABLE that changed since the checkpoint."""
    return [
        f"{name} {then[name]} -> {now[name]}" for name in CHANGEABLE if name in then and name in now and then[name] != now[name]
    ]


# --- The first lines of the log -----------------------------------------------------------------------------------------


def _not_gone_on_from(args, found):
    """Yield a warning for each .pt file without a manifest, and one if there are weights but no checkpoint was `found`."""
    files, weights = output.names(args.checkpoint_dir), output.names(args.output_dir)
    for name in files:
        manifest = name.replace(".pt", ".json")
        if re.fullmatch(r"\d{12}\.pt", name) and manifest not in files:
            yield f"warning: {name} in {args.checkpoint_dir} has no manifest ({manifest}), so it is no checkpoint"
    weights = [name for name in weights if re.fullmatch(r"epoch_\d+\.pth", name)]
    if weights and not found:
        shown = ", ".join(weights[:3])
        yield f"warning: {args.output_dir} has weights ({shown}) but no checkpoint: the run begins at its first step"


def _course(run):
    """Return words for the log: how long the run trains, on what, and where it writes."""
    args, sampler = run.args, run.sampler
    steps = sampler.samples_per_epoch // sampler.global_batch
    classes = f" of {count(len(run.saving.classes), 'class', 'classes')}" if run.saving.classes else ""
    source = f", from {args.data_url or args.input_dir}"
    if args.input.synthetic:
        source = ", made up" + (" (--custom_data true)" if args.custom_data else "")
    elif not args.data_url and args.input == arguments.Input():  # a job that creates its own data
        source = ""
    samples = f"{sampler.num_samples} training samples{classes}{source}"
    return (
        f"{count(args.epochs, 'epoch')} of {count(steps, 'step')}, {samples}; results in {args.output_url or args.output_dir}"
    )


def first_lines(run: Any, found: Optional[Checkpoint], attempt: Optional[Attempt]) -> Iterator[str]:
    """Yield the first lines of the log. `found`: the checkpoint that was restored; `attempt`: in which steps starts died."""
    args, here, global_batch = run.args, run.args.world, run.sampler.global_batch
    yield (
        f"{args.job}: anyrank {VERSION}, {devices.describe(run.device)}, rank {run.peers.rank} of {run.peers.size}, "
        f"platform {here.platform} ({here.rule}), torch {torch.__version__}, global batch {global_batch}"
    )
    if found:
        _, about, path = found
        changed = changes(about["arguments"], vars(args))
        named = {text.split()[0] for text in changed}
        changed += [f"{name} {how}" for name, how in run.changed.items() if name.split()[0] not in named]
        if changed:
            yield f"warning: going on with other settings than before: {', '.join(changed)}"
        within = f"epoch {run.epoch + 1}, after {run.position.consumed} of its samples"
        place = within if run.epoch < args.epochs else f"all {run.epoch} epochs are done"
        yield f"going on from {path}: {place}, step {run.total_steps}"
        yield _course(run)
        factor = global_batch / args.batch_size
        if not has_process_group() and factor != 1:
            yield f"warning: the run's learning rate was scaled by {factor:g} for its global batch: give --lr accordingly"
    else:
        yield f"a new run: {_course(run)}"
    yield from _not_gone_on_from(args, found)
    again = os.environ.get("MA_SCHEDULE_CNT", "")
    if not found and again.isdigit() and int(again) > 1:
        yield (
            f"warning: this is start {again} of the job, and its output folder has no checkpoint: for ModelArts to bring it "
            "back, Predownload of the Output has to be Yes"
        )
    if why := folders.not_kept(args, os.environ):
        yield f"warning: {why}; declare an output there, or everything is lost with this container"
    gpus = devices.count() if devices.is_accelerator(run.device) else 0
    if run.peers.size == 1 and gpus > 1 and not run.uses_all_gpus:
        yield f"warning: {gpus - 1} of {gpus} {devices.noun()}s are idle: train_ddp.py uses all of them"
    if args.input.synthetic:
        yield "warning: the images are synthetic: the accuracy means nothing"
    if not any(weight.requires_grad for weight in run.model.parameters()):
        yield "warning: no weight of the network requires a gradient: nothing is trained"
    groups = [group for optimizer in parts.optimizers(run).values() for group in optimizer.param_groups]
    if any("initial_lr" in group for group in groups) and not any(map(parts.is_schedule, run.parts.values())):
        yield "warning: the schedule of the learning rate is not saved: give it to Run, too: scheduler=scheduler"
    left = run.sampler.num_samples % global_batch
    if left:
        yield f"{left} of {run.sampler.num_samples} samples, others each epoch, do not fill a global batch and are left out"
    if attempt and attempt.died_twice_in:  # (epoch, samples before it) of the step in which the last two starts died
        epoch, consumed = attempt.died_twice_in
        place = f"in epoch {epoch + 1} after {consumed} samples"
        ids = run.sampler.step_ids(epoch, consumed).tolist()
        yield f"warning: the last two starts both died in one step, {place}; its sample ids are {ids}"
    elif attempt and attempt.left:
        yield (
            "the start before this one did not end as it should: if its log has no error: line, it was killed, mostly for want "
            "of memory: lower --workers or --batch_size"
        )
    if found and (rate := journal.rate_before(args.output_dir)):
        left = datetime.timedelta(seconds=int(run.plan.samples_left(run.position) / rate))
        yield f"about {left} left at the {rate:.0f} images a second of the last start"
