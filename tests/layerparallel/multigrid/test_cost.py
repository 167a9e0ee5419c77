import pytest
import torch
from torch import Tensor

from mlotool.layerparallel import BatchedStep, critical_path
from tests.layerparallel.multigrid.reference import mgrit, mgrit_adjoint


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


@pytest.mark.parametrize(("relaxation", "part"), [("F", 7 / 3), ("FCF", 11 / 3)])
def test_the_literature_counts_so_many_layers_a_cycle(relaxation: str, part: float) -> None:
    path = critical_path(4**7, 4, None, relaxation, 1, 1)
    assert path.textbook_per_cycle / 4**7 == pytest.approx(part, abs=1e-3)
    # What ends a cycle begins the next one, which saves more than the coarse operators cost.
    assert sum(path.total_by_level) < path.textbook_per_cycle


def test_enough_workers_make_it_faster_than_the_serial_pass() -> None:
    path = critical_path(2048, 4, None, "FCF", 2, 512)
    assert path.critical < 2048 / 10
    assert path.speedup == 2048 / path.critical
    assert critical_path(2048, 4, None, "FCF", 2, 1).speedup < 1 / 6
