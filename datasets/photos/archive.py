"""Pictures in one archive, .zip, .tar or .tar.gz: unpacked once per node, beside it if that can be written to."""

import hashlib
import os
import shutil
from typing import Optional

from common import storage
from common.errors import UserError, one_line
from common.progress import Progress
from common.storage import once
from common.storage.listing import SPARE
from common.world.folders import is_address, local_folder
from datasets import untrusted
from datasets.photos import splits

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
    names = [name for name in os.listdir(place) if not name.startswith(".")] if os.path.isdir(place) else []
    archives = [name for name in names if name.lower().endswith(ENDINGS)]
    own = {f"{name}{ending}" for name in archives for ending in (UNPACKED, f"{UNPACKED}.lock")}
    return os.path.join(place, archives[0]) if len(archives) == 1 and set(names) <= {*archives, *own} else None


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

    def prepare(held):
        if not untrusted.is_unpacked(archive, folder):
            room = shutil.disk_usage(os.path.dirname(os.path.abspath(folder))).free - SPARE
            with Progress(f"unpacking {archive}", unit="files", tell=held.tell) as done:
                untrusted.unpack(archive, folder, _place_of, room, count=lambda: done.add(1))

    once.once_per_node(folder, prepare)
    return _within(folder)


def _place_of(name):
    """Leave out what is hidden, and the folder in which macOS keeps what other systems lack."""
    words = name.split("/")
    return None if "__MACOSX" in words or any(word.startswith(".") for word in words) else name


def _within(folder):
    with os.scandir(folder) as entries:
        there = [entry for entry in entries if not entry.name.startswith(".")]
    if len(there) != 1 or not there[0].is_dir() or there[0].name.lower() in splits.OTHER_NAMES:
        return folder
    with os.scandir(there[0].path) as entries:
        return _within(there[0].path) if any(entry.is_dir() for entry in entries) else folder
