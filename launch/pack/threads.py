"""The same work for many things, in threads, with one progress."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Callable

from common.progress import Progress

Done = Callable[[int], None]  # adds one thing of so many bytes to the progress


def in_threads(
    workers: int, work: Callable[[Any, Done], object], items: Sequence[Any], progress: Progress
) -> None:
    """Call `work(item, done)` for all items in threads.

    `work` calls done(size), which raises once another item has failed.
    """
    failed = threading.Event()

    def done(size: int) -> None:
        if failed.is_set():
            raise InterruptedError
        progress.add(1, size)

    with progress, ThreadPoolExecutor(workers) as pool:
        try:
            for task in as_completed([pool.submit(work, item, done) for item in items]):
                task.result()
        except BaseException:
            failed.set()
            pool.shutdown(cancel_futures=True)
            raise
