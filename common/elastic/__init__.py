"""Nodes that come and go in a run: the others go on while there are enough. This room is imported with --min_nodes alone."""

__all__ = ["job"]
