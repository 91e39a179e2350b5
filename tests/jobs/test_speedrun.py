"""The speedrun: its optimizer and pictures do what they say, every picture comes once a pass, and the job keeps its rules."""

import json
import sys

import pytest
import torch

from common.errors import UserError
from datasets import synthetic
from jobs import speedrun
from tests.tools.jobs import ROOT, environment, run

IMAGES = (
    torch.arange(6 * 3 * 32 * 32)
    .remainder(251)
    .to(torch.uint8)
    .view(6, 3, 32, 32)
    .contiguous(memory_format=torch.channels_last)
)
IDS = torch.tensor([4, 0, 5])
CPU = torch.device("cpu")


def raw(images):
    """What was normalised, as pixels again."""
    mean, std = (torch.tensor(value).view(1, 3, 1, 1) * 255 for value in (speedrun.cifar10.MEAN, speedrun.cifar10.STD))
    return images * std + mean


# --- Pictures ----------------------------------------------------------------------------------------------------------


def test_pictures_are_those_that_were_asked_for_mirrored_where_asked(monkeypatch):
    monkeypatch.setattr(speedrun, "SHIFT", 0)
    found = raw(speedrun.pictures(IMAGES, IDS, torch.tensor([False, True, False]), 32))
    wanted = IMAGES[IDS].float()
    wanted[1] = wanted[1].flip(-1)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=0)


def test_a_moved_picture_is_a_crop_of_the_one_that_is_reflected_at_its_edges():
    torch.manual_seed(1)
    found = raw(speedrun.pictures(IMAGES, torch.zeros(200, dtype=torch.int64), torch.zeros(200, dtype=torch.bool), 32))
    padded = torch.nn.functional.pad(IMAGES[:1].float(), (2,) * 4, mode="reflect")
    crops = padded.unfold(2, 32, 1).unfold(3, 32, 1).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    nearest = (found[:, None] - crops[None]).abs().amax(dim=(2, 3, 4)).min(dim=1)
    assert nearest.values.max() < 1e-3
    assert set(nearest.indices.tolist()) == set(range(25))


def test_a_smaller_picture_has_the_same_mean(monkeypatch):
    monkeypatch.setattr(speedrun, "SHIFT", 0)
    big, small = (speedrun.pictures(IMAGES, IDS, torch.zeros(3, dtype=torch.bool), size) for size in (32, 16))
    assert small.shape == (3, 3, 16, 16)
    torch.testing.assert_close(small.mean(dim=(2, 3)), big.mean(dim=(2, 3)), atol=0.05, rtol=0)


def test_every_picture_comes_once_a_pass_and_the_other_way_round_in_the_next(monkeypatch):
    monkeypatch.setitem(speedrun.RECIPES, ("small", 0.8), (5, 0.0, 0.6, {16: 1, 32: 1}))
    images = torch.randint(256, (60, 3, 32, 32), dtype=torch.uint8)
    seen, pictures = [], speedrun.pictures
    monkeypatch.setattr(speedrun, "pictures", lambda *given: (seen.append(given[1:]), pictures(*given))[1])
    arguments = type("Arguments", (), {"net": "small", "target": 0.8})
    speedrun.Training(arguments, CPU, images, torch.randint(10, (60,))).run(seed=0)
    assert [size for _, _, size in seen] == [16] * 12 + [32] * 12
    ids, mirrored = (torch.cat([step[place] for step in seen]).view(2, 60) for place in (0, 1))
    order = ids.argsort(dim=1)
    assert ids.gather(1, order).tolist() == [list(range(60))] * 2
    first, second = mirrored.gather(1, order)
    assert torch.equal(first, ~second) and 0 < first.sum() < 60


def test_a_training_is_used_again_and_its_network_has_the_bits_of_a_new_one(monkeypatch):
    monkeypatch.setitem(speedrun.RECIPES, ("small", 0.8), (5, 0.0, 0.6, {16: 1}))
    arguments = type("Arguments", (), {"net": "small", "target": 0.8})
    data = torch.randint(256, (20, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (20,))
    training = speedrun.Training(arguments, CPU, *data)
    before = training.run(seed=0, steps_of_a_size=1)
    again = training.run(seed=1)
    new = speedrun.Training(arguments, CPU, *data).run(seed=1)
    assert again is before
    for name, value in new.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert [norm.momentum for norm in again.modules() if hasattr(norm, "momentum")] == [
        norm.momentum for norm in new.modules() if hasattr(norm, "momentum")
    ]


# --- The optimizer and the networks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 64, 27), (2, 64, 576), (1, 40, 40)])
def test_the_singular_values_of_what_is_made_orthogonal_are_about_one(shape):
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    (found,) = (matrices.float() for matrices in speedrun.orthogonal([matrices]))
    assert found.shape == matrices.shape
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.3
    if shape[1] != shape[2]:  # a square one has values near zero, which three steps do not lift
        assert values.min() > 0.5
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(found.flatten(), (left @ right).flatten(), dim=0) > 0.9


def test_what_is_made_orthogonal_together_is_what_each_would_be_alone():
    torch.manual_seed(0)
    groups = [torch.randn(2, 16, 27), torch.randn(1, 16, 40), torch.randn(3, 32, 64)]
    made = speedrun.orthogonal(groups)
    assert len(made) == len(groups)
    for together, matrices in zip(made, groups):
        assert torch.allclose(together, speedrun.orthogonal([matrices])[0], atol=0.01)


def test_muon_keeps_the_length_of_the_filters_and_lowers_the_loss():
    torch.manual_seed(0)
    filters = torch.nn.Parameter(torch.randn(8, 3, 3, 3))
    wanted = torch.randn(8, 3, 3, 3)
    muon, losses = speedrun.Muon([filters], momentum=0.6), []
    for _ in range(30):
        loss = -(filters / filters.norm() * wanted).sum()
        losses.append(loss.item())
        (filters.grad,) = torch.autograd.grad(loss, filters)
        muon.rate.fill_(0.1)
        muon.step()
    assert losses[-1] < losses[0] - 5
    assert 0.7 < filters.norm() / 8**0.5 < 1.4


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("width", range(2, 12))
def test_a_gathered_convolution_is_a_convolution(width, stride):
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(5, 7, 3, stride=stride, padding=1, bias=False)
    images = torch.randn(4, 5, width, width).to(memory_format=torch.channels_last).requires_grad_()
    wanted, found = conv(images), speedrun.convolved(conv, images)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(answer.square().sum(), [images, conv.weight]) for answer in (wanted, found)]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_a_block_of_the_resnet_begins_with_its_shortcut_alone():
    block, images = speedrun.resnet(IMAGES).conv2[0], torch.rand(2, 64, 8, 8)
    assert torch.equal(block(images), images)


def test_the_resnet_begins_with_filters_that_patches_differ_by():
    torch.manual_seed(0)
    images = torch.randint(256, (50, 3, 16, 16)).float().cumsum(-1).cumsum(-2).remainder(256).to(torch.uint8)
    filters = next(speedrun.resnet(images).parameters())
    torch.testing.assert_close(filters.flatten(1).norm(dim=1), torch.ones(64))
    torch.testing.assert_close(filters[27:54], -filters[:27])
    answers = torch.nn.functional.conv2d(speedrun.normalised(images), filters[:27]).transpose(0, 1).flatten(1)
    moments = answers @ answers.T / answers.shape[1]
    assert (moments - moments.diagonal().diag()).abs().max() < 1e-3 * moments.max()


def test_the_norms_are_measured_on_the_pictures_as_they_are():
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3)).train()
    model(torch.randn(8, 3, 4, 4) + 100)
    speedrun.measure_norms(model, IMAGES, torch.arange(6).split(2))
    torch.testing.assert_close(model[0].running_mean, speedrun.normalised(IMAGES).mean(dim=(0, 2, 3)), atol=1e-3, rtol=0)


def test_accuracy_counts_every_test_image_once():
    images = torch.randint(256, (1001, 3, 4, 4), dtype=torch.uint8)
    labels = torch.arange(1001) % 2
    model = torch.nn.Module()
    model.forward = lambda batch: torch.eye(2)[torch.zeros(len(batch), dtype=torch.int64)]
    assert speedrun.accuracy(model, images, labels) == 501 / 1001


def test_the_small_network_begins_with_independent_patches():
    torch.manual_seed(0)
    images = torch.randint(256, (500, 3, 8, 8)).float().cumsum(-1).cumsum(-2).remainder(256).to(torch.uint8)
    model = speedrun.Small(images)
    first = model[0](speedrun.normalised(images)) - model[0].bias.view(1, -1, 1, 1)
    answers = first[:, :12].transpose(0, 1).flatten(1)
    moments = answers @ answers.T / answers.shape[1]
    assert (moments - torch.eye(12)).abs().max() < 0.01
    torch.testing.assert_close(first[:, 12:], -first[:, :12], atol=1e-4, rtol=1e-4)


# --- The job -----------------------------------------------------------------------------------------------------------


def main(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["speedrun.py", "--custom_data=true", "--enable_gpu=false", "--net=small", *options])
    speedrun.main()


@pytest.mark.rehearsal
def test_it_learns_synthetic_images_and_keeps_its_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(speedrun.RECIPES, ("small", 0.8), (25, 0.0, 0.6, {16: 2, 32: 1}))
    main(monkeypatch, f"--output_dir={tmp_path}", "--runs=2", "--max_samples=500")
    rows = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [row["seed"] for row in rows] == [0, 1]
    assert all(row["accuracy"] > 0.5 and row["seconds"] > 0 for row in rows), rows
    mean, said = (rows[0]["accuracy"] + rows[1]["accuracy"]) / 2, capsys.readouterr().out
    assert f"accuracy: {mean:.2%} in the mean of 2" in said
    assert f"80% {'reached' if mean >= 0.8 else 'missed'}" in said


def test_held_out_images_are_not_trained_on(tmp_path, monkeypatch):
    kept = {}
    monkeypatch.setattr(speedrun.Training, "run", lambda self, seed: kept.update(trained=(self.images, self.labels)))
    monkeypatch.setattr(speedrun, "accuracy", lambda model, *data: kept.update(tested=data) or 0.0)
    monkeypatch.setattr(speedrun, "HELD_OUT", 100)
    main(monkeypatch, "--held_out=true", f"--output_dir={tmp_path}", "--max_samples=500")
    pictures, labels = synthetic.cifar_like(500, "train")
    for name, part in (("trained", slice(400)), ("tested", slice(400, None))):
        assert (kept[name][0].numpy() == pictures[part]).all() and (kept[name][1].numpy() == labels[part]).all()


def test_the_same_seed_gives_the_same_network(monkeypatch):
    monkeypatch.setitem(speedrun.RECIPES, ("small", 0.8), (20, 0.1, 0.6, {32: 1}))
    images, labels = torch.randint(256, (60, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (60,))
    arguments = type("Arguments", (), {"net": "small", "target": 0.8})
    one, same, other = (speedrun.Training(arguments, CPU, images, labels).run(seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["0.bias"], other["0.bias"])


def test_norms_and_biases_alone_learn_fast(monkeypatch):
    monkeypatch.setitem(speedrun.RECIPES, ("small", 0.8), (20, 0.0, 0.6, {32: 1}))
    images, labels = torch.randint(256, (60, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (60,))
    made, sgd = [], torch.optim.SGD
    monkeypatch.setattr(torch.optim, "SGD", lambda groups, **how: made.append(sgd(groups, **how)) or made[-1])
    arguments = type("Arguments", (), {"net": "small", "target": 0.8})
    model = speedrun.Training(arguments, CPU, images, labels).run(seed=0)
    rates = {id(parameter): group["lr"] for group in made[0].param_groups for parameter in group["params"]}
    slow, norm, bias = (rates.pop(id(parameter)) for parameter in (model[-1].weight, model[4].weight, model[4].bias))
    assert isinstance(model[4], torch.nn.BatchNorm2d) and set(rates.values()) == {norm} == {bias}
    assert norm / slow == pytest.approx(speedrun.NORM_RATE / speedrun.LAST_RATE)


@pytest.mark.usefixtures("reachable")
def test_each_run_is_in_the_bucket_before_the_next_begins(store, monkeypatch, tmp_path):
    there = []

    def run(self, seed):
        there.append(
            [item["Key"] for item in store.client().list_objects_v2(Bucket="data", Prefix="speed/").get("Contents", [])]
        )

    monkeypatch.setattr(speedrun.Training, "run", run)
    monkeypatch.setattr(speedrun, "accuracy", lambda model, images, labels: 0.5)
    main(monkeypatch, "--output_dir=s3://data/speed", "--runs=2", "--max_samples=50")
    assert there == [[], ["speed/runs.jsonl"]]
    lines = store.client().get_object(Bucket="data", Key="speed/runs.jsonl")["Body"].read().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [0, 1]
    (tmp_path / "another machine").mkdir()
    monkeypatch.chdir(tmp_path / "another machine")
    main(monkeypatch, "--output_dir=s3://data/speed", "--seed=7", "--max_samples=50")
    lines = store.client().get_object(Bucket="data", Key="speed/runs.jsonl")["Body"].read().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [0, 1, 7]


def test_there_is_a_recipe_for_each_network_and_target():
    assert sorted(speedrun.RECIPES) == [(net, target) for net in sorted(speedrun.NETS) for target in (0.80, 0.94)]


def test_so_few_images_that_none_would_be_left_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="holds out 5000 of the training images, and there are 60"):
        main(monkeypatch, f"--output_dir={tmp_path}", "--held_out=true", "--max_samples=60")


def test_the_doctor_is_sent_to_another_job(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        main(monkeypatch, f"--output_dir={tmp_path}", "--doctor=true")
    assert stop.value.code == 2 and "argument --doctor: speedrun.py makes no Run" in capsys.readouterr().err


def test_several_processes_are_refused(tmp_path):
    words = [sys.executable, str(ROOT / "jobs" / "speedrun.py"), "--custom_data", "true", "--rank", "0", "--world_size", "2"]
    done = run([*words, "--init_method", "tcp://127.0.0.1:1"], cwd=tmp_path, env=environment())
    assert done.returncode == 2 and "speedrun.py trains on one device: start train_ddp.py instead" in done.stderr
