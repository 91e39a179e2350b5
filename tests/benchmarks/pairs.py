"""Pairs of pictures on one core: our two loaders beside the two of the Template repository.

    python -m tests.benchmarks.pairs [--rounds 5]       (make bench)

The forms take turns, each a forked process with one thread. All resize to 256 and crop 224, over the same 400 JPEG pairs of
640 x 360, kept in memory. The Template's own forms end in float32, ours in float32 on the CPU, too.
"""

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from datasets import pairs
from datasets.sampler import EpochSampler
from tests.benchmarks.base import machine
from tests.benchmarks.forked import measure, table

BATCH, RESIZE, CROP, COUNT = 8, 256, 224, 400
FOLDER = []  # filled by main, before the forks


def fill(folder):
    draw = np.random.default_rng(0)
    for number in range(COUNT):
        small = draw.integers(0, 255, (45, 80, 3), np.uint8)
        sharp = Image.fromarray(small).resize((640, 360), Image.Resampling.BICUBIC)
        for side, picture in (("sharp", sharp), ("blurry", sharp.reduce(2).resize((640, 360)))):
            path = folder / "train" / side / "scene" / f"{number:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path, quality=95)


def ours(backend="pytorch"):
    data = pairs.Pairs(str(FOLDER[0] / "train"), RESIZE, CROP, True, seed=0)
    return pairs.loader(
        data, EpochSampler(len(data), BATCH, seed=0), torch.device("cpu"), 0 if backend == "pytorch" else 1, backend
    )


def ours_dali():
    return ours("dali-cpu")


class TemplatePairs(torch.utils.data.Dataset):
    """As its loader.py does it: PIL, one geometry for both."""

    def __init__(self):
        self.paths = list(zip(*(sorted((FOLDER[0] / "train" / side).glob("*/*.*")) for side in ("blurry", "sharp"))))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, number):
        from torchvision.transforms import functional as F

        images = [F.resize(Image.open(path).convert("RGB"), RESIZE) for path in self.paths[number]]
        top, left = random.randint(0, images[0].height - CROP), random.randint(0, images[0].width - CROP)
        across, down = random.random() < 0.5, random.random() < 0.5
        found = []
        for image in images:
            image = F.crop(image, top, left, CROP, CROP)
            image = F.hflip(image) if across else image
            image = F.vflip(image) if down else image
            found.append(F.to_tensor(image) * 2 - 1)
        return found


def template_loader():
    return torch.utils.data.DataLoader(TemplatePairs(), BATCH, shuffle=True)


class TemplateIterator:
    def __init__(self):
        self.paths = TemplatePairs().paths
        random.shuffle(self.paths)

    def __iter__(self):
        self.place = 0
        return self

    def __next__(self):
        if self.place + BATCH > len(self.paths):
            raise StopIteration
        chosen = self.paths[self.place : self.place + BATCH]
        self.place += BATCH
        return tuple([np.fromfile(pair[side], dtype=np.uint8) for pair in chosen] for side in (0, 1))


def template_dali():
    """As its loader_DALI.py does it, on the CPU: geometry by DALI's own generators, float32 made there."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    def transform(images, place, flips):
        images = fn.decoders.image(images, output_type=types.RGB)
        images = fn.resize(images, resize_y=RESIZE)
        images = fn.crop(images, crop=(CROP, CROP), crop_pos_x=place[0], crop_pos_y=place[1])
        images = fn.flip(images, horizontal=flips[0], vertical=flips[1])
        return fn.transpose(images, perm=[2, 0, 1]) / 127.5 - 1

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, seed=1234)
    def pipeline():
        both = fn.external_source(source=TemplateIterator(), num_outputs=2, cycle="raise")
        place = [fn.random.uniform(range=(0.0, 1.0)) for _ in range(2)]
        flips = [fn.random.coin_flip() for _ in range(2)]
        return tuple(transform(images, place, flips) for images in both)

    return DALIGenericIterator(pipeline(), ["imgs", "gts"], last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True)


FORMS = {
    "the Template's loader.py (PIL)": template_loader,
    "ours, torch": ours,
    "the Template's loader_DALI.py": template_dali,
    "ours, dali-cpu": ours_dali,
}


CLAIMS = [
    ("ours, torch", "the Template's loader.py (PIL)", "CPU"),
    ("ours, dali-cpu", "the Template's loader.py (PIL)", "CPU"),
    ("ours, dali-cpu", "the Template's loader_DALI.py", "CPU"),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="only these")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        FOLDER.append(Path(folder))
        fill(FOLDER[0])
        found = {form: [] for form in options.forms}
        for _ in range(options.rounds):
            for form in found:
                found[form].append(measure(FORMS[form]))
    print(f"{machine()}; {options.rounds} rounds, median (range)\n\n{table(found, 'pairs', CLAIMS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
