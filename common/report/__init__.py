"""What a run left, as a page: report.html."""

from common.report.left import FILES, Left
from common.report.page import of_one

__all__ = ["FILES", "Left", "of_one"]
