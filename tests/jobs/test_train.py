"""The base job from the outside: what it writes, how it goes on after every kind of end, and what it refuses."""

import gzip
import json
import re
import shutil
import signal
import sys

import pytest
import torch

from common import VERSION, arguments, devices
from common.models.resnet import FEW_CHANNELS, PointwiseConv2d, resnet18
from common.run import about, first_lines
from common.run.run import Run
from datasets import cifar10
from datasets.sampler import EpochSampler
from tests.tools.every_job import LEAVES, SMALLER
from tests.tools.jobs import (
    PATIENCE,
    ROOT,
    TINY,
    Popen,
    assert_same_bits,
    command,
    environment,
    final_state,
    in_rehearsal,
    run,
    run_forked,
    run_job,
    saved,
    start,
    wait_for,
)


@pytest.fixture
def again(finished, tmp_path):
    """A copy of the finished run's folder, to start again in."""
    shutil.copytree(finished[0] / "out", tmp_path / "out")
    return tmp_path


# --- What a person sees ------------------------------------------------------------------------------------------------


def test_a_run_leaves_everything_it_promises(finished):
    folder, _printed = finished
    out = folder / "out"
    names = {
        "checkpoints",
        "tensorboard",
        "examples",
        "metrics.jsonl",
        "speed.jsonl",
        "journal.jsonl",
        "state.json",
        "curves.png",
    }
    names |= {"report.txt", "report.json", "report.html"}
    names |= {f"epoch_{epoch}.pth{suffix}" for epoch in (1, 2) for suffix in ("", ".sha256")}
    names |= {"epoch_1.json", "epoch_2.json"}
    assert {path.name for path in out.iterdir()} == names
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    report = (out / "report.txt").read_text()
    assert all(word in report for word in ("precision", "recall", "pattern 9", "Confusion matrix"))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["steps"], row["samples"]) for row in rows] == [(1, 4, 64), (2, 8, 128)]
    assert sum(int(number) for number in re.findall(r" (\d+)", report.split("Confusion")[1].split("\n\n")[1])) >= 64


def test_the_log_names_device_and_platform_and_is_key_value(finished):
    lines = finished[1].splitlines()
    assert lines[0].startswith(f"train: anyrank {VERSION}, cpu (1 thread), rank 0 of 1, platform plain")
    assert lines[1] == (
        "a new run: 2 epochs of 4 steps, 64 training samples of 10 classes, made up (--custom_data true); results in "
        f"{finished[0]}/out"
    )
    assert "synthetic" in lines[2] and "means nothing" in lines[2]
    line = next(line for line in lines if "images_per_s" in line)
    form = r"\d\d:\d\d:\d\d epoch=1/2 step=1/4 train_loss=\d+\.\d{4} lr=0\.\d+ images_per_s=\d+ left=\? waiting_for_data=\d+% transfer=\d+% compute=\d+%"
    assert re.fullmatch(form, line), line
    news = r"(the best so far|best \d\.\d{4} in epoch 1), accuracy [+-]\d\.\d{4}, loss [+-]\d\.\d{4}, train_loss [+-]\d\.\d{4}"
    assert re.fullmatch(
        rf"\d\d:\d\d:\d\d epoch=2/2 steps=8 accuracy=\d\.\d{{4}} loss=\d\.\d{{4}} seconds=\d+\.\d \({news}\)", lines[-4]
    ), lines[-4]
    assert lines[-3].startswith("done: best accuracy") and lines[-3].endswith("/out/checkpoints/000000000128.pt")
    out = finished[0] / "out"
    assert lines[-2] == f"files: report.html, metrics.jsonl, curves.png, report.txt in {out}; TensorBoard in {out}/tensorboard"
    use = f"cd {ROOT} && python -m launch export {out} --format torch"
    assert lines[-1] == f"next: with more --epochs the same command trains longer. A network for any program: {use}"
    assert re.search(r" in epoch (\d) \(epoch_\1\.pth\)\. last checkpoint ", lines[-3])


def test_the_command_for_the_network_is_one_that_this_torch_can_do(monkeypatch):
    monkeypatch.setattr(about.devices, "TORCH", (2, 5))
    assert about.export_command("out").endswith("out --format onnx")


def test_tensorboard_has_the_curves(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished[0] / "out" / "tensorboard")).Reload()
    assert {"train/loss", "train/lr", "speed/images_per_s", "test/accuracy"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("test/accuracy")] == [4, 8]


def test_the_weights_are_those_of_the_modelarts_sample(finished):
    """Plain weights under the sample's names, and at full width its parameters and tensors."""
    weights = torch.load(finished[0] / "out" / "epoch_2.pth", weights_only=True)
    resnet18(width=2).load_state_dict(weights)
    full = resnet18()
    assert sum(parameter.numel() for parameter in full.parameters()) == 11_173_962 and len(full.state_dict()) == 122
    assert list(weights) == list(full.state_dict())
    assert {
        "conv1.0.weight",
        "conv2.0.residual_function.0.weight",
        "conv3.0.shortcut.1.bias",
        "dense_layer.bias",
    } <= weights.keys()


@pytest.mark.parametrize("channels", [FEW_CHANNELS - 1, FEW_CHANNELS])
def test_few_channels_overwrite_no_memory_and_have_the_gradients_of_a_convolution(channels):
    """With torch's own layer this process is killed where a CPU has AVX2 alone."""
    layer = PointwiseConv2d(channels, 16, kernel_size=1, stride=2, bias=False).to(memory_format=torch.channels_last)
    images = torch.randn(64, channels, 32, 32).to(memory_format=torch.channels_last).requires_grad_()
    for _ in range(10):
        images.grad = layer.weight.grad = None
        layer(images).square().sum().backward()
    found, (images.grad, layer.weight.grad) = (images.grad, layer.weight.grad), (None, None)
    torch.einsum("bihw,oi->bohw", images[:, :, ::2, ::2], layer.weight[:, :, 0, 0]).square().sum().backward()
    for ours, expected in zip(found, (images.grad, layer.weight.grad)):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_the_network_learns(tmp_path):
    options = ["--custom_data", "true", "--max_samples", 1024, "--batch_size", 32, "--width", 8, "--epochs", 5]
    run_job("train", tmp_path, *options)
    first, *_, last = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    assert last["accuracy"] > 0.6 and last["train_loss"] < first["train_loss"]


def test_the_recipe_of_the_modelarts_sample_is_reachable():
    recipe = (
        re.search(r"(--optimizer adam.*--augment false)", (ROOT / "jobs" / "train.py").read_text(), re.DOTALL).group(1).split()
    )
    args = arguments.parse(cifar10.parser(""), recipe, {})
    assert (args.optimizer, args.lr, args.schedule, args.augment) == ("adam", 0.01, "constant", False)


# --- Killed, stopped, started again ------------------------------------------------------------------------------------


WAS_KILLED = "the start before this one did not end as it should: if its log has no error: line, it was killed, mostly for want"


def test_killed_in_mid_epoch_and_started_again_the_result_has_the_same_bits(finished, tmp_path):
    """Twice in the same run; the later starts have loader workers, and the last one has to end with them."""
    options = [*TINY, "--save_steps", 1]
    for number, workers in ((16, 0), (96, 2)):
        process = start(tmp_path, *options, "--workers", workers)
        wait_for(saved(tmp_path, number), process, f"checkpoint {number}")
        process.kill()
        process.wait()
    done = run_job("train", tmp_path, *options, "--workers", 2)
    assert re.search(r"going on from \S+000000000(96|112).pt: epoch 2, after (32|48) of its samples", done.stdout), done.stdout
    assert WAS_KILLED in done.stdout
    assert_same_bits(final_state(tmp_path), final_state(finished[0]))


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGUSR1, 143)])  # SIGTERM: test_step.py
def test_a_stop_signal_saves_within_a_step(finished, tmp_path, number, code):
    process = start(tmp_path, *TINY, "--save_steps", 1, "--keep", 100)
    wait_for(saved(tmp_path, 16), process, "the first checkpoint")
    process.send_signal(number)
    assert process.wait(PATIENCE) == code
    log = (tmp_path / "log").read_text()
    assert f"stopped by {number.name}; saved after step" in log and "Traceback" not in log
    done = run_job("train", tmp_path, *TINY)
    assert "going on from" in done.stdout
    assert_same_bits(final_state(tmp_path), final_state(finished[0]))


@pytest.mark.rehearsal
def test_a_stop_signal_during_evaluation_does_not_wait_for_its_end(finished, tmp_path):
    """The evaluation is made endless, so only a stop out of its middle can end the job."""
    endless = (
        "import runpy, sys, itertools; sys.argv = sys.argv[1:]; from datasets import cifar10; import datasets.sampler as s\n"
    )
    endless += "order = s.InOrder.__iter__; s.InOrder.__iter__ = lambda self: itertools.chain.from_iterable(order(self) for _ in itertools.count())\n"
    endless += "runpy.run_path(sys.argv[0], run_name='__main__')"
    script = [sys.executable, "-c", endless, *command("train", *TINY, "--save_steps", 3, "--output_dir", tmp_path / "out")[1:]]
    log = open(tmp_path / "log", "w")  # noqa: SIM115
    process = Popen(script, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), stdout=log, stderr=log)
    wait_for(saved(tmp_path, 48), process, "the checkpoint before the last step")
    attempt = tmp_path / "out" / "checkpoints" / ".attempt"
    wait_for(
        lambda: (tmp_path / "log").read_text().count("step=") and attempt.read_bytes()[:8] == b"\xff" * 8, process, "evaluation"
    )
    process.terminate()
    assert process.wait(PATIENCE) == 143
    done = run_job("train", tmp_path, *TINY)
    assert "going on from" in done.stdout
    assert_same_bits(final_state(tmp_path), final_state(finished[0]))


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(finished, again):
    newest = again / "out" / "checkpoints" / "000000000128.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    done = run_job("train", again, *TINY)
    assert f"warning: checkpoint {newest} is damaged" in done.stdout and "000000000064.pt: epoch 2" in done.stdout
    assert_same_bits(final_state(again), final_state(finished[0]))


@pytest.mark.parametrize("gone, said", [
    ("checkpoints/000000000128.json", ["warning: 000000000128.pt in {}/checkpoints has no manifest (000000000128.json), so it is no "
                                       "checkpoint", "000000000064.pt: epoch 2"]),
    ("checkpoints/*", ["warning: {} has weights (epoch_1.pth, epoch_2.pth) but no checkpoint: the run begins at its first step"]),
])  # fmt: skip
def test_what_a_run_does_not_go_on_from_is_said_in_the_first_lines(finished, again, gone, said):
    for path in (again / "out").glob(gone):
        path.unlink()
    done = run_job("train", again, *TINY)
    first = done.stdout.split("images_per_s")[0]
    assert all(words.format(again / "out") in first for words in said), done.stdout
    assert_same_bits(final_state(again), final_state(finished[0]))


def test_max_steps_does_not_close_the_epoch(finished, tmp_path):
    said = run_job("train", tmp_path, *TINY, "--max_steps", 3).stdout
    assert (
        "--max_steps 3 is reached, 0 of 2 epochs are done: the same command with more of them, or without it, goes on" in said
    )
    assert final_state(tmp_path)["position"]["consumed"] == 48
    assert (
        "the run has done 0 epochs, 3 steps; it goes on with more than --max_steps 3"
        in run_job("train", tmp_path, *TINY, "--max_steps", 3).stdout
    )
    said = run_job("train", tmp_path, *TINY).stdout
    assert "is reached" not in said and WAS_KILLED not in said
    assert_same_bits(final_state(tmp_path), final_state(finished[0]))


def test_a_profile_says_what_took_the_time_and_the_run_is_the_same(finished, tmp_path):
    options = [*TINY, "--batch_size", 2, "--max_steps", 22, "--enable_gpu", "false"]
    done = run_job("train", tmp_path, *options, "--profile", "true")
    said = [line.split("profile: ", 1)[1] for line in done.stdout.splitlines() if line.startswith("profile: ")]
    assert re.fullmatch(r"\d+% waiting for data, \d+% host, 0% device", said[1])
    table = [line.split() for line in said[3:]]
    assert len(table) == 10 and {"aten::convolution_backward", "aten::native_batch_norm"} <= {row[-1] for row in table}
    shares = [float(row[0].rstrip("%")) for row in table]
    assert shares == sorted(shares, reverse=True) and 50 < sum(shares) <= 100.5
    with gzip.open(tmp_path / "out" / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    convolutions = [event for event in events if event.get("name") == "aten::convolution_backward"]
    assert len(convolutions) == 10 * float(next(row[2] for row in table if row[-1] == "aten::convolution_backward"))
    (tmp_path / "plain").mkdir()
    run_job("train", tmp_path / "plain", *options)
    assert_same_bits(final_state(tmp_path), final_state(tmp_path / "plain"))
    assert not (tmp_path / "plain" / "out" / "trace.json.gz").exists()


@pytest.mark.rehearsal
def test_a_profile_of_a_run_that_is_too_short_says_so(tmp_path):
    """And the process ends well: a recorder that is still at work would take it down."""
    done = run_job(
        "train", tmp_path, *TINY, "--batch_size", 2, "--max_steps", 15, "--profile", "true", launcher=[sys.executable]
    )
    assert "profile: the run ended after 15 steps, and a profile takes 20" in done.stdout and "done: " in done.stdout


def test_max_hours_saves_and_exits_0(finished, tmp_path):
    done = run_job("train", tmp_path, *TINY, "--max_hours", "1e-9")
    assert "--max_hours 1e-09 is over; saved after step 1: start again to go on" in done.stdout
    state = tmp_path / "out" / "state.json"
    assert state.read_text() == '{"finished": false, "epoch": 0, "epochs": 2}\n'
    run_job("train", tmp_path, *TINY)
    assert state.read_text() == '{"finished": true, "epoch": 2, "epochs": 2}\n'
    assert_same_bits(final_state(tmp_path), final_state(finished[0]))
    run_job("train", tmp_path, *TINY, "--epochs", 3, "--max_hours", "1e-9")
    assert state.read_text() == '{"finished": false, "epoch": 2, "epochs": 3}\n'


def test_a_loss_that_is_no_number_stops_and_enters_no_checkpoint(tmp_path):
    done = run_job(
        "train", tmp_path, *TINY, "--lr", "1e30", "--schedule", "constant", "--save_steps", 1, check=1, env={"WITHOUT": ""}
    )
    line = done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert re.search(
        r"error: (the loss is (nan|inf) at step \d+, sample ids \[\d+, .*\]|a weight is not a finite number after step \d+); ",
        line,
    ), line
    assert "last checkpoint" in line or "no checkpoint yet" in line
    page = (tmp_path / "out" / "report.html").read_text()
    assert (
        re.search("Failed after [01]/2 epochs: TrainingFailed: ", re.sub("<[^>]*>", "", page))
        and "no end was recorded" not in page
    )
    assert done.stdout.splitlines()[-1].startswith(f"next: python {command('train')[1]} --custom_data true")
    for path in (tmp_path / "out" / "checkpoints").glob("*.pt"):
        assert all(torch.isfinite(tensor).all() for tensor in torch.load(path, weights_only=True)["model"].values())


def test_two_deaths_in_the_same_step_are_reported_with_its_samples(tmp_path):
    """A step that kills the process: the third start says which samples were in it."""
    poison = "import os, runpy, sys; sys.argv = sys.argv[1:]; from common import run\n"
    poison += "step = run.Run.step\n"
    poison += "run.Run.step = lambda self, loss: os._exit(9) if self.total_steps == 5 else step(self, loss)\n"
    poison += "runpy.run_path(sys.argv[0], run_name='__main__')"
    script = [sys.executable, "-c", poison, *command("train", *TINY, "--output_dir", tmp_path / "out")[1:]]
    for _ in range(2):
        done = run(script, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)))
        assert done.returncode == 9 and "both died" not in done.stdout
    done = run_job("train", tmp_path, *TINY)
    ids = torch.from_numpy(__import__("numpy").random.default_rng(1).permutation(64)[16:32]).tolist()
    assert f"both died in one step, in epoch 2 after 16 samples; its sample ids are {ids}" in done.stdout


# --- Starting again in the same folder ---------------------------------------------------------------------------------


def test_a_finished_run_says_so_and_more_epochs_go_on(again):
    done = run_job("train", again, *TINY)
    assert (
        ": all 2 epochs are done, step 8\n" in done.stdout
        and "nothing to do" in done.stdout
        and "000000000128.pt" in done.stdout
    )
    done = run_job("train", again, *TINY, "--epochs", 3, "--lr", "0.05")
    assert "warning: going on with other settings than before: epochs 2 -> 3, lr 0.1 -> 0.05" in done.stdout
    assert "epoch=3/3 steps=12" in done.stdout


@pytest.mark.parametrize(
    "options, words",
    [
        (["--width", "8"], ["model is ResNet of 176,402 parameters", "ResNet of 11,420 parameters"]),
        (["--seed", "1"], ["seed is 1 here but 0 there"]),
        (["--max_samples", "128"], ["data set is synthetic, 128 samples here but synthetic, 64 samples there"]),
        (["--optimizer", "adam"], ["optimizer is Adam here but SGD there"]),
        (["--resume", "never"], ["holds a run", "--overwrite true"]),
        (["--resume", "/nowhere.pt"], ["--resume /nowhere.pt does not exist"]),
        (["--resume", "nevr"], ["--resume nevr does not exist: give auto, never, or the path"]),
    ],
)
def test_another_run_in_the_same_folder_is_refused(again, options, words):
    if options[0] == "--resume" and options[1] != "never":
        shutil.rmtree(again / "out")
    done = run_job("train", again, *TINY, *options, check=2)
    assert all(word in done.stderr for word in words) and len(done.stderr.splitlines()) == 1, done.stderr


def test_overwrite_deletes_that_run_and_nothing_else(finished, again):
    (again / "out" / "notes.txt").write_text("mine")
    for name in ("trace.json.gz", "checkpoints/000000000192.pt.unfinished", "checkpoints/.attempt"):
        (again / "out" / name).write_bytes(b"")
    run_job("train", again, *TINY, "--resume", "never", "--overwrite", "true")
    assert not (again / "out" / "trace.json.gz").exists() and len(list((again / "out" / "checkpoints").glob("[0-9]*"))) == 4
    assert (again / "out" / "notes.txt").read_text() == "mine"
    assert len(list((again / "out" / "tensorboard").iterdir())) == 1
    assert_same_bits(final_state(again), final_state(finished[0]))


def test_weights_alone_are_no_checkpoint_to_go_on_from(tmp_path, finished):
    weights = finished[0] / "out" / "epoch_1.pth"
    said = run_job("train", tmp_path, *TINY, "--resume", weights, check=2).stderr
    assert f"--resume {weights} is no checkpoint: give a .pt file that has its .json next to it; with weights alone" in said


def test_a_folder_that_a_running_job_uses_is_refused(tmp_path):
    process = start(tmp_path, *TINY, "--epochs", 500, "--save_steps", 1)
    wait_for(saved(tmp_path, 16), process, "the first checkpoint")
    script = command("train", *TINY, "--output_dir", tmp_path / "out")[1:]
    impatient = f"import runpy, sys; sys.argv = {script!r}; sys.path.insert(0, {str(ROOT)!r}); from common.checkpoints import run_folder; "
    impatient += "run_folder.LOCK_SECONDS = 0.1; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = run([sys.executable, "-c", impatient], cwd=tmp_path, env=environment())
    assert done.returncode == 2, done.stderr
    assert "is in use by another job that is still running" in done.stderr
    process.kill()
    process.wait()
    run_job("train", tmp_path, *TINY, "--epochs", 1)


def test_what_changes_the_training_without_a_part_of_its_own_is_listed():
    before = {"lr_batch": 256, "freeze_epochs": 0, "sync_bn": False, "interpolation": "bilinear", "workers": 1}
    after = {"lr_batch": 128, "freeze_epochs": 2, "sync_bn": True, "interpolation": "bicubic", "workers": 2}
    listed = ["interpolation bilinear -> bicubic", "lr_batch 256 -> 128", "freeze_epochs 0 -> 2", "sync_bn False -> True"]
    assert first_lines.changes(before, after) == listed


def test_a_run_can_begin_from_the_checkpoint_of_another_folder(finished, tmp_path):
    done = run_job("train", tmp_path, *TINY, "--resume", finished[0] / "out" / "checkpoints" / "000000000064.pt")
    assert "000000000064.pt: epoch 2, after 0" in done.stdout
    assert_same_bits(final_state(tmp_path), final_state(finished[0]))
    path = finished[0] / "out" / "checkpoints" / "000000000064.pt"
    done = run_job("train", tmp_path, *TINY, "--resume", path, "--epochs", 3)
    assert f"already went on from --resume {path}" in done.stdout and "000000000128.pt: epoch 3" in done.stdout
    (tmp_path / "other").mkdir()
    run_job("train", tmp_path / "other", *TINY, "--max_steps", 1)
    done = run_job("train", tmp_path / "other", *TINY, "--resume", path, check=2)
    assert "holds another run than --resume" in done.stderr


# --- Refused before anything is spent ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, env, words",
    [
        (["--init_method", "tcp://10.0.0.1:6666", "--rank", "0", "--world_size", "2"], {}, ["2 nodes", "train_ddp.py"]),
        ([], {"MA_NUM_HOSTS": "2", "VC_TASK_INDEX": "0", "VC_WORKER_HOSTS": "a,b"}, ["2 nodes", "train_ddp.py"]),
        (
            ["--enable_gpu", "true"],
            {"CUDA_VISIBLE_DEVICES": ""},
            ["--enable_gpu true", "torch sees no GPU", torch.__version__, "--enable_gpu false"],
        ),
        (
            [],
            {"MA_NUM_HOSTS": "1", "MA_NUM_GPUS": "8", "CUDA_VISIBLE_DEVICES": ""},
            ["the platform reports 8 GPUs", "torch sees no GPU"],
        ),
        (["--batch_size", "128"], {}, ["64 samples are fewer than one global batch of 128"]),
        (["--output_dir", "/proc/none"], {}, ["cannot write to /proc/none"]),
        (["--output_dir", "/etc/hostname/run"], {}, ["cannot write to /etc/hostname/run: /etc/hostname is no folder"]),
        (
            ["--output_dir", "/proc/none", "--custom_data", "false", "--data_url", "/nowhere"],
            {},
            ["cannot write to /proc/none"],
        ),
        (["--custom_data", "false", "--data_url", "/no/such"], {}, ["--data_url /no/such does not exist"]),
        (["--ephocs", "3"], {}, ["unknown option --ephocs: did you mean --epochs?"]),
        (
            [],
            {"CLUSTER_SPEC": '{"cluster": []}'},
            ["the environment looks like that of vertex", "do not have the documented form"],
        ),
        ([], {"SM_HOSTS": "3", "SM_CURRENT_HOST": "algo-1"}, ["the environment looks like that of sagemaker"]),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path, options, env, words):
    done = run_forked(command("train", *TINY, "--output_dir", tmp_path / "out", *options)[1:], tmp_path, env, check=2)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize("wrapped, idle", [(False, True), (True, False)])
def test_a_one_device_job_says_how_many_gpus_are_idle(tmp_path, monkeypatch, wrapped, idle):
    """Eight GPUs are faked; DataParallel uses them all."""
    args = arguments.parse(cifar10.parser(""), ["--output_dir", str(tmp_path)], {})
    model = torch.nn.Linear(1, 1)
    run = Run(args, EpochSampler(8, 1, seed=0), torch.nn.DataParallel(model) if wrapped else model)
    run.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "fake")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    said = list(first_lines.of_run(run, None, None))
    assert said[0].startswith(f"{args.job}: anyrank {VERSION}, cuda:0 (fake)")
    assert any("7 of 8 GPUs are idle: train_ddp.py" in line for line in said) == idle


@pytest.mark.parametrize(
    "device, options, parallel, capability, compiler, advised",
    [
        ("cuda:0", [], False, (7, 0), "gcc", True),
        ("cuda:0", [], False, (6, 0), "gcc", False),
        ("cuda:0", [], False, (9, 0), "", False),
        ("cuda:0", ["--compile", "true"], False, (9, 0), "gcc", False),
        ("cuda:0", [], True, (9, 0), "gcc", False),  # DataParallel cannot be compiled
        ("cpu", [], False, (9, 0), "gcc", False),
        ("xpu:0", [], False, (9, 0), "gcc", False),
    ],
)
def test_on_an_nvidia_gpu_a_new_run_is_advised_to_compile(
    tmp_path, monkeypatch, device, options, parallel, capability, compiler, advised
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(devices.work.shutil, "which", lambda _: None)
    args = arguments.parse(cifar10.parser(""), ["--output_dir", str(tmp_path), *options], {})
    model = torch.nn.Linear(1, 1)
    run = Run(args, EpochSampler(8, 1, seed=0), torch.nn.DataParallel(model) if parallel else model)
    run.device = torch.device(device)
    monkeypatch.setattr(first_lines.devices, "describe", str)
    about = {"arguments": {}}
    assert (first_lines.COMPILE_ADVICE in first_lines.of_run(run, None, None)) == advised
    assert first_lines.COMPILE_ADVICE not in first_lines.of_run(run, ({}, about, "some.pt"), None)


def test_one_platform_node_trains_although_the_platform_injects_its_arguments(tmp_path):
    options = ["--init_method", "tcp://127.0.0.1:6666", "--rank", "0", "--world_size", "1", "--task_index=0"]
    assert "platform modelarts" in run_job("train", tmp_path, *TINY, *options).stdout


PLAIN = "plain_ddp"  # has nothing of ours: tests/jobs/test_plain_ddp.py


# The others have the same lines before their imports (tests/launch/test_blocks.py).
BEGIN_ALIKE = ("train_amp", "train_dali", "train_ddp", "train_ddp_exact", "train_dp", "train_dpex", "train_exact")


@pytest.mark.parametrize("launcher", ["python", pytest.param("torchrun", marks=pytest.mark.rehearsal)])
@pytest.mark.parametrize(
    "job",
    in_rehearsal(
        sorted(path.stem for path in (ROOT / "jobs").glob("*.py") if path.stem != PLAIN), lambda job: job in BEGIN_ALIKE
    ),
)
def test_every_job_from_an_unrelated_folder_beside_an_installed_package_called_datasets(tmp_path, job, launcher):
    """The decoy is on the module search path, as an installed Hugging Face `datasets` would be."""
    decoy = tmp_path / "site" / "datasets"
    decoy.mkdir(parents=True)
    (decoy / "__init__.py").write_text("raise SystemExit('the decoy was imported')")
    words = [] if launcher == "python" else [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    env = {"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path)}
    done = run_job(job, tmp_path, *TINY, *SMALLER.get(job, []), "--max_steps", 1, env=env, launcher=words)
    assert "done: " in done.stdout
    assert any((tmp_path / "out").glob(LEAVES.get(job, "checkpoints/*")))
