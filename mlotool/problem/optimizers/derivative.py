"""The derivative of a pure optimizer step, transposed: cotangents of its results in, of its arguments out.

A step acts on each number by itself, so its Jacobian is diagonal, and what autograd would find through the graph of a
rule's update is a handful of products. A rule may write them down, for many parameters of a group at once. Clipping,
which mixes the numbers, and hyperparameters that are tensors are left to autograd.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlotool.core.gradient import pulled_back
from mlotool.problem.optimizers.rule import (
    COUNTER,
    AlikeSteps,
    Hyperparameters,
    OptimizerRule,
    State,
    StepCotangents,
    Update,
)

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
        rule: of the optimizer.
        theta: the parameters.
        gradient: before clipping; None of a parameter that is left alone.
        state: of the optimizer, one mapping a parameter.
        hyperparameters: of the optimizer, one mapping a parameter.
        clip: limits the gradient's norm; None leaves it.
    """

    rule: OptimizerRule
    theta: Sequence[Tensor]
    gradient: Sequence[Tensor | None]
    state: Sequence[State]
    hyperparameters: Sequence[Hyperparameters]
    clip: Clip | None = None


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
        >>> from mlotool.problem.optimizers.sgd import SGD_RULE
        >>> hyperparameters = dict(torch.optim.SGD([torch.zeros(1)], lr=0.1).defaults)
        >>> step = StepArguments(SGD_RULE, [torch.ones(2)], [torch.ones(2)], [{}], [hyperparameters])
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
        key = _key(step.rule, step.hyperparameters[position], step.state[position])
        groups.setdefault((position,) if key is None else key, []).append(position)
    for key, positions in groups.items():
        closed = step.rule.derivative if len(key) > 1 else None
        derivative = closed or partial(_by_autograd, step.rule.update)
        for chunk in _chunks(step.theta, positions):
            factor = _pull_back_chunk(derivative, step, gradient, chunk, found)
            if len(groups) == 1:
                found.factor = factor
            elif factor != 1:
                for position in chunk:
                    found.gradient[position] = _present(found.gradient[position]) * factor
    if step.clip is not None and unclipped:
        clipped = [each for each in gradient if each is not None]
        slopes = iter(pulled_back(clipped, unclipped, [each for each in found.gradient if each is not None]))
        found.gradient = [None if each is None else next(slopes) for each in found.gradient]
    return found


def _pull_back_chunk(
    derivative: Callable[[AlikeSteps], StepCotangents],
    step: StepArguments,
    gradient: Sequence[Tensor | None],
    chunk: Sequence[int],
    found: StepCotangents,
) -> float:
    """Put cotangents in the places of those of the step's results; return the factor of those of the gradient."""
    pulled = derivative(
        AlikeSteps(
            [step.theta[each] for each in chunk],
            [_present(gradient[each]).detach() for each in chunk],
            [step.state[each] for each in chunk],
            step.hyperparameters[chunk[0]],
            [found.theta[each] for each in chunk],
            [found.state[each] for each in chunk],
        )
    )
    for position, point, slope, state in zip(chunk, pulled.theta, pulled.gradient, pulled.state, strict=True):
        found.theta[position], found.gradient[position], found.state[position] = point, slope, state
    return pulled.factor


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


def _held(state: State, cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
    names = [name for name in state if name != COUNTER]
    return {name: cotangents[name] if name in cotangents else torch.zeros_like(state[name]) for name in names}


def _key(rule: OptimizerRule, hyperparameters: Hyperparameters, state: State) -> _Key | None:
    """Return what steps share that one call of the closed form takes; None where autograd takes each by itself."""
    values: list[Any] = []
    for name in rule.settings:
        value = hyperparameters.get(name)
        values += value if isinstance(value, list | tuple) else [value]
    # Tensors are not compared: each parameter has those of its own.
    if rule.derivative is None or any(isinstance(value, Tensor) for value in values):
        return None
    return (*values, *state, float(state[COUNTER]) if COUNTER in state else None)


def _by_autograd(update: Update, steps: AlikeSteps) -> StepCotangents:
    """Return the same by the graph of the step, for one parameter."""
    theta, gradient = steps.theta[0].detach().requires_grad_(), steps.gradient[0].detach().requires_grad_()
    names = [name for name in steps.state[0] if name != COUNTER]
    held = {name: steps.state[0][name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        after, state = update(theta, gradient, {**steps.state[0], **held}, steps.hyperparameters)
    outputs = [(after, steps.cotangent[0])] + [(state[name], value) for name, value in steps.of_state[0].items()]
    sources = [theta, gradient, *held.values()]
    found = pulled_back([y for y, _ in outputs], sources, [v for _, v in outputs])
    whole = [torch.zeros_like(x) if each is None else each for x, each in zip(sources, found, strict=True)]
    return StepCotangents([whole[0]], [whole[1]], [dict(zip(names, whole[2:], strict=True))])


def _present(value: Tensor | None) -> Tensor:
    assert value is not None
    return value
