"""What a script trains and has not given to Run: a restart would begin it anew, without a word.

The networks, optimizers, schedules and scalers that live in this process are looked through when the run begins, and again at
three moments of it; only generators are watched in steps, in the first ones. Lines name them by the script's variables.
"""

import contextlib
import gc
import inspect
import random
import re
import sys
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, FunctionType, ModuleType
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from common.checkpoints.parts import SCHEDULES, fingerprint, is_schedule
from common.errors import one_line
from common.run.gradients import weights_of
from common.weights.files import unwrapped

NOT_THE_SCRIPTS = {"common", "datasets", "torch"}  # packages whose variables are not looked at
DEEPEST = 10  # references from a saved part to what it saves
MOST_ITEMS = 1000  # of a container that is looked through
FEW = 4  # values along each dimension of a weight, or up to twice as many
STEPS_WATCHED = 3  # of a start, in which it is seen who draws from a generator
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
SCALER: Any = getattr(torch.amp, "GradScaler", ())  # before torch 2.3, scalers are not looked for


class Living(NamedTuple):
    """What lives in this process."""

    modules: list[nn.Module]
    optimizers: list[Optimizer]
    schedules: list[Any]
    scalers: list[Any]


class Weight(NamedTuple):
    """A weight as it was when it was first looked at."""

    owner: weakref.ref  # a module or an optimizer
    version: int
    checksum: int

    def has_changed(self, weight: torch.Tensor) -> bool:
        """Return whether `weight`, which was noted here, was written to since."""
        if self.owner() is None or weight.is_inference():
            return False
        return weight._version > self.version or _checksum(weight) != self.checksum


class Unsaved:
    def __init__(self, saved: Callable[[], Iterable[object]], meant: Sequence[object], say: Callable[[str], None]):
        """`saved`: returns the network and the parts of the run. `meant`: what is meant to begin anew, and is not named."""
        if not isinstance(meant, (list, tuple)) or any(isinstance(one, str) for one in meant):
            raise TypeError("Run(unsaved=...) takes a list of objects, such as unsaved=[discriminator]")
        self.meant = meant
        self._saved = saved
        self._say = say
        self._is_begun = False
        self._weights: dict[int, Weight] = {}  # of this process, by their id
        self._states: dict[int, Any] = {}  # fingerprints of the optimizers' states, then
        self._steps: dict[int, int] = {}  # that the schedules had taken then
        self._generators: list[Any] = []  # of the script
        self._before_step: list[str] = []  # their states
        self._drawn: dict[int, object] = {}  # the generators from which a step has drawn
        self._steps_seen = 0
        self._moments: set[str] = set()  # at which this was looked through
        self._named: set[int] = set()

    @contextlib.contextmanager
    def _or_never(self) -> Iterator[None]:
        """After an error, which an object of the script may raise when it is looked at, look no more."""
        try:
            yield
        except Exception as error:
            self._is_begun = False
            why = f"{type(error).__name__}: {one_line(error)[:200]}"
            self._say(f"warning: what the run does not save cannot be looked for: {why}")

    def not_given(self) -> list[tuple[str, str]]:
        """Return (name, kind) of each optimizer, schedule, average and scaler that is not saved, before anything is trained."""
        found: list[tuple[str, str]] = []
        with self._or_never():
            living = _living()
            averages = [module for module in living.modules if isinstance(module, AveragedModel)]
            scalers = [scaler for scaler in living.scalers if scaler.is_enabled()]
            known = _reached([*self._saved(), *self.meant])
            names = _names()
            for one in (*averages, *living.optimizers, *_outermost(living.schedules), *scalers):
                if id(one) not in known and id(one) in names:
                    found.append((names[id(one)], type(one).__name__))
        return found

    def begin(self) -> None:
        """Note where weights, optimizers and schedules stand."""
        with self._or_never():
            living = _living()
            self._note_new_weights(living)
            self._states = {id(optimizer): _fingerprint(optimizer) for optimizer in living.optimizers}
            self._steps = {id(schedule): _steps_of(schedule) for schedule in living.schedules}
            ours = {id(torch.default_generator), id(np.random.mtrand._rand), id(getattr(random, "_inst", None))}
            self._generators = [one for _, one in _variables() if _is_generator(one) and id(one) not in ours]
            self._is_begun = True

    def _note_new_weights(self, living: Living) -> None:
        for owner, weights in _owners(living):
            for weight in weights:
                noted = self._weights.get(id(weight))
                if (noted is None or noted.owner() is None) and not (is_lazy(weight) or weight.is_inference()):
                    self._weights[id(weight)] = Weight(weakref.ref(owner), weight._version, _checksum(weight))

    def begin_step(self) -> None:
        if self._is_begun and self._steps_seen < STEPS_WATCHED:
            with self._or_never():
                self._before_step = [*map(_state, self._generators)]

    def end_step(self) -> None:
        if self._is_begun and self._steps_seen < STEPS_WATCHED:
            self._steps_seen += 1
            with self._or_never():
                for generator, before in zip(self._generators, self._before_step):
                    if _state(generator) != before:
                        self._drawn[id(generator)] = generator

    def say_what_is_found(self, moment: str) -> None:
        """Say a line for each thing that was not named before, the first time that this is called at a moment of this name."""
        if self._is_begun and moment not in self._moments:
            self._moments.add(moment)
            with self._or_never():
                if self._found():
                    gc.collect()  # unreachable objects do not count
                    names = _names()
                    for one, what in self._found():
                        self._named.add(id(one))
                        self._say(_line(one, what, names.get(id(one), "")))

    def _found(self) -> list[tuple[object, str]]:
        """Return what has changed, is not saved and was not named before, each with what has happened to it."""
        living = _living()
        self._note_new_weights(living)
        saved = [*self._saved()]
        known = _reached([*saved, *self.meant])
        shared = {id(one.state) for one in saved if isinstance(one, Optimizer)}  # a wrapper may have the state of what it wraps
        was_warned_of_schedules = not any(map(is_schedule, saved))  # by the first lines, those of saved optimizers
        found: list[tuple[object, str]] = [(module, "is trained") for module in self._trained(living.modules, known)]
        found += [(weight, "is trained") for weight in self._trained_alone(living, known)]
        for optimizer in living.optimizers:
            has_stepped = bool(optimizer.state) and _fingerprint(optimizer) != self._states.get(id(optimizer))
            if id(optimizer) not in known and id(optimizer.state) not in shared and has_stepped:
                found.append((optimizer, "has stepped"))
        for schedule in _outermost(living.schedules):
            has_stepped = _steps_of(schedule) > self._steps.get(id(schedule), _steps_of(schedule))
            was_warned_of = was_warned_of_schedules and id(getattr(schedule, "optimizer", None)) in known
            if id(schedule) not in known and has_stepped and not was_warned_of:
                found.append((schedule, "has stepped"))
        scaling = [scaler for scaler in living.scalers if getattr(scaler, "_scale", None) is not None]
        found += [(scaler, "has scaled a loss") for scaler in scaling if id(scaler) not in known]
        found += [(one, "is drawn from in a step") for number, one in self._drawn.items() if number not in known]
        return [pair for pair in found if id(pair[0]) not in self._named]

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

    def _trained_alone(self, living: Living, known: set[int]) -> list[torch.Tensor]:
        """Return the weights of optimizers that have changed, are not saved and are in no module."""
        in_modules = {id(weight) for module in living.modules for weight in module.parameters(recurse=False)}
        weights = {id(weight): weight for optimizer in living.optimizers for weight in weights_of(optimizer)}
        alone = weights.keys() - in_modules - known
        return [weight for number, weight in weights.items() if number in alone and self._has_changed(weight)]

    def _has_changed(self, weight: torch.Tensor) -> bool:
        noted = self._weights.get(id(weight))
        return noted is not None and noted.has_changed(weight)


def _line(one: object, what: str, name: str) -> str:
    shown = f"{name} ({type(one).__name__})" if name else f"an object of {type(one).__name__}"
    argument = re.sub(r"\W+", "_", name).strip("_") or "name"
    instead = f"it, as {argument}={name or '...'}"
    if _is_generator(one):
        instead = "an object that has its state, or draw from torch, numpy or random, which are seeded for each step"
    elif isinstance(one, torch.Tensor):
        instead = f"a module that has it, as {argument}=nn.ParameterList([{name or '...'}])"
    return (
        f"warning: {shown} {what} and is not saved, so a restart begins it anew: give Run {instead}; if that is meant, "
        f"unsaved=[{name or '...'}]"
    )


def _living() -> Living:
    living = Living([], [], [], [])
    for one in gc.get_objects():
        kind = type(one)  # not isinstance(), which asks some objects for their class, and these warn or fail
        if issubclass(kind, nn.Module):
            living.modules.append(one)
        elif issubclass(kind, Optimizer):
            living.optimizers.append(one)
        elif issubclass(kind, SCALER):
            living.scalers.append(one)
        elif issubclass(kind, SCHEDULES):
            living.schedules.append(one)
    # Some have not called the __init__() of torch's class: they are shells around others.
    modules = [one for one in living.modules if "_parameters" in vars(one)]
    return living._replace(modules=modules, optimizers=[one for one in living.optimizers if "param_groups" in vars(one)])


def _owners(living: Living) -> Iterator[tuple[object, Iterable[torch.Tensor]]]:
    """Yield (module or optimizer, its weights)."""
    for module in living.modules:
        yield module, module.parameters(recurse=False)
    for optimizer in living.optimizers:
        yield optimizer, weights_of(optimizer)


def _checksum(weight: torch.Tensor) -> int:
    """Return a checksum of a few values, as what is written by way of `.data` has no new version; 0 if there are none."""
    with contextlib.suppress(RuntimeError, TypeError):
        few = weight.detach()[tuple(slice(None, None, max(1, size // FEW)) for size in weight.shape)]
        return zlib.crc32(few.reshape(-1).cpu().view(torch.uint8).numpy().tobytes())
    return 0


def _fingerprint(optimizer: Optimizer) -> Any:
    return fingerprint(list(optimizer.state.values()))


def _outermost(schedules: list[Any]) -> list[Any]:
    inner = {id(one) for schedule in schedules for one in getattr(schedule, "_schedulers", [])}
    return [schedule for schedule in schedules if id(schedule) not in inner]


def _steps_of(schedule: object) -> int:
    return max([getattr(schedule, "last_epoch", 0), *map(_steps_of, getattr(schedule, "_schedulers", []))])


def _is_generator(one: object) -> bool:
    return issubclass(type(one), GENERATORS) and not issubclass(type(one), random.SystemRandom)


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
    level = {id(one): one for one in parts}
    for _ in range(DEEPEST):
        reached.update(level)
        others = (other for one in level.values() for other in _referred_to(one))
        level = {id(other): other for other in others if id(other) not in reached}  # each once, however many refer to it
    return reached


def _referred_to(one: Any) -> Iterable[object]:
    kind = type(one)
    if issubclass(kind, nn.Module) and "_modules" in vars(one):
        return [*one.modules(), *one.parameters()]
    if issubclass(kind, Optimizer):  # it saves what it knows of weights, and not the weights
        return [other for other in vars(one).values() if issubclass(type(other), Optimizer)]
    if issubclass(kind, SCHEDULES):
        return getattr(one, "_schedulers", [])
    if issubclass(kind, FunctionType):
        return [*(one.__closure__ or ()), *(one.__defaults__ or ())]
    if issubclass(kind, (ModuleType, FrameType, type, torch.Tensor)):
        return []
    if issubclass(kind, (list, tuple, dict)) and len(one) > MOST_ITEMS:
        return []
    methods = [vars(base)["state_dict"] for base in kind.__mro__ if "state_dict" in vars(base)]
    return [*gc.get_referents(one), *methods]


# --- The names of a script's variables -----------------------------------------------------------------------------------


def _variables() -> Iterator[tuple[str, object]]:
    """Yield (name, value) of the variables in the script's functions that are under way, of its globals, and of what these have
    as attributes and items."""
    for space in _spaces():
        for name, value in space.items():
            yield name, value
            kind = type(value)
            if issubclass(kind, (list, tuple)) and len(value) <= MOST_ITEMS:
                yield from ((f"{name}[{number}]", item) for number, item in enumerate([*value]))
            elif issubclass(kind, dict) and len(value) <= MOST_ITEMS:
                yield from ((f"{name}[{key!r}]", item) for key, item in [*value.items()] if isinstance(key, str))
            elif not issubclass(kind, (ModuleType, type, FunctionType)):
                attributes = _attributes(value)
                for attribute, item in [*attributes.items(), *attributes.get("_modules", {}).items()]:
                    yield f"{name}.{attribute}", item


def _attributes(value: object) -> dict[str, Any]:
    """Return what is in an object itself, without asking the object."""
    with contextlib.suppress(AttributeError):
        found = object.__getattribute__(value, "__dict__")
        return found if type(found) is dict else {}
    return {}


def _spaces() -> list[dict[str, Any]]:
    """Return copies of the variables of the script's functions that are under way, and of its globals."""
    spaces: dict[int, dict[str, Any]] = {}
    frame: Optional[FrameType] = sys._getframe()
    while frame:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in NOT_THE_SCRIPTS:
            spaces[id(frame.f_globals)] = {**frame.f_globals}
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                spaces[id(frame)] = {**frame.f_locals}
                if sys.version_info < (3, 13) and not sys.gettrace():
                    frame.f_locals.clear()  # the frame's own copy, which would keep the tensors of this step
        frame = frame.f_back
    return list(spaces.values())


def _names() -> dict[int, str]:
    """Return {id of an object: the name of a variable that holds it, or that has it as an attribute or an item}."""
    names: dict[int, str] = {}
    for name, value in sorted(_variables(), key=lambda pair: (not pair[0].isidentifier(), len(pair[0]))):
        if not name.startswith("_"):
            names.setdefault(id(value), name)
    return names
