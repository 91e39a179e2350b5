"""Read parts of a bucket's objects: through obstore where it is installed, else boto3,
which also says why a request failed."""

import time
from typing import Any, Callable

from common.alive.patience import Patience
from common.storage import obstore
from common.storage.bucket import Bucket, ObjectChanged
from common.storage.item import Item

# for which boto3 reads after a request of obstore's has failed; twice as long after each further one
SLOW_SECONDS = 30.0


class Ranges:
    """Reads parts, from any number of threads.

    Temporary errors are retried for `patience`; a refusal raises UserError.
    """

    def __init__(self, bucket: Bucket, patience: Patience) -> None:
        self._bucket = bucket
        self.patience = patience
        self._fast_reader = obstore.reader(bucket)
        self._slow_until = 0.0
        self._slow_seconds = SLOW_SECONDS

    @property
    def threads(self) -> int:
        """How many concurrent requests are of use: boto3 keeps 32 connections."""
        return 64 if self._fast_reader else 32

    def read(self, item: Item, begin: int, length: int) -> bytes:
        """Return a part of the object; ObjectChanged if there is another one under its key by now."""
        pieces: list[bytes] = []
        if self.stream(item, begin, length, lambda _, piece: pieces.append(bytes(piece))):
            return b"".join(pieces)
        return self.read_slowly(item, begin, length)

    def stream(self, item: Item, begin: int, length: int, keep: Callable[[int, memoryview], None]) -> bool:
        """Read a part with obstore, call keep(offset, piece) in order, and return whether all was read.

        If not, call read_slowly(). After a failure, obstore is not used for a while: its time limit is for
        a whole part, which a slow connection exceeds.
        """
        if not self._fast_reader or time.monotonic() <= self._slow_until:
            return False
        if self._fast_reader.read_part(item, begin, length, keep):
            self.patience.succeeded()
            return True
        if time.monotonic() > self._slow_until:  # no other thread has noticed it
            self._slow_until = time.monotonic() + self._slow_seconds
            self._slow_seconds *= 2
        return False

    def read_slowly(self, item: Item, begin: int, length: int) -> bytes:
        """Return a part of the object, read with boto3."""

        def read(answer: Any) -> bytes:
            total_size = str(answer.get("ContentRange", "")).rpartition("/")[2]
            if total_size.isdigit() and int(total_size) < begin + length:
                raise ObjectChanged
            if answer["ContentLength"] != length:
                answer["Body"].close()
                raise ConnectionError("the answer has another length than was asked for")
            return answer["Body"].read()

        condition = {"IfMatch": f'"{item.etag}"'} if item.etag else {}
        parameters = {"Range": f"bytes={begin}-{begin + length - 1}", **condition}
        return self._bucket.ask("get_object", item.key, self.patience, work=read, **parameters)
