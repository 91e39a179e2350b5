"""Faults put into the code of a room, one at a time: does a test see them?

    python -m tests.mutants common/storage [--number 40] [--seed 1]           make mutants ROOM=common/storage N=40 SEED=1

A place of the room is changed at random: a comparison, a number, a condition, a call that is left out, an argument, what is
returned. The tests that come to the function run in a copy of this folder, quick ones first, for LONGEST seconds, until one fails.
Which tests those are, a first run of all of them shows, as long as make test. Each result is a line of
output_dir/mutants/ROOM-SEED.jsonl, and the same command goes on where it was ended. What no test has seen is shown at the end: where
the change alters nothing that anybody could see, its line gets a reason, "same": "...", by hand. --again TESTS tries once more what
was missed, with new tests.
"""

import argparse
import ast
import collections
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import __main__ as side_by_side
from tests.tools import starter

ROOT = Path(__file__).resolve().parents[1]  # in the copy, the copy
HERE = Path(os.environ.get("MUTANTS", ROOT / "output_dir" / "mutants"))
KNOWN = HERE / "tests.json"
REACHED, SECONDS = HERE / "reached.part", HERE / "seconds.part"
PRODUCT = ("common", "datasets", "launch")  # not jobs: what is written into them would break the rules of their blocks
TEMPORARY = tempfile.gettempdir()
LONGEST = 100  # seconds of tests for a fault, as long as they take without it
SLOWER = 4  # how many times as long a test may take with it
TOO_LONG = " takes too long"
OPPOSITE = {ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in",
            ast.Is: "is not", ast.IsNot: "is"}  # fmt: skip
EDGE = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
SPY = f"""
def _reached(place, known=set()):
    import os
    test = os.environ.get("PYTEST_CURRENT_TEST", "?")
    if (place, test) not in known:
        known.add((place, test))
        file = os.open({str(REACHED)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{{place}}\\t{{test}}\\n".encode())
        os.close(file)
"""


def pytest_runtest_logstart(nodeid):
    """This module is a plugin of pytest."""
    (Path(TEMPORARY) / "now").write_text(nodeid)


def pytest_runtest_logreport(report):
    with SECONDS.open("a") as file:
        file.write(f"{report.nodeid}\t{report.duration}\n")


# --- Which tests come to which function ------------------------------------------------------------------------------------


def made_copy(room):
    """A copy of the last commit; each room has its own, so that two can be tried side by side."""
    copy = HERE / room.replace("/", "-")
    if not copy.exists():
        HERE.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", copy], cwd=ROOT, check=True)
        for name in (".venv", ".tools"):
            (copy / name).symlink_to(ROOT / name)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    subprocess.run(["git", "checkout", "--quiet", "--detach", "--force", commit], cwd=copy, check=True)
    return copy


def functions(tree, before=""):
    """(qualified name, node)"""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{before}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, node
            yield from functions(node, f"{name}.")
        elif not isinstance(node, ast.expr):
            yield from functions(node, before)


def spied(path):
    """The module's text, in which each function writes down that a test has come to it."""
    source = (ROOT / path).read_text()
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    for name, node in sorted(functions(tree), key=lambda one: -one[1].body[0].lineno):
        first = next((one for one in node.body if not is_text(one)), None)
        if first is None or first.lineno == node.lineno:
            continue
        at = min([first.lineno, *(one.lineno for one in getattr(first, "decorator_list", ()))]) - 1
        lines.insert(at, f"{' ' * first.col_offset}_reached({f'{path}:{name}'!r})\n")
    head = [one for one in tree.body if is_text(one) or (isinstance(one, ast.ImportFrom) and one.module == "__future__")]
    lines.insert(head[-1].end_lineno if head else 0, SPY)
    return "".join(lines)


def is_text(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def write_map(copy):
    for path in (REACHED, SECONDS):
        path.unlink(missing_ok=True)
    for path in sorted(path.relative_to(ROOT) for room in PRODUCT for path in (ROOT / room).rglob("*.py")):
        (copy / path).write_text(spied(path))
    jobs = copy / "tests/tools/jobs.py"
    jobs.write_text(jobs.read_text().replace('("PATH", "HOME",', '("PYTEST_CURRENT_TEST", "PATH", "HOME",'))
    subprocess.run([sys.executable, "-m", "tests", "-p", "tests.mutants"], cwd=copy)  # tests of texts and lines fail
    subprocess.run(["git", "checkout", "--quiet", "--force", "."], cwd=copy, check=True)
    KNOWN.write_text(json.dumps(reached()))


def reached():
    """{path:function: [(seconds, a test that comes to it)]}"""
    seconds = collections.defaultdict(float)
    for line in SECONDS.read_text().splitlines():
        test, _, duration = line.rpartition("\t")
        seconds[test] += float(duration)
    found = collections.defaultdict(set)
    for line in REACHED.read_text().splitlines():
        place, _, test = line.partition("\t")
        if (test := test.rpartition(" (")[0]) in seconds:
            found[place].add(test)
    return {place: [(seconds[test], test) for test in tests] for place, tests in found.items()}


# --- Faults -----------------------------------------------------------------------------------------------------------------


def places(path):
    """{kind: [(function, line, start, end, what stands there instead)]}; start and end in the bytes of the file."""
    source = (ROOT / path).read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = collections.defaultdict(list)

    def text(node):
        return source.encode()[start(node) : end(node)].decode()

    def start(node):
        return starts[node.lineno - 1] + node.col_offset

    def end(node):
        return starts[node.end_lineno - 1] + node.end_col_offset

    def add(kind, node, instead):
        found[kind].append((f"{path}:{function}", node.lineno, start(node), end(node), instead))

    def visit(node):
        if isinstance(node, (ast.JoinedStr, ast.arg, ast.AnnAssign)):  # places in an f-string are not those of the file
            return
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            for kind, words in (("comparison", OPPOSITE), ("edge", EDGE)):
                if type(node.ops[0]) in words:
                    add(kind, node, f"({text(node.left)} {words[type(node.ops[0])]} {text(node.comparators[0])})")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            add("constant", node, repr(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            add("constant", node, repr(node.value + 1))
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)) and text(node.test) != "TYPE_CHECKING":
            add("condition", node.test, f"(not ({text(node.test)}))")
        elif isinstance(node, ast.BoolOp):
            add("half a condition", node, f"({text(node.values[0])})")
            add("half a condition", node, f"({text(node.values[-1])})")
        elif isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await)):
            add("a call", node, "pass")
        elif isinstance(node, ast.Return) and node.value is not None and text(node.value) != "None":
            add("what is returned", node.value, "None")
        elif isinstance(node, ast.keyword) and node.arg:
            before = source.encode()[: start(node)].decode()
            if before.rstrip().endswith(","):
                cut = len(before.rstrip()[:-1].encode())
                found["an argument"].append((f"{path}:{function}", node.lineno, cut, end(node), ""))
        elif isinstance(node, ast.ExceptHandler) and node.type is not None:
            add("what is caught", node.type, "ZeroDivisionError")
        visit_children(node)

    def visit_children(node):
        nonlocal function
        for name, child in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for one in child if isinstance(child, list) else [child]:
                if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    outer, function = function, f"{function}.{one.name}".removeprefix("<module>.")
                    visit_children(one)
                    function = outer
                elif isinstance(one, ast.AST):
                    visit(one)

    function = "<module>"
    visit_children(ast.parse(source))
    return found


def chosen(room, number, seed):
    """Places of the room at random, each kind as often as another."""
    files = [ROOT / room] if room.endswith(".py") else sorted((ROOT / room).rglob("*.py"))
    kinds = collections.defaultdict(list)
    for path in (path.relative_to(ROOT) for path in files):
        for kind, found in places(path).items():
            kinds[kind] += [(kind, str(path), *place) for place in found]
    draw = random.Random(seed)
    for found in kinds.values():
        draw.shuffle(found)
    left = [found for _, found in sorted(kinds.items())]
    drawn = []
    while len(drawn) < number and any(left):
        drawn += [found.pop() for found in draw.sample(left, len(left)) if found]
    return drawn[:number]


def tests_of(place, by_place):
    """The quickest tests that come to the function, or to any of the module, for LONGEST."""
    path, _, function = place.partition(":")
    names = [place] if function != "<module>" else [one for one in by_place if one.startswith(f"{path}:")]
    least = {test: seconds for name in names for seconds, test in by_place.get(name, ())}
    taken, total = [], 0.0
    for test, seconds in sorted(least.items(), key=lambda one: one[1]):
        if taken and total + seconds > LONGEST:
            break
        taken.append(test)
        total += seconds
    return {test: least[test] for test in taken}


def seen(path, start, end, instead, tests):
    """The name of the test that fails, and fails again alone: on a busy machine one may fail by chance."""
    left = list(tests)
    while left and (by := tried(path, start, end, instead, {name: tests[name] for name in left})):
        name = by.removesuffix(TOO_LONG)
        if name not in tests or tried(path, start, end, instead, {name: tests[name]}):
            return by
        left = left[left.index(name) + 1 :]
    return None


def tried(path, start, end, instead, tests):
    """The name of the test that has failed, or None."""
    source = (ROOT / path).read_bytes()
    (ROOT / path).write_bytes(source[:start] + instead.encode() + source[end:])
    os.environ["TMPDIR"] = tempfile.tempdir = temporary = tempfile.mkdtemp(prefix="t-", dir=TEMPORARY)
    now = Path(temporary) / "now"
    now.write_text("")
    try:
        file = side_by_side.File(list(tests), ["-x", "-m", "", "-p", "tests.mutants"], Path(tempfile.mkdtemp(prefix="")))
        while not (ended := os.wait4(file.process, os.WNOHANG))[0]:
            time.sleep(0.02)
            if time.time() - now.stat().st_mtime > 60 + SLOWER * tests.get(now.read_text(), 0):
                os.kill(file.process, signal.SIGKILL)
        file.ended(*ended[1:])
        by = file.failed if file.outcomes or os.WIFEXITED(ended[1]) else [now.read_text() + TOO_LONG]
    finally:
        (ROOT / path).write_bytes(source)
        end_children()
        shutil.rmtree(temporary, ignore_errors=True)
    return next(iter(by), None)


def end_children():
    """Also those that tests which were killed have left: they have become children of this process."""
    while pids := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for pid in map(int, pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# --- The table --------------------------------------------------------------------------------------------------------------


def go_on(room, number, seed, again):
    by_place = json.loads(KNOWN.read_text())
    kept = HERE / f"{room.replace('/', '-')}-{seed}.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    for kind, path, place, line, start, end, instead in chosen(room, number, seed)[len(rows) :]:
        tests = tests_of(place, by_place)
        began = time.monotonic()
        by = seen(path, start, end, instead, tests)
        before = (ROOT / path).read_bytes()[start:end].decode()
        row = {"place": f"{place}:{line}", "kind": kind, "before": before, "after": instead, "tests": len(tests), "by": by}
        rows.append(row)
        with kept.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{time.monotonic() - began:6.1f} s  {'found' if by else 'MISSED'}  {row['place']}  {kind}  {by or ''}", flush=True
        )
    for row in rows if again else []:
        if is_missed(row) and (where := found_again(row)):
            row["since"] = seen(*where, row["after"], dict.fromkeys(again, 0))
    kept.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    show(room, seed, rows)


def is_missed(row):
    return not (row["by"] or row.get("same") or row.get("since"))


def found_again(row):
    """(path, start, end) of the fault in the code of today; None where the line has gone."""
    place, _, line = row["place"].rpartition(":")
    path = place.partition(":")[0]
    source = (ROOT / path).read_bytes()
    near = [
        (abs(at - int(line)), start, end)
        for function, at, start, end, instead in places(path)[row["kind"]]
        if function == place and instead == row["after"] and source[start:end].decode() == row["before"]
    ]
    return (path, *min(near)[1:]) if near else None


def show(room, seed, rows):
    for row in filter(is_missed, rows):
        came = f"{row['tests']} tests" if row["tests"] else "no test comes here"
        print(f"\n{row['place']}, {row['kind']}, {came}:\n- {row['before']}\n+ {row['after']}")
    changing = [row for row in rows if not row.get("same")]
    first, now = (sum(map(test, changing)) for test in (lambda row: bool(row["by"]), lambda row: not is_missed(row)))
    shares = [f"{100 * found / max(1, len(changing)):.0f}" for found in (first, now)]
    print(
        "\n| room | seed | faults | same behaviour | found at first | found now | of 100, at first | now |\n|---|---|---|---|---|---|---|---|"
    )
    print(f"| {room} | {seed} | {len(rows)} | {len(rows) - len(changing)} | {first} | {now} | {shares[0]} | {shares[1]} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room", help="a folder or a file")
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", nargs="+", default=[], metavar="TEST", help="FILE, or FILE::TEST")
    options = parser.parse_args()
    if "MUTANTS" in os.environ:  # in the copy
        starter.load()
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
        go_on(options.room, options.number, options.seed, options.again)
        return
    os.environ.update(MUTANTS=str(HERE), PYTHONDONTWRITEBYTECODE="1")
    copy = made_copy(options.room)
    if not KNOWN.exists():
        write_map(copy)
    os.chdir(copy)
    os.execv(sys.executable, [sys.executable, "-m", "tests.mutants", *sys.argv[1:]])


if __name__ == "__main__":
    main()
