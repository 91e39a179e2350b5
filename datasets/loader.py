"""Batches on the device, in the order of the sampler: of any samples (SampleLoader), or of images (DeviceLoader).

On a GPU a thread prepares the batches on a second stream, during the training step.
"""

import argparse
import atexit
import contextlib
import functools
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import threading
import time
import weakref
from collections.abc import Generator, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, Callable, Optional

import torch
from torch.utils import _pytree as pytree
from torch.utils.data._utils import collate, worker

from common import devices, malloc, progress
from common.alive.stops import STOPS
from common.errors import STOP_SIGNALS, SampleError, TrainingFailed, UserError, is_of_the_system, one_line
from common.files import scratch_folder
from common.seeds import are_different, seeded_batch, states

AHEAD = 2  # batches that are ready on the GPU while the network computes
THREAD_NAME = "batches ahead"  # name of the thread that makes them
STOP_SECONDS = 1  # longest wait for the batch that is being made when the job is told to stop: it may never come
LITTLE = 1 << 30  # bytes of /dev/shm per rank that suffice for the batches of loader processes; a container often has 64 MiB
DRAWS = (
    "the data set draws random numbers in the process that trains, where they cannot be seeded for each batch, so a restart "
    "draws others: give --workers 1 or more"
)
COLLATED = collate.default_collate_fn_map  # torch documents this registry for custom collate functions
ORIGINAL = COLLATED[torch.Tensor]


class Loader:
    """Moves the tensors of batches to the device. `batches` yields tuples that end with the sample ids, or errors to raise."""

    pixels: Optional[Callable] = None

    def __init__(self, batches: Any, sampler: Any, device: torch.device, pin_memory: bool = True):
        self.sampler, self.device = sampler, device
        self._batches = batches
        self._move = functools.partial(devices.to_device, device=device, pin=pin_memory)
        self.ids: Any = None
        self.beside = devices.has_queues(device)  # whether the transfer happens during the training step
        self._clock = TransferClock(device)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        for batch, ids, ready in STOPS.each(ahead(self._moved(), AHEAD) if self.beside else self._moved()):
            if ready:
                stream = devices.current_stream(self.device)
                stream.wait_event(ready)
                for tensor in pytree.tree_flatten(batch)[0]:
                    if isinstance(tensor, torch.Tensor):
                        tensor.record_stream(stream)
            self.ids = ids
            yield batch

    def transfer_seconds(self) -> float:
        """Return the seconds spent on moving and preparing batches since the last call."""
        return self._clock.read()

    def _moved(self):
        devices.use(self.device)
        epoch, batches = self.sampler.epoch, iter(self._batches)
        while True:
            with self._clock.stream():
                batch = next(batches, None)
            if batch is None:
                return
            if isinstance(batch, Exception):
                raise batch
            ids = _copied(batch[-1])
            with self._clock as clock:
                prepared = self._prepared(batch[:-1], ids, epoch)
            yield prepared, ids, clock.end

    def _prepared(self, batch, _ids, _epoch):
        return pytree.tree_map(lambda leaf: self._move(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch[0])


class SampleLoader(Loader):
    """Batches of any data set that has a length and gives sample number i as data_set[i].

    A batch is what `collate_fn` makes of its samples, with the tensors on the device. The global generators of Python, NumPy
    and torch are seeded for each batch, so a restart draws the same numbers.
    """

    def __init__(
        self, data_set: Any, sampler: Any, device: torch.device, workers: int = 0,
        collate_fn: Callable[[list], Any] = collate.default_collate,
    ):  # fmt: skip
        super().__init__(torch_batches(_Samples(data_set, collate_fn), sampler, workers), sampler, device)
        self.beside = self.beside and workers > 0  # without workers the data set's random draws must not fall into a step


class _Samples:
    def __init__(self, data_set: Any, collate_fn: Callable[[list], Any]):
        self._data_set, self._collate = data_set, collate_fn

    def __getitem__(self, epoch_and_ids: tuple[int, Any]) -> tuple[Any, torch.Tensor]:
        numbers = epoch_and_ids[1].tolist()
        all_at_once = getattr(self._data_set, "__getitems__", None)
        samples = all_at_once(numbers) if all_at_once else [self._data_set[number] for number in numbers]
        return self._collate(samples), torch.tensor(numbers)


class DeviceLoader(Loader):
    """Yields (images, labels), ready for the network; `batches` yields (uint8 images, labels, ids)."""

    def __init__(
        self,
        batches: Any,
        sampler: Any,
        device: torch.device,
        mean: Any,
        std: Any,
        augment: Optional[Callable] = None,
        dtype: torch.dtype = torch.float32,
        pin_memory: bool = True,
        layout: Optional[torch.memory_format] = None,
    ):
        """`mean`, `std`: of pixels from 0 to 1; `augment`: for uint8 batches; `layout`: memory format (None: the fastest)."""
        super().__init__(batches, sampler, device, pin_memory)
        self.dtype, self._augment = dtype, augment
        self.file_of: Optional[Callable[[int], str]] = None  # returns the name of a sample's file; None if samples have none
        self._layout = layout or devices.layout(device)
        mean, std = (torch.tensor(value).view(1, -1, 1, 1) for value in (mean, std))
        with self._clock.stream():  # the stream on which they are used
            self._scale, self._shift = (value.to(device) for value in (1 / (255 * std), -mean / std))

    def pixels(self, images: torch.Tensor) -> torch.Tensor:
        return ((images.float() - self._shift) / self._scale).round().clamp(0, 255).to(torch.uint8)

    def _prepared(self, batch, ids, epoch):
        images, labels = batch
        images = self._move(images)
        if self._augment:
            images = self._augment(images, ids, epoch=epoch)
        images = images.to(torch.float32, memory_format=self._layout)
        images = images.mul_(self._scale).add_(self._shift).to(self.dtype)
        return images, self._move(_copied(labels))


def _copied(kept):
    """Return a copy of a tensor, anything else as it is: a tensor from a loader process holds a file descriptor open."""
    return kept.clone() if isinstance(kept, torch.Tensor) else kept


class TransferClock:
    """Measures the seconds of the work inside `with`; on a GPU the work goes to a second stream and is timed by events."""

    def __init__(self, device: torch.device):
        self._stream = devices.side_stream(device)
        self._seconds, self._events = 0.0, []
        self.end: Any = None  # event after the work, for other streams to wait for; None on a CPU
        self._reading = threading.Lock()  # the loading thread and the training thread both read the events

    def stream(self) -> Any:
        return devices.on_stream(self._stream)

    def __enter__(self) -> "TransferClock":
        self._began, self._inside = self._mark(), self.stream()
        self._inside.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)
        if self._stream:
            self.end = self._mark()
            self._events.append((self._began, self.end))
            self._fold()
        else:
            self._seconds += time.perf_counter() - self._began

    def _mark(self) -> Any:
        if not self._stream:
            return time.perf_counter()
        return devices.record_event(self._stream)

    def _fold(self):
        with self._reading:
            while self._events and self._events[0][1].query():
                began, end = self._events.pop(0)
                self._seconds += began.elapsed_time(end) / 1000

    def read(self) -> float:
        """Return the seconds of work that was finished since the last call."""
        self._fold()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def ahead(items: Generator, depth: int) -> Iterator:
    """Yield the items. A thread makes up to `depth` ahead; its errors are raised here, and it is told to end with the loop."""
    made, room, over = queue.Queue(), threading.Semaphore(depth), threading.Event()

    def work():
        try:
            while room.acquire() and not over.is_set():
                made.put((next(items), None))
        except BaseException as error:  # among them StopIteration, the end of the items
            made.put((None, error))

    thread = threading.Thread(target=work, name=THREAD_NAME, daemon=True)
    thread.start()
    try:
        while True:
            item, error = made.get()
            if isinstance(error, StopIteration):
                return
            if error:
                raise error
            room.release()
            yield item
    finally:
        over.set()
        room.release()
        thread.join(STOP_SECONDS if STOPS.noted else None)
        if not thread.is_alive():
            items.close()


def more_workers(args: argparse.Namespace) -> Iterator[str]:
    """Yield a suggestion for a slow loader, if it has fewer worker processes than its rank has cores."""
    mine = devices.cores_of_a_rank(args)
    if devices.loader_workers(args) < mine:
        yield f"--workers {mine} (the cores of this node for each rank; now {devices.loader_workers(args)})"


def torch_batches(data_set: Any, sampler: Any, workers: int = 0, prefetch: int = 2) -> torch.utils.data.DataLoader:
    """Return a DataLoader of `data_set[epoch, ids]` for the sampler's batches of ids; an error may come in place of a batch."""
    if workers and has_little_shared_memory():
        _advise_more()
    loader = WorkerBatches(
        HandsOnErrors(data_set, sampler),
        sampler=WithEpoch(sampler),
        batch_size=None,  # the sampler gives whole batches of ids
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        persistent_workers=workers > 0,
        worker_init_fn=begin_worker,
        generator=torch.Generator(),  # so that starting an epoch draws nothing from the global generator
    )
    if workers:
        _make_socket_folder()
        atexit.register(_end_workers_of, weakref.ref(loader))
    else:
        malloc.keep()
    return loader


class WorkerBatches(torch.utils.data.DataLoader):
    """A DataLoader with a clear error if a worker is killed while it sends a batch; torch would report a broken connection.

    Workers that do not end by themselves are sent SIGKILL. They ignore SIGTERM, after which Python would wait for ever.
    """

    def __iter__(self) -> Any:
        batches = super().__iter__()
        workers = getattr(batches, "_workers", ())
        for process in workers:
            process._popen.terminate = process._popen.kill
            process.join = functools.partial(_join, process, STOP_SECONDS / len(workers))
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (ConnectionError, EOFError, FileNotFoundError):  # not the data set's: HandsOnErrors wraps those
                raise TrainingFailed(devices.KILLED) from None
            except Exception as error:
                dead = [process for process in getattr(batches, "_workers", ()) if (process.exitcode or 0) < 0]
                self.end_workers()  # a reference cycle keeps the iterator alive, so nothing else would end them soon
                if dead and "exited unexpectedly" in str(error):  # torch's words if it notices before SIGCHLD comes
                    how = signal.strsignal(-dead[0].exitcode)
                    raise RuntimeError(f"DataLoader worker (pid {dead[0].pid}) is killed by signal: {how}.") from None
                raise
            yield batch

    def end_workers(self) -> None:
        iterator = getattr(self, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
        self._iterator = None


def _join(process, seconds, timeout=None):
    """Wait at most `timeout` for a worker to end, or `seconds` if the job is told to stop: its next data may never come."""
    type(process).join(process, seconds if STOPS.noted else timeout)


class HandsOnErrors(torch.utils.data.Dataset):
    """A data set whose errors name the sample.

    A UserError, TrainingFailed or system error is returned as the batch, for Loader to raise: torch would make a text of it.
    """

    def __init__(self, data_set: Any, sampler: Any):
        self._data_set = data_set
        self._seed = getattr(sampler, "seed", 0)
        self._looked = False

    def __len__(self) -> int:
        return len(self._data_set)

    def __getitem__(self, epoch_and_ids: tuple[int, Any]) -> Any:
        epoch, ids = epoch_and_ids
        try:
            return self._load(epoch, ids)
        except (UserError, TrainingFailed) as error:  # their texts already name the cause
            return error
        except Exception as error:
            if is_of_the_system(error):
                return error
            text = f"{self._culprit(epoch, ids)}: {type(error).__name__}: {one_line(error)[:300]}"
            raise SampleError(text) from error

    def _load(self, epoch, ids):
        if worker.get_worker_info() or threading.current_thread().name != THREAD_NAME:  # a worker keeps its parent's name
            with seeded_batch(self._seed, epoch, int(ids[0]) if len(ids) else 0):
                return self._data_set[epoch, ids]
        before, self._looked = None if self._looked else states(), True  # no training step runs meanwhile
        batch = self._data_set[epoch, ids]
        if before and are_different(before, states()):
            progress.warn(DRAWS)
        return batch

    def _culprit(self, epoch, ids):
        """Return a text that names the first sample that fails when loaded alone, or all samples of the batch if none does."""
        for number in range(len(ids)):
            try:
                self._data_set[epoch, ids[number : number + 1]]
            except Exception:
                return f"sample {ids[number]}"
        return f"one of samples {', '.join(map(str, ids))}"


class WithEpoch:
    """Yields (epoch, ids) for each batch of the sampler: worker processes outlive an epoch, so they are told which it is."""

    def __init__(self, sampler: Any):
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return ((self._sampler.epoch, ids) for ids in self._sampler)


@functools.cache
def _make_socket_folder():
    """Make a folder for the sockets of loader processes, unless the disk is full. After a kill, the next start removes it."""
    this: Any = multiprocessing.current_process()
    with contextlib.suppress(OSError):  # the disk may be full
        folder = scratch_folder()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        if len(folder) < 80:  # the path of a socket may have 107 bytes
            this._config["tempdir"] = folder  # inherited by the processes that it starts


def _end_workers_of(reference):
    """End a loader's workers before Python's exit handler would kill them; `reference` is a weak reference to the loader."""
    loader = reference()
    if loader is not None:
        loader.end_workers()


def begin_worker(_worker: int) -> None:
    """Prepare a worker process. It ignores the platform's stop signals, because it must live until the job has saved."""
    malloc.keep()
    if has_little_shared_memory():  # with none left, a process would be killed (SIGBUS)
        ForkingPickler.register(torch.UntypedStorage, _within_the_message)
        collate_in_own_memory()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _but_for_a_lost_reader


def _but_for_a_lost_reader(kind, error, trace):
    """Print an error, except a ConnectionError: the thread that hands over tensors gets one when the job takes no more."""
    if not issubclass(kind, ConnectionError):
        sys.__excepthook__(kind, error, trace)


def has_little_shared_memory() -> bool:
    if not os.path.isdir("/dev/shm"):
        return False
    of_it = os.statvfs("/dev/shm")
    return of_it.f_blocks * of_it.f_frsize < LITTLE * int(os.environ.get("LOCAL_WORLD_SIZE", 1))


@functools.cache
def _advise_more():
    """Warn, once and only in the first rank of a node, that /dev/shm is small."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        progress.warn(
            "/dev/shm has less than 1 GiB for each rank, so loader processes send their batches through pipes, which takes "
            "longer: start the container with more (--shm-size)"
        )


def _within_the_message(storage):
    """Reduce a storage to its bytes, which are then pickled into the message; torch would put them into shared memory."""
    return _stored, (torch.empty(0, dtype=torch.uint8).set_(storage).numpy(),)


def _stored(content):
    return torch.from_numpy(content).untyped_storage()


def collate_in_own_memory() -> None:
    """Have default_collate make batches in ordinary memory instead of /dev/shm, because they are sent in messages."""
    COLLATED[torch.Tensor] = _collated


def _collated(batch, **how):
    info, worker._worker_info = worker._worker_info, None
    try:
        return ORIGINAL(batch, **how)
    finally:
        worker._worker_info = info
