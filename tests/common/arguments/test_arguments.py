"""What a job accepts, and what it answers to everything else."""

import contextlib
import copy
import io
import os
import pickle
import random

import pytest

from common import VERSION, arguments
from common.errors import UserError
from datasets import cifar10
from tests.tools.jobs import command, environment, run

PARSER = cifar10.parser("A job.")


def parse(*argv, environ=None):
    return arguments.parse(cifar10.parser("A job."), [str(word) for word in argv], environ or {})


def refusal(*argv):
    """The one line on stderr with which the parser exits 2."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 2
    return errors.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    "argv, name, value",
    [
        (["--lr", "0.01"], "lr", 0.01),
        (["--lr=0.01"], "lr", 0.01),
        (["--epochs", "100"], "epochs", 100),
        (["--enable_gpu", "true"], "enable_gpu", True),
        (["--enable_gpu=False"], "enable_gpu", False),
        ([], "enable_gpu", None),
        (["--custom_data", "true"], "custom_data", True),
        (["--custom_data", "0"], "custom_data", False),
        (["--init_method", "tcp://10.0.0.1:6666"], "init_method", "tcp://10.0.0.1:6666"),
        (["--rank", "1", "--world_size=2", "--init_method=tcp://h:1"], "rank", 1),
        (["--world_size=2", "--rank=0", "--init_method=tcp://h:1"], "world_size", 2),
        (["--local-rank=3"], "local_rank", 3),
        (["--local_rank", "3"], "local_rank", 3),
        (["--output_dir", "/o"], "output_dir", "/o"),
        (["--train_url", "/o"], "output_dir", "/o"),
        (["--data_url=/d"], "data_url", "/d"),
        (["--lr", "0.5", "--lr", "0.1"], "lr", 0.1),
        (["--batch-size", "3"], "batch_size", 3),
        (["--data-url=/d-1/x_y"], "data_url", "/d-1/x_y"),
        (["--custom_data"], "custom_data", True),
        (["--custom-data", "--epochs", "3"], "custom_data", True),
        (["--custom_data", "--epochs", "3"], "epochs", 3),
        (["--custom_data", " No "], "custom_data", False),
        (["--enable-gpu=0"], "enable_gpu", False),
        (["--deterministic", "true"], "deterministic", True),
        ([], "ledger", False),
    ],
)
def test_every_form_that_platforms_use(argv, name, value):
    assert getattr(parse(*argv), name) == value


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--epoch", "3"], ["--epoch", "did you mean --epochs?"]),
        (["--batch-sise", "3"], ["--batch-sise", "did you mean --batch_size?"]),
        (["-b", "256"], ["unknown option -b: did you mean --batch_size?"]),
        (["-lr", "1"], ["unknown option -lr: did you mean --lr"]),
        (["-q"], ["unknown option -q: options begin with two dashes"]),
        (["/data/cifar"], ["'/data/cifar' belongs to no option: did you mean --data_url /data/cifar?"]),
        (["train"], ["'train' belongs to no option"]),
        (
            ["--nproc_per_node", "2"],
            ["--nproc_per_node is for jobs of several devices", "trains on one: add the lines of docs/your_script.md"],
        ),
        (["--zzz", "1", "2"], ["'2' belongs to no option"]),
        (["--custom_data", "/data"], ["'/data' belongs to no option"]),
        (["--schedule", "x" * 100_000], ["letters more"]),
        (["--ouput_dir=/x"], ["--ouput_dir", "did you mean --output_dir?"]),
        (["--custom-dato", "true"], ["did you mean --custom_data?"]),
        (["--enable_gpu", "maybe"], ["--enable_gpu", "'maybe' is neither true nor false"]),
        (["--enable_gpu=maybe"], ["--enable_gpu", "'maybe' is neither true nor false"]),
        (["--lr", "nan"], ["--lr", "'nan' is not a number above 0"]),
        (["--lr", "-1"], ["--lr", "above 0"]),
        (["--lr", "inf"], ["--lr"]),
        (["--epochs", "9" * 400], ["--epochs"]),
        (["--epochs", "9" * 300], ["--epochs"]),
        (["--epochs", "1.5"], ["--epochs", "'1.5' is not a whole number at least 1"]),
        (["--epochs", "0"], ["--epochs", "at least 1"]),
        (["--rank", "-1"], ["--rank", "at least 0"]),
        (["--batch_size", "9" * 5000], ["--batch_size"]),
        (["--schedule", "cosine"], ["--schedule", "one_cycle"]),
        (["--lr", "\x1b[2J"], ["--lr", r"\\x1b"]),
        (["--batch", "3"], ["unknown option --batch: did you mean --batch_size?"]),
        (["--learning_rate", "3"], ["unknown option --learning_rate: did you mean --lr?"]),
        (["--wd=1"], ["unknown option --wd: did you mean --weight_decay?"]),
        (["--num-workers", "3"], ["unknown option --num-workers: did you mean --workers?"]),
        (["--quota", "3"], ["unknown option --quota: where the platform adds it, give --ignore quota"]),
        (["--quota", "3", "--ignore", "another"], ["unknown option --quota"]),
        (["--data_url", "ftp://host/x"], ["ftp://host/x", "give a folder, or an address"]),
        (["--data_url", "a\0b"], ["zero byte"]),
        (["--workers", "257"], ["--workers", "'257' is not a whole number at least 0 and below 257"]),
        (["--epochs", str(2**53)], ["--epochs", "'9007199254740992' is too long: 2**53 is not exact"]),
        (["--epochs", "9" * 400], ["--epochs", "is too long"]),
        (["--workers", "9" * 400], ["--workers", "is not a whole number at least 0 and below 257"]),
    ],
)
def test_a_mistake_is_refused_in_one_line(argv, words):
    line = refusal(*argv)
    assert all(word in line for word in words), line


def test_a_recipe_is_the_options_written_out_and_each_of_them_may_be_given_otherwise():
    written = [word for name, value in cifar10.MODELARTS.items() for word in (f"--{name}", str(value))]
    named, spelt = parse("--recipe", "modelarts"), parse(*written)
    assert named.changed == {**spelt.changed, "recipe": None}
    assert named.given == {"recipe": "modelarts"} and spelt.given == cifar10.MODELARTS
    own = {"changed": {}, "given": {}}
    own_of_the_recipe = {"recipe": "modelarts", "largest_growth": cifar10.CARDS}
    assert {**vars(named), **own} == {**vars(spelt), **own_of_the_recipe, **own}
    assert parse("--lr", "0.1", "--recipe=modelarts").lr == 0.1 and parse("--recipe=modelarts", "--epochs", "2").epochs == 2
    assert "--recipe" in refusal("--recipe", "another")


@pytest.mark.parametrize("argv", [["--resume="], ["--resume", ""], ["--resume", "  "], ["--resume= "]])
def test_a_field_that_was_left_empty_is_not_given(argv):
    for words in (argv, ["--epochs", "3", *argv], [*argv, "--epochs", "3"]):
        args = parse(*words)
        assert args.resume == "auto" and args.epochs == (3 if len(words) > len(argv) else 30)
    assert parse("--data_url=", "--train_url", "", environ={"data_url": "/data", "train_url": "/out"}).data_url == "/data"


@pytest.mark.parametrize("argv", [["--resume= never "], ["--resume", " never\t"]])
def test_blanks_around_a_value_do_not_count(argv):
    assert parse(*argv, "--epochs", " 3 ").resume == "never"


@pytest.mark.parametrize("argv", [["--resume"], ["--resume", "--epochs", "3"]])
def test_an_option_without_its_value_is_refused(argv):
    assert refusal(*argv) == "error: argument --resume: expected one argument; --help lists every option"


def test_what_platforms_append_is_accepted_and_so_is_what_the_user_names(capsys):
    args = parse(
        "--task_index",
        "0",
        "--num_gpus=8",
        "--job_name",
        "x",
        "--zzz-unheard=1",
        "--qqq",
        "2",
        "--ignore",
        "zzz_unheard,--qqq",
        "--lr=3",
    )
    assert args.lr == 3 and not any(capsys.readouterr())
    assert parse("--zzz", "1", "--ignore=zzz", "--yyy", "--ignore=yyy").epochs == 30


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as end:
        parse("--version")
    assert end.value.code == 0 and capsys.readouterr().out == f"anyrank {VERSION}\n"


def test_help_states_every_option_in_a_group_with_its_true_default():
    text = PARSER.format_help()
    defaults = vars(parse())
    for action in PARSER._actions:
        if action.dest in ("help", "version"):
            continue
        assert action.option_strings[0] in text and action.help
        if action.default is not None:
            default = str(action.default).lower() if isinstance(action.default, bool) else action.default
            assert f"(default: {defaults[action.dest] if action.dest in ('lr', 'epochs', 'seed') else default})" in " ".join(
                text.split()
            )
    assert any(action.type is arguments.boolean and action.default is None for action in PARSER._actions)
    assert "(default: none)" not in text.lower()
    of_a_loader = arguments.general_parser("A job.", data="its data", workers=None).format_help()
    assert [" ".join(one.split()).count("unset: this node's cores") for one in (text, of_a_loader)] == [0, 1]
    for group in ("training:", "data:", "distributed", "output and restart:"):
        assert group in text


def random_words(draw):
    """A plausible, damaged or hostile argument list."""
    options = [option for action in PARSER._actions for option in action.option_strings]
    values = [
        "true",
        "false",
        "0",
        "1",
        "-1",
        "nan",
        "1e400",
        "",
        " ",
        "tcp://h:1",
        "../../etc",
        "; rm -rf /",
        "a" * 10000,
        "\n",
        "\x1b[31m",
        "{}",
        "%s%n",
        "--",
        "-",
        "=",
        "日本",
    ]
    words = []
    for _ in range(draw.randrange(8)):
        option = draw.choice(options)
        if draw.random() < 0.3:
            position = draw.randrange(len(option))
            option = option[:position] + draw.choice("abc-_=%\x00") + option[position + draw.randrange(2) :]
        value = draw.choice(values)
        words += draw.choice([[option, value], [f"{option}={value}"], [option], [value]])
    return [word for word in words if word not in ("-h", "--help")]


def test_2000_random_argument_lists_end_with_0_or_2():
    draw = random.Random(7)
    codes = {0: 0, 2: 0}
    for _ in range(2000):
        words = random_words(draw)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            try:
                arguments.parse(PARSER, words, {})
                code = 0
            except (SystemExit, UserError) as stop:  # the second: a place in the world that cannot be
                code = stop.code if isinstance(stop, SystemExit) else stop.exit_code
        codes[code] += 1  # any other code is a KeyError, any other exception fails the test
    assert min(codes.values()) > 100, codes


@pytest.mark.rehearsal
def test_random_argument_lists_as_whole_processes(tmp_path):
    """The last option makes those that parse end at once: there is no data in that folder."""
    draw = random.Random(8)
    for number in range(6):
        words = [word.replace("\0", "?") for word in random_words(draw)]
        folder = tmp_path / str(number)
        folder.mkdir()
        script = command("train", *words, "--custom_data=false", "--data_url", folder, f"--output_dir={folder}/out")
        done = run(script, cwd=folder, env=environment())
        assert done.returncode in (0, 2), (words, done.stderr)
        assert "Traceback" not in done.stderr, (words, done.stderr)
        assert not os.path.exists(folder / "etc")


def test_nobody_changes_the_arguments_of_a_job():
    args = parse("--lr", 3)
    with pytest.raises(AttributeError, match=r"args\.lr cannot be set: args stay as they were given"):
        args.lr *= 2
    settled = arguments.replaced(args, lr=6.0, optimizer="adam")
    assert (args.lr, settled.lr, settled.optimizer) == (3, 6, "adam") and settled.given == {"lr": 3}
    for same in (copy.deepcopy(settled), pickle.loads(pickle.dumps(settled))):  # as a process that is spawned gets them
        assert vars(same) == vars(settled)
        with pytest.raises(AttributeError, match=r"args\.lr cannot be set"):
            same.lr = 3
