"""Starts a job without waiting for its imports: as a process of its own, forked from one that has done them.

Most of the seconds of a small run are imports of torch, matplotlib and the like. A test that looks at what a run leaves gets
it from here; where the start itself, a signal or an exit code is the subject, the job is started from nothing.

    python tests/starter.py     reads a JSON object per line, what become() needs of each process; answers with their exit codes
"""

import atexit
import gc
import json
import os
import runpy
import signal
import sys
import threading
import traceback

# What the jobs import of others; nothing of ours, so that every fork reads it anew.
IMPORTS = ["torch._dynamo", "torch.distributed.elastic.multiprocessing", "torch.utils.tensorboard", "matplotlib.figure",
           "matplotlib.backends.backend_agg", "sklearn.metrics", "tqdm", "torchvision"]  # fmt: skip


def become(words, folder, env, seconds, output):
    """Turn this process into the script words[0], as a shell would start it; what it prints is in OUTPUT.1 and OUTPUT.2."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for number, path, how in ((0, os.devnull, os.O_RDONLY), (1, f"{output}.1", os.O_WRONLY), (2, f"{output}.2", os.O_WRONLY)):
        file = os.open(path, how | (os.O_CREAT if number else 0))
        os.dup2(file, number)
        os.close(file)
    signal.alarm(seconds)  # a job that hangs dies of SIGALRM
    sys.argv = words
    sys.path[:1] = [os.path.dirname(words[0]), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    code = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # what an interpreter does at its end, but for taking apart all that it has imported: that takes a second
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1 if code else 0)


def main():
    for name in IMPORTS:
        __import__(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not survive a fork"
    gc.freeze()  # so that no fork looks through all of it
    reader = os.fdopen(os.dup(0), "rb", buffering=0)
    while line := reader.readline():
        children = []
        for wish in json.loads(line):
            children.append(os.fork())
            if children[-1] == 0:
                reader.close()
                become(**wish)
                return
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        os.write(1, f"{json.dumps(codes)}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()
