"""Other libraries that read pictures from a bucket, for tests/benchmarks/arriving.py; each in an environment of its own.

python -m tests.benchmarks.streams FORM write FOLDER       pictures, as this form wants them in a bucket
python -m tests.benchmarks.streams FORM read ADDRESS COMPUTE EPOCHS

All decode with Pillow, crop to 64 x 64, and give batches of 64 by two loader processes. What an option says that is not a default of theirs is
what their pages ask for here: several processes, a store that is not Amazon's, shards of 64 MB.
"""

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

BATCH, WORKERS, SHARD_MB = 64, 2, 64
MARK = "ANYRANK_BENCH_FORM"  # in the environment of all that a form starts
# {form: what pip installs}
NEEDS = {
    "mosaic": "mosaicml-streaming==0.13.0",
    "litdata": "litdata==0.2.76",
    "s3torch": "s3torchconnector==1.5.0",
    "webdataset": "webdataset==1.0.2",
}


class Taken(NamedTuple):
    first: float  # seconds to the first batch
    epochs: list[float]
    pictures: list[int]  # of each epoch
    seconds: float  # of all
    cpu: float = 0.0
    carried: int = 0  # bytes through the line
    trained: tuple[float, ...] = ()  # seconds after which each batch was


def paced(loader, epochs, compute, began, start=lambda epoch: None):
    """A Taken, where each batch is trained at `compute` pictures a second."""
    first, seconds, pictures, trained = None, [], [], []
    for epoch in range(epochs):
        start(epoch)
        since, due, seen = time.monotonic(), 0.0, 0
        for images, _ in loader:
            first = first or time.monotonic() - began
            seen += len(images)
            due = max(time.monotonic(), due) + (len(images) / compute if compute else 0)
            time.sleep(max(0.0, due - time.monotonic()))
            trained.append(time.monotonic() - began)
            if not compute:
                break
        seconds.append(time.monotonic() - since)
        pictures.append(seen)
    return Taken(first, seconds, pictures, time.monotonic() - began, trained=tuple(trained))


def cpu_seconds():
    """Of all processes of this form that are there, and of those that they have waited for."""
    ticks, mark = 0, f"{MARK}={os.environ[MARK]}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0"):
                ticks += sum(map(int, (path / "stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def show(found):
    """As the last line, and the end."""
    print(json.dumps(found._replace(cpu=cpu_seconds())), flush=True)
    os._exit(0)


def decoded(content):
    from PIL import Image
    from torchvision import transforms

    change = transforms.Compose([transforms.RandomResizedCrop(64), transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    return change(Image.open(io.BytesIO(content)).convert("RGB"))


def pictures(folder):
    """(name, bytes, class) of each, in the order of a folder."""
    for path in sorted(Path(folder).glob("train/*/*.jpg")):
        yield path.name, path.read_bytes(), int(path.parent.name)


def number_of(name):
    return int(Path(name).stem) % 10


# --- MosaicML Streaming ---------------------------------------------------------------------------------------------------


def write_mosaic(source, folder):
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"image": "bytes", "label": "int"}, size_limit=SHARD_MB << 20) as writer:
        for _, content, label in pictures(source):
            writer.write({"image": content, "label": label})


def read_mosaic(address, compute, epochs):
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    class Pictures(StreamingDataset):
        def __getitem__(self, number):
            sample = super().__getitem__(number)
            return decoded(sample["image"]), sample["label"]

    began = time.monotonic()
    block = {"shuffle_block_size": 1000} if "MOSAIC_BLOCK" in os.environ else {}
    data = Pictures(remote=address, local=os.path.abspath("mosaic"), batch_size=BATCH, shuffle=True, **block)
    return paced(DataLoader(data, BATCH, num_workers=WORKERS), epochs, compute, began)


# --- litdata --------------------------------------------------------------------------------------------------------------


def litdata_sample(path):
    return {"image": Path(path).read_bytes(), "label": int(Path(path).parent.name)}


def write_litdata(source, folder):
    import litdata

    paths = [str(path) for path in sorted(Path(source).glob("train/*/*.jpg"))]
    litdata.optimize(litdata_sample, paths, str(folder), chunk_bytes=f"{SHARD_MB}MB", num_workers=1)


def read_litdata(address, compute, epochs):
    import litdata
    from litdata.streaming import downloader
    from litdata.streaming.cache import Dir

    class Pictures(litdata.StreamingDataset):
        def __getitem__(self, number):
            sample = super().__getitem__(number)
            return decoded(sample["image"]), sample["label"]

    began = time.monotonic()
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no option for a store without https
    keys = {"aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"]}
    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL_S3"], "region_name": os.environ["AWS_REGION"], **keys}
    place = Dir(path=os.path.abspath("litdata"), url=address)
    data = Pictures(place, storage_options=options, shuffle=True)
    return paced(litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=WORKERS), epochs, compute, began)


# --- Amazon's connector ---------------------------------------------------------------------------------------------------


def write_s3torch(source, folder):
    for name, content, _ in pictures(source):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def from_object(reader):
    return decoded(reader.read()), number_of(reader.key)


def read_s3torch(address, compute, epochs):
    from s3torchconnector import S3ClientConfig, S3MapDataset
    from torch.utils.data import DataLoader

    began = time.monotonic()
    how = {"region": os.environ["AWS_REGION"], "endpoint": os.environ["AWS_ENDPOINT_URL_S3"]}
    plain = S3ClientConfig(force_path_style=True)
    data = S3MapDataset.from_prefix(f"{address}/", transform=from_object, s3client_config=plain, **how)
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, multiprocessing_context="spawn")
    return paced(loader, epochs, compute, began)


# --- WebDataset -----------------------------------------------------------------------------------------------------------


def write_webdataset(source, folder):
    import random

    import webdataset

    folder.mkdir(parents=True)
    samples = list(pictures(source))
    random.Random(0).shuffle(samples)  # as its page asks for
    with webdataset.ShardWriter(str(folder / "%06d.tar"), maxsize=SHARD_MB << 20, verbose=0) as writer:
        for name, content, label in samples:
            writer.write({"__key__": name.rpartition(".")[0], "jpg": content, "cls": label})


def from_shard(sample):
    return decoded(sample[0]), int(sample[1])


def read_webdataset(address, compute, epochs):
    import webdataset
    from torch.utils.data import DataLoader

    began = time.monotonic()
    endpoint, shards = os.environ["AWS_ENDPOINT_URL_S3"], os.environ["WEBDATASET_SHARDS"].split()
    urls = [f"pipe:{os.environ['S5CMD']} --endpoint-url {endpoint} cat {address}/{name}" for name in shards]
    os.makedirs("webdataset", exist_ok=True)
    data = webdataset.WebDataset(urls, shardshuffle=len(urls), cache_dir=os.path.abspath("webdataset"))
    data = data.shuffle(1000).to_tuple("jpg", "cls").map(from_shard).batched(BATCH)
    return paced(DataLoader(data, None, num_workers=WORKERS), epochs, compute, began)


if __name__ == "__main__":
    form, what = sys.argv[1:3]
    if what == "write":
        globals()[f"write_{form}"](sys.argv[3], Path(sys.argv[4]))
    else:
        show(globals()[f"read_{form}"](sys.argv[3], float(sys.argv[4]), int(sys.argv[5])))
