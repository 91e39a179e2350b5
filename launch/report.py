"""Make report.html, a page of a run's files: the results, where the time went, the mistakes,
and how to go on.

    python -m launch report output_dir/train  report.html there, also of a run that was killed
    python -m launch report s3://bucket/run   report.html here

A job writes report.html into its output folder every few minutes and at its end. The page is one file that
needs no other.
"""

import argparse
import os
import tempfile
import webbrowser
from pathlib import Path
from typing import Callable

from common import report
from common.address import is_bucket
from common.arguments import boolean
from common.errors import UserError, one_line
from common.files import write_atomically
from common.storage import bucket, download
from launch.options import new_parser, run_for_exit_code


def main(argv: list[str]) -> int:
    parser = new_parser("report", __doc__)
    parser.add_argument("run", metavar="FOLDER_OR_URL", help="the output folder of a job, or its bucket")
    parser.add_argument(
        "--out", help="the file to write; unset: report.html, in that folder, or here where it is a bucket"
    )
    parser.add_argument("--open", type=boolean, default=False, help="true: show it in the browser")
    options = parser.parse_args(argv)
    return run_for_exit_code(lambda: make(options), options.out or "report.html")


def make(options: argparse.Namespace) -> None:
    """Write the page of a run; UserError if it is to be opened and there is no browser."""
    name = os.path.basename(os.path.abspath(options.run.rstrip("/")))
    with tempfile.TemporaryDirectory() as scratch:
        page = report.of_one(report.RunFiles.read(_local(options.run, scratch), name))
    path = options.out or os.path.join("" if is_bucket(options.run) else options.run, "report.html")
    write_atomically(path, page.encode())
    print(f"wrote {one_line(path)}: {len(page.encode()) / 1e6:.1f} MB")
    if options.open and not webbrowser.open(Path(path).absolute().as_uri()):
        raise UserError(f"there is no browser here: open {path} on a machine that has one")


def _local(run: str, scratch: str) -> str:
    """Return the folder `run`; if it is a bucket, fetch the files that the page needs into `scratch` and
    return `scratch`."""
    if not is_bucket(run):
        if not os.path.isdir(run):
            raise UserError(
                f"{one_line(run)} does not exist: give the output folder of a job, or its address in a bucket"
            )
        return run
    fetch_files(run, scratch, lambda name: name in report.FILES or name.startswith("examples/"))
    return scratch


def fetch_files(run: str, folder: str, is_wanted: Callable[[str], bool]) -> None:
    """Fetch into `folder` the files of a run in a bucket whose names `is_wanted` accepts."""
    store = bucket.Bucket(run, print)
    items = {store.relative(item.key): item for item in store.items(store.key_prefix())}
    os.makedirs(folder, exist_ok=True)
    if matches := {name: item for name, item in items.items() if is_wanted(name)}:
        download.fetch_items(store, matches, folder)
