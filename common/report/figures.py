"""The figures of a report as SVG in the colour of the surrounding text.

The page has a table of the numbers below each.
"""

import io
import re
from collections.abc import Sequence
from typing import Any, Optional

from common import packages

# on white and on black
COLOURS = ("#3b82c4", "#d9822b", "#4c9f50", "#b5559e", "#8a6d3b", "#6d6ad1", "#2a9d9d", "#c44e52")
MARKS = {"restart": ("#c44e52", "--"), "nodes": ("#8a6d3b", ":"), "best": ("#4c9f50", "-")}
POINTS = 800  # about the most that are drawn of a line: a screen shows no more
# metadata that matplotlib leaves out
OMITTED_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}

Series = tuple[Sequence[float], Sequence[Optional[float]], dict]  # x, y, and how matplotlib draws the line


def thinned(rows: Sequence, most: int = POINTS) -> list:
    """Return every n-th row and the last one, so that about `most` remain;
    all rows if there are no more than that."""
    step = -(-len(rows) // most) or 1
    return [*rows[:-1:step], *rows[-1:]]


def line_chart(name: str, series: Sequence[Series], marks: Sequence[tuple[str, float]] = ()) -> str:
    """Return curves and, at `marks` [(kind, x)], vertical lines as SVG; empty without matplotlib.

    Its ids begin with `name`.
    """
    if not packages.is_available(packages.FIGURES):
        return ""
    from matplotlib.ticker import EngFormatter

    figure, axes = _new_figure()
    if max((x for xs, _, _ in series for x in xs), default=0) >= 1000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for xs, ys, line_options in series:
        points = thinned([(x, y) for x, y in zip(xs, ys) if y is not None])
        axes.plot([x for x, _ in points], [y for _, y in points], **{"linewidth": 1.5, **line_options})
    for kind, x in thinned(marks, 60):
        colour, style = MARKS[kind]
        axes.axvline(x, color=colour, linestyle=style, linewidth=1)
    axes.locator_params(nbins=6)
    axes.grid(alpha=0.3)
    return _svg(figure, name)


def bars(name: str, labels: Sequence[str], parts: Sequence[Sequence[float]]) -> str:
    """Return stacked bars as SVG whose ids begin with `name`; `parts`: each colour's heights.

    Empty without matplotlib.
    """
    if not packages.is_available(packages.FIGURES):
        return ""
    figure, axes = _new_figure()
    bottoms = [0.0] * len(labels)
    for colour, heights in zip(COLOURS, parts):
        axes.bar(range(len(labels)), heights, bottom=bottoms, color=colour, width=0.8)
        bottoms = [sum(pair) for pair in zip(bottoms, heights)]
    ticks = range(0, len(labels), max(1, -(-len(labels) // 10)))
    axes.set_xticks(list(ticks), [labels[index] for index in ticks])
    axes.grid(alpha=0.3, axis="y")
    return _svg(figure, name)


def _new_figure() -> tuple[Any, Any]:
    """Return a new (figure, axes) without a background."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 2.7))
    figure.patch.set_visible(False)
    figure.subplots_adjust(left=0.16, right=0.97, bottom=0.12, top=0.96)
    axes = figure.subplots()
    axes.patch.set_visible(False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Any, name: str) -> str:
    """Return the figure as an <svg> element.

    Its ids begin with `name`, because a page has several figures.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
        figure.savefig(buffer, format="svg", metadata=OMITTED_METADATA)
    text = buffer.getvalue()
    text = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL
    )
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text).replace("#000000", "currentColor")
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 aria-hidden="true"', text)
