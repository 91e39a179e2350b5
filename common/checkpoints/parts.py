"""The parts of a run in a checkpoint: the network, its optimizers, and whatever else has a state_dict.

Each part gets its saved state back. Every start creates optimizers and learning rate schedules anew: an
option that this start gives another value than the start before is taken from this start instead of the
checkpoint, and the log lists it.
"""

import copy
import warnings
from collections.abc import Mapping
from typing import Any, Callable, Optional, Protocol

import torch
from torch.optim import Optimizer, lr_scheduler

from common.errors import UserError
from common.weights.files import unwrapped

RESERVED_NAMES = ("model", "run", "about")  # names that a checkpoint itself uses
SCHEDULES = (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)
# Options that follow from others or from the device, so the log does not list a change.
NOT_LISTED = {"initial_lr", "base_lrs", "foreach", "fused", "capturable", "differentiable"}


Checkpoint = tuple[dict[str, Any], dict[str, Any], str]  # (state, manifest, path)
Options = dict[str, Any]  # of a parameter group, or of a schedule: {name: value}


class Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: object, /) -> Any: ...


class SavedParts:
    """The network of a run, and the objects that are saved beside it, each under a name.

    Keeps the options with which this start created them, the number of parameter groups at the beginning of
    the epoch, the restored checkpoint, the options that differ from it, and a fingerprint of the states.
    """

    def __init__(self, model: torch.nn.Module, say: Callable[[str], None]):
        """`model`: the network, or what wraps it, as DataParallel does."""
        self.network = unwrapped(model)
        self.uses_all_gpus = isinstance(model, torch.nn.DataParallel)
        self.by_name: dict[str, Stateful] = {}
        # settings that differ from the checkpoint: {"lr of optimizer": "0.1 -> 0.2"}
        self.changed: dict[str, str] = {}
        self.restored: Optional[Checkpoint] = None  # the checkpoint, until forget_restored()
        self._say = say
        # as this start has set them, before a checkpoint is restored
        self._initial_options: dict[str, Any] = {}
        # of the parameter groups of each optimizer, when the epoch began
        self._group_counts: dict[str, int] = {}
        self._fingerprint: Any = None

    def add(self, parts: Mapping[str, Any]) -> None:
        """Add parts to save, each under its name; raise an error if one cannot be saved."""
        require_savable(parts)
        self.by_name.update(parts)

    def optimizers(self) -> dict[str, Optimizer]:
        return {name: part for name, part in self.by_name.items() if isinstance(part, Optimizer)}

    def schedules(self) -> list[Any]:
        return [part for part in self.by_name.values() if is_schedule(part)]

    def learning_rate(self) -> float:
        """Return the present learning rate of the first group of the part "optimizer";
        0.0 if there is none."""
        groups = getattr(self.by_name.get("optimizer"), "param_groups", [])
        return float(groups[0]["lr"]) if groups else 0.0  # it may be a tensor

    def named_weights(self) -> dict[str, torch.nn.Parameter]:
        """Return {name: weight} of the network, and {"PART.name":
        weight} of each other part that is a module."""
        weights: dict[str, torch.nn.Parameter] = {}
        for name, part in self.by_name.items():
            if isinstance(part, torch.nn.Module):
                weights.update(
                    {f"{name}.{weight_name}": weight for weight_name, weight in part.named_parameters()}
                )
        weights.update(self.network.named_parameters())
        return weights

    # --- What a checkpoint holds ---

    def note_initial_options(self) -> None:
        """Note options of optimizers and schedules, and the frozen weights, before a restore changes them."""
        options: dict[str, Any] = {
            name: part.state_dict() for name, part in self.by_name.items() if is_schedule(part)
        }
        for name, optimizer in self.optimizers().items():
            options[name] = [
                {option: value for option, value in group.items() if option != "params"}
                for group in optimizer.param_groups
            ]
        self._initial_options = copy.deepcopy({"model": self._frozen_names(), **options})

    def begin_epoch(self) -> None:
        """Note the number of parameter groups: a start that resumes in this epoch adds later ones itself."""
        self._group_counts = {
            name: len(optimizer.param_groups) for name, optimizer in self.optimizers().items()
        }

    def states(self) -> dict[str, Any]:
        """Return the state of each part by its name; the network's as "model"."""
        return {
            "model": self.network.state_dict(),
            **{name: _state(part) for name, part in self.by_name.items()},
        }

    def settings(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the parts in addition to their states."""
        added = {name: self._names_in_added_groups(name) for name in self.optimizers()}
        return {
            "made": _plain(self._initial_options),
            "frozen": self._frozen_names(),
            "groups": self._group_counts,
            "added": added,
        }

    def note_state(self, extra: Mapping[str, Any]) -> None:
        """Note the addresses and versions of the tensors of all parts and of `extra`, for is_unchanged()."""
        self._fingerprint = fingerprint([self.states(), extra])

    def is_unchanged(self, extra: Mapping[str, Any]) -> bool:
        """Return whether no tensor was replaced or written to since note_state()."""
        return self._fingerprint == fingerprint([self.states(), extra])

    def _frozen_names(self) -> list[str]:
        return [name for name, weight in self.named_weights().items() if not weight.requires_grad]

    def _names_in_added_groups(self, name: str) -> list[list[str]]:
        """Return the weights' names in each group added to optimizer `name` since note_initial_options()."""
        names = {weight: weight_name for weight_name, weight in self.named_weights().items()}
        groups = [
            group["params"]
            for group in self.optimizers()[name].param_groups[len(self._initial_options[name]) :]
        ]
        if any(weight not in names for group in groups for weight in group):
            raise UserError(
                f"{name} has got weights that are neither the network's nor those of a module that the run "
                "saves, so a restart could not find them: give the module to Run, too"
            )
        return [[names[weight] for weight in group] for group in groups]

    # --- Restoring ---

    def forget_restored(self) -> None:
        """Free the memory of the restored checkpoint."""
        self.restored = None

    def restore(self, state: dict[str, Any], about: dict[str, Any], path: str, within_epoch: bool) -> None:
        """Restore the parts from the state of a checkpoint.

        `about`: its manifest; `path`: what messages call it.

        `within_epoch`: without the parameter groups of this epoch, which the job adds again before
        run.steps().
        """
        self.restored = (state, about, path)
        self.network.load_state_dict(state["model"])
        run_state = state["run"]
        previous_options = run_state.get("made", {})  # checkpoints of version 0.2.0 lack it
        if previous_options.get("model") == self._initial_options["model"]:
            for name, weight in self.named_weights().items():
                weight.requires_grad_(name not in run_state["frozen"])
        self._group_counts = run_state.get("groups", self._group_counts)
        # as they set rates
        schedules_last = sorted(self.by_name, key=lambda name: is_schedule(self.by_name[name]))
        for name in schedules_last:
            part = self.by_name[name]
            saved = state.get(name)
            if saved is None or saved == {}:
                has_state = _state(part) != {}  # unlike a scaler that is switched off
                if has_state:
                    self._say(f"warning: {path} has no {name}: it starts anew")
            elif isinstance(part, Optimizer):
                self._restore_optimizer(name, part, state, path, within_epoch)
            elif name in previous_options and is_schedule(part):
                self._restore_schedule(name, part, saved, previous_options[name])
            else:
                part.load_state_dict(saved)

    def _restore_optimizer(
        self, name: str, optimizer: Optimizer, state: dict[str, Any], path: str, within_epoch: bool
    ) -> None:
        """Restore an optimizer's state, added groups, and the options that this start has not changed."""
        saved = state[name]
        groups = [*saved["param_groups"]]
        run_state = state["run"]
        # Those of each group that the optimizer was created with; groups that were added later have none.
        previous_options = run_state.get("made", {}).get(name, [])
        _require_same_groups(name, groups, optimizer, len(previous_options), path)
        if "made" in run_state:
            if within_epoch:
                groups = groups[: run_state["groups"][name]]
            self._add_missing_groups(optimizer, groups, run_state["added"][name], len(previous_options))
            for index, (initial, previous) in enumerate(zip(self._initial_options[name], previous_options)):
                if index < len(groups):
                    groups[index] = self._restored_group(name, groups[index], initial, previous)
        elif not self.schedules():  # of version 0.2.0: all options are this start's, the rate too
            groups = optimizer.state_dict()["param_groups"]
        used = {number for group in groups for number in group["params"]}
        states = {number: value for number, value in saved["state"].items() if number in used}
        optimizer.load_state_dict({"state": states, "param_groups": groups})
        add_missing_buffers(optimizer)

    def _add_missing_groups(
        self, optimizer: Optimizer, groups: list[dict], names_of_added: list[list[str]], created_count: int
    ) -> None:
        """Add the groups that an earlier start has added and this one has not.

        `names_of_added`: the weights of each group behind the `created_count` that the optimizer was created
        with.
        """
        present_count = len(optimizer.param_groups)
        weights = self.named_weights()
        for names, options in zip(names_of_added[present_count - created_count :], groups[present_count:]):
            optimizer.add_param_group({**options, "params": [weights[weight_name] for weight_name in names]})

    def _restored_group(self, name: str, saved: Options, initial: Options, previous: Options) -> Options:
        """Return _merged() options of a parameter group; a rate that a schedule has changed since the start
        before keeps its ratio to the initial one."""
        group = self._merged(name, saved, initial, previous)
        has_new_rate = initial["lr"] != previous["lr"]
        was_scheduled = previous["lr"] != saved["lr"]
        if has_new_rate and was_scheduled and previous["lr"]:
            group["lr"] = saved["lr"] * (initial["lr"] / previous["lr"])
        return group

    def _restore_schedule(self, name: str, schedule: Any, saved: Options, previous: Options) -> None:
        """Restore a schedule. If this start has changed its options, it begins anew and repeats the steps.

        ReduceLROnPlateau goes on with the options of this start.
        """
        initial = copy.deepcopy(self._initial_options[name])
        merged = self._merged(name, saved, initial, previous)
        if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
            schedule.load_state_dict(merged)
        elif initial == previous:
            schedule.load_state_dict(_with_objects_of(initial, saved))
        else:
            self._repeat_steps(schedule, initial, _steps(saved))

    def _repeat_steps(self, schedule: Any, initial: Options, steps: int) -> None:
        """Begin the schedule at its `initial` state, and let it take `steps` steps."""
        for name, optimizer in self.optimizers().items():
            if optimizer is schedule.optimizer:
                for group, options in zip(optimizer.param_groups, self._initial_options[name]):
                    group["lr"] = options["lr"]
        schedule.load_state_dict(initial)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects an update of the weights before each step
            for _ in range(steps):
                schedule.step()

    def _merged(self, name: str, saved: Options, initial: Options, previous: Options) -> Options:
        """Return the `saved` options, with those of this start where it has changed them or where none is
        saved.

        `initial`: with which this start created the part `name`; `previous`: with which the start before did.
        An option in which they differ has changed, and is listed in `changed` unless it is private or in
        NOT_LISTED.
        """
        differing = {
            option
            for option in initial.keys() & previous.keys()
            if not _is_same(initial[option], previous[option])
        }
        for option in sorted(differing - NOT_LISTED):
            if not option.startswith("_"):
                self.changed[f"{option} of {name}"] = f"{previous[option]} -> {initial[option]}"
        return {**initial, **saved, **{option: initial[option] for option in differing}}


def require_savable(parts: Mapping[str, Any]) -> None:
    """Raise ValueError for a reserved name, TypeError for one without state_dict or load_state_dict."""
    for name, part in parts.items():
        if name in RESERVED_NAMES:
            raise ValueError(
                f"nothing that is saved can have the name {name}, which a checkpoint itself uses: give "
                "it another"
            )
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise TypeError(
                f"{name} is a {type(part).__name__}, without state_dict and load_state_dict: it cannot "
                "be saved"
            )


def is_schedule(part: object) -> bool:
    return isinstance(part, SCHEDULES)


def add_missing_buffers(optimizer: Optimizer) -> None:
    """Add momentum buffers of 0 to RMSprop if its state is from a run without momentum."""
    if not isinstance(optimizer, torch.optim.RMSprop):
        return
    for options in optimizer.param_groups:
        if options["momentum"]:
            for parameter in options["params"]:
                if optimizer.state.get(parameter):  # a weight that was frozen has no state yet
                    optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def fingerprint(value: object) -> Any:
    """Return `value` with (address, version) for each tensor;
    it differs later if a tensor was replaced or written to."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value._version
    if isinstance(value, dict):
        return {key: fingerprint(item) for key, item in value.items()}
    return [fingerprint(item) for item in value] if isinstance(value, (list, tuple)) else value


def _require_same_groups(
    name: str, groups: list[Options], optimizer: Optimizer, previous_count: int, path: str
) -> None:
    """Raise UserError unless the first `groups` of a checkpoint are as large as this start's.

    `previous_count`: how many groups the start that wrote it had created. Others were added later.
    """
    current_groups = optimizer.param_groups
    compared_count = max(len(current_groups), previous_count)
    saved_sizes = [len(group["params"]) for group in groups[:compared_count]]
    sizes = [len(group["params"]) for group in current_groups]
    if saved_sizes != sizes:
        raise UserError(
            f"{path} has a {name} with groups of {saved_sizes} weights, and this start has made one with "
            f"{sizes}: give it the groups of before, or another --output_dir"
        )


def _state(part: Stateful) -> Any:
    return _plain(part.state_dict()) if is_schedule(part) else part.state_dict()


def _plain(value: object) -> Any:
    """Return a copy in plain dicts and lists, without the functions in dicts,
    which each start creates anew."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if not callable(item)}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _is_same(value: object, other_value: object) -> bool:
    """Return whether two options are equal; options may be tensors."""
    return bool(torch.as_tensor(value == other_value).all())


def _with_objects_of(initial: object, saved: object) -> Any:
    """Return `saved`, with the objects of `initial` where equal: torch needs a Counter, saved as a dict."""
    if saved == initial:
        return initial
    if isinstance(saved, dict) and isinstance(initial, dict):
        return {key: _with_objects_of(initial.get(key), value) for key, value in saved.items()}
    if isinstance(saved, list) and isinstance(initial, list) and len(saved) == len(initial):
        return [_with_objects_of(*pair) for pair in zip(initial, saved)]
    return saved


def _steps(saved: Options) -> int:
    """Return the steps that a schedule had taken, by its saved state."""
    return saved["last_epoch"] if "last_epoch" in saved else _steps(saved["_schedulers"][0])
