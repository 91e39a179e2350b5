"""Photographs through a sample cache that jobs and nodes share, under the names and call forms of Alibaba's KSpeed.

    data_set = KSpeedImageFolder("imagenet/train", None, 5, "host:11211,host2:11211", user, password, transform)

instead of torchvision's ImageFolder. A sample's key holds its name, size and time of change, so that a changed file is read
again. Where the vendor's own package is installed, `engine` gives that instead.
"""

import collections
import contextlib
import dataclasses
import functools
import io
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from common.errors import UserError
from datasets.kspeed.cache import SampleCache
from datasets.kspeed.memcached import NOT_STORED
from datasets.photos import tree

THREADS = 16
AT_ONCE = 1024  # images handed to the threads
THERE, UNREADABLE = "there", "unreadable"  # what else may come of an image, beside what SampleCache.set says


def engine():
    """The module with the KSpeedFolder and KSpeedImageFolder to use: the vendor's, which speaks to his service, or this."""
    try:
        import kspeed.utils.data.kspeeddataset as vendors
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("kspeed"):
            raise
        return sys.modules[__name__]
    return vendors


def open_cache(iplist=None, user=None, password=None, deadline=0.05):
    """The cache of these servers; what is not given comes from KSPEED_IPLIST and, for a user, KSPEED_PASSWORD."""
    if user and not password:
        password = os.environ.get("KSPEED_PASSWORD")
        if not password:
            raise UserError(f"the password of the cache's user {user} is missing: set KSPEED_PASSWORD")
    return SampleCache(iplist or os.environ.get("KSPEED_IPLIST"), user or None, password or None, deadline)


# --- One sample --------------------------------------------------------------------------------------------------------


def sample_key(root, path, about):
    """Also with the names of root and of the folder around it: train and val may hold files of one name, size and time."""
    name = path[len(root) + 1 :] if path.startswith(root + os.sep) else os.path.relpath(path, root)
    return f"{_place(root)}\0{name}\0{about.st_size}\0{about.st_mtime_ns}"


@functools.lru_cache(maxsize=64)
def _place(root):
    return os.sep.join(os.path.abspath(root).split(os.sep)[-2:])


def read_through(cache, root, path, read, asked=None):
    """The bytes of a file below root, from the cache, or by `read`, which fills it. `asked`: what the cache gave before."""
    about = os.stat(path)
    key = sample_key(root, path, about)
    content = asked.pop(key) if asked and key in asked else cache.get(key)
    if content is None or len(content) != about.st_size:
        content = read()
        if _is_still(path, about, content):
            cache.set(key, content)
    return content


def _is_still(path, about, content):
    """Whether the content is that of the file as it was: nothing is kept of one that is being written."""
    try:
        now = os.stat(path)
    except OSError:
        return False
    return len(content) == about.st_size == now.st_size and about.st_mtime_ns == now.st_mtime_ns


def _read(path):
    with open(path, "rb") as file:
        return file.read()


# --- What a job uses ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class CachedTree(tree.Tree):
    """A Tree whose photographs come through a cache."""

    in_files = False

    cache: SampleCache
    asked: dict = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, files, cache):
        return cls(**vars(files), cache=cache)

    def expect(self, numbers):
        """One request for several costs less than one for each: for the servers, and for whoever waits for them."""
        paths, keys = [self.path(number) for number in numbers], []
        for path in paths:
            with contextlib.suppress(OSError):  # whoever reads it will say so
                keys.append(sample_key(self.folder, path, os.stat(path)))
        self.asked = self.cache.get_many(keys)

    def read(self, number):
        read = functools.partial(super().read, number)
        return read_through(self.cache, self.folder, self.path(number), read, self.asked)


@dataclasses.dataclass
class VendorsTree(tree.Tree):
    """A Tree whose photographs come from the vendor's service."""

    in_files = False

    login: tuple  # iplist, user, password

    def read(self, number):
        return _vendors_folder(os.getpid(), self.folder, self.login).getBIN(self.path(number))


@functools.lru_cache(maxsize=8)
def _vendors_folder(_process, root, login):
    """A client of each process's own."""
    return engine().KSpeedFolder(root, None, THREADS, *login)


def through_cache(files, iplist=None, user=None):
    """The Tree, read through the vendor's service where its package is, else through memcached."""
    if engine() is sys.modules[__name__]:
        return CachedTree.of(files, open_cache(iplist, user))
    return VendorsTree(**vars(files), login=(iplist, user, os.environ.get("KSPEED_PASSWORD")))


class KSpeedFolder:
    """The files below a folder. A path is what `open` would take."""

    def __init__(self, root, fileset=None, workers=0, iplist=None, user=None, password=None):
        if fileset is not None:
            raise UserError("the second argument of KSpeedFolder and KSpeedImageFolder has no meaning here: give None")
        self.root, self.workers = os.path.expanduser(os.fspath(root)), workers
        self.cache = open_cache(iplist, user, password)

    def getBIN(self, path):
        """The bytes of a file."""
        return read_through(self.cache, self.root, path, functools.partial(_read, path))

    def getPIL(self, path):
        """The picture, in RGB, as ImageFolder gives it."""
        from PIL import Image

        with Image.open(io.BytesIO(self.getBIN(path))) as picture:
            return picture.convert("RGB")

    def size(self, path):
        return os.stat(path).st_size

    def preload(self, paths):
        """Put the files into the cache, `workers` at a time, before the first epoch asks for them."""
        collections.deque(for_each(self.root, paths, self.workers or THREADS, functools.partial(put, self.cache)), maxlen=0)


def __getattr__(name):
    """KSpeedImageFolder is made when it is first asked for: it needs torchvision, and this module does not."""
    if name == "KSpeedImageFolder":
        return _image_folder()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _image_folder():
    from torchvision.datasets import ImageFolder

    class KSpeedImageFolder(ImageFolder):
        """torchvision's ImageFolder, read through the cache. `workers` is the number of threads of preload()."""

        def __init__(self, root, fileset=None, workers=0, iplist=None, user=None, password=None, transform=None):
            self.folder = KSpeedFolder(root, fileset, workers, iplist, user, password)
            super().__init__(root, transform=transform, loader=self.folder.getPIL)

        def preload(self):
            self.folder.preload([path for path, _ in self.samples])

    KSpeedImageFolder.__qualname__ = "KSpeedImageFolder"  # where pickle finds it
    return KSpeedImageFolder


class KSpeedCallable(KSpeedFolder):
    """The (bytes, label) of each sample for DALI's fn.external_source(parallel=True, batch=False, num_outputs=2).

    In every epoch all files are in a new order, of which each shard takes its part; what makes no whole batch is left out.
    """

    def __init__(self, root, batch_size, shard_id=0, num_shards=1, iplist=None, user=None, password=None):
        super().__init__(root, iplist=iplist, user=user, password=password)
        self._login = iplist, user, password
        files = tree.load(self.root)
        self.files, self.labels = files.names, files.labels
        shard_size = len(self.files) // num_shards
        self.shard_offset = shard_size * shard_id
        self.full_iters = shard_size // batch_size
        if self.full_iters == 0:
            raise UserError(f"{root}: {len(self.files)} images make no batch of {batch_size} for each of {num_shards} shards")
        self.dataset = self.perm = self.last_seen_epoch = None

    def load(self):
        """In DALI's worker process, at its first sample."""
        folder = engine().KSpeedFolder
        self.dataset = self if folder is KSpeedFolder else folder(self.root, None, self.workers, *self._login)

    def __call__(self, sample_info):
        if self.dataset is None:
            self.load()
        if sample_info.iteration >= self.full_iters:
            raise StopIteration
        if self.last_seen_epoch != sample_info.epoch_idx:
            self.last_seen_epoch = sample_info.epoch_idx
            self.perm = np.random.default_rng(seed=42 + sample_info.epoch_idx).permutation(len(self.files))
        number = self.perm[sample_info.idx_in_epoch + self.shard_offset]
        content = self.dataset.getBIN(os.path.join(self.root, self.files[number]))
        return np.frombuffer(content, dtype=np.uint8), np.array([self.labels[number]], dtype=np.int32)


# --- Many samples ------------------------------------------------------------------------------------------------------


def image_paths(root):
    """Every file below root with the name of an image."""
    return [
        os.path.join(folder, name)
        for folder, _, names in sorted(os.walk(root, followlinks=True))
        for name in sorted(names)
        if name.lower().endswith(tree.EXTENSIONS)
    ]


def for_each(root, paths, threads, function):
    """(what `function` says of its key, path and state, bytes) of each file, in order, so many at a time."""

    def one(path):
        try:
            about = os.stat(path)
            return function(sample_key(root, path, about), path, about), about.st_size
        except OSError:
            return UNREADABLE, 0

    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(paths), AT_ONCE):
            yield from pool.map(one, paths[start : start + AT_ONCE])


def put(cache, key, path, about, verify=False):
    """THERE, or what became of putting it there. Without `verify`, what is there under its key is not read back."""
    if len(cache.get(key) or b"") == about.st_size if verify else cache.has(key):
        return THERE
    content = _read(path)
    return cache.set(key, content) if _is_still(path, about, content) else NOT_STORED
