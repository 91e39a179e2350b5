"""docs/from.md, the Template repository: its commands and options, and its input iterator and pipeline for DALI."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from common.ranks import norms
from datasets.dali import ExternalInputIterator, externalSourcePipeline
from launch import blocks
from tests.datasets.test_pairs import pixels_of, write
from tests.pages.from_page import assert_each_is_checked, typed_here
from tests.tools.jobs import ROOT, TINY, environment, run_forked
from tests.tools.objectstore import free_port

TITLE = "The Template repository"
SMALL = ["--width", "8", "--epochs", "1", "--max_steps", "1"]
DDP = "`CUDA_VISIBLE_DEVICES=0,1 python -m torch.distributed.launch --nproc_per_node=2 train_DDP.py`"
DALI = "`python loader_DALI.py --data_source /path/to/dataset`"
LAYOUT = "`/dataset/{train,test}/{img,gt}/SUB/IMAGE`"
ITERATOR = "`ExternalInputIterator(data_source, batch_size, shuffle)`"
NORMS = "`model = nn.SyncBatchNorm.convert_sync_batchnorm(model)`"
PIPELINE = "`externalSourcePipeline(batch_size, num_threads, device_id, seed, external_data, resize, crop)`"
LOADER_OPTIONS = "`--batch_size`, `--num_workers`, `--resize`, `--crop`, `--seed`"


def picture(number):
    """No two have the same height."""
    return pixels_of(number, 40 + number, 24 if number == 3 else 50 - number)


@pytest.fixture(params=[("blurry", "sharp")])
def folder(request, tmp_path):
    """10 training and 3 test pairs in the Template's layout; both partners are the same picture, one narrower than the crop."""
    for split, count in (("train", 10), ("test", 3)):
        for number in range(count):
            for side in request.param:
                write(tmp_path / "deblur" / split / side / f"scene{number % 2}" / f"{number:02d}.png", picture(number))
    return tmp_path


def run_here(line, folder, *options):
    """The line's command with these options; the pairs are those of the folder."""
    words = [word.replace("/data/deblur", f"{folder}/deblur") for word in typed_here(TITLE, line)[0]]
    assert words[0] == "python"
    return run_forked([ROOT / words[1], *words[2:], *options], folder).stdout


# --- The scripts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["train.py", "train_DP.py", "train_amp.py"])
def test_a_script_is_the_job_of_its_name(script):
    assert typed_here(TITLE, f"`python {script}`") == [["python", f"jobs/{script.lower()}"]]
    assert (ROOT / "jobs" / script.lower()).exists()


@pytest.mark.rehearsal
def test_a_script_of_several_cards_is_started_by_the_same_launcher(tmp_path):
    variable, python, *words = typed_here(TITLE, DDP)[0]
    assert (variable, python) == ("CUDA_VISIBLE_DEVICES=0,1", "python") and words[-1] == "jobs/train_ddp.py"
    words = [sys.executable, *words[:2], "--master_port", str(free_port()), *words[2:-1], str(ROOT / words[-1]), *TINY]
    env = environment(CUDA_VISIBLE_DEVICES="0,1")  # this machine has neither of them
    done = subprocess.run([*words, "--epochs", "1"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "rank 0 of 2" in done.stdout and done.stdout.count("done: best") == 1, done.stderr


def test_the_loader_is_part_of_a_job(folder):
    printed = run_here("`python loader.py`", folder, *SMALL, "--crop", 32, "--result_dir", folder / "out")
    assert re.search(r"^time: .*\(of which waiting for data \S+ s, ", printed, re.MULTILINE)


def test_the_loader_through_dali_is_an_option(folder):
    assert typed_here(TITLE, DALI)[0][-2:] == ["--data_backend", "dali-gpu"]
    options = ["--data_backend", "dali-cpu", "--crop", 32, "--result_dir", folder / "out"]
    assert "done: " in run_here(DALI, folder, *SMALL, *options)
    pairs = ["--data_source", folder / "deblur", "--result_dir", folder / "none"]
    done = run_forked([ROOT / "jobs" / "train_restore.py", *pairs, "--data_backend", "dali-gpu"], folder, check=2)
    assert "take dali-cpu" in done.stderr


@pytest.mark.parametrize("folder", [("img", "gt")], indirect=True)
def test_its_options_and_its_layout_are_read(folder):
    ((name,),) = typed_here(TITLE, "`--result_dir`")
    options = {"batch_size": 5, "num_workers": 1, "resize": 36, "crop": 32, "seed": 1234}
    assert [[f"--{option}"] for option in options] == typed_here(TITLE, LOADER_OPTIONS)
    words = [word for option, value in options.items() for word in (f"--{option}", value)]
    ((source, _),) = typed_here(TITLE, LAYOUT)
    job = ROOT / "jobs" / "train_restore.py"
    out = folder / "result" / "new"
    run_forked([job, source, folder / "deblur", *words, name, out, *SMALL], folder)
    used = json.loads((out / "checkpoints" / "000000000005.json").read_text())["arguments"]
    meant = {"batch_size": 5, "workers": 1, "resize": 36, "crop": 32, "seed": 1234, "data_url": f"{folder}/deblur"}
    assert {option: used[option] for option in meant} == meant
    (folder / "deblur" / "train" / "gt" / "scene0" / "02.png").unlink()
    done = run_forked([job, source, folder / "deblur", *words, name, folder / "other"], folder, check=2)
    assert "img/scene0/02.png has no partner" in done.stderr


def test_what_was_marked_as_new_is_a_block(capsys):
    (words,) = typed_here(TITLE, "comments `# new #`")
    assert words[:4] == ["python", "-m", "launch", "blocks"]
    assert blocks.main([words[4], str(ROOT / words[5])]) == 0
    assert "torch.nn.parallel.DistributedDataParallel(model" in capsys.readouterr().out


# --- Its iterator and pipeline ---------------------------------------------------------------------------------------------


def number_of(content):
    """Which picture these bytes are: PNG has its height in bytes 20 to 23."""
    return int.from_bytes(bytes(content[20:24]), "big") - 40


def test_the_iterator_gives_files_in_a_new_order_each_epoch(folder):
    assert typed_here(TITLE, ITERATOR) == [["from", "datasets.dali", "import", "ExternalInputIterator"]]
    eii = ExternalInputIterator(data_source=str(folder / "deblur"), batch_size=4, shuffle=True)
    orders = []
    for _ in range(3):
        batches = [([number_of(img) for img in imgs], [number_of(gt) for gt in gts]) for imgs, gts in eii]
        assert [len(imgs) for imgs, _ in batches] == [4, 4, 2] and all(imgs == gts for imgs, gts in batches)
        orders.append([number for imgs, _ in batches for number in imgs])
    assert len(eii) == 10 and all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    imgs, gts = next(iter(eii))
    assert isinstance(imgs, list) and isinstance(gts, list) and imgs[0].dtype == np.uint8
    assert number_of(eii.next()[0][0]) not in map(number_of, imgs)
    as_they_are = ExternalInputIterator(str(folder / "deblur"), 4, shuffle=False)
    for _ in range(2):
        found = [number_of(img) for imgs, _ in as_they_are for img in imgs]
        assert found == [*range(0, 10, 2), *range(1, 10, 2)]


def test_the_ranks_of_an_iterator_share_the_pairs(folder):
    ranks = [ExternalInputIterator(str(folder / "deblur"), 4, True, rank=rank, world_size=3) for rank in range(3)]
    for _ in range(2):
        found = [[number_of(img) for imgs, _ in rank for img in imgs] for rank in ranks]
        assert [len(numbers) for numbers in found] == [3, 3, 3] and len(set(sum(found, []))) == 9


def theirs():
    """The pipeline as the Template defines it, but for the decoder's device."""
    from nvidia.dali import fn
    from nvidia.dali.pipeline import pipeline_def

    def transform(imgs, resize, crop, crop_pos, flip_p):
        imgs = fn.decoders.image(imgs, device="cpu")
        imgs = fn.resize(imgs, resize_y=resize)
        imgs = fn.crop(imgs, crop=(crop, crop), crop_pos_x=crop_pos[0], crop_pos_y=crop_pos[1])
        imgs = fn.flip(imgs, horizontal=flip_p[0], vertical=flip_p[1])
        imgs = fn.transpose(imgs, perm=[2, 0, 1])
        imgs = imgs / 127.5 - 1
        return imgs

    @pipeline_def
    def pipeline(external_data, resize, crop):
        imgs, gts = fn.external_source(source=external_data, num_outputs=2)
        crop_pos = (fn.random.uniform(range=(0.0, 1.0)), fn.random.uniform(range=(0.0, 1.0)))
        flip_p = (fn.random.coin_flip(), fn.random.coin_flip())
        imgs = transform(imgs, resize, crop, crop_pos, flip_p)
        gts = transform(gts, resize, crop, crop_pos, flip_p)
        return imgs, gts

    return pipeline


def epochs_of(make, folder, crop, seed=1234, count=3, shuffle=True):
    """[the batches of an epoch]"""
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    eii = ExternalInputIterator(data_source=str(folder / "deblur"), batch_size=4, shuffle=shuffle)
    pipe = make(batch_size=4, num_threads=1, device_id=None, seed=seed, external_data=eii, resize=36, crop=crop)
    dgi = DALIGenericIterator(
        pipe, output_map=["imgs", "gts"], last_batch_padded=True, last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True
    )
    return [[(data[0]["imgs"], data[0]["gts"]) for data in dgi] for _ in range(count)]


@pytest.mark.parametrize("whose", ["theirs", "ours"])
def test_the_pipeline_gives_each_pair_once_an_epoch_both_pictures_alike(folder, whose):
    assert typed_here(TITLE, PIPELINE) == [["from", "datasets.dali", "import", "externalSourcePipeline"]]
    make, crop = (theirs(), 16) if whose == "theirs" else (externalSourcePipeline, 32)
    epochs = epochs_of(make, folder, crop)
    for batches in epochs:
        assert [len(imgs) for imgs, _ in batches] == [len(gts) for _, gts in batches] == [4, 4, 2]
        for imgs, gts in batches:
            assert imgs.shape[1:] == (3, crop, crop) and imgs.dtype == torch.float32 and torch.equal(imgs, gts)
            assert -1 <= imgs.min() < -0.5 < 0.5 < imgs.max() <= 1
    whole = [torch.cat([imgs for imgs, _ in batches]) for batches in epochs]
    assert not torch.equal(whole[0], whole[1]) and not torch.equal(whole[1], whole[2])


def test_the_seed_of_the_pipeline_decides_the_crops_and_flips(folder):
    def first(seed):
        return torch.cat([imgs for imgs, _ in epochs_of(externalSourcePipeline, folder, 32, seed, 1, shuffle=False)[0]])

    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))


def test_every_norm_that_torch_converts_is_over_all_ranks(monkeypatch):
    assert typed_here(TITLE, NORMS) == [["--sync_bn", "true"]]

    def network():
        inner = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm2d(2), torch.nn.GroupNorm(1, 2))
        return torch.nn.Sequential(inner, torch.nn.BatchNorm3d(2), torch.nn.InstanceNorm2d(2))

    def norms_of(model, kind):
        return [name for name, module in model.named_modules() if isinstance(module, kind)]

    theirs = norms_of(torch.nn.SyncBatchNorm.convert_sync_batchnorm(network()), torch.nn.SyncBatchNorm)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert theirs == norms_of(norms.synchronised(network()), norms.SynchronisedNorm) == ["0.0", "0.1", "1"]


CHECKS = {
    NORMS: test_every_norm_that_torch_converts_is_over_all_ranks,
    "`python train.py`": test_a_script_is_the_job_of_its_name,
    "`python train_DP.py`": test_a_script_is_the_job_of_its_name,
    "`python train_amp.py`": test_a_script_is_the_job_of_its_name,
    DDP: test_a_script_of_several_cards_is_started_by_the_same_launcher,
    "`python loader.py`": test_the_loader_is_part_of_a_job,
    DALI: test_the_loader_through_dali_is_an_option,
    LOADER_OPTIONS: test_its_options_and_its_layout_are_read,
    "`--result_dir`": test_its_options_and_its_layout_are_read,
    LAYOUT: test_its_options_and_its_layout_are_read,
    ITERATOR: test_the_iterator_gives_files_in_a_new_order_each_epoch,
    PIPELINE: test_the_pipeline_gives_each_pair_once_an_epoch_both_pictures_alike,
    "comments `# new #`": test_what_was_marked_as_new_is_a_block,
}


def test_each_line_of_the_page_is_run():
    assert_each_is_checked(TITLE, CHECKS)
