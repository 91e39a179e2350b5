"""Send the curves of a run to where people look at them: MLflow, W&B, SwanLab."""

# Modules.
__all__ = ["follow", "senders"]
