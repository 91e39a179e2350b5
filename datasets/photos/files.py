"""Find and read the files of photographs, with limits on their type and size, because the files may come from strangers.

A file or folder that cannot be listed or opened is an error that names it. Otherwise a class could be missing unnoticed.
"""

import argparse
import errno
import os
from typing import IO, TYPE_CHECKING, Optional

from common import arguments
from common.address import INPUT_DIR
from common.errors import UserError, of_a_file, one_line
from common.files import open_regular
from datasets.photos import remarks

if TYPE_CHECKING:
    from PIL import Image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# The formats that Pillow may open. For EPS, for example, it would start another program.
FORMATS = ["JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF"]
MANIFEST = ".manifest"  # the ending of a file that labels photographs
OF_A_JOB = ("journal.jsonl", ".lock")  # files in the output folder of a run, which is not a class
MOST_BYTES = 256 << 20  # of a file
MOST_PIXELS = 100_000_000  # more is a decompression bomb
MEGAPIXELS = 80  # default of --max_megapixels


def add_max_megapixels(group: "argparse._ActionsContainer") -> None:
    most = arguments.number(int, at_least=1, below=MOST_PIXELS // 10**6 + 1)
    group.add_argument("--max_megapixels", type=most, default=MEGAPIXELS, help="photographs of more million pixels are left "
                       "out and counted, because one that is decoded takes up to 10 MB a million in its worker")  # fmt: skip


def manifest_of(place: str) -> Optional[str]:
    """Return the .manifest that `place` is, or that lies in this folder without train and val; None if there is none."""
    if place.endswith(MANIFEST):
        return place
    if not os.path.isdir(place) or any(os.path.exists(os.path.join(place, split)) for split in ("train", "val")):
        return None
    found = sorted(name for name in os.listdir(place) if name.endswith(MANIFEST) and not name.startswith("."))
    if len(found) > 1:
        raise UserError(f"{one_line(place)} has {len(found)} manifests: give one, such as {one_line(found[-1])} in it")
    return os.path.join(place, found[0]) if found else None


def classes(folder: str) -> dict[str, int]:
    """Return {class: st_mtime_ns of its folder}, sorted, without hidden folders and a job's own; UserError if none is left."""
    found = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                changed = entry.stat().st_mtime_ns  # follows a link, whose target may be missing
                if entry.is_dir() and not _is_of_a_job(entry):
                    found[entry.name] = changed
    except OSError as error:
        raise unreadable(error) from None
    if not found:
        raise UserError(f"{folder} has no folder for any class: its images must be in {folder}/CLASS/")
    return dict(sorted(found.items()))


def _is_of_a_job(entry: "os.DirEntry[str]") -> bool:
    there = (os.path.join(entry.path, name) for name in OF_A_JOB)
    return entry.name in (INPUT_DIR, "output_dir") or any(map(os.path.exists, there))


def images_below(folder: str, label: str = "", others: Optional[dict[str, list[str]]] = None) -> list[str]:
    """Return the paths below `folder` of its pictures; if `label` is given, only of that class, in the order of torchvision's
    ImageFolder. Files that are not named like pictures, unless hidden, are added to `others`, by extension."""
    paths = []
    for where, folders, names in sorted(os.walk(os.path.join(folder, label), onerror=_refuse, followlinks=True)):
        for name in folders:
            _refuse_circle(where, name)
        for name in sorted(names):
            path = os.path.join(where, name)
            if name.lower().endswith(EXTENSIONS):
                paths.append(os.path.relpath(path, folder))
                continue
            if os.path.islink(path):
                _refuse_dangling(path)
            if others is not None and not name.startswith("."):
                others.setdefault(os.path.splitext(name)[1].lower(), []).append(os.path.relpath(path, folder))
    return paths


def _refuse(error: OSError) -> None:
    raise unreadable(error)


def _refuse_dangling(path: str) -> None:
    """Raise an error if the target of a link is missing: it may be a folder of images."""
    try:
        os.stat(path)
    except OSError as error:
        raise unreadable(error) from None


def _refuse_circle(where: str, name: str) -> None:
    """Raise a UserError if `name` is a link to a folder above it, whose images would be counted again and again."""
    path = os.path.join(where, name)
    if os.path.islink(path) and (os.path.realpath(where) + "/").startswith(os.path.realpath(path) + "/"):
        raise UserError(f"{one_line(path)} is a link to a folder that it is in, whose images would count twice: delete it")


def unreadable(error: OSError) -> Exception:
    text = f"{one_line(error.filename)} cannot be read ({error.strerror}): make it readable, or take it out of the data set"
    return of_a_file(error, text)


def opened(path: str) -> IO[bytes]:
    """Open a file to read; ValueError if it is not a regular file, or too large."""
    try:
        file = open_regular(path)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENXIO):  # the second is for a socket
            raise ValueError("not a regular file") from None
        raise
    if os.fstat(file.fileno()).st_size > MOST_BYTES:
        file.close()
        raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
    return file


def read(path: str) -> bytes:
    """Return the bytes of a file; OSError if it is not a regular file, or too large."""
    try:
        with opened(path) as file:
            return file.read(os.fstat(file.fileno()).st_size)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), path) from None
    except OSError as error:
        error.filename = path  # a failed read does not name the file
        raise


def picture(file: IO[bytes]) -> "Image.Image":
    """Open the picture with Pillow, which reads only the header here."""
    from PIL import Image

    remarks.listen_to_libtiff()
    return Image.open(file, formats=FORMATS)
