"""A run of residual layers whose forward and backward are multigrid solves."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.bound_module import Slots
from mlotool.core.errors import ConfigError
from mlotool.core.replay import RandomState
from mlotool.layerparallel.exchange import exchanges, has_ranks
from mlotool.layerparallel.multigrid.choice import COARSENINGS, Choice, Plan, make_plans
from mlotool.layerparallel.multigrid.guard import AbstractGuard, Guard
from mlotool.layerparallel.multigrid.layers import BlockLayers, CallArguments, Layers, check_pure, draws_numbers
from mlotool.layerparallel.multigrid.settings import MultigridSettings
from mlotool.layerparallel.multigrid.system import (
    BatchSystem,
    LastStates,
    States,
    WarmStart,
    check_equal_on_ranks,
    joined_index,
)

# N: layers, b: batch

T = TypeVar("T")
CHOICE_EVERY = 100
"""Training steps from one comparison of `cycles: auto` to the next."""


class MultigridResidual(nn.Module):
    """N residual layers `u^{n+1} = u^n + h F(u^n, theta^n)`, forward and backward by multigrid across the layers.

    Forward is `mgrit`, backward `mgrit_adjoint` with the loss's cotangents as its right-hand side, and the gradient of
    all layers' parameters, `sum over the batch of (dPhi/dtheta)^T ubar^{n+1}`, is one product over all layers where
    they are stacked. The backward is differentiable to any order, by further multigrid solves (see `functions`): its
    derivatives are exact where the cycles have converged, and as inexact as the gradient where they have not.

    Args:
        blocks: what the layers are: a module of `Layers` (`mlotool.models.ResidualLayers`, `StackedLayers`), with its
            own number of layers and step; or N blocks F; or what makes one.
        num_layers: N, where `blocks` makes one; else None.
        h: the step, where `blocks` has none; None is 1.
        settings: the fields of `MultigridSettings`: coarsening=None (4), levels=None, relaxation="FCF", cycles=2 (or
            "auto"), backward_cycles=None, tolerance=None, backward_tolerance=None, cycle="V", nested=False,
            warm_start=False, guard_every=None, guard_threshold=0.1, guard_max_cycles=8, workers=None,
            over_ranks=False. With `warm_start` (`begin` says which samples follow) each sample starts from its states
            and adjoints of its last solve.

    Attributes:
        residuals: of the last forward and backward solve: tensors (cycles + 1,), empty before the first.
        guard: what compares gradients with the serial one, and what it has seen.

    Raises:
        ConfigError: a setting is out of range, or a block changes the shape.

    Layers may draw random numbers: for each batch a layer has a seed of its own, from which all its evaluations draw.

    Cost: `critical_path` counts the layers. The memory is that of backpropagation through 1 + 1/(c - 1) times the
    layers.

    Source: Günther et al. 2020, arXiv 1812.04352, sections 3.1 and 3.2.

    Example:
        >>> part = MultigridResidual(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()), 16, h=0.1, cycles=4)
        >>> loss = part(torch.ones(2, 3)).sum()
        >>> loss.backward()
        >>> len(part.residuals["forward"]), len(part.residuals["backward"])
        (5, 5)
        >>> torch.testing.assert_close(part.serial()(torch.ones(2, 3)).sum(), loss)
    """

    def __init__(
        self,
        blocks: nn.Module | Iterable[nn.Module] | Callable[[], nn.Module],
        num_layers: int | None = None,
        h: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.settings = MultigridSettings(**settings)
        self.settings.check()
        self.layers = _layers(blocks, num_layers, h)
        self._has_buffers = any(True for _ in self.layers.buffers())
        if self.settings.over_ranks and self._has_buffers:
            raise ConfigError(
                "over_ranks: found true beside running statistics; expected none, since every rank has a part of the "
                "layers only. Use layers without buffers, or set over_ranks=false."
            )
        self.num_layers: int = self.layers.num_layers  # type: ignore[assignment]
        self.method, self.backward_method = self.settings.methods(self.num_layers)
        self.method.grids(self.num_layers)
        self.guard = self._make_guard()
        self.warm_start = WarmStart() if self.settings.warm_start else None
        self.residuals: dict[str, Tensor] = {}
        self.is_serial = False
        self.is_evaluating = False
        self.draws = draws_numbers(self.layers)
        self._is_checked = False
        self.places = Slots(self.layers)

    def serial(self, is_serial: bool = True) -> Self:
        """Run the layers one after the other from now on, in plain autograd; with False, by multigrid again."""
        self.is_serial = is_serial
        return self

    def begin(self, index: Tensor | None) -> None:
        """Say which samples follow, for the warm start: each begins where its last solve ended.

        Args:
            index: (b,), their positions in their data set; None: there is one batch only.
        """
        if self.warm_start is not None:
            self.warm_start.index = index

    def begin_step(self) -> bool:
        """Count one more forward of a training step; return whether it is a plain pass through the layers."""
        return self.is_serial or not self.training or self.guard.begin()

    def forward(self, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return u^N (b, ...) of u^0; in eval mode by a pass through the layers, which no warm start sees.

        Args:
            state: u^0 (b, ...).
            args: further arguments of all blocks, such as a mask, where the layers are `WholeLayers`.
            kwargs: the same by name.
        """
        if self.begin_step():
            result: Tensor = self.layers(state, *args, **kwargs)
            return result
        return self.solve(state, CallArguments(args, kwargs))[1]

    def states(self, state: Tensor) -> Tensor:
        """Return the states (N + 1, b, ...) of all points, by multigrid; differentiable."""
        return self._solve(state, CallArguments())[0]

    def solve(self, state: Tensor, arguments: CallArguments) -> tuple[Tensor | None, Tensor]:
        """Return the states (N + 1, b, ...) and the last one (b, ...); over ranks None and the last one.

        Args:
            state: u^0 (b, ...).
            arguments: what all layers are given beside the state.
        """
        if self.settings.over_ranks and has_ranks():
            return None, self._over_ranks(state, arguments)
        return self._solve(state, arguments)

    def _solve(self, state: Tensor, arguments: CallArguments) -> tuple[Tensor, Tensor]:
        system, theta = self._system(state, arguments)
        states, last = self._repeatable(system, lambda: States.apply(system, state, *theta))
        self._check(system, theta, states)
        if self._has_buffers and self.training:
            # Running statistics move once, on the states that were found.
            with torch.no_grad():
                system.evaluate(theta, moves_buffers=True)(states[:-1], range(self.num_layers), system.h)
        return states, last

    def _over_ranks(self, state: Tensor, arguments: CallArguments) -> Tensor:
        system, theta = self._system(state, arguments, over_ranks=True)
        # Of the states that another rank has there are none here; the first one is as good.
        self._check(system, theta, state.expand(self.num_layers + 1, *state.shape))
        last: Tensor = self._repeatable(system, lambda: LastStates.apply(system, state, *theta))
        return last

    def _system(
        self, state: Tensor, arguments: CallArguments, *, over_ranks: bool = False
    ) -> tuple[BatchSystem, Sequence[Tensor]]:
        """Return the solves of a batch, and what they differentiate beside the state."""
        advice = "Call the module with a state first."
        require(isinstance(state, Tensor), "MultigridResidual.state", state, "a tensor (b, ...)", advice)
        index, shared = None if self.warm_start is None else self.warm_start.index, None
        if over_ranks:
            shared = exchanges()
            check_equal_on_ranks(shared[0], arguments)
            index = None if index is None else joined_index(shared[0], index)
        theta = dict(self.layers.named_parameters())
        system = BatchSystem(self, tuple(theta), state, index, arguments, shared)
        return system, [*theta.values(), *arguments.tensors]

    def _check(self, system: BatchSystem, theta: Sequence[Tensor], states: Tensor) -> None:
        """Evaluate all layers once more, at the first step, to see that the gradient is all there is."""
        if not self._is_checked and torch.is_grad_enabled():
            check_pure(self.layers, system.evaluate, theta, states)
            self._is_checked = True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Say that layers are called by a solve, not by the module that they are a part of."""
        before, self.is_evaluating = self.is_evaluating, True
        try:
            yield
        finally:
            self.is_evaluating = before

    def _repeatable(self, system: BatchSystem, solve: Callable[[], T]) -> T:
        """Solve; where layers draw random numbers, with a seed a layer, as a solve evaluates each many times."""
        if not self.draws:
            before = RandomState(system.devices)
            found = solve()
            if before.equals(RandomState(system.devices)):
                return found
            # They draw in another way than by torch's dropout modules.
            before.restore()
            self.draws = True
        system.draw_seeds()
        return solve()

    def _make_guard(self) -> AbstractGuard:
        given = self.settings
        if given.is_chosen:
            every = CHOICE_EVERY if given.guard_every is None else given.guard_every
            return Choice(self._plans, every, given.guard_threshold)
        return Guard(given.guard_every or 0, given.guard_threshold, given.guard_max_cycles)

    def _plans(self) -> Sequence[Plan]:
        """Return what `cycles: auto` chooses from, on the devices and ranks of the run."""
        given = self.settings
        num_ranks = exchanges()[0].num_parts if given.over_ranks else 1
        is_on_gpu = any(each.is_cuda for each in self.layers.parameters())
        workers = given.workers or (num_ranks if num_ranks > 1 else self.num_layers if is_on_gpu else 1)
        factors = COARSENINGS if given.coarsening is None else [given.coarsening]
        counts = given.guard_max_cycles, workers
        return make_plans(self.num_layers, self.method, *counts, factors=factors, num_parts=num_ranks)

    def statistics(self) -> dict[str, float]:
        """Return the residuals of the last solves, by cycle, and what the guard has seen."""
        found = {
            f"{name}_residual_{number}": value
            for name, history in self.residuals.items()
            for number, value in enumerate(history.tolist())
        }
        return found | self.guard.statistics()

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        method = self.method
        return f"coarsening={method.coarsening}, relaxation={method.relaxation}, cycles={method.cycles}"


def _layers(blocks: Any, num_layers: int | None, h: float | None) -> nn.Module:
    if isinstance(blocks, nn.Module) and isinstance(blocks, Layers):
        for key, value, own in (("num_layers", num_layers, blocks.num_layers), ("h", h, blocks.h)):
            if value is not None and value != own:
                raise ConfigError(
                    f"{key}: found {value!r} beside {type(blocks).__name__}, which has {own!r} itself; expected null. "
                    f"Remove {key}, or set it there."
                )
        return blocks
    if isinstance(blocks, Iterable):
        blocks = list(blocks)
        are_built = all(isinstance(block, nn.Module) for block in blocks)
        require(are_built, "blocks", blocks, "modules that are built", "Give [Block(), Block()].")
        is_right, advice = num_layers in (None, len(blocks)) or not blocks, "Remove num_layers."
        require(is_right, "num_layers", num_layers, f"null, or {len(blocks)}, for {len(blocks)} blocks", advice)
    elif num_layers is not None and callable(blocks) and not isinstance(blocks, nn.Module):
        blocks = [blocks() for _ in range(num_layers)]
    else:
        raise ConfigError(
            f"blocks: found {type(blocks).__name__} with num_layers={num_layers!r}; expected a module with the method "
            "many(states, layers, h), a list of N blocks, or a function that makes one, with num_layers=N. Pass one of "
            "these."
        )
    return BlockLayers(blocks, 1.0 if h is None else h)
