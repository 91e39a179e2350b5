"""Find what a job imports without starting it: our modules, which a bundle contains, and packages,
which it asks for."""

import ast
import functools
import itertools
import re
import sys
import sysconfig
from collections.abc import Collection, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Union

from common.errors import UserError, one_line

ROOT = Path(__file__).resolve().parent.parent.parent
OURS = ("common", "datasets", "anyrank")
ANYRANK = "anyrank/__init__.py"  # where Python looks for what pip makes of launch/installed
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
READS_BESIDE = re.compile(r"\b(__file__|pkgutil|importlib\.resources|from importlib import resources)\b")


def path_of(bundle_path: str) -> Path:
    """Return the file of the repository that has this path in a bundle."""
    return ROOT / ("launch/installed/__init__.py" if bundle_path == ANYRANK else bundle_path)


def modules_of(job: Union[str, Path], without: Collection[str] = ()) -> list[str]:
    """Return the files of all our modules that a job imports, also indirectly, as sorted paths below ROOT.

    Neither the files in `without` are among them, nor what those alone import.
    """
    module_paths: set[str] = set()
    looked_up: set[str] = set()
    remaining = [Path(job)]
    while remaining:
        new_names = set(names_in(remaining.pop())) - looked_up
        looked_up |= new_names
        for name in new_names:
            imported = itertools.takewhile(lambda file: file not in without, files_of(name))
            new = set(imported) - module_paths
            module_paths |= new
            remaining += [path_of(module_path) for module_path in new]
    return sorted(module_paths)


@functools.lru_cache(maxsize=1)
def option_names(job: Union[str, Path]) -> list[str]:
    """Return each NAME for which the job or its modules have a string --NAME: the job's options,
    and a few other words."""
    paths = [Path(job), *(path_of(module_path) for module_path in modules_of(job))]
    return sorted(
        {name for path in paths for text in _texts_in(path) for name in re.findall(r"^--([A-Za-z]\w*)", text)}
    )


def _nodes(path: Path) -> list[ast.AST]:
    return _parse(path.read_text(encoding="utf-8"), str(path))


@functools.lru_cache(maxsize=500)
def _parse(source: str, name: str) -> list[ast.AST]:
    kinds = (ast.Import, ast.ImportFrom, ast.Constant, ast.If, *FUNCTIONS)
    return [node for node in ast.walk(ast.parse(source, name)) if isinstance(node, kinds)]


def _texts_in(path: Path) -> list[str]:
    return [
        node.value for node in _nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def names_in(path: Path, at_once: bool = False) -> Sequence[str]:
    """Return the dotted names that a file imports, each a module or a name in one;
    UserError for a relative import.

    `at_once`: only those that are imported with the file itself, and not when one of its functions is called,
    or for types.
    """
    return _names_in(path.read_text(encoding="utf-8"), str(path), at_once)


@functools.lru_cache(maxsize=1000)
def _names_in(source: str, path: str, at_once: bool) -> Sequence[str]:
    nodes = _parse(source, path)
    skipped = {inner for node in nodes if at_once and _is_skipped_at_import(node) for inner in ast.walk(node)}
    names = []
    for node in nodes:
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise UserError(
                    f"{one_line(path)}:{node.lineno}: `{ast.unparse(node)}` is a relative import, which does "
                    "not work in a bundle: import it by its full name, such as common.files"
                )
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def has_our_import(statement: ast.stmt) -> bool:
    """Whether a module of ours is imported in this statement."""
    inner = [node for node in ast.walk(statement) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [
        node.module if isinstance(node, ast.ImportFrom) else alias.name
        for node in inner
        for alias in node.names
    ]
    return any(str(name).split(".")[0] in OURS for name in names)


def _is_skipped_at_import(node: ast.AST) -> bool:
    """Return whether Python skips the body of this node when it imports the file: a function,
    or imports for types."""
    is_for_types = isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"
    return is_for_types or isinstance(node, FUNCTIONS)


def files_of(name: str) -> list[str]:
    """Return our files that Python runs to import `name`, in order: its packages and the module."""
    parts = name.split(".")
    if parts[0] not in OURS:
        return []
    paths = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    candidates = [candidate for path in paths for candidate in (f"{path}.py", f"{path}/__init__.py")]
    return [candidate for candidate in candidates if path_of(candidate).is_file()]


def require_bundled_imports(job: Path) -> None:
    """Raise UserError for imports that a bundle would lack: from the job's folder,
    or from ROOT beside common and datasets."""
    looked_up: set[str] = set()
    for path in (job, *(path_of(module_path) for module_path in modules_of(job))):
        new_names = {name.split(".")[0] for name in names_in(path)} - looked_up
        looked_up |= new_names
        for name in sorted(new_names):
            for folder in {job.parent.resolve(), ROOT}:
                # Beside a script there may be a clone of anyrank.
                is_ours = name == "anyrank" or (folder == ROOT and name in OURS)
                if not is_ours and ((folder / f"{name}.py").is_file() or any((folder / name).glob("*.py"))):
                    location = "its own folder" if folder == path.parent.resolve() else one_line(folder)
                    raise UserError(
                        f"{one_line(path.name)} imports {name} from {location}, which a bundle leaves out: "
                        "move it to common or datasets, or into the job"
                    )


def packages_in(path: Path) -> set[str]:
    """Return the top-level names that a file imports and that are neither ours nor of Python itself."""
    names = {name.split(".")[0] for name in names_in(path)}
    return {name for name in names - {*OURS, *sys.builtin_module_names} if not _is_in_stdlib(name)}


def _is_in_stdlib(name: str) -> bool:
    spec = PathFinder.find_spec(name)
    origin = Path(spec.origin) if spec and spec.origin else Path()
    return Path(sysconfig.get_path("stdlib")) in origin.parents and not {"site-packages", "dist-packages"} & {
        *origin.parts
    }


def files_beside(path: Path) -> list[Path]:
    """Return the files that the strings of a module name, directly or by folder, and that are no Python.

    [] unless the module uses __file__ or the like.
    """
    source = "".join(
        line for line in path.read_text(encoding="utf-8").splitlines(True) if not line.startswith("sys.path.")
    )
    if not READS_BESIDE.search(source):
        return []
    named = [path.parent / text for text in _texts_in(path) if re.fullmatch(r"\w[\w./-]*", text)]
    matches: set[Path] = set()
    for entry in named:
        files = [entry] if entry.is_file() else entry.rglob("*")
        matches.update(file for file in files if file.is_file())
    hidden = {
        file for file in matches if any(part.startswith(".") for part in file.relative_to(path.parent).parts)
    }
    return sorted(file for file in matches - hidden if file.suffix not in (".py", ".pyc"))
