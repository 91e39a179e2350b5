"""The process of a node that fetches a pack for a job: it begins, takes over from one that has frozen,
and ends with the job.

It is a fresh interpreter without torch, because obstore does not work in a process that was forked while it
was in use. Of several jobs on a node one fetches; the processes of the others stand by. Readers see its State
(state.py).
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import sys
import threading
import time

from common.errors import STOP_SIGNALS, TrainingFailed, UserError, count, one_line
from common.files import MIB, contents
from common.storage import once
from common.storage.bucket import Bucket
from common.world import network
from datasets.packs.fetcher import Fetcher
from datasets.packs.state import (
    BEAT_SECONDS,
    IN_ITS_SHARD,
    SignsOfLife,
    State,
    lease,
    state_path,
    states_of_this_boot,
)

MOST_FILES = 1 << 20  # a shard that grows is one
GAP_SECONDS = 5  # between two looks, after which this process itself was stopped meanwhile
FROZEN_SECONDS = 30  # without a sign of life, after which another process takes over
WATCH_SECONDS = 1.0  # between two looks at who holds the lease


@dataclasses.dataclass(frozen=True)
class Order:
    """What to fetch, for whom, and where to."""

    rank_pid: int  # the process id of the rank that has started this process
    node: str  # the same text for all processes of the job on this node
    url: str
    folder: str
    path: str  # of the State's file
    keeps_shards: bool  # whether shards are kept on the disk, as far as it has room
    indexes: list[str]  # their paths

    def is_rank_alive(self) -> bool:
        return os.getppid() == self.rank_pid


def main(rank: str, node: str, url: str, folder: str) -> None:
    """Fetch the pack at `url` to `folder` for the process `rank`, as long as that lives,
    unless another process does.

    A line of JSON on the standard input has the path of the State, the number of its samples, whether shards
    are kept, and the paths of the indexes; without it this process ends.
    `node`: the same text for all processes of the job on this node.
    """
    _prepare()
    with contextlib.suppress(UserError):  # it comes again, where it can be written into the State
        Bucket(url)  # imports what takes a while, meanwhile the reader fetches the indexes
    order_line = sys.stdin.readline()
    if not order_line:
        return
    path, samples, keeps_shards, *indexes = json.loads(order_line)
    order = Order(int(rank), node, url, folder, path, keeps_shards, indexes)
    state = State(path, samples)
    waiting_since = time.monotonic()
    holds_lease = threading.Event()
    threading.Thread(target=_FrozenHolder(state, url).watch, args=(holds_lease,), daemon=True).start()
    with once.when_free(lease(path), order.is_rank_alive) as is_held:
        holds_lease.set()
        if is_held and state.failure(waiting_since, node) is None:
            # No other process of this job has tried it yet.
            _fetch_or_record_failure(order, state)


def _prepare() -> None:
    """Prepare this process: stop signals are for the job alone, with which it is killed,
    and it may have many files open."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    for signal_number in STOP_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)  # the job needs samples until it has saved
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: if it is stopped, it cannot look for the job
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
    network.allow_open_files(MOST_FILES)


class _FrozenHolder:
    """The process that holds the lease, looked at by one that stands by."""

    def __init__(self, state: State, url: str) -> None:
        self._state = state
        self._url = os.fsencode(url)
        self._watching_since = time.monotonic()  # since when this process could have seen a sign of life
        self._last_check = self._watching_since

    def watch(self, stop: threading.Event) -> None:
        """Look at the process every WATCH_SECONDS until the event is set. A thread runs this."""
        while not stop.wait(WATCH_SECONDS):
            self.kill_if_frozen()

    def kill_if_frozen(self) -> None:
        """Kill the process if it has shown no sign of life for FROZEN_SECONDS in which this one was
        running."""
        now = time.monotonic()
        if now - self._last_check > GAP_SECONDS:  # this process was stopped, and the other one perhaps, too
            self._watching_since = now
        self._last_check = now
        # Read before the pulse: a new holder shows life first, so an old pulse is never taken for that of a
        # new one.
        holder = self._state.holder
        silent_since = max(self._state.pulse, self._watching_since)
        if holder is not None and now - silent_since > FROZEN_SECONDS:
            _kill_fetcher(holder, self._url)


def _kill_fetcher(pid: int, url: bytes) -> None:
    """Kill the process `pid`, if it is a fetcher of the pack at `url`."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        command = contents(f"/proc/{pid}/cmdline").split(b"\0")
        if url in command and any(__name__.encode() in word for word in command):
            os.kill(pid, signal.SIGKILL)


def _fetch_or_record_failure(order: Order, state: State) -> None:
    """Fetch, unless another process has fetched all, and stay until the rank ends.

    As long as this process holds the lease, no job that starts clears the State. After an error it does not
    stay: the error is written into the State, for readers that wait.
    """
    life = SignsOfLife(state)
    stop = threading.Event()
    threading.Thread(target=life.beat, args=(stop,), daemon=True).start()
    cannot_fetch = f"cannot fetch {one_line(order.url)} to {order.folder}"
    try:
        if os.path.abspath(state_path(order.folder, order.indexes)) != order.path:
            raise UserError(f"{one_line(order.url)} has another index since this run began: start again")
        if not state.is_whole:  # else another process has fetched it
            _refuse_other_version(order)
            state.forget()
            _fetch(order, state, life)
        while order.is_rank_alive():
            life.note_progress()
            time.sleep(BEAT_SECONDS)
    except (UserError, TrainingFailed) as error:
        _record_failure(error, order, state)
    except OSError as error:
        _record_failure(TrainingFailed(f"{cannot_fetch}: {error.strerror or repr(error)}"), order, state)
    except Exception as error:
        _record_failure(TrainingFailed(f"{cannot_fetch}: {error!r}"), order, state)
        raise
    finally:
        stop.set()


def _record_failure(error: Exception, order: Order, state: State) -> None:
    """Write the error into the State, and into the log if no reader waits and would raise it."""
    state.set_failure(error, order.node)
    if (state.place == IN_ITS_SHARD).all():  # so no reader waits
        print(
            f"warning: {one_line(error)}; all samples are there, and the next start fetches what is missing",
            flush=True,
        )


def _fetch(order: Order, state: State, life: SignsOfLife) -> None:
    """Fetch while the rank lives. If all shards are whole in the end, say so in the State and in the log."""
    start_time = time.monotonic()
    fetcher = Fetcher(order.url, order.folder, order.indexes, order.path, state, life)
    if not fetcher.run(order.is_rank_alive, order.keeps_shards):
        return
    state.set_whole()
    ahead, in_turn, on_disk = (state.arrived / MIB).tolist()
    fetched_text = (
        f"{ahead + in_turn:.1f} MiB in {time.monotonic() - start_time:.0f} s, {ahead:.1f} of them ahead of "
        "their shards"
    )
    on_disk_text = f"{on_disk:.1f} MiB were there" if on_disk else "none were there"
    shards = count(len(fetcher.shards), "shard")
    print(
        f"arrived: {shards} of {one_line(order.url)}: {fetched_text}; {on_disk_text}; all verified",
        flush=True,
    )


def _refuse_other_version(order: Order) -> None:
    """Raise a UserError if a process of this node fetches another version of the pack to the same folder.

    This one would replace the files that the readers of that version read.
    """
    for path in states_of_this_boot(order.folder):
        # the folders may be spelled in two ways
        is_other_version = os.path.basename(path) != os.path.basename(order.path)
        if is_other_version and not once.is_free(lease(path)):
            conflict = f"a job on this node reads another version of {one_line(order.url)}"
            raise UserError(f"{conflict}: start when it has ended, or give another --input_dir")
