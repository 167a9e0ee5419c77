"""Complex parameters: refused where a hypergradient passes through them, right in problems above and by themselves."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import SABA, ConjugateGradient, EvolutionStrategies, Exact, Identity, Implicit, Penalty, Program, Unrolled
from mlotool.core.errors import ConfigError
from tests.hypergradient.two_levels import ticked, two_levels
from tests.programs import Point

START = torch.tensor([0.3 + 0.2j, -0.5 + 0.4j], dtype=torch.complex128)
MATRIX = torch.tensor([[2.0, 0.5], [0.5, 1.5]], dtype=torch.float64)
TARGET = torch.tensor([1.0, -1.0], dtype=torch.float64)


class Pairs(nn.Module):
    """The same as real numbers."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.view_as_real(value).clone())

    def forward(self) -> Tensor:
        return torch.view_as_complex(self.x)


def inner(batch: Any, *, w: Any, u: Any) -> Tensor:
    x, c = w(), u()
    size = (x.abs() ** 2).sum()
    return 0.5 * (x.conj() @ (MATRIX.to(x.dtype) @ x)).real - (x * c.conj()).real.sum() + 0.1 * size * c.abs().sum()


def outer(batch: Any, *, w: Any, u: Any) -> Tensor:
    return ((w() - TARGET).abs() ** 2).sum() + 0.05 * (u().abs() ** 2).sum()


def bilevel(
    algorithm: Any, lower: nn.Module | None = None, upper: type[nn.Module] = Point, trace: str | None = None, **of: Any
) -> Program:
    sgd = {"optimizer": partial(torch.optim.SGD, lr=0.1)}
    settings = {"of_upper": sgd | of, "of_program": {"trace": trace}, "unroll_steps": 2, **sgd}
    return two_levels((lower or Point(TARGET / 3), inner), (upper(START), outer), algorithm, **settings)


def end(program: Program) -> Tensor:
    found = ticked(program, 6).problems["u"].theta["x"].detach()
    return found if found.is_complex() else torch.view_as_complex(found)


ALGORITHMS = [
    Implicit(Exact(), "forward"),
    Implicit(ConjugateGradient(4)),
    Implicit(Identity(), "finite_difference"),
    Unrolled(),
    Penalty(0.1),
    SABA(0.1),
    EvolutionStrategies(),
]


@pytest.mark.filterwarnings("ignore:The .* solve at problem")
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_refused_in_a_lower_problem(algorithm: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"w.module: found complex parameters with hypergradient other than first_order; expected real",
    ):
        bilevel(algorithm, Point(TARGET + 0j), Pairs)
    # As the message says.
    assert end(bilevel(algorithm, Pairs(TARGET + 0j), Pairs)).isfinite().all()


@pytest.mark.filterwarnings("ignore:The .* solve at problem", "ignore:problems.* not traced")
@pytest.mark.parametrize(
    ("algorithm", "trace"),
    [
        *[(each, None) for each in ALGORITHMS[:-1]],
        *[(each, "eager") for each in (Implicit(ConjugateGradient(1)), *ALGORITHMS[2:4])],
    ],
)
def test_right_in_an_upper_problem(algorithm: Any, trace: str | None) -> None:
    settings = {"optimizer": partial(torch.optim.Adam, lr=0.1)} if trace else {"gradient_clip_norm": 0.3}
    found, expected = (end(bilevel(algorithm, upper=upper, trace=trace, **settings)) for upper in (Point, Pairs))
    assert torch.allclose(found, expected, rtol=1e-8, atol=1e-10)
