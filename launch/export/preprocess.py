"""Preprocess a photograph for the network in this folder, as the run's own evaluation did.

    pixels = preprocess("photo.jpg")                        # or bytes, an open file, or a picture of Pillow
    scores = network(torch.from_numpy(pixels)[None])        # uint8 (1, 3, size, size); the network normalises

It needs this file, preprocessing.json beside it, numpy and Pillow. With torch 2.1 or later the pixels are
exactly those of the evaluation. Without torch, Pillow resizes, and some pixels are larger or smaller by 1.
"""

from __future__ import annotations

import io
import json
import os
from typing import Any

import numpy as np

FORMATS = ["JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF"]  # all that Pillow may open, as in the run


def read_settings() -> dict[str, Any]:
    """Return preprocessing.json, which says how the evaluation prepared a picture."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "preprocessing.json")) as file:
        return json.load(file)


def preprocess(picture: object, options: dict[str, Any] | None = None) -> np.ndarray:
    """Return uint8 (3, size, size): the middle of the resized picture or all of it, squeezed.

    `options`: in place of preprocessing.json.
    """
    options = options or read_settings()
    pixels = decoded(picture)
    size = options["size"]
    height, width = pixels.shape[:2]
    short = options["resize"]
    if options["crop"] == "none":
        height = width = size
    elif height < width:
        width = int(short * width / height)
        height = short
    else:
        height = int(short * height / width)
        width = short
    pixels = resized(pixels, height, width, options["interpolation"])
    top = round((height - size) / 2)
    left = round((width - size) / 2)
    return np.ascontiguousarray(pixels[top : top + size, left : left + size].transpose(2, 0, 1))


def decoded(picture: Any) -> np.ndarray:
    """Return the picture as uint8 (height, width, 3) in RGB. EXIF orientation is ignored."""
    from PIL import Image

    if not isinstance(picture, Image.Image):
        picture = Image.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture, formats=FORMATS)
    if picture.mode in ("I", "I;16"):  # 16 bits: the upper eight
        picture = picture.point(lambda value: value / 256).convert("L")
    elif picture.mode.startswith("I;16"):  # in the other byte order
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    return np.array(picture.convert("RGB"))


def resized(pixels: np.ndarray, height: int, width: int, mode: str = "bilinear") -> np.ndarray:
    """Resize with antialiasing. `mode`: bilinear or bicubic."""
    if pixels.shape[:2] == (height, width):
        return pixels
    try:
        import torch

        batch = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
        picture = torch.nn.functional.interpolate(batch, size=(height, width), mode=mode, antialias=True)
        return picture[0].permute(1, 2, 0).numpy()
    except (ImportError, TypeError, RuntimeError):  # no torch, or one that cannot resize uint8 so
        from PIL import Image

        return np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling[mode.upper()]))
