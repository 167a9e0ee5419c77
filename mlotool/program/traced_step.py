"""An optimizer's step inside a trace: a pure function of parameters, gradient, the optimizer's state and its rates."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlotool.core.unchanged import SameObjects
from mlotool.problem.optimizers.registry import RULES, find_rule, parts_of_step
from mlotool.problem.optimizers.rule import COUNTER, Hyperparameters, OptimizerRule
from mlotool.problem.problem import Problem

_NO_STATE = "a parameter has its first gradient, for which its optimizer keeps nothing yet"


class TracedStep:
    """Steps one problem's optimizer inside a trace.

    Learning rates are inputs of the trace, which a scheduler may change; the other hyperparameters are fixed by it.

    Args:
        problem: its optimizer has a rule, and its state.

    Attributes:
        tensors: what a step takes beside parameters and gradient: the optimizer's state of each parameter, then a
            learning rate for each group of parameters, 0-D of type float64.
        num_states: how many of them are state, which a step changes.
    """

    def __init__(self, problem: Problem) -> None:
        optimizer: Any = problem.optimizer
        self._problem = problem
        self._optimizer: Any = optimizer
        self._groups: list[dict[str, Any]] = optimizer.param_groups
        self._fixed = [name for name in (*RULES[type(optimizer)].settings, "fused") if name != "lr"]
        positions = {id(parameter): position for position, parameter in enumerate(problem.own)}
        self._positions = [
            [positions[id(each)] for each in group["params"] if id(each) in positions] for group in self._groups
        ]
        self._states: list[dict[str, Any]] = [optimizer.state.get(each, {}) for each in problem.own]
        self._names = [tuple(key for key, value in each.items() if isinstance(value, Tensor)) for each in self._states]
        found = [state[name] for state, names in zip(self._states, self._names, strict=True) for name in names]
        self.num_states = len(found)
        device = problem.own[0].device
        self._rates = [torch.zeros((), dtype=torch.float64, device=device) for _ in self._groups]
        self._numbers: list[Any] = [None] * len(self._groups)
        self.tensors = [*found, *self._rates]
        self._same = SameObjects(partial(parts_of_step, optimizer))

    def is_current(self) -> bool:
        """Return whether the optimizer still has the groups, the parameters and the state whose tensors these are."""
        return self._optimizer is self._problem.optimizer and self._same()

    @property
    def structure(self) -> Any:
        """Where the tensors belong, which a trace holds fixed: parameters by group, and by parameter names of state."""
        return self._positions, self._names

    def places(self, theta: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        """Return the parameters and the state, each with what it is."""
        names = [name for names in self._names for name in names]
        kept = self.tensors[: self.num_states]
        return [*[("parameters", each) for each in theta], *zip(names, kept, strict=True)]

    def refresh(self) -> tuple[Any, ...]:
        """Take the current learning rates over; return the other hyperparameters, for which a trace holds."""
        for number, group in enumerate(self._groups):
            rate = group["lr"]
            if isinstance(rate, Tensor):
                self._rates[number].copy_(rate)
            elif rate != self._numbers[number]:
                self._rates[number].fill_(rate)
                self._numbers[number] = rate
        return tuple([tuple(map(group.get, self._fixed)) for group in self._groups])

    def __call__(
        self, theta: Sequence[Tensor], gradient: Sequence[Tensor | None], tensors: Sequence[Tensor], *, is_fused: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters and the state after a step.

        Args:
            theta: the parameters.
            gradient: one tensor a parameter, clipped; None where it is unused.
            tensors: as `tensors` has them.
            is_fused: by torch's fused kernels where the optimizer takes them; else by plain operations.

        Raises:
            LookupError: a parameter has its first gradient here, and the optimizer no state for it.
        """
        given = iter(tensors)
        states = [{name: next(given) for name in names} for names in self._names]
        after = [*theta]
        rule = find_rule(self._problem.name, self._optimizer)
        for group, positions, rate in zip(self._groups, self._positions, given, strict=True):
            used = [position for position in positions if gradient[position] is not None]
            hyperparameters = {**group, "lr": rate}
            if is_fused and rule.kernel is not None and group.get("fused") and used:
                self._by_kernel(rule, after, gradient, states, hyperparameters, used)
                continue
            for position in used:
                slope = gradient[position]
                assert slope is not None
                after[position], state = rule.update(after[position], slope, states[position], hyperparameters)
                states[position] = dict(state)
        if any(set(state) != set(names) for state, names in zip(states, self._names, strict=True)):
            raise LookupError(_NO_STATE)
        return after, [state[name] for state, names in zip(states, self._names, strict=True) for name in names]

    def _by_kernel(
        self,
        rule: OptimizerRule,
        after: list[Tensor],
        gradient: Sequence[Tensor | None],
        states: list[dict[str, Tensor]],
        hyperparameters: Hyperparameters,
        used: Sequence[int],
    ) -> None:
        """Step the parameters at the positions `used`; `after` and `states` are changed."""
        theta = [after[position] for position in used]
        slopes = [_aligned(gradient[position], self._problem.own[position]) for position in used]
        names = rule.names(hyperparameters)
        if any(name not in states[position] for name in names for position in used):
            raise LookupError(_NO_STATE)
        vectors = {name: [states[position][name] for position in used] for name in names}
        if COUNTER in vectors:
            vectors[COUNTER] = [*torch._foreach_add(vectors[COUNTER], 1)]
        assert rule.kernel is not None
        kernel, settings = rule.kernel(hyperparameters)
        moved, _, *kept = kernel.pure(theta, slopes, *[vectors.get(name, []) for name in rule.state], **settings)
        vectors |= {name: tensors for name, tensors in zip(rule.vectors, kept, strict=True) if name in vectors}
        for place, position in enumerate(used):
            after[position] = moved[place]
            states[position].update({name: tensors[place] for name, tensors in vectors.items()})


def has_traced_step(problem: Problem) -> bool:
    """Return whether a problem's optimizer has a pure form that a trace can take."""
    return type(problem.optimizer) in RULES


def _aligned(slope: Tensor | None, parameter: Tensor) -> Tensor:
    # The kernels read a gradient in the parameter's order, whatever its own strides are.
    assert slope is not None
    if slope.stride() == parameter.stride():
        return slope
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=slope.dtype, device=slope.device).copy_(slope)
