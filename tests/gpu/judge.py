"""The verdicts of `make gpu`: each takes what was measured, and returns what is wrong with it, or None.

Whatever compares numbers stands here, so that tests/gpu/test_gpu.py can show that it fails when they are wrong.
"""

import math

import torch


def same_bits(one, other):
    """Two tensors, on whatever device."""
    one, other = one.detach().cpu(), other.detach().cpu()
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
    different = one.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)
    if not different.any():
        return None
    furthest = (one.double() - other.double()).abs().max().item()
    return f"{int(different.sum())} of {different.numel()} bytes differ; the values by up to {furthest:.3g}"


def below(value, limit):
    return None if math.isfinite(value) and value < limit else f"{value:.4g} is not below {limit:g}"


def at_least(value, limit):
    return None if math.isfinite(value) and value >= limit else f"{value:.4g} is below {limit:g}"


def equal(value, expected):
    return None if value == expected else f"{value!r}, and not {expected!r}"


def close(value, expected, tolerance):
    distance = abs(value - expected)
    return None if math.isfinite(distance) and distance <= tolerance else f"{value:.6g} is {distance:.3g} from {expected:.6g}"


def says(text, *parts):
    """Whether each of the parts stands in the text."""
    absent = [part for part in parts if str(part) not in text]
    return f"does not say {', '.join(map(repr, map(str, absent)))}" if absent else None


def scale_fell_and_steps_were_skipped(scales, moved, counted):
    """The gradient scale after each step, whether the weights moved in it, and the steps that the run says were skipped."""
    skipped = [number for number, scale in enumerate(scales[1:], 1) if scale < scales[number - 1]]
    if not skipped:
        return f"the scale never fell: {scales}"
    if any(moved[number] for number in skipped):
        return f"the weights moved in a skipped step: {moved}, skipped {skipped}"
    if not all(moved[number] for number in range(1, len(scales)) if number not in skipped):
        return f"the weights stood still in a step that was not skipped: {moved}, skipped {skipped}"
    return equal(counted, len(skipped))
