"""A signal to stop is noted by its handler, and obeyed between two batches or while one is waited for; the next start goes on."""

import argparse
import ast
import contextlib
import os
import re
import signal
import sys
import types

import pytest
import torch

from common import arguments, moments
from common.alive.stops import STOPS, Interrupted
from common.checkpoints.position import Position
from common.checkpoints.saver import Saving
from common.errors import STOP_SIGNALS
from common.ranks import collectives
from common.run import Run
from common.run.due import Due
from datasets import cifar10, loader, processes
from datasets.sampler import EpochSampler
from tests.tools.jobs import (
    PATIENCE,
    ROOT,
    TINY,
    Popen,
    assert_same_bits,
    environment,
    final_state,
    in_rehearsal,
    run_forked,
    run_job,
    wait_for,
)
from tests.tools.ranks import TWO, check_ledger, run_ranks

# A job whose data in {where} ("training" or "evaluation") are never there from a batch on, on this rank.
SILENT = """
import os, sys
sys.path.insert(0, {root!r})
from common.alive import supervisor
from datasets.sampler import InOrder
from torch.utils.data import DataLoader

supervisor.GRACE_SECONDS = {grace}
evaluates, made = {where!r} == "evaluation", DataLoader.__init__

class Silent:
    def __init__(self, data_set):
        self._data_set, self._left = data_set, 0 if evaluates else 1

    def __getitem__(self, place):
        if not self._left:
            open({mark!r}, "w").close()
            os.read(os.pipe()[0], 1)
        self._left -= 1
        return self._data_set[place]

def changed(self, data_set, sampler, **how):
    silent = isinstance(sampler._sampler, InOrder) == evaluates and os.environ.get("RANK", "0") == {rank!r}
    made(self, Silent(data_set) if silent else data_set, sampler=sampler, **how)

DataLoader.__init__ = changed
exec(compile(open({job!r}).read(), {job!r}, "exec"), {{"__name__": "__main__", "__file__": {job!r}}})
"""


def stopped_in_silence(folder, where, rank, steps, job, *options, grace=PATIENCE):
    """The log of that job, told to stop when there are no data any more, which is after so many steps."""
    script, mark = folder / f"{job}.py", folder / "silent"
    path = str(ROOT / "jobs" / script.name)
    script.write_text(SILENT.format(root=str(ROOT), where=where, mark=str(mark), rank=str(rank), job=path, grace=grace))
    with open(folder / "log", "w") as log:
        words = [sys.executable, script, *options, "--ledger", "true", "--output_dir", folder / "out"]
        process = Popen(words, cwd=folder, env=environment(), stdout=log, stderr=log)
    wait_for(mark.exists, process, "the batch that is never there")
    ledger = folder / "out" / "ledger" / "rank_0.jsonl"
    wait_for(lambda: ledger.exists() and ledger.read_text().count("ids") == steps, process, "the last step")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 143, (folder / "log").read_text()
    said = (folder / "log").read_text()
    assert "Traceback" not in said and "error:" not in said, said
    return said


SILENCES = [("training", 0), ("training", 2), ("evaluation", 0)]


@pytest.mark.parametrize("where, workers", in_rehearsal(SILENCES, lambda row: row == ("training", 0)))
def test_a_job_saves_although_its_data_are_silent(finished, tmp_path, where, workers):
    steps = 4 if where == "evaluation" else max(workers, 1)  # each process gives one batch
    said = stopped_in_silence(tmp_path, where, 0, steps, "train", *TINY, "--workers", workers)
    assert f"stopped by SIGTERM; saved after step {steps}:" in said
    again = run_job("train", tmp_path, *TINY)
    assert "going on from" in again.stdout and "no weight of the network has changed" not in again.stdout
    assert_same_bits(final_state(tmp_path), final_state(finished[0]))


@pytest.mark.parametrize("rank", [0, 1])  # rank 0 waits for its own data, or for the scores of the other
def test_in_an_evaluation_rank_0_saves_for_all(two_ranks, tmp_path, rank):
    said = stopped_in_silence(tmp_path, "evaluation", rank, 4, "train_ddp", *TWO, "--nproc_per_node", 2)
    assert "stopped by SIGTERM; saved after step 4" in said and "not stopped within" not in said
    run_ranks(tmp_path, *TWO)
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))
    check_ledger(tmp_path / "out")


def test_where_the_ranks_cannot_agree_any_more_the_log_says_who_was_late(two_ranks, tmp_path):
    said = stopped_in_silence(tmp_path, "training", 1, 1, "train_ddp", *TWO, "--nproc_per_node", 2, grace=1)
    late = r"not stopped within 1 s: rank 0 in phase \w+, rank 1 in phase data; the run goes on from its last checkpoint"
    assert re.search(late, said) and "saved after" not in said
    run_ranks(tmp_path, *TWO)
    assert_same_bits(final_state(tmp_path), final_state(two_ranks[0]))
    check_ledger(tmp_path / "out")


def test_a_step_that_has_begun_is_counted_before_a_stop_is_obeyed(finished, tmp_path):
    """Even where its code evaluates: the weights have changed already, and the position has not."""
    path, text = tmp_path / "train.py", (ROOT / "jobs" / "train.py").read_text()
    stop = "optimizer.step(); run.total_steps == 2 and os.kill(os.getpid(), 15); "
    stop += "evaluate(run.model, test_loader, test_set.classes); model.train()"
    assert text.count("optimizer.step()\n") == 1
    path.write_text(text.replace("optimizer.step()\n", stop + "\n").replace("import torch\n", "import os\nimport torch\n", 1))
    done = run_forked([path, *TINY, "--output_dir", tmp_path / "out"], tmp_path, {"PYTHONPATH": str(ROOT)}, check=143)
    assert "stopped by SIGTERM; saved after step 3:" in done.stdout
    run_job("train", tmp_path, *TINY)
    assert_same_bits(final_state(tmp_path), final_state(finished[0]))


# --- In one process ----------------------------------------------------------------------------------------------------


@pytest.fixture
def stops():
    """STOPS of a process that may end alone, and the signals that it has obeyed, each with the names of the functions it was in."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    obeyed = []

    def obey(number):
        frame, names = sys._getframe(1), []
        while frame:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        obeyed.append((number, names))
        sys.exit(STOP_SIGNALS[number])

    STOPS.listen(obey)
    STOPS.may_end, STOPS.obeyed = True, obeyed
    yield STOPS
    for number, handler in handlers.items():
        signal.signal(number, handler)


def told(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_in_the_midst_of_a_wait_is_obeyed_outside_the_handler(stops, number):
    with pytest.raises(SystemExit) as ended:
        stops.wait_for(lambda: told(number) or pytest.fail("the wait has gone on"))
    ((obeyed, names),) = stops.obeyed
    assert obeyed == number and ended.value.code == STOP_SIGNALS[number] and "note" not in names


def test_a_signal_in_a_step_is_obeyed_before_the_next_batch_is_asked_for(stops):
    given = []
    with pytest.raises(SystemExit):
        for batch in stops.each(given.append(number) or number for number in range(1, 9)):
            if batch == 3:
                told()
                given.append("the step goes on")
    assert given == [1, 2, 3, "the step goes on"] and len(stops.obeyed) == 1


def test_who_trains_with_others_only_notes_it(stops):
    stops.may_end = False
    assert stops.wait_for(lambda: told() or "a batch") == "a batch" and stops.noted == signal.SIGTERM
    assert list(stops.each([1, 2])) == [1, 2] and not stops.obeyed
    stops.may_end = True  # in the evaluation
    with pytest.raises(SystemExit):
        next(stops.each([1, 2]))


def test_between_an_evaluation_and_the_end_of_its_epoch_a_signal_is_only_noted(stops):
    due = Due(argparse.Namespace(save_steps=None), types.SimpleNamespace(size=1), types.SimpleNamespace(writes=True))
    due.allow_stop(is_evaluating=True)
    due.end_evaluation()
    assert stops.wait_for(lambda: told() or "the metrics") == "the metrics" and not due.is_evaluating


def test_a_signal_that_is_not_meant_for_this_process_is_none(stops):
    meant = []
    stops.listen(stops._obey, counts=lambda: meant)
    assert stops.wait_for(lambda: told() or "a batch") == "a batch" and not stops.noted
    meant.append(True)
    with pytest.raises(SystemExit):
        stops.wait_for(told)


def test_code_that_makes_another_error_of_it_stops_nothing(stops):
    def reads():
        try:
            told()
        except BaseException as error:
            raise RuntimeError("a file could not be read") from error

    with pytest.raises(SystemExit):
        stops.wait_for(reads)


def test_an_error_without_a_signal_is_an_error(stops):
    with pytest.raises(ZeroDivisionError):
        stops.wait_for(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(stops.each(1 / number for number in (1, 0)))
    assert not stops.obeyed


def test_a_second_signal_does_not_disturb_the_saving(stops):
    saved = []
    stops.listen(lambda number: told(signal.SIGINT) or saved.append(number))
    stops.wait_for(told)
    assert saved == [signal.SIGTERM] and stops.noted == signal.SIGTERM


@pytest.mark.parametrize("number", [0, signal.SIGTERM])
def test_a_stop_that_comes_when_all_epochs_are_done_hurries_the_publishing(tmp_path, monkeypatch, number):
    """It is too late to stop anything, and the platform kills the job in half a minute."""
    hurries = []
    monkeypatch.setattr(Saving, "finish_publishing", lambda _, in_a_hurry: hurries.append(in_a_hurry))
    args = arguments.parse(cifar10.parser(""), ["--output_dir", str(tmp_path)], {})
    run = Run(args, EpochSampler(8, 1, seed=0), torch.nn.Linear(1, 1), prof=1)  # a trial, which writes no files
    run.position = Position(epoch=args.epochs)
    run.resume()
    STOPS.noted = number
    assert list(run.epochs()) == [] and hurries == [bool(number)]


def test_a_wait_for_the_other_ranks_ends_although_the_signal_was_swallowed(stops, monkeypatch):
    """And then so does the process, without waiting for the threads that still wait for the others."""

    class Never:
        def is_completed(self):
            return turns.append(1) or len(turns) > 3

    turns, ended = [], []

    def waits():
        with contextlib.suppress(Interrupted):
            told()
        collectives._wait_for(Never())
        return "what the others never sent"

    monkeypatch.setattr(moments, "_listeners", [])
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(SystemExit) as stop:
        stops.wait_for(waits)
    moments.announce("leaving", stop.value.code)
    assert len(turns) == 1 and ended == [143]


def test_a_second_signal_ends_a_wait_that_has_swallowed_the_first(stops):
    def reads():
        with contextlib.suppress(Interrupted):
            told()
        told(signal.SIGINT)
        pytest.fail("the wait has gone on")

    with pytest.raises(SystemExit) as ended:
        stops.wait_for(reads)
    assert ended.value.code == 143 and len(stops.obeyed) == 1


def test_a_wait_within_a_wait_obeys_once(stops):
    with pytest.raises(SystemExit):
        next(stops.each(stops.each(told() for _ in range(2))))
    assert len(stops.obeyed) == 1


def test_a_thread_that_makes_batches_ahead_and_gets_no_data_holds_up_no_stop(stops):
    silence, _ = os.pipe()

    def batches():
        yield "a batch"
        told()
        os.read(silence, 1)

    with pytest.raises(SystemExit):
        list(stops.each(loader.read_ahead(batches(), 2)))
    assert len(stops.obeyed) == 1


def test_loader_processes_that_hang_are_waited_for_until_a_stop_is_noted(stops):
    class Process:
        def join(self, timeout):
            waited.append(timeout)

    waited = []
    processes._join(Process(), 0.1, timeout=5)
    stops.noted = signal.SIGTERM
    processes._join(Process(), 0.1, timeout=5)
    assert waited == [5, 0.1]


def test_the_handler_calls_nothing_that_saves():
    """And there is no other for these signals in a run."""
    tree = ast.parse((ROOT / "common" / "alive" / "stops.py").read_text())
    names = ("note", "interrupt", "_due")
    handler = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    nodes = [node for function in handler for node in ast.walk(function)]
    called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    assert len(handler) == 3 and called == {"self._counts", "self.interrupt", "self._due"}
    assert [ast.unparse(node.exc) for node in nodes if isinstance(node, ast.Raise)] == [Interrupted.__name__]
    assert not [path for path in (ROOT / "common" / "run").rglob("*.py") if "signal.signal(" in path.read_text()]
