"""What is known of an optimizer: its step as a pure function, that function's derivative, and torch's fused kernels.

The hyperparameters are those of the parameter's group at that step, as the scheduler has set them; the state is what
torch's optimizer keeps. Both are under torch's names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

State = Mapping[str, Tensor]
"""One parameter's optimizer state, by torch's names; empty before its first step."""

Hyperparameters = Mapping[str, Any]
"""One parameter's hyperparameters, by torch's names; a value may be a tensor that broadcasts to the parameter."""

Update = Callable[[Tensor, Tensor, State, Hyperparameters], tuple[Tensor, State]]
"""`(theta, gradient, state, hyperparameters) -> (theta, state)`: a step of one parameter; nothing is changed."""

COUNTER = "step"
"""The entry of an optimizer's state that counts its steps; nothing is differentiated with respect to it."""


@dataclass
class StepCotangents:
    """Cotangents of what a step starts from.

    Args:
        theta: one tensor a parameter.
        gradient: likewise, before it is multiplied by `factor`; None of a parameter that is left alone.
        state: one mapping a parameter, without the counter.
        factor: of all of `gradient`. So a plain SGD step needs no vector beside `theta`: its cotangents of the gradient
            are `-lr` times those.
    """

    theta: list[Tensor]
    gradient: list[Tensor | None]
    state: list[dict[str, Tensor]]
    factor: float = 1.0


@dataclass
class AlikeSteps:
    """The steps of parameters that share all hyperparameters and the number of the step, and cotangents after them."""

    theta: list[Tensor]
    gradient: list[Tensor]
    state: list[State]
    hyperparameters: Hyperparameters
    cotangent: list[Tensor]
    of_state: list[dict[str, Tensor]]


class FusedKernel:
    """A kernel of torch that steps many parameters at once.

    Args:
        name: of the form in torch that returns what it computes, `_fused_sgd`.

    Attributes:
        in_place: writes into its arguments; the learning rate is a number.
        pure: returns what becomes of its arguments, with a learning rate that is a tensor, as a trace records it.
        traced_in_place: the same as `in_place`, with a learning rate that is a tensor.
    """

    def __init__(self, name: str) -> None:
        self.in_place: Callable[..., Any] = getattr(torch, f"{name}_")
        self.pure = getattr(torch.ops.aten, name).tensor_lr
        self.traced_in_place = getattr(torch.ops.aten, f"{name}_").tensor_lr


@dataclass(frozen=True, eq=False)
class OptimizerRule:
    """How an optimizer steps. With `update` alone its steps are differentiated, unrolled and traced.

    Args:
        update: the step of one parameter as a pure function that autograd differentiates, with the values of the
            optimizer up to rounding.
        settings: of a group, those that the step depends on.
        state: by name of what the optimizer keeps of a parameter, the setting of the group without which it does not;
            None keeps it always. In the order of the kernels' arguments.
        derivative: the derivative of `update`, transposed, in closed form; None is by autograd.
        kernels: torch's fused ones.
        kernel: `settings of a group -> (the kernel among them, its keywords)`. Its other arguments are lists with one
            tensor a parameter: theta, the gradient, and each entry of the state.
        is_linear: whether theta after the step is linear in the gradient.
        steps_shards: whether the kernels step parameters that are divided among ranks.

    Attributes:
        vectors: names of the state in a parameter's shape.
        deciding: settings that decide about the state.
    """

    update: Update
    settings: tuple[str, ...] = ("lr",)
    state: Mapping[str, str | None] = field(default_factory=dict)
    derivative: Callable[[AlikeSteps], StepCotangents] | None = None
    kernels: tuple[FusedKernel, ...] = ()
    kernel: Callable[[Hyperparameters], tuple[FusedKernel, dict[str, Any]]] | None = None
    is_linear: bool = False
    steps_shards: bool = False

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the state in a parameter's shape."""
        return tuple(name for name in self.state if name != COUNTER)

    @property
    def deciding(self) -> tuple[str, ...]:
        """Settings that decide about the state."""
        return tuple(setting for setting in self.state.values() if setting is not None)

    def names(self, group: Hyperparameters) -> tuple[str, ...]:
        """Return the names of what is kept of each parameter of a group after a step."""
        return tuple(name for name, setting in self.state.items() if setting is None or group[setting])


def decayed(theta: Tensor, gradient: Tensor, hyperparameters: Hyperparameters) -> Tensor:
    """Return the gradient that is descended, with weight decay."""
    direction = -gradient if hyperparameters["maximize"] else gradient
    decay = hyperparameters["weight_decay"]
    return direction if is_zero(decay) else direction + decay * theta


def is_zero(value: Any) -> bool:
    """Say whether a hyperparameter is 0 and stays it: a learned value that happens to be 0 has a gradient."""
    return not isinstance(value, Tensor) and value == 0


def safe_sqrt(value: Tensor) -> Tensor:
    """Return the root; its derivative at 0 is infinite, and 0 * inf would be NaN: here it is 0."""
    # Not `> 0`, which is false of NaN: its root is NaN.
    is_other = value != 0
    return torch.where(is_other, value, 1.0).sqrt() * is_other


def mul(a: list[Tensor], b: list[Tensor] | float) -> list[Tensor]:
    """Return `a * b`, tensor by tensor."""
    return list(torch._foreach_mul(a, b))


def add(a: list[Tensor], b: list[Tensor], factor: float = 1.0) -> list[Tensor]:
    """Return `a + factor * b`, tensor by tensor."""
    return list(torch._foreach_add(a, b, alpha=factor))


def add_present(a: list[Tensor], b: Sequence[Tensor | None]) -> list[Tensor]:
    """Return `a + b`, tensor by tensor; `a` where b is None."""
    return [x if y is None else x + y for x, y in zip(a, b, strict=True)]
