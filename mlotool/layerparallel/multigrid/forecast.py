"""What speed is to be expected of a multigrid part, in a sentence."""

from mlotool.layerparallel.multigrid.choice import Choice
from mlotool.layerparallel.multigrid.cost import critical_path
from mlotool.layerparallel.multigrid.grids import make_grids
from mlotool.layerparallel.multigrid.residual import MultigridResidual
from mlotool.layerparallel.multigrid.settings import Method


def forecast(name: str, solver: MultigridResidual) -> str:
    """Return the critical path of a training step beside that of a serial one.

    Args:
        name: of the layers.
        solver: of them; of `cycles: auto` after a first training step.

    Example:
        >>> from torch import nn
        >>> print(forecast("layers", MultigridResidual(lambda: nn.Linear(3, 3), 256, cycles=1)))
        layers has 256 layers: forward and backward, a serial step evaluates 512 of them one after the other, \
multigrid 2152 on one worker and 82 on 64, which is at most 6.24 times as fast, where sending is free.
    """
    guard, num_layers = solver.guard, solver.num_layers
    methods: tuple[Method, ...] = (solver.method, solver.backward_method)
    chosen = ""
    if isinstance(guard, Choice):
        if guard.plan is None:
            return f"{name} has {num_layers} layers, which run one after the other: cycles=auto found nothing cheaper."
        methods = (guard.plan.method, guard.plan.method)
        chosen = f" (cycles={guard.plan.method.cycles}, coarsening={guard.plan.method.coarsening} were chosen)"
    grids = [make_grids(num_layers, each.coarsening, each.levels) for each in methods]
    if all(len(each) == 1 for each in grids):
        return f"{name} has {num_layers} layers, too few for a coarse grid: they run one after the other."
    workers = max(each[0].num_chunks for each in grids)
    one, all_chunks = (sum(_critical(num_layers, each, count) for each in methods) for count in (1, workers))
    return (
        f"{name} has {num_layers} layers: forward and backward, a serial step evaluates {2 * num_layers} of them one "
        f"after the other, multigrid{chosen} {one} on one worker and {all_chunks} on {workers}, which is at most "
        f"{2 * num_layers / all_chunks:.2f} times as fast, where sending is free."
    )


def _critical(num_layers: int, method: Method, workers: int) -> int:
    return critical_path(
        num_layers,
        method.coarsening,
        method.levels,
        method.relaxation,
        method.cycles,
        workers,
        cycle=method.cycle,
        nested=method.nested,
    ).critical
