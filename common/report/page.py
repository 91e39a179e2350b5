"""Make report.html, the page of one run, from the run's files."""

import base64
import collections
import contextlib
import datetime
import hashlib
import io
import math
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from typing import Any, Optional

from common import VERSION, packages
from common.chance import NOTHING_IS_LEARNT
from common.checkpoints import names
from common.errors import UserError, count, one_line
from common.report import figures, template
from common.report.left import SOURCES, RunFiles

# the most classes of a whole confusion matrix; of a larger one, so many confusions are listed
MOST_COLUMNS = 30
MANY = 10_000  # from so many pictures on, the accuracy is shown without a range
MOST_BARS = 60
MOST_EXAMPLES = 16  # rows of a sheet of examples
MOST_ROWS = 1000
MOST_OF_A_CURVE = 100
MOST_WARNINGS = 100
# examples/mistakes.png (common/run/scores.py).
SQUARE_SIDE = 64  # pixels of a square
SQUARES_PER_ROW = 24  # squares in a row
# left out of the command to train again
OMITTED_OPTIONS = ("--output_dir", "--train_url", "--resume", "--overwrite")
WIDEST = 384  # the most pixels in the width or height of an embedded picture
SAMPLES = ("Samples", "样本数")
EPOCH = ("Epoch", "Epoch")
# The phases in common/run/clock.py.
PHASES = ("waiting_for_data", "transfer", "compute", "evaluation", "saving", "paused", "waiting_for_storage")
WORDS = {
    "waiting_for_data": ("waiting for data", "等待数据"), "transfer": ("transfer", "传输"),
    "compute": ("compute", "计算"), "evaluation": ("evaluation", "评估"), "saving": ("saving", "保存"),
    "paused": ("paused", "暂停"), "waiting_for_storage": ("waiting for a store or a disk", "等待存储"),
    "train_loss": ("training loss", "训练损失"), "loss": ("validation loss", "验证损失"),
    "lr": ("learning rate", "学习率"), "images_per_s": ("images a second", "每秒图像数"),
    "accuracy": ("accuracy", "准确率"), "top5": ("top-5 accuracy", "top-5 准确率"),
    "balanced_accuracy": ("mean accuracy of the classes", "各类准确率的平均"),
}  # fmt: skip


def of_one(run: RunFiles) -> str:
    """Return the page of one run as HTML; UserError without jinja2."""
    metric, best = run.best()
    return rendered(
        template.ONE_RUN, run.name, run=run, outcome=outcome(run), marks=figures.MARKS,
        curves=list(_curves(run, best)), events=list(_events(run, metric, best)), speed=list(_speed(run)),
        sources=_sources(run), confusion=_confusion(run), classes=_classes(run),
        galleries=list(_galleries(run)), restored=_examples(run), warnings=_warnings(run),
        options=option_rows(run), machine=_machine(run), data=run.picture_counts(), mistakes=_mistakes(run),
        epoch=run.scores.get("epoch"), **_commands(run),
    )  # fmt: skip


def rendered(main: str, title: str, **values: Any) -> str:
    """Return a page with `main` as the template of its main part; all `values` but SVG are escaped."""
    if reason := packages.import_error(packages.PAGE):
        raise UserError(f"the page is made with jinja2: {reason}")
    import jinja2

    digest = base64.b64encode(hashlib.sha256(template.SCRIPT.encode()).digest()).decode()
    page = jinja2.Environment(autoescape=True).from_string(template.PAGE.replace("MAIN", main))
    parts = {"style": template.STYLE, "script": template.SCRIPT, "script_hash": f"sha256-{digest}"}
    return page.render(title=title, version=VERSION, now=_time(time.time()), **parts, **values)


# --- Words --------------------------------------------------------------------------------------------------


def outcome(run: RunFiles) -> dict[str, Any]:
    """Return the facts in the first sentence of the page (`result` in template.py)."""
    metric, best = run.best()
    machine = run.start.get("machine")
    file = names.weights(best.get("epoch", 0))
    suffix = " (lowest)" if metric and run.start.get("best_is") == "lowest" else ""
    last_time = max((row.get("time", 0) for row in run.journal + run.speed), default=0)
    return {
        "how": run.end.get("how"), "why": one_line(str(run.end.get("why")))[:300],
        "last": _time(last_time) if last_time else None, "done": len(run.epochs),
        "epochs": run.start.get("epochs"), "by": metric + suffix, "best": best,
        "ranks": run.start.get("ranks", 1), "value": f"{best[metric]:.4f}" if best else "",
        "range": _accuracy_interval(run, metric, best[metric]) if best else None,
        "file": file if os.path.exists(os.path.join(run.folder, file)) else None,
        "spent": str(datetime.timedelta(seconds=int(run.seconds()))),
        "device": machine.get("device") if isinstance(machine, dict) else None,
    }  # fmt: skip


def _accuracy_interval(run: RunFiles, metric: str, value: float) -> Optional[tuple[str, str, int]]:
    """Return Wilson's 95 % interval of the accuracy, (low, high, images); None for another metric, no images,
    or MANY."""
    samples = sum(row[0] for row in run.scores.get("by_class", ()))
    if metric != "accuracy" or not (0 < samples < MANY and 0 <= value <= 1):
        return None
    middle = value + 2 / samples
    width = 2 * math.sqrt(value * (1 - value) / samples + 1 / samples**2)
    low, high = ((middle + sign * width) / (1 + 4 / samples) for sign in (-1, 1))
    return f"{low:.2f}", f"{high:.2f}", samples


def _events(run: RunFiles, metric: str, best: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (time, samples, text) of each start, change of nodes and end, and of the best epoch."""
    rows = [(row, _start_text(index, row)) for index, row in enumerate(run.events("start"))]
    rows += [(row, f"{row.get('text')} ({row.get('pause', 0):.1f} s)") for row in run.events("nodes")]
    rows += [(row, f"{row.get('how')}: {row.get('why')}"[:300]) for row in run.events("end")]
    for row, text in sorted(rows, key=lambda pair: pair[0].get("time", 0))[-MOST_ROWS:]:
        yield _time(row.get("time", 0)), f"{row.get('samples', 0):,}", one_line(text)
    if best:
        yield (
            "",
            f"{best.get('samples', 0):,}",
            f"best {metric}: {best[metric]:.4f} in epoch {best.get('epoch')}",
        )


def _start_text(index: int, row: dict[str, Any]) -> str:
    checkpoint = row.get("goes_on_from")
    if checkpoint:
        text = f"restart, going on from {os.path.basename(str(checkpoint))}"
    elif index:
        text = "start, from the beginning"
    else:
        text = "start"
    return f"{text} ({count(row.get('ranks', 1), 'rank')})"


def _warnings(run: RunFiles) -> list[tuple[str, int]]:
    """Return [(text, how often)], without the warning that nothing is learnt if later something was."""
    texts = [one_line(str(row.get("text")))[:1000] for row in run.events("warning")]
    if run.has_learnt():
        texts = [text for text in texts if NOTHING_IS_LEARNT not in text]
    return collections.Counter(texts).most_common(MOST_WARNINGS)


def _commands(run: RunFiles) -> dict[str, Any]:
    """Return the commands to go on, to train again elsewhere, and to export, each None if not possible;
    {} if none is known."""
    command = run.start.get("command")
    kept_words = []
    if not isinstance(command, str):
        return {}
    with contextlib.suppress(ValueError):  # shlex raises it for a quote that is not closed
        remaining = iter(shlex.split(command))
        for word in remaining:
            name, separator, _ = word.partition("=")
            if name not in OMITTED_OPTIONS:
                kept_words.append(word)
            elif not separator:
                next(remaining, None)
    commands: dict[str, Any] = {"go_on": command, "again": None, "use": None}
    if run.end.get("how") == "finished":
        commands["go_on"] = None
    if kept_words:
        commands["again"] = shlex.join(
            [*kept_words, "--output_dir", f"output_dir/{run.start.get('job')}_again"]
        )
    if run.scores:
        commands["use"] = run.start.get("use")
    return commands


def option_rows(run: RunFiles) -> list[tuple[str, str, str]]:
    """Return (name, value, default) of each option of the newest start."""
    options = run.start.get("options")
    if not isinstance(options, dict):
        return []
    return [(name, str(pair[0]), str(pair[-1])) for name, pair in options.items() if pair]


def _machine(run: RunFiles) -> list[tuple[str, str]]:
    tables = [
        table for table in (run.start.get("machine"), run.start.get("versions")) if isinstance(table, dict)
    ]
    tables.append(
        {
            name: run.start[name]
            for name in ("platform", "nodes", "ranks", "global_batch")
            if name in run.start
        }
    )
    return [(name.replace("_", " "), str(value)) for table in tables for name, value in table.items()]


# --- Curves -------------------------------------------------------------------------------------------------


def figure(name: str, title: tuple, legend: Sequence, heads: Sequence, rows: Sequence, svg: str) -> dict:
    """Return what the template needs of a figure and its table, which keeps about MOST_ROWS of the rows."""
    return {
        "name": name,
        "title": title,
        "legend": legend,
        "heads": heads,
        "rows": figures.thinned(rows, MOST_ROWS),
        "svg": svg,
    }


def words(name: str) -> tuple[str, str]:
    """Return (English, Chinese) for a name; the name itself, twice, if it has no entry."""
    return WORDS.get(name, (name, name))


def _curves(run: RunFiles, best: dict) -> Iterator[dict]:
    """Yield the figures over the samples: of the loss, of each metric and of the learning rate."""
    marks = [("restart", row.get("samples", 0)) for row in run.events("start")[1:]]
    marks += [("nodes", row.get("samples", 0)) for row in run.events("nodes")]
    if best:
        marks.append(("best", best.get("samples", 0)))
    log_rows = [row for row in run.training_rows() if "lr" in row]
    panels = [["train_loss", "loss"]]
    for name in run.metrics():
        panels.append([name, "top5"] if name == "accuracy" else [name])
    for panel in panels:
        curve_names = [name for name in panel if any(name in row for row in run.epochs)]
        if not curve_names or panel in (["loss"], ["top5"]):
            continue
        samples = [row.get("samples", 0) for row in run.epochs]
        series = []
        if panel[0] == "train_loss":
            line_style = {"color": figures.COLOURS[0], "alpha": 0.35, "linewidth": 1}
            series = [
                (
                    [row.get("samples", 0) for row in log_rows],
                    [row.get("loss") for row in log_rows],
                    line_style,
                )
            ]
        for colour, name in zip(figures.COLOURS, curve_names):
            dot_style = {"color": colour, "marker": "o" if len(samples) <= 60 else "", "markersize": 3}
            series.append((samples, [row.get(name) for row in run.epochs], dot_style))
        legend = []
        if len(curve_names) > 1:
            legend = [(colour, *words(name)) for colour, name in zip(figures.COLOURS, curve_names)]
        rows = [
            (row.get("epoch"), f"{row.get('samples', 0):,}", *(short(row.get(name)) for name in curve_names))
            for row in run.epochs
        ]
        heads = [EPOCH, SAMPLES, *map(words, curve_names)]
        title = ("Loss", "损失") if panel[0] == "train_loss" else words(panel[0])
        yield figure(
            identifier(panel[0]),
            title,
            legend,
            heads,
            rows,
            figures.line_chart(identifier(panel[0]), series, marks),
        )
    if log_rows:
        samples = [row.get("samples", 0) for row in log_rows]
        rates = [row["lr"] for row in log_rows]
        rows = figures.thinned([(f"{x:,}", short(y)) for x, y in zip(samples, rates)], MOST_OF_A_CURVE)
        svg = figures.line_chart("lr", [(samples, rates, {"color": figures.COLOURS[2]})], marks)
        yield figure("lr", words("lr"), [], [SAMPLES, words("lr")], rows, svg)


def _speed(run: RunFiles) -> Iterator[dict]:
    """Yield two figures if there are rows: each phase's seconds by epoch or group of epochs,
    and images a second over time."""
    phase_seconds: dict[str, dict[str, float]] = collections.defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
    epochs = sorted({int(row.get("epoch", 0)) for row in run.speed})
    size = -(-len(epochs) // MOST_BARS) or 1
    groups = [epochs[begin : begin + size] for begin in range(0, len(epochs), size)]
    group_name = {
        epoch: f"{group[0]}-{group[-1]}" if size > 1 else f"{epoch}" for group in groups for epoch in group
    }
    for row in run.speed:
        for phase in PHASES:
            phase_seconds[group_name[int(row.get("epoch", 0))]][phase] += max(0.0, row.get(phase, 0.0))
    if not phase_seconds:
        return
    phases = [phase for phase in PHASES if any(bar[phase] for bar in phase_seconds.values())]
    legend = [(colour, *words(phase)) for colour, phase in zip(figures.COLOURS, phases)]
    rows = [(name, *(f"{bar[phase]:.2f}" for phase in phases)) for name, bar in phase_seconds.items()]
    svg = figures.bars(
        "phases", list(phase_seconds), [[bar[phase] for bar in phase_seconds.values()] for phase in phases]
    )
    yield figure(
        "phases",
        ("Seconds of each epoch", "每个 epoch 的秒数"),
        legend,
        [EPOCH, *map(words, phases)],
        rows,
        svg,
    )

    rate_rows = [row for row in run.speed if "images_per_s" in row]
    # rows of one step are left out: they include the wait for an epoch's first batch
    one_step = run.start.get("global_batch")
    rate_rows = [row for row in rate_rows if row.get("images") != one_step] or rate_rows
    minutes = [(row.get("time", 0) - run.speed[0].get("time", 0)) / 60 for row in rate_rows]
    rates = [row["images_per_s"] for row in rate_rows]
    rows = [
        (f"{minute:.1f}", short(rate), row.get("peak_memory_mib"))
        for minute, rate, row in zip(minutes, rates, rate_rows)
    ]
    heads = [("Minutes", "分钟"), words("images_per_s"), ("Peak memory, MiB", "内存峰值，MiB")]
    svg = figures.line_chart("rate", [(minutes, rates, {"color": figures.COLOURS[0]})])
    title = ("Images a second, over minutes", "每秒图像数（横轴：分钟）")
    yield figure("rate", title, [], heads, figures.thinned(rows, MOST_OF_A_CURVE), svg)


def _sources(run: RunFiles) -> list[tuple]:
    """Return a row for each epoch in which data came: MiB from a bucket, those ahead of their shard,
    on the disk; seconds."""
    totals = collections.defaultdict(lambda: [0.0] * 4)
    for row in run.speed:
        for column, name in enumerate((*SOURCES, "waiting_for_storage")):
            totals[int(row.get("epoch", 0))][column] += row.get(name, 0)
    rows = [
        (epoch, *(f"{size:.1f}" for size in (bucket + ahead, ahead, disk, waited)))
        for epoch, (bucket, ahead, disk, waited) in totals.items()
        if bucket + ahead + disk
    ]
    return figures.thinned(rows, MOST_ROWS)


# --- What it got wrong --------------------------------------------------------------------------------------


def _confusion(run: RunFiles) -> Optional[dict]:
    """Return "names" and "rows" of the matrix or, if it is too large, the most frequent "pairs".

    None without scores.
    """
    if not run.scores:
        return None
    class_names = run.scores["names"]
    cells = run.scores["cells"]
    totals = collections.Counter()
    for true, _, times in cells:
        totals[true] += times
    class_ids = sorted({index for true, predicted, _ in cells for index in (true, predicted)})
    if len(class_ids) > MOST_COLUMNS:
        confusions = sorted((cell for cell in cells if cell[0] != cell[1]), key=lambda cell: -cell[2])[
            :MOST_COLUMNS
        ]
        return {
            "pairs": [
                (class_names[true], class_names[predicted], times, f"{times / totals[true]:.1%}")
                for true, predicted, times in confusions
            ]
        }
    rows = {true: dict.fromkeys(class_ids, (0, 0.0)) for true in class_ids}
    for true, predicted, times in cells:
        rows[true][predicted] = times, round(times / totals[true], 3)
    return {
        "names": [class_names[index] for index in class_ids],
        "rows": [(class_names[true], list(row.values())) for true, row in rows.items()],
    }


def _classes(run: RunFiles) -> list[tuple]:
    """Return a row for each class that has images, the lowest recall first."""
    rows = [row for row in zip(run.scores.get("names", ()), run.scores.get("by_class", ())) if row[1][0]]
    rows.sort(key=lambda row: row[1][1])
    return [
        (name, samples, *(f"{fraction:.4f}" for fraction in fractions))
        for name, (samples, *fractions) in rows
    ]


def _mistakes(run: RunFiles) -> list[tuple]:
    rows = run.scores.get("mistakes", {}).get("all", [])
    return [(row["name"], row["class"], row["predicted"], f"{row['sure']:.0%}") for row in rows]


def _galleries(run: RunFiles) -> Iterator[tuple]:
    """Yield (kind, mistakes with their pictures); leave out a kind whose mistakes were all shown."""
    sheet = _picture(run, "mistakes")
    shown_ids = set()
    for row, kind in enumerate(("worst", "surest")):
        shots = run.scores.get("mistakes", {}).get(kind, [])[:SQUARES_PER_ROW]
        if {shot["id"] for shot in shots} <= shown_ids:
            # none, or so few mistakes that it would repeat the gallery before
            return
        shown_ids |= {shot["id"] for shot in shots}
        boxes = [
            (column * SQUARE_SIDE, row * SQUARE_SIDE, (column + 1) * SQUARE_SIDE, (row + 1) * SQUARE_SIDE)
            for column in range(len(shots))
        ]
        yield (
            kind,
            [
                {**shot, "image": _encoded(sheet.crop(box)) if sheet else None}
                for shot, box in zip(shots, boxes)
            ],
        )


def _examples(run: RunFiles) -> Optional[dict]:
    """Return the newest sheet of examples as {"name", "columns": three titles, "rows": lists of three encoded
    pictures}; None if there is none that can be used."""
    for event in reversed(run.events("picture")):
        name = os.path.basename(str(event.get("name")))
        num_rows = event.get("rows")
        if type(num_rows) is not int:  # the journal is damaged
            continue
        columns = event.get("columns")
        sheet = _picture(run, name)
        fits = sheet and 1 <= num_rows <= min(MOST_EXAMPLES, sheet.height) and sheet.width >= 3
        if fits and isinstance(columns, list) and len(columns) == 3:
            width = sheet.width // 3
            height = sheet.height // num_rows
            boxes = [
                [(x * width, y * height, (x + 1) * width, (y + 1) * height) for x in range(3)]
                for y in range(num_rows)
            ]
            rows = [[_encoded(sheet.crop(box)) for box in row] for row in boxes]
            return {"name": name, "columns": [one_line(str(column)) for column in columns], "rows": rows}
    return None


def _picture(run: RunFiles, name: str) -> Any:
    from PIL import Image

    try:
        with Image.open(os.path.join(run.folder, "examples", f"{name}.png")) as opened:
            return opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        # there is none, or it is damaged
        return None


def _encoded(picture: Any) -> str:
    """Shrink a picture in place to at most WIDEST pixels a side, and return it as a data: URL."""
    content = io.BytesIO()
    picture.thumbnail((WIDEST, WIDEST))
    picture.save(content, "JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


# --- Forms --------------------------------------------------------------------------------------------------


def identifier(name: str) -> str:
    """Return a name as an HTML id of at most 40 characters: all but ASCII letters and digits become _."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in name)[:40]


def short(value: object) -> str:
    """Return a value as text, a float with six digits, None as an empty text."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(max(0.0, seconds), datetime.timezone.utc).strftime(
        "%Y-%m-%d %H:%M:%S UTC"
    )
