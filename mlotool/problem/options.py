"""Hypergradients and optimizers by the names of their options: conf/hypergradient/cg.yaml is "cg". No Hydra here."""

from collections.abc import Iterable, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from mlotool.core.arguments import is_number, require
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.folders.documents import read_document
from mlotool.folders.files import package_dir
from mlotool.problem.optimizers.registry import can_fuse

if TYPE_CHECKING:
    from mlotool.problem.optimizers.optimizer_step import OptimizerFactory

_TARGET = "_target_"


def hypergradient_of(problem: str, given: Any) -> Any:
    """Return a hypergradient: a name is that of an option of conf/hypergradient/, all else stays.

    Args:
        problem: the problem's name, for messages.
        given: to the problem.

    Raises:
        ConfigError: there is no such option.

    Example:
        >>> hypergradient_of("model", "neumann").solver
        Neumann(num_terms=5, step_size=0.1)
    """
    key = f"problems.{problem}.hypergradient"
    return _built(_option(key, "hypergradient", given)) if isinstance(given, str) else given


def optimizer_of(problem: str, given: Any, lr: float | None) -> "Optimizer | OptimizerFactory | None":
    """Return an optimizer or what makes one: a name is that of an option of conf/optimizer/, all else stays.

    Args:
        problem: the problem's name, for messages.
        given: to the problem.
        lr: the learning rate, for a name or a class; None leaves that of the option, or the class's own default.

    Raises:
        ConfigError: there is no such option, or `lr` stands beside an optimizer that has its learning rate already.

    Example:
        >>> optimizer_of("model", "sgd", 0.5)(nn.Linear(1, 1).parameters()).param_groups[0]["lr"]
        0.5
    """
    key, rate = f"problems.{problem}.optimizer", {} if lr is None else {"lr": lr}
    if lr is not None:
        taken, advice = "a name or a class beside lr", "Write optimizer='sgd' or torch.optim.SGD, or leave lr out."
        require(isinstance(given, str | type), key, given, taken, advice)
        require(is_number(lr) and lr >= 0, f"problems.{problem}.lr", lr, "a number of at least 0")
    if isinstance(given, str):
        node = _option(key, "optimizer", given)
        return partial(_optimizer, node[_TARGET], {**_settings(node), **rate})
    return partial(given, **rate) if rate else given


def _optimizer(target: str, settings: Mapping[str, Any], parameters: Iterable[nn.Parameter]) -> Optimizer:
    listed = list(parameters)
    fused = {"fused": True} if can_fuse(target, settings, listed) else {}
    made: Optimizer = resolve_name(target)(listed, **fused, **settings)
    return made


def _option(key: str, group: str, name: str) -> Mapping[str, Any]:
    """Return the node of an option."""
    files = {file.stem: file for file in sorted((package_dir("conf") / group).glob("*.yaml"))}
    if name not in files:
        raise ConfigError(
            f"{key}: found '{name}'; expected one of {', '.join(files)}, or an object.{did_you_mean(name, files)} "
            "Correct the name."
        )
    return read_document(files[name]).data


def _settings(node: Mapping[str, Any]) -> dict[str, Any]:
    # A reference, ${seed}, is to the recipe: without one, its class knows the default. YAML has no tuples (`betas`).
    values = {key: _built(value) for key, value in node.items() if key != _TARGET}
    is_plain = {key: not (isinstance(value, str) and "${" in value) for key, value in values.items()}
    return {key: tuple(x) if isinstance(x, list) else x for key, x in values.items() if is_plain[key]}


def _built(value: Any) -> Any:
    is_node = isinstance(value, Mapping) and _TARGET in value
    return resolve_name(value[_TARGET])(**_settings(value)) if is_node else value
