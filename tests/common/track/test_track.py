"""--track and launch track: one entry for all starts of a run, each row once, and no tracker that stops, slows or changes a training."""

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import types
import urllib.request
from pathlib import Path

import pytest

from common.machine.child import Child
from common.run.observers import tracker
from common.run.side_files import SideFiles
from common.track import follow, senders
from launch import track
from tests.common.elastic.test_elastic import Nodes
from tests.tools import observed
from tests.tools.jobs import PATIENCE, ROOT, TINY, assert_same_bits, command, environment, final_state, run_job, saved, wait_for
from tests.tools.objectstore import free_port
from tests.tools.packages import packages_of, python_program
from tests.tools.runs import ended, made_up

MLFLOW, WANDB, SWANLAB = "mlflow==3.17.2", "wandb==0.31.0", "swanlab==0.10.3"


class Recorded:
    """A tracker in this process."""

    def __init__(self, start, folder):
        self.has, self.of, self.fails = [], senders.describe_run(start, folder), False
        Recorded.made.append(self)

    def progress(self):
        return {}

    def log(self, rows, told):
        if Recorded.away:
            raise OSError("it is away")
        self.has += rows

    def picture(self, path, samples):
        self.has.append((samples, 0, {os.path.basename(path): 1}))

    def end(self, how, why):
        self.has.append((how, why))


@pytest.fixture
def recorded(monkeypatch):
    Recorded.made, Recorded.away = [], False
    monkeypatch.setitem(senders.TOOLS, "mlflow", Recorded)
    return Recorded


def samples_of(rows, name):
    return [row[0] for row in rows if len(row) == 3 and name in row[2]]


def test_each_row_is_sent_once_whatever_was_done_twice(tmp_path, recorded):
    run = made_up(tmp_path / "run", epochs=2)
    (again,) = [row for row in follow.rows(run, "speed.jsonl") if row["samples"] == 300]
    with open(run / "speed.jsonl", "a") as file:  # a start after a kill, and a line that was cut off
        file.write(json.dumps({**again, "loss": 0.25}) + '\n{"time": 18')
    one = follow.Follower(str(run), "mlflow", print)
    assert one.send() and one.send(is_last=True) and one.num_sent == 8 + 2
    (has,) = [made.has for made in recorded.made]
    assert samples_of(has, "train/loss") == [100, 200, 300, 400, 600, 700, 800, 900] and samples_of(has, "epoch") == [500, 1000]
    assert has[2][2]["train/loss"] == 0.25 and has[-1] == ("", "") and has[-2][2]["test/accuracy"] == pytest.approx(0.41)
    assert recorded.made[0].of[1]["epochs"] == "4" and recorded.made[0].of[2]["job"] == "train"
    made_up(run, epochs=3, event=[ended()])
    assert track.main([str(run)]) == track.main([str(run)]) == 0, "a later call, on another machine"
    assert samples_of(recorded.made[1].has, "epoch") == [1500] and recorded.made[2].has == [("finished", "--epochs 4")]
    assert "mistakes.png" in recorded.made[1].has[-2][2]
    made_up(run, epochs=1, run="another")
    assert follow.Follower(str(run), "mlflow", print).send() and samples_of(recorded.made[-1].has, "epoch") == [500]


@pytest.mark.parametrize("told", [5, [], None, {"run": 7}, {"run": "x", "steps": "many"}])
def test_what_a_tracker_or_a_record_cannot_have_been_told_does_not_count(tmp_path, recorded, monkeypatch, told):
    run = made_up(tmp_path / "run", epochs=1)
    known = {**told, "run": "r"} if isinstance(told, dict) else told
    monkeypatch.setattr(Recorded, "progress", lambda self: known)
    (run / "tracked-mlflow.json").write_text(json.dumps(told))
    assert follow.Follower(str(run), "mlflow", print).send()
    assert samples_of(recorded.made[0].has, "epoch") == [500]


@pytest.mark.parametrize("journal", ["", '{"event": "warning"}\n', "5\n"])
def test_a_run_that_has_not_begun_is_called_so(tmp_path, recorded, journal, capsys):
    (tmp_path / "journal.jsonl").write_text(journal)
    assert track.main([str(tmp_path)]) == 2 and not recorded.made
    said = capsys.readouterr()
    assert (
        "holds a run that has not begun: there is no start in its journal.jsonl" in said.err and "has all rows" not in said.out
    )


def test_a_run_that_branches_off_has_an_entry_of_its_own_and_one_that_goes_back_is_sent_again(tmp_path, recorded):
    run = made_up(tmp_path / "branch", epochs=2, branched=True, samples=400, goes_on_from="/other/checkpoints/000000000400.pt")
    assert (
        follow.Follower(str(run), "mlflow", print).send()
        and follow.entry_of({"run": "1", "samples": 400, "branched": True}) == "1-400"
    )
    assert json.loads((run / "tracked-mlflow.json").read_text())["run"] == "1-400"
    run = made_up(tmp_path / "back", epochs=2)
    assert follow.Follower(str(run), "mlflow", print).send()
    (first,) = [row for row in follow.rows(run, "journal.jsonl") if row["event"] == "start"]
    with open(run / "journal.jsonl", "a") as file:  # --resume PATH --overwrite true
        file.write(json.dumps({**first, "time": first["time"] + 300, "samples": 500, "branched": True}) + "\n")
    for _ in range(2):
        assert follow.Follower(str(run), "mlflow", print).send()
    (late,) = [row for row in follow.rows(run, "speed.jsonl") if row["samples"] == 900]
    with open(run / "speed.jsonl", "a") as file:
        file.write(json.dumps({**late, "samples": 1100, "time": first["time"] + 350}) + "\n")
    assert follow.Follower(str(run), "mlflow", print).send()
    with open(run / "journal.jsonl", "a") as file:  # the same command once more, after a kill: from its newest checkpoint on
        file.write(json.dumps({**first, "time": first["time"] + 400, "samples": 1000, "branched": True}) + "\n")
    assert follow.Follower(str(run), "mlflow", print).send()
    assert [samples_of(made.has, "epoch") for made in recorded.made[-5:]] == [[500, 1000], [1000], [], [], []]
    assert [samples_of(made.has, "train/loss") for made in recorded.made[-2:]] == [[1100], []]


def test_a_run_is_followed_until_a_look_after_its_end(tmp_path, recorded, monkeypatch):
    run, looks = made_up(tmp_path / "run", epochs=1), []

    def more(_):
        looks.append(1)
        made_up(run, epochs=1 + len(looks), event=[ended()] * (len(looks) == 2))

    monkeypatch.setattr(track.time, "sleep", more)
    assert track.main([str(run), "--follow", "true"]) == 0 and len(looks) == 3
    assert samples_of(recorded.made[0].has, "epoch") == [500, 1000, 1500, 2000]


class Library:
    """wandb or swanlab, as far as they are called: it keeps how it was begun."""

    Image = Settings = define_metric = log = finish = staticmethod(lambda *_, **__: None)

    def init(self, **how):
        self.begun, self.summary = how, {}
        return self


@pytest.mark.parametrize("tool, option, below", [("wandb", "dir", ""), ("swanlab", "log_dir", "swanlog")])
def test_what_a_tracker_writes_itself_stays(tool, option, below, tmp_path, monkeypatch):
    """In the folder of the run; of one in a bucket, whose files are here only for a while, in the folder of the command."""
    monkeypatch.setitem(sys.modules, tool, library := Library())
    for name in ("WANDB_DIR", "SWANLAB_LOG_DIR"):
        monkeypatch.setenv(name, "")  # so that it is taken away again at the end
        monkeypatch.delenv(name)
    monkeypatch.setattr(track, "fetch_files", lambda run, folder, wanted: made_up(Path(folder), epochs=1))
    monkeypatch.setattr(track.storage, "publish", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    for run, place in ((made_up(tmp_path / "run", epochs=1), tmp_path / "run"), ("s3://bucket/run", tmp_path)):
        assert track.main([str(run), "--to", tool]) == 0
        assert library.begun[option] == str(place / below)


def test_a_job_that_was_killed_has_failed_and_the_reason_of_its_parent_is_waited_for(tmp_path, recorded, monkeypatch):
    monkeypatch.setattr(follow, "PAUSE", 0)
    run = made_up(tmp_path / "run", epochs=1)
    noted = [ended("failed", "rank 1 was killed by SIGKILL")]
    for wait in (lambda *_: None, lambda *_: made_up(run, epochs=1, event=noted)):
        monkeypatch.setattr(follow, "wait_for_end", wait)
        ours, of_job = os.pipe()
        os.close(of_job)  # as the system does
        assert follow.follow(follow.Follower(str(run), "mlflow", print), os.fdopen(ours), os.getppid())
    ends = [made.has[-1] for made in recorded.made]
    assert ends == [("failed", "the process of the run has ended without a word"), ("failed", "rank 1 was killed by SIGKILL")]


def test_a_job_that_says_its_end_is_not_waited_for(tmp_path, recorded, monkeypatch):
    monkeypatch.setattr(follow, "wait_for_end", None)
    run = made_up(tmp_path / "run", epochs=1, event=[ended()])
    ours, of_job = os.pipe()
    os.write(of_job, b"end\n")
    assert follow.follow(follow.Follower(str(run), "mlflow", print), os.fdopen(ours), os.getppid())
    assert recorded.made[0].has[-1] == ("finished", "--epochs 4")
    os.close(of_job)


def test_a_run_that_goes_on_already_has_not_failed(tmp_path, recorded, monkeypatch):
    """The next start may note its beginning before the process that followed the last one sees that its job is gone."""
    monkeypatch.setattr(follow, "PAUSE", 0)
    run = made_up(tmp_path / "run", epochs=1)
    (first,) = [row for row in follow.rows(run, "journal.jsonl") if row["event"] == "start"]

    def another(_):
        with open(run / "journal.jsonl", "a") as file:
            file.write(json.dumps({**first, "time": first["time"] + 300}) + "\n")

    monkeypatch.setattr(follow, "wait_for_end", another)
    ours, of_job = os.pipe()
    os.close(of_job)
    assert follow.follow(follow.Follower(str(run), "mlflow", print), os.fdopen(ours), os.getppid())
    assert len(recorded.made[0].has[-1]) == 3, "rows, and no end"


def test_a_warning_that_nobody_hears_does_not_end_the_following(tmp_path, recorded):
    def closed(_):
        raise BrokenPipeError

    recorded.away = True
    follower = follow.Follower(str(made_up(tmp_path / "run", epochs=1)), "mlflow", closed)
    assert not follower.send()
    recorded.away = False
    assert follower.send() and follower.num_sent == 5


def test_a_tracker_that_is_away_is_one_warning_and_gets_all_later(tmp_path, recorded, capsys):
    run = made_up(tmp_path / "run", epochs=1)
    recorded.away, said = True, []
    one = follow.Follower(str(run), "mlflow", said.append)
    assert [one.send() for _ in range(3)] == [False] * 3
    assert said == [
        f"warning: mlflow takes no rows: it is away; the run goes on, and python -m launch track {run} --to mlflow sends them"
    ]
    assert track.main([str(run)]) == 1 and "error: mlflow has not taken all rows" in capsys.readouterr().err
    recorded.away = False
    assert one.send() and one.num_sent == 5


def test_what_a_run_and_a_tracker_lack_is_told(tmp_path, capsys):
    assert track.main([str(tmp_path)]) == 2 and "holds no run: give the output folder of a job" in capsys.readouterr().err
    done = run_job("train", tmp_path, *TINY, "--max_steps", 1, "--track", "mlflow,swanlab")
    for tool, package in (("mlflow", "mlflow-skinny"), ("swanlab", "swanlab")):
        assert (
            done.stdout.count(f"warning: {tool} takes no rows: pip install {package}; the run goes on, and python -m launch")
            == 1
        )
    done = run_job("train", tmp_path, *TINY, "--track", "mlfow", check=2)
    assert "argument --track: 'mlfow' is none of mlflow, wandb, swanlab" in done.stderr


def test_a_tracker_that_never_answers_is_left_at_the_end(tmp_path, monkeypatch, capsys):
    """The process that follows is stopped, as if its library did not return."""
    monkeypatch.setattr(tracker, "END_SECONDS", 0.2)
    started = []

    def stopped(*words, **how):
        started.append(Child(*words, **how))
        os.kill(started[0].pid, signal.SIGSTOP)
        return started[0]

    monkeypatch.setattr(tracker, "Child", stopped)
    files, facts = SideFiles(str(tmp_path)), observed.facts(tmp_path)
    one = tracker.Tracker(observed.options(tmp_path, track="mlflow"), None, files)
    one.began(facts, about={})
    one.closed(facts, outcome="finished", reason="", is_saved=True, last_good="")
    assert started[0].wait(PATIENCE) == -signal.SIGKILL
    lacks = f"python -m launch track {tmp_path} --to mlflow sends what it lacks"
    assert capsys.readouterr().out == f"warning: mlflow has not taken all rows within 0.2 s; {lacks}\n"


def test_mlflow_without_a_server_and_a_database_says_what_to_install_and_a_page_of_a_library_is_one_line(tmp_path, monkeypatch):
    run, said = made_up(tmp_path / "run", epochs=1), []

    def client():
        raise ValueError("Model registry functionality is unavailable")

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(senders.importlib.util, "find_spec", lambda name: None)

    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", types.SimpleNamespace(Param=None, RunTag=None))
    assert not follow.Follower(str(run), "mlflow", said.append).send()
    assert said == [
        "warning: mlflow takes no rows: set MLFLOW_TRACKING_URI, or for a local file pip install sqlalchemy alembic; the run goes on, and "
        f"python -m launch track {run} --to mlflow sends them"
    ]
    assert follow.root_cause(ValueError("a page " * 100)) == ("a page " * 15)[:100] + "..."
    outer = ValueError("API request to http://127.0.0.1:5000/api failed with exception HTTPConnectionPool(host='127.0.0.1')")
    outer.__cause__ = ConnectionRefusedError(111, "Connection refused")
    assert follow.root_cause(outer) == "[Errno 111] Connection refused"


# --- The trackers themselves ---


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory):
    with server_of(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


@contextlib.contextmanager
def server_of(folder):
    """A server of MLflow, and what a job needs to use it."""
    port = free_port()
    program = python_program("mlflow", MLFLOW)
    words = [program, "server", "--backend-store-uri", f"sqlite:///{folder}/db", "--artifacts-destination", str(folder / "artifacts"),
             "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]  # fmt: skip
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(list(map(str, words)), cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        server = Server(process, port, program)
        wait_for(server.answers, process, "an answer of the server")
        yield server
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Server:
    def __init__(self, process, port, program):
        self.process, self.url = process, f"http://127.0.0.1:{port}"
        self.env = {"MLFLOW_TRACKING_URI": self.url, "PYTHONPATH": packages_of(program), "MLFLOW_TRACKING_PASSWORD": "canary",
                    "MLFLOW_TRACKING_USERNAME": "user"}  # fmt: skip

    def answers(self):
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=1).status == 200
        except OSError:
            return False

    def ask(self, path, **body):
        request = urllib.request.Request(f"{self.url}/api/2.0/mlflow/{path}", json.dumps(body).encode() if body else None,
                                         {"Content-Type": "application/json"})  # fmt: skip
        return json.loads(urllib.request.urlopen(request, timeout=PATIENCE).read())

    def runs(self, folder):
        """Those of the run in this folder."""
        ids = {row["run"] for row in follow.rows(folder, "journal.jsonl") if row["event"] == "start"}
        experiments = [one["experiment_id"] for one in self.ask("experiments/search", max_results=100)["experiments"]]
        found = self.ask("runs/search", experiment_ids=experiments, max_results=100).get("runs", [])
        return [run for run in found if {"key": "anyrank.run", "value": min(ids)} in run["data"]["tags"]]

    def history(self, run, name):
        got = self.ask(f"metrics/get-history?run_id={run['info']['run_id']}&metric_key={urllib.request.quote(name, '')}")
        return [(int(row["step"]), row["value"]) for row in got.get("metrics", [])]


LONG = [*TINY, "--epochs", "6"]


@pytest.fixture(scope="module")
def untracked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untracked")
    run_job("train", folder, *LONG)
    return final_state(folder)


def started(folder, server, *options):
    words = [*command("train", *LONG, "--track", "mlflow", *options), "--output_dir", str(folder / "out")]
    with open(folder / "log", "a") as log:
        return subprocess.Popen(list(map(str, words)), cwd=folder, env=environment(**server.env), stdout=log, stderr=log)


@pytest.mark.rehearsal
def test_without_a_server_mlflow_has_a_file_in_the_folder_of_the_start(tmp_path):
    program = python_program("mlflow", MLFLOW)
    run_job("train", tmp_path, *TINY, "--track", "mlflow", env={"PYTHONPATH": packages_of(program)})
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        found = dict(database.execute("select key, max(step) from metrics group by key"))
    assert found["test/accuracy"] == 128 and found["train/loss"] > 64, found


@pytest.mark.rehearsal
def test_a_run_that_is_killed_twice_is_one_run_of_mlflow(tmp_path, mlflow, untracked):
    for samples in (64, 192):
        process = started(tmp_path, mlflow, "--save_steps", 1)
        wait_for(saved(tmp_path, samples), process, "so many steps")
        process.kill()
        process.wait()
        wait_for(lambda: [run["info"]["status"] for run in mlflow.runs(tmp_path / "out")] == ["FAILED"], None, "its end")
    assert started(tmp_path, mlflow).wait(PATIENCE) == 0
    out = tmp_path / "out"
    (run,) = mlflow.runs(out)
    assert mlflow.history(run, "epoch") == [(64 * epoch, epoch) for epoch in range(1, 7)]
    metrics = list(follow.rows(out, "metrics.jsonl"))
    assert [value for _, value in mlflow.history(run, "test/accuracy")] == [row["accuracy"] for row in metrics]
    steps = [step for step, _ in mlflow.history(run, "train/loss")]
    assert steps == sorted(set(steps)) and steps
    assert run["info"]["status"] == "FINISHED" and {"key": "ended", "value": "--epochs 6"} in run["data"]["tags"]
    assert {"key": "epochs", "value": "6"} in run["data"]["params"]
    files = mlflow.ask(f"artifacts/list?run_id={run['info']['run_id']}")["files"]
    assert [one["path"] for one in files] == ["curves.png", "mistakes.png"]
    assert_same_bits(final_state(tmp_path), untracked)
    assert_no_key(tmp_path)


def assert_no_key(folder):
    for path in folder.rglob("*"):
        assert not path.is_file() or b"canary" not in path.read_bytes(), path


@pytest.mark.rehearsal
def test_a_server_that_freezes_costs_the_training_nothing_and_gets_the_rest_later(tmp_path, mlflow, untracked):
    process = started(tmp_path, mlflow)
    wait_for(lambda: (tmp_path / "out" / "tracked-mlflow.json").exists(), process, "the first rows")
    os.killpg(mlflow.process.pid, signal.SIGSTOP)
    assert process.wait(PATIENCE) == 0
    log = (tmp_path / "log").read_text()
    assert log.count("warning: mlflow ") == 1 and "launch track" in log, log
    assert_same_bits(final_state(tmp_path), untracked)
    os.killpg(mlflow.process.pid, signal.SIGCONT)
    wait_for(mlflow.answers, None, "the server")
    words = [sys.executable, "-m", "launch", "track", str(tmp_path / "out")]
    done = subprocess.run(words, cwd=ROOT, env=environment(**mlflow.env), capture_output=True, text=True)
    assert done.returncode == 0 and re.search(r"^mlflow has all rows: \d+ were sent now$", done.stdout, re.M), done
    (run,) = mlflow.runs(tmp_path / "out")
    assert (
        mlflow.history(run, "epoch") == [(64 * epoch, epoch) for epoch in range(1, 7)] and run["info"]["status"] == "FINISHED"
    )


@pytest.mark.rehearsal
def test_an_elastic_job_whose_writer_is_lost_is_one_run_of_mlflow(tmp_path, mlflow):
    run = Nodes(tmp_path, 2, "--min_nodes", 1, "--track", "mlflow", env={0: mlflow.env, 1: mlflow.env})
    try:
        run.wait_for("epoch=2/12", 0)
        wait_for(lambda: (tmp_path / "node0" / "out" / "tracked-mlflow.json").exists(), run.running[0], "the first rows")
        run.kill(0)
        assert run.end(1) == [0]
    finally:
        run.close()
    (entry,) = mlflow.runs(tmp_path / "node1" / "out")
    assert [value for _, value in mlflow.history(entry, "epoch")] == list(range(1, 21))


READ = """
import glob, json, sys
from google.protobuf.json_format import MessageToDict
from swanlab.converter.wb.wbdatastore import WBDataStoreReader
from swanlab.proto.swanlab.record.v1 import record_pb2
from swanlab.sdk.internal.core_python.store import DataStoreReader
from wandb.proto import wandb_internal_pb2
found = {"wandb": [], "swanlab": []}
for path in sorted(glob.glob("wandb/offline-run-*/*.wandb")):
    reader = WBDataStoreReader()
    reader.open(path)
    while (content := reader.scan()) is not None:
        record = wandb_internal_pb2.Record.FromString(content)
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        found["wandb"] += [(row["samples"], name, value) for name, value in row.items()] if "samples" in row else []
for path in sorted(glob.glob("swanlog/*/*.swanlab")):
    reader = DataStoreReader()
    reader.open(path)
    for content in reader:
        if row := MessageToDict(record_pb2.Record.FromString(content)).get("scalar"):
            found["swanlab"].append((int(row["step"]), row["key"], row["value"]["number"]))
print(json.dumps(found))
"""


@pytest.mark.rehearsal
def test_wandb_and_swanlab_have_each_epoch_once_by_their_own_readers(tmp_path):
    paths = [packages_of(python_program(*one)) for one in (("wandb", WANDB), ("swanlab", SWANLAB))]
    offline = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "WANDB_API_KEY": "canary" * 8, "SWANLAB_API_KEY": "canary"}
    env = {**offline, "PYTHONPATH": ":".join(paths)}
    for epochs in (1, 2):  # two starts
        run_job("train_ddp", tmp_path, *TINY, "--epochs", epochs, "--nproc_per_node", 2, "--track", "wandb,swanlab", env=env)
    read = subprocess.run(
        [sys.executable, "-c", READ], cwd=tmp_path / "out", env=environment(**env), capture_output=True, text=True
    )
    accuracies = [row["accuracy"] for row in follow.rows(tmp_path / "out", "metrics.jsonl")]
    for tool, rows in json.loads(read.stdout).items():
        assert [(at, value) for at, name, value in rows if name == "epoch"] == [(64, 1), (128, 2)], tool
        assert [value for _, name, value in rows if name == "test/accuracy"] == pytest.approx(accuracies), tool
        assert [at for at, name, _ in rows if name == "train/loss"], tool
    assert_no_key(tmp_path)
