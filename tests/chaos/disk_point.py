"""One point of the matrix: a run in which one operation fails, then a run without a fault, and what is demanded of both."""

import dataclasses
import os
import re
import shutil
import tempfile
from pathlib import Path

from tests.chaos.disk_cases import left
from tests.chaos.kill import in_child
from tests.tools.jobs import ROOT, environment
from tests.tools.starter import become, opened

NAMED = re.compile(r"rename out/checkpoints/(\d{12})\.json")  # from here on it is a checkpoint
WENT_ON = re.compile(r"(?:going on from| of) \S*?(\d{12})\.pt")
# What a fault may leave beside the rest: the last save's step of removing what is no longer kept may not have been taken.
MAY_STAY = re.compile(r"out/checkpoints/\d{12}\.(pt|json)|out/epoch_\d+\.pth(\.sha256)?")
NO_FAULT = ("-", "*", 1, "EIO")
CLUSTER = {}  # the variables that lead to the Ray cluster of all points


@dataclasses.dataclass(frozen=True)
class Point:
    job: str
    operation: str
    path: str  # a pattern
    times: int
    fault: str

    def order(self):
        return self.operation, self.path, self.times, self.fault

    def __str__(self):
        return f"{self.job}: {self.fault} at {self.operation} {self.path} ({self.times})"


def run(case, folder, work, order, library, options=None):
    """(exit code, what it printed, its operations). The folder of the order is beside the one that is watched."""
    control = Path(f"{folder}.order")
    shutil.rmtree(control, ignore_errors=True)
    control.mkdir()
    (control / "order").write_text("\n".join(map(str, (folder, *order, ""))))
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    own = {"LD_PRELOAD": str(library), "ANYRANK_DISK": str(control), "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")}
    if case.ray:
        own.update(CLUSTER, TMPDIR=tempfile.gettempdir())
    process = os.fork()
    if process == 0:
        os.setsid()
        printed = opened(os.devnull, f"{control}/printed.1", f"{control}/printed.2")
        become(case.words(folder, work, options), folder, environment(**own), printed, case.seconds)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    printed = "".join((control / f"printed.{number}").read_text() for number in (1, 2))
    log = (control / "log").read_text().splitlines() if (control / "log").exists() else []
    return code, printed, log


def same_in_child(case, folder):
    """In a process of its own: none that has computed with tensors can be forked again."""
    target = Path(f"{folder}.same")

    def compute():
        try:
            target.write_text(case.same(folder))
        except Exception as error:
            target.write_text(f"{type(error).__name__}: {error}")

    os.waitpid(in_child(compute), 0)
    return target.read_text()


def prepare(case, name, work, library):
    """What is there when the program starts: made once."""
    folder = work / f"{name}.before"
    if case.before and not folder.exists():
        run(case, folder, work, case.fault or NO_FAULT, library, case.before)
    return folder


def begin(case, name, folder, work, library):
    if case.before:
        shutil.copytree(prepare(case, name, work, library), folder, symlinks=True)
        shutil.rmtree(folder / "tmp", ignore_errors=True)


def record(case, name, work, library):
    """The undisturbed run: (its operations in their order, what must be the same, the names of what it leaves, problems)."""
    folder = work / name
    begin(case, name, folder, work, library)
    code, printed, log = run(case, folder, work, NO_FAULT, library)
    if code:
        return [], "", [], [f"exit code {code}: {printed[-2000:]}"]
    unseen = [path for path in left(folder) if f" {path}" not in "\n".join(log) and not (work / f"{name}.before").exists()]
    return log, same_in_child(case, folder), left(folder), [f"{path} is written unseen" for path in unseen if "*" not in path]


def newest(log, folder):
    """The newest checkpoint that was there at some time: nothing of it may be lost."""
    manifests = [path.stem for path in (folder / "out" / "checkpoints").glob("*.json")]
    return max([*(match[1] for line in log if (match := NAMED.match(line))), *manifests], default="")


def problems_of_fault(point, code, printed, log):
    if point.fault == "killed":
        if code == 0 and "tmp/" not in point.path:
            yield "it was killed, and its exit code is 0"
        return
    errors = [line for line in printed.splitlines() if line.startswith("error:")]
    if code not in (0, 1):
        yield f"exit code {code}"
    if code and len(errors) != 1:
        yield f"{len(errors)} lines begin with error:"
    if code == 0 and errors:
        yield "it goes on with an error"


def may_be_silent(point, recorded):
    """A sync of a folder, which a run does not need, since some mounted stores cannot; the file by which Python tries a folder
    for temporary files before it takes another one, and the one without a name by which a start tries the output folder before
    it takes one with a name; what stays in a temporary folder."""
    if point.operation == "fsync":
        return any(f" {point.path}/" in line for line in recorded["log"])
    if point.operation == "unlink":
        return point.path.startswith("tmp/")
    return (point.operation, point.path) in {("open", "out"), ("open", "tmp/*"), ("write", "tmp/*")}


def wrong_files(point, folder, recorded, when):
    there, wanted = set(left(folder)), set(recorded["left"])
    spare = {path for path in there - wanted if not MAY_STAY.fullmatch(path)}
    if point.operation == "unlink":
        spare.discard(point.path)
    if wanted - there:
        yield f"{when} files are missing: {sorted(wanted - there)}"
    if spare:
        yield f"{when} files are left: {sorted(spare)}"


def attempt(case, point, recorded, work, library, name):
    """{problems, outcome, code} of a point."""
    folder = work / name
    begin(case, point.job, folder, work, library)
    before = newest([], folder)
    code, printed, log = run(case, folder, work, point.order(), library)
    if not any(line.startswith("FAULT") for line in log):
        return {"outcome": "missed", "problems": ["the operation did not happen"]}
    found = list(problems_of_fault(point, code, printed, log))
    whole = max(before, newest(log, folder))
    warned = "warning:" in re.sub("warning: the images are synthetic.*", "", printed)
    outcome = "killed" if point.fault == "killed" else "ends" if code else "goes on" if warned else "silent"
    if outcome == "silent" and not may_be_silent(point, recorded):
        found.append("it goes on without a word")
    if code == 0:
        found += wrong_files(point, folder, recorded, "the run went on")
    again, text, _ = run(case, folder, work, NO_FAULT, library)
    if again or re.search(r"^error:", text, re.MULTILINE):
        found.append(f"the restart ends with exit code {again}")
    if "Traceback" in printed + text:
        found.append("a traceback")
    number = match[1] if (match := WENT_ON.search(text)) else ""
    if (number or "") < whole:
        found.append(f"checkpoint {whole} was whole, and the restart goes on from {number or 'none'}")
    if same_in_child(case, folder) != recorded["same"]:
        found.append("the final state has other bits")
    found += wrong_files(point, folder, recorded, "after the restart")
    if not found:
        for path in (folder, f"{folder}.order"):
            shutil.rmtree(path)
        os.unlink(f"{folder}.same")
    shown = f"{printed}\n--- the restart ---\n{text}" if found else ""
    return {"outcome": outcome, "problems": found, "code": code, "printed": shown}
