"""Photographs as large files: a tree of many small ones as uncompressed tar shards, in WebDataset's naming, and an index.

    python -m launch pack ROOT OUT                    ROOT/{train,val}/CLASS/*.JPEG as OUT/train-000000.tar ... train-index.npz
    python -m launch pack ROOT s3://bucket/imagenet   the same in output_dir/s3/bucket/imagenet, and then in the bucket
    python -m launch pack --verify OUT                every shard against its digest, every sample against its checksum

The same command goes on where the last one stopped: shards that are whole are kept. The same photographs and settings give the
same bytes. `--data_backend packed --data_url OUT` trains on them, and so does any reader of WebDataset.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import tarfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np
from tqdm import tqdm

from common import bucket, errors, etag, paths, publisher, storage
from common.arguments import boolean, number
from common.checkpoint import TEMPORARY, write_atomically
from common.download import LINE_SECONDS, MIB, SPARE
from common.errors import TrainingFailed, UserError, one_line
from datasets import packed, tree

SPLITS = ("train", "val")
WORKERS = 8  # threads: what is slow is the disk, or lets other threads run
UPLOADS = 4
BLOCK = tarfile.BLOCKSIZE
KINDS = {b"\xff\xd8": "jpg", b"\x89PNG": "png", b"RIFF": "webp", b"BM": "bmp", b"II*\0": "tif", b"MM\0*": "tif", b"GIF8": "gif"}
OURS = re.compile(r"\.?(?:train|val)-(?:\d{6}\.(?:tar|json)|index\.npz|pack\.json)", re.ASCII)


@dataclasses.dataclass
class Shard:
    name: str
    numbers: list  # of its samples, in their order here
    size: int = 0
    made: dict = None  # what its note says, once it is whole


class Plan:
    """Which sample of a split goes into which shard: a function of the files' names, sizes and the settings alone."""

    def __init__(self, root, split, folder, options):
        self.split, self.folder = split, folder
        self.files = tree.load(os.path.join(root, split), os.path.join(folder, ".tree"))
        self.lengths, self._changed = self._stat()
        self.settings = {"form": options.form, "shard_mb": options.shard_mb}
        words = [packed.FORMAT, split, self.settings, self.files.classes, self.files.names]
        digest = hashlib.sha256(json.dumps(words, sort_keys=True).encode())
        self.identity = _digest(digest, self.files.labels, self.lengths)
        self.shards = self._deal(int(options.shard_mb * MIB) // tarfile.RECORDSIZE * tarfile.RECORDSIZE)

    def _stat(self):
        """(bytes, time of the last change) of each file."""

        def stat(numbers):
            return [(found.st_size, found.st_mtime_ns) for found in map(os.stat, map(self.files.path, numbers))]

        parts = [range(begin, min(begin + 1000, len(self.files))) for begin in range(0, len(self.files), 1000)]
        with ThreadPoolExecutor(tree.THREADS) as pool:
            return np.array([pair for part in pool.map(stat, parts) for pair in part], np.int64).T

    def _deal(self, limit):
        """Shuffled, for a reader that streams a few shards should see all classes; RandomState never changes its numbers."""
        shards, full = [], limit
        for sample in np.random.RandomState(0).permutation(len(self.files)).tolist():
            size = 3 * BLOCK + int(self.lengths[sample]) + -int(self.lengths[sample]) % BLOCK  # two headers, a label
            if not shards or full + size > limit:
                full = 2 * BLOCK  # the archive's end
                shards.append(Shard(f"{self.split}-{len(shards):06d}.tar", []))
            shards[-1].numbers.append(sample)
            full += size
            shards[-1].size = full + -full % tarfile.RECORDSIZE
        return shards

    def sources(self, shard):
        """What the shard was made of; another size or time of one file is another shard."""
        return _digest(hashlib.sha256(self.identity.encode()), self._changed[shard.numbers], np.array(shard.numbers))

    def note_path(self, shard):
        return os.path.join(self.folder, f".{shard.name[:-4]}.json")

    def missing(self):
        """The shards that are not there, or not of these files."""
        for shard in self.shards:
            shard.made = self._note(shard)
        return [shard for shard in self.shards if not shard.made]

    def _note(self, shard):
        """What was written down when the shard was whole, or None."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(self.note_path(shard)) as file:
            note = json.load(file)
            if note["sources"] == self.sources(shard) and os.path.getsize(os.path.join(self.folder, shard.name)) == shard.size:
                return note
        return None

    def write_index(self):
        offset, checksum, place = (np.empty(len(self.files), np.int64) for _ in range(3))
        for position, shard in enumerate(self.shards):
            offset[shard.numbers], checksum[shard.numbers] = shard.made["offset"], shard.made["checksum"]
            place[shard.numbers] = position
        shards = [{"name": shard.name, "size": shard.size, "sha256": shard.made["sha256"]} for shard in self.shards]
        about = {**self.settings, "identity": self.identity, "shards": shards}
        arrays = {"shard": place, "offset": offset, "length": self.lengths, "checksum": checksum}
        packed.write_index(self.folder, self.split, self.files, about, arrays)


# --- One shard ---------------------------------------------------------------------------------------------------------


def make(plan, shard, progress):
    """The shard under its name, and then its note: by the note a later start knows that it is whole."""
    path = os.path.join(plan.folder, shard.name)
    digest, offsets, checksums = hashlib.sha256(), [], []
    with open(path + TEMPORARY, "wb") as file:

        def write(content):
            file.write(content)
            digest.update(content)

        def member(name, content):
            header = tarfile.TarInfo(name)  # no time, no user: the same bytes whoever packs
            header.size = len(content)
            write(header.tobuf(tarfile.USTAR_FORMAT))
            write(content)
            write(bytes(-len(content) % BLOCK))

        for sample in shard.numbers:
            content = plan.files.read(sample)
            if len(content) != plan.lengths[sample]:
                raise UserError(
                    f"{one_line(plan.files.path(sample))} changed while it was packed: start again when it is at rest"
                )
            offsets.append(file.tell() + BLOCK)
            checksums.append(zlib.crc32(content))
            key = f"{sample:08d}"  # unique, and without the dot that ends a key
            member(f"{key}.{_kind(content)}", content)
            member(f"{key}.cls", b"%d" % plan.files.labels[sample])
            progress.add(len(content))
        write(bytes(shard.size - file.tell()))
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + TEMPORARY, path)
    shard.made = {"sources": plan.sources(shard), "sha256": digest.hexdigest(), "offset": offsets, "checksum": checksums}
    write_atomically(plan.note_path(shard), json.dumps(shard.made).encode())


def _kind(content):
    """The extension of what it is, whatever its file was called."""
    return next((kind for begin, kind in KINDS.items() if content.startswith(begin)), "img")


def _digest(digest, *arrays):
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


class Progress:
    """A bar on a terminal, a line every ten seconds in a log."""

    def __init__(self, what, count, size):
        self._what, self._count, self._done, self._lock = what, count, 0, threading.Lock()
        self._bar = tqdm(total=size, unit="B", unit_scale=True, unit_divisor=1024, desc=what, disable=None)
        self._size, self._bytes, self._began = size, 0, time.monotonic()
        self._told, self.stopped = self._began, False

    def add(self, size):
        if self.stopped:
            raise InterruptedError
        with self._lock:
            self._done, self._bytes, now = self._done + 1, self._bytes + size, time.monotonic()
            self._bar.update(size)
            self._bar.set_postfix_str(f"{self._done} of {self._count}", refresh=False)
            if self._bar.disable and now - self._told >= LINE_SECONDS:
                self._told = now
                left = (now - self._began) / max(self._bytes, 1) * (self._size - self._bytes)
                print(f"{self._what}: {self._done} of {self._count}, {self.describe()}, {left:.0f} s left", flush=True)

    def describe(self):
        seconds = time.monotonic() - self._began
        return f"{self._bytes / MIB:.1f} MiB in {seconds:.1f} s, {self._bytes / MIB / max(seconds, 1e-3):.1f} MiB/s"

    def all_of(self, workers, work, items):
        """`work(item)` of all, in threads; the first failure stops the others."""
        with ThreadPoolExecutor(workers) as pool:
            try:
                for task in as_completed([pool.submit(work, item) for item in items]):
                    task.result()
            except BaseException:
                self.stopped = True
                pool.shutdown(cancel_futures=True)
                raise
            finally:
                self._bar.close()


# --- All of them -------------------------------------------------------------------------------------------------------


def pack(root, folder, options):
    """Make what is missing of the pack in `folder`; one line at the end says what there is."""
    for split in SPLITS:  # before a folder is made
        if not os.path.isdir(os.path.join(root, split)):
            raise UserError(
                f"{one_line(root)} has no folder {split}: give one with train/CLASS/*.JPEG and val/CLASS/*.JPEG in it"
            )
    if os.path.realpath(folder).startswith(os.path.realpath(root) + os.sep):
        raise UserError(f"{one_line(folder)} lies in {one_line(root)}, whose files are to be packed: give a folder elsewhere")
    os.makedirs(folder, exist_ok=True)
    with _alone(folder):
        plans = [Plan(root, split, folder, options) for split in SPLITS]
        _clear(folder, plans, options.overwrite)
        missing = [(plan, shard) for plan in plans for shard in plan.missing()]
        _need_space(folder, sum(shard.size for _, shard in missing))
        for plan in plans:
            write_atomically(_marker(folder, plan.split), json.dumps({"identity": plan.identity}).encode())
        for plan, _ in missing:
            with contextlib.suppress(FileNotFoundError):  # it would vouch for what is about to be replaced
                os.unlink(packed.index_path(folder, plan.split))
        lengths = [plan.lengths[shard.numbers] for plan, shard in missing]
        progress = Progress("images", sum(map(len, lengths)), int(sum(map(np.sum, lengths))))
        progress.all_of(options.workers, lambda pair: make(*pair, progress), missing)
        for plan in plans:
            plan.write_index()
        shutil.rmtree(os.path.join(folder, ".tree"))
    print(_describe(plans, len(missing), progress), flush=True)
    return [shard.name for plan in plans for shard in plan.shards]


def _describe(plans, made, progress):
    shards, reasons = sum(len(plan.shards) for plan in plans), {}
    for plan in plans:
        for reason, names in plan.files.left_out.items():
            reasons[reason] = reasons.get(reason, 0) + len(names)
    images, size = sum(len(plan.files) for plan in plans), sum(int(plan.lengths.sum()) for plan in plans) / MIB
    left_out = ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items())) or "nothing"
    return (
        f"{plans[0].folder} has {images} images, {size:.1f} MiB, in {shards} shards; "
        f"made {made} of them now ({progress.describe()}); left out: {left_out}"
    )


@contextlib.contextmanager
def _alone(folder):
    file = os.open(os.path.join(folder, ".pack.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another pack is being made in {one_line(folder)}: wait for it, or give another folder") from None
        yield
    finally:
        os.close(file)


def _marker(folder, split):
    return os.path.join(folder, f".{split}-pack.json")


def _clear(folder, plans, overwrite):
    """Leave what is of this pack alone; what is of another goes, if it may."""
    names = [name for name in os.listdir(folder) if OURS.fullmatch(name.removesuffix(TEMPORARY))]
    for plan in plans:
        there = [name for name in names if name.lstrip(".").startswith(f"{plan.split}-")]
        if there and _identity(folder, plan.split) != plan.identity:
            if not overwrite:
                raise UserError(
                    f"{one_line(folder)} has a pack of other photographs or settings ({len(there)} files of {plan.split}): "
                    "give another folder, or --overwrite true"
                )
            for name in sorted(there, reverse=True):  # the index before what it vouches for
                os.unlink(os.path.join(folder, name))
    for name in os.listdir(folder):
        if name.endswith(TEMPORARY) and OURS.fullmatch(name.removesuffix(TEMPORARY)):
            os.unlink(os.path.join(folder, name))


def _identity(folder, split):
    """Of the pack that is there, whole or not; a folder that was fetched has the index alone."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(_marker(folder, split)) as file:
        return json.load(file)["identity"]
    with contextlib.suppress(UserError):
        return packed.read_index(packed.index_path(folder, split), folder, split).identity
    return None


def _need_space(folder, need):
    free = shutil.disk_usage(folder).free
    if need + SPARE > free:
        raise UserError(
            f"{one_line(folder)} has {free / MIB:.0f} MiB free, the pack needs {(need + SPARE) / MIB:.0f} MiB: "
            "give a folder on a larger disk"
        )


def publish(folder, shards, url, overwrite):
    """What the bucket does not have yet; the indexes last, for they vouch for the shards."""
    store = bucket.Bucket(url)
    there = {store.relative(item.key): item for item in store.items(store.below())}
    indexes = [os.path.basename(packed.index_path("", split)) for split in SPLITS]
    missing = [name for name in [*shards, *indexes] if not _same(os.path.join(folder, name), there.get(name))]
    for name in [name for name in indexes if name in missing and name in there]:
        if not overwrite:
            raise UserError(f"{one_line(url)} has another pack: give another address, or --overwrite true")
        store.ask("delete_object", store.below() + name)
    sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in missing}
    progress = Progress(f"published to {one_line(url)}: files", len(missing), sum(sizes.values()))

    def send(name):
        storage.publish(os.path.join(folder, name), f"{store.url(store.below())}{name}")
        progress.add(sizes[name])

    progress.all_of(UPLOADS, send, [name for name in missing if name not in indexes])
    for name in sizes.keys() & indexes:
        send(name)
    print(f"published {len(missing)} files to {one_line(url)}, {progress.describe()}; {len(shards) + 2} are there", flush=True)


def _same(path, item):
    """Whether the bucket's object has the bytes of the file, as far as its ETag tells."""
    if item is None or item.size != os.path.getsize(path) or not item.digest:
        return False
    hasher = etag.Hasher(item.digest, item.size, publisher.PART)
    with open(path, "rb") as file:
        while content := file.read(MIB):
            hasher.update(content)
    return hasher.right() is True


def verify(folder, workers):
    """Name every damaged shard and sample."""
    if paths.is_address(folder):
        raise UserError(f"{one_line(folder)}: only a folder can be verified; a job that fetches it verifies each shard")
    splits = [packed.load(folder, split) for split in SPLITS]
    pairs = [(files, number) for files in splits for number in range(len(files.shards))]
    progress, damaged = Progress("shards", len(pairs), sum(files.shards[number]["size"] for files, number in pairs)), []

    def look(pair):
        files, number = pair
        what = files.damage(number)
        progress.add(files.shards[number]["size"])
        if what:
            damaged.append(what)
            tqdm.write(f"damaged: {what}")

    progress.all_of(workers, look, pairs)
    if damaged:
        raise TrainingFailed(
            f"{len(damaged)} of {len(pairs)} shards are damaged: delete them, then fetch them again or have "
            f"python -m launch pack ROOT {one_line(folder)} make them again"
        )
    images = sum(map(len, splits))
    print(f"{one_line(folder)}: {images} images in {len(pairs)} shards are as they were packed ({progress.describe()})")


def run(options):
    try:
        if options.verify:
            return verify(options.verify, options.workers)
        url = options.out if paths.is_address(options.out) else None
        if url:
            bucket.Bucket(url)  # an address that cannot be is said before hours of work
        folder = paths.local_folder(url, "output_dir") if url else options.out
        shards = pack(options.root, folder, options)
        if url:
            publish(folder, shards, url, options.overwrite)
    except OSError as error:
        raise UserError(
            f"{one_line(error.filename or options.out or options.verify)}: {one_line(error.strerror or error)}"
        ) from None


def main(argv):
    parser = argparse.ArgumentParser(
        prog="python -m launch pack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", nargs="?", metavar="ROOT", help="the folder with train and val")
    parser.add_argument("out", nargs="?", metavar="OUT", help="a folder, or a bucket (s3://, obs://, oss://)")
    parser.add_argument("--form", choices=["original"], default="original", help="original: the files as they are")
    parser.add_argument(
        "--shard_mb", type=number(float, above=0), default=256.0, help="MiB of a shard at most (default: 256), or one image"
    )
    parser.add_argument(
        "--workers",
        type=number(int, at_least=1, below=257),
        default=WORKERS,
        help=f"shards at a time (default: {WORKERS})",
    )
    parser.add_argument("--overwrite", type=boolean, default=False, help="true: replace another pack that is in OUT")
    parser.add_argument("--verify", metavar="OUT", help="read a pack and name what is damaged in it")
    options = parser.parse_args(argv)
    if bool(options.verify) == bool(options.out) or bool(options.root) != bool(options.out):
        parser.error("give ROOT and OUT, or --verify OUT")
    errors.run_job(lambda: run(options))
    return 0
