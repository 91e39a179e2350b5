"""What earlier versions have written is still read. tests/formats has what they made of synthetic images:

0.1.0/run/      jobs/train.py --custom_data true --max_samples 64 --batch_size 16 --width 1 --epochs 3 --max_steps 6 --ledger true
0.1.0/pack-*/   launch pack of photos/ (noise, eight small JPEGs) --shard_mb 0.02, with --form original and raw
0.1.0/index/    the index of photos/train, which had one file more, empty
0.2.0/run/      jobs/train_exact.py with these options, --batch_size 8 --shares 2 --keep 1; its packs are those of 0.1.0, byte for byte
0.3.0/run/      the same, with the weights of the first epoch; its packs are those of 0.1.0, too
0.3.0/bucket/   the same in a bucket, of two starts, the second one on an empty disk
0.3.0/imports.txt  what its jobs, and the scripts of its pages, import of ours
0.4.0/run/      jobs/train_ddp.py with the options of 0.1.0/run, --nproc_per_node 2 --batch_size 8 --keep 1
0.4.0/own/      own.py, the script of a user, --nproc_per_node 2 --max_steps 5: gradients of two processes wait for their update
0.4.0/shards/   the pictures of photos/ in shards of WebDataset, whose labels are numbers, after launch pack --index
0.4.0/imports.txt  as that of 0.3.0
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from common.address import FETCHING
from common.checkpoints import checkpoint
from common.checkpoints.pretrained import about_weights, load_weights, read_weights
from common.models import resnet18
from common.storage.index import Index, Parts
from datasets.packs import packed
from datasets.photos import decode, tree
from datasets.photos import files as photo_files
from tests.tools.jobs import ROOT, command, run_forked, run_job
from tests.tools.stores import store_environment

OLD = ROOT / "tests" / "formats" / "0.1.0"


def test_they_are_small():
    assert sum(path.stat().st_size for path in OLD.parent.rglob("*") if path.is_file()) < 750_000


OPTIONS = ["--custom_data", "true", "--max_samples", 64, "--width", 1, "--epochs", 3, "--ledger", "true", "--keep", 3]
RUNS = {"0.1.0": ("train", "--batch_size", 16), "0.2.0": ("train_exact", "--batch_size", 8)}
RUNS["0.3.0"] = RUNS["0.2.0"]
RUNS["0.4.0"] = ("train_ddp", "--batch_size", 16)


@pytest.mark.parametrize("version", RUNS)
def test_a_run_goes_on_where_it_stopped(tmp_path, version):
    shutil.copytree(OLD.parent / version / "run", tmp_path / "out")
    job, *options = RUNS[version]
    done = run_job(job, tmp_path, *OPTIONS, *options)
    went_on(OLD.parent / version / "run", tmp_path / "out", done.stdout)


def test_a_script_goes_on_with_the_gradients_of_each_of_its_processes(tmp_path):
    """To the weights of a start that nobody has stopped."""
    before, after = OLD.parent / "0.4.0" / "own", tmp_path / "out"
    shutil.copytree(before, after)
    words = [OLD.parent / "0.4.0" / "own.py", "--nproc_per_node", 2, "--ledger", "true", "--output_dir", after]
    done = run_forked(words, tmp_path, {"PYTHONPATH": str(ROOT)})
    assert "going on from" in done.stdout and "epoch 2, after 16 of its samples, step 5" in done.stdout
    assert json.loads((after / "state.json").read_text()) == {"finished": True, "epoch": 3, "epochs": 3}
    weights = read_weights(str(after / "epoch_3.pth"))
    assert weights["weight"].tolist()[0] == pytest.approx([-0.457656, 0.259471, -0.202806, -0.294940], abs=1e-5)
    assert weights["bias"].tolist() == pytest.approx([-0.254272], abs=1e-5)


@pytest.mark.parametrize(
    "version, count, one",
    [
        ("0.3.0", 41, "from common.checkpoints.pretrained import about_weights, fit, load_weights, local_weights"),
        ("0.4.0", 46, "from common.start import start"),
    ],
)
def test_a_copy_of_a_job_finds_what_it_imports(version, count, one):
    lines = (OLD.parent / version / "imports.txt").read_text().splitlines()
    assert len(lines) == count and one in lines
    for line in lines:
        exec(line, {})


@pytest.mark.usefixtures("reachable")
@pytest.mark.parametrize("version, folder", [("0.2.0", "run"), ("0.3.0", "bucket")])
def test_a_run_in_a_bucket_goes_on_where_it_stopped(tmp_path, store, version, folder):
    before, run = OLD.parent / version / folder, f"runs/{version}"
    for path in filter(Path.is_file, before.rglob("*")):
        name = f"{run}/{path.relative_to(before).as_posix()}"
        store.client().put_object(Bucket="data", Key=name, Body=path.read_bytes())
    job, *options = RUNS[version]
    words = [*command(job, *OPTIONS, *options)[1:], "--output_dir", f"s3://data/{run}"]
    done = run_forked(words, tmp_path, store_environment())
    went_on(before, tmp_path / f"output_dir/s3/data/{run}", done.stdout)
    rows = store.client().get_object(Bucket="data", Key=f"{run}/metrics.jsonl")["Body"].read()
    assert len(rows.splitlines()) == 3


def test_weights_are_read_and_so_is_what_lies_beside_them():
    path = str(OLD.parent / "0.3.0" / "run" / "epoch_1.pth")
    about = about_weights(path)
    assert about["epoch"] == 1 and about["classes"] == [f"pattern {number}" for number in range(10)]
    network = resnet18(num_classes=10, width=about["width"])
    assert load_weights(network, path) == [] and network.state_dict().keys() == read_weights(path).keys()


def went_on(before, after, printed):
    assert "going on from" in printed and "epoch 2, after 32 of its samples, step 6" in printed
    rows = (after / "metrics.jsonl").read_text().splitlines()
    assert rows[0] == (before / "metrics.jsonl").read_text().splitlines()[0] and len(rows) == 3
    for path in before.glob("*.jsonl"):
        assert (after / path.name).read_bytes().startswith(path.read_bytes()), path.name
    assert json.loads((after / "state.json").read_text()) == {"finished": True, "epoch": 3, "epochs": 3}
    check = [sys.executable, str(ROOT / "tests" / "check_ledger.py"), "--samples", "64", "--global_batch", "16"]
    ledger = subprocess.run([*check, str(after)], capture_output=True, text=True)
    assert ledger.returncode == 0, ledger.stdout


def test_a_checkpoint_and_its_manifest_are_read_and_a_changed_one_is_refused(tmp_path):
    path = OLD / "run" / "checkpoints" / "000000000096.pt"
    state, about = checkpoint.read(str(path))
    assert about["samples_seen"] == 96 and set(state) == {"model", "optimizer", "run"}
    for name in ("000000000096.pt", "000000000096.json"):
        shutil.copy(path.parent / name, tmp_path)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / path.name).write_bytes(damaged)
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.read(str(tmp_path / path.name))


@pytest.mark.parametrize("form", ["original", "raw"])
@pytest.mark.parametrize("split, count", [("train", 6), ("val", 2)])
def test_a_pack_has_the_pictures_that_were_packed(form, split, count):
    files = packed.load(str(OLD / f"pack-{form}"), split)
    assert len(files) == count and files.classes == ["cat", "dog"] and files.form == form
    for number, name in enumerate(files.names):
        photo = (OLD / "photos" / split / name).read_bytes()
        if form == "original":
            assert files.read(number) == photo
        else:
            pixels = decode.decode(files.content(number), False, None)
            assert np.array_equal(pixels.permute(1, 2, 0).numpy(), np.asarray(decode.decode_with_pillow(photo)))
    assert all(files.find_damage(number) is None for number in range(len(files.shards)))


@pytest.mark.parametrize("split, labels", [("train", [0, 0, 0, 1, 1, 1]), ("val", [0, 1])])
def test_an_index_of_shards_of_others_has_the_right_class_of_each_picture(split, labels):
    files = packed.load(str(OLD.parent / "0.4.0" / "shards"), split)
    assert files.classes == ["cat", "dog"] and files.labels.tolist() == labels
    photos = [photo for name in files.classes for photo in sorted((OLD / "photos" / split / name).iterdir())]
    assert [files.read(number) for number in range(len(files))] == [photo.read_bytes() for photo in photos]


def test_a_pack_is_made_ready_by_the_same_command_without_packing_anything_again(tmp_path):
    shutil.copytree(OLD / "photos", tmp_path / "photos")
    (tmp_path / "photos" / "train" / "cat" / "broken.jpg").touch()
    shutil.copytree(OLD / "pack-original", tmp_path / "pack")
    words = [sys.executable, "-m", "launch", "pack", tmp_path / "photos", tmp_path / "pack", "--shard_mb", "0.02"]
    done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # other times of the files make other shards, of the same bytes
    for name in ("train-000000.tar", "val-000000.tar"):
        assert (tmp_path / "pack" / name).read_bytes() == (OLD / "pack-original" / name).read_bytes()


def test_the_index_of_a_tree_is_believed_where_the_folder_is_still_as_it_was(tmp_path):
    """Its signature has the folder's name and times, which are others here; everything else is as it was written."""
    shutil.copytree(OLD / "photos" / "train", folder := tmp_path / "train")
    (folder / "cat" / "broken.jpg").touch()
    classes = photo_files.classes(str(folder))
    with np.load(OLD / "index" / "train.npz") as stored:
        arrays = dict(stored)
    assert json.loads(bytes(arrays["signature"]))[0] == tree.FORMAT
    arrays["signature"] = tree._bytes(signature := tree._signature(str(folder), list(classes.items())))
    os.utime(folder / "cat" / "broken.jpg", ns=(0, int(arrays["changed"][0])))
    np.savez(tmp_path / "index.npz", **arrays)
    files = tree._read(str(tmp_path / "index.npz"), str(folder), list(classes), signature)
    assert files.names == [f"{label}/{number}.jpg" for label in ("cat", "dog") for number in range(3)]
    assert files.labels.tolist() == [0, 0, 0, 1, 1, 1] and files.left_out == {"empty": ["cat/broken.jpg"]}


def test_what_was_fetched_is_not_fetched_again(tmp_path):
    """The lines that 0.1.0 wrote of two files and of a large object of which two parts had come."""
    for name, content in (("a.bin", b"12345"), ("gone.bin", b"1")):
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, ns=(1_700_000_000_000_000_000,) * 2)
    line = '{"name": "%s", "size": %s, "etag": "%s", "mtime": 1700000000000000000}\n'
    lines = "\n" + line % ("a.bin", 5, "827ccb0eea8a706c4c34a16891f84e7b") + line % ("gone.bin", 1, "c4ca") + '{"name": "half'
    (tmp_path / FETCHING).mkdir()
    (tmp_path / FETCHING / "index.jsonl").write_text(lines)
    index = Index(str(tmp_path))
    assert index.has("a.bin", SimpleNamespace(size=5, etag="827ccb0eea8a706c4c34a16891f84e7b"))
    assert not index.has("a.bin", SimpleNamespace(size=5, etag="another")) and index.names() == {"a.bin", "gone.bin"}
    index.close()
    item = SimpleNamespace(size=20, etag="e")
    (tmp_path / "large.part").write_bytes(bytes(20))
    (tmp_path / "large.part.json").write_text('{"etag": "e", "size": 20, "part": 8}\n0\n2\n')
    parts = Parts(str(tmp_path / "large"), item, 8)
    assert parts.fetched == {0, 2} and parts.count == 3
    parts.close()
