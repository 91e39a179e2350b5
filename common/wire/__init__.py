"""Communication between the nodes of a job: connections, messages, the shared secret, the network interface."""

# Modules.
__all__ = ["channel", "hub", "messages", "network", "secret"]
