"""Programs that a platform starts before the job.

Each is sent as its own text, so it imports nothing of this project.
"""

__all__: list[str] = []
