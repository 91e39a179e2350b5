"""List the objects to fetch from a bucket, give each a file name,
and check that the disk has room for them."""

import os
from typing import Optional

from common.address import is_fetchable_name
from common.errors import UserError, one_line
from common.files import MIB
from common.progress import Tell
from common.storage import index
from common.storage.bucket import Bucket
from common.storage.item import Item

SPARE = 64 << 20  # bytes that stay free on the disk
DISK_BLOCK = 512  # bytes of what st_blocks counts


def list_objects(bucket: Bucket, tell: Optional[Tell]) -> list[Item]:
    """Return the objects below the bucket's address, or the one object of this name;
    raise UserError if there are none."""
    key_prefix = bucket.key_prefix()
    items = []
    for item in bucket.items(key_prefix):
        items.append(item)
        if tell and len(items) % 1000 == 0:
            tell(f"listing {bucket.url(key_prefix)}: {len(items)} objects", len(items))
    if not items and key_prefix:
        items = [item for item in bucket.items(bucket.prefix) if item.key == bucket.prefix]
    if not items:
        raise UserError(
            f"{bucket.url(key_prefix)} at {bucket.endpoint} holds nothing: no object's name begins so"
        )
    return items


def items_by_path(bucket: Bucket, items: list[Item]) -> dict[str, Item]:
    """Return {path in the local folder: item}, but no empty folders.

    UserError if a path is unsafe, or a file and a folder.
    """
    by_path = {}
    for item in items:
        if item.key.endswith("/") and item.size == 0:
            continue  # the mark of a console for an empty folder
        name = os.path.basename(item.key) if item.key == bucket.prefix else bucket.relative(item.key)
        if not is_fetchable_name(name):
            raise UserError(
                f"{one_line(bucket.url(item.key))[:300]} cannot be the name of a file: rename the object"
            )
        by_path[name] = item
    for name in by_path:
        folders = name.split("/")[:-1]
        for depth in range(1, len(folders) + 1):
            if (folder := "/".join(folders[:depth])) in by_path:
                url = one_line(bucket.url(f"{bucket.prefix}/{folder}"))
                raise UserError(f"{url} is an object and a folder of others too: rename one of them")
    return by_path


def require_space(folder: str, items: dict[str, Item], ending: str = ".part") -> None:
    """Raise UserError, before anything is fetched, if the disk has no room for the missing bytes or files.

    `ending`: that of the names of unfinished files.
    """
    bytes_on_disk = sum(_bytes_on_disk(folder, name, item, ending) for name, item in items.items())
    needed_bytes = sum(item.size for item in items.values()) - bytes_on_disk
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    free_files = disk.f_favail
    if needed_bytes + SPARE > free_bytes:
        sizes = f"{free_bytes / MIB:.0f} MiB free, {needed_bytes / MIB:.0f} MiB are to be fetched"
        raise UserError(f"{folder} has {sizes}: start the job in a folder on a larger disk")
    if disk.f_files and len(items) > free_files:
        raise UserError(
            f"{folder} can take {free_files} more files, {len(items)} are to be fetched: start on "
            "another disk"
        )


def _bytes_on_disk(folder: str, name: str, item: Item, ending: str) -> int:
    """Return how many bytes of the disk an object has already: its size if its file is there, else what its
    unfinished file has, whose name has this ending.

    What an unfinished file has is counted in whole blocks, of which the last may be beyond its end.
    """
    if index.has_size(os.path.join(folder, name), item.size):
        return item.size
    path = index.unfinished_path(folder, name) + ending
    if not os.path.exists(path):
        return 0
    return min(item.size, os.stat(path).st_blocks * DISK_BLOCK)
