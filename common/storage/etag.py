"""The digest that a store states for an object: a checksum,
an ETag that is an MD5 or an MD5 of the MD5s of parts, or none."""

import base64
import functools
import hashlib
import re
import zlib
from collections.abc import Mapping
from typing import Any, Callable, Optional, Union

from common.files import MIB

# The part sizes with which common programs upload, for a store that does not state the size of an object's
# parts.
PART_SIZES = [size * MIB for size in (5, 8, 10, 15, 16, 20, 25, 32, 50, 64, 100, 128, 256, 512, 1024)]


def is_encrypted(answer: Mapping[str, Any]) -> bool:
    """Whether the object is encrypted otherwise than with the store's own AES256 keys,
    so that its ETag is not a digest."""
    return answer.get("ServerSideEncryption", "AES256") != "AES256" or bool(
        answer.get("SSECustomerAlgorithm")
    )


class Crc:
    """A CRC with update() and digest(), as in hashlib."""

    def __init__(
        self,
        compute: Callable[[Any, int], int],
        digest_size: int,
        combine: Optional[Callable[[int, int, int], int]] = None,
    ) -> None:
        """`compute(content, crc)`: the CRC of what `crc` is of, followed by `content`.

        `digest_size`: in bytes.

        `combine(first, second, num_bytes)`: the CRC of what `first` is of, followed by the bytes that
        `second` is of."""
        self._compute = compute
        self._digest_size = digest_size
        self._combine = combine
        self._value = 0
        self._num_bytes = 0

    def crc_of_next_piece(self) -> "Optional[Crc]":
        """Return a new Crc for the next piece, to be given to add();
        None if these CRCs cannot be combined."""
        return Crc(self._compute, self._digest_size) if self._combine else None

    def update(self, content: Any) -> None:
        self._value = self._compute(content, self._value)
        self._num_bytes += len(content)

    def add(self, following: "Crc") -> None:
        """Continue with the bytes of which `following` is the CRC."""
        assert self._combine
        self._value = self._combine(self._value, following._value, following._num_bytes)
        self._num_bytes += following._num_bytes

    def digest(self) -> bytes:
        return self._value.to_bytes(self._digest_size, "big")


@functools.cache
def _checksums() -> dict[str, Callable[[], Any]]:
    """Return {name in boto3's answer: function that makes the hash}, fastest first.

    Two of them need the package awscrt.
    """
    makers: dict[str, Callable[[], Any]] = {}
    try:
        from awscrt import checksums

        combiners = {
            name: getattr(checksums, f"combine_{name}", None) for name in ("crc64nvme", "crc32c")
        }  # old ones lack them
        makers["ChecksumCRC64NVME"] = lambda: Crc(checksums.crc64nvme, 8, combiners["crc64nvme"])
        makers["ChecksumCRC32C"] = lambda: Crc(checksums.crc32c, 4, combiners["crc32c"])
    except ImportError:
        pass
    makers["ChecksumCRC32"] = lambda: Crc(zlib.crc32, 4)
    return {**makers, "ChecksumSHA1": hashlib.sha1, "ChecksumSHA256": hashlib.sha256}


def checksum(answer: Mapping[str, Any]) -> Optional[tuple[str, Callable[[], Any]]]:
    """Return the checksum in `answer`, in hex, with -N if it is of N parts,
    and a function that makes its hash; or None."""
    has_parts = "-" in answer.get("ETag", "")
    for name, make in _checksums().items():
        match = re.fullmatch(r"([A-Za-z0-9+/]+={0,2})(-\d{1,5})?", answer.get(name) or "")
        # Even without -N, the checksum of an object in parts may be a checksum of its parts' checksums.
        if match and (
            match[2]
            or not has_parts
            or answer.get("ChecksumType") == "FULL_OBJECT"
            or name == "ChecksumCRC64NVME"
        ):
            return base64.b64decode(match[1] + "==").hex() + (match[2] or ""), make
    return None


class Hasher:
    """Checks bytes against a digest: of all bytes, or of the digests of the parts in which they were
    stored."""

    def __init__(
        self, digest: Optional[str], size: int, part_size: int, make: Callable[[], Any] = hashlib.md5
    ) -> None:
        """`digest`: in hex, with -N for N parts of `part_size` (guessed if it does not fit N).

        None: nothing is compared."""
        self._expected = digest
        self._part_count = int(digest.partition("-")[2] or 0) if digest else 0
        # the store has not stated it
        self.is_guessed = bool(self._part_count) and -(-size // part_size) != self._part_count
        if self.is_guessed:
            fitting = [candidate for candidate in PART_SIZES if -(-size // candidate) == self._part_count]
            part_size = fitting[0] if len(fitting) == 1 else 0
        self._part_size = part_size
        self._filled = 0
        if self._part_count and not part_size:
            self._expected = None
        self._make_hash = make
        self._hash = make()
        self._part_hash = make()

    def crc_of_next_piece(self) -> Optional[Crc]:
        """Return a Crc to update with the next piece and to give to add();
        None if the piece must be given to update()."""
        can_combine = not self._part_count and self._expected is not None and isinstance(self._hash, Crc)
        return self._hash.crc_of_next_piece() if can_combine else None

    def add(self, following: Crc) -> None:
        """Continue with the bytes of which `following` is the CRC, in place of update()."""
        self._hash.add(following)

    def update(self, content: Union[bytes, memoryview]) -> None:
        """Hash the next bytes."""
        if self._expected is None:
            return
        if not self._part_count:
            self._hash.update(content)
            return
        remaining = memoryview(content)
        while remaining:
            piece = remaining[: self._part_size - self._filled]
            self._part_hash.update(piece)
            self._filled += len(piece)
            remaining = remaining[len(piece) :]
            if self._filled == self._part_size:
                self._close_part()

    def _close_part(self):
        """Add the digest of a complete part to the digest of the parts."""
        self._hash.update(self._part_hash.digest())
        self._part_hash = self._make_hash()
        self._filled = 0

    def matches(self) -> Optional[bool]:
        """Return whether the bytes have the digest; None if there is no digest,
        or the size of its parts is unknown."""
        if self._expected is None:
            return None
        if self._filled:
            self._close_part()
        self.computed = self._hash.digest().hex()
        if self._part_count:
            self.computed += f"-{self._part_count}"
        return self.computed == self._expected
