"""The first lines of a run's log: on what it trains, where it goes on, and what a user may not expect."""

import argparse
import datetime
import os
from collections.abc import Iterator, Mapping
from typing import Optional

import torch

from common import VERSION, arguments, devices
from common.checkpoints import names, run_folder
from common.checkpoints.evidence import Attempt
from common.checkpoints.parts import is_schedule
from common.checkpoints.restore import Checkpoint
from common.errors import count
from common.ranks.collectives import has_process_group
from common.run.about import RunState
from common.world import folders

# Options whose changes between two starts of one run are listed in a warning; the new value counts from then
# on.
CHANGEABLE = [
    "epochs", "lr", "schedule", "batch_size", "weight_decay", "label_smoothing", "augment", "amp_dtype",
    "total_batch", "warmup", "end_lr", "momentum", "bn_weight_decay", "mixup", "cutmix", "clip_grad",
    "class_weights", "ema", "image_size", "resize", "crop", "crop_scale", "interpolation", "augmentation",
    "random_erasing", "data_backend", "lr_batch", "freeze_epochs", "sync_bn",
]  # fmt: skip

COMPILE_ADVICE = (
    "advice: --compile true is faster on a GPU, after first steps that take a minute: on an H100, ResNet-50 "
    "in bfloat16 had 1.44 times the images a second"
)


def changes(saved_options: dict, current_options: dict) -> list[str]:
    """Return ["lr 0.1 -> 0.2", ...] for the options of CHANGEABLE that changed since the checkpoint."""
    return [
        f"{name} {saved_options[name]} -> {current_options[name]}"
        for name in CHANGEABLE
        if name in saved_options and name in current_options and saved_options[name] != current_options[name]
    ]


def _unused_file_warnings(args: argparse.Namespace, checkpoint: object) -> Iterator[str]:
    """Yield warnings: of .pt files without a manifest, and of weights without a checkpoint."""
    files = run_folder.sorted_names(args.checkpoint_dir)
    weights = run_folder.sorted_names(args.output_dir)
    for name in files:
        parsed = names.parse(name)
        if (
            parsed
            and parsed.ending == "pt"
            and (manifest := names.of_checkpoint(parsed.samples, "json", parsed.start)) not in files
        ):
            yield (
                f"warning: {name} in {args.checkpoint_dir} has no manifest ({manifest}), so it is no "
                "checkpoint"
            )
    weights = [name for name in weights if name.endswith(".pth") and names.epoch_of(name) is not None]
    if weights and not checkpoint:
        shown = ", ".join(weights[:3])
        yield (
            f"warning: {args.output_dir} has weights ({shown}) but no checkpoint: the run begins at its "
            "first step"
        )


def _course(run: RunState) -> str:
    """Return words for the log: how long the run trains, on what, and where it writes."""
    args = run.args
    sampler = run.sampler
    steps = sampler.samples_per_epoch // sampler.global_batch
    classes = f" of {count(len(run.saving.classes), 'class', 'classes')}" if run.saving.classes else ""
    source = f", from {args.data_url or args.input_dir}"
    if args.input.synthetic:
        source = ", made up"
        if args.custom_data:
            source += " (--custom_data true)"
    elif not args.data_url and args.input == arguments.Input():  # a job that creates its own data
        source = ""
    samples = f"{sampler.num_samples} training samples{classes}{source}"
    return (
        f"{count(args.epochs, 'epoch')} of {count(steps, 'step')}, {samples}; results in "
        f"{args.output_url or args.output_dir}"
    )


def _changed_data_warning(
    saved_digests: Mapping[str, str], current_digests: Mapping[str, str]
) -> Iterator[str]:
    """Yield a warning if a digest of the data set differs from that in the checkpoint."""
    if any(
        saved_digests[name] != current_digests[name] for name in saved_digests.keys() & current_digests.keys()
    ):
        yield (
            "warning: these are not the samples that the run was trained on before, though as many: it goes "
            "on with them; give --data_url with those of before to go on with them, or --resume never "
            "--overwrite true to begin anew"
        )


def _resumed_run_lines(run: RunState, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the lines of a run that goes on: from where, and what differs from the start before."""
    args = run.args
    _, manifest, path = checkpoint
    changed = changes(manifest["arguments"], vars(args))
    named_options = {text.split()[0] for text in changed}
    changed += [
        f"{name} {change}"
        for name, change in run.parts.changed.items()
        if name.split()[0] not in named_options
    ]
    if changed:
        yield f"warning: going on with other settings than before: {', '.join(changed)}"
    within = f"epoch {run.position.epoch + 1}, after {run.position.consumed} of its samples"
    place = within if run.position.epoch < args.epochs else f"all {run.position.epoch} epochs are done"
    yield f"going on from {path}: {place}, step {run.position.total_steps}"
    yield from _changed_data_warning(manifest.get("data_digests", {}), run.saving.data_digests)
    yield _course(run)
    factor = arguments.growth(args, run.sampler.global_batch)
    if not has_process_group() and factor != 1:
        yield (
            f"warning: the run's learning rate was scaled by {factor:g} for its global batch: give --lr "
            "accordingly"
        )


def of_run(run: RunState, checkpoint: Optional[Checkpoint], attempt: Optional[Attempt]) -> Iterator[str]:
    """Yield the first lines of the log. `checkpoint`: the restored one; `attempt`: of earlier starts."""
    args = run.args
    world = run.args.world
    global_batch = run.sampler.global_batch
    yield (
        f"{args.job}: anyrank {VERSION}, {devices.describe(run.device)}, rank {run.peers.rank} of "
        f"{run.peers.size}, platform {world.platform} ({world.rule}), torch {torch.__version__}, global "
        f"batch {global_batch}"
    )
    if checkpoint:
        yield from _resumed_run_lines(run, checkpoint)
    else:
        yield f"a new run: {_course(run)}"
    yield from _unused_file_warnings(args, checkpoint)
    start_number = os.environ.get("MA_SCHEDULE_CNT", "")
    if not checkpoint and start_number.isdigit() and int(start_number) > 1:
        yield (
            f"warning: this is start {start_number} of the job, and its output folder has no checkpoint: for "
            "ModelArts to bring it back, Predownload of the Output has to be Yes"
        )
    if reason := folders.why_results_would_be_lost(args, os.environ):
        yield f"warning: {reason}; declare an output there, or everything is lost with this container"
    gpus = devices.count() if devices.is_accelerator(run.device) else 0
    if run.peers.size == 1 and gpus > 1 and not run.parts.uses_all_gpus:
        yield f"warning: {gpus - 1} of {gpus} {devices.noun()}s are idle: train_ddp.py uses all of them"
    if not checkpoint and _may_be_compiled(run):
        yield COMPILE_ADVICE
    if args.input.synthetic:
        yield "warning: the images are synthetic: the accuracy means nothing"
    if not any(weight.requires_grad for weight in run.parts.network.parameters()):
        yield "warning: no weight of the network requires a gradient: nothing is trained"
    groups = [group for optimizer in run.parts.optimizers().values() for group in optimizer.param_groups]
    schedules = [*run.parts.schedules(), *filter(is_schedule, run.unsaved.ignored)]
    if any("initial_lr" in group for group in groups) and not schedules:
        yield (
            "warning: the schedule of the learning rate is not saved: give it to Run, too: "
            "scheduler=scheduler"
        )
    yield from _left_out_samples(run, is_resumed=bool(checkpoint))
    if attempt and attempt.died_twice_in:
        # (epoch, samples before it) of the step in which the last two starts died
        epoch, consumed = attempt.died_twice_in
        place = f"in epoch {epoch + 1} after {consumed} samples"
        ids = run.sampler.step_ids(epoch, consumed).tolist()
        yield f"warning: the last two starts both died in one step, {place}; its sample ids are {ids}"
    elif attempt and attempt.previous_start_died:
        yield (
            "the start before this one did not end as it should: if its log has no error: line, it was "
            "killed, mostly for want of memory: lower --workers or --batch_size"
        )
    if checkpoint:
        yield from _time_left(run)


def _may_be_compiled(run: RunState) -> bool:
    """Whether --compile true would work and is not given."""
    # DataParallel's networks cannot be compiled.
    if vars(run.args).get("compile") is not False or run.parts.uses_all_gpus:
        return False
    return devices.is_nvidia(run.device) and devices.can_compile(run.device)


def _left_out_samples(run: RunState, is_resumed: bool) -> Iterator[str]:
    """Yield a line if samples do not fill a global batch; to a new run it advises another batch."""
    samples = run.sampler.num_samples
    global_batch = run.sampler.global_batch
    if samples % global_batch:
        parts_of_a_step = max(run.peers.size, getattr(run.sampler, "shares", 1))
        advice = ""
        if not is_resumed:
            advice = _advice_on_batch(
                samples, global_batch, parts_of_a_step, vars(run.args).get("batch_size")
            )
        yield (
            f"{samples % global_batch} of {samples} samples, others each epoch, do not fill a global batch "
            f"and are left out{advice}"
        )


def _advice_on_batch(samples: int, global_batch: int, parts: int, batch_size: Optional[int]) -> str:
    """Return the end of a line: a smaller global batch, but not half as small,
    with which no sample is left out.

    `batch_size`: the option, of a process or of all; None if the job has none.
    """
    sizes = [
        size
        for size in range(global_batch, global_batch // 2, -1)
        if samples % size == 0 and size % parts == 0
    ]
    if not sizes:
        return ""
    if batch_size == global_batch:
        return f"; --batch_size {sizes[0]} leaves none"
    if batch_size == global_batch // parts:
        return f"; --batch_size {sizes[0] // parts} leaves none"
    return f"; a global batch of {sizes[0]} leaves none"


def _time_left(run: RunState) -> Iterator[str]:
    """Yield a line with the time left at the speed of earlier starts, if that is known."""
    from common.run.observers.journal import earlier_rate

    rate = earlier_rate(run.args.output_dir)
    samples = run.plan.samples_left(run.position)
    if rate and samples > 0:
        remaining = datetime.timedelta(seconds=int(samples / rate))
        yield f"about {remaining} left at the {rate:.0f} samples a second of the last start"
