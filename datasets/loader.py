"""Batches on the device, in the order of the sampler: of any samples (SampleLoader),
or of images (DeviceLoader).

On a GPU a thread prepares the batches on a second stream, during the training step.
"""

import argparse
import functools
import queue
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any, Callable, Optional

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data._utils import collate

from common import devices, moments, progress
from common.alive.stops import STOPS
from common.devices.seeds import are_different, seeded_batch, states
from common.errors import SampleError, TrainingFailed, UserError, is_system_error, one_line

AHEAD = 2  # batches that are ready on the GPU while the network computes
THREAD_NAME = "batches ahead"  # name of the thread that makes them
THREAD = threading.local()  # has `is_prefetching` in that thread, and in a process that it has forked
# longest wait for the batch that is being made when the job is told to stop: it may never come
STOP_SECONDS = 1
DRAWS = (
    "the data set draws random numbers in the process that trains, where they cannot be seeded for each "
    "batch, so a restart draws others: give --workers 1 or more"
)


class Loader:
    """Moves the tensors of batches to the device.

    `batches` yields tuples that end with the sample ids, or errors to raise.
    """

    pixels: Optional[Callable] = None
    unit = "samples"

    def __init__(self, batches: Any, sampler: Any, device: torch.device, pin_memory: bool = True):
        self.sampler = sampler
        self.device = device
        self._batches = batches
        self._move = functools.partial(devices.to_device, device=device, pin=pin_memory)
        self.ids: Any = None
        self.beside = devices.has_streams(device)  # whether the transfer happens during the training step
        self._clock = TransferClock(device)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, also within one that was resumed in its middle."""
        return len(self.sampler) + getattr(self.sampler, "batches_before", 0)

    def __iter__(self) -> Iterator[Any]:
        """Yield each batch on the device; `ids` has the ids of its samples meanwhile.

        After the body of the loop the moment "batch" is announced (common/moments.py).
        """
        batches = self._device_batches()
        if self.beside:
            batches = read_ahead(batches, AHEAD)
        batches = STOPS.each(batches)
        for number, (batch, ids, event) in enumerate(batches):
            if event:
                stream = devices.current_stream(self.device)
                stream.wait_event(event)
                for tensor in pytree.tree_flatten(batch)[0]:
                    if isinstance(tensor, torch.Tensor):
                        tensor.record_stream(
                            stream
                        )  # its memory is not given away before this stream has read it
            self.ids = ids
            yield batch
            moments.announce("batch", number + 1, self)

    def transfer_seconds(self) -> float:
        """Return the seconds spent on moving and preparing batches since the last call."""
        return self._clock.read()

    def _device_batches(self) -> Generator:
        """Yield (batch on the device, ids, event after the transfer or None).

        Runs in the thread, if there is one.
        """
        devices.use(self.device)
        epoch = self.sampler.epoch
        batches = iter(self._batches)
        while True:
            with self._clock.stream():
                batch = next(batches, None)
            if batch is None:
                return
            if isinstance(batch, Exception):
                raise batch
            ids = _copy_tensor(batch[-1])
            with self._clock as clock:
                prepared = self._prepare(batch[:-1], ids, epoch)
            yield prepared, ids, clock.end

    def _prepare(self, batch: Any, _ids: torch.Tensor, _epoch: int) -> Any:
        return pytree.tree_map(
            lambda leaf: self._move(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch[0]
        )


class SampleLoader(Loader):
    """Batches of any data set that has a length and gives sample number i as data_set[i].

    A batch is what `collate_fn` makes of its samples, with the tensors on the device. The global generators
    of Python, NumPy and torch are seeded for each batch, so a restart draws the same numbers.
    """

    def __init__(
        self, data_set: Any, sampler: Any, device: torch.device, workers: int = 0,
        collate_fn: Callable[[list], Any] = collate.default_collate,
    ):  # fmt: skip
        super().__init__(torch_batches(_Samples(data_set, collate_fn), sampler, workers), sampler, device)
        # without workers the data set's random draws must not fall into a step
        self.beside = self.beside and workers > 0


class _Samples:
    def __init__(self, data_set: Any, collate_fn: Callable[[list], Any]):
        self._data_set = data_set
        self._collate = collate_fn

    def __getitem__(self, epoch_and_ids: tuple[int, Any]) -> tuple[Any, torch.Tensor]:
        numbers = epoch_and_ids[1].tolist()
        getitems = getattr(self._data_set, "__getitems__", None)
        samples = getitems(numbers) if getitems else [self._data_set[number] for number in numbers]
        return self._collate(samples), torch.tensor(numbers)


class DeviceLoader(Loader):
    """Yields (images, labels), ready for the network; `batches` yields (uint8 images, labels, ids)."""

    unit = "images"

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
        """`mean`, `std`: of pixels from 0 to 1; `augment`: for uint8 batches.

        `layout`: memory format (None: the fastest)."""
        super().__init__(batches, sampler, device, pin_memory)
        self.dtype = dtype
        self._augment = augment
        # returns the name of a sample's file; None if samples have none
        self.file_of: Optional[Callable[[int], str]] = None
        self._layout = layout or devices.layout(device)
        mean, std = (torch.tensor(value).view(1, -1, 1, 1) for value in (mean, std))
        with self._clock.stream():  # the stream on which they are used
            self._scale, self._shift = (value.to(device) for value in (1 / (255 * std), -mean / std))

    def pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Return normalised images as uint8 pixels from 0 to 255."""
        return ((images.float() - self._shift) / self._scale).round().clamp(0, 255).to(torch.uint8)

    def _prepare(self, batch: Any, ids: torch.Tensor, epoch: int) -> Any:
        images, labels = batch
        images = self._move(images)
        if self._augment:
            images = self._augment(images, ids, epoch=epoch)
        images = images.to(torch.float32, memory_format=self._layout)
        images = images.mul_(self._scale).add_(self._shift).to(self.dtype)
        return images, self._move(_copy_tensor(labels))


def _copy_tensor(value: object) -> Any:
    """Return a copy of a tensor, anything else as it is:
    a tensor from a loader process holds a file descriptor open."""
    return value.clone() if isinstance(value, torch.Tensor) else value


class TransferClock:
    """Measures the seconds of the work inside `with`; on a GPU the work goes to a second stream and is timed
    by events."""

    def __init__(self, device: torch.device):
        self._stream = devices.side_stream(device)
        self._seconds = 0.0
        self._events = []
        self.end: Any = None  # event after the work, for other streams to wait for; None on a CPU
        # the loading thread and the training thread both read the events
        self._events_lock = threading.Lock()

    def stream(self) -> Any:
        """Return a context in which operations go to the second stream; one without effect on a CPU."""
        return devices.on_stream(self._stream)

    def __enter__(self) -> "TransferClock":
        self._start_mark = self._mark()
        self._stream_context = self.stream()
        self._stream_context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._stream_context.__exit__(*error)
        if self._stream:
            self.end = self._mark()
            self._events.append((self._start_mark, self.end))
            self._add_finished()
        else:
            self._seconds += time.perf_counter() - self._start_mark

    def _mark(self) -> Any:
        if not self._stream:
            return time.perf_counter()
        return devices.record_event(self._stream)

    def _add_finished(self):
        with self._events_lock:
            while self._events and self._events[0][1].query():
                start, end = self._events.pop(0)
                self._seconds += start.elapsed_time(end) / 1000

    def read(self) -> float:
        """Return the seconds of work that was finished since the last call."""
        self._add_finished()
        with self._events_lock:
            seconds = self._seconds
            self._seconds = 0.0
        return seconds


def _start_with_one_torch_thread(work: Callable[[], None]) -> threading.Thread:
    """Start a thread in which torch computes with one thread, as many would take the cores of the training.

    torch.set_num_threads() of a thread is also valid for threads that are started later; so it is waited for,
    and the number of before set again."""
    num_threads = torch.get_num_threads()
    has_set_its_own = threading.Event()

    def begin() -> None:
        torch.set_num_threads(1)
        has_set_its_own.set()
        work()

    thread = threading.Thread(target=begin, name=THREAD_NAME, daemon=True)
    thread.start()
    has_set_its_own.wait()
    torch.set_num_threads(num_threads)
    return thread


def read_ahead(items: Generator, depth: int) -> Iterator:
    """Yield the items.

    A thread makes up to `depth` ahead; its errors are raised here, and it is told to end with the loop.
    """
    results = queue.Queue()
    free_slots = threading.Semaphore(depth)
    stopped = threading.Event()

    def work() -> None:
        THREAD.is_prefetching = True
        try:
            while free_slots.acquire() and not stopped.is_set():
                results.put((next(items), None))
        except BaseException as error:  # among them StopIteration, the end of the items
            results.put((None, error))

    thread = _start_with_one_torch_thread(work)
    try:
        while True:
            item, error = results.get()
            if isinstance(error, StopIteration):
                return
            if error:
                raise error
            free_slots.release()
            yield item
    finally:
        stopped.set()
        free_slots.release()
        thread.join(STOP_SECONDS if STOPS.noted else None)
        if not thread.is_alive():
            items.close()


def more_workers(args: argparse.Namespace) -> Iterator[str]:
    """Yield a suggestion for a slow loader, if it has fewer worker processes than its rank has cores."""
    cores = devices.cores_per_rank(args)
    if devices.loader_workers(args) < cores:
        yield f"--workers {cores} (the cores of this node for each rank; now {devices.loader_workers(args)})"


def torch_batches(
    data_set: object, sampler: object, workers: int = 0, prefetch: int = 2
) -> torch.utils.data.DataLoader:
    """Return a DataLoader that gives `data_set[epoch, ids]` for each batch of ids of the sampler, or in its
    place the error that it has raised.

    `prefetch`: batches that each worker makes ahead. If the data set has a method `announced`, it is told the
    coming batches (WithEpoch).
    """
    # The sampler gives whole batches of ids. With a generator of its own, an epoch draws nothing from the
    # global one.
    batches_with_epoch = WithEpoch(sampler, getattr(data_set, "announced", iter))
    options: dict[str, Any] = {
        "sampler": batches_with_epoch,
        "batch_size": None,
        "generator": torch.Generator(),
    }
    if workers:
        from datasets.processes import worker_batches

        return worker_batches(WithSampleErrors(data_set, sampler), workers, prefetch, **options)
    return torch.utils.data.DataLoader(WithSampleErrors(data_set, sampler), **options)


class WithSampleErrors(torch.utils.data.Dataset):
    """A data set whose errors name the sample.

    A UserError, TrainingFailed or system error is returned as the batch, for Loader to raise: torch would
    make a text of it.
    """

    def __init__(self, data_set: Any, sampler: Any):
        self._data_set = data_set
        self._seed = getattr(sampler, "seed", 0)
        self._has_checked_draws = False

    def __getitem__(self, epoch_and_ids: tuple[int, Any]) -> Any:
        epoch, ids = epoch_and_ids
        try:
            return self._load(epoch, ids)
        except (UserError, TrainingFailed) as error:  # their texts already name the cause
            return error
        except (Exception, SystemExit) as error:
            # a data set that calls sys.exit() would end a process without a word
            if is_system_error(error):
                return error
            text = f"{self._culprit(epoch, ids)}: {type(error).__name__}: {one_line(error)[:300]}"
            raise SampleError(text) from error

    def _load(self, epoch: int, ids: np.ndarray) -> Any:
        in_prefetch_thread = getattr(THREAD, "is_prefetching", False)
        if torch.utils.data.get_worker_info() or not in_prefetch_thread:
            with seeded_batch(self._seed, epoch, int(ids[0]) if len(ids) else 0):
                return self._data_set[epoch, ids]
        states_before = None if self._has_checked_draws else states()  # no training step runs meanwhile
        self._has_checked_draws = True
        batch = self._data_set[epoch, ids]
        if states_before and are_different(states_before, states()):
            progress.warn(DRAWS)
        return batch

    def _culprit(self, epoch: int, ids: np.ndarray) -> str:
        """Return a text that names the first sample that fails when loaded alone,
        or all samples of the batch if none does."""
        for number in range(len(ids)):
            try:
                self._data_set[epoch, ids[number : number + 1]]
            except (Exception, SystemExit):
                return f"sample {ids[number]}"
        return f"one of samples {', '.join(map(str, ids))}"


class WithEpoch:
    """Yields (epoch, ids) for each batch of the sampler: worker processes outlive an epoch,
    so they are told which it is.

    `announced(batches)` yields what it is given, and may look ahead.
    """

    def __init__(self, sampler: Any, announced: Callable[[Any], Iterator] = iter):
        self._sampler = sampler
        self._announced = announced

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return ((self._sampler.epoch, ids) for ids in self._announced(self._sampler))
