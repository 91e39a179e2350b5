"""Folders of pictures as a user may have them, FOLDER/CLASS/*.jpg: shapes, small shapes, colours, scikit-learn's digits as photographs.

    python -m tests.tools.pictures shapes FOLDER [NUMBER]

The pictures have different sizes and grounds; what tells their classes apart lies anywhere in them. The same seed draws the same.
"""

import colorsys
import os
import sys

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SHAPES = ("circle", "square", "triangle")
COLOURS = {"red": 0.0, "yellow": 0.15, "green": 0.35, "blue": 0.6, "purple": 0.8}  # hues


def make(kind: str, folder: str, number: int, seed: int = 0) -> list[str]:
    """`number` pictures, as many of each class; returns the classes."""
    draw_one, classes = {
        "shapes": (_shape, list(SHAPES)),
        "small_shapes": (_small_shape, list(SHAPES)),
        "colours": (_colour, list(COLOURS)),
        "digits": _digits(),
    }[kind]
    draw = np.random.default_rng(seed)
    for place in range(number):
        label = classes[place % len(classes)]
        os.makedirs(os.path.join(folder, label), exist_ok=True)
        picture = draw_one(label, place // len(classes), draw)
        picture.save(os.path.join(folder, label, f"{place // len(classes):04d}.jpg"), quality=85)
    return classes


def _ground(draw, darkest=100, lightest=220, noise=8):
    """A picture of a random size and colour, lighter to one side, and with noise."""
    width, height = (int(side) for side in draw.integers(90, 200, 2))
    light = np.linspace(draw.uniform(0.7, 1), draw.uniform(0.7, 1), width)[None, :, None]
    pixels = draw.integers(darkest, lightest, 3) * light + draw.normal(0, noise, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _place(picture, draw, smallest, largest):
    """(left, top, side) of a square in it: its side is a share of the picture's short one."""
    side = int(draw.uniform(smallest, largest) * min(picture.size))
    return int(draw.integers(0, picture.width - side)), int(draw.integers(0, picture.height - side)), side


def _shape(label, _number, draw):
    """Of any dark colour, not quite upright."""
    picture = _ground(draw)
    place = _place(picture, draw, 0.7, 0.99)
    _paste(picture, label, place, draw.uniform(-15, 15), draw.integers(0, 90, 3))
    return picture


def _small_shape(label, _number, draw):
    """Of any colour, on a ground of any other; upright."""
    picture = _ground(draw, 0, 256, noise=0)
    place = _place(picture, draw, 0.35, 0.6)
    left, top, side = place
    ground = np.asarray(picture.crop((left, top, left + side, top + side)), int).mean(axis=(0, 1))
    colour = draw.integers(0, 256, 3)
    while abs(colour - ground).max() < 130:
        colour = draw.integers(0, 256, 3)
    _paste(picture, label, place, 0, colour)
    return picture


def _paste(picture, label, place, turned, colour):
    left, top, side = place
    mask = Image.new("L", (200, 200))
    pen = ImageDraw.Draw(mask)
    if label == "circle":
        pen.ellipse((30, 30, 170, 170), fill=255)
    elif label == "square":
        pen.rectangle((45, 45, 155, 155), fill=255)
    else:
        pen.polygon(((100, 15), (174, 143), (26, 143)), fill=255)
    mask = mask.rotate(float(turned), Image.Resampling.BILINEAR).resize((side, side))
    picture.paste(tuple(int(value) for value in colour), (left, top), mask)


def _colour(label, _number, draw):
    """A soft spot of the hue, brighter or darker."""
    picture = _ground(draw)
    left, top, side = _place(picture, draw, 0.2, 0.5)
    hue = (COLOURS[label] + draw.uniform(-0.04, 0.04)) % 1
    colour = colorsys.hsv_to_rgb(hue, draw.uniform(0.6, 1), draw.uniform(0.5, 1))
    mask = Image.new("L", (side, side))
    ImageDraw.Draw(mask).ellipse((side // 8, side // 8, side - side // 8, side - side // 8), fill=255)
    picture.paste(tuple(int(255 * part) for part in colour), (left, top), mask.filter(ImageFilter.GaussianBlur(side / 12)))
    return picture


def _digits():
    from sklearn.datasets import load_digits

    found = load_digits()
    of_each = [found.images[found.target == digit] for digit in range(10)]

    def written(label, number, draw):
        """In dark ink."""
        picture = _ground(draw)
        left, top, side = _place(picture, draw, 0.7, 0.99)
        pixels = of_each[int(label)][number % len(of_each[int(label)])] * (255 / 16)
        mask = Image.fromarray(pixels.astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
        picture.paste(tuple(int(value) for value in draw.integers(0, 60, 3)), (left, top), mask)
        return picture

    return written, [str(digit) for digit in range(10)]


if __name__ == "__main__":
    print(make(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 480))
