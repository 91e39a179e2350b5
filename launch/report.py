"""A page of what a run has left: what came out, where the time went, what it got wrong, how to go on.

    python -m launch report output_dir/train                        report.html there, also of a run that was killed
    python -m launch report s3://bucket/run                         report.html here
    python -m launch report output_dir/one output_dir/other         both side by side, compared with the first: report.html here

A job writes report.html into its output folder every few minutes and at its end. The page is one file that needs no other.
"""

import argparse
import os
import tempfile
import webbrowser
from pathlib import Path

from common import report
from common.errors import UserError, one_line
from common.files import write_atomically
from common.storage import bucket, download
from common.typed import boolean
from launch.options import exit_code, new_parser


def main(argv: list[str]) -> int:
    parser = new_parser("report", __doc__)
    parser.add_argument("runs", nargs="+", metavar="FOLDER_OR_URL", help="the output folder of a job, or its bucket")
    where = "the file to write; unset: report.html, in the folder if it is a single one, else here"
    parser.add_argument("--out", help=where)
    parser.add_argument("--open", type=boolean, default=False, help="true: show it in the browser")
    options = parser.parse_args(argv)
    return exit_code(lambda: make(options), options.out or "report.html")


def make(options: argparse.Namespace) -> None:
    names = _names(options.runs)
    with tempfile.TemporaryDirectory() as scratch:
        folders = [_local(run, os.path.join(scratch, str(number))) for number, run in enumerate(options.runs)]
        runs = [report.Left.read(folder, name) for folder, name in zip(folders, names)]
        page = report.of_one(runs[0]) if len(runs) == 1 else report.side_by_side(runs)
    alone = len(runs) == 1 and not bucket.is_address(options.runs[0])
    path = options.out or os.path.join(options.runs[0] if alone else "", "report.html")
    write_atomically(path, page.encode())
    print(f"wrote {one_line(path)}: {len(page.encode()) / 1e6:.1f} MB")
    if options.open and not webbrowser.open(Path(path).absolute().as_uri()):
        raise UserError(f"there is no browser here: open {path} on a machine that has one")


def _names(runs: list[str]) -> list[str]:
    """The last part of each, or all of it where two have the same."""
    short = [os.path.basename(os.path.abspath(run.rstrip("/"))) for run in runs]
    return [name if short.count(name) == 1 else run for name, run in zip(short, runs)]


def _local(run: str, scratch: str) -> str:
    """The folder itself; of a bucket, what the page needs."""
    if not bucket.is_address(run):
        if not os.path.isdir(run):
            raise UserError(f"{one_line(run)} does not exist: give the output folder of a job, or its address in a bucket")
        return run
    place = bucket.Bucket(run, print)
    items = {place.relative(item.key): item for item in place.items(place.below())}
    wanted = {name: item for name, item in items.items() if name in report.FILES or name.startswith("examples/")}
    os.makedirs(scratch, exist_ok=True)
    if wanted:
        download.fetch_items(place, wanted, scratch)
    return scratch
