"""What all verbs do alike: they split at --, refuse a missing job with the same words, and end with an exit code and one line."""

import argparse
import importlib
import re
import subprocess
import sys

import pytest

from common.errors import TrainingFailed, UserError
from launch import options
from launch.__main__ import VERBS
from launch.__main__ import main as launch
from tests.tools.jobs import ROOT, environment


@pytest.mark.parametrize(
    "words, own, jobs",
    [
        ([], [], []),
        (["a", "--b"], ["a", "--b"], []),
        (["a", "--", "--b", "--", "c"], ["a"], ["--b", "--", "c"]),
        (["--"], [], []),
    ],
)
def test_the_words_after_the_first_dashes_are_the_jobs(words, own, jobs):
    assert options.split_words(words) == (own, jobs)


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "jobs/none.py"],
        ["local", "jobs/none.py", "--", "--epochs", "1"],
        ["bundle", "jobs/none.py"],
        ["bundle", "jobs/none.py", "--folder", "dist/none"],
        ["blocks", "show", "jobs/none.py"],
        ["submit", "--platform", "local", "jobs/none.py"],
    ],
    ids=" ".join,
)
def test_a_missing_job_is_refused_with_the_same_words_by_every_verb(words, capsys):
    verb = importlib.import_module(f"launch.{words[0]}")
    try:
        code = verb.main(words[1:])
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and error.endswith("error: there is no job jobs/none.py: give a job's file, such as jobs/train_ddp.py")


class Made(Exception):
    """With the parser of a verb."""


@pytest.mark.parametrize("verb", VERBS)
def test_help_says_what_each_option_of_a_verb_does(verb, monkeypatch):
    def parse(parser, *_):
        raise Made(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    with pytest.raises(Made) as made:
        importlib.import_module(f"launch.{verb}").main([])
    parsers = [made.value.args[0]]
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += set(action.choices.values())
                assert len([one for one in action._choices_actions if one.help]) == len(set(action.choices.values()))
            else:
                assert action.help, action.dest


@pytest.mark.parametrize(
    "error, code, said",
    [
        (UserError("give\nless"), 2, "error: give\\nless\n"),
        (TrainingFailed("no cache server answers"), 1, "error: no cache server answers\n"),
        (OSError(13, "Permission denied", "out\n"), 2, "error: out\\n: Permission denied\n"),
        (OSError(28, "No space left on device"), 1, "error: No space left on device\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_is_one_line_and_an_exit_code(error, code, said, capsys):
    def work():
        raise error

    assert options.run_for_exit_code(work) == code
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    "words",
    [["local", "--nodes", "999999"], ["local", "--procs", "-1"], ["kspeed", "load", "--threads", "999999"]],
    ids=" ".join,
)
def test_numbers_that_no_machine_can_have_are_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"launch.{words[0]}").main([*words[1:], "jobs/train.py"])
    assert ended.value.code == 2 and "is not a whole number at least 1 and below 1025" in capsys.readouterr().err


def test_a_programming_error_and_a_closed_pipe_are_raised():
    for error in (BrokenPipeError, TypeError):
        with pytest.raises(error):
            options.run_for_exit_code(lambda error=error: (_ for _ in ()).throw(error()))
    assert options.run_for_exit_code(lambda: None) == 0 and options.run_for_exit_code(lambda: 7) == 7


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_launch_says_which_verbs_there_are(words, capsys):
    assert launch(words) == 0
    said = capsys.readouterr().out
    assert all(f"    {verb:8} {what}" in said for verb, what in VERBS.items())


def test_launch_says_which_version_it_is():
    done = subprocess.run(
        [sys.executable, "-m", "launch", "--version"], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "anyrank 0.4.0\n", "")


def test_a_verb_that_is_none_is_one_line_with_the_nearest():
    for word, said in (("bundel", "did you mean bundle?"), ("nothing", "give blocks, doctor, ")):
        done = subprocess.run(
            [sys.executable, "-m", "launch", word], cwd=ROOT, env=environment(), capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"error: launch has no verb '{word}': {said}")


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_says_of_each_argument_what_it_is(verb, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(f"launch.{verb}").main(["--help"])
    told = capsys.readouterr().out
    alone = re.findall(r"^  \S+(?: \S+)*\n(?! {3,}\S)", told, re.MULTILINE)  # an argument with no words beside or below it
    assert "  -h, --help " in told and alone == []
