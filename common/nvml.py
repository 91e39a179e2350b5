"""What the NVIDIA driver says of this machine, asked through its own library: gVisor and WSL have no /dev/nvidia0 to look for.

Nothing here imports torch.
"""

import ctypes
from pathlib import Path
from typing import Optional

LOADED = Path("/sys/module/nvidia/version")  # also where no GPU was given to this container


def driver() -> Optional[str]:
    """The version of the driver, or None."""
    library, version = _library(), ctypes.create_string_buffer(96)
    if library and library.nvmlSystemGetDriverVersion(version, len(version)) == 0:
        return version.value.decode()
    return LOADED.read_text().strip() if LOADED.exists() else None


def gpus() -> int:
    """The GPUs that this container may use, before CUDA_VISIBLE_DEVICES hides some of them."""
    library, number = _library(), ctypes.c_uint()
    return number.value if library and library.nvmlDeviceGetCount_v2(ctypes.byref(number)) == 0 else 0


def _library():
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None
