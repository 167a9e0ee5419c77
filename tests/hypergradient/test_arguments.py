"""Arguments of a wrong kind are refused by every hypergradient and solver, each by its name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlotool import (
    KFAC,
    SABA,
    ConjugateGradient,
    EvolutionStrategies,
    Exact,
    FixedPoint,
    Identity,
    Implicit,
    Neumann,
    NormalEquationConjugateGradient,
    Nystrom,
    Penalty,
    Unrolled,
)
from mlotool.core.errors import ConfigError

Make = Callable[..., Any]
SOLVERS: list[tuple[Make, dict[str, Any], str]] = [
    (Identity, {"step_size": None}, "found step_size=None; expected a number"),
    (Neumann, {"num_terms": "3", "step_size": 0.1}, "found num_terms='3'; expected a whole number"),
    (Neumann, {"num_terms": True, "step_size": 0.1}, "found num_terms=True; expected a whole number"),
    (Neumann, {"num_terms": 3, "step_size": "0.1"}, "found step_size='0.1'; expected a number"),
    (ConjugateGradient, {"max_iterations": "3"}, "found max_iterations='3'; expected a whole number"),
    (ConjugateGradient, {"tolerance": "x"}, "found tolerance='x'; expected a number"),
    (ConjugateGradient, {"damping": None}, "found damping=None; expected a number"),
    (NormalEquationConjugateGradient, {"tolerance": [1]}, "found tolerance=[1]; expected a number"),
    (FixedPoint, {"step_size": "x"}, "found step_size='x'; expected a number"),
    (FixedPoint, {"tolerance": None}, "found tolerance=None; expected a number"),
    (Exact, {"damping": "x"}, "found damping='x'; expected a number"),
    (Exact, {"max_parameters": 1.5}, "found max_parameters=1.5; expected a whole number"),
    (Nystrom, {"rho": "x"}, "found rho='x'; expected a number"),
    (KFAC, {"damping": "x"}, "found damping='x'; expected a number"),
    (KFAC, {"kind": []}, "found kind=[]; expected one of kfac, ekfac, ggn"),
    (KFAC, {"input_key": 3}, "found input_key=3; expected a text"),
]
HYPERGRADIENTS: list[tuple[Make, dict[str, Any], str]] = [
    (Implicit, {"solver": None}, "solver: found None; expected a solver that is built"),
    (Implicit, {"solver": "cg"}, "solver: found 'cg'; expected a solver that is built"),
    (Implicit, {"solver": Identity}, "solver: found the class Identity; expected a solver that is built"),
    (Implicit, {"solver": Unrolled()}, "solver: found an Unrolled; expected a solver that is built"),
    (Implicit, {"solver": Identity(), "product": ["reverse"]}, "product: found ['reverse']; expected one of reverse"),
    (Implicit, {"solver": Identity(), "radius": "1"}, "radius: found '1'; expected a number or null"),
    (Implicit, {"solver": Identity(), "warm_start": "no"}, "warm_start: found 'no'; expected true or false"),
    (Implicit, {"solver": Identity(), "report_every": "1"}, "report_every: found '1'; expected a whole number"),
    (Unrolled, {"horizon": "x"}, "horizon: found 'x'; expected a whole number or null"),
    (Unrolled, {"remat": "no"}, "remat: found 'no'; expected true or false"),
    (Penalty, {"multiplier": "x"}, "multiplier: found 'x'; expected a number or null"),
    (Penalty, {"multiplier": 1.0, "growth": "x"}, "growth: found 'x'; expected a number"),
    (Penalty, {"multiplier": 1.0, "rule": []}, "rule: found []; expected one of fixed, barrier"),
    (SABA, {"step_size": None}, "step_size: found None; expected a number"),
    (SABA, {"step_size": 0.1, "key": 3}, "key: found 3; expected a text or null"),
    (EvolutionStrategies, {"sigma": None}, "sigma: found None; expected a number"),
    (EvolutionStrategies, {"seed": "x"}, "seed: found 'x'; expected a whole number"),
    (EvolutionStrategies, {"seed": 2**70}, "seed: found 1180591620717411303424; expected a whole number of at least 0"),
    (EvolutionStrategies, {"persistent": "no"}, "persistent: found 'no'; expected true or false"),
]


@pytest.mark.parametrize(("make", "given", "said"), SOLVERS)
def test_a_solver_refuses(make: Make, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make(**given)
    assert str(refused.value).startswith(f"{make.__name__}: {said}")


@pytest.mark.parametrize(("make", "given", "said"), HYPERGRADIENTS)
def test_a_hypergradient_refuses(make: Make, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make(**given)
    assert str(refused.value).startswith(f"hypergradient.{said}")


def test_numbers_of_other_classes_are_taken() -> None:
    count: Any = np.int64(3)
    assert Neumann(count, 1).num_terms == 3
    half: Any = np.float32(0.5)
    assert ConjugateGradient(tolerance=0, damping=half).tolerance == 0
    assert Unrolled(horizon=count).horizon == 3
