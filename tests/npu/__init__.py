"""A stand-in for torch_npu and its devices, so that the jobs run on an "npu" where there is none.

    npu.environment(devices=2)      variables with which every Python of a test loads it, as torch loads torch_npu: by itself

device.cpp is the device, torch_npu.py what Python sees of it; both are compiled and installed into a folder of this machine at
the first use, which takes half a minute.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.tools import packages

HERE = Path(__file__).parent
SOURCES = ("device.cpp", "torch_npu.py")
BUILD = """
import sys
from torch.utils.cpp_extension import load
load("torch_npu_device", [sys.argv[1]], build_directory=sys.argv[2], extra_cflags=["-O1", "-w"], with_cuda=False, verbose=True)
"""


def environment(devices: int = 2) -> dict[str, str]:
    # The ports of HCCL's default are among those that the system gives to any connection, and doctor says so if it has.
    return {"PYTHONPATH": str(installed()), "STANDIN_NPUS": str(devices), "HCCL_IF_BASE_PORT": "27200"}


def installed() -> Path:
    """The folder that Python has to look into; built once for these sources, this Python and this torch."""
    texts = b"".join((HERE / name).read_bytes() for name in SOURCES)
    digest = hashlib.sha256(texts + f"{sys.version}{torch.__version__}{torch.__file__}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"anyrank-npu-{os.getuid()}-{digest}"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several test processes one builds
        if not folder.exists():
            _build(folder)
    assert folder.stat().st_uid == os.getuid(), f"{folder} belongs to somebody else"
    return folder


def _build(folder):
    for name in ("g++", "ninja"):
        packages.program(name)
    new = Path(f"{folder}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700)
    built = subprocess.run([sys.executable, "-c", BUILD, HERE / "device.cpp", new], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-5000:] + built.stderr[-2000:]
    for path in new.iterdir():
        if path.suffix != ".so":
            path.unlink()
    shutil.copy(HERE / "torch_npu.py", new)
    version = torch.__version__.split("+")[0]
    about = new / f"torch_npu-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {version}\n")
    (about / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:autoload\n")
    new.rename(folder)
