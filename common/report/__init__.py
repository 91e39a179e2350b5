"""report.html, a page made from the files of a run."""

from common.report.left import FILES, Left, add_end
from common.report.page import of_one

__all__ = ["FILES", "Left", "add_end", "of_one"]
