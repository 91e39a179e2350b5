"""Run a job: call its `main`, and turn an error into an exit code (see errors.py) and one line that says why
it ends.

The job trains on when the reader of its output is gone or the disk of its log is full.
"""

import argparse
import contextlib
import errno
import io
import os
import resource
import signal
import sys
import threading
import traceback
from typing import Any, Callable, NoReturn, Optional

from common import files, moments, packages, progress
from common.alive import heartbeat
from common.alive.stops import STOPS
from common.errors import (
    SYSTEM_ERRNOS,
    SampleError,
    TrainingFailed,
    UserError,
    is_victim,
    one_line,
    report_failure,
)
from common.files import write_atomically
from common.secrets import mask

VERDICT_SECONDS = 15  # longer than a lost machine takes to be noticed
DISK_ERRNOS = {*SYSTEM_ERRNOS, errno.EROFS}  # a disk that has failed may become read-only


# Listeners of common/moments.py, which run_job() registers.


class _DoctorCaller:
    """With --doctor, lets the doctor examine the job."""

    def arguments(self, args: argparse.Namespace) -> None:
        if args.doctor:
            from common.doctor import Examination

            moments.listen(Examination(args))


class _LargestBatchFinder:
    """With --find_max_batch, finds the largest batch and ends the process."""

    def arguments(self, args: argparse.Namespace) -> None:
        if args.find_max_batch:
            from common.devices import largest_batch

            largest_batch.find(args)


class _ElasticJobMaker:
    """With --min_nodes, lets the nodes and ranks of a job change while it runs."""

    def arguments(self, args: argparse.Namespace) -> None:
        if args.min_nodes and not args.doctor:  # the doctor waits for all nodes
            try:
                from common.elastic import job
            except ImportError as error:
                if error.name != "common.elastic":
                    raise
                missing = (
                    "--min_nodes needs the folder common/elastic, which is not there: leave the option out"
                )
                raise UserError(missing) from None
            moments.listen(job)


class _WatcherStarter:
    """Starts a watcher of a job that is a single process,
    which has no parent to notice that it hangs or is killed."""

    def world(self, args: argparse.Namespace) -> None:
        is_single_process = args.world.world_size == 1 and not heartbeat.has_parent()
        if is_single_process and not (args.doctor or args.find_max_batch) and sys.platform == "linux":
            from common.alive import watcher

            heartbeat.report_end(0)  # to the watcher of a Run before, if a script has two
            watcher.start_for_single_rank(
                args.world, lambda since, why: moments.announce("killed", args, since, why)
            )


class _ReportWriter:
    """Writes report.html when the files it shows were written, and adds the end of a job that was killed."""

    def written(self, folder: str, write: Callable[[str, bytes], None]) -> None:
        if not packages.is_available(packages.PAGE):
            return
        from common import report

        try:
            write("report.html", report.of_one(report.RunFiles.read(folder)).encode())
        except Exception as error:  # a missing page is no reason to end the training
            progress.say(
                f"warning: report.html could not be made: {type(error).__name__}: {one_line(error)[:300]}"
            )

    def killed(self, args: argparse.Namespace, since: float, why: str) -> None:
        with contextlib.suppress(ImportError, OSError, UserError):
            from common import report

            if report.add_end(args.output_dir, since, why):
                self.written(
                    args.output_dir,
                    lambda name, page: write_atomically(os.path.join(args.output_dir, name), page),
                )


_is_running = False  # whether run_job() or begin_in_notebook() was called in this process


def is_running() -> bool:
    """Whether run_job() or begin_in_notebook() was called in this process."""
    return _is_running


def begin_in_notebook() -> None:
    """Make this process fit for a Run in a notebook.

    What a job does to its process, such as having it watched, is left out.
    """
    global _is_running
    if not _is_running:
        _is_running = True
        moments.listen(_ReportWriter())
        progress.ipython().events.register("post_run_cell", _end_cell)


def _end_cell(result: Any) -> None:
    """Announce how a cell has ended, as run_job() announces how `main` has,
    and give the stop signals back."""
    error = result.error_before_exec or result.error_in_exec
    try:
        if error is not None and not isinstance(error, (SystemExit, KeyboardInterrupt)):
            moments.announce("failure", error)
        if error is None:
            moments.announce("paused")
        else:
            moments.announce("returned", 1)
    finally:
        STOPS.restore_handlers()
        if error is not None:
            files.release()


def run_job(main: Callable[[], None]) -> None:
    """Call a job's `main`, and return if it returns.

    After an error, end the process with the exit code for it (errors.py).
    """
    global _is_running
    _is_running = True
    ignore_write_errors()
    # a core file has gigabytes
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        # packages.check() has set it, for the time of the job's imports.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sent when a terminal is closed
    for listener in (
        _DoctorCaller(),
        _LargestBatchFinder(),
        _ElasticJobMaker(),
        _WatcherStarter(),
        _ReportWriter(),
    ):
        moments.listen(listener)
    try:
        _run(main)
    except SystemExit as end:
        heartbeat.report_end(end.code)
        moments.announce("leaving", end.code)
        raise
    heartbeat.report_end(0)
    moments.announce("leaving", 0)


def _run(main: Callable[[], None]) -> None:
    """Call `main`; after an error, end the process with the exit code for it.

    If its cause is known, one line says it, printed here or by the parent; else there is a traceback."""
    try:
        _call_and_announce(main)
    except Exception as exception:
        # torch's handler for loader processes could raise during these lines
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        error = (
            exception
            if isinstance(exception, (UserError, TrainingFailed))
            else _disk_error(exception) or _memory_error(exception)
        )
        if error is None:
            _end_with_traceback(exception)
        if not heartbeat.has_parent():  # which prints it once for all ranks
            report_failure(error)
        if heartbeat.has_parent() or heartbeat.has_watcher():
            _leave(one_line(error), error.exit_code)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # the run does not handle signals yet, so there is nothing to save
        sys.exit(130)


def _disk_error(error: Exception) -> Optional[TrainingFailed]:
    """Return the error to end with if a disk has failed or is full, or a limit of the system was reached;
    else None."""
    if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
        path = error.filename or "a file of this job"
        return TrainingFailed(
            f"{path}: {error.strerror}; mend that and start again: the run goes on from its last checkpoint"
        )
    return None


def _memory_error(error: Exception) -> Optional[TrainingFailed]:
    with contextlib.suppress(OSError, ImportError, MemoryError):  # of this import
        from common.devices.diagnosis import out_of_memory_error

        return out_of_memory_error(error)
    return None


def _end_with_traceback(error: Exception) -> NoReturn:
    """End with code 1 and the traceback, which is left out if the loss of another rank caused the error."""
    message = f"{type(error).__name__}: {one_line(error)[:300]}"
    with contextlib.suppress(OSError, ImportError, MemoryError):
        from common.world import network

        message += network.advice(error)
    text = one_line(error.log_line) if isinstance(error, SampleError) else message
    is_watched = heartbeat.has_parent() or heartbeat.has_watcher()
    if not is_watched or not is_victim(error):
        print(mask(traceback.format_exc()), end="", file=sys.stderr, flush=True)
    if not heartbeat.has_parent() and not (is_watched and is_victim(error)):
        report_failure(text)
    if is_watched:
        _leave(text, 1, is_victim(error))
    sys.exit(1)


def _call_and_announce(main: Callable[[], None]) -> None:
    """Call `main`, and announce that it has returned or failed."""
    try:
        try:
            main()
        except SystemExit as end:
            moments.announce("returned", end.code)
            raise
        moments.announce("returned", 0)
    except Exception as error:
        moments.announce("failure", error)
        raise


def _leave(text: str, code: int, victim: bool = False) -> NoReturn:
    """Report the fault and call os._exit(), as closing a broken group may hang.

    A victim first waits for its watcher to act.
    """
    if victim and heartbeat.has_watcher():  # the watcher ends this process once it has shown the cause
        threading.Event().wait(VERDICT_SECONDS)
    heartbeat.report_fault(text, code, victim)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Unfailing(io.FileIO):
    """A file that drops what cannot be written."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content) or len(content)
        except OSError:
            return len(content)


def ignore_write_errors() -> None:
    """Make sys.stdout and sys.stderr ignore errors of writes, and escape what their encoding lacks."""
    # A file of the run must not get the descriptor of a stream that is closed.
    while (unused := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(unused)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        if stream is None:  # its descriptor may belong to another file by now
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (until the process ends)
            continue
        with contextlib.suppress(OSError):
            stream.flush()
        file = io.BufferedWriter(_Unfailing(descriptor, "w", closefd=False))
        line_buffering = stream.line_buffering or stream.write_through
        setattr(
            sys,
            name,
            io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=line_buffering),
        )
