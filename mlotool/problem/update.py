"""The user's torch optimizer as pure functions, so that a step can be differentiated.

A step of one parameter is `update(theta, gradient, state, hyperparameters) -> (theta, state)`. The hyperparameters are
those of the parameter's group at that step, as the scheduler has set them; `state` holds what torch's optimizer keeps,
under its names. The values are those of torch's optimizers up to rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from mlotool.core.errors import ConfigError
from mlotool.core.gradient import values_of
from mlotool.core.tracing import is_tracing
from mlotool.problem.fused_step import has_step_hooks

State = Mapping[str, Tensor]
"""One parameter's optimizer state, by torch's names; empty before its first step."""

Hyperparameters = Mapping[str, Any]
"""One parameter's hyperparameters, by torch's names; a value may be a tensor that broadcasts to the parameter."""

Update = Callable[[Tensor, Tensor, State, Hyperparameters], tuple[Tensor, State]]


def sgd(theta: Tensor, gradient: Tensor, state: State, hyperparameters: Hyperparameters) -> tuple[Tensor, State]:
    """Return a step of stochastic gradient descent (`torch.optim.SGD`).

    d = g + weight_decay theta,   b = momentum b + (1 - dampening) d  (d at the first step)
    theta = theta - lr b          (lr (d + momentum b) with nesterov)
    """
    direction = _decayed(theta, gradient, hyperparameters)
    momentum = hyperparameters["momentum"]
    if _is_zero(momentum):
        return _moved(theta, direction, hyperparameters["lr"]), state
    buffer = state.get("momentum_buffer")
    buffer = direction if buffer is None else momentum * buffer + (1 - hyperparameters["dampening"]) * direction
    direction = direction + momentum * buffer if hyperparameters["nesterov"] else buffer
    return _moved(theta, direction, hyperparameters["lr"]), {"momentum_buffer": buffer}


def adam(theta: Tensor, gradient: Tensor, state: State, hyperparameters: Hyperparameters) -> tuple[Tensor, State]:
    """Return a step of Adam (`torch.optim.Adam`; Kingma & Ba 2015, algorithm 1).

    m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
    theta = theta - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
    """
    direction = _decayed(theta, gradient, hyperparameters)
    beta1, beta2 = hyperparameters["betas"]
    number = state["step"] + 1 if "step" in state else torch.ones((), dtype=torch.float32)
    zeros = torch.zeros_like(theta)
    first = beta1 * state.get("exp_avg", zeros) + (1 - beta1) * direction
    second = beta2 * state.get("exp_avg_sq", zeros) + (1 - beta2) * direction * direction
    found = {"step": number, "exp_avg": first, "exp_avg_sq": second}
    largest = second
    if hyperparameters["amsgrad"]:
        largest = found["max_exp_avg_sq"] = torch.maximum(state.get("max_exp_avg_sq", zeros), second)
    # A trace does not know the number: it takes the powers of a tensor.
    count = number.double() if is_tracing() else float(number)
    scale = _safe_sqrt(largest) / (1 - beta2**count) ** 0.5 + hyperparameters["eps"]
    return theta - hyperparameters["lr"] / (1 - beta1**count) * (first / scale), found


def adamw(theta: Tensor, gradient: Tensor, state: State, hyperparameters: Hyperparameters) -> tuple[Tensor, State]:
    """Return a step of Adam with decoupled weight decay (`torch.optim.AdamW`; Loshchilov & Hutter 2019).

    theta = (1 - lr weight_decay) theta, then a step of Adam without weight decay
    """
    decayed = theta * (1 - hyperparameters["lr"] * hyperparameters["weight_decay"])
    return adam(decayed, gradient, state, {**hyperparameters, "weight_decay": 0.0})


UPDATES: dict[type[Optimizer], Update] = {SGD: sgd, Adam: adam, AdamW: adamw}


def find_update(problem: str, optimizer: Optimizer | None) -> Update:
    """Return the pure update that mirrors an optimizer.

    Raises:
        ConfigError: none does, or hooks see its steps.
    """
    # Its exact type: a subclass may step otherwise.
    update = None if optimizer is None else UPDATES.get(type(optimizer))
    if update is adam and any(group.get("decoupled_weight_decay") for group in optimizer.param_groups):  # type: ignore[union-attr]
        return adamw
    if update is None:
        found = "nothing" if optimizer is None else type(optimizer).__name__
        raise ConfigError(
            f"problems.{problem}.optimizer: found {found}; expected one of "
            f"{', '.join(f'torch.optim.{each.__name__}' for each in UPDATES)}, whose steps can be differentiated. "
            f"Choose one of them, or an implicit hypergradient for '{problem}' (hypergradient=cg)."
        )
    if has_step_hooks(optimizer):
        raise ConfigError(
            f"problems.{problem}.optimizer: found hooks on its steps; expected none, since these steps are taken as "
            f"functions, which call no hooks. Remove them, or choose an implicit hypergradient for '{problem}' "
            "(hypergradient=cg) and no optimizer setting that another problem gives."
        )
    return update


def clipped(
    gradient: Sequence[Tensor | None],
    max_norm: float,
    num_tasks: int | None = None,
    total: Callable[[Sequence[Tensor | None]], Tensor] | None = None,
) -> tuple[list[Tensor | None], Tensor]:
    """Return the gradient with a 2-norm of at most `max_norm`, and its norm before.

    Args:
        gradient: one tensor a parameter; None where it is unused.
        max_norm: as for `torch.nn.utils.clip_grad_norm_`.
        num_tasks: length of the leading task axis, each of which is clipped by itself; None without one.
        total: where tensors are divided among ranks, returns the sum of the squares of all elements, from the squares
            of this rank's part of each tensor.

    Returns:
        The gradient, and the norm: 0-D, or one a task.
    """
    start = 0 if num_tasks is None else 1
    squares = [None if tensor is None else _squares(tensor).flatten(start).sum(start) for tensor in gradient]
    if total is None:
        norm = _safe_sqrt(torch.stack([square for square in squares if square is not None]).sum(0))
    else:
        norm = _safe_sqrt(total(squares))
    factor = (max_norm / (norm + 1e-6)).clamp_max(1.0)
    return [None if tensor is None else tensor * _on_axis(factor, tensor) for tensor in gradient], norm


def spread(key: str, value: Any, theta: Mapping[str, Tensor]) -> list[Any]:
    """Return a hyperparameter for each parameter of `theta`.

    Args:
        key: where it is set, for messages.
        value: a tensor of one element; a 1-D tensor with one element a parameter; or tensors by parameter name that
            broadcast to the parameter.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(value, Mapping) and set(value) == set(theta):
        return [value[name] for name in theta]
    if isinstance(value, Tensor) and value.numel() == 1:
        return [value.reshape(())] * len(theta)
    if isinstance(value, Tensor) and value.shape == (len(theta),):
        return list(value)
    found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r}"[:200]
    raise ConfigError(
        f"{key}: its problem's module gives {found}; expected one value, {len(theta)} values (one a parameter), or a "
        f"mapping with the keys {', '.join(theta)}. Correct the module's size, or what its forward returns."
    )


def _squares(tensor: Tensor) -> Tensor:
    values = values_of(tensor)
    return (values.abs() if values.is_complex() else values).square()


def _on_axis(factor: Tensor, tensor: Tensor) -> Tensor:
    """Return `factor`, 0-D or one a task, so that it multiplies a tensor with a leading task axis."""
    return factor if factor.dim() == 0 else factor.reshape(factor.shape + (1,) * (tensor.dim() - factor.dim()))


def _decayed(theta: Tensor, gradient: Tensor, hyperparameters: Hyperparameters) -> Tensor:
    direction = -gradient if hyperparameters["maximize"] else gradient
    decay = hyperparameters["weight_decay"]
    return direction if _is_zero(decay) else direction + decay * theta


def _moved(theta: Tensor, direction: Tensor, rate: Any) -> Tensor:
    # One node of the graph in the place of two, where the rate is a number.
    return theta - rate * direction if isinstance(rate, Tensor) else torch.sub(theta, direction, alpha=rate)


def _is_zero(value: Any) -> bool:
    # A learned value that happens to be 0 has a gradient all the same.
    return not isinstance(value, Tensor) and value == 0


def _safe_sqrt(value: Tensor) -> Tensor:
    # The root's derivative at 0 is infinite, and 0 * inf would be NaN; here it is 0.
    # Not `> 0`, which is false of NaN: its root is NaN.
    is_other = value != 0
    return torch.where(is_other, value, 1.0).sqrt() * is_other
