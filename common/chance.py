"""What an accuracy is worth: guessing the most frequent class reaches one, too."""

import math

NOTHING_IS_LEARNT = "nothing is learnt"  # in the warning, which the page leaves out once something is


def accuracy_by_chance(most_frequent: int, samples: int) -> float:
    """Return what always guessing a class with `most_frequent` of the samples reaches,
    plus two standard deviations."""
    share = most_frequent / samples
    return share + 2 * math.sqrt(share * (1 - share) / samples)
