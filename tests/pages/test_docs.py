"""What the pages say is true: their links and names lead somewhere, and their commands run, small, from a copy of the repository."""

import ast
import functools
import importlib
import os
import re
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from launch import bundle, local, pack
from tests.pages.docs_commands import MADE_UP, NEEDS, NOT_RUN, OTHERS_SAY, REFUSED
from tests.tools.cifar import write_folder
from tests.tools.jobs import NETWORK, ROOT, run_forked
from tests.tools.packages import program

PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = ("jobs", "common", "datasets", "launch", "tests", "docs")

# --- Reading a page ------------------------------------------------------------------------------------------------------

FENCE = re.compile(r"\s*```(\w*)")
SHELL = ("", "sh", "bash", "console")
PROGRAMS = "python|torchrun|make|ray|memcached|export|source|pip|docker|git|tensorboard|srun|sbatch|mpirun|diff"
COMMAND = re.compile(rf"(\$ )?(\w+=\S+ )*({PROGRAMS}) ")


def lines(page):
    """(line, the language of its block of code or None)"""
    language = None
    for line in page.read_text(encoding="utf-8").splitlines():
        if fence := FENCE.match(line):
            language = fence[1] if language is None else None
            continue
        yield line, language if language is not None else "" if line.startswith("    ") else None


def prose(page):
    return "\n".join(line for line, language in lines(page) if language is None)


def commands(page):
    """Without what follows a #, and with spaces as they do not matter; a \\ at the end joins two lines."""
    code = "\n".join(line for line, language in lines(page) if language in SHELL).replace("\\\n", " ")
    for line in map(str.strip, code.splitlines()):
        if COMMAND.match(line):
            yield " ".join(re.sub(r"\s+# .*", "", line.removeprefix("$ ")).split())


COMMANDS = sorted({command for page in PAGES for command in commands(page)})
LISTED = [command for group in NOT_RUN.values() for command in group]


def slug(heading):
    """The anchor that a heading has."""
    words = re.sub(r"`|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def anchors(page):
    return {slug(line.lstrip("#").strip()) for line in prose(page).splitlines() if line.startswith("#")}


# --- Links and names -----------------------------------------------------------------------------------------------------


def page_name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page, letters", [("README.md", 120), ("README.zh.md", None)])
def test_the_readme_is_short(page, letters):
    """A line of Chinese is a paragraph, as a browser would show a space where it is broken."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 130 and not [line for line in lines if letters and len(line) > letters]


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_readme_begins_with_the_code_of_a_job(page):
    """Its first block is a part of train_ddp.py; without the marked lines it is a part of train.py."""
    code = re.search(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[1]
    assert textwrap.indent(code, "    ") in (ROOT / "jobs" / "train_ddp.py").read_text()
    unmarked = re.sub(r"^### DDP.*?^### end DDP ###\n", "", code, flags=re.DOTALL | re.MULTILINE)
    assert unmarked != code and textwrap.indent(unmarked, "    ") in (ROOT / "jobs" / "train.py").read_text()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page):
    text = re.sub(r"`[^`]*`", "", prose(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path) if path else page
        assert there.exists(), f"{target}: there is no {path}"
        assert not anchor or anchor in anchors(there), f"{target}: no heading of {there.name} has this anchor"


@functools.cache
def names():
    """Of every file of the repository, also those not yet committed."""
    listed = [program("git"), "ls-files", "--cached", "--others", "--exclude-standard"]
    return {
        Path(path).name
        for path in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    }


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_files_and_modules_that_are_named_exist(page):
    words = {word.strip(",;:()") for span in re.findall(r"`([^`\n]+)`", prose(page)) for word in span.split()}
    for word in words - MADE_UP:
        if re.search(r"(^|[/_])[A-Z]+\.py$", word):  # launch/NAME.py stands for any
            continue
        if re.fullmatch(rf"({'|'.join(OURS)})/[\w./-]*", word):
            assert (ROOT / word).exists(), word
        elif re.fullmatch(r"[\w-]+\.(py|md)", word):
            assert word in names(), word
        elif re.fullmatch(r"(common|datasets|launch)(\.\w+)+", word):
            named(word)


def named(path):
    """The module, class or function of this dotted name."""
    module, *rest = path.split(".")
    found = importlib.import_module(module)
    for name in rest:
        module = f"{module}.{name}"
        try:
            found = getattr(found, name)
        except AttributeError:
            found = importlib.import_module(module)
    return found


def test_what_stands_for_a_readers_own_is_still_in_the_pages():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in sorted(MADE_UP) if name not in text] == []


@functools.cache
def messages():
    """Every text of the code that could be a message, one to a line; what is filled in is left out."""
    texts = []
    for room in ("common", "datasets", "jobs"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return "\n".join(texts)


def pieces(message):
    """What is left of a quoted message without numbers, names in capitals, quotes, punctuation and dots."""
    for piece in re.split(r"\.\.\.|\S*[A-Z]{2,}\S*|\S*\d\S*|'\w*'|[():;,?](?: |$)", message):
        if len(piece.split()) > 1:
            yield piece.split()


def is_said(words):
    """Whether the code has these words, but for the first and the last, which may be filled in there."""
    tries = [" ".join(run) for run in (words, words[1:], words[:-1], words[1:-1])]
    return any(len(text) > 5 and text in messages() for text in tries)


def test_the_failures_of_the_modelarts_page_are_messages_of_the_code():
    """At least half of each: the rest may be values."""
    table = prose(ROOT / "docs" / "modelarts.md").split("## When a job fails")[1].split("\n## ")[0]
    quoted = [span for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for span in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 20
    assert [message for message in OTHERS_SAY if message not in quoted] == []
    for message in set(quoted) - OTHERS_SAY:
        said = [is_said(words) for words in pieces(message)]
        assert 2 * sum(said) >= len(said), f"nothing says {message!r}"


# --- Commands ------------------------------------------------------------------------------------------------------------

# What makes a job small; an option that is given twice counts as it is given last.
ENDS_SOON = ["--epochs", "1", "--max_steps", "2", "--workers", "0"]
CIFAR = [*ENDS_SOON, "--max_samples", "128", "--batch_size", "32", "--width", "4", "--enable_gpu", "false"]
SMALLER = {
    "train_imagenet": [*ENDS_SOON, *NETWORK, "--image_size", "32", "--max_samples", "64", "--batch_size", "8"],
    "train_restore": [*ENDS_SOON, "--max_samples", "16", "--batch_size", "4", "--width", "8", "--resize", "40", "--crop", "32"],
    "train_dpex": [*CIFAR, "--workers", "1"],
    "speedrun": ["--net", "small", "--max_samples", "512", "--runs", "1"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder that /data stands for: CIFAR-10, photographs by the class and packed, pairs of pictures, weights."""
    from torchvision.models import shufflenet_v2_x0_5

    folder = tmp_path_factory.mktemp("data")
    write_folder(folder / "cifar10" / "cifar-10-batches-py", 64)
    draw = np.random.default_rng(0)
    for split, count in (("train", 32), ("val", 8)):
        for number in range(count):
            pixels = draw.integers(0, 255, (40, 50, 3), np.uint8)
            write(folder / "imagenet" / split / f"class{number % 2}" / f"{number}.JPEG", pixels)
    for split in ("train", "val"):
        shutil.copytree(folder / "imagenet" / split, folder / "flowers", dirs_exist_ok=True)
    pack.main([str(folder / "imagenet"), str(folder / "imagenet-packed")])
    torch.save(shufflenet_v2_x0_5(num_classes=2).state_dict(), folder / "resnet50.pth")  # jobs are made small: see SMALLER
    for split, count in (("train", 8), ("test", 2)):
        for number in range(count):
            for side in ("blurry", "sharp"):
                write(
                    folder / "deblur" / split / side / "scene" / f"{number}.png", draw.integers(0, 255, (48, 48, 3), np.uint8)
                )
    return folder


def write(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def clone(data):
    copy = data.parent / "clone"
    for name in ("jobs", "common", "datasets", "launch"):
        shutil.copytree(ROOT / name, copy / name)
    shutil.copy(ROOT / "requirements.txt", copy)
    os.link(data / "resnet50.pth", copy / "resnet50.pth")
    return copy


@pytest.fixture
def repository(tmp_path, data, clone, monkeypatch):
    """A copy of what runs, to stand in and to write to; /data and /runs are folders beside it."""
    copy = tmp_path / "repository"
    shutil.copytree(clone, copy, copy_function=os.link)
    shutil.copytree(data, tmp_path / "data", copy_function=os.link)
    monkeypatch.chdir(copy)
    return copy


def run_small(job, options, folder):
    """The job with these options of its own, and those that make it end soon."""
    options = [*options, *SMALLER.get(Path(job).stem, CIFAR), *(["--prof", "3"] if "--prof" in options else [])]
    if not {"--help", "--doctor"} & set(options):
        options += ["--output_dir", str(folder.parent / "out")]
    return run_forked([str(folder / job), *options], folder)


def run_verb(verb, words, folder, monkeypatch, refused):
    """A verb as it is, but for those that start the job: it is started once, small."""
    before, _, behind = " ".join(words).partition(" -- ")
    if verb == "doctor":
        run_small(before, [*behind.split(), "--doctor", "true"], folder)
    elif verb == "local":
        monkeypatch.setattr(
            local, "start_once", lambda options, *_: [run_small(options.job, options.arguments, folder).returncode]
        )
        assert local.main(words) == 0
    elif verb == "bundle" and "--folder" in words:
        monkeypatch.setattr(bundle.command, "try_out", lambda *_: "")  # the other form is tried
        monkeypatch.chdir(folder)
        assert bundle.main(words) == 0
    else:
        env = {"PYTHONPATH": str(folder), "HOME": str(folder.parent)}  # without anybody's credentials
        done = run_forked([str(folder / "launch" / "__main__.py"), verb, *words], folder, env=env, check=2 if refused else 0)
        assert (refused or "") in done.stderr


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command not in LISTED], ids=lambda command: command[:90]
)
def test_every_command_runs(command, repository, monkeypatch):
    for name in NEEDS.get(command, ()):
        program(name)
    words = [re.sub(r"^/(data|runs)/", rf"{repository.parent}/\1/", word) for word in shlex.split(command)]
    if words[:3] == ["python", "-m", "launch"] and len(words) > 3:
        run_verb(words[3], words[4:], repository, monkeypatch, REFUSED.get(command))
    elif words[0] == "python" and words[1].startswith("jobs/"):
        run_small(words[1], words[2:], repository)
    else:
        pytest.fail("nobody runs this command: teach this test how, or list it in tests/pages/docs_commands.py with the reason")


def test_what_is_not_run_is_in_the_pages_once():
    assert [command for command in [*LISTED, *REFUSED, *NEEDS] if command not in COMMANDS] == []
    assert len(LISTED) == len(set(LISTED))


def test_reasons_are_true():
    """A file of tests that a reason names exists; a command of a docstring is in it; a target is in the Makefile."""
    for name in re.findall(r"tests/[\w/]+\.py", " ".join(NOT_RUN)):
        assert (ROOT / name).exists(), name
    docstring = " ".join((ROOT / "jobs" / "train_ddp.py").read_text().split("import os")[0].split())
    told = [group for reason, group in NOT_RUN.items() if "docstring" in reason]
    assert told and all(command in docstring for group in told for command in group)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    used = [word for page in PAGES for word in re.findall(r"\bmake (\w+)`", prose(page))]
    used += [command.split()[1] for command in COMMANDS if command.startswith("make ")]
    assert used and set(used) <= set(targets)
