"""Bundle a job for a training console: one file that needs no other, or a folder with the job and exactly what it uses.

    python -m launch bundle jobs/train_ddp.py                          dist/train_ddp.py, for consoles that take a script
    python -m launch bundle jobs/train_ddp.py --folder dist/train_ddp  for consoles that take a folder and a boot file

The one file begins with the job. Every module that the job imports follows unchanged, below a line with its name. The same
sources give the same bytes.
"""

import argparse
import ast
import functools
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Union

from common.arguments import boolean
from common.errors import UserError, one_line
from common.version import VERSION
from launch import engines
from launch.bundle import requirements
from launch.options import exit_code, missing_job, new_parser

ROOT = Path(__file__).resolve().parent.parent.parent
OURS = ("common", "datasets")
LOADER = "launch/bundle/importer.py"

# The line by which a job finds the repository, and what a bundle has in its place.
FINDS_THE_REPOSITORY = re.compile(r"^sys\.path\.insert\(0, .*$", re.MULTILINE)
FINDS_ITSELF = (
    f"BUNDLE = {{}}; exec(open(__file__, encoding='utf-8').read().split('\\n# ==== {LOADER} ')[1].split(\"'''\")[1], BUNDLE); "
    "sys.meta_path.insert(0, BUNDLE['Bundle'](__file__))  # the modules are below"
)

MADE_BY = "Made by python -m launch bundle"  # a file that says so may be replaced
MARKER = ".bundle"  # in a folder that this verb has written

# The most that ModelArts takes as a code folder; it counts files and folders.
MOST_BYTES, MOST_FILES, DEEPEST = 5 << 30, 1000, 32


def modules_of(job: Union[str, Path]) -> list[str]:
    """Return the files of ours that a job needs, sorted, as paths below ROOT."""
    places: set[str] = set()
    left = [Path(job)]
    while left:
        for name in _imports(left.pop()):
            new = _files_of(name) - places
            places |= new
            left += [ROOT / place for place in new]
    return sorted(places)


@functools.lru_cache(maxsize=1)
def option_names(job: Union[str, Path]) -> list[str]:
    """What the job and its modules write as --NAME: its options, found without starting it, and a few words more."""
    found: set[str] = set()
    for path in [Path(job), *(ROOT / place for place in modules_of(job))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(re.findall(r"^--([A-Za-z]\w*)", node.value))
    return sorted(found)


def _imports(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports: each may be a module of ours, or a name in one."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise UserError(
                    f"{one_line(path)}:{node.lineno}: `{ast.unparse(node)}` is a relative import, which does not work in a "
                    "bundle: import it by its full name, such as common.files"
                )
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files_of(name: str) -> set[str]:
    """Return the module of this name and the packages around it: Python imports a package before what is in it."""
    words = name.split(".")
    paths = ["/".join(words[:count]) for count in range(1, len(words) + 1)] if words[0] in OURS else []
    places = [place for path in paths for place in (f"{path}.py", f"{path}/__init__.py")]
    return {place for place in places if (ROOT / place).is_file()}


def _read_job(job: Path) -> str:
    """Read the job's text. A module in its own folder is refused: it is on Python's path here, and is not in a bundle."""
    if wrong := missing_job(job):
        raise UserError(wrong)
    for name in (name.split(".")[0] for name in _imports(job)):
        if (job.parent / f"{name}.py").is_file() or (job.parent / name / "__init__.py").is_file():
            raise UserError(
                f"{one_line(job.name)} imports {name} from its own folder, which a bundle leaves out: "
                "move it to common or datasets, or into the job"
            )
    return job.read_text(encoding="utf-8")


def bundle(job: Union[str, Path]) -> str:
    """Return the text of the one file."""
    job = Path(job)
    text = _read_job(job)
    if len(FINDS_THE_REPOSITORY.findall(text)) != 1:
        raise UserError(f"{one_line(job)} is no job: it lacks the line sys.path.insert(0, ...) that jobs/train.py has")
    places = modules_of(job)
    sources = {place: (ROOT / place).read_text(encoding="utf-8") for place in [*places, LOADER]}
    digest = hashlib.sha256("\0".join([text, *(f"{place}\0{source}" for place, source in sources.items())]).encode())
    parts = [
        FINDS_THE_REPOSITORY.sub(lambda _: FINDS_ITSELF, text),
        f"\n\n# The modules that {job.name} imports, each as it is in its repository. {MADE_BY} of anyrank {VERSION}.\n"
        f"# Digest of the sources: {digest.hexdigest()}\n",
    ]
    for place, source in sources.items():
        if "'''" in source or (source and not source.endswith("\n")):
            raise UserError(f"{place} cannot be bundled: it has three single quotes in a row, or no line end at its end")
        parts.append(f"\n# ==== {place} {'=' * (120 - len(place))}\nr'''\n{source}'''\n")
    return "".join(parts)


def write_folder(job: Union[str, Path], out: Union[str, Path], overwrite: bool = False) -> tuple[int, int]:
    """Write the job, its modules and the files of packages into a folder of their own; (files, bytes)."""
    job, out = Path(job), Path(out)
    _read_job(job)
    ours = (out / MARKER).is_file()
    if out.exists() and any(out.iterdir()) and not (overwrite and ours):
        remedy = ", or --overwrite true" if ours else "; launch bundle replaces only what it has written"
        raise UserError(f"{one_line(out)} is not empty: give another folder{remedy}")
    places = {f"jobs/{job.name}": job, **{place: ROOT / place for place in modules_of(job)}}
    packages = requirements.text(job.resolve())
    size = sum(path.stat().st_size for path in places.values()) + len(requirements.NAMES) * len(packages)
    folders = {str(parent) for place in places for parent in Path(place).parents} - {"."}
    limits = [
        (size, MOST_BYTES, "bytes"),
        (len(places) + len(requirements.NAMES) + len(folders), MOST_FILES, "files and folders"),
        (max(place.count("/") + 1 for place in places), DEEPEST, "levels of folders"),
    ]
    for count, most, what in limits:
        if count > most:
            raise UserError(f"{one_line(job)} with its modules has {count} {what}: a console takes {most} at most")
    if overwrite:
        shutil.rmtree(out, ignore_errors=True)
    for place, path in places.items():
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out / place)
    for name in requirements.NAMES:
        (out / name).write_text(packages)
    (out / MARKER).write_text(f"{MADE_BY} --folder of anyrank {VERSION}\n")
    return len(places) + len(requirements.NAMES), size


def run(options: argparse.Namespace) -> None:
    if options.engine:
        engines.read(options.engine)
    if options.folder:
        count, size = write_folder(options.job, options.folder, options.overwrite)
        print(f"{options.folder}: {count} files, {size:,} bytes; the boot file is jobs/{os.path.basename(options.job)}")
        return
    out = Path(options.output or f"dist/{os.path.basename(options.job)}")
    text = bundle(options.job)
    if out.exists() and MADE_BY not in out.read_text(errors="replace"):
        raise UserError(f"{one_line(out)} exists and is no bundle: give another name with -o")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    packages = requirements.text(Path(options.job).resolve())
    beside = [name for name in requirements.NAMES if _lay(out.parent / name, packages)]
    also = f", or with {' and '.join(beside)} beside it where packages are installed" if beside else ""
    print(f"{out}: {len(text.encode()):,} bytes, {text.count(chr(10) + '# ==== ')} modules; upload it alone{also}")


def _lay(path: Path, text: str) -> bool:
    """Write the file, also in place of another job's; somebody else's stays. Returns whether it has this text."""
    if not path.exists() or requirements.MADE.match(path.read_text(errors="replace")):
        path.write_text(text)
    return path.read_text(errors="replace") == text


def main(argv: list[str]) -> int:
    parser = new_parser("bundle", __doc__)
    parser.add_argument("job", metavar="JOB", help="the job's file, such as jobs/train_ddp.py")
    parser.add_argument("-o", "--output", metavar="FILE", help="where the one file goes (default: dist/ and the job's name)")
    parser.add_argument("--folder", metavar="FOLDER", help="write a folder instead of one file")
    parser.add_argument(
        "--engine", metavar="NAME", help="the platform's engine that will run it: one that is too old is refused"
    )
    about = "true: replace a folder that launch bundle has written (default: false)"
    parser.add_argument("--overwrite", type=boolean, metavar="true|false", default=False, help=about)
    options = parser.parse_args(argv)
    return exit_code(lambda: run(options))
