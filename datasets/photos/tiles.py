"""JPEGs that can be decoded in part: each tile lies between two restart markers, and a table in the file states its place.

`python -m launch pack --form tiled` makes them with jpegtran, which does not change the pixels. Every reader of JPEG can read
them. Here the tiles that a window touches are joined to a small JPEG. The table, an APP9 segment, has a checksum of the header
and of each row of tiles, so that only the rows that are read are checked.
"""

import contextlib
import shutil
import struct
import subprocess
from typing import NamedTuple, Optional

import numpy as np

from common.errors import UserError
from datasets.crc import crc32
from datasets.photos import jpeg

TILE_COLUMNS = 4  # width of a tile in MCUs (blocks coded together): wide enough for a small file, narrow enough for a window
NAME = b"anyrank tiles\0"
# Checksum of the rest and of the header; offsets of SOF and data; rows and columns of tiles, height and width of one.
PLACES = struct.Struct("<IIIHHHH")
BEGIN = 2 + 2 + 2 + len(NAME)  # offset of PLACES in the file
LONGEST_TABLE = 65_000
SOF = (0xC0, 0xC1, 0xC2)  # Huffman-coded, baseline or progressive


class NotTiled(Exception):
    """The file is no JPEG of the kinds that can be cut into tiles."""


class Layout(NamedTuple):
    """Where the parts of a JPEG begin, and its sizes in pixels."""

    sof: int  # where the frame header is
    data: int  # where the coded picture begins
    height: int
    width: int
    block_height: int  # of an MCU, in pixels
    block_width: int


def require_jpegtran() -> None:
    """Raise a UserError if the program jpegtran is not installed."""
    if not shutil.which("jpegtran"):
        raise UserError(
            "--form tiled needs the program jpegtran: install it (apt-get install libjpeg-turbo-progs), or give --form original"
        )


# --- Making them -------------------------------------------------------------------------------------------------------


def cut_into_tiles(content: bytes) -> bytes:
    """Return the JPEG cut into tiles, with the table of their places; raise NotTiled if that cannot be done."""
    original = layout(content)
    for columns in _tile_columns(-(-original.width // original.block_width)):
        candidate = _run_jpegtran(content, "-restart", f"{columns}B")
        table = _table(candidate, layout(candidate), columns)
        if table:
            break
    else:
        raise NotTiled("its table or a tile would be too long")
    if not same_coefficients(candidate, content):
        raise NotTiled("its coefficients would not be the same")
    return b"\xff\xd8\xff\xe9" + struct.pack(">H", 2 + len(table)) + table + candidate[2:]


def same_coefficients(content: bytes, other_content: bytes) -> bool:
    """Return whether two JPEGs have the same coefficients, however coded; NotTiled if one is damaged."""
    return _run_jpegtran(content) == _run_jpegtran(other_content)


def _tile_columns(blocks: int) -> list[int]:
    """Return divisors of the number of blocks in a row: the one nearest to TILE_COLUMNS first, then larger ones."""
    divisors = [number for number in range(1, blocks + 1) if blocks % number == 0]
    best = min(divisors, key=lambda number: abs(np.log(number / TILE_COLUMNS)))
    return [number for number in divisors if number >= best]


def _run_jpegtran(content: bytes, *options: str) -> bytes:
    """Return what jpegtran makes of a JPEG; NotTiled if it says anything about damage."""
    completed = subprocess.run(["jpegtran", "-copy", "none", "-optimize", *options], input=content, capture_output=True)
    if completed.returncode or completed.stderr:  # damage may be only a warning
        raise NotTiled(completed.stderr.decode(errors="replace")[:200])
    return completed.stdout


def _table(content: bytes, frame: Layout, columns: int) -> Optional[bytes]:
    """Return the APP9 segment's content; None if it or a tile would be too long. NotTiled if there are several scans."""
    view = memoryview(content)[frame.data :]
    codes = np.frombuffer(view, np.uint8)
    marks = np.flatnonzero((codes[:-1] == 0xFF) & (codes[1:] != 0))
    codes_of_marks = codes[marks + 1]
    if codes_of_marks[-1] != 0xD9 or not ((codes_of_marks[:-1] >= 0xD0) & (codes_of_marks[:-1] <= 0xD7)).all():
        raise NotTiled("there is more than one picture or scan in it")
    lengths = np.diff(marks, prepend=-2) - 2
    rows = -(-frame.height // frame.block_height)
    tiles_per_row = -(-frame.width // frame.block_width) // columns
    size = len(NAME) + PLACES.size + 4 * rows + 2 * rows * tiles_per_row
    if size > LONGEST_TABLE or lengths.max() > 0xFFFF:
        return None
    if len(lengths) != rows * tiles_per_row:
        raise NotTiled("it has another number of tiles than its size says")
    ends = np.cumsum(lengths + 2).reshape(rows, tiles_per_row)[:, -1].tolist()
    checksums = [crc32(view[begin:end]) for begin, end in zip([0, *ends], ends)]
    shift = 4 + size  # the segment goes before all that follows the first two bytes
    places = (frame.sof + shift, frame.data + shift, rows, tiles_per_row, frame.block_height, columns * frame.block_width)
    row_data = np.array(checksums, "<u4").tobytes() + lengths.astype("<u2").tobytes()
    checksum = crc32(content[2 : frame.data], crc32(PLACES.pack(0, *places) + row_data))
    return NAME + PLACES.pack(checksum, *places) + row_data


def layout(content: bytes) -> Layout:
    """Find the frame header, the coded data and the sizes in a JPEG; raise NotTiled if it is of an unusual kind, or damaged."""
    frame = None
    with contextlib.suppress(EOFError, IndexError, struct.error):
        for kind, at in jpeg.segments(content):
            if kind in SOF:
                frame = at
            if kind == jpeg.START_OF_SCAN and frame:
                length = int.from_bytes(content[at + 2 : at + 4], "big")
                return _layout_of_frame(content, frame, at + 2 + length)
    raise NotTiled("it is no JPEG of a usual kind")


def _layout_of_frame(content: bytes, frame: int, data: int) -> Layout:
    """Return the layout of a JPEG with this frame header; NotTiled if its colours are unusual."""
    bits, height, width, components = struct.unpack_from(">BHHB", content, frame + 4)
    if bits != 8 or components not in (1, 3) or not height or not width:
        raise NotTiled("it has other colours than a photograph")
    blocks_high = blocks_wide = 1  # of an MCU
    if components > 1:
        sampling = [content[frame + 11 + 3 * component] for component in range(components)]
        blocks_high = max(factors & 15 for factors in sampling)
        blocks_wide = max(factors >> 4 for factors in sampling)
    return Layout(frame, data, height, width, 8 * blocks_high, 8 * blocks_wide)


# --- Reading them ------------------------------------------------------------------------------------------------------


def is_tiled(content: bytes) -> bool:
    return content[2:4] == b"\xff\xe9" and content[6 : 6 + len(NAME)] == NAME


def cut_out(content: bytes, box: tuple[int, int, int, int]) -> tuple[bytes, tuple[int, int, int, int]]:
    """Return (JPEG of the tiles that the box needs, the box's place in that JPEG); ValueError if a checksum differs."""
    checksum, sof, data, rows, columns, tile_height, tile_width = PLACES.unpack_from(content, BEGIN)
    table_begin = BEGIN + PLACES.size
    end = table_begin + 4 * rows + 2 * rows * columns
    table = PLACES.pack(0, sof, data, rows, columns, tile_height, tile_width) + content[table_begin:end]
    if crc32(content[end:data], crc32(table)) != checksum:
        raise ValueError("its header is damaged")
    height, width = struct.unpack_from(">HH", content, sof + 5)
    checksums = np.frombuffer(content, "<u4", rows, table_begin)
    lengths = np.frombuffer(content, "<u2", rows * columns, table_begin + 4 * rows).astype(np.int64) + 2
    ends = (data + np.cumsum(lengths)).reshape(rows, columns)
    lengths = lengths.reshape(rows, columns)

    top, left, bottom, right = box  # and a pixel around it, from which colours are interpolated
    first_row = max(0, (top - 1) // tile_height)
    end_row = min(rows, bottom // tile_height + 1)
    first_column = max(0, (left - 1) // tile_width)
    end_column = min(columns, right // tile_width + 1)
    if first_column == columns - 1 and first_column:
        first_column -= 1  # the last one may be so narrow that libjpeg would interpolate its colours in another way
    view = memoryview(content)
    row_ends = ends[first_row:end_row, -1].tolist()
    row_begins = [data if first_row == 0 else int(ends[first_row - 1, -1]), *row_ends[:-1]]
    for begin, stop, expected in zip(row_begins, row_ends, checksums[first_row:end_row].tolist()):
        if crc32(view[begin:stop]) != expected:
            raise ValueError("a row of its tiles is damaged")

    first_y = first_row * tile_height
    first_x = first_column * tile_width
    size = struct.pack(">HH", min(height, end_row * tile_height) - first_y, min(width, end_column * tile_width) - first_x)
    head = [b"\xff\xd8", view[end : sof + 5], size, view[sof + 9 : data]]
    begins = (ends[first_row:end_row, first_column] - lengths[first_row:end_row, first_column]).tolist()
    stops = ends[first_row:end_row, end_column - 1].tolist()
    joined = bytearray().join([*head, *(view[begin:stop] for begin, stop in zip(begins, stops))])
    marks = np.cumsum(lengths[first_row:end_row, first_column:end_column].ravel())
    codes = np.frombuffer(joined, np.uint8)[len(joined) - int(marks[-1]) :]
    codes[marks - 1] = 0xD0 + (np.arange(len(marks)) & 7)  # restart markers are numbered from 0 again
    codes[-1] = 0xD9
    return bytes(joined), (top - first_y, left - first_x, bottom - first_y, right - first_x)
