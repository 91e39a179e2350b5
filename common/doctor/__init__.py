"""Checks of every node and of the job before the training starts."""

from common.doctor.examination import Examination

__all__ = ["Examination"]
