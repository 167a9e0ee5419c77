"""Which rule an optimizer follows, and whether its steps are still those of the class."""

import inspect
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.problem.optimizers.rule import OptimizerRule

_FILES = [file for file in sorted(Path(__file__).parent.glob("*.py")) if "\nRULES = " in file.read_text("utf-8")]
# By exact class, for a subclass may step otherwise. A file beside this one that has RULES adds its own.
RULES: dict[type[Any], OptimizerRule] = {}
for _file in _FILES:
    RULES |= import_module(f"mlotool.problem.optimizers.{_file.stem}").RULES

# Settings of an optimizer that ask for another kernel than the fused one.
_OTHER_KERNELS = ("foreach", "differentiable", "capturable")
_GLOBAL_HOOKS = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
_STEPS: dict[Any, Any] = {kind: inspect.unwrap(kind.step) for kind in RULES}


def can_fuse(target: str, settings: Mapping[str, Any], parameters: Iterable[Any]) -> bool:
    """Say whether torch can update all parameters in one kernel: less than half of the time of a small step.

    Args:
        target: the optimizer's class, as `torch.optim.SGD`.
        settings: that it is to have.
        parameters: that it is to step.
    """
    fused = [f"torch.optim.{kind.__name__}" for kind, rule in RULES.items() if rule.kernels]
    is_free = target in fused and not any(settings.get(name) for name in _OTHER_KERNELS)
    return is_free and all(x.is_floating_point() and x.device.type in ("cpu", "cuda") for x in parameters)


def find_rule(problem: str, optimizer: Optimizer | None) -> OptimizerRule:
    """Return the rule that an optimizer follows.

    Args:
        problem: its name, for the message.
        optimizer: the problem's.

    Raises:
        ConfigError: there is none, or hooks see its steps.
    """
    rule = RULES.get(type(optimizer))
    if rule is not None and not has_step_hooks(optimizer):
        return rule
    key, advice = f"problems.{problem}.optimizer", f"Or choose an implicit hypergradient for '{problem}'."
    kinds = ", ".join(f"torch.optim.{kind.__name__}" for kind in RULES)
    require(rule is not None, key, optimizer, f"one of {kinds}, whose steps can be differentiated", advice)
    expected = "none, since these steps are differentiated, and hooks are not called in them"
    raise ConfigError(f"{key}.hooks: found hooks on its steps; expected {expected}. Remove them. {advice}")


def parts_of_step(optimizer: Any) -> list[Any]:
    """Return the objects that an optimizer's step consists of: its method, groups, parameters, what is kept of each.

    Beside them the numbers of hooks; they are small, and equal ones are the same object.
    """
    groups, state = optimizer.param_groups, optimizer.state
    kept = [entry for entry in state.values() if isinstance(entry, dict)]
    return [
        type(optimizer).step,
        vars(optimizer).get("step"),
        *map(len, (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, *_GLOBAL_HOOKS)),
        *groups,
        *chain(*[group["params"] for group in groups]),
        *state,
        *kept,
        *chain.from_iterable(map(dict.values, kept)),
    ]


def has_step_hooks(optimizer: Any) -> bool:
    """Return whether somebody wants to see an optimizer's steps: by hooks, or a method in the place of torch's."""
    own = optimizer.__dict__.get("step")
    kind: Any = type(optimizer)
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or any(_GLOBAL_HOOKS)
        or (own is not None and not _only_counts(own, kind.step))
        or (kind in _STEPS and not _is_torchs(kind, kind.step))
    )


@cache
def _is_torchs(kind: Any, step: Any) -> bool:
    """Return whether nobody has put another method into torch's class."""
    return inspect.unwrap(step) is _STEPS[kind]


def _only_counts(step: Any, wrapped: Any) -> bool:
    """Return whether a method is the one that a scheduler of torch's puts there, to count calls of the class's own."""
    is_torchs = getattr(getattr(step, "__code__", None), "co_filename", "") == lr_scheduler.__file__
    return is_torchs and getattr(step, "__wrapped__", None) is wrapped
