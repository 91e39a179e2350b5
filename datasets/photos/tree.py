"""The photographs of ROOT/{train,val}/CLASS/*.JPEG as a list of samples.

Each file is judged once, by its header and end.

Classes and files are sorted as in torchvision's ImageFolder, so labels agree. A file that cannot be a picture
is left out and counted. A file that decoders read differently (CMYK, 16 bits, an odd header, anything but
JPEG and PNG) is marked, and every loader uses the same decoder for it. An index keeps the verdicts and sizes.
It is made again when a class folder, or a file that was left out, has changed.
"""

import dataclasses
import hashlib
import io
import json
import os
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Any, Callable, ClassVar, NamedTuple, Optional, Union

import numpy as np

from common.address import INPUT_DIR
from common.errors import UserError, one_line, require_folder
from common.files import write_atomically
from common.progress import Progress, say
from common.storage import once
from datasets import digests
from datasets.crc import crc32
from datasets.photos import files, jpeg, remarks

if TYPE_CHECKING:
    from datasets.photos.decode import Content

MOST_ASPECT = 100  # a longer picture, resized to a short side of 256, would need too much memory
HEAD = 65536  # bytes read at a file's begin, where a header may hold a thumbnail or a colour profile
TAIL = 4096  # and at its end
MOST_HEADER = 20 << 20  # a colour profile can have 16 MiB
THREADS = 16
FORMAT = 3  # of the index; one of another format is made again
GOOD = 0
SPECIAL = 1
BY_NAME = "named "  # begins the reason for a file that is not named like a picture

Verdict = Union[str, tuple[int, int, int]]  # why a file is left out; or (GOOD or SPECIAL, width, height)
JudgeFile = Callable[[str], Verdict]
# list_files(other_files) returns [(label, path)], and adds to `other_files` what it leaves out, by extension.
ListFiles = Callable[[dict[str, list[str]]], list[tuple[int, str]]]


@dataclasses.dataclass
class Tree:
    """The samples of a split: their files, labels and sizes, and how they are read."""

    has_sample_files: ClassVar[bool] = True  # whether path() is a file that holds one sample and nothing else

    folder: str
    classes: list[str]  # sorted names; a label is an index in this list
    names: list[str]  # paths of the samples' files, below the folder
    labels: np.ndarray
    widths: np.ndarray
    heights: np.ndarray
    special: np.ndarray  # whether only Pillow may decode it
    left_out: dict[str, list[str]]  # {reason: names}

    def __len__(self) -> int:
        return len(self.names)

    def path(self, number: int) -> str:
        """Return the path of a sample's file; a pack, which has none, adds the name to the shard's path."""
        return os.path.join(self.folder, self.names[number])

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Prepare to read these samples now.

        This does nothing here; a tree with a cache fetches them together.
        """

    def announced(self, batches: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the batches of numbers.

        A pack that arrives looks ahead, and brings first what will be read next.
        """
        return iter(batches)

    def read(self, number: int) -> bytes:
        """Return the bytes of a sample's file, as they are."""
        return files.read(self.path(number))

    def original_size(self, number: int) -> tuple[int, int]:
        """Return (height, width) of a sample's picture."""
        return int(self.heights[number]), int(self.widths[number])

    def stored_size(self, number: int) -> tuple[int, int]:
        """Return (height, width) of the stored picture: a pack may hold a smaller one."""
        return self.original_size(number)

    def content(self, number: int) -> "Content":
        """Return what a sample's picture is decoded from: here, the bytes of its file."""
        return self.read(number)

    def crc(self, number: int) -> int:
        """Return the CRC-32 of a sample's file."""
        return crc32(files.read(self.path(number)))

    def digest(self) -> dict[str, str]:
        """Return what tells these pictures from others, equal for files and for a pack of them."""
        list_digest = digests.digest_of(self.names, self.labels, self.widths, self.heights)
        return {"list": list_digest, **digests.digest_of_checksums(len(self), self.crc)}

    def pick(self, numbers: np.ndarray) -> "Tree":
        """Return a tree with these samples only, in this order."""
        arrays = {name: value[numbers] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return dataclasses.replace(self, names=[self.names[number] for number in numbers], **arrays)

    def without_larger(self, megapixels: int) -> "Tree":
        """Return a tree in which photographs above `megapixels` million pixels are left out;
        UserError if all are larger."""
        is_large = self.widths.astype(np.int64) * self.heights > megapixels * 10**6
        if not is_large.any():
            return self
        if is_large.all():
            raise UserError(
                f"{self.folder}: every image has more than --max_megapixels {megapixels} million "
                "pixels: give more"
            )
        names = [self.names[number] for number in np.flatnonzero(is_large)]
        left_out = {**self.left_out, f"more than {megapixels} million pixels (--max_megapixels)": names}
        return dataclasses.replace(self.pick(np.flatnonzero(~is_large)), left_out=left_out)

    def describe(self) -> str:
        """Return a line about the tree for the log."""
        text = f"{self.folder}: {len(self)} images of {len(self.classes)} classes"
        if self.special.any():
            text += f", {int(self.special.sum())} of them no plain JPEGs"
        for reason, names in sorted(self.left_out.items()):
            text += f"; left out, {reason}: {len(names)} (the first is {one_line(names[0])})"
        return text


def load(folder: str, index_folder: str = INPUT_DIR) -> Tree:
    """Return the tree below `folder`, from its index, which is made once per node if it is missing or
    outdated."""
    require_folder("the folder", folder, "give one with train/CLASS/*.JPEG and val/CLASS/*.JPEG in it")
    classes = files.classes(folder)

    def list_images(other_files: dict[str, list[str]]) -> list[tuple[int, str]]:
        images = []
        for label, class_name in enumerate(classes):
            images += [(label, name) for name in files.images_below(folder, class_name, other_files)]
        return images

    state = list(classes.items())  # with the times at which the folders of the classes were changed
    return indexed(
        source=folder,
        folder=folder,
        classes=list(classes),
        state=state,
        list_files=list_images,
        index_folder=index_folder,
    )


# --- The index ----------------------------------------------------------------------------------------------


def indexed(
    source: str, folder: str, classes: list[str], state: object, list_files: ListFiles, index_folder: str,
    judge_file: JudgeFile = lambda path: judge(path),
) -> Tree:  # fmt: skip
    """Return the tree of the files below `folder` that list_files() names.

    It is read from the index of `source`, which is made once per node if it is missing or of another
    `state`."""
    signature = _signature(folder, state)
    name = hashlib.sha256(os.fsencode(os.path.realpath(source))).hexdigest()[:16]
    path = os.path.join(index_folder, "index", f"{name}.npz")

    def read_tree() -> Optional[Tree]:
        return _read(path, folder, classes, signature)

    once.once_per_node(
        path, lambda lease: read_tree() or _write(path, folder, signature, list_files, judge_file, lease)
    )
    tree = read_tree()
    if tree is None:
        raise UserError(
            f"{folder} has changed while it was indexed: start again when its files stay as they are"
        )
    return tree


def _signature(folder: str, state: object) -> str:
    return json.dumps([FORMAT, os.path.realpath(folder), files.MOST_PIXELS, state])


def _read(path: str, folder: str, classes: list[str], signature: str) -> Optional[Tree]:
    """Return the tree, or None where the index is missing, damaged, or of another state of the folder."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            if stored.zip.testzip() or bytes(stored["signature"]).decode() != signature:
                return None
            names = bytes(stored["names"]).decode("utf-8", "surrogateescape").split("\0")
            left_out = json.loads(bytes(stored["left_out"]))
            mtimes = [mtime_ns(os.path.join(folder, name)) for name in _judged_names(left_out)]
            if mtimes != stored["changed"].tolist():  # a repaired file leaves its folder's time as it was
                return None
            arrays = {name: stored[name] for name in ("labels", "widths", "heights", "special")}
    except Exception:  # a damaged file can fail in any way
        return None
    return Tree(folder, classes, names, left_out=left_out, **arrays)


class _Judged(NamedTuple):
    """What came of judging all files of a folder."""

    rows: list[tuple]  # (name, label, GOOD or SPECIAL, width, height) of each that can be read
    left_out: dict[str, list[str]]  # {reason: the files that were left out for it}
    mtimes: dict[str, int]  # {file that was left out for its content: when it was changed, in ns}


def _write(
    path: str, folder: str, signature: str, list_files: ListFiles, judge_file: JudgeFile, lease: once.Lease
) -> None:
    """Judge all files, and write the index; UserError if none of them can be read."""
    judged = _judge_all(folder, list_files, judge_file, lease)
    if not judged.rows:
        reasons = ", ".join(f"{reason}: {len(names)}" for reason, names in judged.left_out.items())
        raise UserError(
            f"{folder} holds no image that can be read ({reasons or 'no file has the extension of one'})"
        )
    names, labels, special, widths, heights = zip(*judged.rows)
    mtimes = [judged.mtimes[name] for name in _judged_names(judged.left_out)]
    stored = {
        "signature": _bytes(signature),
        "names": _bytes("\0".join(names)),
        "left_out": _bytes(json.dumps(judged.left_out)),
        "changed": np.array(mtimes, np.int64),
        "labels": np.array(labels, np.int64),
        "special": np.array(special, bool),
        "widths": np.array(widths, np.int32),
        "heights": np.array(heights, np.int32),
    }
    content = io.BytesIO()
    np.savez(content, **stored)
    write_atomically(path, content.getbuffer())


def _judge_all(folder: str, list_files: ListFiles, judge_file: JudgeFile, lease: once.Lease) -> _Judged:
    """Judge the files of a folder in threads, with a bar, and tell the processes that wait how far it is."""
    other_files: dict[str, list[str]] = {}
    entries = list_files(other_files)
    judged = _Judged(rows=[], left_out={}, mtimes={})
    for ending, other_names in other_files.items():
        judged.left_out[f"{BY_NAME}{ending or 'without an extension'}"] = other_names

    def judge_at(name: str) -> tuple[int, Verdict]:
        path = os.path.join(folder, name)
        mtime = mtime_ns(path)  # before the file is read: a change meanwhile is a later one
        return mtime, judge_file(path)

    progress = Progress(f"indexing {folder}", len(entries), "images", tell=lease.tell)
    with ThreadPoolExecutor(THREADS) as pool, progress:
        verdicts = pool.map(judge_at, (name for _, name in entries))
        for (label, name), (mtime, verdict) in zip(entries, verdicts):
            if isinstance(verdict, str):
                judged.left_out.setdefault(verdict, []).append(name)
                judged.mtimes[name] = mtime
            else:
                judged.rows.append((name, label, *verdict))
            progress.add(1)
    return judged


def _judged_names(left_out: dict[str, list[str]]) -> list[str]:
    """Return the files that were left out for their content, not for their name: if one changes,
    the index is made again."""
    return [name for reason, names in left_out.items() if not reason.startswith(BY_NAME) for name in names]


def mtime_ns(path: str) -> int:
    """Return the time in ns at which a file or folder was changed; 0 if there is none."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)


# --- Judging one file ---------------------------------------------------------------------------------------


def judge(path: str) -> Verdict:
    """Return the reason to leave a file out, or (GOOD or SPECIAL, width, height);
    UserError or TrainingFailed if unreadable."""
    try:
        with files.open_limited(path) as file:
            return judge_open(file, path)
    except OSError as error:
        error.filename = path
        raise files.unreadable_error(error) from None
    except ValueError as error:  # not a regular file, or too large
        return str(error)


def judge_open(file: IO[bytes], name: str) -> Verdict:
    """judge() of a file that is open. `name`: for warnings."""
    with remarks.report_warnings(lambda: name, lambda text: say(f"warning: {text}")):
        head = file.read(HEAD)
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        tail = file.read()
        if not head:
            return "empty"
        if head.startswith(b"\xff\xd8"):
            verdict = _judge_jpeg(file, bytearray(head), tail)
        elif head.startswith(b"\x89PNG\r\n\x1a\n"):
            verdict = _judge_png(head, tail)
        else:
            verdict = _judge_other(file)
    if isinstance(verdict, str):
        return verdict
    _, width, height = verdict
    if width * height > files.MOST_PIXELS:
        return "too many pixels"
    if max(width, height) > MOST_ASPECT * min(width, height):
        return "too long and thin"
    return verdict


def _judge_jpeg(file: IO[bytes], head: bytearray, tail: bytes) -> Verdict:
    """Walk the segments up to the data, and look for the end marker near the file's end.

    Return a reason if the file is damaged; SPECIAL if it has 4 components, not 8 bits, or stray bytes between
    segments; else GOOD.
    """
    frame = None
    is_odd = False

    def read_more(size: int) -> bytes:
        file.seek(size)
        return file.read(HEAD) if size <= MOST_HEADER else b""

    try:
        for kind, position in jpeg.segments(head, read_more):
            if kind == jpeg.NO_MARKER and frame is None:
                return "damaged header"
            if kind < 0xC0 or 0xD0 <= kind <= 0xD8:  # not the marker of a segment
                is_odd = True
                if frame:
                    break
            if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
                frame = struct.unpack(">BHHB", head[position + 4 : position + 10])
    except EOFError:
        return "damaged header"
    bits, height, width, components = frame or (0, 0, 0, 0)
    if not width or not height or components not in (1, 3, 4):
        return "damaged header"
    if b"\xff\xd9" not in tail:
        return "cut off"
    return (GOOD if bits == 8 and components != 4 and not is_odd else SPECIAL), width, height


def _judge_png(head: bytes, tail: bytes) -> Verdict:
    """Return GOOD for 8-bit RGB, SPECIAL for other kinds, or the reason if it is damaged."""
    if len(head) < 33 or head[12:16] != b"IHDR":
        return "damaged header"
    width, height, bits, colour = struct.unpack(">IIBB", head[16:26])
    if not width or not height:
        return "damaged header"
    if b"IEND" not in tail:
        return "cut off"
    return (GOOD if bits == 8 and colour == 2 else SPECIAL), width, height


def _judge_other(file: Any) -> Verdict:
    from PIL import Image

    try:
        with files.open_picture(file) as picture:
            return SPECIAL, *picture.size
    except Image.DecompressionBombError:
        return "too many pixels"
    except Exception:  # a damaged file may cause any error in a decoder
        return "not an image"
