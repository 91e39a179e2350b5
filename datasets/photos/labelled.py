"""Photographs with the label of their class, as batches: decoded, cropped and, for training, flipped.

A file that was judged to be a picture and cannot be decoded after all is replaced by the next sample that can, with its own
label: the same one in every loader, at every start, on every rank.
"""

import numpy as np
import torch

from common.errors import TrainingFailed, one_line
from datasets import crops
from datasets.photos import decode

SUBSTITUTES = 100  # tried in a row until the data set is taken for damaged


class Photos:
    """The pictures of a tree, decoded a batch at a time; for training each is cropped and flipped at random."""

    def __init__(self, files, size, train, seed, area=crops.AREA, short=None):
        """`area`: how much of a picture a crop may take; `short`: what the short side is resized to for evaluation."""
        self.tree, self.size, self.train, self.seed = files, size, train, seed
        self.area, self.short = area, short or decode.short_side(size)
        self.classes = files.classes
        self._told = set()

    def __len__(self):
        return len(self.tree)

    def __getitem__(self, epoch_and_ids):
        epoch, ids = epoch_and_ids
        images = torch.empty((len(ids), 3, self.size, self.size), dtype=torch.uint8, memory_format=torch.channels_last)
        used = np.empty(len(ids), np.int64)
        windows, flips = self.windows(ids, epoch)
        self.tree.expect(ids)
        for place, number in enumerate(ids):
            used[place], images[place] = self._picture(int(number), epoch, windows[place], flips[place])
        return images, torch.from_numpy(self.tree.labels[used]), torch.from_numpy(ids)

    def windows(self, ids, epoch):
        """Where each picture is cropped in this epoch, and which are flipped."""
        return crops.random_windows(ids, self.tree.widths[ids], self.tree.heights[ids], self.seed, epoch, self.area)

    def _picture(self, number, epoch, window, flip):
        """(the sample that it is after all, its pixels)"""
        for step in range(SUBSTITUTES):
            used = (number + step) % len(self)
            if step:
                (window,), (flip,) = self.windows(np.array([used]), epoch)
            try:
                return used, self._decode(used, window, flip)
            except (decode.Undecodable, OSError) as error:
                self._tell(used, error)
        first = one_line(self.tree.path(number))
        raise TrainingFailed(f"{SUBSTITUTES} images in a row cannot be decoded, from {first}: fetch the data set again")

    def _decode(self, number, window, flip):
        whole, stored = self.tree.whole(number), self.tree.stored(number)
        if not min(stored):
            raise decode.Undecodable("it was damaged when it was packed")
        content, special = self.tree.content(number), self.tree.special[number]
        if self.train:
            return decode.train_picture(content, special, crops.scaled(window, whole, stored), flip, self.size)
        return decode.test_picture(content, special, self.size, self.short, whole)

    def _tell(self, number, error):
        if number not in self._told:  # once in each loader process
            self._told.add(number)
            name = one_line(self.tree.path(number))
            print(f"warning: {name} cannot be decoded ({one_line(error)[:100]}): the next one takes its place", flush=True)
