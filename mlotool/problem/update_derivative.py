"""The derivative of a pure optimizer step, transposed: cotangents of its results in, of its arguments out.

A step acts on each number by itself, so its Jacobian is diagonal, and what autograd would find through the graph of
`mlotool.problem.update` is a handful of products. Here they are written down, for many parameters of a group at once.
Clipping, which mixes the numbers, and hyperparameters that are tensors are left to autograd.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlotool.core.gradient import pulled_back
from mlotool.problem.update import Hyperparameters, State, Update, adam, adamw, sgd

COUNTER = "step"
"""The entry of an optimizer's state that counts its steps; nothing is differentiated with respect to it."""

SMALLEST_CHUNK, MOST_CHUNKS = 2**16, 16
"""Adam's derivative holds 16 tensors beside each parameter, so it takes a sixteenth of a large model at once: then they
take the memory of one more vector. What is smaller than the first number is taken whole, since each call has a cost."""

Clip = Callable[[Sequence[Tensor | None]], tuple[Sequence[Tensor | None], Tensor | None]]
"""`gradient -> (gradient within its norm, norm)`."""

_Key = tuple[Any, ...]


@dataclass(frozen=True)
class StepArguments:
    """What one step of an optimizer is taken from.

    Args:
        update: the pure step of one parameter.
        theta: the parameters.
        gradient: before clipping; None of a parameter that is left alone.
        state: of the optimizer, one mapping a parameter.
        hyperparameters: of the optimizer, one mapping a parameter.
        clip: limits the gradient's norm; None leaves it.
    """

    update: Update
    theta: Sequence[Tensor]
    gradient: Sequence[Tensor | None]
    state: Sequence[State]
    hyperparameters: Sequence[Hyperparameters]
    clip: Clip | None = None


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
class _Part:
    """The parameters of a step that share all hyperparameters and the number of the step."""

    theta: list[Tensor]
    gradient: list[Tensor]
    state: list[State]
    hyperparameters: Hyperparameters
    cotangent: list[Tensor]
    of_state: list[dict[str, Tensor]]


def pull_back(
    step: StepArguments, cotangent: list[Tensor], of_state: list[dict[str, Tensor]] | None = None
) -> StepCotangents:
    """Return `(d (theta', state') / d (theta, gradient, state))^T` times cotangents.

    The two lists are taken over: what is found for a parameter takes the place of what was given, so that no vector is
    held twice.

    Args:
        step: the step.
        cotangent: of theta after it, one tensor a parameter.
        of_state: of the state after it, one mapping a parameter, without what has none; None has none at all.

    Example:
        >>> hyperparameters = dict(torch.optim.SGD([torch.zeros(1)], lr=0.1).defaults)
        >>> step = StepArguments(sgd, [torch.ones(2)], [torch.ones(2)], [{}], [hyperparameters])
        >>> found = pull_back(step, [torch.ones(2)])
        >>> found.factor, found.gradient
        (-0.1, [tensor([1., 1.])])
    """
    given = [{} for _ in cotangent] if of_state is None else of_state
    found = StepCotangents(cotangent, [None] * len(cotangent), given)
    gradient, unclipped = step.gradient, list[Tensor]()
    if step.clip is not None:
        with torch.enable_grad():
            leaves = [None if each is None else each.detach().requires_grad_() for each in gradient]
            unclipped = [each for each in leaves if each is not None]
            gradient = step.clip(leaves)[0]
    groups: dict[_Key, list[int]] = {}
    for position, slope in enumerate(gradient):
        if slope is None:
            # A parameter without a gradient passes through, with its state.
            given[position] = _held(step.state[position], given[position])
            continue
        key = _key(step.update, step.hyperparameters[position], step.state[position])
        # Tensors are not compared: each parameter has those of its own.
        groups.setdefault((position,) if key is None else key, []).append(position)
    rate = _plain_rate(step.update, groups, step.hyperparameters)
    if rate is not None:
        found.gradient = [None if slope is None else each for slope, each in zip(gradient, cotangent, strict=True)]
        found.factor = -rate
    else:
        for key, positions in groups.items():
            closed = _CLOSED.get(step.update) if len(key) > 1 else None
            for chunk in _chunks(step.theta, positions):
                _pull_back_part(closed or partial(_by_autograd, step.update), step, gradient, chunk, found)
    if step.clip is not None and unclipped:
        clipped = [each for each in gradient if each is not None]
        slopes = iter(pulled_back(clipped, unclipped, [each for each in found.gradient if each is not None]))
        found.gradient = [None if each is None else next(slopes) for each in found.gradient]
    return found


def _plain_rate(
    update: Update, groups: Mapping[_Key, Sequence[int]], hyperparameters: Sequence[Hyperparameters]
) -> float | None:
    """Return lr where all steps are `theta - lr gradient`, with one lr; else None."""
    if update is not sgd or len(groups) != 1:
        return None
    [(key, positions)] = groups.items()
    shared = hyperparameters[positions[0]]
    if len(key) == 1 or shared["momentum"] != 0 or shared["weight_decay"] != 0:
        return None
    return -float(shared["lr"]) if shared["maximize"] else float(shared["lr"])


def _chunks(theta: Sequence[Tensor], positions: Sequence[int]) -> Iterator[list[int]]:
    """Yield parameters that are taken at once."""
    most = max(SMALLEST_CHUNK, sum(theta[each].numel() for each in positions) // MOST_CHUNKS)
    chunk, size = list[int](), 0
    for position in positions:
        count = theta[position].numel()
        if chunk and size + count > most:
            yield chunk
            chunk, size = [], 0
        chunk.append(position)
        size += count
    yield chunk


def _pull_back_part(
    closed: "Callable[[_Part], StepCotangents]",
    step: StepArguments,
    gradient: Sequence[Tensor | None],
    positions: Sequence[int],
    found: StepCotangents,
) -> None:
    """Put the cotangents of some parameters in the places of those of the step's results."""
    part = _Part(
        [step.theta[each] for each in positions],
        [_present(gradient[each]).detach() for each in positions],
        [step.state[each] for each in positions],
        step.hyperparameters[positions[0]],
        [found.theta[each] for each in positions],
        [found.state[each] for each in positions],
    )
    pulled = closed(part)
    for position, point, slope, state in zip(positions, pulled.theta, pulled.gradient, pulled.state, strict=True):
        found.theta[position], found.gradient[position], found.state[position] = point, slope, state


def _held(state: State, cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
    names = [name for name in state if name != COUNTER]
    return {name: cotangents[name] if name in cotangents else torch.zeros_like(state[name]) for name in names}


def _key(update: Update, hyperparameters: Hyperparameters, state: State) -> _Key | None:
    """Return what parameters of one group share; None where a hyperparameter is a tensor."""
    own = ("momentum", "dampening", "nesterov") if update is sgd else ("eps", "amsgrad")
    values = [hyperparameters[name] for name in ("lr", "weight_decay", "maximize", *own)]
    values += [] if update is sgd else hyperparameters["betas"]
    if any(isinstance(value, Tensor) for value in values):
        return None
    return (*values, "momentum_buffer" in state if update is sgd else _count(state))


def _sgd(part: _Part) -> StepCotangents:
    hyperparameters, cotangent = part.hyperparameters, part.cotangent
    momentum, decay = hyperparameters["momentum"], hyperparameters["weight_decay"]
    of_step = _mul(cotangent, -hyperparameters["lr"])
    of_slope, state = of_step, part.of_state
    if momentum != 0:
        whole = _mul(of_step, momentum) if hyperparameters["nesterov"] else of_step
        of_buffer = _plus(whole, [each.get("momentum_buffer") for each in part.of_state])
        is_first = "momentum_buffer" not in part.state[0]
        inflow = of_buffer if is_first else _mul(of_buffer, 1 - hyperparameters["dampening"])
        of_slope = _add(of_step, inflow) if hyperparameters["nesterov"] else inflow
        state = [{} if is_first else {"momentum_buffer": each} for each in _mul(of_buffer, momentum)]
    theta = _add(cotangent, of_slope, decay) if decay != 0 else cotangent
    return StepCotangents(list(theta), [*_mul(of_slope, -1.0)] if hyperparameters["maximize"] else [*of_slope], state)


def _adam(part: _Part, *, is_decoupled: bool = False) -> StepCotangents:
    hyperparameters, cotangent, decay = part.hyperparameters, part.cotangent, part.hyperparameters["weight_decay"]
    beta1, beta2 = hyperparameters["betas"]
    lr, count = hyperparameters["lr"], _count(part.state[0])
    sign = -1.0 if hyperparameters["maximize"] else 1.0
    slope = _mul(part.gradient, sign) if sign < 0 else part.gradient
    if decay != 0 and not is_decoupled:
        slope = _add(slope, part.theta, decay)
    # The values of the step.
    first = _add(_mul(_kept(part, "exp_avg"), beta1), slope, 1 - beta1)
    second = _add(_mul(_kept(part, "exp_avg_sq"), beta2), _mul(slope, slope), 1 - beta2)
    before = _kept(part, "max_exp_avg_sq") if hyperparameters["amsgrad"] else []
    largest = list(torch._foreach_maximum(second, before)) if hyperparameters["amsgrad"] else second
    root, correction = list(torch._foreach_sqrt(largest)), (1 - beta2**count) ** 0.5
    scale = list(torch._foreach_add(list(torch._foreach_div(root, correction)), hyperparameters["eps"]))
    # Their cotangents, backwards.
    over_scale = list(torch._foreach_div(_mul(cotangent, -lr / (1 - beta1**count)), scale))
    of_first = _plus(over_scale, [each.get("exp_avg") for each in part.of_state])
    of_scale = _mul(list(torch._foreach_div(_mul(over_scale, first), scale)), -0.5 / correction)
    # The root's derivative at 0 is infinite, and 0 * inf would be NaN; here it is 0, as in the step.
    of_largest = [torch.where(r > 0, each / r, 0.0) for each, r in zip(of_scale, root, strict=True)]
    of_second = of_largest
    state: list[dict[str, Tensor]] = [{} for _ in cotangent]
    if hyperparameters["amsgrad"]:
        whole = _plus(of_largest, [each.get("max_exp_avg_sq") for each in part.of_state])
        # Of two that are equal each has half, as autograd has it.
        shares = [0.5 * ((a > b).to(a.dtype) + (a >= b)) for a, b in zip(second, before, strict=True)]
        of_second = _mul(whole, shares)
        _put(state, part, "max_exp_avg_sq", _add(whole, of_second, -1.0))
    of_second = _plus(of_second, [each.get("exp_avg_sq") for each in part.of_state])
    _put(state, part, "exp_avg", _mul(of_first, beta1))
    _put(state, part, "exp_avg_sq", _mul(of_second, beta2))
    of_slope = _add(_mul(of_first, 1 - beta1), _mul(of_second, slope), 2 * (1 - beta2))
    theta = cotangent
    if decay != 0:
        theta = _mul(cotangent, 1 - lr * decay) if is_decoupled else _add(cotangent, of_slope, decay)
    return StepCotangents(list(theta), [*_mul(of_slope, -1.0)] if sign < 0 else [*of_slope], state)


def _adamw(part: _Part) -> StepCotangents:
    return _adam(part, is_decoupled=True)


_CLOSED: dict[Update, Callable[[_Part], StepCotangents]] = {sgd: _sgd, adam: _adam, adamw: _adamw}


def _by_autograd(update: Update, part: _Part) -> StepCotangents:
    """Return the same by the graph of the step, for one parameter."""
    theta, gradient = part.theta[0].detach().requires_grad_(), part.gradient[0].detach().requires_grad_()
    names = [name for name in part.state[0] if name != COUNTER]
    held = {name: part.state[0][name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        after, state = update(theta, gradient, {**part.state[0], **held}, part.hyperparameters)
    outputs = [(after, part.cotangent[0])] + [(state[name], value) for name, value in part.of_state[0].items()]
    sources = [theta, gradient, *held.values()]
    found = pulled_back([y for y, _ in outputs], sources, [v for _, v in outputs])
    whole = [torch.zeros_like(x) if each is None else each for x, each in zip(sources, found, strict=True)]
    return StepCotangents([whole[0]], [whole[1]], [dict(zip(names, whole[2:], strict=True))])


def _count(state: State) -> float:
    return float(state[COUNTER]) + 1 if COUNTER in state else 1.0


def _kept(part: _Part, name: str) -> list[Tensor]:
    return [
        state[name] if name in state else torch.zeros_like(point)
        for state, point in zip(part.state, part.theta, strict=True)
    ]


def _put(state: list[dict[str, Tensor]], part: _Part, name: str, values: list[Tensor]) -> None:
    for each, before, value in zip(state, part.state, values, strict=True):
        if name in before:
            each[name] = value


def _present(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _mul(a: list[Tensor], b: list[Tensor] | float) -> list[Tensor]:
    return list(torch._foreach_mul(a, b))


def _add(a: list[Tensor], b: list[Tensor], factor: float = 1.0) -> list[Tensor]:
    return list(torch._foreach_add(a, b, alpha=factor))


def _plus(a: list[Tensor], b: Sequence[Tensor | None]) -> list[Tensor]:
    return [x if y is None else x + y for x, y in zip(a, b, strict=True)]
