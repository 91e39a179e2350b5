"""The additional messages between the nodes of an elastic job, and the form that each must have."""

from common.alive.wire.messages import BOOL, PORT, RANK, STEPS, each, is_address, is_true, record, several, text

# What a node says of its workers: [rank, generation that it waits for] of each that runs, and the ranks that are done.
HERE = record(workers=several(each(RANK, STEPS)), done=several(RANK), generation=STEPS)
GENERATION = record(
    number=STEPS, ranks=several(RANK), writes=RANK, lighthouse=text(200), why=text(8000), stop=BOOL,
    changes=several(each(STEPS, text(8000)), 100),
    nodes=several(each(RANK, is_address, PORT)),
)  # fmt: skip
FORMS = {
    "here": HERE, "cause": text(4000), "generation": GENERATION, "leave": is_true, "excluded": is_true,
    "elsewhere": each(is_address, PORT),
}  # fmt: skip
