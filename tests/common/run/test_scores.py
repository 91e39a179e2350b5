"""What `evaluate` collects: the answers against plain torch, whatever the batches and the number of ranks."""

import argparse
import json

import pytest
import torch

from common.run import Scores
from common.run import scores as module
from tests.tools.jobs import forked
from tests.tools.ranks import free_port

CLASSES = [f"class {number}" for number in range(7)]


def made(count=53, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, len(CLASSES), generator=draw), torch.randint(0, len(CLASSES), (count,), generator=draw)


def scored(logits, labels, ids, batch=10):
    scores = Scores(CLASSES, torch.device("cpu"))
    for part in torch.arange(len(ids)).split(batch):
        scores.add(logits[part], labels[part], ids[part])
    return scores.all_reduce()


def test_the_answers_are_those_of_plain_torch():
    logits, labels = made()
    scores = scored(logits, labels, torch.arange(len(labels)))
    predicted, losses = logits.argmax(dim=1), torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    assert scores.samples == len(labels)
    assert scores.accuracy == (predicted == labels).sum().item() / len(labels)
    assert scores.top5 == (logits.topk(5).indices == labels[:, None]).any(dim=1).sum().item() / len(labels)
    assert scores.loss == pytest.approx(losses.mean().item(), rel=1e-6)
    for true in range(len(CLASSES)):
        for guess in range(len(CLASSES)):
            assert scores.confusion[true, guess] == ((labels == true) & (predicted == guess)).sum()
    for name, count, share in scores.per_class():
        mine = labels == CLASSES.index(name)
        assert count == mine.sum() and share == pytest.approx((predicted[mine] == labels[mine]).float().mean().item())


def test_the_worst_are_those_with_the_largest_losses_by_their_sample_ids():
    logits, labels = made(100)
    ids = torch.randperm(1000)[:100]
    scores = scored(logits, labels, ids, batch=33)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    order = losses.argsort(descending=True)[:32]
    assert [row[1] for row in scores.worst] == ids[order].tolist()
    loss, number, label, predicted = scores.worst[0]
    place = ids.tolist().index(number)
    assert (loss, label, predicted) == (losses.max().item(), labels[place], logits[place].argmax())


@pytest.mark.parametrize(
    "right, samples, epoch, warmup, says",
    [
        (65, 100, 2, 0, False),
        (52, 100, 2, 0, True),
        (52, 100, 3, 0, False),
        (4, 4, 2, 0, False),
        (52, 100, 2, 3, False),
        (52, 100, 4, 3, True),
    ],
)
def test_a_network_that_has_learnt_nothing_is_known_by_its_accuracy_after_the_warm_up(right, samples, epoch, warmup, says):
    """Of two classes of one size; of four samples nothing can be said."""
    labels = torch.arange(samples) % 2
    logits = torch.nn.functional.one_hot(torch.where(torch.arange(samples) < right, labels, 1 - labels), len(CLASSES)).float()
    scores = scored(logits, labels, torch.arange(samples))
    args = argparse.Namespace(epochs=10, lr=0.1, warmup=warmup, weights=None, input=argparse.Namespace(synthetic=False))
    line = scores.nothing_learnt(epoch, args)
    assert bool(line) == says and (not line or f"an accuracy of {right / samples:.4f} may be chance" in line)


def test_batches_do_not_matter():
    logits, labels = made()
    one, other = (scored(logits, labels, torch.arange(len(labels)), batch) for batch in (53, 4))
    assert torch.equal(one.confusion, other.confusion) and (one.accuracy, one.top5) == (other.accuracy, other.top5)
    assert [row[1:] for row in one.worst] == [row[1:] for row in other.worst]


def test_fewer_than_five_classes_and_no_sample_at_all():
    scores = Scores(["a", "b"], torch.device("cpu"))
    scores.add(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 1]), torch.tensor([0, 1]))
    assert (scores.all_reduce().top5, scores.accuracy) == (1.0, 0.5)
    assert Scores(["a", "b"], torch.device("cpu")).all_reduce().worst == []


# Two ranks, each with every second sample; the first prints what all have found.
RANK = """
import json, os, sys, torch
sys.path.insert(0, sys.argv[1])
from tests.common.run.test_scores import CLASSES, Scores, made
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
logits, labels = made()
ids = torch.arange(rank, len(labels), 2)
scores = Scores(CLASSES, torch.device("cpu"))
for part in ids.split(10):
    scores.add(logits[part], labels[part], part)
scores.all_reduce()
print(json.dumps([scores.confusion.tolist(), scores.accuracy, scores.top5, scores.loss, scores.worst]))
torch.distributed.destroy_process_group()
"""


def test_two_ranks_that_saw_half_each_know_what_one_knows_that_saw_all(tmp_path):
    from tests.tools.jobs import ROOT

    (tmp_path / "rank.py").write_text(RANK)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = forked([tmp_path / "rank.py", ROOT], tmp_path, *({**shared, "RANK": str(rank)} for rank in range(2)))
    assert [done.returncode for done in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    answers = [json.loads(done.stdout.splitlines()[-1]) for done in ranks]
    assert answers[0] == answers[1]
    logits, labels = made()
    alone = scored(logits, labels, torch.arange(len(labels)))
    confusion, accuracy, top5, loss, worst = answers[0]
    assert confusion == alone.confusion.tolist() and (accuracy, top5) == (alone.accuracy, alone.top5)
    assert loss == pytest.approx(alone.loss, rel=1e-6)
    assert [row[1:] for row in worst] == [list(row[1:]) for row in alone.worst]


def pictured(images):
    return (images * 40 + 100).to(torch.uint8)


def with_pictures(logits, labels, images, ids, batch):
    scores = Scores(CLASSES, torch.device("cpu"), pictured)
    for part in torch.arange(len(ids)).split(batch):
        scores.add(logits[part], labels[part], ids[part], images[part])
    return scores.all_reduce()


@pytest.mark.parametrize("batch", [100, 33, 5])
def test_the_mistakes_are_those_with_the_largest_losses_and_those_that_were_surest_with_their_pictures(batch):
    logits, labels = made(100)
    ids, images = torch.randperm(1000)[:100], torch.randn(100, 3, 32, 32)
    scores = with_pictures(logits, labels, images, ids, batch)
    losses, sure = torch.nn.functional.cross_entropy(logits, labels, reduction="none"), logits.softmax(1).amax(1)
    for kind, values in (("worst", losses), ("surest", sure)):
        order = torch.where(logits.argmax(1) != labels, values, -1).argsort(descending=True)[: module.SHOWN].tolist()
        found = scores.mistakes[kind]
        assert [one.id for one in found] == ids[order].tolist() and len(found) == module.SHOWN
        for one, place in zip(found, order):
            assert (one.label, one.predicted) == (labels[place], logits[place].argmax()) and one.label != one.predicted
            assert (one.loss, one.confidence) == (pytest.approx(losses[place].item()), pytest.approx(sure[place].item()))
            assert torch.equal(one.picture, pictured(images[place]).repeat_interleave(2, 1).repeat_interleave(2, 2))
    sheet = scores.picture()
    assert sheet.shape == (3, 2 * module.SIDE, module.SHOWN * module.SIDE)
    assert torch.equal(sheet[:, module.SIDE :, : module.SIDE], scores.mistakes["surest"][0].picture)


def test_the_sheet_of_a_few_mistakes_is_as_wide_as_they_are():
    logits, labels = torch.eye(7), torch.tensor([1, 0, 2, 3, 4, 5, 6])
    assert with_pictures(logits, labels, torch.zeros(7, 3, 32, 32), labels, 7).picture().shape == (
        3,
        2 * module.SIDE,
        2 * module.SIDE,
    )


def test_large_pictures_are_made_small_and_where_all_is_right_there_is_none():
    logits, labels = torch.eye(7), torch.arange(7)
    images = torch.zeros(7, 3, 224, 160)
    assert with_pictures(logits, labels, images, labels, 7).picture() is None
    (one, *_) = with_pictures(logits, labels.flip(0), images, labels, 7).mistakes["worst"]
    assert one.picture.shape == (3, module.SIDE, module.SIDE) and one.picture.unique().tolist() == [100]


def test_losses_that_are_no_numbers_and_outputs_without_a_name_are_no_mistakes_of_json():
    logits = torch.tensor([[torch.nan] * 7, [0.0, 9, 0, 0, 0, 0, 0], [0.0, 0, 0, 0, 0, 0, 9]])
    scores = Scores(CLASSES, torch.device("cpu"))
    scores.add(logits, torch.tensor([3, 2, 6]), torch.arange(3))
    scores.all_reduce().classes = CLASSES
    said = json.loads(json.dumps(scores.as_json(), allow_nan=False))
    assert said["loss"] is None and said["mistakes"]["worst"][0]["loss"] is None and len(said["mistakes"]["worst"]) == 2
