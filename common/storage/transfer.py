"""Data in, results out: the same for a mounted folder, a bucket and a web server.

folder = fetch(url, folder)     what to read: the path itself, or a folder that now holds what the address names
publish(path, url)              a file or folder, to a path or a bucket
"""

import os
import shutil
import urllib.parse
from typing import Optional

from common.errors import UserError, one_line
from common.storage import bucket, download, https, once, upload
from common.storage.bucket import Say
from common.world.folders import is_address, local_folder


def fetch(url: str, folder: Optional[str] = None, say: Say = print) -> str:
    """The folder to read. One process of a node fetches; the others wait for it, and fail if it fails."""
    if not is_address(url):
        return url
    folder = folder or local_folder(url, "input_dir")
    try:
        if bucket.is_address(url):
            once.once_per_node(os.path.join(folder, ".fetch"), lambda held: download.fetch(url, folder, held.tell, say))
        else:
            path = os.path.join(folder, os.path.basename(urllib.parse.urlsplit(url).path) or "download")
            once.once_per_node(path, lambda held: os.path.exists(path) or https.download(url, path, tell=held.tell))
    except OSError as error:
        raise UserError(f"{folder}, for {one_line(url)[:200]}, cannot be written to: {one_line(error.strerror)}") from None
    return folder


def publish(path: str, url: str, say: Say = print) -> None:
    """A file or folder to a path or a bucket: each file under its name when it is whole, a checkpoint before its manifest."""
    if bucket.is_address(url):
        upload.Publisher(path, url, say).finish()
    elif is_address(url):
        raise UserError(f"{one_line(url)[:200]}: only a folder or s3://, obs://, oss:// can be written to")
    elif os.path.isdir(path):
        shutil.copytree(path, url, dirs_exist_ok=True)
    else:
        os.makedirs(os.path.dirname(os.path.abspath(url)), exist_ok=True)
        shutil.copy2(path, f"{url}.unfinished")
        os.replace(f"{url}.unfinished", url)
