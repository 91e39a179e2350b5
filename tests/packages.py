"""Programs of the system that a test needs: root on Debian gets them installed, everybody else is told; CI must not go without."""

import os
import shutil
import subprocess

import pytest


def program(name):
    """Its path; the package has the same name."""
    if not shutil.which(name) and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends", name]
        for command in (install, ["apt-get", "update"], install):  # a fresh image has no list of packages
            if shutil.which(name) is None:
                subprocess.run(command, env=quiet, capture_output=True, timeout=300)
    found = shutil.which(name)
    if not found:
        missing = f"needs {name}: apt-get install {name}, or your system's own way"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    return found
