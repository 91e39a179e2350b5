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
        return "/".join(word for word in (self.bucket.prefix, name) if word)

    def names(self) -> list[str]:
        return [self.bucket.relative(item.key) for item in self.bucket.items(self.bucket.below(), self.patience)]

    def delete(self, name: str) -> None:
        self.bucket.ask("delete_object", self.key(name), self.patience)

    def copy(self, there: str, name: str) -> None:
        source = {"Bucket": self.bucket.name, "Key": self.key(there)}
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
        digest = hashlib.md5(content)

        def check(answer: dict[str, Any]) -> None:
            if not etag.is_encrypted(answer) and answer["ETag"].strip('"') != digest.hexdigest():
                raise ConnectionError("the store has received other bytes than were sent")

        self.bucket.ask("put_object", self.key(name), self.patience, work=check, Body=content, ContentMD5=_base64(digest))

    def _put_in_parts(self, name: str, file: BinaryIO) -> None:
        key = self.key(name)
        upload = self.bucket.ask("create_multipart_upload", key, self.patience)["UploadId"]
        try:
            parts = []
            while content := file.read(PART):
                number = len(parts) + 1
                digest = hashlib.md5(content)
                words = {"UploadId": upload, "PartNumber": number, "Body": content, "ContentMD5": _base64(digest)}
                answer = self.bucket.ask("upload_part", key, self.patience, **words)
                parts.append({"PartNumber": number, "ETag": answer["ETag"]})
            words = {"UploadId": upload, "MultipartUpload": {"Parts": parts}}
            self.bucket.ask("complete_multipart_upload", key, self.patience, **words)
        except BaseException:
            with contextlib.suppress(Exception):
                self.bucket.client.abort_multipart_upload(Bucket=self.bucket.name, Key=key, UploadId=upload)
            raise

    def abort_unfinished(self, ours: Callable[[str], bool]) -> None:
        """Abort the uploads that a killed start left of `ours(name)`; ignore errors, as not every store lists uploads."""
        with contextlib.suppress(Exception):  # not every store can list them
            client = self.bucket.client
            name = self.bucket.name
            answer = client.list_multipart_uploads(Bucket=name, Prefix=self.bucket.below())
            for upload in answer.get("Uploads", []):
                if ours(self.bucket.relative(upload["Key"])):
                    client.abort_multipart_upload(Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"])


def changed(folder: str, known: Files, unread: list[OSError]) -> Files:
    """Return the files that `known` lacks or that changed, without hidden and temporary ones. Add errors to `unread`."""
    found = {}
    for path in _paths(folder, unread):
        name = os.path.relpath(path, folder).replace(os.sep, "/") if path != folder else ""
        base = os.path.basename(path)
        if base.startswith(".") or base.endswith((TEMPORARY, ".lock")):
            continue
        try:
            status = os.stat(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            unread.append(error)
            continue
        now = (status.st_size, status.st_mtime_ns)
        if stat.S_ISREG(status.st_mode) and known.get(name) != now:
            found[name] = now
    return found


def _paths(folder: str, unread: list[OSError]) -> Iterator[str]:
    if os.path.isfile(folder):
        yield folder
        return
    for place, folders, names in os.walk(folder, onerror=unread.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(place, name) for name in names)


def require_read(folder: str, unread: list[OSError]) -> None:
    if unread:
        raise TrainingFailed(
            f"{len(unread)} files or folders of {folder} cannot be read, so they are not published; the first is "
            f"{one_line(unread[0].filename)}: {unread[0].strerror}"
        )


def upload(path: str, url: str, say: Say = print) -> None:
    """Upload a file, or a folder without its hidden files; files that describe others (.json) go last."""
    uploads = Uploads(url, say)
    unread = []
    for name in sorted(changed(path, {}, unread), key=lambda name: (name.endswith(".json"), name)):
        try:
            uploads.send(os.path.join(path, name) if name else path, name)
        except FileNotFoundError:  # deleted meanwhile
            continue
        except OSError as error:  # of the file: requests to the store raise other errors
            unread.append(error)
    require_read(path, unread)


def is_up_to_date(item: Optional[Item], path: str) -> bool:
    """Return whether the ETag of an object proves that it has the bytes of the file; False for None (no such object)."""
    if item is None or item.size != os.path.getsize(path) or not item.digest:
        return False
    hasher = etag.Hasher(item.digest, item.size, PART)
    with open(path, "rb") as file:
        while content := file.read(MIB):
            hasher.update(content)
    return hasher.matches() is True


def _base64(digest: Any) -> str:
    return base64.b64encode(digest.digest()).decode()
