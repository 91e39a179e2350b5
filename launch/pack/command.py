"""Many small photographs as a few large files: uncompressed tar shards in WebDataset's naming, and an index.

    python -m launch pack ROOT OUT                    ROOT/{train,val}/CLASS/*.JPEG as OUT/train-000000.tar ... train-index.npz
                                                      of ROOT/CLASS/*.JPEG a fifth as val, the one that a job holds out
    python -m launch pack ROOT s3://bucket/imagenet   the same in output_dir/s3/bucket/imagenet, and then in the bucket
    python -m launch pack ROOT OUT --form 256         smaller JPEGs in place of the files; also 320, and raw for pixels
    python -m launch pack FOLDER OUT                  of .parquet with columns image and label, as Hugging Face keeps pictures
    python -m launch pack --index FOLDER              tar shards of WebDataset as they are: writes the indexes beside them, and
                                                      nothing else; also s3://bucket/shards
    python -m launch pack --verify OUT                compare every shard with its digest, every sample with its checksum
    python -m launch pack ROOT --verify OUT           and every picture with its original, where --form keeps all of it

The same command goes on where the last one stopped: shards that are whole are kept. The same photographs and settings give the
same bytes. `--data_backend packed --data_url OUT` trains on them, and so does any reader of WebDataset.
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


# --- Packing -------------------------------------------------------------------------------------------------------


def pack(root: str, folder: str, options: argparse.Namespace) -> list[str]:
    """Make the missing shards and the indexes of the pack in `folder`, print a summary, and return the names of all shards."""
    if not files.manifest_of(root):
        _require_photographs(root)
    _require_elsewhere(root, folder, below=not files.manifest_of(root))
    os.makedirs(folder, exist_ok=True)
    with once.locked(os.path.join(folder, ".pack"), _busy(folder)):
        notes = os.path.join(folder, ".tree")
        trees = _photographs(root, notes, options)
        plans = [ShardPlan(files, split, folder, options) for files, split in zip(trees, splits.SPLITS)]
        identities = {plan.split: plan.identity for plan in plans}
        _clear(folder, identities, options.overwrite)
        missing = [(plan, shard) for plan in plans for shard in plan.missing()]
        _need_space(folder, sum(shard.size for _, shard in missing))
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
    """The same, of files of parquet."""
    if options.form != "original":
        raise UserError(f"--form {options.form} is for pictures in folders: leave it out")
    _require_elsewhere(options.root, folder, below=False)
    os.makedirs(folder, exist_ok=True)
    with once.locked(os.path.join(folder, ".pack"), _busy(folder)):
        made, classes, identity = parquet.plan(paths, options.shard_mb, options.classes)
        _clear(folder, dict.fromkeys(splits.SPLITS, identity), options.overwrite)
        missing = [rows for rows in made if not os.path.exists(os.path.join(folder, rows.name))]
        _need_space(folder, sum(rows.size for rows in missing))
        _mark(folder, dict.fromkeys(splits.SPLITS, identity))
        progress = Progress("packing", len(missing), "shards", sum(rows.size for rows in missing))
        in_threads(options.workers, lambda rows, done: parquet.write(rows, folder, done), missing, progress)
        names = {split: [rows.name for rows in made if rows.split == split] for split in {rows.split: 0 for rows in made}}
        index.index(folder, argparse.Namespace(**{**vars(options), "overwrite": True}), names, classes)
    return [rows.name for rows in made]


def _busy(folder: str) -> str:
    return f"another pack is being made in {one_line(folder)}: wait for it, or give another folder"


def _require_photographs(root: str) -> None:
    """Raise UserError, before a folder is made, unless ROOT holds photographs."""
    require_folder("ROOT", root, "give the folder of the photographs")
    for split in () if splits.is_unsplit(root) else splits.SPLITS:
        if not os.path.isdir(os.path.join(root, split)):
            raise UserError(
                f"{one_line(root)} has no folder {split}: give one with train/CLASS/*.JPEG and val/CLASS/*.JPEG in it, or with "
                "CLASS/*.JPEG"
            )


def _require_elsewhere(root: str, folder: str, below: bool = True) -> None:
    """Raise UserError if OUT (`folder`) is ROOT (`root`) or, with `below`, in it."""
    out = os.path.realpath(folder)
    source = os.path.realpath(root)
    if out == source:
        raise UserError(f"OUT {one_line(folder)} is the folder whose files are to be packed: give a folder elsewhere")
    if below and out.startswith(source + os.sep):
        raise UserError(f"OUT {one_line(folder)} is in the folder whose files are to be packed: give a folder elsewhere")


def _photographs(root: str, index: str, options: argparse.Namespace) -> Sequence[tree.Tree]:
    """Return the photographs for training and validation. `index`: the folder for their index."""
    if labels := files.manifest_of(root):
        found, undivided = manifest.load(labels, index_folder=index)
    else:
        undivided = splits.is_unsplit(root)
        parts = [root] if undivided else [os.path.join(root, split) for split in splits.SPLITS]
        found = [tree.load(part, index) for part in parts]
    found = [part.without_larger(options.max_megapixels) for part in found]
    return splits.hold_out(found[0], options.seed) if undivided else found


def _describe(plans: list[ShardPlan], count: int, progress: Progress) -> str:
    notes = [shard.made for plan in plans for shard in plan.shards]
    reasons: Counter[str] = Counter()
    for plan in plans:
        reasons.update({reason: len(names) for reason, names in plan.files.left_out.items()})
    images = sum(len(plan.files) for plan in plans)
    size = sum(sum(made["length"]) for made in notes) / MIB
    counted = ", ".join(f"{reason}: {number}" for reason, number in sorted(reasons.items())) or "nothing"
    lost = sum(made["stored_heights"].count(0) for made in notes)
    return (
        f"{plans[0].folder} has {images} images, {size:.1f} MiB, in {len(notes)} shards; "
        f"made {count} of them now ({progress.describe()}); left out: {counted}"
    ) + (f"; packed, though they cannot be decoded: {lost}" if lost else "")


def _marker(folder: str, split: str) -> str:
    return os.path.join(folder, f".{split}-pack.json")


def _mark(folder: str, identities: dict[str, str]) -> None:
    for split, identity in identities.items():
        write_atomically(_marker(folder, split), json.dumps({"identity": identity}).encode())


def _clear(folder: str, identities: dict[str, str], overwrite: bool) -> None:
    """Delete unfinished files. Delete a pack of other photographs or settings if `overwrite`, else raise UserError for it."""
    for name in os.listdir(folder):  # an unfinished file is of no use, whichever pack it is of
        if name.endswith(TEMPORARY) and OURS.fullmatch(name.removesuffix(TEMPORARY)):
            os.unlink(os.path.join(folder, name))
    names = [name for name in os.listdir(folder) if OURS.fullmatch(name)]
    for split, identity in identities.items():
        there = [name for name in names if name.lstrip(".").startswith(f"{split}-")]
        if there and _identity(folder, split) != identity:
            if not overwrite:
                raise UserError(
                    f"{one_line(folder)} has a pack of other photographs or settings ({len(there)} files of {split}): "
                    "give another folder, or --overwrite true"
                )
            for name in sorted(there, reverse=True):  # the index before its shards
                os.unlink(os.path.join(folder, name))


def _identity(folder: str, split: str) -> Optional[str]:
    """Return the digest of a pack's photographs and settings from .SPLIT-pack.json, else from its index, else None."""
    if noted := read_json_dict(_marker(folder, split)).get("identity"):
        return noted
    with contextlib.suppress(UserError):
        return packed.read_index(packed.index_path(folder, split), folder, split).identity
    return None


def _need_space(folder: str, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if need + SPARE > free:
        raise UserError(
            f"{one_line(folder)} has {free / MIB:.0f} MiB free, the pack needs {(need + SPARE) / MIB:.0f} MiB: "
            "give a folder on a larger disk"
        )


def publish(folder: str, shards: list[str], url: str, overwrite: bool) -> None:
    """Upload the files that the bucket lacks, indexes last; UserError if another pack is there, unless `overwrite`."""
    store = bucket.Bucket(url)
    there = {store.relative(item.key): item for item in store.items(store.key_prefix())}
    indexes = [os.path.basename(packed.index_path("", split)) for split in splits.SPLITS]
    missing = [name for name in [*shards, *indexes] if not upload.is_up_to_date(there.get(name), os.path.join(folder, name))]
    for name in [name for name in indexes if name in missing and name in there]:
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
    print(f"published {len(missing)} files to {one_line(url)}, {progress.describe()}; {len(shards) + 2} are there", flush=True)


def verify(folder: str, root: Optional[str], workers: int) -> None:
    """Compare shards and samples with their checksums and, if `root` is given, the originals; TrainingFailed if any differs."""
    if is_address(folder):
        raise UserError(f"--verify {one_line(folder)}: give a folder; a job that fetches a pack verifies each shard")
    parts = [packed.load(folder, split) for split in splits.SPLITS]
    form = parts[0].form
    if root and form not in ("original", "tiled"):
        raise UserError(f"{one_line(folder)} has pictures in the form {form}, not the originals of {one_line(root)}")
    if form == "tiled" and root:
        tiles.require_jpegtran()
    if root and not any(os.path.exists(_original(part, 0, split, root)) for part, split in zip(parts, splits.SPLITS)):
        raise UserError(f"{one_line(folder)} was not packed from {one_line(root)}, which has other names: leave it out")
    pairs = [(files, split, number) for files, split in zip(parts, splits.SPLITS) for number in range(len(files.shards))]
    size = sum(files.shards[number]["size"] for files, _, number in pairs)
    progress = Progress("verifying", len(pairs), "shards", size)
    damaged: list[str] = []
    changed: list[str] = []

    def look(one: tuple[packed.Packed, str, int], done: Done) -> None:
        files, split, number = one
        found = files.find_damage(number)
        done(files.shards[number]["size"])
        if found:
            damaged.append(found)
            say(f"damaged: {found}")
        elif root:
            others = [
                one_line(files.path(n))
                for n in np.flatnonzero(files.shard == number).tolist()
                if not _is_original(files, n, _original(files, n, split, root))
            ]
            changed.extend(others)
            for name in others:
                say(f"another picture than in {one_line(root)}: {name}")

    in_threads(workers, look, pairs, progress)
    if damaged:
        raise TrainingFailed(
            f"{len(damaged)} of {len(pairs)} shards are damaged: delete them, then fetch them again or have "
            f"python -m launch pack ROOT {one_line(folder)} make them again"
        )
    images = sum(map(len, parts))
    if changed:
        names = ", ".join(sorted({os.path.basename(name.partition(".tar:")[0]) + ".tar" for name in changed})[:5])
        raise TrainingFailed(
            f"{len(changed)} of {images} pictures are not those of {one_line(root or '')}: delete the shards that have them, "
            f"{names} and so on, and pack it again"
        )
    same = f", and are the pictures of {one_line(root)}" if root else ""
    print(f"{one_line(folder)}: {images} images in {len(pairs)} shards are as they were packed{same} ({progress.describe()})")


def _original(files: packed.Packed, number: int, split: str, root: str) -> str:
    below = os.path.join(root, split)
    return os.path.join(below if os.path.isdir(below) else root, files.names[number])


def _is_original(files: packed.Packed, number: int, path: str) -> bool:
    """Whether a sample has the bytes of its original or, if it is in tiles, the original's coefficients."""
    stored = files.read(number)
    try:
        with open(path, "rb") as file:
            content = file.read()
        return stored == content or (tiles.is_tiled(stored) and tiles.same_coefficients(stored, content))
    except (OSError, tiles.NotTiled):
        return False


def run(options: argparse.Namespace) -> None:
    if options.index:
        return index.index(options.index, options)
    if options.verify:
        labels = files.manifest_of(options.root or "")
        return verify(options.verify, manifest.load(labels)[0][0].folder if labels else options.root, options.workers)
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
    forms = "; ".join(f"{form}: {what}" for form, what in FORMS.items())
    mb = number(float, above=0)
    threads = number(int, at_least=1, below=257)
    parser.add_argument("root", nargs="?", metavar="ROOT", help="the folder of the photographs or of .parquet, or a .manifest")
    parser.add_argument("out", nargs="?", metavar="OUT", help="a folder, or a bucket (s3://, obs://, oss://)")
    parser.add_argument("--form", choices=FORMS, default="original", help=f"what is stored (default: original). {forms}")
    parser.add_argument("--shard_mb", type=mb, default=256.0, help="MiB of a shard at most (default: 256), or one image")
    parser.add_argument("--workers", type=threads, default=WORKERS, help=f"how many shards at a time (default: {WORKERS})")
    files.add_max_megapixels(parser)
    seed = number(int, at_least=0, below=2**31)
    parser.add_argument("--seed", type=seed, default=0, help="of the training, which decides what of CLASS/*.JPEG is held out")
    what = "true: replace another pack in OUT (default: false)"
    parser.add_argument("--overwrite", type=boolean, metavar="true|false", default=False, help=what)
    parser.add_argument("--index", metavar="FOLDER", help="make a pack of the tar shards of WebDataset in a folder or bucket")
    names = "names of the classes, one a line, where labels are numbers (default: classnames.txt beside the shards)"
    parser.add_argument("--classes", metavar="FILE", help=names)
    parser.add_argument("--verify", metavar="OUT", help="read the pack in this folder and name what is damaged")
    options = parser.parse_args(argv)
    one = sum(map(bool, (options.out, options.index, options.verify))) == 1
    if not one or (options.out and not options.root) or (options.root and options.index):
        parser.error("give ROOT and OUT, --index FOLDER, or --verify OUT")
    return run_for_exit_code(lambda: run(options), options.out or options.verify or options.index)
