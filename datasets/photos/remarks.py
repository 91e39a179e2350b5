"""Log the warnings of Pillow and libtiff about pictures that they can still read: one line for a file, with its name."""

import contextlib
import ctypes
import functools
import itertools
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Callable

from common.errors import one_line
from common.progress import warn

MOST = 20  # number of files that a process names in warnings
LONGEST = 200  # longest message that is kept, in bytes

_NAMED: set[str] = set()
_NUMBERS = itertools.count(1)  # numbers of the named files; no two threads get the same
_THREAD = threading.local()  # heard: warnings about the picture that this thread decodes; None outside about()
_shown: Any = warnings.showwarning  # the handler of all other warnings


@contextlib.contextmanager
def about(name: Callable[[], str], tell: Callable[[str], None] = warn) -> Iterator[None]:
    """Report the first warning inside `with` under name(), once per name and for MOST names; nothing if the code raises."""
    _listen_to_warnings()
    before = getattr(_THREAD, "heard", None)
    _THREAD.heard = []
    try:
        yield
        heard = _THREAD.heard
    finally:
        _THREAD.heard = before
    if heard:
        _tell_once(name(), heard, tell)


def _tell_once(name: str, heard: Any, tell: Callable[[str], None]) -> None:
    if name in _NAMED:
        return
    _NAMED.add(name)
    number = next(_NUMBERS)
    if number > MOST:
        return
    more = f" ({len(heard) - 1} more about it)" if len(heard) > 1 else ""
    last = f"; that is said of {MOST} files now, and no other is named" if number == MOST else ""
    tell(f"{one_line(name)}: its decoder says: {one_line(heard[0])[:LONGEST]}{more}{last}")


# --- Pillow ------------------------------------------------------------------------------------------------------------


def _listen_to_warnings():
    """Direct Python's warnings to _show(); called for each picture, because the end of a catch_warnings() block undoes it."""
    global _shown
    if warnings.showwarning is not _show:
        _shown = warnings.showwarning
        warnings.showwarning = _show


def _show(message: object, *rest: object, **named: Any) -> None:
    heard = getattr(_THREAD, "heard", None)
    if heard is None:
        _shown(message, *rest, **named)
        return
    heard.append(str(message))
    for module, its in list(sys.modules.items()):  # or Python would not repeat the warning for the next file
        if module.startswith("PIL."):
            vars(its).get("__warningregistry__", {}).clear()


# --- libtiff -----------------------------------------------------------------------------------------------------------


@functools.cache
def listen_to_libtiff() -> None:
    """Receive libtiff's messages here and in forks, unless Pillow was built without libtiff or hides its functions."""
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
def _FROM_LIBTIFF(module: Any, text: Any, values: Any) -> None:
    line = ctypes.create_string_buffer(LONGEST)
    ctypes.CDLL(None).vsnprintf(line, LONGEST, text, ctypes.c_void_p(values))
    message = f"{(module or b'libtiff').decode(errors='replace')}: {line.value.decode(errors='replace')}"
    heard = getattr(_THREAD, "heard", None)
    if heard is None:
        print(message, file=sys.stderr)
    else:
        heard.append(message)
