"""Starts a job without waiting for its imports: as a process of its own, forked from one that has done them.

Most of the seconds of a small run are imports of torch, matplotlib and the like. A test that looks at what a run does gets it
from here, and so do the workers that this run starts; where the start itself is the subject, Python starts it from nothing.

    python tests/tools/starter.py     reads a JSON object per line, an order of tests/tools/jobs.py, and answers with another one
"""

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import py_compile
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

# What the jobs import of others; nothing of ours, so that every fork reads it anew.
IMPORTS = ["boto3", "hypothesis", "torch._dynamo", "torch.distributed.elastic.multiprocessing", "torch.utils.tensorboard", "sklearn.metrics", "tqdm",
           "torchvision"]  # fmt: skip


OURS = ("common", "datasets", "launch")
ROOT = Path(__file__).resolve().parents[2]
PATH = list(sys.path)


NEW_NETWORK = 0x40000000  # CLONE_NEWNET
NEW_MOUNTS, FOR_ITSELF, BIND = 0x20000, 0x84000, 0x1000  # CLONE_NEWNS, MS_REC | MS_SLAVE, MS_BIND


def become(words, folder, env, descriptors, seconds=0, host=None):
    """Turn this process into `python WORDS...`, as a shell would start it; `descriptors`: what are its 0, 1 and 2."""
    if host:
        enter(host)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # as another TMPDIR says
    sys.meta_path.insert(0, Without(env.get("WITHOUT", "").split()))
    forget(env.get("ANEW", "").split())
    for number, descriptor in enumerate(descriptors):
        if descriptor != number:
            os.dup2(descriptor, number)
    signal.alarm(seconds)  # a job that hangs dies of SIGALRM
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if rank := env.get("RANK"):
        ctypes.CDLL(None).prctl(15, f"rank {rank}".encode())  # PR_SET_NAME: see ranks.workers_of
    if words[0] == "-u":
        words = words[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
    subprocess.Popen = subprocess_handler.Popen = Worker  # the second is that of torch's launcher
    os.execv = become_instead
    leave(lambda: run(words, env))


def enter(host):
    """As `ip netns exec` does: the network of this host, and its names of others."""
    libc, hosts = ctypes.CDLL(None), f"/etc/netns/{host}/hosts"
    with open(f"/run/netns/{host}") as network:
        assert libc.setns(network.fileno(), NEW_NETWORK) == 0, host
    if os.path.exists(hosts):
        assert libc.unshare(NEW_MOUNTS) == 0
        assert libc.mount(None, b"/", None, FOR_ITSELF, None) == 0
        assert libc.mount(hosts.encode(), b"/etc/hosts", None, BIND, None) == 0


def leave(work):
    """Do the work, then end this process as Python would; returns never."""
    code = 0
    try:
        work()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # what an interpreter does at its end, but for taking apart all that it has imported: that takes a second
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 1 if code else 0)


def run(words, env):
    beside = [os.getcwd()] if words[0] in ("-c", "-m") else [os.path.dirname(words[0])]
    sys.path[:] = [*beside, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *PATH[1:]]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


class Without:
    """Makes it as if these packages were not installed."""

    def __init__(self, packages):
        self._packages = packages
        forget(packages)

    def find_spec(self, name, _path=None, _target=None):
        if name in self._packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def become_instead(_path, words, execute=os.execv):
    """os.execv of a job, which does so with Python only: without another second of imports."""
    if len(os.listdir("/proc/self/task")) > 1:
        execute(sys.executable, words)
    os.closerange(3, 1024)
    forget_ours()
    become(words[1:], os.getcwd(), dict(os.environ), (0, 1, 2))


def forget_ours():
    """What of it is imported, and what it has left to do at its end."""
    forget((*OURS, "anyrank"))  # the second is what pip installs
    atexit._clear()


def forget(packages):
    """They are imported anew, from where they are found then."""
    for name in [name for name in sys.modules if name.split(".")[0] in packages]:
        del sys.modules[name]


class Worker(subprocess.Popen):
    """A process that a job starts with Python: a fork of the job's own, which forgets what of ours it has imported."""

    def _execute_child(self, args, executable, preexec, close_fds, pass_fds, folder, env, *rest):
        words, read, write, errors, own_session = list(args), rest[3], rest[6], rest[8], rest[14]
        a_script = words[0] == sys.executable and (words[1:2] == ["-u"] or words[1].endswith(".py"))
        threads = len(os.listdir("/proc/self/task"))  # no thread would survive a fork, and what it holds stays locked
        if not a_script or threads > 1 or preexec or pass_fds:
            super()._execute_child(args, executable, preexec, close_fds, pass_fds, folder, env, *rest)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            forget_ours()
            if own_session:
                os.setsid()
            for number, own in enumerate((read, write, errors)):
                os.dup2(number if own == -1 else own, number)
            os.closerange(3, 1024)  # what the job has opened
            become(words[1:], folder or os.getcwd(), os.environ.copy() if env is None else env, (0, 1, 2))
        self._child_created = True
        self._close_pipe_fds(*rest[3:9])


def fork(order):
    """The process id of one that becomes what is ordered; `files`: the paths of its descriptors."""
    descriptors = opened(*order.pop("files"))  # before the one who asks closes them
    own_session = order.pop("own_session", False)
    pid = os.fork()
    if not pid:
        if own_session:
            os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, 1024)
        become(**order, descriptors=(0, 1, 2))
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def opened(read, *written):
    """Descriptors of these files, which are made where they are missing."""
    return [os.open(read, os.O_RDONLY), *(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) for path in written)]


def answer(order):
    if "run" in order:  # some at a time, until all have ended
        children = [fork(one) for one in order["run"]]
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if "start" in order:
        return fork(order["start"])
    return os.waitpid(*order["wait"])


def compile_ours():
    """Compile all that every run reads anew. Where Python is told to write no bytecode, each would do it itself: a tenth of a
    second. Each file goes by its content, so that one that was changed is never taken for the one before."""
    for path in (path for folder in OURS for path in (ROOT / folder).rglob("*.py")):
        cached = Path(importlib.util.cache_from_source(str(path)))
        checked = importlib.util.MAGIC_NUMBER + (0b11).to_bytes(4, "little") + importlib.util.source_hash(path.read_bytes())
        if not cached.exists() or cached.read_bytes()[: len(checked)] != checked:
            py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def load():
    compile_ours()
    for name in IMPORTS:
        __import__(name)
    from botocore import session

    loader = session.create_loader(None)  # of 3 MB of JSON, that each new client would read again
    session.create_loader = {None: loader}.get
    for name in ("service-2", "endpoint-rule-set-1"):
        loader.load_service_model("s3", name)
    loader.load_data("endpoints")
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not survive a fork"
    gc.freeze()  # so that no fork looks through all of it


def serve(asked, answers):
    """Until nobody can ask any more; returns never."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever asks ends, too
    reader = os.fdopen(asked, "rb", buffering=0)
    while line := reader.readline():
        os.write(answers, f"{json.dumps(answer(json.loads(line)))}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    load()
    serve(os.dup(0), 1)
