"""What a script forgets is said: parts that it trains and does not give to Run, and batches that it counts itself.

The two scripts are written as by somebody who has read the first page: a GAN, and a transformer that accumulates gradients.
"""

import re
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from common.run import first_lines
from common.run.unsaved import Unsaved
from datasets.loader import SampleLoader
from datasets.sampler import EpochSampler
from tests.jobs import ROOT, assert_same_bits, final_state, wait_for
from tests.restarts import finish, start

EXAMPLES = ROOT / "tests" / "examples"
WARNING = re.compile(
    r"^warning: (.*?) \((\w+)\) (.*) and is not saved, so a restart begins it anew: give Run (.*); if that is meant, unsaved=\[(.*)\]$"
)


def warnings(said):
    return [line for line in said.splitlines() if line.startswith("warning: ")]


def copy_of(example, folder, *changes):
    text = (EXAMPLES / example).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / example).write_text(text)
    return [folder / example, "--epochs", 3, "--output_dir", "out"]


PARTS = {  # of the GAN, which Run is given there: what a restart without it is warned of
    "discriminator": ("Sequential", "is trained", "it, as discriminator=discriminator"),
    "average": ("AveragedModel", "is trained", "it, as average=average"),
    "optimizer_d": ("Adam", "has stepped", "it, as optimizer_d=optimizer_d"),
    "schedule_d": ("ExponentialLR", "has stepped", "it, as schedule_d=schedule_d"),
    "noise": ("Generator", "is drawn from in a step", "an object that has its state, or draw from torch, numpy or random"),
}


def gan(folder, *without, unsaved=()):
    """The GAN whose Run is given all but these parts."""
    text = (EXAMPLES / "own_gan.py").read_text()
    for name in without:
        given = "noise=Saved(noise)" if name == "noise" else f"{name}={name}"
        assert text.count(f" {given}") == 1, name
        text = re.sub(rf",?\s+{re.escape(given)}", "", text)
    if unsaved:
        text = text.replace("optimizer=optimizer_g", f"optimizer=optimizer_g, unsaved=[{', '.join(unsaved)}]")
    folder.mkdir(exist_ok=True)
    (folder / "own_gan.py").write_text(text)
    return [folder / "own_gan.py", "--epochs", 3, "--output_dir", "out"]


def test_each_part_that_is_forgotten_is_named_with_the_argument_to_add(tmp_path):
    said = finish(tmp_path, gan(tmp_path, *PARTS))
    found = {line[1]: (line[2], line[3], line[4]) for line in map(WARNING.match, warnings(said)) if line}
    assert found.keys() == PARTS.keys() and len(warnings(said)) == len(PARTS), said
    for name, (kind, what, given) in PARTS.items():
        assert found[name][:2] == (kind, what) and found[name][2].startswith(given), found[name]


def test_the_doctor_names_them_before_the_training(tmp_path):
    words = gan(tmp_path, "average", "optimizer_d", "schedule_d")
    said = finish(tmp_path, [*words, "--doctor", "true"])
    for name, kind in (("average", "AveragedModel"), ("optimizer_d", "Adam"), ("schedule_d", "ExponentialLR")):
        assert f"{name} ({kind}) is not given to Run: if it is trained, a restart begins it anew" in said, said
    assert "doctor: 0 bad, 3 doubtful" in said and not (tmp_path / "out" / "checkpoints").exists()
    assert "doctor: 0 bad, 0 doubtful" in finish(tmp_path, [*gan(tmp_path), "--doctor", "true"])


def test_nothing_is_said_of_what_is_saved_or_meant_to_begin_anew(tmp_path):
    assert not warnings(finish(tmp_path / "saved", gan(tmp_path / "saved")))
    assert not warnings(finish(tmp_path / "meant", gan(tmp_path / "meant", *PARTS, unsaved=PARTS)))


def kill_after_a_save(folder, words):
    process = start(folder, words)
    before = {*folder.glob("out/checkpoints/*.json")}
    wait_for(lambda: not {*folder.glob("out/checkpoints/*.json")} <= before, process, "a checkpoint")
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.rehearsal
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("example", ["own_gan.py", "own_accumulation.py"])
def test_in_the_right_form_three_kills_change_no_bits(tmp_path, example, ranks):
    words = [EXAMPLES / example, "--epochs", 4, "--save_steps", 1, "--nproc_per_node", ranks, "--output_dir", "out"]
    finish(tmp_path / "whole", words)
    for _ in range(3):
        kill_after_a_save(tmp_path / "killed", words)
    said = finish(tmp_path / "killed", words)
    assert "going on from" in said
    assert_same_bits(final_state(tmp_path / "killed"), final_state(tmp_path / "whole"))


COUNTS = [
    ("for x, y in run.steps(loader):", "for i, (x, y) in enumerate(run.steps(loader)):"),
    ("if run.updates(every=ACCUMULATED):", "if (i + 1) % ACCUMULATED == 0 or i + 1 == len(loader):"),
]


def test_batches_that_are_counted_from_where_an_epoch_resumes_are_noticed(tmp_path):
    words = copy_of("own_accumulation.py", tmp_path, *COUNTS)
    assert not warnings(finish(tmp_path, [*words, "--max_steps", 5]))
    (line,) = warnings(finish(tmp_path, words))
    assert (
        "the last gradients of the epoch that was resumed in its middle were not applied" in line
        and "run.updates(every=...)" in line
    )


def test_updates_come_with_each_fourth_batch_and_the_last_also_where_an_epoch_is_resumed(tmp_path):
    words = copy_of(
        "own_accumulation.py",
        tmp_path,
        (
            "                optimizer.step()\n",
            "                optimizer.step()\n                print('update', run.total_steps + 1)\n",
        ),
    )
    steps = [int(number) for number in re.findall(r"^update (\d+)$", finish(tmp_path, [*words, "--output_dir", "whole"]), re.M)]
    assert steps == [number for epoch in range(3) for number in (10 * epoch + 4, 10 * epoch + 8, 10 * epoch + 10)]
    said = finish(tmp_path, [*words, "--max_steps", 16]) + finish(tmp_path, words)
    assert [int(number) for number in re.findall(r"^update (\d+)$", said, re.M)] == steps and not warnings(said)
    assert_same_bits(final_state(tmp_path, "whole"), final_state(tmp_path))


@pytest.mark.parametrize(
    "samples, batch, ranks, size",
    [(630, 16, 1, 15), (630, 16, 2, 14), (100, 10, 1, 10), (101, 16, 1, None), (128, 96, 2, 64), (128, 96, 3, None)],
)
def test_a_batch_that_leaves_no_sample_out_is_named(samples, batch, ranks, size):
    text = first_lines._batch_that_divides(samples, batch, ranks)
    assert text == (f"; a global batch of {size} leaves none" if size else "")


def test_the_length_of_a_loader_is_that_of_a_whole_epoch_wherever_it_stands():
    sampler = EpochSampler(35, 4, seed=0)
    loader = SampleLoader(TensorDataset(torch.zeros(35)), sampler, torch.device("cpu"))
    assert len(loader) == 8
    sampler.start_at(0, 20)
    assert len(loader) == 8 and len(sampler) == 3 == len([*loader])


def test_what_is_no_image_is_called_a_sample(tmp_path):
    said = finish(tmp_path, copy_of("own_accumulation.py", tmp_path))
    assert " samples_per_s=" in said and "images" not in said


def test_a_metric_that_no_epoch_gives_is_missed(tmp_path):
    words = copy_of("own_accumulation.py", tmp_path, ('best_by="loss"', 'best_by="los"'))
    (line,) = warnings(finish(tmp_path, words))
    assert (
        line
        == "warning: no epoch will be called the best: Run(best_by='los') names a metric that end_epoch() does not give; it gives loss"
    )


# --- What is looked through ------------------------------------------------------------------------------------------------


def trained(network, optimizer):
    network(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def lines_of(saved, meant=(), train=lambda: None):
    unsaved = Unsaved(lambda: saved, meant)
    unsaved.begin()
    train()
    return [*unsaved.lines("now")]


def test_a_network_in_a_container_an_attribute_or_a_wrapper_has_its_name():
    class Trainer:
        def __init__(self):
            self.network = nn.Linear(3, 1)
            self.optimizers = [torch.optim.SGD(self.network.parameters(), 0.1, momentum=0.9)]

    saved, trainer = nn.Linear(3, 1), Trainer()
    lines = lines_of([saved], train=lambda: trained(trainer.network, trainer.optimizers[0]))
    assert any(
        "warning: trainer.network (Linear) is trained" in line and "as trainer_network=trainer.network" in line
        for line in lines
    )
    assert sum("(SGD) has stepped" in line or "an object of SGD has stepped" in line for line in lines) == 1 and len(lines) == 2
    assert not lines_of(
        [saved], [trainer.network, trainer.optimizers], train=lambda: trained(trainer.network, trainer.optimizers[0])
    )


def test_what_is_frozen_untrained_or_in_an_object_that_saves_it_is_not_named():
    teacher, network = nn.Linear(3, 1).requires_grad_(False), nn.Linear(3, 1)
    optimizer, unused = (torch.optim.SGD(network.parameters(), 0.1, momentum=0.9) for _ in range(2))

    class Own:
        def state_dict(self):
            return {"network": network.state_dict(), "optimizer": optimizer.state_dict()}

    assert not lines_of([teacher, Own()], train=lambda: trained(network, optimizer))
    assert not lines_of([network, optimizer]) and unused


def test_it_looks_once_at_a_moment_and_names_a_thing_once():
    network, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.Adam(other.parameters())
    unsaved = Unsaved(lambda: [network], ())
    assert not [*unsaved.lines("before it begins")]
    unsaved.begin()
    assert not [*unsaved.lines("a line")]
    trained(other, optimizer)
    assert not [*unsaved.lines("a line")]
    assert len([*unsaved.lines("a save")]) == 2 and not [*unsaved.lines("an epoch")]
