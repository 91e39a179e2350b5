"""Photographs as samples of the shared cache: their keys, a Tree that reads through the cache,
and filling it in advance."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Optional, Union

from common.errors import UserError
from datasets.kspeed.cache import SampleCache
from datasets.kspeed.servers import Addresses
from datasets.kspeed.values import NOT_STORED
from datasets.photos import files, tree

THREADS = 16
QUEUED = 1024  # images handed to the threads at a time
# Outcomes for an image, besides those of SampleCache.set.
CACHED = "there"
UNREADABLE = "unreadable"


def open_cache(
    iplist: Addresses = None,
    user: Optional[str] = None,
    password: Optional[str] = None,
    deadline: float = 0.05,
) -> SampleCache:
    """Return the cache on these servers; UserError if the user has no password.

    `deadline`: seconds for one get or set.

    KSPEED_IPLIST and, for a user, KSPEED_PASSWORD stand in for missing arguments."""
    if user and not password:
        password = os.environ.get("KSPEED_PASSWORD")
        if not password:
            raise UserError(f"the password of the cache's user {user} is missing: set KSPEED_PASSWORD")
    return SampleCache(iplist or os.environ.get("KSPEED_IPLIST"), user or None, password or None, deadline)


def vendor_folder_class() -> Optional[type]:
    """Return the class KSpeedFolder of Alibaba's own package; None if that is not installed."""
    try:
        from kspeed.utils.data.kspeeddataset import KSpeedFolder  # pyright: ignore[reportMissingImports] (in no registry)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("kspeed"):
            raise
        return None
    return KSpeedFolder


# --- One sample ---------------------------------------------------------------------------------------------


def sample_key(root: str, path: str, info: os.stat_result) -> str:
    """Return a file's key: the last two names in `root` (train and val may have equal files),
    path from there, size, time."""
    name = path[len(root) + 1 :] if path.startswith(root + os.sep) else os.path.relpath(path, root)
    return f"{_last_two_names(root)}\0{name}\0{info.st_size}\0{info.st_mtime_ns}"


@functools.lru_cache(maxsize=64)
def _last_two_names(root: str) -> str:
    return os.sep.join(os.path.abspath(root).split(os.sep)[-2:])


def read_through(cache: SampleCache, root: str, path: str, is_known_miss: bool = False) -> bytes:
    """Return a file's bytes: the cache's unless `is_known_miss`, else the file's,
    which are then cached if it is unchanged."""
    info = os.stat(path)
    key = sample_key(root, path, info)
    content = None if is_known_miss else _if_complete(cache.get(key), info)
    if content is None:
        content = files.read(path)
        if _is_unchanged(path, info, content):
            cache.set(key, content)
    return content


def _if_complete(content: Optional[bytes], info: os.stat_result) -> Optional[bytes]:
    """Return the cached content if it is as long as the file, else None."""
    return content if content is not None and len(content) == info.st_size else None


def _is_unchanged(path: str, info: os.stat_result, content: bytes) -> bool:
    """Return whether `content` is whole and the file's size and time are still those of `info`,
    taken before it was read."""
    try:
        current_info = os.stat(path)
    except OSError:
        return False
    return (
        len(content) == info.st_size == current_info.st_size and info.st_mtime_ns == current_info.st_mtime_ns
    )


# --- The samples of a job -----------------------------------------------------------------------------------


@dataclasses.dataclass
class CachedTree(tree.Tree):
    """A Tree whose photographs are read through a cache."""

    has_sample_files = False

    cache: SampleCache
    # By the numbers of this tree, so that pick() does not take them along.
    prefetched: dict[int, Optional[bytes]] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Ask the cache for these samples together, which costs less than one by one. read() then returns
        those found."""
        entries = {}
        for number in numbers:
            with contextlib.suppress(OSError):  # read() will raise it
                path = self.path(number)
                info = os.stat(path)
                entries[number] = sample_key(self.folder, path, info), info
        contents = self.cache.get_many(key for key, _ in entries.values())
        self.prefetched = {
            number: _if_complete(contents[key], info) for number, (key, info) in entries.items()
        }

    def read(self, number: int) -> bytes:
        """Return a photograph's bytes: those of prefetch() if it got them, else the cache's or the file's."""
        was_prefetched = number in self.prefetched
        content = self.prefetched.pop(number, None)
        return (
            read_through(self.cache, self.folder, self.path(number), was_prefetched)
            if content is None
            else content
        )


@dataclasses.dataclass
class VendorsTree(tree.Tree):
    """A Tree whose photographs are read through the vendor's service."""

    has_sample_files = False

    client: type  # the vendor's KSpeedFolder
    login: tuple[Optional[str], Optional[str], Optional[str]]  # iplist, user, password

    def read(self, number: int) -> bytes:
        """Return a photograph's bytes, through the vendor's service."""
        return _vendor_client(os.getpid(), self.client, self.folder, self.login).getBIN(self.path(number))


@functools.lru_cache(maxsize=8)
def _vendor_client(_process: int, client: Callable[..., Any], root: str, login: Any) -> Any:
    """Return this process's client of Alibaba's service.

    A forked worker makes its own, because `_process` (an id) differs.
    """
    return client(root, None, THREADS, *login)


def through_cache(
    photos: tree.Tree, iplist: Optional[str] = None, user: Optional[str] = None
) -> Union[CachedTree, VendorsTree]:
    """Return a copy of the tree that reads through Alibaba's service if its package is installed,
    else through memcached."""
    client = vendor_folder_class()
    fields = {field.name: getattr(photos, field.name) for field in dataclasses.fields(tree.Tree)}
    if client is None:
        return CachedTree(**fields, cache=open_cache(iplist, user))
    return VendorsTree(**fields, client=client, login=(iplist, user, os.environ.get("KSPEED_PASSWORD")))


# --- Filling the cache --------------------------------------------------------------------------------------


def for_each(
    root: str, paths: Sequence[str], threads: int, function: Callable[[str, str, os.stat_result], Any]
) -> Iterator[tuple[Any, int]]:
    """Yield (function(key, path, stat), file size) of each file in order, called in threads;
    (UNREADABLE, 0) on an OSError."""

    def visit(path: str) -> Any:
        try:
            info = os.stat(path)
            return function(sample_key(root, path, info), path, info), info.st_size
        except OSError:
            return UNREADABLE, 0

    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(paths), QUEUED):
            yield from pool.map(visit, paths[start : start + QUEUED])


def put(cache: SampleCache, key: str, path: str, info: os.stat_result, verify: bool = False) -> str:
    """Store a file unless it is cached; return CACHED or the outcome of set().

    `verify`: fetch a cached sample to check it.
    """
    if verify and len(cache.get(key) or b"") == info.st_size:
        return CACHED
    if not verify and cache.has(key):
        return CACHED
    content = files.read(path)
    return cache.set(key, content) if _is_unchanged(path, info, content) else NOT_STORED
