"""Functions that can be differentiated once.

Torch takes what such a function's backward returns for a constant, or raises where it cannot: behind one, a product of
double backward is zero, or lacks a part, and nothing says so.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.function import once_differentiable

from mlotool.core.errors import ConfigError
from mlotool.core.forward_mode import twice_differentiable_mode
from mlotool.core.rematerialization import graph_inside
from mlotool.core.replay import RandomState
from mlotool.problem.interface import LowerView

# All functions that the decorator makes share their code.
_MARK = once_differentiable(lambda ctx: None).__code__

# Nodes of the operators in `mlotool.core.decompositions.TWICE`.
_REPLACEABLE = re.compile(
    "(ScaledDotProduct.*Attention.*|WeightNormInterface|Hardsigmoid|MultiMarginLoss|MultilabelMarginLoss|EmbeddingBag"
    "|.*LinearCrossEntropy.*)Backward"
)

_REFUSAL = (
    "problems.{problem}.loss: found {name}, an autograd.Function whose backward is marked once_differentiable, so that "
    "double backward takes its derivatives for constants; expected functions that are differentiable twice. Write "
    "hypergradient: finite_difference (product: finite_difference, report_every: 0) for '{problem}', or write that "
    "backward in differentiable operations and remove the mark."
)


def twice_differentiable(view: LowerView, evaluate: Callable[[], Tensor]) -> Tensor:
    """Return a value of the loss whose gradient can be differentiated.

    Its graph is searched once a problem. Where operators are in it that fail in double backward, or are silently wrong
    there (fused attention, weight normalization), the loss is evaluated with equal ones from then on.

    Args:
        view: of the problem.
        evaluate: returns the value.

    Raises:
        ConfigError: it depends on the parameters through a function that is differentiable once.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = [torch.tensor([2.0], requires_grad=True)], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> twice_differentiable(view, lambda: view(theta, inputs)).tolist()
        1.0
    """
    name, traits = view.problem.name, view.problem.traits
    if traits.is_twice_differentiable:
        return evaluate()
    if not traits.replaces_operators:
        random = RandomState(view.devices)
        loss = evaluate()
        function = _found([loss.grad_fn], _marked)
        if function is not None:
            raise ConfigError(_REFUSAL.format(problem=name, name=function))
        if _found([loss.grad_fn], _replaceable) is None:
            traits.is_twice_differentiable = True
            return loss
        traits.replaces_operators = True
        random.restore()
    with twice_differentiable_mode(name):
        return evaluate()


def _marked(node: Any) -> str | None:
    function = getattr(node, "_forward_cls", None)
    if function is None or getattr(function.backward, "__code__", None) is not _MARK:
        return None
    return str(function.__name__)


def _replaceable(node: Any) -> str | None:
    return str(node.name()) if _REPLACEABLE.match(node.name()) else None


def _found(nodes: Iterable[Any], look: Callable[[Any], str | None]) -> str | None:
    """Return the first that `look` finds at a node of a graph, also inside blocks of `remat`."""
    seen, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # By itself, as what has been seen holds its tensors: then those of one block of `remat` at a time.
        name = look(node) or _found(graph_inside(node), look)
        if name is not None:
            return name
        waiting += [other for other, _ in node.next_functions]
    return None
