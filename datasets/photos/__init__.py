"""Photographs in folders, packs and pairs: how they are found, decoded, and put into batches."""

__all__ = [
    "archive", "arrival", "decode", "files", "labelled", "manifest", "packed", "pairs", "remarks", "splits", "tiles", "tree",
]  # fmt: skip
