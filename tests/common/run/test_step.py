"""What counts where a part of run.step() fails: the contract above it, in common/run/run.py."""

import json

import pytest

from tests.tools.jobs import ROOT, TINY, assert_same_bits, final_state, in_rehearsal, run_forked, run_job
from tests.tools.ranks import TWO, check_ledger, run_ranks

# A job in which something happens in the sixth step, the second of the second epoch.
RUN = """
import errno, os, signal, sys
sys.path.insert(0, {root!r})
from common.alive import heartbeat
from common.run import clock, losses, peers, run
from common.checkpoints import checkpoint, evidence, saver
from common.run.observers import files

def sixth(room, name, happens):
    usual, times = getattr(room, name), []
    def changed(*given, **how):
        times.append(name)
        return happens(usual, *given) if len(times) == 6 and os.environ.get("RANK", "1") == "1" else usual(*given, **how)
    setattr(room, name, changed)

def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

def save(self, state, about, *rest):
    in_the_background(self, state, about, *rest)
    if about["total_steps"] != 6:  # what fails must not meet the save before
        self.wait()

def leave(*_):  # when rank 0 has taken this step as well
    while open("out/ledger/rank_0.jsonl").read().count("step") < 6:
        pass
    os._exit(1)

write = checkpoint.write
in_the_background, saver.Saving.save = saver.Saving.save, save
peers.EXCHANGE_SECONDS = 0  # in every step
clock.LINE_SECONDS = 1000  # no line looks at the losses
{what}
exec(compile(open({job!r}).read(), {job!r}, "exec"), {{"__name__": "__main__", "__file__": {job!r}}})
"""
LEDGER = (
    "sixth(evidence.Evidence, 'note_step_counts', lambda usual, *given: (setattr(evidence, 'append', full), usual(*given)))"
)
LOSS = "sixth(losses.Losses, 'add', lambda usual, self, loss, *rest: usual(self, loss * float('nan'), *rest))"
LOSS_LATER = f"run.Run._losses_can_wait = lambda self: True; {LOSS}"  # as on a GPU, where the thread that writes looks at it
LOOKS_ON = "files.Files.stepped = lambda self, facts: None; sixth(files.Files, 'stepped', full)"
PEER = "sixth(peers.Agreement, 'exchange', leave)"
DISK = "checkpoint.write = lambda folder, state, about: (full if about['total_steps'] == 6 else write)(folder, state, about)"
KILLED = """
whole, copies = checkpoint.snapshot, []
def copy(tensor):
    copies.append(tensor)
    return os.kill(os.getpid(), signal.SIGKILL) if len(copies) > 20 else checkpoint._on_host(tensor)
def killed(_, self, state):
    print("in phase", heartbeat.of_this_process().read()[0], flush=True)  # by which a slow save is not taken for a hang
    whole(state, copy)
sixth(checkpoint.Snapshot, '__init__', killed)
"""
STOP = "sixth(losses.Losses, 'add', lambda usual, *given: (os.kill(os.getpid(), signal.SIGTERM), usual(*given)))"


def disturbed(folder, what, job, *options, code):
    """What the job said; then the number of samples in the last checkpoint, and steps, as the ledger has them, after it."""
    path, script = ROOT / "jobs" / f"{job}.py", folder / f"{job}.py"
    script.write_text(RUN.format(root=str(ROOT), what=what, job=str(path)))
    words = [*map(str, options), "--save_steps", "1", "--ledger", "true", "--output_dir", folder / "out"]
    done = run_forked([script, *words], folder, check=code)
    lines = [json.loads(line) for line in (folder / "out" / "ledger" / "rank_0.jsonl").open()]
    last = max(int(file.stem) for file in (folder / "out" / "checkpoints").glob("*.json"))
    return done.stdout + done.stderr, last, sum("step" in line for line in lines)


@pytest.mark.parametrize(
    "what, code, samples, steps, says",
    in_rehearsal([
        (LEDGER, 1, 80, 5, "error: the ledger cannot be written: No space left on device; last checkpoint "),
        (LOSS, 1, 80, 6, "error: the loss is nan at step 6"),
        (LOSS_LATER, 1, 80, 7, "error: the loss is nan at step 6"),
        (f"{LOSS_LATER}; {STOP}", 1, 80, 6, "error: the loss is nan at step 6"),
        (KILLED, -9, 80, 6, "epoch=1/2 steps=4\nin phase save"),
        (LOOKS_ON, 0, 128, 8, "warning: Files has failed, and the run goes on without it"),
        (DISK, 1, 80, 7, "error: a checkpoint could not be written: [Errno 28] No space left on device"),
        (STOP, 143, 96, 6, "stopped by SIGTERM; saved after step 6"),
    ], lambda row: row[0] in (LOSS, LOSS_LATER, LOOKS_ON)),
)  # fmt: skip
def test_the_next_start_takes_again_what_did_not_count(finished, tmp_path, what, code, samples, steps, says):
    said, last, taken = disturbed(tmp_path, what, "train", *TINY, code=code)
    assert all(words in said for words in says.split("\n")) and (last, taken) == (samples, steps), said
    run_job("train", tmp_path, *TINY, "--ledger", "true")
    assert_same_bits(final_state(tmp_path), final_state(finished[0]))
    check_ledger(tmp_path / "out")


def test_a_step_that_a_peer_has_not_agreed_to_is_taken_again(two_ranks, tmp_path):
    said, last, taken = disturbed(tmp_path, PEER, "train_ddp", *TWO, "--nproc_per_node", 2, code=1)
    assert "error: rank 1 " in said and (last, taken) == (80, 6), said
    run_ranks(tmp_path, *TWO)
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))
    check_ledger(tmp_path / "out")
