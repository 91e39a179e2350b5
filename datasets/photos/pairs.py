"""Pairs of pictures, a blurry one and its sharp partner: ROOT/{train,test}/{blurry,sharp}/SUB/IMAGE, or img and gt.

Partners have the same path below their folders, and both get one geometry: resized, cropped, flipped by numbers that depend on
seed, epoch and pair alone. A batch is 2N pictures, the blurry ones first.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from common.errors import UserError, one_line
from datasets import synthetic
from datasets.crops import uniform
from datasets.photos import decode, tree
from datasets.photos.substitutes import Substitutes

LAYOUT = "{train,test}/{blurry,sharp}/SUB/IMAGE; img and gt will do, too"
FOLDERS = [("blurry", "sharp"), ("img", "gt")]
SUBSTITUTES = 10  # tried in a row until the data set is taken for damaged
SYNTHETIC, SYNTHETIC_SIZE = {"train": 256, "test": 32}, 72


class Pairs:
    """The pairs of a split. `resize` 0 leaves the pictures' size as it is."""

    def __init__(self, folder, resize, crop, train, seed):
        self.folder, self.resize, self.crop, self.train, self.seed = folder, resize, crop, train, seed
        self.folders, names = find(folder)
        paths = [[os.path.join(folder, side, name) for name in names] for side in self.folders]
        with ThreadPoolExecutor(tree.THREADS) as pool:
            verdicts = [list(pool.map(tree.judge, side)) for side in paths]
        self.names, rows = [], []
        for name, *pair in zip(names, *verdicts):
            reason = _unfit(*pair)
            if reason:
                print(f"warning: {one_line(os.path.join(folder, '*', name))} is left out: {reason}", flush=True)
            else:
                self.names.append(name)
                rows.append((pair[0][0] or pair[1][0], *pair[0][1:]))
        if not rows:
            raise UserError(f"{folder} holds no pair that can be read")
        special, self.widths, self.heights = (np.array(column) for column in zip(*rows))
        self.special = special.astype(bool)
        self._substitutes = Substitutes("pairs", SUBSTITUTES)

    def __len__(self):
        return len(self.names)

    def keep_first(self, count):
        """Only so many; None: all."""
        for name in ("names", "heights", "widths", "special"):
            setattr(self, name, getattr(self, name)[:count])

    def read(self, number):
        """The two files' bytes."""
        found = []
        for side in self.folders:
            with open(os.path.join(self.folder, side, self.names[number]), "rb") as file:
                found.append(file.read())
        return found

    def __getitem__(self, epoch_and_ids):
        epoch, ids = epoch_and_ids
        images = self.room(len(ids))
        for place, number in enumerate(ids):
            images[place], images[len(ids) + place] = self._pair(int(number), epoch)
        return images, torch.from_numpy(ids), torch.from_numpy(ids)

    def room(self, count):
        """Memory for a batch: all blurry ones, then all sharp ones."""
        return torch.empty((2 * count, 3, self.crop, self.crop), dtype=torch.uint8, memory_format=torch.channels_last)

    def geometry(self, ids, epoch):
        """Of each pair (height, width) when resized, (top, left) of the crop in that, whether it is flipped (down, across)."""
        heights, widths, crop = self.heights[ids].astype(np.int64), self.widths[ids].astype(np.int64), self.crop
        scale = self.resize / heights if self.resize else np.ones(len(ids))
        scale = np.maximum(scale, np.maximum(crop / heights, crop / widths))  # too narrow a picture grows until the crop fits
        sizes = np.maximum(np.rint(np.stack([heights, widths], axis=1) * scale[:, None]).astype(np.int64), crop)
        if not self.train:
            return sizes, (sizes - crop) // 2, np.zeros((len(ids), 2), bool)
        draws = np.ascontiguousarray(uniform(ids, self.seed, epoch, range(4)).T)  # DALI takes no other
        return sizes, (draws[:, :2] * (sizes - crop + 1)).astype(np.int64), draws[:, 2:] < 0.5

    def _pair(self, number, epoch):
        def decoded(used):
            (size,), (corner,), (flips,) = self.geometry(np.array([used]), epoch)
            pictures = [decode.decode(content, self.special[used], None) for content in self.read(used)]
            return [self.cut(picture, size, corner, flips) for picture in pictures]

        return self._substitutes.decode(number, len(self), decoded, self.names.__getitem__)[1]

    def cut(self, picture, size, corner, flips):
        """What becomes of one of a pair after it was decoded."""
        if tuple(picture.shape[1:]) != tuple(size):
            picture = decode.resize(picture, *map(int, size))
        top, left = corner
        picture = picture[:, top : top + self.crop, left : left + self.crop]
        return picture.flip([axis + 1 for axis in range(2) if flips[axis]])


class SyntheticPairs(Pairs):
    """Coloured shapes, sharp and blurred by a known motion, made at the start and kept as PNG."""

    def __init__(self, split, limit, crop, seed):
        self.resize, self.crop, self.train, self.seed = 0, crop, split == "train", seed
        count = min(SYNTHETIC[split], limit or SYNTHETIC[split])
        self._files = [synthetic.blurry_and_sharp(number, split, SYNTHETIC_SIZE) for number in range(count)]
        self.names = [f"shapes {number}" for number in range(count)]
        self.heights = self.widths = np.full(count, SYNTHETIC_SIZE)
        self.special = np.zeros(count, bool)
        self._substitutes = Substitutes("pairs", SUBSTITUTES)

    def read(self, number):
        return self._files[number]


def find(folder):
    """((folder of the inputs, folder of the targets), paths below both), refused where a picture has no partner."""
    for sides in FOLDERS:
        if all(os.path.isdir(os.path.join(folder, side)) for side in sides):
            names = [set(tree.images_below(os.path.join(folder, side))) for side in sides]
            for here, there in ((0, 1), (1, 0)):
                alone = sorted(names[here] - names[there])
                if alone:
                    more = f", and {len(alone) - 1} more have none" if len(alone) > 1 else ""
                    mine, wanted = (one_line(os.path.join(folder, sides[side], alone[0])) for side in (here, there))
                    raise UserError(f"{mine} has no partner {wanted}{more}")
            return sides, sorted(names[0])
    raise UserError(
        f"{one_line(folder)} has neither the folders blurry and sharp nor img and gt: a data set of pairs has {LAYOUT}"
    )


def _unfit(blurry, sharp):
    """Why a pair is left out, or None."""
    for side, verdict in (("blurry", blurry), ("sharp", sharp)):
        if isinstance(verdict, str):
            return f"the {side} one is {verdict}"
    if blurry[1:] != sharp[1:]:
        return "they are of {}x{} and {}x{} pixels".format(*blurry[1:], *sharp[1:])
    return None
