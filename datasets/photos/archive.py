"""Pictures in one archive, .zip, .tar or .tar.gz: unpacked once per node,
beside it if that can be written to."""

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
    """Return the folder of the pictures that a folder, a bucket or an archive holds,
    fetched or unpacked if necessary."""
    archive = archive_of(address)
    if not archive:
        address = storage.fetch(address, inputs=inputs)
        archive = archive_of(address)
    return unpack(archive, inputs) if archive else address


def archive_of(address: str) -> Optional[str]:
    """Return the archive: `address` itself, or the file that is alone in this folder; else None."""
    if address.lower().endswith(ENDINGS) and not os.path.isdir(address):
        return address
    names = []
    with contextlib.suppress(OSError):  # who reads the folder says why
        names = [name for name in os.listdir(address) if not name.startswith(".") and UNPACKED not in name]
    if len(names) != 1 or not names[0].lower().endswith(ENDINGS):
        return None
    only_entry = os.path.join(address, names[0])
    return only_entry if os.path.isfile(only_entry) else None


def unpack(address: str, inputs: str) -> str:
    """Fetch and unpack an archive, once per node. Return the folder with its pictures, see _innermost()."""
    archive = address
    if is_address(address):
        folder = storage.fetch(address, local_folder(address, os.path.join(inputs, "archives")))
        archive = os.path.join(folder, os.path.basename(address))
    if not os.path.isfile(archive):
        raise UserError(f"{one_line(address)} does not exist: give an archive of pictures, or a folder")
    folder = archive + UNPACKED
    if not os.access(os.path.dirname(os.path.abspath(archive)), os.W_OK):
        folder = os.path.join(
            inputs, "unpacked", hashlib.sha256(os.fsencode(os.path.realpath(archive))).hexdigest()[:16]
        )

    def prepare(lease: once.Lease) -> None:
        if not untrusted.is_unpacked(archive, folder):
            room = shutil.disk_usage(os.path.dirname(os.path.abspath(folder))).free - SPARE
            with Progress(f"unpacking {archive}", unit="files", tell=lease.tell) as progress:
                untrusted.unpack(archive, folder, _picture_name, room, count=lambda: progress.add(1))

    once.once_per_node(folder, prepare)
    return _innermost(folder)


def _picture_name(name: str) -> Optional[str]:
    """Return a member's name if it is a visible picture or manifest; None to leave it out."""
    is_hidden = any(word.startswith(".") or word == "__MACOSX" for word in name.split("/"))
    return name if not is_hidden and name.lower().endswith((*files.EXTENSIONS, files.MANIFEST)) else None


def _innermost(folder: str) -> str:
    """Enter a folder that is alone in its folder, repeatedly, unless it is a split or holds no folder."""
    while True:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
        if len(entries) != 1 or not entries[0].is_dir() or entries[0].name.lower() in splits.OTHER_NAMES:
            return folder
        inner = entries[0].path
        if not any(entry.is_dir() for entry in os.scandir(inner)):
            return folder
        folder = inner
