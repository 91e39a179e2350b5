"""docs/your_own.md: what it quotes are the files of tests/examples, its changes fit the jobs, and its commands train."""

import ast
import json
import re
import shutil
import sys

import pytest

from launch import blocks
from tests.examples.own_platform import skyline
from tests.jobs import ROOT, assert_same_bits, final_state, run_forked
from tests.ranks import fork_ranks
from tests.test_world import resolve

EXAMPLES = ROOT / "tests" / "examples"
PAGE = (ROOT / "docs" / "your_own.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
ROOMS = ["common", "common/models", "common/world", "datasets"]  # where the page puts something


def section(title):
    """What stands below this heading, up to the next one of its rank or a higher."""
    rank, text = re.search(rf"^(##+) {title}\n(.*)", PAGE, re.DOTALL | re.MULTILINE).groups()
    return re.split(rf"^#{{2,{len(rank)}}} ", text, flags=re.MULTILINE)[0]


def changed(text, title):
    """The text with the changes of a section, each of which fits one place in it."""
    diffs = re.findall(r"^```diff\n(.*?)^```", section(title).split("\n### ")[0], re.DOTALL | re.MULTILINE)
    assert diffs
    for diff in diffs:
        old, new = ("".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] in kept) for kept in (" -", " +"))
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def commands(job):
    """The words behind `python` of the page's commands for this job, with the variables before it."""
    lines = re.findall(rf"^ +((?:\w+=\S+ )*)python (jobs/{job}\.py.*)$", PAGE, re.MULTILINE)
    return [(dict(word.split("=") for word in env.split()), words.split()) for env, words in lines]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """The repository after a user has done what the page says, and the folder `arrays`."""
    root = tmp_path_factory.mktemp("house")
    for room in ROOMS:
        (root / room).mkdir()
    for room in ROOMS:
        for path in (ROOT / room).iterdir():
            if not (root / room / path.name).exists():
                (root / room / path.name).symlink_to(path)
    (root / "jobs").mkdir()
    base = (ROOT / "jobs" / "train.py").read_text()
    (root / "jobs" / "train.py").write_text(base)
    (root / "jobs" / "my_network.py").write_text(changed(base, "A network of your own"))
    (root / "jobs" / "my_data.py").write_text(changed(base, "A data set of your own"))
    script = (EXAMPLES / "own_script.py").read_text()
    (root / "jobs" / "own_script.py").write_text(script)
    (root / "jobs" / "everywhere.py").write_text(changed(script, "On every GPU of every node"))
    shutil.copy(EXAMPLES / "own_network.py", root / "common" / "models")
    shutil.copy(EXAMPLES / "own_data.py", root / "datasets")
    rules = root / "common" / "world" / "rules.py"
    text = rules.read_text().replace("def plain(given", f"{own_rule()}\n\ndef plain(given")
    rules.unlink()
    rules.write_text(changed(text, "A platform of your own"))
    run_forked([EXAMPLES / "make_arrays.py"], root)
    return root


def own_rule():
    return next(code for code in PYTHON if code.startswith("def skyline(given"))


def run(house, folder, words, env=None):
    job, *options = words
    folder.mkdir(exist_ok=True)
    if not (folder / "arrays").exists():
        (folder / "arrays").symlink_to(house / "arrays")
    return run_forked([house / job, *options, "--output_dir", folder / "out"], folder, env)


def manifest(folder):
    return json.loads(max((folder / "out" / "checkpoints").glob("*.json")).read_text())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_page_quotes_the_example_line_for_line(path):
    text = path.read_text()
    if path.name == "own_platform.py":  # the page puts it where `node` is
        text = text.replace("from common.world.rules import node\n\n\n", "")
    assert PYTHON.count(text) == 1


def test_a_network_of_your_own(house, tmp_path):
    ((_, words),) = commands("my_network")
    assert "done: " in run(house, tmp_path, words).stdout
    assert manifest(tmp_path)["identity"]["model"].startswith("SmallNet of ") and manifest(tmp_path)["total_steps"] == 20


def test_a_data_set_of_your_own(house, tmp_path):
    ((_, words),) = commands("my_data")
    run(house, tmp_path, words)
    found = manifest(tmp_path)
    assert found["identity"]["data set"] == "real, 640 samples" and found["total_steps"] == 20


def test_a_script_of_your_own_goes_on_to_the_bits_of_a_run_that_was_not_stopped(house, tmp_path):
    (_, first), (_, second), *_ = commands("own_script")
    assert "--max_steps" in first and first[: first.index("--max_steps")] == second
    run(house, tmp_path / "stopped", first)
    done = run(house, tmp_path / "stopped", second)
    assert "epoch 2, after 320 of its samples, step 15" in done.stdout
    run(house, tmp_path / "whole", second)
    assert_same_bits(final_state(tmp_path / "stopped"), final_state(tmp_path / "whole"))
    assert "bright" in (tmp_path / "whole" / "out" / "report.txt").read_text()
    for number in (1, 2):  # the same script with the lines for many GPUs: alone, and as two ranks with half of each batch
        folder = tmp_path / str(number)
        if number == 1:
            run(house, folder, ["jobs/everywhere.py", *second[1:]])
            assert_same_bits(final_state(folder)["model"], final_state(tmp_path / "whole")["model"])
        else:
            folder.mkdir()
            (folder / "arrays").symlink_to(house / "arrays")
            half = [*second[1:], "--batch_size", "32"]
            done = fork_ranks(house / "jobs" / "everywhere.py", folder, *half)
            assert done.returncode == 0 and "rank 0 of 2" in done.stdout, done.stdout + done.stderr
            assert [*manifest(folder)["identity"].values()] == [*manifest(tmp_path / "whole")["identity"].values()]


def test_a_platform_of_your_own(house, tmp_path, monkeypatch):
    (env, words), *two = commands("train") + commands("train_ddp")
    assert "platform skyline (SKY_NODES and SKY_NODE)" in run(house, tmp_path, words, env).stdout
    monkeypatch.setattr(sys.modules["common.world.resolve"], "RULES", [skyline])
    for node, (env, _) in enumerate(two):
        found = resolve({}, env)
        assert (found.platform, found.node_rank, found.num_nodes, found.master_addr) == ("skyline", node, 2, "127.0.0.1")
    played = {"HOST": "127.0.0.1"}
    exec(next(code for code in PYTHON if code.startswith("def skyline(node")), played)
    arguments, env = played["skyline"](1, 2, 6666)
    assert not arguments and resolve({}, env).rank == 1 and resolve({}, env).master_port == 6666
    row = re.search(r'^ +(\("Skyline", .*\)),$', PAGE, re.MULTILINE)[1]
    _, args, env, gpus, expected = ast.literal_eval(row)
    w = resolve(args, env, gpus)
    place = f"{w.node_rank}/{w.num_nodes} {w.local_rank}/{w.local_world_size} {w.rank}/{w.world_size}"
    assert f"{w.platform} {w.level} {place} {w.master_addr}:{w.master_port}" == expected


def test_the_page_on_blocks_shows_what_dp_changes():
    assert f"```\n{blocks.show(blocks.job_of('DP'))}\n```" in (ROOT / "docs" / "blocks.md").read_text()
