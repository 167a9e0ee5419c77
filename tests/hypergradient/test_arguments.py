"""Arguments of a wrong kind are refused by every hypergradient and solver, each by its name."""

import math
import re
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
    (ConjugateGradient, {"tolerance": "x"}, "found tolerance='x'; expected a number"),
    (NormalEquationConjugateGradient, {"tolerance": [1]}, "found tolerance=[1]; expected a number"),
    (Exact, {"max_parameters": 1.5}, "found max_parameters=1.5; expected a whole number"),
    (Nystrom, {"rho": "x"}, "found rho='x'; expected a number"),
    (KFAC, {"kind": []}, "found kind=[]; expected one of kfac, ekfac, ggn"),
    (KFAC, {"input_key": 3}, "found input_key=3; expected a text"),
]
HYPERGRADIENTS: list[tuple[Make, dict[str, Any], str]] = [
    (Implicit, {"solver": "cg"}, "solver: found 'cg'; expected a solver that is built"),
    (Implicit, {"solver": Identity}, "solver: found the class Identity; expected a solver that is built"),
    (Implicit, {"solver": Identity(), "product": ["reverse"]}, "product: found ['reverse']; expected one of reverse"),
    (Implicit, {"solver": Identity(), "warm_start": "no"}, "warm_start: found 'no'; expected true or false"),
    (Unrolled, {"horizon": "x"}, "horizon: found 'x'; expected a whole number or null"),
    (Penalty, {"multiplier": "x"}, "multiplier: found 'x'; expected a number or null"),
    (SABA, {"step_size": None}, "step_size: found None; expected a number"),
    (SABA, {"step_size": 0.1, "key": 3}, "key: found 3; expected a text or null"),
    (EvolutionStrategies, {"seed": 2**70}, "seed: found 1180591620717411303424; expected a whole number of at least 0"),
]


# Out of range, by the class's own rule.
RANGES: list[tuple[Make, dict[str, Any], str]] = [
    (ConjugateGradient, {"damping": -1.0}, "damping=-1.0"),
    (Neumann, {"num_terms": 1, "step_size": math.nan}, "step_size=nan"),
    (NormalEquationConjugateGradient, {"tolerance": math.nan}, "tolerance=nan"),
    (Identity, {"step_size": 0.0}, "found step_size=0.0"),
    (Exact, {"max_parameters": 0}, "max_parameters=0"),
    (FixedPoint, {"num_iterations": 0}, "found num_iterations=0"),
    (Nystrom, {"rank": 0}, "found rank=0"),
    (KFAC, {"kind": "ekfca"}, "found kind='ekfca'.*Did you mean 'ekfac'"),
    (
        Penalty,
        {"rule": "barrier", "barrier": 1.0, "growth": 1.0},
        "growth: found 1.0; expected .* 0 with rule: barrier",
    ),
    (SABA, {"step_size": -1.0}, "step_size: found -1.0; expected a positive number"),
    (EvolutionStrategies, {"restart_every": 2}, "restart_every: found 2; expected null, or .* with persistent"),
    (Unrolled, {"horizon": 0}, "horizon: found 0; expected a whole number of at least 1"),
    (Unrolled, {"product": "forward", "remat": False}, "remat: found False; expected true with product: forward"),
    (Implicit, {"solver": Identity(), "report_every": -1}, "report_every: found -1; expected a whole number"),
]


@pytest.mark.parametrize(("make", "given", "said"), [*SOLVERS, *HYPERGRADIENTS, *RANGES])
def test_an_argument_is_refused(make: Make, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make(**given)
    said = re.escape(said) if (make, given, said) not in RANGES else said
    assert re.match(rf"(hypergradient\.|{make.__name__}: .*){said}", str(refused.value))


def test_numbers_of_other_classes_are_taken() -> None:
    count: Any = np.int64(3)
    assert Neumann(count, 1).num_terms == 3
    half: Any = np.float32(0.5)
    assert ConjugateGradient(tolerance=0, damping=half).tolerance == 0
    assert Unrolled(horizon=count).horizon == 3
