"""A job of one's own keeps the promise: killed twice, it ends with the bits of a run that nobody disturbed.

Each row is a copy of jobs/train.py with ordinary parts of torch in it, put in at marked places (`written`).
"""

import collections
import random
import signal

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from common.checkpoints import checkpoint, parts
from common.errors import UserError
from common.run import Scaler
from common.weights.files import unwrapped
from common.weights.tensors import read
from tests.tools.jobs import ROOT, assert_same_bits, final_state, in_rehearsal, run_forked

SMALL = ["--custom_data", "true", "--max_samples", "128", "--batch_size", "32", "--width", "2", "--epochs", "3"]  # of 4 steps
OFTEN = ["--save_steps", "1", "--output_dir", "out"]

# Where something is put into jobs/train.py: {place: (the text that stands there, what stands there then)}.
PLACES = {
    "imports": ("import torch\n\n", "import random\n\nimport numpy as np\nimport torch\n\n{}\n\n{die}\n\n"),
    "network": ("    loss_fn = torch", "{}    loss_fn = torch"),
    "data": ("    test_loader = cifar10", "{}    test_loader = cifar10"),
    "made": ("    # The run: shows", "{}    # The run: shows"),
    "saved": ("optimizer=optimizer)", "optimizer=optimizer{})"),
    "head": ("        model.train()\n", '        model.train()\n{}        die("head", run)\n'),
    "rate": ('            for parameters in optimizer.param_groups:\n                parameters["lr"] = '
             "learning_rate(args, peak, run.progress)\n", "{}"),
    "step": ("            optimizer.zero_grad()\n            loss.backward()\n            optimizer.step()\n",
             '{}            die("step", run)\n'),
    "late": ("            run.step(loss)\n", '            run.step(loss)\n{}            die("late", run)\n'),
    "before": ("        scores = evaluate(", '{}        die("before", run)\n        scores = evaluate('),
    "evaluation": ("        accuracy = (", '        die("evaluation", run)\n        accuracy = ('),
    "tail": ("loss=scores.loss)\n", 'loss=scores.loss)\n{}        die("tail", run)\n'),
}  # fmt: skip
RATE, STEP = PLACES["rate"][0], PLACES["step"][0]
DIE = """
def die(place, run):
    if os.environ.get("DIE") == f"{place} {run.total_steps}":
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
"""


def lines(text, depth):
    return "".join(f"{' ' * 4 * depth}{line}\n" for line in text.splitlines())


def written(path, imports="", saved="", rate=RATE, step=STEP, **texts):
    """A copy of jobs/train.py with these texts at their places."""
    job = (ROOT / "jobs" / "train.py").read_text()
    depths = {"network": 1, "data": 1, "made": 1, "head": 2, "before": 2, "tail": 2, "late": 3}
    put = {"imports": imports, "saved": saved, "rate": rate, "step": step, "evaluation": ""}
    put.update({place: lines(texts.pop(place, ""), depth) for place, depth in depths.items()})
    assert not texts
    for place, (there, then) in PLACES.items():
        assert job.count(there) == 1, place
        job = job.replace(there, then.replace("{die}", DIE).replace("{}", put[place]))
    path.write_text(job)


def schedule(made, step="scheduler.step()", where="step", **more):
    """A row with a schedule of torch, which is stepped after the optimizer or at another place."""
    how = {"made": f"scheduler = lr_scheduler.{made}", "saved": ", scheduler=scheduler", "rate": ""}
    how[where] = STEP + lines(step, 3) if where == "step" else step
    return {"imports": "from torch.optim import lr_scheduler", **how, **more}


def optimizer(made):
    return {"made": f"optimizer = {made}", "rate": ""}


NOISY = """
class Noisy:
    def __init__(self, data_set):
        self._data_set, self.classes = data_set, data_set.classes

    def __len__(self):
        return len(self._data_set)

    def __getitem__(self, epoch_and_ids):
        images, labels, ids = self._data_set[epoch_and_ids]
        shift = random.randrange(3) + np.random.randint(3) + int(torch.randint(3, ()))
        return torch.roll(images, shift, -1), labels, ids
"""
INNER = """
class Around(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.module, self.scale = inner, torch.nn.Parameter(torch.ones(()))

    def forward(self, images):
        return self.module(images) * self.scale
"""
COUNTS = """
class Counts(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.1 / group["k"]
        return super().step(closure)
"""
ACCUMULATED = """            (loss / 3).backward()
            if (number + 1) % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
"""
SECOND = """
class Second(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shift, self.unused = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, images, both):
        means = images.mean(dim=(2, 3))
        shift = self.shift(means) + self.unused(means) if both else self.shift(means)
        return images + shift[:, :, None, None]
"""
IN_TWO = """            loss = loss_fn(model(second(images, run.total_steps % 3 == 0)), labels)
"""
STATE = """
class Generator:
    def __init__(self):
        self.own = random.Random(7)

    def state_dict(self):
        return {"state": self.own.getstate()}

    def load_state_dict(self, state):
        self.own.setstate(state["state"])

class Counter:
    count = torch.zeros((), dtype=torch.int64)

    def state_dict(self):
        return self.count

    def load_state_dict(self, state):
        self.count = state
"""
SGD = "torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)"
ROWS = {
    "a recursive schedule": schedule("CosineAnnealingLR(optimizer, 12)"),
    "a schedule stepped after run.step()": schedule("StepLR(optimizer, 2, 0.7)", where="late"),
    "a schedule stepped after run.end_epoch()": schedule("StepLR(optimizer, 1, 0.5)", where="tail"),
    "a schedule stepped before the evaluation": schedule("StepLR(optimizer, 1, 0.5)", where="before"),
    "a schedule that looks at the loss": schedule(
        "ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)", "scheduler.step(scores.loss)", where="tail"
    ),
    "a warm-up before a schedule": schedule(
        "SequentialLR(optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), "
        "lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.3)], [4])"
    ),
    "an optimizer with state in its groups": {**optimizer("Counts(model.parameters(), lr=0.1, momentum=0.9)"), "imports": COUNTS},
    "a rate that is lowered by hand": {"rate": "", "tail": 'for group in optimizer.param_groups:\n    group["lr"] *= 0.1'},
    "a rate that is lowered in the head": {"rate": "", "head": 'for group in optimizer.param_groups:\n    group["lr"] *= 0.3'},
    "groups that are added, a layer an epoch": {
        "made": "layers = list(model.children())\nfor layer in layers[:-1]:\n    layer.requires_grad_(False)\n"
        "optimizer = torch.optim.SGD(layers[-1].parameters(), lr=0.1, momentum=0.9)",
        "rate": "",
        "head": "if epoch:\n    layers[-1 - epoch].requires_grad_(True)\n"
        '    optimizer.add_param_group({"params": list(layers[-1 - epoch].parameters()), "lr": 0.05})',
    },
    "groups with rates of their own": optimizer(
        'torch.optim.AdamW([{"params": [weight for weight in model.parameters() if weight.ndim == 1], "weight_decay": 0.0},'
        ' {"params": [weight for weight in model.parameters() if weight.ndim > 1], "lr": 0.01}], lr=0.001)'
    ),
    "two optimizers": {
        "made": "weights = list(model.parameters())\noptimizer = torch.optim.SGD(weights[:-2], lr=0.1, momentum=0.9)\n"
        "second = torch.optim.Adam(weights[-2:], lr=0.01)",
        "saved": ", second=second",
        "rate": "",
        "step": STEP.replace("optimizer.zero_grad()", "model.zero_grad()") + "            second.step()\n",
    },
    "a network that calls its module module": {"imports": INNER, "network": "model = Around(model)"},
    "gradients that are accumulated": {
        "head": "optimizer.zero_grad()", "step": ACCUMULATED.replace("number", "run.total_steps"),
    },
    "gradients that are accumulated over epochs": {"step": ACCUMULATED.replace("number", "run.total_steps")},
    "gradients that are accumulated and enumerated": {
        "head": "optimizer.zero_grad()\nnumber = -1", "step": "            number += 1\n" + ACCUMULATED,
    },
    "two optimizers, of which one steps each fourth step": {
        "made": "weights = list(model.parameters())\noptimizer = torch.optim.SGD(weights[:-2], lr=0.1, momentum=0.9)\n"
        "second = torch.optim.Adam(weights[-2:], lr=0.01)",
        "saved": ", second=second", "rate": "",
        "step": STEP + "            if (run.total_steps + 1) % 4 == 3:\n                second.step()\n"
                       "                second.zero_grad()\n",
    },
    "two optimizers that step in turns": {
        "made": "weights = list(model.parameters())\noptimizer = torch.optim.SGD(weights[:-2], lr=0.1, momentum=0.9)\n"
        "second = torch.optim.Adam(weights[-2:], lr=0.01)\noptimizer.zero_grad()",
        "saved": ", second=second", "rate": "",
        "step": "            loss.backward()\n            steps = (optimizer, second)[run.total_steps % 2]\n"
                "            steps.step()\n            steps.zero_grad()\n",
    },
    "a second network that accumulates": {
        "imports": SECOND,
        "made": "second = Second()\nof_second = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)",
        "saved": ", second=second, of_second=of_second", "rate": "",
        "step": IN_TWO + STEP + "            if run.total_steps % 3 == 1:\n                of_second.step()\n"
                                "                of_second.zero_grad()\n",
    },
    "gradients that are zeroed in place": {
        "imports": SECOND, "made": "second = Second()\nof_second = torch.optim.AdamW(second.parameters(), lr=0.1)",
        "saved": ", second=second, of_second=of_second", "rate": "",
        "step": IN_TWO + "            of_second.zero_grad(set_to_none=False)\n" + STEP + "            of_second.step()\n",
    },
    "gradients that are kept and made smaller": {
        "step": STEP.replace("optimizer.zero_grad()", "for weight in model.parameters():\n"
                             "                weight.grad = None if weight.grad is None else weight.grad * 0.5"),
    },
    "gradients that are used in the next step": {
        "step": "            optimizer.step()\n            optimizer.zero_grad()\n            loss.backward()\n",
    },
    "a data set that draws": {"imports": NOISY, "data": "train_loader = cifar10.loader(Noisy(train_set), train_sampler, device, "
                              "args.augment, args.seed, args.workers)"},
    "a data set that draws in processes": {
        "imports": NOISY,
        "data": "train_loader = cifar10.loader(Noisy(train_set), train_sampler, device, args.augment, args.seed, 2)",
    },
    "numbers that are drawn outside the steps": {
        "rate": "",
        "head": 'for group in optimizer.param_groups:\n    group["lr"] = 0.1 * random.random() + 0.1 * np.random.rand()',
        "tail": 'for group in optimizer.param_groups:\n    group["weight_decay"] = 0.001 * torch.rand(()).item()',
    },
    "states of tuples, tensors and generators": {
        "imports": STATE, "made": "generator, counter = Generator(), Counter()", "saved": ", generator=generator, counter=counter",
        "rate": lines('for group in optimizer.param_groups:\n    group["lr"] = 0.1 * generator.own.random()\n'
                      "counter.count = counter.count + 1", 3),
    },
    "averages": {
        "imports": "from torch.optim import swa_utils",
        "made": "ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))\n"
        "swa = swa_utils.AveragedModel(model)\nscheduler = swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=6)",
        "saved": ", ema=ema, swa=swa, scheduler=scheduler", "rate": "",
        "late": "ema.update_parameters(model)\nscheduler.step()", "before": "swa.update_parameters(model)",
    },
    "scaled losses": {
        "imports": "from common.run import Scaler", "made": 'scaler = Scaler("cpu")', "saved": ", scaler=scaler",
        "step": STEP.replace("loss.backward()", "scaler.scale(loss).backward()").replace(
            "optimizer.step()", "scaler.step(optimizer)\n            scaler.update()"),
    },
    "dropout": {"network": "model = torch.nn.Sequential(torch.nn.Dropout(0.2), model)"},
}  # fmt: skip


# Killed where gradients wait, or are 0 and not None.
KILLED_IN_BETWEEN = ["two optimizers, of which one steps each fourth step", "gradients that are zeroed in place"]
IN_EVERY_TEST = ["groups that are added, a layer an epoch", "averages"]  # the others do the same in more ways


def run(folder, die="", check=0, more=()):
    env = {"PYTHONPATH": str(ROOT), "DIE": die, "SIGNAL": str(signal.SIGTERM if check == 143 else signal.SIGKILL)}
    return run_forked([folder / "job.py", *SMALL, *OFTEN, *more], folder, env, check)


@pytest.fixture
def places(tmp_path):
    """Two folders with a copy of a row: for the run that nobody disturbs, and for the other."""

    def places(row):
        for name in ("whole", "killed"):
            (tmp_path / name).mkdir()
            written(tmp_path / name / "job.py", **ROWS[row])
        return tmp_path / "whole", tmp_path / "killed"

    return places


def bits(folder):
    return {**final_state(folder), "all": {name: part for name, part in newest(folder).items() if name not in ("about", "run")}}


def newest(folder):
    return read(max((folder / "out" / "checkpoints").glob("*.pt")).read_bytes(), verified=True)


def moments(row):
    """Two moments of a run of 12 steps, in the order in which it comes to them."""
    if row in KILLED_IN_BETWEEN:
        return ["late 5", "late 10"]
    passed = []
    for step in range(1, 12):
        between = ["before", "evaluation", "tail", "head"] if step in (4, 8) else []
        passed += [f"{place} {step}" for place in ("late", *between, "step")]
    return sorted(random.Random(row).sample(passed, 2), key=passed.index)


@pytest.mark.parametrize("row", in_rehearsal(ROWS, lambda row: row not in IN_EVERY_TEST))
def test_killed_twice_it_ends_with_the_same_bits(places, row):
    whole, killed = places(row)
    run(whole)
    for moment in moments(row):
        run(killed, moment, check=-signal.SIGKILL)
    said = run(killed).stdout
    assert "going on from" in said and "warning: going on with other settings" not in said
    assert_same_bits(bits(killed), bits(whole))


@pytest.mark.rehearsal
@pytest.mark.parametrize("row", ["averages", "a schedule stepped before the evaluation", "dropout"])
def test_told_to_stop_before_an_evaluation_it_saves_only_what_can_be_gone_on_from(places, row):
    """The lines before run.end_epoch() run again after a restart: what they have changed must not be in the checkpoint."""
    whole, killed = places(row)
    run(whole)
    said = run(killed, "before 4", check=143).stdout
    assert ("stopped by SIGTERM; saved after step 4" in said) is (row == "dropout") is not ("nothing was saved" in said)
    run(killed, "before 8", check=143)
    run(killed)
    assert_same_bits(bits(killed), bits(whole))


@pytest.mark.rehearsal
@pytest.mark.parametrize(
    "row", ["averages", "a schedule stepped before the evaluation", "a schedule stepped after run.end_epoch()"]
)
def test_an_epoch_that_is_cut_short_has_not_taken_what_belongs_to_a_whole_one(places, row):
    whole, cut = places(row)
    run(whole)
    for steps in (2, 7):
        run(cut, more=["--max_steps", str(steps)])
    run(cut)
    assert_same_bits(bits(cut), bits(whole))


@pytest.mark.rehearsal
@pytest.mark.parametrize(
    "row, stops",  # {the step after which it is told to stop: that of the update of the weights}
    [("gradients that are accumulated", {5: 6, 10: 12}), ("gradients that are accumulated and enumerated", {5: 7, 10: 11})],
)
def test_a_stop_waits_for_the_update_of_accumulated_gradients(places, row, stops):
    whole, killed = places(row)
    run(whole)
    for step, saved in stops.items():
        assert f"stopped by SIGTERM; saved after step {saved}" in run(killed, f"late {step}", check=143).stdout
    run(killed)
    assert_same_bits(bits(killed), bits(whole))


@pytest.mark.rehearsal
def test_gradients_that_wait_at_the_end_of_an_epoch_belong_to_its_checkpoint(places):
    whole, killed = places("gradients that are accumulated over epochs")
    run(whole)
    for step in (4, 8):
        run(killed, check=0, more=["--max_steps", str(step)])
        assert "gradients" in newest(killed)["run"]
    run(killed)
    assert_same_bits(bits(killed), bits(whole))


# --- In one process: the parts of a run alone ---------------------------------------------------------------------------


def run_of(build):
    """The parts of a run."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    said = []
    run = parts.SavedParts(model, said.append)
    run.add(build(run.network))
    run.note_initial_options()
    run.begin_epoch()
    run.said = said
    return run


def train(run, *steps):
    for step in steps:
        images = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        for part in run.by_name.values():
            take_a_step(part, run.network, images)


def take_a_step(part, model, images):
    def loss():
        model.zero_grad()
        loss = model(images).square().mean()
        loss.backward()
        return loss

    if isinstance(part, torch.optim.Optimizer):
        part.step(loss)
    elif isinstance(part, lr_scheduler.ReduceLROnPlateau):
        part.step(loss())
    elif parts.is_schedule(part):
        part.step()
    elif isinstance(part, swa_utils.AveragedModel):
        part.update_parameters(model)


def saved(run):
    """Its state, as a checkpoint gives it back."""
    state = checkpoint.snapshot({**run.states(), "run": {"history": [], **run.settings()}})
    checkpoint.require_plain(state)
    return read(bytes(checkpoint.encode(state)), verified=True)


def gone_on(run, build, within_epoch=False):
    other = run_of(build)
    other.restore(saved(run), {}, "its checkpoint", within_epoch)
    return other


def assert_goes_on_with_the_same_bits(build):
    whole, stopped = run_of(build), run_of(build)
    train(whole, *range(10))
    train(stopped, *range(3))
    other = gone_on(stopped, build)
    train(other, *range(3, 6))
    other = gone_on(other, build)
    train(other, *range(6, 10))
    assert not other.said and not other.changed
    assert_same_bits(saved(other), saved(whole))


def sgd(model, **how):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **how})


SCHEDULES = {
    "ChainedScheduler": lambda to: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(to, 0.1, 4), lr_scheduler.ExponentialLR(to, 0.9)]
    ),
    "ConstantLR": lambda to: lr_scheduler.ConstantLR(to, 0.1, 4),
    "CosineAnnealingLR": lambda to: lr_scheduler.CosineAnnealingLR(to, 8),
    "CosineAnnealingWarmRestarts": lambda to: lr_scheduler.CosineAnnealingWarmRestarts(to, 2, 2),
    "CyclicLR": lambda to: lr_scheduler.CyclicLR(to, 0.01, 0.1, 3, scale_fn=lambda x: 0.9**x),
    "ExponentialLR": lambda to: lr_scheduler.ExponentialLR(to, 0.9),
    "LambdaLR": lambda to: lr_scheduler.LambdaLR(to, lambda step: 0.8**step),
    "LinearLR": lambda to: lr_scheduler.LinearLR(to, 0.1, total_iters=5),
    "MultiplicativeLR": lambda to: lr_scheduler.MultiplicativeLR(to, lambda step: 0.9),
    "MultiStepLR": lambda to: lr_scheduler.MultiStepLR(to, [2, 4, 7], 0.5),
    "OneCycleLR": lambda to: lr_scheduler.OneCycleLR(to, 0.1, 11),
    "PolynomialLR": lambda to: lr_scheduler.PolynomialLR(to, 9, 2.0),
    "ReduceLROnPlateau": lambda to: lr_scheduler.ReduceLROnPlateau(to, patience=0, threshold=0.5),
    "SequentialLR": lambda to: lr_scheduler.SequentialLR(
        to, [lr_scheduler.LinearLR(to, 0.1, total_iters=3), lr_scheduler.MultiStepLR(to, [1, 3], 0.5)], [4]
    ),
    "StepLR": lambda to: lr_scheduler.StepLR(to, 3),
    "SWALR": lambda to: swa_utils.SWALR(to, 0.01, 5),
}


def test_the_table_has_all_schedules_of_torch():
    kinds = [
        kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and kind.__module__ == lr_scheduler.__name__
    ]
    names = {kind.__name__ for kind in kinds if kind.__name__.endswith(("LR", "Scheduler", "Restarts", "Plateau"))}
    assert names - {"LRScheduler", "_LRScheduler"} == SCHEDULES.keys() - {"SWALR"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on(name):
    def build(model):
        optimizer = sgd(model)
        return {"optimizer": optimizer, "scheduler": SCHEDULES[name](optimizer)}

    assert_goes_on_with_the_same_bits(build)


# SparseAdam is for sparse gradients, and Muon for matrices alone.
OPTIMIZERS = sorted(
    name for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
)  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on(name):
    def build(model):
        weights = [weight for weight in model.parameters() if weight.ndim == 2] if name == "Muon" else model.parameters()
        return {"optimizer": getattr(torch.optim, name)(weights, lr=0.01)}

    assert_goes_on_with_the_same_bits(build)


class Schedulefree(torch.optim.SGD):
    """As optimizers that keep what they count in their groups."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["d"] = max(group.get("d", 1e-6), torch.cat([weight.flatten() for weight in group["params"]]).norm().item())
            group["lr"] = group["d"] / group["k"]
        return loss


class Remembers(lr_scheduler.ExponentialLR):
    """A schedule with a list that its first step makes."""

    def step(self):
        super().step()
        if self.last_epoch:
            self.rates = [*vars(self).get("rates", []), *self.get_last_lr()]


PARTS = {
    "a schedule with a list": lambda model: {"optimizer": (to := sgd(model)), "scheduler": Remembers(to, 0.9)},
    "state in the groups": lambda model: {"optimizer": Schedulefree(model.parameters(), lr=0.1, momentum=0.9)},
    "two optimizers": lambda model: {"optimizer": sgd(model[0]), "second": torch.optim.Adam(model[2].parameters(), lr=0.1)},
    "a rate that is a tensor": lambda model: {"optimizer": torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))},
    "rates of their own": lambda model: {
        "optimizer": torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.1}])
    },
    "averages": lambda model: {
        "optimizer": sgd(model), "swa": swa_utils.AveragedModel(model),
        "ema": swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True),
    },
    "a scaler": lambda model: {"optimizer": sgd(model), "scaler": Scaler("cpu")},
}  # fmt: skip


@pytest.mark.parametrize("what", PARTS)
def test_parts_go_on(what):
    assert_goes_on_with_the_same_bits(PARTS[what])


def test_groups_that_were_added_come_again_where_the_lines_of_this_epoch_do_not_add_them():
    def build(model):
        return {"optimizer": sgd(model[2])}

    def add(run, lr):
        optimizer = run.by_name["optimizer"]
        layer = run.network[0]
        optimizer.add_param_group({"params": [(layer.weight, layer.bias)[len(optimizer.param_groups) - 1]], "lr": lr})

    first = run_of(build)
    train(first, 0)
    add(first, 0.05)
    first.begin_epoch()  # as run.epochs() does it when an epoch begins
    add(first, 0.02)  # in the lines before run.steps()
    train(first, 1)
    within = gone_on(first, build, within_epoch=True)
    assert len(within.by_name["optimizer"].param_groups) == 2
    add(within, 0.03)  # the same lines
    within.restore(saved(first), {}, "its checkpoint", within_epoch=False)  # as run.steps() does it when an epoch goes on
    for other in (within, gone_on(first, build)):
        assert_same_bits(saved(other)["optimizer"], saved(first)["optimizer"])
        train(other, 2)
    assert_same_bits(saved(within)["model"], saved(other)["model"])
    with pytest.raises(UserError, match="optimizer has got weights that are neither the network's"):
        first.by_name["optimizer"].add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        saved(first)
    with pytest.raises(UserError, match=r"an? optimizer with groups of \[2\] weights, and this start has made one with"):
        gone_on(within, lambda model: {"optimizer": sgd(model)})


def test_an_optimizer_with_fewer_groups_than_before_is_refused():
    def build(model):
        return {"optimizer": torch.optim.SGD([{"params": layer.parameters()} for layer in (model[0], model[2])], lr=0.1)}

    first = run_of(build)
    train(first, 0)
    with pytest.raises(UserError, match=r"optimizer with groups of \[2, 2\] weights, and this start has made one with \[2\]"):
        gone_on(first, lambda model: {"optimizer": sgd(model[0])})


def test_a_part_of_another_kind_gets_what_the_checkpoint_has():
    """Under the name of a schedule: it may take it, and else says itself why not."""
    first = run_of(lambda model: {"optimizer": (to := sgd(model)), "after": lr_scheduler.StepLR(to, 3)})
    train(first, 0)
    with pytest.raises(RuntimeError, match="Missing key"):
        gone_on(first, lambda model: {"optimizer": sgd(model), "after": torch.nn.Linear(1, 1)})


def test_the_rate_of_a_manifest_is_a_number_where_that_of_the_optimizer_is_a_tensor():
    run = run_of(lambda model: {"optimizer": torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))})
    assert type(run.learning_rate()) is float and run.learning_rate() == 0.5


def test_only_what_this_start_has_made_otherwise_counts_instead():
    def build(lr, epochs, **how):
        def parts_of(model):
            optimizer = sgd(model, lr=lr, **how)
            return {"optimizer": optimizer, "scheduler": lr_scheduler.CosineAnnealingLR(optimizer, epochs)}

        return parts_of

    first = run_of(build(0.1, 10))
    train(first, *range(5))
    (then,) = first.by_name["optimizer"].param_groups
    other = gone_on(first, build(0.1, 10, weight_decay=0.5))
    assert other.changed == {"weight_decay of optimizer": "0 -> 0.5"}
    assert other.by_name["optimizer"].param_groups[0] | {"params": 0} == then | {"weight_decay": 0.5, "params": 0}
    half = gone_on(first, build(0.05, 20))
    assert half.changed == {"lr of optimizer": "0.1 -> 0.05", "T_max of scheduler": "10 -> 20"}
    (now,) = half.by_name["optimizer"].param_groups
    undisturbed = run_of(build(0.05, 20))
    train(undisturbed, *range(5))
    assert now["lr"] == undisturbed.by_name["optimizer"].param_groups[0]["lr"] and now["initial_lr"] == 0.05
    assert_same_bits(saved(half)["scheduler"], saved(undisturbed)["scheduler"])
    half.restore(saved(first), {}, "its checkpoint", within_epoch=False)  # once more, as in the midst of an epoch
    assert_same_bits(saved(half)["scheduler"], saved(undisturbed)["scheduler"])
    again = gone_on(half, build(0.05, 20))
    assert not again.changed and again.by_name["optimizer"].param_groups[0]["lr"] == now["lr"]


def test_weights_that_were_unfrozen_stay_so():
    def build(model):
        model[0].requires_grad_(False)
        return {"optimizer": sgd(model)}

    first = run_of(build)
    first.network[0].requires_grad_(True)
    assert all(weight.requires_grad for weight in gone_on(first, build).network.parameters())


def test_a_checkpoint_of_0_2_0_gives_the_options_of_this_start():
    first = run_of(lambda model: {"optimizer": sgd(model)})
    train(first, 0)
    state = saved(first)
    state["run"] = {"history": []}
    other = run_of(lambda model: {"optimizer": sgd(model, lr=0.3)})
    other.restore(state, {}, "its checkpoint", within_epoch=False)
    assert other.by_name["optimizer"].param_groups[0]["lr"] == 0.3
    scheduled = run_of(lambda model: {"optimizer": (to := sgd(model, lr=0.3)), "scheduler": lr_scheduler.StepLR(to, 3)})
    scheduled.restore(state, {}, "its checkpoint", within_epoch=False)
    assert scheduled.by_name["optimizer"].param_groups[0]["lr"] == 0.1
    assert_same_bits(saved(other)["optimizer"]["state"], saved(first)["optimizer"]["state"])


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "state",
    [
        Point(1, 2),
        {1, 2},
        collections.Counter("a"),
        collections.defaultdict(list),
        {"a": [torch.float32]},
        {"f": print},
        torch.ones(2).to_sparse(),
    ],
)
def test_a_state_that_could_not_be_read_back_is_refused(state):
    with pytest.raises(UserError, match="a checkpoint cannot hold the state of own: it holds a "):
        checkpoint.require_plain(checkpoint.snapshot({"own": state}))


@pytest.mark.parametrize("state", [(1, (2.5, None)), np.float64(2), [np.int64(3)], {"a": torch.ones(2)}, torch.ones(3), True])
def test_a_state_comes_back_as_it_was(state):
    found = read(bytes(checkpoint.encode(checkpoint.snapshot({"own": state}))), verified=True)["own"]
    assert type(found) in (type(state), float) and (found == state if not isinstance(state, (dict, torch.Tensor)) else True)


@pytest.mark.parametrize("name", ["model", "run", "about"])
def test_a_name_that_a_checkpoint_itself_uses_is_refused(name):
    with pytest.raises(ValueError, match=f"can have the name {name}, which"):
        parts.require_savable({name: torch.nn.Linear(1, 1)})


def test_what_has_no_state_is_refused():
    with pytest.raises(TypeError, match="teacher is a function, without state_dict"):
        parts.require_savable({"teacher": print and (lambda: 0)})


@pytest.mark.parametrize(
    "wrap", [torch.nn.DataParallel, torch.compile, lambda network: torch.compile(torch.nn.DataParallel(network))]
)
def test_only_the_wrappers_of_torch_are_taken_off(wrap):
    network = torch.nn.Module()
    network.module = torch.nn.Linear(1, 1)
    assert unwrapped(wrap(network)) is network and unwrapped(network) is network


LONGER = {
    "CosineAnnealingLR": lambda to, epochs: lr_scheduler.CosineAnnealingLR(to, epochs),
    "OneCycleLR": lambda to, epochs: lr_scheduler.OneCycleLR(to, 0.1, epochs),
    "SequentialLR": lambda to, epochs: lr_scheduler.SequentialLR(
        to, [lr_scheduler.LinearLR(to, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(to, epochs - 3)], [3]
    ),
    "ChainedScheduler": lambda to, epochs: lr_scheduler.ChainedScheduler([lr_scheduler.PolynomialLR(to, epochs)]),
    "MultiStepLR": lambda to, epochs: lr_scheduler.MultiStepLR(to, [epochs // 3, epochs // 2]),
}


@pytest.mark.parametrize("name", LONGER)
def test_a_finished_run_that_trains_longer_has_the_rate_of_the_longer_schedule(name):
    def build(epochs):
        def parts_of(model):
            optimizer = sgd(model)
            return {"scheduler": LONGER[name](optimizer, epochs), "optimizer": optimizer}

        return parts_of

    first, longer = run_of(build(9)), run_of(build(18))
    train(first, *range(8))
    other = gone_on(first, build(18))
    train(longer, *range(8))
    assert other.by_name["optimizer"].param_groups[0]["lr"] == longer.by_name["optimizer"].param_groups[0]["lr"]
    assert_same_bits(saved(other)["scheduler"], saved(longer)["scheduler"])
