"""Every algorithm on the device follows itself on the CPU."""

import pytest
import torch

from tests.gpu.placed import CPU, follow, parameters, placed, relative_error
from tests.hypergradient.every_algorithm import EVERY, program

pytestmark = [
    pytest.mark.gpu,
    # A few steps of a network of forty parameters: solvers say what they think of its curvature.
    pytest.mark.filterwarnings("ignore:The .* solve at problem 'model'"),
]

TICKS = 4
"""Two steps of the upper problem."""


def tolerance(name: str) -> float:
    """Differences of losses magnify rounding errors; all else is as exact as float64."""
    return 1e-5 if name.endswith("_difference") or name == "evolution" else 1e-9


@pytest.mark.parametrize("name", EVERY)
def test_it_equals_the_cpu(name: str, device: torch.device) -> None:
    if name.startswith("ggn"):
        pytest.importorskip("curvlinops")
    found = {}
    for where in (CPU, device):
        made = follow(placed(program(EVERY[name]), where), TICKS)
        gradient = made.gradient("weigher")
        assert all(tensor.device == where for tensor in gradient.values())
        found[where] = parameters(made), gradient
    (theta, gradient), (expected_theta, expected_gradient) = found[device], found[CPU]
    assert relative_error(theta, expected_theta) < tolerance(name)
    assert relative_error(gradient, expected_gradient) < tolerance(name)
