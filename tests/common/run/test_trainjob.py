"""What kubectl get trainjob shows of a run: the reports to a controller of the test, over TLS, as its interface takes them."""

import datetime
import http.server
import json
import threading

import pytest

from common.checkpoints.position import Position
from common.run.observers import trainjob
from tests.tools import observed
from tests.tools.certificate import certified
from tests.tools.jobs import ROOT, TINY, assert_same_bits, command, final_state, in_rehearsal, run_forked

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/run-7/status"


class Controller(http.server.ThreadingHTTPServer):
    """Keeps what it is sent; `codes`: those of its answers, of which the last stays."""

    def __init__(self, context):
        self.asked, self.codes = [], [200]
        super().__init__(("127.0.0.1", 0), ControllerHandler)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class ControllerHandler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers["Authorization"], json.loads(body)))
        codes = self.server.codes
        self.send_response(codes.pop(0) if len(codes) > 1 else codes[0])
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def controller(tmp_path):
    certificate, context = certified(tmp_path, "IP:127.0.0.1")
    (tmp_path / "token").write_text("a-token\n")
    server = Controller(context)
    server.env = {
        "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{server.server_port}{PATH}",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(certificate), "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
    }  # fmt: skip
    yield server
    server.shutdown()
    server.server_close()


def train(folder, env, job="train", *more):
    folder.mkdir()
    return run_forked(command(job, *TINY, *more, "--output_dir", folder / "out")[1:], folder, env)


def require_valid(status):
    """By the types and the marks in pkg/apis/trainer/v1alpha1/trainjob_types.go."""
    assert set(status) <= {"progressPercentage", "estimatedRemainingSeconds", "metrics", "lastUpdatedTime"}
    assert type(status["progressPercentage"]) is int and 0 <= status["progressPercentage"] <= 100
    assert type(status.get("estimatedRemainingSeconds", 0)) is int and status.get("estimatedRemainingSeconds", 0) >= 0
    assert datetime.datetime.fromisoformat(status["lastUpdatedTime"]).tzinfo
    assert len(status["metrics"]) <= 256
    for metric in status["metrics"]:
        assert set(metric) == {"name", "value"} and all(type(text) is str and 1 <= len(text) <= 64 for text in metric.values())


@pytest.mark.parametrize("job", in_rehearsal(["train", "train_ddp"], lambda job: job == "train"))
def test_a_run_is_reported_from_its_beginning_to_its_end(job, controller, tmp_path):
    ranks = [] if job == "train" else ["--nproc_per_node", 2]
    done = train(tmp_path / "run", controller.env, job, *ranks)
    assert {(path, token) for path, token, _ in controller.asked} == {(PATH, "Bearer a-token")}
    reports = [body["trainerStatus"] for _, _, body in controller.asked]
    for report in reports:
        require_valid(report)
    assert reports[0]["progressPercentage"] == 0 and "does not take" not in done.stdout
    percents = [report["progressPercentage"] for report in reports]
    assert percents == sorted(percents) and percents[-1] == 100 and reports[-1]["estimatedRemainingSeconds"] == 0
    last = {metric["name"]: float(metric["value"]) for metric in reports[-1]["metrics"]}
    row = json.loads((tmp_path / "run" / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["epoch"] == 2 and last["accuracy"] == pytest.approx(row["accuracy"], rel=1e-5)


def test_a_controller_that_refuses_is_said_once_and_changes_nothing(controller, finished, tmp_path):
    controller.codes = [403]
    done = train(tmp_path / "refused", controller.env)
    assert done.stdout.count("warning: the TrainJob's controller does not take this run's progress: HTTP Error 403") == 1
    assert len(controller.asked) >= 2
    assert_same_bits(final_state(tmp_path / "refused")["model"], final_state(finished[0])["model"])


def test_numbers_that_are_none_are_left_out_and_no_run_is_beyond_its_end(tmp_path):
    observer = observed.observer(trainjob.TrainJob, tmp_path, shows=True, writes=False)
    facts = observed.facts(tmp_path)
    observer.log_due(facts, **{**observed.LINE, "seconds_left": float("inf")})
    observer.epoch_ended(facts, **{**observed.EPOCH, "metrics": {"accuracy": 0.5, "grade": "high", "bad": float("nan")}})
    names = {metric["name"] for metric in observer._status["metrics"]}
    assert names == {"epoch", "step", "train_loss", "lr", "accuracy"} and "estimatedRemainingSeconds" not in observer._status
    assert [trainjob.percent(observed.facts(tmp_path, Position(epoch=epoch))) for epoch in (0, 1, 2, 5)] == [0, 50, 100, 100]


def test_the_token_is_read_anew_for_each_report(controller, tmp_path, monkeypatch):
    for name, value in controller.env.items():
        monkeypatch.setenv(name, value)
    trainjob.post({})
    (tmp_path / "token").write_text("another")
    trainjob.post({})
    assert [token for _, token, _ in controller.asked] == ["Bearer a-token", "Bearer another"]


def test_the_address_is_where_the_page_says_that_it_comes_from():
    assert "TrainJobStatus" in (ROOT / "docs" / "platforms.md").read_text()
    assert tuple(f"KUBEFLOW_TRAINER_SERVER_{what}" for what in ("URL", "CA_CERT", "TOKEN")) == (
        trainjob.URL,
        trainjob.CA,
        trainjob.TOKEN,
    )
