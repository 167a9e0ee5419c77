"""Adam and AdamW of torch.optim, which torch's setting `decoupled_weight_decay` tells apart.

Sources: Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019 for decoupled weight decay.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW

from mlotool.core.tracing import is_tracing
from mlotool.problem.optimizers import rule
from mlotool.problem.optimizers.rule import AlikeSteps, FusedKernel, Hyperparameters, State

_ADAM, _ADAMW = FusedKernel("_fused_adam"), FusedKernel("_fused_adamw")
_SETTINGS = ("lr", "weight_decay", "eps", "amsgrad", "maximize")


def _update(theta: Tensor, gradient: Tensor, state: State, hyperparameters: Hyperparameters) -> tuple[Tensor, State]:
    """Return a step.

    m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
    theta = theta - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

    With decoupled weight decay `theta = (1 - lr weight_decay) theta` comes first, in the place of g's.
    """
    if hyperparameters.get("decoupled_weight_decay"):
        theta = theta * (1 - hyperparameters["lr"] * hyperparameters["weight_decay"])
        hyperparameters = {**hyperparameters, "weight_decay": 0.0}
    direction = rule.decayed(theta, gradient, hyperparameters)
    beta1, beta2 = hyperparameters["betas"]
    number = state[rule.COUNTER] + 1 if rule.COUNTER in state else torch.ones((), dtype=torch.float32)
    zeros = torch.zeros_like(theta)
    first = beta1 * state.get("exp_avg", zeros) + (1 - beta1) * direction
    second = beta2 * state.get("exp_avg_sq", zeros) + (1 - beta2) * direction * direction
    new_state = {rule.COUNTER: number, "exp_avg": first, "exp_avg_sq": second}
    largest = second
    if hyperparameters["amsgrad"]:
        largest = new_state["max_exp_avg_sq"] = torch.maximum(state.get("max_exp_avg_sq", zeros), second)
    # A trace does not know the number: it takes the powers of a tensor.
    count = number.double() if is_tracing() else float(number)
    scale = rule.safe_sqrt(largest) / (1 - beta2**count) ** 0.5 + hyperparameters["eps"]
    return theta - hyperparameters["lr"] / (1 - beta1**count) * (first / scale), new_state


def _derivative(steps: AlikeSteps) -> rule.StepCotangents:
    hyperparameters, cotangent, decay = steps.hyperparameters, steps.cotangent, steps.hyperparameters["weight_decay"]
    beta1, beta2 = hyperparameters["betas"]
    is_decoupled, lr = hyperparameters.get("decoupled_weight_decay"), hyperparameters["lr"]
    count = float(steps.state[0].get(rule.COUNTER, 0)) + 1
    sign = -1.0 if hyperparameters["maximize"] else 1.0
    slope = rule.mul(steps.gradient, sign) if sign < 0 else steps.gradient
    if decay != 0 and not is_decoupled:
        slope = rule.add(slope, steps.theta, decay)
    # The values of the step.
    first = rule.add(rule.mul(_kept(steps, "exp_avg"), beta1), slope, 1 - beta1)
    second = rule.add(rule.mul(_kept(steps, "exp_avg_sq"), beta2), rule.mul(slope, slope), 1 - beta2)
    before = _kept(steps, "max_exp_avg_sq") if hyperparameters["amsgrad"] else []
    largest = list(torch._foreach_maximum(second, before)) if hyperparameters["amsgrad"] else second
    root, correction = list(torch._foreach_sqrt(largest)), (1 - beta2**count) ** 0.5
    scale = list(torch._foreach_add(list(torch._foreach_div(root, correction)), hyperparameters["eps"]))
    # Their cotangents, backwards.
    over_scale = list(torch._foreach_div(rule.mul(cotangent, -lr / (1 - beta1**count)), scale))
    of_first = rule.add_present(over_scale, [kept.get("exp_avg") for kept in steps.of_state])
    of_scale = rule.mul(list(torch._foreach_div(rule.mul(over_scale, first), scale)), -0.5 / correction)
    # The root's derivative at 0 is infinite, and 0 * inf would be NaN; here it is 0, as in the step.
    of_largest = [torch.where(r > 0, value / r, 0.0) for value, r in zip(of_scale, root, strict=True)]
    of_second, of_state = of_largest, dict[str, list[Tensor]]()
    if hyperparameters["amsgrad"]:
        whole = rule.add_present(of_largest, [kept.get("max_exp_avg_sq") for kept in steps.of_state])
        # Of two that are equal each has half, as autograd has it.
        shares = [0.5 * ((a > b).to(a.dtype) + (a >= b)) for a, b in zip(second, before, strict=True)]
        of_second = rule.mul(whole, shares)
        of_state["max_exp_avg_sq"] = rule.add(whole, of_second, -1.0)
    of_second = rule.add_present(of_second, [kept.get("exp_avg_sq") for kept in steps.of_state])
    of_state |= {"exp_avg": rule.mul(of_first, beta1), "exp_avg_sq": rule.mul(of_second, beta2)}
    kept = enumerate(steps.state)
    state = [{name: values[place] for name, values in of_state.items() if name in before} for place, before in kept]
    of_slope = rule.add(rule.mul(of_first, 1 - beta1), rule.mul(of_second, slope), 2 * (1 - beta2))
    theta = cotangent
    if decay != 0:
        theta = rule.mul(cotangent, 1 - lr * decay) if is_decoupled else rule.add(cotangent, of_slope, decay)
    return rule.StepCotangents(theta, [*rule.mul(of_slope, sign)] if sign < 0 else [*of_slope], state)


def _kept(steps: AlikeSteps, name: str) -> list[Tensor]:
    pairs = zip(steps.state, steps.theta, strict=True)
    return [state[name] if name in state else torch.zeros_like(point) for state, point in pairs]


def _kernel(group: Hyperparameters) -> tuple[FusedKernel, dict[str, Any]]:
    beta1, beta2 = group["betas"]
    kernel = _ADAMW if group.get("decoupled_weight_decay") else _ADAM
    return kernel, dict({name: group[name] for name in _SETTINGS}, beta1=beta1, beta2=beta2)


_KERNELS, _ALL = (_ADAM, _ADAMW), (*_SETTINGS, "betas", "decoupled_weight_decay")
_STATE = {"exp_avg": None, "exp_avg_sq": None, "max_exp_avg_sq": "amsgrad", rule.COUNTER: None}
ADAM_RULE = rule.OptimizerRule(_update, _ALL, _STATE, _derivative, _KERNELS, _kernel, steps_shards=True)
RULES = {Adam: ADAM_RULE, AdamW: ADAM_RULE}
