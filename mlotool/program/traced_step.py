"""An optimizer's step inside a trace: a pure function of parameters, gradient, the optimizer's state and its rates."""

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from mlotool.core.unchanged import SameObjects
from mlotool.problem.optimizers.registry import parts_of_step
from mlotool.problem.optimizers.rule import Hyperparameters
from mlotool.problem.problem import Problem
from mlotool.problem.update import UPDATES, find_update

_ATEN = torch.ops.aten
_SGD = ("weight_decay", "momentum", "dampening", "nesterov", "maximize", "fused")
_ADAM = ("weight_decay", "betas", "eps", "amsgrad", "maximize", "fused", "decoupled_weight_decay")
_NO_STATE = "a parameter has its first gradient, for which its optimizer keeps nothing yet"


class TracedStep:
    """Steps one problem's optimizer inside a trace.

    Learning rates are inputs of the trace, which a scheduler may change; the other hyperparameters are fixed by it.

    Args:
        problem: its optimizer is SGD, Adam or AdamW, and has its state.

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
        self._fixed = itemgetter(*(_SGD if type(self._optimizer) is SGD else _ADAM))
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
        return tuple([self._fixed(group) for group in self._groups])

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
        update = find_update(self._problem.name, self._optimizer)
        for group, positions, rate in zip(self._groups, self._positions, given, strict=True):
            used = [position for position in positions if gradient[position] is not None]
            hyperparameters = {**group, "lr": rate}
            if is_fused and group.get("fused") and used:
                self._by_kernel(after, gradient, states, hyperparameters, used)
                continue
            for position in used:
                slope = gradient[position]
                assert slope is not None
                after[position], state = update(after[position], slope, states[position], hyperparameters)
                states[position] = dict(state)
        if any(set(state) != set(names) for state, names in zip(states, self._names, strict=True)):
            raise LookupError(_NO_STATE)
        return after, [state[name] for state, names in zip(states, self._names, strict=True) for name in names]

    def _by_kernel(
        self,
        after: list[Tensor],
        gradient: Sequence[Tensor | None],
        states: list[dict[str, Tensor]],
        hyperparameters: Hyperparameters,
        used: Sequence[int],
    ) -> None:
        """Step the parameters at the positions `used`; `after` and `states` are changed."""
        theta = [after[position] for position in used]
        slopes = [_aligned(gradient[position], self._problem.own[position]) for position in used]
        vectors = {
            name: [states[position][name] for position in used]
            for name in ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
            if all(name in states[position] for position in used)
        }
        if type(self._optimizer) is SGD:
            found = _sgd(theta, slopes, vectors, hyperparameters)
        else:
            found = _adam(theta, slopes, vectors, hyperparameters)
        for name, tensors in found.items():
            for position, tensor in zip(used, tensors, strict=True):
                if name == "theta":
                    after[position] = tensor
                else:
                    states[position][name] = tensor


def has_traced_step(problem: Problem) -> bool:
    """Return whether a problem's optimizer has a pure form that a trace can take."""
    return type(problem.optimizer) in UPDATES


def _aligned(slope: Tensor | None, parameter: Tensor) -> Tensor:
    # The kernels read a gradient in the parameter's order, whatever its own strides are.
    assert slope is not None
    if slope.stride() == parameter.stride():
        return slope
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=slope.dtype, device=slope.device).copy_(slope)


def _sgd(
    theta: list[Tensor], slopes: list[Tensor], vectors: dict[str, list[Tensor]], hyperparameters: Hyperparameters
) -> dict[str, list[Tensor]]:
    names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
    given = {name: hyperparameters[name] for name in names}
    momentum = vectors.get("momentum_buffer", [])
    if hyperparameters["momentum"] and not momentum:
        raise LookupError(_NO_STATE)
    moved, _, momentum = _ATEN._fused_sgd.tensor_lr(theta, slopes, momentum, is_first_step=False, **given)
    return {"theta": moved, **({"momentum_buffer": momentum} if momentum else {})}


def _adam(
    theta: list[Tensor], slopes: list[Tensor], vectors: dict[str, list[Tensor]], hyperparameters: Hyperparameters
) -> dict[str, list[Tensor]]:
    if "step" not in vectors:
        raise LookupError(_NO_STATE)
    beta1, beta2 = hyperparameters["betas"]
    given = {name: hyperparameters[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    kernel = _ATEN._fused_adamw if hyperparameters.get("decoupled_weight_decay") else _ATEN._fused_adam
    steps, largest = torch._foreach_add(vectors["step"], 1), vectors.get("max_exp_avg_sq", [])
    moved, _, first, second, largest = kernel.tensor_lr(
        theta, slopes, vectors["exp_avg"], vectors["exp_avg_sq"], largest, steps, beta1=beta1, beta2=beta2, **given
    )
    found = {"theta": moved, "exp_avg": first, "exp_avg_sq": second, "step": steps}
    return {**found, **({"max_exp_avg_sq": largest} if largest else {})}
