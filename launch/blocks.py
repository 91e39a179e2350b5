"""The marked blocks that make a feature job out of the base: show them, take them out, put two features together.

    python -m launch blocks list                        every job, its blocks and how many lines they add and replace
    python -m launch blocks show jobs/train_ddp.py      what DDP changes
    python -m launch blocks revert jobs/train_ddp.py    the single-card job that it came from
    python -m launch blocks compose DDP AMP             a job with both features
    python -m launch blocks rebase                      put every job's blocks into a changed jobs/train.py

A block opens with `### TAG: why ###` and closes with `### end TAG ###` at the same indentation. Directly after the opening
line, `# was: <line>` names each line of the base that it replaces; without one it only adds. Blocks do not nest.
"""

import dataclasses
import difflib
import itertools
import re
from pathlib import Path

from common.errors import UserError
from launch.options import exit_code, missing_job, new_parser

JOBS = Path(__file__).resolve().parent.parent / "jobs"
BASE = JOBS / "train.py"

# At one place of the base, blocks follow each other in this order.
ORDER = ["DP", "DDP", "DALI", "DPEX", "AMP"]
EXCLUSIVE = {
    ("DP", "DDP"): "DDP already uses every GPU, one process each",
    ("DALI", "DPEX"): "each brings a loader of its own",
}

OPEN = re.compile(r"( *)### ([A-Z0-9]+): (\S.*) ###")
CLOSE = re.compile(r"( *)### end ([A-Z0-9]+) ###")
WAS = re.compile(r"( *)# was:(?: (.*))?")


class BlockError(UserError):
    """The file, the line and the rule that it breaks."""


@dataclasses.dataclass(frozen=True)
class Block:
    tag: str
    at: int  # index of the base line before which it stands
    was: tuple  # the base lines it replaces
    text: tuple  # all of its lines, markers included

    @property
    def code(self):
        """The lines that run; what a block adds to the job's help is none of them."""
        if self.text[1].startswith("__doc__ = "):
            return []
        return [line for line in self.text[1 + len(self.was) : -1] if line.strip() and not line.lstrip().startswith("#")]


def parse(lines, name):
    """(base lines, blocks) of a job's lines; an error names file, line and rule."""
    base, blocks, opened = [], [], None
    for number, line in enumerate(lines, start=1):

        def wrong(rule, number=number):
            return BlockError(f"{name}:{number}: {rule}")

        opening, closing, was = OPEN.fullmatch(line), CLOSE.fullmatch(line), WAS.fullmatch(line)
        if closing:
            if not opened:
                raise wrong(f"### end {closing[2]} ### closes a block that was never opened")
            indent, tag, first = opened
            if closing[2] != tag:
                raise wrong(f"### end {closing[2]} ### does not match {tag}, opened in line {first}")
            if closing[1] != indent:
                raise wrong(f"### end {tag} ### is indented otherwise than its opening in line {first}")
            text = lines[first - 1 : number]
            replaced = [match for match in map(WAS.fullmatch, itertools.takewhile(WAS.fullmatch, text[1:])) if match]
            originals = tuple(f"{indent}{match[2]}" if match[2] else "" for match in replaced)
            if len(text) == 2 + len(originals):
                raise wrong(f"the {tag} block opened in line {first} has no line of its own")
            blocks.append(Block(tag, len(base), originals, tuple(text)))
            base += originals
            opened = None
        elif opening:
            if opened:
                raise wrong(f"{opening[2]} opens inside the {opened[1]} block of line {opened[2]}: blocks do not nest")
            opened = opening[1], opening[2], number
        elif opened and was:
            before = lines[number - 2]
            if not (OPEN.fullmatch(before) or WAS.fullmatch(before)):
                raise wrong("# was: lines stand directly below the opening line")
            if was[1] != opened[0]:
                raise wrong("# was: is indented otherwise than its block")
        elif was:
            raise wrong("# was: stands outside a block")
        elif line.lstrip().startswith("###"):
            raise wrong("a line that begins with ### has the form `### TAG: why ###` or `### end TAG ###`")
        elif not opened:
            base.append(line)
    if opened:
        raise BlockError(f"{name}:{opened[2]}: the {opened[1]} block is never closed")
    return base, blocks


def read(path):
    """(base lines, blocks) of a job's file."""
    if wrong := missing_job(path):
        raise BlockError(wrong)
    return parse(Path(path).read_text().split("\n"), str(path))


def apply(base, blocks):
    """The base's lines with the blocks in their places."""
    lines, position = [], 0
    for block in sorted(blocks, key=lambda block: (block.at, bool(block.was), ORDER.index(block.tag))):
        lines += base[position : block.at]
        lines += block.text
        position = block.at + len(block.was)
    return lines + base[position:]


def job_of(tag):
    """jobs/train_ddp.py for DDP."""
    path = JOBS / f"train_{tag.lower()}.py"
    if tag not in ORDER or not path.exists():
        known = [name for name in ORDER if (JOBS / f"train_{name.lower()}.py").exists()]
        raise BlockError(f"there is no feature {tag}; there are {', '.join(known)}")
    return path


def compose(tags):
    """The lines of a job with all these features, or a sentence on why they do not go together."""
    for pair, why in EXCLUSIVE.items():
        if set(pair) <= set(tags):
            raise BlockError(f"{pair[0]} and {pair[1]} do not go together: {why}")
    base = BASE.read_text().split("\n")
    chosen, owner = [], {}
    for tag in tags:
        found, blocks = read(job_of(tag))
        if found != base:
            raise BlockError(f"{job_of(tag)}: without its blocks it is not {BASE.name}; run python -m launch blocks rebase")
        for block in blocks:
            for number in range(block.at, block.at + len(block.was)):
                if owner.setdefault(number, tag) != tag:
                    raise BlockError(
                        f"{owner[number]} and {tag} both replace line {number + 1} of {BASE.name}: {base[number].strip()}"
                    )
        chosen += blocks
    return apply(base, chosen)


def feature_jobs():
    """Every job whose file has blocks, the compositions among them."""
    return [path for path in sorted(JOBS.glob("train_*.py")) if read(path)[1]]


def rebase(path, base):
    """The job's lines on a changed base: each block stays beside the line it stood behind, or else before."""
    old, blocks = read(path)
    moved = {}
    for match in difflib.SequenceMatcher(None, old, base, autojunk=False).get_matching_blocks():
        moved.update({match.a + offset: match.b + offset for offset in range(match.size)})
    placed = []
    for block in blocks:
        targets = [moved.get(block.at + offset) for offset in range(len(block.was))]
        if block.was:
            if targets[0] is None or targets != list(range(targets[0], targets[0] + len(targets))):
                raise BlockError(f"{path}: the {block.tag} block `{block.text[0].strip()}` replaces a line that has changed")
            at = targets[0]
        else:
            before, behind = moved.get(block.at - 1), moved.get(block.at)
            anchored = before is not None and (old[block.at - 1].strip() or behind is None)
            at = before + 1 if before is not None and anchored else behind
            if at is None:
                raise BlockError(f"{path}: the lines around the {block.tag} block `{block.text[0].strip()}` have changed")
        placed.append(dataclasses.replace(block, at=at))
    return apply(base, placed)


def _same_base(paths):
    """An edit outside the blocks of one job would be lost: it belongs into the base."""
    first, *others = paths
    lines = read(first)[0]
    for path in others:
        for number, (one, other) in enumerate(itertools.zip_longest(lines, read(path)[0]), 1):
            if one != other:
                raise BlockError(
                    f"{path.name} and {first.name} differ outside their blocks, in line {number} of the base: "
                    f"{(other or '').strip()!r} and {(one or '').strip()!r}; make the change in {BASE.name}"
                )


def table():
    """One line a job, for docs/blocks.md too."""
    rows = ["| job | blocks | lines added | base lines replaced |", "|---|---|---|---|"]
    for path in feature_jobs():
        code = [block for block in read(path)[1] if block.code]
        added, replaced = sum(len(block.code) for block in code), sum(len(block.was) for block in code)
        rows.append(f"| `jobs/{path.name}` | {len(code)} | {added} | {replaced} |")
    return "\n".join(rows)


def show(path):
    """Each block with the line of the base that it stands behind."""
    base, blocks = read(path)
    parts = []
    for block in blocks:
        where = next(
            (f"{number + 1}: {base[number].strip()}" for number in range(block.at - 1, -1, -1) if base[number].strip()),
            "the top",
        )
        parts.append("\n".join([f"# behind line {where}", *block.text]))
    return "\n\n".join(parts)


def main(argv):
    parser = new_parser("blocks", __doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="every job and its blocks")
    for verb, what in (("show", "what the blocks of a job change"), ("revert", "the job without its blocks")):
        verbs.add_parser(verb, help=what).add_argument("job")
    verbs.add_parser("compose", help="a job with several features").add_argument(
        "tags", nargs="+", type=str.upper, metavar="TAG", help=f"of {', '.join(ORDER)}"
    )
    verbs.add_parser("rebase", help="put every job's blocks into a changed base")
    for name in ("revert", "compose"):
        verbs.choices[name].add_argument("-o", "--output", help="a file to write; unset: the terminal")
    options = parser.parse_args(argv)
    return exit_code(lambda: _show_or_write(run(options), getattr(options, "output", None)))


def _show_or_write(text, path):
    if path:
        _write(Path(path), text)
    else:
        print(text, end="" if text.endswith("\n") else "\n")


def _write(path, text):
    """To a new file, or over a job that is the base with blocks: nothing that somebody wrote is lost."""
    if path.exists() and read(path)[0] != BASE.read_text().split("\n"):
        raise BlockError(f"{path} exists and is not {BASE.name} with blocks: give another name, or remove it first")
    path.write_text(text)
    print(f"wrote {path}")


def run(options):
    if options.verb == "list":
        return table()
    if options.verb == "show":
        return show(options.job)
    if options.verb == "revert":
        return "\n".join(read(options.job)[0])
    if options.verb == "compose":
        return "\n".join(compose(options.tags))
    base = BASE.read_text().split("\n")
    _same_base(feature_jobs())
    rebased = {path: rebase(path, base) for path in feature_jobs()}  # all of them, or none is written
    changed = [path for path, lines in rebased.items() if path.read_text() != "\n".join(lines)]
    for path in changed:
        path.write_text("\n".join(rebased[path]))
    return f"{len(rebased)} jobs follow {BASE.name}; changed: {', '.join(path.name for path in changed) or 'none'}"
