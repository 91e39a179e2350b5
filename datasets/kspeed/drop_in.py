"""Drop-in replacements for the classes of Alibaba's KSpeed, with its names and call forms.

    servers = "host:11211,host2:11211"
    data_set = KSpeedImageFolder("imagenet/train", None, 5, servers, user, password, transform)

instead of torchvision's ImageFolder. KSpeedCallable uses the vendor's own package where that is installed.
"""

import functools
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

import numpy as np

from common.errors import UserError, one_line
from datasets.kspeed import samples
from datasets.kspeed.servers import Addresses
from datasets.photos import files, tree

if TYPE_CHECKING:
    from PIL import Image


class KSpeedFolder:
    """Reads the files below a folder through the cache.

    Paths are complete, as for open(), not relative to the folder.
    """

    def __init__(
        self,
        root: Union[str, Path],
        fileset: None = None,
        workers: int = 0,
        iplist: Addresses = None,
        user: Optional[str] = None,
        password: Optional[str] = None,
    ):
        if fileset is not None:
            raise UserError(
                "the second argument of KSpeedFolder and KSpeedImageFolder has no meaning here: give None"
            )
        self.root = os.path.expanduser(os.fspath(root))
        self.workers = workers
        self.cache = samples.open_cache(iplist, user, password)

    def getBIN(self, path: str) -> bytes:
        """Return the file's bytes, from the cache if it has them."""
        return samples.read_through(self.cache, self.root, path)

    def getPIL(self, path: str) -> "Image.Image":
        """Return the picture, in RGB, as ImageFolder gives it."""
        with files.open_picture(io.BytesIO(self.getBIN(path))) as picture:
            return picture.convert("RGB")

    def size(self, path: str) -> int:
        """Return the file's size in bytes."""
        return os.stat(path).st_size

    def preload(self, paths: Sequence[str]) -> None:
        """Put the files into the cache, in self.workers threads (0: samples.THREADS).

        Those that cannot be read are skipped.
        """
        put = functools.partial(samples.put, self.cache)
        for _ in samples.for_each(self.root, paths, self.workers or samples.THREADS, put):
            pass


@functools.cache
def image_folder() -> type:
    """Return the class KSpeedImageFolder. Only this needs torchvision, so it is imported on first use."""
    from torchvision.datasets import ImageFolder

    class KSpeedImageFolder(ImageFolder):
        """torchvision's ImageFolder, read through the cache.

        `workers` is the number of threads of preload().
        """

        def __init__(
            self,
            root: Union[str, Path],
            fileset: None = None,
            workers: int = 0,
            iplist: Addresses = None,
            user: Optional[str] = None,
            password: Optional[str] = None,
            transform: Optional[Callable] = None,
        ):
            self.folder = KSpeedFolder(root, fileset, workers, iplist, user, password)
            super().__init__(root, transform=transform, loader=self.folder.getPIL)

        @staticmethod
        def make_dataset(
            directory: Union[str, Path], class_to_idx: dict[str, int], *_args: object, **_kwargs: Any
        ) -> list[tuple[str, int]]:
            """Return [(path, class number)] in torchvision's order.

            An empty class or an unreadable folder is an error.
            """
            folder = os.fspath(directory)
            names_by_class = {label: files.images_below(folder, label) for label in sorted(class_to_idx)}
            if empty := [label for label, file_names in names_by_class.items() if not file_names]:
                raise UserError(
                    f"{one_line(folder)} has no image of {one_line(', '.join(empty))}: add some, or "
                    "delete the folders"
                )
            return [
                (os.path.join(folder, name), class_to_idx[label])
                for label, file_names in names_by_class.items()
                for name in file_names
            ]

        def preload(self) -> None:
            """Put all photographs of the folder into the cache, as KSpeedFolder.preload() does."""
            self.folder.preload([path for path, _ in self.samples])

    # pickle looks the class up under these names.
    KSpeedImageFolder.__module__ = "datasets.kspeed"
    KSpeedImageFolder.__qualname__ = "KSpeedImageFolder"
    return KSpeedImageFolder


class KSpeedCallable(KSpeedFolder):
    """Gives (bytes, label) of a sample to DALI's fn.external_source(parallel=True, batch=False,
    num_outputs=2).

    Every epoch has its own order of all files. Each shard takes an equal part of it; an incomplete last batch
    is left out.
    """

    def __init__(
        self,
        root: Union[str, Path],
        batch_size: int,
        shard_id: int = 0,
        num_shards: int = 1,
        iplist: Addresses = None,
        user: Optional[str] = None,
        password: Optional[str] = None,
        max_megapixels: int = files.MEGAPIXELS,
    ):
        """Photographs of more than `max_megapixels` million pixels are left out, as in the jobs."""
        super().__init__(root, iplist=iplist, user=user, password=password)
        self._login = iplist, user, password
        photos = tree.load(self.root).without_larger(max_megapixels)
        self.files = photos.names
        self.labels = photos.labels
        shard_size = len(self.files) // num_shards
        self.shard_offset = shard_size * shard_id
        self.full_iters = shard_size // batch_size
        if self.full_iters == 0:
            raise UserError(
                f"{root}: {len(self.files)} images make no batch of {batch_size} for each of {num_shards} "
                "shards: give a smaller batch_size or fewer shards"
            )
        self.dataset: Any = None  # its getBIN reads the samples; load() sets it, in the process that reads
        self.perm = np.empty(0, np.int64)
        self.last_seen_epoch = None

    def load(self) -> Any:
        """Set `dataset` to a KSpeedFolder of Alibaba's own package if that is installed, else to this object,
        and return it.

        A subclass may set it, as Alibaba's document does, or only return it.
        """
        vendor_class = samples.vendor_folder_class()
        self.dataset = vendor_class(self.root, None, self.workers, *self._login) if vendor_class else self
        return self.dataset

    def __call__(self, sample_info: Any) -> tuple[np.ndarray, np.ndarray]:
        if self.dataset is None:
            self.dataset = self.load() or self.dataset
        if sample_info.iteration >= self.full_iters:
            raise StopIteration
        if self.last_seen_epoch != sample_info.epoch_idx:
            self.last_seen_epoch = sample_info.epoch_idx
            self.perm = np.random.default_rng(seed=42 + sample_info.epoch_idx).permutation(len(self.files))
        number = self.perm[sample_info.idx_in_epoch + self.shard_offset]
        content = self.dataset.getBIN(os.path.join(self.root, self.files[number]))
        return np.frombuffer(content, dtype=np.uint8), np.array([self.labels[number]], dtype=np.int32)
