"""Training steps in plain PyTorch that keep one graph from the first to the loss above: nothing of mlotool's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Vector = Sequence[Tensor]
Slopes = Sequence[Tensor | None]
Update = Callable[[Tensor, Tensor, dict[str, Tensor], int, Any], Tensor]
"""Parameter, gradient, state, the number of the step from 1 on, and learning rate in; the next parameter out."""

MOMENTUM, BETAS, EPSILON, DECAY = 0.9, (0.8, 0.9), 1e-3, 0.3
"""Of all optimizers here. With Adam's usual epsilon its first step is a sign, whose derivative is about zero."""


def sgd(theta: Tensor, slope: Tensor, state: dict[str, Tensor], number: int, lr: Any) -> Tensor:
    return theta - lr * slope


def momentum(theta: Tensor, slope: Tensor, state: dict[str, Tensor], number: int, lr: Any) -> Tensor:
    state["b"] = slope if number == 1 else MOMENTUM * state["b"] + slope
    return theta - lr * state["b"]


def adam(theta: Tensor, slope: Tensor, state: dict[str, Tensor], number: int, lr: Any) -> Tensor:
    for key, beta, value in zip("mv", BETAS, (slope, slope**2), strict=True):
        state[key] = beta * state.get(key, torch.zeros_like(theta)) + (1 - beta) * value
    first, second = (state[key] / (1 - beta**number) for key, beta in zip("mv", BETAS, strict=True))
    # The root has no derivative at zero, where the derivative of the step is that of m.
    root = torch.where(second > 0, torch.where(second > 0, second, 1.0).sqrt(), 0.0)
    return theta - lr * first / (root + EPSILON)


def adamw(theta: Tensor, slope: Tensor, state: dict[str, Tensor], number: int, lr: Any) -> Tensor:
    return adam(theta, slope, state, number, lr) - lr * DECAY * theta


UPDATES: dict[str, Update] = {"sgd": sgd, "momentum": momentum, "adam": adam, "adamw": adamw}


def call(module: nn.Module, theta: Vector, *inputs: Any) -> Any:
    """Return what a module gives at other parameters; its trainable ones are `theta`, buffers are a copy."""
    names = [name for name, each in module.named_parameters() if each.requires_grad]
    given = dict(zip(names, theta, strict=True)) | {name: each.clone() for name, each in module.named_buffers()}
    return functional_call(module, given, inputs)


@dataclass(frozen=True)
class PlainUnroll:
    """A lower problem that is trained for some steps, and a loss above of where that leads.

    Args:
        start: where it begins.
        loss: `(theta, meta, batch) -> loss`.
        goal: `(theta, meta) -> loss above`.
        update: of a parameter.
        rate: learning rate, or from meta to it.
        batches: by step, those that the gradient is averaged over.
        is_start: whether it begins at meta.
        clip: largest norm of a gradient.
        horizon: how many of the last steps are differentiated; None for all.
    """

    start: Vector
    loss: Callable[[Vector, Vector, Any], Tensor]
    goal: Callable[[Vector, Vector], Tensor]
    update: Update
    rate: float | Callable[[Vector], Tensor]
    batches: Sequence[Sequence[Any]]
    is_start: bool = False
    clip: float | None = None
    horizon: int | None = None

    def gradient(self, meta: Vector, *, is_second_order: bool = True) -> Tensor:
        """Return the derivative of the loss above with respect to meta, flat.

        Args:
            meta: what shapes the problem.
            is_second_order: false takes the gradients of steps for constants.
        """
        points = [each.detach().clone().requires_grad_() for each in meta]
        goal = self.goal(self.steps(points, is_second_order), points)
        if not goal.requires_grad:
            return torch.cat([torch.zeros_like(each).reshape(-1) for each in points])
        found = torch.autograd.grad(goal, points, materialize_grads=True)
        return torch.cat([each.reshape(-1) for each in found])

    def steps(self, meta: Vector, is_second_order: bool = True) -> list[Tensor]:
        """Return the parameters after all steps, in one graph from meta."""
        theta = [each.view_as(each) for each in (meta if self.is_start else self.start)]
        rate = self.rate(meta) if callable(self.rate) else self.rate
        states: list[dict[str, Tensor]] = [{} for _ in theta]
        for number, group in enumerate(self.batches, 1):
            if self.horizon is not None and number == len(self.batches) - self.horizon + 1:
                theta = [each.detach() for each in theta]
                states = [{key: value.detach() for key, value in each.items()} for each in states]
            slopes = self._slopes(theta, meta, group, is_second_order)
            theta = [
                x if g is None else self.update(x, g, state, number, rate)
                for x, g, state in zip(theta, slopes, states, strict=True)
            ]
        return theta

    def _slopes(self, theta: Vector, meta: Vector, group: Sequence[Any], is_second_order: bool) -> Slopes:
        at = [each if each.requires_grad else each.detach().requires_grad_() for each in theta]
        total: list[Tensor | None] = [None] * len(at)
        for batch in group:
            loss = self.loss(at, meta, batch)
            found = torch.autograd.grad(loss, at, create_graph=is_second_order, retain_graph=True, allow_unused=True)
            total = [a if b is None else b if a is None else a + b for a, b in zip(total, found, strict=True)]
        mean = [None if each is None else each / len(group) for each in total]
        if not is_second_order:
            mean = [None if each is None else each.detach() for each in mean]
        if self.clip is None:
            return mean
        norm = torch.stack([each.square().sum() for each in mean if each is not None]).sum().sqrt()
        factor = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        return [None if each is None else each * factor for each in mean]
