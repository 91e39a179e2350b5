"""Exact training, whose result does not depend on the number of ranks: the shares of a batch,
and the order of their sums."""

from common.exact.shares import SHARES, Shares, add_options, settled

__all__ = ["SHARES", "Shares", "add_options", "settled"]
