"""python -m tests.gpu.rehearsal [--only ROW ...] [--keep true]: see costs.py."""

import argparse

from tests.gpu.rehearsal import costs

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--only", nargs="+", choices=list(costs.ROWS), metavar="ROW", help=", ".join(costs.ROWS))
parser.add_argument("--keep", choices=["true", "false"], default="false", help="write costs.json")
args = parser.parse_args()
costs.main(args.only, args.keep == "true")
