"""The first lines of a run's log: where it runs, where it goes on, and what its user may not expect."""

import torch

from common import devices, restart, world


def lines(run, device, found):
    """`found`: the checkpoint that it goes on from, as restart.choose gives it, or None."""
    args, here, global_batch = run.args, world.here(run.args), run.sampler.global_batch
    yield (
        f"{args.job}: {devices.describe(device)}, rank {run.rank} of {run.world_size}, "
        f"platform {here.platform} ({here.rule}), torch {torch.__version__}, global batch {global_batch}"
    )
    if found:
        _, about, path = found
        changed = restart.changes(about["arguments"], run.arguments)
        if changed:
            yield f"warning: going on with other settings than before: {', '.join(changed)}"
        yield f"going on from {path}: epoch {run.epoch + 1}, after {run.consumed} of its samples, step {run.total_steps}"
        factor = global_batch / args.batch_size
        if not run.grouped and factor != 1:
            yield f"warning: the run's learning rate was scaled by {factor:g} for its global batch: give --lr accordingly"
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if run.world_size == 1 and gpus > 1 and not run.uses_all_gpus:
        yield f"warning: {gpus - 1} of {gpus} GPUs are idle: train_ddp.py uses all of them"
    if getattr(args, "custom_data", False):
        yield "warning: the images are synthetic: the accuracy means nothing"
    left = run.sampler.num_samples % global_batch
    if left:
        yield f"{left} of {run.sampler.num_samples} samples, others each epoch, do not fill a global batch and are left out"


def crash_loop(sampler, epoch, consumed):
    ids = sampler.step_ids(epoch, consumed).tolist()
    return (
        f"warning: the last two starts both died in one step, in epoch {epoch + 1} after {consumed} samples; "
        f"its sample ids are {ids}"
    )
