"""Who looks on at a run cannot change it: it ends with the same bits without any of them, and where one fails."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common.checkpoints.position import Position
from common.run.observers import Observer, Observers, console, observers_of_rank
from common.run.observers.files import Files
from common.run.observers.journal import Journal, earlier_rate
from common.run.observers.report import Report
from common.run.observers.tensorboard import TensorBoard
from common.run.scores import Scores
from common.run.side_files import SideFiles
from tests.tools import observed
from tests.tools.jobs import ROOT, TINY, assert_same_bits, command, final_state, in_rehearsal, run_forked

# A job in which the observer argv[2] is left out, fails at whatever it is told, or is reached by a signal.
RUN = """
import os, runpy, signal, sys
from common.run import observers

how, name, *sys.argv = sys.argv[1:]
of_a_rank = observers.observers_of_rank

def fail(*_, **__):
    raise RuntimeError("as a test wants it")

def changed(*rank):
    kinds = of_a_rank(*rank)
    (kind,) = [kind for kind in kinds if kind.__name__ == name]
    if how == "left out":
        return [other for other in kinds if other is not kind]
    if how == "signal":
        kind.epoch_began = lambda self, facts: facts.position.epoch and os.kill(os.getpid(), signal.SIGTERM)
        return kinds
    for moment in [moment for moment in vars(kind) if not moment.startswith("_")]:
        setattr(kind, moment, fail)
    return kinds

observers.observers_of_rank = changed
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def names():
    args = observed.options(ROOT, profile=True)
    return [kind.__name__ for kind in observers_of_rank(args, shows=True, writes=True, may_write=True)]


def trained(folder, how, name, job, options, code=0):
    (folder / "run.py").write_text(RUN)
    words = [folder / "run.py", how, name, *command(job, *options, "--output_dir", folder / "out")[1:]]
    done = run_forked(words, folder, {"PYTHONPATH": str(ROOT)}, check=code)
    return done, {what: state for what, state in final_state(folder).items() if what != "metrics"}


@pytest.fixture
def undisturbed(untouched):
    """The state at the end of this job, with these options."""
    return lambda job, options: without_metrics(untouched(job, *options)[0])


def without_metrics(folder):
    return {what: state for what, state in final_state(folder).items() if what != "metrics"}


def of(name):
    return "train", [*TINY, "--epochs", 6, "--profile", "true"] if name == "Trace" else TINY


@pytest.mark.parametrize("name", in_rehearsal(names(), lambda name: name != "Report"))
def test_without_an_observer_the_training_is_the_same(tmp_path, undisturbed, name):
    _done, state = trained(tmp_path, "left out", name, *of(name))
    assert_same_bits(state, undisturbed(*of(name)))


@pytest.mark.parametrize("name", in_rehearsal(names(), lambda name: name not in ("Console", "Journal")))
def test_where_an_observer_fails_the_training_goes_on_with_one_warning(tmp_path, undisturbed, name):
    done, state = trained(tmp_path, "fails", name, *of(name))
    assert done.stdout.count("as a test wants it") == 1, done.stdout
    assert f"warning: {name} has failed, and the run goes on without it: RuntimeError: as a test wants it\n" in done.stdout
    assert_same_bits(state, undisturbed(*of(name)))


def test_a_signal_that_reaches_an_observer_is_obeyed_when_all_of_them_have_been_told(tmp_path, undisturbed):
    done, _state = trained(tmp_path, "signal", "Console", *of("Console"), code=143)
    assert "stopped by SIGTERM; saved after step 4: start again to go on" in done.stdout and "has failed" not in done.stdout
    run_forked(command("train", *TINY, "--output_dir", tmp_path / "out")[1:], tmp_path)
    assert_same_bits(without_metrics(tmp_path), undisturbed(*of("Console")))


class Hears(Observer):
    def __init__(self, heard):
        self._heard = heard

    def log_due(self, fact, **_):
        self._heard.append(fact)

    ended = log_due


class Fails(Observer):
    def log_due(self, fact, **_):
        raise OSError(28, "no space left")

    def saved(self, fact, **_):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")  # by torch's handler, wherever we are

    def failed(self, fact, error):
        raise OSError(28, "no space left")


def test_the_curves_have_the_loss_of_the_validation_beside_that_of_the_training(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn = []
    monkeypatch.setattr(figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    facts = observed.facts(tmp_path)
    facts.results.history[:] = [{"epoch": epoch, "train_loss": 2.0, "loss": 2.1, "accuracy": 0.5} for epoch in (1, 2)]
    observed.observer(Files, tmp_path, shows=True, writes=True).ended(facts)
    lines = {axes.get_title(): [line.get_label() for line in axes.lines] for axes in drawn[0].axes}
    assert lines == {"loss": ["training", "validation"], "accuracy": ["accuracy"]}


def told(*present):
    observers = Observers(observed.options(ROOT), None, SideFiles("/none", shows=True, writes=False), may_write=False)
    observers._active = list(present)
    return observers


def test_the_others_are_told_when_one_fails_and_that_one_is_told_nothing_more(capsys):
    observers = told(Fails(), Hears(heard := []))
    for moment, fact in (
        (Observer.log_due, 1),
        (Observer.epoch_began, 2),
        (Observer.log_due, 3),
        (Observer.ended, 4),
        (Observer.epoch_began, 5),
    ):
        observers.notify(moment, fact)
    warning = "warning: Fails has failed, and the run goes on without it: OSError: [Errno 28] no space left\n"
    assert heard == [1, 3, 4] and capsys.readouterr().out == warning


def test_what_a_dead_loader_process_raises_in_an_observer_is_not_its_failure():
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        told(Fails()).notify(Observer.saved, 5)


def test_an_observer_that_fails_while_the_job_does_says_nothing_and_the_others_are_told(tmp_path, capsys):
    observers = told(Fails(), journal := observed.observer(Journal, tmp_path))
    journal.began(facts := observed.facts(tmp_path), about={})
    observers.notify(Observer.epoch_began, facts)
    observers.failure(ValueError("of the job"))
    assert not any(capsys.readouterr())
    assert [json.loads(line).get("why") for line in (tmp_path / "journal.jsonl").open()] == [None, "ValueError: of the job"]


def test_the_failure_of_an_observer_is_said_also_by_a_rank_that_shows_nothing(capsys):
    observers = told(Fails())
    observers._side_files.shows = False
    observers.notify(Observer.log_due, 1)
    assert "warning: Fails has failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "shows, writes, may_write, there",
    [
        (False, False, False, set()),
        (True, False, False, {"Console"}),  # a trial
        (True, True, True, {*names()}),
        (False, False, True, {*names()} - {"Trace"}),  # in an elastic job
    ],
)
def test_which_observers_a_rank_has(shows, writes, may_write, there):
    args = observed.options(ROOT, profile=True)
    assert {kind.__name__ for kind in observers_of_rank(args, shows, writes, may_write)} == there


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_folders_may_be_relative_and_links(tmp_path, monkeypatch, elsewhere):
    """Those of TensorBoard may be elsewhere, as on some platforms."""
    monkeypatch.chdir(tmp_path)
    args = observed.options(Path("out"))
    if elsewhere:
        (tmp_path / "a" / "b").mkdir(parents=True)
        (tmp_path / "out").symlink_to(tmp_path / "a" / "b")
        args.tensorboard_dir = "events"
    TensorBoard(args, None, SideFiles("out")).epoch_ended(observed.facts(tmp_path), metrics={"accuracy": 0.5})
    Files(args, None, SideFiles("out")).began(observed.facts(tmp_path), about={})
    assert (tmp_path / "out" / "state.json").exists()
    assert [path.name.split(".tfevents")[0] for path in (tmp_path / args.tensorboard_dir).iterdir()] == ["events.out"]
    assert {path.name for path in tmp_path.iterdir()} == ({"out", "a", "events"} if elsewhere else {"out"})


def test_no_word_of_the_curves_is_cut_off(tmp_path):
    """The edge of the picture is white all around."""
    facts = observed.facts(tmp_path)
    facts.results.history += [{"epoch": epoch, "train_loss": 2.5 / epoch, "accuracy": epoch / 9} for epoch in (1, 2, 3)]
    observed.observer(Files, tmp_path).draw_curves(facts)
    with Image.open(tmp_path / "curves.png") as picture:
        pixels = np.asarray(picture.convert("L"))
    assert all((edge == 255).all() for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]))


# --- Where the one that wrote is lost ---------------------------------------------------------------------------------------


def test_a_rank_that_takes_over_writes_what_came_since_its_own_last_line(tmp_path):
    journal = observed.observer(Journal, tmp_path, shows=False, writes=False)
    journal.began(observed.facts(tmp_path, Position()), about={})
    journal.nodes_changed(observed.facts(tmp_path), news="node 2 is lost", ranks=2, pause=1.0)
    journal.log_due(observed.facts(tmp_path), **observed.LINE)
    assert not list(tmp_path.iterdir())
    journal._side_files.writes = journal._side_files.shows = True
    journal.began(observed.facts(tmp_path), about={"goes_on_from": "the state of the other nodes"})
    after = Position(samples_seen=896, total_steps=7, consumed=896)
    journal.log_due(observed.facts(tmp_path, after, seconds=1.5), **observed.LINE)
    (row,) = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    assert (row["images"], row["compute"], row["epoch"]) == (256, 0.5, 1)
    events = [json.loads(line)["event"] for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert events == ["nodes", "start"]


def test_its_report_has_the_scores_of_the_last_evaluation_and_its_console_the_whole_epoch(tmp_path, capsys, at):
    side_files, now = SideFiles(str(tmp_path), shows=False, writes=False), at([0.0], console)
    report, shown = (kind(observed.options(tmp_path), None, side_files) for kind in (Report, console.Console))
    scores = Scores(["a", "b"], torch.device("cpu"))
    scores.add(torch.eye(2), torch.tensor([0, 1]), torch.arange(2))
    report.epoch_ended(observed.facts(tmp_path), **{**observed.EPOCH, "scores": scores.all_reduce()})
    shown.epoch_began(observed.facts(tmp_path))
    report.ended(observed.facts(tmp_path))
    assert not list(tmp_path.iterdir())
    now[0], side_files.writes, side_files.shows = 7.0, True, True
    report.ended(observed.facts(tmp_path))
    assert (tmp_path / "report.json").exists()
    shown.epoch_ended(observed.facts(tmp_path, Position(epoch=1)), **observed.EPOCH)
    assert " seconds=7.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "rate"),
    [
        ("", None),
        ('{"images_per_s": 10}\n', 10),
        ('{"images_per_s": 10}\n{"images_per_s": 30}\n{"images_per_s": 20}\n', 20),
        ('{"images_per_s": 10}\n{"images_per_s": 30}\n{"images_per', 20),
        ('5\n[1]\nnull\n{"images_per_s": "x"}\n{"images_per_s": null}\n{"images_per_s": 10}\n{"loss": 1}\n', 10),
        ("x" * (1 << 14) + '\n{"images_per_s": 10}\n', 10),
    ],
    ids=["none", "one", "three", "torn", "damaged", "long"],
)
def test_the_rate_of_the_last_start_is_that_of_all_whole_rows(tmp_path, content, rate):
    (tmp_path / "speed.jsonl").write_text(content)
    assert earlier_rate(str(tmp_path)) == rate


TWO_RUNS = """
import torch
from common import arguments, progress
from common.run import Run
from common.job import run_job
from datasets.loader import SampleLoader
from datasets.sampler import EpochSampler

def train(name):
    parser = arguments.general_parser("", data="is not used", workers=0)
    args = arguments.parse(parser, ["--output_dir", name, "--epochs", "1", "--enable_gpu", "false"])
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data_set = torch.utils.data.TensorDataset(torch.ones(8, 2))
    sampler = EpochSampler(8, 4, seed=0)
    run = Run(args, sampler, model, optimizer=optimizer)
    run.resume()
    for _ in run.epochs():
        for images, in run.steps(SampleLoader(data_set, sampler, run.device)):
            loss = model(images).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss)
        run.end_epoch(accuracy=0.5)
        if name == "first":
            break
    progress.say(f"warning: {name} is over")

def main():
    train("first")
    train("second")
    raise ValueError("after both")

run_job(main)
"""


def test_two_runs_of_one_process_do_not_meet(tmp_path):
    """As in a notebook: what the second one says is not in the journal of the first, and neither is how it ends."""
    (tmp_path / "both.py").write_text(TWO_RUNS)
    done = run_forked([tmp_path / "both.py"], tmp_path, {"PYTHONPATH": str(ROOT)}, check=1)
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == ["error: ValueError: after both"]
    first = (tmp_path / "first" / "journal.jsonl").read_text()
    second = (tmp_path / "second" / "journal.jsonl").read_text()
    assert len([*(tmp_path / "first" / "checkpoints").glob("*.pt")]) == 1, "of the epoch after which its loop was left"
    assert not [*(tmp_path / "first" / "checkpoints").glob(".attempt*")]
    assert "first is over" in first and "second is over" not in first and "after both" not in first
    assert "second is over" in second and "first is over" not in second and "after both" in second
