"""What pip makes of the project: the module `anyrank` and the command of that name (launch/installed)."""

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from launch import __main__ as launch
from launch.bundle import command, imports
from tests.tools.jobs import ROOT, environment, run
from tests.tools.plain_scripts import as_a_job

SCRIPT = as_a_job("vectors").replace("from common.start import start", "from anyrank import start")
PIP = [
    "-m",
    "pip",
    "install",
    "--quiet",
    "--disable-pip-version-check",
    "--no-deps",
    "--no-build-isolation",
]  # nothing is fetched


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what pip reads, as it builds there."""
    copy = tmp_path_factory.mktemp("source") / "anyrank"
    for folder in ("common", "datasets", "jobs", "launch"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "requirements.txt"):
        shutil.copy(ROOT / file, copy)
    return copy


@pytest.fixture(scope="module")
def installed(source, tmp_path_factory):
    """Where pip has put it."""
    target = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, *PIP, "--target", target, source], check=True, timeout=300)
    return target


def python(words, folder, *target, code=0, others=()):
    where = os.pathsep.join(map(str, [*target, *others]))
    done = run([sys.executable, *map(str, words)], cwd=folder, env=environment(PYTHONPATH=where))
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_a_script_anywhere_trains_is_bundled_and_has_the_command(installed, tmp_path):
    assert {path.name.partition("-")[0] for path in installed.iterdir()} == {"anyrank", "bin"}
    (tmp_path / "script.py").write_text(SCRIPT)
    done = python(["script.py", "--epochs", 1, "--nproc_per_node", 2], tmp_path, installed)
    assert "rank 0 of 2" in done.stdout and "done: " in done.stdout, done.stderr

    anyrank = installed / "bin" / "anyrank"
    done = python([anyrank, "bundle", "script.py", "-o", "one/script.py"], tmp_path, installed)
    assert "one/script.py: " in done.stdout and "not tried" not in done.stdout
    assert "done: " in python([tmp_path / "one" / "script.py", "--epochs", 1], tmp_path / "one").stdout
    done = python([anyrank, "--help"], tmp_path, installed)
    assert all(verb in done.stdout for verb in launch.VERBS)


CLASHES = [
    (
        "from datasets import load_dataset\nfrom anyrank import start\n",
        "anyrank has a package called datasets, and so has this program",
    ),
    ("from anyrank import start\nfrom datasets import load_dataset\n", "datasets.load_dataset is Hugging Face's"),
    ("from anyrank import start\nimport datasets\ndatasets.Dataset\n", "datasets.Dataset is Hugging Face's"),
]


@pytest.mark.parametrize("text, line", CLASHES)
def test_a_script_with_the_package_of_hugging_face_is_told_so(installed, tmp_path, text, line):
    other = tmp_path / "site-packages" / "datasets"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("def load_dataset(name):\n    return []\n\n\nclass Dataset:\n    pass\n")
    (tmp_path / "script.py").write_text(text)
    done = python(["script.py"], tmp_path, installed, code=1, others=[str(other.parent)])
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {line}") and "to files in another script, and read them in this one" in last


@pytest.mark.parametrize("name", ["common", "datasets", "launch"])
def test_a_package_of_the_script_with_one_of_our_names_is_named(installed, tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "script.py").write_text("import anyrank\n")
    done = python(["script.py"], tmp_path, installed, code=1)
    assert f"anyrank has a package called {name}, and so has this program, {tmp_path / name}: " in done.stderr


def test_a_module_of_another_folder_with_one_of_our_names_is_named(installed, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "common.py").write_text("")
    (tmp_path / "script.py").write_text("import common\nimport anyrank\n")
    done = python(["script.py"], tmp_path, installed, code=1, others=[str(tmp_path / "other")])
    conflict = tmp_path / "other" / "common.py"
    assert f"anyrank has a package called common, and so has this program, {conflict}: rename it" in done.stderr


def test_a_script_without_the_line_by_which_jobs_find_the_repository_is_bundled(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f'"""Mine."""\n\nfrom __future__ import annotations\n{as_a_job("vectors")}')
    python(["-m", "launch", "bundle", script, "--folder", "several"], tmp_path, ROOT)
    assert "done: " in python([tmp_path / "several" / "jobs" / "script.py", "--epochs", 1], tmp_path).stdout


@pytest.mark.rehearsal
def test_an_editable_installation_follows_the_repository(source, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    interpreter = tmp_path / "venv" / "bin" / "python"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = tmp_path / "venv" / "lib" / version / "site-packages"
    (packages / "torch.pth").write_text("\n".join(site.getsitepackages()))  # torch need not be installed once more
    subprocess.run([interpreter, *PIP, "--editable", source], check=True, timeout=300)
    (tmp_path / "script.py").write_text(
        SCRIPT.replace("job = start", "import common\nassert common.VERSION == 'edited'\njob = start")
    )
    changed = (source / "common" / "__init__.py").read_text()
    (source / "common" / "__init__.py").write_text(f'{changed}\nVERSION = "edited"\n')
    words = [interpreter, "script.py", "--epochs", "1"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "done: " in done.stdout, done.stderr
    command = subprocess.run([Path(interpreter).parent / "anyrank", "--version"], capture_output=True, text=True, check=True)
    assert command.stdout.strip() == "anyrank edited"


def test_where_the_repository_is_on_the_path_its_packages_are_taken(installed, source, tmp_path):
    show = "import common\nimport anyrank\nimport datasets\nprint(common.__file__, datasets.__file__)\n"
    for text in (show, show.replace("import common\nimport anyrank", "import anyrank\nimport common")):
        (source / "script.py").write_text(text)
        done = python(["script.py"], source, installed)
        assert done.stdout.split() == [str(source / name / "__init__.py") for name in ("common", "datasets")]


INSERTED = [
    "import torch\n\n@torch.no_grad()\ndef main():\n    from common.start import start\n",
    "x = '\x0c'\n\x0cimport common.start\n",
]


@pytest.mark.parametrize("text", INSERTED)
def test_the_line_for_sys_path_comes_before_the_whole_statement(text):
    found = command._with_path_line(text)
    compile(found, "script.py", "exec")
    assert found.index("sys.path.insert") < min(found.index(word) for word in ("@torch", "import common") if word in found)


def test_a_clone_called_anyrank_beside_a_script_is_no_part_of_it(tmp_path):
    (tmp_path / "anyrank").mkdir()
    (tmp_path / "anyrank" / "setup.py").write_text("")
    (tmp_path / "script.py").write_text(SCRIPT)
    imports.require_bundled_imports(tmp_path / "script.py")
