"""docs/from.md, the ModelArts sample: its arguments, its marked lines, its three ways to data, its files of weights."""

import hashlib
import json
import types

import pytest
import torch

from common.checkpoints.pretrained import load_weights
from common.errors import UserError
from common.models import resnet18
from datasets import cifar10, cifar10_files
from launch import blocks
from tests.common.arguments.test_arguments import parse, refusal
from tests.common.storage.test_https import serve  # noqa: F401 (a fixture)
from tests.pages.from_page import assert_each_is_checked, typed_here
from tests.tools.certificate import certified
from tests.tools.cifar import archive, write_folder  # noqa: F401 (a fixture)
from tests.tools.jobs import ROOT, run_forked
from tests.tools.worlds import resolve

TITLE = "The ModelArts sample"
SMALL = ["--custom_data", "true", "--max_samples", "64", "--batch_size", "32", "--width", "4", "--epochs", "3"]
LOADED = '`model.load_state_dict(torch.load("epoch_3.pth"))`'
DATA = "data extracted below `--data_url`"
OTHERS = "`--lr`, `--epochs`, `--data_url`, `--output_dir`"
PLATFORM = "`--init_method`, `--rank`, `--world_size`"
CUDNN = "`torch.backends.cudnn.deterministic = True`"
COMMENTED = "marked lines commented out"
MANY, ONE = "the script on many cards", "the script without its marked lines, on one card"
MARKED = "the marked lines, `### 分布式改造,... ###`"


@pytest.fixture(scope="module")
def three_epochs(tmp_path_factory):
    """A finished run with the sample's settings, but small."""
    folder = tmp_path_factory.mktemp("sample")
    _, job, *options = typed_here(TITLE, ONE)[0]
    done = run_forked([ROOT / job, *options, *SMALL, "--output_dir", folder / "out"], folder)
    return folder / "out", done.stdout


def used(folder):
    return json.loads(max((folder / "checkpoints").glob("*.json")).read_text())["arguments"]


# --- The script and its marked lines ---------------------------------------------------------------------------------------


def test_the_recipe_trains_with_the_settings_of_the_sample(three_epochs):
    wanted = {
        "optimizer": "adam",
        "lr": 0.01,
        "schedule": "constant",
        "weight_decay": 0,
        "label_smoothing": 0,
        "augment": False,
    }
    found = used(three_epochs[0])
    assert {name: found[name] for name in wanted} == wanted
    whole = parse(*typed_here(TITLE, ONE)[0][2:])
    assert (whole.epochs, whole.batch_size, whole.width) == (100, 128, 64)
    assert sum(parameter.numel() for parameter in resnet18(width=whole.width).parameters()) == 11_173_962


def test_on_many_cards_it_is_the_ddp_job_with_the_same_recipe(tmp_path):
    _, job, *options = typed_here(TITLE, MANY)[0]
    assert typed_here(TITLE, ONE)[0][2:] == options
    done = run_forked([ROOT / job, *options, *SMALL, "--max_steps", 1, "--output_dir", tmp_path / "out"], tmp_path)
    assert "train_ddp: " in done.stdout and used(tmp_path / "out")["optimizer"] == "adam"


@pytest.mark.rehearsal
def test_its_rate_grows_with_the_processes_up_to_the_cards_of_a_node(tmp_path):
    """0.08 for any larger batch, as the sample has it on two nodes of 8 cards. Other settings grow with all processes."""
    words = [*SMALL, "--width", 1, "--batch_size", 2, "--max_steps", 1, "--nproc_per_node", 9, "--output_dir", tmp_path / "out"]
    printed = run_forked([ROOT / "jobs" / "train_ddp.py", "--recipe", "modelarts", *words], tmp_path).stdout
    assert "learning rate 0.08 for a global batch of 18" in printed
    assert parse("--recipe", "modelarts").largest_growth == 8 and parse().largest_growth is None


def test_what_was_marked_is_shown_and_taken_out(capsys):
    for line, wanted in ((MARKED, "### end DDP ###"), (COMMENTED, (ROOT / "jobs" / "train.py").read_text())):
        python, dash, launch, name, verb, job = typed_here(TITLE, line)[0]
        assert [python, dash, launch, name] == ["python", "-m", "launch", "blocks"]
        assert blocks.main([verb, str(ROOT / job)]) == 0
        printed = capsys.readouterr().out
        assert wanted in printed and (verb == "show" or printed == wanted)


SCRIPT = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument('--rank', type=int, default=0)
args, unknown = parser.parse_known_args()
order = list(range(8))
### 分布式改造,每个进程加载不同的数据 ###
order = order[args.rank :: 2]
### 分布式改造,每个进程加载不同的数据 ###
for epoch in range(2):
    ### 分布式改造,打印 ###
    print('rank', args.rank)
    ### 分布式改造,打印 ###
    print(epoch, order)
"""


def test_a_script_of_the_samples_form_becomes_one_of_a_single_card(tmp_path, capsys):
    (tmp_path / "theirs.py").write_text(SCRIPT, encoding="utf-8")
    assert blocks.main(["show", str(tmp_path / "theirs.py")]) == 0 and "order[args.rank :: 2]" in capsys.readouterr().out
    assert blocks.main(["revert", str(tmp_path / "theirs.py"), "-o", str(tmp_path / "single.py")]) == 0
    whole = "".join(f"{epoch} {list(range(8))}\n" for epoch in range(2))
    assert run_forked([tmp_path / "single.py", "--rank", 1], tmp_path).stdout == whole
    assert run_forked([tmp_path / "theirs.py", "--rank", 1], tmp_path).stdout == "".join(
        f"rank 1\n{epoch} [1, 3, 5, 7]\n" for epoch in range(2)
    )


# --- Arguments -------------------------------------------------------------------------------------------------------------


def test_the_platforms_arguments_count_nodes():
    method, rank, world_size = (words[0] for words in typed_here(TITLE, PLATFORM))
    args = parse(method, "tcp://10.0.0.1:6666", rank, "1", world_size, "2")
    given = {name: vars(args)[name] for name in ("init_method", "rank", "world_size")}
    place = resolve(given, {}, gpus=8)
    assert (place.node_rank, place.num_nodes, place.rank, place.world_size) == (1, 2, 8, 16)


def test_the_other_arguments_have_its_names(capsys):
    names = [words[0] for words in typed_here(TITLE, OTHERS)[:4]]
    values = ["0.02", "7", "/data", "/out"]
    args = parse(*(word for pair in zip(names, values) for word in pair))
    assert (args.lr, args.epochs, args.data_url, args.output_dir) == (0.02, 7, "/data", "/out")
    assert parse("--train_url", "/out").output_dir == "/out"
    parse(*typed_here(TITLE, "other arguments, which are ignored")[0])
    assert not capsys.readouterr().err
    assert "unknown option --quota: where the platform adds it, give --ignore quota" in refusal("--quota", "3")
    assert "did you mean --epochs?" in refusal("--epoch", "3")
    assert parse(*typed_here(TITLE, "the year as the seed")[0]).seed == 2026 and parse().seed == 0
    assert parse(*typed_here(TITLE, CUDNN)[0]).deterministic is True and parse().deterministic is False


def test_a_gpu_that_is_asked_for_has_to_be_there():
    """What a job says where there is none: tests/jobs/test_train.py."""
    assert parse(*typed_here(TITLE, "`--enable_gpu true`")[0]).enable_gpu is True and parse().enable_gpu is None


# --- Data ----------------------------------------------------------------------------------------------------------------


def given(folder, **changed):
    wanted = {"custom_data": False, "max_samples": None, "data_url": None, "output_dir": str(folder / "out"),
              "input_dir": str(folder / "input_dir")}  # fmt: skip
    return types.SimpleNamespace(**{**wanted, **changed})


def test_synthetic_data_have_the_samples_sizes(tmp_path):
    assert parse(*typed_here(TITLE, "`--custom_data true`")[0]).custom_data is True
    train, test = cifar10.load(given(tmp_path, custom_data=True))
    assert (train.images.shape, test.images.shape) == ((5000, 3, 32, 32), (1000, 3, 32, 32))
    assert len(train.classes) == 10 and set(train.labels.tolist()) == set(range(10))


def test_data_are_read_where_they_are(tmp_path, archive):
    write_folder(tmp_path / "cifar10" / "cifar-10-batches-py")
    assert typed_here(TITLE, DATA)[0][0] == "--data_url"
    for folder in (tmp_path / "cifar10", tmp_path / "cifar10" / "cifar-10-batches-py", archive.parent):
        train, test = cifar10.load(given(tmp_path, data_url=str(folder)))
        assert (len(train), len(test)) == (20, 4)


@pytest.fixture
def university(serve, archive, tmp_path, monkeypatch):
    """The server of the archive's address, with a certificate of its own. This archive has the published one's form, and is small."""
    certificate, context = certified(tmp_path, "IP:127.0.0.1")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    server = serve(archive.read_bytes(), tls=context)
    assert server.url.startswith("https://") and server.url.endswith(cifar10_files.URL.rpartition("/")[2])
    monkeypatch.setattr(cifar10_files, "URL", server.url)
    monkeypatch.setattr(cifar10_files, "SHA256", hashlib.sha256(server.body).hexdigest())
    return server


def test_without_data_they_are_downloaded_once(tmp_path, university):
    assert typed_here(TITLE, "data from torchvision")[0] == ["python", "jobs/train.py"]
    university.cuts = [len(university.body) // 2]  # and the rest with the next answer
    for _ in range(2):
        assert [len(part) for part in cifar10.load(given(tmp_path))] == [20, 4]
    assert len(university.asked) == 2 and university.asked[1] == f"bytes={len(university.body) // 2}-"


def test_another_archive_or_a_server_that_nobody_vouches_for_is_refused(tmp_path, university, monkeypatch):
    university.body = university.body[:-1] + b"0"
    with pytest.raises(UserError, match="it was damaged on the way, or replaced"):
        cifar10.load(given(tmp_path))
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(UserError, match=r"certificate cannot be verified .*: give the file of its authority as"):
        cifar10.load(given(tmp_path))
    assert not (tmp_path / "input_dir" / cifar10_files.FOLDER).exists()


# --- What it leaves --------------------------------------------------------------------------------------------------------


def test_the_weights_of_the_last_epochs_are_files(three_epochs):
    ((name,),) = [words for words in typed_here(TITLE, "`epoch_N.pth`") if words[0].endswith(".pth")]
    assert {"epoch_2.pth", name} <= {path.name for path in three_epochs[0].glob("*.pth")} and name == "epoch_3.pth"
    state = torch.load(three_epochs[0] / name, weights_only=True)
    assert not [key for key in state if key.startswith("module.")] and {"conv1.0.weight", "dense_layer.bias"} <= state.keys()


@pytest.mark.parametrize("prefix", ["module.", ""])
def test_weights_of_the_sample_fit_our_network(prefix, three_epochs, tmp_path):
    """A file as the sample saves it: the state_dict of the network, or of the network inside DDP."""
    state = torch.load(three_epochs[0] / "epoch_3.pth", weights_only=True)
    torch.save({prefix + key: value for key, value in state.items()}, tmp_path / "epoch_3.pth")
    assert typed_here(TITLE, LOADED)[0] == ["load_weights(resnet18(),", "epoch_3.pth)"]
    network = resnet18(width=4)
    load_weights(network, str(tmp_path / "epoch_3.pth"), new_head=False)
    assert all(torch.equal(value, network.state_dict()[key]) for key, value in state.items())
    with pytest.raises(UserError):
        load_weights(resnet18(width=8), str(tmp_path / "epoch_3.pth"), new_head=False)


def test_what_an_epoch_came_to_is_a_line(three_epochs):
    folder, printed = three_epochs
    ((name,),) = typed_here(TITLE, "the lines of train and val for each epoch")
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    assert len(rows) == 3 and all({"train_loss", "accuracy", "loss"} <= row.keys() for row in rows)
    assert printed.count("epoch=3/3 steps=6 accuracy=") == 1


CHECKS = {
    MANY: test_on_many_cards_it_is_the_ddp_job_with_the_same_recipe,
    ONE: test_the_recipe_trains_with_the_settings_of_the_sample,
    MARKED: test_a_script_of_the_samples_form_becomes_one_of_a_single_card,
    COMMENTED: test_what_was_marked_is_shown_and_taken_out,
    PLATFORM: test_the_platforms_arguments_count_nodes,
    OTHERS: test_the_other_arguments_have_its_names,
    "other arguments, which are ignored": test_the_other_arguments_have_its_names,
    "`--enable_gpu true`": test_a_gpu_that_is_asked_for_has_to_be_there,
    "`--custom_data true`": test_synthetic_data_have_the_samples_sizes,
    DATA: test_data_are_read_where_they_are,
    "data from torchvision": test_without_data_they_are_downloaded_once,
    "the year as the seed": test_the_other_arguments_have_its_names,
    CUDNN: test_the_other_arguments_have_its_names,
    "`epoch_N.pth`": test_the_weights_of_the_last_epochs_are_files,
    LOADED: test_weights_of_the_sample_fit_our_network,
    "the lines of train and val for each epoch": test_what_an_epoch_came_to_is_a_line,
}


def test_each_line_of_the_page_is_run():
    assert_each_is_checked(TITLE, CHECKS)
