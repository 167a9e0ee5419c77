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
from mlotool.core.messages import shown

Make = Callable[..., Any]
SOLVERS: list[tuple[Make, dict[str, Any]]] = [
    (Identity, {"step_size": None}),
    (Neumann, {"step_size": 0.1, "num_terms": "3"}),
    (Neumann, {"step_size": 0.1, "num_terms": True}),
    (ConjugateGradient, {"tolerance": "x"}),
    (NormalEquationConjugateGradient, {"tolerance": [1]}),
    (Exact, {"max_parameters": 1.5}),
    (Nystrom, {"rho": "x"}),
    (KFAC, {"kind": []}),
    (KFAC, {"input_key": 3}),
]
HYPERGRADIENTS: list[tuple[Make, dict[str, Any]]] = [
    (Implicit, {"solver": "cg"}),
    (Implicit, {"solver": Identity}),
    (Implicit, {"solver": Identity(), "product": ["reverse"]}),
    (Implicit, {"solver": Identity(), "warm_start": "no"}),
    (Unrolled, {"horizon": "x"}),
    (Penalty, {"multiplier": "x"}),
    (SABA, {"step_size": None}),
    (SABA, {"step_size": 0.1, "key": 3}),
    (EvolutionStrategies, {"seed": 2**70}),
]


# Out of range, by the class's own rule.
RANGES: list[tuple[Make, dict[str, Any]]] = [
    (ConjugateGradient, {"damping": -1.0}),
    (Neumann, {"num_terms": 1, "step_size": math.nan}),
    (NormalEquationConjugateGradient, {"tolerance": math.nan}),
    (Identity, {"step_size": 0.0}),
    (Exact, {"max_parameters": 0}),
    (FixedPoint, {"num_iterations": 0}),
    (Nystrom, {"rank": 0}),
    (KFAC, {"kind": "ekfca"}),
    (Penalty, {"rule": "barrier", "barrier": 1.0, "growth": 1.0}),
    (SABA, {"step_size": -1.0}),
    (EvolutionStrategies, {"restart_every": 2}),
    (Unrolled, {"horizon": 0}),
    (Unrolled, {"product": "forward", "remat": False}),
    (Implicit, {"solver": Identity(), "report_every": -1}),
]


@pytest.mark.parametrize(("make", "given"), [*SOLVERS, *HYPERGRADIENTS, *RANGES])
def test_an_argument_is_refused(make: Make, given: dict[str, Any]) -> None:
    key, value = list(given.items())[-1]
    found = re.escape(shown(value))
    with pytest.raises(
        ConfigError, match=rf"({make.__name__}|hypergradient)\.{key}: found {found}; expected .* Correct"
    ):
        make(**given)


def test_numbers_of_other_classes_are_taken() -> None:
    count: Any = np.int64(3)
    assert Neumann(count, 1).num_terms == 3
    half: Any = np.float32(0.5)
    assert ConjugateGradient(tolerance=0, damping=half).tolerance == 0
    assert Unrolled(horizon=count).horizon == 3
