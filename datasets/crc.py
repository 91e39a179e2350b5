"""The CRC-32 by which a damaged photograph of a pack or cache is known; isal's takes an eighth of the time of zlib's."""

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
