"""docs/your_script.md, your_own.md and platforms.md: they quote and copy files of tests/examples, and what they change and start trains."""

import ast
import json
import re
import shutil
import struct
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from launch import blocks
from tests.examples import own_template
from tests.examples.own_platform import skyline
from tests.tools.jobs import ROOT, assert_same_bits, final_state, run_forked
from tests.tools.ranks import fork_ranks
from tests.tools.worlds import resolve

EXAMPLES = ROOT / "tests" / "examples"
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("your_script", "your_own", "platforms"))
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
COPIES = re.findall(r"^    cp (tests/.*) (\S+)/$", PAGE, re.MULTILINE)  # (files, where they go)
IN_PLACE = re.findall(r"^    cp jobs/my_data.py jobs/(\w+).py +# and (\w+) in place of own_data", PAGE, re.MULTILINE)
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
    data = changed(base, "A data set of your own")
    (root / "jobs" / "my_data.py").write_text(data)
    script = (EXAMPLES / "own_script.py").read_text()
    (root / "jobs" / "own_script.py").write_text(script)
    (root / "jobs" / "everywhere.py").write_text(changed(script, "On every GPU of every node"))
    assert dict(IN_PLACE) == {"my_folder": "own_folder", "my_csv": "own_csv", "my_digits": "own_digits"}
    for job, name in IN_PLACE:
        (root / "jobs" / f"{job}.py").write_text(data.replace("own_data", name))
    (root / "jobs" / "my_torchvision.py").write_text(changed(base, "A network of torchvision or timm"))
    (root / "jobs" / "my_loss.py").write_text(changed(base, "Another loss"))
    digits = changed(data.replace("own_data", "own_digits"), "MNIST, FashionMNIST and the network of the Template")
    (root / "jobs" / "my_digits.py").write_text(digits)
    (root / "jobs" / "ray_digits.py").write_text(changed(digits, "Its batches from a Ray cluster"))
    shutil.copy(EXAMPLES / "own_network.py", root / "common" / "models")
    for files, room in COPIES:
        for file in files.split():
            shutil.copy(ROOT / file, root / room)
    rules = root / "common" / "world" / "rules.py"
    text = rules.read_text().replace("def plain(context", f"{own_rule()}\n\ndef plain(context")
    rules.unlink()
    rules.write_text(changed(text, "A platform of your own"))
    run_forked([EXAMPLES / "make_arrays.py"], root)
    return root


def own_rule():
    return next(code for code in PYTHON if code.startswith("def skyline(context"))


def run(house, folder, words, env=None):
    job, *options = words
    folder.mkdir(exist_ok=True)
    if not (folder / "arrays").exists():
        (folder / "arrays").symlink_to(house / "arrays")
    return run_forked([house / job, *options, "--output_dir", folder / "out"], folder, env)


def manifest(folder):
    return json.loads(max((folder / "out" / "checkpoints").glob("*.json")).read_text())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_page_quotes_the_example_line_for_line_or_says_where_it_goes(path):
    text = path.read_text()
    if any(str(path.relative_to(ROOT)) in files.split() for files, _ in COPIES) and path.name != "own_data.py":
        assert text not in PYTHON
        return
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


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Red and blue ones, in folders by class and named in tables."""
    folder = tmp_path_factory.mktemp("pictures")
    for split, count in (("train", 32), ("test", 10)):
        rows = ["file,label"]
        for number in range(count):
            name = ("blue", "red")[number % 2]
            path = folder / split / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (50, 40), (200, number, 30) if number % 2 else (30, number, 200)).save(path)
            rows.append(f"{path.relative_to(folder)},{name}")
        (folder / f"{split}.csv").write_text("\n".join(rows))
    return folder


@pytest.mark.parametrize("job", ["my_folder", "my_csv", "my_torchvision", "my_loss"])
def test_other_data_networks_and_losses_end_in_the_same_report(house, tmp_path, pictures, job):
    ((_, words),) = commands(job)
    done = run(house, tmp_path, [pictures if word == "pictures" else word for word in words], {"WITHOUT": "matplotlib"})
    assert "done: " in done.stdout and ("of 2 classes" in done.stdout) is (job in ("my_folder", "my_csv"))
    said = json.loads((tmp_path / "out" / "report.json").read_text())
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Finished after 2/2 epochs" in page and all(f"<bdi>{row['class']}</bdi>" in page for row in said["classes"])
    if job in ("my_folder", "my_csv"):
        assert [row["class"] for row in said["classes"]] == ["blue", "red"] and said["samples"] == 10


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """64 and 20 digits in MNIST's own files: dark ones and bright ones."""
    folder = tmp_path_factory.mktemp("mnist")
    for split, count in (("train", 64), ("t10k", 20)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = np.random.default_rng(count).integers(0, 50, (count, 28, 28)).astype(np.uint8) + 20 * labels[:, None, None]
        for name, numbers in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, numbers.ndim]) + struct.pack(f">{numbers.ndim}i", *numbers.shape)
            (folder / f"{split}-{name}-ubyte").write_bytes(head + numbers.tobytes())
    return folder


SMALL = ["--batch_size", 32, "--epochs", 1]


def test_the_network_of_the_template_on_the_files_of_mnist(house, tmp_path, digits):
    words = [digits if word == "mnist" else word for word in commands("my_digits")[0][1]]
    assert "done: " in run(house, tmp_path, [*words, *SMALL]).stdout
    found = manifest(tmp_path)
    assert re.match("TemplateNet of 19,824 parameters", found["identity"]["model"]) and found["total_steps"] == 2
    wanted = {"optimizer": "adam", "lr": 2e-4, "schedule": "constant", "weight_decay": 0, "label_smoothing": 0}
    assert {name: found["arguments"][name] for name in wanted} == wanted
    state = final_state(tmp_path)
    assert state["optimizer"]["param_groups"][0]["betas"] in ([0.5, 0.999], (0.5, 0.999))
    sizes = [list(weight.shape) for name, weight in state["model"].items() if weight.dim() > 1]
    assert sizes == [[3, 1, 3, 3], [3, 3, 3, 3], [8, 3, 3, 3], [8, 8, 3, 3], [16, 8, 3, 3], [16, 16, 3, 3], [32, 16, 3, 3],
                     [32, 32, 3, 3], [10, 128]]  # fmt: skip


def test_its_first_weights_are_those_of_the_template():
    net = own_template.TemplateNet(num_classes=10)
    assert net(torch.rand(2, 3, 28, 28)).shape == (2, 10)
    assert [layer.negative_slope for layer in net.layers if isinstance(layer, torch.nn.LeakyReLU)] == [0.2] * 8
    last = net.layers[-1]
    assert last.weight.std().item() == pytest.approx(0.01, rel=0.15) and not last.bias.any()
    convolution = net.layers[-5]
    assert (
        convolution.weight.std().item() == pytest.approx((2 / (9 * (32 + 32))) ** 0.5, rel=0.1) and not convolution.bias.any()
    )


COMPARE = """
import sys
from torchvision.datasets import FashionMNIST
sys.path.insert(0, sys.argv[1])
from datasets import own_digits
theirs = FashionMNIST(".", train=False)
ours = own_digits.Digits("FashionMNIST/raw", "t10k")
assert len(ours) == 20 and (ours.images == theirs.data.numpy()[:, None]).all() and (ours.labels == theirs.targets.numpy()).all()
"""


def test_the_reader_reads_what_torchvision_reads(house, tmp_path, digits):
    (tmp_path / "FashionMNIST").mkdir()
    (tmp_path / "FashionMNIST" / "raw").symlink_to(digits)
    (tmp_path / "compare.py").write_text(COMPARE)
    run_forked([tmp_path / "compare.py", house], tmp_path)


@pytest.mark.rehearsal
def test_its_batches_from_a_ray_cluster_are_the_same(house, tmp_path, digits):
    shutil.copytree(house, tmp_path / "copy")  # without links: what the cluster gets is the repository in which its loader is
    words = [digits if word.startswith("data/") else word for word in commands("my_digits")[1][1]]
    run(house, tmp_path / "here", [*words, *SMALL, "--workers", 0])
    run(tmp_path / "copy", tmp_path / "ray", ["jobs/ray_digits.py", *words[1:], *SMALL, "--workers", 1])
    assert_same_bits(final_state(tmp_path / "ray"), final_state(tmp_path / "here"))


def test_a_script_of_your_own_goes_on_to_the_bits_of_a_run_that_was_not_stopped(house, tmp_path):
    (_, first), (_, second), *_ = commands("own_script")
    assert "--max_steps" in first and first[: first.index("--max_steps")] == second
    run(house, tmp_path / "stopped", first)
    done = run(house, tmp_path / "stopped", second)
    assert "epoch 2, after 320 of its samples, step 15" in done.stdout
    run(house, tmp_path / "whole", second)
    assert_same_bits(final_state(tmp_path / "stopped"), final_state(tmp_path / "whole"))
    assert "bright" in (tmp_path / "whole" / "out" / "report.txt").read_text()


@pytest.mark.rehearsal
def test_that_script_with_the_lines_for_many_gpus(house, tmp_path):
    """Alone, and as two ranks with half of each batch."""
    _, (_, second), *_ = commands("own_script")
    run(house, tmp_path / "whole", second)
    for number in (1, 2):
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


def test_a_plain_script_that_became_a_job(house, tmp_path):
    """It lies outside the repository; killed twice it ends with the same bits, and learns what the plain script has learnt."""
    words, env = [tmp_path / "my_script.py", "--save_steps", 10], {"PYTHONPATH": str(ROOT)}
    text, step = (EXAMPLES / "own_tensors.py").read_text(), "            run.step(loss)\n"
    (tmp_path / "my_script.py").write_text(text)
    run_forked([words[0], "--output_dir", "whole"], tmp_path, env)
    for code, dies, more in ((0, 0, ["--max_steps", 40]), (9, 137, []), (9, 368, [])):  # each within an epoch of 25 steps
        killed = text.replace(step, f"{step}            run.total_steps == {dies} and os._exit(9)\n")
        (tmp_path / "my_script.py").write_text(killed)
        run_forked([*words, *more, "--output_dir", "killed"], tmp_path, env, check=code)
    (tmp_path / "my_script.py").write_text(text)
    run_forked([*words, "--output_dir", "killed"], tmp_path, env)
    assert_same_bits(final_state(tmp_path, "killed"), final_state(tmp_path, "whole"))
    plain = run_forked([EXAMPLES / "plain.py"], tmp_path).stdout.splitlines()
    ours = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").open()]
    assert len(plain) == len(ours) == 20
    assert ours[-1]["loss"] == pytest.approx(float(plain[-1].split()[1]), rel=0.1)


@pytest.mark.rehearsal
def test_that_job_on_two_ranks_and_as_a_bundle(tmp_path):
    shutil.copy(EXAMPLES / "own_tensors.py", tmp_path / "my_script.py")
    done = run_forked([ROOT / "launch" / "__main__.py", "bundle", "my_script.py"], tmp_path, {"PYTHONPATH": str(ROOT)})
    assert "dist/my_script.py" in done.stdout
    run_forked([tmp_path / "dist" / "my_script.py", "--output_dir", tmp_path / "bundled", "--epochs", 2], tmp_path)
    run_forked(
        [tmp_path / "my_script.py", "--output_dir", tmp_path / "here", "--epochs", 2], tmp_path, {"PYTHONPATH": str(ROOT)}
    )
    assert_same_bits(final_state(tmp_path, "bundled"), final_state(tmp_path, "here"))
    words = [
        tmp_path / "my_script.py",
        "--nproc_per_node",
        2,
        "--batch_size",
        32,
        "--epochs",
        2,
        "--output_dir",
        tmp_path / "two",
    ]
    run_forked(words, tmp_path, {"PYTHONPATH": str(ROOT)})
    rows = [[json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").open()] for name in ("two", "here")]
    assert rows[0] == pytest.approx(rows[1], rel=1e-3)


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
