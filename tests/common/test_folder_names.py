"""A folder may be named as its user likes: not in UTF-8, or with a line end in it, which must not forge a line of the log."""

import os

import pytest
from PIL import Image

from tests.tools import jobs
from tests.tools.jobs import NETWORK, TINY, command, environment

ODD = os.fsdecode(b"odd\xff\nerror: forged")


def run(folder, job, *options):
    done = jobs.run(command(job, *options), cwd=folder, env=environment())
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert not [line for line in done.stdout.splitlines() if line.startswith("error: forged")]
    return done.stdout


def test_a_run_whose_folder_has_an_odd_name_goes_on(tmp_path):
    (tmp_path / ODD).mkdir()
    options = [*TINY, "--output_dir", tmp_path / ODD, "--ledger", "true"]
    assert "done: " in run(tmp_path, "train", *options, "--epochs", 1)
    assert "going on from" in run(tmp_path, "train_ddp", *options, "--nproc_per_node", 2)


def test_photographs_in_folders_with_odd_names_are_trained_on_and_evaluated(tmp_path):
    for split in ("train", "val"):
        for label in (ODD, "plain"):
            (folder := tmp_path / ODD / split / label).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (40, 40), (number * 20, 0, 0)).save(folder / f"{number}.jpg")
            (folder / f"{ODD}.jpg").write_bytes(b"")
    small = [*NETWORK, "--image_size", 32, "--batch_size", 4, "--workers", 0, "--epochs", 1]
    options = [*small, "--data_url", tmp_path / ODD, "--output_dir", tmp_path / "out" / ODD]
    assert "done: " in run(tmp_path, "train_imagenet", *options)
    weights = tmp_path / "out" / ODD / "epoch_1.pth"
    assert "accuracy=" in run(tmp_path, "train_imagenet", *options, "--evaluate", "true", "--weights", weights)


@pytest.mark.parametrize("job, option", [("train", "--workers"), ("train_ddp", "--nproc_per_node"), ("train_ddp", "--workers")])
def test_999999_workers_are_refused_in_one_line(tmp_path, job, option):
    done = jobs.run(command(job, *TINY, option, 999_999), cwd=tmp_path, env=environment())
    assert done.returncode == 2 and f"argument {option}: '999999' is not a whole number" in done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())
