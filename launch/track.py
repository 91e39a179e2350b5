"""Send the curves of a run to MLflow, W&B or SwanLab: once, or while the run goes on.

    python -m launch track output_dir/train  to MLflow, at MLFLOW_TRACKING_URI
    python -m launch track obs://bucket/run --to swanlab --follow true  a job without Internet, by its bucket

A job does the same with --track. What the tracker has already is not sent again.
"""

import os
import tempfile
import time

from common import storage
from common.address import is_bucket
from common.arguments import boolean
from common.errors import TrainingFailed, UserError, one_line
from common.track import senders
from common.track.follow import PICTURES, Follower, has_ended, rows
from launch.options import new_parser, run_for_exit_code
from launch.report import fetch_files

FILES = ("journal.jsonl", "speed.jsonl", "metrics.jsonl", *PICTURES)
PAUSE = 30  # seconds between two looks; a job publishes as often


def main(argv: list[str]) -> int:
    parser = new_parser("track", __doc__)
    parser.add_argument("run", metavar="FOLDER_OR_URL", help="the output folder of a job, or its bucket")
    parser.add_argument(
        "--to", choices=list(senders.TOOLS), default="mlflow", help="the tracker; unset: mlflow"
    )
    parser.add_argument("--follow", type=boolean, default=False, help="true: go on until the run has ended")
    options = parser.parse_args(argv)
    return run_for_exit_code(lambda: track(options.run.rstrip("/"), options.to, options.follow))


def track(run: str, tool: str, follow: bool) -> None:
    """Send the rows of a run to a tracker, once or until the run has ended."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = os.path.join(scratch, os.path.basename(run)) if is_bucket(run) else run
        if is_bucket(run):  # what wandb and swanlab write themselves stays
            os.environ.setdefault("WANDB_DIR", os.getcwd())
            os.environ.setdefault("SWANLAB_LOG_DIR", os.path.join(os.getcwd(), "swanlog"))
        follower = Follower(folder, tool, lambda text: print(text.replace(folder, run)))
        is_last = not follow
        while not _send(run, folder, follower, is_last):
            is_last = has_ended(folder)  # and looks again: the other files may be older than the journal
            time.sleep(PAUSE)
    print(f"{tool} has all rows: {follower.num_sent} were sent now")


def _send(run: str, folder: str, follower: Follower, is_last: bool) -> bool:
    """Send what is new in the run and return `is_last`;
    TrainingFailed if rows are missing at the last time."""
    if is_bucket(run):
        names = {*FILES, follower.record}
        fetch_files(run, folder, lambda name: name in names)
    if not os.path.exists(os.path.join(folder, FILES[0])):
        raise UserError(
            f"{one_line(run)} holds no run: give the output folder of a job, or its address in a bucket"
        )
    if is_last and not any(row.get("event") == "start" for row in rows(folder, FILES[0])):
        raise UserError(
            f"{one_line(run)} holds a run that has not begun: there is no start in its {FILES[0]}"
        )
    sent = follower.send(is_last)
    if is_bucket(run) and os.path.exists(record := os.path.join(folder, follower.record)):
        storage.publish(record, f"{run}/{follower.record}")
    if is_last and not sent:
        raise TrainingFailed(f"{follower.tool} has not taken all rows")
    return is_last
