"""Bundle a job for a training console: one file that needs no other,
or a folder with the job and exactly what it uses.

    python -m launch bundle jobs/train_ddp.py                    dist/train_ddp.py, where a script is uploaded
    python -m launch bundle jobs/train_ddp.py --folder dist/ddp  where a folder with a boot file is uploaded
    python -m launch bundle jobs/train_ddp.py -- --doctor true   with what this option needs; or --with doctor

The one file begins with the job. Every module that the job imports follows unchanged, below a line with its
name, but for those that are for one option alone: with such an option, the job ends before its first step
with a line that says how to bundle it. The same sources give the same bytes.
"""

import argparse
import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Union

from common import VERSION
from common.arguments import boolean
from common.errors import UserError, one_line
from launch import engines
from launch.bundle import features, imports, requirements
from launch.bundle.imports import modules_of
from launch.options import missing_job, new_parser, run_for_exit_code, split_words

LOADER = "launch/bundle/importer.py"

# The line by which a job finds the repository, and what a bundle of one file has in its place. A script that
# pip's anyrank finds its modules for has no such line; a bundle has one above the first import of ours.
FINDS_THE_REPOSITORY = re.compile(r"^sys\.path\.insert\(0, .*$", re.MULTILINE)
FINDS_ITS_FOLDER = "sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))"
FINDS_ITSELF = (
    f"BUNDLE = {{}}; exec(open(__file__, encoding='utf-8').read().split('\\n# ==== {LOADER} "
    "')[1].split(\"'''\")[1], BUNDLE); sys.meta_path.insert(0, BUNDLE['Bundle'](__file__))  # the modules "
    "are below"
)

MADE_BY = "Made by python -m launch bundle"  # a file that has these words may be replaced
MARKER = ".bundle"  # a file in every folder that this verb has written

# The most that ModelArts takes as a code folder; it counts files and folders.
MOST_BYTES = 5 << 30
MOST_FILES = 1000
DEEPEST = 32


def _read_and_check_job(job: Path) -> str:
    if message := missing_job(job):
        raise UserError(message)
    try:
        imports.require_bundled_imports(job)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{one_line(job)} is no Python: {one_line(error)}") from None
    return job.read_text(encoding="utf-8")


def bundle(job: Union[str, Path], included: Collection[str] = features.FEATURES) -> str:
    """Return a job and its modules as the text of one Python file; UserError if they do not fit into one.

    `included`: the names of features to put in, also if the job works without them (features.py).
    """
    job = Path(job)
    text = _read_and_check_job(job)
    stubs = features.stubs(job, included)
    module_paths = modules_of(job, without=stubs)
    if not module_paths and "torch" in imports.packages_in(job):
        return f"{text}\n\n# {MADE_BY} of anyrank {VERSION}: {job.name} needs no other file.\n"
    if not module_paths or len(FINDS_THE_REPOSITORY.findall(text)) > 1:
        raise UserError(
            f"{one_line(job)} is no job: it imports nothing of anyrank, or changes sys.path more than once"
        )
    files = [*sorted([*module_paths, *stubs]), LOADER]
    sources = {file: stubs.get(file) or imports.path_of(file).read_text(encoding="utf-8") for file in files}
    digest = hashlib.sha256(
        "\0".join([text, *(f"{module_path}\0{source}" for module_path, source in sources.items())]).encode()
    )
    parts = [
        FINDS_THE_REPOSITORY.sub(lambda _: FINDS_ITSELF, _with_path_line(text)),
        f"\n\n# The modules that {job.name} imports, unchanged or left out. {MADE_BY} of anyrank {VERSION}.\n"
        f"# Digest of the sources: {digest.hexdigest()}\n",
    ]
    data_files = [
        file for path in [*map(imports.path_of, module_paths), job] for file in imports.files_beside(path)
    ]
    if data_files:
        raise UserError(
            f"{one_line(data_files[0])} is read by a module in its folder, and one file cannot hold "
            "both: give --folder FOLDER"
        )
    for module_path, source in sources.items():
        if "'''" in source or (source and not source.endswith("\n")):
            raise UserError(
                f"{module_path} cannot be bundled: it has three single quotes in a row, or no line end "
                "at its end"
            )
        parts.append(f"\n# ==== {module_path} {'=' * (120 - len(module_path))}\nr'''\n{source}'''\n")
    return "".join(parts)


def _with_path_line(text: str) -> str:
    """Return the text of a job with a line by which it finds our modules, if it imports some and has none."""
    statement = next((node for node in ast.parse(text).body if imports.has_our_import(node)), None)
    if statement is None or FINDS_THE_REPOSITORY.search(text):
        return text
    index = min([statement.lineno, *(node.lineno for node in getattr(statement, "decorator_list", []))]) - 1
    lines = text.split("\n")
    return "\n".join([*lines[:index], "import os", "import sys", "", FINDS_ITS_FOLDER, *lines[index:]])


def write_folder(
    job: Union[str, Path],
    out: Union[str, Path],
    overwrite: bool = False,
    included: Collection[str] = features.FEATURES,
    extra_packages: Collection[str] = (),
    weights: str = "",
) -> tuple[int, int]:
    """Write the job and what it uses to `out`: new, empty or, with `overwrite`, a bundle.

    Return (files, bytes).

    `included`: as in bundle(). `extra_packages`: for requirements.txt, besides those that the job imports.
    `weights`: the name of weights to put in.
    """
    job = Path(job)
    out = Path(out)
    text = _with_path_line(_read_and_check_job(job))
    is_bundle = (out / MARKER).is_file()
    if out.exists() and any(out.iterdir()) and not (overwrite and is_bundle):
        remedy = ", or --overwrite true" if is_bundle else "; launch bundle replaces only what it has written"
        raise UserError(f"{one_line(out)} is not empty: give another folder{remedy}")
    if out.resolve() in job.resolve().parents:
        raise UserError(
            f"{one_line(job)} is in {one_line(out)}, which the bundle replaces: give another folder"
        )
    stubs = features.stubs(job, included)
    sources = {
        f"jobs/{job.name}": job,
        **{target: imports.path_of(target) for target in modules_of(job, without=stubs)},
    }
    for target, path in list(sources.items()):
        data_files = imports.files_beside(path)
        sources.update(
            {str(Path(target).parent / file.relative_to(path.parent)): file for file in data_files}
        )
    del sources[f"jobs/{job.name}"]
    if weights:
        target, path = _fetch_weights(weights)
        sources[target] = path
    packages = requirements.text(job.resolve(), extra_packages)
    texts = {**stubs, f"jobs/{job.name}": text, **dict.fromkeys(requirements.NAMES, packages)}
    size = sum(path.stat().st_size for path in sources.values()) + sum(len(text) for text in texts.values())
    folders = {str(parent) for target in (*sources, *texts) for parent in Path(target).parents} - {"."}
    limits = [
        (size, MOST_BYTES, "bytes"),
        (len(sources) + len(texts) + len(folders), MOST_FILES, "files and folders"),
        (max(target.count("/") + 1 for target in [*sources, *texts]), DEEPEST, "levels of folders"),
    ]
    for count, limit, unit in limits:
        if count > limit:
            raise UserError(
                f"{one_line(job)} with its modules has {count} {unit}: a console takes {limit} at most"
            )
    out = out.resolve()  # a link stays one
    if is_bundle:
        _clear(out)
    out.mkdir(parents=True, exist_ok=True)
    # first, so that half a bundle can be replaced
    (out / MARKER).write_text(f"{MADE_BY} --folder of anyrank {VERSION}\n")
    for target, path in sources.items():
        (out / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out / target)
    for target, text in texts.items():
        (out / target).parent.mkdir(parents=True, exist_ok=True)
        (out / target).write_text(text)
    return len(sources) + len(texts), size


def _clear(folder: Path) -> None:
    """Delete what an earlier bundle has in the folder; the folder stays,
    as it may be a mount or the current one."""
    for entry in folder.iterdir():
        if entry.name == MARKER:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            os.unlink(entry)


def _fetch_weights(name: str) -> tuple[str, Path]:
    """Fetch named weights to input_dir if this machine has none;
    return (their path in the bundle, their file)."""
    from common.address import INPUT_DIR
    from common.weights import by_name

    weights = by_name.find_by_full_name(name)
    return f"{by_name.BUNDLED.name}/{weights.file}", Path(by_name.fetch(weights, INPUT_DIR))


def run(options: argparse.Namespace, job_options: Sequence[str]) -> None:
    """Write the bundle as one file or as a folder, try it out, and print what it has and what it lacks."""
    if options.engine:
        engines.parse(options.engine)
    job = Path(options.job).absolute()
    names = [name for text in options.features for name in text.split(",")]
    option_features = features.of_options([*job_options, options.weights])
    included = features.named(names) | option_features
    packages = features.packages({*names, *option_features})
    if options.weights and not options.folder:
        raise UserError(
            "--weights go along in a folder, as one file cannot hold them: give --folder FOLDER, too"
        )
    if options.weights and "weights" not in imports.option_names(job):
        raise UserError(
            f"{one_line(job.name)} has no option --weights: give jobs/train_imagenet.py, or leave "
            "--weights out"
        )
    if options.folder:
        count, size = write_folder(
            options.job, options.folder, options.overwrite, included, packages, options.weights
        )
        note = try_out(Path(options.folder, "jobs", job.name), requirements.needed(job))
        print(f"{options.folder}: {count} files, {size:,} bytes; the boot file is jobs/{job.name}{note}")
        if options.weights:
            print(f"with the weights of {options.weights}, which the job finds by this name")
        _print_left_out(job, included)
        return
    out = Path(options.output or f"dist/{job.name}")
    text = bundle(options.job, included)
    if out.exists() and MADE_BY not in out.read_text(errors="replace"):
        raise UserError(f"{one_line(out)} exists and is no bundle: give another name with -o")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    requirements_text = requirements.text(job, packages)
    written_names = [
        name for name in requirements.NAMES if _write_unless_foreign(out.parent / name, requirements_text)
    ]
    note = try_out(out, requirements.needed(job))
    hint = (
        f", or with {' and '.join(written_names)} beside it where packages are installed"
        if written_names
        else ""
    )
    print(
        f"{out}: {len(text.encode()):,} bytes, {text.count(chr(10) + '# ==== ')} modules; upload it "
        f"alone{hint}{note}"
    )
    print(
        f"on ModelArts: Code Directory, the folder of the uploaded file; Boot File, {out.name}; Input "
        "data_url;"
    )
    print("    Output train_url with Predownload: Yes. Every field: docs/modelarts.md")
    _print_left_out(job, included)


def _print_left_out(job: Path, included: Collection[str]) -> None:
    if names := sorted(set(features.left_out(job, included).values())):
        print(
            f"without {', '.join(names)}: --with NAME, or the job's options after --, put in what they need"
        )


def try_out(boot: Path, needed: set[str]) -> str:
    """Run the bundle's --help; UserError if it fails.

    Return a note if torch or a package of `needed` is missing.
    """
    lacking = sorted(requirements.OF_OURS - needed)
    program = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({lacking})); sys.argv = "
        f"[{str(boot.resolve())!r}, '--help']; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    with tempfile.TemporaryDirectory() as empty:
        result = subprocess.run(
            [sys.executable, "-EBc", program], cwd=empty, stdin=subprocess.DEVNULL, capture_output=True
        )
    if not result.returncode:
        return ""
    error_line = (
        result.stderr.decode(errors="replace").strip().splitlines() or [f"it ended with {result.returncode}"]
    )[-1]
    missing = re.match(r"ModuleNotFoundError: No module named '(\w+)", error_line)
    if missing and missing[1] in requirements.OF_AN_ENGINE | needed:
        return f"; not tried, because {missing[1]} is not installed here"
    if refused := re.search(r"import of (\w+) halted", error_line):
        error_line = (
            f"a module imports {refused[1]}, which the platform may lack: import it in the job, so that it "
            "is asked for"
        )
    raise UserError(
        f"{one_line(boot)} is written, but does not show its --help in an empty folder: "
        f"{one_line(error_line)}"
    )


def _write_unless_foreign(path: Path, text: str) -> bool:
    """Write the file, unless there is one that launch bundle has not made.

    Return whether it now has this text.
    """
    if not path.exists() or requirements.GENERATED.match(path.read_text(errors="replace")):
        path.write_text(text)
    return path.read_text(errors="replace") == text


def main(argv: list[str]) -> int:
    verb_words, job_options = split_words(argv)
    parser = new_parser("bundle", __doc__)
    parser.add_argument("job", metavar="JOB", help="the job's file, such as jobs/train_ddp.py")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where the one file goes (default: dist/ and the job's name)"
    )
    parser.add_argument("--folder", metavar="FOLDER", help="write a folder instead of one file")
    parser.add_argument(
        "--engine",
        metavar="NAME",
        help="the platform's engine that will run it: one that is too old is refused",
    )
    help_text = f"also what is for one option alone: all, or some of {', '.join(features.FEATURES)}"
    parser.add_argument(
        "--with", dest="features", metavar="NAME[,NAME...]", action="append", default=[], help=help_text
    )
    help_text = (
        "with --folder: weights that go along, by a name as of launch weights, for a platform without "
        "Internet"
    )
    parser.add_argument("--weights", metavar="NAME", default="", help=help_text)
    help_text = "true: replace a folder that launch bundle has written (default: false)"
    parser.add_argument("--overwrite", type=boolean, metavar="true|false", default=False, help=help_text)
    options = parser.parse_args(verb_words)
    return run_for_exit_code(lambda: run(options, job_options))
