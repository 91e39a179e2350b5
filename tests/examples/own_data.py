"""Arrays as a data set: FOLDER/{train,test}/images.npy, uint8 (N, 3, H, W), and labels.npy, int64 (N,)."""

import os

import numpy as np
import torch

from common import storage
from common.errors import UserError
from datasets.loader import DeviceLoader, torch_batches

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)  # of each channel, for pixels from 0 to 1


class Arrays:
    classes = ["dark", "bright"]

    def __init__(self, folder):
        self.images = np.load(os.path.join(folder, "images.npy"), mmap_mode="r")
        self.labels = np.load(os.path.join(folder, "labels.npy"))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, epoch_and_ids):
        _, ids = epoch_and_ids  # ids: the sample numbers of one batch, an int64 array
        return torch.from_numpy(self.images[ids]), torch.from_numpy(self.labels[ids]), torch.from_numpy(ids)


def load(args):
    if not args.data_url:
        raise UserError("there are no data: give --data_url, a folder with train and test in it")
    folder = storage.fetch(args.data_url, inputs=args.input_dir)
    return Arrays(os.path.join(folder, "train")), Arrays(os.path.join(folder, "test"))


def loader(data_set, sampler, device, workers=0, batches=torch_batches):
    return DeviceLoader(batches(data_set, sampler, workers), sampler, device, MEAN, STD)
