"""What a checkpoint and a file of weights may hold: tensors and plain values.

How they are read: tensors.py.
"""

import collections
from typing import Any, Optional

import torch

DEEPEST = 100  # levels of lists and dicts in each other
LARGEST_KEY = 2**32  # of a dict: larger numbers can be chosen so that they all collide in its table
TYPES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip


class Refused(ValueError):
    """The content is no file of tensors and plain values."""


def check(value: Any, depth: int = 0, seen: Optional[set[int]] = None) -> None:
    """Raise Refused if the value holds something that a file may not hold,
    such as a sparse tensor or an object of a class."""
    seen = set() if seen is None else seen
    if id(value) in seen:  # an object that occurs many times is checked once
        return
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.dtype not in TYPES.values() or value.layout is not torch.strided:
            raise Refused(f"it holds a tensor of {value.dtype}, {value.layout}, which is not stored here")
        if value.dtype is torch.bool and bool((value.detach().view(torch.uint8) > 1).any()):
            raise Refused("it holds a truth that is neither true nor false")
    elif type(value) in (dict, collections.OrderedDict, list, tuple):
        seen.add(id(value))
        if depth == DEEPEST:
            raise Refused(f"it holds lists in lists, more than {DEEPEST} deep")
        for key in value if isinstance(value, dict) else ():
            if not is_key(key):
                raise Refused(f"it holds a dict with a key that is {type(key).__name__} or too large")
        for item in value.values() if isinstance(value, dict) else value:
            check(item, depth + 1, seen)
    elif type(value) not in (str, int, float, bool, type(None)):
        raise Refused(f"it holds a {type(value).__name__}, which is neither a tensor nor a plain value")


def is_key(key: Any) -> bool:
    """Whether this may be a key of a dict.

    No tuple may: to hash tuples nested very deep can overflow the stack of C.
    """
    return key is None or type(key) is str or (type(key) in (int, bool) and abs(key) < LARGEST_KEY)
