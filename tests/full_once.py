"""python full_once.py FILE JOB OPTIONS: a job for which the disk is full when FILE is opened for the first time."""

import os
import runpy
import sys

_, full, job, *options = sys.argv
plain = os.open


def opened(path, flags, *more, **how):
    if os.path.basename(path) != os.path.basename(full):
        return plain(path, flags, *more, **how)
    os.open = plain
    return plain("/dev/full", os.O_RDWR)


os.open = opened
sys.argv = [job, *options]
runpy.run_path(job, run_name="__main__")
