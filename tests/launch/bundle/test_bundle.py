"""A job as one file: alone in an empty folder it does what it does in the repository, whatever starts it."""

import ast
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common import VERSION
from common.errors import UserError
from launch.bundle import command as bundle
from tests.tools import pictures
from tests.tools.every_job import LEAVES, SMALLER
from tests.tools.jobs import (
    PATIENCE,
    ROOT,
    TINY,
    assert_same_bits,
    environment,
    final_state,
    in_rehearsal,
    run,
    run_forked,
    run_job,
    saved,
    wait_for,
)

JOBS = sorted(
    path.name for path in (ROOT / "jobs").glob("*.py") if path.stem != "plain_ddp"
)  # which needs none: tests/jobs/test_plain_ddp.py


@pytest.fixture
def empty(tmp_path):
    """A folder with nothing of the repository near, and a decoy that an installed package of the same name would be."""
    decoy = tmp_path / "site" / "datasets"
    decoy.mkdir(parents=True)
    (decoy / "__init__.py").write_text("raise SystemExit('the decoy was imported')")
    (tmp_path / "upload").mkdir()
    return tmp_path / "upload"


@pytest.fixture
def untried(monkeypatch):
    """No bundle is started: the subject is what is in it, and a start takes seconds, of torch's import."""
    monkeypatch.setattr(bundle, "try_out", lambda boot, needed: "")


def write(folder, name, change=lambda text: text, wanted=()):
    path = folder / name
    path.write_text(change(bundle.bundle(ROOT / "jobs" / name, wanted)))
    return path


def started(folder, path, *options, launcher=(sys.executable,), check=0):
    script = [*launcher, str(path), *map(str, options), "--output_dir", str(folder / "out")]
    env = environment(PYTHONPATH=str(folder.parent / "site"))
    done = run(script, cwd=folder, env=env)
    assert done.returncode == check, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("name", JOBS)
def test_the_job_comes_first_line_for_line_and_every_module_as_it_is(name):
    lines, job = bundle.bundle(ROOT / "jobs" / name).split("\n"), (ROOT / "jobs" / name).read_text().split("\n")
    changed = [number for number, line in enumerate(job[:-1]) if lines[number] != line]
    assert (
        len(changed) == 1
        and job[changed[0]].startswith("sys.path.insert(0, ")
        and "BUNDLE['Bundle'](__file__)" in lines[changed[0]]
    )
    ast.parse("\n".join(lines))
    sections = re.findall(r"^# ==== (\S+) =+\nr'''\n(.*?)^'''$", "\n".join(lines), re.DOTALL | re.MULTILINE)
    assert [place for place, _ in sections] == [*bundle.modules_of(ROOT / "jobs" / name), bundle.LOADER]
    assert all((ROOT / place).read_text() == source for place, source in sections)


def test_its_help_is_that_of_the_job(empty):
    (empty / "train_ddp.py").write_text(bundle.bundle(ROOT / "jobs" / "train_ddp.py"))
    helps = [run_forked([path, "--help"], empty).stdout for path in (ROOT / "jobs" / "train_ddp.py", empty / "train_ddp.py")]
    assert helps[0] == helps[1] and "jobs/train_ddp.py" in helps[0]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_was_uploaded_alone_says_what_is_missing(name, empty):
    shutil.copy(ROOT / "jobs" / name, empty)
    done = run_forked([empty / name, "--custom_data", "true"], empty, check=2)
    said = "error: No module named 'common': upload common and datasets too, or a bundle: python -m launch bundle JOB\n"
    assert (done.stdout, done.stderr) == ("", said) and [path.name for path in empty.iterdir()] == [name]


@pytest.mark.parametrize("another", [False, True])
def test_a_job_with_half_of_its_folder_says_which_half(another, empty):
    """Without `datasets`, of which Hugging Face has a package, too."""
    shutil.copytree(ROOT / "common", empty / "common", ignore=shutil.ignore_patterns("__pycache__"))
    (empty / "jobs").mkdir()
    shutil.copy(ROOT / "jobs" / "train.py", empty / "jobs")
    site = empty / "site" / "datasets"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("raise SystemExit('it was imported')")
    done = run_forked([empty / "jobs" / "train.py"], empty, {"PYTHONPATH": str(site.parent) if another else ""}, check=2)
    named = f"; {site} is another package of that name" if another else ""
    said = f"error: the folder datasets is missing beside common{named}: upload common and datasets too, or a bundle"
    assert done.stderr.startswith(said) and len(done.stderr.splitlines()) == 1 and not done.stdout


def test_only_what_the_job_uses_is_in_it():
    assert "datasets/imagenet.py" not in bundle.modules_of(ROOT / "jobs" / "train.py")
    assert {"datasets/imagenet.py", "datasets/dali/batches.py", "common/alive/supervisor.py"} <= set(
        bundle.modules_of(ROOT / "jobs" / "train_imagenet.py")
    )
    others = ("datasets/dpex/", "datasets/dali/", "datasets/drop_in/", "launch/submit/",
              "common/models/classifiers")  # fmt: skip
    assert not [place for place in bundle.modules_of(ROOT / "jobs" / "train.py") if place.startswith(others)]
    assert {"datasets/dpex/bridge.py", "datasets/dpex/worker.py"} <= set(bundle.modules_of(ROOT / "jobs" / "train_dpex.py"))
    assert not any(place.startswith(("launch", "tests")) for name in JOBS for place in bundle.modules_of(ROOT / "jobs" / name))


@pytest.mark.parametrize("name, most_kilobytes", [("train_ddp", 820), ("train", 770), ("train_imagenet", 1_200)])
def test_what_an_option_alone_needs_is_left_out(name, most_kilobytes):
    job = ROOT / "jobs" / f"{name}.py"
    lean, whole = bundle.bundle(job, ()), bundle.bundle(job)
    assert len(lean.encode()) < most_kilobytes * 1000
    assert len(lean) < 0.82 * len(whole)


PHOTOS = ["--custom_data", "false", "--data_url", "photos", "--batch_size", "8"]
NEEDS = [
    ("train_ddp_exact", "elastic", ["--min_nodes", "1", "--nproc_per_node", "1"]),
    ("train_ddp", "doctor", ["--doctor", "true"]),
    ("train", "find_max_batch", ["--find_max_batch=true"]),
    ("train", "track", ["--track", "wandb"]),
    ("train", "profile", ["--profile", "true"]),
    ("train", "buckets", ["--custom_data", "false", "--data_url", "s3://bucket/cifar10"]),
    ("train", "buckets", ["--output_dir", "obs://bucket/run"]),
    ("train_imagenet", "profile", ["--prof", "3"]),
    ("train_imagenet", "kspeed", ["--data_backend", "kspeed", "--kspeed_iplist", "127.0.0.1", *PHOTOS]),
    ("train_imagenet", "dpex", ["--data_backend", "dpex"]),
    ("train_imagenet", "dali", ["--data-backend", "dali-cpu", *PHOTOS]),
]


@pytest.mark.parametrize("name, feature, options", NEEDS)
def test_a_job_that_is_asked_for_what_its_bundle_lacks_says_how_to_bundle_it(name, feature, options, empty):
    if "photos" in options:
        pictures.make("shapes", str(empty / "photos"), 20)
    path = write(empty, f"{name}.py", wanted=["track"] if feature == "doctor" else ())
    done = run_forked([path, *TINY, *SMALLER.get(name, []), *options], empty, check=2)
    also = "doctor,track" if feature == "doctor" else feature
    command = f"python -m launch bundle jobs/{name}.py --with {also}"
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said == [f"error: {feature} is not in this bundle: make another with {command}"], done.stderr
    assert "Traceback" not in done.stderr and not re.search("epoch 0", done.stdout)


@pytest.mark.parametrize("name, feature, options", NEEDS)
def test_the_options_that_a_job_will_have_bring_what_they_need(name, feature, options):
    features = bundle.features.of_options(options)
    assert features == {feature} == bundle.features.named([feature]) and not bundle.features.of_options(["--lr", "0.1"])
    stubs, lean = (bundle.features.stubs(ROOT / "jobs" / f"{name}.py", wanted) for wanted in (features, ()))
    assert set(stubs) < set(lean) and not [text for text in stubs.values() if f"{feature} is not" in text]


@pytest.mark.parametrize("feature, options, words", [
    ("find_max_batch", ["--find_max_batch=true"], "looks at the memory of a GPU, and this job computes on a CPU"),
    ("profile", ["--prof", "3", "--epochs", "30"], "Training speed was "),
])  # fmt: skip
def test_a_trial_needs_its_own_feature_alone(feature, options, words, empty):
    """Both take some steps and then end."""
    name = "train" if feature == "find_max_batch" else "train_imagenet"
    path = write(empty, f"{name}.py", wanted=[feature])
    options = [*TINY, *SMALLER.get(name, []), *options]
    done = run_forked([path, *options], empty, check=0 if feature == "profile" else 2)
    assert words in done.stdout + done.stderr


def test_a_feature_that_is_asked_for_is_in_the_file_and_in_the_folder(empty, capsys, untried):
    job, lean, asked = str(ROOT / "jobs" / "train.py"), empty / "lean.py", empty / "asked.py"
    for words in (
        ["-o", str(lean)],
        ["--with", "doctor,track", "-o", str(asked)],
        ["-o", str(empty / "all.py"), "--with", "all"],
    ):
        assert bundle.main([job, *words]) == 0
    assert bundle.main([job, "--folder", str(empty / "code"), "--", "--doctor", "true"]) == 0
    assert (empty / "all.py").read_text() == bundle.bundle(Path(job))
    places = [set(re.findall(r"^# ==== (\S+) =+$", path.read_text(), re.MULTILINE)) for path in (lean, asked)]
    assert {"common/doctor/checks.py", "common/track/follow.py"} <= places[1] - places[
        0
    ] and "common/doctor/__init__.py" in places[0]
    assert (empty / "code/common/doctor/checks.py").exists() and not (empty / "code/common/track").exists()
    capsys.readouterr()
    assert bundle.main([job, "--with", "all,doctors"]) == 2
    assert "--with doctors: there is no such feature; give all, or some of buckets,dali,doctor" in capsys.readouterr().err


def test_what_a_job_is_about_is_in_its_bundle():
    for name, module in (
        ("train_dali", "datasets/dali/batches.py"),
        ("train_dpex", "datasets/dpex/bridge.py"),
        ("speedrun", "common/storage/bucket.py"),
    ):
        job = ROOT / "jobs" / f"{name}.py"
        assert module in bundle.modules_of(job, bundle.features.stubs(job, ()))


def test_a_job_that_publishes_by_itself_has_the_buckets(tmp_path, monkeypatch):
    (tmp_path / "my job.py").write_text((ROOT / "jobs" / "train.py").read_text() + "\nfrom common import storage\n")
    stubs = bundle.features.stubs(tmp_path / "my job.py", ())
    assert stubs and not [file for file in stubs if file.startswith("common/storage")]
    assert "python -m launch bundle 'my job.py' --with doctor" in stubs["common/doctor/__init__.py"]
    monkeypatch.chdir(tmp_path)
    assert bundle.bundle("my job.py", ()) == bundle.bundle(tmp_path / "my job.py", ())


def test_what_a_feature_needs_is_asked_for(empty, untried):
    job, out = str(ROOT / "jobs" / "train_imagenet.py"), ["-o", str(empty / "job.py")]
    for words, packages in (
        (["--with", "dali", "--with", "dpex,doctor"], ["nvidia-dali-cuda120", "ray"]),
        (["--", "--data_url", "obs://bucket/photos"], ["boto3"]),
        (["--with", "all"], []),
        (["--with", "all", "--", "--output_dir", "s3://bucket/run"], ["boto3"]),
        (["--", "--data_url", "/data/dalian", "--output_dir", "/runs/kspeed"], []),
        (["--", "--data-backend", "dali-kspeed"], ["nvidia-dali-cuda120", "pymemcache"]),
    ):
        assert bundle.main([job, *out, *words]) == 0
        lines = [line for line in (empty / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
        assert [re.split("[>=;]", line)[0] for line in lines] == packages


@pytest.mark.parametrize("name", JOBS)
def test_a_module_brings_the_packages_that_it_is_in(name):
    places = bundle.modules_of(ROOT / "jobs" / name)
    assert {"common/world/world.py", "common/world/__init__.py", "common/__init__.py", "datasets/__init__.py"} <= set(places)
    packages = {f"{folder}/__init__.py" for place in places for folder in Path(place).parents[:-1]}
    assert packages <= set(places)


DEEP_JOB = """import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from common.outer.inner.deep import answer

if __name__ == "__main__":
    print(answer())
"""


@pytest.fixture
def deep(tmp_path, monkeypatch):
    """A repository with one job, which uses one module in a package of a package."""
    sources = {
        "jobs/deep.py": DEEP_JOB,
        "common/__init__.py": "",
        "common/outer/__init__.py": "print('outer is imported')\n",
        "common/outer/inner/__init__.py": "print('inner is imported')\n",
        "common/outer/inner/deep.py": "def answer():\n    return __name__\n",
        "requirements.txt": "",
        bundle.LOADER: (ROOT / bundle.LOADER).read_text(),
    }
    for place, text in sources.items():
        (tmp_path / "repository" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "repository" / place).write_text(text)
    monkeypatch.setattr(bundle.imports, "ROOT", tmp_path / "repository")
    return tmp_path / "repository" / "jobs" / "deep.py"


@pytest.mark.parametrize("form", ["file", "folder"])
@pytest.mark.parametrize("without_init", [False, True])
def test_a_module_in_a_package_of_a_package_works(deep, empty, form, without_init):
    for name in ("outer/__init__.py", "outer/inner/__init__.py") if without_init else ():
        (deep.parent.parent / "common" / name).unlink()
    boot = empty / "jobs" / "deep.py" if form == "folder" else empty / "deep.py"
    words = ["--folder", str(empty)] if form == "folder" else ["-o", str(boot)]
    assert bundle.main([str(deep), *words]) == 0
    done = run([sys.executable, str(boot)], cwd=empty, env=environment())
    imported = "" if without_init else "outer is imported\ninner is imported\n"
    assert done.stdout == f"{imported}common.outer.inner.deep\n", done.stderr


@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_job_that_is_a_link_is_bundled_under_the_name_that_was_given(deep, empty, form, monkeypatch):
    link = deep.with_name("link.py")
    link.symlink_to("deep.py")
    monkeypatch.chdir(empty)
    assert bundle.main([str(link), *(["--folder", "out"] if form == "folder" else [])]) == 0
    assert (empty / ("out/jobs/link.py" if form == "folder" else "dist/link.py")).exists()


def test_a_folder_that_may_be_replaced_need_not_be_there(deep, empty):
    assert bundle.main([str(deep), "--folder", str(empty / "code"), "--overwrite", "true"]) == 0
    assert (empty / "code" / "jobs" / "deep.py").exists()


def test_a_bundle_is_replaced_behind_a_link_too(deep, empty):
    assert bundle.main([str(deep), "--folder", str(empty)]) == 0
    (empty / "common" / "of_before.py").write_text("")
    (link := empty.with_name("link")).symlink_to(empty)
    assert bundle.main([str(deep), "--folder", str(link), "--overwrite", "true"]) == 0
    assert not (empty / "common" / "of_before.py").exists() and (empty / "jobs" / "deep.py").exists()


def test_a_bundle_that_was_cut_off_may_be_replaced(deep, empty, monkeypatch):
    words = [str(deep), "--folder", str(empty / "code"), "--overwrite", "true"]
    with monkeypatch.context() as full:
        full.setattr(bundle.shutil, "copyfile", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert bundle.main(words) == 1
    assert bundle.main(words) == 0


def test_the_packages_beside_are_those_of_the_newest_bundle(deep, empty, capsys):
    for package in ("scipy", "json"):
        (deep.parent / f"{package}_job.py").write_text(f"import {package}\n{DEEP_JOB}")
        assert bundle.main([str(deep.parent / f"{package}_job.py"), "-o", str(empty / f"{package}_job.py")]) == 0
        assert "or with requirements.txt and pip-requirements.txt beside it" in capsys.readouterr().out
        assert bool(re.search("^scipy$", (empty / "requirements.txt").read_text(), re.MULTILINE)) == (package == "scipy")
    (empty / "requirements.txt").write_text("of somebody else")
    assert bundle.main([str(deep), "-o", str(empty / "deep.py")]) == 0
    assert (empty / "requirements.txt").read_text() == "of somebody else"


def add(path, text):
    path.write_text(f"{path.read_text()}{text}\n")


def test_packages_of_ones_own_are_asked_for(deep, empty, capsys):
    add(deep, "import json, scipy, sklearn.metrics, torch, numpy.linalg, PIL.Image")
    add(deep.parent.parent / "common/outer/inner/deep.py", "import dateutil, of_a_friend")
    assert bundle.main([str(deep), "-o", str(empty / "deep.py")]) == 0
    assert "not tried, because of_a_friend is not installed here" in capsys.readouterr().out
    wanted = [line for line in (empty / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert wanted == [
        "python-dateutil" if sys.version_info >= (3, 10) else "dateutil",
        "of_a_friend",
        "scipy",
        "scikit-learn>=1.3.2",
    ]


def test_what_is_beside_common_and_not_in_it_is_refused(deep, empty, capsys):
    (deep.parent.parent / "mine").mkdir()
    (deep.parent.parent / "mine" / "layers.py").write_text("")
    add(deep.parent.parent / "common/outer/inner/deep.py", "from mine import layers")
    assert bundle.main([str(deep), "-o", str(empty / "deep.py")]) == 2
    assert f"deep.py imports mine from {deep.parent.parent}, which a bundle leaves out" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["Path(__file__).with_name('words.txt')", "Path(__file__).parent / 'texts' / 'words.txt'"])
@pytest.mark.parametrize("where", ["jobs", "common/outer/inner"])
def test_files_that_a_module_reads_beside_itself_go_along_in_a_folder(deep, empty, capsys, words, where):
    folder = deep.parent.parent / where
    place = folder / ("texts/words.txt" if "texts" in words else "words.txt")
    place.parent.mkdir(exist_ok=True)
    place.write_text("good morning")
    (folder / "private.txt").write_text("no module names this")
    (place.parent / ".private.txt").write_text("hidden, in the folder that a module may name")
    add(folder / "deep.py", f"from pathlib import Path\n\nprint(({words}).read_text())")
    assert bundle.main([str(deep), "-o", str(empty / "deep.py")]) == 2
    assert (
        "words.txt is read by a module in its folder, and one file cannot hold both: give --folder" in capsys.readouterr().err
    )
    assert bundle.main([str(deep), "--folder", str(empty)]) == 0
    done = run([sys.executable, str(empty / "jobs" / "deep.py")], cwd=empty, env=environment())
    assert "good morning" in done.stdout and not list(empty.rglob("*private.txt")), done.stderr


@pytest.mark.parametrize("form", ["file", "folder"])
@pytest.mark.parametrize(
    "line, why",
    [
        ("open('settings.json')", "FileNotFoundError: .*settings.json"),
        ("__import__('common.later')", "ModuleNotFoundError: No module named 'common.later'"),
        (
            "__import__('jinja2')",
            "a module imports jinja2, which the platform may lack: import it in the job, so that it is asked for",
        ),
    ],
)
def test_a_bundle_that_does_not_start_alone_is_not_called_done(deep, empty, capsys, form, line, why):
    (deep.parent.parent / "common" / "later.py").write_text("")
    add(deep, line)
    boot = empty / ("jobs/deep.py" if form == "folder" else "deep.py")
    assert bundle.main([str(deep), *(["--folder", str(empty)] if form == "folder" else ["-o", str(boot)])]) == 2
    said = capsys.readouterr()
    assert re.search(rf"deep\.py is written, but does not show its --help in an empty folder: {why}", said.err)
    assert boot.exists() and not said.out


@pytest.mark.parametrize("where", ["jobs/deep.py", "common/outer/inner/deep.py"])
@pytest.mark.parametrize("line", ["from . import beside", "from .beside import x", "from ..outer import x"])
def test_a_relative_import_is_refused_with_its_file_and_line(deep, empty, where, line, capsys):
    path = deep.parent.parent / where
    path.write_text(f"{path.read_text()}\n\n{line}\n")
    for words in (["-o", str(empty / "deep.py")], ["--folder", str(empty / "code")]):
        assert bundle.main([str(deep), *words]) == 2
        number = len(path.read_text().splitlines())
        assert f"{where}:{number}: `{line}` is a relative import" in capsys.readouterr().err
    assert not list(empty.iterdir())


def test_the_same_sources_give_the_same_bytes_and_others_another_digest(tmp_path, monkeypatch):
    first = bundle.bundle(ROOT / "jobs" / "train.py")
    assert first == bundle.bundle(ROOT / "jobs" / "train.py")
    other = tmp_path / "train.py"
    other.write_text((ROOT / "jobs" / "train.py").read_text() + "# changed\n")
    digests = [
        re.search(r"^# Digest of the sources: ([0-9a-f]{64})$", text, re.MULTILINE)[1] for text in (first, bundle.bundle(other))
    ]
    assert digests[0] != digests[1]


@pytest.mark.parametrize("name", in_rehearsal(JOBS, lambda name: name not in ("train.py", "train_ddp.py", "train_imagenet.py")))
def test_every_job_runs_alone_in_an_empty_folder(empty, name):
    options = [*TINY, *SMALLER.get(name[:-3], []), "--max_steps", 1, "--output_dir", empty / "out"]
    done = run_forked([write(empty, name), *options], empty)
    assert "done: " in done.stdout and any((empty / "out").glob(LEAVES.get(name[:-3], "checkpoints/*")))


@pytest.mark.rehearsal
@pytest.mark.parametrize("name", JOBS)
def test_a_copy_of_a_job_under_another_name_runs_alone_in_an_empty_folder(empty, tmp_path, name):
    shutil.copy(ROOT / "jobs" / name, tmp_path / "mine.py")
    assert bundle.main([str(tmp_path / "mine.py"), "-o", str(empty / "mine.py")]) == 0
    options = [*TINY, *SMALLER.get(name[:-3], []), "--max_steps", 1, "--output_dir", empty / "out"]
    assert "done: " in run_forked([empty / "mine.py", *options], empty).stdout


@pytest.mark.rehearsal
def test_with_loader_workers_it_gives_the_bits_of_the_repositorys_job(empty):
    started(empty, write(empty, "train.py"), *TINY, "--workers", 2)
    (empty / "theirs").mkdir()
    run_job("train", empty / "theirs", *TINY)
    assert_same_bits(final_state(empty), final_state(empty / "theirs"))


def test_a_spawned_process_finds_the_modules_too(deep, empty):
    spawned = "__import__('multiprocessing').get_context('spawn').Pool(1).apply(answer)"
    deep.write_text(DEEP_JOB.replace("answer())", f"{spawned})"))
    path = empty / "deep.py"
    path.write_text(bundle.bundle(deep))
    words = [sys.executable, str(path)]
    done = subprocess.run(words, cwd=empty, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert "common.outer.inner.deep\n" in done.stdout, done.stdout + done.stderr


@pytest.mark.rehearsal
def test_two_nodes_stopped_and_started_again_by_another_launcher(empty):
    """First the platform's own form of starting it, once per node."""
    path = write(empty, "train_ddp.py")
    words = ["--nodes", 2, "--procs", 1, path, "--", *TINY, "--epochs", 500, "--save_steps", 1, "--output_dir", empty / "out"]
    local = [sys.executable, "-m", "launch", "local", *map(str, words)]
    process = subprocess.Popen(local, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    wait_for(saved(empty, 96), process, "the third step")
    process.send_signal(signal.SIGTERM)
    log, _ = process.communicate(timeout=PATIENCE)
    assert "stopped by SIGTERM; saved after step" in log
    steps = int(re.search(r"saved after step (\d+)", log)[1])
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    more = started(empty, path, *TINY, "--epochs", 500, "--max_steps", steps + 3, launcher=torchrun)
    assert f", step {steps}" in more.stdout and "done: " in more.stdout


def test_a_traceback_names_the_line_of_the_repository(empty):
    lines = (ROOT / "common" / "run" / "run.py").read_text().split("\n")
    number = next(number for number, line in enumerate(lines, 1) if line.strip() == "self.position = Position()")

    def change(text):
        return text.replace(lines[number - 1], lines[number - 1] + "; 1 / 0")

    done = started(empty, write(empty, "train.py", change), *TINY, check=1)
    assert f'train.py/common/run/run.py", line {number}, in __init__' in done.stderr and "ZeroDivisionError" in done.stderr


def test_a_folder_holds_the_job_and_what_it_uses(empty, capsys, monkeypatch):
    job = ROOT / "jobs" / "train.py"
    stubs = bundle.features.stubs(job, ())
    assert bundle.main([str(job), "--folder", str(empty / "code")]) == 0
    assert "the boot file is jobs/train.py" in capsys.readouterr().out
    found = sorted(str(path.relative_to(empty / "code")) for path in (empty / "code").rglob("*") if path.is_file())
    assert found == sorted([bundle.MARKER, "jobs/train.py", *bundle.requirements.NAMES, *bundle.modules_of(job, stubs), *stubs])
    started(empty, empty / "code" / "jobs" / "train.py", *TINY, "--max_steps", 1)
    with pytest.raises(UserError, match="is not empty: give another folder, or --overwrite true"):
        bundle.write_folder(ROOT / "jobs" / "train.py", empty / "code")
    bundle.write_folder(ROOT / "jobs" / "train_ddp.py", empty / "code", overwrite=True)
    started(empty, empty / "code" / "jobs" / "train_ddp.py", *TINY, "--max_steps", 2)
    assert not (empty / "code" / "jobs" / "train.py").exists()
    with pytest.raises(UserError, match=r"train_ddp\.py is in .*code, which the bundle replaces: give another folder"):
        bundle.write_folder(empty / "code" / "jobs" / "train_ddp.py", empty / "code", overwrite=True)
    assert (empty / "code" / "jobs" / "train_ddp.py").exists()
    (empty / "mine").mkdir()
    (empty / "mine" / "thesis.txt").write_text("my own work")
    with pytest.raises(UserError, match="is not empty: give another folder; launch bundle replaces only what it has written"):
        bundle.write_folder(ROOT / "jobs" / "train.py", empty / "mine", overwrite=True)
    assert (empty / "mine" / "thesis.txt").exists()
    for name, what in (("MOST_BYTES", "bytes"), ("MOST_FILES", "files and folders"), ("DEEPEST", "levels of folders")):
        with monkeypatch.context() as patch, pytest.raises(UserError, match=f"has \\d+ {what}: a console takes 1 at most"):
            patch.setattr(bundle, name, 1)
            bundle.write_folder(ROOT / "jobs" / "train.py", empty / "other")
        assert not (empty / "other").exists()


def test_a_bundle_says_by_which_version_it_was_made(deep, tmp_path):
    job, old = str(deep), tmp_path / "deep.py"
    assert bundle.main([job, "-o", str(old)]) == 0 and bundle.main([job, "--folder", str(tmp_path / "code")]) == 0
    assert re.search(rf"^# .* Made by python -m launch bundle of anyrank {VERSION}\.$", old.read_text(), re.MULTILINE)
    assert f"of anyrank {VERSION}" in (tmp_path / "code" / bundle.MARKER).read_text()
    old.write_text(re.sub(r" of anyrank [0-9.]+\.\n", ".\n", old.read_text()))  # as 0.1.0 wrote it
    assert bundle.main([job, "-o", str(old)]) == 0 and VERSION in old.read_text()


def test_what_is_no_job_and_what_somebody_wrote_is_refused(tmp_path, capsys, untried):
    (tmp_path / "mine.py").write_text("print('mine')\n")
    (tmp_path / "with_settings.py").write_text("import mine\n" + (ROOT / "jobs" / "train.py").read_text())
    (tmp_path / "half.py").write_text("print(\n")
    for words, message in (
        ([str(tmp_path / "mine.py")], "is no job: it imports nothing of anyrank"),
        ([str(tmp_path / "with_settings.py")], "with_settings.py imports mine from its own folder"),
        ([str(tmp_path / "with_settings.py"), "--folder", str(tmp_path / "code")], "imports mine from its own folder"),
        ([str(tmp_path / "none.py")], "none.py: give a job's file"),
        ([str(tmp_path / "half.py")], "half.py is no Python: '(' was never closed"),
        ([str(ROOT / "jobs" / "train.py"), "-o", str(tmp_path / "mine.py")], "exists and is no bundle"),
    ):
        assert bundle.main(words) == 2 and message in capsys.readouterr().err
    assert (tmp_path / "mine.py").read_text() == "print('mine')\n"
    assert bundle.main([str(ROOT / "jobs" / "train.py"), "-o", str(tmp_path / "out.py")]) == 0
    assert Path(tmp_path / "out.py").read_text() == bundle.bundle(ROOT / "jobs" / "train.py", ())
