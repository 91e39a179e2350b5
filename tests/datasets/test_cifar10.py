"""Order, augmentation and the ways CIFAR-10 arrives: whole, missing, damaged or hostile."""

import errno
import gzip
import hashlib
import io
import os
import pickle
import shutil
import struct
import tarfile

import numpy as np
import pytest
import torch

from common.errors import TrainingFailed, UserError
from datasets import cifar10, cifar10_files, synthetic, untrusted
from tests.tools.cifar import archive, arguments, batch, python2, write_archive, write_folder  # noqa: F401 (a fixture)

# --- CIFAR-10 from a folder, an archive, a server ------------------------------------------------------------------------


def test_a_folder_with_the_batches(archive, tmp_path):
    for root in (archive.parent, archive.parent / "cifar-10-batches-py"):
        train, test = cifar10.load(arguments(root, tmp_path))
        assert (len(train), len(test)) == (20, 4)
        assert torch.equal(test.images.reshape(4, 3072), torch.arange(4 * 3072).to(torch.uint8).view(4, 3072))
        assert test.labels.tolist() == [0, 1, 2, 3] and test.classes[3] == "cat"


def test_a_folder_with_the_archive_is_unpacked_once(archive, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    os.link(archive, data / archive.name)
    assert len(cifar10.load(arguments(data, tmp_path))[0]) == 20
    (data / archive.name).unlink()  # the second start needs it no more
    assert len(cifar10.load(arguments(data, tmp_path))[0]) == 20


def another(path, tmp_path, count):
    write_folder(tmp_path / f"of {count}" / "cifar-10-batches-py", count)
    path.unlink(missing_ok=True)
    write_archive(path, tmp_path / f"of {count}" / "cifar-10-batches-py")


def test_an_archive_that_was_replaced_is_unpacked_again(tmp_path):
    archive = tmp_path / "data" / "cifar-10-python.tar.gz"
    archive.parent.mkdir()
    for count in (4, 6, 6, 5):
        another(archive, tmp_path, count) if not (tmp_path / f"of {count}").exists() else None
        assert len(cifar10.load(arguments(archive.parent, tmp_path))[1]) == count
    assert {path.name for path in archive.parent.iterdir()} == {
        archive.name, "cifar-10-batches-py", "cifar-10-batches-py.lock"
    }  # fmt: skip
    shutil.rmtree(archive.parent / "cifar-10-batches-py")
    write_folder(archive.parent / "cifar-10-batches-py", 7)  # the user's own counts, whatever lies beside it
    assert len(cifar10.load(arguments(archive.parent, tmp_path))[1]) == 7


@pytest.mark.usefixtures("reachable")
def test_an_archive_that_was_replaced_in_its_bucket_is_unpacked_again(tmp_path, monkeypatch, store):
    monkeypatch.chdir(tmp_path)
    asked = arguments("s3://data/cifar-replaced", tmp_path)
    asked.data_url = "s3://data/cifar-replaced"

    def put(path, name):
        store.client().put_object(Bucket="data", Key=f"cifar-replaced/{name}", Body=path.read_bytes())

    for count in (4, 6):
        another(tmp_path / "made.tar.gz", tmp_path, count)
        put(tmp_path / "made.tar.gz", "cifar-10-python.tar.gz")
        assert len(cifar10.load(asked)[1]) == count
    shutil.rmtree("input_dir")
    for path in (tmp_path / "of 4" / "cifar-10-batches-py").iterdir():
        put(path, f"cifar-10-batches-py/{path.name}")
    for _ in range(2):  # what the bucket has is not replaced by what it has packed
        assert len(cifar10.load(asked)[1]) == 4


def test_a_prepared_folder_that_cannot_be_written_to_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "input_dir" / "cifar-10-batches-py", 7)
    another(tmp_path / "input_dir" / "cifar-10-python.tar.gz", tmp_path, 4)
    monkeypatch.setattr(os, "access", lambda path, _: False)
    assert len(cifar10.load(arguments(None, tmp_path))[1]) == 7


def test_two_folders_that_cannot_be_written_to_are_two_data_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    roots = [tmp_path / "one", tmp_path / "other"]
    monkeypatch.setattr(os, "access", lambda path, _: path not in map(str, roots))
    for count, root in zip((4, 6), roots):
        root.mkdir()
        another(root / "cifar-10-python.tar.gz", tmp_path, count)
    for count, root in [*zip((4, 6), roots)] * 2:
        assert len(cifar10.load(arguments(root, tmp_path))[1]) == count
        assert [path.name for path in root.iterdir()] == ["cifar-10-python.tar.gz"]


def test_an_archive_that_finds_no_room_is_not_said_to_be_damaged(archive, tmp_path, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "rename", full)
    names = sorted(path.name for path in (archive.parent / "cifar-10-batches-py").iterdir())
    with pytest.raises(TrainingFailed, match=r"cannot be unpacked: \[Errno 28\] No space left on device; mend that"):
        untrusted.unpack(str(archive), str(tmp_path / "data"), cifar10_files.place_of, cifar10_files.MAX_UNPACKED, names)


def test_a_folder_with_neither_names_both(tmp_path):
    with pytest.raises(
        UserError,
        match=r"neither cifar-10-batches-py nor cifar-10-python.tar.gz.*\(https://www.cs.toronto.edu.*--custom_data true",
    ):
        cifar10.load(arguments(tmp_path, tmp_path))


def test_a_missing_batch_is_named(tmp_path):
    write_folder(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(UserError, match="lacks data_batch_3"):
        cifar10.load(arguments(tmp_path, tmp_path))


# --- Hostile archives and pickles ----------------------------------------------------------------------------------------


def member(name, content=b"x", **attributes):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    return info, content


def archive_of(*members, mode="w:gz"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=tarfile.PAX_FORMAT) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def good_members(without=()):
    names = [*cifar10_files.TRAIN_FILES, *cifar10_files.TEST_FILES, "batches.meta", "readme.html"]
    return [member(f"cifar-10-batches-py/{name}", python2(batch())) for name in names if name not in without]


def test_an_archive_needs_the_batches_and_nothing_else(tmp_path):
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(archive_of(*good_members(["readme.html", "batches.meta"])))
    train, test = cifar10.load(arguments(tmp_path, tmp_path))
    assert len(train) == 5 * len(test) and sorted(path.name for path in (tmp_path / "cifar-10-batches-py").iterdir()) == sorted(
        [untrusted.NOTE, *cifar10_files.TRAIN_FILES, *cifar10_files.TEST_FILES]
    )


D = "cifar-10-batches-py/"
LINK, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE
HOSTILE_ARCHIVES = {
    "parent": archive_of(*good_members(), member("../evil")),
    "parent with an expected name": archive_of(*good_members(), member("../../data_batch_1")),
    "absolute": archive_of(*good_members(), member("/tmp/anyrank-evil")),
    "absolute with an expected name": archive_of(*good_members(["test_batch"]), member("/test_batch")),
    "symlink": archive_of(*good_members(), member(D + "link", b"", type=LINK, linkname="/etc/passwd")),
    "symlink with an expected name": archive_of(
        *good_members(["test_batch"]), member(D + "test_batch", b"", type=LINK, linkname="/etc/passwd")
    ),
    "symlinked folder, then a file through it": archive_of(member(D[:-1], b"", type=LINK, linkname="/tmp"), *good_members()),
    "hard link": archive_of(*good_members(["test_batch"]), member(D + "test_batch", b"", type=HARD, linkname="/etc/passwd")),
    "device": archive_of(
        *good_members(["test_batch"]), member(D + "test_batch", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3)
    ),
    "fifo": archive_of(*good_members(["test_batch"]), member(D + "test_batch", b"", type=tarfile.FIFOTYPE)),
    "unexpected file": archive_of(*good_members(), member(D + "sitecustomize.py", b"import os")),
    "twice": archive_of(*good_members(), member(D + "test_batch", b"other")),
    "other case": archive_of(*good_members(["test_batch"]), member(D + "TEST_BATCH")),
    "deeper": archive_of(*good_members(["test_batch"]), member("a/b/test_batch")),
    "name with a line end": archive_of(*good_members(), member(D + "x\ny")),
    "missing member": archive_of(*good_members(["data_batch_2"])),
    "empty": archive_of(),
    "bomb": gzip.compress(archive_of(member(D + "test_batch", bytes(300 * 2**20)), mode="w")),
    "giant header": gzip.compress(
        tarfile.TarInfo.create_pax_global_header({"comment": "x"})[:124] + b"77777777777\0" + b" " * 376
    ),
    "sparse giant": archive_of(*good_members(["test_batch"]), member(D + "test_batch", b"", type=tarfile.GNUTYPE_SPARSE)),
    "a second archive after the first": archive_of(*good_members()) + archive_of(*good_members()) + b"more",
    "cut off in the checksum": archive_of(*good_members())[:-6],
    "truncated": archive_of(*good_members())[:-200],
    "not gzip": b"<html>404 Not Found</html>",
    "gzip of rubbish": gzip.compress(b"rubbish" * 1000),
    "flipped bit": bytes(b ^ (i == 300) for i, b in enumerate(archive_of(*good_members()))),
    "nothing": b"",
}


def test_a_flipped_bit_anywhere_in_an_archive_is_noticed(tmp_path):
    """Stored without compression, a flipped bit of a pixel leaves everything as it was but the checksum at the very end."""
    whole = gzip.compress(archive_of(*good_members(), mode="w"), compresslevel=0)
    names = [os.path.basename(info.name) for info, _ in good_members()]
    untrusted.unpack(
        write(tmp_path / "whole", whole), str(tmp_path / "good"), cifar10_files.place_of, cifar10_files.MAX_UNPACKED, names
    )
    header = 10  # of gzip: a time and a system, which say nothing of the files
    for place in np.random.default_rng(0).integers(8 * header, 8 * len(whole), 300):
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        path = write(tmp_path / "flipped", bytes(content))
        with pytest.raises(UserError, match="cannot be unpacked"):
            untrusted.unpack(path, str(tmp_path / "data"), cifar10_files.place_of, cifar10_files.MAX_UNPACKED, names)
    assert sorted(os.listdir(tmp_path)) == ["flipped", "good", "whole"]


def test_an_archive_that_is_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / cifar10_files.ARCHIVE)
    with pytest.raises(UserError, match="is not a regular file"):
        cifar10.load(arguments(tmp_path, tmp_path))


def write(path, content):
    path.write_bytes(content)
    return str(path)


def test_an_archive_that_is_not_the_published_one_is_named(archive, tmp_path, monkeypatch, capsys):
    for number, digest in enumerate([cifar10_files.SHA256, hashlib.sha256(archive.read_bytes()).hexdigest()]):
        data = tmp_path / str(number)
        data.mkdir()
        os.link(archive, data / archive.name)
        monkeypatch.setattr(cifar10_files, "SHA256", digest)
        cifar10.load(arguments(data, tmp_path))
    said = capsys.readouterr().out
    assert said.count("is not the published archive") == 1 and str(tmp_path / "0" / archive.name) in said


@pytest.mark.parametrize("name", HOSTILE_ARCHIVES)
def test_a_hostile_archive_writes_nothing_outside(name, tmp_path):
    data = tmp_path / "deep" / "data"
    data.mkdir(parents=True)
    (data / cifar10_files.ARCHIVE).write_bytes(HOSTILE_ARCHIVES[name])
    with pytest.raises(UserError, match="cannot be unpacked"):
        cifar10.load(arguments(data, tmp_path))
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"deep", "deep/data", f"deep/data/{cifar10_files.ARCHIVE}", f"deep/data/{cifar10_files.FOLDER}.lock"}
    assert not os.path.exists("/tmp/anyrank-evil")


RAN = []


def trap(*_):
    RAN.append(1)


class Calls:
    """Pickled as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def dumps(value, protocol=2):
    return pickle.dumps(value, protocol)


HERE = __name__.encode()
TRAP = b"c" + HERE + b"\ntrap\n"
HEAD = b"\x80\x02"
HOSTILE_PICKLES = {
    **{f"calls our trap, protocol {p}": dumps(Calls(trap), p) for p in range(6)},
    **{
        f"calls {f.__name__}, protocol {p}": dumps(Calls(f, "1"), p)
        for f in (os.system, eval, exec, __import__, open)
        for p in (0, 2, 4)
    },
    "the trap inside a batch": dumps(batch(labels=Calls(trap))),
    "the trap as the array": dumps(batch(data=Calls(trap))),
    "GLOBAL": HEAD + TRAP + b"(tR.",
    "INST": b"(i" + HERE + b"\ntrap\n.",
    "OBJ": b"(" + TRAP + b"o.",
    "NEWOBJ": HEAD + TRAP + b")\x81.",
    "STACK_GLOBAL": b"\x80\x04\x8c" + bytes([len(HERE)]) + HERE + b"\x8c\x04trap\x93)R.",
    "extension registry": HEAD + b"\x82\x01)R.",
    "persistent id": b"Pid\n.",
    "reduce on a builtin through getattr": HEAD + b"c__builtin__\ngetattr\n.",
    "numpy's own loader": HEAD + b"cnumpy\nload\n(U\x05/etc/tR.",
    "numpy.core.multiarray.scalar": HEAD + b"cnumpy.core.multiarray\nscalar\n.",
    "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0etesting.sys.e\x93.",
    "memo bomb": HEAD + b"]r\xff\xff\xff\x7f.",
    "long": HEAD + b"\x8b\xff\xff\xff\x7f" + b"1" * 10,
    "frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "object array": dumps(batch(data=np.array([[1, "a"]], dtype=object))),
    "float array": dumps(batch(data=np.zeros((4, 3072)))),
    "wrong shape": python2(batch(data=np.zeros((4, 3000), np.uint8))),
    "one dimension": python2(batch(data=np.zeros(3072, np.uint8))),
    "no images": python2(batch(data=np.zeros((0, 3072), np.uint8), labels=[])),
    "fewer labels": python2(batch(labels=[1])),
    "label 10": python2(batch(labels=[0, 1, 2, 10])),
    "label -1": python2(batch(labels=[0, 1, 2, -1])),
    "label of another type": python2(batch(labels=[0, 1, 2, None])),
    "no data": python2(batch(data=None)),
    "no labels": python2(batch(labels=None)),
    "a list": python2([1, 2]),
    "truncated": python2(batch())[:-100],
    "empty": b"",
    "text": b"hello",
    "html": b"<html>404</html>",
    "deep": HEAD + b"(" * 100_000,
    "array claims a giant shape": python2(batch()).replace(struct.pack("<H", 3072), struct.pack("<H", 65535)),
}


def test_there_are_60_hostile_inputs():
    assert len(HOSTILE_ARCHIVES) + len(HOSTILE_PICKLES) >= 60


@pytest.mark.parametrize("name", HOSTILE_PICKLES)
def test_a_hostile_pickle_runs_nothing(name, tmp_path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(HOSTILE_PICKLES[name])
    RAN.clear()
    with pytest.raises(UserError, match="is not a CIFAR-10 batch") as refused:
        untrusted.read_batch(str(path))
    assert not RAN and "\n" not in str(refused.value)
    assert os.listdir(tmp_path) == ["data_batch_1"]


def test_the_traps_would_have_worked(tmp_path):
    """The same bytes run in Python's own unpickler, so the tests above are not empty."""
    RAN.clear()
    for name in ("calls our trap, protocol 2", "GLOBAL", "INST", "OBJ", "STACK_GLOBAL"):
        pickle.loads(HOSTILE_PICKLES[name])
    assert len(RAN) == 5


@pytest.mark.parametrize("split, number", [("train", 1), ("test", 2)])
def test_made_up_images_follow_their_formula_however_many_are_made_at_once(split, number):
    """So that a run on them has the same bits with every version."""
    images, labels = synthetic.cifar_like(230, split)

    def draw(*seed):
        return np.random.default_rng([synthetic.SEED, *seed])

    patterns = np.random.default_rng(synthetic.SEED).uniform(-1, 1, (10, 3, 8, 8)).repeat(4, axis=2).repeat(4, axis=3)
    assert (labels == draw(number, 1).integers(0, 10, 230)).all()
    shifts = draw(number, 2).integers(-4, 5, (230, 2))
    noise = draw(number, 3).standard_normal((230, 3, 32, 32), dtype=np.float32)
    for place, (label, shift) in enumerate(zip(labels, shifts)):
        clean = np.roll(patterns[label], shift, axis=(1, 2))
        assert (images[place] == np.clip(128 + 32 * clean + 64 * noise[place], 0, 255).astype(np.uint8)).all()
