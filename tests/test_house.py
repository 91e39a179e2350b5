"""The rules of the house: which way imports go, what importing does, and that the README tells the truth about the tree."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import ROOT, environment

# Which of our packages each may import.
MAY_IMPORT = {
    "jobs": {"datasets", "common"},
    "datasets": {"datasets", "common"},
    "common": {"common"},
    "launch": {"launch", "datasets", "common"},
}
OURS = set(MAY_IMPORT) | {"tests"}
FILES = sorted(path.relative_to(ROOT) for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))

# Needed by some jobs only, so imported inside the function that uses them.
OPTIONAL = {
    "nvidia", "ray", "pymemcache", "boto3", "torchvision", "sklearn", "matplotlib", "tensorboard", "huaweicloudsdkcore",
    "huaweicloudsdkmodelarts", "alibabacloud_credentials", "alibabacloud_pai_dlc20201203", "alibabacloud_tea_openapi", "kubernetes",
}  # fmt: skip


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_there_are_files_to_check():
    assert len(FILES) > 15


@pytest.mark.parametrize("path", FILES, ids=str)
def test_arrows_run_one_way(path):
    found = {name.split(".")[0] for name in imports(ast.parse((ROOT / path).read_text()))}
    assert found & OURS <= MAY_IMPORT[path.parts[0]]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_optional_packages_are_imported_where_they_are_used(path):
    top = ast.Module(
        [node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))], []
    )
    assert not {name.split(".")[0] for name in imports(top)} & OPTIONAL


def test_importing_does_nothing():
    """No output, no file, no thread, no GPU, no signal handler."""
    modules = [".".join(path.with_suffix("").parts) for path in FILES if path.parts[0] != "jobs" and "__" not in path.name]
    script = (
        "import signal, sys, threading\nbefore = [signal.getsignal(n) for n in (15, 2, 10)]\n"
        + "".join(f"import {module}\n" for module in modules)
        + "import torch\nassert not torch.cuda.is_initialized() and threading.active_count() == 1\n"
        + "assert before == [signal.getsignal(n) for n in (15, 2, 10)]\nassert not {'torchvision', 'sklearn', 'matplotlib', 'boto3'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_tree_in_the_readme_is_the_tree():
    """Every file the README's tree names exists, and every source file of ours is named in it."""
    tree = re.search(r"## What is where\n.*?```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    folder, named = "", set()
    for line in tree.splitlines():
        indent, names = re.match(r"( *)((?:[\w.\-/]+ ?)+?)(?:  |$)", line).groups()
        for name in names.split():
            if not indent and name.endswith("/"):
                folder = name
            named.add(Path(folder if indent else "") / name)
    missing = [str(path) for path in named if not (ROOT / path).exists()]
    assert not missing, missing
    tracked = subprocess.run(
        ["git", "ls-files", "jobs", "common", "datasets", "launch"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    unnamed = [
        path for path in tracked if path.endswith(".py") and not path.endswith("__init__.py") and Path(path) not in named
    ]
    unnamed = [
        path
        for path in unnamed
        if not any(Path(path).is_relative_to(folder) for folder in named if folder.parent.name and (ROOT / folder).is_dir())
    ]
    assert not unnamed, unnamed


def test_no_object_is_ever_pickled_or_unpickled_but_by_the_reader_of_batches():
    """Checkpoints are weights_only; ranks exchange tensors and JSON; the one unpickler knows three names. What the loader over Ray
    unpacks comes from processes that it started: a data set and its transform cannot travel otherwise."""
    forbidden = re.compile(
        r"weights_only=False|pickle\.loads?\(|pickle\.Unpickler|(?<!_custom)_object\(|_object_list\(|allow_pickle=True|yaml\.load|eval\(|exec\(|shell=True"
    )
    for path in set(FILES) - {Path("datasets/dpex/wire.py")}:
        found = [
            line
            for line in (ROOT / path).read_text().splitlines()
            if forbidden.search(line) and "model.eval()" not in line and "exec(open(__file__" not in line  # a bundle's own text
        ]
        assert not found, (path, found)
