"""What Pillow and libtiff say about a picture that they can read all the same: one line in the log, which names its file.

By themselves they write to stderr, without the name of the file, and thousands of lines for a damaged TIFF in every epoch.
"""

import contextlib
import ctypes
import functools
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Callable

from common.errors import one_line
from common.progress import warn

MOST = 20  # files that a process names
LONGEST = 200  # bytes of what libtiff says

_NAMED: set[str] = set()
_THREAD = threading.local()  # heard: what was said about the picture that this thread decodes, or None


@contextlib.contextmanager
def about(name: Callable[[], str], tell: Callable[[str], None] = warn) -> Iterator[None]:
    """What is said by the code inside is about this file. Where it raises an error, that is all that is said."""
    _THREAD.heard = heard = []
    try:
        yield
    finally:
        _THREAD.heard = None
    if heard:
        _tell_once(name(), heard, tell)


def _tell_once(name, heard, tell):
    if name in _NAMED or len(_NAMED) == MOST:
        return
    _NAMED.add(name)
    more = f" ({len(heard) - 1} more about it)" if len(heard) > 1 else ""
    last = f"; that is said of {MOST} files now, and no other is named" if len(_NAMED) == MOST else ""
    tell(f"{one_line(name)}: its decoder says: {one_line(heard[0])[:LONGEST]}{more}{last}")


@functools.cache
def listen() -> None:
    """From here on, in this process and in those that are forked from it; before Pillow opens the first file."""
    shown: Any = warnings.showwarning

    def show(message, *rest, **named):
        heard = getattr(_THREAD, "heard", None)
        if heard is None:
            shown(message, *rest, **named)
        else:
            heard.append(str(message))

    warnings.showwarning = show
    _listen_to_libtiff()


def _listen_to_libtiff():
    """Its functions that set who is told; Pillow has no way to them. It may have been built without, or with them inside."""
    from PIL import Image

    try:
        library = ctypes.CDLL(Image.core.__file__)
        set_handlers = [library.TIFFSetErrorHandler, library.TIFFSetWarningHandler]
    except (AttributeError, OSError):
        return
    for set_handler in set_handlers:
        set_handler.restype = ctypes.c_void_p
        set_handler(_FROM_LIBTIFF)


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
def _FROM_LIBTIFF(module, text, values):
    line = ctypes.create_string_buffer(LONGEST)
    ctypes.CDLL(None).vsnprintf(line, LONGEST, text, ctypes.c_void_p(values))
    said = f"{(module or b'libtiff').decode(errors='replace')}: {line.value.decode(errors='replace')}"
    heard = getattr(_THREAD, "heard", None)
    if heard is None:
        print(said, file=sys.stderr)
    else:
        heard.append(said)
