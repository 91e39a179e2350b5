"""Where common/weights/files.py was until 0.3.0: copies of jobs import it by this name."""

from common.weights.files import OPTIONS, beside, evaluated_weights, unwrapped, write_weights

__all__ = ["OPTIONS", "beside", "evaluated_weights", "unwrapped", "write_weights"]
