"""The segments of a JPEG: what its header says, without a decoder."""

from collections.abc import Iterator
from typing import Callable, Union

START_OF_SCAN = 0xDA
END = (0xD9, START_OF_SCAN)  # behind these there is no further segment of a header
NO_MARKER = -1  # in place of a kind: here is something else than a marker
FRAME_START = 10  # bytes of a marker, a length, and a frame header's bits, height, width and components


def segments(
    head: Union[bytes, bytearray], read_more: Callable[[int], bytes] = lambda _: b""
) -> Iterator[tuple[int, int]]:
    """Yield (kind, position) of each marker, the last of which is one of END or NO_MARKER.

    EOFError if the file ends before. `head`: the first bytes of the file, which grow if they are a bytearray;
    `read_more(size)`: some bytes after the first `size`, or none.
    """
    position = 2
    while True:
        while position + FRAME_START > len(head):
            following = read_more(len(head))
            if not following:
                raise EOFError
            head += following
        kind = head[position + 1]
        if head[position] != 0xFF:
            yield NO_MARKER, position
            return
        if kind == 0xFF:  # a fill byte
            position += 1
            continue
        yield kind, position
        if kind in END:
            return
        position += 2 + int.from_bytes(head[position + 2 : position + 4], "big")
