"""Where common/weights/pretrained.py was until 0.3.0: copies of jobs import it by this name."""

from common.weights.pretrained import about_weights, fit, load_weights, local_weights, read_weights

__all__ = ["about_weights", "fit", "load_weights", "local_weights", "read_weights"]
