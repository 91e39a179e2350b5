"""Fetch data and publish results: the same for a mounted folder, a bucket and a web server.

folder = fetch(url, folder)  # what to read: the path itself, or a folder with what is at the address
publish(path, url)           # a file or folder, to a path or a bucket
"""

import hashlib
import os
import shutil
import urllib.parse
from collections.abc import Collection
from typing import Optional

from common import files
from common.address import INPUT_DIR, is_address, is_bucket, is_fetchable_name, local_folder
from common.alive.patience import Say
from common.errors import UserError, file_error, one_line


def fetch(
    url: str,
    folder: Optional[str] = None,
    say: Say = print,
    inputs: str = INPUT_DIR,
    only: Optional[Collection[str]] = None,
) -> str:
    """Fetch what `url` names, once per node, to `folder` or a subfolder of `inputs`; return this,
    or `url` if it is a path.

    `only`: paths below a bucket's `url`; no other objects are fetched.
    """
    if not is_address(url):
        return url
    from common.storage import https, index, once

    if not is_bucket(url):
        https.refuse_unsafe(url)
    folder = folder or local_folder(url, inputs)
    try:
        if is_bucket(url):
            from common.storage import download

            lock_path = os.path.join(index.make_records_folder(folder), "fetch")
            request = ""
            if only is not None:
                request = hashlib.sha256("\n".join(sorted(only)).encode()).hexdigest()

            def fetch_objects(lease: once.Lease) -> None:
                download.fetch(url, folder, lease.tell, say, only)

            once.once_per_node(lock_path, fetch_objects, request)
        else:
            name = os.path.basename(urllib.parse.urlsplit(url).path) or "download"
            if not is_fetchable_name(name):
                raise UserError(
                    f"{one_line(url)[:200]} ends with what cannot be the name of a file: give another address"
                )
            path = os.path.join(folder, name)
            lock_path = os.path.join(index.make_records_folder(folder), name)

            def fetch_file(lease: once.Lease) -> None:
                if not os.path.exists(path) or https.is_replaced(url, path):
                    https.download(url, path, tell=lease.tell)

            once.once_per_node(lock_path, fetch_file)
    except OSError as error:
        text = f"{folder}, for {one_line(url)[:200]}, cannot be written to: {one_line(error.strerror)}"
        raise file_error(error, text) from None
    return folder


def publish(path: str, url: str, say: Say = print) -> None:
    """Copy a file or folder to a path, or to a bucket, which gets no hidden files.

    Each file gets its name when it is whole.
    """
    if is_bucket(url):
        from common.storage import upload

        upload.upload(path, url, say)
    elif is_address(url):
        raise UserError(f"{one_line(url)[:200]}: only a folder or s3://, obs://, oss:// can be written to")
    elif os.path.isdir(path):
        shutil.copytree(path, url, dirs_exist_ok=True, copy_function=_copy)
    else:
        os.makedirs(os.path.dirname(os.path.abspath(url)), exist_ok=True)
        _copy(path, url)


def _copy(path: str, destination: str) -> None:
    """Copy the file with its times and mode. The copy gets its name when it is whole."""
    with files.open_regular(path) as source, files.create(destination + files.TEMPORARY) as target:
        shutil.copyfileobj(source, target)
    shutil.copystat(path, destination + files.TEMPORARY)
    os.replace(destination + files.TEMPORARY, destination)
