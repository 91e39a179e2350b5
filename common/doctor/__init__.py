"""What could go wrong, looked for on every node before a job starts."""

from common.doctor.examination import Examination

__all__ = ["Examination"]
