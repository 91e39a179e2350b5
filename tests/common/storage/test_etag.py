"""What a store says of an object's bytes is compared with them: checksums of the whole, of parts, of what came in any order."""

import base64
import hashlib
import zlib

import pytest

from common.storage import etag
from tests.tools.stores import MIB


def base64_of(name, content):
    """A checksum as a store writes it; CRC64NVME and CRC32C are those of "123456789" in the catalogues."""
    known = {"ChecksumCRC64NVME": "ae8b14860a799888", "ChecksumCRC32C": "e3069283"}
    if name in known:
        assert content == b"123456789"
        return base64.b64encode(bytes.fromhex(known[name])).decode()
    kinds = {"ChecksumSHA1": hashlib.sha1, "ChecksumSHA256": hashlib.sha256}
    digest = kinds[name](content).digest() if name in kinds else zlib.crc32(content).to_bytes(4, "big")
    return base64.b64encode(digest).decode()


@pytest.mark.parametrize("name", ["ChecksumCRC64NVME", "ChecksumCRC32C", "ChecksumCRC32", "ChecksumSHA1", "ChecksumSHA256"])
def test_each_checksum_of_a_store_is_compared(name):
    for content, right in ((b"123456789", True), (b"123456788", False)):
        digest, make = etag.checksum({"ETag": '"0x8DCA-2"', name: base64_of(name, b"123456789"), "ChecksumType": "FULL_OBJECT"})
        hasher = etag.Hasher(digest, 9, 9, make)
        hasher.update(memoryview(content)[:4])
        hasher.update(content[4:])
        assert hasher.matches() is right


@pytest.mark.parametrize("name", ["ChecksumCRC64NVME", "ChecksumCRC32C"])
@pytest.mark.parametrize("read_again", [set(), {0}, {1}, {2}, {0, 1, 2}])
def test_checksums_of_parts_that_came_in_any_order_are_that_of_the_whole(name, read_again):
    for parts, right in (([b"1234", b"56", b"789"], True), ([b"1234", b"789", b"56"], False)):
        digest, make = etag.checksum({"ETag": '"0x8DCA"', name: base64_of(name, b"123456789")})
        hasher = etag.Hasher(digest, 9, 9, make)
        checksums = [hasher.crc_of_next_piece() for _ in parts]
        for part, checksum in reversed([*zip(parts, checksums)]):
            checksum.update(part[:1])
            checksum.update(memoryview(part)[1:])
        for number, (part, checksum) in enumerate(zip(parts, checksums)):
            if number in read_again:
                hasher.update(part)
            else:
                hasher.add(checksum)
        assert hasher.matches() is right


def test_other_digests_need_the_bytes_in_order():
    kinds = [("ab" * 16, hashlib.md5), ("ab" * 16 + "-2", hashlib.md5), (None, hashlib.md5), ("ab" * 32, hashlib.sha256)]
    kinds += [
        ("ab" * 8 + "-2", etag._checksums()["ChecksumCRC64NVME"]),
        ("ab" * 4, etag._checksums()["ChecksumCRC32"]),
    ]
    for digest, make in kinds:
        assert etag.Hasher(digest, 9, 5, make).crc_of_next_piece() is None


def test_the_fastest_checksum_is_taken_and_that_of_one_part_is_not_taken_for_the_whole():
    whole = {
        "ETag": '"a"',
        "ChecksumSHA256": base64_of("ChecksumSHA256", b"x"),
        "ChecksumCRC32": base64_of("ChecksumCRC32", b"x"),
    }
    assert etag.checksum(whole)[0] == zlib.crc32(b"x").to_bytes(4, "big").hex()
    assert etag.checksum({"ETag": '"a-2"', "ChecksumCRC32": whole["ChecksumCRC32"]}) is None
    assert etag.checksum({"ETag": '"a"', "ChecksumCRC32": "no checksum!"}) is None and etag.checksum({}) is None
    parts = [b"first", b"2nd"]
    of_parts = base64_of("ChecksumSHA256", b"".join(hashlib.sha256(part).digest() for part in parts)) + "-2"
    digest, make = etag.checksum({"ETag": '"a-2"', "ChecksumSHA256": of_parts, "ChecksumType": "COMPOSITE"})
    for content, right in ((b"first2nd", True), (b"first3rd", False)):
        hasher = etag.Hasher(digest, 8, 5, make)
        hasher.update(content)
        assert hasher.matches() is right


class OfLengths:
    """As quick as hashlib is not: of how long the pieces are, and of what short ones hold."""

    def __init__(self):
        self._hash = hashlib.md5()
        self.digest = self._hash.digest

    def update(self, content):
        self._hash.update(content if len(content) < 100 else b"%d" % len(content))


@pytest.mark.parametrize(
    "program, part", [("rclone", 5), ("the AWS CLI", 8), ("s3cmd", 15), ("s5cmd", 50), ("none of them", 49)]
)
def test_what_known_programs_upload_is_compared_although_the_store_does_not_say_how_large_its_parts_are(program, part):
    content = memoryview(bytes(part * MIB))
    digest = hashlib.md5(hashlib.md5(b"%d" % len(content)).digest() * 1000).hexdigest()
    size = 1000 * len(content)
    for given, right in ((digest, True if part != 49 else None), ("0" * 32, False if part != 49 else None)):
        hasher = etag.Hasher(f"{given}-1000", size, size, OfLengths)
        for _ in range(1000):
            hasher.update(content)
        assert hasher.matches() is right, program
