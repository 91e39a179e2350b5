"""report.html, a page made from the files of a run."""

from common.report.left import FILES, RunFiles, add_end
from common.report.page import of_one

__all__ = ["FILES", "RunFiles", "add_end", "of_one"]
