"""Pairs of pictures: partners, one geometry for both, two loaders with the same result; and the job that learns from them."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from common.errors import TrainingFailed, UserError
from common.models.restorer import Restorer, psnr, ssim
from datasets import pairs, synthetic
from datasets.photos.pairs import Pairs
from datasets.sampler import EpochSampler, InOrder
from tests.tools.jobs import assert_same_bits, final_state, run_job, saved, start, wait_for

CPU = torch.device("cpu")
SMALL = ["--custom_data", "true", "--max_samples", 48, "--workers", 0, "--width", 8, "--epochs", 2]


def write(path, pixels, **how):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **how)


def pixels_of(number, height, width):
    return (
        np.random.default_rng(number)
        .integers(0, 255, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
        .repeat(4, 0)
        .repeat(4, 1)[:height, :width]
    )


@pytest.fixture
def folder(tmp_path):
    """12 training and 5 test pairs of many sizes, one narrower than the crop; both partners are the same picture."""
    for split, count in (("train", 12), ("test", 5)):
        for number in range(count):
            pixels = pixels_of(number, 40 + number, 24 if number == 3 else 50 - number)
            for side in ("blurry", "sharp"):
                write(tmp_path / split / side / f"scene{number % 2}" / f"{number:02d}.png", pixels)
    return tmp_path


def opened(folder, train=True, resize=36, crop=32, seed=0):
    return Pairs(str(folder / ("train" if train else "test")), resize, crop, train, seed)


# --- Partners ------------------------------------------------------------------------------------------------------------


def test_partners_have_the_same_path_also_under_the_other_names(folder):
    found = opened(folder)
    assert found.names == [f"scene{half}/{number:02d}.png" for half in (0, 1) for number in range(half, 12, 2)]
    for side, other in (("blurry", "img"), ("sharp", "gt")):
        (folder / "train" / side).rename(folder / "train" / other)
    assert opened(folder).names == found.names


@pytest.mark.parametrize("side, other", [("blurry", "sharp"), ("sharp", "blurry")])
def test_a_picture_without_its_partner_is_named(folder, side, other):
    for name, more in (("scene0/02.png", ""), ("scene1/05.png", ", and 1 more have none")):
        (folder / "train" / other / name).unlink()
        with pytest.raises(
            UserError,
            match=rf"{side}/scene0/02\.png has no partner \S+{other}/scene0/02\.png{more}: add what is missing",
        ):
            opened(folder)


def test_a_pair_that_cannot_be_one_is_left_out_and_said(folder, capsys):
    write(folder / "train" / "blurry" / "scene0" / "04.png", pixels_of(4, 20, 20))
    (folder / "train" / "sharp" / "scene0" / "06.png").write_bytes(b"")
    assert len(opened(folder)) == 10
    said = capsys.readouterr().out
    assert "scene0/04.png is left out: they are of 20x20 and 46x44 pixels" in said
    assert "scene0/06.png is left out: the sharp one is empty" in said


def test_a_folder_without_pairs_is_refused(tmp_path):
    with pytest.raises(UserError, match="has neither the folders blurry and sharp nor img and gt"):
        opened(tmp_path)
    (tmp_path / "train" / "blurry").mkdir(parents=True)
    (tmp_path / "train" / "sharp").mkdir()
    with pytest.raises(UserError, match="holds no pair that can be read"):
        opened(tmp_path)


# --- One geometry --------------------------------------------------------------------------------------------------------


def batches_of(data, sampler, backend, workers=0):
    loader = pairs.loader(data, sampler, CPU, workers, backend)
    return [(loader.ids.tolist(), blurry.clone(), sharp.clone()) for blurry, sharp in loader]


def shard(count, batch_size, rank=0, world_size=1, epoch=0, consumed=0):
    sampler = EpochSampler(count, batch_size, seed=5)
    sampler.shard(rank, world_size)
    sampler.start_at(epoch, consumed)
    return sampler


@pytest.mark.parametrize("seed", [0, 1, 77])
@pytest.mark.parametrize("backend", ["pytorch", "dali-cpu"])
def test_the_same_picture_as_both_partners_gives_equal_tensors(folder, backend, seed):
    data = opened(folder, seed=seed)
    for epoch in range(3):
        for _, blurry, sharp in batches_of(data, shard(len(data), 4, epoch=epoch), backend):
            assert blurry.shape == (4, 3, 32, 32) and torch.equal(blurry, sharp)
            assert blurry.min() >= -1 and blurry.max() <= 1 and blurry.min() < -0.5 and blurry.max() > 0.5


@pytest.mark.parametrize("train", [True, False])
def test_both_loaders_give_the_same_in_the_same_order(folder, train):
    data = opened(folder, train)
    for epoch in range(2):
        sampler = shard(len(data), 4, epoch=epoch) if train else InOrder(len(data), 4)
        ours, theirs = batches_of(data, sampler, "pytorch"), batches_of(data, sampler, "dali-cpu", workers=1)
        assert [batch[0] for batch in ours] == [batch[0] for batch in theirs]
        for mine, other in zip(ours, theirs):
            assert (mine[1] - other[1]).abs().mean() < 2 / 127.5  # two resizes
    assert len(ours[-1][0]) == (4 if train else 1)  # the last one of an evaluation is as long as it comes out


def test_as_they_are_the_crops_are_pixels_of_the_pictures(folder):
    data = opened(folder, resize=0)
    for ids, blurry, _ in batches_of(data, shard(len(data), 4), "pytorch"):
        for number, found in zip(ids, blurry):
            if data.widths[number] >= 32:
                (_,), ((top, left),), ((down, across),) = data.geometry(np.array([number]), 0)
                with Image.open(folder / "train" / "sharp" / data.names[number]) as picture:
                    whole = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
                wanted = whole[:, top : top + 32, left : left + 32]
                wanted = wanted.flip([axis for axis, flip in ((1, down), (2, across)) if flip])
                assert torch.allclose((found + 1) * 127.5, wanted.float(), atol=1e-3)


def test_the_geometry_depends_on_seed_epoch_and_pair_alone_and_the_crop_always_fits(folder):
    data = opened(folder)
    ids = np.arange(12)
    sizes, corners, flips = data.geometry(ids, 3)
    again = data.geometry(ids[[7, 2]], 3)
    assert all(np.array_equal(some, whole[[7, 2]]) for some, whole in zip(again, (sizes, corners, flips)))
    assert (sizes >= 32).all() and (corners >= 0).all() and (corners + 32 <= sizes).all()
    wide = data.widths * 36 / data.heights >= 32
    assert (
        3 < wide.sum() < 12
        and (sizes[wide][:, 0] == 36).all()
        and sizes[list(data.names).index("scene1/03.png")].tolist() == [57, 32]
    )
    assert any(not np.array_equal(data.geometry(ids, epoch)[1], corners) for epoch in (0, 1))
    draws = np.concatenate([data.geometry(ids, epoch)[2] for epoch in range(50)])
    assert (abs(draws.mean(axis=0) - 0.5) < 0.1).all()


@pytest.mark.parametrize("backend", ["pytorch", "dali-cpu"])
def test_shards_are_disjoint_and_a_resume_begins_in_the_middle(folder, backend):
    data = opened(folder)
    whole = {number: image for ids, images, _ in batches_of(data, shard(12, 4), backend) for number, image in zip(ids, images)}
    parts = {}
    for rank in (0, 1):
        for ids, images, _ in batches_of(data, shard(12, 2, rank, 2), backend):
            assert not parts.keys() & set(ids)
            parts.update(zip(ids, images))
    assert parts.keys() == whole.keys() and all(torch.equal(parts[number], whole[number]) for number in whole)
    rest = batches_of(data, shard(12, 4, consumed=4), backend)
    assert [ids for ids, _, _ in rest] == [ids for ids, _, _ in batches_of(data, shard(12, 4), backend)][1:]


def test_what_cannot_be_decoded_is_replaced_by_the_next_pair_and_said_once(folder, capfd):
    path = folder / "test" / "blurry" / "scene1" / "01.png"
    content = path.read_bytes()
    for backend in ("pytorch", "dali-cpu"):
        path.write_bytes(content)
        data = opened(folder, train=False)
        path.write_bytes(content[:60] + bytes(len(content) - 80) + content[-20:])
        place = data.names.index("scene1/01.png")
        for _ in range(2):
            ((_, blurry, sharp),) = batches_of(data, InOrder(5, 5), backend)
            assert all(torch.equal(images[place], images[(place + 1) % 5]) for images in (blurry, sharp))
        assert capfd.readouterr().out.count("scene1/01.png cannot be decoded") == 1, "it is said once"
    for name in data.names:
        (folder / "test" / "blurry" / name).write_bytes(b"\x89PNG\r\n\x1a\n damaged")
    with pytest.raises(TrainingFailed, match="10 pairs in a row cannot be decoded"):
        batches_of(data, InOrder(5, 5), "pytorch")


# --- Network and measures --------------------------------------------------------------------------------------------------


def test_what_pillow_says_of_a_pair_names_it(folder, capfd):
    """A picture with transparent colours, which Pillow remarks on."""
    seen = Image.open(folder / "train" / "sharp" / "scene0" / "00.png").convert("P")
    for side in ("blurry", "sharp"):
        seen.save(folder / "train" / side / "scene0" / "00.png", transparency=bytes(range(200)))
    data = Pairs(str(folder / "train"), 0, 16, True, 0)
    for _ in range(2):
        data[0, np.arange(len(data))]
    said, told = capfd.readouterr()
    (line,) = said.splitlines()
    assert line.startswith(f"warning: {folder}/train/*/scene0/00.png: its decoder says: Palette images") and not told


def test_the_network_changes_nothing_before_it_has_learned_and_takes_any_size():
    network = Restorer()
    assert 200_000 < sum(parameter.numel() for parameter in network.parameters()) < 400_000
    images = torch.rand(2, 3, 31, 46) * 2 - 1
    assert torch.equal(network(images), images)


def test_psnr_and_ssim():
    images = torch.rand(3, 3, 24, 20, dtype=torch.float64)
    assert torch.allclose(psnr(images, images + 0.1), torch.full((3,), 20.0, dtype=torch.float64))
    assert torch.allclose(ssim(images, images), torch.ones(3, dtype=torch.float64))
    noisy = (images + 0.2 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    place = np.arange(11) - 5
    window = np.outer(*[np.exp(-(place**2) / 4.5) / np.exp(-(place**2) / 4.5).sum()] * 2)
    values = []
    for x, y in zip(images[0].numpy(), noisy[0].numpy()):  # by the formula, window by window
        for top in range(24 - 10):
            for left in range(20 - 10):
                a, b = (side[top : top + 11, left : left + 11] for side in (x, y))
                mean_a, mean_b = (window * a).sum(), (window * b).sum()
                var_a, var_b = (window * (a - mean_a) ** 2).sum(), (window * (b - mean_b) ** 2).sum()
                both = (window * (a - mean_a) * (b - mean_b)).sum()
                values.append(
                    (2 * mean_a * mean_b + 1e-4) * (2 * both + 9e-4) / ((mean_a**2 + mean_b**2 + 1e-4) * (var_a + var_b + 9e-4))
                )
    assert ssim(images, noisy)[0].item() == pytest.approx(np.mean(values), abs=1e-9)


def test_the_synthetic_blur_is_the_known_motion():
    blurry, sharp = (
        np.array(Image.open(__import__("io").BytesIO(content))).astype(float)
        for content in synthetic.blurry_and_sharp(3, "train", 72)
    )
    assert np.abs(blurry - sharp).mean() > 3
    steps = range(-3, 4)
    middle = slice(10, 62)
    moved = np.mean([np.roll(sharp, (step // 2, step), axis=(0, 1)) for step in steps], axis=0)
    assert np.abs(moved - blurry)[middle, middle].max() < 1.01


# --- The job -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("restored")
    return folder, run_job("train_restore", folder, *SMALL, "--ledger", "true").stdout


@pytest.mark.rehearsal
def test_a_minute_on_a_cpu_gains_two_db_over_the_blurry_pictures(tmp_path):
    done = run_job("train_restore", tmp_path, "--custom_data", "true", "--epochs", 12, "--workers", 0)
    untouched = float(re.search(r"the blurry pictures themselves: psnr=(\S+)", done.stdout)[1])
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["psnr"] > untouched + 2 and rows[-1]["ssim"] > rows[0]["ssim"]


def test_a_run_leaves_examples_and_says_where_the_time_went(finished):
    folder, log = finished
    assert sorted(path.name for path in (folder / "out" / "examples").iterdir()) == ["epoch_1.png", "epoch_2.png"]
    with Image.open(folder / "out" / "examples" / "epoch_2.png") as strip:
        assert strip.size == (3 * 48, 4 * 48)
    assert re.search(
        r"time: parameters \S+ s, data \S+ s, model \S+ s, training \S+ s \(of which waiting for data \S+ s, ", log
    )
    assert "done: best psnr" in log
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows[1].keys() == {"epoch", "steps", "samples", "train_loss", "psnr", "ssim", "loss"}


def test_killed_and_started_again_it_ends_with_the_same_bits(finished, tmp_path):
    process = start(tmp_path, *SMALL, "--save_steps", 1, "--keep", 50, job="train_restore")
    wait_for(saved(tmp_path, 64), process, "the eighth step")
    process.kill()
    process.wait()
    done = run_job("train_restore", tmp_path, *SMALL)
    assert re.search(r"going on from \S+: epoch 2, after \d+ of its samples", done.stdout), done.stdout
    assert_same_bits(final_state(tmp_path), final_state(finished[0]))


def test_two_processes_evaluate_every_pair_once(finished, tmp_path):
    options = [*SMALL, "--batch_size", 4, "--nproc_per_node", 2]
    run_job("train_restore", tmp_path, *options, "--data_backend", "dali-cpu")
    rows = [json.loads((folder / "out" / "metrics.jsonl").read_text().splitlines()[-1]) for folder in (tmp_path, finished[0])]
    assert rows[0]["samples"] == rows[1]["samples"] and rows[0]["psnr"] == pytest.approx(rows[1]["psnr"], abs=0.05)


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "there are no pairs: give --data_url"),
        (["--custom_data", "true", "--crop", 100], "--crop 100 is too large: the synthetic pictures have 72 pixels a side"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, options, message):
    done = run_job("train_restore", tmp_path, *options, check=2)
    assert message in done.stderr and "Traceback" not in done.stderr
