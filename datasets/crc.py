"""CRC-32, to detect damaged photographs in a pack or cache. isal computes it in an eighth of the time of
zlib."""

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
