"""Pairs of pictures, a blurry one and its sharp partner: ROOT/{train,test}/{blurry,sharp}/SUB/IMAGE,
or img and gt.

Partners have the same path below their folders. Both are resized and cropped alike, in training at random and
with flips, by numbers that depend on seed, epoch and pair alone. A batch is 2N pictures, the blurry ones
first.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional

import numpy as np
import torch

from common.errors import UserError, one_line
from common.progress import warn
from datasets import digests, synthetic
from datasets.crc import crc32
from datasets.crops import uniform
from datasets.photos import decode, files, tree

LAYOUT = "{train,test}/{blurry,sharp}/SUB/IMAGE, or img and gt in place of blurry and sharp"
FOLDERS = [("blurry", "sharp"), ("img", "gt")]
SUBSTITUTES = 10  # tried in a row until the data set is taken for damaged
SYNTHETIC = {"train": 256, "test": 32}
SYNTHETIC_SIZE = 72


class Pairs:
    """The pairs of a split, resized to the height `resize` (0: as they are),
    and larger if the crop would not fit."""

    def __init__(
        self, folder: str, resize: int, crop: int, train: bool, seed: int, megapixels: int = files.MEGAPIXELS
    ) -> None:
        self.folder = folder
        self.resize = resize
        self.crop = crop
        self.train = train
        self.seed = seed
        self.folders, names = find(folder)
        paths = [[os.path.join(folder, side, name) for name in names] for side in self.folders]
        with ThreadPoolExecutor(tree.THREADS) as pool:
            verdicts = [list(pool.map(tree.judge, side)) for side in paths]
        self.names = []
        rows = []
        for name, *pair in zip(names, *verdicts):
            reason = _reason_left_out(pair[0], pair[1], megapixels)
            if reason:
                warn(f"{one_line(os.path.join(folder, '*', name))} is left out: {reason}")
            else:
                self.names.append(name)
                rows.append((pair[0][0] or pair[1][0], *pair[0][1:]))
        if not rows:
            raise UserError(
                f"{one_line(folder)} holds no pair that can be read: a data set of pairs has {LAYOUT}"
            )
        special, self.widths, self.heights = (np.array(column) for column in zip(*rows))
        self.special = special.astype(bool)
        self._substitutes = decode.Substitutes("pairs", SUBSTITUTES)

    def __len__(self) -> int:
        return len(self.names)

    def keep_first(self, count: Optional[int]) -> None:
        """Keep only the first `count` pairs; None: all."""
        for name in ("names", "heights", "widths", "special"):
            setattr(self, name, getattr(self, name)[:count])

    def name(self, number: int) -> str:
        """Return the path of both files, with * in place of their folders."""
        return os.path.join(self.folder, "*", self.names[number])

    def read(self, number: int) -> list[bytes]:
        """Return the bytes of both files, the blurry one first."""
        return [files.read(os.path.join(self.folder, side, self.names[number])) for side in self.folders]

    def _crc(self, number: int) -> int:
        return crc32(b"".join(self.read(number)))

    def digest(self) -> dict[str, str]:
        """Return what tells these pairs from others."""
        list_digest = digests.digest_of(self.names, self.widths, self.heights)
        return {"list": list_digest, **digests.digest_of_checksums(len(self), self._crc)}

    def __getitem__(
        self, epoch_and_ids: tuple[int, np.ndarray]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (images, ids, ids) of a batch: where other data sets have labels,
        pairs have their ids again."""
        epoch, ids = epoch_and_ids
        images = self.empty_batch(len(ids))
        for position, number in enumerate(ids):
            images[position], images[len(ids) + position] = self._pair(int(number), epoch)
        return images, torch.from_numpy(ids), torch.from_numpy(ids)

    def empty_batch(self, count: int) -> torch.Tensor:
        """Return uninitialised memory for `count` pairs: first all blurry pictures, then all sharp ones."""
        return torch.empty(
            (2 * count, 3, self.crop, self.crop), dtype=torch.uint8, memory_format=torch.channels_last
        )

    def geometry(self, ids: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for each pair, its resized (height, width), (top, left) of its crop,
        and its (vertical, horizontal) flips."""
        heights = self.heights[ids].astype(np.int64)
        widths = self.widths[ids].astype(np.int64)
        crop = self.crop
        scale = self.resize / heights if self.resize else np.ones(len(ids))
        scale = np.maximum(scale, np.maximum(crop / heights, crop / widths))  # enlarged until the crop fits
        sizes = np.maximum(
            np.rint(np.stack([heights, widths], axis=1) * scale[:, None]).astype(np.int64), crop
        )
        if not self.train:
            return sizes, (sizes - crop) // 2, np.zeros((len(ids), 2), bool)
        # DALI needs contiguous arrays
        draws = np.ascontiguousarray(uniform(ids, self.seed, epoch, range(4)).T)
        return sizes, (draws[:, :2] * (sizes - crop + 1)).astype(np.int64), draws[:, 2:] < 0.5

    def _pair(self, number: int, epoch: int) -> Any:
        """Return both pictures of a pair, or of its substitute, resized, cropped and flipped alike."""

        def decode_pair(candidate: int) -> Any:
            (size,), (corner,), (flips,) = self.geometry(np.array([candidate]), epoch)
            pictures = [
                decode.decode(content, bool(self.special[candidate]), None)
                for content in self.read(candidate)
            ]
            return [self.cut(picture, size, corner, flips) for picture in pictures]

        return self._substitutes.decode(number, len(self), decode_pair, self.name)[1]

    def cut(
        self, picture: torch.Tensor, size: np.ndarray, corner: np.ndarray, flips: np.ndarray
    ) -> torch.Tensor:
        """Resize, crop and flip one decoded picture of a pair."""
        height, width = map(int, size)
        if tuple(picture.shape[1:]) != (height, width):
            picture = decode.resize(picture, height, width)
        top, left = corner
        picture = picture[:, top : top + self.crop, left : left + self.crop]
        return picture.flip([axis + 1 for axis in range(2) if flips[axis]])


class SyntheticPairs(Pairs):
    """Coloured shapes, sharp and blurred by a known motion, made at the start and kept as PNG."""

    def __init__(self, split: str, limit: Optional[int], crop: int, seed: int) -> None:
        self.resize = 0
        self.crop = crop
        self.train = split == "train"
        self.seed = seed
        count = min(SYNTHETIC[split], limit or SYNTHETIC[split])
        self._files = [synthetic.blurry_and_sharp(number, split, SYNTHETIC_SIZE) for number in range(count)]
        self.names = [f"shapes {number}" for number in range(count)]
        self.heights = self.widths = np.full(count, SYNTHETIC_SIZE)
        self.special = np.zeros(count, bool)
        self._substitutes = decode.Substitutes("pairs", SUBSTITUTES)

    def name(self, number: int) -> str:
        return self.names[number]

    def read(self, number: int) -> list[bytes]:
        return self._files[number]


def find(folder: str) -> tuple[tuple[str, str], list[str]]:
    """Return ((blurry folder, sharp folder), paths below both); UserError if either is missing,
    or a picture's partner."""
    for sides in FOLDERS:
        if all(os.path.isdir(os.path.join(folder, side)) for side in sides):
            names = [set(files.images_below(os.path.join(folder, side))) for side in sides]
            for side, partner in ((0, 1), (1, 0)):
                unpaired = sorted(names[side] - names[partner])
                if unpaired:
                    path = one_line(os.path.join(folder, sides[side], unpaired[0]))
                    missing = one_line(os.path.join(folder, sides[partner], unpaired[0]))
                    text = f"{path} has no partner {missing}"
                    if len(unpaired) > 1:
                        text += f", and {len(unpaired) - 1} more have none"
                    raise UserError(f"{text}: add what is missing")
            return sides, sorted(names[0])
    raise UserError(
        f"{one_line(folder)} has neither the folders blurry and sharp nor img and gt: a data set of "
        f"pairs has {LAYOUT}"
    )


def _reason_left_out(blurry: tree.Verdict, sharp: tree.Verdict, megapixels: int) -> Optional[str]:
    """Return why a pair cannot be used; None if it can."""
    if isinstance(blurry, str):
        return f"the blurry one is {blurry}"
    if isinstance(sharp, str):
        return f"the sharp one is {sharp}"
    if blurry[1:] != sharp[1:]:
        return "they are of {}x{} and {}x{} pixels".format(*blurry[1:], *sharp[1:])
    if blurry[1] * blurry[2] > megapixels * 10**6:
        return f"they have more than {megapixels} million pixels (--max_megapixels)"
    return None
