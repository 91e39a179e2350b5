"""Which photographs there are, in folders, packs and pairs, and how each becomes a part of a batch."""

__all__ = ["decode", "files", "labelled", "packed", "pairs", "remarks", "splits", "tiles", "tree"]
