"""report.html, a page made from the files of a run."""

from common.report.left import FILES, Left
from common.report.page import of_one

__all__ = ["FILES", "Left", "of_one"]
