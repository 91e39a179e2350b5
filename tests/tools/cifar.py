"""CIFAR-10 as a folder and as an archive, made up."""

import io
import pickle
import struct
import tarfile
import types

import numpy as np
import pytest

from datasets import cifar10_files


class Python2Pickler(pickle._Pickler):
    """Byte strings as Python 2 wrote them into the original batches."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_bytes(self, value):
        head = b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<i", len(value))
        self.write(head + value)
        self.memoize(value)

    dispatch[bytes] = save_bytes
    dispatch[str] = lambda self, value: self.save_bytes(value.encode("latin1"))


def python2(value):
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def batch(count=4, **changed):
    content = {
        b"batch_label": b"training batch 1 of 5",
        b"labels": [i % 10 for i in range(count)],
        b"data": np.arange(count * 3072, dtype=np.uint8).reshape(count, 3072),
        b"filenames": [b"x_%d.png" % i for i in range(count)],
    }
    content.update({name.encode(): value for name, value in changed.items()})
    return {name: value for name, value in content.items() if value is not None}


def write_folder(folder, count=4):
    folder.mkdir(parents=True)
    for name in cifar10_files.TRAIN_FILES + cifar10_files.TEST_FILES:
        (folder / name).write_bytes(python2(batch(count)))
    (folder / "batches.meta").write_bytes(python2({b"label_names": [b"a"]}))
    (folder / "readme.html").write_text("")


def write_archive(path, source):
    with tarfile.open(path, "w:gz") as archive:
        archive.add(source, "cifar-10-batches-py")


def arguments(folder, output):
    return types.SimpleNamespace(
        custom_data=False, max_samples=None, data_url=folder and str(folder), output_dir=str(output), input_dir="input_dir"
    )


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    write_folder(folder / "cifar-10-batches-py")
    write_archive(folder / "cifar-10-python.tar.gz", folder / "cifar-10-batches-py")
    return folder / "cifar-10-python.tar.gz"
