"""Adam and AdamW of torch.optim, which torch's setting `decoupled_weight_decay` tells apart.

Sources: Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019 for decoupled weight decay.
"""

from typing import Any

import torch
from torch import Tensor

from mlotool.core.tracing import is_tracing
from mlotool.problem.optimizers.rule import (
    COUNTER,
    AlikeSteps,
    FusedKernel,
    Hyperparameters,
    OptimizerRule,
    State,
    StepCotangents,
    add,
    add_present,
    decayed,
    mul,
    safe_sqrt,
)

_ADAM, _ADAMW = FusedKernel("_fused_adam"), FusedKernel("_fused_adamw")


def _update(theta: Tensor, gradient: Tensor, state: State, hyperparameters: Hyperparameters) -> tuple[Tensor, State]:
    """Return a step.

    m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
    theta = theta - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

    With decoupled weight decay `theta = (1 - lr weight_decay) theta` comes first, in the place of g's.
    """
    if hyperparameters.get("decoupled_weight_decay"):
        theta = theta * (1 - hyperparameters["lr"] * hyperparameters["weight_decay"])
        hyperparameters = {**hyperparameters, "weight_decay": 0.0}
    direction = decayed(theta, gradient, hyperparameters)
    beta1, beta2 = hyperparameters["betas"]
    number = state[COUNTER] + 1 if COUNTER in state else torch.ones((), dtype=torch.float32)
    zeros = torch.zeros_like(theta)
    first = beta1 * state.get("exp_avg", zeros) + (1 - beta1) * direction
    second = beta2 * state.get("exp_avg_sq", zeros) + (1 - beta2) * direction * direction
    found = {COUNTER: number, "exp_avg": first, "exp_avg_sq": second}
    largest = second
    if hyperparameters["amsgrad"]:
        largest = found["max_exp_avg_sq"] = torch.maximum(state.get("max_exp_avg_sq", zeros), second)
    # A trace does not know the number: it takes the powers of a tensor.
    count = number.double() if is_tracing() else float(number)
    scale = safe_sqrt(largest) / (1 - beta2**count) ** 0.5 + hyperparameters["eps"]
    return theta - hyperparameters["lr"] / (1 - beta1**count) * (first / scale), found


def _derivative(steps: AlikeSteps) -> StepCotangents:
    hyperparameters, cotangent, decay = steps.hyperparameters, steps.cotangent, steps.hyperparameters["weight_decay"]
    beta1, beta2 = hyperparameters["betas"]
    is_decoupled, lr = hyperparameters.get("decoupled_weight_decay"), hyperparameters["lr"]
    count = float(steps.state[0].get(COUNTER, 0)) + 1
    sign = -1.0 if hyperparameters["maximize"] else 1.0
    slope = mul(steps.gradient, sign) if sign < 0 else steps.gradient
    if decay != 0 and not is_decoupled:
        slope = add(slope, steps.theta, decay)
    # The values of the step.
    first = add(mul(_kept(steps, "exp_avg"), beta1), slope, 1 - beta1)
    second = add(mul(_kept(steps, "exp_avg_sq"), beta2), mul(slope, slope), 1 - beta2)
    before = _kept(steps, "max_exp_avg_sq") if hyperparameters["amsgrad"] else []
    largest = list(torch._foreach_maximum(second, before)) if hyperparameters["amsgrad"] else second
    root, correction = list(torch._foreach_sqrt(largest)), (1 - beta2**count) ** 0.5
    scale = list(torch._foreach_add(list(torch._foreach_div(root, correction)), hyperparameters["eps"]))
    # Their cotangents, backwards.
    over_scale = list(torch._foreach_div(mul(cotangent, -lr / (1 - beta1**count)), scale))
    of_first = add_present(over_scale, [kept.get("exp_avg") for kept in steps.of_state])
    of_scale = mul(list(torch._foreach_div(mul(over_scale, first), scale)), -0.5 / correction)
    # The root's derivative at 0 is infinite, and 0 * inf would be NaN; here it is 0, as in the step.
    of_largest = [torch.where(r > 0, value / r, 0.0) for value, r in zip(of_scale, root, strict=True)]
    of_second, found = of_largest, dict[str, list[Tensor]]()
    if hyperparameters["amsgrad"]:
        whole = add_present(of_largest, [kept.get("max_exp_avg_sq") for kept in steps.of_state])
        # Of two that are equal each has half, as autograd has it.
        shares = [0.5 * ((a > b).to(a.dtype) + (a >= b)) for a, b in zip(second, before, strict=True)]
        of_second = mul(whole, shares)
        found["max_exp_avg_sq"] = add(whole, of_second, -1.0)
    of_second = add_present(of_second, [kept.get("exp_avg_sq") for kept in steps.of_state])
    found |= {"exp_avg": mul(of_first, beta1), "exp_avg_sq": mul(of_second, beta2)}
    state = [
        {name: values[place] for name, values in found.items() if name in kept}
        for place, kept in enumerate(steps.state)
    ]
    of_slope = add(mul(of_first, 1 - beta1), mul(of_second, slope), 2 * (1 - beta2))
    theta = cotangent
    if decay != 0:
        theta = mul(cotangent, 1 - lr * decay) if is_decoupled else add(cotangent, of_slope, decay)
    return StepCotangents(theta, [*mul(of_slope, sign)] if sign < 0 else [*of_slope], state)


def _kept(steps: AlikeSteps, name: str) -> list[Tensor]:
    return [
        state[name] if name in state else torch.zeros_like(point)
        for state, point in zip(steps.state, steps.theta, strict=True)
    ]


def _kernel(group: Hyperparameters) -> tuple[FusedKernel, dict[str, Any]]:
    beta1, beta2 = group["betas"]
    settings = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    return _ADAMW if group.get("decoupled_weight_decay") else _ADAM, {**settings, "beta1": beta1, "beta2": beta2}


ADAM_RULE = OptimizerRule(
    _update,
    ("amsgrad", "lr", "betas", "weight_decay", "eps", "maximize", "decoupled_weight_decay"),
    {"exp_avg": None, "exp_avg_sq": None, "max_exp_avg_sq": "amsgrad", COUNTER: None},
    _derivative,
    (_ADAM, _ADAMW),
    _kernel,
    steps_shards=True,
)
