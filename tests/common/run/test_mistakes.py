"""A mistake in a training loop, an option or a place ends a job with a line, or is a warning; it is never found out the next morning."""

import errno
import json
import re
import types

import pytest
import torch

from common.alive import heartbeat
from common.checkpoints import checkpoint, run_folder
from common.checkpoints.position import Position
from common.checkpoints.saver import Saving
from common.errors import UserError
from common.models import classifiers
from common.run.about import restart_command
from common.run.plan import Results
from tests.tools.jobs import ROOT, TINY, forked, module_of, run_forked, run_job
from tests.tools.ranks import rank_environments

END = "        run.end_epoch(scores, accuracy=accuracy, loss=scores.loss)\n"
STEPS = "for images, labels in run.steps(train_loader):"
BACKWARD, STEP = "            loss.backward()\n", "            optimizer.step()\n"
SHORT = "Short = type('Short', (), {'__init__': lambda self, _: None, '__iter__': lambda self: iter([]), 'transfer_seconds': None}); "
RUN = "run = Run(args, train_sampler, model, data_set=train_set, test_samples=len(test_set), optimizer=optimizer)"


@pytest.fixture
def trained(tmp_path):
    """What jobs/train.py says, with these changes."""

    def train(*changes, check=0, output=tmp_path / "out", **env):
        text = (ROOT / "jobs" / "train.py").read_text()
        text = re.sub(r"^sys.path.insert\(0, .*$", f"sys.path.insert(0, {str(ROOT)!r})", text, flags=re.MULTILINE)
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (tmp_path / "mine.py").write_text(text)
        return run_forked([tmp_path / "mine.py", *TINY, "--output_dir", output], tmp_path, env, check=check)

    return train


@pytest.mark.parametrize(
    "changes, says",
    [
        ([(END, "")], "the loop over run.epochs() has to call run.end_epoch() once, after run.steps()"),
        ([(END, END + END)], "run.end_epoch() was called without a step since the last call"),
        ([(STEPS, "for images, labels in []:"), (END, "")], "an epoch without a step: the loop over run.epochs() has to go through run.steps"),
    ],
)  # fmt: skip
def test_a_loop_that_forgets_a_call_is_an_error_that_names_it(trained, changes, says):
    assert says in trained(*changes, check=1).stderr


def test_a_loader_that_ends_too_early_is_an_error_that_says_where(trained):
    said = trained((STEPS, "for images, labels in run.steps(Short(train_loader)):"), (RUN, SHORT + RUN), check=1).stderr
    assert "error: RuntimeError: the loader ended after 0 of the " in said and "generator raised" not in said


@pytest.mark.parametrize("leave", ["break", "sys.exit()"])
def test_what_fails_when_a_loop_is_left_ends_the_job_in_a_line(trained, leave):
    lost = f"        import shutil, sys\n        shutil.rmtree(args.output_dir)\n        {leave}\n"
    said = trained((END, END + lost), check=2).stderr
    assert "the folder was moved or deleted, so this one ends" in said and "Traceback" not in said


def test_a_save_that_fails_before_a_loop_is_left_within_an_epoch_ends_the_job_in_a_line(trained):
    left = "            if run.total_steps == 1:\n                sys.exit()\n"
    save = ("    args = arguments.parse(", "    parser.set_defaults(save_steps=1)\n    args = arguments.parse(")
    full = "from common.checkpoints import checkpoint\n\ndef full(*_):\n    raise OSError(28, 'No space left on device')\n\ncheckpoint.write = full\n"
    said = trained((STEPS, f"{STEPS}\n{left}"), save, ("import torch\n\n", f"import torch\n{full}\n"), check=1).stderr
    assert "error: a checkpoint could not be written: [Errno 28] No space left on device" in said and "Traceback" not in said


@pytest.mark.parametrize(
    "changes, says",
    [
        ([(STEP, "")], ["no weight of the network has changed in this epoch"] * 2),
        (
            [(BACKWARD, ""), (STEP, ""), (RUN, f"model.requires_grad_(False); {RUN}")],
            ["no weight of the network requires a gradient"],
        ),
    ],
)
def test_what_learns_nothing_is_a_warning(trained, changes, says):
    told = [line for line in trained(*changes).stdout.splitlines() if line.startswith("warning: ") and "synthetic" not in line]
    assert len(told) == len(says) and all(words in line for words, line in zip(says, told)), told


def test_a_job_that_learns_has_no_such_warning(finished):
    assert not [line for line in finished[1].splitlines() if line.startswith("warning: ") and "synthetic" not in line]


SCHEDULE = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3); "
BATCHES = "for images, labels in run.steps(torch.utils.data.DataLoader(train_set)):"


def test_what_a_restart_could_not_give_back_is_said_before_the_first_step(trained):
    ids = "types.SimpleNamespace(state_dict=lambda: {1, 2}, load_state_dict=0)"
    changes = (
        (RUN, RUN.replace("=optimizer)", f"=optimizer, ids={ids})")),
        ("import torch\n\n", "import torch\nimport types\n\n"),
    )
    said = trained(*changes, check=2)
    assert "error: a checkpoint cannot hold the state of ids: it holds a set" in said.stderr and "step=" not in said.stdout
    said = trained((STEPS, BATCHES), check=1).stderr
    assert "error: TypeError: run.steps() was given a DataLoader, which does not say which samples it gives" in said
    assert "give it SampleLoader(data_set, train_sampler, device) of datasets.loader" in said
    assert "warning: the schedule of the learning rate is not saved" in trained((RUN, SCHEDULE + RUN)).stdout
    meant = RUN.replace("optimizer=optimizer", "optimizer=optimizer, unsaved=[scheduler]")
    assert "is not saved" not in trained((RUN, SCHEDULE + meant)).stdout
    kept = RUN.replace("optimizer=optimizer", "optimizer=optimizer, scheduler=scheduler")
    assert "is not saved" not in trained((RUN, SCHEDULE + kept)).stdout


def test_a_sampler_that_was_not_sharded_is_refused_on_two_ranks(tmp_path):
    text = (ROOT / "tests" / "examples" / "own_tensors.py").read_text()
    assert text.count("in (train_sampler, val_sampler):") == 1
    (tmp_path / "mine.py").write_text(text.replace("in (train_sampler, val_sampler):", "in (val_sampler,):"))
    ranks = forked([tmp_path / "mine.py"], tmp_path, *rank_environments(PYTHONPATH=str(ROOT)))
    assert all(rank.returncode for rank in ranks)
    assert any(
        "all ranks would train on the same samples: call sampler.shard(rank, world_size)" in rank.stderr for rank in ranks
    )


SAME_SUMS = """\
            with torch.no_grad():
                model.dense_layer.weight.zero_()[:2, 0] = torch.tensor([1.0, -1.0]) * (run.total_steps + 1)
"""


def test_weights_that_change_and_add_up_to_the_same_are_no_warning(trained):
    """As those of a last layer do: the gradients of its classes add up to zero."""
    assert "no weight of the network has changed" not in trained((STEP, SAME_SUMS)).stdout


def test_the_lowest_value_is_the_best_where_the_job_says_so(trained, tmp_path):
    done = trained((RUN, RUN.replace("optimizer=", 'best_by="loss", best_is="lowest", optimizer=')), WITHOUT="matplotlib")
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    best = min(rows, key=lambda row: row["loss"])
    assert f"done: lowest loss {best['loss']:.4f} in epoch {best['epoch']} (epoch_{best['epoch']}.pth). " in done.stdout
    assert f"Best loss (lowest) {best['loss']:.4f}, in epoch {best['epoch']}" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("name", ["loss", "val_error", "mae", "log_mse"])
def test_which_value_is_the_best_has_to_be_said_where_the_name_does_not(name):
    with pytest.raises(UserError, match=f'best_by="{name}".* does not say which value is better: give best_is="lowest" or'):
        Results(name)
    assert Results(name, "highest").best_is == "highest" and Results("accuracy").best_is == "highest"
    with pytest.raises(UserError, match="best_is='low'"):
        Results(name, "low")


# --- Before anything is spent -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, says",
    [
        (["--arch", "resnet19"], "--arch resnet19 is none of torchvision's"),
        (["--arch", "vit_b_16", "--image_size", 100], "--arch vit_b_16 takes no --image_size 100"),
    ],
)
def test_a_network_is_refused_before_the_data_are_looked_for(tmp_path, options, says):
    assert says in run_job("train_imagenet", tmp_path, "--data_url", "/nowhere", *options, check=2).stderr


@pytest.mark.parametrize("arch", ["resnet18", "regnet_y_400mf", "vit_b_32", "swin_t", "resnext101_32x4d", "maxvit_t"])
def test_a_network_that_can_be_built_is_not_refused(arch):
    classifiers.require(arch, 224)


@pytest.mark.parametrize("file", ["train/cat/1.jpg", "cat/1.jpeg", "cat/1.png"])
def test_pictures_by_the_class_are_for_another_job(tmp_path, file):
    (tmp_path / "photos" / file).parent.mkdir(parents=True)
    (tmp_path / "photos" / file).touch()
    said = run_job("train", tmp_path, "--data_url", tmp_path / "photos", check=2).stderr
    assert "for pictures in folders by class take jobs/train_imagenet.py" in said


def test_a_device_that_is_not_there_has_its_own_way_out(tmp_path):
    said = run_job("train", tmp_path, *TINY, "--device", "cuda", check=2).stderr
    assert "--device cuda, but torch sees no GPU" in said and "or give --device cpu to train on the CPU" in said


def test_checkpoints_that_will_not_fit_are_an_error_before_the_first_step(tmp_path):
    args = types.SimpleNamespace(checkpoint_dir=str(tmp_path), keep=2)
    run_folder.require_room(args, 2**10)
    with pytest.raises(UserError, match=r"no room for 4 checkpoints: .* MiB are needed and .* MiB are free: delete .* --keep"):
        run_folder.require_room(args, 2**60)


def test_a_run_looks_for_that_room(trained, tmp_path):
    small = f"import shutil, types; shutil.disk_usage = lambda path: types.SimpleNamespace(free=1000); {RUN}"
    assert "has no room for 4 checkpoints" in trained((RUN, small), check=2).stderr
    assert not list((tmp_path / "out").glob("checkpoints/*.pt"))


def test_a_full_disk_says_what_is_needed_and_what_is_free(tmp_path, monkeypatch):
    def full(folder, *_):
        raise OSError(errno.ENOSPC, "No space left on device", f"{folder}/1.pt")

    args = types.SimpleNamespace(
        checkpoint_dir=str(tmp_path), output_dir=str(tmp_path), keep=2, checkpoints=True, output_url=""
    )
    saving = Saving(args, [], print)
    monkeypatch.setattr(checkpoint, "write", full)
    saving.save(lambda: {"model": {"weight": torch.zeros(2**18)}}, vars(Position(total_steps=1)))
    with pytest.raises(Exception, match=r"1\.0 MiB are needed and [\d.]+ MiB are free: delete .*1\.pt'; no checkpoint yet"):
        saving.wait()
    assert saving.saved_at is None
    saving.save(lambda: {"model": {"weight": torch.zeros(1)}}, vars(Position(total_steps=2)))
    saving.forgive_pending()  # as the run ends with another error
    saving.wait()
    assert saving.saved_at is None


def test_what_is_no_longer_kept_and_cannot_be_removed_is_a_warning(tmp_path, monkeypatch):
    def prune(*_):
        raise OSError(errno.EIO, "Input/output error")

    said = []
    args = types.SimpleNamespace(
        checkpoint_dir=str(tmp_path), output_dir=str(tmp_path), keep=2, checkpoints=True, output_url=""
    )
    saving = Saving(args, [], said.append)
    monkeypatch.setattr(checkpoint, "prune", prune)
    saving.save(lambda: {"model": {"weight": torch.zeros(1)}}, {**vars(Position(total_steps=1)), "best": None})
    saving.wait()
    assert said == [
        "warning: what is no longer kept could not be removed: [Errno 5] Input/output error; the next save tries it again"
    ]


def test_the_next_command_goes_on():
    words = ["jobs/train.py", "--max_steps=2", "--lr", "1", "--max-steps", "3"]
    args = types.SimpleNamespace(world=types.SimpleNamespace(num_nodes=1, local_world_size=1))
    assert restart_command(args, words, omit=["max_steps"]) == "python jobs/train.py --lr 1"


@pytest.mark.parametrize(
    "nodes, parent, begins",
    [
        (1, False, "torchrun --nproc_per_node 2 jobs"),
        (3, False, "torchrun --nproc_per_node 2 --nnodes 3 jobs"),
        (3, True, "python jobs"),
    ],
)
def test_the_next_command_is_torchruns_where_torchrun_has_started_this_one(monkeypatch, nodes, parent, begins):
    """The workers of a parent of ours have its variables, too: python started that."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    if parent:
        monkeypatch.setenv(heartbeat.PARENT, "1")
    args = types.SimpleNamespace(world=types.SimpleNamespace(num_nodes=nodes, local_world_size=2))
    assert restart_command(args, ["jobs/train_ddp.py"]).startswith(begins)


def test_the_first_five_of_five_classes_say_nothing():
    imagenet = module_of("train_imagenet")
    for classes in (5, 6):
        found = types.SimpleNamespace(
            classes=["x"] * classes, accuracy=0.5, top5=1.0, loss=1.0, per_class=lambda: [("x", 3, 0.5)]
        )
        assert ("top5" in imagenet.epoch_metrics(found)) == (classes > 5)
