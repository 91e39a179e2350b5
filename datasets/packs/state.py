"""The memory that the process which fetches a pack shares with those that read it: what has arrived,
and what is wanted.

It is a file beside the pack, which every process maps. Samples of all splits are numbered together.

    from byte   what                                                                            who writes it
    0           bell: time.monotonic_ns() of the last request                                   readers
    8           pulse: time.monotonic_ns() of the last sign of life                             the fetcher
    16, 24      holder: the fetcher's process id, and the namespace that gives it a meaning     the fetcher
    32          is_whole: 1 once all shards are whole and verified                              the fetcher
    40, 48, 56  arrived: bytes ahead of their shard's turn, in its turn, and found on the disk  the fetcher
    1024        failure: why the fetcher ended, as JSON; zeros if it did not                    the fetcher
    4096        place: of each sample a byte: ABSENT, IN_ITS_SHARD, PASSING or IN_ITS_FILE      the fetcher
    after it    requested_at: of each sample 8 bytes: 0, time.monotonic_ns(), or WAITING        readers

"The fetcher" is the process that holds the lease; a job that starts takes it for a moment, to forget what an
earlier one left.

There is no lock. An aligned word of up to eight bytes is stored in one piece on x86-64 and on 64-bit Arm.
Readers may overwrite each other's word in `requested_at`: one that waits writes it again once a second. Some
things are seen in another order than they were written, or have to be in order:

- The bytes of a sample come before its place. The fetcher writes them by a system call, in which Linux
  releases the page by an atomic operation that is a full barrier. A reader looks at the place first, and then
  reads them by a system call of its own.
- PASSING comes before a sample's file is deleted. A reader that saw the old place finds no file and looks
  again.
- `requested_at` comes before the bell. On Arm the fetcher may see the bell first and miss the request until
  the next one. A reader that waits rings once a second, so this costs a second and no sample.
- A failure is longer than a word. A part of it is no JSON, and the reader looks again; an older one is zeroed
  first.
- The holder is two words. Before it is killed, its command line has to be that of a fetcher of the same pack.
"""

import contextlib
import dataclasses
import errno
import glob
import hashlib
import json
import os
import threading
import time
from collections.abc import Sequence
from typing import Optional

import numpy as np

from common.alive import patience
from common.errors import TrainingFailed, UserError
from common.files import create, refuse_link, sha256
from common.secrets import mask
from common.storage import index, once

# The place of a sample. PASSING: it is not on the disk, which has no room for its shard.
ABSENT, IN_ITS_SHARD, PASSING, IN_ITS_FILE = range(4)
# in State.requested_at: a reader waits for the sample. It is less than any time, so these come first
WAITING = 1
AHEAD, IN_TURN, ON_DISK = range(3)  # places in State.arrived
ARRIVED_COLUMNS = ("from_bucket_first_mib", "from_bucket_mib", "on_disk_mib")  # what speed.jsonl calls them
UNREAD_SECONDS = 600  # after which a sample that was wanted soon, and not read, no longer is
BEAT_SECONDS = 1.0  # between two signs of life
# without a byte and beyond --patience, after which there are none: a request or the disk never ends
STUCK_SECONDS = 60


class State:
    """The shared memory, mapped by this process."""

    FAILURE_AT = 1024
    ARRAYS_AT = 4096

    def __init__(self, path: str, samples: int) -> None:
        memory = np.memmap(path, np.uint8, "r+", shape=self._file_size(samples))
        words = memory[: self.FAILURE_AT].view(np.int64)
        self._bell = words[0:1]
        self._pulse = words[1:2]
        self._holder = words[2:4]
        self._is_whole = words[4:5]
        self._failure_text = memory[self.FAILURE_AT : self.ARRAYS_AT]
        self.arrived = words[5:8]
        self.place = memory[self.ARRAYS_AT : self.ARRAYS_AT + samples]
        self.requested_at = memory[-8 * samples :].view(np.int64)

    @classmethod
    def make(cls, path: str, samples: int) -> None:
        """Make the file of the memory, all zeros, unless it is there.

        One process does at a time (once_per_node).

        OSError if its bytes cannot be reserved on this disk or system.
        """
        refuse_link(path)
        if os.path.exists(path):
            return
        if not hasattr(os, "posix_fallocate"):
            raise OSError(errno.ENOSYS, "this system cannot reserve the bytes of a file")
        try:
            with create(f"{path}.new") as file:
                # a hole would be SIGBUS on a disk that is full
                os.posix_fallocate(file.fileno(), 0, cls._file_size(samples))
        except OSError:
            os.unlink(f"{path}.new")
            raise
        os.replace(f"{path}.new", path)

    @classmethod
    def _file_size(cls, samples: int) -> int:
        place_bytes = -(-samples // 8) * 8  # `requested_at` begins at a multiple of 8
        return cls.ARRAYS_AT + place_bytes + 8 * samples

    @property
    def bell(self) -> int:
        """Return the time.monotonic_ns() of the last request; it changes with each."""
        return int(self._bell[0])

    def ring(self) -> None:
        """Let the fetcher look at what is wanted."""
        self._bell[0] = time.monotonic_ns()

    @property
    def pulse(self) -> float:
        """Return when a fetcher last showed a sign of life, by time.monotonic()."""
        return int(self._pulse[0]) / 1e9

    def show_life(self) -> None:
        """Write this fetcher's sign of life."""
        self._pulse[0] = time.monotonic_ns()

    @property
    def holder(self) -> Optional[int]:
        """Return the process id of the fetcher, or None if it is from another namespace of processes."""
        return int(self._holder[0]) if self._holder[1] == _namespace() else None

    def set_holder(self) -> None:
        """Say that this process fetches."""
        self._holder[:] = os.getpid(), _namespace()

    @property
    def is_whole(self) -> bool:
        return bool(self._is_whole[0])

    def set_whole(self) -> None:
        self._is_whole[0] = 1

    def forget(self) -> None:
        """Forget what an earlier fetcher said of the samples and why it ended: files may have changed since.

        Its pulse and holder stay, as the next one may have written them already; the bell and `requested_at`
        are the readers'.
        """
        self.place[:] = ABSENT
        self.arrived[:] = 0
        self._is_whole[0] = 0
        self._failure_text[:] = 0

    def set_failure(self, error: Exception, node: str = "") -> None:
        """Write why the fetcher ends. `node`: the same text for all processes of its job on this node."""
        failure = {
            "at": time.monotonic(),
            "node": node,
            "text": mask(error)[:200],
            "code": getattr(error, "exit_code", 1),
        }
        self._failure_text[:] = 0  # no part of an older one is left behind it
        self._failure_text[:] = np.frombuffer(
            json.dumps(failure).encode().ljust(len(self._failure_text)), np.uint8
        )

    def failure(self, since: float, node: str = "") -> Optional[Exception]:
        """Return the error of the fetcher that has failed last, if that was after `since`,
        by time.monotonic(); else None.

        One that was killed has written none. `node`: only if it was of this node's part of a job, as
        set_failure() has it.
        """
        # there is none, or it is being written
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            failure = json.loads(bytes(self._failure_text))
            if failure["at"] > since and node in ("", failure["node"]):
                error_type = UserError if failure["code"] == UserError.exit_code else TrainingFailed
                return error_type(failure["text"])
        return None


@dataclasses.dataclass
class SignsOfLife:
    """The fetcher's signs of life.

    They end when nothing has come for so long that a request or the disk must be stuck.
    """

    state: State
    last_progress: float = dataclasses.field(default_factory=time.monotonic)

    def note_progress(self) -> None:
        """Note that something has come, or that nobody wants anything. From any thread."""
        self.last_progress = time.monotonic()

    def beat(self, stop: threading.Event) -> None:
        """Show signs of life until `stop`, unless this process is stuck.

        A thread of the fetcher runs this.
        """
        self.state.show_life()
        self.state.set_holder()
        while not stop.wait(BEAT_SECONDS):
            if time.monotonic() - self.last_progress < patience.limit() + STUCK_SECONDS:
                self.state.show_life()


def request_cutoff() -> int:
    """Return the time.monotonic_ns() before which a request has expired."""
    return time.monotonic_ns() - UNREAD_SECONDS * 10**9


def _namespace() -> int:
    """Return a number of the namespace of processes, in which an id means this process and no other;
    0 if there is none."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


# --- Where its file is, and what belongs to it --------------------------------------------------------------


def state_path(folder: str, indexes: Sequence[str]) -> str:
    """Return the path of the State.

    Another pack has another one, and so has another boot, which has another clock.
    """
    pack = hashlib.sha256(" ".join(map(sha256, indexes)).encode()).hexdigest()[:16]
    return os.path.join(index.make_records_folder(folder), f"{_boot_digest()}-{pack}.state")


def states_of_this_boot(folder: str) -> list[str]:
    """Return the paths of the States of a folder that were made since this machine started, of any pack."""
    return glob.glob(f"{glob.escape(index.make_records_folder(folder))}/{_boot_digest()}-*.state")


def all_states(folder: str) -> list[str]:
    """Return the paths of the States of a folder, of any pack and boot."""
    return glob.glob(f"{glob.escape(index.make_records_folder(folder))}/*.state")


def lease(path: str) -> str:
    """Return the path of what one process holds that fetches for the readers of the State at this path."""
    return f"{path}.fetcher"


def passing_folder(path: str) -> str:
    """Return the folder of the samples that pass through;
    each is named by its number in the State at this path."""
    return f"{path}.passing"


def _boot_digest() -> str:
    return hashlib.sha256(once.boot_id().encode()).hexdigest()[:8]
