"""What a script forgets is said: parts that it trains and does not give to Run, and batches that it counts itself.

The two scripts are written as by somebody who has read the first page: a GAN, and a transformer that accumulates gradients.
"""

import random
import re
import signal
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from common.run import Run, first_lines
from common.run.gradients import Gradients
from common.run.unsaved import Unsaved
from datasets.loader import SampleLoader
from datasets.sampler import EpochSampler
from tests.tools.jobs import ROOT, assert_same_bits, final_state, wait_for
from tests.tools.restarts import finish, start

FORGETS_PARTS = True  # so the journals of its runs may say so
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
    script, *options = gan(tmp_path / "nothing", *PARTS)
    script.write_text(script.read_text().replace("set_defaults(", "set_defaults(checkpoints=False, "))
    assert not warnings(finish(tmp_path / "nothing", [script, *options])), "where no checkpoint is made, nothing is lost"


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
    words = [*copy_of(example, tmp_path), "--epochs", 4, "--save_steps", 1, "--nproc_per_node", ranks]
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


def test_where_no_update_may_come_that_is_said():
    with pytest.raises(ValueError, match="give the number of batches, 1 or more"):
        Run.updates(types.SimpleNamespace(shares=None), 0)
    with pytest.raises(RuntimeError, match="not for exact training"):
        Run.updates(types.SimpleNamespace(shares=object()), 4)
    position = types.SimpleNamespace(after_step=lambda samples: types.SimpleNamespace(consumed=samples))
    run = types.SimpleNamespace(shares=None, position=position, global_batch=8)
    assert Run.updates(run, 1), "each step updates"


@pytest.mark.parametrize(
    "epochs, line_after",  # (whether this start began it, whether gradients wait after it), and after which the line comes
    [
        ([(False, True), (True, False), (True, False), (True, False)], 3),
        ([(False, True), (True, False), (True, True), (True, False), (True, True)], None),  # as of those who count all steps
        ([(False, False), (True, False), (True, False)], None),
        ([(True, False), (True, False), (True, False)], None),
    ],
)
def test_a_lost_update_is_said_after_two_epochs_that_had_theirs(monkeypatch, epochs, line_after):
    gradients = Gradients({}, {})
    waits = iter([waiting for _, waiting in epochs])
    monkeypatch.setattr(gradients, "_accumulated_weights", lambda: {0} if next(waits) else set())
    said = [number for number, (began, _) in enumerate(epochs, 1) if gradients.note_end_of_epoch(began)]
    assert said == ([line_after] if line_after else [])


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
    "samples, batch, ranks, option, advice",
    [
        (630, 16, 1, 16, "--batch_size 15"),
        (630, 16, 2, 16, "--batch_size 14"),  # of all
        (630, 16, 2, 8, "--batch_size 7"),  # of a process
        (630, 16, 2, 4, "a global batch of 14"),  # accumulated
        (100, 10, 1, None, "a global batch of 10"),
        (101, 16, 1, 16, None),
        (128, 96, 2, None, "a global batch of 64"),
        (128, 96, 3, 32, None),
    ],
)
def test_a_batch_that_leaves_no_sample_out_is_named(samples, batch, ranks, option, advice):
    text = first_lines._advice_on_batch(samples, batch, ranks, option)
    assert text == (f"; {advice} leaves none" if advice else "")


def test_the_length_of_a_loader_is_that_of_a_whole_epoch_wherever_it_stands():
    sampler = EpochSampler(35, 4, seed=0)
    loader = SampleLoader(TensorDataset(torch.zeros(35)), sampler, torch.device("cpu"))
    assert len(loader) == 8
    sampler.start_at(0, 20)
    assert len(loader) == 8 and len(sampler) == 3 == len([*loader])


def test_a_metric_that_no_epoch_gives_is_missed_and_what_is_no_image_is_called_a_sample(tmp_path):
    said = finish(tmp_path, copy_of("own_accumulation.py", tmp_path, ('best_by="loss"', 'best_by="los"')))
    assert " samples_per_s=" in said and "images" not in said
    (line,) = warnings(said)
    assert line == "warning: no epoch is the best so far: best_by is los, and end_epoch() gives loss"


# --- What is looked through ------------------------------------------------------------------------------------------------


def trained(network, optimizer):
    network(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def lines_of(saved, meant=(), train=lambda: None):
    said = []
    unsaved = Unsaved(lambda: saved, meant, said.append)
    unsaved.begin()
    train()
    unsaved.warn_of_changes("now")
    return said


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


def test_what_is_changed_by_way_of_data_made_later_or_a_single_weight_is_named():
    network, copied = nn.Linear(3, 1), nn.Linear(3, 1)
    temperature = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*network.parameters(), temperature], 0.1)
    copied.weight.data, copied.bias.data = copied.weight.data.t().contiguous().t(), copied.bias.data.bfloat16()
    made: list[nn.Module] = []
    said: list[str] = []
    unsaved = Unsaved(lambda: [network, optimizer], (), said.append)
    unsaved.begin()
    made.append(nn.Linear(2, 1))
    unsaved.warn_of_changes("a line")
    assert not said
    trained(network, optimizer)
    stepped(optimizer, temperature)
    versions = [weight._version for weight in copied.parameters()]
    copied.weight.data.mul_(2)
    assert [weight._version for weight in copied.parameters()] == versions, "torch counts this now: no checksum is needed"
    stepped(torch.optim.SGD(made[0].parameters(), 0.1), made[0].weight)
    unsaved.warn_of_changes("a save")
    assert len(said) == 3 and all("is trained and is not saved" in line for line in said)
    assert any(line.startswith("warning: copied (Linear)") for line in said)
    assert any(line.startswith("warning: made[0] (Linear)") for line in said)
    assert any("give Run a module that has it, as temperature=nn.ParameterList([temperature]);" in line for line in said), said
    assert not lines_of([network, optimizer], [temperature], train=lambda: stepped(optimizer, temperature))


def test_weights_that_have_no_values_yet_or_at_all_are_left_alone():
    network = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    late, on_no_device = nn.LazyLinear(1), nn.Linear(3, 1, device="meta")

    def train():
        late(torch.ones(1, 3))
        trained(network, optimizer)

    assert not lines_of([network, optimizer], train=train) and on_no_device


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
    said = []
    unsaved = Unsaved(lambda: [network], (), said.append)
    unsaved.warn_of_changes("before it begins")
    unsaved.begin()
    unsaved.warn_of_changes("a line")
    trained(other, optimizer)
    unsaved.warn_of_changes("a line")
    assert not said
    unsaved.warn_of_changes("a save")
    unsaved.warn_of_changes("an epoch")
    assert len(said) == 2


def stepped(optimizer, weight):
    weight.grad = torch.ones_like(weight)
    optimizer.step()


def test_an_optimizer_that_stepped_before_the_run_began_or_shares_what_is_saved_is_not_named():
    network = nn.Linear(3, 1)
    finder, optimizer = (torch.optim.Adam(network.parameters()) for _ in range(2))
    stepped(finder, network.weight)  # as one that looks for a learning rate

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.state, self.param_groups = inner, inner.state, inner.param_groups

    wrapper = Wrapper(optimizer)
    assert not lines_of([network, optimizer], train=lambda: trained(network, optimizer)) and finder and wrapper


def test_schedules_in_a_schedule_are_one_and_one_made_later_has_not_stepped():
    network = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    parts = [torch.optim.lr_scheduler.StepLR(optimizer, 2), torch.optim.lr_scheduler.StepLR(optimizer, 3)]
    both = torch.optim.lr_scheduler.ChainedScheduler(parts)
    saved = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    made = []

    def train():
        optimizer.step()
        both.step()
        made.append(
            torch.optim.lr_scheduler.StepLR(
                torch.optim.SGD([{"params": [*network.parameters()], "initial_lr": 0.1}], 0.1), 5, last_epoch=3
            )
        )

    (line,) = lines_of([network, optimizer, saved], train=train)
    assert "both (ChainedScheduler) has stepped" in line


class Shell(nn.Module):
    """It does not call torch's __init__(), and nothing may be asked of it."""

    def __init__(self):
        pass


class Odd:
    def __getattr__(self, name):
        raise RuntimeError("it is not there")

    @property
    def __class__(self):
        raise RuntimeError("nor this")


def test_odd_objects_of_a_script_are_left_alone():
    network = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    optimizer.state["step"] = 0
    off, system, gone, odd, shell = (
        torch.amp.GradScaler("cpu", enabled=False),
        random.SystemRandom(),
        nn.Linear(1, 1),
        Odd(),
        Shell(),
    )
    proxy, numbers = weakref.proxy(gone), {"a": 1}
    del gone
    with torch.inference_mode():
        teacher = nn.Linear(3, 1)
    many = [object()] * 100_000
    said = []
    unsaved = Unsaved(lambda: [network, optimizer], [], said.append)
    unsaved.begin()
    unsaved.begin_step()
    trained(network, optimizer)
    unsaved.end_step()
    unsaved.warn_of_changes("now")
    assert not said and all((off, system, teacher, many, numbers)) and odd is not shell is not proxy


def test_what_many_refer_to_is_looked_through_once():
    """Each level refers 900 times to the next: followed each time, this would never end."""
    network = nn.Linear(3, 1)
    inner = [network]
    for _ in range(6):
        inner = [inner] * 900
    optimizer = torch.optim.Adam(network.parameters())
    assert not lines_of([inner, optimizer], train=lambda: trained(network, optimizer))


def test_an_error_while_it_looks_ends_the_looking_and_not_the_run(monkeypatch):
    said = []
    unsaved = Unsaved(lambda: [nn.Linear(1, 1)], [], said.append)
    unsaved.begin()
    monkeypatch.setattr(Unsaved, "_new_changes", lambda self: 1 / 0)
    unsaved.warn_of_changes("one")
    unsaved.warn_of_changes("other")
    assert said == ["warning: what the run does not save cannot be looked for: ZeroDivisionError: division by zero"]


@pytest.mark.parametrize("meant", [nn.Linear(1, 1), ["discriminator"], "discriminator"])
def test_what_is_meant_to_begin_anew_is_a_list_of_objects(meant):
    with pytest.raises(TypeError, match=r"unsaved=\.\.\.\) takes a list of objects"):
        Unsaved(list, meant, print)


def test_looking_keeps_no_tensor_of_a_function_that_is_under_way():
    network, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, said = torch.optim.Adam(other.parameters()), []
    unsaved = Unsaved(lambda: [network], [], said.append)
    unsaved.begin()
    large = torch.zeros(10)
    seen = weakref.ref(large)
    trained(other, optimizer)
    unsaved.warn_of_changes("now")
    del large
    assert said and seen() is None


def test_generators_that_are_seeded_for_each_step_are_not_named():
    network, known, own = nn.Linear(3, 1), [torch.default_generator, np.random.mtrand._rand], random.Random(0)
    said = []
    unsaved = Unsaved(lambda: [network], [], said.append)
    unsaved.begin()
    for _ in range(3):
        unsaved.begin_step()
        _ = torch.rand(1), np.random.rand(), own.random(), trained(network, torch.optim.SGD(network.parameters(), 0.1))
        unsaved.end_step()
    unsaved.warn_of_changes("now")
    assert len(said) == 1 and "own (Random) is drawn from in a step" in said[0] and known
