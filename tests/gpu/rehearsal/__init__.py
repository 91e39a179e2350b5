"""A stand-in for the CUDA runtime, so that every line for GPUs runs where there is none: python -m tests.gpu.rehearsal

runtime.cpp, nccl.cpp, profiler.cpp and driver.c are built once per machine, by the C++ compiler that is there, and laid in front of the real
libraries; site/ is in each Python process of a run. Not stood in for: cuDNN (convolutions are replaced by launches), DALI's
own kernels (its pipelines are built for the CPU), and every number. What --compile makes is compiled as for a GPU, by Triton.
"""

import hashlib
import os
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

from tests.tools import packages

HERE = Path(__file__).resolve().parent
SOURCES = ["runtime.cpp", "nccl.cpp", "profiler.cpp", "driver.c", "counts.h"]


def need_what_builds_it():
    """Compilers, and torch's CUDA build, whose wheels bring the headers."""
    for compiler in ("g++", "gcc"):
        packages.program(compiler)
    if not _headers():
        packages.missing("the GPU's stand-in needs torch's CUDA build, whose wheels bring the headers: this torch has none")


def _headers():
    """The folders with cuda_runtime_api.h and, from Triton's wheel, what that includes."""
    site = Path(str(metadata.distribution("torch").locate_file("")))
    runtimes = [*site.glob("nvidia/cu*/include"), *site.glob("nvidia/cuda_runtime/include")]
    return [*runtimes, site / "triton" / "backends" / "nvidia" / "include"] if runtimes else []


def built():
    """The folder with librehearsal.so and libcuda.so.1."""
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in SOURCES))
    digest.update(metadata.version("torch").encode())
    folder = Path(tempfile.gettempdir()) / f"anyrank-rehearsal-{os.getuid()}-{digest.hexdigest()[:16]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            shared = ["-shared", "-fPIC", "-O1"]
            headers = [f"-I{path}" for path in _headers()]
            runtime = [*(HERE / name for name in SOURCES if name.endswith(".cpp")), "-o", made / "librehearsal.so"]
            subprocess.run(["g++", "-std=c++17", *shared, *headers, *runtime], check=True)
            subprocess.run(["gcc", *shared, HERE / "driver.c", "-o", made / "libcuda.so.1"], check=True)
            (made / "libnvidia-ml.so.1").symlink_to("libcuda.so.1")
            try:
                made.rename(folder)
            except OSError:  # another process was faster
                if not folder.exists():
                    raise
    return folder


def environment(gpus=1, **extra):
    """What turns a process into one with so many GPUs."""
    folder = built()
    return {
        "LD_PRELOAD": str(folder / "librehearsal.so"),
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": str(HERE / "site"),
        "REHEARSAL_GPUS": str(gpus),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
        "PATH": os.pathsep.join([str(HERE), os.environ["PATH"]]),  # nvidia-smi
        **extra,
    }
