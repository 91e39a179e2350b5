"""Pictures in folders by class, FOLDER/{train,test}/CLASS/*.jpg, as squares of one size."""

import os
from glob import glob

import numpy as np
import torch
from PIL import Image

from common import storage
from common.errors import UserError
from datasets.loader import DeviceLoader, torch_batches

SIDE, MEAN, STD = 64, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


class Pictures:
    def __init__(self, paths, labels, classes):
        self.paths, self.labels, self.classes = paths, np.array(labels), classes

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, epoch_and_ids):
        _, ids = epoch_and_ids
        pictures = torch.stack([decoded(self.paths[number]) for number in ids])
        return pictures, torch.from_numpy(self.labels[ids]), torch.from_numpy(ids)


def decoded(path):
    with Image.open(path) as picture:
        pixels = np.array(picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def load(args):
    folder = storage.fetch(args.data_url, inputs=args.input_dir)
    if not all(os.path.isdir(os.path.join(folder, name)) for name in ("train", "test")):
        raise UserError(f"{folder} has no train/CLASS and test/CLASS")
    classes = sorted(os.listdir(os.path.join(folder, "train")))
    return split(folder, "train", classes), split(folder, "test", classes)


def split(folder, name, classes):
    found = [(path, label) for label, one in enumerate(classes) for path in sorted(glob(os.path.join(folder, name, one, "*")))]
    return Pictures(*zip(*found), classes)


def loader(data_set, sampler, device, workers=0):
    return DeviceLoader(torch_batches(data_set, sampler, workers), sampler, device, MEAN, STD)
