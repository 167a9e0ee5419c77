"""Counts of layers, any number of layers, and states, adjoints and parameters that converge together."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.layerparallel import BatchedStep, Multigrid, critical_path
from tests.layerparallel.multigrid.reference import mgrit, mgrit_adjoint
from tests.layerparallel.multigrid.test_residual import Wave
from tests.layerparallel.multigrid.test_setting import network, problem, train


class Counter:
    """A step that counts its layers, and how long a number of workers takes for each call."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.total = 0
        self.critical = 0
        self.step = BatchedStep(self.evaluate)

    def evaluate(self, values: Tensor, layers: range, h: float) -> Tensor:
        assert len(values) == len(layers)
        self.total += len(layers)
        self.critical += -(-len(layers) // self.workers)
        return values * (1 - h)


@pytest.mark.parametrize(
    ("relaxation", "cycle", "num_layers", "coarsening", "levels", "workers"),
    [
        ("F", "V", 64, 4, None, 1),
        ("FCF", "F", 48, [2, 4], None, 3),
        ("FCF", "V", 23, 3, None, 16),
        ("F", "F", 3, 4, 2, 3),
    ],
)
def test_counts_equal_those_of_the_calls(
    num_layers: int, coarsening: int | list[int], levels: int | None, relaxation: str, cycle: str, workers: int
) -> None:
    settings = (coarsening, levels, relaxation, 3)
    expected = critical_path(num_layers, *settings, workers, cycle=cycle)
    counter = Counter(workers)
    mgrit(counter.step, torch.ones(1, 1), num_layers, 0.01, *settings, cycle=cycle)
    assert (counter.total, counter.critical) == (expected.total, expected.critical)
    assert expected.critical == expected.start + 3 * sum(expected.critical_by_level)
    if num_layers == 3:
        return
    counter = Counter(workers)
    states = torch.ones(num_layers + 1, 1, 1)
    mgrit_adjoint(counter.step, states, torch.ones(1, 1), num_layers, 0.01, *settings, cycle=cycle)
    # Each group of layers is traced once for all cycles.
    assert counter.total < expected.total


NUM_LAYERS = (1, 3, 5, 7, 13)
SETTINGS = [
    {"relaxation": relaxation, "cycle": cycle, "nested": nested}
    for relaxation, cycle, nested in (("F", "V", False), ("FCF", "V", True), ("F", "F", True), ("FCF", "F", False))
]


@pytest.mark.parametrize("coarsening", [2, 3])
@pytest.mark.parametrize("num_layers", NUM_LAYERS)
def test_after_enough_cycles_it_is_the_serial_pass(num_layers: int, coarsening: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(num_layers, 3, 3, dtype=torch.float64, generator=generator) / 2
    start, cotangent = (torch.randn(2, 3, dtype=torch.float64, generator=generator) for _ in range(2))

    def step(u: Tensor, n: int, h: float) -> Tensor:
        return u + h * torch.tanh(u @ weights[n].T)

    found = [start]
    for n in range(num_layers):
        found.append(step(found[-1], n, 0.3))
    states = torch.stack(found)
    back = [cotangent]
    for n in reversed(range(num_layers)):
        leaf = states[n].clone().requires_grad_()
        back.append(torch.autograd.grad(step(leaf, n, 0.3), leaf, back[-1])[0])
    adjoints = torch.stack(back[::-1])
    for each in SETTINGS:
        settings = {"coarsening": coarsening, "cycles": num_layers, **each}
        ours, residuals = mgrit(step, start, num_layers, 0.3, **settings)  # type: ignore[arg-type]
        torch.testing.assert_close(ours, states, rtol=0, atol=1e-13)
        assert residuals[-1] < 1e-13
        ours, _ = mgrit_adjoint(step, states, cotangent, num_layers, 0.3, **settings)  # type: ignore[arg-type]
        torch.testing.assert_close(ours, adjoints, rtol=0, atol=1e-13)


# One iteration a tick, with as many trial steps as its line search wants.
lbfgs = partial(torch.optim.LBFGS, max_iter=1, max_eval=20, history_size=10, line_search_fn="strong_wolfe")
adam = partial(torch.optim.Adam, lr=0.02)


@pytest.mark.parametrize(
    ("optimizer", "batch_size", "steps"),
    [(lbfgs, 12, 15), (adam, 4, 40)],
    ids=["lbfgs", "adam"],
)
def test_inexact_gradients_train_as_well_as_the_serial_ones(optimizer: Any, batch_size: int, steps: int) -> None:
    settings = {"optimizer": optimizer, "batch_size": batch_size}
    parallel = Multigrid(cycles=2, backward_cycles=2, warm_start=True)
    torch.manual_seed(0)
    net = network(Wave(32, h=0.03))
    serial = train(problem(None, deepcopy(net), **settings), steps)
    mine = train(problem(parallel, net, **settings), steps)
    epoch = 12 // batch_size
    last, expected = (sum(losses[-epoch:]) / epoch for losses in (mine, serial))
    assert last < 0.5 * mine[0]
    assert last < 1.1 * expected
    assert parallel.statistics()["forward_residual_2"] > 1e-9
