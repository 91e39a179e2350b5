"""What an object's ETag says of its bytes: an MD5, an MD5 of the MD5s of its parts, or nothing."""

import hashlib
from collections.abc import Mapping
from typing import Any, Optional, Union

from common.files import MIB

# The sizes of parts in which common programs upload, for a store that does not tell.
PART_SIZES = [size * MIB for size in (5, 8, 10, 15, 16, 20, 25, 32, 50, 64, 100, 128, 256, 512, 1024)]


def is_encrypted(answer: Mapping[str, Any]) -> bool:
    """Whether the store has encrypted the object with a key of its user's, so that its ETag is no digest."""
    return answer.get("ServerSideEncryption", "AES256") != "AES256" or bool(answer.get("SSECustomerAlgorithm"))


class Hasher:
    """The digest that an ETag is: MD5 of the object, or of the MD5s of the parts that it was stored in."""

    def __init__(self, digest: Optional[str], size: int, part_size: int) -> None:
        self._expected, self._parts = digest, int(digest.partition("-")[2] or 0) if digest else 0
        if self._parts and -(-size // part_size) != self._parts:  # a store that does not tell
            fitting = [candidate for candidate in PART_SIZES if -(-size // candidate) == self._parts]
            part_size = fitting[0] if len(fitting) == 1 else 0
        self._part_size, self._filled = part_size, 0
        if self._parts and not part_size:
            self._expected = None
        self._whole, self._part = hashlib.md5(), hashlib.md5()

    def update(self, content: Union[bytes, memoryview]) -> None:
        if self._expected is None:
            return
        if not self._parts:
            self._whole.update(content)
            return
        rest = memoryview(content)
        while rest:
            piece = rest[: self._part_size - self._filled]
            self._part.update(piece)
            self._filled += len(piece)
            rest = rest[len(piece) :]
            if self._filled == self._part_size:
                self._close_part()

    def _close_part(self):
        self._whole.update(self._part.digest())
        self._part, self._filled = hashlib.md5(), 0

    def right(self) -> Optional[bool]:
        """Whether the bytes have the digest; None where there is no digest to compare with."""
        if self._expected is None:
            return None
        if self._filled:
            self._close_part()
        return self._whole.hexdigest() + (f"-{self._parts}" if self._parts else "") == self._expected
