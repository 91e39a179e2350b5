"""FFCV, a peer of tests.benchmarks.images: its own format, written from the same photographs, and its own loader.

It is not among the project's packages, for it is built against OpenCV: apt install libopencv-dev libturbojpeg0-dev pkg-config g++,
and pip install ffcv opencv-python-headless. Without it the rows that need it say so.
"""

import importlib.util
import os
import subprocess
import sys

MODES = {"FFCV, raw": "raw", "FFCV, jpg": "jpg"}  # uncompressed at most 500 pixels long; compressed again with quality 90


def why_not():
    """In words, or None where it is installed."""
    return None if importlib.util.find_spec("ffcv") else "FFCV is not installed; it has to be built against OpenCV"


def write(source, path, mode, workers=2):
    """In a process of its own: FFCV's writer may hang when its program ends."""
    subprocess.run([sys.executable, "-m", "tests.benchmarks.ffcv_peer", source, path, mode, str(workers)], check=True)


def main(source, path, mode, workers):
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    longest = {"max_resolution": 500} if mode == "raw" else {}
    fields = {"image": RGBImageField(write_mode=mode, jpeg_quality=90, **longest), "label": IntField()}
    DatasetWriter(path, fields, num_workers=int(workers)).from_indexed_dataset(ImageFolder(source))
    sys.stdout.flush()
    os._exit(0)


def batches(path, size, batch):
    """uint8, channels first, as all other forms end."""
    import ffcv.transforms
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption

    image = [
        RandomResizedCropRGBImageDecoder((size, size)), ffcv.transforms.RandomHorizontalFlip(), ffcv.transforms.ToTensor(),
        ffcv.transforms.ToTorchImage(convert_back_int16=False),
    ]  # fmt: skip
    label = [IntDecoder(), ffcv.transforms.ToTensor()]
    how = {"num_workers": 1, "order": OrderOption.RANDOM, "os_cache": True, "drop_last": True}
    return Loader(path, batch, pipelines={"image": image, "label": label}, **how)


if __name__ == "__main__":
    main(*sys.argv[1:])
