"""What a script trains and has not given to Run: a restart would begin it anew, without a word.

The networks, optimizers, schedules and scalers that live in this process are looked through when the run begins, and again at
three moments of it; only generators are watched in steps, in the first ones. All are called by the names of the script's
variables.
"""

import functools
import gc
import random
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Callable, Optional

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from common.checkpoints.parts import SCHEDULES, is_schedule
from common.checkpoints.weights import unwrapped
from common.run.gradients import weights_of

OURS = {"common", "datasets", "torch"}  # packages whose variables are not the script's
DEEPEST = 5  # references from a saved part to what it saves
STEPS_WATCHED = 3  # of a start, in which it is seen who draws from a generator
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class Unsaved:
    def __init__(self, saved: Callable[[], Iterable[object]], meant: Sequence[object]):
        """`saved`: returns the network and the parts of the run. `meant`: what is meant to begin anew, and is not named."""
        self._saved = saved
        self._meant = meant
        self._versions: dict[int, tuple[weakref.ref, int]] = {}  # of the weights of this process, when the run began
        self._places: dict[int, int] = {}  # of the schedules, then
        self._states: dict[int, str] = {}  # of the script's generators, when a step began
        self._drawn: dict[int, object] = {}  # the generators from which a step has drawn
        self._steps_seen = 0
        self._moments: set[str] = set()  # at which this was looked through
        self._told: set[int] = set()

    def not_given(self) -> list[tuple[str, str]]:
        """Return (name, kind) of each optimizer, schedule, average and scaler that is not saved, before anything is trained."""
        modules, optimizers, schedules, scalers = _living()
        averages = [module for module in modules if isinstance(module, AveragedModel)]
        known = _reached([*self._saved(), *self._meant])
        names = _names()
        found = [one for one in (*averages, *optimizers, *schedules, *scalers) if id(one) not in known and id(one) in names]
        return [(names[id(one)], type(one).__name__) for one in found]

    def begin(self) -> None:
        """Note where weights and schedules stand."""
        modules, optimizers, schedules, _ = _living()
        weights: set[torch.Tensor] = set()
        for module in modules:
            weights.update(module.parameters(recurse=False))
        for optimizer in optimizers:
            weights.update(weights_of(optimizer))
        self._versions = {id(weight): (weakref.ref(weight), weight._version) for weight in weights}
        self._places = {id(schedule): schedule.last_epoch for schedule in schedules}

    def begin_step(self) -> None:
        if self._versions and self._steps_seen < STEPS_WATCHED:
            self._states = {id(one): _state(one) for _, one in _variables() if isinstance(one, GENERATORS)}

    def end_step(self) -> None:
        if self._versions and self._steps_seen < STEPS_WATCHED:
            self._steps_seen += 1
            for _, one in _variables():
                if isinstance(one, GENERATORS) and self._states.get(id(one), _state(one)) != _state(one):
                    self._drawn[id(one)] = one

    def lines(self, moment: str) -> Iterator[str]:
        """Yield a line for each thing that was not named before, the first time that this is asked at a moment of this name."""
        if not self._versions or moment in self._moments:
            return
        self._moments.add(moment)
        if not any(self._found()):
            return
        gc.collect()  # nobody need save what nothing refers to any more
        names = _names()
        for one, what in self._found():
            self._told.add(id(one))
            name = names.get(id(one), "")
            shown = f"{name} ({type(one).__name__})" if name else f"an object of {type(one).__name__}"
            if isinstance(one, GENERATORS):
                instead = "an object that has its state, or draw from torch, numpy or random, which are seeded for each step"
            else:
                instead = f"it, as {_argument(name)}={name or '...'}"
            yield (
                f"warning: {shown} {what} and is not saved, so a restart begins it anew: give Run {instead}; if that is meant, "
                f"unsaved=[{name or '...'}]"
            )

    def _found(self) -> list[tuple[object, str]]:
        """Return what is trained, not saved and not told of before, each with what has happened to it."""
        modules, optimizers, schedules, scalers = _living()
        saved = [*self._saved()]
        known = _reached([*saved, *self._meant])
        was_warned_of_schedules = not any(map(is_schedule, saved))  # by the first lines, those of saved optimizers
        found: list[tuple[object, str]] = [(module, "is trained") for module in self._trained(modules, known)]
        for optimizer in optimizers:
            values = (value for state in optimizer.state.values() for value in state.values())
            has_state = any(value is not None for value in values)
            if id(optimizer) not in known and has_state and any(map(self._has_changed, weights_of(optimizer))):
                found.append((optimizer, "has stepped"))
        for schedule in schedules:
            has_stepped = schedule.last_epoch > self._places.get(id(schedule), 0)
            was_warned_of = was_warned_of_schedules and id(schedule.optimizer) in known
            if id(schedule) not in known and has_stepped and not was_warned_of:
                found.append((schedule, "has stepped"))
        found += [(one, "has scaled a loss") for one in scalers if id(one) not in known and one._scale is not None]
        found += [(one, "is drawn from in a step") for number, one in self._drawn.items() if number not in known]
        return [pair for pair in found if id(pair[0]) not in self._told]

    def _trained(self, modules: list[nn.Module], known: set[int]) -> list[nn.Module]:
        """Return the outermost modules of which no weight is saved and some weight has changed since the run began."""
        found = {}
        for module in modules:
            weights = [*module.parameters()]
            if any(map(self._has_changed, weights)) and not any(id(weight) in known for weight in weights):
                found[id(module)] = module
        inner = {id(child) for module in found.values() for child in module.modules() if child is not module}
        outermost = [module for number, module in found.items() if number not in inner]
        return list({id(unwrapped(module)): unwrapped(module) for module in outermost}.values())

    def _has_changed(self, weight: torch.Tensor) -> bool:
        weight_then, version = self._versions.get(id(weight), (None, 0))
        return weight_then is not None and weight_then() is weight and weight._version > version


def _living() -> tuple[list[nn.Module], list[Optimizer], list[Any], list[Any]]:
    """Return the modules, optimizers, schedules and gradient scalers of this process."""
    modules, optimizers, schedules, scalers = [], [], [], []
    for one in gc.get_objects():
        kind = type(one)  # not isinstance(), which asks some objects for their class, and these warn
        if issubclass(kind, nn.Module):
            modules.append(one)
        elif issubclass(kind, Optimizer):
            optimizers.append(one)
        elif issubclass(kind, torch.amp.GradScaler):
            scalers.append(one)
        elif issubclass(kind, SCHEDULES):
            schedules.append(one)
    return modules, optimizers, schedules, scalers


def _state(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return repr(generator.get_state().tolist())
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return repr(generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate())


# --- What a saved part saves -------------------------------------------------------------------------------------------


def _reached(parts: Iterable[object]) -> set[int]:
    """Return the ids of these objects and of what they refer to, except what they use and do not save."""
    reached: set[int] = set()
    level = [*parts]
    for _ in range(DEEPEST):
        level = [one for one in level if id(one) not in reached]
        reached.update(map(id, level))
        level = [other for one in level for other in _referred_to(one)]
    return reached


def _referred_to(one: Any) -> Iterable[object]:
    if isinstance(one, nn.Module):
        return [*one.modules(), *one.parameters()]
    if isinstance(one, Optimizer):  # it saves what it knows of weights, and not the weights
        return [other for other in vars(one).values() if isinstance(other, Optimizer)]
    if is_schedule(one):
        return getattr(one, "_schedulers", [])
    if isinstance(one, FunctionType):
        return [*(cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)), *(one.__defaults__ or ())]
    if isinstance(one, MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, (ModuleType, FrameType, type, torch.Tensor)):
        return []
    return [*gc.get_referents(one), *([one.state_dict] if hasattr(one, "state_dict") else [])]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


# --- The names of a script's variables -----------------------------------------------------------------------------------


def _variables() -> Iterator[tuple[str, object]]:
    """Yield (name, value) of the variables in the script's functions that are under way, of its globals, and of what these have
    as attributes and items."""
    frame: Optional[FrameType] = sys._getframe()
    spaces: dict[int, dict[str, Any]] = {}
    while frame:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in OURS:
            spaces[id(frame)] = {**frame.f_locals}
            spaces[id(frame.f_globals)] = {**frame.f_globals}
        frame = frame.f_back
    for space in spaces.values():
        for name, value in space.items():
            yield name, value
            if isinstance(value, (list, tuple)):
                yield from ((f"{name}[{number}]", item) for number, item in enumerate(value))
            elif isinstance(value, dict):
                yield from ((f"{name}[{key!r}]", item) for key, item in value.items() if isinstance(key, str))
            elif isinstance(value, nn.Module):
                yield from ((f"{name}.{child}", module) for child, module in value.named_children())
            elif hasattr(value, "__dict__") and not isinstance(value, (ModuleType, type, FunctionType)):
                yield from ((f"{name}.{attribute}", item) for attribute, item in vars(value).items())


def _names() -> dict[int, str]:
    """Return {id of an object: the name of a variable that holds it, or that has it as an attribute or an item}."""
    names: dict[int, str] = {}
    for name, value in sorted(_variables(), key=lambda pair: (not pair[0].isidentifier(), len(pair[0]))):
        if not name.startswith("_"):
            names.setdefault(id(value), name)
    return names


def _argument(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_") or "name"
