"""Steps of many layers at once, and their Jacobians' products."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.messages import kind_of

Step = Callable[[Tensor, int, float], Tensor]
"""`step(u, n, h)`: the state (b, ...) after layer n of the finest grid, with step h."""

Evaluate = Callable[[Tensor, range, float], Tensor]
"""`evaluate(values, layers, h)`: the states (k, b, ...) after k layers of the finest grid, each of its own state."""


class BatchedStep:
    """A step that takes many layers in one call: a sweep visits the k-th layer of all chunks at once.

    `mgrit` and `mgrit_adjoint` take it in the place of a plain step. Called as one, it is that step.

    Args:
        evaluate: `(values (k, b, ...), layers, h) -> (k, b, ...)`; `layers` is a range of k layer indices, and a
            stacked weight's part is `weight[layers.start : layers.stop : layers.step]`, without a copy.

    Example:
        >>> rates = torch.arange(4.0)
        >>> step = BatchedStep(lambda u, layers, h: u + h * rates[layers.start:layers.stop:layers.step, None, None] * u)
        >>> step.many(torch.ones(2, 1, 1), range(1, 4, 2), 0.5).flatten(), step(torch.ones(1, 1), 3, 0.5)
        (tensor([1.5000, 2.5000]), tensor([[2.5000]]))
    """

    def __init__(self, evaluate: Evaluate) -> None:
        self.many = evaluate

    def __call__(self, values: Tensor, layer: int, step_size: float) -> Tensor:
        """Return the state after one layer."""
        return self.many(values[None], range(layer, layer + 1), step_size)[0]


def batched(step: Any) -> Evaluate:
    """Return what evaluates many layers of a step: the step's own `many`, or the step for one layer after the other.

    Args:
        step: a function `step(u, n, h)`, or an object with a method `many`, such as `BatchedStep` or `Layers`.

    Raises:
        ConfigError: from what is returned, where a layer returns no tensor or one of another shape, or changes the
            state that it was given.

    Example:
        >>> evaluate = batched(lambda u, n, h: u + h * n)
        >>> evaluate(torch.zeros(2, 1, 1), range(4, 8, 2), 0.5).flatten()
        tensor([2., 3.])
    """
    many: Evaluate | None = getattr(step, "many", None)

    def evaluate(values: Tensor, layers: range, step_size: float) -> Tensor:
        version = None if values.is_inference() else values._version
        if many is not None:
            name = f"layer {layers.start}" if len(layers) == 1 else f"layers {layers.start}, {layers[1]}, ..."
            return check_state(f"step: {name}", values, many(values, layers, step_size), version)
        moved = [
            check_state(f"step: layer {layer}", value, step(value, layer, step_size), version)
            for value, layer in zip(values, layers, strict=True)
        ]
        return torch.stack(moved)

    return evaluate


def check_state(name: str, state: Tensor, moved: Any, version: int | None = None) -> Tensor:
    """Return what a layer has made of a state, and refuse what is no state after it.

    Args:
        name: of the layer, for messages.
        state: that it was given.
        moved: what it returned.
        version: of the state before; None: it may have been changed.

    Raises:
        ConfigError: it returned no tensor or one of another shape, or has changed the state that it was given.

    Example:
        >>> check_state("block 0", torch.ones(2), torch.zeros(2))
        tensor([0., 0.])
    """
    if not isinstance(moved, Tensor):
        fault, advice = f"returned {kind_of(moved)}", "Return the state after it alone"
    elif version is not None and state._version != version:
        fault, advice = "changed the state that it was given", "Write u = u + x in place of u.add_(x) or u += x"
    elif moved.shape != state.shape:
        fault = f"turned a state of shape {tuple(state.shape)} into {tuple(moved.shape)}"
        advice = "Name other layers, or keep it outside of the multigrid part"
    else:
        return moved
    raise ConfigError(f"{name} {fault}; expected a new tensor of the state's shape. {advice}.")


class Linearised:
    """Products with the Jacobians of layers at fixed states; each layer is traced once for a step size.

    A level's groups of layers are the same in every cycle, so their graphs are kept from one to the next: at most
    those of 1 + 1/(c - 1) backward passes, as backpropagation keeps those of one.

    Args:
        evaluate: the layers, many of them in one call.
        states: `states(layers)`, the states (k, b, ...) at which k layers are linearised.

    Example:
        >>> states = torch.ones(3, 1, 1)
        >>> jacobians = Linearised(batched(lambda u, n, h: u + h * u**2), lambda layers: states[:-1])
        >>> jacobians.transposed(torch.ones(2, 1, 1), range(2), 0.5).flatten()
        tensor([2., 2.])
    """

    def __init__(self, evaluate: Evaluate, states: Callable[[range], Tensor]) -> None:
        self._evaluate = evaluate
        self._states = states
        self._traces: dict[tuple[range, float], tuple[Tensor, Tensor]] = {}
        self._pulled: dict[tuple[range, float], tuple[Tensor, Tensor]] = {}

    def transposed(self, cotangents: Tensor, layers: range, step_size: float) -> Tensor:
        """Return `(dPhi_n/du)^T w_n` of k layers n.

        Args:
            cotangents: w, (k, b, ...).
            layers: the numbers of the k layers.
            step_size: of each of these layers.
        """
        at, moved = self._trace(layers, step_size)
        return torch.autograd.grad(moved, at, cotangents, retain_graph=True, materialize_grads=True)[0]

    def plain(self, tangents: Tensor, layers: range, step_size: float) -> Tensor:
        """Return `(dPhi_n/du) v_n` of k layers n: the product is linear in its cotangent, and this is its transpose.

        Args:
            tangents: v, (k, b, ...).
            layers: the numbers of the k layers.
            step_size: of each of these layers.
        """
        key = (layers, step_size)
        if key not in self._pulled:
            at, moved = self._trace(layers, step_size)
            with torch.enable_grad():
                cotangent = torch.zeros_like(moved, requires_grad=True)
                pulled = torch.autograd.grad(moved, at, cotangent, create_graph=True, materialize_grads=True)[0]
            self._pulled[key] = cotangent, pulled
        cotangent, pulled = self._pulled[key]
        return torch.autograd.grad(pulled, cotangent, tangents, retain_graph=True, materialize_grads=True)[0]

    def _trace(self, layers: range, step_size: float) -> tuple[Tensor, Tensor]:
        key = (layers, step_size)
        if key not in self._traces:
            with torch.enable_grad():
                at = self._states(layers).detach().requires_grad_()
                self._traces[key] = at, self._evaluate(at, layers, step_size)
        return self._traces[key]
