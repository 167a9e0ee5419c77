"""What a trace, or one program of several runs, may take, and what it holds fixed: looked at before every step.

Both run the operations that one evaluation has taken. What else takes part in a step is lost to them, and what Python
holds is fixed by them. So nothing is traced that has hooks. Unasked (`runner.trace=auto`) nothing is traced but code of
torch's and mlotool's. Where attributes, modes or parts of modules, or numbers, texts and small containers in Python of
the user's, are others than they were, no trace counts any more.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as registration

from mlotool.core.user_code import is_of_user
from mlotool.problem.batches import draws_nothing
from mlotool.problem.optimizers.registry import has_step_hooks
from mlotool.problem.problem import Problem
from mlotool.program.python_places import (
    HOOKS,
    PythonPlace,
    copied_value,
    hidden_state,
    hooks_of,
    is_same_value,
    is_watched,
    reached,
)

_OF_ALL_MODULES: tuple[dict[int, Any], ...] = tuple(getattr(registration, f"_global{name}") for name in HOOKS)
_PACKAGES = frozenset(
    {"torch", "torchvision", "mlotool", "builtins", "collections", "functools", "operator", "_operator"}
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor)


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
    if hook := _hook_in([problem]):
        return hook
    if optimizer is not None and has_step_hooks(optimizer):
        return f"the optimizer of problems.{name} has hooks"
    for what in ("loss", "optimizer", "scheduler", "hypergradient"):
        if not all(map(_is_known, _held(getattr(problem, what)))):
            return f"the {what} of problems.{name} is code of yours, or holds some"
    for path, module in problem.module.named_modules():
        if not all(map(_is_known, _held(module))):
            return f"the module of problems.{name} ({path or type(module).__name__}) is code of yours, or holds some"
    return None


def may_change_between_ticks(problem: Problem) -> bool:
    """Say whether what a tick runs beside losses and modules may put other objects in the place of a problem's own.

    So may an optimizer, a scheduler, data and a hypergradient of a user's, and so does a problem that goes back to
    where it began.
    """
    settings = problem.settings
    parts = chain(*map(_held, (problem.optimizer, problem.scheduler, problem.hypergradient)))
    data = getattr(problem.stream, "dataset", None)
    is_known = all(map(_is_known, (problem.stream, *parts))) and (data is None or draws_nothing(data))
    return not is_known or settings.roll_back or settings.reset_to is not None


class Guard:
    """Sees whether losses and modules are what they were when it was made, beside the values of their tensors.

    A look compares parts and attributes of modules, settings of losses and what the user's code keeps elsewhere
    (`python_places`), by identity or as equal values: 0.1 us a place.

    Args:
        members: by member the problems of its program.
        with_modes: whether it counts as a change where a module goes to training or evaluation.
    """

    def __init__(self, members: Sequence[Sequence[Problem]], *, with_modes: bool) -> None:
        self._members = [list(problems) for problems in members]
        self._with_modes = with_modes
        self._pending: str | None = None
        self.renew()

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy count as changed: the dict of a module's attributes is another one than the copy of that dict."""
        return _of_copies, (self._members, self._with_modes)

    def drop(self, number: int) -> None:
        """Forget a member that has left; what has changed until then is told by the next look."""
        self._pending = self.change()
        self._members[number] = []
        self.renew()

    def hook(self) -> str | None:
        """Return where there is a hook of a user's now; None where there is none."""
        if any(_OF_ALL_MODULES) or any(self._hooks) or any(map(_has_hook, self._parameters)):
            return _hook_in([*chain(*self._members)])
        return None

    def change(self) -> str | None:
        """Return the place of what has changed since it was made, or renewed; None where nothing has."""
        pending, self._pending = self._pending, None
        if pending is not None or self._is_same():
            return pending
        before = self._fixed()
        self.renew()
        now = self._fixed()
        changed = [
            identity
            for identity in {**before, **now}
            if identity not in before or identity not in now or not _is_equal(now[identity][1], before[identity][1])
        ]
        return (now.get(changed[0]) or before[changed[0]])[0] if changed else None

    def settle(self) -> None:
        """Take what there is now for what is held fixed, if it is something else; what `drop` has found stays."""
        if not self._is_same():
            self.renew()

    def renew(self) -> None:
        """Take what there is now for what is held fixed."""
        places: dict[Any, PythonPlace] = {}
        modules: dict[int, tuple[str, nn.Module]] = {}
        own: set[int] = set()
        for problems in filter(None, self._members):
            parts, found = reached(problems)
            modules |= {id(part): (name, part) for name, part in parts if isinstance(part, nn.Module)}
            own |= {id(vars(module)) for problem in problems for module in problem.module.modules()}
            # A global that several members read is looked at once.
            places |= {place.identity: place for place in found if place.is_whole or is_watched(place.value)}
            for problem in problems:
                loss = PythonPlace(f"problems.{problem.name}.loss", vars(problem), "loss")
                places[loss.identity] = loss
        parts_of = [
            PythonPlace(f"{name}: {type(module).__name__}.{key}", space, key)
            for name, module in modules.values()
            for space in (module._parameters, module._modules)
            for key in space
        ]
        places = {place.identity: place for place in parts_of} | places
        self._parameters = [x for _, module in modules.values() for x in module._parameters.values() if x is not None]
        self._hooks = [vars(module)[name] for _, module in modules.values() for name in HOOKS]
        # Traces are told apart by the modes of the problems' modules.
        skipped = set() if self._with_modes else own
        watched = [x for x in places.values() if x.key != "training" or id(x.holder) not in skipped]
        self._places = sorted(watched, key=lambda place: not isinstance(place.holder, dict))
        self._in_dicts = [(place.holder, place.key) for place in self._places if isinstance(place.holder, dict)]
        self._spaces = [
            space for _, module in modules.values() for space in (vars(module), module._parameters, module._modules)
        ]
        self._sizes = [*map(len, self._spaces)]
        self._flags = [x.requires_grad for x in self._parameters]
        self._values = self._look()
        # Of a container, which is the same object when it has changed in place, a copy.
        self._kept = [copied_value(value) if is_watched(value) else value for value in self._values]
        pairs = zip(self._values, self._kept, strict=True)
        self._containers = [(value, copy) for value, copy in pairs if value is not copy]

    def _fixed(self) -> dict[Any, tuple[str, Any]]:
        """Return what is held fixed, with its place in words."""
        flags, kept = zip(self._parameters, self._flags, strict=True), zip(self._places, self._kept, strict=True)
        found = {place.identity: (place.owner, value) for place, value in kept}
        return found | {(id(x), ""): ("a parameter's requires_grad", flag) for x, flag in flags}

    def _look(self) -> list[Any]:
        others = self._places[len(self._in_dicts) :]
        return [*[holder.get(key) for holder, key in self._in_dicts], *[place.value for place in others]]

    def _is_same(self) -> bool:
        if [*map(len, self._spaces)] != self._sizes or [x.requires_grad for x in self._parameters] != self._flags:
            return False
        now = self._look()
        if all(map(is_, now, self._values)):
            return all(is_same_value(value, copy) for value, copy in self._containers)
        return all(map(_is_equal, now, self._kept))


def _of_copies(members: Sequence[Sequence[Problem]], with_modes: bool) -> Guard:
    guard = Guard(members, with_modes=with_modes)
    guard._pending = "a program, which is a copy,"
    return guard


def _is_equal(now: Any, kept: Any) -> bool:
    """Say whether what is in a place is the same object, or an equal number, text or container of such."""
    return now is kept or (not isinstance(now, Tensor) and is_same_value(now, kept))


def _hook_in(problems: Sequence[Problem]) -> str | None:
    """Return where hooks of a user's see steps or evaluations, on modules of problems or of what losses hold."""
    if any(_OF_ALL_MODULES):
        return "all modules of torch have a hook"
    for problem in problems:
        for path, module in problem.module.named_modules():
            if _is_hooked(module):
                return f"the module of problems.{problem.name} ({path or type(module).__name__}) has a hook"
    held = (part for _, part in reached(problems)[0] if isinstance(part, nn.Module) and _is_hooked(part))
    return next((f"a module that a loss holds ({type(module).__name__}) has a hook" for module in held), None)


def _is_hooked(module: nn.Module) -> bool:
    """Say whether a module or one of its parameters has a hook that is not torch's own."""
    has_own = any(_has_hook(x) for x in module._parameters.values() if x is not None)
    return has_own or not all(map(_is_torchs, hooks_of(module)))


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


def _held(part: Any, depth: int = 4) -> Iterator[Any]:
    """Yield a function or an object, and what it is bound with and holds."""
    yield part
    inside: Iterable[Any] = ()
    if depth == 0 or isinstance(part, _PLAIN) or inspect.isclass(part):
        return
    if isinstance(part, partial):
        inside = [part.func, *part.args, *part.keywords.values()]
    elif inspect.isroutine(part):
        inside = [part.__self__] if inspect.ismethod(part) else []
    elif isinstance(part, Mapping):
        inside = part.values()
    elif isinstance(part, (list, tuple, set, frozenset)):
        inside = part
    elif dataclasses.is_dataclass(part):
        inside = [getattr(part, field.name, None) for field in dataclasses.fields(part)]
    else:
        # Of a problem's module its submodules are told by themselves.
        inside = [value for key, value in getattr(part, "__dict__", {}).items() if key != "_modules"]
    for value in inside:
        if isinstance(value, nn.Module):
            yield from value.modules()
        yield from _held(value, depth - 1)
