"""The flagship as whole jobs: it learns, goes on to the same bits from every backend, evaluates, profiles, and says what is wrong."""

import contextlib
import json
import math
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from common.checkpoints import parts, pretrained
from common.errors import UserError
from datasets.kspeed.cache import SampleCache
from launch.pack import command as pack
from tests.check_ledger import complaints, steps_that_count
from tests.tools.flagship import EVERYTHING, SMALL, SYNTHETIC, last_row, photographs, trained  # noqa: F401 (fixtures)
from tests.tools.jobs import (
    NETWORK,
    PATIENCE,
    ROOT,
    assert_same_bits,
    command,
    environment,
    final_state,
    in_rehearsal,
    module_of,
    run,
    run_forked,
    run_job,
    saved,
    start,
    wait_for,
)
from tests.tools.memcached import Memcached

TODAY = [*EVERYTHING, "--cutmix", 0.5, "--augmentation", "trivialaugment", "--random_erasing", 0.2, "--clip_grad", 5,
         "--class_weights", "balanced", "--best_by", "balanced_accuracy"]  # fmt: skip


def test_it_learns_from_photographs_and_says_where_the_time_went(trained, photographs, tmp_path):
    log = run_job(
        "train_imagenet", tmp_path, "--data_url", photographs, *EVERYTHING, "--arch", "resnet18", "--checkpoints", "false"
    ).stdout
    assert "learning rate 0.05 for a total batch of 16, in portions of 8 on each device" in log
    assert "warning" not in log
    assert re.search(r"waiting_for_data=\d+% transfer=\d+% compute=\d+%", log)
    row = last_row(tmp_path)
    assert row["accuracy"] > 0.6 and "top5" not in row and row["samples"] == 144 and row["steps"] == 9
    state = torch.load(trained[0] / "out" / "checkpoints" / "000000000144.pt", weights_only=True)
    assert state["ema"].keys() >= {"n_averaged", "module.fc.weight"}
    assert not torch.equal(state["ema"]["module.fc.weight"], state["model"]["fc.weight"])


# A server of the cache is given up after 0.05 s, which a busy machine may need to answer.
PATIENT = """
import runpy, sys
sys.path.insert(0, {root!r})
from datasets.kspeed import cache
cache.SampleCache.deadline = property(lambda self: {seconds}, lambda self, _: None)
runpy.run_path({root!r} + "/jobs/train_imagenet.py", run_name="__main__")
"""


@pytest.mark.parametrize("backend", ["packed", "kspeed"])
def test_every_backend_that_decodes_alike_ends_with_the_same_bits(trained, photographs, tmp_path, backend):
    with Memcached() as server:
        options = {
            "kspeed": ["--data_url", photographs, "--kspeed_iplist", server.address],
            "packed": ["--data_url", tmp_path / "pack"],
        }
        if backend == "packed":
            pack.main([str(photographs), str(tmp_path / "pack")])
        words = [*options[backend], "--data_backend", backend, *EVERYTHING, "--output_dir", tmp_path / "out"]
        (tmp_path / "train_imagenet.py").write_text(PATIENT.format(root=str(ROOT), seconds=PATIENCE))
        run_forked([tmp_path / "train_imagenet.py", *words], tmp_path)
        if backend == "kspeed":
            status = SampleCache(server.address, deadline=PATIENCE).status()
            assert next(iter(status.values()))["get_hits"] >= 2 * 60  # of the second and the third epoch
    assert_same_bits(final_state(tmp_path), final_state(trained[0]))


@pytest.mark.parametrize("workers", in_rehearsal([2], lambda workers: True))
def test_killed_in_mid_epoch_and_started_again_it_ends_with_the_same_bits(trained, photographs, tmp_path, workers):
    options = ["--data_url", photographs, *EVERYTHING, "--save_steps", 1]
    process = start(tmp_path, *options, "--workers", workers, job="train_imagenet")
    wait_for(saved(tmp_path, 64), process, "the fourth step")
    process.kill()
    process.wait()
    done = run_job("train_imagenet", tmp_path, *options)
    assert re.search(r"going on from \S+: epoch 2, after (16|32) of its samples", done.stdout), done.stdout
    assert_same_bits(final_state(tmp_path), final_state(trained[0]))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.rehearsal)])
def test_todays_recipe_killed_in_mid_epoch_ends_with_the_same_bits(photographs, tmp_path, ranks):
    options = ["--data_url", photographs, *TODAY, "--nproc_per_node", ranks, "--save_steps", 1]
    (whole := tmp_path / "whole").mkdir()
    run_job("train_imagenet", whole, *options)
    process = start(tmp_path, *options, "--workers", 2, job="train_imagenet")
    wait_for(saved(tmp_path, 64), process, "the fourth step")
    process.kill()
    process.wait()
    done = run_job("train_imagenet", tmp_path, *options, "--best_by", "accuracy")
    assert re.search(r"going on from \S+: epoch 2, after (16|32) of its samples", done.stdout), done.stdout
    assert "warning: this run chooses its best epoch by balanced_accuracy, and --best_by accuracy has no effect" in done.stdout
    assert_same_bits(final_state(tmp_path), final_state(whole))
    assert "--class_weights balanced: from" in done.stdout and 0 <= last_row(tmp_path)["balanced_accuracy"] <= 1
    seen = run_job("train_imagenet", tmp_path, "--data_url", photographs, *TODAY[:-2], "--evaluate", "true").stdout
    assert "balanced_accuracy=" in seen and "--best_by" not in seen


def test_on_two_devices_it_sees_the_same_batches_in_fewer_portions(trained, photographs, tmp_path):
    """Begun on two, gone on with one: the total batch stays, no sample is lost or repeated."""
    options = ["--data_url", photographs, *EVERYTHING]
    run_job("train_imagenet", tmp_path, *options, "--nproc_per_node", 2, "--max_steps", 4)
    run_job("train_imagenet", tmp_path, *options)
    assert last_row(tmp_path)["samples"] == 144
    mine, theirs = (steps_that_count([folder / "out"]) for folder in (tmp_path, trained[0]))
    sets = [[{place: set(ids) for place, ids in steps.items()} for steps in epochs.values()] for epochs in (mine, theirs)]
    assert not list(complaints(mine, 48, 16)) and sets[0] == sets[1]


def test_only_the_first_batches_of_an_evaluation_wait_for_the_device(job, monkeypatch):
    waits = []
    monkeypatch.setattr(job.devices, "synchronize", waits.append)
    loader = Batches([(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))] * 30)
    scores, latency = job.evaluate(torch.nn.Linear(3, 2), loader, ["a", "b"], contextlib.nullcontext())
    assert len(waits) == job.LATENCIES == 20 and int(scores.confusion.sum()) == 60 and latency["latency_max"] > 0


class Batches(list):
    device, pixels, file_of = torch.device("cpu"), None, None
    ids = torch.zeros(2)


def test_evaluation_alone_gives_the_numbers_of_the_training(trained, photographs, tmp_path):
    checkpoint = trained[0] / "out" / "checkpoints" / "000000000144.pt"
    options = ["--data_url", photographs, *SMALL, "--epochs", 3, "--evaluate", "true"]
    done = run_job("train_imagenet", tmp_path, *options, "--resume", checkpoint)
    row, theirs = json.loads((tmp_path / "out" / "evaluation.json").read_text()), last_row(trained[0])
    assert {name: row[name] for name in ("accuracy", "loss")} == {name: theirs[name] for name in ("accuracy", "loss")}
    assert 0 < row["latency_p50"] <= row["latency_p95"] <= row["latency_p99"] <= row["latency_max"]
    assert f"accuracy={row['accuracy']:.4f}" in done.stdout
    weights = trained[0] / "out" / "epoch_3.pth"
    (tmp_path / "other").mkdir()
    done = run_job("train_imagenet", tmp_path / "other", *options, "--weights", weights, "--nproc_per_node", 2)
    assert "unverified" not in done.stdout
    again = json.loads((tmp_path / "other" / "out" / "evaluation.json").read_text())
    assert again["accuracy"] == row["accuracy"] and again["loss"] == pytest.approx(
        row["loss"], rel=1e-6
    )  # the averaged weights
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"evaluation.json"}
    assert "warning: its run had" not in done.stdout


def test_an_evaluation_needs_no_training_images(trained, photographs, tmp_path):
    """Nor as many as a batch has; and it says where the pictures have another size than in the run."""
    checkpoint = trained[0] / "out" / "checkpoints" / "000000000144.pt"
    shutil.copytree(photographs / "val", tmp_path / "alone" / "val")
    options = ["--data_url", tmp_path / "alone", *SMALL, "--evaluate", "true", "--resume", checkpoint, "--batch_size", 1000]
    run_job("train_imagenet", tmp_path, *options)
    row, theirs = json.loads((tmp_path / "out" / "evaluation.json").read_text()), last_row(trained[0])
    assert (row["accuracy"], row["loss"]) == (theirs["accuracy"], pytest.approx(theirs["loss"], rel=1e-5))
    (tmp_path / "smaller").mkdir()
    done = run_job("train_imagenet", tmp_path / "smaller", *options, "--image_size", 48)
    assert re.search(r"warning: its run had --image_size \d+, and this is evaluated with 48", done.stdout)


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.rehearsal)])
def test_the_last_layer_learns_alone_for_as_many_epochs_as_are_asked_for(trained, photographs, tmp_path, exact):
    weights = trained[0] / "out" / "epoch_1.pth"
    options = ["--data_url", photographs, *SMALL, "--weights", weights, "--freeze_epochs", 1, "--keep", 9, "--lr", 0.1]
    run_job("train_imagenet", tmp_path, *options, *(["--exact", "true", "--shares", 2] if exact else []))
    begun, first, second = (
        torch.load(path, weights_only=True) for path in (weights, *sorted((tmp_path / "out").glob("*.pth")))
    )
    learnt = {name for name in begun if "running" not in name and "num_batches" not in name}
    assert {name for name in learnt if not torch.equal(begun[name], first[name])} == {"fc.weight", "fc.bias"}
    later = {name for name in learnt if not torch.equal(first[name], second[name])}
    assert later >= {"conv1.0.weight", "conv5.0.weight", "fc.weight"}


def test_weights_for_other_classes_are_taken_but_for_the_last_layer(trained, tmp_path):
    weights = trained[0] / "out" / "epoch_1.pth"
    done = run_job("train_imagenet", tmp_path, *SYNTHETIC, "--epochs", 1, "--max_steps", 1, "--weights", weights, "--lr", 1e-6)
    assert "has no weights for these classes: fc.weight and fc.bias begin anew" in done.stdout
    mine, theirs = (
        torch.load(path, weights_only=True) for path in (sorted((tmp_path / "out").glob("checkpoints/*.pt"))[0], weights)
    )
    assert torch.allclose(mine["model"]["conv1.0.weight"], theirs["conv1.0.weight"], atol=1e-4)
    assert mine["model"]["fc.weight"].shape == (10, 1024)


def test_what_is_made_up_may_be_evaluated_by_weights_of_any_classes(tmp_path):
    run_job("train_imagenet", tmp_path, *SYNTHETIC, "--epochs", 1)
    about = json.loads((tmp_path / "out" / "epoch_1.json").read_text())
    about["classes"] = [f"breed {number}" for number in range(10)]
    (tmp_path / "out" / "epoch_1.json").write_text(json.dumps(about))
    weights = ["--evaluate", "true", "--weights", tmp_path / "out" / "epoch_1.pth"]
    assert "accuracy=" in run_job("train_imagenet", tmp_path, *SYNTHETIC, *weights).stdout


def test_only_the_last_layer_may_be_of_other_classes():
    network, other = (torch.nn.Sequential(torch.nn.Linear(3, size), torch.nn.Linear(3, 2)) for size in (4, 5))
    of_other_inputs = {**network.state_dict(), "1.weight": torch.zeros(5, 7), "1.bias": torch.zeros(5)}
    for state in (other.state_dict(), of_other_inputs):
        with pytest.raises(UserError, match="is of another network than this Sequential"):
            pretrained.fit(network, state, "w.pth", new_head=True)
    last, of_other_classes = (torch.nn.Linear(3, classes, bias=False) for classes in (2, 5))
    with pytest.raises(UserError, match=r"w\.pth is for 5 classes, and here are 2"):
        pretrained.fit(last, of_other_classes.state_dict(), "w.pth", new_head=False)


def test_a_profile_measures_and_saves_nothing(tmp_path):
    options = [
        *SMALL,
        "--data_backend",
        "syntetic",
        "--max_samples",
        400,
        "--prof",
        3,
        "--nproc_per_node",
        2,
        "--sync_bn",
        "false",
    ]
    done = run_job("train_imagenet", tmp_path, *options)
    assert re.search(
        r"Training speed was \d+\.\d images/s over 3 steps: \d+% waiting for data, 0% transfer, \d+% compute", done.stdout
    )
    assert not [path for path in (tmp_path / "out").rglob("*") if path.suffix in (".pt", ".pth", ".json", ".jsonl")]


@pytest.mark.rehearsal
def test_float16_survives_that_its_first_steps_overflow(tmp_path):
    """torch's fused SGD would go on from memory that nobody has written; and a float32 run may go on in float16."""
    options = [*SYNTHETIC, "--max_samples", 16]
    run_job("train_imagenet", tmp_path, *options, "--epochs", 1)
    run_job("train_imagenet", tmp_path, *options, "--amp_dtype", "float16")
    (tmp_path / "fresh").mkdir()
    too_large = ["--static_loss_scale", 2**19]  # so that the first steps are left out, and a later one is not
    run_job("train_imagenet", tmp_path / "fresh", *options, "--amp_dtype", "float16", "--epochs", 6, *too_large)
    state = torch.load(tmp_path / "fresh" / "out" / "checkpoints" / "000000000096.pt", weights_only=True)
    assert 2**19 / 2**12 < state["scaler"]["scale"] < 2**19, "no step overflowed, or all"
    buffers = [entry["momentum_buffer"] for entry in state["optimizer"]["state"].values()]
    assert all(buffer.abs().max() < 1e4 for buffer in buffers)


ASKED = """
import runpy, sys
from common.run import run

def asked(line_every, test_samples):
    print("test samples:", test_samples)
    sys.exit(0)

run.Clock = asked
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("options, count", [([], 64), (["--training_only", "true"], 0)])
def test_the_time_that_is_left_counts_evaluations_only_where_there_are_any(tmp_path, options, count):
    words = [sys.executable, "-c", ASKED, *command("train_imagenet", *SYNTHETIC, *options)[1:]]
    done = run(words, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)))
    assert f"test samples: {count}\n" in done.stdout, done.stdout + done.stderr


def test_it_gives_up_when_nothing_gets_better(tmp_path):
    options = [*SYNTHETIC, "--max_samples", 16, "--lr", 1e-9, "--epochs", 50, "--early_stopping_patience", 1]
    done = run_job("train_imagenet", tmp_path, *options)
    best = int(re.search(r"done: best accuracy \S+ in epoch (\d+)", done.stdout)[1])
    assert last_row(tmp_path)["epoch"] == best + 1 < 50
    again = run_job("train_imagenet", tmp_path, *options)
    assert "it goes on with more than the present --early_stopping_patience" in again.stdout


@pytest.mark.parametrize(
    "options, message",
    [
        ([*SYNTHETIC, "--training_only", "true", "--early_stopping_patience", 1], "needs the accuracy that --training_only"),
        (SMALL, "there are no images: give --data_url"),
        ([*SYNTHETIC, "--evaluate", "true"], "--evaluate true has no weights: give --weights FILE, --resume PATH"),
        ([*SYNTHETIC, "--weights", "none.pth"], "--weights none.pth does not exist: give a .pth, .pt or .safetensors file"),
        ([*SYNTHETIC, "--freeze_epochs", 1], "a network that has learnt before: give --weights FILE, too"),
        ([*SYNTHETIC, "--total_batch", 3, "--nproc_per_node", 2], "a global batch of 3 does not divide among 2 ranks"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(tmp_path, options, message):
    done = run_job("train_imagenet", tmp_path, *options, check=2)
    assert re.search(message, done.stderr) and "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def job():
    return module_of("train_imagenet")


def test_a_network_or_weights_that_cannot_be_had(job, trained):
    args = SimpleNamespace(
        arch="resnet19", weights=None, num_classes=None, evaluate=False, image_size=32, input_dir="input_dir", recipe=None
    )
    with pytest.raises(UserError, match=r"--arch resnet19 is none of torchvision's \d+ networks; the nearest: resnet18"):
        job.build(args, 3)
    args.arch = "alexnet"
    with torch.device("meta"):  # as classifiers.require() has it
        with pytest.raises(UserError, match="--arch alexnet takes no --image_size 32"):
            job.build(args, 3)
        args.arch = "vit_b_16"
        assert job.build(args, 3).image_size == 32
    args.arch, args.weights = "resnet18", str(ROOT / "README.md")
    with pytest.raises(UserError, match=r"README\.md holds no weights"):
        job.build(args, 3)
    args.arch, args.weights = "shufflenet_v2_x1_0", str(trained[0] / "out" / "epoch_1.pth")
    with pytest.raises(UserError, match=r"is of another network than this ShuffleNetV2: stage2"):
        job.build(args, 3)
    args.arch, args.evaluate = NETWORK[1], True
    with pytest.raises(UserError, match=r"epoch_1\.pth is for 3 classes, and here are 4: give --data_url with the classes"):
        job.build(args, 4)


def test_the_learning_rate_over_the_run(job):
    args = SimpleNamespace(epochs=90, warmup=5, end_lr=0.01, schedule="cosine")
    rate = lambda epochs: job.learning_rate(args, 2.0, epochs)  # noqa: E731
    assert rate(2.5) == 1.0 and rate(5) == 2.0 and rate(90) == pytest.approx(0.01) and rate(47.5) == pytest.approx(1.005)
    args.schedule = "linear"
    assert rate(47.5) == pytest.approx(1.005) and rate(90) == pytest.approx(0.01)
    args.schedule = "step"
    assert [round(math.log10(rate(epochs) / 2), 6) for epochs in (29, 31, 61, 81)] == [0, -1, -2, -3]


def test_norms_and_biases_do_not_decay_and_the_last_norm_of_a_block_begins_at_zero(job):
    args = SimpleNamespace(
        arch="resnet50",
        image_size=32,
        weights=None,
        num_classes=None,
        nesterov=True,
        weight_decay=0.1,
        bn_weight_decay=False,
        optimizer="sgd",
        lr=1.0,
        momentum=0.9,
        recipe="imagenet",
    )
    network = job.build(args, 7)
    assert all(not module.bn3.weight.any() for module in network.modules() if hasattr(module, "bn3"))
    args.recipe = "small"  # where so few steps would not wake it up
    assert all(module.bn3.weight.all() for module in job.build(args, 7).modules() if hasattr(module, "bn3"))
    decayed, others = job.build_optimizer(args, network).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0)
    assert len(decayed["params"]) == 54 and len(others["params"]) == 107  # 53 convolutions and fc; 53 norms and fc's bias
    args.optimizer, args.bn_weight_decay = "rmsprop", True
    groups = job.build_optimizer(args, network).param_groups
    assert groups[0]["alpha"] == 0.9 and [group["weight_decay"] for group in groups] == [0.1, 0.1]
    assert [len(group["params"]) for group in groups] == [54, 107]  # as before: the state of a resumed run fits


def test_rmsprop_goes_on_with_a_momentum_that_it_had_not():
    weight = torch.nn.Parameter(torch.ones(2))

    def stepped(momentum, before=None):
        optimizer = torch.optim.RMSprop([weight], lr=0.1, momentum=momentum)
        if before:
            optimizer.load_state_dict({"state": before["state"], "param_groups": optimizer.state_dict()["param_groups"]})
            parts.add_missing_buffers(optimizer)
        weight.grad = torch.ones(2)
        optimizer.step()
        return optimizer.state_dict()

    after = stepped(0.9, stepped(0))
    assert after["state"][0]["step"] == 2 and after["state"][0]["momentum_buffer"].all()
