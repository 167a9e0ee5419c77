"""Multigrid as a setting of a problem: its training steps solve a part of its module across the layers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.hypergradient import Identity, Implicit
from mlotool.layerparallel.multigrid.cost import critical_path
from mlotool.layerparallel.multigrid.grids import make_grids
from mlotool.layerparallel.multigrid.layers import Layers, WholeLayers
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
        part: the name of the layers in the problem's module, such as "residual": a module of `Layers`, a
            `MultigridResidual`, or an nn.Sequential of blocks that keep the shape, shortcut included. None looks
            for the first two kinds, and else for a Sequential named "residual".
        coarsening: and all others: the fields of `MultigridSettings`. With `warm_start` samples are known by the
            batch's `index`, and without one all batches are taken for the same.

    Raises:
        ConfigError: a setting is out of range; `attach`: the module has no such layers, or a block changes the shape.

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

    part: str | None = field(default=None, kw_only=False)

    def __post_init__(self) -> None:
        self.solvers: dict[str, MultigridResidual] = {}

    def attach(self, name: str, module: nn.Module) -> None:
        """Find the layers of the problem's module."""
        self.module = module
        settings: Any = {each.name: getattr(self, each.name) for each in fields(MultigridSettings)}
        for path, part in _find(name, module, self.part).items():
            if isinstance(part, MultigridResidual):
                # Its own settings are those of a module that is used by itself.
                part = part.serial().layers
            try:
                self.solvers[path] = MultigridResidual(part, **settings)
            except ConfigError as error:
                raise ConfigError(f"problems.{name}.parallel: {error}") from error

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
        for solver in self.solvers.values():
            solver.train(self.module.training)
        if "" in self.solvers:
            return self.solvers[""](*args, **kwargs)
        with _replaced(self.module, self.solvers):
            return self.module(*args, **kwargs)

    def forecast(self) -> list[str]:
        """Return the critical path of a training step beside that of a serial one, in sentences."""
        found = []
        for path, solver in self.solvers.items():
            methods = (solver.method, solver.backward_method)
            num_layers = solver.num_layers
            [workers, *_] = {make_grids(num_layers, each.coarsening, each.levels)[0].num_chunks for each in methods}
            one, all_chunks = (
                [
                    critical_path(
                        num_layers, each.coarsening, each.levels, each.relaxation, each.cycles, count, cycle=each.cycle
                    ).critical
                    for each in methods
                ]
                for count in (1, workers)
            )
            found.append(
                f"{path or 'the module'} has {num_layers} layers: forward and backward, a serial step evaluates "
                f"{2 * num_layers} of them one after the other, multigrid {sum(one)} on one worker and "
                f"{sum(all_chunks)} on {workers}, which is at most {2 * num_layers / sum(all_chunks):.2f} times as "
                "fast, where sending is free."
            )
        return found

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
        for path, solver in self.solvers.items():
            solver.guard.load_state_dict(state[path]["guard"])
            if solver.warm_start is not None:
                solver.warm_start.load_state_dict(state[path]["warm_start"])


def _find(name: str, module: nn.Module, part: str | None) -> dict[str, nn.Module]:
    """Return the layers by their path in the module."""
    children = dict(module.named_modules())
    if part is None:
        found: dict[str, nn.Module] = {}
        for path, child in children.items():
            is_inside = any(path.startswith(f"{outer}." if outer else "") for outer in found)
            if _is_run(child) and not is_inside:
                found[path] = child
        if found:
            return found
        part = "residual"
    child = children.get(part)
    if child is not None and _is_run(child):
        return {part: child}
    if isinstance(child, nn.Sequential):
        return {part: WholeLayers(child)}
    runs = [path for path, each in children.items() if path and isinstance(each, nn.Sequential) and len(each) > 1]
    raise ConfigError(
        f"problems.{name}.parallel.part: found {type(child).__name__ if child is not None else 'nothing'} at "
        f"'{part}' in {type(module).__name__}; expected mlotool.models.ResidualLayers, or an nn.Sequential of blocks "
        f"that keep the shape. {'Name one of ' + ', '.join(runs[:8]) if runs else 'Use a model that has one'}."
    )


def _is_run(module: nn.Module) -> bool:
    return isinstance(module, MultigridResidual | Layers)


@contextmanager
def _replaced(module: nn.Module, parts: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put other modules into places of a module, and the old ones back."""
    places = []
    for path, part in parts.items():
        parent, _, attribute = path.rpartition(".")
        holder = module.get_submodule(parent)._modules
        places.append((holder, attribute, holder[attribute]))
        holder[attribute] = part
    try:
        yield
    finally:
        for holder, attribute, own in places:
            holder[attribute] = own
