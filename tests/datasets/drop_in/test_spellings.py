"""What is typed in the words of NVIDIA's ResNet-50 script means the same here, and nothing of it disappears."""

import pytest
import torch

from common import arguments
from datasets.drop_in import spellings
from tests.tools.jobs import module_of


@pytest.fixture(scope="module")
def job():
    return module_of("train_imagenet")


@pytest.fixture
def parsed(job):
    return lambda *words: arguments.parse(job.options(), list(map(str, words)), {})


SAME = {
    "--arch resnet18": "-a resnet18",
    "--batch_size 8": "-b 8",
    "--workers 16": "-j16",
    "--print_freq 100": "-p=100",
    "--data_backend kspeed": "--data-backend kspeed",
    "--training_only true": "--training-only",
    "--evaluate true": "-e",
    "--amp_dtype float16": "--amp",
    "--static_loss_scale 128": "--static-loss-scale 128",
    "--growth_interval 100": "--dynamic-loss-scale",
    "--schedule cosine": "--lr-schedule cosine",
    "--label_smoothing 0.1": "--label-smoothing 0.1",
    "--bn_weight_decay true": "--bn-weight-decay",
    "--ema 0.9999": "--use-ema 0.9999",
    "--total_batch 2048": "--optimizer-batch-size 2048",
    "--run_epochs 3": "--run-epochs 3",
    "--memory_format nhwc": "--memory-format nhwc",
    "--num_classes 1000": "--num-classes=1000",
    "--output_dir out": "--workspace out",
    "--checkpoints false": "--no-checkpoints",
    "--lr 0.2 --weight_decay 0.001": "--learning-rate 0.2 --wd 1e-3",
    "--data_url data --recipe nvidia": "data",
    "--data_url data --recipe nvidia --prof 20": "--prof 20 data",
    "--data_url data --recipe nvidia --prof 100": "data --prof",
    "--data_backend dali-cpu": "--dali-cpu --use-dali",
    "--data_backend dali-gpu": "--use-dali",
    "--amp_dtype float16 --epochs 3": "--amp true --epochs 3",
    "--amp_dtype float16 --epochs 4": "--amp=True --epochs 4",
    "--epochs 5": "--amp=false --no-checkpoints false --pretrained true --epochs 5",
    "--val_batch_size 500": "-v 500",
    "": "--run-epochs -1 --optimizer-batch-size=-1 --prof -1",
}


@pytest.mark.parametrize("ours", SAME)
def test_one_word_is_as_good_as_another(parsed, ours):
    assert vars(parsed(*SAME[ours].split())) == vars(parsed(*ours.split()))


def test_a_whole_command_of_that_script(parsed):
    command = (
        "/imagenet --data-backend dali-cpu --raport-file raport.json -j16 -p 100 --lr 2.048 --optimizer-batch-size 2048 --warmup 8 "
        "--arch resnext101-32x4d --label-smoothing 0.1 --lr-schedule cosine --momentum 0.875 --wd 3.0517578125e-05 "
        "--workspace runs/1 -b 256 --amp --static-loss-scale 128 --epochs 90 --mixup 0.2 --memory-format nhwc"
    )
    args = parsed(*command.split())
    expected = {
        "data_url": "/imagenet", "workers": 16, "lr": 2.048, "lr_batch": 0, "total_batch": 2048, "warmup": 8, "momentum": 0.875,
        "arch": "resnext101-32x4d", "batch_size": 256, "amp_dtype": "float16", "static_loss_scale": 128, "nesterov": False,
        "output_dir": "runs/1", "mixup": 0.2, "schedule": "cosine", "epochs": 90, "print_freq": 100,
    }  # fmt: skip
    assert {name: vars(args)[name] for name in expected} == expected


def test_a_recipe_that_is_given_stays_with_the_folder_as_a_word_of_its_own(parsed):
    for words in (["/data/imagenet", "--recipe", "torchvision"], ["--recipe", "torchvision", "/data/imagenet"]):
        args = parsed(*words)
        assert (args.recipe, args.data_url, args.cutmix) == ("torchvision", "/data/imagenet", 1.0)


def test_the_option_as_it_is_written_wins_over_the_recipe_wherever_it_stands(parsed):
    for words in (["data", "--warmup", 3], ["--warmup", 3, "data"]):
        assert parsed(*words).warmup == 3
    assert parsed("data").warmup == 0 and parsed().warmup == 5


@pytest.mark.parametrize("name", sorted({**spellings.NO_EFFECT, **spellings.NO_EFFECT_WITH_VALUE}))
def test_what_has_no_meaning_here_says_so_once(parsed, name, capsys):
    value = ["script"] if name in spellings.NO_EFFECT_WITH_VALUE else []
    args = parsed(name.replace("_", "-") if name.startswith("--") else name, *value, "-b", 8)
    said = capsys.readouterr()
    assert (said.out + said.err).count("has no effect") == 1 and args.batch_size == 8 and args.data_url is None


@pytest.mark.parametrize(
    "words, what",
    [
        (["data", "more"], "'more' belongs to no option"),
        (["--data_url", "data", "more"], "'more' belongs to no option"),
        (["-z", "3"], "unknown option -z"),
        (["--amp=maybe"], "unknown option --amp: did you mean --amp_dtype?"),
        (["-b", "many"], "'many' is not a whole number"),
        (["--optimizer-batch-size", "0"], "--total_batch"),
        (["--lr", "-1"], "--lr"),
        (["-b"], "--batch_size: expected one argument"),
    ],
)
def test_the_rest_is_refused(job, capsys, words, what):
    with pytest.raises(SystemExit) as stop:
        arguments.parse(job.options(), words, {})
    assert stop.value.code == 2 and what in capsys.readouterr().err


def test_a_worker_of_a_node_repeats_no_remark(parsed, monkeypatch, capsys):
    monkeypatch.setattr(arguments.options.heartbeat, "has_parent", lambda: True)
    parsed("--jit", "script")
    assert "has no effect" not in "".join(capsys.readouterr())


def test_the_scale_of_float16(job, parsed):
    """static: never grows; dynamic: doubles; both: begins there and doubles."""
    grows = {
        "": (65536, 2000),
        "--static-loss-scale 128": (128, 2**31 - 1),
        "--dynamic-loss-scale": (65536, 100),
        "--static-loss-scale 128 --dynamic-loss-scale": (128, 100),
    }
    for words, expected in grows.items():
        scaler = torch.amp.GradScaler("cpu", **job.scaling(parsed(*words.split())))
        assert (scaler.get_scale(), scaler.get_growth_interval()) == expected
