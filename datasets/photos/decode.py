"""Decode a photograph, or only the part that is needed, and resize it to the network's input size, as uint8.

nvImageCodec decodes only a window of a JPEG, on the CPU. Without it, Pillow decodes the whole JPEG.
simplejpeg decodes tiles. Pictures that these decoders read differently (CMYK, 16 bits, other formats) go
through Pillow in every loader. EXIF orientation is ignored, as in torchvision.
"""

import functools
import io
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar, Union

import numpy as np
import torch
import torch.nn.functional as F

from common import devices
from common.errors import TrainingFailed, is_system_error, one_line
from common.progress import warn
from datasets.photos import files, remarks, tiles

if TYPE_CHECKING:
    from PIL import Image

CODEC = {  # packages of nvImageCodec: the first alone writes errors to stderr that mean nothing on a CPU
    12: "nvidia-nvimgcodec-cu12 nvidia-nvjpeg-cu12 nvidia-nvjpeg2k-cu12 nvidia-nvtiff-cu12",
    13: "nvidia-nvimgcodec-cu13 nvidia-nvjpeg nvidia-nvjpeg2k-cu13 nvidia-nvtiff-cu13",
}
# radius of each resize filter, in pixels of the smaller of the two sizes
FILTERS = {"bilinear": 1, "bicubic": 2}
WHOLE = 0  # in place of a short side: the whole picture is squeezed into the square, and nothing is cut off
# evaluation: the short side is resized to this times the network's size, then the middle is cut out
RESIZE_SHARE = 256 / 224

STRAY_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # of a JPEG, in the middle of its coded data

Box = tuple[int, int, int, int]  # top, left, bottom, right
Decoded = TypeVar("Decoded")


def short_side(size: int, crop_pct: Optional[float] = None) -> int:
    """Return the short side to which evaluation resizes a picture, before it cuts out its middle of `size`.

    `crop_pct`: which share of it `size` is, as in timm; None: 1 / RESIZE_SHARE.
    """
    return int(size / crop_pct) if crop_pct else round(size * RESIZE_SHARE)


class Undecodable(Exception):
    """The file has the header of a picture, but cannot be decoded."""


class Substitutes:
    """Replaces a sample that cannot be decoded by the next one that can, the same in every run and rank.

    Each process warns once about such a sample.
    """

    def __init__(self, samples_name: str, max_failures: int) -> None:
        """`samples_name`: for errors; `max_failures`: in a row,
        after which the data set counts as damaged."""
        self._samples_name = samples_name
        self._max_failures = max_failures
        self._reported: set[int] = set()

    def decode(
        self, number: int, count: int, decode: Callable[[int], Decoded], name: Callable[[int], str]
    ) -> tuple[int, Decoded]:
        """Return (id, decode(id)) of `number` or the next of `count` ids that can be decoded.

        TrainingFailed after too many failures in a row.
        """
        for step in range(self._max_failures):
            candidate = (number + step) % count
            try:
                with remarks.report_warnings(functools.partial(name, candidate)):
                    return candidate, decode(candidate)
            except (Undecodable, OSError) as error:
                if is_system_error(error):
                    # the picture may be good: a start on a repaired disk has to use it
                    raise
                self._warn(candidate, one_line(name(candidate)), error)
        raise TrainingFailed(
            f"{self._max_failures} {self._samples_name} in a row cannot be decoded, from "
            f"{one_line(name(number))}: fetch the data set again"
        )

    def _warn(self, number: int, name: str, error: Exception) -> None:
        if number not in self._reported:
            self._reported.add(number)
            warn(f"{name} cannot be decoded ({one_line(error)[:100]}): the next one takes its place")


class Pixels:
    """A picture that is stored as pixels: only the rows that are needed are read."""

    def __init__(self, height: int, width: int, read: Callable[[int, int], Union[bytes, memoryview]]) -> None:
        """`read(begin, length)` returns a range of the bytes of the pixels."""
        self._height = height
        self._width = width
        self._read = read

    def cut(self, box: Optional[Box]) -> torch.Tensor:
        """Return the pixels of a box (None: all), uint8 (3, H, W)."""
        top, left, bottom, right = box or (0, 0, self._height, self._width)
        row_bytes = 3 * self._width
        rows = np.frombuffer(self._read(top * row_bytes, (bottom - top) * row_bytes), np.uint8).reshape(
            bottom - top, self._width, 3
        )
        return torch.from_numpy(rows[:, left:right].copy()).permute(2, 0, 1)


class Tiled:
    """A picture in tiles (tiles.py): only the tiles that the box needs are decoded,
    and their rows checked."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def cut(self, box: Optional[Box]) -> torch.Tensor:
        """Decode a box (None: all) to uint8 (3, H, W)."""
        if box is None:
            layout = tiles.layout(self.content)
            box = (0, 0, layout.height, layout.width)
        small, (top, left, bottom, right) = tiles.cut_out(self.content, box)
        decode_whole = _simplejpeg()
        picture = decode_whole(small) if decode_whole else None
        return (decode(small, False, None) if picture is None else picture)[:, top:bottom, left:right]


Content = Union[bytes, Pixels, Tiled]  # what a picture is decoded from


def is_narrow(width: int) -> bool:
    """Return whether nvImageCodec and DALI give a part of this width other colours than the whole has."""
    return width < 2


def train_picture(
    content: Content, special: bool, window: Iterable[int], flip: bool, size: int, mode: str = "bilinear"
) -> torch.Tensor:
    """Decode a window (top, left, height, width), resize to uint8 (3, size, size), mirror if `flip`.

    `special` needs Pillow.
    """
    top, left, height, width = map(int, window)
    return train_cut(decode(content, special, (top, left, top + height, left + width)), flip, size, mode)


def train_cut(picture: torch.Tensor, flip: bool, size: int, mode: str = "bilinear") -> torch.Tensor:
    """Resize a decoded window to size x size and, with `flip`, mirror it."""
    picture = resize(picture, size, size, mode)
    return picture.flip(2) if flip else picture


def eval_picture(
    content: Content, special: bool, size: int, short: int, original: Optional[tuple[int, int]] = None,
    mode: str = "bilinear",
) -> torch.Tensor:  # fmt: skip
    """Decode the middle of the picture, as torchvision's Resize(short) and CenterCrop(size) cut it;
    `short` WHOLE: all of it.

    `original`: its (height, width), if the stored picture is smaller.
    """
    stored = None if special else _size_of_jpeg(content)
    box = _needed_box(stored, size, short, original or stored, mode) if stored else None
    if stored is None or box is None or box == (0, 0, *stored):
        return eval_cut(decode(content, special, None), size, short, original, mode)
    _refuse_bomb(*stored)
    picture = torch.empty((*stored, 3), dtype=torch.uint8).permute(2, 0, 1)
    top, left, bottom, right = box
    picture[:, top:bottom, left:right] = decode(content, special, box)
    return eval_cut(picture, size, short, original, mode)


def _size_of_jpeg(content: Content) -> Optional[tuple[int, int]]:
    """Return (height, width) of a JPEG that can be decoded in part; None for any other picture."""
    if isinstance(content, Pixels):
        return None
    try:
        layout = tiles.layout(content.content if isinstance(content, Tiled) else content)
    except tiles.NotTiled:
        return None
    return layout.height, layout.width


def _needed_box(stored: tuple[int, int], size: int, short: int, original: tuple[int, int], mode: str) -> Box:
    """Return the box of a stored picture on which the result of eval_cut() depends, with a small margin."""
    resized = resized_size(*original, short, size)
    spans = []
    for length, resized_length, crop_begin in zip(stored, resized, middle(*resized, size)):
        scale = length / resized_length
        reach = FILTERS[mode] * max(scale, 1)
        begin = (crop_begin + 0.5) * scale - reach - 2
        end = (crop_begin + size - 0.5) * scale + reach + 2
        spans.append((max(0, int(begin)), min(length, int(end) + 1)))
    (top, bottom), (left, right) = spans
    return top, left, bottom, right


def eval_cut(
    picture: torch.Tensor,
    size: int,
    short: int,
    original: Optional[tuple[int, int]] = None,
    mode: str = "bilinear",
) -> torch.Tensor:
    """Resize a decoded picture to the resized_size() of `original`, and cut out the size x size middle.

    `original`: (height, width); None: those of the picture.
    """
    height, width = original or picture.shape[1:]
    height, width = resized_size(height, width, short, size)
    picture = resize(picture, height, width, mode)
    top, left = middle(height, width, size)
    return picture[:, top : top + size, left : left + size]


def resized_size(height: int, width: int, short: int, size: int = 0) -> tuple[int, int]:
    """Return the (height, width) to which a picture is resized for evaluation;
    `size` is used only if `short` is WHOLE."""
    if short == WHOLE:
        return size, size
    return (short, int(short * width / height)) if height < width else (int(short * height / width), short)


def middle(height: int, width: int, size: int) -> tuple[int, int]:
    """Return (top, left) of the size x size pixels in the middle of a picture."""
    return round((height - size) / 2), round((width - size) / 2)


def resize(picture: torch.Tensor, height: int, width: int, mode: str = "bilinear") -> torch.Tensor:
    """Resize with antialiasing; `mode`: bilinear or bicubic.

    The pixels stay interleaved, as they were decoded: torch recognises that layout only in a batch of one
    with the right strides."""
    batch = picture.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    return F.interpolate(batch, size=(height, width), mode=mode, antialias=True)[0]


def decode(content: Content, special: bool, box: Optional[Box]) -> torch.Tensor:
    """Decode a box (None: all) to uint8 (3, H, W), a `special` file with Pillow.

    Undecodable for any error but those of the system, such as a failed read.
    """
    try:
        if not isinstance(content, bytes):
            return content.cut(box)
        decoder = None if special or not content.startswith(b"\xff\xd8") else _codec()
        if decoder:
            return decoder(content, box)
        top, left, bottom, right = box or (0, 0, None, None)
        return torch.from_numpy(np.array(decode_with_pillow(content))).permute(2, 0, 1)[
            :, top:bottom, left:right
        ]
    except Undecodable:
        raise
    except Exception as error:
        if is_system_error(error):  # raw pixels are read here
            raise
        raise Undecodable(one_line(error)[:200]) from None


def decode_with_pillow(content: bytes) -> "Image.Image":
    """Decode a picture to RGB with Pillow.

    A one-scan JPEG that it refuses is cut at the first stray marker and tried again.
    """
    try:
        return _in_rgb(content)
    except OSError:
        intact = _cut_at_stray_marker(content)
        if intact is None:
            raise
        return _in_rgb(intact)


def _in_rgb(content: bytes) -> Any:
    """Decode a whole picture with Pillow, and convert it to RGB."""
    from PIL import Image

    with files.open_picture(io.BytesIO(content)) as picture:
        _refuse_bomb(*picture.size)
        if picture.mode in ("I", "I;16"):  # 16 bits: the upper eight; Pillow would clip instead
            picture = picture.point(lambda value: value / 256).convert("L")
        elif picture.mode.startswith("I;16"):  # the other byte order, which point() does not know
            picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
        return picture.convert("RGB")


def _cut_at_stray_marker(content: bytes) -> Optional[bytes]:
    """Return a JPEG that ends where a stray marker interrupts its data; None if it has none, is progressive
    or has several scans. nvImageCodec decodes such a file up to the marker, with grey for the rest. Pillow
    refuses the whole file, but has to give the same picture."""
    try:
        layout = tiles.layout(content)
    except tiles.NotTiled:
        return None
    components = content[layout.sof + 9]
    only_scan = b"\xff\xda" + bytes([0, 6 + 2 * components, components])
    match = STRAY_MARKER.search(content, layout.data)
    if (
        content[layout.sof + 1] == 0xC2
        or not match
        or content[: layout.data][-8 - 2 * components :][:5] != only_scan
    ):
        return None
    return content[: match.start()] + b"\xff\xd9"


def _refuse_bomb(width: int, height: int) -> None:
    """Raise Undecodable for too many pixels: the file may have changed since its header was judged."""
    if width * height > files.MOST_PIXELS:
        raise Undecodable("it has too many pixels")


def slow_decoder_hints() -> Iterator[str]:
    """Yield a line for the log, how to install nvImageCodec, if this system could have it and lacks it."""
    if sys.platform == "linux" and not (find_spec("nvidia") and find_spec("nvidia.nvimgcodec")):
        yield (
            "photographs are decoded by Pillow, which takes about twice as long as nvImageCodec on the CPU: "
            f"pip install {CODEC[devices.toolkit_major()]} (50 MB)"
        )


@functools.cache
def _codec():
    """Return nvImageCodec's decoder, a function (content, box) -> picture, made once per process;
    None if it is missing."""
    try:
        from nvidia import nvimgcodec
    except ImportError:
        return None
    library: Any = nvimgcodec  # it has no stubs
    cpu_only = -99999  # the library's number for no GPU; by default it looks for one
    decoder = library.Decoder(
        device_id=cpu_only, max_num_cpu_threads=1, backends=[library.Backend(library.BackendKind.CPU_ONLY)]
    )
    parameters = library.DecodeParams(apply_exif_orientation=False)

    def decode(content: bytes, box: Any) -> Any:
        stream = library.CodeStream(content)
        _refuse_bomb(stream.width, stream.height)
        if box is not None and is_narrow(box[3] - box[1]):
            return decode(content, None)[:, box[0] : box[2], box[1] : box[3]]
        if box is not None:
            stream = stream.get_sub_code_stream(region=library.Region(start=box[:2], end=box[2:]))
        picture = decoder.decode(stream, params=parameters)
        if picture is None:
            raise Undecodable("its data are damaged")
        return torch.from_numpy(np.asarray(picture)).permute(2, 0, 1)

    return decode


@functools.cache
def _simplejpeg():
    """Return a function (content) -> picture or, if simplejpeg cannot decode it, None.

    Return None if simplejpeg is missing.
    """
    try:
        import simplejpeg
    except ImportError:
        return None
    library: Any = simplejpeg  # its stubs do not allow all types that it takes

    def decode(content: bytes) -> Optional[torch.Tensor]:
        try:
            height, width, *_ = library.decode_jpeg_header(content)
            _refuse_bomb(width, height)
            return torch.from_numpy(library.decode_jpeg(content)).permute(2, 0, 1)
        except (ValueError, KeyError):  # for example, a colour format that only the other decoders know
            return None

    return decode
