"""What a trace, or one program of several runs, may take, and what it holds fixed: looked at before every step.

Both run the operations that one evaluation has taken. What else takes part in a step is lost to them, and what Python
holds is fixed by them. So nothing is traced that has hooks. Unasked (`runner.trace=auto`) nothing is traced but code of
torch's and mlotool's. Where attributes, modes or parts of modules are others than they were, no trace counts any more.
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
from mlotool.problem.batch_fetcher import draws_nothing
from mlotool.problem.fused_step import has_step_hooks
from mlotool.problem.problem import Problem
from mlotool.program.python_places import OF_TORCH, PythonWatch, held_modules, hidden_state

_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_ALL_MODULES: tuple[dict[int, Any], ...] = (
    registration._global_forward_hooks,
    registration._global_forward_pre_hooks,
    registration._global_backward_hooks,
    registration._global_backward_pre_hooks,
)
_PACKAGES = frozenset(
    {"torch", "torchvision", "mlotool", "builtins", "collections", "functools", "operator", "_operator"}
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor)
_SEQUENCES = (list, tuple, set, frozenset)


def why_hooked(problem: Problem) -> str | None:
    """Return where hooks of a user's see steps or evaluations of a problem; None where there are none."""
    if any(_OF_ALL_MODULES):
        return "all modules of torch have a hook"
    for path, module in problem.module.named_modules():
        hooks = chain.from_iterable([vars(module)[name].values() for name in _OF_MODULES])
        if not all(map(_is_torchs, hooks)):
            return f"the module of problems.{problem.name} ({path or type(module).__name__}) has a hook"
    for key, parameter in problem.module.named_parameters():
        if _has_hook(parameter):
            return f"the parameter '{key}' of problems.{problem.name} has a hook"
    return None


def why_unseen(problems: Sequence[Problem]) -> str | None:
    """Return why a trace of these problems would miss what takes part in their steps; None where nothing is known."""
    return _hook_in(problems) or hidden_state(problems)


def _hook_in(problems: Sequence[Problem]) -> str | None:
    """Return where a hook of a user's is, on modules of problems or on those that their losses hold."""
    if hook := next(filter(None, map(why_hooked, problems)), None):
        return hook
    for module in held_modules(problems):
        on_parameters = [each for each in module._parameters.values() if each is not None and _has_hook(each)]
        if on_parameters or not all(map(_is_torchs, chain(*[vars(module)[name].values() for name in _OF_MODULES]))):
            return f"a module that a loss holds ({type(module).__name__}) has a hook"
    return None


def has_own_scheduler(problem: Problem) -> bool:
    """Say whether a problem's scheduler is a class of a user's, which may do anything after a step."""
    return problem.scheduler is not None and not _is_known(problem.scheduler)


def why_foreign(problem: Problem) -> str | None:
    """Return the first part of a problem's steps that has hooks or is neither torch's nor mlotool's code, in words.

    Its data are not part of a step.
    """
    optimizer, name = problem.optimizer, problem.name
    if hook := why_hooked(problem):
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
    optimizer, settings = problem.optimizer, problem.settings
    parts = chain.from_iterable(map(_with_parts, (optimizer, problem.scheduler, problem.hypergradient)))
    data = getattr(problem.stream, "dataset", None)
    is_known = all(map(_is_known, (problem.stream, *parts))) and (data is None or draws_nothing(data))
    return not is_known or settings.roll_back or settings.reset_to is not None


class Guard:
    """Sees whether losses and modules are what they were when it was made, beside the values of their tensors.

    Args:
        members: by member the problems of its program.
        with_modes: whether it counts as a change where a module goes to training or evaluation.
    """

    def __init__(self, members: Sequence[Sequence[Problem]], *, with_modes: bool) -> None:
        self._members = [list(each) for each in members]
        self._pending: str | None = None
        self._skipped = OF_TORCH if with_modes else OF_TORCH | {"training"}
        self.renew()

    def drop(self, number: int) -> None:
        """Forget a member that has left; what has changed until then is told by the next look."""
        self._pending = self.change()
        self._members[number] = []
        self.renew()

    def hook(self) -> str | None:
        """Return where there is a hook of a user's now; None where there is none."""
        on_parameters = [each for each in self._parameters if each._backward_hooks or each._post_accumulate_grad_hooks]
        are_more = any(len(each) != count for each, count in self._own_hooks)
        if not (are_more or any(self._hooks) or on_parameters):
            return None
        return _hook_in(self._problems)

    def change(self) -> str | None:
        """Return the place of what has changed since it was made, or renewed; None where nothing has."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            return pending
        if self._is_same():
            return self._watch.change()
        before = self._values
        self.renew()
        places = [*before, *[place for place in self._values if place not in before]]
        changed = next((place for place in places if self._differs(before, place)), None)
        return None if changed is None else f"{changed[0]}{changed[1]}"

    def settle(self) -> None:
        """Take what there is now for what is held fixed, if it is something else; what `drop` has found stays."""
        if not self._is_same() or self._watch.change() is not None:
            self.renew()

    def renew(self) -> None:
        """Take what there is now for what is held fixed."""
        self._problems = [*chain(*self._members)]
        named = [(f"problems.{each.name}: ", module) for each in self._problems for module in each.module.modules()]
        held = [module for each in self._members for module in held_modules(each)]
        named += [("a loss's ", module) for module in held]
        self._parameters = [
            parameter for _, module in named for parameter in module._parameters.values() if parameter is not None
        ]
        self._held = held
        # What torch itself has put there is part of a module, and stays.
        hooks = [*_OF_ALL_MODULES, *[vars(each)[name] for _, each in named for name in _OF_MODULES]]
        self._own_hooks = [(each, len(each)) for each in hooks if each and all(map(_is_torchs, each.values()))]
        self._hooks = [each for each in hooks if not (each and all(map(_is_torchs, each.values())))]
        spaces = [(f"{owner}{type(module).__name__}.", vars(module)) for owner, module in named]
        for each in self._problems:
            spaces += [(f"problems.{each.name}: {owner}", space) for owner, space in _spaces_of(each.loss)]
        self._spaces = [space for _, space in spaces]
        # One key more than there are, so that it is a tuple in any case.
        keys = [[key for key in space if key not in self._skipped] for _, space in spaces]
        self._getters = [
            (itemgetter(*names, names[0]), space) for names, (_, space) in zip(keys, spaces, strict=True) if names
        ]
        inside = [
            (f"{owner}{type(module).__name__}.", space)
            for owner, module in named
            for space in (module._parameters, module._modules)
        ]
        self._inside = [space for _, space in inside]
        self._values = {
            (owner, str(key), id(space)): value
            for owner, space in (*inside, *spaces)
            for key, value in space.items()
            if key not in self._skipped
        }
        self._values |= {(f"problems.{each.name}.", "loss", id(each)): each.loss for each in self._problems}
        self._values |= {("a loss's module.", "training", id(each)): each.training for each in held}
        self._values |= {("a parameter's ", "requires_grad", id(each)): each.requires_grad for each in self._parameters}
        self._seen, self._objects = self._look(), self._look_at_objects()
        self._watch = PythonWatch(self._members)

    def _is_same(self) -> bool:
        now = self._look_at_objects()
        if len(now) != len(self._objects) or not all(map(is_, now, self._objects)):
            return False
        try:
            return bool(self._look() == self._seen)
        except Exception:
            # An attribute that is gone, or a tensor, which compares with another one by its entries.
            return False

    def _look(self) -> Any:
        values = [get(space) for get, space in self._getters]
        modes = [each.training for each in self._held]
        return values, modes, [*map(len, self._spaces)], [each.requires_grad for each in self._parameters]

    def _look_at_objects(self) -> list[Any]:
        return [*chain.from_iterable([each.values() for each in self._inside]), *[each.loss for each in self._problems]]

    def _differs(self, before: Mapping[Any, Any], place: Any) -> bool:
        if place not in before or place not in self._values:
            return True
        return not _is_equal(before[place], self._values[place])


def _spaces_of(loss: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return where a loss keeps values: the settings it is bound with, the attributes of an object."""
    found: list[tuple[str, dict[str, Any]]] = []
    while isinstance(loss, partial):
        found.append(("", loss.keywords))
        loss = loss.func
    owner = getattr(loss, "__self__", loss)
    is_object = not (inspect.isroutine(owner) or inspect.isclass(owner) or inspect.ismodule(owner))
    return [*found, (f"{type(owner).__name__}.", vars(owner))] if is_object and hasattr(owner, "__dict__") else found


def _is_equal(kept: Any, now: Any) -> bool:
    """Return whether what is in a place is the same, or an equal number, text or tuple of such."""
    if kept is now:
        return True
    if type(kept) is not type(now) or not isinstance(kept, bool | int | float | complex | str | tuple | type(None)):
        return False
    try:
        return bool(kept == now or (kept != kept and now != now))
    except Exception:
        return False


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
    if depth == 0 or isinstance(part, _PLAIN) or inspect.isroutine(part) or inspect.isclass(part):
        return
    if isinstance(part, Mapping):
        inside = [*part.values()]
    elif isinstance(part, _SEQUENCES):
        inside = [*part]
    elif dataclasses.is_dataclass(part):
        inside = [getattr(part, field.name, None) for field in dataclasses.fields(part)]
    else:
        # Of a module its submodules are told by themselves.
        inside = [each for key, each in vars(part).items() if key != "_modules"] if hasattr(part, "__dict__") else []
    for each in inside:
        if isinstance(each, _PLAIN):
            continue
        if isinstance(each, nn.Module):
            yield from each.modules()
            continue
        if not isinstance(each, (Mapping, *_SEQUENCES)):
            yield each
        yield from _held(each, depth - 1)
