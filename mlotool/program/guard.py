"""What a trace, or one program of several runs, may take, and what it holds fixed: looked at before every step.

Both run the operations that one evaluation has taken. What else takes part in a step is lost to them, and what Python
holds is fixed by them. So nothing is traced that has hooks. Unasked (`runner.trace=auto`) nothing is traced but code of
torch's and mlotool's. Where attributes, modes or parts of modules, or numbers, texts and small containers in Python of
the user's, are others than they were, no trace counts any more.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as registration

from mlotool.core.user_code import is_of_user
from mlotool.problem.batches import draws_nothing
from mlotool.problem.optimizers.registry import has_step_hooks
from mlotool.problem.problem import Problem
from mlotool.program.python_places import (
    copied_value,
    held_modules,
    hidden_state,
    is_same_value,
    is_watched,
    places,
)

# What torch keeps in a module, but for its mode; hooks, parameters and submodules are looked at by themselves.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_ALL_MODULES: tuple[dict[int, Any], ...] = tuple(getattr(registration, f"_global{name}") for name in _HOOKS)
_PACKAGES = frozenset(
    {"torch", "torchvision", "mlotool", "builtins", "collections", "functools", "operator", "_operator"}
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor)
_SEQUENCES = (list, tuple, set, frozenset)


def why_unseen(problems: Sequence[Problem]) -> str | None:
    """Return why a trace of these problems would miss what takes part in their steps; None where nothing is known."""
    return _hook_in(problems) or hidden_state(problems)


def has_own_scheduler(problem: Problem) -> bool:
    """Say whether a problem's scheduler is a class of a user's, which may do anything after a step."""
    return problem.scheduler is not None and not _is_known(problem.scheduler)


def why_foreign(problem: Problem) -> str | None:
    """Return the first part of a problem's steps that has hooks or is neither torch's nor mlotool's code, in words.

    Its data are not part of a step.
    """
    optimizer, name = problem.optimizer, problem.name
    if hook := _why_hooked(problem):
        return hook
    if optimizer is not None and has_step_hooks(optimizer):
        return f"the optimizer of problems.{name} has hooks"
    for what in ("loss", "optimizer", "scheduler", "hypergradient"):
        if not all(map(_is_known, _with_parts(getattr(problem, what)))):
            return f"the {what} of problems.{name} is code of yours, or holds some"
    for path, module in problem.module.named_modules():
        if not _is_known(module) or not all(map(_is_known, _held(module))):
            return f"the module of problems.{name} ({path or type(module).__name__}) is code of yours, or holds some"
    return None


def may_change_between_ticks(problem: Problem) -> bool:
    """Say whether what a tick runs beside losses and modules may put other objects in the place of a problem's own.

    So may an optimizer, a scheduler, data and a hypergradient of a user's, and so does a problem that goes back to
    where it began.
    """
    settings = problem.settings
    parts = chain(*map(_with_parts, (problem.optimizer, problem.scheduler, problem.hypergradient)))
    data = getattr(problem.stream, "dataset", None)
    is_known = all(map(_is_known, (problem.stream, *parts))) and (data is None or draws_nothing(data))
    return not is_known or settings.roll_back or settings.reset_to is not None


class Guard:
    """Sees whether losses and modules are what they were when it was made, beside the values of their tensors.

    A look compares attributes of modules and settings of losses by identity or as equal numbers, parts and modes of
    modules, and what the user's code keeps elsewhere (`python_places`): 50 ns a value.

    Args:
        members: by member the problems of its program.
        with_modes: whether it counts as a change where a module goes to training or evaluation.
    """

    def __init__(self, members: Sequence[Sequence[Problem]], *, with_modes: bool) -> None:
        self._members = [list(problems) for problems in members]
        self._pending: str | None = None
        self._skipped = _OF_TORCH if with_modes else _OF_TORCH | {"training"}
        self.renew()

    def drop(self, number: int) -> None:
        """Forget a member that has left; what has changed until then is told by the next look."""
        self._pending = self.change()
        self._members[number] = []
        self.renew()

    def hook(self) -> str | None:
        """Return where there is a hook of a user's now; None where there is none."""
        are_more = any(self._hooks) or any(len(hooks) != count for hooks, count in self._own_hooks)
        return _hook_in(self._problems) if are_more or any(map(_has_hook, self._parameters)) else None

    def change(self) -> str | None:
        """Return the place of what has changed since it was made, or renewed; None where nothing has."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            return pending
        if self._is_same():
            return None
        before = self._fixed
        self.renew()
        now = self._fixed
        changed = [
            place
            for place in {**before, **now}
            if place not in before or place not in now or not _is_equal(now[place][1], before[place][1])
        ]
        return (now.get(changed[0]) or before[changed[0]])[0] if changed else None

    def settle(self) -> None:
        """Take what there is now for what is held fixed, if it is something else; what `drop` has found stays."""
        if not self._is_same():
            self.renew()

    def renew(self) -> None:
        """Take what there is now for what is held fixed."""
        self._problems = [*chain(*self._members)]
        own = [
            (f"problems.{problem.name}: ", module) for problem in self._problems for module in problem.module.modules()
        ]
        held = [("a loss's ", module) for problems in self._members for module in held_modules(problems)]
        modules = [*own, *held]
        self._parameters = [x for _, module in modules for x in module._parameters.values() if x is not None]
        # What torch itself has put there is part of a module, and stays.
        hooks = [*_OF_ALL_MODULES, *[vars(module)[name] for _, module in modules for name in _HOOKS]]
        self._own_hooks = [(kept, len(kept)) for kept in hooks if kept and all(map(_is_torchs, kept.values()))]
        self._hooks = [kept for kept in hooks if not (kept and all(map(_is_torchs, kept.values())))]
        # By namespace what is held fixed: its owner, itself, and the keys in it.
        parts: list[tuple[str, Mapping[str, Any], list[str]]] = []
        spaces: list[tuple[str, Mapping[str, Any], list[str]]] = []
        for number, (owner, module) in enumerate(modules):
            # The modes of modules that losses hold are no part of what traces are told apart by.
            skipped = self._skipped if number < len(own) else _OF_TORCH
            keys = [key for key in vars(module) if key not in skipped]
            owner = f"{owner}{type(module).__name__}."
            parts += [(owner, space, [*space]) for space in (module._parameters, module._modules)]
            spaces.append((owner, vars(module), keys))
        for problem in self._problems:
            for owner, space in _bound(problem.loss):
                keys = [key for key in space if key not in self._skipped]
                spaces.append((f"problems.{problem.name}: {owner}", space, keys))
        self._counts = [space for _, space, _ in (*parts, *spaces)]
        spaces += [(f"problems.{problem.name}.", vars(problem), ["loss"]) for problem in self._problems]
        # A global that several members read is looked at once.
        watched = {place.identity: place for problems in self._members for place in places(problems)}
        by_holder: dict[int, tuple[str, Any, list[str]]] = {}
        for place in watched.values():
            is_torchs = place.key in _OF_TORCH and place.holder.keys() >= _OF_TORCH
            if is_watched(place.value) and not is_torchs:
                owner = place.owner.removesuffix(place.key)
                by_holder.setdefault(id(place.holder), (owner, place.holder, []))[2].append(place.key)
        spaces += by_holder.values()
        self._spaces = [space for _, space, _ in parts]
        # One key more than there are, so that it gives a tuple in any case.
        self._getters = [(itemgetter(*keys, keys[0]), space) for _, space, keys in spaces if keys]
        flat = [(owner, space, key) for owner, space, keys in parts for key in keys]
        flat += [(owner, space, key) for owner, space, keys in spaces if keys for key in (*keys, keys[0])]
        self._sizes = [*map(len, self._counts)]
        self._flags = [x.requires_grad for x in self._parameters]
        self._values = self._look()
        # Of a container, which is the same object when it has changed in place, a copy.
        self._kept = [copied_value(value) if is_watched(value) else value for value in self._values]
        names = [((id(space), key), f"{owner}{key}") for owner, space, key in flat]
        self._fixed = {place: (name, value) for (place, name), value in zip(names, self._kept, strict=True)}
        self._fixed |= {
            (id(x), "requires_grad"): ("a parameter's requires_grad", x.requires_grad) for x in self._parameters
        }
        pairs = [(value, copy) for value, copy in zip(self._values, self._kept, strict=True) if value is not copy]
        self._containers = [*{id(value): (value, copy) for value, copy in pairs}.values()]

    def _look(self) -> list[Any]:
        values = [*chain.from_iterable([space.values() for space in self._spaces])]
        return [*values, *chain.from_iterable([get(space) for get, space in self._getters])]

    def _is_same(self) -> bool:
        if [*map(len, self._counts)] != self._sizes or [x.requires_grad for x in self._parameters] != self._flags:
            return False
        try:
            now = self._look()
        except KeyError:
            return False
        if all(map(is_, now, self._values)):
            return all(is_same_value(value, copy) for value, copy in self._containers)
        return all(map(_is_equal, now, self._kept))


def _is_equal(now: Any, kept: Any) -> bool:
    """Say whether what is in a place is the same object, or an equal number, text or container of such."""
    return now is kept or (not isinstance(now, Tensor) and is_same_value(now, kept))


def _bound(loss: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return where a loss keeps values: the settings it is bound with, the attributes of an object."""
    spaces: list[tuple[str, dict[str, Any]]] = []
    while isinstance(loss, partial):
        spaces.append(("", loss.keywords))
        loss = loss.func
    owner = getattr(loss, "__self__", loss)
    is_object = not (inspect.isroutine(owner) or inspect.isclass(owner) or inspect.ismodule(owner))
    return [*spaces, (f"{type(owner).__name__}.", vars(owner))] if is_object and hasattr(owner, "__dict__") else spaces


def _hook_in(problems: Sequence[Problem]) -> str | None:
    """Return where a hook of a user's is, on modules of problems or on those that their losses hold."""
    if hook := next(filter(None, map(_why_hooked, problems)), None):
        return hook
    held = next(filter(_is_hooked, held_modules(problems)), None)
    return None if held is None else f"a module that a loss holds ({type(held).__name__}) has a hook"


def _why_hooked(problem: Problem) -> str | None:
    """Return where hooks of a user's see steps or evaluations of a problem; None where there are none."""
    if any(_OF_ALL_MODULES):
        return "all modules of torch have a hook"
    for path, module in problem.module.named_modules():
        if _is_hooked(module):
            return f"the module of problems.{problem.name} ({path or type(module).__name__}) has a hook"
    return None


def _is_hooked(module: nn.Module) -> bool:
    """Say whether a module or one of its parameters has a hook that is not torch's own."""
    hooks = chain.from_iterable([vars(module)[name].values() for name in _HOOKS])
    return not all(map(_is_torchs, hooks)) or any(_has_hook(x) for x in module._parameters.values() if x is not None)


def _has_hook(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _is_torchs(hook: Any) -> bool:
    """Say whether a hook is part of how a module of torch's works, such as `torch.nn.utils.spectral_norm`."""
    return (getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0] == "torch"


def _is_known(part: Any) -> bool:
    if isinstance(part, _PLAIN):
        return True
    definition = part if inspect.isroutine(part) or inspect.isclass(part) else type(part)
    package = (getattr(definition, "__module__", None) or "builtins").partition(".")[0]
    # A decorator gives a function the name of the one that it wraps, but not its file.
    return package in _PACKAGES and not is_of_user(definition)


def _with_parts(part: Any) -> Iterator[Any]:
    """Yield a function or an object, and what it is bound with and holds."""
    while isinstance(part, partial):
        yield from _held([*part.args, *part.keywords.values()])
        part = part.func
    yield part
    yield from _held([getattr(part, "__self__", None)])
    yield from _held(part)


def _held(part: Any, depth: int = 3) -> Iterator[Any]:
    """Yield functions, modules and objects in an object's attributes, and in containers there."""
    inside: Sequence[Any]
    if depth == 0 or isinstance(part, _PLAIN) or inspect.isroutine(part) or inspect.isclass(part):
        return
    if isinstance(part, (Mapping, *_SEQUENCES)):
        inside = [*(part.values() if isinstance(part, Mapping) else part)]
    elif dataclasses.is_dataclass(part):
        inside = [getattr(part, field.name, None) for field in dataclasses.fields(part)]
    else:
        # Of a module its submodules are told by themselves.
        inside = [value for key, value in getattr(part, "__dict__", {}).items() if key != "_modules"]
    for value in inside:
        if isinstance(value, nn.Module):
            yield from value.modules()
        elif not isinstance(value, _PLAIN):
            if not isinstance(value, (Mapping, *_SEQUENCES)):
                yield value
            yield from _held(value, depth - 1)
