"""Look for problems before a job starts: on every node, in seconds, in one table, the worst first.

    python -m launch doctor jobs/train_ddp.py -- --data_url /data/cifar10 --output_dir /runs/7

The job's own options come after --. On several nodes, start this program on each, like the job itself. Node 0
waits for the others for --doctor_seconds, an option of the job, and prints the table for all. The job ends
before its first step, and nothing of a run is written. The exit code is 0 when nothing is bad, else 1.

If a console takes only a job, --doctor true among the job's options does the same.
"""

import os
import sys
from typing import NoReturn

from launch.options import missing_job, new_parser, split_words


def main(argv: list[str]) -> NoReturn:
    parser = new_parser("doctor", __doc__)
    parser.add_argument(
        "job", help="the job's file, such as jobs/train_ddp.py; its own options come after --"
    )
    verb_words, job_arguments = split_words(argv)
    job = parser.parse_args(verb_words).job
    if message := missing_job(job):
        parser.error(message)
    os.execv(sys.executable, [sys.executable, os.path.abspath(job), *job_arguments, "--doctor", "true"])
