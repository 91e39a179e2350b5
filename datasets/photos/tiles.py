"""JPEGs that can be decoded in part: each tile lies between two restart markers,
and a table in the file states its place.

`python -m launch pack --form tiled` makes them with jpegtran, which does not change the pixels. Every reader
of JPEG can read them. Here the tiles that a window touches are joined to a small JPEG. The table, an APP9
segment, has a checksum of the header and of each row of tiles, so that only the rows that are read are
checked.
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

# width of a tile in MCUs (blocks coded together): wide enough for a small file, narrow enough for a window
TILE_COLUMNS = 4
NAME = b"anyrank tiles\0"
# Checksum of the rest and of the header; offsets of SOF and data; rows and columns of tiles, height and width
# of one.
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
            "--form tiled needs the program jpegtran: install it (apt-get install "
            "libjpeg-turbo-progs), or give --form original"
        )


# --- Making them --------------------------------------------------------------------------------------------


def cut_into_tiles(content: bytes) -> bytes:
    """Return the JPEG cut into tiles, with the table of their places;
    raise NotTiled if that cannot be done."""
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
    """Return divisors of the number of blocks in a row: the one nearest to TILE_COLUMNS first,
    then larger ones."""
    divisors = [number for number in range(1, blocks + 1) if blocks % number == 0]
    best = min(divisors, key=lambda number: abs(np.log(number / TILE_COLUMNS)))
    return [number for number in divisors if number >= best]


def _run_jpegtran(content: bytes, *options: str) -> bytes:
    """Return what jpegtran makes of a JPEG; NotTiled if it says anything about damage."""
    completed = subprocess.run(
        ["jpegtran", "-copy", "none", "-optimize", *options], input=content, capture_output=True
    )
    if completed.returncode or completed.stderr:  # damage may be only a warning
        raise NotTiled(completed.stderr.decode(errors="replace")[:200])
    return completed.stdout


def _table(content: bytes, frame: Layout, columns: int) -> Optional[bytes]:
    """Return the APP9 segment's content; None if it or a tile would be too long.

    NotTiled if there are several scans.
    """
    view = memoryview(content)[frame.data :]
    codes = np.frombuffer(view, np.uint8)
    marks = np.flatnonzero((codes[:-1] == 0xFF) & (codes[1:] != 0))
    codes_of_marks = codes[marks + 1]
    if (
        codes_of_marks[-1] != 0xD9
        or not ((codes_of_marks[:-1] >= 0xD0) & (codes_of_marks[:-1] <= 0xD7)).all()
    ):
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
    places = (
        frame.sof + shift,
        frame.data + shift,
        rows,
        tiles_per_row,
        frame.block_height,
        columns * frame.block_width,
    )
    row_data = np.array(checksums, "<u4").tobytes() + lengths.astype("<u2").tobytes()
    checksum = crc32(content[2 : frame.data], crc32(PLACES.pack(0, *places) + row_data))
    return NAME + PLACES.pack(checksum, *places) + row_data


def layout(content: bytes) -> Layout:
    """Find the frame header, the coded data and the sizes in a JPEG;
    raise NotTiled if it is of an unusual kind, or damaged."""
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


# --- Reading them -------------------------------------------------------------------------------------------


def is_tiled(content: bytes) -> bool:
    return content[2:4] == b"\xff\xe9" and content[6 : 6 + len(NAME)] == NAME


Box = tuple[int, int, int, int]  # top, left, bottom, right, in pixels


class _Table(NamedTuple):
    """The table in front of a tiled JPEG, and what follows from it.

    Places are numbers of bytes from the file's begin.
    """

    end: int  # where the JPEG's own header goes on behind the table
    sof: int  # where the frame header is, which states the size
    data: int  # where the first tile is
    tile_height: int
    tile_width: int
    row_checksums: np.ndarray  # (rows,)
    begins: np.ndarray  # (rows, columns): where each tile begins
    ends: np.ndarray  # (rows, columns): where it ends


def cut_out(content: bytes, box: Box) -> tuple[bytes, Box]:
    """Return (JPEG of the tiles that the box needs, the box's place in that JPEG);
    ValueError if a checksum differs."""
    table = _read_table(content)
    rows, columns = table.ends.shape
    top, left, bottom, right = box
    # One pixel more on each side, from which colours are interpolated.
    first_row = max(0, (top - 1) // table.tile_height)
    end_row = min(rows, bottom // table.tile_height + 1)
    first_column = max(0, (left - 1) // table.tile_width)
    end_column = min(columns, right // table.tile_width + 1)
    if first_column == columns - 1 and first_column:
        # the last one may be so narrow that libjpeg would interpolate its colours in another way
        first_column -= 1
    _check_rows(content, table, first_row, end_row)
    joined = _joined(content, table, slice(first_row, end_row), slice(first_column, end_column))
    first_y = first_row * table.tile_height
    first_x = first_column * table.tile_width
    return joined, (top - first_y, left - first_x, bottom - first_y, right - first_x)


def _read_table(content: bytes) -> _Table:
    """Return the table of a tiled JPEG; ValueError if its header is damaged."""
    checksum, sof, data, rows, columns, tile_height, tile_width = PLACES.unpack_from(content, BEGIN)
    begin = BEGIN + PLACES.size
    lengths_begin = begin + 4 * rows
    end = lengths_begin + 2 * rows * columns
    without_checksum = PLACES.pack(0, sof, data, rows, columns, tile_height, tile_width) + content[begin:end]
    if crc32(content[end:data], crc32(without_checksum)) != checksum:
        raise ValueError("its header is damaged")
    row_checksums = np.frombuffer(content, "<u4", rows, begin)
    # with the marker
    lengths = np.frombuffer(content, "<u2", rows * columns, lengths_begin).astype(np.int64) + 2
    ends = data + np.cumsum(lengths)
    begins = ends - lengths
    shape = (rows, columns)
    return _Table(
        end, sof, data, tile_height, tile_width, row_checksums, begins.reshape(shape), ends.reshape(shape)
    )


def _check_rows(content: bytes, table: _Table, first_row: int, end_row: int) -> None:
    """Raise ValueError if one of these rows of tiles is damaged."""
    view = memoryview(content)
    rows = slice(first_row, end_row)
    begins = table.begins[rows, 0].tolist()
    ends = table.ends[rows, -1].tolist()
    for begin, end, expected in zip(begins, ends, table.row_checksums[rows].tolist()):
        if crc32(view[begin:end]) != expected:
            raise ValueError("a row of its tiles is damaged")


def _joined(content: bytes, table: _Table, rows: slice, columns: slice) -> bytes:
    """Return the JPEG of these tiles: the header with their size,
    and their data with the markers numbered anew."""
    view = memoryview(content)
    height, width = struct.unpack_from(">HH", content, table.sof + 5)
    pixels_high = min(height, rows.stop * table.tile_height) - rows.start * table.tile_height
    pixels_wide = min(width, columns.stop * table.tile_width) - columns.start * table.tile_width
    size = struct.pack(">HH", pixels_high, pixels_wide)
    head = [b"\xff\xd8", view[table.end : table.sof + 5], size, view[table.sof + 9 : table.data]]
    begins = table.begins[rows, columns]
    ends = table.ends[rows, columns]
    row_data = [view[begin:end] for begin, end in zip(begins[:, 0].tolist(), ends[:, -1].tolist())]
    joined = bytearray().join([*head, *row_data])
    marker_ends = np.cumsum((ends - begins).ravel())  # in the data: each tile ends with its marker
    codes = np.frombuffer(joined, np.uint8)[len(joined) - int(marker_ends[-1]) :]
    # restart markers are numbered from 0 again
    codes[marker_ends - 1] = 0xD0 + (np.arange(len(marker_ends)) & 7)
    codes[-1] = 0xD9
    return bytes(joined)
