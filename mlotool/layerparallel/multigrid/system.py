"""The solves behind one forward pass of a multigrid part, at the parameters that it was made with."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mlotool.layerparallel.multigrid.functions import Gradient
from mlotool.layerparallel.multigrid.grids import Grid
from mlotool.layerparallel.multigrid.propagation import start_of, transposed
from mlotool.layerparallel.multigrid.settings import Method
from mlotool.layerparallel.multigrid.solver import solve
from mlotool.layerparallel.multigrid.steps import Evaluate, Linearised, batched, layers_of, states_at

if TYPE_CHECKING:
    from mlotool.layerparallel.multigrid.residual import MultigridResidual

# N: layers, b: batch


class BatchSystem:
    """The solves of a `MultigridResidual` for one batch: states, adjoints and tangents, with its settings.

    Args:
        part: the layers and how they are solved.
        names: of the layers' parameters, in the order in which the methods are given them as `theta`.
        state: u0 (b, ...), for its device and the autocast that it is under.
        index: (b,), the positions of the samples in their data set, for the warm start; None where they have none.

    Example:
        >>> from mlotool.layerparallel.multigrid import MultigridResidual
        >>> part = MultigridResidual(lambda: torch.nn.Linear(3, 3), num_layers=16, h=0.1)
        >>> (names, theta), u0 = zip(*part.layers.named_parameters()), torch.ones(2, 3)
        >>> system = BatchSystem(part, names, u0, index=None)
        >>> system.solve_states(u0, theta).shape
        torch.Size([17, 2, 3])
    """

    def __init__(self, part: "MultigridResidual", names: tuple[str, ...], state: Tensor, index: Tensor | None) -> None:
        self.part = part
        self.names = names
        self.num_layers = part.num_layers
        self.h: float = part.layers.h  # type: ignore[assignment]
        self.index = index
        self._device, device = state.device, state.device.type
        # A backward runs without the autocast of its forward, and the adjoint is that of the same function.
        self._precision = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    def evaluate(self, theta: Sequence[Tensor]) -> Evaluate:
        """Return what evaluates the layers with these parameters; their buffers stay as they are."""
        layers, places = self.part.layers, self.part._places
        many = batched(layers)
        parameters = dict(zip(self.names, theta, strict=True))
        device, dtype, is_enabled = self._precision

        def evaluate(states: Tensor, which: range, step_size: float) -> Tensor:
            restore = places.fill(parameters, places.copy_buffers())
            try:
                with torch.autocast(device, dtype=dtype, enabled=is_enabled):
                    return many(states, which, step_size)
            finally:
                restore()

        return evaluate

    def solve_states(self, u0: Tensor, theta: Sequence[Tensor]) -> Tensor:
        """Return the states (N + 1, b, ...) of u0 (b, ...); the solve starts from a warm start where there is one."""
        evaluate = self.evaluate([tensor.detach() for tensor in theta])

        def advance(grid: Grid, values: Tensor, points: range) -> Tensor:
            return evaluate(values, layers_of(grid, points), self.h * grid.stride)

        initial = self.recall("states", (self.num_layers + 1, *u0.shape))
        values = start_of(u0, self.num_layers, initial)
        states, residuals = solve(advance, u0.detach(), values, None, self.methods()[0], is_warm=initial is not None)
        self.keep("states", states, residuals)
        return states

    def solve_adjoints(
        self, states: Tensor, sources: Tensor | None, last: Tensor | None, theta: Sequence[Tensor], *, is_first: bool
    ) -> Tensor:
        """Return the adjoints `A^-T g`, (N + 1, b, ...); those of a first derivative are kept for the next warm start.

        Args:
            states: (N + 1, b, ...), at which the layers are linearised.
            sources: g at all points, (N + 1, b, ...); None is zero.
            last: (b, ...), added to g at the last point; None is zero. One of the two is given.
            theta: the layers' parameters.
            is_first: whether this is a first derivative, as every training step has one.
        """
        advance = transposed(self._jacobians(states, theta), self.h, self.num_layers)
        initial = self.recall("adjoints", tuple(states.shape)) if is_first else None
        given = [each.detach() for each in (None if sources is None else sources[-1], last) if each is not None]
        origin = given[0] if len(given) == 1 else given[0] + given[1]
        values = start_of(origin, self.num_layers, initial, place=-1)
        adjoints, residuals = solve(
            advance, origin, values, sources, self.methods()[1], is_warm=initial is not None, is_mirrored=True
        )
        if is_first:
            self.keep("adjoints", adjoints, residuals)
        return adjoints

    def solve_tangents(self, states: Tensor, sources: Tensor, theta: Sequence[Tensor]) -> Tensor:
        """Return the tangents `A^-1 g`, (N + 1, b, ...).

        Args:
            states: (N + 1, b, ...), at which the layers are linearised.
            sources: g at all points, (N + 1, b, ...).
            theta: the layers' parameters.
        """
        jacobians = self._jacobians(states, theta)

        def advance(grid: Grid, values: Tensor, points: range) -> Tensor:
            return jacobians.plain(values, layers_of(grid, points), self.h * grid.stride)

        values = start_of(sources[0], self.num_layers, None)
        return solve(advance, sources[0].detach(), values, sources, self.methods()[1])[0]

    def inspect(self, states: Tensor, last: Tensor, theta: Sequence[Tensor], gradient: Gradient) -> Gradient:
        """Return the gradient to hand on: plain backpropagation's where the guard compares the two, else the given one.

        Args:
            states: (N + 1, b, ...), that were found.
            last: (b, ...), the cotangent of the last state.
            theta: the layers' parameters.
            gradient: multigrid's, with respect to u0 and each of theta; None where it is not needed.
        """
        # A gradient that will be differentiated again stays what its graph says.
        if torch.is_grad_enabled() or not self.part.guard.is_due():
            return gradient
        u0 = states[0].detach().requires_grad_()
        leaves = [tensor.detach().requires_grad_() for tensor in theta]
        device, dtype, is_enabled = self._precision
        restore = self.part._places.fill(dict(zip(self.names, leaves, strict=True)), self.part._places.copy_buffers())
        try:
            with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=is_enabled):
                found = self.part.layers(u0)
        finally:
            restore()
        serial = torch.autograd.grad(found, [u0, *leaves], last, materialize_grads=True)
        is_used = [each is not None for each in gradient]
        mine = [each for each in gradient if each is not None]
        exact = [each for each, used in zip(serial, is_used, strict=True) if used]
        self.part.guard.compare(mine, exact, states[-1], found.detach())
        return [each if used else None for each, used in zip(serial, is_used, strict=True)]

    def _jacobians(self, states: Tensor, theta: Sequence[Tensor]) -> Linearised:
        return Linearised(self.evaluate([tensor.detach() for tensor in theta]), partial(states_at, states))

    def methods(self) -> tuple[Method, Method]:
        """Return the methods of the forward and of the backward solve, with the cycles that the guard has added."""
        extra, set_ones = self.part.guard.extra_cycles, (self.part.method, self.part.backward_method)
        forward, backward = (replace(each, cycles=each.cycles + extra) if extra else each for each in set_ones)
        return forward, backward

    def recall(self, kind: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return a warm start of the "states" or "adjoints", if there is one of that shape."""
        store = self.part.warm_start
        found = None if store is None else store.recall(self.index, kind, shape)
        # What a checkpoint has put back may lie elsewhere.
        return None if found is None else found.to(self._device)

    def keep(self, kind: str, values: Tensor, residuals: Tensor) -> None:
        """Keep what a solve has found, for the next warm start and for the statistics.

        Args:
            kind: "states" or "adjoints".
            values: (N + 1, b, ...).
            residuals: norms, (cycles + 1,).
        """
        self.part.residuals["forward" if kind == "states" else "backward"] = residuals
        if self.part.warm_start is not None:
            self.part.warm_start.remember(self.index, kind, values)
