"""What a run left, as a page: report.html of one run, and a page that lays several side by side."""

from common.report.left import FILES, Left
from common.report.page import of_one
from common.report.several import side_by_side

__all__ = ["FILES", "Left", "of_one", "side_by_side"]
