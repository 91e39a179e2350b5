"""The command-line options of a job: which there are (options.py), and how they may be typed (typed.py).

    parser = arguments.general_parser(__doc__, ...)
    parser.add_argument(...)                         # options of the job's own
    args = arguments.parse(parser)

args.world: node and rank of this process; args.input: its data; args.given: {option: value} as on the command
line.
"""

from common.arguments import declared
from common.arguments.options import (
    COUNT,
    POSITIVE,
    WORKERS,
    Arguments,
    Input,
    Parser,
    add_aliases,
    add_compile,
    add_label_smoothing,
    bare_parser,
    explain,
    general_parser,
    group,
    growth,
    number,
    parse,
    plain_values,
    replaced,
)
from common.arguments.typed import YES_OR_NO, boolean

__all__ = [
    "COUNT",
    "POSITIVE",
    "WORKERS",
    "YES_OR_NO",
    "Arguments",
    "Input",
    "Parser",
    "add_aliases",
    "add_compile",
    "add_label_smoothing",
    "bare_parser",
    "boolean",
    "declared",
    "explain",
    "general_parser",
    "group",
    "growth",
    "number",
    "parse",
    "plain_values",
    "replaced",
    "typed",
]
