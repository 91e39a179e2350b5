"""Output that never fails: the job trains on when the reader of its output is gone or the disk of its log is full."""

import contextlib
import io
import os
import sys


class _Unfailing(io.FileIO):
    """A file that drops what cannot be written."""

    def write(self, content):
        try:
            return super().write(content) or len(content)
        except OSError:
            return len(content)


def never_fail() -> None:
    """Make writes to sys.stdout and sys.stderr never fail, unless these were replaced; escape what their encoding lacks."""
    while (unused := os.open(os.devnull, os.O_RDWR)) <= 2:  # else a file of the run could get the descriptor of a closed stream
        pass
    os.close(unused)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        if stream is None:  # its descriptor may belong to another file by now
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (until the process ends)
            continue
        with contextlib.suppress(OSError):
            stream.flush()
        file, by_line = io.BufferedWriter(_Unfailing(number, "w", closefd=False)), stream.line_buffering or stream.write_through
        setattr(sys, name, io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=by_line))
