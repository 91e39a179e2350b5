"""Data in, results out: the same for a mounted folder, a bucket and a web server.

folder = fetch(url, folder)     what to read: the path itself, or a folder that now holds what the address names
publish(path, url)              a file or folder, to a path or a bucket
"""

import os
import shutil
import urllib.parse

from common.errors import UserError, one_line
from common.storage import bucket, download, https, once, upload
from common.world.folders import is_address, local_folder


def fetch(url, folder=None, say=print):
    """The folder to read. Once per node, whatever the number of processes that ask; the others wait and share its end."""
    if not is_address(url):
        return url
    folder = folder or local_folder(url, "input_dir")
    try:
        _fetch_once(url, folder, say)
    except OSError as error:
        raise UserError(f"{folder}, for {one_line(url)[:200]}, cannot be written to: {one_line(error.strerror)}") from None
    return folder


def _fetch_once(url, folder, say):
    if bucket.is_address(url):
        once.once_per_node(os.path.join(folder, ".fetch"), lambda held: download.fetch(url, folder, held.tell, say))
    else:
        path = os.path.join(folder, os.path.basename(urllib.parse.urlsplit(url).path) or "download")
        once.once_per_node(path, lambda held: os.path.exists(path) or https.download(url, path, tell=held.tell))


def publish(path, url, say=print):
    """Whole files under their names, and a checkpoint's manifest behind what it vouches for."""
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
