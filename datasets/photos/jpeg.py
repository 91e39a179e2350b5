"""The segments of a JPEG: what its header says, without a decoder."""

from collections.abc import Iterator
from typing import Callable, Union

START_OF_SCAN = 0xDA
END = (0xD9, START_OF_SCAN)  # behind these there is no further segment of a header
NO_MARKER = -1  # in place of a kind: here is something else than a marker
FRAME_START = 10  # bytes of a marker, a length, and a frame header's bits, height, width and components


def segments(head: Union[bytes, bytearray], more: Callable[[int], bytes] = lambda _: b"") -> Iterator[tuple[int, int]]:
    """Yield (kind, place) of each marker up to the coded data, the end of the picture or NO_MARKER. EOFError if none comes.

    `head`: the first bytes of the file; `more(size)`: some of those behind `size` bytes, or none. A bytearray grows by them.
    """
    at = 2
    while True:
        while at + FRAME_START > len(head):
            following = more(len(head))
            if not following:
                raise EOFError
            head += following
        kind = head[at + 1]
        if head[at] != 0xFF:
            yield NO_MARKER, at
            return
        if kind == 0xFF:  # a fill byte
            at += 1
            continue
        yield kind, at
        if kind in END:
            return
        at += 2 + int.from_bytes(head[at + 2 : at + 4], "big")
