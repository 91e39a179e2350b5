"""What make bench does with its rows; the benchmarks themselves judge speed, so no test runs them."""

import re
from pathlib import Path

import pytest
import torch

from common.storage import download, etag
from tests.benchmarks import __main__ as bench
from tests.benchmarks import libraries, storage
from tests.benchmarks.__main__ import RECORDED, fallen, recorded

TABLE = """
| what | beside | first take | second take | measured by |
|---|---|---|---|---|
| photographs: packed | torchvision | 2.12 (1.99 to 2.24) | 2.50 (1.99 to 2.60) | `python -m tests.benchmarks.images` |
| a step | plain | 1.00 (0.9 to 1.1) | | `python -m tests.benchmarks.base` |
| objects/s of another table | 7.00 (6.00 to 8.00) |
"""


def test_the_newest_median_of_each_row_is_read():
    assert recorded(TABLE) == {("photographs: packed", "torchvision"): 2.5, ("a step", "plain"): 1.0}
    assert len(recorded(RECORDED.read_text())) > 40, f"the table of {RECORDED} has another form"


def test_a_row_that_fell_is_named_and_no_other():
    def row(what, peer, **ratio):
        return {"what": what, "peer": peer, **ratio}

    rows = [
        row("photographs: packed", "torchvision", ratio=2.24), row("a step", "plain", ratio=0.95),
        row("something new", "plain", ratio=0.1), row("a step", "another", missing="not installed"),
    ]  # fmt: skip
    assert fallen(rows, recorded(TABLE)) == ["photographs: packed, beside torchvision: 2.24, recorded 2.50"]


def test_whatever_keeps_rows_is_started():
    folder = Path(bench.__file__).parent
    keeps = re.compile(r"rows\.keep\(|forked import .*table")
    keep_rows = {path.stem for path in folder.glob("*.py") if keeps.search(path.read_text())} - {"forked"}
    started = {name: bench.WORDS.get(name, [name]) for name in bench.BENCHMARKS}
    assert {module for module, *_ in started.values()} == keep_rows
    for module, *options in started.values():
        assert all(f'"{option}"' in (folder / f"{module}.py").read_text() for option in options)


def test_a_fetch_that_is_not_verified_takes_every_byte_for_right(monkeypatch):
    """What the digests cost is measured against it."""
    fetched = []

    def fetch(*where):
        hasher = etag.Hasher("0" * 32, 5, 5)
        hasher.update(b"other")
        fetched.append(hasher.matches() and download.hashlib.md5(b"other").hexdigest() == "0" * 32)

    monkeypatch.setattr(storage, "ours", fetch)
    storage.ours_unverified("large", "folder")
    hasher = etag.Hasher("0" * 32, 5, 5)
    hasher.update(b"other")
    assert fetched == [True] and hasher.matches() is False


def test_a_loop_of_another_library_is_measured_between_two_steps_as_ours_is():
    found = []
    training = libraries.Training(
        torch.nn.Linear(2, 3),
        torch.nn.CrossEntropyLoss(),
        [(torch.ones(5, 2), torch.zeros(5).long())],
        torch.device("cpu"),
        "float32",
        libraries.Steps(2, 5, 5, lambda: None, _ends_with(found)),
    )
    with pytest.raises(StopAsyncIteration):
        libraries.plain(training)
    assert len(found[0]["images/s"]) == 3 and min(found[0]["images/s"]) > 0
    assert found[0]["seconds to"]["the second step"] >= found[0]["seconds to"]["the first step"] > 0
    assert found[0]["CPU seconds to the first step"] > 0


def _ends_with(found):
    def end(figures):
        found.append(figures)
        raise StopAsyncIteration

    return end
