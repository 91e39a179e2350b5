"""The worker processes of a torch DataLoader: how they begin, send their batches, fail and end."""

import atexit
import contextlib
import functools
import multiprocessing
import os
import shutil
import signal
import sys
import weakref
from collections.abc import Iterable, Sequence
from multiprocessing import queues
from multiprocessing.reduction import ForkingPickler
from typing import Any, Callable, Optional

import numpy as np
import torch
from torch.utils.data._utils import collate, worker

from common import progress
from common.alive.stops import STOPS
from common.devices.diagnosis import KILLED
from common.errors import STOP_SIGNALS, TrainingFailed, UserError, one_line
from common.files import create_scratch_folder

SHARED_MEMORY = "/dev/shm"
STOP_SECONDS = 1  # longest wait for workers to end when the job is told to stop
MIN_SHARED_BYTES = (
    1 << 30
)  # bytes of /dev/shm per rank that suffice for the batches of loader processes; a container often has 64 MiB
# torch documents this registry for custom collate functions
COLLATE_FUNCTIONS = collate.default_collate_fn_map
ORIGINAL_COLLATE = COLLATE_FUNCTIONS[torch.Tensor]


def worker_batches(data_set: Any, workers: int, prefetch: int, **options: Any) -> "WorkerBatches":
    """Return a DataLoader with worker processes; UserError if they cannot have locks.

    `options`: more of DataLoader.
    """
    if os.path.isdir(SHARED_MEMORY) and not os.access(SHARED_MEMORY, os.W_OK):
        raise UserError(
            f"{SHARED_MEMORY} cannot be written to, and loader processes keep their locks there: mount it "
            "writable, or give --workers 0"
        )
    if has_little_shared_memory():
        _warn_of_small_memory()
    loader = WorkerBatches(
        data_set,
        num_workers=workers,
        prefetch_factor=prefetch,
        persistent_workers=True,
        worker_init_fn=begin_worker,
        **options,
    )
    _make_socket_folder()
    atexit.register(_end_workers_of, weakref.ref(loader))
    return loader


class WorkerBatches(torch.utils.data.DataLoader):
    """A DataLoader with a clear error if a worker is killed while it sends a batch;
    torch would report a broken connection.

    Workers that do not end by themselves are sent SIGKILL. They ignore SIGTERM, after which Python would wait
    for ever.
    """

    def __iter__(self) -> Any:
        batches = super().__iter__()
        _let_torch_end_workers(batches)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (ConnectionError, EOFError, FileNotFoundError):
                # not the data set's: WithSampleErrors wraps those
                raise TrainingFailed(KILLED) from None
            except Exception as error:
                killed_error = _error_of_killed_worker(batches, error)
                # a reference cycle keeps the iterator alive, so nothing else would end them soon
                self.end_workers()
                if killed_error:
                    raise killed_error from None
                raise
            yield batch

    def end_workers(self) -> None:
        """End the worker processes, if there are any; the next loop over the loader starts new ones."""
        iterator = getattr(self, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
        self._iterator = None


def _worker_processes(batches: Any) -> Sequence[Any]:
    """Return the processes of a DataLoader's iterator, which torch keeps to itself."""
    return getattr(batches, "_workers", ())


def _let_torch_end_workers(batches: Any) -> None:
    """Make the ways in which torch ends workers suit these: its SIGTERM, which they ignore, becomes SIGKILL,
    and it does not wait for long once the job is told to stop."""
    processes = _worker_processes(batches)
    for process in processes:
        process._popen.terminate = process._popen.kill
        process.join = functools.partial(_join, process, STOP_SECONDS / len(processes))


def _error_of_killed_worker(batches: Any, error: Exception) -> Optional[RuntimeError]:
    """Return torch's usual error for a killed worker, if this is the one that it raises when it notices
    before SIGCHLD."""
    killed = [process for process in _worker_processes(batches) if (process.exitcode or 0) < 0]
    if not killed or "exited unexpectedly" not in str(error):
        return None
    signal_name = signal.strsignal(-killed[0].exitcode)
    return RuntimeError(f"DataLoader worker (pid {killed[0].pid}) is killed by signal: {signal_name}.")


def _join(process: Any, seconds: float, timeout: Optional[float] = None) -> None:
    """Wait at most `timeout` for a worker to end, or `seconds` if the job is told to stop:
    its next data may never come."""
    type(process).join(process, seconds if STOPS.noted else timeout)


@functools.cache
def _make_socket_folder() -> None:
    """Make a folder for the sockets of loader processes, unless the disk is full.

    After a kill, the next start removes it.
    """
    current_process: Any = multiprocessing.current_process()
    with contextlib.suppress(OSError):  # the disk may be full
        folder = create_scratch_folder()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        if len(folder) < 80:  # the path of a socket may have 107 bytes
            current_process._config["tempdir"] = folder  # inherited by the processes that it starts


def _end_workers_of(reference: Callable[[], Any]) -> None:
    """End a loader's workers before Python's exit handler would kill them;
    `reference` is a weak reference to the loader."""
    loader = reference()
    if loader is not None:
        loader.end_workers()


def begin_worker(_worker: int) -> None:
    """Prepare a worker process, as the worker_init_fn of a DataLoader.

    It ignores the platform's stop signals, because it must live until the job has saved; sends batches
    without /dev/shm if that is small; and reports what it cannot send."""
    if has_little_shared_memory():  # with no shared memory left, a process would be killed (SIGBUS)
        ForkingPickler.register(torch.UntypedStorage, _reduce_to_bytes)
        collate_in_own_memory()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _print_error
    queue_class: Any = queues.Queue
    queue_class._on_queue_feeder_error = _send_error_instead


def _print_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an error, except a ConnectionError: the thread that hands over tensors gets one when the job
    takes no more."""
    if not issubclass(kind, ConnectionError):
        sys.__excepthook__(kind, error, trace)


def _send_error_instead(queue: Any, error: Exception, unsent: object) -> None:
    """Send an error in place of a batch that cannot be sent.

    Python would print it and forget the batch, for which the training would wait for ever. Python's thread
    that fills the queue calls it, tried with 3.11, with (number, batch); with bytes if the reader was
    lost."""
    if not isinstance(unsent, tuple):
        _print_error(type(error), error, error.__traceback__)
        return
    number, batch = unsent
    try:
        queue.put((number, _explain_unsent(batch, one_line(error))))
    except Exception:  # whatever is in it, the training must not wait for it
        queue.put(
            (
                number,
                TrainingFailed(f"a loader process cannot send a batch ({one_line(error)}): give --workers 0"),
            )
        )


def _explain_unsent(batch: Any, reason: str) -> Exception:
    """Return an error that names the part of the batch that cannot be sent,
    and its sample if that is clear."""
    *content, ids = batch
    path, culprit = _find_unsendable(content)
    if not path or (isinstance(culprit, torch.Tensor) and not culprit.requires_grad):
        # It is not the data set's fault.
        return TrainingFailed(
            f"a loader process cannot send a batch ({reason}): give fewer --workers, or --workers 0"
        )
    indices = [key for key, length in path if length == len(ids)]
    sample = (
        f"sample {ids[indices[0]]}"
        if len(indices) == 1
        else f"one of samples {', '.join(str(int(sample_id)) for sample_id in ids)}"
    )
    part = "".join(f"[{key!r}]" for key, _ in path[1:])
    subject = f"{part} of its batch is" if part else "the batch is"
    return UserError(
        f"{sample}: a loader process cannot send a batch ({reason}): {subject} a {type(culprit).__name__}; "
        "let the data set give tensors, numbers and texts, or give --workers 0"
    )


def _find_unsendable(value: object) -> tuple[list[tuple[Any, int]], Any]:
    """Return the first part of `value` that cannot be pickled, and before it the way to it from outside to
    inside: the key in each dict or list, with the length of the list, 0 for a dict."""
    parts: Iterable = ()
    length = 0
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
        length = len(value)
    for key, part in parts:
        if not _can_be_sent(part):
            path, culprit = _find_unsendable(part)
            return [(key, length), *path], culprit
    return [], value


def _can_be_sent(value: object) -> bool:
    try:
        ForkingPickler.dumps(value)
    except Exception:
        return False
    return True


def has_little_shared_memory() -> bool:
    """Return whether /dev/shm is too small for the batches of all ranks of this node."""
    if not os.path.isdir(SHARED_MEMORY):
        return False
    stats = os.statvfs(SHARED_MEMORY)
    return stats.f_blocks * stats.f_frsize < MIN_SHARED_BYTES * int(os.environ.get("LOCAL_WORLD_SIZE", 1))


@functools.cache
def _warn_of_small_memory():
    """Warn, once and only in the first rank of a node, that /dev/shm is small."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        progress.warn(
            "/dev/shm has less than 1 GiB for each rank, so loader processes send their batches through "
            "pipes, which takes longer: start the container with more (--shm-size)"
        )


def _reduce_to_bytes(storage: torch.UntypedStorage) -> tuple[Callable[..., Any], tuple]:
    """Reduce a storage to its bytes, which are then pickled into the message;
    torch would put them into shared memory."""
    return _restore_storage, (torch.empty(0, dtype=torch.uint8).set_(storage).numpy(),)


def _restore_storage(content: np.ndarray) -> torch.UntypedStorage:
    return torch.from_numpy(content).untyped_storage()


def collate_in_own_memory() -> None:
    """Have default_collate make batches in ordinary memory instead of /dev/shm,
    because they are sent in messages."""
    COLLATE_FUNCTIONS[torch.Tensor] = _collated


def _collated(batch: list, **kwargs: Any) -> Any:
    info = worker._worker_info
    worker._worker_info = None
    try:
        return ORIGINAL_COLLATE(batch, **kwargs)
    finally:
        worker._worker_info = info
