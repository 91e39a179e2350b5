"""How each tracker is told of a run: one entry for all of its starts, found by the run's own id; the x axis
counts samples, so that steps that are done again after a kill do not break a curve. Address and key come from
the tracker's own variables.
"""

import importlib.util
import json
import os
from typing import Any

from common.errors import UserError

PACKAGES = {"mlflow": "mlflow-skinny", "wandb": "wandb", "swanlab": "swanlab"}
PROGRESS_KEY = "anyrank.told"  # where a tracker keeps how far it has been told

Rows = list[tuple[int, float, dict[str, float]]]  # (samples, time, values)


def describe_run(start: dict, folder: str) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return (name, settings that are not at their defaults, tags) of a run.

    `start`: its last start in the journal.
    """
    settings = {name: start[name] for name in ("epochs", "global_batch", "ranks", "best_by") if name in start}
    settings.update({name: values[0] for name, values in start.get("options", {}).items()})
    # among them the commit
    tags = {"job": start["job"], "platform": start.get("platform", ""), **start.get("versions", {})}
    return os.path.basename(os.path.abspath(folder)), settings, tags


NO_SERVER = "set MLFLOW_TRACKING_URI, or for a local file pip install sqlalchemy alembic"


class MLflow:
    """A run's entry in MLflow: a run of the experiment that has the job's name."""

    def __init__(self, start: dict, folder: str):
        try:
            self._open(start, folder)
        except ImportError:
            raise
        except Exception:
            if not os.environ.get("MLFLOW_TRACKING_URI") and importlib.util.find_spec("sqlalchemy") is None:
                raise UserError(NO_SERVER) from None
            raise

    def _open(self, start: dict, folder: str) -> None:
        """Find or make the entry, and send it the settings that it lacks and the tags."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")  # seconds, for 120
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # the follower tries again
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Param, RunTag  # pyright: ignore[reportMissingImports]

        self._client: Any = MlflowClient()  # whatever version is there, with its types or without
        name, settings, tags = describe_run(start, folder)
        self._run = os.environ.get("MLFLOW_RUN_ID") or self._find_run(start["job"], start["run"], name)
        saved_params = self._client.get_run(self._run).data.params  # which cannot be changed
        missing = [
            Param(name, str(value)[:6000]) for name, value in settings.items() if name not in saved_params
        ]
        self._client.log_batch(self._run, params=missing, tags=[RunTag(*tag) for tag in tags.items()])
        self._client.update_run(self._run, status="RUNNING")

    def _find_run(self, job: str, run: str, run_name: str) -> str:
        """Return the id of the entry for this run, which is made if there is none:
        MLflow chooses the ids itself."""
        client = self._client
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", job)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if experiment is None:
            match = client.get_experiment_by_name(name)
            experiment = match.experiment_id if match else client.create_experiment(name)
        runs = client.search_runs([experiment], f"tags.`anyrank.run` = '{run}'")
        entry = (
            runs[0] if runs else client.create_run(experiment, tags={"anyrank.run": run}, run_name=run_name)
        )
        return entry.info.run_id

    def progress(self) -> dict[str, Any]:
        """Return how far the entry has the rows, as log() has stored it there; {} if it has none."""
        return json.loads(self._client.get_run(self._run).data.tags.get(PROGRESS_KEY, "{}"))

    def log(self, rows: Rows, progress: dict) -> None:
        """Send rows, and store in the entry how far it has them now."""
        from mlflow.entities import Metric, RunTag  # pyright: ignore[reportMissingImports]

        points = [
            Metric(name, value, int(1000 * seconds), samples)
            for samples, seconds, values in rows
            for name, value in values.items()
        ]
        self._client.log_batch(self._run, metrics=points, tags=[RunTag(PROGRESS_KEY, json.dumps(progress))])

    def picture(self, path: str, samples: int) -> None:
        """Send a picture, which is of the run after so many samples."""
        self._client.log_artifact(self._run, path)

    def end(self, outcome: str, reason: str) -> None:
        """Close the entry. Empty texts: the run has not ended, and its entry stays open."""
        if outcome:
            self._client.set_tag(self._run, "ended", reason)
            self._client.set_terminated(
                self._run, {"failed": "FAILED", "stopped": "KILLED"}.get(outcome, "FINISHED")
            )


class WandB:
    """A run's entry in Weights & Biases, whose id is that of the run.

    Its methods are those of MLflow, above.
    """

    def __init__(self, start: dict, folder: str):
        import wandb  # pyright: ignore[reportMissingImports]

        name, settings, tags = describe_run(start, folder)
        self._image_class = wandb.Image
        client_settings = wandb.Settings(console="off", silent=True)
        self._run: Any = wandb.init(
            id=start["run"], resume="allow", project=os.environ.get("WANDB_PROJECT", start["job"]), name=name,
            dir=os.environ.get("WANDB_DIR", folder), config=settings,
            tags=[f"{key}={value}"[:64] for key, value in tags.items()], settings=client_settings,
        )  # fmt: skip
        self._run.define_metric("*", step_metric="samples")

    def progress(self) -> dict[str, Any]:
        return json.loads(self._run.summary.get(PROGRESS_KEY, "{}"))

    def log(self, rows: Rows, progress: dict) -> None:
        for samples, _, values in rows:
            self._run.log({**values, "samples": samples})
        self._run.summary[PROGRESS_KEY] = json.dumps(progress)

    def picture(self, path: str, samples: int) -> None:
        self._run.log({os.path.basename(path): self._image_class(path), "samples": samples})

    def end(self, outcome: str, reason: str) -> None:
        self._run.summary["ended"] = reason
        self._run.finish(exit_code=int(outcome == "failed"))


class SwanLab:
    """A run's entry in SwanLab, whose id is that of the run. Its methods are those of MLflow, above."""

    def __init__(self, start: dict, folder: str):
        import swanlab  # pyright: ignore[reportMissingImports]

        name, settings, tags = describe_run(start, folder)
        self._swanlab: Any = swanlab  # whatever version is there, with its types or without
        swanlab.init(
            id=start["run"], resume="allow", project=os.environ.get("SWANLAB_PROJ_NAME", start["job"]),
            name=name, log_dir=os.environ.get("SWANLAB_LOG_DIR", os.path.join(folder, "swanlog")),
            config=settings, tags=[f"{key}={value}" for key, value in tags.items()],
        )  # fmt: skip

    def progress(self) -> dict[str, Any]:
        return {}  # it cannot be asked: the record in the folder of the run knows

    def log(self, rows: Rows, progress: dict) -> None:
        for samples, _, values in rows:
            self._swanlab.log(values, step=samples)

    def picture(self, path: str, samples: int) -> None:
        self._swanlab.log({os.path.basename(path): self._swanlab.Image(path)}, step=samples)

    def end(self, outcome: str, reason: str) -> None:
        state = {"failed": "crashed", "stopped": "aborted"}.get(outcome, "success")
        self._swanlab.finish(state, reason if state == "crashed" else None)


TOOLS = {"mlflow": MLflow, "wandb": WandB, "swanlab": SwanLab}
