"""Read tensors from a file of torch.save or of safetensors without torch.load,
so that no version of torch runs code in it.

torch.load with weights_only has run code below torch 2.6 (CVE-2025-32434), and below 2.10 a crafted file
could damage the memory of the process (CVE-2026-24747). Here a pickle may make only plain values and what
NAMES lists. Each number that describes a tensor is checked against the bytes of the file, and the bytes are
copied.
"""

import collections
import io
import json
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any, BinaryIO, Callable, ClassVar

import numpy as np
import torch

from common.weights.plain import TYPES, Refused, check, is_key
from common.weights.unpickler import PlainUnpickler, opcodes

LONGEST_PICKLE = 64 << 20  # bytes
# At the beginning of a file in the form before torch 1.6.
MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
BEGINNINGS = (b"PK\3\4", pickle.dumps(MAGIC, 2))  # of a file of torch.save, now and before 1.6
# The names of types in a file of safetensors.
SAFE_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
LONGEST_HEADER = 8 << 20  # bytes, of a file of safetensors
Storage = Callable[[str, int], torch.Tensor]  # (key of a storage, number of bytes) -> the bytes


class LegacyFormat(Refused):
    """The file has the form before torch 1.6, which has no checksums, and no digest from elsewhere."""


def has_known_header(head: bytes) -> bool:
    """Whether these are the first bytes, at least nine, of a file that `read` may read."""
    return head.startswith(BEGINNINGS) or (
        head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= LONGEST_HEADER
    )


def read(content: bytes, verified: bool) -> Any:
    """Return what torch.save wrote, or the tensors by name of a file of safetensors, which has no checksums.

    Unless `verified` by a digest, compare the checksums of torch.save, and refuse files of torch before 1.6.
    """
    if not has_known_header(content):
        raise Refused("it is no archive of torch.save, and no file of safetensors")
    if not content.startswith(BEGINNINGS):
        value: Any = _read_safetensors(content)
    elif content.startswith(BEGINNINGS[0]):
        value = _read_archive(content, verified)
    elif not verified:
        raise LegacyFormat("it is of a torch before 1.6")
    else:
        value = _read_legacy(content)
    check(value)
    return value


def read_records(records: dict[str, Any]) -> Any:
    """Return the value in {name: bytes}, the records of an archive of torch.save;
    they are removed as they are used."""
    storages: dict[str, torch.Tensor] = {}

    def storage(key: str, _size: int) -> torch.Tensor:  # it has a size of its own
        if key not in storages:
            if f"data/{key}" not in records:
                raise Refused("it lacks a storage")
            storages[key] = _copy(records.pop(f"data/{key}"))
        return storages[key]

    if bytes(records.get("byteorder", b"little")) != b"little":
        raise Refused("its numbers are big-endian")
    if not 0 < len(records.get("data.pkl", b"")) <= LONGEST_PICKLE:
        raise Refused("it lacks a pickle, or has a very long one")
    return Unpickler(io.BytesIO(records.pop("data.pkl")), storage).load()


def _read_archive(content: bytes, verified: bool) -> Any:
    """Return the value in a zip archive of torch.save; Refused if it is damaged, compressed or a program."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
    records: dict[str, memoryview] = {}
    for entry in entries:
        prefix, _, name = entry.filename.partition("/")
        if not name or name in records or prefix != entries[0].filename.partition("/")[0]:
            raise Refused("its names are not those of torch.save")
        if name == "constants.pkl" or name.startswith("code/"):
            raise Refused("it is a program of TorchScript")
        begin = entry.header_offset + 30
        # the lengths of the name and of the extra field
        begin += sum(struct.unpack_from("<2H", content, begin - 4))
        records[name] = memoryview(content)[begin : begin + entry.file_size]
        if entry.compress_type or len(records[name]) != entry.file_size:
            raise Refused(f"{name} is compressed, or not whole")
        if not verified and zlib.crc32(records[name]) != entry.CRC:
            raise Refused(f"{name} is damaged")
    if sum(map(len, records.values())) > len(content):
        raise Refused("its records share their bytes")
    return read_records(records)


def _read_legacy(content: bytes) -> Any:
    """Return the value in a file of torch before 1.6: five pickles, the fourth of them the value,
    then each storage's bytes."""
    file = io.BytesIO(content)
    storages = {}
    remaining = len(content)

    def storage(key: str, size: int) -> torch.Tensor:
        nonlocal remaining
        if key not in storages:
            remaining -= size
            if remaining < 0:
                raise Refused("it has not as many bytes as it says")
            storages[key] = torch.empty(size, dtype=torch.uint8)
        return storages[key]

    magic, protocol, _ = (Unpickler(file, storage).load() for _ in range(3))
    if (magic, protocol) != (MAGIC, PROTOCOL):
        raise Refused("it is no file of torch.save")
    value = Unpickler(file, storage).load()
    keys = Unpickler(file, storage).load()
    if (
        type(keys) is not list
        or not all(type(key) is str for key in keys)
        or sorted(keys) != sorted(storages)
    ):
        raise Refused("it lacks a storage")
    for key in keys:
        file.read(8)
        if file.readinto(storages[key].numpy()) != len(storages[key]):
            raise Refused("it ends too early")
    return value


def _copy(record: memoryview) -> torch.Tensor:
    tensor = torch.empty(len(record), dtype=torch.uint8)
    tensor.numpy()[:] = np.frombuffer(record, np.uint8)
    return tensor


# --- safetensors: a length, that many bytes of JSON, and the bytes of the tensors ---------------------------


def _read_safetensors(content: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors by name; Refused unless they fill the file without gaps or overlaps."""
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin].decode(), object_pairs_hook=_unique_names, parse_int=_below_2_62)
    metadata = header.pop("__metadata__", {})
    if type(metadata) is not dict or not all(type(text) is str for text in metadata.values()):
        raise Refused("what it says of itself is no text")
    entries = {name: _entry(entry) for name, entry in header.items()}
    data = memoryview(content)[begin:]
    end = 0
    for _, _, start, stop in sorted(entries.values(), key=lambda entry: entry[2:]):
        if start != end:
            raise Refused("its tensors share bytes, or leave some out")
        end = stop
    if begin > len(content) or end != len(data):
        raise Refused("it has not as many bytes as it says")
    return {
        name: _copy(data[start:stop]).view(kind).reshape(shape)
        for name, (kind, shape, start, stop) in entries.items()
    }


def _entry(entry: object) -> tuple[torch.dtype, list[int], int, int]:
    """Return (type, shape, first byte, the byte behind the last)."""
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Refused("a tensor in it is none")
    name = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if type(name) is not str or name not in SAFE_TYPES:
        raise Refused(f"it holds a tensor of {str(name)[:80]}, which is not read here")
    if not all(
        type(numbers) is list and all(type(n) is int for n in numbers) for numbers in (shape, offsets)
    ):
        raise Refused("a tensor in it has no shape")
    kind = SAFE_TYPES[name]
    if len(shape) > 64 or len(offsets) != 2 or min([*shape, *offsets]) < 0 or math.prod(shape) >= 2**62:
        raise Refused("a tensor in it has no shape")
    if offsets[1] - offsets[0] != math.prod(shape) * torch.empty(0, dtype=kind).element_size():
        raise Refused("a tensor in it has another size than it says")
    return kind, shape, offsets[0], offsets[1]


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise Refused("it has a name twice")
    return entries


def _below_2_62(digits: str) -> int:
    if len(digits) > 19 or int(digits) >= 2**62:
        raise Refused("it has a number that is no size")
    return int(digits)


# --- What a pickle may make ---------------------------------------------------------------------------------


class _Storage:
    """A storage, made only by persistent_load.

    A type of its own, so that no tensor is made from another tensor.
    """

    def __init__(self, flat: torch.Tensor):
        self.flat = flat


def _tensor(
    storage: object,
    offset: Any,
    size: Any,
    stride: Any,
    needs_gradient: object = False,
    _hooks: object = None,
    metadata: object = None,
) -> torch.Tensor:
    """Return a tensor that views a storage; Refused if it has more elements than the storage,
    or some outside of it."""
    if type(storage) is not _Storage or type(size) is not tuple or type(stride) is not tuple or metadata:
        raise Refused("a tensor in it is none")
    if not len(size) == len(stride) <= 64 or not all(
        type(n) is int and 0 <= n < 2**62 for n in (offset, *size, *stride)
    ):
        raise Refused("a tensor in it has no shape")
    numel = math.prod(size)
    storage_numel = len(storage.flat)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride))
    if numel > storage_numel or (numel and last >= storage_numel):
        raise Refused("a tensor in it is larger than its bytes")
    return storage.flat.as_strided(size, stride, offset).requires_grad_(bool(needs_gradient))


def _parameter(tensor: object, needs_gradient: object = True, _hooks: object = None) -> torch.nn.Parameter:
    if type(tensor) is not torch.Tensor:
        raise Refused("a parameter in it is none")
    return torch.nn.Parameter(tensor, bool(needs_gradient))


def _ordered(pairs: Any = ()) -> collections.OrderedDict:
    if type(pairs) not in (list, tuple) or not all(map(_is_item, pairs)):
        raise Refused("a dict in it is none")
    return collections.OrderedDict(pairs)


def _is_item(pair: Any) -> bool:
    return type(pair) in (list, tuple) and len(pair) == 2 and is_key(pair[0])


FUNCTIONS = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch.nn.parameter", "Parameter"): _parameter,  # by NEWOBJ, before torch 0.4
    ("collections", "OrderedDict"): _ordered,
}
NAMES = {**FUNCTIONS, **{("torch", name): kind for name, kind in TYPES.items()}}


class Unpickler(PlainUnpickler):
    """Accepts only the opcodes that torch.save writes, and only on the types for which they are meant."""

    stack: list
    pop_mark: Callable[[], list]
    allowed = NAMES

    def __init__(self, file: BinaryIO, storage: Storage):
        super().__init__(file)
        self._storage = storage

    def load(self) -> Any:
        try:
            return super().load()
        except KeyError as error:
            raise Refused(
                f"it has opcode {error}: it is no pickle of protocol 2, with which torch.save writes"
            ) from None
        except pickle.UnpicklingError as error:
            raise Refused(str(error)) from None
        except (EOFError, IndexError):
            raise Refused("it ends too early, or is no pickle") from None

    def persistent_load(self, pid: object) -> _Storage:
        """Return the storage that a persistent id of torch.save names; Refused if it is malformed."""
        if type(pid) is not tuple or len(pid) not in (5, 6) or any(view is not None for view in pid[5:]):
            raise Refused("a storage in it is none")
        tag, kind, key, _, numel = pid[:5]
        if (
            (tag, type(kind), type(key), type(numel)) != ("storage", torch.dtype, str, int)
            or numel < 0
            or len(key) > 100
        ):
            raise Refused("a storage in it is none")
        size = numel * torch.empty(0, dtype=kind).element_size()
        content = self._storage(key, size)
        if len(content) != size:
            raise Refused("a storage in it has another size than it says")
        return _Storage(content.view(kind))

    def _require_type(self, target: object, *kinds: type) -> Any:
        if type(target) not in kinds:
            raise Refused(f"a {type(target).__name__} in it is where none may be")
        return target

    def _append(self):
        values = [self.stack.pop()]
        self._require_type(self.stack[-1], list).extend(values)

    def _appends(self):
        values = self.pop_mark()
        self._require_type(self.stack[-1], list).extend(values)

    def _setitem(self):
        self._set([self.stack.pop(-2), self.stack.pop()])

    def _setitems(self):
        self._set(self.pop_mark())

    def _set(self, values: Sequence[Any]) -> None:
        for key, value in zip(values[::2], values[1::2]):
            if not is_key(key):
                raise Refused(f"a {type(key).__name__} in it is a key, or too large for one")
            self._require_type(self.stack[-1], dict, collections.OrderedDict)[key] = value

    def _reduce(self):
        arguments = self.stack.pop()
        function = self.stack[-1]
        if (
            not any(function is allowed for allowed in FUNCTIONS.values())
            or type(arguments) is not tuple
            or len(arguments) > 7
        ):
            raise Refused("it calls what is no part of a tensor")
        try:
            self.stack[-1] = function(*arguments)
        except TypeError:
            raise Refused("a tensor in it has too few parts") from None

    def _build(self):
        """Drop the attributes of an OrderedDict: the versions of layers that torch.nn adds to a state_dict,
        not needed here."""
        self.stack.pop()
        self._require_type(self.stack[-1], collections.OrderedDict)

    dispatch: ClassVar[Any] = {
        **PlainUnpickler.dispatch,
        **opcodes(pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE, pickle.BINPERSID),
        pickle.APPEND[0]: _append, pickle.APPENDS[0]: _appends, pickle.SETITEM[0]: _setitem,
        pickle.SETITEMS[0]: _setitems, pickle.REDUCE[0]: _reduce, pickle.NEWOBJ[0]: _reduce,
        pickle.BUILD[0]: _build,
    }  # fmt: skip
