"""The flagship in the tests: small runs of train_imagenet.py, and photographs for them."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.tools.jobs import (
    NETWORK,
    run_job,
)

SMALL = [*NETWORK, "--image_size", 32, "--batch_size", 8, "--workers", 0, "--epochs", 2, "--warmup", 0, "--lr", 0.8]
SMALL += ["--recipe", "imagenet"]
SYNTHETIC = ["--custom_data", "true", "--max_samples", 64, *SMALL]
EVERYTHING = [*SMALL, "--epochs", 3, "--mixup", 0.2, "--ema", 0.8, "--total_batch", 16, "--ledger", "true", "--keep", 100]


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    """A tree of 48 and 12 pictures of three classes, of many sizes."""
    folder, draw = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for split, count in (("train", 48), ("val", 12)):
        for number in range(count):
            where = folder / split / f"class{number % 3}"
            where.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 60, (36 + number % 7, 40 + number % 5, 3), dtype=np.uint8)
            pixels[:, :, number % 3] += 150
            Image.fromarray(pixels).save(where / f"{number}.JPEG", quality=90)
    return folder


def last_row(folder):
    return json.loads((folder / "out" / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.fixture(scope="session")
def trained(photographs, tmp_path_factory):
    """(folder, log) of a run over the photographs that nobody touched, with everything on."""
    folder = tmp_path_factory.mktemp("trained")
    done = run_job("train_imagenet", folder, "--data_url", photographs, *EVERYTHING)
    return folder, done.stdout
