"""Report percent, seconds left and metrics to the controller of a TrainJob:
kubectl get trainjob NAME -o yaml has them.

A cluster with the gate TrainJobStatus (Kubeflow Trainer 2.2, KEP-2779) sets the variables below in the pods
of the job. Each report replaces the one before, so it is whole. It is sent beside the training, which waits
for it only at the end of the run.
"""

import argparse
import datetime
import http.client
import json
import math
import os
import ssl
import threading
import urllib.request
from pathlib import Path
from typing import Any, Optional

import torch

from common.errors import one_line
from common.run.observers.observer import Facts, Observer
from common.run.side_files import SideFiles

URL = "KUBEFLOW_TRAINER_SERVER_URL"
CA = "KUBEFLOW_TRAINER_SERVER_CA_CERT"  # a path
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # a path
PAUSE_SECONDS = 5  # between two reports, as the controller asks
PATIENCE_SECONDS = 5  # with an answer, and with the last report at the end of a run
MOST_METRICS = 256  # that the controller takes
LONGEST_NAME = 64  # letters of a metric's name that the controller takes


class TrainJob(Observer):
    def __init__(self, _args: argparse.Namespace, _device: torch.device, side_files: SideFiles):
        self._side_files = side_files
        self._status: dict[str, Any] = {}
        self._metrics: dict[str, float] = {}
        self._is_over = threading.Event()
        self._reporter: Optional[threading.Thread] = None
        self._is_refused = False

    def began(self, facts: Facts, **_: object) -> None:
        self._update_status(facts, None)
        if self._side_files.writes and self._reporter is None:
            self._reporter = threading.Thread(
                target=self._report, name="the progress of the TrainJob", daemon=True
            )
            self._reporter.start()

    def log_due(
        self, facts: Facts, loss: float, lr: float, seconds_left: Optional[float], **_: object
    ) -> None:
        self._metrics.update(train_loss=loss, lr=lr)
        self._update_status(facts, seconds_left)

    def epoch_ended(self, facts: Facts, metrics: dict, **_: object) -> None:
        self._metrics.update(metrics)
        self._update_status(facts, None)

    def closed(self, facts: Facts, **_: object) -> None:
        self._update_status(facts, 0 if facts.plan.is_finished(facts.position) else None)
        self._end()

    def failed(self, _facts: Facts, **_: object) -> None:
        self._end()

    def _update_status(self, facts: Facts, seconds_left: Optional[float]) -> None:
        """Prepare the next report."""
        position = facts.position
        values = {"epoch": position.epoch, "step": position.total_steps, **self._metrics}
        numbers = {name: value for name, value in values.items() if is_finite(value)}
        metrics = [
            {"name": name[:LONGEST_NAME], "value": f"{number:.6g}"} for name, number in numbers.items()
        ]
        status = {"progressPercentage": percent(facts), "metrics": metrics[:MOST_METRICS]}
        if seconds_left is not None and math.isfinite(seconds_left):
            status["estimatedRemainingSeconds"] = int(seconds_left)
        self._status = status

    def _report(self) -> None:
        is_over = False
        while not is_over:
            self._send(self._status)
            is_over = self._is_over.wait(PAUSE_SECONDS)
        self._send(self._status)

    def _send(self, status: dict[str, Any]) -> None:
        """Send a report. Log a warning for the first of several failures in a row."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        try:
            post({**status, "lastUpdatedTime": now})
            self._is_refused = False
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not self._is_refused:
                self._side_files.say(
                    f"warning: the TrainJob's controller does not take this run's progress: {one_line(error)}"
                )
            self._is_refused = True

    def _end(self) -> None:
        self._is_over.set()
        if self._reporter:
            self._reporter.join(2 * PATIENCE_SECONDS)


def percent(facts: Facts) -> int:
    """Return the percentage of the samples that are done; 100 only if the run is finished."""
    position = facts.position
    if facts.plan.is_finished(position):
        return 100
    done = position.epoch * facts.plan.sampler.samples_per_epoch + position.consumed
    return min(99, 100 * done // max(1, done + facts.plan.samples_left(position)))


def is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def post(status: dict[str, Any]) -> None:
    """Send this status. The token is read anew each time, as the cluster replaces it."""
    headers = {"Content-Type": "application/json"}
    if path := os.environ.get(TOKEN):
        headers["Authorization"] = f"Bearer {Path(path).read_text().strip()}"
    body = json.dumps({"trainerStatus": status}).encode()
    request = urllib.request.Request(os.environ[URL], body, headers, method="POST")
    context = ssl.create_default_context(cafile=os.environ.get(CA))
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    opener.open(request, timeout=PATIENCE_SECONDS).close()
