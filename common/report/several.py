"""The page that lays several runs side by side."""

from collections.abc import Iterator, Sequence

from common.report import figures, template
from common.report.left import Left
from common.report.page import EPOCH, figure, filled, identifier, options_of, outcome, short, words

HIGHER = ("accuracy", "top5", "psnr", "ssim")  # of which more is better


def side_by_side(runs: Sequence[Left]) -> str:
    """The first is the one that the others are compared with."""
    heads = [("", ""), *((run.name, run.name) for run in runs)]
    shown = [(run.name, colour, outcome(run)) for run, colour in zip(runs, figures.colours())]
    facts = {"heads": heads, "final": list(_final(runs)), "differ": _differ(runs), "curves": list(_curves_of_all(runs))}
    return filled(template.SEVERAL, " · ".join(run.name for run in runs)[:200], runs=shown, **facts)


def _numbers_of_all(runs: Sequence[Left]) -> list[str]:
    return list(dict.fromkeys(["train_loss", *(name for run in runs for name in run.metrics())]))


def _final(runs: Sequence[Left]) -> Iterator[tuple]:
    for name in _numbers_of_all(runs):
        columns = [[row[name] for row in run.epochs if name in row] for run in runs]
        yield f"{name}, last", *_with_differences([column[-1] if column else None for column in columns])
        if best := min if "loss" in name else max if name in HIGHER else None:
            yield f"{name}, best", *_with_differences([best(column, default=None) for column in columns])
    yield "epochs", *_with_differences([len(run.epochs) for run in runs])
    yield "seconds", *_with_differences([round(run.seconds(), 1) for run in runs])
    rates = [sorted(row["images_per_s"] for row in run.speed if "images_per_s" in row) for run in runs]
    yield "images a second, median", *_with_differences([rate[len(rate) // 2] if rate else None for rate in rates])
    memory = [max((row.get("peak_memory_mib", 0) for row in run.speed), default=None) for run in runs]
    yield "peak memory, MiB", *_with_differences(memory)


def _with_differences(values):
    first = values[0]
    yield short(first)
    for value in values[1:]:
        yield short(value) + (f" ({value - first:+.4g})" if value is not None and first is not None else "")


def _differ(runs: Sequence[Left]) -> list[tuple]:
    tables = [{name: (value, default) for name, value, default in options_of(run)} for run in runs]
    defaults = {name: default for table in tables for name, (_, default) in table.items()}
    rows = [(name, *(table.get(name, (default,))[0] for table in tables)) for name, default in defaults.items()]
    return [row for row in rows if len(set(row[1:])) > 1 and row[0] != "output_dir"]


def _curves_of_all(runs: Sequence[Left]) -> Iterator[dict]:
    legend = [(colour, run.name, run.name) for run, colour in zip(runs, figures.colours())]
    for name in _numbers_of_all(runs):
        points = [([row.get("samples", 0) for row in run.epochs], [row.get(name) for row in run.epochs]) for run in runs]
        svg = figures.lines(identifier(name), [(*pair, {"color": colour}) for pair, colour in zip(points, figures.colours())])
        longest = range(max(len(run.epochs) for run in runs))
        columns = [[short(value) for value in ys] + [""] * (len(longest) - len(ys)) for _, ys in points]
        rows = [(epoch + 1, *(column[epoch] for column in columns)) for epoch in longest]
        yield figure(identifier(name), words(name), legend, [EPOCH, *((run.name, run.name) for run in runs)], rows, svg)
