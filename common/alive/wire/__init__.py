"""Communication between the nodes of a job: connections, messages, the shared secret, the network interface."""

__all__ = ["channel", "hub", "messages", "network", "secret"]
