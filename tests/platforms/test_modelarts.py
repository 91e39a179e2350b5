"""The troubles in ModelArts' own manual: each cannot happen, or is a sentence that says what to do."""

import ast
import http.server
import os
import re
import shutil
import signal
import sys
import tarfile
import threading
import types
from pathlib import Path

import pytest
import torch

from common import arguments, devices, job, moments, packages, storage
from common.doctor import examination
from common.errors import TrainingFailed, UserError
from common.ranks import group
from common.world import World, folders
from datasets import cifar10, loader
from launch import bundle
from launch.submit import kubernetes, modelarts, request
from tests.tools.certificate import certified
from tests.tools.cifar import write_folder
from tests.tools.jobs import (
    FIGURES,
    PATIENCE,
    ROOT,
    TINY,
    assert_same_bits,
    command,
    environment,
    final_state,
    run,
    run_forked,
    run_job,
    saved,
    start,
    wait_for,
)
from tests.tools.ranks import changed_loader, children
from tests.tools.submitting import ask

JOBS = sorted((ROOT / "jobs").glob("*.py"))
INPUT, OUTPUT = "/home/ma-user/modelarts/inputs/data_url_0", "/home/ma-user/modelarts/outputs/train_url_0"


# --- Packages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "python, torch, numpy, missing, words",
    [
        ((3, 11), "2.15.0+cu132", "2.4.6", (), None),
        ((3, 9), "2.1.0a0+git1234", "1.24.4", (), None),
        ((3, 11), "2.3.0", "2.0.0", (), None),
        ((3, 10), None, "2.0.0", (), None),
        ((3, 8), "1.13.1", "1.24.4", (), "this is Python 3.8, and the jobs need Python 3.9 and torch 2.1, or later: choose an eng"),
        ((3, 9), "2.10.0", None, ("numpy", "torchvision"), "not installed: numpy, torchvision; choose an engine or image that has"),
        ((3, 10), "2.0.1", "1.24.4", (), "torch is 2.0.1, and the jobs need torch 2.1 or later: choose an engine"),
        ((3, 10), "2.1.0", "2.0.0", (), "numpy 2.0.0 does not work with torch 2.1.0, which was built for numpy 1: pip install 'numpy<2'"),
    ],
)  # fmt: skip
def test_what_is_too_old_or_missing_is_a_sentence(python, torch, numpy, missing, words):
    old, lacks = packages.python_error(python), packages.missing_error(lambda module: module not in missing)
    said = old or lacks or packages.version_error(torch, numpy)
    assert said is None if words is None else said.startswith(words)


@pytest.mark.parametrize(
    "path",
    [
        *JOBS,
        ROOT / "common" / "__init__.py",
        ROOT / "common" / "packages.py",
        ROOT / "launch" / "__main__.py",
        ROOT / "launch" / "bundle" / "importer.py",
    ],
    ids=lambda path: path.name,
)
def test_an_old_python_can_read_what_it_reads_first(path):
    ast.parse(path.read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("form", ["repository", "file"])
def test_a_job_without_a_package_ends_with_one_line(tmp_path, form):
    job = ROOT / "jobs" / "train.py"
    if form == "file":
        job = tmp_path / "train.py"
        job.write_text(bundle.bundle(ROOT / "jobs" / "train.py"))
    start = f"""
import runpy, sys, importlib.util as util
real = util.find_spec
util.find_spec = lambda name, package=None: None if name in ("numpy", "torchvision") else real(name, package)
sys.argv = [{str(job)!r}, "--custom_data", "true"]
runpy.run_path({str(job)!r}, run_name="__main__")
"""
    done = run([sys.executable, "-c", start], env=environment(), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(
        "error: not installed: numpy, torchvision; choose an engine or image"
    )
    assert done.stderr.count("\n") == 1


def test_an_older_torch_beside_numpy_2_is_one_line_before_torch_is_imported(tmp_path):
    """Torch itself would print sixty lines when it is imported, and fail at the first array."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("raise RuntimeError('too late')")
    for name, version in (("torch", "2.1.0"), ("numpy", "2.0.0")):
        about = tmp_path / "site" / f"{name}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    path = {"PYTHONPATH": str(tmp_path / "site")}
    done = run_job("train", tmp_path, "--custom_data", "true", env=path, check=2, launcher=[sys.executable])
    assert done.stderr.startswith("error: numpy 2.0.0 does not work with torch 2.1.0, which") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "package, text, why, missing",
    [
        ("sklearn", "raise ValueError('numpy.dtype size changed')", "scikit-learn cannot be imported: ValueError: numpy.dtype size", ""),
        ("matplotlib", None, "matplotlib is not installed", "curves.png"),
        ("tensorboard", None, "tensorboard is not installed", "tensorboard/events*"),
        ("jinja2", None, "jinja2 is not installed", "report.html"),
    ],
)  # fmt: skip
def test_a_run_does_without_what_only_looks_on(finished, tmp_path, package, text, why, missing):
    env = {"WITHOUT": package}
    if text:
        broken = tmp_path / "broken" / package
        broken.mkdir(parents=True)
        (broken / "__init__.py").write_text(text)
        env = {"PYTHONPATH": str(broken.parent), "WITHOUT": "", "ANEW": package}
    done = run_job("train", tmp_path, *TINY, env=env)
    (said,) = re.findall(r"^left out: (.*)$", done.stdout, re.MULTILINE)
    assert why in said and said.count("(") == 1 and not done.stderr
    files = {"curves.png", "tensorboard/events*", "report.html", "report.txt"}
    assert {name for name in files if not list((tmp_path / "out").glob(name))} == ({missing} - {""})
    assert_same_bits(final_state(tmp_path), final_state(finished[0]))


def test_uploads_and_bundles_have_the_packages_under_both_names(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bundle.command, "try_out", lambda *_: "")  # tests/launch/bundle/test_bundle.py tries what is bundled
    names, text = bundle.requirements.NAMES, bundle.requirements.text("jobs/train.py")
    job = str(ROOT / "jobs" / "train.py")
    assert bundle.main([job, "--folder", str(tmp_path / "folder")]) == 0
    assert bundle.main([job, "-o", str(tmp_path / "file" / "train.py")]) == 0
    request.stage("jobs/train.py", tmp_path / "upload")
    for folder in ("folder", "file", "upload"):
        assert {(tmp_path / folder / name).read_text() for name in names} == {text}
    assert names == ("requirements.txt", "pip-requirements.txt")
    assert "or with requirements.txt and pip-requirements.txt beside it" in capsys.readouterr().out
    (tmp_path / "file" / "requirements.txt").write_text("mine\n")
    assert bundle.main([job, "-o", str(tmp_path / "file" / "train.py")]) == 0
    assert (tmp_path / "file" / "requirements.txt").read_text() == "mine\n", "a file of somebody else stays"
    assert "or with pip-requirements.txt beside it" in capsys.readouterr().out


# --- Addresses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"data_url": "obs://bkt/code/data"}, "--data_url obs://bkt/code/data lies in --code_url obs://bkt/code"),
        ({"output_url": "obs://bkt/code/out"}, "--output_url obs://bkt/code/out lies in --code_url obs://bkt/code"),
        (
            {"output_url": "obs://bkt/cifar"},
            "--data_url obs://bkt/cifar/ lies in --output_url obs://bkt/cifar: give each a folder",
        ),
        ({"log_url": "obs://bkt/runs/7/log"}, "--log_url obs://bkt/runs/7/log lies in --output_url obs://bkt/runs/7"),
        ({"hours": 73.0}, "--hours is 73: modelarts stops a job after 72 at most: give the job --max_hours"),
    ],
)
def test_addresses_in_each_other_are_refused(changes, words):
    lines = [*request.mistakes(ask("modelarts", **changes)), *modelarts.mistakes(ask("modelarts", **changes))]
    assert len(lines) == 1 and lines[0].startswith(words), lines


def test_addresses_beside_each_other_are_not(tmp_path):
    assert not request.mistakes(ask("modelarts", data_url="obs://bkt/code2", output_url="obs://bkt/co"))
    assert not request.mistakes(ask("slurm", data_url="/mnt/nas", output_url="/mnt/nas/runs")), "a disk is not copied"


def test_an_encrypted_bucket_is_refused_before_anything_is_sent(monkeypatch):
    monkeypatch.setattr(storage.bucket, "encryption", lambda url: "aws:kms" if "cifar" in url else None)
    with pytest.raises(
        UserError, match=r"--data_url obs://bkt/cifar/: the bucket is encrypted \(aws:kms\), which ModelArts' jobs"
    ):
        modelarts.send(None, ask("modelarts"), {})


# --- Names of inputs and outputs -----------------------------------------------------------------------------------------


def parse(*argv, **environ):
    return arguments.parse(cifar10.parser("A job."), list(argv), environ)


@pytest.mark.parametrize(
    "argv, environ, words",
    [
        ([f"--data_path={INPUT}"], {}, f"--data_path is {INPUT}, an input that this job does not read: call it data_url"),
        (["--data_path", INPUT], {}, f"--data_path is {INPUT}, an input that this job does not read: call it data_url"),
        ([], {"dataset": INPUT}, f"dataset is {INPUT}, an input that this job does not read: call it data_url"),
        (
            ["--output_path", OUTPUT],
            {},
            f"--output_path is {OUTPUT}, an output that this job does not write to: call it train_url",
        ),
        (
            [],
            {"PAI_OUTPUT_RESULT": "/ml/output/r"},
            "PAI_OUTPUT_RESULT is /ml/output/r, an output that this job does not write to: call it model",
        ),
    ],
)
def test_an_input_or_output_of_another_name_is_refused_with_ours(argv, environ, words, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv, **environ)
    assert stop.value.code == 2 and f"error: {words}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, environ",
    [
        ([f"--data_path={INPUT}", f"--data_url={INPUT}"], {}),
        ([f"--data_path={INPUT}", "--custom_data=true"], {}),
        ([f"--output_path={OUTPUT}", f"--train_url={OUTPUT}"], {}),
        ([], {"PAI_OUTPUT_CHECKPOINTS": "/ml/output/c", "PAI_OUTPUT_TENSORBOARD": "/ml/output/t"}),
        ([], {"PAI_OUTPUT_RESULT": "/ml/output/r", "PAI_OUTPUT_MODEL": "/ml/output/model"}),
    ],
)
def test_beside_ours_it_is_left_alone(argv, environ):
    parse(*argv, **environ)


@pytest.mark.parametrize(
    "output, environ, kept",
    [
        (OUTPUT, {"MA_JOB_DIR": "/x"}, True),
        ("/home/ma-user/modelarts/outputs_of_mine", {"MA_JOB_DIR": "/x"}, False),
        ("/cache/out", {"MA_JOB_DIR": "/x"}, False),
        ("/opt/ml/model", {"SM_MODEL_DIR": "/opt/ml/model"}, True),
        ("/tmp/out", {"SM_MODEL_DIR": "/opt/ml/model"}, False),
        ("/proc/out", {"MA_JOB_DIR": "/x"}, True),  # a disk that is mounted
        ("/anywhere", {}, True),
    ],
)
def test_results_that_would_go_with_the_container_are_warned_of(output, environ, kept, monkeypatch):
    monkeypatch.setattr(folders.os.path, "ismount", lambda path: path in ("/", "/cache", "/proc"))
    why = folders.why_results_would_be_lost(types.SimpleNamespace(output_dir=output, output_url=None), environ)
    assert why is None if kept else why.startswith(f"the platform does not keep {output}: it keeps what is in /")


# Whatever is mounted at the folder of the tests, as often at /tmp.
ON_ONE_DISK = """
import os, runpy, sys
os.path.ismount = lambda path: path == "/"
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_log_and_the_doctor_say_that_results_are_not_kept(tmp_path, monkeypatch):
    env = {"MA_JOB_DIR": "/x", "MA_SCHEDULE_CNT": "2"}
    words = [*command("train", *TINY, "--max_steps", 1)]
    done = run([words[0], "-c", ON_ONE_DISK, *words[1:]], cwd=tmp_path, env=environment(**env))
    lines = done.stdout + done.stderr
    assert "warning: the platform does not keep output_dir/train: it keeps what is in /home/ma-user/modelarts/outputs;" in lines
    assert (
        "warning: this is start 2 of the job, and its output folder has no checkpoint: for ModelArts to bring it back, Predownload"
        in lines
    )
    monkeypatch.setenv("MA_JOB_DIR", "/x")
    monkeypatch.setattr(folders.os.path, "ismount", lambda path: path == "/")
    monkeypatch.chdir(tmp_path)
    args = parse("--custom_data", "true")
    rows = [finding for finding in examination._node_findings(args, args.world) if finding.check == "output"]
    assert [row.severity for row in rows] == ["good", "bad"]


# --- Memory --------------------------------------------------------------------------------------------------------------

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of which 1.2 GiB is free."


@pytest.mark.parametrize(
    "error, line",
    [
        (
            torch.OutOfMemoryError(OOM),
            "CUDA out of memory. Tried to allocate 2.00 GiB: the GPU's memory is full; lower --batch_size "
            "(--find_max_batch true finds the largest that fits)",
        ),
        (
            torch.OutOfMemoryError("CUDA error: out of memory"),
            "CUDA error: out of memory: the GPU's memory is full; lower --batch_size "
            "(--find_max_batch true finds the largest that fits)",
        ),
        (MemoryError(), "this node's memory is full: lower --workers or --batch_size, or ask for more memory"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"),
            "this node's memory is full: ",
        ),
        (OSError(12, "Cannot allocate memory"), "this node's memory is full: "),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that"),
            "/dev/shm is full: start the container with more",
        ),
        (RuntimeError("Some memory of another kind"), None),
    ],
)
def test_for_want_of_memory_a_job_ends_with_one_line(error, line, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as stop:
        job._run(main)
    said = capsys.readouterr().err
    assert stop.value.code == 1 and ("Traceback" in said) == (line is None)
    assert line is None or (said.startswith(f"error: {line}") and said.count("\n") == 1)


def test_a_killed_loader_process_is_said_with_what_to_lower(tmp_path):
    process = start(tmp_path, *TINY, "--epochs", 200, "--save_steps", 1, "--workers", 2)
    wait_for(saved(tmp_path, 16), process, "a step")
    loaders = [pid for pid in children(process) if Path(f"/proc/{pid}/comm").read_text().startswith("pt_data")]
    os.kill(loaders[-1], signal.SIGKILL)
    assert process.wait(PATIENCE) == 1
    said = (tmp_path / "log").read_text()
    assert "error: a loader process was killed, perhaps for want of memory: lower --workers or --batch_size" in said
    assert "Traceback" not in said


def test_a_loader_process_that_is_killed_while_it_hands_over_a_batch_is_said_too(monkeypatch):
    def broken(_):
        yield "a batch"
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(torch.utils.data.DataLoader, "__iter__", broken)
    batches = iter(loader.torch_batches([0], [[0]], workers=1))
    assert next(batches) == "a batch"
    with pytest.raises(TrainingFailed, match="a loader process was killed, perhaps for want of memory: lower --workers"):
        next(batches)


@pytest.mark.parametrize("seen, promised, warned", [(7, 8, True), (8, 8, False), (0, 8, False), (2, 0, False)])
def test_fewer_gpus_than_promised_are_a_warning_with_both_numbers(seen, promised, warned, monkeypatch):
    monkeypatch.setattr(devices.choice, "count", lambda: seen)
    here = World("modelarts", "", "node", 0, 2, 0, 8, 0, 16, gpus_promised=promised)
    said = devices.idle_devices_warning(types.SimpleNamespace(world=here, enable_gpu=None))
    assert said == ("torch sees 7 of the 8 GPUs that modelarts says this node has: the others are idle" if warned else None)


def test_workers_whose_torch_sees_none_of_the_promised_gpus_end_instead_of_training_on_the_cpu(tmp_path):
    words = command("train_ddp", *TINY, "--output_dir", tmp_path / "out")
    env = {"MA_NUM_HOSTS": "1", "MA_NUM_GPUS": "8", "NPROC_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": ""}
    done = run_forked(words[1:], tmp_path, env, check=2)
    assert re.match(
        r"error: rank \d .*: the platform reports 8 GPUs \(modelarts\), but torch sees no GPU: ", done.stderr.splitlines()[-1]
    )


# --- How a job ends ------------------------------------------------------------------------------------------------------


def test_volcano_does_not_start_a_mistake_again():
    policies = kubernetes.build(ask("volcano"))
    text = re.sub(r"\s", "", str(policies))
    assert "'policies':[{'exitCode':2,'action':'TerminateJob'},{'event':'PodFailed','action':'RestartJob'}" in text


# --- Disks and rights ----------------------------------------------------------------------------------------------------


def test_data_that_cannot_be_read_are_called_so_and_not_missing(tmp_path):
    (tmp_path / "out").mkdir()
    (closed := tmp_path / "closed").mkdir()
    (closed / "cifar-10-batches-py").mkdir()
    closed.chmod(0)
    unprivileged = without_rights(command("train", "--data_url", closed, "--output_dir", tmp_path / "out"), tmp_path)
    assert unprivileged.returncode == 2
    assert f"error: --data_url {closed} cannot be read (Permission denied): make it readable" in unprivileged.stderr
    missing = without_rights(command("train", "--data_url", tmp_path / "none", "--output_dir", tmp_path / "out"), tmp_path)
    assert f"error: --data_url {tmp_path / 'none'} does not exist: give a folder" in missing.stderr


# Without the two capabilities by which root passes every right of a file.
AS_ANYBODY = """
import ctypes, runpy, sys
head, capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc = ctypes.CDLL(None)
assert libc.capget(head, capabilities) == 0
capabilities[0] &= ~0b110
capabilities[1] &= ~0b110
assert libc.capset(head, capabilities) == 0
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def without_rights(words, folder, **env):
    """Run a job in a working folder that cannot be written to, without a home; root as anybody else."""
    mode = folder.stat().st_mode
    folder.chmod(0o555)
    env = environment(HOME="/nonexistent", PYTHONDONTWRITEBYTECODE="1", **env)
    try:
        return run([words[0], "-c", AS_ANYBODY, *words[1:]], cwd=folder, env=env)
    finally:
        folder.chmod(mode)


def test_without_a_home_and_a_working_folder_it_trains(tmp_path):
    (tmp_path / "out").mkdir()
    done = without_rights(command("train", *TINY, "--epochs", 1, "--output_dir", tmp_path / "out"), tmp_path, **FIGURES)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert not re.search("^error", done.stderr, re.MULTILINE) and (tmp_path / "out" / "curves.png").exists()


def test_where_nothing_can_be_written_it_says_what_to_give(tmp_path):
    done = without_rights(command("train", *TINY), tmp_path)
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[-1] == "error: cannot write to output_dir/train: Permission denied; give another --output_dir"
    )


def test_a_crash_leaves_no_core_file(tmp_path):
    job = changed_loader(
        "train", tmp_path, "import resource; print('core', resource.getrlimit(resource.RLIMIT_CORE)[0], flush=True)"
    )
    done = run([*job, *TINY, "--epochs", "1"], cwd=tmp_path, env=environment())
    assert "core 0\n" in done.stdout, done.stderr


def test_what_is_fetched_and_indexed_lies_in_the_folder_that_was_given(tmp_path):
    write_folder(tmp_path / "data" / "cifar-10-batches-py")
    with tarfile.open(tmp_path / "data" / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "data" / "cifar-10-batches-py", "cifar-10-batches-py")
    shutil.rmtree(tmp_path / "data" / "cifar-10-batches-py")
    (tmp_path / "data").chmod(0o555)
    somewhere = tmp_path / "disk" / "in"
    somewhere.parent.mkdir()
    (out := tmp_path / "out").mkdir()
    job = command(
        "train",
        "--data_url",
        tmp_path / "data",
        "--input_dir",
        somewhere,
        "--output_dir",
        out,
        *TINY[2:],
        "--batch_size",
        4,
        "--epochs",
        1,
    )
    done = without_rights(job, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(somewhere.glob("unpacked/*/cifar-10-batches-py/data_batch_1"))) == 1 and not (out / "input_dir").exists()


@pytest.mark.parametrize("free, folder", [({"/cache": 2, ".": 1}, "/cache/input_dir"), ({"/cache": 1, ".": 2}, "input_dir")])
def test_on_modelarts_the_larger_disk_takes_the_data(free, folder, monkeypatch):
    monkeypatch.setattr(folders, "_size", lambda place: free[place])
    monkeypatch.setattr(folders.os, "access", lambda *_: True)
    assert parse("--custom_data", "true", MA_JOB_DIR="/x").input_dir == folder
    assert parse("--custom_data", "true").input_dir == "input_dir"
    assert parse("--custom_data", "true", "--input_dir", "/mine", MA_JOB_DIR="/x").input_dir == "/mine"


# --- Network -------------------------------------------------------------------------------------------------------------


def test_a_certificate_that_cannot_be_verified_is_refused_at_once_whatever_s3_verify_ssl_says(tmp_path):
    _, context = certified(tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    store = {"S3_ENDPOINT": f"127.0.0.1:{server.server_port}", "S3_USE_HTTPS": "1", "S3_VERIFY_SSL": "0"}
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    options = ("--data_url", "obs://bucket/cifar10", "--output_dir", tmp_path / "out")
    done = run_forked(command("train", *options)[1:], tmp_path, {**store, **keys}, check=2)
    server.shutdown()
    assert "certificate cannot be verified: give the file of the authority" in done.stderr, done.stderr
    assert "S3_VERIFY_SSL=0 is not followed" in done.stderr


def test_the_parent_of_a_node_prints_that_warning_before_it_starts_the_workers(monkeypatch, capsys):
    parent = types.SimpleNamespace(run=lambda: print("workers") or 0)
    monkeypatch.setattr(moments.REPLACED, "parent", lambda *_: parent)
    monkeypatch.setattr(devices.choice, "count", lambda: 7)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "jobs" / "train_ddp.py")])
    here = World("modelarts", "", "node", 0, 1, 0, 7, 0, 7, gpus_promised=8)
    with pytest.raises(SystemExit) as ended:
        group.start_workers(types.SimpleNamespace(world=here, enable_gpu=None, max_restarts=0, join_seconds=1.0))
    warning, workers = capsys.readouterr().out.splitlines()
    assert warning.startswith("warning: node 0: torch sees 7 of the 8 GPUs") and (workers, ended.value.code) == ("workers", 0)
