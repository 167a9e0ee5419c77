"""What torch's functions need to be told about stand-ins for values, and what their names tell."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

_MADE_BY_SIZES = ("ones", "zeros", "empty", "rand", "randn")
_DRAWING = (
    "drop",
    "rand",
    "normal",
    "uniform",
    "bernoulli",
    "multinomial",
    "poisson",
    "exponential",
    "cauchy",
    "geometric",
    "rrelu",
    "gumbel",
)


@contextmanager
def sizes_in_tuples() -> Iterator[None]:
    """While it lasts, `torch.ones(n, n)` takes stand-ins for n: they are given in a tuple, which torch looks into.

    Example:
        >>> class Causal(torch.nn.Module):
        ...     def forward(self, x):
        ...         return torch.tril(torch.ones(x.shape[1], x.shape[1]))
        >>> with sizes_in_tuples():
        ...     graph = fx.symbolic_trace(Causal()).graph
        >>> [node.name for node in graph.nodes if node.op == "call_function"][-2:]
        ['ones', 'tril']
    """
    own = {name: getattr(torch, name) for name in _MADE_BY_SIZES}
    for name, function in own.items():
        setattr(torch, name, _in_a_tuple(function))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(torch, name, function)


def draws(node: fx.Node) -> bool:
    """Say whether an operation draws random numbers, by its name.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> [draws(graph.call_function(each, (x,))) for each in (torch.relu, torch.bernoulli)]
        [False, True]
    """
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return any(each in name for each in _DRAWING) and "normalize" not in name


def without_gradient(value: Any) -> Any:
    """Return a value that the forward has computed with gradients switched off, wherever it is computed again.

    Example:
        >>> without_gradient(torch.ones(1, requires_grad=True) * 2).requires_grad
        False
    """
    return tree_map_only(Tensor, Tensor.detach, value)


def casts() -> list[object]:
    """Return what autocast does now, on the CPU and on GPUs.

    Example:
        >>> casts()[0]
        (False, torch.bfloat16)
    """
    return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]


def _in_a_tuple(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*sizes: Any, **kwargs: Any) -> Any:
        if len(sizes) > 1 and any(issubclass(type(each), fx.Proxy) for each in sizes):
            return function(tuple(sizes), **kwargs)
        return function(*sizes, **kwargs)

    return call
