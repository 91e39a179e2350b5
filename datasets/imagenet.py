"""Photographs by the class: ROOT/{train,val}/CLASS/*.JPEG, or synthetic ones, as batches for the image jobs."""

import os

import numpy as np
import torch

from common import arguments, devices, moments, storage
from common.errors import UserError, one_line
from common.processes.barrier import on_every_rank
from common.world.folders import is_address
from datasets import dpex, kspeed
from datasets.dali import DaliBatches
from datasets.loader import DeviceLoader, more_workers, torch_batches
from datasets.photos import packed, tree
from datasets.photos.labelled import Photos
from datasets.synthetic import ColouredNoise

BACKENDS = ["pytorch", "dali", "dali-cpu", "dali-gpu", "kspeed", "dali-kspeed", "packed", "packed-remote", "dpex"]
NO_INPUT = ["synthetic", "syntetic"]  # the second is how Alibaba's document spells it
DATA = "folder or bucket (s3://, obs://, oss://) with train/CLASS/*.JPEG and val/CLASS/*.JPEG, or what launch pack made of one"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SYNTHETIC = {"train": 1280, "val": 256}
IMAGENET = {"train": 1_281_167, "val": 50_000}
COLOURS = 10


def add_options(parser):
    data = arguments.group(parser, "data")
    data.add_argument(
        "--data_backend",
        choices=[*BACKENDS, *NO_INPUT],
        default="pytorch",
        help="where the pictures come from and who decodes them; all give the same ones in the same order. pytorch: files, "
        "nvImageCodec on the CPU; dali-cpu (or dali), dali-gpu: files, DALI with --workers threads (0: one for each core); "
        "packed: the large files of launch pack; "
        "packed-remote: those, read from the bucket as they are needed instead of fetched before; "
        "kspeed, dali-kspeed: files, through a cache in memcached that jobs and nodes share; "
        "dpex: files, by --workers processes of each rank (2 where that is 0) all over the Ray cluster of RAY_ADDRESS; "
        "synthetic (or syntetic): one batch of noise that stays on the device, to measure everything else",
    )
    data.add_argument(
        "--kspeed_iplist", help="memcached servers of kspeed, host:port,host:port,...; unset: the variable KSPEED_IPLIST"
    )
    data.add_argument("--kspeed_user", help="their user, where they want one; the password is the variable KSPEED_PASSWORD")
    data.add_argument("--image_size", type=arguments.number(int, at_least=8), default=224, help="pixels of a side")
    parser.reads = reads


def reads(args):
    """What the arguments say of the data; see arguments.Input."""
    here, backend = args.world, args.data_backend
    samples = -(-args.total_batch // here.world_size) if args.total_batch else args.batch_size
    own_processes = not backend.startswith("dali") and backend not in ("dpex", *NO_INPUT) and devices.loader_workers(args)
    synthetic = args.custom_data or backend in NO_INPUT
    return arguments.Input(
        address=args.data_url if is_address(args.data_url) and not synthetic else None,
        fetched=backend != "packed-remote",
        synthetic=synthetic,
        shared_bytes=samples * 3 * args.image_size**2 if own_processes else 0,
        samples=samples,
        remedies=() if backend in NO_INPUT else tuple(remedies(args)),
    )


def remedies(args):
    yield from more_workers(args)
    if not args.data_backend.startswith("packed"):
        yield "photographs packed into few large files (python -m launch pack, then --data_backend packed)"
    if not args.data_backend.startswith("dali"):
        yield "--data_backend dali-gpu where there is a GPU"


def load(args):
    """The training and the validation set that the arguments ask for."""
    size, limit = args.image_size, args.max_samples
    if args.custom_data or args.data_backend in NO_INPUT:
        counts, num_classes = (SYNTHETIC, COLOURS) if args.custom_data else (IMAGENET, 1000)
        counts = {split: min(count, limit or count) for split, count in counts.items()}
        return tuple(ColouredNoise(counts[split], size, num_classes, seed) for seed, split in enumerate(("train", "val")))
    if not args.data_url:
        raise UserError(f"there are no images: give --data_url, a {DATA}; or --custom_data true")

    def prepare():
        if args.data_backend.startswith("packed"):
            root = args.data_url if args.data_backend == "packed-remote" else storage.fetch(args.data_url)
            return [packed.load(root, split) for split in ("train", "val")]
        root = storage.fetch(args.data_url)
        return [tree.load(os.path.join(root, split)) for split in ("train", "val")]

    moments.announce("data", args)
    found = on_every_rank("data", prepare)
    _compare_classes(*found)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        for files in found:
            print(files.describe(), flush=True)
    train, test = (spread(files, limit) for files in found)
    if args.data_backend.endswith("kspeed"):
        train, test = (kspeed.through_cache(files, args.kspeed_iplist, args.kspeed_user) for files in (train, test))
    return Photos(train, size, True, args.seed), Photos(test, size, False, args.seed)


def _compare_classes(train, val):
    """The same in both, or every label of one would mean something else in the other."""
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))[0]
        has, lacks = (train, val) if odd in train.classes else (val, train)
        raise UserError(
            f"{one_line(has.folder)} has {len(has.classes)} classes and {one_line(lacks.folder)} {len(lacks.classes)}: "
            f"{one_line(odd)} is in the first alone"
        )


def spread(files, limit):
    """At most `limit` samples, from all over the classes."""
    if limit is None or limit >= len(files):
        return files
    return files.pick(np.arange(limit) * len(files) // limit)


def loader(data_set, sampler, device, workers=0, backend="pytorch", mean=MEAN, std=STD, **how):
    """`backend`: one of NO_INPUT, or of BACKENDS, which give the same pictures in the same order. `how`: see DeviceLoader."""
    if backend in NO_INPUT:
        return Resident(data_set, sampler, device)
    if backend.startswith("dali") and isinstance(data_set, Photos):
        batches = DaliBatches(data_set, sampler, device, workers, decode_on_gpu=backend == "dali-gpu")
    elif backend == "dpex":
        batches = dpex.batches(data_set, sampler, workers)
    else:
        batches = torch_batches(data_set, sampler, workers)
    return DeviceLoader(batches, sampler, device, mean, std, **how)


class Resident:
    """A loader that costs nothing: one batch of noise, made on the device, for every one of the sampler's."""

    beside = False

    def __init__(self, data_set, sampler, device):
        self.sampler, self.device, self.ids = sampler, device, None
        self._size, self._classes = data_set.size, len(data_set.classes)

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        images = None
        for ids in self.sampler:
            if images is None or len(ids) > len(images):
                generator = torch.Generator(self.device).manual_seed(0)
                images = torch.randn((len(ids), 3, self._size, self._size), device=self.device, generator=generator)
                images = images.contiguous(memory_format=torch.channels_last)
                labels = torch.randint(0, self._classes, (len(ids),), device=self.device, generator=generator)
            self.ids = torch.from_numpy(ids)
            yield images[: len(ids)], labels[: len(ids)]

    def transfer_seconds(self):
        return 0.0
