"""The rules of the house: which way imports go, what a room offers, what importing does."""

import ast
import collections
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.jobs import ROOT, environment

# From the ground up: a room, or a file that stands by itself, imports only from floors below its own.
FLOORS = [
    ["common.secrets"],
    ["common.address", "common.errors", "common.chance", "common.machine", "common.moments"],
    ["common.files", "common.packages"],
    ["common.progress"],
    ["common.devices"],
    ["common.world"],
    ["common.alive"],
    ["common.arguments", "common.models", "common.storage", "common.track"],
    ["common.weights"],
    ["common.ranks"],
    ["common.checkpoints"],
    ["common.run"],
    ["common.doctor", "common.elastic", "common.exact", "common.report"],
    ["common.job"],
    ["datasets.sampler", "datasets.crops", "datasets.untrusted", "datasets.crc", "datasets.digests"],
    ["datasets.processes", "datasets.cifar10_files"],
    ["datasets.loader"],
    ["datasets.resident"],
    ["common.start"],
    ["datasets.augment", "datasets.mixing", "datasets.synthetic"],
    ["datasets.photos", "datasets.cifar10", "datasets.recipe"],
    ["datasets.packs"],
    ["datasets.kspeed", "datasets.dali", "datasets.dpex"],
    ["datasets.imagenet", "datasets.pairs"],
    ["datasets.facade"],
    ["datasets.drop_in"],
    ["launch.options", "launch.engines"],
    [
        "launch.blocks",
        "launch.bundle",
        "launch.doctor",
        "launch.export",
        "launch.image",
        "launch.installed",
        "launch.kspeed",
        "launch.local",
        "launch.report",
        "launch.weights",
    ],
    ["launch.pack", "launch.track"],
    ["launch.submit"],
    ["launch.__main__"],
    ["jobs"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FLOOR["common"] = -1  # the version, and nothing else
OURS = {"jobs", "datasets", "common", "launch", "tests"}
FILES = sorted(path.relative_to(ROOT) for package in OURS - {"tests"} for path in (ROOT / package).rglob("*.py"))
TESTS = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
MODULES = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}

# Needed by some jobs only, so imported inside the function that uses them.
OPTIONAL = {
    "nvidia", "ray", "pymemcache", "boto3", "torchvision", "sklearn", "matplotlib", "tensorboard", "huaweicloudsdkcore",
    "huaweicloudsdkmodelarts", "alibabacloud_credentials", "alibabacloud_pai_dlc20201203", "alibabacloud_tea_openapi", "kubernetes",
    "onnx", "jinja2", "tqdm", "mlflow", "wandb", "swanlab", "timm", "pyarrow",
}  # fmt: skip
OF_ONE_PACKAGE = {"datasets/kspeed/fleet.py": "pymemcache"}  # its classes extend that package's, so it is imported like one


@functools.cache
def tree_of(path):
    """Read once for all tests, of which none changes it."""
    return ast.parse((ROOT / path).read_text())


HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef)


def room(module):
    """common.run for common.checkpoints, common.errors for itself, jobs for any job."""
    parts = module.split(".")
    return parts[0] if parts[0] == "jobs" else ".".join(parts[:2])


def imports(tree):
    """(module, name or None) of every import, also of those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports do not survive in a bundle"
            yield from ((node.module, alias.name) for alias in node.names)


def arrows(path, part=lambda tree: tree):
    """The modules of ours that a file imports from, in that part of it."""
    for module, name in imports(part(tree_of(path))):
        if module.split(".")[0] in OURS:
            yield f"{module}.{name}" if f"{module}.{name}" in MODULES else module


def name_of(path):
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


REMOVABLE = {"common.elastic"}  # a folder that somebody may delete, and all else works (tests/common/elastic/test_rules.py)


def test_every_file_has_its_floor():
    there = {room(name_of(path)) for path in FILES} - {"datasets", "launch"}
    assert there <= set(FLOOR) and set(FLOOR) - there <= REMOVABLE


def test_imports_between_rooms_go_down_only():
    for path, module in [(file, target) for file in FILES for target in arrows(file)]:
        mine, target = room(name_of(path)), room(module)
        assert target != "tests" and (target == mine != "jobs" or FLOOR[target] < FLOOR[mine]), f"{path} imports {module}"
        assert not (mine == "jobs" and target.startswith("launch")), f"{path}: a job never imports launch"


def test_no_circles_inside_a_room():
    graph = {name: set() for name in MODULES}
    for name, path in MODULES.items():
        offers = {target for target in arrows(path) if room(target) == room(name) and target != room(name)}
        graph[name] = offers - {name}
    no_circles(graph)


def test_no_circles_between_the_rooms_and_files_of_a_room():
    """Each room inside is one place there, whatever files it has."""
    for name in rooms():
        graph = {}
        for module in [module for module in MODULES if module.startswith(f"{name}.")]:
            place, offers = ".".join(module.split(".")[: name.count(".") + 2]), arrows(MODULES[module])
            places = {".".join(one.split(".")[: name.count(".") + 2]) for one in offers if one.startswith(f"{name}.")}
            graph.setdefault(place, set()).update(places - {place})
        no_circles(graph)


def no_circles(graph):
    done, under_way = set(), []

    def visit(name):
        assert name not in under_way, " -> ".join([*under_way[under_way.index(name) :], name])
        if name not in done:
            under_way.append(name)
            for target in sorted(graph[name]):
                visit(target)
            done.add(under_way.pop())

    for name in sorted(graph):
        visit(name)


def test_a_circle_is_seen():
    with pytest.raises(AssertionError, match="b -> c -> b"):
        no_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})


def rooms():
    """Folders with an inside."""
    return sorted(name for name, path in MODULES.items() if path.name == "__init__.py" and name.count("."))


@pytest.mark.parametrize("name", rooms())
def test_a_room_says_what_it_is_for_and_offers_what_there_is(name):
    module = importlib.import_module(name)
    assert module.__doc__ and module.__doc__.strip().endswith("."), "one sentence: the question that the room answers"
    for offered in module.__all__:
        assert f"{name}.{offered}" in MODULES or hasattr(module, offered), f"{name} does not have the {offered} that it offers"


def test_the_page_of_the_architecture_names_every_room():
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = {name: rf"\b({name.replace('.', '[./]')}\b|{name.split('.')[1]}/)" for name in rooms()}
    assert [name for name, pattern in named.items() if not re.search(pattern, page)] == []


def test_no_room_reaches_into_another():
    for path, module, name in [(file, *one) for file in FILES for one in imports(tree_of(file))]:
        mine = room(name_of(path))
        words = [*module.split("."), *filter(None, [name])]
        for depth in range(2, len(words)):  # rooms inside rooms, too
            target, wanted = ".".join(words[:depth]), words[depth]
            if target in rooms() and room(target) != mine:
                offered = importlib.import_module(target).__all__
                assert wanted in offered, f"{path} takes {wanted} out of {target}, which offers {', '.join(offered)}"


def test_optional_packages_are_imported_where_they_are_used():
    for path in FILES:
        top = ast.Module([node for node in tree_of(path).body if isinstance(node, (ast.Import, ast.ImportFrom))], [])
        found = {module.split(".")[0] for module, _ in imports(top)} & OPTIONAL
        assert found <= {OF_ONE_PACKAGE.get(str(path))}, path
        assert not {name_of(Path(place)) for place in OF_ONE_PACKAGE} & {module for module, _ in imports(top)}, path


@pytest.mark.parametrize("job, most_files, most_statements", [("train", 69, 5760), ("train_imagenet", 97, 8220)])
def test_a_job_loads_what_it_uses(job, most_files, most_statements):
    """Ours that importing a job loads. What only some runs need is imported in the function that needs it."""
    loaded, left = set(), [f"jobs.{job}"]
    while left:
        module = left.pop()
        packages = {module.rsplit(".", number)[0] for number in range(1, module.count(".") + 1)}
        if module not in loaded:
            loaded |= {module, *(packages & set(MODULES))}
            left += [one for place in {module, *packages} & set(MODULES) for one in arrows(MODULES[place], at_its_head)]
    nodes = [node for module in loaded for node in ast.walk(tree_of(MODULES[module]))]
    docstrings = sum(isinstance(node, HAVE_DOCSTRINGS) and ast.get_docstring(node) is not None for node in nodes)
    statements = sum(isinstance(node, ast.stmt) for node in nodes) - docstrings
    assert (len(loaded) <= most_files, statements <= most_statements) == (True, True), (len(loaded), statements)


def at_its_head(tree):
    """Without what is inside functions and classes, which runs later, and without `if TYPE_CHECKING`."""
    return ast.Module([node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom, ast.Try))], [])


def test_importing_does_nothing():
    """No output, no file, no thread, no GPU, no signal handler."""
    modules = [name for name, path in MODULES.items() if path.parts[0] != "jobs" and "__main__" not in name
               and str(path) not in OF_ONE_PACKAGE]  # fmt: skip
    script = (
        "import signal, sys, threading\nbefore = [signal.getsignal(n) for n in (15, 2, 10)]\n"
        + "".join(f"import {module}\n" for module in modules)
        + "import torch\nassert not torch.cuda.is_initialized() and threading.active_count() == 1\n"
        + "assert before == [signal.getsignal(n) for n in (15, 2, 10)]\nassert not {'torchvision', 'sklearn', 'matplotlib', 'boto3'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Where CUDA is named outside the room of devices, and why.
CUDA_ALONE = {
    "common/arguments/options.py": "a choice of --device, in a module that is read without torch",
    "common/devices/choice.py": "the room",
    "common/devices/diagnosis.py": "the room",
    "common/devices/kinds.py": "the room",
    "common/devices/work.py": "the room",
    "common/doctor/checks.py": "a sentence for the user names NVIDIA's variable",
    "common/packages.py": "the name of a platform's engine",
    "launch/bundle/requirements.py": "DALI's package is named after it",
    "launch/engines.py": "the names of a platform's engines",
    "launch/image.py": "the name of an image",
    "common/devices/graphs.py": "graphs of steps, which torch has for CUDA alone",
    "datasets/dali/batches.py": "DALI's own error messages",
    "datasets/dali/pipeline.py": "DALI knows CUDA alone: its package and an argument are named after it",
    "datasets/facade.py": "an argument that the documents promise",
    "launch/export/modelarts.py": "the name of a platform's engine, and a program for it that has nothing of ours",
    "launch/submit/modelarts.py": "a word in the names of the platform's engines, in a program that never imports torch",
    "jobs/plain_ddp.py": "it has nothing of ours",
    "launch/local.py": "the variable by which nodes share NVIDIA's GPUs, in a program that never imports torch",
}


def test_what_a_kind_of_device_needs_stands_in_the_room_of_devices():
    named = set()
    for path in FILES:
        tree = tree_of(path)
        docs = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, HAVE_DOCSTRINGS)}
        for node in ast.walk(tree):
            words = {field for _, field in ast.iter_fields(node) if isinstance(field, str)} - docs
            if any("cuda" in word.lower() or word == "nccl" for word in words):
                named.add(str(path))
    assert named == set(CUDA_ALONE)


def test_nobody_asks_which_kind_of_job_it_is_in():
    """A part is told what it needs to know: no option that may be there or not, no state on functions."""
    asked = re.compile(r"(getattr|hasattr)\((self\.)?(args|parser)\b")
    for path in FILES:
        text = (ROOT / path).read_text()
        assert not asked.search(text), path
        functions = {node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(tree_of(path)):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                on_function = (
                    isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in functions
                )
                assert not on_function, f"{path}:{node.lineno} keeps state on a function"


def test_no_object_is_ever_pickled_or_unpickled_but_by_the_reader_of_batches():
    """Checkpoints are weights_only; ranks exchange tensors and JSON; the one unpickler knows three names. What the loader over Ray
    unpacks comes from processes that it started: a data set and its transform cannot travel otherwise."""
    forbidden = re.compile(
        r"weights_only=False|pickle\.loads?\(|pickle\.Unpickler|(?<!_custom)_object\(|_object_list\(|allow_pickle=True|yaml\.load|eval\(|exec\(|shell=True"
    )
    for path in set(FILES) - {Path("datasets/dpex/wire.py")}:
        found = [
            line
            for line in (ROOT / path).read_text().splitlines()
            if forbidden.search(line) and "model.eval()" not in line and "exec(open(__file__" not in line  # a bundle's own text
        ]
        assert not found, (path, found)


def test_one_file_knows_the_names_of_checkpoints_and_weights():
    """Nothing else matches or makes them: not by twelve digits, and not by the number of an epoch."""
    spelled = re.compile(r":012d|\\d\{\{?12|epoch_\{|epoch_\(?\\d")
    found = {str(path) for path in FILES for line in (ROOT / path).read_text().splitlines() if spelled.search(line)}
    assert found == {
        "common/checkpoints/names.py",
        "common/checkpoints/run_folder.py",
        "jobs/train_restore.py",
    }  # examples/epoch_N.png
    assert [
        str(path) for path in FILES if room(name_of(path)) == "common.storage" and "checkpoint" in (ROOT / path).read_text()
    ] == []


# --- How large things may be ---------------------------------------------------------------------------------------------

MOST_ATTRIBUTES, MOST_WITH_INHERITED, MOST_STATEMENTS, MOST_FILES = 15, 25, 50, 14
LARGER = {
    "Run": "what a job is given: the parts of a run, and the order in which they act",
    "Request": "a table: each field is an option of launch submit",
    "Shares": "tensors that are made once and used in every step, and their places",
}
LARGER_WITH_INHERITED = {"Request"}
MOST_OF_RUN = 20  # attributes, all of which its __init__ sets
TOP = {"jobs", "common", "datasets", "launch"}  # folders that a reader knows by their lists in README and docs


def classes():
    trees = [tree_of(path) for path in FILES]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def attributes(node):
    """Those that a class sets, or has as the fields of a record."""
    return {statement.target.id for statement in node.body if isinstance(statement, ast.AnnAssign)} | set_on_self(node)


def set_on_self(node):
    stored = [one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)]
    return {one.attr for one in stored if getattr(one.value, "id", "") == "self"}


def inherited(node, known):
    """The attributes of the classes of ours that it is made from."""
    bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
    found = [one for one in known if one.name in bases and one is not node]
    return {name for one in found for name in attributes(one) | inherited(one, known)}


MOST_ANY = 758  # may only fall: what is of any type is not checked


def test_few_things_are_of_any_type():
    nodes = [node for path in FILES for node in ast.walk(tree_of(path))]
    assert sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes) <= MOST_ANY


def test_a_class_is_about_one_thing():
    known = classes()
    large = {node.name for node in known if len(attributes(node) - inherited(node, known)) > MOST_ATTRIBUTES}
    assert large == set(LARGER) and len(LARGER) <= 3
    (run,) = [node for node in known if node.name == "Run"]
    (init,) = [one for one in run.body if getattr(one, "name", "") == "__init__"]
    assert len(attributes(run)) <= MOST_OF_RUN and attributes(run) == set_on_self(init)
    deep = {node.name for node in known if len(attributes(node) | inherited(node, known)) > MOST_WITH_INHERITED}
    assert deep == LARGER_WITH_INHERITED & {node.name for node in known}


def test_a_class_has_a_name_of_its_own():
    found = collections.Counter(node.name for node in classes())
    assert [name for name, number in found.items() if number > 1] == []


def test_a_line_sets_two_attributes_of_an_object_at_most():
    """A tuple of more hides what a class owns."""
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            for target in node.targets if isinstance(node, ast.Assign) else []:
                assert len(set_on_self(target)) <= 2, f"{path}:{node.lineno} sets {', '.join(set_on_self(target))}"


def test_an_assignment_sets_one_thing():
    """But for unpacking one value, and for swaps."""
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            for target in node.targets if isinstance(node, ast.Assign) else []:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    names = {ast.unparse(one) for one in target.elts}
                    is_swap = names == {ast.unparse(one) for one in node.value.elts}
                    assert is_swap, f"{path}:{node.lineno} sets {', '.join(sorted(names))}"


# Words that leave a reader to guess what a thing is, as names of variables, parameters, attributes, functions and classes.
SAYS_NOTHING = {
    "told", "said", "asked", "heard", "its", "how", "what", "here", "there", "came", "gone", "still", "made", "mine", "then",
    "before", "afresh", "beyond", "wanted", "given", "counted", "owed", "not_here",
}  # fmt: skip
SAYS_SOMETHING = {
    ("common/arguments/options.py", "given"): "args.given: the options that were given, of which docs tell authors of jobs",
    ("common/progress.py", "counted"): "the name in copies of earlier jobs",
    ("common/run/observers/__init__.py", "said"): "is called at the moment of this name",
}


def test_a_name_says_what_a_thing_is():
    found = {(str(path), name) for path in FILES for name in names_in(tree_of(path)) if name.strip("_") in SAYS_NOTHING}
    assert found == set(SAYS_SOMETHING)


def names_in(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name


def test_a_function_is_read_at_one_look():
    """Without the functions inside it, but with the classes. A job's main is the training itself, in full."""
    for path in FILES:
        if path.parts[0] == "jobs":
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                inside = [one for one in node.body if isinstance(one, ast.FunctionDef)]
                statements = count_statements(node) - sum(map(count_statements, inside))
                assert statements <= MOST_STATEMENTS, f"{path}: {node.name} has {statements} statements"


def count_statements(node):
    return sum(isinstance(one, ast.stmt) for one in ast.walk(node)) - 1


def test_the_page_says_how_large_each_room_is():
    """To within a sixth: the page is no list of every change."""
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## The rooms")[2].partition("## ")[0]
    for row in [line.split(" | ") for line in table.splitlines() if line.startswith("| `") and "tests/" not in line]:
        names = [name.rstrip("/") for name in re.findall("`([^`]+)`", row[0])]
        names = {name if "/" in name or name in TOP else f"{names[0].split('/')[0]}/{name}" for name in names}
        folders = {name.removesuffix("/*.py") for name in names}
        if {folder.replace("/", ".") for folder in folders} <= REMOVABLE and not any(
            (ROOT / folder).is_dir() for folder in folders
        ):
            continue
        said = [int(number.replace(",", "")) for number in row[3].split(" / ")]
        found = [lines_of(FILES, folders), lines_of(TESTS, {f"tests/{folder}" for folder in folders})]
        assert all(abs(one - other) <= 100 + other / 6 for one, other in zip(said, found)), f"{row[0]}: {said}, now {found}"


def lines_of(paths, folders):
    return sum(len((ROOT / path).read_text().splitlines()) for path in paths if path.parent.as_posix() in folders)


def test_each_room_has_its_tests_in_a_folder_of_its_name():
    for room in rooms():
        folder = ROOT / "tests" / room.replace(".", "/")
        assert room == "common.run.observers" or [*folder.glob("test_*.py")], (
            f"{folder} has no tests"
        )  # they are those of common.run


def test_a_room_is_seen_at_one_look():
    files = collections.Counter(path.parent.as_posix() for path in FILES)
    assert not {room: number for room, number in files.items() if number > MOST_FILES and room not in TOP}


def test_the_moments_of_the_page_are_those_that_are_announced():
    announced = {name for path in FILES for name in re.findall(r'announce\("(\w+)"', (ROOT / path).read_text())}
    described = set(re.findall(r"^    (\w+)\(", importlib.import_module("common.moments").__doc__, re.MULTILINE))
    table = (ROOT / "docs" / "architecture.md").read_text().split("### Moments")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert announced == described == {name for row in rows for name in re.findall(r"`(\w+)", row)}
