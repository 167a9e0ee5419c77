"""Hypergradients on the device against plain autograd programs that solve every level there."""

from collections.abc import Callable

import pytest
import torch

from mlotool.hypergradient import AbstractSolver, ConjugateGradient, Exact, Implicit
from tests import programs
from tests.gpu.placed import relative_error

pytestmark = pytest.mark.gpu

CASES = {
    "bilevel": programs.bilevel,
    "ridge": programs.ridge,
    "logistic": programs.logistic,
    "trilevel": programs.trilevel,
    "two_path": programs.two_path,
    "diamond": programs.diamond,
    "nested": programs.nested,
}
SOLVERS: dict[str, Callable[[], AbstractSolver]] = {
    "exact": Exact,
    "cg": lambda: ConjugateGradient(max_iterations=50, tolerance=1e-14),
}
SOLVED = ("bilevel", "ridge", "logistic", "trilevel", "two_path", "diamond")


def error(case_of: Callable[..., programs.Case], algorithm: Callable[[], Implicit], device: torch.device) -> float:
    with device:
        case = case_of(0.05)
        program, expected = case.program(algorithm), case.reference()
    found = program.gradient(case.top)["x"]
    assert found.device == expected.device == device
    return relative_error(found, expected)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", CASES)
def test_reverse_products(name: str, solver: str, device: torch.device) -> None:
    assert error(CASES[name], lambda: Implicit(SOLVERS[solver]()), device) < 1e-8


@pytest.mark.parametrize("name", SOLVED)
def test_finite_differences(name: str, device: torch.device) -> None:
    assert error(CASES[name], lambda: Implicit(Exact(), product="finite_difference"), device) < 1e-5
