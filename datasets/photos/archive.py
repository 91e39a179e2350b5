"""Pictures in one archive, .zip, .tar or .tar.gz: unpacked once per node, beside it if that can be written to."""

import contextlib
import hashlib
import os
import shutil
from typing import Optional

from common import storage
from common.address import is_address, local_folder
from common.errors import UserError, one_line
from common.progress import Progress
from common.storage import once
from common.storage.listing import SPARE
from datasets import untrusted
from datasets.photos import files, splits

ENDINGS = (".zip", ".tar", ".tar.gz", ".tgz")
UNPACKED = ".unpacked"  # ends the name of the folder beside an archive


def root(address: str, inputs: str) -> str:
    """Return the folder of the pictures that a folder, a bucket or an archive holds, fetched or unpacked if necessary."""
    archive = archive_of(address)
    if not archive:
        address = storage.fetch(address, inputs=inputs)
        archive = archive_of(address)
    return unpacked(archive, inputs) if archive else address


def archive_of(place: str) -> Optional[str]:
    """Return the archive that `place` is, or the one in this folder if there is nothing else; None if there is none."""
    if place.lower().endswith(ENDINGS) and not os.path.isdir(place):
        return place
    names = []
    with contextlib.suppress(OSError):  # who reads the folder says why
        names = [name for name in os.listdir(place) if not name.startswith(".") and UNPACKED not in name]
    return os.path.join(place, names[0]) if len(names) == 1 and names[0].lower().endswith(ENDINGS) else None


def unpacked(address: str, inputs: str) -> str:
    """Return the folder that holds what the archive does, without folders that hold one folder and nothing else."""
    archive = address
    if is_address(address):
        folder = storage.fetch(address, local_folder(address, os.path.join(inputs, "archives")))
        archive = os.path.join(folder, os.path.basename(address))
    if not os.path.isfile(archive):
        raise UserError(f"{one_line(address)} does not exist: give an archive of pictures, or a folder")
    folder = archive + UNPACKED
    if not os.access(os.path.dirname(os.path.abspath(archive)), os.W_OK):
        folder = os.path.join(inputs, "unpacked", hashlib.sha256(os.fsencode(os.path.realpath(archive))).hexdigest()[:16])

    def prepare(held: once.Lease) -> None:
        if not untrusted.is_unpacked(archive, folder):
            room = shutil.disk_usage(os.path.dirname(os.path.abspath(folder))).free - SPARE
            with Progress(f"unpacking {archive}", unit="files", tell=held.tell) as done:
                untrusted.unpack(archive, folder, _place_of, room, count=lambda: done.add(1))

    once.once_per_node(folder, prepare)
    return _within(folder)


def _place_of(name: str) -> Optional[str]:
    """Leave out what is hidden, the folder in which macOS keeps what other systems lack, and what is no picture."""
    hidden = any(word.startswith(".") or word == "__MACOSX" for word in name.split("/"))
    return name if not hidden and name.lower().endswith((*files.EXTENSIONS, files.MANIFEST)) else None


def _within(folder: str) -> str:
    while len(there := [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]) == 1:
        if there[0].name.lower() in splits.OTHER_NAMES or not any(entry.is_dir() for entry in os.scandir(there[0].path)):
            break
        folder = there[0].path
    return folder
