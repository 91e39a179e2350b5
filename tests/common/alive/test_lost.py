"""Who has started a rank x what becomes of it: one line says it, everywhere, and nothing of the job is left."""

import contextlib
import html
import json
import os
import re
import signal

import pytest

from tests.tools.jobs import PATIENCE, TINY, Popen, command, environment, in_rehearsal, wait_for
from tests.tools.objectstore import free_port
from tests.tools.ranks import LONG, TORCHRUN, changed_loader, children, processes_of, rank_environments, workers_of

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
CODE = {"hangs": "time.sleep(10000)", "fails": "raise KeyError('x')", "crashes": "ctypes.string_at(0)", "exits": "sys.exit(7)"}
LINES = {
    "killed": r"was killed by SIGKILL, perhaps for want of memory after step \d+, in phase \w+",
    "stopped": r"is stopped \(state T\) after step \d+, in phase \w+",
    "hangs": r"has made no progress for \d+ s after step 2, in phase data",
    "fails": "failed after step 2, in phase data: KeyError: 'x'",
    "crashes": "was killed by SIGSEGV after step 2, in phase data",
    "exits": "ended with exit code 7 after step 2, in phase data",
}
HOME = {
    "a user, alone": r"rank 0 \(host \S+\)",
    "the job itself": r"rank 1 \(node 0, host \S+\)",
    "a platform, each": r"rank 1 \(host \S+\)",
    "torchrun": r"rank 1 \(host \S+\)",
}
ROWS = [
    *(("a user, alone", fault) for fault in ("killed", "stopped", "crashes", "hangs")),
    *(("the job itself", fault) for fault in ("killed", "stopped", "hangs")),
    *(("a platform, each", fault) for fault in LINES),
    ("torchrun", "killed"),
]
ENDS_ALONE = {"killed": -signal.SIGKILL, "stopped": -signal.SIGKILL, "crashes": -signal.SIGSEGV, "hangs": 1}  # else 1
OFTEN = [("a user, alone", "killed"), ("a user, alone", "crashes"), ("the job itself", "stopped"), ("a platform, each", "killed"),
         ("a platform, each", "hangs"), ("a platform, each", "fails"), ("a platform, each", "exits")]  # fmt: skip


@contextlib.contextmanager
def started(folder, who, fault):
    """The process of rank 0, or its parent, and one that returns the process id of the rank that is lost."""
    job = "train" if who == "a user, alone" else "train_ddp"
    options = [*TINY, "--epochs", "200"] if who == "a user, alone" else LONG
    options = [*options, "--nproc_per_node", "2"] if who == "the job itself" else options
    words = [*(changed_loader(job, folder, CODE[fault]) if fault in CODE else command(job)), *options]
    words += ["--save_steps", "1", "--output_dir", str(folder / "out")]
    own = rank_environments() if who == "a platform, each" else [{}]
    words = [*TORCHRUN, str(free_port()), *words[1:]] if who == "torchrun" else words
    with open(folder / "log", "w") as log:
        how = {"cwd": folder, "stdout": log, "stderr": log}
        processes = [Popen(words, env=environment(WITHOUT="matplotlib", **env), **how) for env in own]
    are_ranks = who in ("a user, alone", "a platform, each")
    try:
        yield processes[0], lambda: processes[-1].pid if are_ranks else workers_of(children(processes[0]))[1]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("who, fault", in_rehearsal(ROWS, lambda row: row not in OFTEN))
def test_a_rank_that_is_lost_is_named_and_nothing_is_left(tmp_path, who, fault):
    alone = who == "a user, alone"
    with started(tmp_path, who, fault) as (first, lost):
        if fault in SIGNALS:
            wait_for(lambda: steps_of(tmp_path) >= 20, first, "so many steps that its watcher has seen it handle signals")
            os.kill(lost(), SIGNALS[fault])
        code = ENDS_ALONE[fault] if alone else 1
        assert first.wait(PATIENCE) == code
        wait_for(lambda: not processes_of(tmp_path), None, "the end of all others, and of their watchers")
    log = (tmp_path / "log").read_text()
    home = " ".join(HOME[who].split()[:2]) if fault == "hangs" else HOME[who]  # what the ranks agree on names no host
    line = f"{home} {LINES[fault]}"
    assert re.search(f"^error: {line}{'$' if alone else '; stopping all 2 ranks'}", log, re.M), log
    assert ("Fatal Python error: Segmentation fault" in log) == (fault == "crashes")
    assert fault != "hangs" or re.search("in changed$", log, re.M), "the stack shows where it hangs"
    assert alone or "connection" not in log.lower(), "not the error of who has lost it"
    events = map(json.loads, (tmp_path / "out" / "journal.jsonl").read_text().splitlines())
    assert [bool(re.fullmatch(line, row["why"])) for row in events if row["event"] == "end"] == [True]
    page = html.unescape(re.sub("<[^>]*>", "", (tmp_path / "out" / "report.html").read_text()))
    assert re.search(f"Failed after .*{line}", page)


def steps_of(folder):
    return max((int(path.stem) // 16 for path in (folder / "out" / "checkpoints").glob("*.json")), default=0)
