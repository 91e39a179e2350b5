"""What a file of tensors may hold, how it is read without running code, and which weights a run begins with or gives away."""

# Modules.
__all__ = ["files", "plain", "pretrained", "tensors"]
