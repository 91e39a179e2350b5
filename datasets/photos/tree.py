"""A tree of photographs, ROOT/{train,val}/CLASS/*.JPEG, as a list of samples; every file is judged once, by its header and end.

Classes and files are sorted as torchvision's ImageFolder sorts them, so labels agree. What cannot be a picture is left out and
counted; what only some decoders read alike (CMYK, 16 bits, anything but JPEG and PNG) is marked, and every loader gives it to
the same decoder. The verdicts and sizes are kept in an index, which is made again when a class folder has
changed, or a file that was left out.
"""

import collections
import dataclasses
import hashlib
import json
import os
import struct
import time
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from common.errors import UserError, one_line
from common.storage import once

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
MOST_PIXELS = 100_000_000  # more is a decompression bomb
MOST_ASPECT = 100  # resized to a short side of 256, a longer one would take all memory
HEAD, TAIL = 65536, 4096  # bytes read of each file; a header may hold a thumbnail or a colour profile
THREADS = 16
FORMAT = 3  # of the index; a new one is made where it differs
GOOD, SPECIAL = 0, 1


@dataclasses.dataclass
class Tree:
    in_files = True  # whether path() is that of a file which holds the sample and nothing else

    folder: str
    classes: list  # names, sorted: the label is the place
    names: list  # of the files that are samples, below the folder
    labels: np.ndarray
    widths: np.ndarray
    heights: np.ndarray
    special: np.ndarray  # for the one decoder that reads everything
    left_out: dict  # {reason: [names]}

    def __len__(self):
        return len(self.names)

    def path(self, number):
        return os.path.join(self.folder, self.names[number])

    def expect(self, numbers):
        """These will be read next, each once."""

    def read(self, number):
        """The bytes of a sample's file."""
        with open(self.path(number), "rb") as file:
            return file.read()

    def whole(self, number):
        """(height, width) of a sample's picture."""
        return int(self.heights[number]), int(self.widths[number])

    def stored(self, number):
        """The same of the picture that there is: a pack may hold a smaller one."""
        return self.whole(number)

    def content(self, number):
        """What the picture is decoded from."""
        return self.read(number)

    def pick(self, numbers):
        """The same with these samples only, in this order."""
        arrays = {name: getattr(self, name)[numbers] for name in ("labels", "widths", "heights", "special")}
        return dataclasses.replace(self, names=[self.names[number] for number in numbers], **arrays)

    def describe(self):
        """One line for the log, whatever there is to say of the files."""
        text = f"{self.folder}: {len(self)} images of {len(self.classes)} classes"
        if self.special.any():
            text += f", {int(self.special.sum())} of them in an unusual form"
        for reason, names in sorted(self.left_out.items()):
            text += f"; left out, {reason}: {len(names)} (the first is {one_line(names[0])})"
        return text


def load(folder, index_folder="input_dir"):
    """The tree below `folder`, from its index where that is still true; made once per node."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder} does not exist: give a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG in it")
    name = hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()[:16]
    path = os.path.join(index_folder, "index", f"{name}.npz")
    classes = _classes(folder)
    once.once_per_node(path, lambda held: _read(path, folder, classes) or _write(path, folder, classes, held))
    return _read(path, folder, classes)


def _classes(folder):
    """{class: when its folder changed last}"""
    with os.scandir(folder) as entries:
        found = {entry.name: entry.stat().st_mtime_ns for entry in entries if entry.is_dir() and not entry.name.startswith(".")}
    if not found:
        raise UserError(f"{folder} has no folder for any class: its images have to lie in {folder}/CLASS/")
    return dict(sorted(found.items()))


# --- The index ---------------------------------------------------------------------------------------------------------


def _signature(folder, classes):
    return json.dumps([FORMAT, os.path.realpath(folder), MOST_PIXELS, list(classes.items())])


def _read(path, folder, classes):
    """The tree, or None where the index is missing, damaged, or of another state of the folder."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            if bytes(stored["signature"]).decode() != _signature(folder, classes):
                return None
            names = bytes(stored["names"]).decode("utf-8", "surrogateescape").split("\0")
            left_out = json.loads(bytes(stored["left_out"]))
            now = [_when(os.path.join(folder, name)) for name in _names(left_out)]
            if now != stored["changed"].tolist():  # a file may be repaired in its place
                return None
            arrays = {name: stored[name] for name in ("labels", "widths", "heights", "special")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    return Tree(folder, list(classes), names, left_out=left_out, **arrays)


def _write(path, folder, classes, held):
    files = [(number, name) for number, label in enumerate(classes) for name in images_below(folder, label)]
    rows, left_out, changed, began = [], collections.defaultdict(list), {}, time.monotonic()
    told = began
    with ThreadPoolExecutor(THREADS) as pool:
        verdicts = pool.map(lambda file: _judged(os.path.join(folder, file[1])), files, chunksize=64)
        for done, ((label, name), (when, verdict)) in enumerate(zip(files, verdicts), 1):
            if isinstance(verdict, str):
                left_out[verdict].append(name)
                changed[name] = when
            else:
                rows.append((name, label, *verdict))
            now = time.monotonic()
            if now - told > 10:
                told = now
                left = (now - began) / done * (len(files) - done)
                print(f"indexing {folder}: {done} of {len(files)} images, {left:.0f} s left", flush=True)
                held.tell(f"indexing {folder}: {done} of {len(files)} images", done)
    if not rows:
        reasons = ", ".join(f"{reason}: {len(names)}" for reason, names in left_out.items())
        raise UserError(f"{folder} holds no image that can be read ({reasons or 'no file with the name of one'})")
    names, labels, special, widths, heights = zip(*rows)
    stored = {
        "signature": _bytes(_signature(folder, classes)), "names": _bytes("\0".join(names)),
        "left_out": _bytes(json.dumps(left_out)), "changed": np.array([changed[name] for name in _names(left_out)], np.int64),
        "labels": np.array(labels, np.int64),
        "special": np.array(special, bool), "widths": np.array(widths, np.int32), "heights": np.array(heights, np.int32),
    }  # fmt: skip
    with open(f"{path}.unfinished", "wb") as file:
        np.savez(file, **stored)
    os.replace(f"{path}.unfinished", path)


def _names(left_out):
    return [name for names in left_out.values() for name in names]


def _judged(path):
    """(when the file had changed last before it was judged, the verdict)"""
    return _when(path), judge(path)


def _when(path):
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _bytes(text):
    return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)


def images_below(folder, label=""):
    """The files of a class, or all, below the folder, in the order of torchvision's ImageFolder."""
    found = []
    for where, _, names in sorted(os.walk(os.path.join(folder, label), followlinks=True)):
        found += [os.path.relpath(os.path.join(where, name), folder) for name in sorted(names)]
    return [name for name in found if name.lower().endswith(EXTENSIONS)]


# --- Judging one file --------------------------------------------------------------------------------------------------


def judge(path):
    """(GOOD or SPECIAL, width, height), or in words why the file is left out."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            tail = file.read()
            if not head:
                return "empty"
            if head.startswith(b"\xff\xd8"):
                found = _judge_jpeg(file, head, tail)
            elif head.startswith(b"\x89PNG\r\n\x1a\n"):
                found = _judge_png(head, tail)
            else:
                found = _judge_other(path)
    except OSError:
        return "unreadable"
    if not isinstance(found, str) and found[1] * found[2] > MOST_PIXELS:
        return "too many pixels"
    if not isinstance(found, str) and max(found[1:]) > MOST_ASPECT * min(found[1:]):
        return "too long and thin"
    return found


def _judge_jpeg(file, head, tail):
    """Walk the segments to the frame header; the end marker has to be near the end."""
    at = 2
    while True:
        if at + 4 > len(head):
            file.seek(len(head))
            more = file.read(HEAD)
            if not more:
                return "damaged header"
            head += more
            continue
        if head[at] != 0xFF:
            return "damaged header"
        kind = head[at + 1]
        if kind == 0xFF:  # fill
            at += 1
            continue
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            if at + 10 > len(head):
                return "damaged header"
            bits, height, width, components = struct.unpack(">BHHB", head[at + 4 : at + 10])
            break
        if kind in (0xD9, 0xDA):
            return "damaged header"
        at += 2 + struct.unpack(">H", head[at + 2 : at + 4])[0]
    if not width or not height or components not in (1, 3, 4):
        return "damaged header"
    if b"\xff\xd9" not in tail:
        return "cut off"
    return (GOOD if bits == 8 and components != 4 else SPECIAL), width, height


def _judge_png(head, tail):
    if len(head) < 33 or head[12:16] != b"IHDR":
        return "damaged header"
    width, height, bits, colour = struct.unpack(">IIBB", head[16:26])
    if not width or not height:
        return "damaged header"
    if b"IEND" not in tail:
        return "cut off"
    return (GOOD if bits == 8 and colour == 2 else SPECIAL), width, height


def _judge_other(path):
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            return SPECIAL, *picture.size
    except Image.DecompressionBombError:
        return "too many pixels"
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
        return "not an image"
