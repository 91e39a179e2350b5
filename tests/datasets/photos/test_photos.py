"""Photographs: the index of a tree and what is judged in it, the crop as a pure function, the pixels beside torchvision's."""

import io
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from common import arguments
from common.errors import TrainingFailed, UserError
from datasets import crops, imagenet, synthetic
from datasets.packs import packed
from datasets.photos import decode, files, labelled, tree
from datasets.sampler import InOrder
from launch.pack import command as pack
from tests.tools.jobs import ROOT, environment, in_rehearsal, module_of, run
from tests.tools.packages import program
from tests.tools.photographs import (  # noqa: F401 (a fixture)
    FILES,
    JPEG,
    SIXTEEN,
    TOLERANCE,
    assert_close,
    assert_equal,
    difference,
    encoded,
    folder,
    images_of,
    picture,
    reference_crop,
    shard,
)


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_is_judged(tmp_path, name):
    content, verdict = FILES[name]
    (tmp_path / name).write_bytes(content)
    assert tree.judge(str(tmp_path / name)) == verdict


@pytest.mark.parametrize("place", [tree.HEAD - 9, tree.HEAD - 4, tree.HEAD])
def test_a_frame_header_may_lie_across_two_reads(tmp_path, place):
    begins = JPEG.index(b"\xff\xc0")
    comment = b"\xff\xfe" + (place - begins - 2).to_bytes(2, "big") + bytes(place - begins - 4)
    (tmp_path / "long.jpg").write_bytes(JPEG[:begins] + comment + JPEG[begins:])
    assert tree.judge(str(tmp_path / "long.jpg")) == (tree.GOOD, 60, 40)


def test_the_order_and_labels_are_those_of_torchvision(folder):
    found = tree.load(str(folder))
    theirs = torchvision.datasets.ImageFolder(str(folder))
    left_out = {name for names in found.left_out.values() for name in names}
    expected = [pair for pair in theirs.samples if os.path.relpath(pair[0], folder) not in left_out]
    assert [(found.path(number), int(found.labels[number])) for number in range(len(found))] == expected
    pictures = {name for name in left_out if name.lower().endswith(files.EXTENSIONS)}
    assert found.classes == theirs.classes and len(pictures) == sum(isinstance(verdict, str) for _, verdict in FILES.values())
    assert "left out, cut off: 3 (the first is kinds/cut.jpg)" in found.describe()
    assert "6 of them no plain JPEGs" in found.describe()


def test_both_splits_have_the_same_classes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for split, classes in (("train", "ab"), ("val", "ab")):
        for name in classes:
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "1.jpg").write_bytes(JPEG)
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "train" / "a" / "0.jpg").write_bytes(b"")
    args = arguments.parse(module_of("train_imagenet").options(), ["--data_url", str(tmp_path)], environ={})
    assert [len(split) for split in imagenet.load(args)[1:]] == [2, 2]
    said = capsys.readouterr().out
    assert "train: 2 images of 2 classes; left out, empty: 1 (the first is a/0.jpg)" in said
    (tmp_path / "val" / "c").mkdir()
    with pytest.raises(
        UserError,
        match=r"--data_url needs the same classes in train and val: \S+val has 3 and \S+train 2, and c is only in the first",
    ):
        imagenet.load(args)


def test_the_index_is_used_until_a_folder_changes_or_it_is_damaged(folder, monkeypatch):
    first = tree.load(str(folder))
    judged = []
    real = tree.judge
    monkeypatch.setattr(tree, "judge", lambda path: judged.append(path) or real(path))
    assert tree.load(str(folder)).names == first.names and judged == []
    index = next((Path("input_dir") / "index").glob("*.npz"))
    index.write_bytes(index.read_bytes()[:-100])
    assert tree.load(str(folder)).names == first.names and len(judged) == len(FILES) + 4
    (folder / "zgood" / "new.jpg").write_bytes(JPEG)
    os.utime(folder / "zgood", ns=(time.time_ns(), time.time_ns() + 1))
    assert len(tree.load(str(folder))) == len(first) + 1
    with open(folder / "kinds" / "cut.jpg", "r+b") as file:  # repaired in its place, of which the folder knows nothing
        file.truncate(0)
        file.write(JPEG)
    again = tree.load(str(folder))
    assert len(again) == len(first) + 2 and "kinds/cut.jpg" in again.names


def test_an_index_with_flipped_bits_or_of_another_form_is_made_again(folder):
    first = tree.load(str(folder))
    path = next((Path("input_dir") / "index").glob("*.npz"))
    good, classes, read = path.read_bytes(), files.classes(str(folder)), 0
    signature = bytes(np.load(path)["signature"]).decode()
    for position in range(0, len(good) * 8, 29):
        bad = bytearray(good)
        bad[position // 8] ^= 1 << position % 8
        path.write_bytes(bad)
        found = tree._read(str(path), str(folder), list(classes), signature)
        read += found is not None  # a bit that says nothing, as in the date of an entry
        for name, value in vars(first).items() if found else ():
            assert np.array_equal(getattr(found, name), value), (position, name)
    assert read < 200
    with np.load(io.BytesIO(good)) as stored:
        arrays = dict(stored)
    for left_out in (b"[" * 200_000 + b"]" * 200_000, b"[]", b'{"empty": [5]}'):
        np.savez(path, **{**arrays, "left_out": np.frombuffer(left_out, np.uint8)})
        assert tree._read(str(path), str(folder), list(classes), signature) is None
    # --- new from here on ---
    count = 3000  # of more than 4 KiB zipfile compares no checksum, unless all is read to the end
    names = np.frombuffer("\0".join(f"zgood/{number}.jpg" for number in range(count)).encode(), np.uint8)
    more = {name: np.resize(arrays[name], count) for name in ("labels", "widths", "heights", "special")}
    np.savez(path, **{**arrays, **more, "names": names})
    good = path.read_bytes()
    assert len(tree._read(str(path), str(folder), list(classes), signature)) == count
    for length in re.finditer(rb"'shape': \((\d+),\)", good):
        for place in range(*length.span(1)):
            for bit in (bit for bit in range(4) if good[place] >> bit & 1):  # without it, the array is a shorter one
                bad = bytearray(good)
                bad[place] ^= 1 << bit
                path.write_bytes(bad)
                assert tree._read(str(path), str(folder), list(classes), signature) is None, length


def test_a_folder_without_pictures_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        tree.load(str(tmp_path / "none"))
    with pytest.raises(UserError, match="has no folder for any class"):
        (tmp_path / "flat").mkdir()
        tree.load(str(tmp_path / "flat"))
    (tmp_path / "flat" / "class").mkdir()
    (tmp_path / "flat" / "class" / "empty.jpg").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds no image that can be read \(empty: 1\)"):
        tree.load(str(tmp_path / "flat"))


def test_a_crop_depends_on_nothing_but_seed_epoch_and_sample():
    ids, widths, heights = np.arange(1000), np.full(1000, 500), np.full(1000, 375)
    windows, flips = crops.random_windows(ids, widths, heights, 3, 7)
    some = np.array([999, 5, 400])
    again, flips_again = crops.random_windows(some, widths[some], heights[some], 3, 7)
    assert np.array_equal(again, windows[some]) and np.array_equal(flips_again, flips[some])
    for seed, epoch in ((4, 7), (3, 8)):
        assert (crops.random_windows(ids, widths, heights, seed, epoch)[0] != windows).any(axis=1).mean() > 0.99


@pytest.mark.parametrize("width, height", [(500, 375), (100, 900), (900, 100), (1, 1), (64, 64)])
def test_the_windows_are_distributed_as_torchvisions(width, height):
    """Inside the picture, and the same means of area, ratio and place as 4,000 draws of RandomResizedCrop."""
    count = 4000
    windows, flips = crops.random_windows(np.arange(count), np.full(count, width), np.full(count, height), 0, 0)
    top, left, high, wide = windows.T
    assert (top >= 0).all() and (left >= 0).all() and (high > 0).all() and (wide > 0).all()
    assert (top + high <= height).all() and (left + wide <= width).all()
    assert 0.46 < flips.mean() < 0.54
    torch.manual_seed(0)
    empty = torch.empty(3, height, width)
    theirs = np.array(
        [torchvision.transforms.RandomResizedCrop.get_params(empty, (0.08, 1), (3 / 4, 4 / 3)) for _ in range(count)]
    )
    for ours, reference, scale in (
        (high * wide, theirs[:, 2] * theirs[:, 3], width * height),
        (top, theirs[:, 0], height),
        (left, theirs[:, 1], width),
    ):
        assert abs(ours.mean() - reference.mean()) / scale < 0.02


@pytest.mark.parametrize(
    "name", [name for name, (_, verdict) in FILES.items() if not isinstance(verdict, str) and "sixteen" not in name]
)
def test_the_pixels_are_those_of_torchvision(name):
    content, (special, width, height) = FILES[name]
    image = Image.open(io.BytesIO(content)).convert("RGB")
    for sample in range(8):
        windows, flips = crops.random_windows(np.array([sample]), [width], [height], 0, 0)
        found = decode.train_picture(content, special, windows[0], flips[0], 32)
        assert found.dtype == torch.uint8 and found.shape == (3, 32, 32)
        assert difference(found, reference_crop(image, windows[0], flips[0], 32)) < TOLERANCE
    whole = torchvision.transforms.Compose(
        [torchvision.transforms.Resize(round(32 * 256 / 224)), torchvision.transforms.CenterCrop(32)]
    )
    assert (
        difference(decode.eval_picture(content, special, 32, 37), torch.from_numpy(np.array(whole(image))).permute(2, 0, 1))
        < TOLERANCE
    )


@pytest.mark.parametrize("name", ["plain.JPEG", "cmyk.jpg", "alpha.png"])
def test_nothing_is_cut_off_where_the_whole_picture_is_asked_for(name):
    content, (special, width, height) = FILES[name]
    (window,), _ = crops.random_windows(np.array([5]), [width], [height], 0, 0, area=(1.0, 1.0))
    assert window.tolist() == [0, 0, height, width]
    squeezed = torchvision.transforms.Resize((32, 32))(Image.open(io.BytesIO(content)).convert("RGB"))
    expected = torch.from_numpy(np.array(squeezed)).permute(2, 0, 1)
    for found in (
        decode.eval_picture(content, special, 32, decode.WHOLE),
        decode.eval_picture(content, special, 32, decode.WHOLE, original=(2 * height, 3 * width)),  # of a pack of smaller ones
        decode.train_picture(content, special, window, False, 32),
    ):
        assert difference(found, expected) < TOLERANCE
    assert difference(decode.eval_picture(content, special, 32, 37), expected) > 3 * TOLERANCE


def test_a_shifted_window_would_be_noticed():
    content, window = FILES["plain.JPEG"][0], np.array([3, 4, 30, 40])
    found = decode.train_picture(content, 0, window, False, 32)
    assert difference(found, reference_crop(picture(), window + np.array([1, 1, 0, 0]), False, 32)) > 3 * TOLERANCE


def test_sixteen_bits_keep_their_upper_half():
    content, (special, *_) = FILES["sixteen.png"]
    found = decode.train_picture(content, special, np.array([0, 0, 40, 60]), False, 40)
    assert found.min() < 3 and found.max() > 250 - 3 and (found[0] == found[1]).all()


@pytest.mark.parametrize("name", ["big-endian.tif", "little-endian.tif", "thirty-two.tif"])
def test_sixteen_bits_of_a_tiff_are_the_same(tmp_path, name):
    values = np.asarray(SIXTEEN).astype({"b": ">u2", "l": "<u2", "t": "<i4"}[name[0]])
    if name == "thirty-two.tif":
        values[0, :2] = -300, 100_000  # which become black and white
    Image.fromarray(values).save(tmp_path / name)
    with Image.open(tmp_path / name) as opened:
        assert opened.mode == {"b": "I;16B", "l": "I;16", "t": "I"}[name[0]]
    found = decode.decode((tmp_path / name).read_bytes(), tree.judge(str(tmp_path / name))[0], None)
    assert np.array_equal(found.numpy(), np.stack([(values.astype(int) >> 8).clip(0, 255)] * 3))


def test_a_picture_of_floats_is_what_pillow_makes_of_it():
    values = np.linspace(-50, 400, 2400, dtype=np.float32).reshape(40, 60)
    found = decode.decode(encoded(Image.fromarray(values), "TIFF"), True, None)
    assert np.array_equal(found[0].numpy(), values.clip(0, 255).astype(np.uint8)) and found.max() == 255


def between_the_tables(content, more):
    """With bytes before its last table, which is behind the size of the picture."""
    place = content.rindex(b"\xff\xc4")
    return content[:place] + more + content[place:]


def interrupted(content, behind=None):
    """With a marker in its data that means nothing, as a damaged file may have one."""
    place = content.index(b"\xff\xda") + (behind or len(content) // 2)
    return content[:place] + b"\xff\x42" + content[place + 2 :]


ODD = {
    "a marker that is none": (between_the_tables(JPEG, b"\xff\x00\x00\x02"), tree.SPECIAL, True),
    "half of it": (between_the_tables(JPEG, b"\xff\x00"), tree.SPECIAL, True),
    "a marker of the data": (between_the_tables(JPEG, b"\xff\xd0"), tree.SPECIAL, True),
    "bytes between segments": (between_the_tables(JPEG, b"stray"), tree.SPECIAL, True),
    "a marker in the data": (interrupted(JPEG), tree.GOOD, True),
    "the same in a grey one": (interrupted(FILES["grey.jpg"][0]), tree.GOOD, True),
    "the same in a progressive one": (interrupted(FILES["progressive.jpg"][0]), tree.GOOD, False),
    "two frames": (JPEG.replace(b"\xff\xda", JPEG[JPEG.index(b"\xff\xc0") :][:19] + b"\xff\xda"), tree.GOOD, False),
}


def test_what_a_missing_codec_costs_is_said(monkeypatch):
    assert not list(decode.slow_decoder_hints())
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    assert [
        line.startswith("photographs are decoded by Pillow, which takes about twice as long")
        for line in decode.slow_decoder_hints()
    ] == [True]
    for version, package in (
        ("13.2", "nvimgcodec-cu13 nvidia-nvjpeg "),
        ("12.8", "nvimgcodec-cu12 "),
        (None, "nvimgcodec-cu12 "),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert package in next(decode.slow_decoder_hints())
    monkeypatch.setattr(sys, "platform", "darwin")  # there is none for it
    assert not list(decode.slow_decoder_hints())


def with_and_without_codec(content, special, monkeypatch):
    """The picture, or None where it cannot be decoded."""
    pictures = []
    for codec in (decode._codec, lambda: None):
        monkeypatch.setattr(decode, "_codec", codec)
        try:
            pictures.append(decode.decode(content, bool(special), None))
        except decode.Undecodable:
            pictures.append(None)
    return pictures


def test_neither_decodes_one_in_several_scans_that_is_interrupted(tmp_path, monkeypatch):
    (tmp_path / "scans").write_text("0;1;2;\n")
    words = [program("jpegtran"), "-scans", str(tmp_path / "scans")]
    whole = subprocess.run(words, input=JPEG, capture_output=True, check=True).stdout
    assert whole.count(b"\xff\xda") == 3
    for content, good in ((whole, True), (interrupted(whole, 100), False)):
        assert [picture is not None for picture in with_and_without_codec(content, False, monkeypatch)] == [good, good]


@pytest.mark.parametrize("name", ODD)
def test_what_can_be_decoded_does_not_depend_on_what_is_installed(tmp_path, monkeypatch, name):
    content, special, good = ODD[name]
    (tmp_path / "odd.jpg").write_bytes(content)
    assert tree.judge(str(tmp_path / "odd.jpg")) == (special, 60, 40)

    with_codec, without = with_and_without_codec(content, special, monkeypatch)
    assert (with_codec is not None) == (without is not None) == good
    assert not good or ((with_codec.int() - without.int()).abs().max() <= 3 and without.float().std() > 30)


@pytest.mark.parametrize("width", [1, 4, 5, 12, 18, 40])
def test_a_part_one_pixel_wide_has_the_colours_of_the_whole(width):
    noise = np.random.default_rng(width).integers(0, 256, (24, width, 3)).astype(np.uint8)
    content = encoded(Image.fromarray(noise), subsampling="4:2:0")
    whole = decode.decode(content, False, None)
    for left in range(width):
        for right in {left + 1, min(left + 2, width), width}:
            assert torch.equal(decode.decode(content, False, (3, left, 20, right)), whole[:, 3:20, left:right])


def test_dali_crops_narrow_pictures_to_the_same_pixels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train" / "narrow").mkdir(parents=True)
    for number in range(8):
        noise = np.random.default_rng(number).integers(0, 256, (8, 6, 3)).astype(np.uint8)
        Image.fromarray(noise).save(tmp_path / "train" / "narrow" / f"{number:02d}.jpg", subsampling="4:2:0")
    narrow = np.array([1, 0, 5, 1])
    monkeypatch.setattr(crops, "random_windows", lambda ids, *_: (np.stack([narrow] * len(ids)), np.zeros(len(ids), bool)))
    ours, theirs = (
        images_of(tmp_path / "train", lambda count: shard(count, 4, 0, 1), backend=backend)[0]
        for backend in ("pytorch", "dali-cpu")
    )
    assert_close(theirs, ours, 0.01)


def test_a_file_that_only_looks_like_a_picture_is_undecodable():
    for content in (JPEG[:200] + b"\xff\xd9", b"\xff\xd8" + os.urandom(500), encoded(picture(), "PNG")[:60]):
        with pytest.raises(decode.Undecodable):
            decode.train_picture(content, False, np.array([0, 0, 40, 60]), False, 32)


# --- Batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_picture_is_the_same_whoever_loads_it(folder, world_size):
    """On every rank, with and without worker processes; the shards are disjoint and complete."""
    whole, order = images_of(folder, lambda count: shard(count, 6, 0, 1))
    seen = []
    for rank in range(world_size):
        some, _ = images_of(folder, lambda count, rank=rank: shard(count, 6 // world_size, rank, world_size), workers=rank)
        assert_equal(some, whole)
        seen += some
    assert sorted(seen) == sorted(order) and len(set(seen)) == len(seen)


def test_resumed_at_every_step_of_an_epoch(folder):
    whole, order = images_of(folder, lambda count: shard(count, 4, 0, 1))

    def resumed(count, consumed):
        sampler = shard(count, 4, 0, 1)
        sampler.start_at(0, consumed)
        return sampler

    for consumed in range(0, len(order), 4):
        some, rest = images_of(folder, lambda count, consumed=consumed: resumed(count, consumed))
        assert rest == order[consumed:]
        assert_equal(some, whole)


def test_evaluation_gives_every_picture_once_and_unchanged_in_every_epoch(folder):
    found, order = images_of(folder, lambda count: InOrder(count, 5), train=False)
    files = tree.load(str(folder))
    assert order == list(range(len(files)))
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (imagenet.MEAN, imagenet.STD))
    for number in order:
        picture = decode.eval_picture(Path(files.path(number)).read_bytes(), files.special[number], 32, 37)
        assert torch.allclose(found[number][0], (picture / 255 - mean) / std, atol=1e-5)
        assert found[number][1] == files.labels[number]


def test_what_cannot_be_decoded_is_replaced_by_the_next_and_said_once(folder, capfd):
    files = tree.load(str(folder))
    number = files.names.index("zgood/0.jpg")
    content = Path(files.path(number)).read_bytes()
    Path(files.path(number)).write_bytes(content[:200] + bytes(len(content) - 202) + b"\xff\xd9")
    for workers in (0, 1):
        found, order = images_of(folder, lambda count: InOrder(count, 4), train=False, workers=workers)
        assert torch.equal(found[number][0], found[number + 1][0]) and sorted(order) == list(range(len(files)))
        assert capfd.readouterr().out.count("zgood/0.jpg cannot be decoded") == 1


SAID = """
import sys
import PIL.Image
from datasets.photos import decode, remarks, tree
remarks.MOST = int(sys.argv[1])
files = tree.load(sys.argv[2], sys.argv[3])
kept = decode.Substitutes("images", 100)
with remarks.warnings.catch_warnings():
    kept.decode(0, len(files), lambda used: decode.decode(files.read(used), True, None), files.path)
for epoch in range(3):
    for number in range(len(files)):
        kept.decode(number, len(files), lambda used: decode.decode(files.read(used), True, None), files.path)
remarks.warnings.warn("of another")
PIL.Image.open(files.path(0)).load()  # by the program itself
"""


@pytest.mark.parametrize("most", in_rehearsal([20, 3], lambda most: most == 20))
def test_what_pillow_and_libtiff_say_is_one_line_for_each_file(tmp_path, most):
    some = tmp_path / "pictures" / "train" / "some"
    some.mkdir(parents=True)
    for number in range(4):
        fax = bytearray(encoded(picture(seed=number).convert("1"), "TIFF", compression="group4"))
        fax[20:60] = bytes(range(60, 100))
        (some / f"fax{number}.tif").write_bytes(fax)
    for name in ("palette.png", "quite_another.png"):
        (some / name).write_bytes(encoded(picture(mode="P"), "PNG", transparency=bytes(range(200))))
    words = [sys.executable, "-c", SAID, str(most), str(some.parent), str(tmp_path / "inputs")]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    said = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    assert len(said) == min(most, 6) and len({line.split(": its decoder")[0] for line in said}) == len(said)
    assert re.search(r"fax0\.tif: its decoder says: Fax4Decode: .+ \(\d+ more about it\)$", said[0])
    if most == 20:
        assert all("png: its decoder says: Palette images with Transparency" in line for line in said[-2:])
    else:
        assert said[-1].endswith("; that is said of 3 files now, and no other is named")
    first, *others = [line for line in done.stderr.splitlines() if "Fax4Decode: " in line or "Warning" in line]
    assert first == "<string>:13: UserWarning: of another" and others and all(line[:4] == "Fax4" for line in others)
    shutil.copytree(some.parent, tmp_path / "pictures" / "val")
    words = [sys.executable, "-m", "launch", "pack", str(tmp_path / "pictures"), str(tmp_path / "packed"), "--form", "256"]
    done = run(words, cwd=ROOT, env=environment())
    assert done.stdout.count("train/some/fax0.tif: its decoder says: Fax4Decode") == 1 and "Fax4Decode" not in done.stderr


def test_a_data_set_without_end_of_damage_stops_the_run(folder, monkeypatch):
    monkeypatch.setattr(labelled, "SUBSTITUTES", 3)
    monkeypatch.setattr(decode, "decode", lambda *_: (_ for _ in ()).throw(decode.Undecodable("damaged")))
    with pytest.raises(TrainingFailed, match="3 images in a row"):
        images_of(folder, lambda count: InOrder(count, 4))


def test_fewer_samples_come_from_all_over_the_classes(folder):
    some = imagenet.spread(tree.load(str(folder)), 5)
    assert len(some) == 5 and set(some.labels) == {0, 1} and len(some.names) == 5
    assert labelled.Photos(some, 32, True, 0)[0, np.arange(2)][0].dtype == torch.uint8, "a quarter of what goes to a GPU"
    data = synthetic.ColouredNoise(100, 16, 10, seed=0)
    images, labels, _ = data[0, np.arange(8)]
    again, *_ = data[3, np.arange(8)]
    assert torch.equal(images, again) and images.shape == (8, 3, 16, 16) and labels.max() < 10
    assert torch.equal(data[0, np.arange(5, 8)][0], images[5:]) and not torch.equal(images[5], images[6])


def test_the_pixels_of_real_photographs(real, tmp_path):
    found = tree.load(str(real / "train"), str(tmp_path))
    differences = []
    for number in range(0, len(found), 6):
        windows, flips = crops.random_windows(np.array([number]), [found.widths[number]], [found.heights[number]], 0, 0)
        mine = decode.train_picture(found.read(number), found.special[number], windows[0], flips[0], 224)
        differences.append(
            difference(mine, reference_crop(Image.open(found.path(number)).convert("RGB"), windows[0], flips[0], 224))
        )
    assert np.mean(differences) < 0.1 and max(differences) < TOLERANCE


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_backend_gives_the_same_of_real_photographs(real, tmp_path, monkeypatch, split):
    monkeypatch.chdir(tmp_path)
    train = split == "train"
    sampler = (lambda count: shard(count, 40, 0, 1)) if train else (lambda count: InOrder(count, 40))
    ours, order = images_of(real / split, sampler, train)
    assert len(order) == (240 if train else 60)
    theirs, their_order = images_of(real / split, sampler, train, workers=1, backend="dali-cpu")
    assert their_order == order
    assert_close(theirs, ours, 2 * TOLERANCE)  # each may be so far from torchvision's
    pack.main([str(real), str(tmp_path / "pack")])
    monkeypatch.setattr(tree, "load", lambda folder: packed.load(str(tmp_path / "pack"), split))
    theirs, their_order = images_of(real / split, sampler, train, backend="packed")
    assert their_order == order
    assert_equal(theirs, ours)
