"""Photographs with the label of their class, as batches: decoded, cropped and, for training, flipped."""

from typing import Any, Optional

import numpy as np
import torch

from datasets import crops
from datasets.photos import decode, tree

SUBSTITUTES = 100  # tried in a row until the data set is taken for damaged


class Photos:
    """The pictures of a tree, decoded a batch at a time;
    for training each is cropped and flipped at random."""

    def __init__(
        self, photo_tree: tree.Tree, size: int, train: bool, seed: int,
        area: tuple[float, float] = crops.AREA, short: Optional[int] = None, mode: str = "bilinear",
        augmentation: str = "none",
    ) -> None:  # fmt: skip
        """`area`: smallest and largest share of a picture in a crop; `short`: length of the short side for
        evaluation, or WHOLE (None: 8/7 of `size`); `mode`: bilinear or bicubic; `augmentation`: of training
        pictures, see datasets/augment.py."""
        self.tree = photo_tree
        self.announced = photo_tree.announced
        self.size = size
        self.train = train
        self.seed = seed
        self.area = area
        self.short = decode.short_side(size) if short is None else short
        self.mode = mode
        self.augmentation = augmentation if train else "none"
        self.classes = photo_tree.classes
        self.special = photo_tree.special
        self._substitutes = decode.Substitutes("images", SUBSTITUTES)

    def __len__(self) -> int:
        return len(self.tree)

    @property
    def labels(self) -> np.ndarray:
        return self.tree.labels

    def __getitem__(
        self, epoch_and_ids: tuple[int, np.ndarray]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (images, labels, ids) of a batch; where a sample was replaced,
        the label is that of its substitute."""
        epoch, ids = epoch_and_ids
        images = torch.empty(
            (len(ids), 3, self.size, self.size), dtype=torch.uint8, memory_format=torch.channels_last
        )
        used_ids = np.empty(len(ids), np.int64)
        windows, flips = self.windows(ids, epoch)
        self.tree.prefetch(ids)
        for position, number in enumerate(ids):
            used_ids[position], images[position] = self._picture(
                int(number), epoch, windows[position], flips[position]
            )
        return images, torch.from_numpy(self.tree.labels[used_ids]), torch.from_numpy(ids)

    def digest(self) -> dict[str, str]:
        return self.tree.digest()

    def file_of(self, number: int) -> str:
        """Return the path of a sample's file below the folder of the tree,
        for reports of wrong predictions."""
        return self.tree.names[number]

    def windows(self, ids: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the crops (top, left, height, width) and flips of these samples in an epoch."""
        return crops.random_windows(
            ids, self.tree.widths[ids], self.tree.heights[ids], self.seed, epoch, self.area
        )

    def _picture(self, number: int, epoch: int, window: object, flip: bool) -> Any:
        """Return (id, picture) of a sample or of its substitute, which has a window and a flip of its own."""

        def decode_sample(candidate: int) -> Any:
            if candidate == number:
                return self._decode(candidate, epoch, window, flip)
            (own_window,), (own_flip,) = self.windows(np.array([candidate]), epoch)
            return self._decode(candidate, epoch, own_window, own_flip)

        return self._substitutes.decode(number, len(self), decode_sample, self.tree.path)

    def _decode(self, number: int, epoch: int, window: Any, flip: bool) -> Any:
        """Decode a sample, for training with window, flip and augmentation; Undecodable if it is damaged."""
        original = self.tree.original_size(number)
        stored_size = self.tree.stored_size(number)
        if not min(stored_size):
            raise decode.Undecodable("it was damaged when it was packed")
        content = self.tree.content(number)
        special = bool(self.special[number])
        if not self.train:
            return decode.eval_picture(content, special, self.size, self.short, original, self.mode)
        picture = decode.train_picture(
            content, special, crops.scaled(window, original, stored_size), flip, self.size, self.mode
        )
        return self.augmented(picture, number, epoch)

    def augmented(self, picture: torch.Tensor, number: int, epoch: int) -> torch.Tensor:
        """Apply the augmentation, if there is one, to a training picture that has been cropped and
        flipped."""
        if self.augmentation == "none":
            return picture
        from datasets import augment

        return augment.augmented(self.augmentation, picture, self.seed, epoch, number)
