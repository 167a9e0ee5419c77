"""A run of residual layers whose forward and backward are multigrid solves."""

from collections.abc import Callable, Iterable
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.slots import Places
from mlotool.layerparallel.multigrid.exchange import exchanges, has_ranks
from mlotool.layerparallel.multigrid.functions import States
from mlotool.layerparallel.multigrid.grids import make_grids
from mlotool.layerparallel.multigrid.guard import Guard
from mlotool.layerparallel.multigrid.layers import BlockLayers, Layers, check_repeatable
from mlotool.layerparallel.multigrid.over_ranks import LastStates, joined_index
from mlotool.layerparallel.multigrid.settings import MultigridKeywords, MultigridSettings
from mlotool.layerparallel.multigrid.system import BatchSystem
from mlotool.layerparallel.multigrid.warm_start import WarmStart

# N: layers, b: batch


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
        settings: the fields of `MultigridSettings`: coarsening=4, levels=None, relaxation="FCF", cycles=2,
            backward_cycles=None, tolerance=None, backward_tolerance=None, cycle="V", nested=False, warm_start=False,
            guard_every=0, guard_threshold=0.1, guard_max_cycles=8, over_ranks=False. With `warm_start` (`begin` says
            which samples follow) each sample starts from its states and adjoints of its last solve.

    Attributes:
        residuals: of the last forward and backward solve: tensors (cycles + 1,), empty before the first.
        guard: what the guard has seen.

    Raises:
        ConfigError: a setting is out of range, a block changes the shape, or has dropout.

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
        **settings: Unpack[MultigridKeywords],
    ) -> None:
        super().__init__()
        given = MultigridSettings(**settings)
        self.layers = _layers(blocks, num_layers, h)
        check_repeatable(self.layers)
        self._has_buffers = any(True for _ in self.layers.buffers())
        _check_ranks(given.over_ranks, given.guard_every, self._has_buffers)
        self.over_ranks = given.over_ranks
        self.num_layers: int = self.layers.num_layers  # type: ignore[assignment]
        make_grids(self.num_layers, given.coarsening, given.levels)
        self.method, self.backward_method = given.forward, given.backward
        self.guard = Guard(given.guard_every, given.guard_threshold, given.guard_max_cycles)
        self.warm_start = WarmStart() if given.warm_start else None
        self.residuals: dict[str, Tensor] = {}
        self.is_serial = False
        self._places = Places(self.layers)

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

    def forward(self, state: Tensor) -> Tensor:
        """Return u^N (b, ...) of u^0; in eval mode by a pass through the layers, which no warm start sees."""
        if self.is_serial or self.guard.is_serial or not self.training:
            result: Tensor = self.layers(state)
            return result
        if self.over_ranks and has_ranks():
            return self._over_ranks(state)
        return self._solve(state)[1]

    def states(self, state: Tensor) -> Tensor:
        """Return the states (N + 1, b, ...) of all points, by multigrid; differentiable."""
        return self._solve(state)[0]

    def _solve(self, state: Tensor) -> tuple[Tensor, Tensor]:
        advice = "Call the module with a state alone."
        require(isinstance(state, Tensor), "MultigridResidual.state", state, "a tensor (b, ...)", advice)
        theta = dict(self.layers.named_parameters())
        index = None if self.warm_start is None else self.warm_start.index
        states, last = States.apply(BatchSystem(self, tuple(theta), state, index), state, *theta.values())
        if self._has_buffers and self.training:
            # Running statistics move once, on the states that were found.
            with torch.no_grad():
                self.layers.many(states[:-1], range(self.num_layers), self.layers.h)  # type: ignore[operator]
        return states, last

    def _over_ranks(self, state: Tensor) -> Tensor:
        forward, backward = exchanges()
        index = None if self.warm_start is None else self.warm_start.index
        index = None if index is None else joined_index(forward, index)
        theta = dict(self.layers.named_parameters())
        system = BatchSystem(self, tuple(theta), state, index)
        last: Tensor = LastStates.apply(system, forward, backward, state, *theta.values())
        return last

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


def _check_ranks(over_ranks: bool, guard_every: int, has_buffers: bool) -> None:
    for key, is_set in (("guard_every", bool(guard_every)), ("running statistics", has_buffers)):
        if over_ranks and is_set:
            raise ConfigError(
                f"over_ranks: found true beside {key}; expected none, since every rank has a part of the layers only. "
                "Set guard_every=0 and use layers without buffers, or over_ranks=false."
            )


def _layers(blocks: Any, num_layers: int | None, h: float | None) -> nn.Module:
    if isinstance(blocks, nn.Module) and isinstance(blocks, Layers):
        for key, value, own in (("num_layers", num_layers, blocks.num_layers), ("h", h, blocks.h)):
            if value is not None and value != own:
                raise ConfigError(
                    f"{key}: found {value!r} beside {type(blocks).__name__}, which has {own!r} itself; expected null. "
                    f"Remove {key}, or set it there."
                )
        return blocks
    step_size = 1.0 if h is None else h
    if isinstance(blocks, Iterable):
        blocks = list(blocks)
        are_built = all(isinstance(block, nn.Module) for block in blocks)
        require(are_built, "blocks", blocks, "modules that are built", "Give [Block(), Block()].")
        found = BlockLayers(blocks, step_size)
        if num_layers not in (None, found.num_layers):
            raise ConfigError(
                f"num_layers: found {num_layers!r} for {found.num_layers} blocks; expected null. Remove num_layers."
            )
        return found
    if num_layers is None or isinstance(blocks, nn.Module) or not callable(blocks):
        raise ConfigError(
            f"blocks: found {type(blocks).__name__} with num_layers={num_layers!r}; expected a module with the method "
            "many(states, layers, h), a list of N blocks, or a function that makes one block, with num_layers=N. Pass "
            "one of these."
        )
    return BlockLayers([blocks() for _ in range(num_layers)], step_size)
