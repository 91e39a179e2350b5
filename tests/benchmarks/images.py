"""Photographs as batches of 224 x 224 on one core: every backend of ours beside torchvision and DALI's own pipeline.

    python -m tests.benchmarks.images --data FOLDER [--rounds 5]       a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG
    python -m tests.benchmarks.images --data FOLDER --forms pytorch packed "packed, 256"        these and the first
    python -m tests.benchmarks.images --data FOLDER --validation              resized to 256 and cut in the middle, in order

The forms take turns; each is a forked process with one thread that warms up and then passes over every photograph COPIES times;
its own CPU time and the time on the clock are taken from that. They end in uint8 batches in memory, where nothing else is said. The
caches run on the other cores; the object store is rclone's, on the same machine, and each photograph is one request. FFCV is
measured where it is installed; TurboLoader and SPDL are fetched, SPDL needs FFmpeg. Two processes at once, for some forms, show
whether they get in each other's way.
"""

import argparse
import contextlib
import functools
import itertools
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torchvision

from datasets import imagenet
from datasets.dali.batches import DaliBatches
from datasets.kspeed import samples
from datasets.kspeed.cache import SampleCache
from datasets.loader import DeviceLoader, torch_batches
from datasets.packs import packed
from datasets.photos import decode, tree
from datasets.sampler import EpochSampler, InOrder
from tests.benchmarks import rows
from tests.benchmarks.base import machine
from tests.benchmarks.forked import measure, table
from tests.benchmarks.storage import KEY, SECRET, get_programs, serve
from tests.tools.jobs import ROOT, environment
from tests.tools.memcached import Memcached
from tests.tools.packages import program, python_package

PACKED = ("tiled", "320", "256", "raw")
FFCV, FFCV_ORDERED = "FFCV, raw, its own order", "FFCV, raw, our order"
TURBO, SPDL = "TurboLoader, float32, its own order", "SPDL"
FAR, FIRST_BYTE = "object store, 10 ms to the first byte", 0.01  # which is little for a bucket; on this machine there is none
CPU, SIZE, BATCH, COPIES = torch.device("cpu"), 224, 40, 5
TWICE = ("pytorch", "dali-cpu", "packed", "packed, tiled", "packed, raw")  # also measured in two processes at once
SETTINGS = {}  # filled by main, before the forks


def sampled(files):
    data = imagenet.Photos(files, SIZE, SETTINGS["train"], seed=0)
    return data, EpochSampler(len(data), BATCH, seed=0) if data.train else InOrder(len(data), BATCH)


def files():
    return tree.load(str(SETTINGS["data"] / "train"), str(SETTINGS["folder"]))


# --- The forms: each gives batches, for one epoch every time it is iterated ------------------------------------------------


def torchvision_(last):
    from torchvision import datasets, transforms

    train = SETTINGS["train"]
    steps = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
    steps = steps if train else [transforms.Resize(decode.short_side(SIZE)), transforms.CenterCrop(SIZE)]
    data = datasets.ImageFolder(str(SETTINGS["data"] / "train"), transforms.Compose([*steps, *last]))
    return torch.utils.data.DataLoader(data, BATCH, shuffle=train, drop_last=train)


def torchvision_float():
    return torchvision_([torchvision.transforms.ToTensor(), torchvision.transforms.Normalize(imagenet.MEAN, imagenet.STD)])


def torchvision_uint8():
    return torchvision_([torchvision.transforms.PILToTensor()])


def ours(source=files):
    data, sampler = sampled(source())
    return torch_batches(data, sampler)


def ours_float():
    data, sampler = sampled(files())
    return DeviceLoader(torch_batches(data, sampler), sampler, CPU, imagenet.MEAN, imagenet.STD)


def ours_without_antialias():
    def plain(picture, height, width, _mode):
        return torch.nn.functional.interpolate(picture[None], size=(height, width), mode="bilinear")[0]

    decode.resize = plain
    return ours()


def ours_dali():
    data, sampler = sampled(files())
    return DaliBatches(data, sampler, CPU, workers=1)


def dalis_own():
    """As DALI's documentation for PyTorch has it, on the CPU: its own order, its own random crops."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)
    def pipeline():
        jpegs, labels = fn.readers.file(file_root=str(SETTINGS["data"] / "train"), random_shuffle=True, name="Reader")
        images = fn.decoders.image_random_crop(jpegs, output_type=types.RGB, random_area=[0.08, 1.0])
        images = fn.resize(images, size=(SIZE, SIZE), interp_type=types.INTERP_TRIANGULAR)
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    return DALIGenericIterator([pipeline()], ["images", "labels"], reader_name="Reader", auto_reset=True)


def from_pack(form="original"):
    return ours(lambda: packed.load(str(SETTINGS["folder"] / f"pack_{form}"), "train"))


def ffcv(ordered=False):
    """As its documentation has it, with its fastest form, pixels; its own random crops. Ordered: as our sampler wants it."""
    from ffcv.fields.decoders import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    image = [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip(), ToTensor()]
    pipelines = {"image": image, "label": [IntDecoder(), ToTensor()]}
    path = str(SETTINGS["folder"] / "ffcv.beton")
    how = {"num_workers": 1, "os_cache": True, "drop_last": True, "pipelines": pipelines}
    if ordered:
        return Loader(path, BATCH, order=OrderOption.SEQUENTIAL, indices=[*itertools.chain(*sampled(files())[1])], **how)
    return Loader(path, BATCH, order=OrderOption.RANDOM, **how)


def turboloader(antialias=False):
    """As its README has it, out of a tar: its own order, its own random crops and flips. It gives normalised float32."""
    import turboloader

    (tar,) = (SETTINGS["folder"] / "pack_original").glob("train-000000.tar")
    how = {"image_size": SIZE, "train_aug": True, "shuffle": True, "drop_last": True, "output_format": "pytorch"}
    for images, _ in turboloader.DataLoader(str(tar), batch_size=BATCH, num_workers=1, antialias=antialias, **how):
        yield torch.as_tensor(images)


def spdl_(algorithm="bilinear"):
    """A random crop is a filter of FFmpeg's, made for each picture."""
    import spdl.io

    tree_, (data, sampler) = files(), sampled(files())
    for ids in sampler:
        frames = []
        for number, (top, left, height, width), flip in zip(ids, *data.windows(ids, sampler.epoch)):
            words = f"crop={width}:{height}:{left}:{top},scale={SIZE}:{SIZE}:flags={algorithm},{'hflip,' * int(flip)}format=pix_fmts=rgb24"
            frames.append(spdl.io.decode_packets(spdl.io.demux_image(tree_.path(number)), filter_desc=words))
        yield spdl.io.to_torch(spdl.io.convert_frames(frames))


WRITE_FFCV = """
import os, sys
from ffcv.fields import IntField, RGBImageField
from ffcv.writer import DatasetWriter
from torchvision.datasets import ImageFolder
fields = {"image": RGBImageField(write_mode="raw", max_resolution=500), "label": IntField()}
DatasetWriter(sys.argv[2], fields, num_workers=1).from_indexed_dataset(ImageFolder(sys.argv[1]))
os._exit(0)  # its threads may never end
"""


def write_ffcv():
    """Why there is no FFCV to measure, or None."""
    paths = [str(SETTINGS["data"] / "train"), str(SETTINGS["folder"] / "ffcv.beton")]
    done = subprocess.run([sys.executable, "-c", WRITE_FFCV, *paths], stderr=subprocess.PIPE, text=True, timeout=600)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def cached():
    cache = SampleCache(",".join(server.address for server in SETTINGS["servers"]))
    return samples.CachedTree(**vars(files()), cache=cache)


def through_cache():
    return ours(cached)


def one_stopped():
    SETTINGS["servers"][0].stop()
    return ours(cached)


class InStore(tree.Tree):
    def read(self, number):
        key = f"photographs/{self.names[number]}"
        return SETTINGS["client"].get_object(Bucket="data", Key=key)["Body"].read()


def cold_store(kind=InStore):
    import boto3

    SETTINGS["client"] = boto3.client("s3")
    return ours(lambda: kind(**vars(files())))


class FarStore(InStore):
    def read(self, number):
        time.sleep(FIRST_BYTE)
        return super().read(number)


def far_store():
    return cold_store(FarStore)


FORMS = {
    "torchvision ImageFolder + DataLoader, float32": torchvision_float,
    "the same, uint8": torchvision_uint8,
    "pytorch": ours,
    "pytorch, normalised to float32 on this core too": ours_float,
    "pytorch without antialias": ours_without_antialias,
    "dali-cpu": ours_dali,
    "DALI's own pipeline and order": dalis_own,
    "packed": from_pack,
    **{f"packed, {form}": functools.partial(from_pack, form) for form in PACKED},
    FFCV: ffcv,
    FFCV_ORDERED: functools.partial(ffcv, ordered=True),
    **{f"{TURBO}{', antialias' * smooth}": functools.partial(turboloader, smooth) for smooth in (False, True)},
    **{f"{SPDL}, {algorithm}": functools.partial(spdl_, algorithm) for algorithm in ("bilinear", "fast_bilinear")},
    "kspeed, warm": through_cache,
    "kspeed, one of three servers stopped": one_stopped,
    "object store, a request each": cold_store,
    FAR: far_store,
}


PLAIN = "torchvision ImageFolder + DataLoader, float32"
BACKENDS = ["pytorch", "dali-cpu", "packed", *(f"packed, {form}" for form in PACKED)]
CLAIMS = [
    ("pytorch", PLAIN, "CPU"),
    ("pytorch without antialias", PLAIN, "CPU"),
    ("dali-cpu", PLAIN, "CPU"),
    ("dali-cpu", "DALI's own pipeline and order", "CPU"),
    ("packed", PLAIN, "CPU"),
    *((f"packed, {form}", PLAIN, "CPU") for form in PACKED),
    *(("packed, raw", form, "CPU") for form in (FFCV, FFCV_ORDERED)),
    *(("packed", f"{TURBO}{kind}", "CPU") for kind in ("", ", antialias")),
    *(("pytorch", f"{SPDL}, {kind}", "CPU") for kind in ("bilinear", "fast_bilinear")),
    ("kspeed, warm", "pytorch", "CPU"),
    ("kspeed, one of three servers stopped", "pytorch", "CPU"),
    ("kspeed, warm", "object store, a request each", "clock"),
    ("kspeed, warm", FAR, "clock"),
]


def repeat(source, target):
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        for copy in range(COPIES if "train" in path.parts else 1):
            place = target / path.relative_to(source).parent / f"{copy}_{path.name}"
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def size_on_disk(form):
    """Bytes of an image of the training set."""
    folder, count = SETTINGS["folder"], len(files())
    kind = form.partition(", ")[2] or "original"
    paths = folder.glob(f"pack_{kind}/train-*.tar") if form.startswith("packed") else [folder / "ffcv.beton"]
    if not form.startswith(("packed", "FFCV")):
        paths = [path for path in (SETTINGS["data"] / "train").rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in paths) / count


def prepare(chosen, stack):
    """What the chosen forms read, and who serves it."""
    folder = SETTINGS["folder"]
    SETTINGS["servers"] = []
    for form in ("original", *PACKED):
        turbo = form == "original" and any(peer.startswith(TURBO) for peer in chosen)
        if turbo or {"original": "packed"}.get(form, f"packed, {form}") in chosen:
            words = [sys.executable, "-m", "launch", "pack", SETTINGS["data"], folder / f"pack_{form}", "--form", form]
            subprocess.run(list(map(str, words)), cwd=ROOT, env=environment(), check=True)
    if any(form.startswith(TURBO) for form in chosen):
        sys.path.append(str(python_package("turboloader==2.39.0")))
    if any(form.startswith(SPDL) for form in chosen):
        program("ffmpeg")
        sys.path.append(str(python_package("spdl-core==0.8.0")))
        import spdl

        spdl.__path__.append(str(python_package("spdl-io==0.8.0") / "spdl"))  # two packages that expect to be in one folder
    if any(form.startswith("kspeed") for form in chosen):
        SETTINGS["servers"] = [stack.enter_context(Memcached("-m", 256)) for _ in range(3)]
    if any(form.startswith("object store") for form in chosen):
        rclone, _ = get_programs(folder / "programs")
        shutil.copytree(SETTINGS["data"] / "train", folder / "store" / "data" / "photographs")
        server, endpoint = serve(rclone, folder / "store")
        stack.callback(lambda: (server.terminate(), server.wait()))
        os.environ.update(
            AWS_ENDPOINT_URL_S3=endpoint, AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET, AWS_DEFAULT_REGION="us-east-1"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forms", nargs="*", choices=[[], *FORMS], default=[], help="only these, and the first")
    parser.add_argument("--validation", action="store_true", help="as for evaluation: our backends beside torchvision")
    options = parser.parse_args()
    SETTINGS["train"] = not options.validation
    if options.validation:
        options.forms = [form for form in options.forms or BACKENDS if form in BACKENDS]
    what, claims = ("photographs", CLAIMS) if SETTINGS["train"] else ("validation", [(form, PLAIN, "CPU") for form in BACKENDS])
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=shared) as folder, contextlib.ExitStack() as stack:
        folder = Path(folder)
        os.chdir(folder)
        repeat(options.data.resolve(), folder / "photographs")
        SETTINGS.update(data=folder / "photographs", folder=folder)
        chosen = [form for form in FORMS if not options.forms or form in options.forms or "torchvision Im" in form]
        prepare(chosen, stack)
        lacking = write_ffcv() if {FFCV, FFCV_ORDERED} & {*chosen} else None
        chosen = [form for form in chosen if not (lacking and form.startswith("FFCV"))]
        found, twice = {form: [] for form in chosen}, {}
        for _ in range(options.rounds):
            for form in chosen:
                found[form].append(measure(FORMS[form]))
                for server in SETTINGS["servers"][:1]:
                    server.go_on()
                if form in TWICE and SETTINGS["train"]:
                    twice.setdefault(form, []).append(found[form][-1][1] / measure(FORMS[form], 2)[1])
        for form, ratios in twice.items():
            rows.keep(
                f"photographs: {form}, two processes", "one process", ratios, f"--data FOLDER --forms {shlex.quote(form)}"
            )
            print(f"{form}: two processes at once give {statistics.median(ratios):.2f} times the photographs of one")
        data = "--data FOLDER " + "--validation " * options.validation
        shown = table(found, what, claims, data, {form: size_on_disk(form) for form in chosen})
    print(f"\n{machine()}, torchvision {torchvision.__version__}; {options.rounds} rounds, median (range)\n\n{shown}")
    if lacking:
        print(f"| FFCV | not measured: {lacking} |")
        for form in (FFCV, FFCV_ORDERED):
            rows.missing("photographs: packed, raw", form, f"FFCV is not installed: {lacking}", "--data FOLDER")
    return 0


if __name__ == "__main__":
    sys.exit(main())
