"""MGRIT against plain loops in numpy, counts of layers, and any number of layers."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.layerparallel import BatchedStep, Multigrid, critical_path
from tests.layerparallel.multigrid.reference import Network, Reference, levels_of, mgrit, mgrit_adjoint
from tests.layerparallel.multigrid.test_residual import Wave
from tests.layerparallel.multigrid.test_setting import network, problem, train

WIDTH, BATCH = 3, 4


def plain_step(network: Network) -> Callable[[Tensor, int, float], Tensor]:
    weight, bias = torch.from_numpy(network.weight), torch.from_numpy(network.bias)
    return lambda u, n, h: u + h * torch.tanh(u @ weight[n].T + bias[n])


def batched_step(network: Network) -> BatchedStep:
    weight, bias = torch.from_numpy(network.weight), torch.from_numpy(network.bias)

    def evaluate(u: Tensor, layers: range, h: float) -> Tensor:
        part = slice(layers.start, layers.stop, layers.step)
        return u + h * torch.tanh(torch.baddbmm(bias[part, None], u, weight[part].mT))

    return BatchedStep(evaluate)


def start(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(BATCH, WIDTH))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["V", "F"])
@pytest.mark.parametrize("levels", [2, 3, None, [4, 2, 2], [2, 8]])
@pytest.mark.parametrize("relaxation", ["F", "FCF"])
def test_histories_equal_the_plain_algorithm(relaxation: str, levels: Any, kind: str) -> None:
    """With one factor for so many levels, or one for each."""
    num_layers, cycles = 64, 3
    network, u0, cotangent = Network.random(num_layers), start(), start(2)
    is_list = isinstance(levels, list)
    factors = levels if is_list else levels_of(num_layers, 4, levels)
    expected, norms = Reference(network.forward_phi(factors), factors, relaxation, kind).run(u0, num_layers, cycles)
    settings = (num_layers, network.h, *((levels, None) if is_list else (4, levels)), relaxation, cycles)
    step = batched_step(network)
    states, residuals = mgrit(step, torch.from_numpy(u0), *settings, cycle=kind)
    np.testing.assert_allclose(residuals, norms, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(states, expected, rtol=0, atol=1e-10)
    # At states that are not converged, so that each linearisation matters.
    phi = network.adjoint_phi(factors, states.numpy())
    expected, norms = Reference(phi, factors, relaxation, kind).run(cotangent, num_layers, cycles)
    adjoints, residuals = mgrit_adjoint(step, states, torch.from_numpy(cotangent), *settings, cycle=kind)
    np.testing.assert_allclose(residuals, norms, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(adjoints.numpy()[::-1], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("relaxation", "cycles"), [("F", 16), ("FCF", 8)])
@pytest.mark.parametrize("levels", [2, None])
def test_it_is_exact_after_a_finite_number_of_cycles(relaxation: str, cycles: int, levels: int | None) -> None:
    network, u0, cotangent = Network.random(64, depth=16.0), start(), start(2)
    expected = network.states(u0)
    settings = (64, network.h, 4, levels, relaxation)
    states, _ = mgrit(batched_step(network), torch.from_numpy(u0), *settings, cycles)
    np.testing.assert_allclose(states, expected, rtol=1e-12, atol=1e-12)
    adjoints, _ = mgrit_adjoint(batched_step(network), states, torch.from_numpy(cotangent), *settings, cycles)
    exact = network.adjoints(expected, cotangent)
    np.testing.assert_allclose(adjoints, exact, rtol=1e-12, atol=1e-12 * np.abs(exact).max())


def test_two_grids_with_f_relaxation_are_parareal() -> None:
    num_layers, factor = 24, 4
    network, u0 = Network.random(num_layers), start()

    def fine(k: int, u: np.ndarray) -> np.ndarray:
        for n in range(k * factor, (k + 1) * factor):
            u = network.step(n, u, network.h)
        return u

    def coarse(k: int, u: np.ndarray) -> np.ndarray:
        return network.step(k * factor, u, factor * network.h)

    points = [u0 for _ in range(num_layers // factor + 1)]
    for cycles in range(1, 4):
        old, points = points, [u0]
        for k in range(num_layers // factor):
            points.append(coarse(k, points[k]) + fine(k, old[k]) - coarse(k, old[k]))
        states, _ = mgrit(plain_step(network), torch.from_numpy(u0), num_layers, network.h, factor, 2, "F", cycles)
        np.testing.assert_allclose(states[::factor], np.stack(points), rtol=0, atol=1e-13)


def test_nested_iteration_on_two_grids_starts_from_the_coarse_solution() -> None:
    network, u0 = Network.random(16), start()
    points = [u0]
    for k in range(4):
        points.append(network.step(4 * k, points[-1], 4 * network.h))
    states, _ = mgrit(plain_step(network), torch.from_numpy(u0), 16, network.h, 4, 2, "F", 0, nested=True)
    np.testing.assert_allclose(states[::4], np.stack(points), rtol=0, atol=1e-14)


def test_convergence_does_not_depend_on_the_number_of_layers() -> None:
    rates = []
    for num_layers in (64, 256, 512, 1024):
        network = Network.random(num_layers)
        u0 = torch.from_numpy(start())
        _, residuals = mgrit(batched_step(network), u0, num_layers, network.h, 4, None, "FCF", 6)
        rates.append((residuals[-1] / residuals[0]) ** (1 / 6))
    assert max(rates) < 0.12
    # Deeper is no worse.
    assert max(rates[2:]) < 1.5 * min(rates[2:])


def test_a_tolerance_ends_the_cycles() -> None:
    network, u0 = Network.random(64), torch.from_numpy(start())
    _, history = mgrit(batched_step(network), u0, 64, network.h, cycles=9)
    _, absolute = mgrit(batched_step(network), u0, 64, network.h, cycles=9, tolerance=history[3])
    _, relative = mgrit(batched_step(network), u0, 64, network.h, cycles=9, relative_tolerance=history[2] / history[0])
    assert absolute == history[:4]
    assert relative == history[:3]


def test_a_warm_start_goes_on() -> None:
    network, u0 = Network.random(64), torch.from_numpy(start())
    arguments = (batched_step(network), u0, 64, network.h, 4, None, "F")
    states, whole = mgrit(*arguments, 4)
    half, first = mgrit(*arguments, 2)
    found, second = mgrit(*arguments, 2, initial=half)
    torch.testing.assert_close(found, states, rtol=0, atol=1e-14)
    np.testing.assert_allclose([*first, *second[1:]], whole, rtol=1e-10)
    cotangent = torch.from_numpy(start(2))
    arguments = (batched_step(network), states, cotangent, 64, network.h, 4, None, "F")
    whole_adjoints, _ = mgrit_adjoint(*arguments, 4)
    half, _ = mgrit_adjoint(*arguments, 2)
    torch.testing.assert_close(mgrit_adjoint(*arguments, 2, initial=half)[0], whole_adjoints, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"coarsening": [4, 9]}, "coarsening: found"),
        ({"relaxation": "CF"}, "relaxation: found"),
        ({"initial": torch.zeros(3, 4, 3)}, r"found .* \(3, 4, 3\); expected one value per point, \(65, 4, 3\)"),
        ({"step": lambda u, n, h: None}, "step: layer 0 returned None"),
        ({"step": lambda u, n, h: u.sub_(h * u)}, "step: layer 0 changed the state"),
        ({"step": lambda u, n, h: u[:, :2]}, r"layer 0 turned a state of shape \(4, 3\) into \(4, 2\)"),
        ({"u0": torch.ones(1).long()}, "u0: found"),
    ],
)
def test_wrong_arguments_are_refused(changed: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"step": lambda u, n, h: u - h * u, "u0": torch.zeros(4, 3), "num_layers": 64, "h": 0.1}
    with pytest.raises(ConfigError, match=message):
        mgrit(**{**good, **changed})


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


@pytest.mark.one_in(3)
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


@pytest.mark.parametrize(("optimizer", "batch_size", "steps"), [(lbfgs, 12, 9), (adam, 4, 24)], ids=["lbfgs", "adam"])
def test_inexact_gradients_train_as_well_as_the_serial_ones(optimizer: Any, batch_size: int, steps: int) -> None:
    settings = {"optimizer": optimizer, "batch_size": batch_size}
    parallel = Multigrid(cycles=2, backward_cycles=2, warm_start=True)
    torch.manual_seed(0)
    layers = Wave(32, h=0.03)
    mine, serial = (train(problem(how, network(copy.deepcopy(layers)), **settings), steps) for how in (parallel, None))
    epoch = 12 // batch_size
    last, expected = (sum(losses[-epoch:]) / epoch for losses in (mine, serial))
    assert last < 0.5 * mine[0]
    assert last < 1.1 * expected
    assert parallel.statistics()["forward_residual_2"] > 1e-9
