"""What is known of an optimizer: its step as a pure function, that function's derivative, and torch's fused kernels.

The hyperparameters are those of the parameter's group at that step, as the scheduler has set them; the state is what
torch's optimizer keeps. Both are under torch's names.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mlotool.core.gradient import pulled_back

# One tensor per parameter: a point or a direction in a problem's parameter space.
Vector = Sequence[Tensor]

# One parameter's optimizer state, by torch's names; empty before its first step.
State = Mapping[str, Tensor]

# One parameter's hyperparameters, by torch's names; a value may be a tensor that broadcasts to the parameter.
Hyperparameters = Mapping[str, Any]

# `(theta, gradient, state, hyperparameters) -> (theta, state)`: a step of one parameter; nothing is changed.
Update = Callable[[Tensor, Tensor, State, Hyperparameters], tuple[Tensor, State]]

# One tensor per parameter; None of one that is left alone.
Gradient = Sequence[Tensor | None]

States = Sequence[State]
# One mapping per parameter.
Rates = Sequence[Hyperparameters]

# Parameters and states after a step.
Stepped = tuple[list[Tensor], list[State]]

# The entry of an optimizer's state that counts its steps; nothing is differentiated with respect to it.
COUNTER = "step"


@dataclass
class StepCotangents:
    """Cotangents of what a step starts from.

    Args:
        theta: one tensor per parameter.
        gradient: likewise, before it is multiplied by `factor`; None of a parameter that is left alone.
        state: one mapping per parameter, without the counter.
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
    """

    def __init__(self, name: str) -> None:
        self.in_place: Callable[..., Any] = getattr(torch, f"{name}_")
        self.pure = getattr(torch.ops.aten, name).tensor_lr


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
            tensor per parameter: theta, the gradient, and each entry of the state.
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
    kernel: Any = None
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

    def values(self, hyperparameters: Hyperparameters) -> tuple[Any, ...] | None:
        """Return what the derivative in closed form depends on; None where there is none, as where one is a tensor."""
        values = [hyperparameters.get(name) for name in self.settings]
        if self.derivative is None or any(isinstance(value, Tensor) for value in values):
            return None
        return tuple([tuple(value) if isinstance(value, list) else value for value in values])


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


# Adam's derivative holds 16 tensors beside each parameter, so it takes a sixteenth of a large model at once: then they
# take the memory of one more vector. What is smaller than the first number is taken whole, since each call has a cost.
SMALLEST_CHUNK, MOST_CHUNKS = 2**16, 16

# `gradient -> (gradient within its norm, norm)`.
Clip = Callable[[Gradient], tuple[Gradient, Tensor | None]]


@dataclass(frozen=True)
class StepArguments:
    """What one step of an optimizer is taken from.

    Args:
        rule: of the optimizer.
        theta: the parameters.
        gradient: before clipping; None of a parameter that is left alone.
        state: of the optimizer, one mapping per parameter.
        hyperparameters: of the optimizer, one mapping per parameter.
        clip: limits the gradient's norm; None leaves it.
    """

    rule: OptimizerRule
    theta: Sequence[Tensor]
    gradient: Gradient
    state: States
    hyperparameters: Rates
    clip: Clip | None = None


def pull_back(
    step: StepArguments, cotangent: list[Tensor], of_state: list[dict[str, Tensor]] | None = None
) -> StepCotangents:
    """Return `(d (theta', state') / d (theta, gradient, state))^T` times cotangents.

    The two lists are taken over: what is found for a parameter takes the place of what was given, so that no vector is
    held twice.

    Args:
        step: the step.
        cotangent: of theta after it, one tensor per parameter.
        of_state: of the state after it, one mapping per parameter, without what has none; None has none at all.

    Example:
        >>> from mlotool.problem.optimizers.sgd import SGD_RULE
        >>> hyperparameters = dict(torch.optim.SGD([torch.zeros(1)], lr=0.1).defaults)
        >>> step = StepArguments(SGD_RULE, [torch.ones(2)], [torch.ones(2)], [{}], [hyperparameters])
        >>> found = pull_back(step, [torch.ones(2)])
        >>> found.factor, found.gradient
        (-0.1, [tensor([1., 1.])])
    """
    rule, rates = step.rule, step.hyperparameters
    given = [{} for _ in cotangent] if of_state is None else of_state
    cotangents = StepCotangents(cotangent, [None] * len(cotangent), given)
    gradient, leaves = step.gradient, list[Tensor | None]()
    if step.clip is not None:
        with torch.enable_grad():
            leaves = [None if value is None else value.detach().requires_grad_() for value in gradient]
            gradient = step.clip(leaves)[0]
    # Parameters with the same hyperparameters are taken together; learned ones are tensors of each.
    closed = {id(value): rule.values(value) for value in rates}
    groups: dict[Any, list[int]] = {}
    for position, slope in enumerate(gradient):
        state, key = step.state[position], closed[id(rates[position])]
        if slope is None:
            # A parameter without a gradient passes through, with its state.
            given[position] = _held(state, given[position])
        elif key is not None:
            count = float(state[COUNTER]) if COUNTER in state else None
            groups.setdefault((key, count, *state), []).append(position)
        else:
            groups[position] = [position]
    for key, positions in groups.items():
        derivative = rule.derivative if isinstance(key, tuple) else None
        for chunk in _chunks(step.theta, positions):
            steps = AlikeSteps(
                [step.theta[place] for place in chunk],
                [_present(gradient[place]).detach() for place in chunk],
                [step.state[place] for place in chunk],
                rates[chunk[0]],
                [cotangents.theta[place] for place in chunk],
                [cotangents.state[place] for place in chunk],
            )
            pulled = _by_autograd(rule.update, steps) if derivative is None else derivative(steps)
            if len(groups) == 1:
                cotangents.factor, pulled.factor = pulled.factor, 1.0
            for place, point, slope, state in zip(chunk, pulled.theta, pulled.gradient, pulled.state, strict=True):
                scaled = slope if pulled.factor == 1 else _present(slope) * pulled.factor
                cotangents.theta[place], cotangents.gradient[place], cotangents.state[place] = point, scaled, state
    if unclipped := _there(leaves):
        slopes = iter(pulled_back(_there(gradient), unclipped, _there(cotangents.gradient)))
        cotangents.gradient = [None if value is None else next(slopes) for value in cotangents.gradient]
    return cotangents


def _there(values: Gradient) -> list[Tensor]:
    return [value for value in values if value is not None]


def _chunks(theta: Sequence[Tensor], positions: Sequence[int]) -> Iterator[list[int]]:
    """Yield parameters that are taken at once."""
    most = max(SMALLEST_CHUNK, sum(theta[place].numel() for place in positions) // MOST_CHUNKS)
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


def _by_autograd(update: Update, steps: AlikeSteps) -> StepCotangents:
    """Return the same by the graph of the step, for one parameter."""
    theta, gradient = steps.theta[0].detach().requires_grad_(), steps.gradient[0].detach().requires_grad_()
    names = [name for name in steps.state[0] if name != COUNTER]
    held = {name: steps.state[0][name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        after, state = update(theta, gradient, {**steps.state[0], **held}, steps.hyperparameters)
    outputs = [(after, steps.cotangent[0])] + [(state[name], value) for name, value in steps.of_state[0].items()]
    sources = [theta, gradient, *held.values()]
    slopes = pulled_back([y for y, _ in outputs], sources, [v for _, v in outputs])
    whole = [torch.zeros_like(x) if entry is None else entry for x, entry in zip(sources, slopes, strict=True)]
    return StepCotangents([whole[0]], [whole[1]], [dict(zip(names, whole[2:], strict=True))])


def _present(value: Tensor | None) -> Tensor:
    assert value is not None
    return value
