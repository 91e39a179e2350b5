"""Photographs in folders and pairs: how they are found, decoded, and put into batches.

In a few large files: packs.
"""

__all__ = [
    "archive",
    "decode",
    "files",
    "labelled",
    "manifest",
    "pairs",
    "remarks",
    "splits",
    "tiles",
    "tree",
]
