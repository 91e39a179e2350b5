"""What a cache stores: a sample behind a header with its length and checksum,
under a name that is a hash of its key."""

import hashlib
import hmac
import struct
from typing import Optional, Union

from datasets.crc import crc32

LARGEST = 64 << 20  # bytes of a sample; more would not come within the deadline over a fast network
HEADER = struct.Struct(">4sI16s")  # MAGIC, length of the sample, checksum over key and sample
MAGIC = b"ARC1"
HASHED_KEY = 20  # bytes
# Outcomes of storing a sample.
STORED = "stored"
TOO_LARGE = "too large"
NOT_STORED = "not stored"

Key = Union[str, bytes]


class Values:
    """Names and headers for those who have a password in common. Without one, anybody can forge headers."""

    def __init__(self, password: Optional[str]) -> None:
        self._secret = hashlib.sha256(password.encode()).digest() if password else b""

    def hashed(self, key: Key) -> tuple[str, bytes]:
        """Return (the key's name on the server, secret for its checksum).

        The name is a hash, so it contains no command.
        """
        key = key if isinstance(key, bytes) else key.encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(
            key, digest_size=HASHED_KEY + 32, key=self._secret, person=b"anyrank sample"
        ).digest()
        return digest[:HASHED_KEY].hex(), digest[HASHED_KEY:]

    def header(self, seal: bytes, content: bytes) -> bytes:
        """Return the header to store before `content`. `seal`: the key's secret."""
        if self._secret:
            checksum = hmac.digest(seal, content, "sha256")[:16]
        else:
            checksum = crc32(content, int.from_bytes(seal[:4], "big")).to_bytes(16, "big")
        return HEADER.pack(MAGIC, len(content), checksum)

    def is_valid(self, header: bytes, seal: bytes, content: bytes) -> bool:
        """Return whether the header is that of this content and key. `seal`: the key's secret."""
        return hmac.compare_digest(header, self.header(seal, content))
