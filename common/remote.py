"""A run whose output folder is in a bucket: bring its newest checkpoint to this machine's disk, or delete it."""

import fnmatch
import os

from common import bucket, checkpoint, download
from common.errors import UserError

LEFT_BY_A_RUN = [
    "checkpoints/*.json", "checkpoints/*.pt", "epoch_*.pth", "metrics.jsonl", "curves.png", "report.txt",
    "tensorboard/events.out.tfevents.*", "ledger/rank_*.jsonl",
]  # fmt: skip


def bring_newest(args, say):
    """Make the checkpoint folder hold the newest valid checkpoint that the bucket has, unless it has a newer one itself."""
    place = bucket.Bucket(args.output_url, say)
    items = {place.relative(item.key): item for item in place.items(place.below() + "checkpoints/")}
    numbers = sorted(int(match[1]) for name in items if (match := checkpoint.NAME.fullmatch(os.path.basename(name))))
    here = checkpoint.numbers(args.checkpoint_dir)
    if not numbers or numbers[-1] in here:
        return
    for number in reversed(numbers):
        if number in here or _bring(place, items, number, args.checkpoint_dir, say):
            for other in [other for other in here if other > number]:  # the bucket's run is the one that goes on
                say(f"warning: {args.output_url} does not have the local checkpoint {other:012d}: it is removed")
                _remove(args.checkpoint_dir, other)
            return
    if args.resume != "never":
        afresh = "start afresh with --resume never --overwrite true"
        raise UserError(f"all {len(numbers)} checkpoints in {args.output_url} are damaged; {afresh}")


def _bring(place, items, number, folder, say):
    """Whether the checkpoint came whole."""
    names = [f"{number:012d}.pt", f"{number:012d}.json"]
    try:
        if f"checkpoints/{names[0]}" not in items:
            raise UserError(f"checkpoint {names[0]} is missing in {place.url(place.below())}")
        for name in names:  # the manifest last, here too
            download.fetch_items(place, {name: items[f"checkpoints/{name}"]}, folder)
        checkpoint.read_verified(os.path.join(folder, names[0]))
    except UserError as error:
        say(f"warning: {error}; trying the one before")
        _remove(folder, number)
        return False
    say(f"fetched checkpoint {names[0]} from {place.url(place.below())}")
    return True


def _remove(folder, number):
    for suffix in (".json", ".pt"):
        checkpoint.remove(os.path.join(folder, f"{number:012d}{suffix}"))


def delete(args, say):
    """Remove what a run of ours left in the bucket, and nothing else; the manifests first."""
    place = bucket.Bucket(args.output_url, say)
    names = [place.relative(item.key) for item in place.items(place.below())]
    for name in sorted(names, key=lambda name: not name.endswith(".json")):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in LEFT_BY_A_RUN):
            place.ask("delete_object", place.below() + name)
