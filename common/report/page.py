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
from common.report.left import CAME, RunFiles

MOST_COLUMNS = 30  # the most classes of a whole confusion matrix; of a larger one, so many confusions are listed
MANY = 10_000  # from so many pictures on, the accuracy is shown without a range
MOST_BARS = 60
MOST_ROWS = 1000
MOST_OF_A_CURVE = 100
MOST_WARNINGS = 100
# examples/mistakes.png (common/run/scores.py).
SIDE = 64  # pixels of a square
SHOWN = 24  # squares in a row
OF_THIS_RUN = ("--output_dir", "--train_url", "--resume", "--overwrite")  # left out of the command to train again
WIDEST = 384  # the most pixels in the width or height of an embedded picture
SAMPLES = ("Samples", "样本数")
EPOCH = ("Epoch", "Epoch")
# The phases in common/run/clock.py.
PHASES = ("waiting_for_data", "transfer", "compute", "evaluation", "saving", "paused", "waiting_for_storage")
WORDS = {
    "waiting_for_data": ("waiting for data", "等待数据"), "transfer": ("transfer", "传输"), "compute": ("compute", "计算"),
    "evaluation": ("evaluation", "评估"), "saving": ("saving", "保存"), "paused": ("paused", "暂停"),
    "waiting_for_storage": ("waiting for a store or a disk", "等待存储"),
    "train_loss": ("training loss", "训练损失"), "loss": ("validation loss", "验证损失"), "lr": ("learning rate", "学习率"),
    "images_per_s": ("images a second", "每秒图像数"), "accuracy": ("accuracy", "准确率"),
    "top5": ("top-5 accuracy", "top-5 准确率"), "balanced_accuracy": ("mean accuracy of the classes", "各类准确率的平均"),
}  # fmt: skip


def of_one(left: RunFiles) -> str:
    by, best = left.best()
    return rendered(
        template.ONE_RUN, left.name, left=left, outcome=outcome(left), marks=figures.MARKS, curves=list(_curves(left, best)),
        events=list(_events(left, by, best)), speed=list(_speed(left)), sources=_sources(left),
        confusion=_confusion(left), classes=_classes(left),
        galleries=list(_galleries(left)), restored=_examples(left), warnings=_warnings(left), options=options_of(left),
        machine=_machine(left), data=left.data(), mistakes=_mistakes(left), epoch=left.scores.get("epoch"), **_commands(left),
    )  # fmt: skip


def rendered(text: str, title: str, **facts: Any) -> str:
    """Return a page with `text` as the template of its main part; all `facts` but SVG are escaped. UserError without jinja2."""
    if why := packages.trouble(packages.PAGE):
        raise UserError(f"the page is made with jinja2: {why}")
    import jinja2

    digest = base64.b64encode(hashlib.sha256(template.SCRIPT.encode()).digest()).decode()
    page = jinja2.Environment(autoescape=True).from_string(template.PAGE.replace("MAIN", text))
    parts = {"style": template.STYLE, "script": template.SCRIPT, "script_hash": f"sha256-{digest}"}
    return page.render(title=title, version=VERSION, now=_time(time.time()), **parts, **facts)


# --- Words ------------------------------------------------------------------------------------------------------------------


def outcome(left: RunFiles) -> dict[str, Any]:
    """Return the facts in the first sentence of the page (`result` in template.py)."""
    by, best = left.best()
    machine = left.start.get("machine")
    file = names.weights(best.get("epoch", 0))
    lowest = " (lowest)" if by and left.start.get("best_is") == "lowest" else ""
    last = max((row.get("time", 0) for row in left.journal + left.speed), default=0)
    return {
        "how": left.end.get("how"), "why": one_line(str(left.end.get("why")))[:300],
        "last": _time(last) if last else None, "done": len(left.epochs), "epochs": left.start.get("epochs"),
        "by": by + lowest, "best": best, "ranks": left.start.get("ranks", 1),
        "value": f"{best[by]:.4f}" if best else "", "range": _range(left, by, best[by]) if best else None,
        "file": file if os.path.exists(os.path.join(left.folder, file)) else None,
        "spent": str(datetime.timedelta(seconds=int(left.seconds()))),
        "device": machine.get("device") if isinstance(machine, dict) else None,
    }  # fmt: skip


def _range(left: RunFiles, by: str, share: float) -> Optional[tuple[str, str, int]]:
    """Return Wilson's 95 % interval of the accuracy, (low, high, images); None for another metric, no images, or MANY."""
    samples = sum(row[0] for row in left.scores.get("by_class", ()))
    if by != "accuracy" or not (0 < samples < MANY and 0 <= share <= 1):
        return None
    middle = share + 2 / samples
    width = 2 * math.sqrt(share * (1 - share) / samples + 1 / samples**2)
    low, high = ((middle + sign * width) / (1 + 4 / samples) for sign in (-1, 1))
    return f"{low:.2f}", f"{high:.2f}", samples


def _events(left: RunFiles, by: str, best: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    rows = [(row, _of_a_start(place, row)) for place, row in enumerate(left.events("start"))]
    rows += [(row, f"{row.get('text')} ({row.get('pause', 0):.1f} s)") for row in left.events("nodes")]
    rows += [(row, f"{row.get('how')}: {row.get('why')}"[:300]) for row in left.events("end")]
    for row, what in sorted(rows, key=lambda pair: pair[0].get("time", 0))[-MOST_ROWS:]:
        yield _time(row.get("time", 0)), f"{row.get('samples', 0):,}", one_line(what)
    if best:
        yield "", f"{best.get('samples', 0):,}", f"best {by}: {best[by]:.4f} in epoch {best.get('epoch')}"


def _of_a_start(place: int, row: dict[str, Any]) -> str:
    from_ = row.get("goes_on_from")
    what = (
        f"restart, going on from {os.path.basename(str(from_))}" if from_ else "start, from the beginning" if place else "start"
    )
    return f"{what} ({count(row.get('ranks', 1), 'rank')})"


def _warnings(left: RunFiles) -> list[tuple[str, int]]:
    """Return [(text, how often)], without the warning that nothing is learnt if later something was."""
    texts = [one_line(str(row.get("text")))[:1000] for row in left.events("warning")]
    if left.has_learnt():
        texts = [text for text in texts if NOTHING_IS_LEARNT not in text]
    return collections.Counter(texts).most_common(MOST_WARNINGS)


def _commands(left: RunFiles) -> dict[str, Any]:
    """Return the commands to go on, to train again elsewhere, and to export, each None if not possible; {} if none is known."""
    command = left.start.get("command")
    kept = []
    if not isinstance(command, str):
        return {}
    with contextlib.suppress(ValueError):  # shlex raises it for a quote that is not closed
        rest = iter(shlex.split(command))
        for word in rest:
            name, equals, _ = word.partition("=")
            if name not in OF_THIS_RUN:
                kept.append(word)
            elif not equals:
                next(rest, None)
    again = shlex.join([*kept, "--output_dir", f"output_dir/{left.start.get('job')}_again"])
    use = left.start.get("use") if left.scores else None
    return {"go_on": None if left.end.get("how") == "finished" else command, "again": again if kept else None, "use": use}


def options_of(left: RunFiles) -> list[tuple[str, str, str]]:
    options = left.start.get("options")
    return [
        (name, str(pair[0]), str(pair[-1])) for name, pair in (options.items() if isinstance(options, dict) else ()) if pair
    ]


def _machine(left: RunFiles) -> list[tuple[str, str]]:
    tables = [table for table in (left.start.get("machine"), left.start.get("versions")) if isinstance(table, dict)]
    tables.append({name: left.start[name] for name in ("platform", "nodes", "ranks", "global_batch") if name in left.start})
    return [(name.replace("_", " "), str(value)) for table in tables for name, value in table.items()]


# --- Curves -----------------------------------------------------------------------------------------------------------------


def figure(name: str, title: tuple, legend: Sequence, heads: Sequence, rows: Sequence, svg: str) -> dict:
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


def _curves(left: RunFiles, best: dict) -> Iterator[dict]:
    marks = [("restart", row.get("samples", 0)) for row in left.events("start")[1:]]
    marks += [("nodes", row.get("samples", 0)) for row in left.events("nodes")]
    marks += [("best", best.get("samples", 0))] if best else []
    names = left.metrics()
    lines = [row for row in left.trained() if "lr" in row]
    panels = [["train_loss", "loss"], *([name, "top5"] if name == "accuracy" else [name] for name in names)]
    for panel in panels:
        shown = [name for name in panel if any(name in row for row in left.epochs)]
        if not shown or panel in (["loss"], ["top5"]):
            continue
        samples = [row.get("samples", 0) for row in left.epochs]
        series = []
        if panel[0] == "train_loss":
            faint = {"color": figures.COLOURS[0], "alpha": 0.35, "linewidth": 1}
            series = [([row.get("samples", 0) for row in lines], [row.get("loss") for row in lines], faint)]
        for colour, name in zip(figures.COLOURS, shown):
            dots = {"color": colour, "marker": "o" if len(samples) <= 60 else "", "markersize": 3}
            series.append((samples, [row.get(name) for row in left.epochs], dots))
        legend = [(colour, *words(name)) for colour, name in zip(figures.COLOURS, shown) if len(shown) > 1]
        rows = [
            (row.get("epoch"), f"{row.get('samples', 0):,}", *(short(row.get(name)) for name in shown)) for row in left.epochs
        ]
        heads = [EPOCH, SAMPLES, *map(words, shown)]
        title = ("Loss", "损失") if panel[0] == "train_loss" else words(panel[0])
        yield figure(identifier(panel[0]), title, legend, heads, rows, figures.line_chart(identifier(panel[0]), series, marks))
    if lines:
        samples = [row.get("samples", 0) for row in lines]
        rates = [row["lr"] for row in lines]
        rows = figures.thinned([(f"{x:,}", short(y)) for x, y in zip(samples, rates)], MOST_OF_A_CURVE)
        svg = figures.line_chart("lr", [(samples, rates, {"color": figures.COLOURS[2]})], marks)
        yield figure("lr", words("lr"), [], [SAMPLES, words("lr")], rows, svg)


def _speed(left: RunFiles) -> Iterator[dict]:
    """Yield two figures if there are rows: each phase's seconds by epoch or group of epochs, and images a second over time."""
    spent: dict[str, dict[str, float]] = collections.defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
    epochs = sorted({int(row.get("epoch", 0)) for row in left.speed})
    size = -(-len(epochs) // MOST_BARS) or 1
    groups = [epochs[place : place + size] for place in range(0, len(epochs), size)]
    name_of = {epoch: f"{group[0]}-{group[-1]}" if size > 1 else f"{epoch}" for group in groups for epoch in group}
    for row in left.speed:
        for phase in PHASES:
            spent[name_of[int(row.get("epoch", 0))]][phase] += max(0.0, row.get(phase, 0.0))
    if not spent:
        return
    phases = [phase for phase in PHASES if any(bar[phase] for bar in spent.values())]
    legend = [(colour, *words(phase)) for colour, phase in zip(figures.COLOURS, phases)]
    rows = [(name, *(f"{bar[phase]:.2f}" for phase in phases)) for name, bar in spent.items()]
    svg = figures.bars("phases", list(spent), [[bar[phase] for bar in spent.values()] for phase in phases])
    yield figure("phases", ("Seconds of each epoch", "每个 epoch 的秒数"), legend, [EPOCH, *map(words, phases)], rows, svg)

    rated = [row for row in left.speed if "images_per_s" in row]
    one_step = left.start.get("global_batch")  # rows of one step are left out: they include the wait for an epoch's first batch
    rated = [row for row in rated if row.get("images") != one_step] or rated
    minutes = [(row.get("time", 0) - left.speed[0].get("time", 0)) / 60 for row in rated]
    rates = [row["images_per_s"] for row in rated]
    rows = [(f"{minute:.1f}", short(rate), row.get("peak_memory_mib")) for minute, rate, row in zip(minutes, rates, rated)]
    heads = [("Minutes", "分钟"), words("images_per_s"), ("Peak memory, MiB", "内存峰值，MiB")]
    svg = figures.line_chart("rate", [(minutes, rates, {"color": figures.COLOURS[0]})])
    title = ("Images a second, over minutes", "每秒图像数（横轴：分钟）")
    yield figure("rate", title, [], heads, figures.thinned(rows, MOST_OF_A_CURVE), svg)


def _sources(left: RunFiles) -> list[tuple]:
    """Return a row for each epoch in which data came: MiB from a bucket, those ahead of their shard, on the disk; seconds."""
    came = collections.defaultdict(lambda: [0.0] * 4)
    for row in left.speed:
        for place, name in enumerate((*CAME, "waiting_for_storage")):
            came[int(row.get("epoch", 0))][place] += row.get(name, 0)
    rows = [
        (epoch, *(f"{size:.1f}" for size in (bucket + first, first, disk, waited)))
        for epoch, (bucket, first, disk, waited) in came.items()
        if bucket + first + disk
    ]
    return figures.thinned(rows, MOST_ROWS)


# --- What it got wrong ------------------------------------------------------------------------------------------------------


def _confusion(left: RunFiles) -> Optional[dict]:
    """Return "names" and "rows" of the matrix or, if it is too large, the most frequent "pairs". None without scores."""
    if not left.scores:
        return None
    names = left.scores["names"]
    cells = left.scores["cells"]
    totals = collections.Counter()
    for true, _, times in cells:
        totals[true] += times
    used = sorted({place for true, given, _ in cells for place in (true, given)})
    if len(used) > MOST_COLUMNS:
        wrong = sorted((cell for cell in cells if cell[0] != cell[1]), key=lambda cell: -cell[2])[:MOST_COLUMNS]
        return {"pairs": [(names[true], names[given], times, f"{times / totals[true]:.1%}") for true, given, times in wrong]}
    rows = {true: dict.fromkeys(used, (0, 0.0)) for true in used}
    for true, given, times in cells:
        rows[true][given] = times, round(times / totals[true], 3)
    return {
        "names": [names[place] for place in used],
        "rows": [(names[true], list(row.values())) for true, row in rows.items()],
    }


def _classes(left: RunFiles) -> list[tuple]:
    """Return a row for each class that has images, the lowest recall first."""
    rows = [row for row in zip(left.scores.get("names", ()), left.scores.get("by_class", ())) if row[1][0]]
    rows.sort(key=lambda row: row[1][1])
    return [(name, samples, *(f"{fraction:.4f}" for fraction in fractions)) for name, (samples, *fractions) in rows]


def _mistakes(left: RunFiles) -> list[tuple]:
    rows = left.scores.get("mistakes", {}).get("all", [])
    return [(one["name"], one["class"], one["predicted"], f"{one['sure']:.0%}") for one in rows]


def _galleries(left: RunFiles) -> Iterator[tuple]:
    sheet = _picture(left, "mistakes")
    seen = set()
    for row, kind in enumerate(("worst", "surest")):
        shots = left.scores.get("mistakes", {}).get(kind, [])[:SHOWN]
        if {shot["id"] for shot in shots} <= seen:  # none, or so few mistakes that it would repeat the gallery before
            return
        seen |= {shot["id"] for shot in shots}
        boxes = [(column * SIDE, row * SIDE, (column + 1) * SIDE, (row + 1) * SIDE) for column in range(len(shots))]
        yield kind, [{**shot, "image": _encoded(sheet.crop(box)) if sheet else None} for shot, box in zip(shots, boxes)]


def _examples(left: RunFiles) -> Optional[dict]:
    """Return the newest sheet of examples, cut into rows of three pictures; None if there is none that can be used."""
    for event in reversed(left.events("picture")):
        name = os.path.basename(str(event.get("name")))
        high = int(event.get("rows", 0))
        columns = event.get("columns")
        strip = _picture(left, name)
        fits = strip and 1 <= high <= min(16, strip.height) and strip.width >= 3
        if fits and isinstance(columns, list) and len(columns) == 3:
            width = strip.width // 3
            height = strip.height // high
            boxes = [[(x * width, y * height, (x + 1) * width, (y + 1) * height) for x in range(3)] for y in range(high)]
            rows = [[_encoded(strip.crop(box)) for box in row] for row in boxes]
            return {"name": name, "columns": [one_line(str(column)) for column in columns], "rows": rows}
    return None


def _picture(left: RunFiles, name: str) -> Any:
    from PIL import Image

    try:
        with Image.open(os.path.join(left.folder, "examples", f"{name}.png")) as opened:
            return opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # there is none, or it is damaged
        return None


def _encoded(picture: Any) -> str:
    """Shrink a picture in place to at most WIDEST pixels a side, and return it as a data: URL."""
    content = io.BytesIO()
    picture.thumbnail((WIDEST, WIDEST))
    picture.save(content, "JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


# --- Forms ------------------------------------------------------------------------------------------------------------------


def identifier(name: str) -> str:
    """Return a name as an HTML id of at most 40 characters: all but ASCII letters and digits become _."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in name)[:40]


def short(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(max(0.0, seconds), datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
