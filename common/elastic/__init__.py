"""Elastic jobs: nodes may be lost and join, and the others go on while there are enough. Imported with --min_nodes alone."""

__all__ = ["job"]
