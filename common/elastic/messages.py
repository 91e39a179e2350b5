"""The additional messages between the nodes of an elastic job, and the form that each must have."""

from typing import TypedDict

from common.alive.wire.messages import (
    PORT,
    RANK,
    STEPS,
    each,
    is_address,
    is_bool,
    is_true,
    record,
    several,
    text,
)


class NodeReport(TypedDict):
    """What a node says of its workers."""

    workers: list[list[int]]  # [rank, generation that it waits for] of each that runs
    done: list[int]  # the ranks that have finished the run
    generation: int  # the last one that the node has heard of


class Generation(TypedDict):
    """A group of ranks: the members of an elastic job from now on."""

    number: int
    ranks: list[int]
    writes: int  # the rank that writes the files
    lighthouse: str  # where its members meet
    why: str  # the generation before it ended
    stop: bool  # whether the run is to end
    changes: list[list]  # [number, why] of the latest generations
    nodes: list[list]  # [node, address, port at which it listens if it has to lead]


NONE_YET: Generation = {
    "number": 0, "ranks": [], "writes": 0, "lighthouse": "", "why": "", "stop": False, "changes": [],
    "nodes": [],
}  # fmt: skip

# What a node says of its workers: [rank, generation that it waits for] of each that runs, and the ranks that
# are done.
NODE_REPORT = record(workers=several(each(RANK, STEPS)), done=several(RANK), generation=STEPS)
GENERATION = record(
    number=STEPS, ranks=several(RANK), writes=RANK, lighthouse=text(200), why=text(8000), stop=is_bool,
    changes=several(each(STEPS, text(8000)), 100),
    nodes=several(each(RANK, is_address, PORT)),
)  # fmt: skip
FORMS = {
    "here": NODE_REPORT, "cause": text(4000), "generation": GENERATION, "leave": is_true, "excluded": is_true,
    "elsewhere": each(is_address, PORT),
}  # fmt: skip
