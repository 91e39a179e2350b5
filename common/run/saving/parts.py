"""The parts of a run in a checkpoint: the network, its optimizers, and whatever else has a state_dict.

Each gets back all that it had. Optimizers and schedules of the learning rate are made anew by every start: only what this start
has made otherwise than the start before counts instead of the checkpoint's, and the log lists it.
"""

import copy
import warnings
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from common.errors import UserError

TAKEN = ("model", "run", "about")  # names that a checkpoint itself uses
# Options that follow from others, or from the device.
NOT_LISTED = {"initial_lr", "base_lrs", "foreach", "fused", "capturable", "differentiable"}


def require_savable(parts: dict[str, Any]) -> None:
    for name, part in parts.items():
        if name in TAKEN:
            raise ValueError(f"nothing that is saved can have the name {name}, which a checkpoint itself uses: give it another")
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise TypeError(f"{name} is a {type(part).__name__}, without state_dict and load_state_dict: it cannot be saved")


def is_schedule(part: Any) -> bool:
    return isinstance(part, (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau))


def optimizers(run: Any) -> dict[str, Optimizer]:
    return {name: part for name, part in run.parts.items() if isinstance(part, Optimizer)}


def groups(run: Any) -> dict[str, int]:
    """Return how many groups of weights each optimizer has."""
    return {name: len(part.param_groups) for name, part in optimizers(run).items()}


def made(run: Any) -> dict[str, Any]:
    """Return with what options this start has made its parts, before a checkpoint is loaded."""
    options: dict[str, Any] = {name: part.state_dict() for name, part in run.parts.items() if is_schedule(part)}
    for name, part in optimizers(run).items():
        options[name] = [{key: value for key, value in group.items() if key != "params"} for group in part.param_groups]
    return copy.deepcopy({"model": _frozen(run), **options})


def states(run: Any) -> dict[str, Any]:
    return {"model": run.model.state_dict(), **{name: _state(part) for name, part in run.parts.items()}}


def of_the_run(run: Any, gradients_wait: bool) -> dict[str, Any]:
    """Return what a checkpoint holds beside the states. `gradients_wait`: for an update of the weights that has yet to come."""
    gradients = {name: weight.grad for name, weight in _weights(run).items() if gradients_wait and weight.grad is not None}
    added = {name: _added(run, name) for name in optimizers(run)}
    return {"made": _plain(run.made), "frozen": _frozen(run), "groups": run.groups, "added": added, "gradients": gradients}


def mark(value: Any) -> Any:
    """Return a value that is another one as soon as a tensor in nested dicts and lists has been written to."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value._version
    if isinstance(value, dict):
        return {key: mark(item) for key, item in value.items()}
    return [mark(item) for item in value] if isinstance(value, (list, tuple)) else value


def give_back(run: Any, state: dict, path: str, within_epoch: bool) -> None:
    """Give the parts what a checkpoint holds.

    `within_epoch`: the lines before run.steps() are still to come, and add again what groups they have added to an optimizer.
    """
    run.model.load_state_dict(state["model"])
    kept, weights = state["run"], _weights(run)
    before = kept.get("made", {})  # 0.2.0 did not save it
    if before.get("model") == run.made["model"]:
        for name, weight in weights.items():
            weight.requires_grad_(name not in kept["frozen"])
    run.groups = kept.get("groups", run.groups)  # as long as this epoch lasts
    for name, gradient in kept.get("gradients", {}).items():
        weights[name].grad = gradient.to(weights[name].device)
    for name in sorted(run.parts, key=lambda name: is_schedule(run.parts[name])):  # which sets the rate of its optimizer
        part, saved = run.parts[name], state.get(name)
        if saved is None or (isinstance(saved, dict) and not saved):
            if not isinstance(now := _state(part), dict) or now:  # a scaler that was switched off has saved nothing
                run.say(f"warning: {path} has no {name}: it starts anew")
        elif isinstance(part, Optimizer):
            _restore_optimizer(run, name, state, path, within_epoch)
        elif name in before:
            _restore_schedule(run, name, saved, before[name])
        else:
            part.load_state_dict(saved)


def _restore_optimizer(run, name, state, path, within_epoch):
    part, saved, kept = run.parts[name], state[name], state["run"]
    groups, known = [*saved["param_groups"]], len(part.param_groups)
    sizes = [[len(group["params"]) for group in all_of_them] for all_of_them in (groups[:known], part.param_groups)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"{path} has a {name} with groups of {sizes[0]} weights, and this start has made one with {sizes[1]}: "
            "give it the groups of before, or another --output_dir"
        )
    if "made" in kept:
        made, before, weights = run.made[name], kept["made"][name], _weights(run)
        groups = groups[: kept["groups"][name]] if within_epoch else groups
        for names, options in zip(kept["added"][name][known - len(before) :], groups[known:]):
            part.add_param_group({**options, "params": [weights[one] for one in names]})
        for place, (then, mine, first) in enumerate(zip(groups, made, before)):
            groups[place] = _merged(run, name, then, mine, first)
            if mine["lr"] != first["lr"] != then["lr"] and first["lr"]:  # it is lowered or raised in proportion
                groups[place]["lr"] = then["lr"] * (mine["lr"] / first["lr"])
    elif not any(map(is_schedule, run.parts.values())):  # it is of 0.2.0, and the rate is one of the options
        groups = part.state_dict()["param_groups"]
    used = {number for group in groups for number in group["params"]}
    states = {number: value for number, value in saved["state"].items() if number in used}
    part.load_state_dict({"state": states, "param_groups": groups})
    complete(part)


def complete(optimizer: Optimizer) -> None:
    """Give RMSprop a momentum of 0 where the checkpoint is from a run without momentum."""
    for options in optimizer.param_groups if isinstance(optimizer, torch.optim.RMSprop) else []:
        for parameter in options["params"] if options["momentum"] else []:
            if optimizer.state.get(parameter):  # one that was frozen has none yet
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def _state(part):
    return _plain(part.state_dict()) if is_schedule(part) else part.state_dict()


def _plain(value):
    """Return the same in plain dicts, and without functions, which each start makes anew."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if not callable(item)}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _weights(run):
    """Return {name: weight} of the network, and of other networks among the parts."""
    others = {name: part for name, part in run.parts.items() if isinstance(part, torch.nn.Module)}
    named = {f"{name}.{key}": weight for name, part in others.items() for key, weight in part.named_parameters()}
    return {**named, **dict(run.model.named_parameters())}


def _frozen(run):
    return [name for name, weight in _weights(run).items() if not weight.requires_grad]


def _added(run, name):
    """Return the names of the weights in the groups that the optimizer has got since this start made it."""
    names = {weight: one for one, weight in _weights(run).items()}
    groups = [group["params"] for group in run.parts[name].param_groups[len(run.made[name]) :]]
    if any(weight not in names for group in groups for weight in group):
        raise UserError(
            f"{name} has got weights that are neither the network's nor those of a module that the run saves, so a restart "
            "could not find them: give the module to Run, too"
        )
    return [[names[weight] for weight in group] for group in groups]


def _merged(run, name, saved, made, before):
    """Return the options that were saved, but for those that this start has made otherwise than the one before; list these."""
    others = {key for key in made.keys() & before.keys() if not bool(torch.as_tensor(made[key] == before[key]).all())}
    for key in others - NOT_LISTED:
        if not key.startswith("_"):
            run.changed[f"{key} of {name}"] = f"{before[key]} -> {made[key]}"
    return {**made, **saved, **{key: made[key] for key in others}}


def _restore_schedule(run, name, saved, before):
    part, made = run.parts[name], copy.deepcopy(run.made[name])
    merged = _merged(run, name, saved, made, before)
    if isinstance(part, lr_scheduler.ReduceLROnPlateau):
        part.load_state_dict(merged)
    elif made == before:
        part.load_state_dict(_of_the_kinds(saved, made))
    else:  # it is another one, which goes to the place where that of before was
        for one, optimizer in optimizers(run).items():
            for group, options in zip(optimizer.param_groups, run.made[one]) if optimizer is part.optimizer else ():
                group["lr"] = options["lr"]
        part.load_state_dict(made)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects an update of the weights before each step
            for _ in range(_steps(saved)):
                part.step()


def _of_the_kinds(saved, made):
    """Return what was saved, with a Counter where the schedule has one: a checkpoint has only plain dicts."""
    if saved == made:
        return made
    if isinstance(saved, dict) and isinstance(made, dict):
        return {key: _of_the_kinds(value, made.get(key)) for key, value in saved.items()}
    if isinstance(saved, list) and isinstance(made, list):
        return [_of_the_kinds(*pair) for pair in zip(saved, made)] if len(saved) == len(made) else saved
    return saved


def _steps(saved):
    return saved["last_epoch"] if "last_epoch" in saved else _steps(saved["_schedulers"][0])
