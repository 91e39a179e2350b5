"""A photograph from its file to the network's size: only the part that is needed is decoded, and it stays uint8.

nvImageCodec, which comes with DALI, decodes a window of a JPEG on the CPU without the rest; where it is missing Pillow
decodes the whole. The resize is torch's own antialiased one, on uint8. What these two do not read alike (CMYK, 16 bits, other
formats) goes through Pillow in every loader. EXIF orientation is ignored, as torchvision does. Of what a pack holds as pixels
nothing is decoded at all.
"""

import functools
import io

import numpy as np
import torch
import torch.nn.functional as F

from common.errors import one_line

RESIZE_SHARE = 256 / 224  # evaluation: the short side is resized to this times the network's size, then the middle cut out


def short_side(size):
    return round(size * RESIZE_SHARE)


class Undecodable(Exception):
    """The file has the header of a picture and is none."""


class Pixels:
    """A picture that was decoded before: of its rows only those are read that are needed."""

    def __init__(self, height, width, read):
        """`read(begin, length)` gives bytes of them."""
        self._height, self._width, self._read = height, width, read

    def cut(self, box):
        top, left, bottom, right = box or (0, 0, self._height, self._width)
        line = 3 * self._width
        rows = np.frombuffer(self._read(top * line, (bottom - top) * line), np.uint8).reshape(bottom - top, self._width, 3)
        return torch.from_numpy(rows[:, left:right].copy()).permute(2, 0, 1)


def train_picture(content, special, window, flip, size):
    """The window of the picture, resized to size x size: uint8 (3, size, size)."""
    top, left, height, width = map(int, window)
    return train_cut(decode(content, special, (top, left, top + height, left + width)), flip, size)


def train_cut(picture, flip, size):
    """The same of a window that has been decoded."""
    picture = resize(picture, size, size)
    return picture.flip(2) if flip else picture


def test_picture(content, special, size, short, whole=None):
    """The middle of the whole picture, as torchvision's Resize(short) and CenterCrop(size) make it.

    `whole`: (height, width) of the original, where a smaller one is given.
    """
    return test_cut(decode(content, special, None), size, short, whole)


def test_cut(picture, size, short, whole=None):
    """The same of a picture that has been decoded."""
    height, width = resized(*(whole or picture.shape[1:]), short)
    picture = resize(picture, height, width)
    top, left = middle(height, width, size)
    return picture[:, top : top + size, left : left + size]


def resized(height, width, short):
    """(height, width) of a whole picture whose short side has been resized for evaluation."""
    return (short, int(short * width / height)) if height < width else (int(short * height / width), short)


def middle(height, width, size):
    """(top, left) of the size x size pixels in its middle."""
    return round((height - size) / 2), round((width - size) / 2)


def resize(picture, height, width):
    """The pixels stay interleaved, as they were decoded: torch sees that only in a batch of one whose own stride is right."""
    batch = picture.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    return F.interpolate(batch, size=(height, width), mode="bilinear", antialias=True)[0]


def decode(content, special, box):
    """uint8 (3, H, W) of the box (top, left, bottom, right), or of everything; `content`: the bytes of a file, or Pixels."""
    try:
        if isinstance(content, Pixels):
            return content.cut(box)
        decoder = None if special or not content.startswith(b"\xff\xd8") else _codec()
        if decoder is None:
            return _cut(torch.from_numpy(np.array(with_pillow(content))).permute(2, 0, 1), box)
        return decoder(content, box)
    except Undecodable:
        raise
    except Exception as error:
        raise Undecodable(one_line(error)[:200]) from None


def _cut(picture, box):
    if box is None:
        return picture
    top, left, bottom, right = box
    return picture[:, top:bottom, left:right]


def with_pillow(content):
    """An RGB picture of Pillow's."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as picture:
        if picture.mode in ("I", "I;16", "I;16B", "F"):  # 16 bits: the upper eight, not the clipped lower ones
            picture = picture.point(lambda value: value / 256).convert("L")
        return picture.convert("RGB")


@functools.cache
def _codec():
    """A function (content, box) -> picture, or None. One decoder a process: it is made after the fork of a loader worker."""
    try:
        from nvidia import nvimgcodec
    except ImportError:
        return None
    cpu_only = -99999  # a device number of its own; without it the library asks for a GPU
    decoder = nvimgcodec.Decoder(
        device_id=cpu_only, max_num_cpu_threads=1, backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)]
    )
    parameters = nvimgcodec.DecodeParams(apply_exif_orientation=False)

    def decode(content, box):
        stream = nvimgcodec.CodeStream(content)
        if box is not None:
            stream = stream.get_sub_code_stream(region=nvimgcodec.Region(start=box[:2], end=box[2:]))
        picture = decoder.decode(stream, params=parameters)
        if picture is None:
            raise Undecodable("its data are damaged")
        return torch.from_numpy(np.asarray(picture)).permute(2, 0, 1)

    return decode
