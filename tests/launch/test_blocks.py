"""The five things that hold of every feature job: complete, insert-only where promised, neutral, necessary, composable."""

import ast
import itertools
import re
import subprocess
import sys

import pytest

from launch import blocks
from tests.tools.jobs import ROOT, TINY, assert_same_bits, final_state, run_job, slow_ones_marked

FEATURE_JOBS = blocks.feature_jobs()
BASE = blocks.BASE.read_text()
SINGLE = [path for path in FEATURE_JOBS if path.stem.count("_") == 1]


def test_there_are_feature_jobs():
    features = {path.name for path in FEATURE_JOBS}
    assert {
        "train_dp.py",
        "train_ddp.py",
        "train_amp.py",
        "train_dali.py",
        "train_dpex.py",
        "train_ddp_amp.py",
        "train_exact.py",
        "train_ddp_exact.py",
    } <= features
    bases = {"train.py", "train_imagenet.py", "train_restore.py", "speedrun.py"}
    assert bases | features <= {path.name for path in blocks.JOBS.glob("*.py")}


# --- 1. Complete, 2. insert-only ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FEATURE_JOBS, ids=lambda path: path.name)
def test_reverting_the_blocks_gives_train_py_byte_for_byte(path):
    assert "\n".join(blocks.read(path)[0]) == BASE


@pytest.mark.parametrize("path", FEATURE_JOBS, ids=lambda path: path.name)
def test_the_tags_are_those_of_the_file_name_and_the_how_to_start_is_below_the_docstring(path):
    base, found = blocks.read(path)
    assert {block.tag.lower() for block in found} == set(path.stem.split("_")[1:])
    below_the_docstring = base.index('"""', 1) + 2
    for tag in {block.tag for block in found}:
        first = next(block for block in found if block.tag == tag)
        assert first.position == below_the_docstring and "how to start it, and when" in first.text[0]
        assert first.text[1] == '__doc__ = f"""{__doc__}' and first.text[-2] == '"""'


@pytest.mark.parametrize("tag", ["DDP", "DP"])
def test_commenting_out_an_insert_only_feature_is_the_single_card_job(tag):
    """The promise of the ModelArts document, taken literally: every line inside the markers gets a # in front."""
    path = blocks.job_of(tag)
    assert all(not block.replaced for block in blocks.read(path)[1])
    inside, lines = False, []
    for line in path.read_text().split("\n"):
        opening, closing = blocks.OPEN.fullmatch(line), blocks.CLOSE.fullmatch(line)
        inside = (inside or bool(opening)) and not closing
        lines.append(f"# {line}" if inside and not opening else line)
    assert ast.dump(ast.parse("\n".join(lines))) == ast.dump(ast.parse(BASE)), "it is another program than the base"


# --- 3. Neutral --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", slow_ones_marked(path.stem for path in FEATURE_JOBS if "amp" not in path.stem))
def test_with_one_process_on_a_cpu_the_weights_are_those_of_the_base(job, finished, tmp_path):
    run_job(job, tmp_path, *TINY)
    assert_same_bits(final_state(tmp_path), final_state(finished[0]))


# --- 5. Composable -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [path for path in FEATURE_JOBS if path not in SINGLE], ids=lambda path: path.name)
def test_a_composition_equals_what_the_tool_makes_of_its_parts(path):
    assert "\n".join(blocks.compose([tag.upper() for tag in path.stem.split("_")[1:]])) == path.read_text()


@pytest.mark.parametrize(
    "pair", list(itertools.combinations([path.stem.split("_")[1].upper() for path in SINGLE], 2)), ids="+".join
)
def test_every_pair_composes_and_reverts_or_is_refused_in_a_sentence(pair):
    if pair in blocks.EXCLUSIVE or pair[::-1] in blocks.EXCLUSIVE:
        with pytest.raises(blocks.BlockError, match="do not go together: "):
            blocks.compose(pair)
        return
    lines = blocks.compose(pair)
    base, found = blocks.parse(lines, "composition")
    assert "\n".join(base) == BASE
    for tag in pair:
        alone = blocks.apply(base, [block for block in found if block.tag == tag])
        assert "\n".join(alone) == blocks.job_of(tag).read_text()
    assert lines == blocks.compose(pair[::-1])


def test_two_features_that_replace_the_same_line_are_refused(monkeypatch, tmp_path):
    one = BASE.replace(
        "            loss.backward()\n",
        "            ### DALI: why ###\n            # was: loss.backward()\n            pass\n            ### end DALI ###\n",
    )
    (tmp_path / "train.py").write_text(BASE)
    (tmp_path / "train_dali.py").write_text(one)
    (tmp_path / "train_amp.py").write_text(blocks.job_of("AMP").read_text())
    monkeypatch.setattr(blocks, "JOBS", tmp_path)
    with pytest.raises(blocks.BlockError, match=r"DALI and AMP both replace line \d+ of train.py: loss.backward\(\)"):
        blocks.compose(["DALI", "AMP"])


# --- The tool ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, where, rule",
    [
        ("### DDP: why ###\nx\n", 1, "never closed"),
        ("x\n### end DDP ###", 2, "closes a block that was never opened"),
        ("### DDP: why ###\nx\n### end AMP ###", 3, "does not match DDP, opened in line 1"),
        ("### DDP: why ###\nx\n### AMP: why ###\nx\n### end AMP ###\n### end DDP ###", 3, "blocks do not nest"),
        ("### DDP: why ###\nx\n    ### end DDP ###", 3, "is not indented as its first line, line 1"),
        ("### DDP: why ###\n### end DDP ###", 2, "no line of its own"),
        ("### DDP: why ###\n# was: x\n### end DDP ###", 3, "no line of its own"),
        ("### DDP ###\nx\n### end DDP ###", 1, "has the form"),
        ("### DDP: ###\nx\n### end DDP ###", 1, "has the form"),
        ("#### DDP: why ###\nx", 1, "has the form"),
        ("# was: x", 1, "outside of a block"),
        ("### DDP: why ###\nx\n# was: y\n### end DDP ###", 3, "directly below the first line"),
        ("### DDP: why ###\n  # was: y\nx\n### end DDP ###", 2, "is not indented as its block"),
    ],
)
def test_an_error_names_file_line_and_rule(text, where, rule):
    with pytest.raises(blocks.BlockError) as error:
        blocks.parse(text.split("\n"), "job.py")
    assert str(error.value).startswith(f"job.py:{where}: ") and rule in str(error.value)


@pytest.mark.parametrize("path", SINGLE, ids=lambda path: path.name)
def test_no_marker_can_be_lost_unnoticed(path):
    """Every marker and every `was` line taken out in turn: the parser complains, or the base is no longer the base."""
    lines = path.read_text().split("\n")
    marks = [number for number, line in enumerate(lines) if line.lstrip().startswith(("###", "# was:"))]
    assert len(marks) >= 4
    for number in marks:
        try:
            base = blocks.parse(lines[:number] + lines[number + 1 :], "job")[0]
        except blocks.BlockError:
            continue
        assert "\n".join(base) != BASE, lines[number]


def test_formatters_leave_the_blocks_alone():
    done = subprocess.run([sys.executable, "-m", "ruff", "format", "--check", "jobs"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A copy of the jobs in which the base may be changed."""
    for path in [blocks.BASE, *FEATURE_JOBS]:
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(blocks, "JOBS", tmp_path)
    monkeypatch.setattr(blocks, "BASE", tmp_path / "train.py")
    return tmp_path


@pytest.mark.parametrize(
    "old, new",
    [
        ("    torch.manual_seed(args.seed)\n", "    torch.manual_seed(args.seed)\n    print('a new line')\n"),
        ("    loss_fn = torch", "    # A comment above the loss.\n    loss_fn = torch"),
        ("    device = devices.choose(args)\n", "    device = devices.choose(args)\n    print(device)\n"),
        ("            optimizer.zero_grad()\n", "            optimizer.zero_grad(set_to_none=True)\n"),
        ('"""Train ResNet-18', '"""Train a ResNet-18'),
    ],
)
def test_an_edit_of_the_base_is_one_edit(house, old, new):
    assert BASE.count(old) == 1
    (house / "train.py").write_text(BASE.replace(old, new))
    assert blocks.main(["rebase"]) == 0
    for path in blocks.feature_jobs():
        assert "\n".join(blocks.read(path)[0]) == BASE.replace(old, new)
        assert [block.text for block in blocks.read(path)[1]] == [
            block.text for block in blocks.read(ROOT / "jobs" / path.name)[1]
        ]


def test_a_rebase_that_cannot_be_done_changes_nothing(house, capsys):
    (house / "train.py").write_text(
        BASE.replace("loss = loss_fn(model(images), labels)", "loss = loss_fn(model(images), labels) * 2")
    )
    before = {path: path.read_text() for path in blocks.feature_jobs()}
    assert blocks.main(["rebase"]) == 2
    assert re.search(r"train_amp.py: the AMP block .* replaces a line that has changed", capsys.readouterr().err)
    assert before == {path: path.read_text() for path in blocks.feature_jobs()}


def test_the_commands_print_what_they_promise(capsys):
    assert blocks.main(["show", str(blocks.job_of("DP"))]) == 0
    assert "model = torch.nn.DataParallel(model)" in capsys.readouterr().out
    assert blocks.main(["revert", str(blocks.job_of("AMP"))]) == 0
    assert capsys.readouterr().out == BASE
    assert blocks.main(["compose", "ddp", "amp"]) == 0
    assert capsys.readouterr().out == (ROOT / "jobs" / "train_ddp_amp.py").read_text()
    assert blocks.main(["compose", "XYZ"]) == 2
    assert "there is no feature XYZ; there are DP, DDP, DALI, DPEX, AMP" in capsys.readouterr().err


def test_a_block_is_shown_with_the_line_that_it_comes_after(tmp_path, capsys):
    job = tmp_path / "job.py"
    job.write_text("### DP: one ###\na = 1\n### end DP ###\nb = 2\n### DP: two ###\nc = 3\n### end DP ###\n")
    assert blocks.main(["show", str(job)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line[:2] == "# "] == [
        "# at the top",
        "# after line 1: b = 2",
    ]


def test_the_page_on_blocks_shows_the_tools_real_output():
    assert blocks.table() in (ROOT / "docs" / "blocks.md").read_text()


def test_what_somebody_wrote_is_never_lost(house, capsys, tmp_path):
    """Neither an edit outside the blocks of one job, nor a file that is no job of ours."""
    job = house / "train_ddp.py"
    job.write_text(job.read_text().replace("model.train()", "model.eval()"))
    assert blocks.main(["rebase"]) == 2
    assert "differ outside their blocks, in line" in capsys.readouterr().err and "model.eval()" in job.read_text()
    (tmp_path / "elsewhere").mkdir()
    mine = tmp_path / "elsewhere" / "mine.py"
    mine.write_text("my own work\n")
    assert blocks.main(["compose", "DP", "-o", str(mine)]) == 2
    assert "exists and is not train.py with blocks" in capsys.readouterr().err and mine.read_text() == "my own work\n"


def test_a_changed_block_comes_into_the_jobs_that_combine_it(house, capsys):
    single, both = house / "train_ddp.py", house / "train_ddp_amp.py"
    old = "    group.start_workers(args)\n"
    single.write_text(single.read_text().replace(old, old + "    print(args.lr)\n"))
    assert blocks.main(["compose", "DDP", "-o", str(both)]) == 2
    assert "train_ddp_amp.py would lose blocks" in capsys.readouterr().err and "print(args.lr)" not in both.read_text()
    assert blocks.main(["compose", "DDP", "AMP", "-o", str(both)]) == 0
    assert both.read_text().replace("    print(args.lr)\n", "") == (ROOT / "jobs" / both.name).read_text()


def test_the_file_that_a_feature_is_read_from_does_not_lose_it(house, capsys, tmp_path):
    job = house / "train_ddp.py"
    before = job.read_text()
    assert blocks.main(["compose", "DP", "-o", str(house / "train.py")]) == 2
    assert "train.py is what every job is made from" in capsys.readouterr().err
    for words in (["revert", str(job)], ["compose", "DP"]):
        assert blocks.main([*words, "-o", str(job)]) == 2
        assert "train_ddp.py would lose blocks that compose and rebase read from there" in capsys.readouterr().err
    assert job.read_text() == before
    assert blocks.main(["compose", "DDP", "-o", str(job)]) == 0 and job.read_text() == before
    assert blocks.main(["revert", str(job), "-o", str(tmp_path / "single.py")]) == 0
    job.write_text((house / "train.py").read_text())  # by hand
    capsys.readouterr()
    assert blocks.main(["compose", "DDP", "AMP"]) == 2
    assert "train_ddp.py has no blocks any more" in capsys.readouterr().err
    assert blocks.main(["show", str(job)]) == 0
    assert "train_ddp.py has no blocks" in capsys.readouterr().out


# --- The form of ModelArts' sample -----------------------------------------------------------------------------------------

# The same line opens and closes a block. The commas are those of ASCII or of full width, also in one pair of lines.
THEIRS = """#### any other comment ####
rank, shown = 0, []
    # 分布式改造, in another comment
### 分布式改造,进程, 由平台给出 ###
rank = 1

shown.append("started")
### 分布式改造\uff0c进程\uff0c由平台给出 ###
for step in range(2):
    ### 分布式改造,打印 ###
    shown.append(rank)
    ### 分布式改造,打印 ###
    shown.append(step)
"""
SINGLE_CARD = """#### any other comment ####
rank, shown = 0, []
    # 分布式改造, in another comment
for step in range(2):
    shown.append(step)
"""


@pytest.fixture
def sample(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text(THEIRS, encoding="utf-8")
    return path


def test_a_script_of_the_vendor_is_listed_shown_and_reverted(sample, tmp_path, capsys):
    assert blocks.main(["list", str(sample)]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [f"| `{sample}` | 2 | 3 | 0 |"]
    assert blocks.main(["show", str(sample)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# after line 3: # 分布式改造, in another comment\n### 分布式改造,进程, 由平台给出 ###\nrank = 1\n")
    assert "# after line 4: for step in range(2):\n    ### 分布式改造,打印 ###\n    shown.append(rank)\n" in shown
    assert blocks.main(["revert", str(sample)]) == 0
    assert capsys.readouterr().out == SINGLE_CARD
    assert blocks.main(["revert", str(sample), "-o", str(tmp_path / "single.py")]) == 0
    assert (tmp_path / "single.py").read_text(encoding="utf-8") == SINGLE_CARD
    capsys.readouterr()
    assert blocks.main(["revert", str(sample), "-o", str(sample)]) == 2, "nobody's work is lost"
    assert "exists and is not train.py with blocks" in capsys.readouterr().err and sample.read_text(encoding="utf-8") == THEIRS


@pytest.mark.parametrize(
    "old, new, error",
    [
        ("    ### 分布式改造,打印 ###\n    shown.append(step)", "    shown.append(step)", ":10: the block is never closed"),
        (
            "### 分布式改造,进程, 由平台给出 ###\nrank",
            "### 分布式改造,别的 ###\nrank",
            ":8: the block of line 4 ends with another",
        ),
    ],
)
def test_a_block_of_the_vendor_that_is_not_closed_is_refused(sample, old, new, error, capsys):
    assert THEIRS.count(old) == 1
    sample.write_text(THEIRS.replace(old, new), encoding="utf-8")
    assert blocks.main(["revert", str(sample)]) == 2
    assert f"{sample}{error}" in capsys.readouterr().err


# --- The form of the Template ----------------------------------------------------------------------------------------------

OF_THE_TEMPLATE = """import os

# new #
import sys

# NEW #
@staticmethod
def add(data):

    return data + 1

for step in range(2):
    shown = step
    # new #
    with open(os.devnull) as file:

        shown += 1
    # with a comment
    shown = add(shown)
print(shown)
"""


def test_a_script_of_the_template_is_listed_and_shown_and_cannot_be_reverted(tmp_path, capsys):
    script = tmp_path / "train_DDP.py"
    script.write_text(OF_THE_TEMPLATE)
    assert blocks.main(["list", str(script)]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [f"| `{script}` | 3 | 7 | 0 |"]
    base, found = blocks.read(script)
    assert [block.text[-1] for block in found] == ["import sys", "    return data + 1", "    shown = add(shown)"]
    assert [line for line in base if line] == ["import os", "for step in range(2):", "    shown = step", "print(shown)"]
    assert blocks.main(["show", str(script)]) == 0
    assert "# after line 1: import os\n# new #\nimport sys\n" in capsys.readouterr().out
    assert blocks.main(["revert", str(script)]) == 2
    assert (
        f"{script}: a block below # new # does not say which lines it replaced: take the script that" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "text, error",
    [
        ("a = 1\n# new #\n\nb = 2\n", ":2: below # new # is no line of its block"),
        ("# new #\na = (\n", ":2: this is no line of"),
    ],
)
def test_a_script_of_the_template_that_cannot_be_read_is_named(text, error, tmp_path, capsys):
    (tmp_path / "script.py").write_text(text)
    assert blocks.main(["show", str(tmp_path / "script.py")]) == 2
    assert error in capsys.readouterr().err


def test_what_has_no_blocks_says_which_there_are(tmp_path, capsys):
    (tmp_path / "script.py").write_text("a = 1\n")
    assert blocks.main(["show", str(tmp_path / "script.py")]) == 0
    printed = capsys.readouterr().out
    assert "has no blocks: they begin with `### TAG: why ###`" in printed and "`# new #` as in the Template" in printed
