"""A folder of pictures as one .zip or .tar: unpacked once, with nothing outside, and then it is the folder."""

import io
import os
import random
import shutil
import socket
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from common import progress
from common.errors import UserError
from datasets import untrusted
from datasets.photos import archive, tree
from tests.tools.hostile import mutated
from tests.tools.jobs import run_job
from tests.tools.packs import encoded

FILES = {f"{label}/{n}.jpg": encoded(n + len(label)) for label in ("daisy", "rose") for n in range(5)}
BESIDE = {"__MACOSX/daisy/._0.jpg": b"x", ".DS_Store": b"x", "daisy/.hidden.jpg": b"x"}


def zip_of(files, **how):
    with zipfile.ZipFile(content := io.BytesIO(), "w", **how) as made:
        for name, body in files.items():
            made.writestr(name, body)
    return content.getvalue()


def tar_of(files, mode="w"):
    with tarfile.open(fileobj=(content := io.BytesIO()), mode=mode) as made:
        for name, body in files.items():
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(body)
            made.addfile(info, io.BytesIO(body))
    return content.getvalue()


def below(files, folder):
    return {f"{folder}{name}": body for name, body in files.items()}


ARCHIVES = {
    "a.zip": zip_of({**FILES, **BESIDE}, compression=zipfile.ZIP_DEFLATED),
    "of a folder.zip": zip_of(below({**FILES, **BESIDE}, "flowers/")),
    "a.tar": tar_of(below(FILES, "./")),
    "a.tar.gz": tar_of({**below(FILES, "2026/flowers/"), **BESIDE}, "w:gz"),
    "A.TGZ": tar_of(FILES, "w:gz"),
}


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*.jpg")}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_is_the_folder_that_is_in_it(tmp_path, name):
    (tmp_path / name).write_bytes(ARCHIVES[name])
    for place in (tmp_path / name, tmp_path):  # as a platform gives it: a folder with nothing else
        assert files_in(archive.root(str(place), str(tmp_path / "inputs"))) == FILES
    assert len(tree.load(archive.root(str(tmp_path), "inputs"), str(tmp_path / "inputs"))) == 10
    assert sorted(os.listdir(tmp_path)) == sorted([name, f"{name}.unpacked", f"{name}.unpacked.lock", "inputs"])


def test_of_one_picture_it_is_the_folder_with_that_picture(tmp_path):
    (tmp_path / "a.zip").write_bytes(zip_of({"0.jpg": FILES["rose/0.jpg"]}))
    assert files_in(archive.unpack(str(tmp_path / "a.zip"), "inputs")) == {"0.jpg": FILES["rose/0.jpg"]}


def test_a_folder_that_is_named_like_an_archive_is_none(tmp_path):
    (tmp_path / "a.zip").mkdir()
    assert archive.archive_of(str(tmp_path)) is None


def test_it_is_unpacked_once_and_again_when_it_has_changed(tmp_path, monkeypatch):
    unpack, times = untrusted.unpack, []
    monkeypatch.setattr(untrusted, "unpack", lambda *given, **how: times.append(1) or unpack(*given, **how))
    path = tmp_path / "a.zip"
    for content, files in ((FILES, FILES), (FILES, FILES), (dict(list(FILES.items())[:7]),) * 2):
        if not path.exists() or len(files) < 10:
            path.write_bytes(zip_of(content))
        assert files_in(archive.root(str(path), "inputs")) == files
    assert len(times) == 2


def test_what_a_kill_has_left_goes_and_the_same_archive_in_another_place_is_the_same(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.zip").write_bytes(ARCHIVES["a.zip"])
    left = tmp_path / "data" / f".unpacking-a.zip.unpacked-{socket.gethostname()}"
    (left / "rose").mkdir(parents=True)
    (left / "rose" / "more.jpg").write_bytes(b"half")
    found = archive.root(str(tmp_path / "data"), "inputs")
    assert files_in(found) == FILES and not left.exists()
    before = os.stat(found).st_ino
    (tmp_path / "data").rename(tmp_path / "mounted elsewhere")
    assert os.stat(archive.root(str(tmp_path / "mounted elsewhere"), "inputs")).st_ino == before


def test_where_another_node_was_quicker_its_folder_stays(tmp_path, monkeypatch):
    path, folder = tmp_path / "a.zip", tmp_path / "unpacked"
    path.write_bytes(ARCHIVES["a.zip"])

    def other_node():
        if not folder.exists():
            with monkeypatch.context() as patch:
                patch.setattr(socket, "gethostname", lambda: "node-1")
                untrusted.unpack(str(path), str(folder), archive._picture_name, 1 << 20)
            found.append(folder.stat().st_ino)

    found = []
    untrusted.unpack(str(path), str(folder), archive._picture_name, 1 << 20, count=other_node)
    assert [folder.stat().st_ino] == found and files_in(folder) == FILES and len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz"])
def test_a_file_of_more_than_one_fits_in_memory_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(untrusted, "MAX_FILE_BYTES", 1 << 20)
    for size, said in (((1 << 20) + 1, "'rose/9.jpg' in it has more than 1 MiB"), (1 << 20, None)):
        files = {**FILES, "rose/9.jpg": bytes(size)}
        (tmp_path / name).write_bytes(zip_of(files) if "zip" in name else tar_of(files, "w:gz" if "gz" in name else "w"))
        if said:
            with pytest.raises(UserError, match=said):
                archive.root(str(tmp_path / name), "inputs")
        else:
            assert files_in(archive.root(str(tmp_path / name), "inputs")) == files


def test_what_is_unpacked_is_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    (tmp_path / "a.zip").write_bytes(ARCHIVES["a.zip"])
    archive.root(str(tmp_path / "a.zip"), "inputs")
    assert f"unpacking {tmp_path}/a.zip: {len(FILES)} files" in capsys.readouterr().out


def test_where_nothing_can_be_written_it_is_unpacked_among_the_inputs(tmp_path, monkeypatch):
    (tmp_path / "mount").mkdir()
    (tmp_path / "mount" / "a.tar").write_bytes(ARCHIVES["a.tar"])
    monkeypatch.setattr(os, "access", lambda path, _: not str(path).endswith("mount"))
    found = archive.root(str(tmp_path / "mount"), str(tmp_path / "inputs"))
    assert files_in(found) == FILES and found.startswith(str(tmp_path / "inputs" / "unpacked"))
    assert os.listdir(tmp_path / "mount") == ["a.tar"]


def test_train_and_val_in_it_stay_apart_and_other_files_beside_it_make_it_no_data(tmp_path):
    (tmp_path / "a.zip").write_bytes(zip_of(below(FILES, "train/")))
    assert archive.root(str(tmp_path / "a.zip"), "inputs").endswith("a.zip.unpacked")
    (tmp_path / "rose").mkdir()
    assert archive.root(str(tmp_path), "inputs") == str(tmp_path)
    with pytest.raises(UserError, match=r"b\.zip does not exist: give an archive of pictures, or a folder"):
        archive.root(str(tmp_path / "b.zip"), "inputs")


def test_a_job_trains_on_an_archive_in_a_bucket(tmp_path, store):
    store.client().put_object(Bucket="data", Key="archives/flowers.zip", Body=ARCHIVES["of a folder.zip"])
    words = ["--arch", "resnet18", "--image_size", 32, "--epochs", 1, "--max_steps", 1, "--workers", 0]
    done = run_job("train_imagenet", tmp_path, *words, "--data_url", "s3://data/archives/flowers.zip", env=store.environment)
    assert "flowers.zip.unpacked/flowers: 10 images of 2 classes" in done.stdout


@pytest.mark.usefixtures("reachable")
def test_an_archive_alone_in_a_folder_of_a_bucket_is_fetched_to_the_inputs(tmp_path, store):
    store.client().put_object(Bucket="data", Key="alone/flowers.zip", Body=ARCHIVES["a.zip"])
    found = archive.root("s3://data/alone", str(tmp_path / "inputs"))
    assert files_in(found) == FILES and found == str(tmp_path / "inputs/s3/data/alone/flowers.zip.unpacked")


def test_names_as_windows_writes_them(tmp_path):
    class Old(zipfile.ZipInfo):
        """A name in the code page of Windows in China, which the archive does not say."""

        def _encodeFilenameFlags(self):
            return self.filename.encode("gb18030"), self.flag_bits

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as made:
        for name, body in FILES.items():
            made.writestr(Old(name.replace("daisy", "雏菊").replace("rose/", "rose\\")), body)
    found = files_in(archive.root(str(tmp_path / "a.zip"), "inputs"))
    assert found == {name.replace("daisy", "雏菊"): body for name, body in FILES.items()}


def special(name, kind):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return tar_of({**FILES, info: b""})


def zip_with(name, body=b"x", **attributes):
    info = zipfile.ZipInfo(name)
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    return zip_of({**FILES, info: body})


def encrypted():
    content = bytearray(zip_of(FILES))
    content[content.rindex(b"PK\1\2") + 8] |= 1
    return bytes(content)


def smaller_than_it_is():
    """Its list says 100 bytes of a file that unpacks to 50 MB."""
    content = bytearray(zip_of({"rose/1.jpg": bytes(50 << 20)}, compression=zipfile.ZIP_DEFLATED))
    place = content.rindex(b"PK\1\2")
    content[place + 24 : place + 28] = (100).to_bytes(4, "little")
    return bytes(content)


HOSTILE = {
    "parent.zip": (zip_with("../evil.jpg"), "'../evil.jpg' in it is no name of a file below a folder"),
    "parent.tar": (tar_of({**FILES, "rose/../../evil.jpg": b""}), "is no name of a file below a folder"),
    "absolute.zip": (zip_with("/evil.jpg"), "is no name of a file"),
    "absolute.tar": (tar_of({**FILES, "/evil.jpg": b""}), "is no name of a file"),
    "windows.zip": (zip_with("rose\\..\\..\\evil.jpg"), "is no name of a file"),
    "link.zip": (zip_with("rose/9.jpg", b"/etc/passwd", external_attr=(stat.S_IFLNK | 0o777) << 16), "is no plain file"),
    "link.tar": (special("rose/9.jpg", tarfile.SYMTYPE), "'rose/9.jpg' in it is not a plain file"),
    "hard link.tar": (special("rose/9.jpg", tarfile.LNKTYPE), "is not a plain file"),
    "device.tar": (special("rose/9.jpg", tarfile.BLKTYPE), "is not a plain file"),
    "pipe.tar": (special("rose/9.jpg", tarfile.FIFOTYPE), "is not a plain file"),
    "twice.tar": (tar_of({**FILES, tarfile.TarInfo("rose/1.jpg"): b""}), "'rose/1.jpg' is in it twice"),
    "file and folder.tar": (tar_of({**FILES, "rose/1.jpg/2.jpg": b""}), "cannot be unpacked"),
    "encrypted.zip": (encrypted(), "or is encrypted"),
    "few programs.zip": (zip_of(FILES, compression=zipfile.ZIP_LZMA), "in a form of few programs"),
    "bomb.zip": (smaller_than_it_is(), "cannot be unpacked: Bad CRC-32"),
    "cut off.tar": (tar_of(FILES)[:9000], "cannot be unpacked: it is cut off"),
    "cut off.tgz": (tar_of(FILES, "w:gz")[:-9], "cannot be unpacked"),
    "page.zip": (b"<html>404 Not Found</html>", "cannot be unpacked: it is a web page, as a server sends it"),
    "refusal.tar": (b"\xef\xbb\xbf<?xml version='1.0'?><Error>AccessDenied", "cannot be unpacked: it is a web page"),
    "page.tgz": (b"\n<!DOCTYPE html>" + b" " * 5000, "cannot be unpacked: it is a web page, as a server sends it"),
    "empty.tar": (b"", "cannot be unpacked"),
    "archives.tar": (tar_of({"n01440764.tar": tar_of(FILES)}), "it has no file that is wanted"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_in_a_line_and_leaves_nothing(tmp_path, name):
    content, said = HOSTILE[name]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        archive.root(str(tmp_path / "data" / name), "inputs")
    assert said in str(refused.value) and str(refused.value).isprintable() and len(str(refused.value)) < 400
    assert os.listdir(tmp_path) == ["data"] and set(os.listdir(tmp_path / "data")) == {name, f"{name}.unpacked.lock"}


def test_more_than_the_disk_holds_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 0, archive.SPARE + 20_000))
    for name in ("a.zip", "a.tar", "a.tar.gz"):
        (tmp_path / name).write_bytes(ARCHIVES[name])
        with pytest.raises(UserError, match="it unpacks to more than the data set can hold, or the disk"):
            archive.root(str(tmp_path / name), "inputs")


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz"])
def test_of_170_damaged_archives_each_is_refused_in_a_line_or_unpacked_below_its_folder(tmp_path, name):
    draw, refused = random.Random(4), 0
    path, folder = tmp_path / "data" / name, tmp_path / "data" / "unpacked"
    path.parent.mkdir()
    for _ in range(170):
        path.write_bytes(mutated(ARCHIVES[name], draw))
        try:
            untrusted.unpack(str(path), str(folder), archive._picture_name, 1 << 20)
        except UserError as error:
            refused += 1
            assert str(error).isprintable() and len(str(error)) < 500
        assert os.listdir(tmp_path) == ["data"] and {*os.listdir(tmp_path / "data")} <= {name, "unpacked"}
        assert not [found for found in folder.rglob("*") if found.is_symlink()]
        shutil.rmtree(folder, ignore_errors=True)
    assert refused > 40
