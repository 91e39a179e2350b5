"""How the nodes of a job talk to each other: connections, messages, the secret that they share, the interface that they use."""

# Modules.
__all__ = ["channel", "hub", "messages", "network", "secret"]
