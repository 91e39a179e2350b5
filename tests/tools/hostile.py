"""Files that would run code, damage memory or fill it, if torch or pickle read them; and damaged ones.

python -m tests.tools.hostile         each is refused in one line, on the torch of this Python (a row of make engine)
"""

import copy
import hashlib
import io
import json
import os
import pickle
import random
import struct
import sys
import tarfile
import tempfile
import zipfile

import torch
from torch import nn

from common.checkpoints import checkpoint
from common.checkpoints.pretrained import read_weights
from common.errors import UserError
from common.weights import tensors

CANARY = "canary"  # which a file would make in the current folder, if anything in it were run


def saved(value, **how):
    torch.save(value, content := io.BytesIO(), **how)
    return content.getvalue()


def old(value):
    return saved(value, _use_new_zipfile_serialization=False)


def mutated(content, draw):
    bad = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 2, 8])):
        place = draw.randrange(len(bad))
        what = draw.randrange(5)
        if what < 2:
            bad[place] ^= 1 << draw.randrange(8)
        elif what == 2:
            bad[place : place + draw.randrange(1, 9)] = draw.randbytes(draw.randrange(9))
        elif what == 3:
            other = draw.randrange(len(bad))
            bad[place : place + 16] = bad[other : other + 16]
        else:
            del bad[place + 1 :]
    return bytes(bad)


def text(word):
    return b"X" + struct.pack("<I", len(word)) + word


def storage(kind=b"FloatStorage", key=b"0", count=b"K\4", word=b"storage", more=b"", name=b"torch"):
    """That with which a tensor of four numbers begins."""
    return b"(" + text(word) + b"c%s\n%s\n" % (name, kind) + text(key) + text(b"cpu") + count + more + b"tQ"


def number(value):
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def tensor(store=None, offset=b"K\0", size=b"K\4\x85", stride=b"K\1\x85", function=b"torch._utils\n_rebuild_tensor_v2"):
    return b"c%s\n(" % function + (storage() if store is None else store) + offset + size + stride + b"\x89Nt" + b"R"


def in_a_dict(value):
    return b"}" + text(b"weight") + value + b"s."


RUNS = text(f"touch {CANARY}".encode())
CALLS = [b"os\nsystem", b"posix\nsystem", b"subprocess\ngetoutput", b"builtins\neval", b"builtins\nexec", b"builtins\ngetattr",
         b"torch\nload", b"torch.jit\nload", b"torch.hub\nload", b"torch.storage\n_load_from_bytes", b"torch._utils\n_rebuild_wrapper_subclass",
         b"torch._tensor\n_rebuild_from_type_v2", b"numpy\nload", b"pickle\nloads", b"collections\nCounter", b"torch.serialization\n_load",
         b"torch\nUntypedStorage", b"torch._utils\n_rebuild_sparse_tensor", b"importlib\nimport_module", b"common.weights.tensors\nread"]  # fmt: skip
DEEP = b"N" + b"\x85" * 500_000

HOSTILE = {
    **{f"calls {name.decode()!r}": b"c%s\n(%stR" % (name, RUNS) for name in CALLS},
    "calls by protocol 4": b"\x8c\2os\x8c\6system\x93(" + RUNS + b"tR",
    "INST": b"(" + RUNS + b"ios\nsystem\n",
    "OBJ": b"(cos\nsystem\n" + RUNS + b"o",
    "NEWOBJ": b"cos\nsystem\n(" + RUNS + b"t\x81",
    "NEWOBJ_EX": b"cos\nsystem\n(" + RUNS + b"t}\x92",
    "EXT1": b"\x82\1",
    "calls a type": b"ctorch\nFloatStorage\n(tR",
    "calls a tensor": tensor() + b"(tR",
    "calls a text": text(b"print") + b"(tR",
    "calls without a tuple": b"ccollections\nOrderedDict\n]R",
    "sets an item of a tensor": tensor() + b"K\0K\1s",
    "sets items of a tensor": tensor() + b"(K\0K\1u",
    "sets an item of a list": b"]K\0K\1s",
    "sets items of a list": b"](K\0K\1K\2K\3u",
    "sets an item of a storage": storage() + b"K\0K\1s",
    "appends to a tensor": tensor() + b"K\1a",
    "appends to a dict": b"}K\1a",
    "extends a tensor": tensor() + b"(K\1e",
    "extends a storage": storage() + b"(K\1e",
    "builds a tensor": tensor() + b"}b",
    "builds a dict": b"}}b",
    "builds a storage": storage() + b"}b",
    "a tuple of half a million tuples as a key": b"}" + DEEP + b"K\1s",
    "a tensor as a key": b"}" + tensor() + b"K\1s",
    "an index of the memo that is not there": b"j\xff\xff\xff\x7f",
    "a text of 4 GB": b"X\xff\xff\xff\xff",
    "a text of an exabyte": b"\x8d" + b"\xff" * 8,
    "bytes of an exabyte": b"\x8e" + b"\xff" * 7 + b"\x0f",
    "an array of bytes of an exabyte": b"\x96" + b"\xff" * 7 + b"\x0f",
    "a frame of an exabyte": b"\x95" + b"\xff" * 7 + b"\x0f",
    "a long number of 2 GB": b"\x8b\xff\xff\xff\x7f",
    "a number as text": b"I1\n",
    "an empty stack": b"0",
    "no mark": b"t",
    "a storage with more numbers than bytes": tensor(storage(count=b"K\5")),
    "a storage with fewer numbers than bytes": tensor(storage(count=b"K\3")),
    "a storage of 2**60 numbers": tensor(storage(count=number(2**60))),
    "a storage of -4 numbers": tensor(storage(count=number(-4))),
    "a storage of other numbers": tensor(storage(kind=b"DoubleStorage")),
    "a storage that is not there": tensor(storage(key=b"7")),
    "a storage outside": tensor(storage(key=b"../0")),
    "a storage of no known type": tensor(storage(kind=b"QInt8Storage")),
    "a storage of a function": tensor(storage(name=b"torch._utils", kind=b"_rebuild_tensor_v2")),
    "a storage with a view": tensor(storage(more=b"(" + text(b"1") + b"K\0K\4t")),
    "a module in place of a storage": tensor(storage(word=b"module")),
    "no storage": tensor(b"N"),
    "an empty name of a storage": b"(tQ",
    "an offset beyond the end": tensor(offset=b"K\1"),
    "an offset before the beginning": tensor(offset=number(-1)),
    "an offset that overflows": tensor(offset=number(2**63)),
    "a size beyond the end": tensor(size=b"K\5\x85"),
    "a size of 2**62 with steps of 0": tensor(size=number(2**62) + b"\x85", stride=b"K\0\x85"),
    "sizes whose product overflows": tensor(size=number(2**32) + number(2**32) + b"\x86", stride=b"K\0K\0\x86"),
    "more numbers than bytes by steps of 0": tensor(size=b"K\5\x85", stride=b"K\0\x85"),
    "a million numbers by steps of 0": tensor(size=b"J\0\0\x10\0\x85", stride=b"K\0\x85"),
    "a size below 0": tensor(size=number(-4) + b"\x85"),
    "a step beyond the end": tensor(stride=b"K\2\x85"),
    "a step below 0": tensor(stride=number(-1) + b"\x85"),
    "a step that overflows": tensor(size=b"K\2\x85", stride=number(2**63) + b"\x85"),
    "more steps than sizes": tensor(stride=b"K\1K\1\x86"),
    "65 dimensions": tensor(size=b"(" + b"K\1" * 65 + b"t", stride=b"(" + b"K\1" * 65 + b"t"),
    "a size that is a text": tensor(size=text(b"4") + b"\x85"),
    "a size that is true": tensor(size=b"\x88\x85"),
    "a tensor of a tensor": tensor(tensor(size=number(2**61) + b"K\0\x86", stride=b"K\1K\1\x86")),
    "a storage as a weight": storage(),
    "a type as a weight": b"ctorch\nFloatStorage\n",
    "a function as a weight": b"ctorch._utils\n_rebuild_tensor_v2\n",
    "a size whose product has a million digits": tensor(
        size=b"(\x8a\xff" + b"\xff" * 254 + b"\x7fq\0" + b"h\0" * 20_000 + b"tq\1", stride=b"h\1"
    ),
    "a storage as a size": tensor(size=storage(), stride=storage()),
    "a storage of a storage": storage() + b"Q",
    "a tensor as pairs": b"ccollections\nOrderedDict\n" + tensor() + b"\x85R",
    "pairs of three": b"ccollections\nOrderedDict\n](K\1K\2K\3tae\x85R".replace(b"tae", b"ta"),
    "numbers as keys that fall on one place": b"}(" + b"".join(number((2**61 - 1) * place) + b"N" for place in range(1, 6)) + b"u",
    "lists in lists": b"]" * 200 + b"a" * 199,
    "a tensor whose sign is turned": tensor().replace(b"\x89NtR", b"\x89N}" + text(b"conj") + b"\x88stR"),
    "a name with a line in it": b"cos\rfinished\x1b[31m" + b"y" * 3000 + b"\nsystem\n(tR",
    "a parameter of no tensor": b"ctorch._utils\n_rebuild_parameter\n(N\x88NtR",
}  # fmt: skip


def archive(records, top="weights", **how):
    with zipfile.ZipFile(content := io.BytesIO(), "w", **how) as made:
        for name, body in records:
            made.writestr(f"{top}/{name}" if top else name, body)
    return content.getvalue()


NUMBERS = struct.pack("<4f", 1, 2, 3, 4)
GOOD = [("data.pkl", b"\x80\2" + in_a_dict(tensor())), ("byteorder", b"little"), ("data/0", NUMBERS)]


def in_an_archive(value):
    return archive([("data.pkl", b"\x80\2" + in_a_dict(value)), *GOOD[1:]])


def in_the_old_form(value):
    value = value.replace(b"K\4tQ", b"K\4NtQ")
    head = b"".join(pickle.dumps(each, 2) for each in (tensors.MAGIC, tensors.PROTOCOL, {"little_endian": True}))
    return head + b"\x80\2" + in_a_dict(value) + pickle.dumps(["0"], 2) + struct.pack("<q", 4) + NUMBERS


def program():
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), content := io.BytesIO())
    return content.getvalue()


def as_tar():
    with tarfile.open(fileobj=(content := io.BytesIO()), mode="w") as made:
        for name in ("storages", "tensors", "pickle"):
            made.addfile(tarfile.TarInfo(name), io.BytesIO())
    return content.getvalue()


def overlapping():
    """Many names of the same bytes: copied, they would be more than a machine has memory."""
    with zipfile.ZipFile(content := io.BytesIO(), "w") as made:
        for name, body in GOOD:
            made.writestr(f"weights/{name}", body)
        made.writestr("weights/data/1", bytes(1 << 20))
        for number in range(2, 1000):
            made.filelist.append(again := copy.copy(made.getinfo("weights/data/1")))
            again.filename = f"weights/data/{number}"
    return content.getvalue()


FORMS = {
    "nothing": lambda: b"",
    "a text": lambda: b"version https://git-lfs.github.com/spec/v1\n",
    "a pickle": lambda: pickle.dumps({"weight": 1}),
    "a tar of torch 0.1": as_tar,
    "a program of TorchScript": program,
    "an archive with code": lambda: archive([*GOOD, ("code/a.py", b"")]),
    "an archive that is compressed": lambda: archive(GOOD, compression=zipfile.ZIP_DEFLATED),
    "an archive with a line in a name": lambda: archive(
        [*GOOD, ("a\nfinished: \x1b[31m" + "y" * 3000, b"x" * 99)], compression=zipfile.ZIP_DEFLATED
    ),
    "an archive with a storage that is no truth": lambda: archive(
        [("data.pkl", b"\x80\2" + in_a_dict(tensor(storage(kind=b"BoolStorage")))), *GOOD[1:2], ("data/0", b"\0\1\2\1")]
    ),
    "an archive with a name twice": lambda: archive([*GOOD, GOOD[0]]),
    "an archive with two folders": lambda: archive([*GOOD[:2], ("../other/data/0", NUMBERS)], top=""),
    "an archive without a folder": lambda: archive(GOOD, top=""),
    "an archive without a pickle": lambda: archive(GOOD[1:]),
    "an archive without a storage": lambda: archive(GOOD[:2]),
    "an archive with big-endian numbers": lambda: archive([GOOD[0], ("byteorder", b"big"), GOOD[2]]),
    "an empty archive": lambda: archive([]),
    "the beginning of an archive": lambda: archive(GOOD)[:-30],
    "names that share their bytes": overlapping,
    "the old form cut off": lambda: old({"weight": torch.ones(4)})[:-1],
    "the old form with another list of storages": lambda: old({"weight": torch.ones(4)}).replace(b"]q", b"]N", 1),
}
ONE = b'{"weight":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'


def safe(header=ONE, data=NUMBERS, length=None):
    """A file of safetensors."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def safe_of(tensors_by_name):
    """As the package writes it: the largest types first, and a header whose end is on a multiple of eight bytes."""
    names = {kind: name for name, kind in tensors.SAFE_TYPES.items()}
    ordered = sorted(tensors_by_name.items(), key=lambda item: (-item[1].element_size(), item[0]))
    bodies, header, end = [], {"__metadata__": {"format": "pt"}}, 0
    for name, value in ordered:
        bodies.append(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        header[name] = {"dtype": names[value.dtype], "shape": list(value.shape), "data_offsets": [end, end + len(bodies[-1])]}
        end += len(bodies[-1])
    text_of_it = json.dumps(header, separators=(",", ":")).encode()
    return safe(text_of_it + b" " * (-len(text_of_it) % 8), b"".join(bodies))


SAFE = {
    "a header of an exabyte": safe(length=2**60),
    "a header that is longer than the file": safe(length=1000),
    "a header that is cut off": safe(length=20),
    "a header that is no JSON": safe(b"{weight}"),
    "a header that is no text": safe(ONE.replace(b"weight", b"\xff\xfe")),
    "a header of a hundred thousand lists": safe(b'{"a":' + b"[" * 100_000),
    "a name twice": safe(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},' + ONE[1:].replace(b"weight", b"a")),
    "a field twice": safe(ONE.replace(b'"shape":[4]', b'"shape":[4],"shape":[4]')),
    "a field more": safe(ONE.replace(b'"shape":[4]', b'"shape":[4],"strides":[0]')),
    "a tensor that is a number": safe(b'{"weight":7}'),
    "a type that is not there": safe(ONE.replace(b"F32", b"F8_E4M3")),
    "a type that is a list": safe(ONE.replace(b'"F32"', b'["F32"]')),
    "a type with a line in it": safe(ONE.replace(b"F32", b"\\n\\u001b[31m" + b"y" * 3000)),
    "a shape that is a text": safe(ONE.replace(b"[4]", b'"4"')),
    "a size that is true": safe(ONE.replace(b"[4]", b"[4,true]")),
    "a size with a point": safe(ONE.replace(b"[4]", b"[4.0]")),
    "a size that is no number": safe(ONE.replace(b"[4]", b"[NaN]")),
    "a size below 0": safe(ONE.replace(b"[4]", b"[-2,-2]")),
    "a size of a million digits": safe(ONE.replace(b"[4]", b"[" + b"9" * 1_000_000 + b"]")),
    "sizes whose product overflows": safe(ONE.replace(b"[4]", b"[4294967296,4294967296,0]").replace(b"16", b"0"), b""),
    "sizes whose product wraps around to four": safe(ONE.replace(b"[4]", b"[4611686018427387905,4]")),
    "65 dimensions": safe(ONE.replace(b"[4]", b"[4" + b",1" * 64 + b"]")),
    "a shape that is smaller than its bytes": safe(ONE.replace(b"[4]", b"[3]")),
    "a shape that is larger than its bytes": safe(ONE.replace(b"[4]", b"[5]")),
    "bytes before the beginning": safe(ONE.replace(b"[0,16]", b"[-16,0]")),
    "bytes beyond the end": safe(ONE.replace(b"[0,16]", b"[16,32]")),
    "bytes that end before they begin": safe(ONE.replace(b"[0,16]", b"[16,0]")),
    "bytes in three places": safe(ONE.replace(b"[0,16]", b"[0,8,16]")),
    "bytes that no tensor has": safe(data=NUMBERS + b"more"),
    "bytes between two tensors": safe(
        ONE[:-1] + b',"b":{"dtype":"U8","shape":[4],"data_offsets":[20,24]}}', NUMBERS + bytes(8)
    ),
    "bytes that two tensors share": safe(ONE[:-1] + b',"b":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'),
    "fewer bytes than the header says": safe(data=NUMBERS[:-1]),
    "a truth that is neither": safe(ONE.replace(b"F32", b"BOOL").replace(b"[4]", b"[16]")),
    "metadata that are a list": safe(ONE[:-1] + b',"__metadata__":[]}'),
    "metadata that are numbers": safe(ONE[:-1] + b',"__metadata__":{"a":1}}'),
    "no tensors but text": safe(b'{"__metadata__":{"a":"b"}}', b"x"),
}
ALL = {
    **{f"{name}, in safetensors": lambda content=content: content for name, content in SAFE.items()},
    **{f"{name}, in an archive": lambda value=value: in_an_archive(value) for name, value in HOSTILE.items()},
    **{f"{name}, in the old form": lambda value=value: in_the_old_form(value) for name, value in HOSTILE.items()},
    **FORMS,
}


def refused_in_a_line(content):
    """Also where its maker vouches for it. In the current folder."""
    for digest in ("", hashlib.sha256(content).hexdigest()):
        with open("weights.pth", "wb") as file:
            file.write(content)
        if digest:
            with open("weights.pth.sha256", "w") as file:
                file.write(digest)
        if not _refuses(read_weights, "weights.pth"):
            return False
    manifest = {"samples_seen": 7, "sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    for name, body in (("000000000007.pt", content), ("000000000007.json", json.dumps(manifest, indent=1).encode())):
        with open(name, "wb") as file:
            file.write(body)
    os.unlink("weights.pth.sha256")
    return _refuses(checkpoint.read, "000000000007.pt") and not os.path.exists(CANARY)


def _refuses(read, path):
    try:
        read(path)
    except UserError as error:
        return str(error).isprintable() and len(str(error)) <= 400
    return False


def right_or_refused(weights, times):
    """How many damaged files of these weights were refused; all others must have the same tensors. In the current folder."""
    good, draw, refused = saved(weights), random.Random(1), 0
    for _ in range(times):
        with open("weights.pth", "wb") as file:
            file.write(mutated(good, draw))
        try:
            found = read_weights("weights.pth")
            assert list(found) == list(weights) and all(torch.equal(found[name], weights[name]) for name in weights)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
    return refused


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict()


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        wrong = [name for name in ALL if not refused_in_a_line(ALL[name]())]
        refused = right_or_refused(network(), 1000)
        with open("good.safetensors", "wb") as file:
            file.write(safe_of(network()))
        found = read_weights("good.safetensors")
        wrong += [name for name, tensor in network().items() if not torch.equal(found[name], tensor)]
    print(
        f"torch {torch.__version__}: {len(ALL) - len(wrong)} of {len(ALL)} hostile files were refused, and {refused} of 1000 damaged ones"
    )
    sys.exit(f"wrong: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
