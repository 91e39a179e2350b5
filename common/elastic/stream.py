"""Read the state that another rank has sent, in the form of torch.distributed._serialization,
without torch.load."""

import pickle
from typing import Any, BinaryIO, ClassVar

import torch

from common.weights.plain import Refused, check
from common.weights.tensors import Unpickler, read_records


class _Entries(Unpickler):
    """Reads the list at the start of a stream: for each record an object with a "key" and a "length"."""

    allowed = {("torch.distributed._serialization", "_Entry"): dict}

    def _new(self):
        self.stack.pop()
        self.stack[-1] = {}

    def _fill(self):
        state = self._require_type(self.stack.pop(), dict)
        self._require_type(self.stack[-1], dict).update(state)

    dispatch: ClassVar[Any] = {**Unpickler.dispatch, pickle.NEWOBJ[0]: _new, pickle.BUILD[0]: _fill}


def read_stream(file: BinaryIO) -> Any:
    """Return what was sent: a list of records, and then their bytes. Refused if it is not of this form."""
    records = {}
    entries = _Entries(file, lambda key, size: torch.empty(0)).load()
    if type(entries) is not list:
        raise Refused("it begins with no list")
    for entry in entries:
        fields = entry if type(entry) is dict else {}
        key = fields.get("key")
        length = fields.get("length")
        if type(key) is not str or key in records or type(length) is not int or not 0 <= length < 2**62:
            raise Refused("its list of records is none")
        records[key] = file.read(length)
        if len(records[key]) != length:
            raise Refused("it ends too early")
    value = read_records(records)
    check(value)
    return value
