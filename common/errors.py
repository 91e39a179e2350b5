"""The errors with which a job ends: one line on stderr and a documented exit code,
no traceback for a user's mistake.

    0    finished, or stopped on purpose (--max_hours): start again to go on
    1    the training itself failed (a loss that is not a number, a lost node), or the doctor has found
         something bad
    2    an option or the environment is wrong; the line says what was given, what is allowed and what to do
    130  interrupted with Ctrl-C, after saving
    143  stopped by the platform (SIGTERM), after saving
"""

import contextlib
import errno
import fcntl
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from typing import Optional, Union

from common.secrets import mask

# The signals that ask a job to stop, and the exit code of each; SLURM warns with USR1 before its time limit.
STOP_SIGNALS: dict[int, int] = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 143}


# Files that platforms show as the reason of a failure: {file: a path that exists only on its platform}.
FAILURE_FILES = {
    "/opt/ml/output/failure": "/opt/ml/output",  # SageMaker, which shows 1024 characters
    "/dev/termination-log": "/dev/termination-log",  # Kubernetes
}
SHOWN_CHARACTERS = 1024


class UserError(ValueError):
    """A wrong option, file or environment: what was given, what is allowed and what to do, in one line."""

    exit_code = 2


class TooFewSamples(UserError):
    """The data have fewer samples than a batch."""


class TrainingFailed(RuntimeError):
    """The run cannot go on, though it was started correctly."""

    exit_code = 1


# Errors of a full or failing disk, or of a limit of the system: the request was right, and may succeed later.
SYSTEM_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE}


def is_system_error(error: BaseException) -> bool:
    """Whether a full or failing disk, or a limit of the system, has caused the error."""
    return isinstance(error, OSError) and error.errno in SYSTEM_ERRNOS


def file_error(error: OSError, text: str) -> Union[UserError, TrainingFailed]:
    """Return TrainingFailed(text) for an error of the system, which may pass; else UserError(text)."""
    if is_system_error(error):
        return TrainingFailed(text)
    return UserError(text)


def require_folder(name: str, folder: str, advice: str) -> None:
    """Raise an error that ends with `advice` if the folder is missing, no folder or unreadable;
    the error calls it `name`."""
    try:
        os.scandir(folder).close()
    except FileNotFoundError:
        raise UserError(f"{name} {one_line(folder)} does not exist: {advice}") from None
    except OSError as error:
        raise file_error(
            error,
            f"{name} {one_line(folder)} cannot be read ({error.strerror}): make it readable, or {advice}",
        ) from None


@contextlib.contextmanager
def raising_path_conflict(path: str) -> Iterator[None]:
    """Raise a UserError that names what is in the way if the block finds a folder in place of a file,
    or vice versa."""
    try:
        yield
    except IsADirectoryError:
        raise UserError(f"{one_line(path)} is a folder, and a file belongs there: move it away") from None
    except (NotADirectoryError, FileExistsError):
        candidates = [path]
        while os.path.dirname(candidates[-1]) not in ("", candidates[-1]):
            candidates.append(os.path.dirname(candidates[-1]))
        obstacle = next(
            (candidate for candidate in candidates if os.path.lexists(candidate)), path
        )  # of the folders, one may be a file
        kind = "a link to nothing" if os.path.islink(obstacle) and not os.path.exists(obstacle) else "a file"
        raise UserError(f"{one_line(obstacle)} is {kind}, and a folder belongs there: move it away") from None


class SampleError(Exception):
    """A data set gave no sample.

    Not a RuntimeError, so that is_victim() does not take its text for a lost connection.
    """

    @property
    def log_line(self) -> str:
        """The sample and its error, without the traceback that torch puts before them in a loader process."""
        return str(self).rpartition(f"{type(self).__name__}: ")[2].strip()


def one_line(text: object) -> str:
    """Return `text` with secrets masked and control characters escaped,
    so that no file name can forge a line of the log."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in mask(text)
    )


def report_failure(text: object) -> None:
    """Print on stderr why the job ends.

    On SageMaker and Kubernetes, also write the first cause to the file that they show.
    """
    line = f"error: {one_line(text)}"
    print(line, file=sys.stderr, flush=True)
    for path, platform_path in FAILURE_FILES.items():
        with contextlib.suppress(OSError):
            if os.path.exists(platform_path):
                _write_if_first(path, line[: SHOWN_CHARACTERS - 1] + "\n")


def _write_if_first(path: str, line: str) -> None:
    """Write the line to the file, unless one was written since this process started,
    so that a node's first cause is kept."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    # an open descriptor is not truncated: that needs the lock
    with open(descriptor, "w", errors="replace") as file:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process is writing its cause
            return
        except OSError:
            pass  # not every disk has locks
        status = os.fstat(descriptor)
        if not status.st_size or status.st_mtime < _process_start_time():
            os.ftruncate(descriptor, 0)
            file.write(line)


def _process_start_time() -> float:
    """Return when this process was started, in seconds since the epoch.

    The kernel states it in ticks since boot.
    """
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def count(number: int, singular: str, plural: Optional[str] = None) -> str:
    """Return "1 node" or "2 nodes". `plural`: if it is not `singular` with an s."""
    if number == 1:
        return f"{number} {singular}"
    return f"{number} {plural or singular + 's'}"


def is_victim(error: BaseException) -> bool:
    """Whether this looks like the error of a collective or connection that broke because another rank was
    lost."""
    names = {kind.__name__ for kind in type(error).__mro__}
    match = re.search(
        r"gloo|nccl|TCPStore|socket|connection (closed|reset|refused)|broken pipe", str(error), re.IGNORECASE
    )
    return "DistError" in names or (isinstance(error, RuntimeError) and match is not None)
