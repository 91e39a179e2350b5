"""The random crop and flip of each training picture: a pure function of (seed, epoch, sample id) and the
picture's size.

Photographs get the windows of torchvision's RandomResizedCrop: an area of 8 to 100 % of the picture and an
aspect ratio of 3:4 to 4:3, ten attempts to make it fit, else the largest window in the middle with the
nearest allowed ratio. If the area has to be 100 %, the window is the whole picture. Small images in memory
are shifted by up to PADDING pixels, a whole batch on its device.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from common import devices

# --- Windows of photographs ---------------------------------------------------------------------------------

ATTEMPTS = 10
AREA = (0.08, 1.0)
LOG_RATIO = (np.log(3 / 4), np.log(4 / 3))


def random_windows(
    ids: Any, widths: Any, heights: Any, seed: int, epoch: int, area: tuple[float, float] = AREA
) -> tuple[np.ndarray, np.ndarray]:
    """Return crops (top, left, height, width), int64 (N, 4), and flips, bool (N,).

    `area`: shares of a picture to draw from.
    """
    widths = np.asarray(widths, np.int64)
    heights = np.asarray(heights, np.int64)
    ids = np.asarray(ids)
    windows = _largest_in_the_middle(widths, heights)
    pending = np.arange(len(ids))
    if area[0] == 1:  # the whole picture, whatever its ratio
        windows = np.stack([0 * heights, 0 * widths, heights, widths], axis=1)
        pending = pending[:0]
    for attempt in range(ATTEMPTS if len(pending) else 0):
        full_width = widths[pending]
        full_height = heights[pending]
        draws = uniform(ids[pending], seed, epoch, range(4 * attempt, 4 * attempt + 4))
        pixels = full_width * full_height * (area[0] + draws[0] * (area[1] - area[0]))
        ratio = np.exp(LOG_RATIO[0] + draws[1] * (LOG_RATIO[1] - LOG_RATIO[0]))
        width = np.rint(np.sqrt(pixels * ratio)).astype(np.int64)
        height = np.rint(np.sqrt(pixels / ratio)).astype(np.int64)
        fits = (width > 0) & (width <= full_width) & (height > 0) & (height <= full_height)
        top = (draws[2] * (full_height - height + 1)).astype(np.int64)
        left = (draws[3] * (full_width - width + 1)).astype(np.int64)
        windows[pending[fits]] = np.stack([top, left, height, width], axis=1)[fits]
        pending = pending[~fits]
        if not len(pending):  # most fit at once, and each attempt costs a batch as much as decoding a picture
            break
    return windows, uniform(ids, seed, epoch, [4 * ATTEMPTS])[0] < 0.5


def scaled(window: np.ndarray, original: tuple[int, int], stored: tuple[int, int]) -> Any:
    """Return the window for the same part of a picture resized from `original` to `stored`,
    both (height, width)."""
    if stored == original:
        return window
    top, left, height, width = window.tolist()
    top, bottom = _scaled(top, top + height, original[0], stored[0])
    left, right = _scaled(left, left + width, original[1], stored[1])
    return top, left, bottom - top, right - left


def _scaled(start: int, stop: int, original: int, stored: int) -> tuple[int, int]:
    scaled_start = min(
        round(start * stored / original), -(-stop * stored // original) - 1
    )  # the second: the window has less than a pixel
    return scaled_start, max(round(stop * stored / original), scaled_start + 1)


def _largest_in_the_middle(widths: np.ndarray, heights: np.ndarray) -> np.ndarray:
    ratio = np.clip(widths / heights, np.exp(LOG_RATIO[0]), np.exp(LOG_RATIO[1]))
    width = np.where(widths / heights > ratio, np.rint(heights * ratio), widths).astype(np.int64)
    height = np.where(widths / heights < ratio, np.rint(widths / ratio), heights).astype(np.int64)
    return np.stack([(heights - height) // 2, (widths - width) // 2, height, width], axis=1)


def uniform(ids: Any, seed: int, epoch: int, draws: Any) -> np.ndarray:
    """Return numbers in [0, 1) of shape (len(draws), len(ids)), each 53 bits of a hash of seed, epoch, id and
    draw."""
    words = np.array([seed, epoch, *draws], dtype=object) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019
    seed, epoch, *draws = _mix((words % 2**64).astype(np.uint64))[:, None]
    counter = _mix(_mix(np.asarray(ids).astype(np.uint64) ^ seed) ^ epoch)
    return (_mix(counter ^ np.array(draws)) >> np.uint64(11)) / float(1 << 53)


def _mix(bits: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64, in which every input bit affects every output bit."""
    with np.errstate(over="ignore"):
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


# --- Shifts of small images, whose numbers come from 32-bit arithmetic, alike on CPU and GPU ----------------

PADDING = 4  # pixels of black on every side, from which the crop may take
MASK = 0xFFFFFFFF


def crop_and_flip(images: torch.Tensor, ids: torch.Tensor, seed: int, epoch: int) -> torch.Tensor:
    """Return the uint8 (N, C, H, W) images, each shifted by up to PADDING pixels and flipped or not at
    random."""
    numbers = torch.arange(len(images), device=images.device)
    rows, columns = rows_and_columns(numbers, ids, images.shape[2:], seed, epoch)
    return pixels_with_border(images)[rows + columns].permute(0, 3, 1, 2)


def pixels_with_border(images: torch.Tensor) -> torch.Tensor:
    """Return the pixels (-1, C) of all (N, C, H, W) images, row after row,
    with PADDING pixels of black on every side."""
    padded = torch.nn.functional.pad(images, (PADDING,) * 4)
    return padded.permute(0, 2, 3, 1).reshape(-1, images.shape[1])


def rows_and_columns(
    numbers: torch.Tensor, ids: torch.Tensor, size: Sequence[int], seed: int, epoch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (N, H, 1) and columns (N, 1, W): their sums are the places of crops among
    pixels_with_border(images).

    `numbers`: of the images that are cropped, on their device; `ids`: of the samples that they are, which the
    crops are drawn for; `size`: height and width of all images.
    """
    height, width = size
    device = numbers.device
    top, left, flip = devices.to_device(torch.stack(draw_crops_and_flips(ids, seed, epoch)), device)
    rows = top[:, None] + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(len(ids), width)
    columns = left[:, None] + torch.where(flip[:, None] == 1, width - 1 - columns, columns)
    first_row = numbers[:, None] * (height + 2 * PADDING)
    first_of_rows = (first_row + rows) * (width + 2 * PADDING)
    return first_of_rows[:, :, None], columns[:, None, :]


def draw_crops_and_flips(
    ids: torch.Tensor, seed: int, epoch: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (top, left, flip) of each sample: where its crop begins in the padded picture,
    and 1 if it is flipped."""
    bits = _mix32(torch.full_like(ids, seed & MASK, dtype=torch.int64))
    bits = _mix32(bits ^ (epoch & MASK))
    bits = _mix32(bits ^ (ids.to(torch.int64) & MASK))
    span = 2 * PADDING + 1
    return bits % span, (bits >> 8) % span, (bits >> 16) & 1


def _mix32(bits: Any) -> Any:
    """Spread every input bit over all 32 output bits; the multiplier is small enough for int64 not to
    overflow."""
    for _ in range(2):
        bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) & MASK
    return bits ^ (bits >> 16)
