"""MNIST and FashionMNIST: FOLDER/{train,t10k}-{images-idx3,labels-idx1}-ubyte."""

import os

import numpy as np

from common import storage
from datasets import own_data

loader = own_data.loader


class Digits(own_data.Arrays):
    classes = [str(number) for number in range(10)]

    def __init__(self, folder, split):
        grey = read(os.path.join(folder, f"{split}-images-idx3-ubyte"))
        self.images = np.broadcast_to(grey[:, None], (len(grey), 3, *grey.shape[1:]))
        self.labels = read(os.path.join(folder, f"{split}-labels-idx1-ubyte")).astype(np.int64)


def read(path):
    """Byte 3 is the number of axes; then comes the length of each, in four bytes; then the numbers."""
    content = np.fromfile(path, np.uint8)
    begin = 4 + 4 * int(content[3])
    return content[begin:].reshape(content[4:begin].view(">i4"))


def load(args):
    folder = storage.fetch(args.data_url, inputs=args.input_dir)
    return Digits(folder, "train"), Digits(folder, "t10k")
