"""Photographs in the tests: shards of them, and what torchvision makes of their pixels."""

import io
import struct

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from datasets import imagenet
from datasets.photos import labelled, tree
from datasets.sampler import EpochSampler


def picture(width=60, height=40, mode="RGB", seed=0):
    """Smooth colours with an edge, so that JPEG keeps them and a wrong crop shows."""
    rows, columns = np.mgrid[0:height, 0:width]
    channels = [np.sin(rows / (5 + seed + c)) * 60 + np.cos(columns / (4 + c)) * 60 + 128 for c in range(3)]
    channels[0][:, : width // 3] = 20
    return Image.fromarray(np.stack(channels, axis=2).astype(np.uint8)).convert(mode)


def encoded(image, form="JPEG", **how):
    buffer = io.BytesIO()
    image.save(buffer, form, **how)
    return buffer.getvalue()


JPEG = encoded(picture(), quality=92)


SIXTEEN = Image.fromarray((np.arange(2400, dtype=np.uint16) * 27).reshape(40, 60))


BOMB_PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", 50_000, 50_000, 8, 2, 0, 0, 0) + b"0000" + b"IEND"


# name: (content, the verdict)
FILES = {
    "plain.JPEG": (JPEG, (tree.GOOD, 60, 40)),
    "grey.jpg": (encoded(picture(mode="L")), (tree.GOOD, 60, 40)),
    "progressive.jpg": (encoded(picture(), progressive=True), (tree.GOOD, 60, 40)),
    "rotated.jpg": (encoded(picture(), exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"), (tree.GOOD, 60, 40)),
    "profile.jpg": (encoded(picture(), icc_profile=bytes(200_000)), (tree.GOOD, 60, 40)),
    "trailing.jpg": (JPEG + bytes(100), (tree.GOOD, 60, 40)),
    "cmyk.jpg": (encoded(picture(mode="CMYK")), (tree.SPECIAL, 60, 40)),
    "named_as_jpeg.JPEG": (encoded(picture(), "PNG"), (tree.GOOD, 60, 40)),
    "palette.png": (encoded(picture(mode="P"), "PNG"), (tree.SPECIAL, 60, 40)),
    "alpha.png": (encoded(picture(mode="RGBA"), "PNG"), (tree.SPECIAL, 60, 40)),
    "sixteen.png": (encoded(SIXTEEN, "PNG"), (tree.SPECIAL, 60, 40)),
    "moving.webp": (encoded(picture(), "WEBP"), (tree.SPECIAL, 60, 40)),
    "picture.bmp": (encoded(picture(), "BMP"), (tree.SPECIAL, 60, 40)),
    "empty.jpg": (b"", "empty"),
    "cut.jpg": (JPEG[: len(JPEG) // 2], "cut off"),
    "cut.png": (encoded(picture(), "PNG")[:-20], "cut off"),
    "only_header.png": (encoded(picture(), "PNG")[:33], "cut off"),
    "html.jpg": (b"<html>404</html>", "not an image"),
    "bomb.png": (BOMB_PNG, "too many pixels"),
    "flat.png": (BOMB_PNG.replace(struct.pack(">II", 50_000, 50_000), struct.pack(">II", 0, 40)), "damaged header"),
    "only_signature.png": (BOMB_PNG[:20], "damaged header"),
    "header.jpg": (b"\xff\xd8\xff\xe0\x00\x10JFIF" + b"x" * 100, "damaged header"),
    "flat.jpg": (JPEG[: JPEG.index(b"\xff\xc0") + 5] + bytes(4) + JPEG[JPEG.index(b"\xff\xc0") + 9 :], "damaged header"),
    "only_soi.jpg": (b"\xff\xd8", "damaged header"),
    "thread.jpg": (encoded(picture().resize((3000, 1))), "too long and thin"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two classes; the first has one file of every kind, the second has good ones."""
    monkeypatch.chdir(tmp_path)
    for name, (content, _) in FILES.items():
        (tmp_path / "train" / "kinds").mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / "kinds" / name).write_bytes(content)
    (tmp_path / "train" / "zgood" / "deeper").mkdir(parents=True)
    for number in range(4):
        (tmp_path / "train" / "zgood" / ("deeper" if number % 2 else ".") / f"{number}.jpg").write_bytes(
            encoded(picture(50 + number, 70, seed=number))
        )
    (tmp_path / "train" / "zgood" / "notes.txt").write_text("no picture")
    return tmp_path / "train"


def reference_crop(image, window, flip, size):
    top, left, height, width = map(int, window)
    resized = torchvision.transforms.functional.resized_crop(image, top, left, height, width, [size, size])
    found = torch.from_numpy(np.array(resized)).permute(2, 0, 1)
    return found.flip(2) if flip else found


def difference(one, other):
    return (one.int() - other.int()).abs().float().mean().item()


# Mean absolute difference from torchvision's reference on Pillow, of 255: two JPEG decoders round differently, and so do two
# antialiased resizes. What a wrong pixel offset would cost is asserted beside it.
TOLERANCE = 0.6


def images_of(folder, sampler, train=True, workers=0, seed=0, backend="pytorch", **how):
    """{id: (pixels, label)} of everything that the loader gives, and the ids in order."""
    data = labelled.Photos(tree.load(str(folder)), 32, train, seed, **how)
    loader = imagenet.loader(data, sampler(len(data)), torch.device("cpu"), workers, backend)
    found, order = {}, []
    for images, labels in loader:
        assert images.dtype == torch.float32 and images.is_contiguous(memory_format=torch.channels_last)
        for number, image, label in zip(loader.ids.tolist(), images, labels.tolist()):
            found[number] = (image.clone(), label)
            order.append(number)
    return found, order


def shard(count, batch_size, rank, world_size):
    sampler = EpochSampler(count, batch_size, seed=5)
    sampler.shard(rank, world_size)
    return sampler


def assert_equal(some, others):
    for number, (image, label) in some.items():
        assert torch.equal(image, others[number][0]) and label == others[number][1], number


@pytest.fixture
def many(tmp_path, monkeypatch):
    """30 pictures of many sizes, two of them in a form that DALI reads differently."""
    monkeypatch.chdir(tmp_path)
    for number in range(30):
        where = tmp_path / "train" / f"class{number % 3}"
        where.mkdir(parents=True, exist_ok=True)
        mode = "CMYK" if number in (4, 17) else "L" if number == 9 else "RGB"
        (where / f"{number:02d}.jpg").write_bytes(
            encoded(picture(40 + 7 * number, 140 - 3 * number, mode, number % 5), quality=90)
        )
    return tmp_path / "train"


def assert_close(some, others, tolerance=TOLERANCE):
    """Equal labels, and pixels that differ as two decoders and two resizes do; special pictures come from the same decoder."""
    std = torch.tensor(imagenet.STD).view(3, 1, 1)
    assert some.keys() == others.keys()
    for number, (image, label) in some.items():
        assert label == others[number][1]
        assert ((image - others[number][0]).abs() * std * 255).mean() < tolerance, number
