"""Problems with a task axis on the device equal those on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mlotool import (
    SABA,
    ConjugateGradient,
    EvolutionStrategies,
    Exact,
    FixedPoint,
    Implicit,
    Neumann,
    Nystrom,
    Penalty,
    Unrolled,
)
from mlotool.hypergradient import NormalEquationConjugateGradient
from tests.gpu.placed import CPU, follow, parameters, placed, relative_error
from tests.problem.test_tasks import TASKS, maml

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The .* solve at problem 'learner'")]

# Damped: an error of the loss's curvature would decide which way a solver goes.
ALGORITHMS: dict[str, Callable[[], Any]] = {
    "unrolled": Unrolled,
    "kept": lambda: Unrolled(remat=False),
    "exact": lambda: Implicit(Exact(damping=1.0)),
    "cg": lambda: Implicit(ConjugateGradient(4, 1e-8, damping=5.0), warm_start=True),
    "normal_cg": lambda: Implicit(NormalEquationConjugateGradient(3, 1e-8, damping=5.0)),
    "neumann": lambda: Implicit(Neumann(4, 0.05)),
    "fixed_point": lambda: Implicit(FixedPoint(4, 0.05), warm_start=True),
    "nystrom": lambda: Implicit(Nystrom(rank=3, rho=5.0)),
    "finite_difference": lambda: Implicit(Neumann(2, 0.05), "finite_difference"),
    "penalty": lambda: Penalty(multiplier=20.0, num_steps=2, step_size=0.02),
    "saba": lambda: SABA(step_size=0.02),
    "evolution": lambda: EvolutionStrategies(num_pairs=2, sigma=0.01),
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


@pytest.mark.parametrize("clip", [0.3])
def test_each_task_is_clipped_on_the_device(clip: float, device: torch.device) -> None:
    ends = [
        parameters(follow(placed(maml(TASKS, Unrolled(), gradient_clip_norm=clip), where), 4))
        for where in (CPU, device)
    ]
    assert relative_error(ends[1], ends[0]) < 1e-9
