"""The run of a job: it goes on where the last start stopped, shows progress, saves,
and measures where the time goes."""

from common.run import peers
from common.run.losses import Scaler
from common.run.observers import Observer
from common.run.run import Run, TrainLoader
from common.run.scores import Scores

__all__ = ["Observer", "Run", "Scaler", "Scores", "TrainLoader", "about", "peers", "timing"]
