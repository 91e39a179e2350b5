"""Files among the photographs that hang, fill the memory, start programs, or cannot be read."""

import contextlib
import io
import os
import re
import shutil
import socket
from pathlib import Path

import pytest
from PIL import EpsImagePlugin, Image

from common import arguments
from common.errors import UserError
from datasets import imagenet, kspeed
from datasets.photos import decode, files, tree
from launch.pack import command as pack
from tests.tools.jobs import module_of
from tests.tools.permissions import of_anybody
from tests.tools.photographs import JPEG, encoded, folder, picture  # noqa: F401 (a fixture)

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60 40\n%%EndComments\n(/ran) (w) file closefile showpage\n%%EOF\n"


def test_no_more_than_a_regular_file_of_some_size_is_read(tmp_path):
    """Nothing that blocks or never ends; a file of 3 GB that takes no place on the disk; a header that never ends."""
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    (tmp_path / "sparse.jpg").write_bytes(JPEG)
    os.truncate(tmp_path / "sparse.jpg", 3 << 30)
    (tmp_path / "fill.jpg").write_bytes(b"\xff\xd8" + b"\xff\xe1\xff\xff" + bytes(65533) + b"\xff\xe1\xff\xff" * (6 << 20))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket.jpg"))
        verdicts = {path.stem: tree.judge(str(path)) for path in tmp_path.iterdir()}
    special = dict.fromkeys(("pipe", "zero", "socket"), "not a regular file")
    assert verdicts == {**special, "sparse": "more than 256 MiB", "fill": "damaged header"}
    for name in ("pipe", "zero", "sparse"):
        with pytest.raises(OSError):
            files.read(str(tmp_path / f"{name}.jpg"))


def test_pillow_opens_only_photographs(tmp_path, monkeypatch):
    """An EPS picture is a program, for which Pillow starts ghostscript; what is told to open it here leaves a file."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    os.chmod(tmp_path / "gs", 0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    (tmp_path / "eps.jpg").write_bytes(EPS)
    assert tree.judge(str(tmp_path / "eps.jpg")) == "not an image"
    with pytest.raises(decode.Undecodable):
        decode.decode(EPS, True, None)
    assert not (tmp_path / "ran").exists()
    with contextlib.suppress(OSError), Image.open(io.BytesIO(EPS)) as found:
        found.load()
    assert (tmp_path / "ran").exists(), "or this test shows nothing"


@pytest.mark.parametrize("special", [False, True])
def test_a_file_that_has_become_a_bomb_is_not_decoded(special):
    bomb = encoded(Image.new("L", (20_000, 6_000)), quality=1)
    with pytest.raises(decode.Undecodable, match="too many pixels"):
        decode.decode(bomb, special, (0, 0, 40, 60))


def test_what_cannot_be_listed_or_opened_is_an_error_that_names_it(folder):
    """A class would be missing, and the log would say "done"."""
    for number, (place, change) in enumerate({
        "zgood": lambda path: os.chmod(path, 0), "zgood/deeper": lambda path: os.chmod(path, 0),
        "zgood/2.jpg": lambda path: os.chmod(path, 0), ".": lambda path: os.chmod(path, 0),
        "away": lambda path: path.symlink_to("/none/such"), "zgood/away": lambda path: path.symlink_to("/none/such"),
    }.items()):  # fmt: skip
        copied = Path(shutil.copytree(folder, folder.parent / str(number) / "train"))
        change(copied / place)
        with (
            of_anybody(),
            pytest.raises(UserError, match=rf"{re.escape(str(copied / place))} cannot be read \(\w.*\): make it"),
        ):
            tree.load(str(copied))
    (folder / "zgood" / "deeper" / "up").symlink_to("..")
    with pytest.raises(UserError, match="zgood/deeper/up is a link to a folder that it is in"):
        tree.load(str(folder))


def test_a_large_photograph_is_left_out_and_counted_unless_the_option_allows_it(
    tmp_path, tmp_path_factory, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "1.jpg").write_bytes(JPEG)
    (tmp_path / "train" / "a" / "large.png").write_bytes(encoded(Image.new("1", (10_000, 10_000)), "PNG"))
    args = arguments.parse(module_of("train_imagenet").options(), ["--data_url", str(tmp_path)], environ={})
    assert [len(split) for split in imagenet.load(args)[1:]] == [1, 1]
    assert "left out, more than 80 million pixels (--max_megapixels): 1 (the first is a/large.png)" in capsys.readouterr().out
    assert [len(split) for split in imagenet.load(arguments.replaced(args, max_megapixels=100))[1:]] == [2, 1]
    with pytest.raises(UserError, match="every image has more than --max_megapixels 0"):
        tree.load(str(tmp_path / "val")).without_larger(0)
    for words, taken in (("1", True), ("100", True), ("0", False), ("101", False)):
        with contextlib.nullcontext() if taken else pytest.raises(SystemExit):
            arguments.parse(module_of("train_imagenet").options(), ["--max_megapixels", words], environ={})
    folder = str(tmp_path_factory.mktemp("packs"))
    assert pack.main([str(tmp_path), f"{folder}/some"]) == 0
    assert "has 2 images" in (said := capsys.readouterr().out) and "more than 80 million pixels (--max_megapixels): 1" in said
    assert pack.main([str(tmp_path), f"{folder}/all", "--max_megapixels", "100"]) == 0
    assert "has 3 images" in capsys.readouterr().out
    for more, count in (({}, 1), ({"max_megapixels": 100}, 2)):
        assert len(kspeed.KSpeedCallable(tmp_path / "train", 1, iplist="127.0.0.1:1", **more).files) == count
