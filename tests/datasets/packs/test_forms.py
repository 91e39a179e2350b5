"""Packs of smaller JPEGs and of pixels: the samples, the order and the parts of the pictures are those of the files."""

import errno
import io
import json
import os
import signal
import tarfile

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from common.errors import UserError
from datasets import crops
from datasets.loader import torch_batches
from datasets.packs import packed
from datasets.photos import decode, labelled, tree
from datasets.sampler import EpochSampler, InOrder
from launch.pack import command as pack
from launch.pack import forms
from tests.tools.jobs import NETWORK, assert_same_bits, final_state, in_rehearsal, run_job, wait_for
from tests.tools.packs import ENDLESS, contents, fetchers, first, flip, passing, reached, run, settings, start, with_changes  # noqa: F401 (a fixture)
from tests.tools.photographs import SIXTEEN, difference, encoded, reference_crop

FORMS = ["320", "256", "raw"]
SIZE = 96  # of the network's pictures
SHARD_MB = 0.5  # so that every form has several shards
SMALL = [*NETWORK, "--image_size", 32, "--batch_size", 8, "--workers", 0, "--warmup", 0, "--recipe", "imagenet"]
SMALL += ["--data_backend", "packed"]

# Mean absolute difference, of 255, from torchvision's transforms of the original: of the pictures below, and of real photographs.
TOLERANCE = {"320": 2.5, "256": 3.0, "raw": 1.0}
OF_REAL = {"320": 4.2, "256": 5.6, "raw": 0.5}


def photograph(height, width, mode="RGB", seed=0):
    """Colours with edges and some detail, so that a wrong part of it shows."""
    rows, columns = np.mgrid[0:height, 0:width] / max(height, width)
    channels = [np.sin(rows * (30 + seed + c)) * 60 + np.cos(columns * (40 + 3 * c)) * 60 + 128 for c in range(3)]
    channels[seed % 3][:, : width // 3] = 20
    channels[1][height // 2 :, width // 2 :] = 200
    return Image.fromarray(np.stack(channels, axis=2).astype(np.uint8)).convert(mode)


SPECIAL = {3: ("CMYK", "JPEG"), 6: ("P", "PNG"), 12: ("L", "JPEG"), 15: ("RGB", "PNG")}
BROKEN = "class1/13.JPEG"


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """24 and 6 pictures, larger and smaller than any form has them, in every mode; one looks like a picture and is none."""
    folder = tmp_path_factory.mktemp("originals")
    for split, count in (("train", 24), ("val", 6)):
        for number in range(count):
            mode, form = SPECIAL.get(number, ("RGB", "JPEG"))
            size = {1: (90, 120), 2: (700, 640), 4: (290, 460)}.get(number, (340 + 9 * number, 520 - 11 * number))
            where = folder / split / f"class{number % 3}"
            where.mkdir(parents=True, exist_ok=True)
            content = encoded(photograph(*size, mode, number), form, **({"quality": 92} if form == "JPEG" else {}))
            (where / f"{number:02d}.JPEG").write_bytes(content)
    sixteen = folder / "train" / "class2" / "sixteen.png"
    sixteen.write_bytes(encoded(SIXTEEN.resize((400, 300)), "PNG"))
    broken = folder / "train" / BROKEN
    content = broken.read_bytes()
    broken.write_bytes(content[:200] + bytes(len(content) - 202) + b"\xff\xd9")
    (folder / "train" / "class0" / "empty.jpg").write_bytes(b"")
    return folder


@pytest.fixture(scope="session")
def packs(root, tmp_path_factory):
    """{form: a pack that nobody may change}"""
    folder = tmp_path_factory.mktemp("packs")
    for form in FORMS:
        pack.pack(str(root), str(folder / form), settings(form=form, shard_mb=SHARD_MB))
    return {form: folder / form for form in FORMS}


@pytest.fixture
def files(root, tmp_path):
    return lambda split: tree.load(str(root / split), str(tmp_path))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def batches(files, train=True, epoch=0, consumed=0, workers=0):
    """[(images, labels, ids)] of an epoch, or of the rest of one."""
    sampler = EpochSampler(len(files), 4, seed=5) if train else InOrder(len(files), 4)
    if train:
        sampler.start_at(epoch, consumed)
    return list(torch_batches(labelled.Photos(files, SIZE, train, seed=3), sampler, workers))


def joined(some):
    return [torch.cat(parts) for parts in zip(*some)]


def differences(one, other):
    """Of each picture, once their labels and ids have been seen to be the same."""
    (images, labels, ids), (others, *theirs) = joined(one), joined(other)
    assert torch.equal(labels, theirs[0]) and torch.equal(ids, theirs[1])
    return {number: difference(*pair) for number, *pair in zip(ids.tolist(), images, others)}


# --- The same samples ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_it_has_the_samples_of_the_tree(packs, files, form):
    for split in ("train", "val"):
        ours, theirs = packed.load(str(packs[form]), split), files(split)
        assert (ours.names, ours.classes, ours.left_out) == (theirs.names, theirs.classes, theirs.left_out)
        for name in ("labels", "widths", "heights"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name))
        assert not ours.special.any() and ours.describe().endswith(f"; in the form {form}")
    some = packed.load(str(packs[form]), "train").pick(np.array([5, 2]))
    assert some.stored_size(1) == packed.load(str(packs[form]), "train").stored_size(2) and len(some) == 2


@pytest.mark.parametrize("form", FORMS)
def test_batches_have_the_same_ids_and_parts_of_the_pictures_in_the_same_order(packs, files, form):
    ours, theirs = packed.load(str(packs[form]), "train"), files("train")
    found = [differences(batches(ours, epoch=epoch), batches(theirs, epoch=epoch)) for epoch in range(3)]
    assert len(found[0]) == 24 and np.mean([of_one for epoch in found for of_one in epoch.values()]) < TOLERANCE[form]
    few = [
        epoch[number] for epoch in found for number in epoch if max(ours.stored_size(number)) == max(ours.original_size(number))
    ]
    assert form != "raw" or (len(few) > 30 and max(few) < 0.1), "nothing is lost of what is no larger than a pack's"


@pytest.mark.parametrize("form", FORMS)
def test_another_part_would_be_noticed(packs, files, form, monkeypatch):
    scaled = crops.scaled

    def from_the_other_end(window, whole, stored):
        top, left, height, width = scaled(window, whole, stored)
        return stored[0] - top - height, stored[1] - left - width, height, width

    theirs = batches(files("train"))
    monkeypatch.setattr(crops, "scaled", from_the_other_end)
    found = differences(batches(packed.load(str(packs[form]), "train")), theirs)
    assert np.mean(list(found.values())) > 5 * TOLERANCE[form]


def test_a_part_is_scaled_to_the_nearest_pixel():
    draw = np.random.default_rng(0)
    for _ in range(2000):
        whole = tuple(draw.integers(1, 900, 2).tolist())
        stored = tuple(draw.integers(1, side + 1) for side in whole)
        height, width = (draw.integers(1, side + 1) for side in whole)
        top, left = draw.integers(0, whole[0] - height + 1), draw.integers(0, whole[1] - width + 1)
        window = np.array([top, left, height, width])
        found = crops.scaled(window, whole, stored)
        for place in (0, 1):
            share, begin, end = stored[place] / whole[place], found[place], found[place] + found[place + 2]
            assert 0 <= begin < end <= stored[place], (window, whole, stored)
            exact = window[place] * share, (window[place] + window[place + 2]) * share
            near = 0.5 if exact[1] - exact[0] > 1 else 1  # at least one pixel
            assert abs(begin - exact[0]) <= near and abs(end - exact[1]) <= near, (window, whole, stored)
        assert crops.scaled(window, whole, whole) is window


@pytest.mark.parametrize("form", FORMS)
def test_evaluation_sees_every_picture_once_as_torchvision_does(packs, files, form):
    ours, theirs = packed.load(str(packs[form]), "val"), files("val")
    images, labels, ids = joined(batches(ours, train=False))
    assert ids.tolist() == list(range(len(theirs))) and labels.tolist() == theirs.labels.tolist()
    transform = torchvision.transforms.Compose(
        [torchvision.transforms.Resize(decode.short_side(SIZE)), torchvision.transforms.CenterCrop(SIZE)]
    )
    for number, image in enumerate(images):
        reference = np.array(transform(Image.open(theirs.path(number)).convert("RGB")))
        assert difference(image, torch.from_numpy(reference).permute(2, 0, 1)) < TOLERANCE[form]


@pytest.mark.parametrize("form", FORMS)
def test_any_reader_of_webdataset_finds_pictures_of_the_size_that_the_index_says(packs, root, files, form):
    ours, theirs, seen, large = packed.load(str(packs[form]), "train"), files("train"), 0, 0
    for path in packs[form].glob("train-*.tar"):
        with tarfile.open(path) as shard:
            for member in shard:
                number, kind = int(member.name.partition(".")[0]), member.name.partition(".")[2]
                if kind == "cls" or theirs.names[number] == BROKEN:
                    continue
                content = shard.extractfile(member).read()
                picture, whole = Image.open(io.BytesIO(content)), theirs.original_size(number)
                assert content == ours.read(number) and picture.size == ours.stored_size(number)[::-1]
                grey_and_small = form != "raw" and picture.size == whole[::-1] and picture.mode == "L"
                assert picture.mode == "RGB" or grey_and_small
                assert (kind, picture.format) == (("ppm", "PPM") if form == "raw" else ("jpg", "JPEG"))
                seen, large = seen + 1, large + (picture.size != whole[::-1])
                limit, side = (500, max) if form == "raw" else (int(form), min)
                assert side(picture.size) == min(limit, side(whole))
        count = len(np.flatnonzero(ours.shard == int(path.name[6:12])))
        assert count == 1 or path.stat().st_size <= SHARD_MB * (1 << 20) * (1 if form == "raw" else 1.5)
    assert seen == len(theirs) - 1 and large >= (3 if form == "raw" else 15)
    number = theirs.names.index("class1/01.JPEG")  # small already
    assert form == "raw" or ours.read(number) == theirs.read(number)


def test_what_only_pillow_reads_alike_is_read_by_it_once(packs, files):
    """Sixteen bits keep their upper half, CMYK its colours; no loader needs to know."""
    theirs, ours = files("train"), {form: packed.load(str(packs[form]), "train") for form in FORMS}
    numbers = [number for number in np.flatnonzero(theirs.special) if theirs.names[number] != BROKEN]
    assert len(numbers) == 3
    for form in FORMS:
        for number in numbers:
            window = np.array([0, 0, *theirs.original_size(number)])
            some, other = (
                decode.train_picture(
                    of.content(number),
                    of.special[number],
                    crops.scaled(window, of.original_size(number), of.stored_size(number)),
                    False,
                    64,
                )
                for of in (ours[form], theirs)
            )
            assert difference(some, other) < TOLERANCE[form]


def test_of_pixels_nothing_is_decoded_and_only_some_rows_are_read(packs, monkeypatch):
    ours, read = packed.load(str(packs["raw"]), "train"), []
    expected = batches(ours)
    from_file = packed._read_part
    monkeypatch.setattr(
        packed, "_read_part", lambda path, begin, length, _: read.append(length) or from_file(path, begin, length)
    )
    for name in ("decode_with_pillow", "_codec"):
        monkeypatch.setattr(decode, name, lambda *_: pytest.fail("decoded"))
    for one, other in zip(batches(ours), expected):
        assert all(map(torch.equal, one, other))
    assert sum(read) < 0.9 * ours.length.sum()


@pytest.mark.parametrize("form", FORMS)
def test_in_mid_epoch_and_in_worker_processes_the_batches_have_the_same_bits(packs, form):
    ours = packed.load(str(packs[form]), "train")
    whole = batches(ours, epoch=2)
    assert len(whole) == 6
    for consumed, workers in ((8, 0), (16, 1)):
        rest = batches(ours, epoch=2, consumed=consumed, workers=workers)
        assert len(rest) == 6 - consumed // 4
        for one, other in zip(rest, whole[consumed // 4 :]):
            assert all(map(torch.equal, one, other))


# --- What is damaged -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_what_cannot_be_decoded_is_replaced_as_everywhere(packs, files, root, tmp_path, capsys, form):
    ours = packed.load(str(packs[form]), "train")
    number = ours.names.index(BROKEN)
    assert ours.stored_size(number) == (0, 0) and ours.read(number) == (root / "train" / BROKEN).read_bytes()
    _, labels, ids = joined(batches(ours, train=False))
    assert capsys.readouterr().out.count(f"{BROKEN} cannot be decoded (it was damaged when it was packed)") == 1
    _, theirs, their_ids = joined(batches(files("train"), train=False))
    assert torch.equal(labels, theirs) and torch.equal(ids, their_ids) and labels[number] == ours.labels[number + 1]
    run(root, "again", "--form", form)
    said = run(root, "again", "--form", form, "--overwrite", "true").stdout.splitlines()[-1]
    assert said.endswith("left out: empty: 1; packed, though they cannot be decoded: 1")


@pytest.mark.parametrize("form", FORMS)
def test_damage_is_found(packs, tmp_path, capsys, form):
    copied = tmp_path / "pack"
    copied.mkdir()
    for name, content in contents(packs[form]).items():
        (copied / name).write_bytes(content)
    assert "31 images in" in run("--verify", copied).stdout
    ours = packed.load(str(copied), "train")
    flip(ours.shard_path(9), int(ours.offset[9] + ours.length[9] // 2))
    done = run("--verify", copied, check=1)
    assert f"and in it 1 samples: {ours.names[9]}" in done.stdout and "1 of" in done.stderr
    if form != "raw":
        images, labels, _ = joined(batches(ours, train=False))
        assert torch.equal(images[9], images[10]) and labels[9] == ours.labels[10]
        assert f"{ours.names[9]} cannot be decoded" in capsys.readouterr().out
    else:  # of pixels a wrong one is just that, but what is not there is missed
        with open(ours.shard_path(9), "r+b") as shard:
            shard.truncate(int(ours.offset[9]) + 100)
        with pytest.raises(decode.Undecodable):
            decode.decode(ours.content(9), False, (0, 0, *ours.stored_size(9)))


def test_a_disk_that_fails_while_pixels_are_read_is_not_a_damaged_picture():
    """Which would be left out: a start on a mended disk has to use it."""

    def read(_begin, _length):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        decode.decode(decode.Pixels(4, 4, read), False, None)


@pytest.mark.parametrize(
    "form, change",
    [
        ("256", {"arrays": first("stored_widths", 10**6)}),
        ("256", {"arrays": first("stored_heights", -1)}),
        ("256", {"arrays": lambda arrays: {"stored_widths": arrays["stored_widths"].astype(float)}}),
        ("raw", {"arrays": first("length", 1000)}),
        ("raw", {"about": lambda about: {"form": "512"}}),
        ("raw", {"about": lambda about: {"form": ["raw"]}}),
        ("320", {"about": lambda about: {"form": "original"}}),
        ("320", {"about": lambda about: {"format": 1}}),
    ],
)
def test_a_hostile_index_is_refused_in_one_line(packs, tmp_path, form, change):
    (tmp_path / "train-index.npz").write_bytes((packs[form] / "train-index.npz").read_bytes())
    packed.read_index(str(tmp_path / "train-index.npz"), str(packs[form]), "train")
    with_changes(tmp_path / "train-index.npz", **change)
    with pytest.raises(UserError, match=r"train-index.npz is damaged \(.+\): fetch it again") as refused:
        packed.read_index(str(tmp_path / "train-index.npz"), str(packs[form]), "train")
    assert "\n" not in str(refused.value)


# --- Making it -----------------------------------------------------------------------------------------------------------


def test_killed_in_the_middle_it_goes_on_to_the_same_bytes(packs, root, tmp_path):
    options = [str(root), str(tmp_path / "pack"), "--shard_mb", str(SHARD_MB), "--form", "256", "--workers", "1"]
    process = start("-c", ENDLESS.format(reads=22), *options, cwd=tmp_path)
    wait_for((tmp_path / "pack" / ".train-000000.json").exists, process, "a part of the pack")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = (tmp_path / "pack" / "train-000000.tar").stat()
    assert not list((tmp_path / "pack").glob("*.npz"))
    run(*options)
    assert contents(tmp_path / "pack") == contents(packs["256"])
    assert (tmp_path / "pack" / "train-000000.tar").stat().st_ino == kept.st_ino


def test_another_form_in_the_same_folder_is_refused(packs, root, tmp_path):
    options = [root, tmp_path / "pack", "--shard_mb", SHARD_MB]
    run(*options)
    with np.load(tmp_path / "pack" / "train-index.npz") as stored:  # as every version of ours has read it
        assert json.loads(bytes(stored["about"]))["format"] == 1 and not {"stored_widths", "stored_heights"} & set(stored.files)
    assert "has a pack of other photographs or settings" in run(*options, "--form", "raw", check=2).stderr
    run(*options, "--form", "raw", "--overwrite", "true", "--workers", 5)
    assert contents(tmp_path / "pack") == contents(packs["raw"])


@pytest.mark.parametrize("form", in_rehearsal(["256", "raw"], lambda form: form == "256"))
def test_out_of_a_bucket_come_the_same_batches(packs, store, reached, form):
    for name, content in contents(packs[form]).items():
        if name.startswith("val"):
            store.client().put_object(Bucket="data", Key=f"{form}/{name}", Body=content)
    remote, local = passing(f"s3://data/{form}", "val"), packed.load(str(packs[form]), "val")
    for one, other in zip(batches(remote, train=False), batches(local, train=False)):
        assert all(map(torch.equal, one, other))


# --- Whole jobs, and real photographs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", in_rehearsal(["320", "256"], lambda form: True))
def test_the_flagship_trains_on_it(packs, tmp_path, form):
    done = run_job("train_imagenet", tmp_path, "--data_url", packs[form], *SMALL, "--epochs", 1)
    assert f"in the form {form}" in done.stdout
    assert json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])["samples"] == 24


def test_the_flagship_goes_on_in_mid_epoch_to_the_same_bits(packs, tmp_path):
    options = ["--data_url", packs["raw"], *SMALL, "--epochs", 1]
    for folder, stops in (("whole", [[]]), ("stopped", [["--max_steps", 2], []])):
        (tmp_path / folder).mkdir()
        for stop in stops:
            done = run_job("train_imagenet", tmp_path / folder, *options, *stop)
            assert "in the form raw" in done.stdout
    assert "epoch 1, after 16 of its samples" in done.stdout
    assert_same_bits(final_state(tmp_path / "stopped"), final_state(tmp_path / "whole"))


@pytest.mark.rehearsal
@pytest.mark.parametrize("form", FORMS)
def test_the_pixels_of_real_photographs(real, tmp_path, form):
    pack.pack(str(real), str(tmp_path / "pack"), settings(form=form, shard_mb=256.0))
    ours, found = packed.load(str(tmp_path / "pack"), "train"), []
    for number in range(0, len(ours), 5):
        windows, flips = crops.random_windows(np.array([number]), [ours.widths[number]], [ours.heights[number]], 0, 0)
        window = crops.scaled(windows[0], ours.original_size(number), ours.stored_size(number))
        mine = decode.train_picture(ours.content(number), False, window, flips[0], 224)
        original = Image.open(real / "train" / ours.names[number]).convert("RGB")
        found.append(difference(mine, reference_crop(original, windows[0], flips[0], 224)))
    assert len(found) > 40 and np.mean(found) < OF_REAL[form], np.mean(found)
    assert set(forms.FORMS) == {"original", "tiled", *FORMS} == set(packed.FORMATS)
