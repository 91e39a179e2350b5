"""The parts of a run in a checkpoint: the network, its optimizers, and whatever else has a state_dict.

Each part gets its saved state back. Every start creates optimizers and learning rate schedules anew: an option that this start
gives another value than the start before is taken from this start instead of the checkpoint, and the log lists it.
"""

import copy
import warnings
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from common.errors import UserError

TAKEN = ("model", "run", "about")  # names that a checkpoint itself uses
SCHEDULES = (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)
# Options that follow from others or from the device, so the log does not list a change.
NOT_LISTED = {"initial_lr", "base_lrs", "foreach", "fused", "capturable", "differentiable"}


def require_savable(parts: dict[str, Any]) -> None:
    for name, part in parts.items():
        if name in TAKEN:
            raise ValueError(f"nothing that is saved can have the name {name}, which a checkpoint itself uses: give it another")
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise TypeError(f"{name} is a {type(part).__name__}, without state_dict and load_state_dict: it cannot be saved")


def is_schedule(part: Any) -> bool:
    return isinstance(part, SCHEDULES)


def optimizers(run: Any) -> dict[str, Optimizer]:
    return {name: part for name, part in run.parts.items() if isinstance(part, Optimizer)}


def groups(run: Any) -> dict[str, int]:
    return {name: len(part.param_groups) for name, part in optimizers(run).items()}


def made(run: Any) -> dict[str, Any]:
    """Return a copy of the options of optimizers and schedules, and the names of frozen weights, as this start set them."""
    options: dict[str, Any] = {name: part.state_dict() for name, part in run.parts.items() if is_schedule(part)}
    for name, part in optimizers(run).items():
        options[name] = [{key: value for key, value in group.items() if key != "params"} for group in part.param_groups]
    return copy.deepcopy({"model": _frozen(run), **options})


def states(run: Any) -> dict[str, Any]:
    return {"model": run.model.state_dict(), **{name: _state(part) for name, part in run.parts.items()}}


def of_the_run(run: Any) -> dict[str, Any]:
    """Return what a checkpoint holds of the parts in addition to their states."""
    added = {name: _added(run, name) for name in optimizers(run)}
    return {"made": _plain(run.made), "frozen": _frozen(run), "groups": run.groups, "added": added}


def fingerprint(value: Any) -> Any:
    """Return `value` with (address, version) for each tensor; it differs later if a tensor was replaced or written to."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value._version
    if isinstance(value, dict):
        return {key: fingerprint(item) for key, item in value.items()}
    return [fingerprint(item) for item in value] if isinstance(value, (list, tuple)) else value


def restore(run: Any, state: dict, path: str, within_epoch: bool) -> None:
    """Restore the parts; `within_epoch`: without this epoch's parameter groups, which the job adds again before run.steps()."""
    run.model.load_state_dict(state["model"])
    kept = state["run"]
    weights = named_weights(run)
    before = kept.get("made", {})  # checkpoints of version 0.2.0 lack it
    if before.get("model") == run.made["model"]:
        for name, weight in weights.items():
            weight.requires_grad_(name not in kept["frozen"])
    run.groups = kept.get("groups", run.groups)  # counted when the epoch began
    for name in sorted(run.parts, key=lambda name: is_schedule(run.parts[name])):  # schedules last: they set rates
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


def _restore_optimizer(run: Any, name: str, state: dict[str, Any], path: str, within_epoch: bool) -> None:
    part, saved, kept = run.parts[name], state[name], state["run"]
    groups, known = [*saved["param_groups"]], len(part.param_groups)
    sizes = [[len(group["params"]) for group in all_of_them] for all_of_them in (groups[:known], part.param_groups)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"{path} has a {name} with groups of {sizes[0]} weights, and this start has made one with {sizes[1]}: "
            "give it the groups of before, or another --output_dir"
        )
    if "made" in kept:
        made = run.made[name]
        before = kept["made"][name]
        weights = named_weights(run)
        groups = groups[: kept["groups"][name]] if within_epoch else groups
        for names, options in zip(kept["added"][name][known - len(before) :], groups[known:]):
            part.add_param_group({**options, "params": [weights[one] for one in names]})
        for place, (then, mine, first) in enumerate(zip(groups, made, before)):
            groups[place] = _merged(run, name, then, mine, first)
            if mine["lr"] != first["lr"] != then["lr"] and first["lr"]:  # a schedule has changed the rate: scale it
                groups[place]["lr"] = then["lr"] * (mine["lr"] / first["lr"])
    elif not any(map(is_schedule, run.parts.values())):  # of version 0.2.0: all options are this start's, the rate too
        groups = part.state_dict()["param_groups"]
    used = {number for group in groups for number in group["params"]}
    states = {number: value for number, value in saved["state"].items() if number in used}
    part.load_state_dict({"state": states, "param_groups": groups})
    complete(part)


def complete(optimizer: Optimizer) -> None:
    """Add momentum buffers of 0 to RMSprop if its state is from a run without momentum."""
    for options in optimizer.param_groups if isinstance(optimizer, torch.optim.RMSprop) else []:
        for parameter in options["params"] if options["momentum"] else []:
            if optimizer.state.get(parameter):  # a weight that was frozen has no state yet
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def _state(part: Any) -> Any:
    return _plain(part.state_dict()) if is_schedule(part) else part.state_dict()


def _plain(value: Any) -> Any:
    """Return a copy in plain dicts and lists, without the functions in dicts, which each start creates anew."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if not callable(item)}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def named_weights(run: Any) -> dict[str, torch.nn.Parameter]:
    """Return {name: weight} of the network, and {"PART.name": weight} of each other part that is a module."""
    others = {name: part for name, part in run.parts.items() if isinstance(part, torch.nn.Module)}
    named = {f"{name}.{key}": weight for name, part in others.items() for key, weight in part.named_parameters()}
    return {**named, **dict(run.model.named_parameters())}


def _frozen(run: Any) -> list[str]:
    return [name for name, weight in named_weights(run).items() if not weight.requires_grad]


def _added(run: Any, name: str) -> list[list[str]]:
    """Return, for each parameter group that optimizer `name` has got since Run.resume(), the names of its weights."""
    names = {weight: one for one, weight in named_weights(run).items()}
    groups = [group["params"] for group in run.parts[name].param_groups[len(run.made[name]) :]]
    if any(weight not in names for group in groups for weight in group):
        raise UserError(
            f"{name} has got weights that are neither the network's nor those of a module that the run saves, so a restart "
            "could not find them: give the module to Run, too"
        )
    return [[names[weight] for weight in group] for group in groups]


def _merged(run: Any, name: str, saved: dict[str, Any], made: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return options: `saved`, but this start's (`made`) where they differ from the last one's (`before`); fill run.changed."""
    others = {key for key in made.keys() & before.keys() if not bool(torch.as_tensor(made[key] == before[key]).all())}
    for key in others - NOT_LISTED:
        if not key.startswith("_"):
            run.changed[f"{key} of {name}"] = f"{before[key]} -> {made[key]}"
    return {**made, **saved, **{key: made[key] for key in others}}


def _restore_schedule(run: Any, name: str, saved: dict[str, Any], before: dict[str, Any]) -> None:
    part, made = run.parts[name], copy.deepcopy(run.made[name])
    merged = _merged(run, name, saved, made, before)
    if isinstance(part, lr_scheduler.ReduceLROnPlateau):
        part.load_state_dict(merged)
    elif made == before:
        part.load_state_dict(_of_the_kinds(saved, made))
    else:  # another schedule: it takes as many steps as the one before had taken
        for one, optimizer in optimizers(run).items():
            for group, options in zip(optimizer.param_groups, run.made[one]) if optimizer is part.optimizer else ():
                group["lr"] = options["lr"]
        part.load_state_dict(made)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects an update of the weights before each step
            for _ in range(_steps(saved)):
                part.step()


def _of_the_kinds(saved: Any, made: Any) -> Any:
    """Return `saved` with the objects of `made` where they are equal, as a checkpoint has plain dicts in place of Counters."""
    if saved == made:
        return made
    if isinstance(saved, dict) and isinstance(made, dict):
        return {key: _of_the_kinds(value, made.get(key)) for key, value in saved.items()}
    if isinstance(saved, list) and isinstance(made, list):
        return [_of_the_kinds(*pair) for pair in zip(saved, made)] if len(saved) == len(made) else saved
    return saved


def _steps(saved: dict[str, Any]) -> int:
    return saved["last_epoch"] if "last_epoch" in saved else _steps(saved["_schedulers"][0])
