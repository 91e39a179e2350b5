"""Batches of workers on the training process's own machine: past Ray's object store, and their bytes are not copied on the way.

A worker sends where they are in memory over a socket of the bridge process, and tells Ray only that it is done.
"""

import contextlib
import itertools
import os
import threading
from multiprocessing.connection import Client, Listener
from typing import Any, NamedTuple, Optional

from datasets.dpex.wire import Packed, Place, lay_out, receive_descriptors, send_descriptors
from datasets.memory import HAS_MEMFD, Memory

NUMBERS = itertools.count()  # of the sockets of this process
SECONDS = 60  # in which a batch is here after Ray has said that it is made


class Missing(Exception):
    """A batch that was made has not come."""


class Batch(NamedTuple):
    header: bytes
    places: list[Place]
    descriptors: list[int]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


class Near:
    """In the bridge process: what the workers of one iterator send. A batch goes by the key of its request."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, f"near-{next(NUMBERS)}")
        self._listener = Listener(self.path, "AF_UNIX")
        self._changed, self._closed = threading.Condition(), False
        self._awaited: set[int] = set()
        self._here: dict[int, Batch] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def expect(self, key: int) -> None:
        with self._changed:
            self._awaited.add(key)

    def forget(self) -> None:
        """Of all that was asked for nothing is needed any more."""
        with self._changed:
            self._awaited.clear()
            while self._here:
                self._here.popitem()[1].close()
            self._changed.notify_all()

    def take(self, key: int) -> Batch:
        with self._changed:
            self._changed.wait_for(lambda: key in self._here or key not in self._awaited, SECONDS)
            self._awaited.discard(key)
            if key not in self._here:
                raise Missing("the worker has made it, but it has not come")
            return self._here.pop(key)

    def close(self) -> None:
        self._closed = True
        self.forget()
        with contextlib.suppress(OSError):
            Client(self.path, "AF_UNIX").close()  # ends the wait for the next one
        with contextlib.suppress(FileNotFoundError):  # a bridge that ends removes the folder
            self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection = self._listener.accept()
                if self._closed:
                    connection.close()
                    return
                threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection):
        with connection, contextlib.suppress(EOFError, OSError):
            while True:
                key, header, places, count = connection.recv()
                batch = Batch(header, places, receive_descriptors(connection, count))
                with self._changed:
                    if key in self._awaited:
                        self._here[key] = batch
                        self._changed.notify_all()
                    else:
                        batch.close()


class Sender:
    """In a worker: the other end, where it is on this machine."""

    def __init__(self, path: Optional[str], memory: Memory) -> None:
        self._memory = memory
        self._connection: Any = None
        if path and HAS_MEMFD:
            with contextlib.suppress(OSError):  # another user's, or in another container
                self._connection = Client(path, "AF_UNIX")

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def send(self, key: int, packed: Packed) -> bool:
        """Whether it is on its way."""
        if not self._connection:
            return False
        try:
            descriptors, places = lay_out(packed.buffers, self._memory)
            send_descriptors(self._connection, (key, packed.header, places, len(descriptors)), descriptors)
            return True
        except OSError:
            self._connection = None
            return False
