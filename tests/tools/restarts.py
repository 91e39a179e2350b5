"""Jobs that are interrupted and started again, as the words of a command: what they end with is compared with an undisturbed run."""

import contextlib
import os
import signal
import sys

from tests.tools.jobs import PATIENCE, ROOT, Popen, assert_same_bits, environment, final_state, wait_for
from tests.tools.ranks import processes_of

SYNTHETIC = ["--custom_data", "true"]
OWN = ROOT / "tests" / "examples" / "own_tensors.py"
PLACES = {  # the options that start a job on so many processes
    "1": ["--nproc_per_node", 1],
    "2": ["--nproc_per_node", 2],
    "3": ["--nproc_per_node", 3],
    "4": ["--nproc_per_node", 4],
    "2 x 2": ["--nodes", 2, "--procs", 2],
}


def words_of(job, ranks):
    """Those behind python. `job`: a script and its options."""
    script, *options = job
    options = [*options, "--save_steps", 1, "--output_dir", "out"]
    if "x" in ranks:
        return ["-m", "launch", "local", *PLACES[ranks], script, "--", *options]
    return [script, *PLACES[ranks], *options]


def start(folder, words, **variables):
    folder.mkdir(exist_ok=True)
    with open(folder / "log", "w") as log:
        env = environment(PYTHONPATH=str(ROOT), **variables)
        return Popen([sys.executable, *words], cwd=folder, env=env, stdout=log, stderr=log)


def finish(folder, words, expected=0, **variables):
    """Let it end with this exit code; returns what it has said."""
    process = start(folder, words, **variables)
    code, said = process.wait(PATIENCE), (folder / "log").read_text()
    assert code == expected, f"exit code {code}\n{said}"
    return said


def has_saved(folder, number=1):
    """Whether so many checkpoints are there; --keep 2 leaves the last two."""
    return lambda: len(list(folder.glob("out/checkpoints/*.json"))) >= number


def assert_goes_on_to(folder, words, whole, **variables):
    """The next start goes on from a checkpoint, and ends with the bits of the run in `whole`."""
    said = finish(folder, words, **variables)
    assert "going on from" in said, said
    assert_same_bits(final_state(folder), final_state(whole))


def assert_a_restart_changes_no_bits(folder, words, stop_after):
    """A run that is stopped after a step, and one that is killed, end with the bits of one that nobody has disturbed."""
    whole, stopped, killed = (folder / name for name in ("whole", "stopped", "killed"))
    finish(whole, words)

    finish(stopped, [*words, "--max_steps", stop_after])
    assert_goes_on_to(stopped, words, whole)

    process = start(killed, words)
    wait_for(has_saved(killed, 2), process, "two checkpoints")
    process.send_signal(signal.SIGKILL)
    process.wait()
    for pid in processes_of(killed) if "local" in words else ():  # its nodes would train on to their end without it
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert_goes_on_to(killed, words, whole)
