"""A run that goes on with other data than it began with: other classes are refused, other samples named in a warning."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from common.checkpoints import restore
from common.errors import UserError
from datasets.cifar10 import ImageArrays
from datasets.packs import packed
from datasets.photos import pairs, tree
from launch.pack import command
from tests.tools.jobs import NETWORK, run_job

WORDS = [*NETWORK, "--image_size", 32, "--batch_size", 4, "--workers", 0, "--recipe", "imagenet"]
OTHERS = "warning: these are not the samples that the run was trained on before, though as many"


def photographs(folder, classes=("cat", "dog", "fox"), seed=0):
    """Make six pictures of each class and split, all of one size: only names and bytes differ."""
    shutil.rmtree(folder, ignore_errors=True)
    draw = np.random.default_rng(seed)
    for split in ("train", "val"):
        for name in classes:
            (folder / split / name).mkdir(parents=True)
            for number in range(6):
                pixels = draw.integers(0, 255, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.jpg")
    return folder


def test_other_classes_are_refused_and_other_pictures_of_the_same_are_named(tmp_path):
    data = photographs(tmp_path / "data")
    words = ["--data_url", data, *WORDS]

    def trained(*more, check=0):
        done = run_job("train_imagenet", tmp_path, *words, *more, check=check)
        return done.stdout + done.stderr

    trained("--max_steps", 2)
    command.main([str(data), str(tmp_path / "pack")])
    assert OTHERS not in trained("--max_steps", 3, "--data_url", tmp_path / "pack", "--data_backend", "packed")

    photographs(data, classes=("ant", "bee", "cow"))
    log = trained("--max_steps", 5, check=2)
    assert "list of classes is ant, bee, cow (3, " in log and ") here but cat, dog, fox (3, " in log
    assert "going on" not in log
    log = trained("--evaluate", "true", check=2)
    assert "was trained on other classes: cat, dog, fox (3, " in log and ") there, and ant, bee, cow (3, " in log

    photographs(data, seed=1)
    log = trained("--epochs", 1)
    assert "step 3\n" in log and OTHERS in log
    assert "give --data_url with those of before to go on with them, or --resume never --overwrite true" in log
    assert OTHERS not in trained("--epochs", 2)

    photographs(data, classes=("ant", "bee", "cow"))
    log = trained("--evaluate", "true", "--weights", tmp_path / "out" / "epoch_1.pth", check=2)
    assert "epoch_1.pth was trained on other classes: cat, dog, fox (3, " in log


def test_what_a_run_before_did_not_note_is_not_asked_of_it():
    ours = {"model": "M", "list of classes": "cat (1, x)"}
    restore.refuse_another_run({"identity": {"model": "M"}}, ours, "1.pt")
    restore.refuse_another_run({"identity": {"model": "M"}, "classes": []}, ours, "1.pt")
    with pytest.raises(UserError, match=r"list of classes is cat \(1, x\) here but ant, bee \(2, "):
        restore.refuse_another_run({"identity": {"model": "M"}, "classes": ["ant", "bee"]}, ours, "1.pt")
    restore.refuse_another_run({"identity": ours}, {"model": "M"}, "1.pt")
    with pytest.raises(UserError, match="model is N here but M there"):
        restore.refuse_another_run({"identity": ours}, {**ours, "model": "N"}, "1.pt")


def test_an_evaluation_may_have_the_first_classes_of_the_weights_alone():
    restore.refuse_other_classes(["cat", "dog", "output 2"], ["cat", "dog"], "w.pth")
    restore.refuse_other_classes([], ["cat"], "w.pth")
    for ours in (["dog", "cat"], ["dog"], ["cat", "dog", "output 2", "fox"]):
        with pytest.raises(UserError, match=r"w\.pth was trained on other classes: cat, dog, output 2 \(3, "):
            restore.refuse_other_classes(["cat", "dog", "output 2"], ours, "w.pth")


def test_the_digest_of_photographs_is_that_of_their_pack_and_of_another_place(tmp_path):
    data = photographs(tmp_path / "data")
    shutil.copytree(data, tmp_path / "copy")
    files = tree.load(str(data / "train"), str(tmp_path)).digest()
    assert tree.load(str(tmp_path / "copy" / "train"), str(tmp_path)).digest() == files
    for form in ("original", "raw"):
        command.main([str(data), str(tmp_path / form), "--form", form])
        pack = packed.load(str(tmp_path / form), "train").digest()
        assert pack == (files if form == "original" else {"list": files["list"]})
    photographs(data, seed=1)
    changed = tree.load(str(data / "train"), str(tmp_path)).digest()
    assert changed["list"] == files["list"] and changed["bytes"] != files["bytes"]
    for path in (data / "train" / "cat" / "0.jpg", data / "train" / "fox" / "5.jpg", data / "train" / "dog" / "3.jpg"):
        before = tree.load(str(data / "train"), str(tmp_path)).digest()["bytes"]
        path.write_bytes((data / "val" / "cat" / "0.jpg").read_bytes())
        assert tree.load(str(data / "train"), str(tmp_path)).digest()["bytes"] != before, "of few pictures, each counts"
    (data / "train" / "cat" / "0.jpg").rename(data / "train" / "cat" / "7.jpg")
    assert tree.load(str(data / "train"), str(tmp_path)).digest()["list"] != files["list"]


def test_the_digest_of_arrays_has_each_label_and_each_pixel():
    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 255, (100, 3, 32, 32), dtype=np.uint8), draw.integers(0, 9, 100)
    known = ImageArrays(images, labels, []).digest()
    assert ImageArrays(images.copy(), labels.copy(), []).digest() == known
    images[50, 1, 2, 3] += 1
    assert ImageArrays(images, labels, []).digest() == {**known, "bytes": ImageArrays(images, labels, []).digest()["bytes"]}
    assert ImageArrays(images, labels, []).digest()["bytes"] != known["bytes"]
    labels[50] += 1
    assert ImageArrays(images, labels, []).digest()["list"] != known["list"]
    assert torch.equal(ImageArrays(images, labels, []).images, torch.from_numpy(images))


def test_the_digest_of_pairs_has_their_names_sizes_and_bytes(tmp_path):
    for side in ("blurry", "sharp"):
        photographs(tmp_path / side, classes=("a",))
        shutil.rmtree(tmp_path / side / "val")
    known = pairs.Pairs(str(tmp_path), 0, 11, True, 0).digest()
    assert pairs.Pairs(str(tmp_path), 0, 32, True, 7).digest() == known
    photographs(tmp_path / "sharp", classes=("a",), seed=1)
    shutil.rmtree(tmp_path / "sharp" / "val")
    changed = pairs.Pairs(str(tmp_path), 0, 11, True, 0).digest()
    assert changed["list"] == known["list"] and changed["bytes"] != known["bytes"]


def test_a_checkpoint_notes_the_classes_and_the_digests(tmp_path):
    run_job("train", tmp_path, "--custom_data", "true", "--max_samples", 64, "--batch_size", 32, "--max_steps", 1, "--width", 4)
    about = json.loads(next((tmp_path / "out" / "checkpoints").glob("*.json")).read_text())
    assert {*about["data_digests"]} == {"list", "bytes"} and about["identity"]["list of classes"].startswith(
        "pattern 0, pattern 1"
    )
