"""Read parts of a bucket's objects: through obstore where it is installed, else boto3, which also says why a request failed."""

import time
from typing import Any

from common.alive.patience import Patience
from common.storage import obstore
from common.storage.bucket import Bucket, ObjectChanged
from common.storage.item import Item

SLOW_SECONDS = 30.0  # for which boto3 reads after a request of obstore's has failed; twice as long after each further one


class Ranges:
    """Reads parts, from any number of threads. Temporary errors are retried for `patience`; a refusal raises UserError."""

    def __init__(self, bucket: Bucket, patience: Patience) -> None:
        self._bucket, self.patience = bucket, patience
        self._fast = obstore.reader(bucket)
        self._slow_until, self._slow_seconds = 0.0, SLOW_SECONDS

    @property
    def threads(self) -> int:
        """How many concurrent requests are of use: boto3 keeps 32 connections."""
        return 64 if self._fast else 32

    def read(self, item: Item, begin: int, length: int) -> bytes:
        """Return a part of the object; ObjectChanged if there is another one under its key by now."""
        pieces: list[bytes] = []
        if self._fast and time.monotonic() > self._slow_until:
            if self._fast.part(item, begin, length, lambda _, piece: pieces.append(bytes(piece))):
                self.patience.succeeded()
                return b"".join(pieces)
            if time.monotonic() > self._slow_until:  # it has one time limit for a whole part, which a slow line exceeds
                self._slow_until = time.monotonic() + self._slow_seconds
                self._slow_seconds *= 2
        return read_slowly(self._bucket, item, begin, length, self.patience)


def read_slowly(bucket: Bucket, item: Item, begin: int, length: int, patience: Patience) -> bytes:
    """Return a part of the object, read with boto3."""

    def read(answer: Any) -> bytes:
        whole = str(answer.get("ContentRange", "")).rpartition("/")[2]
        if whole.isdigit() and int(whole) < begin + length:
            raise ObjectChanged
        if answer["ContentLength"] != length:
            answer["Body"].close()
            raise ConnectionError("the answer has another length than was asked for")
        return answer["Body"].read()

    same = {"IfMatch": f'"{item.etag}"'} if item.etag else {}
    return bucket.ask("get_object", item.key, patience, work=read, Range=f"bytes={begin}-{begin + length - 1}", **same)
