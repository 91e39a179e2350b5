"""A folder of one's own pictures, FOLDER/CLASS: which of them are held out, what of them is named, how they are learnt."""

import json
import re
import shutil

import numpy as np
import pytest

from common import arguments
from common.errors import UserError
from datasets import imagenet, recipe
from datasets.photos import splits, tree
from tests.tools import pictures
from tests.tools.jobs import FIGURES, NETWORK, module_of, run_job


@pytest.fixture
def shapes(tmp_path, monkeypatch):
    """Twenty pictures of each of three classes."""
    monkeypatch.chdir(tmp_path)
    pictures.make("shapes", "own", 60)
    return tmp_path / "own"


def loaded(folder, *words):
    """(training, validation)"""
    args = arguments.parse(module_of("train_imagenet").options(), ["--data_url", str(folder), *words], environ={})
    return tuple(data.tree for data in imagenet.load(args)[1:])


def test_a_fifth_of_each_class_is_held_out_and_one_line_says_so(shapes, capsys):
    train, val = loaded(shapes)
    assert np.bincount(train.labels).tolist() == [16, 16, 16] and np.bincount(val.labels).tolist() == [4, 4, 4]
    assert sorted(train.names + val.names) == sorted(tree.load(str(shapes)).names)
    said = capsys.readouterr().out
    assert f"{shapes} has no train and val: 12 of its images, a fifth of each class, are held out" in said
    assert "warning" not in said


def test_the_same_ones_are_held_out_in_every_start_until_the_seed_is_another(shapes):
    held = loaded(shapes)[1].names
    shutil.rmtree("input_dir")
    assert loaded(shapes)[1].names == held != loaded(shapes, "--seed", "1")[1].names
    pictures.make("shapes", "more", 66)
    for path in shapes.parent.glob("more/*/002*.jpg"):  # two more of each class
        shutil.copy(path, shapes / path.parent.name)
    assert len(set(loaded(shapes)[1].names) & set(held)) >= 9


def test_classes_of_almost_no_pictures_are_named_and_one_picture_is_trained_on(shapes, capsys):
    for path in sorted((shapes / "circle").iterdir())[1:]:
        path.unlink()
    for path in sorted((shapes / "square").iterdir())[2:]:
        path.unlink()
    train, val = loaded(shapes)
    assert np.bincount(train.labels).tolist() == [1, 1, 16] and np.bincount(val.labels, minlength=3).tolist() == [0, 1, 4]
    assert "warning: 2 classes have 2 pictures or fewer: circle (1), square (2)" in capsys.readouterr().out


def test_one_picture_of_each_class_leaves_none_to_validate_with(shapes):
    for path in [path for path in shapes.glob("*/*") if path.name != "0000.jpg"]:
        path.unlink()
    with pytest.raises(UserError, match="has one picture of each class, so there is none to validate with"):
        loaded(shapes)


@pytest.mark.parametrize("divided", [False, True])
def test_a_picture_on_both_sides_is_named(shapes, capsys, divided):
    train, val = loaded(shapes)
    if divided:
        for split, part in (("train", train), ("val", val)):
            for number in range(len(part)):
                (shapes / split / part.names[number]).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(part.path(number), shapes / split / part.names[number])
        for name in pictures.SHAPES:
            (shapes / name).rmdir()
        train, val = loaded(shapes)
    capsys.readouterr()
    shutil.copy(train.path(3), val.path(5))  # a name that is on the other side stays there
    loaded(shapes)
    said = capsys.readouterr().out
    assert "warning: 1 picture of the validation, byte for byte, is in the training, too" in said
    assert f"{val.path(5)} is {train.path(3)}" in said


def test_a_picture_that_has_gone_since_it_was_indexed_does_not_end_the_job(shapes):
    train, val = loaded(shapes)
    shutil.copy(train.path(3), val.path(5))
    (shapes / train.names[0]).unlink()
    assert splits.copies(train, val) == [(val.path(5), train.path(3))]


def test_other_names_for_train_and_val_are_not_taken_for_classes(shapes):
    for names in (("training", "validation"), ("Train", "Val")):
        for split in names:
            shutil.copytree(shapes, shapes.parent / names[0] / "data" / split)
        with pytest.raises(UserError, match=f"data has a folder {names[0]} and no train and val: give those names"):
            loaded(shapes.parent / names[0] / "data")
    with pytest.raises(UserError, match=r"Train has one folder, data, and so one class: give the folder that has one for each"):
        loaded(shapes.parent / "Train")
    assert splits.is_unsplit(str(shapes)) and not splits.is_unsplit(str(shapes.parent / "none"))


def test_files_that_have_no_name_of_a_picture_are_counted(shapes, capsys, monkeypatch):
    for path in sorted((shapes / "circle").iterdir()):
        path.rename(path.with_suffix(".gif"))
    (shapes / "square" / "notes.TXT").write_text("of the pictures")
    (shapes / "square" / ".DS_Store").write_text("of a system")
    loaded(shapes)
    said = capsys.readouterr().out
    assert (
        "left out, named .gif: 20 (the first is circle/0000.gif); left out, named .txt: 1 (the first is square/notes.TXT)\n"
        in said
    )
    assert "warning: 1 class has 2 pictures or fewer: circle (0)" in said
    (shapes / "square" / "notes.TXT").write_text("changed")
    monkeypatch.setattr(tree, "judge", None)
    loaded(shapes)  # from the index, which still holds


def test_a_folder_that_is_not_there_is_called_so(shapes):
    with pytest.raises(UserError, match=r"--data_url \S+/shape does not exist: give the folder that holds one with pictures"):
        loaded(shapes.parent / "shape")


def test_what_runs_have_written_into_the_folder_is_no_class(shapes, monkeypatch):
    monkeypatch.chdir(shapes)
    words = ["--data_url", ".", *NETWORK, "--image_size", 32, "--workers", 0, "--epochs", 1]
    run_job("train_imagenet", shapes, *words)  # in out
    assert (shapes / "out").is_dir() and (shapes / "input_dir").is_dir()
    assert loaded(shapes)[0].classes == list(pictures.SHAPES)


# --- The recipe of a small folder -------------------------------------------------------------------------------------------


def settled(pictures, *words, ranks=1, before=None):
    """(arguments, what is said)"""
    args = arguments.parse(module_of("train_imagenet").options(), list(words), environ={})
    return recipe.with_recipe(args, pictures, pictures, ranks, before or {})


def test_a_small_folder_has_settings_of_its_own_which_one_line_spells_out():
    args, line = settled(480, "--epochs", "20")
    assert line.startswith("480 pictures are few, so this run has ")
    told = dict(re.findall(r"--(\w+) (\S+)", line.partition(" (")[0]))
    assert told.keys() == {*recipe.SMALL, "lr", "lr_batch", "weight_decay", "batch_size", "warmup"}
    assert all(str(vars(args)[name]) == value or float(value) == vars(args)[name] for name, value in told.items())
    assert args.recipe == "small" and args.warmup == 6 and args.batch_size == 32
    assert {name for name in told if name not in args.changed} <= {"label_smoothing"}  # as ImageNet's


def test_the_settings_of_imagenet_are_kept_for_many_pictures_or_where_they_are_asked_for():
    plain, line = settled(recipe.SMALL_SET + 1)
    assert line is None and plain.recipe == "imagenet" and (plain.optimizer, plain.lr, plain.batch_size) == ("sgd", 0.1, 256)
    asked, line = settled(480, "--recipe", "imagenet")
    assert line is None and {**vars(asked), "changed": 0, "given": 0} == {**vars(plain), "changed": 0, "given": 0}
    assert settled(480, "--recipe", "nvidia")[0].schedule == "step"
    assert settled(10**6, "--recipe", "small")[0].optimizer == "adamw"


def test_what_is_given_counts_also_where_it_is_the_default():
    words = ["--lr", "0.1", "--resize", "short", "--crop_scale", "0.08", "--batch-size=256", "--warmup", "5"]
    args, line = settled(480, *words)
    assert (args.lr, args.resize, args.crop_scale, args.batch_size, args.warmup) == (0.1, "short", 0.08, 256, 5)
    assert args.optimizer == "adamw" and not any(name in line for name in ("--lr ", "--resize", "--crop_scale", "--warmup"))


def test_the_rate_is_for_the_batch_and_for_the_optimizer():
    assert settled(480, "--batch_size", "128")[0].lr == 2 * settled(480)[0].lr
    one, four = (settled(480, "--optimizer", "sgd", *more)[0].lr for more in ([], ["--total_batch", "128"]))
    assert four == 4 * one > settled(480)[0].lr


@pytest.mark.parametrize("pictures, batch", [(1, 1), (6, 2), (40, 4), (100, 8), (256, 32), (5000, 32)])
def test_an_epoch_of_few_pictures_has_several_steps(pictures, batch):
    assert settled(pictures)[0].batch_size == batch


def test_more_ranks_share_the_batch_and_in_exact_training_its_shares():
    assert [settled(480, ranks=ranks)[0].batch_size for ranks in (1, 2, 8, 64, 480)] == [32, 16, 4, 2, 1]
    for ranks in (1, 2, 4):
        assert settled(480, "--exact", "true", "--shares", "4", ranks=ranks)[0].batch_size == 8


def test_a_run_keeps_its_recipe_also_where_it_was_begun_before_there_were_several():
    first = vars(settled(480, "--weights", "epoch_3.pth", "--epochs", "10")[0])
    again = settled(480, "--epochs", "20", ranks=2, before=first)[0]
    assert all(vars(again)[name] == first[name] for name in ("lr", "warmup", "optimizer", "resize"))
    assert 2 * again.batch_size == first["batch_size"]  # the same together
    assert settled(480, "--lr", "0.5", before=first)[0].lr == 0.5
    old = settled(480, before={"recipe": None, "optimizer": "sgd"})
    assert old[1] is None and old[0].optimizer == "sgd" and old[0].recipe == "imagenet"


@pytest.mark.parametrize("name", recipe.RECIPES)
def test_a_run_goes_on_with_the_settings_of_its_recipe_where_it_is_not_given_again(name):
    first = vars(settled(10**6, "--recipe", name, "--weight_decay", "0.25")[0])
    again, line = settled(10**6, before=first)
    assert {option: vars(again)[option] for option in recipe.RECIPES[name]} == {
        option: first[option] for option in recipe.RECIPES[name]
    }
    assert again.weight_decay == 0.25 and line.startswith(f"this run goes on with --recipe {name}, which has ")
    other, line = settled(10**6, "--recipe", name, before=first)
    assert line is None and other.weight_decay == recipe.RECIPES[name]["weight_decay"]
    assert settled(10**6, "--recipe", "imagenet", before=first)[0].weight_decay == 5e-5


def test_a_run_of_a_small_folder_goes_on_with_its_settings(shapes):
    words = ["--data_url", shapes, *NETWORK, "--image_size", 32, "--workers", 0, "--epochs", 2]
    run_job("train_imagenet", shapes.parent, *words, "--max_steps", 5)
    about = json.loads(sorted(shapes.parent.glob("out/checkpoints/*.json"))[-1].read_text())
    manifest, given = about["arguments"], {"data_url", "arch", "image_size", "workers", "epochs", "max_steps", "output_dir"}
    assert (manifest["recipe"], manifest["optimizer"], manifest["resize"]) == ("small", "adamw", "whole")
    assert about["asked"] == {name: manifest[name] for name in given}
    log = run_job(
        "train_imagenet", shapes.parent, *words, "--epochs", 4, "--max_steps", 6
    ).stdout  # which alone would have another warm-up
    assert "going on from" in log and "global batch 4" in log
    assert "warning: going on with other settings than before: epochs 2 -> 4\n" in log
    later = json.loads(sorted(shapes.parent.glob("out/checkpoints/*.json"))[-1].read_text())["arguments"]
    assert {**later, "max_steps": 0, "epochs": 0} == {**manifest, "max_steps": 0, "epochs": 0}


# --- What comes of it -------------------------------------------------------------------------------------------------------


@pytest.mark.rehearsal
def test_shapes_are_learnt_in_less_than_a_minute(tmp_path):
    """Of one core; the accuracy after two minutes is in tests/benchmarks/results/pictures.md."""
    pictures.make("shapes", str(tmp_path / "own"), 480)
    words = ["--data_url", tmp_path / "own", "--arch", "resnet18", "--image_size", 48, "--epochs", 9, "--workers", 0]
    log = run_job("train_imagenet", tmp_path, *words).stdout
    assert "nothing is learnt" not in log
    assert max(row["accuracy"] for row in rows_of(tmp_path)) >= 0.9


def rows_of(folder):
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def test_where_nothing_is_learnt_one_line_says_so_and_the_mistakes_are_files(tmp_path):
    """The labels are drawn anew: there is nothing to learn."""
    shapes = tmp_path / "own"
    pictures.make("shapes", str(shapes), 180)
    labels = np.random.default_rng(0).permutation(np.repeat(pictures.SHAPES, 60))
    for number, (path, label) in enumerate(zip(sorted(shapes.glob("*/*")), labels)):
        path.rename(shapes / label / f"again{number}.jpg")
    words = [
        "--data_url",
        shapes,
        *NETWORK,
        "--image_size",
        32,
        "--workers",
        0,
        "--epochs",
        5,
        "--run_epochs",
        1,
        "--warmup",
        0,
    ]
    (shapes / "circle" / "empty.jpg").touch()
    log = run_job("train_imagenet", shapes.parent, *words, env=FIGURES).stdout
    (line,) = [line for line in log.splitlines() if "nothing is learnt" in line]
    assert line.startswith("warning: after 1 of 5 epochs nothing is learnt: an accuracy of 0.") and "--weights FILE" in line
    mistakes = json.loads((shapes.parent / "out" / "report.json").read_text())["mistakes"]["worst"]
    assert mistakes and all((shapes / one["file"]).exists() and one["file"].startswith(one["class"]) for one in mistakes)
    page = (shapes.parent / "out" / "report.html").read_text()
    assert mistakes[0]["file"] in page and "Left out, empty: 1, the first is circle/empty.jpg" in page
    assert re.search(r'<bdi>square</bdi></th><td class="n">\d+</td><td class="n">\d+</td></tr>', page)


def test_a_job_of_ones_own_needs_none_of_the_flagships_options_to_go_on_with_its_pictures(shapes, monkeypatch):
    """As a copy of the flagship as it was in 0.2.0."""
    parser = arguments.general_parser("A job.", data=imagenet.DATA, workers=None)
    imagenet.add_options(parser)
    for name in ("arch", "weights", "evaluate"):
        parser.add_argument(f"--{name}", default="", help="as it was")
    monkeypatch.setattr(imagenet, "_previous_settings", lambda args: {"best_by": "accuracy"})
    args, train_set, _ = imagenet.load(arguments.parse(parser, ["--data_url", str(shapes)], environ={}))
    assert len(train_set) and args.best_by == "accuracy"


def test_weights_that_are_not_there_are_missed_before_anything_is_said_of_them(shapes):
    words = ["--data_url", shapes, *NETWORK, "--evaluate", "true", "--weights", "none.pth"]
    done = run_job("train_imagenet", shapes.parent, *words, check=2)
    assert "warning" not in done.stdout + done.stderr and "--weights none.pth does not exist" in done.stderr


def test_an_evaluation_holds_out_what_the_run_did(shapes):
    """Not what another seed would, most of which it was trained on; of weights whatever the folder: what lies beside them says how."""
    words, network = ["--data_url", shapes, "--workers", 0, "--epochs", 1], [*NETWORK, "--image_size", 32]
    run_job("train_imagenet", shapes.parent, *words, *network, "--seed", 1)
    run_job("train_imagenet", shapes.parent, *words, *network, "--evaluate", "true")
    found = json.loads((shapes.parent / "out" / "evaluation.json").read_text())
    assert found["loss"] == pytest.approx(rows_of(shapes.parent)[-1]["loss"], rel=1e-5)
    (shapes.parent / "out" / "evaluation.json").unlink()
    elsewhere = shapes.parent / "elsewhere"
    elsewhere.mkdir()
    for name in ("epoch_1.pth", "epoch_1.json"):
        (shapes.parent / "out" / name).rename(elsewhere / name)
    about = json.loads((elsewhere / "epoch_1.json").read_text())
    assert about["classes"] == list(pictures.SHAPES) and about["metrics"].items() <= rows_of(shapes.parent)[0].items()
    words += ["--evaluate", "true", "--weights", elsewhere / "epoch_1.pth"]
    done = run_job("train_imagenet", shapes.parent, *words)
    assert f"--arch {NETWORK[1]} --image_size 32 --resize whole --interpolation bilinear --seed 1" in done.stdout
    found = json.loads((shapes.parent / "out" / "evaluation.json").read_text())
    assert found["loss"] == pytest.approx(rows_of(shapes.parent)[0]["loss"], rel=1e-5) and found["epoch"] == 1
    (elsewhere / "epoch_1.json").unlink()
    done = run_job("train_imagenet", shapes.parent, *words, *network)
    assert "warning: nothing says what " in done.stdout and "were trained on: some of these pictures, perhaps" in done.stdout


def test_an_evaluation_cuts_the_pictures_as_the_run_did(shapes):
    """Not as so few pictures are cut where nobody says otherwise; also where `val` alone is there."""
    words = ["--data_url", shapes, *NETWORK, "--image_size", 32, "--workers", 0]
    run_job("train_imagenet", shapes.parent, *words, "--epochs", 1, "--recipe", "imagenet", "--batch_size", 8)
    words[1] = shapes.parent / "later"
    _, held = loaded(shapes)
    for number in range(len(held)):
        (words[1] / "val" / held.names[number]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(held.path(number), words[1] / "val" / held.names[number])
    done = run_job("train_imagenet", shapes.parent, *words, "--evaluate", "true")
    assert "warning" not in done.stdout
    found = json.loads((shapes.parent / "out" / "evaluation.json").read_text())
    assert found["loss"] == pytest.approx(rows_of(shapes.parent)[-1]["loss"], rel=1e-5)
