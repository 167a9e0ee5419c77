"""Multigrid's critical path with many workers, beside the speed-ups that the paper measured on so many cores."""

from typing import Any

import torch

from mlotool.layerparallel.multigrid import critical_path, mgrit, mgrit_adjoint
from mlotool.models import DenseResidualNetwork

NUM_LAYERS = (256, 512, 1024, 2048)
NUM_WORKERS = tuple(2**power for power in range(10))
LAYERS_PER_WORKER, COARSENING = 4, 4
RELATIVE_TOLERANCE, MAX_CYCLES = 1e-5, 30
NUM_POINTS = 100
STARTS = {"equal layers": True, "independent layers": False}
PAPER = {
    "Peaks": (1.5, 2.5, 4.3, 7.7),
    "Indian Pines": (2.0, 3.3, 6.1, 10.3),
    "MNIST": (3.4, 4.8, 10.5, 16.0),
}
"""Günther et al. 2020, Table 1: measured speed-ups of a gradient evaluation, by NUM_LAYERS, on a quarter as many cores,
residuals down by five orders."""

ONE_SHOT_CYCLES = 2
PAPER_TRAINING = {512: {"Indian Pines": 4.4, "MNIST": 8.5}, 1024: {"Peaks": 6.0}}
"""Its Table 2: whole trainings with two cycles a step (m1 = m2 = 2), on a quarter as many cores as layers."""


def compare() -> list[dict[str, Any]]:
    """Return a row for each start of the weights, relaxation and number of layers."""
    return [
        _row(start, relaxation, num_layers)
        for start in STARTS
        for relaxation in ("F", "FCF")
        for num_layers in NUM_LAYERS
    ]


def _row(start: str, relaxation: str, num_layers: int) -> dict[str, Any]:
    cycles = _cycles(start, relaxation, num_layers)
    return {
        "start": start,
        "relaxation": relaxation,
        "num_layers": num_layers,
        "cycles_of_states": cycles[0],
        "cycles_of_adjoints": cycles[1],
        "workers_in_paper": num_layers // LAYERS_PER_WORKER,
        "bound": _bound(num_layers, relaxation, cycles, num_layers // LAYERS_PER_WORKER),
        "paper": {name: rows[NUM_LAYERS.index(num_layers)] for name, rows in PAPER.items()},
        "one_shot_bound": _bound(
            num_layers, relaxation, (ONE_SHOT_CYCLES, ONE_SHOT_CYCLES), num_layers // LAYERS_PER_WORKER
        ),
        "paper_training": PAPER_TRAINING.get(num_layers, {}),
        "bound_by_workers": {workers: _bound(num_layers, relaxation, cycles, workers) for workers in NUM_WORKERS},
    }


def _cycles(start: str, relaxation: str, num_layers: int) -> tuple[int, int]:
    """Return how many cycles states and adjoints of the Peaks network take for five orders; in float64."""
    torch.manual_seed(0)
    network = DenseResidualNetwork([2], 5, num_layers, equal_start=STARTS[start]).double()
    points = 6 * torch.rand(NUM_POINTS, 2, dtype=torch.float64) - 3
    grid: Any = (num_layers, network.layers.h)
    settings: Any = {"coarsening": COARSENING, "relaxation": relaxation, "cycles": MAX_CYCLES}
    with torch.no_grad():
        first = network.opening(points)
        states, residuals = mgrit(network.layers, first, *grid, **settings, relative_tolerance=RELATIVE_TOLERANCE)
    last = states[-1].requires_grad_()
    loss = torch.nn.functional.cross_entropy(network.classifier(last), torch.arange(NUM_POINTS) % 5)
    (cotangent,) = torch.autograd.grad(loss, last)
    _, adjoint_residuals = mgrit_adjoint(
        network.layers, states.detach(), cotangent, *grid, **settings, relative_tolerance=RELATIVE_TOLERANCE
    )
    for history in (residuals, adjoint_residuals):
        assert history[-1] <= RELATIVE_TOLERANCE * history[0], "not converged: the cycles are no count of it"
    return len(residuals) - 1, len(adjoint_residuals) - 1


def _bound(num_layers: int, relaxation: str, cycles: tuple[int, int], workers: int) -> float:
    """Return serial layer evaluations of a state and an adjoint pass over critical ones, counted alike."""
    critical = sum(critical_path(num_layers, COARSENING, None, relaxation, each, workers).critical for each in cycles)
    return 2 * num_layers / critical
