"""What a script trains and has not given to Run: a restart would begin it anew, without a word.

The networks, optimizers, schedules and scalers that live in this process are looked through when the run
begins, and again at three moments of it; only generators are watched in steps, in the first ones. Lines name
them by the script's variables.
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

LIBRARY_PACKAGES = {"common", "datasets", "torch"}  # packages whose variables are not looked at
DEEPEST = 10  # references from a saved part to what it saves
MOST_ITEMS = 1000  # of a container that is looked through
SAMPLED_VALUES = 4  # values along each dimension of a weight, or up to twice as many
STEPS_WATCHED = 3  # of a start, in which it is seen who draws from a generator
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
SCALER: Any = getattr(torch.amp, "GradScaler", ())  # before torch 2.3, scalers are not looked for


class LiveObjects(NamedTuple):
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
    def __init__(
        self, get_saved: Callable[[], Iterable[object]], ignored: Sequence[object], say: Callable[[str], None]
    ):
        """`get_saved`: returns the network and the parts of the run. `ignored`: not to be warned of."""
        if not isinstance(ignored, (list, tuple)) or any(isinstance(item, str) for item in ignored):
            raise TypeError("Run(unsaved=...) takes a list of objects, such as unsaved=[discriminator]")
        self.ignored = ignored
        self._get_saved = get_saved
        self._say = say
        self._is_watching = False
        self._weights: dict[int, Weight] = {}  # of this process, by their id
        self._optimizer_states: dict[int, Any] = {}  # fingerprints of the optimizers' states, then
        self._schedule_steps: dict[int, int] = {}  # that the schedules had taken then
        self._generators: list[Any] = []  # of the script
        self._states_before_step: list[str] = []  # their states
        self._drawn_from: dict[int, object] = {}  # the generators from which a step has drawn
        self._steps_watched = 0
        self._past_moments: set[str] = set()  # at which this was looked through
        self._reported_ids: set[int] = set()

    @contextlib.contextmanager
    def _stop_watching_on_error(self) -> Iterator[None]:
        """Stop watching after an error, which an object of the script may raise when it is examined."""
        try:
            yield
        except Exception as error:
            self._is_watching = False
            reason = f"{type(error).__name__}: {one_line(error)[:200]}"
            self._say(f"warning: what the run does not save cannot be looked for: {reason}")

    def unsaved_parts(self) -> list[tuple[str, str]]:
        """Return (name, kind) of each optimizer, schedule, average and scaler that is not saved,
        before anything is trained."""
        missing: list[tuple[str, str]] = []
        with self._stop_watching_on_error():
            live = _live_objects()
            averages = [module for module in live.modules if isinstance(module, AveragedModel)]
            scalers = [scaler for scaler in live.scalers if scaler.is_enabled()]
            saved_ids = _reachable_ids([*self._get_saved(), *self.ignored])
            names = _names()
            for part in (*averages, *live.optimizers, *_outermost(live.schedules), *scalers):
                if id(part) not in saved_ids and id(part) in names:
                    missing.append((names[id(part)], type(part).__name__))
        return missing

    def begin(self) -> None:
        """Note where weights, optimizers and schedules stand."""
        with self._stop_watching_on_error():
            live = _live_objects()
            self._note_new_weights(live)
            self._optimizer_states = {id(optimizer): _fingerprint(optimizer) for optimizer in live.optimizers}
            self._schedule_steps = {id(schedule): _steps_of(schedule) for schedule in live.schedules}
            seeded_ids = {
                id(torch.default_generator),
                id(np.random.mtrand._rand),
                id(getattr(random, "_inst", None)),
            }
            self._generators = [
                value for _, value in _variables() if _is_generator(value) and id(value) not in seeded_ids
            ]
            self._is_watching = True

    def _note_new_weights(self, live: LiveObjects) -> None:
        for owner, weights in _owners(live):
            for weight in weights:
                noted = self._weights.get(id(weight))
                if (noted is None or noted.owner() is None) and not (
                    is_lazy(weight) or weight.is_inference()
                ):
                    self._weights[id(weight)] = Weight(weakref.ref(owner), weight._version, _checksum(weight))

    def begin_step(self) -> None:
        """Note the states of the script's generators, in the first steps of a start."""
        if self._is_watching and self._steps_watched < STEPS_WATCHED:
            with self._stop_watching_on_error():
                self._states_before_step = [*map(_state, self._generators)]

    def end_step(self) -> None:
        """Note which generators the step has drawn from, in the first steps of a start."""
        if self._is_watching and self._steps_watched < STEPS_WATCHED:
            self._steps_watched += 1
            with self._stop_watching_on_error():
                for generator, previous_state in zip(self._generators, self._states_before_step):
                    if _state(generator) != previous_state:
                        self._drawn_from[id(generator)] = generator

    def warn_of_changes(self, moment: str) -> None:
        """Warn once of each changed object; a second call with this moment does nothing."""
        if self._is_watching and moment not in self._past_moments:
            self._past_moments.add(moment)
            with self._stop_watching_on_error():
                if self._new_changes():
                    gc.collect()  # unreachable objects do not count
                    names = _names()
                    for item, change in self._new_changes():
                        self._reported_ids.add(id(item))
                        self._say(_warning(item, change, names.get(id(item), "")))

    def _new_changes(self) -> list[tuple[object, str]]:
        """Return (object, what happened) for each that changed, is not saved and was not named."""
        live = _live_objects()
        self._note_new_weights(live)
        saved = [*self._get_saved()]
        saved_ids = _reachable_ids([*saved, *self.ignored])
        shared_state_ids = {
            id(item.state) for item in saved if isinstance(item, Optimizer)
        }  # a wrapper may have the state of what it wraps
        # by the first lines, those of saved optimizers
        was_warned_of_schedules = not any(map(is_schedule, saved))
        changes: list[tuple[object, str]] = [
            (module, "is trained") for module in self._trained_modules(live.modules, saved_ids)
        ]
        changes += [(weight, "is trained") for weight in self._trained_loose_weights(live, saved_ids)]
        for optimizer in live.optimizers:
            has_stepped = bool(optimizer.state) and _fingerprint(optimizer) != self._optimizer_states.get(
                id(optimizer)
            )
            if id(optimizer) not in saved_ids and id(optimizer.state) not in shared_state_ids and has_stepped:
                changes.append((optimizer, "has stepped"))
        for schedule in _outermost(live.schedules):
            has_stepped = _steps_of(schedule) > self._schedule_steps.get(id(schedule), _steps_of(schedule))
            was_warned_of = was_warned_of_schedules and id(getattr(schedule, "optimizer", None)) in saved_ids
            if id(schedule) not in saved_ids and has_stepped and not was_warned_of:
                changes.append((schedule, "has stepped"))
        scaling = [scaler for scaler in live.scalers if getattr(scaler, "_scale", None) is not None]
        changes += [(scaler, "has scaled a loss") for scaler in scaling if id(scaler) not in saved_ids]
        changes += [
            (item, "is drawn from in a step")
            for generator_id, item in self._drawn_from.items()
            if generator_id not in saved_ids
        ]
        return [pair for pair in changes if id(pair[0]) not in self._reported_ids]

    def _trained_modules(self, modules: list[nn.Module], saved_ids: set[int]) -> list[nn.Module]:
        """Return the outermost modules of which no weight is saved and some weight has changed since the run
        began."""
        changed = {}
        for module in modules:
            weights = [*module.parameters()]
            if any(map(self._has_changed, weights)) and not any(
                id(weight) in saved_ids for weight in weights
            ):
                changed[id(module)] = module
        inner = {
            id(child) for module in changed.values() for child in module.modules() if child is not module
        }
        outermost = [module for module_id, module in changed.items() if module_id not in inner]
        return list({id(unwrapped(module)): unwrapped(module) for module in outermost}.values())

    def _trained_loose_weights(self, live: LiveObjects, saved_ids: set[int]) -> list[torch.Tensor]:
        """Return the weights of optimizers that have changed, are not saved and are in no module."""
        in_modules = {id(weight) for module in live.modules for weight in module.parameters(recurse=False)}
        weights = {id(weight): weight for optimizer in live.optimizers for weight in weights_of(optimizer)}
        loose_ids = weights.keys() - in_modules - saved_ids
        return [
            weight
            for weight_id, weight in weights.items()
            if weight_id in loose_ids and self._has_changed(weight)
        ]

    def _has_changed(self, weight: torch.Tensor) -> bool:
        noted = self._weights.get(id(weight))
        return noted is not None and noted.has_changed(weight)


def _warning(item: object, change: str, name: str) -> str:
    """Return the warning of an object that is not saved. `name`: that of its variable, or ""."""
    label = f"{name} ({type(item).__name__})" if name else f"an object of {type(item).__name__}"
    argument = re.sub(r"\W+", "_", name).strip("_") or "name"
    remedy = f"it, as {argument}={name or '...'}"
    if _is_generator(item):
        remedy = (
            "an object that has its state, or draw from torch, numpy or random, which are seeded for each "
            "step"
        )
    elif isinstance(item, torch.Tensor):
        remedy = f"a module that has it, as {argument}=nn.ParameterList([{name or '...'}])"
    return (
        f"warning: {label} {change} and is not saved, so a restart begins it anew: give Run {remedy}; if "
        f"that is meant, unsaved=[{name or '...'}]"
    )


def _live_objects() -> LiveObjects:
    """Find the modules, optimizers, schedules and scalers of this process."""
    live = LiveObjects([], [], [], [])
    for item in gc.get_objects():
        kind = type(item)  # not isinstance(), which asks some objects for their class, and these warn or fail
        if issubclass(kind, nn.Module):
            live.modules.append(item)
        elif issubclass(kind, Optimizer):
            live.optimizers.append(item)
        elif issubclass(kind, SCALER):
            live.scalers.append(item)
        elif issubclass(kind, SCHEDULES):
            live.schedules.append(item)
    # Some have not called the __init__() of torch's class: they are shells around others.
    modules = [item for item in live.modules if "_parameters" in vars(item)]
    return live._replace(
        modules=modules, optimizers=[item for item in live.optimizers if "param_groups" in vars(item)]
    )


def _owners(live: LiveObjects) -> Iterator[tuple[object, Iterable[torch.Tensor]]]:
    """Yield (module or optimizer, its weights)."""
    for module in live.modules:
        yield module, module.parameters(recurse=False)
    for optimizer in live.optimizers:
        yield optimizer, weights_of(optimizer)


def _checksum(weight: torch.Tensor) -> int:
    """Return a checksum of a few values, as what is written by way of `.data` has no new version;
    0 if there are none."""
    with contextlib.suppress(RuntimeError, TypeError):
        values = weight.detach()[
            tuple(slice(None, None, max(1, size // SAMPLED_VALUES)) for size in weight.shape)
        ]
        return zlib.crc32(values.reshape(-1).cpu().view(torch.uint8).numpy().tobytes())
    return 0


def _fingerprint(optimizer: Optimizer) -> Any:
    return fingerprint(list(optimizer.state.values()))


def _outermost(schedules: list[Any]) -> list[Any]:
    """Return the schedules that no other schedule wraps."""
    inner = {id(child) for schedule in schedules for child in getattr(schedule, "_schedulers", [])}
    return [schedule for schedule in schedules if id(schedule) not in inner]


def _steps_of(schedule: object) -> int:
    """Return the steps that a schedule has taken; of one that wraps others, the most of any."""
    return max([getattr(schedule, "last_epoch", 0), *map(_steps_of, getattr(schedule, "_schedulers", []))])


def _is_generator(value: object) -> bool:
    return issubclass(type(value), GENERATORS) and not issubclass(type(value), random.SystemRandom)


def _state(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return repr(generator.get_state().tolist())
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return repr(
        generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()
    )


# --- What a saved part saves --------------------------------------------------------------------------------


def _reachable_ids(parts: Iterable[object]) -> set[int]:
    """Return the ids of these objects and of all that they save along with themselves."""
    reachable: set[int] = set()
    level = {id(item): item for item in parts}
    for _ in range(DEEPEST):
        reachable.update(level)
        referents = (referent for item in level.values() for referent in _referents(item))
        level = {
            id(referent): referent for referent in referents if id(referent) not in reachable
        }  # each once, however many refer to it
    return reachable


def _referents(item: Any) -> Iterable[object]:
    """Return what an object saves along with itself, as far as references show it."""
    kind = type(item)
    if issubclass(kind, nn.Module) and "_modules" in vars(item):
        return [*item.modules(), *item.parameters()]
    if issubclass(kind, Optimizer):  # it saves what it knows of weights, and not the weights
        return [value for value in vars(item).values() if issubclass(type(value), Optimizer)]
    if issubclass(kind, SCHEDULES):
        return getattr(item, "_schedulers", [])
    if issubclass(kind, FunctionType):
        return [*(item.__closure__ or ()), *(item.__defaults__ or ())]
    if issubclass(kind, (ModuleType, FrameType, type, torch.Tensor)):
        return []
    if issubclass(kind, (list, tuple, dict)) and len(item) > MOST_ITEMS:
        return []
    methods = [vars(base)["state_dict"] for base in kind.__mro__ if "state_dict" in vars(base)]
    return [*gc.get_referents(item), *methods]


# --- The names of a script's variables ----------------------------------------------------------------------


def _variables() -> Iterator[tuple[str, object]]:
    """Yield (name, value) of the script's variables, and of their attributes and items."""
    for namespace in _namespaces():
        for name, value in namespace.items():
            yield name, value
            kind = type(value)
            if issubclass(kind, (list, tuple)) and len(value) <= MOST_ITEMS:
                yield from ((f"{name}[{index}]", item) for index, item in enumerate([*value]))
            elif issubclass(kind, dict) and len(value) <= MOST_ITEMS:
                yield from (
                    (f"{name}[{key!r}]", item) for key, item in [*value.items()] if isinstance(key, str)
                )
            elif not issubclass(kind, (ModuleType, type, FunctionType)):
                attributes = _attributes(value)
                for attribute, item in [*attributes.items(), *attributes.get("_modules", {}).items()]:
                    yield f"{name}.{attribute}", item


def _attributes(value: object) -> dict[str, Any]:
    """Return an object's __dict__ without running code of its class; {} if it has none."""
    with contextlib.suppress(AttributeError):
        attributes = object.__getattribute__(value, "__dict__")
        return attributes if type(attributes) is dict else {}
    return {}


def _namespaces() -> list[dict[str, Any]]:
    """Return copies of the script's variables: of its running functions, and its globals."""
    namespaces: dict[int, dict[str, Any]] = {}
    frame: Optional[FrameType] = sys._getframe()
    while frame:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in LIBRARY_PACKAGES:
            namespaces[id(frame.f_globals)] = {**frame.f_globals}
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                namespaces[id(frame)] = {**frame.f_locals}
                if sys.version_info < (3, 13) and not sys.gettrace():
                    frame.f_locals.clear()  # the frame's own copy, which would keep the tensors of this step
        frame = frame.f_back
    return list(namespaces.values())


def _names() -> dict[int, str]:
    """Return {id of an object: the name of a variable that holds it,
    or that has it as an attribute or an item}."""
    names: dict[int, str] = {}
    for name, value in sorted(_variables(), key=lambda pair: (not pair[0].isidentifier(), len(pair[0]))):
        if not name.startswith("_"):
            names.setdefault(id(value), name)
    return names
