"""python full_once.py FILE,... JOB OPTIONS: a job for which the disk is full when a FILE is opened for the first time."""

import os
import runpy
import sys

_, full, job, *options = sys.argv
plain, waiting = os.open, set(map(os.path.basename, full.split(",")))


def opened(path, flags, *more, **how):
    if os.path.basename(path) not in waiting:
        return plain(path, flags, *more, **how)
    waiting.remove(os.path.basename(path))
    return plain("/dev/full", os.O_RDWR)


os.open = opened
sys.argv = [job, *options]
runpy.run_path(job, run_name="__main__")
