"""Short texts for the log: the names of any number of nodes and ranks,
and the first difference between two texts."""

LONGEST_LIST = 200


def first_difference(first: str, second: str) -> tuple[str, str]:
    """Return the first words in which two texts differ;
    both texts if one consists of the other's first words."""
    for first_word, second_word in zip(first.split(" "), second.split(" ")):
        if first_word != second_word:
            return first_word, second_word
    return first, second


def spans(numbers: list[int], longest: int = LONGEST_LIST) -> str:
    """Return "1-3, 7" for sorted numbers [1, 2, 3, 7]; if it is longer than `longest`,
    only its beginning and "and 5 more"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    whole_text = ", ".join(shown)
    if len(whole_text) <= longest:
        return whole_text
    while shown and len(", ".join(shown)) > longest - 24:
        shown.pop()
    remaining = sum(last - first + 1 for first, last in ranges[len(shown) :])
    return f"{', '.join(shown)} and {remaining} more"


def describe_nodes(nodes: list[int], workers: int) -> str:
    """Return "node 1 (ranks 2-3)", or "nodes 1-3 (ranks 2-7)"; `workers`: the number of ranks on a node."""
    ranks = [rank for node in nodes for rank in range(node * workers, (node + 1) * workers)]
    half = LONGEST_LIST // 2 - 12
    noun = "nodes" if len(nodes) > 1 else "node"
    return f"{noun} {spans(nodes, half)} ({describe_ranks(ranks, half)})"


def describe_ranks(ranks: list[int], longest: int = LONGEST_LIST) -> str:
    """Return "rank 1", or "ranks 1-3, 7" for sorted ranks; `longest`: see spans()."""
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {spans(ranks, longest)}"
