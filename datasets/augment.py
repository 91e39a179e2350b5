"""Random crop and flip of a whole batch on its device, as a pure function of (seed, epoch, sample id).

No generator is drawn from, so a picture looks the same on every rank, in every batch split, with any number of workers and
after any restart. The numbers come from a counter hash in 32-bit arithmetic, alike on CPU and GPU.
"""

import torch

PADDING = 4  # pixels of black on every side, from which the crop may take
MASK = 0xFFFFFFFF


def crop_and_flip(images, ids, seed, epoch):
    """uint8 (N, C, H, W) in channels_last to the same, each shifted by up to PADDING pixels and flipped half of the time."""
    count, _, height, width = images.shape
    top, left, flip = crops_and_flips(ids.to(images.device), seed, epoch)
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(count, width)
    columns = left[:, None] + torch.where(flip[:, None] == 1, width - 1 - columns, columns)

    padded = torch.nn.functional.pad(images, (PADDING,) * 4)
    sample = torch.arange(count, device=images.device)
    pixels = padded.permute(0, 2, 3, 1)[sample[:, None, None], rows[:, :, None], columns[:, None, :]]
    return pixels.permute(0, 3, 1, 2)


def crops_and_flips(ids, seed, epoch):
    """(top, left, flip) of each sample: where its crop begins in the padded picture, and 1 if it is flipped."""
    bits = random_bits(ids, seed, epoch)
    span = 2 * PADDING + 1
    return bits % span, (bits >> 8) % span, (bits >> 16) & 1


def random_bits(ids, seed, epoch):
    """32 well mixed bits for each sample id, as int64."""
    bits = _mix(torch.full_like(ids, seed & MASK, dtype=torch.int64))
    bits = _mix(bits ^ (epoch & MASK))
    return _mix(bits ^ (ids.to(torch.int64) & MASK))


def _mix(bits):
    """Spread every input bit over all 32 output bits; the multiplier is small enough for int64 not to overflow."""
    for _ in range(2):
        bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) & MASK
    return bits ^ (bits >> 16)
