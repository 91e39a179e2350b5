"""Many small photographs as a few large files: uncompressed tar shards in WebDataset's naming, and an index.

    python -m launch pack ROOT OUT                   ROOT/{train,val}/CLASS/*.JPEG as OUT/train-000000.tar ...
                                                     and train-index.npz; of ROOT/CLASS/*.JPEG a fifth as val,
                                                     the one that a job holds out
    python -m launch pack ROOT s3://bucket/imagenet  the same in output_dir/s3/bucket/imagenet, then in the
                                                     bucket
    python -m launch pack ROOT OUT --form 256        smaller JPEGs in place of the files; also 320, and raw
                                                     for pixels
    python -m launch pack FOLDER OUT                 of .parquet with columns image and label, as Hugging Face
                                                     keeps pictures
    python -m launch pack --index FOLDER             tar shards of WebDataset as they are: writes the indexes
                                                     beside them, and nothing else; also s3://bucket/shards
    python -m launch pack --verify OUT               compare every shard with its digest, every sample with
                                                     its checksum
    python -m launch pack ROOT --verify OUT          and every picture with its original, where --form keeps
                                                     all of it

The same command goes on where the last one stopped: shards that are whole are kept. The same photographs and
settings give the same bytes. `--data_backend packed --data_url OUT` trains on them, and so does any reader of
WebDataset.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from typing import Optional

import numpy as np

from common import storage
from common.address import is_address, local_folder
from common.arguments import boolean, number
from common.errors import TrainingFailed, UserError, one_line, require_folder
from common.files import MIB, TEMPORARY, read_json_dict, remove, write_atomically
from common.progress import Progress, say
from common.storage import bucket, once, upload
from common.storage.listing import SPARE
from datasets.packs import packed
from datasets.photos import files, manifest, splits, tiles, tree
from launch.options import new_parser, run_for_exit_code
from launch.pack import index, parquet
from launch.pack.forms import FORMS
from launch.pack.shards import ShardPlan, make
from launch.pack.threads import Done, in_threads

WORKERS = 8  # threads: the slow parts, disk and decoder, release the GIL
UPLOADS = 4
OURS = re.compile(r"\.?(?:train|val)-(?:\d{6}\.(?:tar|json)|index\.npz|pack\.json)", re.ASCII)


# --- Packing ------------------------------------------------------------------------------------------------


def pack(root: str, folder: str, options: argparse.Namespace) -> list[str]:
    """Make the missing shards and the indexes of the pack in `folder`, print a summary,
    and return the names of all shards."""
    if not files.manifest_of(root):
        _require_photographs(root)
    _require_elsewhere(root, folder, below=not files.manifest_of(root))
    os.makedirs(folder, exist_ok=True)
    with once.locked(os.path.join(folder, ".pack"), _busy_message(folder)):
        notes = os.path.join(folder, ".tree")
        trees = _photographs(root, notes, options)
        plans = [ShardPlan(part, split, folder, options) for part, split in zip(trees, splits.SPLITS)]
        identities = {plan.split: plan.identity for plan in plans}
        _clear(folder, identities, options.overwrite)
        missing = [(plan, shard) for plan in plans for shard in plan.missing()]
        _require_space(folder, sum(shard.size for _, shard in missing))
        _mark(folder, identities)
        for plan, _ in missing:
            remove(packed.index_path(folder, plan.split))  # it describes shards that are about to be replaced
        lengths = [plan.lengths[shard.numbers] for plan, shard in missing]
        progress = Progress("packing", sum(map(len, lengths)), "images", int(sum(map(np.sum, lengths))))
        in_threads(options.workers, lambda pair, done: make(pair[0], pair[1], done), missing, progress)
        for plan in plans:
            plan.write_index()
        shutil.rmtree(notes)
    print(_describe(plans, len(missing), progress), flush=True)
    return [shard.name for plan in plans for shard in plan.shards]


def pack_parquet(paths: list[str], folder: str, options: argparse.Namespace) -> list[str]:
    """Make the missing shards and the indexes of a pack of parquet files; return the names of all shards."""
    if options.form != "original":
        raise UserError(f"--form {options.form} is for pictures in folders: leave it out")
    _require_elsewhere(options.root, folder, below=False)
    os.makedirs(folder, exist_ok=True)
    with once.locked(os.path.join(folder, ".pack"), _busy_message(folder)):
        planned, classes, identity = parquet.plan(paths, options.shard_mb, options.classes)
        _clear(folder, dict.fromkeys(splits.SPLITS, identity), options.overwrite)
        missing = [rows for rows in planned if not os.path.exists(os.path.join(folder, rows.name))]
        _require_space(folder, sum(rows.size for rows in missing))
        _mark(folder, dict.fromkeys(splits.SPLITS, identity))
        progress = Progress("packing", len(missing), "shards", sum(rows.size for rows in missing))
        in_threads(options.workers, lambda rows, done: parquet.write(rows, folder, done), missing, progress)
        names: dict[str, list[str]] = {}
        for rows in planned:
            names.setdefault(rows.split, []).append(rows.name)
        index_options = argparse.Namespace(**vars(options))
        index_options.overwrite = (
            True  # _clear() has refused another pack's: what is there is this pack's own
        )
        index.index(folder, index_options, names, classes)
    return [rows.name for rows in planned]


def _busy_message(folder: str) -> str:
    return f"another pack is being made in {one_line(folder)}: wait for it, or give another folder"


def _require_photographs(root: str) -> None:
    """Raise UserError, before a folder is made, unless ROOT holds photographs."""
    require_folder("ROOT", root, "give the folder of the photographs")
    if splits.is_unsplit(root):
        return
    for split in splits.SPLITS:
        if not os.path.isdir(os.path.join(root, split)):
            raise UserError(
                f"{one_line(root)} has no folder {split}: give one with train/CLASS/*.JPEG and "
                "val/CLASS/*.JPEG in it, or with CLASS/*.JPEG"
            )


def _require_elsewhere(root: str, folder: str, below: bool = True) -> None:
    """Raise UserError if OUT (`folder`) is ROOT (`root`) or, with `below`, in it."""
    out = os.path.realpath(folder)
    source = os.path.realpath(root)
    if out == source:
        raise UserError(
            f"OUT {one_line(folder)} is the folder whose files are to be packed: give a folder elsewhere"
        )
    if below and out.startswith(source + os.sep):
        raise UserError(
            f"OUT {one_line(folder)} is in the folder whose files are to be packed: give a folder elsewhere"
        )


def _photographs(root: str, index_folder: str, options: argparse.Namespace) -> Sequence[tree.Tree]:
    """Return the photographs for training and validation. `index_folder`: the folder for their index."""
    if labels := files.manifest_of(root):
        photographs, is_undivided = manifest.load(labels, index_folder=index_folder)
    else:
        is_undivided = splits.is_unsplit(root)
        folders = [root] if is_undivided else [os.path.join(root, split) for split in splits.SPLITS]
        photographs = [tree.load(part, index_folder) for part in folders]
    photographs = [part.without_larger(options.max_megapixels) for part in photographs]
    return splits.hold_out(photographs[0], options.seed) if is_undivided else photographs


def _describe(plans: list[ShardPlan], count: int, progress: Progress) -> str:
    """Return the summary that pack() prints; `count`: how many shards this start has made."""
    notes = [shard.note for plan in plans for shard in plan.shards]
    reasons: Counter[str] = Counter()
    for plan in plans:
        reasons.update({reason: len(names) for reason, names in plan.files.left_out.items()})
    images = sum(len(plan.files) for plan in plans)
    size = sum(sum(note["length"]) for note in notes) / MIB
    left_out = ", ".join(f"{reason}: {number}" for reason, number in sorted(reasons.items())) or "nothing"
    lost = sum(note["stored_heights"].count(0) for note in notes)
    text = (
        f"{plans[0].folder} has {images} images, {size:.1f} MiB, in {len(notes)} shards; "
        f"made {count} of them now ({progress.describe()}); left out: {left_out}"
    )
    if lost:
        text += f"; packed, though they cannot be decoded: {lost}"
    return text


def _marker(folder: str, split: str) -> str:
    return os.path.join(folder, f".{split}-pack.json")


def _mark(folder: str, identities: dict[str, str]) -> None:
    for split, identity in identities.items():
        write_atomically(_marker(folder, split), json.dumps({"identity": identity}).encode())


def _clear(folder: str, identities: dict[str, str], overwrite: bool) -> None:
    """Delete unfinished files.

    Delete a pack of other photographs or settings if `overwrite`, else raise UserError for it.
    """
    for name in os.listdir(folder):  # an unfinished file is of no use, whichever pack it is of
        if name.endswith(TEMPORARY) and OURS.fullmatch(name.removesuffix(TEMPORARY)):
            os.unlink(os.path.join(folder, name))
    names = [name for name in os.listdir(folder) if OURS.fullmatch(name)]
    for split, identity in identities.items():
        existing = [name for name in names if name.lstrip(".").startswith(f"{split}-")]
        if existing and _identity(folder, split) != identity:
            if not overwrite:
                raise UserError(
                    f"{one_line(folder)} has a pack of other photographs or settings ({len(existing)} files "
                    f"of {split}): give another folder, or --overwrite true"
                )
            for name in sorted(existing, reverse=True):  # the index before its shards
                os.unlink(os.path.join(folder, name))


def _identity(folder: str, split: str) -> Optional[str]:
    """Return the digest of a pack's photographs and settings from .SPLIT-pack.json, else from its index,
    else None."""
    if noted := read_json_dict(_marker(folder, split)).get("identity"):
        return noted
    with contextlib.suppress(UserError):
        return packed.read_index(packed.index_path(folder, split), folder, split).identity
    return None


def _require_space(folder: str, size: int) -> None:
    """Raise UserError if the disk of the folder has less than `size` and SPARE bytes free."""
    free = shutil.disk_usage(folder).free
    if size + SPARE > free:
        raise UserError(
            f"{one_line(folder)} has {free / MIB:.0f} MiB free, the pack needs {(size + SPARE) / MIB:.0f} "
            "MiB: give a folder on a larger disk"
        )


def publish(folder: str, shards: list[str], url: str, overwrite: bool) -> None:
    """Upload the files that the bucket lacks, indexes last; UserError if another pack is there,
    unless `overwrite`."""
    store = bucket.Bucket(url)
    published = {store.relative(item.key): item for item in store.items(store.key_prefix())}
    indexes = [os.path.basename(packed.index_path("", split)) for split in splits.SPLITS]
    missing = [
        name
        for name in [*shards, *indexes]
        if not upload.is_up_to_date(published.get(name), os.path.join(folder, name))
    ]
    for name in [name for name in indexes if name in missing and name in published]:
        if not overwrite:
            raise UserError(f"{one_line(url)} has another pack: give another address, or --overwrite true")
        store.ask("delete_object", store.key_prefix() + name)
    sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in missing}
    progress = Progress(f"publishing to {url}", len(missing), "files", sum(sizes.values()))

    def send(name: str, done: Done) -> None:
        storage.publish(os.path.join(folder, name), f"{store.url(store.key_prefix())}{name}")
        done(sizes[name])

    in_threads(UPLOADS, send, [name for name in missing if name not in indexes], progress)
    for name in sizes.keys() & indexes:
        send(name, lambda size: progress.add(1, size))
    print(
        (
            f"published {len(missing)} files to {one_line(url)}, {progress.describe()}; {len(shards) + 2} "
            "are there"
        ),
        flush=True,
    )


def verify(folder: str, root: Optional[str], workers: int) -> None:
    """Compare shards and samples with their checksums and, if `root` is given, the originals;
    TrainingFailed if any differs."""
    if is_address(folder):
        raise UserError(
            f"--verify {one_line(folder)}: give a folder; a job that fetches a pack verifies each shard"
        )
    parts = [packed.load(folder, split) for split in splits.SPLITS]
    form = parts[0].form
    if root and form not in ("original", "tiled"):
        raise UserError(
            f"{one_line(folder)} has pictures in the form {form}, not the originals of {one_line(root)}"
        )
    if form == "tiled" and root:
        tiles.require_jpegtran()
    if root and not any(
        os.path.exists(_original(part, 0, split, root)) for part, split in zip(parts, splits.SPLITS)
    ):
        raise UserError(
            f"{one_line(folder)} was not packed from {one_line(root)}, which has other names: leave it out"
        )
    pairs = [
        (samples, split, number)
        for samples, split in zip(parts, splits.SPLITS)
        for number in range(len(samples.shards))
    ]
    size = sum(samples.shards[number]["size"] for samples, _, number in pairs)
    progress = Progress("verifying", len(pairs), "shards", size)
    damaged: list[str] = []
    changed: list[str] = []

    def check_shard(item: tuple[packed.Packed, str, int], done: Done) -> None:
        samples, split, number = item
        damage = samples.find_damage(number)
        done(samples.shards[number]["size"])
        if damage:
            damaged.append(damage)
            say(f"damaged: {damage}")
        elif root:
            different = [
                one_line(samples.path(sample))
                for sample in np.flatnonzero(samples.shard == number).tolist()
                if not _is_original(samples, sample, _original(samples, sample, split, root))
            ]
            changed.extend(different)
            for name in different:
                say(f"another picture than in {one_line(root)}: {name}")

    in_threads(workers, check_shard, pairs, progress)
    if damaged:
        raise TrainingFailed(
            f"{len(damaged)} of {len(pairs)} shards are damaged: delete them, then fetch them again or have "
            f"python -m launch pack ROOT {one_line(folder)} make them again"
        )
    images = sum(map(len, parts))
    if changed:
        names = ", ".join(
            sorted({os.path.basename(name.partition(".tar:")[0]) + ".tar" for name in changed})[:5]
        )
        raise TrainingFailed(
            f"{len(changed)} of {images} pictures are not those of {one_line(root or '')}: delete the shards "
            f"that have them, {names} and so on, and pack it again"
        )
    suffix = f", and are the pictures of {one_line(root)}" if root else ""
    print(
        f"{one_line(folder)}: {images} images in {len(pairs)} shards are as they were packed{suffix} "
        f"({progress.describe()})"
    )


def _original(samples: packed.Packed, number: int, split: str, root: str) -> str:
    below = os.path.join(root, split)
    return os.path.join(below if os.path.isdir(below) else root, samples.names[number])


def _is_original(samples: packed.Packed, number: int, path: str) -> bool:
    """Return whether a sample has the bytes of its original or, if it is in tiles,
    the original's coefficients."""
    stored = samples.read(number)
    try:
        with open(path, "rb") as file:
            content = file.read()
        return stored == content or (tiles.is_tiled(stored) and tiles.same_coefficients(stored, content))
    except (OSError, tiles.NotTiled):
        return False


def run(options: argparse.Namespace) -> None:
    """Make a pack and publish it if OUT is a bucket, or do what --index or --verify asks for."""
    if options.index:
        return index.index(options.index, options)
    if options.verify:
        labels = files.manifest_of(options.root or "")
        root = manifest.load(labels)[0][0].folder if labels else options.root
        return verify(options.verify, root, options.workers)
    if options.form == "tiled":
        tiles.require_jpegtran()
    url = options.out if is_address(options.out) else None
    if url:
        bucket.Bucket(url)  # a wrong address is an error before hours of work
    folder = local_folder(url, "output_dir") if url else options.out
    paths = parquet.files_of(options.root)
    shards = pack_parquet(paths, folder, options) if paths else pack(options.root, folder, options)
    if url:
        publish(folder, shards, url, options.overwrite)


def main(argv: list[str]) -> int:
    parser = new_parser("pack", __doc__)
    forms = "; ".join(f"{form}: {help_text}" for form, help_text in FORMS.items())
    positive = number(float, above=0)
    thread_count = number(int, at_least=1, below=257)
    parser.add_argument(
        "root", nargs="?", metavar="ROOT", help="the folder of the photographs or of .parquet, or a .manifest"
    )
    parser.add_argument("out", nargs="?", metavar="OUT", help="a folder, or a bucket (s3://, obs://, oss://)")
    parser.add_argument(
        "--form", choices=FORMS, default="original", help=f"what is stored (default: original). {forms}"
    )
    parser.add_argument(
        "--shard_mb", type=positive, default=256.0, help="MiB of a shard at most (default: 256), or one image"
    )
    parser.add_argument(
        "--workers",
        type=thread_count,
        default=WORKERS,
        help=f"how many shards at a time (default: {WORKERS})",
    )
    files.add_max_megapixels(parser)
    seed_number = number(int, at_least=0, below=2**31)
    parser.add_argument(
        "--seed",
        type=seed_number,
        default=0,
        help="of the training, which decides what of CLASS/*.JPEG is held out",
    )
    help_text = "true: replace another pack in OUT (default: false)"
    parser.add_argument("--overwrite", type=boolean, metavar="true|false", default=False, help=help_text)
    parser.add_argument(
        "--index", metavar="FOLDER", help="make a pack of the tar shards of WebDataset in a folder or bucket"
    )
    classes_help = (
        "names of the classes, one a line, where labels are numbers (default: classnames.txt beside the "
        "shards)"
    )
    parser.add_argument("--classes", metavar="FILE", help=classes_help)
    parser.add_argument(
        "--verify", metavar="OUT", help="read the pack in this folder and name what is damaged"
    )
    options = parser.parse_args(argv)
    has_one_action = sum(map(bool, (options.out, options.index, options.verify))) == 1
    if not has_one_action or (options.out and not options.root) or (options.root and options.index):
        parser.error("give ROOT and OUT, --index FOLDER, or --verify OUT")
    return run_for_exit_code(lambda: run(options), options.out or options.verify or options.index)
