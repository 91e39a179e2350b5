"""What a file of tensors may hold, how it is read without running code,
and what the weights of an epoch are."""

# Modules.
__all__ = ["by_name", "files", "plain", "tensors", "unpickler"]
