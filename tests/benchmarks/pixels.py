"""What each form of a pack costs: bytes, and how far its pictures are from torchvision's reference transforms of the originals.

    python -m tests.benchmarks.pixels --data FOLDER       a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG

The mean absolute difference of the pixels, of 255: of random crops of the training set, each against Pillow's crop of the same
part of the original, and of the validation set against Resize(256) and CenterCrop(224).
"""

import argparse
import contextlib
import io
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torchvision.transforms.functional import resized_crop

from datasets import crops, imagenet
from datasets.packs import packed
from launch.pack import command as pack
from launch.pack.forms import FORMS

SIZE, EPOCHS = 224, 3


def originals(files, folder):
    for number in range(len(files)):
        with Image.open(folder / files.names[number]) as picture:
            yield number, picture.convert("RGB")


def away(picture, reference):
    return (picture.int() - torch.from_numpy(np.array(reference)).permute(2, 0, 1).int()).abs().float().mean().item()


def of_crops(files, folder):
    data, found = imagenet.Photos(files, SIZE, True, seed=0), []
    for number, original in originals(files, folder):
        for epoch in range(EPOCHS):
            (window,), (flip,) = crops.random_windows(*(np.array([of]) for of in (number, *original.size)), 0, epoch)
            ours = data[epoch, np.array([number])][0][0]
            top, left, height, width = map(int, window)
            found.append(away(ours.flip(2) if flip else ours, resized_crop(original, top, left, height, width, [SIZE, SIZE])))
    return found


def of_evaluation(files, folder):
    reference = torchvision.transforms.Compose([torchvision.transforms.Resize(256), torchvision.transforms.CenterCrop(SIZE)])
    data = imagenet.Photos(files, SIZE, False, seed=0)
    return [away(data[0, np.array([number])][0][0], reference(original)) for number, original in originals(files, folder)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG")
    data = parser.parse_args().data
    print("| form | KB an image | random crops: mean | worst | evaluation: mean | worst |\n|---|---|---|---|---|---|")
    for form in FORMS:
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.redirect_stdout(io.StringIO()):
                pack.main([str(data), folder, "--form", form])
            train, val = (packed.load(folder, split) for split in ("train", "val"))
            cells = [f"{value:.2f}" for found in (of_crops(train, data / "train"), of_evaluation(val, data / "val"))
                     for value in (np.mean(found), max(found))]  # fmt: skip
            kilobytes = np.mean(np.concatenate([train.length, val.length])) / 1000
        print(f"| {form} | {kilobytes:.0f} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
