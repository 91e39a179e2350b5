"""Upload files to a bucket. Each object is whole under its name, and verified by the store."""

import base64
import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO, Callable, Optional

from common.alive.patience import Patience, Say
from common.errors import TrainingFailed, one_line
from common.files import MIB, TEMPORARY
from common.storage import etag
from common.storage.bucket import Bucket
from common.storage.item import Item

PART = 16 << 20  # larger files go in parts of this size

Files = dict[str, tuple[int, int]]  # {name below a folder, or "" for a single file: (size, mtime)}


class Uploads:
    """Writes and deletes objects below the address of a bucket. All requests share one Patience."""

    def __init__(self, url: str, say: Say = print) -> None:
        self.bucket = Bucket(url, say)
        self.patience = Patience()

    def key(self, name: str) -> str:
        """Return the key of the object `name` below the address."""
        return "/".join(word for word in (self.bucket.prefix, name) if word)

    def names(self) -> list[str]:
        """Return the names of all objects below the address."""
        return [
            self.bucket.relative(item.key)
            for item in self.bucket.items(self.bucket.key_prefix(), self.patience)
        ]

    def delete(self, name: str) -> None:
        """Delete an object; it may be missing."""
        self.bucket.ask("delete_object", self.key(name), self.patience)

    def copy(self, source_name: str, name: str) -> None:
        """Copy the object `source_name` to `name` within the bucket."""
        source = {"Bucket": self.bucket.name, "Key": self.key(source_name)}
        self.bucket.ask("copy_object", self.key(name), self.patience, CopySource=source)

    def send(self, path: str, name: str) -> None:
        """Upload a file; one that still grows is sent as it is now."""
        with open(path, "rb") as file:
            content = file.read(PART + 1)
            if len(content) <= PART:
                self.put(name, content)
            else:
                file.seek(0)
                self._put_in_parts(name, file)

    def put(self, name: str, content: bytes) -> None:
        """Upload `content` in one request, and compare its MD5 with the ETag that the store returns."""
        digest = hashlib.md5(content)

        def check(answer: dict[str, Any]) -> None:
            if not etag.is_encrypted(answer) and answer["ETag"].strip('"') != digest.hexdigest():
                raise ConnectionError("the store has received other bytes than were sent")

        self.bucket.ask(
            "put_object", self.key(name), self.patience, work=check, Body=content, ContentMD5=_base64(digest)
        )

    def _put_in_parts(self, name: str, file: BinaryIO) -> None:
        """Upload a file as a multipart upload, which is aborted after an error."""
        key = self.key(name)
        upload_id = self.bucket.ask("create_multipart_upload", key, self.patience)["UploadId"]
        try:
            parts = []
            while content := file.read(PART):
                number = len(parts) + 1
                digest = hashlib.md5(content)
                parameters = {
                    "UploadId": upload_id,
                    "PartNumber": number,
                    "Body": content,
                    "ContentMD5": _base64(digest),
                }
                answer = self.bucket.ask("upload_part", key, self.patience, **parameters)
                parts.append({"PartNumber": number, "ETag": answer["ETag"]})
            parameters = {"UploadId": upload_id, "MultipartUpload": {"Parts": parts}}
            self.bucket.ask("complete_multipart_upload", key, self.patience, **parameters)
        except BaseException:
            with contextlib.suppress(Exception):
                self.bucket.client.abort_multipart_upload(
                    Bucket=self.bucket.name, Key=key, UploadId=upload_id
                )
            raise

    def abort_unfinished(self, is_ours: Callable[[str], bool]) -> None:
        """Abort multipart uploads that killed starts left for names with `is_ours(name)`; ignore errors."""
        with contextlib.suppress(Exception):  # not every store can list them
            client = self.bucket.client
            name = self.bucket.name
            answer = client.list_multipart_uploads(Bucket=name, Prefix=self.bucket.key_prefix())
            for upload in answer.get("Uploads", []):
                if is_ours(self.bucket.relative(upload["Key"])):
                    client.abort_multipart_upload(Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"])


def changed_files(folder: str, previous: Files, read_errors: list[OSError]) -> Files:
    """Return the files that `previous` lacks or that changed, without hidden and temporary ones.

    Add errors to `read_errors`.
    """
    changes = {}
    for path in _paths(folder, read_errors):
        name = os.path.relpath(path, folder).replace(os.sep, "/") if path != folder else ""
        base_name = os.path.basename(path)
        if base_name.startswith(".") or base_name.endswith((TEMPORARY, ".lock")):
            continue
        try:
            status = os.stat(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            read_errors.append(error)
            continue
        current = (status.st_size, status.st_mtime_ns)
        if stat.S_ISREG(status.st_mode) and previous.get(name) != current:
            changes[name] = current
    return changes


def _paths(folder: str, read_errors: list[OSError]) -> Iterator[str]:
    """Yield the files below `folder`, without hidden folders, or `folder` itself if it is a file."""
    if os.path.isfile(folder):
        yield folder
        return
    for parent, folders, names in os.walk(folder, onerror=read_errors.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(parent, name) for name in names)


def require_readable(folder: str, read_errors: list[OSError]) -> None:
    """Raise TrainingFailed if there are errors in `read_errors`."""
    if read_errors:
        raise TrainingFailed(
            f"{len(read_errors)} files or folders of {folder} cannot be read, so they are not published; the "
            f"first is {one_line(read_errors[0].filename)}: {read_errors[0].strerror}"
        )


def upload(path: str, url: str, say: Say = print) -> None:
    """Upload a file, or a folder without its hidden files; files that describe others (.json) go last."""
    uploads = Uploads(url, say)
    read_errors = []
    for name in sorted(changed_files(path, {}, read_errors), key=lambda name: (name.endswith(".json"), name)):
        try:
            uploads.send(os.path.join(path, name) if name else path, name)
        except FileNotFoundError:  # deleted meanwhile
            continue
        except OSError as error:  # of the file: requests to the store raise other errors
            read_errors.append(error)
    require_readable(path, read_errors)


def is_up_to_date(item: Optional[Item], path: str) -> bool:
    """Return whether the ETag of an object proves that it has the bytes of the file;
    False for None (no such object)."""
    if item is None or item.size != os.path.getsize(path) or not item.digest:
        return False
    hasher = etag.Hasher(item.digest, item.size, PART)
    with open(path, "rb") as file:
        while content := file.read(MIB):
            hasher.update(content)
    return hasher.matches() is True


def _base64(digest: Any) -> str:
    return base64.b64encode(digest.digest()).decode()
