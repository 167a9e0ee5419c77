"""What a problem is: as the keys of a recipe, for the folder of a run, and in lines, for `print(program)`."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from inspect import isclass, isroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlotool.problem.problem import Problem

# Keys of an optimizer's groups that are no settings of a recipe.
_NOT_SETTINGS = ("params", "initial_lr", "fused", "foreach")


def path_of(target: Any) -> str:
    """Return the dotted name of a function or a class; of another object that of its class.

    Example:
        >>> path_of(partial(sum, start=1)), path_of(3)
        ('builtins.sum', 'builtins.int')
    """
    while isinstance(target, partial):
        target = target.func
    named = target if isroutine(target) or isclass(target) else type(target)
    return f"{named.__module__}.{named.__qualname__}"


def keys_of(problem: "Problem") -> dict[str, Any]:
    """Return what a recipe would have in `problems.<name>`, in plain values.

    Two scripts that make the same problem get the same; data and streams are left out.
    """
    settings = asdict(problem.settings)
    roles, training = settings.pop("optimizer_roles"), {True: "train", False: "eval"}
    played: dict[str, Any] = {role: value.problem for role, value in problem.roles.items()}
    modes = {role: training[value.training] for role, value in problem.roles.items() if value.training is not None}
    played |= {role: {"problem": played[role], "mode": mode} for role, mode in modes.items()}
    groups = [] if problem.optimizer is None else problem.optimizer.param_groups
    rates = _plain({key: value for group in groups[:1] for key, value in group.items() if key not in _NOT_SETTINGS})
    return {
        "module": {"_target_": path_of(problem.module), "num_parameters": num_trained(problem)},
        "loss": {"_target_": path_of(problem.loss), "roles": played},
        "optimizer": _node(problem.optimizer, rates | {key: {"problem": name} for key, name in roles.items()}),
        "scheduler": _node(problem.scheduler),
        "hypergradient": _settings_of(problem.hypergradient),
        "parallel": _node(problem.parallel),
        **_plain(settings),
    }


def num_trained(problem: "Problem") -> int:
    """Return how many numbers a problem trains, of all its tasks together."""
    return sum(tensor.numel() for tensor in problem.theta.values())


def formula_of(problem: "Problem", read: Collection[str] = ()) -> str:
    """Return what a problem minimizes: its loss, and whose modules play in it.

    Args:
        problem: any.
        read: the problems whose solutions its loss reads, which have a star.
    """
    names = dict.fromkeys(role.problem for role in problem.roles.values())
    players = ", ".join(f"{name}*" if name in read else name for name in names)
    return f"{path_of(problem.loss).rpartition('.')[2]}({players})"


def facts_of(problem: "Problem") -> str:
    """Return module, size, optimizer and batches of a problem, in a line."""
    count, dataset = num_trained(problem), getattr(problem.stream, "dataset", None)
    facts = [f"{type(problem.module).__name__} with {count:,} parameter{'s' * (count != 1)}"]
    if problem.settings.tasks is not None:
        facts[0] += f" in {problem.settings.tasks} tasks"
    if problem.optimizer is None:
        facts.append("no optimizer")
    else:
        rates = [f"lr={rate:.3g}" for group in problem.optimizer.param_groups if (rate := group.get("lr")) is not None]
        learned = [f"{key} of {name}" for key, name in problem.settings.optimizer_roles.items()]
        kept = rates if "lr" not in problem.settings.optimizer_roles else []
        facts.append(f"{type(problem.optimizer).__name__}({', '.join(dict.fromkeys([*kept, *learned]))})")
    size = getattr(problem.stream, "batch_size", None)
    if dataset is not None and size is not None:
        facts.append(f"batches of {size} out of {len(dataset):,} samples")
    elif problem.stream is not None:
        facts.append(type(problem.stream).__name__)
    return "; ".join(facts)


def _settings_of(value: Any) -> Any:
    """Return an algorithm as the node that would make it; other values plain."""
    if not is_dataclass(value) or isinstance(value, type):
        return _node(value)
    settings = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    nested = {key: _settings_of(x) if is_dataclass(x) else _plain_value(x) for key, x in settings.items()}
    return _node(value, nested)


def _node(value: Any, settings: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    return None if value is None else {"_target_": path_of(value), **(settings or {})}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain_value(value) for key, value in values.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain_value(item) for key, item in value.items()}
    # Not by repr, in which an object's address may stand.
    return value if isinstance(value, bool | int | float | str | None) else path_of(value)
