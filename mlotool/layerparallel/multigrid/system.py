"""The solves behind one forward pass of a multigrid part, at the parameters that it was made with."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mlotool.core.replay import RandomState
from mlotool.layerparallel.multigrid.call import CallArguments
from mlotool.layerparallel.multigrid.exchange import AbstractExchange
from mlotool.layerparallel.multigrid.functions import Gradient
from mlotool.layerparallel.multigrid.grids import Grid
from mlotool.layerparallel.multigrid.guard import Methods, Norm, Solved
from mlotool.layerparallel.multigrid.propagation import start_of, transposed
from mlotool.layerparallel.multigrid.settings import Method
from mlotool.layerparallel.multigrid.solver import solve
from mlotool.layerparallel.multigrid.steps import BatchedStep, Evaluate, Linearised, batched, layers_of, states_at

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
        arguments: what all layers are given beside the state; those with a gradient follow the parameters in `theta`.

    Example:
        >>> from mlotool.layerparallel.multigrid import MultigridResidual
        >>> part = MultigridResidual(lambda: torch.nn.Linear(3, 3), num_layers=16, h=0.1)
        >>> (names, theta), u0 = zip(*part.layers.named_parameters()), torch.ones(2, 3)
        >>> system = BatchSystem(part, names, u0, index=None)
        >>> system.solve_states(u0, theta).shape
        torch.Size([17, 2, 3])
    """

    def __init__(
        self,
        part: "MultigridResidual",
        names: tuple[str, ...],
        state: Tensor,
        index: Tensor | None,
        arguments: CallArguments | None = None,
    ) -> None:
        self.part = part
        self.arguments = arguments or CallArguments()
        self.names = names
        self.num_layers = part.num_layers
        self.h: float = part.layers.h  # type: ignore[assignment]
        self.index = index
        self._device, device = state.device, state.device.type
        self.devices = (state.device,) if state.is_cuda else ()
        self.seeds: list[int] | None = None
        # A backward linearises the function that its forward has solved, whatever moves the buffers in between.
        self._buffers = part._places.copy_buffers()
        self._solve_by(part.guard.methods(part.method, part.backward_method))
        self.is_due = part.guard.take_due()
        self.is_trial = False
        # A backward runs without the autocast of its forward, and the adjoint is that of the same function.
        self._precision = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    def evaluate(self, theta: Sequence[Tensor], *, moves_buffers: bool = False) -> Evaluate:
        """Return what evaluates the layers with these parameters.

        Args:
            theta: the parameters, and the arguments with a gradient.
            moves_buffers: whether an evaluation changes the layers' buffers, as a training step does once.
        """
        layers, places, count = self.part.layers, self.part._places, len(self.names)
        parameters = dict(zip(self.names, theta[:count], strict=True))
        buffers = self._buffers
        args, kwargs = self.arguments.filled(theta[count:])
        many = batched(layers)
        if self.arguments:
            many = batched(BatchedStep(lambda states, which, h: layers.many(states, which, h, *args, **kwargs)))  # type: ignore[operator]
        device, dtype, is_enabled = self._precision

        def evaluate(states: Tensor, which: range, step_size: float) -> Tensor:
            own = {} if moves_buffers else {name: each.clone() for name, each in buffers.items()}
            restore = places.fill(parameters, own)
            try:
                with self.part.evaluating(), torch.autocast(device, dtype=dtype, enabled=is_enabled):
                    return (
                        many(states, which, step_size) if self.seeds is None else one_by_one(states, which, step_size)
                    )
            finally:
                restore()

        def one_by_one(states: Tensor, which: range, step_size: float) -> Tensor:
            found = []
            for state, n in zip(states.split(1), which, strict=True):
                with _drawing(self.seeds[n], self.devices):  # type: ignore[index]
                    found.append(many(state, range(n, n + 1), step_size))
            return torch.cat(found)

        return evaluate

    def draw_seeds(self, exchange: AbstractExchange) -> None:
        """Draw a seed a layer, from which all evaluations of a layer for this batch draw the same random numbers.

        Args:
            exchange: with the ranks that share the layers, which take those of the first.
        """
        seeds = torch.randint(2**62, (self.num_layers,)).to(self._device)
        self.seeds = exchange.origin(seeds).tolist()

    def solve_states(self, u0: Tensor, theta: Sequence[Tensor]) -> Tensor:
        """Return the states (N + 1, b, ...) of u0 (b, ...); the solve starts from a warm start where there is one."""
        evaluate = self.evaluate([tensor.detach() for tensor in theta])

        def advance(grid: Grid, values: Tensor, points: range) -> Tensor:
            return evaluate(values, layers_of(grid, points), self.h * grid.stride)

        initial = self.recall("states", (self.num_layers + 1, *u0.shape))
        values = start_of(u0, self.num_layers, initial)
        states, residuals = solve(advance, u0.detach(), values, None, self.methods[0], is_warm=initial is not None)
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
            advance, origin, values, sources, self.methods[1], is_warm=initial is not None, is_mirrored=True
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
        return solve(advance, sources[0].detach(), values, sources, self.methods[1])[0]

    def inspect(
        self,
        gradient: Gradient,
        last: Tensor,
        again: Callable[["BatchSystem"], tuple[Gradient, Tensor]],
        norm: Norm = lambda own: own,
    ) -> Gradient:
        """Return the gradient to hand on: the serial one where the guard compares the two, else the given one.

        Args:
            gradient: with respect to u0 and each of theta; None where it is not needed.
            last: (b, ...), the last state that was found.
            again: finds both with another system.
            norm: over the ranks that share the layers.
        """
        if not self.is_due:
            return gradient
        self.is_due = False

        def measure(methods: Methods | None) -> Solved:
            return Solved(*again(self.with_methods(methods)))

        return list(self.part.guard.compare(Solved(gradient, last), measure, norm).gradient)

    def with_methods(self, methods: Methods | None) -> "BatchSystem":
        """Return a system of the same batch for a trial: it starts anew, and keeps nothing.

        Args:
            methods: of the forward and of the backward solve; None is one layer after the other.
        """
        other = copy.copy(self)
        other._solve_by(methods)
        other.is_trial, other.is_due = True, False
        return other

    def _solve_by(self, methods: Methods | None) -> None:
        self.is_serial = methods is None
        self.methods = methods or serial_methods(self.num_layers)

    def _jacobians(self, states: Tensor, theta: Sequence[Tensor]) -> Linearised:
        return Linearised(self.evaluate([tensor.detach() for tensor in theta]), partial(states_at, states))

    def recall(self, kind: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return a warm start of the "states" or "adjoints", if there is one of that shape."""
        store = None if self.is_trial else self.part.warm_start
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
        if self.is_trial or self.is_serial:
            return
        self.part.residuals["forward" if kind == "states" else "backward"] = residuals
        if self.part.warm_start is not None:
            self.part.warm_start.remember(self.index, kind, values)


def serial_methods(num_layers: int) -> Methods:
    """Return the methods of serial passes: without a coarse grid the layers are solved one after the other.

    Args:
        num_layers: N.

    Example:
        >>> serial_methods(16)[0].coarsening
        16
    """
    method = Method(coarsening=max(2, num_layers))
    return method, method


@contextmanager
def _drawing(seed: int, devices: Sequence[torch.device]) -> Iterator[None]:
    """Draw random numbers that a seed alone decides; afterwards torch's generators are as they were."""
    before = RandomState(tuple(devices))
    torch.default_generator.manual_seed(seed)
    for device in devices:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        before.restore()
