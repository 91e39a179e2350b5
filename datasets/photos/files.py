"""Find and read the files of photographs, with limits on their type and size,
because the files may come from strangers.

A file or folder that cannot be listed or opened is an error that names it. Otherwise a class could be missing
unnoticed.
"""

import argparse
import errno
import os
from typing import IO, TYPE_CHECKING, Optional

from common import arguments
from common.address import INPUT_DIR
from common.errors import UserError, file_error, one_line
from common.files import open_regular
from datasets.photos import remarks

if TYPE_CHECKING:
    from PIL import Image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# The formats that Pillow may open. For EPS, for example, it would start another program.
FORMATS = ["JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF"]
MANIFEST = ".manifest"  # the ending of a file that labels photographs
JOB_FILES = ("journal.jsonl", ".lock")  # files in the output folder of a run, which is not a class
MOST_BYTES = 256 << 20  # of a file
MOST_PIXELS = 100_000_000  # more is a decompression bomb
MEGAPIXELS = 80  # default of --max_megapixels


def add_max_megapixels(group: "argparse._ActionsContainer") -> None:
    """Add --max_megapixels to a parser or a group of its options."""
    megapixels = arguments.number(int, at_least=1, below=MOST_PIXELS // 10**6 + 1)
    group.add_argument(
        "--max_megapixels",
        type=megapixels,
        default=MEGAPIXELS,
        help="photographs of more million pixels are left "
        "out and counted, because one that is decoded takes up to 10 MB a million in its worker",
    )


def manifest_of(address: str) -> Optional[str]:
    """Return the manifest: `address` itself, or the one in this folder; None if there is none.

    None, too, for a folder with train or val; UserError if it has several manifests.
    """
    if address.endswith(MANIFEST):
        return address
    if not os.path.isdir(address) or any(
        os.path.exists(os.path.join(address, split)) for split in ("train", "val")
    ):
        return None
    manifests = sorted(
        name for name in os.listdir(address) if name.endswith(MANIFEST) and not name.startswith(".")
    )
    if len(manifests) > 1:
        raise UserError(
            f"{one_line(address)} has {len(manifests)} manifests: give one, such as "
            f"{one_line(manifests[-1])} in it"
        )
    return os.path.join(address, manifests[0]) if manifests else None


def classes(folder: str) -> dict[str, int]:
    """Return {class: st_mtime_ns of its folder}, sorted, without hidden folders and a job's own;
    UserError if none is left."""
    mtimes = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                mtime = entry.stat().st_mtime_ns  # follows a link, whose target may be missing
                if entry.is_dir() and not _is_of_a_job(entry):
                    mtimes[entry.name] = mtime
    except OSError as error:
        raise unreadable_error(error) from None
    if not mtimes:
        raise UserError(f"{folder} has no folder for any class: its images must be in {folder}/CLASS/")
    return dict(sorted(mtimes.items()))


def _is_of_a_job(entry: "os.DirEntry[str]") -> bool:
    job_files = (os.path.join(entry.path, name) for name in JOB_FILES)
    return entry.name in (INPUT_DIR, "output_dir") or any(map(os.path.exists, job_files))


def images_below(
    folder: str, label: str = "", other_files: Optional[dict[str, list[str]]] = None
) -> list[str]:
    """Return the paths of the pictures below `folder`, relative to it, in the order of ImageFolder.

    `label`: only of this class. Files that are not named like pictures, unless hidden, are added to
    `other_files`, by extension.
    """
    paths = []
    for parent, folders, names in sorted(
        os.walk(os.path.join(folder, label), onerror=_raise_unreadable, followlinks=True)
    ):
        for name in folders:
            _refuse_circle(parent, name)
        for name in sorted(names):
            path = os.path.join(parent, name)
            if name.lower().endswith(EXTENSIONS):
                paths.append(os.path.relpath(path, folder))
                continue
            if os.path.islink(path):
                _refuse_dangling(path)
            if other_files is not None and not name.startswith("."):
                other_files.setdefault(os.path.splitext(name)[1].lower(), []).append(
                    os.path.relpath(path, folder)
                )
    return paths


def _raise_unreadable(error: OSError) -> None:
    raise unreadable_error(error)


def _refuse_dangling(path: str) -> None:
    """Raise an error if the target of a link is missing: it may be a folder of images."""
    try:
        os.stat(path)
    except OSError as error:
        raise unreadable_error(error) from None


def _refuse_circle(parent: str, name: str) -> None:
    """Raise a UserError if `name` is a link to a folder above it,
    whose images would be counted again and again."""
    path = os.path.join(parent, name)
    if os.path.islink(path) and (os.path.realpath(parent) + "/").startswith(os.path.realpath(path) + "/"):
        raise UserError(
            f"{one_line(path)} is a link to a folder that it is in, whose images would count twice: delete it"
        )


def unreadable_error(error: OSError) -> Exception:
    """Return the error to raise, with a hint, for a file or folder of a data set that cannot be read."""
    text = (
        f"{one_line(error.filename)} cannot be read ({error.strerror}): make it readable, or take it out of "
        "the data set"
    )
    return file_error(error, text)


def open_limited(path: str) -> IO[bytes]:
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
        with open_limited(path) as file:
            return file.read(os.fstat(file.fileno()).st_size)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), path) from None
    except OSError as error:
        error.filename = path  # a failed read does not name the file
        raise


def open_picture(file: IO[bytes]) -> "Image.Image":
    """Open a picture with Pillow, which reads only its header until the pixels are used."""
    from PIL import Image

    remarks.listen_to_libtiff()
    return Image.open(file, formats=FORMATS)
