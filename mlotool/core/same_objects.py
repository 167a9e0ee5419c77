"""Whether objects that somebody else holds are still those that were there before, and tensors of the same form."""

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards


class SameObjects:
    """Remembers the objects that a function has found, and says later whether it finds the same ones again.

    Args:
        look: returns them; numbers count as the same only if they are the same object.

    Example:
        >>> settings = {"rate": 0.1}
        >>> same = SameObjects(lambda: list(settings.values()))
        >>> same(), settings.update(rate=0.2), same()
        (True, None, False)
    """

    __slots__ = ("_kept", "_look")

    def __init__(self, look: Callable[[], Sequence[Any]]) -> None:
        self._look = look
        self._kept = look()

    def __call__(self) -> bool:
        """Say whether they are the same."""
        now, kept = self._look(), self._kept
        return len(now) == len(kept) and all(map(is_, now, kept))

    def renew(self) -> None:
        """Remember those that are there now."""
        self._kept = self._look()


class SameForms:
    """Remembers sizes, strides, types and `requires_grad` of tensors, which `tensor.data = ...` may change.

    It asks as torch's compiler does, which is three times as fast as asking each tensor for each of them.

    Args:
        tensors: in order.

    Example:
        >>> weight = torch.ones(2, 3)
        >>> same = SameForms([weight])
        >>> weight.data = weight.data.mT
        >>> same([weight])
        False
    """

    __slots__ = ("_guards", "_number")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._number = len(tensors)
        self._guards: Any = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy remember nothing, so that its owner looks anew: what torch's compiler keeps cannot be copied."""
        return SameForms, ([],)

    def __call__(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether they are the same, asked where nothing else than before sees operations of torch."""
        return len(tensors) == self._number and bool(self._guards.check(*tensors))
