"""Functions that can be differentiated once.

Torch takes what such a function's backward returns for a constant, or raises where it cannot: behind one, a product of
double backward is zero, or lacks a part, and nothing says so.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.function import once_differentiable

from mlotool.core.errors import ConfigError
from mlotool.core.rematerialization import graph_inside
from mlotool.problem.interface import LowerView

# All functions that the decorator makes share their code.
_MARK = once_differentiable(lambda ctx: None).__code__

_REFUSAL = (
    "problems.{problem}.loss: found {name}, an autograd.Function whose backward is marked once_differentiable, so that "
    "double backward takes its derivatives for constants; expected functions that are differentiable twice. Write "
    "hypergradient: finite_difference (product: finite_difference, report_every: 0) for '{problem}', or write that "
    "backward in differentiable operations and remove the mark."
)


def check_twice_differentiable(view: LowerView, loss: Tensor) -> None:
    """Refuse a value of the loss that depends on the parameters through a function that is differentiable once.

    The graph is searched once a problem.

    Raises:
        ConfigError: it does.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = [torch.tensor([2.0], requires_grad=True)], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> check_twice_differentiable(view, view(theta, inputs))  # nothing to refuse
    """
    if view.problem.traits.is_twice_differentiable:
        return
    name = _once_differentiable([loss.grad_fn])
    if name is not None:
        raise ConfigError(_REFUSAL.format(problem=view.problem.name, name=name))
    view.problem.traits.is_twice_differentiable = True


def _once_differentiable(nodes: Iterable[Any]) -> str | None:
    """Return the name of a function in a graph that can be differentiated once; None where there is none."""
    seen, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(node, "_forward_cls", None)
        if function is not None and getattr(function.backward, "__code__", None) is _MARK:
            return str(function.__name__)
        # By itself, as what has been seen holds its tensors: then those of one block of `remat` at a time.
        name = _once_differentiable(graph_inside(node))
        if name is not None:
            return name
        waiting += [other for other, _ in node.next_functions]
    return None
