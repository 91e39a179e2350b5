"""The devices and driver versions of this machine, as the drivers report them.

This module does not import torch.

NVIDIA's library (NVML) counts its GPUs, because gVisor and WSL have no /dev/nvidia0. Ascend's NPUs are files
in /dev.
"""

import ctypes
import os
import re
from pathlib import Path
from typing import Optional

NVIDIA = Path("/sys/module/nvidia/version")  # exists even if this container was given no GPU
DEVICES = Path("/dev")
# the folder of the driver, and of CANN unless ASCEND_HOME_PATH names another
ASCEND = Path("/usr/local/Ascend")


def nvidia() -> Optional[str]:
    """Return the version of NVIDIA's driver, or None."""
    library = _nvml()
    version = ctypes.create_string_buffer(96)
    if library and library.nvmlSystemGetDriverVersion(version, len(version)) == 0:
        return version.value.decode()
    return NVIDIA.read_text().strip() if NVIDIA.exists() else None


def gpus() -> int:
    """Return how many NVIDIA GPUs this container may use, also those that CUDA_VISIBLE_DEVICES hides;
    0 without NVML."""
    library = _nvml()
    number = ctypes.c_uint()
    return number.value if library and library.nvmlDeviceGetCount_v2(ctypes.byref(number)) == 0 else 0


def _nvml() -> Optional[ctypes.CDLL]:
    """Return NVML, initialized; None without it."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def npus() -> int:
    """Return the number of NPUs that this container was given: /dev/davinci0 and up."""
    return sum(1 for name in os.listdir(DEVICES) if re.fullmatch(r"davinci\d+", name))


def ascend() -> Optional[str]:
    """Return the version of Ascend's driver, or None."""
    return _stated_version(ASCEND / "driver" / "version.info")


def cann() -> Optional[str]:
    """Return the version of CANN, Ascend's toolkit, or None."""
    homes = []
    if os.environ.get("ASCEND_HOME_PATH"):
        homes.append(Path(os.environ["ASCEND_HOME_PATH"]))
    files = [home / "version.cfg" for home in (*homes, ASCEND / "ascend-toolkit" / "latest", ASCEND / "cann")]
    files += [home / "compiler" / "version.info" for home in (*homes, ASCEND / "ascend-toolkit" / "latest")]
    return next((version for file in files if (version := _stated_version(file))), None)


def _stated_version(file: Path) -> Optional[str]:
    """Return the version stated in a file, as Version=8.2.RC1, toolkit_installed_version=[8.2.RC1:8.2.RC1],
    or [7.0.0.1:8.0.RC3] with a number of its own before that of the release; else None."""
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"(?:^|_)version\s*=\s*\[?(?:[\d.]*:)?([\w.]+)", text, re.IGNORECASE | re.MULTILINE)
    return match[1] if match else None
