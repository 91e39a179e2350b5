"""Communication between the nodes of a job: connections, messages, the shared secret."""

__all__ = ["channel", "hub", "messages", "secret"]
