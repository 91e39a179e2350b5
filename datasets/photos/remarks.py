"""Log the warnings of Pillow and libtiff about pictures that they can still read: one line for a file,
with its name."""

import contextlib
import ctypes
import functools
import itertools
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Callable, Optional

from common.errors import one_line
from common.progress import warn

MOST = 20  # number of files that a process names in warnings
LONGEST = 200  # longest message that is kept, in bytes

_REPORTED: set[str] = set()
_NUMBERS = itertools.count(1)  # numbers of the named files; no two threads get the same
# messages: about the picture that this thread decodes; None outside report_warnings()
_THREAD = threading.local()
_default_handler: Any = warnings.showwarning  # the handler of all other warnings


@contextlib.contextmanager
def report_warnings(name: Callable[[], str], report: Callable[[str], None] = warn) -> Iterator[None]:
    """Report the first warning inside `with` under name(), once per name and for MOST names;
    nothing if the code raises."""
    _listen_to_warnings()
    previous = getattr(_THREAD, "messages", None)
    _THREAD.messages = []
    try:
        yield
        messages = _THREAD.messages
    finally:
        _THREAD.messages = previous
    if messages:
        _report_once(name(), messages, report)


def _report_once(name: str, messages: list[str], report: Callable[[str], None]) -> None:
    """Report the first of a picture's messages, unless this name or MOST others were reported already."""
    if name in _REPORTED:
        return
    _REPORTED.add(name)
    number = next(_NUMBERS)
    if number > MOST:
        return
    text = f"{one_line(name)}: its decoder says: {one_line(messages[0])[:LONGEST]}"
    if len(messages) > 1:
        text += f" ({len(messages) - 1} more about it)"
    if number == MOST:
        text += f"; that is said of {MOST} files now, and no other is named"
    report(text)


# --- Pillow -------------------------------------------------------------------------------------------------


def _listen_to_warnings() -> None:
    """Direct Python's warnings to _show(); called for each picture,
    because the end of a catch_warnings() block undoes it."""
    global _default_handler
    if warnings.showwarning is not _show:
        _default_handler = warnings.showwarning
        warnings.showwarning = _show


def _show(message: object, *args: object, **kwargs: Any) -> None:
    """Keep a warning about the picture that this thread decodes; pass any other to the previous handler."""
    messages = getattr(_THREAD, "messages", None)
    if messages is None:
        _default_handler(message, *args, **kwargs)
        return
    messages.append(str(message))
    for name, module in list(sys.modules.items()):  # or Python would not repeat the warning for the next file
        if name.startswith("PIL."):
            vars(module).get("__warningregistry__", {}).clear()


# --- libtiff ------------------------------------------------------------------------------------------------


@functools.cache
def listen_to_libtiff() -> None:
    """Receive libtiff's messages here and in forks, unless Pillow was built without libtiff or hides its
    functions."""
    from PIL import Image

    try:
        library = ctypes.CDLL(Image.core.__file__)
        set_handlers = [library.TIFFSetErrorHandler, library.TIFFSetWarningHandler]
    except (AttributeError, OSError):
        return
    for set_handler in set_handlers:
        set_handler.restype = ctypes.c_void_p
        set_handler(_LIBTIFF_HANDLER)


def _receive_from_libtiff(module: Optional[bytes], text_format: bytes, values: int) -> None:
    """Keep a message of libtiff for the picture that this thread decodes, or else print it.

    `values`: a va_list of C, of what belongs into the format."""
    buffer = ctypes.create_string_buffer(LONGEST)
    ctypes.CDLL(None).vsnprintf(buffer, LONGEST, text_format, ctypes.c_void_p(values))
    message = f"{(module or b'libtiff').decode(errors='replace')}: {buffer.value.decode(errors='replace')}"
    messages = getattr(_THREAD, "messages", None)
    if messages is None:
        print(message, file=sys.stderr)
    else:
        messages.append(message)


# libtiff's TIFFErrorHandler. It is kept here, as libtiff holds no reference to it.
_LIBTIFF_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)(
    _receive_from_libtiff
)
