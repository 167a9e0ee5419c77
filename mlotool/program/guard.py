"""What a trace, or one program of several runs, may take, and what it holds fixed: looked at before every step.

Both run the operations that one evaluation has taken. What else takes part in a step is lost to them, and what Python
holds is fixed by them. So nothing is traced that has hooks. Unasked (`runner.trace=auto`) nothing is traced but code of
torch's and mlotool's. Where attributes, modes or parts of modules, or numbers, texts and small containers in Python of
the user's, are others than they were, no trace counts any more: in the attributes of modules and losses that are the
user's, and in the globals and closures that their functions read.
"""

import copy
import dataclasses
import inspect
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from types import CodeType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration

from mlotool.core.private import MODULE_HOOKS
from mlotool.core.unchanged import is_same
from mlotool.core.user_code import is_of_user
from mlotool.problem.optimizers.registry import has_step_hooks
from mlotool.problem.problem import Problem
from mlotool.problem.streams.batches import draws_nothing

# A container of more elements is data.
MOST_ELEMENTS = 10_000

# A tensor or an array of more numbers is data.
MOST_NUMBERS = 4_000_000

# What torch keeps in a module, but for its mode; hooks, parameters and submodules are looked at by themselves.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}

_OF_ALL_MODULES: tuple[dict[int, Any], ...] = tuple(getattr(registration, f"_global{name}") for name in MODULE_HOOKS)
_PACKAGES = frozenset(
    {"torch", "torchvision", "mlotool", "builtins", "collections", "functools", "operator", "_operator"}
)
_HIDDEN = (Iterator, random.Random, numpy.random.RandomState, numpy.random.Generator, torch.Generator)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque)
_ARRAYS = (Tensor, numpy.ndarray)


def why_unseen(problems: Sequence[Problem]) -> str | None:
    """Return why a trace of these problems would miss what takes part in their steps; None where nothing is known."""
    hidden = ((name, part) for name, part in reached(problems)[0] if isinstance(part, _HIDDEN))
    values = (f"{name}: an object that it uses gives other values each time ({type(x).__name__})" for name, x in hidden)
    return _hook_in(problems) or next(values, None)


def why_foreign(problem: Problem) -> str | None:
    """Return the first part of a problem's steps that has hooks or is neither torch's nor mlotool's code, in words.

    Its data are not part of a step.
    """
    optimizer, name = problem.optimizer, problem.name
    if hook := _hook_in([problem]):
        return hook
    if optimizer is not None and has_step_hooks(optimizer):
        return f"the optimizer of problems.{name} has hooks"
    kinds = ("loss", "optimizer", "scheduler", "hypergradient")
    parts: list[tuple[str, Any]] = [(f"the {kind} of problems.{name}", getattr(problem, kind)) for kind in kinds]
    for where, part in (*parts, *_modules_of(problem)):
        if not all(map(is_known, _held(part))):
            return f"{where} is code of yours, or holds some"
    return None


def _modules_of(problem: Problem) -> list[tuple[str, nn.Module]]:
    name, modules = problem.name, problem.module.named_modules()
    return [(f"the module of problems.{name} ({path or type(module).__name__})", module) for path, module in modules]


def may_change_between_ticks(problem: Problem) -> bool:
    """Say whether what a tick runs beside losses and modules may put other objects in the place of a problem's own.

    So may an optimizer, a scheduler, data and a hypergradient of a user's, and so does a problem that goes back to
    where it began.
    """
    settings = problem.settings
    parts = chain(*map(_held, (problem.optimizer, problem.scheduler, problem.hypergradient)))
    data = getattr(problem.stream, "dataset", None)
    parts = chain(parts, getattr(problem.stream, "code", ()))
    is_torchs = all(map(is_known, (problem.stream, *parts))) and (data is None or draws_nothing(data))
    return not is_torchs or settings.roll_back or settings.reset_to is not None


def is_known(part: Any) -> bool:
    """Say whether a part is a plain value, or of a package whose code a trace may take."""
    if isinstance(part, (*_PLAIN, Tensor)):
        return True
    definition = part if inspect.isroutine(part) or inspect.isclass(part) else type(part)
    package = (getattr(definition, "__module__", None) or "builtins").partition(".")[0]
    # A decorator gives a function the name of the one that it wraps, but not its file.
    return package in _PACKAGES and not is_of_user(definition)


def _held(part: Any, depth: int = 4) -> Iterator[Any]:
    """Yield a function or an object, and what it is bound with and holds."""
    yield part
    inside: Iterable[Any] = ()
    if isinstance(part, partial):
        inside = [part.func, *part.args, *part.keywords.values()]
    elif inspect.ismethod(part):
        inside = [part.__self__]
    elif isinstance(part, (Mapping, list, tuple, set, frozenset)):
        inside = part.values() if isinstance(part, Mapping) else part
    elif not (isinstance(part, (*_PLAIN, Tensor)) or inspect.isclass(part) or inspect.isroutine(part)):
        # Of a problem's module its submodules are told by themselves.
        inside = [value for key, value in getattr(part, "__dict__", {}).items() if key != "_modules"]
    for value in inside if depth else ():
        if isinstance(value, nn.Module):
            yield from value.modules()
        yield from _held(value, depth - 1)


def _hook_in(problems: Sequence[Problem]) -> str | None:
    """Return where hooks of a user's see steps or evaluations, on modules of problems or of what losses hold."""
    if any(_OF_ALL_MODULES):
        return "all modules of torch have a hook"
    modules = [part for problem in problems for part in _modules_of(problem)]
    held = [part for _, part in reached(problems)[0] if isinstance(part, nn.Module)]
    modules += [(f"a module that a loss holds ({type(part).__name__})", part) for part in held]
    return next((f"{where} has a hook" for where, module in modules if _is_hooked(module)), None)


def _is_hooked(module: nn.Module) -> bool:
    """Say whether a module or one of its parameters has a hook that is not torch's own (`spectral_norm`)."""
    origins = [getattr(hook, "__module__", None) or type(hook).__module__ for hook in _hooks_of(module)]
    has_own = any(_has_hook(x) for x in module._parameters.values() if x is not None)
    return has_own or any(origin.partition(".")[0] != "torch" for origin in origins)


def _hooks_of(module: nn.Module) -> list[Any]:
    return [hook for name in MODULE_HOOKS for hook in vars(module)[name].values()]


def _has_hook(x: Tensor) -> bool:
    return bool(x._backward_hooks or x._post_accumulate_grad_hooks)


class ChangeGuard:
    """Sees whether losses and modules are what they were when it was made, beside the values of their tensors.

    A look compares parts, modes and attributes of modules, settings of losses and what the user's code keeps elsewhere,
    by identity or as equal values: 0.2 us a place.

    Args:
        members: by member the problems of its program.
        pending: what the next look tells as changed, in words.
    """

    def __init__(self, members: Sequence[Sequence[Problem]], pending: str | None = None) -> None:
        self._members, self._pending = [list(problems) for problems in members], pending
        self.renew()

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy count as changed: the dict of a module's attributes is another one than the copy of that dict."""
        return ChangeGuard, (self._members, "a program, which is a copy,")

    def drop(self, number: int) -> None:
        """Forget a member that has left; what has changed until then is told by the next look."""
        self._pending, self._members[number] = self.change(), []
        self.renew()

    def hook(self) -> str | None:
        """Return where there is a hook of a user's now; None where there is none."""
        if any(_OF_ALL_MODULES) or any(self._hooks) or any(map(_has_hook, self._parameters)):
            return _hook_in([*chain(*self._members)])
        return None

    def change(self) -> str | None:
        """Return the place of what has changed since it was made, or renewed; None where nothing has."""
        pending, self._pending = self._pending, None
        if pending is None and (pending := self._changed()):
            self.renew()
        return pending

    def settle(self) -> None:
        """Take what there is now for what is held fixed, if it is something else; what `drop` has found stays."""
        if self._changed():
            self.renew()

    def renew(self) -> None:
        """Take what there is now for what is held fixed."""
        places: dict[Any, PythonPlace] = {}
        modules: dict[int, tuple[str, nn.Module]] = {}
        for problems in filter(None, self._members):
            parts, reached_places = reached(problems)
            modules |= {id(part): (name, part) for name, part in parts if isinstance(part, nn.Module)}
            # A global that several members read is looked at once.
            places |= {place.identity: place for place in reached_places if place.is_whole or _is_watched(place.value)}
            losses = [PythonPlace(f"problems.{problem.name}.loss", vars(problem), "loss") for problem in problems]
            places |= {place.identity: place for place in losses}
        self._spaces = [
            (f"{name}: {type(module).__name__}", space, {*space})
            for name, module in modules.values()
            for space in (vars(module), module._parameters, module._modules)
        ]
        parts_of = [PythonPlace(f"{owner}.{key}", x, key) for owner, x, keys in self._spaces for key in keys]
        self._places = [x for x in parts_of if x.key not in _OF_TORCH and x.identity not in places] + [*places.values()]
        self._parameters = [x for _, module in modules.values() for x in module._parameters.values() if x is not None]
        self._flags = [x.requires_grad for x in self._parameters]
        self._hooks = [vars(module)[name] for _, module in modules.values() for name in MODULE_HOOKS]
        # Of a container, which is the same object when it has changed in place, a copy.
        values = [place.value for place in self._places]
        self._kept = [copied_value(value) if _is_watched(value) else value for value in values]

    def _changed(self) -> str | None:
        """Return what is another than it was, in words."""
        for owner, space, keys in self._spaces:
            if len(space) != len(keys):
                return f"{owner}.{', '.join(map(str, keys ^ {*space}))}"
        if [x.requires_grad for x in self._parameters] != self._flags:
            return "a parameter's requires_grad"
        for place, kept in zip(self._places, self._kept, strict=True):
            # Most are in plain dicts, whose look costs less than the property's call.
            now = place.holder.get(place.key) if type(place.holder) is dict else place.value
            if now is not kept and (isinstance(now, Tensor) or not is_same_value(now, kept)):
                return place.owner
        return None


@dataclass(frozen=True, slots=True)
class PythonPlace:
    """A place that holds a value: a key of a dict or of a list, or an attribute of a class or of a closure's variable.

    Args:
        owner: in words, for messages.
        holder: what holds it.
        key: in it.
        is_attribute: whether it is an attribute.
        is_whole: whether all that its holder has is looked at: attributes of an object, settings of a bound function.
    """

    owner: str
    holder: Any
    key: Any
    is_attribute: bool = False
    is_whole: bool = False

    @property
    def identity(self) -> tuple[int, Any]:
        """The same whenever it is looked for."""
        return id(self.holder), self.key

    @property
    def value(self) -> Any:
        """What is there now."""
        try:
            return getattr(self.holder, self.key) if self.is_attribute else self.holder[self.key]
        except (AttributeError, ValueError, LookupError):
            # A variable without a value; a container that has become shorter.
            return None

    def put(self, value: Any) -> None:
        """Put a value there; a tuple has what it has."""
        if self.is_attribute:
            setattr(self.holder, self.key, value)
        elif not isinstance(self.holder, tuple):
            self.holder[self.key] = value


class PythonState:
    """The state of a program beside its parameters and buffers, before its losses are evaluated.

    Args:
        problems: of one program.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._problems = problems
        self._kept = [(place, place.value, copied_value(place.value)) for place in self._places()]
        spaces: list[Any] = [part.keywords if isinstance(part, partial) else part for _, part in reached(problems)[0]]
        spaces = [x if isinstance(x, dict) else vars(x) for x in spaces if isinstance(x, dict) or _is_users(x)]
        self._whole = [(holder, {*holder}) for holder in spaces]
        self._frozen = [
            (f"problems.{problem.name}", parameter, parameter.detach().clone())
            for problem in problems
            for parameter in problem.module.parameters()
            if not parameter.requires_grad
        ]
        parameters = [parameter for problem in problems for parameter in problem.module.parameters()]
        self._hooks = [(parameter, {*(parameter._backward_hooks or {})}) for parameter in parameters]
        self._numpy: Any = numpy.random.get_state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Put all of it back."""
        for holder, before in self._whole:
            for key in {*holder} - before:
                del holder[key]
        for place, value, kept in self._kept:
            _restore(place, value, kept)
        for _, parameter, kept in self._frozen:
            parameter.data.copy_(kept)
        for parameter, there in self._hooks:
            hooks: Any = parameter._backward_hooks or {}
            for key in {*hooks} - there:
                del hooks[key]
        numpy.random.set_state(self._numpy)
        random.setstate(self._python)

    def change(self) -> str | None:
        """Return what has changed, as a sentence."""
        if any({*(parameter._backward_hooks or {})} - there for parameter, there in self._hooks):
            return "evaluating a loss puts a hook on a parameter, which a trace does not call"
        known = {place.identity for place, _, _ in self._kept}
        # A tensor that is put in the place of one is most often a result that is kept to be looked at.
        changed = [
            place
            for place, value, kept in self._kept
            if (place.value is value or not isinstance(value, Tensor)) and not is_same_value(place.value, kept)
        ]
        new = [place for place in self._places() if place.identity not in known]
        for place in (*changed, *[place for place in new if not isinstance(place.value, Tensor)]):
            problem, _, owner = place.owner.partition(": ")
            return f"{problem}: evaluating its loss changes {owner}, which a trace would fix"
        for name, parameter, kept in self._frozen:
            if not is_same_value(parameter, kept):
                return f"{name}: evaluating its loss moves a frozen parameter, which a trace would fix"
        state: Any = numpy.random.get_state()
        is_drawn = state[2] != self._numpy[2] or not (state[1] == self._numpy[1]).all()
        if is_drawn or random.getstate() != self._python:
            return "a loss draws from numpy's or Python's global random numbers"
        return None

    def _places(self) -> list[PythonPlace]:
        """Return the places of values that can be compared later, and are no problem's parameters or buffers."""
        tensors = [x for problem in self._problems for x in (*problem.module.parameters(), *problem.module.buffers())]
        own = {*map(_memory, tensors)}
        parts, places = reached(self._problems)
        # What modules of torch's and mlotool's keep is for them to change.
        skipped = {id(vars(part)) for _, part in parts if isinstance(part, nn.Module) and not _is_users(part)}
        return [
            place
            for place in places
            # Traces are told apart by the modes of modules anyway.
            if id(place.holder) not in skipped
            and place.key != "training"
            and _is_kept(place.value)
            and not (isinstance(place.value, _ARRAYS) and _memory(place.value) in own)
        ]


def reached(problems: Sequence[Problem]) -> tuple[list[tuple[str, Any]], list[PythonPlace]]:
    """Return what one program's losses and modules are, call and hold, with the problem's name, and its places."""
    # The objects are kept, so that no other one takes its number.
    parts: dict[int, tuple[str, Any]] = {}
    places: dict[tuple[int, Any], PythonPlace] = {}
    for problem in problems:
        name, waiting = f"problems.{problem.name}", [problem.loss, *problem.module.modules()]
        while waiting and len(parts) < MOST_ELEMENTS:
            part = waiting.pop(0)
            if id(part) not in parts:
                parts[id(part)] = name, part
                inside = [*_places_of(f"{name}: ", part)]
                places.update({place.identity: place for place in inside if place.identity not in places})
                waiting += _parts(part)
                waiting += [x for x in (place.value for place in inside) if not isinstance(x, (Tensor, *_PLAIN))]
    return [*parts.values()], [*places.values()]


def _is_watched(value: Any) -> bool:
    """Say whether a value is compared before every step: all that can be but tensors and large arrays."""
    is_data = isinstance(value, Tensor) or (isinstance(value, numpy.ndarray) and value.size > MOST_ELEMENTS)
    return not is_data and _is_kept(value)


def copied_value(value: Any) -> Any:
    """Return what is compared with a value later."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (*_CONTAINERS, numpy.ndarray)) else value


def is_same_value(value: Any, kept: Any) -> bool:
    """Say whether a value is what it was when it was copied; NaN is equal to itself."""
    if value is kept:
        return True
    if isinstance(value, Tensor) and isinstance(kept, Tensor):
        return is_same(value, kept)
    if isinstance(value, numpy.ndarray) and isinstance(kept, numpy.ndarray):
        return numpy.array_equal(value, kept, equal_nan=value.dtype.kind in "fc")
    if type(value) is not type(kept) or not isinstance(value, (*_PLAIN, *_CONTAINERS, tuple)):
        return False
    try:
        return bool(value == kept or (value != value and kept != kept))
    except Exception:
        # Such as of tensors inside, which compare by their entries.
        return False


def _is_kept(value: Any) -> bool:
    """Say whether a copy of a value can be compared with it later: plain ones, small containers and tensors."""
    if isinstance(value, Tensor | numpy.ndarray):
        return (value.numel() if isinstance(value, Tensor) else value.size) <= MOST_NUMBERS
    if isinstance(value, _CONTAINERS):
        return len(value) <= MOST_ELEMENTS and not _richer(value)
    return isinstance(value, _PLAIN)


def _richer(container: Any) -> list[Any]:
    """Return the elements of a container that are more than plain values; of a large one of its first ones."""
    elements = islice(container.values() if isinstance(container, dict) else container, MOST_ELEMENTS)
    return [element for element in elements if not isinstance(element, _PLAIN)]


def _restore(place: PythonPlace, value: Any, kept: Any) -> None:
    """Put a value back, into the object that held it where it is one that changes in place."""
    if not is_same_value(value, kept):
        if isinstance(value, Tensor):
            value.data.copy_(kept)
        elif isinstance(value, numpy.ndarray):
            value[...] = kept
        else:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(kept)
    if place.value is not value:
        place.put(value)


def _memory(value: Any) -> int:
    """Return what tensors and arrays have in common that are views of one memory: where it begins."""
    if isinstance(value, numpy.ndarray):
        while isinstance(value.base, numpy.ndarray):
            value = value.base
        return int(value.__array_interface__["data"][0])
    is_plain = value.layout is torch.strided and not value.is_meta
    return int(value.untyped_storage().data_ptr()) if is_plain and value.numel() else id(value)


def _parts(part: Any) -> list[Any]:
    """Return what a part is bound with, and what a container or a module holds, where it is more than plain values."""
    if isinstance(part, partial):
        return [part.func, *part.args]
    if isinstance(part, nn.Module):
        return [*part.children(), *_hooks_of(part)]
    if inspect.ismethod(part):
        return [part.__self__, part.__func__]
    if inspect.isfunction(part):
        return [*(part.__defaults__ or ())] if is_of_user(part) else []
    return _richer(part) if isinstance(part, set | frozenset) else []


def _places_of(owner: str, part: Any) -> Iterator[PythonPlace]:
    """Yield where a function or an object keeps values: what it is bound with, attributes, globals and closures."""
    if isinstance(part, partial):
        yield from [PythonPlace(f"{owner}{key}", part.keywords, key, is_whole=True) for key in part.keywords]
    elif inspect.isfunction(part) or inspect.ismethod(part):
        yield from _places_of_code(owner, inspect.unwrap(part))
    elif isinstance(part, list | tuple | deque | dict):
        keys = [*part] if isinstance(part, dict) else [*range(len(part))]
        yield from [PythonPlace(f"{owner}element {key}", part, key) for key in keys] if _richer(part) else []
    elif isinstance(part, nn.Module) or _is_users(part):
        skipped = _OF_TORCH if isinstance(part, nn.Module) else ()
        for key in [key for key in vars(part) if key not in skipped]:
            yield PythonPlace(f"{owner}{type(part).__name__}.{key}", vars(part), key, is_whole=True)
    if not (inspect.isroutine(part) or inspect.isclass(part) or inspect.ismodule(part)):
        for kind in filter(is_of_user, type(part).__mro__):
            for key, value in vars(kind).items():
                if inspect.isfunction(value):
                    yield from _places_of_code(owner, inspect.unwrap(value))
                elif key[:2] != "__" and not inspect.isroutine(value):
                    yield PythonPlace(f"{owner}{kind.__name__}.{key}", kind, key, is_attribute=True)


def _places_of_code(owner: str, function: Any) -> Iterator[PythonPlace]:
    """Yield the globals and the variables of closures that a function of the user's reads, and defaults by name."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType) and is_of_user(function):
        for name in _names_in(code) & function.__globals__.keys():
            yield PythonPlace(f"{owner}{name}", function.__globals__, name)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            yield PythonPlace(f"{owner}{name}", cell, "cell_contents", is_attribute=True)
        for name in function.__kwdefaults__ or ():
            yield PythonPlace(f"{owner}{name}", function.__kwdefaults__, name)


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code and what is defined in it look up."""
    return {*code.co_names}.union(*[_names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)])


def _is_users(part: Any) -> bool:
    """Say whether a part has attributes, and is a user's object or one that holds what a user puts there."""
    if inspect.isroutine(part) or inspect.isclass(part) or inspect.ismodule(part) or not hasattr(part, "__dict__"):
        return False
    return is_of_user(part) or type(part).__module__ == "types" or dataclasses.is_dataclass(part)
