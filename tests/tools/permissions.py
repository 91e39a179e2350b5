"""Root as anybody else: a folder that may not be listed is not listed."""

import contextlib
import ctypes
import os
import struct

DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2  # the capabilities by which root passes over permissions
VERSION_3 = 0x20080522


@contextlib.contextmanager
def of_anybody():
    """Permissions count for this thread and those that it starts."""
    if os.geteuid():
        yield
        return
    library = ctypes.CDLL(None, use_errno=True)
    header, before = struct.pack("<Ii", VERSION_3, 0), ctypes.create_string_buffer(24)
    assert library.capget(header, before) == 0
    low, *rest = struct.unpack("<6I", before.raw)
    assert library.capset(header, struct.pack("<6I", low & ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH), *rest)) == 0
    try:
        yield
    finally:
        assert library.capset(header, before) == 0
