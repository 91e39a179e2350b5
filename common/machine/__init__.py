"""This machine, without torch: its cores, its drivers, and a process of this project started on it."""

__all__ = ["child", "cores", "drivers"]
