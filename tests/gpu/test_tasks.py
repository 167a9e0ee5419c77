"""Problems with a task axis on the device equal those on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mlotool import hypergradient as by
from tests.gpu.placed import CPU, follow, parameters, placed, relative_error
from tests.problem.test_tasks import TASKS, maml

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The .* solve at problem 'learner'")]

# Damped: an error of the loss's curvature would decide which way a solver goes.
ALGORITHMS: dict[str, Callable[[], Any]] = {
    "unrolled": by.Unrolled,
    "kept": lambda: by.Unrolled(remat=False),
    "exact": lambda: by.Implicit(by.Exact(damping=1.0)),
    "cg": lambda: by.Implicit(by.ConjugateGradient(4, 1e-8, damping=5.0), warm_start=True),
    "normal_cg": lambda: by.Implicit(by.NormalEquationConjugateGradient(3, 1e-8, damping=5.0)),
    "neumann": lambda: by.Implicit(by.Neumann(4, 0.05)),
    "fixed_point": lambda: by.Implicit(by.FixedPoint(4, 0.05), warm_start=True),
    "nystrom": lambda: by.Implicit(by.Nystrom(rank=3, rho=5.0)),
    "finite_difference": lambda: by.Implicit(by.Neumann(2, 0.05), "finite_difference"),
    "penalty": lambda: by.Penalty(multiplier=20.0, num_steps=2, step_size=0.02),
    "saba": lambda: by.SABA(step_size=0.02),
    "evolution": lambda: by.EvolutionStrategies(num_pairs=2, sigma=0.01),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_equals_the_cpu(name: str, device: torch.device) -> None:
    found = []
    for where in (CPU, device):
        program = follow(placed(maml(TASKS, ALGORITHMS[name]()), where), 4)
        assert program.problems["learner"].theta["0.weight"].shape[0] == TASKS
        found.append((parameters(program), program.gradient("meta")))
    tolerance = 1e-5 if name in ("finite_difference", "evolution") else 1e-9
    assert relative_error(found[1][0], found[0][0]) < tolerance
    assert relative_error(found[1][1], found[0][1]) < tolerance


def test_each_task_is_clipped_on_the_device(device: torch.device) -> None:
    clipped = (placed(maml(TASKS, by.Unrolled(), gradient_clip_norm=0.3), where) for where in (CPU, device))
    expected, found = (parameters(follow(program, 4)) for program in clipped)
    assert relative_error(found, expected) < 1e-9
