"""Tangents of gradients (forward over reverse) of losses that were written for gradients alone.

Three things in such a loss would otherwise fail, or go wrong without a word: operators without a derivative in forward
mode; `torch.no_grad()` and `.data`, which stop gradients and let tangents pass; and what cannot be had at all.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mlotool.core.decompositions import FORWARD, TWICE, Table
from mlotool.core.gradient_switches import GradientSwitches
from mlotool.core.not_differentiable import explained

_OPENED = frozenset({F.multi_head_attention_forward, torch.autograd.grad, torch.autograd.backward, Tensor.backward})
"""Functions of torch in Python that call operators of the tables, at once or in a backward pass."""


@contextmanager
def forward_mode(problem: str) -> Iterator[None]:
    """Evaluate a loss, and its backward pass, on tensors with tangents.

    Operators without forward mode are replaced by equal ones that have it (`core/decompositions`). What is computed
    under `torch.no_grad()`, and what `.data` returns, has no tangent, as it has no gradient.

    Args:
        problem: whose loss it is.

    Raises:
        ConfigError: the loss has an operator, or a construction, that has no tangents here.

    Example:
        >>> from torch.autograd import forward_ad
        >>> from mlotool.core.tangents import dual_level
        >>> with dual_level(), forward_mode("w"):
        ...     x = forward_ad.make_dual(torch.zeros(1), torch.ones(1))
        ...     gradient = torch.func.vjp(lambda x: F.silu(x).sum(), x)[1](torch.ones(()), create_graph=False)[0]
        ...     forward_ad.unpack_dual(gradient).tangent
        tensor([0.5000])
    """
    before = torch._C._is_fwd_grad_enabled()
    with explained(problem, "forward"), _slow_attention(), _uncompiled(), _Decomposition(FORWARD, GradientSwitches()):
        try:
            yield
        finally:
            torch._C._set_fwd_grad_enabled(before)


@contextmanager
def twice_differentiable_mode(problem: str) -> Iterator[None]:
    """Evaluate a loss whose gradient is differentiated by a second backward pass (reverse over reverse).

    Operators that fail there, or are silently wrong, are replaced by equal ones.

    Args:
        problem: whose loss it is.

    Raises:
        ConfigError: the loss has an operator that cannot be differentiated twice.

    Example:
        >>> x = torch.ones(2, 3, requires_grad=True)
        >>> with twice_differentiable_mode("w"):
        ...     loss = F.scaled_dot_product_attention(x, x, x).sum()
        ...     slope = torch.autograd.grad(loss, x, create_graph=True)[0]
        ...     bool(torch.autograd.grad(slope.square().sum(), x)[0].isfinite().all())
        True
    """
    with explained(problem, "reverse"), _slow_attention(), _uncompiled(), _Decomposition(TWICE):
        yield


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run what is compiled by torch.compile as it is written.

    A compiled function has no second derivatives, and takes the constants of its trace for the tangents of its inputs.
    """
    # It takes long to import.
    with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
        yield


@contextmanager
def _slow_attention() -> Iterator[None]:
    """Keep modules of attention from kernels for inference, which have no derivative.

    They take them wherever no tensor seems to require a gradient, as within `torch.vmap`.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Decomposition(TorchFunctionMode):
    """Puts other operators in the place of some.

    Args:
        table: from operators to these.
        switches: what follows `torch.no_grad` and its like.
    """

    def __init__(self, table: Table, switches: GradientSwitches | None = None) -> None:
        super().__init__()
        self._table = table
        self._switches = switches

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, or what stands in its place."""
        other = self._table.get(func)
        if other is not None:
            return other(*args, **(kwargs or {}))
        if func in _OPENED:
            with self:
                return _opened(func)(*args, **(kwargs or {}))
        if self._switches is not None and func is torch._C._set_grad_enabled:
            self._switches.follow(sys._getframe(1), *args)
        return func(*args, **kwargs) if kwargs else func(*args)


@cache
def _opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that does not ask modes to take its place, so that they see what it calls.

    Such a function calls the mode again when it is called under it, and for the mode's own call there is no mode.
    """
    assert isinstance(function, FunctionType)
    checks = [name for name in function.__globals__ if name.startswith("has_torch_function")]
    scope = {**function.__globals__, **dict.fromkeys(checks, lambda *_: False)}
    found = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    found.__kwdefaults__ = function.__kwdefaults__
    return found
