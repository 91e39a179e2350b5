"""Training whose result does not depend on how many ranks compute it: the shares of a batch, and the order of their sums."""

from common.exact.shares import SHARES, Shares, add_options, settled

__all__ = ["SHARES", "Shares", "add_options", "settled"]
