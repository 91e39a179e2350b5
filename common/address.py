"""What is an address, which of them are buckets, and where on this machine lies what one names?"""

import hashlib
import os
import re

from common.secrets import BUCKETS, mask

INPUT_DIR = "input_dir"  # the default name of the folder for fetched data and for the indexes of data sets

# The subfolder of fetched data that holds unfinished files and the records of the fetch. No object can have
# this name.
FETCHING = ".fetching"


def is_address(text: object) -> bool:
    """Whether `text` looks like an address, also a mistyped one such as s3:/bucket,
    which must not be taken for a folder."""
    return isinstance(text, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", text) is not None


def is_bucket(text: object) -> bool:
    """Whether `text` is an address in a bucket, such as s3://bucket/prefix."""
    return isinstance(text, str) and text.startswith(BUCKETS)


def is_fetchable_name(name: object) -> bool:
    """Whether an object's name is a safe path: at most 1024 characters, no part empty, ., .. or .fetching."""
    parts = name.split("/") if isinstance(name, str) and len(name) <= 1024 else [""]
    return not any(part.lower() in ("", ".", "..", FETCHING) or "\0" in part for part in parts)


def local_folder(url: str, root: str) -> str:
    """Return the local folder for `url`, such as ROOT/s3/bucket/prefix,
    or ROOT/https/host/folder for a file on the web."""
    scheme, _, rest = mask(url).partition("://")
    if scheme in ("http", "https"):  # the address of a file, which is stored in the local folder
        rest = re.split("[?#]", rest)[0]
        rest = rest.rpartition("/")[0] or rest
    parts = list(map(_as_folder, rest.removesuffix("/").split("/")))
    if mask(url) != url:  # addresses that differ only in a password or query need different folders
        parts.append("%" + hashlib.sha256(url.encode()).hexdigest()[:16])
    return os.path.join(root, scheme, *parts)


def _as_folder(part: str) -> str:
    """Return a folder name for a part of an address: never empty, ., .. or FETCHING,
    and different for different parts."""
    part = part.replace("%", "%25")
    return f"%{part}" if part.lower() in ("", ".", "..", FETCHING) else part
