"""Find what a job imports without starting it: our modules, which a bundle contains, and packages, which it asks for."""

import ast
import functools
import itertools
import re
import sys
import sysconfig
from collections.abc import Collection, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Union

from common.errors import UserError, one_line

ROOT = Path(__file__).resolve().parent.parent.parent
OURS = ("common", "datasets", "anyrank")
ANYRANK = "anyrank/__init__.py"  # where Python looks for what pip makes of launch/installed
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
READS_BESIDE = re.compile(r"\b(__file__|pkgutil|importlib\.resources|from importlib import resources)\b")


def path_of(place: str) -> Path:
    """Return where the file is that a bundle has at this place."""
    return ROOT / ("launch/installed/__init__.py" if place == ANYRANK else place)


def modules_of(job: Union[str, Path], without: Collection[str] = ()) -> list[str]:
    """Return the files of all our modules that a job imports, also indirectly, as sorted paths below ROOT.

    Neither the files in `without` are among them, nor what those alone import.
    """
    places: set[str] = set()
    left = [Path(job)]
    while left:
        for name in names_in(left.pop()):
            imported = itertools.takewhile(lambda file: file not in without, files_of(name))
            new = set(imported) - places
            places |= new
            left += [path_of(place) for place in new]
    return sorted(places)


@functools.lru_cache(maxsize=1)
def option_names(job: Union[str, Path]) -> list[str]:
    """Return each NAME for which the job or its modules have a string --NAME: the job's options, and a few other words."""
    paths = [Path(job), *(path_of(place) for place in modules_of(job))]
    return sorted({name for path in paths for text in _texts_in(path) for name in re.findall(r"^--([A-Za-z]\w*)", text)})


def _nodes(path: Path) -> list[ast.AST]:
    return _parse(path.read_text(encoding="utf-8"), str(path))


@functools.lru_cache(maxsize=500)
def _parse(source: str, name: str) -> list[ast.AST]:
    kinds = (ast.Import, ast.ImportFrom, ast.Constant, ast.If, *FUNCTIONS)
    return [node for node in ast.walk(ast.parse(source, name)) if isinstance(node, kinds)]


def _texts_in(path: Path) -> list[str]:
    return [node.value for node in _nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def names_in(path: Path, at_once: bool = False) -> Iterator[str]:
    """Yield the dotted names that a file imports, each a module or a name in one; UserError for a relative import.

    `at_once`: only those that are imported with the file itself, and not when one of its functions is called, or for types.
    """
    nodes = _nodes(path)
    later = {inner for node in nodes if at_once and _is_passed_over(node) for inner in ast.walk(node)}
    for node in nodes:
        if node in later:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise UserError(
                    f"{one_line(path)}:{node.lineno}: `{ast.unparse(node)}` is a relative import, which does not work in a "
                    "bundle: import it by its full name, such as common.files"
                )
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_of_ours(statement: ast.stmt) -> bool:
    """Whether a module of ours is imported in this statement."""
    inner = [node for node in ast.walk(statement) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [node.module if isinstance(node, ast.ImportFrom) else alias.name for node in inner for alias in node.names]
    return any(str(name).split(".")[0] in OURS for name in names)


def _is_passed_over(node: ast.AST) -> bool:
    """Whether Python does not run what is inside, when it imports the file."""
    is_for_types = isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"
    return is_for_types or isinstance(node, FUNCTIONS)


def files_of(name: str) -> list[str]:
    """Return our files that Python runs to import `name`, in order: its packages and the module."""
    words = name.split(".")
    paths = ["/".join(words[:count]) for count in range(1, len(words) + 1)] if words[0] in OURS else []
    places = [place for path in paths for place in (f"{path}.py", f"{path}/__init__.py")]
    return [place for place in places if path_of(place).is_file()]


def require_bundled_imports(job: Path) -> None:
    """Raise UserError for imports that a bundle would lack: from the job's folder, or from ROOT beside common and datasets."""
    for path in (job, *(path_of(place) for place in modules_of(job))):
        for name in sorted({name.split(".")[0] for name in names_in(path)}):
            for folder in {job.parent.resolve(), ROOT}:
                ours = (
                    folder == ROOT and name in OURS
                ) or name == "anyrank"  # beside a script there may be a clone of this name
                if not ours and ((folder / f"{name}.py").is_file() or any((folder / name).glob("*.py"))):
                    where = "its own folder" if folder == path.parent.resolve() else one_line(folder)
                    raise UserError(
                        f"{one_line(path.name)} imports {name} from {where}, which a bundle leaves out: "
                        "move it to common or datasets, or into the job"
                    )


def packages_in(path: Path) -> set[str]:
    names = {name.split(".")[0] for name in names_in(path)}
    return {name for name in names - {*OURS, *sys.builtin_module_names} if not _is_pythons(name)}


def _is_pythons(name: str) -> bool:
    spec = PathFinder.find_spec(name)
    place = Path(spec.origin) if spec and spec.origin else Path()
    return Path(sysconfig.get_path("stdlib")) in place.parents and not {"site-packages", "dist-packages"} & {*place.parts}


def files_beside(path: Path) -> list[Path]:
    """Return the non-Python files beside a module that its strings name, or whose folder, if it uses __file__ or the like."""
    source = "".join(line for line in path.read_text(encoding="utf-8").splitlines(True) if not line.startswith("sys.path."))
    if not READS_BESIDE.search(source):
        return []
    named = [path.parent / text for text in _texts_in(path) if re.fullmatch(r"\w[\w./-]*", text)]
    found = {file for place in named for file in ([place] if place.is_file() else place.rglob("*")) if file.is_file()}
    hidden = {file for file in found if any(part.startswith(".") for part in file.relative_to(path.parent).parts)}
    return sorted(file for file in found - hidden if file.suffix not in (".py", ".pyc"))
