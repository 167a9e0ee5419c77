"""Multigrid as a setting of a problem: its training steps solve a part of its module across the layers."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.hypergradient import Identity, Implicit
from mlotool.layerparallel.multigrid.forecast import forecast
from mlotool.layerparallel.multigrid.grids import make_grids
from mlotool.layerparallel.multigrid.in_place import InPlace
from mlotool.layerparallel.multigrid.parts import find_parts
from mlotool.layerparallel.multigrid.residual import MultigridResidual
from mlotool.layerparallel.multigrid.settings import MultigridSettings
from mlotool.problem.parallel import AbstractParallel


@dataclass(eq=False, repr=False)
class Multigrid(MultigridSettings, AbstractParallel):
    """Training steps whose residual layers are solved by multigrid, forward and backward.

    `Problem(..., parallel=Multigrid(cycles=2))`, or in a recipe
    `problems.classifier.parallel: {_target_: mlotool.layerparallel.Multigrid, cycles: 2}`. Evaluation and
    hypergradients run the layers one after the other. With `warm_start`, and one or two cycles, training is one-shot:
    states, adjoints and parameters converge together (section 4 of the paper).

    Args:
        part: the name of the layers in the problem's module: a module of `Layers`, a `MultigridResidual`, an
            nn.Sequential or nn.ModuleList of blocks that keep the shape, shortcut included, or some of its blocks, as
            in "layer3[1:]"; or a list of these. None looks for the first two kinds, then for one that is called
            "residual", then for all runs of equal blocks. The module's own forward runs as it is: it calls the blocks
            one after the other, with what further arguments it likes (see `InPlace`).
        coarsening: and all others: the fields of `MultigridSettings`. With `warm_start` samples are known by the
            batch's `index`, and without one all batches are taken for the same.

    Raises:
        ConfigError: a setting is out of range; `attach`: the module has no such layers; a training step: a block
            changes the shape, or the module does something else between blocks.

    Cost: see `critical_path`. `statistics` gives the residual after each cycle, `forward_residual_0` on.

    Source: Günther et al. 2020, arXiv 1812.04352.

    Example:
        >>> import torch
        >>> blocks = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(8)])
        >>> parallel = Multigrid(part="", cycles=3)
        >>> parallel.attach("classifier", blocks)
        >>> parallel(torch.ones(2, 3)).shape, sorted(parallel.statistics())[:2]
        (torch.Size([2, 3]), ['forward_residual_0', 'forward_residual_1'])
    """

    part: str | Sequence[str] | None = field(default=None, kw_only=False)

    def __post_init__(self) -> None:
        self.solvers: dict[str, MultigridResidual] = {}
        self._places: list[InPlace] = []

    def attach(self, name: str, module: nn.Module) -> None:
        """Find the layers of the problem's module."""
        self.module = module
        settings: Any = {each.name: getattr(self, each.name) for each in fields(MultigridSettings)}
        is_list = isinstance(self.part, Sequence) and all(isinstance(each, str) for each in self.part)
        is_right = isinstance(self.part, str | None) or (is_list and bool(self.part))
        require(is_right, f"problems.{name}.parallel.part", self.part, "a name, a list of names, or null")
        try:
            parts = find_parts(module, self.part)
        except ConfigError as error:
            raise ConfigError(f"problems.{name}.parallel.{error}") from error
        try:
            for path, part in parts.items():
                self.solvers[path] = MultigridResidual(part.layers, **settings)
                self._places.append(InPlace(path or type(module).__name__, part.blocks, self.solvers[path]))
        except ConfigError as error:
            raise ConfigError(f"problems.{name}.parallel: {error}") from error
        self._warn_of_few_layers(name)

    def default_hypergradient(self) -> Implicit:
        """Return finite differences with the identity: first-order passes through the serial network."""
        return Implicit(Identity(), product="finite_difference")

    def begin(self, batch: Any, weight: float) -> None:
        """Begin a step: note which samples the batch has, for the warm start."""
        index = batch.get("index") if isinstance(batch, Mapping) else None
        for solver in self.solvers.values():
            solver.begin(index if isinstance(index, Tensor) else None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with its layers solved by multigrid."""
        with ExitStack() as stack:
            for solver in self.solvers.values():
                solver.training = self.module.training
            for place in self._places:
                stack.enter_context(place.solving())
            return self.module(*args, **kwargs)

    def forecast(self) -> list[str]:
        """Return the critical path of a training step beside that of a serial one, in sentences."""
        return [forecast(path or "the module", solver) for path, solver in self.solvers.items()]

    def _warn_of_few_layers(self, name: str) -> None:
        """Say that nothing is solved by multigrid where no part has a coarse grid."""
        solvers = self.solvers.values()
        grids = [make_grids(each.num_layers, each.method.coarsening, each.method.levels) for each in solvers]
        if all(len(each) == 1 for each in grids):
            told = ", ".join(f"{path or 'the module'} has {each.num_layers}" for path, each in self.solvers.items())
            factor = "" if self.coarsening is None else f" with coarsening={self.coarsening}"
            warnings.warn(
                f"problems.{name}.parallel: {told} layers, too few for a coarse grid{factor}: they run one after the "
                "other. Name a longer part, or take parallel=auxnet.",
                UserWarning,
                stacklevel=2,
            )

    def statistics(self) -> dict[str, float]:
        """Return the residuals after each cycle of the last step, and what the guard has seen."""
        prefixes = {path: f"{path}." if len(self.solvers) > 1 else "" for path in self.solvers}
        return {
            f"{prefixes[path]}{key}": value
            for path, solver in self.solvers.items()
            for key, value in solver.statistics().items()
        }

    @property
    def differs_by_rank(self) -> bool:
        """Return True: a warm start is of a rank's own samples, or of its own layers."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the guards' counters and the warm starts."""
        return {
            path: {
                "guard": solver.guard.state_dict(),
                "warm_start": {} if solver.warm_start is None else solver.warm_start.state_dict(),
            }
            for path, solver in self.solvers.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has returned."""
        if state.keys() != self.solvers.keys():
            raise ConfigError(
                f"parallel.part: the checkpoint has the parts {', '.join(state)}, this run {', '.join(self.solvers)}; "
                "expected the same. Set part to those of the checkpoint."
            )
        for path, solver in self.solvers.items():
            solver.guard.load_state_dict(state[path]["guard"])
            if solver.warm_start is not None:
                solver.warm_start.load_state_dict(state[path]["warm_start"])
