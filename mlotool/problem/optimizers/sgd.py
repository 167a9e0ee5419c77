"""Stochastic gradient descent, `torch.optim.SGD`."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from mlotool.problem.optimizers import rule
from mlotool.problem.optimizers.rule import AlikeSteps, FusedKernel, Hyperparameters, State

_KERNEL = FusedKernel("_fused_sgd")
_SETTINGS = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")


def _update(theta: Tensor, gradient: Tensor, state: State, hyperparameters: Hyperparameters) -> tuple[Tensor, State]:
    """Return a step.

    d = g + weight_decay theta,   b = momentum b + (1 - dampening) d  (d at the first step)
    theta = theta - lr b          (lr (d + momentum b) with nesterov)
    """
    direction = rule.decayed(theta, gradient, hyperparameters)
    momentum, rate = hyperparameters["momentum"], hyperparameters["lr"]
    if not rule.is_zero(momentum):
        buffer = state.get("momentum_buffer")
        buffer = direction if buffer is None else momentum * buffer + (1 - hyperparameters["dampening"]) * direction
        direction = direction + momentum * buffer if hyperparameters["nesterov"] else buffer
        state = {"momentum_buffer": buffer}
    # One node of the graph in the place of two, where the rate is a number.
    moved = theta - rate * direction if isinstance(rate, Tensor) else torch.sub(theta, direction, alpha=rate)
    return moved, state


def _derivative(steps: AlikeSteps) -> rule.StepCotangents:
    hyperparameters, cotangent = steps.hyperparameters, steps.cotangent
    momentum, decay = hyperparameters["momentum"], hyperparameters["weight_decay"]
    sign, rate = -1.0 if hyperparameters["maximize"] else 1.0, hyperparameters["lr"]
    if momentum == 0 and decay == 0:
        return rule.StepCotangents(cotangent, [*cotangent], steps.of_state, -sign * float(rate))
    of_step = rule.mul(cotangent, -rate)
    of_slope, state = of_step, steps.of_state
    if momentum != 0:
        whole = rule.mul(of_step, momentum) if hyperparameters["nesterov"] else of_step
        of_buffer = rule.add_present(whole, [kept.get("momentum_buffer") for kept in steps.of_state])
        is_first = "momentum_buffer" not in steps.state[0]
        inflow = of_buffer if is_first else rule.mul(of_buffer, 1 - hyperparameters["dampening"])
        of_slope = rule.add(of_step, inflow) if hyperparameters["nesterov"] else inflow
        state = [{} if is_first else {"momentum_buffer": value} for value in rule.mul(of_buffer, momentum)]
    theta = rule.add(cotangent, of_slope, decay) if decay != 0 else cotangent
    return rule.StepCotangents(theta, [*rule.mul(of_slope, sign)] if sign < 0 else [*of_slope], state)


def _kernel(group: Hyperparameters) -> tuple[FusedKernel, dict[str, Any]]:
    return _KERNEL, dict({name: group[name] for name in _SETTINGS}, is_first_step=False)


_STATE = {"momentum_buffer": "momentum"}
SGD_RULE = rule.OptimizerRule(_update, _SETTINGS, _STATE, _derivative, (_KERNEL,), _kernel, is_linear=True)
RULES = {SGD: SGD_RULE}
