"""Elastic jobs: nodes may be lost or join, and the others continue while enough remain.

Imported only with --min_nodes.
"""

__all__ = ["job"]
