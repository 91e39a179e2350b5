"""Plain scripts become jobs by ten lines: common/start.py."""

import difflib
import re

import pytest

from common.checkpoints import checkpoint
from common.start import Job
from tests.tools.jobs import ROOT, assert_same_bits, in_rehearsal, run_forked
from tests.tools.plain_scripts import SCRIPTS, as_a_job

RANKS = in_rehearsal([(name, ranks) for name in SCRIPTS for ranks in (1, 2)], lambda row: row != ("tokens", 2))


def last_state(output):
    return checkpoint.newest(str(output / "checkpoints"), print)[0]


def train(folder, text, ranks, output, dies=0, code=0, more=()):
    """A start of the script, which is killed after step `dies` of the run, when the checkpoint before is written."""
    steps = [line for line in text.splitlines(keepends=True) if "run.step(" in line]
    assert len(steps) == 1
    indent = re.match(" *", steps[0]).group()
    kill = "(run.saving.wait(), __import__('os')._exit(9))"  # of rank 0, which writes
    killed = f"{steps[0]}{indent}run.total_steps == {dies} and run.side_files.writes and {kill}\n"
    (folder / "script.py").write_text(text.replace(steps[0], killed if dies else steps[0]))
    words = [folder / "script.py", "--nproc_per_node", ranks, "--save_steps", 5, "--output_dir", output, *more]
    return run_forked(words, folder, {"PYTHONPATH": str(ROOT)}, check=code)


@pytest.mark.parametrize("name", SCRIPTS)
def test_ten_lines_are_changed_or_added(name):
    """One more where gradients are accumulated, and where a schedule follows a number that all processes have to have."""
    plain = SCRIPTS[name][0].splitlines()
    changed = [line for line in difflib.ndiff(plain, as_a_job(name).splitlines()) if line[:2] == "+ " and line[2:].strip()]
    assert len(changed) <= 10 + (name in ("tokens", "plateau")), changed


@pytest.mark.parametrize("name, ranks", RANKS)
def test_killed_twice_it_ends_with_the_same_bits(tmp_path, name, ranks):
    text = as_a_job(name)
    whole = train(tmp_path, text, ranks, "whole")
    assert f"rank 0 of {ranks}" in whole.stdout and "warning: " not in whole.stdout, whole.stdout
    for dies in (7, 11):
        train(tmp_path, text, ranks, "killed", dies, code=9 if ranks == 1 else 1)
    last = train(tmp_path, text, ranks, "killed")
    assert "going on from" in last.stdout
    assert_same_bits(last_state(tmp_path / "killed"), last_state(tmp_path / "whole"))


def test_the_errors_of_a_script_are_those_of_a_job(tmp_path):
    text = as_a_job("vectors")
    for wrong, said in (
        (text.replace("job.loader(train_data, shuffle=True)", "job.loader(train_data)"), "call job.loader(train_set, shuffle=True)"),
        (text.replace("job.loader(test_data", "job.loader(test_data, shuffle=True"), "job.loader(shuffle=True) was called twice"),
        (text.replace("len(test_data)))", "50))"), "job.mean(total, 50): give the length of the data set that is evaluated: 100"),
    ):  # fmt: skip
        done = train(tmp_path, wrong, 1, "out", code=1, more=["--resume", "never", "--overwrite", "true"])
        assert said in done.stderr.splitlines()[-1]
    for wrong, said in (
        (text.replace("job = start(__doc__, epochs=3", "job = start(__doc__, epoch=3"), "there is no option --epoch;"),
        (text.replace("net = job.parallel(net)", "job.parallel(net)"), "give job.run() what job.parallel(network) has returned"),
        (text.replace("net.parameters()", "[*net.parameters(), torch.nn.Parameter(torch.ones(1))]"), "optimizer has weights of a network"),
        (text.replace("job.mean(correct, len(test_data))", "correct / len(test_data)"), "add the parts of all processes up by job.sum()"),
        (text.replace("run.steps(train_loader)", "run.steps(test_loader)"), "run.steps() was given another _EvaluationLoader than job.loader(train_set, shuffle=True)"),
    ):  # fmt: skip
        done = train(
            tmp_path, wrong, 2, "out", code=1 if "--epoch;" in said else 2, more=["--resume", "never", "--overwrite", "true"]
        )
        assert said in done.stderr, done.stderr
    (tmp_path / "script.py").write_text(text)
    done = run_forked(["-m", "script"], tmp_path, {"PYTHONPATH": str(ROOT)}, check=2)
    assert "python my_script.py, and not python -m" in done.stderr
    done = run_forked([tmp_path / "script.py", "--ephocs", 3], tmp_path, {"PYTHONPATH": str(ROOT)}, check=2)
    assert done.stderr.startswith("error: unknown option --ephocs: did you mean --epochs?")


def test_what_a_job_offers_is_what_the_file_says():
    names = [name for name in vars(Job) if not name.startswith("_")]
    assert names == ["loader", "parallel", "run", "sum", "mean", "say"]
