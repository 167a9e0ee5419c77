"""Functions that can be differentiated once.

Torch takes what such a function's backward returns for a constant, or raises where it cannot: behind one, a product of
double backward is zero, or lacks a part, and nothing says so.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlotool.core.decompositions import ONCE_IN_OLDER_TORCH
from mlotool.core.errors import ConfigError
from mlotool.core.forward_mode import twice_differentiable_mode
from mlotool.core.rematerialization import graph_inside
from mlotool.core.replay import LossTraits, RandomState

# All functions that the decorator makes share their code.
_MARK = once_differentiable(lambda ctx: None).__code__

# Nodes of the operators in `mlotool.core.decompositions.TWICE`, and of what torch.compile has made.
_NODES = (
    "CompiledFunction",
    *("ScaledDotProduct.*Attention.*", "WeightNormInterface", "Hardsigmoid", "MultiMarginLoss", "MultilabelMarginLoss"),
    *("EmbeddingBag", ".*LinearCrossEntropy.*", *ONCE_IN_OLDER_TORCH),
)
_REPLACEABLE = re.compile(f"({'|'.join(_NODES)})Backward")

_REFUSAL = (
    "problems.{problem}.loss: found {name}, an autograd.Function whose backward is marked once_differentiable, so that "
    "double backward takes its derivatives for constants; expected functions that are differentiable twice. Write "
    "hypergradient: finite_difference (product: finite_difference, report_every: 0) for '{problem}', or write that "
    "backward in differentiable operations and remove the mark."
)


def twice_differentiable(
    problem: str, traits: LossTraits, devices: tuple[torch.device, ...], evaluate: Callable[[], Tensor]
) -> Tensor:
    """Return a value of the loss whose gradient can be differentiated.

    Its graph is searched once a problem. Where operators are in it that fail in double backward, or are silently wrong
    there (fused attention, weight normalization), the loss is evaluated with equal ones from then on.

    Args:
        problem: whose loss it is.
        traits: of the loss; says from then on which it is.
        devices: CUDA devices whose generators are used.
        evaluate: returns the value.

    Raises:
        ConfigError: it depends on the parameters through a function that is differentiable once.

    Example:
        >>> theta, traits = torch.tensor([2.0], requires_grad=True), LossTraits()
        >>> twice_differentiable("w", traits, (), lambda: (theta ** 2).sum()).tolist(), traits.is_twice_differentiable
        (4.0, True)
    """
    if traits.is_twice_differentiable:
        return evaluate()
    if not traits.replaces_operators:
        random = RandomState(devices)
        loss = evaluate()
        function = _found([loss], _marked)
        if function is not None:
            raise ConfigError(_REFUSAL.format(problem=problem, name=function))
        if _found([loss], _replaceable) is None:
            traits.is_twice_differentiable = True
            return loss
        traits.replaces_operators = True
        random.restore()
    with twice_differentiable_mode(problem):
        return evaluate()


def _marked(node: Any) -> str | None:
    function = getattr(node, "_forward_cls", None)
    if function is None or getattr(function.backward, "__code__", None) is not _MARK:
        return None
    return str(function.__name__)


def _replaceable(node: Any) -> str | None:
    return str(node.name()) if _REPLACEABLE.match(node.name()) else None


def _found(tensors: Sequence[Tensor], look: Callable[[Any], str | None]) -> str | None:
    """Return the first that `look` finds at a node of the graph of tensors, also inside blocks of `remat`.

    The tensors are held meanwhile: without them torch 2.9 gives up what the nodes of functions have saved.
    """
    seen, waiting = set(), [each.grad_fn for each in tensors]
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
