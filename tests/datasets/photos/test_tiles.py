"""JPEGs in tiles: every window has the pixels of the whole picture, bit for bit, and what is damaged is found when it is read."""

import io
import random
import shutil
import struct
import subprocess
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from datasets.loader import torch_batches
from datasets.packs import packed
from datasets.photos import decode, labelled, tiles, tree
from datasets.sampler import EpochSampler, InOrder
from launch.pack import command as pack
from tests.tools.packages import program
from tests.tools.packs import flip, root, run, settings  # noqa: F401 (a fixture)


@pytest.fixture(scope="module", autouse=True)
def jpegtran():
    program("jpegtran")
    program("cjpeg")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def jpeg(height, width, mode="RGB", seed=0, **how):
    """Noise that is smooth enough for coefficients of every size."""
    draw = np.random.default_rng(seed)
    shape = (height // 3 + 1, width // 3 + 1, 3)
    picture = Image.fromarray(draw.integers(0, 256, shape, np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    picture.convert(mode).save(buffer := io.BytesIO(), "JPEG", **{"quality": 90, **how})
    return buffer.getvalue()


TURNED = Image.Exif()
TURNED[0x0112] = 6
KINDS = {
    "4:2:0": jpeg(203, 333),
    "4:2:2": jpeg(97, 211, subsampling=1),
    "4:4:4": jpeg(150, 64, subsampling=0),
    "grey": jpeg(120, 130, "L"),
    "progressive": jpeg(180, 240, progressive=True),
    "with restart markers": jpeg(160, 160, restart_marker_blocks=3),
    "a prime number of blocks": jpeg(50, 16 * 23),
    "so, and two pixels": jpeg(50, 16 * 22 + 2),
    "one block": jpeg(7, 5),
    "one row": jpeg(9, 400),
    "RGB, not YCbCr": jpeg(90, 90, keep_rgb=True),
    "turned": jpeg(60, 90, exif=TURNED),
}


SAMPLED = {"4:1:0": "4x2,1x1,1x1", "4:4:1": "1x4,1x1,1x1", "a third": "3x1,1x1,1x1", "uneven": "2x2,2x1,1x1"}


def sampled(factors):
    """With colours stored as few programs store them, which simplejpeg does not know."""
    picture = Image.open(io.BytesIO(jpeg(130, 210)))
    picture.save(buffer := io.BytesIO(), "PPM")
    return subprocess.run(["cjpeg", "-sample", factors], input=buffer.getvalue(), capture_output=True, check=True).stdout


def windows(height, width):
    """All of it, its corners, single pixels, and some others."""
    draw = random.Random(1)
    yield 0, 0, height, width
    for top, left in ((0, 0), (0, width - 1), (height - 1, 0), (height - 1, width - 1)):
        yield top, left, top + 1, left + 1
    for left in range(max(0, width - 6), width):
        yield 0, left, height, width
    for _ in range(60):
        top, bottom = sorted(draw.sample(range(height + 1), 2))
        left, right = sorted(draw.sample(range(width + 1), 2))
        yield top, left, bottom, right


@pytest.mark.parametrize("decoder", ["simplejpeg", "nvImageCodec", "Pillow"])
@pytest.mark.parametrize("kind", [*KINDS, *SAMPLED])
def test_every_window_has_the_pixels_of_the_whole_picture(monkeypatch, kind, decoder):
    assert decode._simplejpeg() and decode._codec()
    if decoder != "simplejpeg":
        monkeypatch.setattr(decode, "_simplejpeg", lambda: None)
    if decoder == "Pillow":
        monkeypatch.setattr(decode, "_codec", lambda: None)
    content = KINDS[kind] if kind in KINDS else sampled(SAMPLED[kind])
    made, whole = tiles.cut_into_tiles(content), decode.decode(content, False, None)
    assert tiles.is_tiled(made) and not tiles.is_tiled(content)
    assert torch.equal(decode.decode(made, False, None), whole), "any reader of JPEG sees the same"
    assert np.array_equal(Image.open(io.BytesIO(made)), Image.open(io.BytesIO(content)))
    for box in windows(*whole.shape[1:]):
        top, left, bottom, right = box
        assert torch.equal(decode.decode(decode.Tiled(made), False, box), whole[:, top:bottom, left:right]), box
    assert torch.equal(decode.decode(decode.Tiled(made), False, None), whole)


@pytest.mark.parametrize("left", [0, 255])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_the_middle_for_evaluation_does_not_depend_on_what_is_not_decoded(monkeypatch, mode, left):
    """The rest of the picture is left as the memory was."""
    draw, decoded, real = random.Random(2), [], decode.decode

    def counted(content, special, box):
        decoded.append(box)
        return real(content, special, box)

    def filled(shape, dtype):
        return torch.full(shape, left, dtype=dtype)

    for _ in range(40):
        content = jpeg(draw.randint(8, 300), draw.randint(8, 300))
        size = draw.randint(4, 120)
        short = size + draw.randint(0, 30)
        whole = real(content, False, None)
        expected = decode.eval_cut(whole, size, short, mode=mode)
        larger = tuple(3 * length for length in whole.shape[1:])  # of a pack of smaller pictures
        of_larger = decode.eval_cut(whole, size, short, larger, mode)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", filled)
            patch.setattr(decode, "decode", counted)
            for form in (content, decode.Tiled(tiles.cut_into_tiles(content))):
                assert torch.equal(decode.eval_picture(form, False, size, short, mode=mode), expected)
                assert torch.equal(decode.eval_picture(form, False, size, short, larger, mode), of_larger)
    assert sum(box is not None for box in decoded) > 80, "mostly a part is enough"


def test_of_a_small_window_little_is_decoded():
    made = tiles.cut_into_tiles(KINDS["4:2:0"])
    small, box = tiles.cut_out(made, (70, 140, 130, 200))
    assert len(small) < 0.25 * len(made) and Image.open(io.BytesIO(small)).size == (144, 80)
    assert box == (70 - 64, 140 - 96, 130 - 64, 200 - 96)


@pytest.mark.parametrize(
    "content",
    [
        jpeg(40, 40, "CMYK"),
        KINDS["4:2:0"][:-900],
        KINDS["4:2:0"][:300] + bytes(5000) + KINDS["4:2:0"][5300:],
        b"\xff\xd8 and nothing else",
        b"\xff\xd8" + b"\xff" * 99,
        b"\x89PNG, for example",
        b"",
    ],
)
def test_what_is_no_whole_picture_of_a_usual_kind_stays_as_it_is(content):
    with pytest.raises(tiles.NotTiled):
        tiles.cut_into_tiles(content)


def test_a_table_that_would_be_too_long_is_one_of_wider_tiles(monkeypatch):
    content = KINDS["4:2:0"]
    usual = tiles.PLACES.unpack_from(tiles.cut_into_tiles(content), tiles.BEGIN)
    monkeypatch.setattr(tiles, "LONGEST_TABLE", len(tiles.NAME) + tiles.PLACES.size + 4 * 13 + 2 * 13)
    made = tiles.cut_into_tiles(content)
    assert tiles.PLACES.unpack_from(made, tiles.BEGIN)[4] == 1 < usual[4]
    assert torch.equal(decode.Tiled(made).cut((5, 6, 99, 100)), decode.decode(content, False, (5, 6, 99, 100)))
    monkeypatch.setattr(tiles, "LONGEST_TABLE", 40)
    with pytest.raises(tiles.NotTiled, match="a tile would be too long"):
        tiles.cut_into_tiles(content)


def test_a_program_that_changes_coefficients_is_not_believed(monkeypatch):
    transformed = tiles._run_jpegtran
    other = jpeg(203, 333, seed=1)
    monkeypatch.setattr(
        tiles, "_run_jpegtran", lambda content, *how: transformed(other if "-restart" in how else content, *how)
    )
    with pytest.raises(tiles.NotTiled, match="its coefficients would not be the same"):
        tiles.cut_into_tiles(KINDS["4:2:0"])


def test_damage_is_found_where_it_is_read_and_only_there():
    made, box = tiles.cut_into_tiles(KINDS["4:2:0"]), (70, 140, 130, 200)
    whole, data = decode.Tiled(made).cut(box), tiles.PLACES.unpack_from(made, tiles.BEGIN)[2]
    found = []
    for at in range(2, len(made), 7):
        damaged = bytearray(made)
        damaged[at] ^= 0x10
        try:
            assert torch.equal(decode.decode(decode.Tiled(bytes(damaged)), False, box), whole), at
        except decode.Undecodable:
            found.append(at)
    header = [at for at in range(2, data, 7) if at >= tiles.BEGIN]
    assert set(header) <= set(found) and 0.2 < len(set(found) - set(header)) / (len(made) / 7) < 0.6


@pytest.mark.parametrize(
    "places", [(0, 0, 65535, 65535, 1, 1), (2**31, 2**31, 3, 3, 16, 16), (50, 60, 2, 2, 0, 0), (4, 4, 1, 1, 8, 8)]
)
def test_a_table_of_a_stranger_does_no_harm(places):
    made = tiles.cut_into_tiles(KINDS["grey"])
    table = tiles.PLACES.pack(0, *places)
    after, rows, columns, data = tiles.BEGIN + tiles.PLACES.size, places[2], places[3], places[1]
    end = after + 4 * rows + 2 * rows * columns
    checksum = zlib.crc32(made[end:data], zlib.crc32(table + made[after:end]))
    hostile = made[: tiles.BEGIN] + struct.pack("<I", checksum) + table[4:] + made[after:]
    with pytest.raises(decode.Undecodable):
        decode.decode(decode.Tiled(hostile), False, (0, 0, 20, 20))


@pytest.mark.parametrize("installed", [True, False])
def test_a_picture_that_says_it_is_huge_is_not_decoded(monkeypatch, installed):
    if not installed:
        monkeypatch.setattr(decode, "_simplejpeg", lambda: None)
    made = bytearray(tiles.cut_into_tiles(KINDS["grey"]))
    checksum, sof, data, rows, columns, *_ = tiles.PLACES.unpack_from(made, tiles.BEGIN)
    made[sof + 5 : sof + 9] = struct.pack(">HH", 60_000, 60_000)
    table = tiles.PLACES.pack(0, sof, data, rows, columns, 60_000 // rows + 1, 60_000 // columns + 1)
    end = tiles.BEGIN + tiles.PLACES.size + 4 * rows + 2 * rows * columns
    made[tiles.BEGIN : tiles.BEGIN + tiles.PLACES.size] = table
    checksum = zlib.crc32(made[end:data], zlib.crc32(made[tiles.BEGIN : end]))
    made[tiles.BEGIN : tiles.BEGIN + 4] = struct.pack("<I", checksum)
    with pytest.raises(decode.Undecodable, match="it has too many pixels"):
        decode.decode(decode.Tiled(bytes(made)), False, None)


# --- Packs of them -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(root, tmp_path_factory):
    """(a pack of the files as they are, one in tiles)"""
    folders = [tmp_path_factory.mktemp(form) for form in ("original", "tiled")]
    for folder in folders:
        pack.pack(str(root), str(folder), settings(form=folder.name.rstrip("0123456789")))
    return folders


def batches(files, train=True, workers=0):
    sampler = EpochSampler(len(files), 5, seed=5) if train else InOrder(len(files), 5)
    return list(torch_batches(labelled.Photos(files, 32, train, seed=3), sampler, workers))


@pytest.mark.parametrize("train, workers", [(True, 0), (True, 1), (False, 0)])
def test_batches_have_the_bits_of_the_files(both, root, tmp_path, train, workers):
    split = "train" if train else "val"
    plain, tiled = (packed.load(str(folder), split) for folder in both)
    assert tiled.describe().endswith("in the form tiled") and np.array_equal(plain.special, tiled.special)
    assert sum(tiles.is_tiled(tiled.read(number)) for number in range(len(tiled))) > 0.9 * len(tiled) - 4
    files = tree.load(str(root / split), str(tmp_path))
    for one, other, third in zip(batches(plain, train), batches(tiled, train, workers), batches(files, train)):
        assert all(map(torch.equal, one, other)) and all(map(torch.equal, one, third))


def test_verify_compares_the_coefficients_with_those_of_the_originals(both, root, tmp_path):
    for folder in both:
        assert "as they were packed, and are the pictures of" in run(root, "--verify", folder).stdout
    tiled = packed.load(str(both[1]), "train")
    number = next(number for number in range(len(tiled)) if tiles.is_tiled(tiled.read(number)))
    other = tmp_path / "other"
    for split in ("train", "val"):
        for path in (root / split).rglob("*"):
            if path.is_file():
                (copy := other / path.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    with Image.open(tiled_path := other / "train" / tiled.names[number]) as picture:
        picture.load()
    picture.putpixel((0, 0), (1, 2, 3))
    picture.save(tiled_path, "JPEG")
    done = run(other, "--verify", both[1], check=1)
    assert f"another picture than in {other}: " in done.stdout and tiled.names[number] in done.stdout
    assert "error: 1 of 73 pictures are not those of" in done.stderr


def test_pictures_that_are_no_longer_the_originals_are_not_compared_with_them(root, tmp_path):
    run(root, tmp_path / "pack", "--form", "256")
    said = run(root, "--verify", tmp_path / "pack", check=2).stderr
    assert "has pictures in the form 256, not the originals of" in said


def test_a_damaged_sample_is_named_and_the_next_takes_its_place(both, tmp_path, capsys):
    copied = shutil.copytree(both[1], tmp_path / "pack")
    tiled = packed.load(str(copied), "val")
    flip(tiled.shard_path(3), int(tiled.offset[3] + tiled.length[3] // 2))
    images, labels, _ = (torch.cat(parts) for parts in zip(*batches(tiled, train=False)))
    assert torch.equal(images[3], images[4]) and labels[3] == tiled.labels[4]
    assert f"{tiled.names[3]} cannot be decoded (a row of its tiles is damaged)" in capsys.readouterr().out


def test_a_machine_without_jpegtran_hears_what_to_install(root, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run(root, tmp_path / "pack", "--form", "tiled", check=2)
    assert "needs the program jpegtran: install it (apt-get install libjpeg-turbo-progs)" in done.stderr
    assert not (tmp_path / "pack").exists()


@pytest.mark.rehearsal
def test_the_pixels_of_real_photographs(real, tmp_path):
    """Those of a pack of the files, to the bit."""
    folders = {form: tmp_path / form for form in ("original", "tiled")}
    for form, folder in folders.items():
        pack.pack(str(real), str(folder), settings(form=form, shard_mb=256.0))
    plain, tiled = (packed.load(str(folder), "train") for folder in folders.values())
    assert all(tiles.is_tiled(tiled.read(number)) for number in range(len(tiled)))
    assert tiled.length.sum() < 1.06 * plain.length.sum()
    for one, other in zip(
        *(torch_batches(labelled.Photos(files, 224, True, 3), EpochSampler(len(files), 20, 5)) for files in (plain, tiled))
    ):
        assert all(map(torch.equal, one, other))
