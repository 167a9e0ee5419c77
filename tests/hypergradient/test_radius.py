"""Finite differences whatever the scale of the parameters, and the warning where they depend on their radius."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.hypergradient import Identity, Implicit
from mlotool.hypergradient.products import FiniteDifferenceProduct, ReverseProduct, default_radius
from mlotool.hypergradient.vector import apart, norm
from mlotool.problem.interface import LowerProblem, LowerView
from mlotool.program import Graph, Problem, Program

INPUT = torch.randn(32, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGET = torch.randint(0, 3, (32,), generator=torch.Generator().manual_seed(1))


class Point(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(value)

    def forward(self) -> Tensor:
        return self.x


def loss(scale: float) -> Any:
    """A small network's, weighted by sample, in units of which the parameters are multiples of `scale`."""

    def function(theta: Any, inputs: Any) -> Tensor:
        first, second = (tensor / scale for tensor in theta)
        outputs = torch.tanh(INPUT.to(first) @ first) @ second
        each = nn.functional.cross_entropy(outputs, TARGET, reduction="none")
        return (torch.sigmoid(inputs[0]) * each).mean() + 0.1 * (first**2).sum()

    return function


def draw(seed: int, dtype: torch.dtype, scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (scale * torch.randn(*shape, dtype=torch.float64, generator=generator)).to(dtype) for shape in ((6, 5), (5, 3))
    ]


@pytest.mark.parametrize("scale", [1e-8, 1e-4, 1.0, 1e4, 1e8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-7)])
def test_products_at_any_scale(dtype: torch.dtype, tolerance: float, scale: float) -> None:
    if dtype is torch.float32 and scale < 1e-2:
        pytest.skip("below the floor: the warning's business")
    function, inputs = loss(scale), [torch.linspace(-1, 1, 32, dtype=torch.float64)]
    theta, direction = draw(2, dtype, scale), draw(3, dtype, 1.0)
    if scale < 1e-4:
        tolerance = 1e-4  # at the floor
    lower_loss = LowerView(LowerProblem("w"), tuple(theta), function)
    found = FiniteDifferenceProduct(lower_loss, theta, [inputs[0].to(dtype)], [True])
    exact = ReverseProduct(lower_loss, [each.double() for each in theta], inputs, [True])
    pairs = [
        (found.hessian(direction), exact.hessian([each.double() for each in direction])),
        (found.push([inputs[0].to(dtype)]), exact.push(inputs)),
        (found.cross(direction), exact.cross([each.double() for each in direction])),
    ]
    for difference, reverse in pairs:
        assert apart([each.double() for each in difference], reverse) < tolerance


def test_the_default_radius_is_a_share_of_the_root_mean_square_with_a_floor() -> None:
    for dtype, share, floor in ((torch.float32, 0.0295, 1.45e-4), (torch.float64, 3.63e-5, 2.2e-10)):
        point = [torch.full((4, 2), 3.0, dtype=dtype), torch.zeros(4, dtype=dtype)]
        assert float(default_radius(point) / norm(point)) == pytest.approx(share / 12**0.5, rel=0.05)
        assert float(default_radius([torch.zeros(3, dtype=dtype)])) == pytest.approx(floor, rel=0.05)
        rows = torch.cat([default_radius([point[0][:1], point[1][:1]], 1)] * 4)
        assert torch.allclose(default_radius(point, 4), rows)


@pytest.mark.parametrize("begin", [0.0, 1e-3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-2), (torch.float64, 1e-4)])
def test_parameters_that_begin_at_zero(dtype: torch.dtype, tolerance: float, begin: float) -> None:
    """A linear classifier: a change by 1 matters, whatever it begins at."""

    def function(theta: Any, inputs: Any) -> Tensor:
        each = nn.functional.cross_entropy(INPUT.to(theta[0]) @ theta[0], TARGET, reduction="none")
        return (inputs[0] * each).mean()

    theta, direction = [torch.full((6, 3), begin / 18**0.5, dtype=dtype)], [draw(4, dtype, 1.0)[0][:, :3]]
    inputs = [torch.linspace(0, 1, 32, dtype=dtype)]
    lower_loss = LowerView(LowerProblem("w"), tuple(theta), function)
    found = FiniteDifferenceProduct(lower_loss, theta, inputs, [True])
    exact = ReverseProduct(lower_loss, theta, inputs, [True])
    assert apart(found.hessian(direction), exact.hessian(direction)) < tolerance
    assert apart(found.cross(direction), exact.cross(direction)) < tolerance


def program(scale: float, radius: float | None = None, product: Any = "finite_difference") -> Program:
    function = loss(scale)

    def lower(batch: Any, *, w: Any, lam: Any) -> Tensor:
        value: Tensor = function(list(dict(w.named_parameters()).values()), [lam()])
        return value

    def upper(batch: Any, *, w: Any) -> Tensor:
        return sum(((each / scale) ** 3).sum() for each in dict(w.named_parameters()).values())  # type: ignore[return-value]

    module = nn.ParameterList(draw(2, torch.float32, scale))
    algorithm = Implicit(Identity(1.0), product, radius=radius)
    low = Problem("w", module, lower, roles={"w": "w", "lam": "lam"}, hypergradient=algorithm)
    lam = Problem("lam", Point(torch.linspace(-1, 1, 32)), upper, roles={"w": "w"})
    return Program([low, lam], Graph({"lam": ["w"]}, {"w": ["lam"]}))


def test_a_scale_below_the_floor_warns_once_and_names_a_radius_that_is_right() -> None:
    with pytest.warns(UserWarning, match=r"problems\.w: finite differences of its hypergradient at") as caught:
        built = program(1e-6)
        built.gradient("lam")
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "a quarter of it differ by" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built.gradient("lam")
        radius = float(text.split("hypergradient.radius=")[1].split(",")[0])
        found = program(1e-6, radius).gradient("lam")["x"]
        for scale in (1e-2, 1.0, 1e6):
            program(scale).gradient("lam")
    reverse = program(1e-6, product="reverse").gradient("lam")["x"]
    assert apart([found], [reverse]) < 1e-2
