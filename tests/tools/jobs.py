"""Running a job as a user does: a process of its own, started by absolute path from an unrelated folder."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]

PATIENCE = 600  # seconds, for what takes some on an idle machine: only what hangs takes so long on a busy one

# A whole run in a few seconds: 4 steps an epoch on a network of a few thousand parameters.
TINY = ["--custom_data", "true", "--max_samples", "64", "--batch_size", "16", "--width", "2", "--epochs", "2"]

# Of torchvision's networks one that takes a third of the time of resnet18, mostly for its checkpoints.
NETWORK = ["--arch", "shufflenet_v2_x0_5"]


def in_rehearsal(values, which):
    """The parameters of a test, a tuple for several; those for which which() is true belong to make rehearsal."""
    import pytest  # here, because tests.gpu runs where there is none

    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=[pytest.mark.rehearsal] if which(value) else []) for row, value in zip(rows, values)]


def slow_ones_marked(jobs):
    """Names of jobs as the parameters of a test: one that starts a Ray cluster takes long."""
    return in_rehearsal(jobs, lambda job: "dpex" in job)


# In the environment of a run that makes its figures and its page. Others do without, as these take as long as a small run itself.
FIGURES = {"WITHOUT": ""}


def environment(**extra):
    """The parent's environment without what a platform would have set; one thread, so that bits and times do not depend on the load."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH")}
    own = {"RAY_ADDRESS": "local", "CUDA_VISIBLE_DEVICES": ""}  # no cluster and no GPU that this machine happens to have
    return {**kept, **own, "OMP_NUM_THREADS": "1", "WITHOUT": "matplotlib jinja2", **extra}


def module_of(job):
    """jobs/JOB.py, imported and not run."""
    spec = importlib.util.spec_from_file_location(job, ROOT / "jobs" / f"{job}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(job, *options):
    return [sys.executable, str(ROOT / "jobs" / f"{job}.py"), *map(str, options)]


def after(prelude, words):
    """`python SCRIPT ...`, with these lines of Python before it in the same process."""
    run = f"{prelude}\nimport runpy, sys\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    return [sys.executable, "-c", run, *map(str, words[1:])]


def run_job(job, folder, *options, env=None, check=0, timeout=PATIENCE, launcher=()):
    """Run jobs/JOB.py in `folder` with the output in folder/out; returns the finished process, its exit code asserted.

    It is forked from a process that has done the imports; with a launcher, which may be Python alone, it is started from nothing.
    """
    script = command(job, *options, "--output_dir", folder / "out")
    if not launcher:
        return run_forked(script[1:], folder, env, check, timeout)
    done = subprocess.run(
        [*launcher, *script[1:]],
        cwd=folder,
        env=environment(**(env or {})),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == check, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


PIPES = os.environ.pop("STARTER", "")  # to the one that python -m tests has forked for this process


@functools.cache
def starter():
    """It ends with this process, which holds the other end of its stdin."""
    if PIPES:
        asked, answers = map(int, PIPES.split())
        return types.SimpleNamespace(stdin=open(asked, "w"), stdout=open(answers), kill=lambda: None)
    words = [sys.executable, str(ROOT / "tests" / "tools" / "starter.py")]
    return subprocess.Popen(words, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(**order):
    try:
        print(json.dumps(order), file=starter().stdin, flush=True)
        return json.loads(starter().stdout.readline())
    except BaseException:  # the time of a test is over: the answer to its question is not for the next one
        global PIPES
        starter().kill()
        PIPES = ""
        starter.cache_clear()
        raise


def forked(words, folder, *environments, timeout=PATIENCE):
    """Run the script words[0] in `folder` once per environment, all at a time; returns the finished processes."""
    with tempfile.TemporaryDirectory() as temporary:
        printed = [[Path(temporary) / f"{number}.{which}" for which in ("out", "err")] for number in range(len(environments))]
        wishes = [
            {"words": list(map(str, words)), "folder": str(folder), "env": environment(**env), "seconds": timeout,
             "files": [os.devnull, *map(str, both)]}
            for env, both in zip(environments, printed)
        ]  # fmt: skip
        codes = ask(run=wishes)
        texts = [[path.read_text() for path in both] for both in printed]
    return [subprocess.CompletedProcess(words, code, *text) for code, text in zip(codes, texts)]


def run_forked(words, folder, env=None, check=0, timeout=PATIENCE):
    """The same once, its exit code asserted."""
    (done,) = forked(words, folder, env or {}, timeout=timeout)
    assert done.returncode == check, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


class Popen(subprocess.Popen):
    """As subprocess.Popen, for `python SCRIPT ...`, `python -m MODULE ...`, `python -c CODE ...`: forked from a process that has done the imports.

    `host`: the name of a network namespace that it runs in (tests/tools/hosts.py).
    """

    def __init__(self, words, host=None, **how):
        self._host = host
        super().__init__(words, **how)

    def _execute_child(self, args, _executable, preexec, _close_fds, _pass_fds, folder, env, *rest):
        words = list(map(str, args))
        assert words[0] == sys.executable and not preexec, words
        own = [f"/proc/{os.getpid()}/fd/{number}" for number in range(3)]
        given = [place if fd == -1 else f"/proc/{os.getpid()}/fd/{fd}" for place, fd in zip(own, (rest[3], rest[6], rest[8]))]
        order = {"words": words[1:], "folder": str(folder or os.getcwd()), "env": dict(os.environ if env is None else env)}
        order["host"] = self._host
        self.pid = ask(start={**order, "files": given, "own_session": rest[14]})
        self._child_created = True
        self._close_pipe_fds(*rest[3:9])

    def _try_wait(self, flags):
        return tuple(ask(wait=[self.pid, flags]))

    def _internal_poll(self, *_how, **_more):
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid == self.pid:
                self._handle_exitstatus(status)
        return self.returncode


def run(words, timeout=PATIENCE, **how):
    """As subprocess.run with capture_output and text, through that."""
    with Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how) as process:
        printed = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(words, process.returncode, *printed)


def start(folder, *options, job="train"):
    """Start jobs/JOB.py with the output in folder/out and what it prints in folder/log; returns the process."""
    with open(folder / "log", "a") as log:
        return Popen(
            command(job, *options, "--output_dir", folder / "out"), cwd=folder, env=environment(), stdout=log, stderr=log
        )


def wait_for(condition, process, what):
    """`process` may be None, where none has to run on meanwhile."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None, f"the job ended before {what}"
        assert time.monotonic() < deadline, f"no {what} in time"
        time.sleep(0.002)


def saved(folder, number):
    return lambda: (folder / "out" / "checkpoints" / f"{number:012d}.json").exists()


def lock_holders(path):
    """The processes that hold a lock on this file, as the kernel says it."""
    inode = os.stat(path).st_ino
    with open("/proc/locks") as file:
        return [int(line.split()[4]) for line in file if f":{inode} " in line and "->" not in line]


def final_state(folder, output="out"):
    """Everything that must be bit-identical between two runs: weights, optimizer, position and metrics of the newest checkpoint."""
    manifests = sorted((folder / output / "checkpoints").glob("*.json"))
    state = torch.load(manifests[-1].with_suffix(".pt"), weights_only=True)
    about = json.loads(manifests[-1].read_text())
    metrics = folder / output / "metrics.jsonl"
    position = {name: about[name] for name in ("samples_seen", "total_steps", "epoch", "consumed", "best", "global_batch")}
    return {
        "model": state["model"],
        "optimizer": state["optimizer"],
        "run": state["run"],
        "position": position,
        "metrics": metrics.read_text() if metrics.exists() else "",
    }


def assert_same_bits(one, other, path=""):
    """Equality of two nests of dicts, lists, tensors and plain values, naming the first place where they differ."""
    assert type(one) is type(other), f"{path}: {type(one)} and {type(other)}"
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same_bits(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for index, pair in enumerate(zip(one, other)):
            assert_same_bits(*pair, f"{path}/{index}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other), f"{path}: the tensors differ"
    else:
        assert one == other, f"{path}: {one!r} and {other!r}"
