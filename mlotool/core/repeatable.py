"""Whether a block that is evaluated again is the function that it was: looked at for some of its calls.

A counter, a cache or a running mean in an attribute, Python's or numpy's random numbers, a generator of its own: any of
these makes of the second evaluation another function than the first one was, and its derivative is then that of a
network that nobody has evaluated. Nothing else would say so.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves

from mlotool.core.errors import ConfigError
from mlotool.core.fingerprint import fingerprint, tolerance
from mlotool.core.tangents import apart
from mlotool.core.tracing import is_tracing

_CHANGED = (
    "remat: found a block, {block}, that returned something else when it was evaluated again; expected the same "
    "function each time. Draw random numbers from torch's default generators alone (no random, no numpy, no generator= "
    "of your own), and keep what changes from call to call in a buffer, or leave this block out of remat."
)

_KEPT = (
    "remat: found a block whose {module} keeps a tensor that has a derivative in its attribute '{name}', as of an "
    "auxiliary loss; expected that a block returns what has derivatives, since the gradient of anything else would be "
    "lost. Return it as well, or keep it without one: self.{name} = x.detach()."
)

_calls: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()
"""By block; the first call of one, the second, the fourth and so on are looked at, since some blocks change later."""


class FirstResults:
    """What a block has returned, in two numbers a tensor.

    Args:
        block: which has.
        results: the tensors among what it has returned.

    Example:
        >>> first = FirstResults("a block", [torch.ones(2)])
        >>> first.compare([torch.ones(2)])  # nothing to refuse
    """

    def __init__(self, block: Any, results: Sequence[Tensor]) -> None:
        self._block = block
        self._numbers = _numbers(results)

    @classmethod
    def of(cls, block: Callable[..., Any], results: Sequence[Tensor]) -> "FirstResults | None":
        """Return them where this call of the block is looked at, and values can be read; else None."""
        # Functions are often made anew for each call, and share their code.
        key = block.__code__ if isinstance(block, FunctionType) else block
        try:
            number = _calls[key] = _calls.get(key, 0) + 1
        except TypeError:
            # It cannot be held weakly, or hashed.
            return None
        if number & (number - 1) or is_tracing() or not _can_be_read(results):
            return None
        return cls(key, results)

    def compare(self, results: Sequence[Tensor]) -> None:
        """Raise ConfigError unless these are the same results."""
        if not _can_be_read(results):
            return
        now = _numbers(results)
        pairs = zip(self._numbers, now, results, strict=False)
        if len(now) != len(self._numbers) or not all(_is_same(*pair) for pair in pairs):
            name = getattr(self._block, "co_name", None) or type(getattr(self._block, "block", self._block)).__name__
            raise ConfigError(_CHANGED.format(block=name))


class Attributes:
    """The tensors that modules keep in attributes of their own, before an evaluation.

    Args:
        modules: those of a block.

    Example:
        >>> before = Attributes([nn.Tanh()])
        >>> before.compare()  # nothing to refuse
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before = {key: tensor for key, _, tensor in self._kept()}

    def compare(self) -> None:
        """Raise ConfigError where the evaluation has left one that depends on something."""
        for key, module, tensor in self._kept():
            if tensor.grad_fn is not None and tensor is not self._before.get(key):
                raise ConfigError(_KEPT.format(module=type(module).__name__, name=key[1]))

    def _kept(self) -> Iterator[tuple[tuple[int, str, int], nn.Module, Tensor]]:
        for module in self._modules:
            for name, value in module.__dict__.items():
                if isinstance(value, Tensor | list | tuple | dict) and not _is_of_torch(module, name):
                    for number, each in enumerate(tree_leaves(value)):
                        if isinstance(each, Tensor):
                            yield (id(module), name, number), module, each


_OF_MODULES = frozenset([*nn.Module().__dict__, "_flat_weights"])


def _is_of_torch(module: nn.Module, name: str) -> bool:
    """Return whether an attribute has parameters, which are arguments of a call, or what hooks make of them anew.

    The hooks are those of `torch.nn.utils.weight_norm` and `spectral_norm`.
    """
    return name in _OF_MODULES or any(f"{name}_{each}" in module._parameters for each in ("orig", "v"))


def _can_be_read(results: Sequence[Tensor]) -> bool:
    return not any(is_functorch_wrapped_tensor(each) or each.is_meta for each in results)


def _numbers(results: Sequence[Tensor]) -> list[Tensor]:
    """Return the fingerprint of each tensor."""
    return [fingerprint(each) for each in apart(results)[0]]


def _is_same(before: Tensor, now: Tensor, result: Tensor) -> bool:
    # What has overflowed is no sign of anything.
    return not bool(((before - now).abs() > tolerance(result.dtype) * torch.maximum(before[1], now[1])).any())


def holds_tensors(value: Any) -> bool:
    """Return whether tensors are among the attributes or items of something that is no tensor itself.

    Args:
        value: any, as a dataclass.

    Example:
        >>> from types import SimpleNamespace
        >>> holds_tensors(SimpleNamespace(x=[torch.ones(1)])), holds_tensors("text")
        (True, False)
    """
    if value is None or isinstance(value, str | bytes | int | float | complex | type | nn.Module):
        return False
    if isinstance(value, Mapping):
        items: Any = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        items = list(value)
    else:
        slots = [name for each in type(value).__mro__ for name in each.__dict__.get("__slots__", ())]
        items = [*getattr(value, "__dict__", {}).values(), *[getattr(value, name, None) for name in slots]]
    return any(isinstance(each, Tensor) for each in tree_leaves(items))
