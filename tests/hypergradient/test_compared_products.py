"""Products by forward mode and by finite differences are compared with double backward, once a problem."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mlotool.core import LossOutput, stop_gradient
from mlotool.core.errors import ConfigError
from mlotool.core.replay import LossTraits
from mlotool.hypergradient import AbstractSolver, ConjugateGradient, Exact, Identity, Implicit, Neumann, Penalty
from mlotool.hypergradient.products import FiniteDifferenceProduct, ReverseProduct, default_radius
from mlotool.hypergradient.products.choice import check_forward_product, chosen_product
from mlotool.hypergradient.vector import apart, norm
from mlotool.problem.interface import LowerProblem, LowerView, Vector
from mlotool.problem.rank_mean import RankMean
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule
from tests.hypergradient.every_algorithm import Batch, program, sample_losses, weighted
from tests.hypergradient.test_forward import Doubled, quadratic, view_of
from tests.program.small import Mlp, assert_identical
from tests.programs import Point

DIFFERENCES: dict[str, Callable[[], AbstractHypergradient]] = {
    "identity": lambda: Implicit(Identity(0.1), "finite_difference"),
    "neumann": lambda: Implicit(Neumann(3, 0.02), "finite_difference"),
    "penalty": lambda: Penalty(multiplier=20.0, num_steps=2, step_size=0.1),
    "barrier": lambda: Penalty(rule="barrier", barrier=0.5, num_steps=2, step_size=0.1),
}
WARNING = r"problems\.{}: the product with {} by finite differences, at a radius of .*, differs by \d+% from"


def traits_of(built: Program, name: str) -> LossTraits:
    return built.engine.traits[built.engine.numbers[name]]


def no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return 1.0 * x


HIDING: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "no_grad": no_grad,
    "item": lambda x: torch.stack([torch.as_tensor(each.detach().item(), dtype=x.dtype) for each in x]),
}


def weighted_by(constant: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor] = torch.square) -> Any:
    def loss(batch: Batch, *, model: Any, weigher: Any) -> Tensor:
        losses = function(model(batch["input"]) - batch["target"])
        return (torch.sigmoid(weigher(constant(losses)[:, None])) * losses).mean()

    return loss


def to_float32(built: Program) -> Program:
    for problem in built.problems.values():
        problem.module.float()
        problem.stream.to("cpu", torch.float32)
    return built


@pytest.mark.parametrize(
    ("name", "to"), [("identity", to_float32), *[(name, lambda built: built) for name in DIFFERENCES]]
)
@pytest.mark.parametrize("constant", HIDING)
def test_values_that_a_loss_hides_are_told_once(constant: str, name: str, to: Any) -> None:
    built = to(program(DIFFERENCES[name], lower=weighted_by(HIDING[constant])))
    with pytest.warns(UserWarning, match=WARNING.format("model", "M") + ".*mlotool.stop_gradient") as caught:
        for _ in range(3):
            built.gradient("weigher")
    assert len(caught) == 1


def test_what_is_hidden_from_the_hessian_alone_is_told_of_solvers_that_take_products_with_it() -> None:
    def rescaled(batch: Batch, *, model: Any, weigher: Any) -> Tensor:
        fit = sample_losses(batch, model).mean()
        return weighted(batch, model=model, weigher=weigher) + 3 * fit.detach() * fit

    program(DIFFERENCES["identity"], lower=rescaled).gradient("weigher")
    with pytest.warns(UserWarning, match=WARNING.format("model", "H")):
        program(DIFFERENCES["neumann"], lower=rescaled).gradient("weigher")


class Twice(torch.autograd.Function):
    """Its forward pass runs without gradients, and hides nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x.detach()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return 2 * slopes[0]


class Once(torch.autograd.Function):
    """Has no second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * slopes[0]


def with_metrics(batch: Batch, *, model: Any, weigher: Any) -> LossOutput:
    loss = weighted(batch, model=model, weigher=weigher)
    return LossOutput(loss, {"loss": loss.detach(), "number": torch.tensor(loss.detach().item())})


CORRECT: dict[str, Callable[..., Any]] = {
    "metrics": with_metrics,
    "function": weighted_by(stop_gradient, lambda x: Twice.apply(x) ** 2),
    "once": weighted_by(stop_gradient, Once.apply),
    "checkpoint": weighted_by(stop_gradient, lambda x: checkpoint(torch.square, x, use_reentrant=False)),
}


@pytest.mark.parametrize("loss", CORRECT)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_correct_losses_are_let_alone(name: str, loss: str) -> None:
    built = program(DIFFERENCES[name], Mlp(nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.2)), lower=CORRECT[loss])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = Schedule(built)
        for _ in range(4):
            schedule.tick()
    assert traits_of(built, "model").has_compared_product


def test_a_loss_without_a_second_derivative_is_not_compared_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="mlotool")
    program(DIFFERENCES["identity"], lower=CORRECT["once"]).gradient("weigher")
    assert "by finite differences were not compared with double backward" in caplog.text


@pytest.mark.parametrize("constant", [stop_gradient, torch.detach])
def test_the_comparison_changes_nothing(constant: Any) -> None:
    """The first pullback is the one that looks; random numbers, buffers and results are those of a second one."""
    kinds = [nn.BatchNorm1d(5, eps=1.0), nn.Dropout(0.2)]
    made = [program(DIFFERENCES["identity"], Mlp(*kinds), lower=weighted_by(constant)) for _ in range(2)]
    traits_of(made[1], "model").has_compared_product = True
    found = []
    for built in made:
        built.random.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gradient = built.gradient("weigher")
        buffers = dict(built.problems["model"].module.named_buffers())
        found.append({**gradient, **buffers, "random": built.random.state_dict()["cpu"]})
    assert_identical(*found)


SIZE = 6
KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "abs": torch.abs,
    "hinge": lambda x: (-x).clamp_min(0.0),
    "max_pool": lambda x: functional.max_pool1d(torch.stack([x, -x], 1)[None].flatten(1), 2)[0],
}
SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": functional.softplus,
    "square": torch.square,
    "exp": torch.exp,
}
RADIUS = {torch.float64: 3.6e-5, torch.float32: 3e-2}
"""By default, of parameters of root mean square 1."""


def near(
    function: Callable[[Tensor], Tensor], solver: AbstractSolver, distance: float, dtype: torch.dtype, product: Any
) -> Program:
    """Let theta, near 1, be as far from the place of the kinks as is said: a share of the radius."""
    at = 1.0 + distance * RADIUS[dtype] / SIZE**0.5

    def lower(batch: None, *, w: Any, lam: Any) -> Tensor:
        return function(w() - 1.0).sum() + (w() ** 2).sum() - (lam() * w()).sum()

    roles = {"w": "w", "lam": "lam"}
    start = torch.full((SIZE,), at, dtype=dtype)
    low = Problem("w", Point(start), lower, roles=roles, hypergradient=Implicit(solver, product))
    upper = Problem("lam", Point(torch.zeros(SIZE, dtype=dtype)), lambda batch, *, w: w().sum(), roles={"w": "w"})
    return Program([low, upper], Graph({"lam": ["w"]}, {"w": ["lam"]}))


@pytest.mark.parametrize("dtype", RADIUS)
@pytest.mark.parametrize("name", KINKS)
def test_a_kink_within_the_radius_is_told_and_the_curvature_not_blamed(name: str, dtype: torch.dtype) -> None:
    for solver in (Neumann(2, 0.1), ConjugateGradient(6, 1e-6), Exact()):
        built = near(KINKS[name], solver, 0.1, dtype, "finite_difference")
        with pytest.warns(UserWarning, match=WARNING.format("w", "H") + ".*kinks.*product: reverse") as caught:
            for _ in range(2):
                built.gradient("lam")
        assert len(caught) == 1


@pytest.mark.parametrize("dtype", RADIUS)
@pytest.mark.parametrize("name", [*SMOOTH, *KINKS])
def test_nothing_is_said_of_what_is_smooth_within_the_radius(name: str, dtype: torch.dtype) -> None:
    distance = 0.1 if name in SMOOTH else 1.5 * SIZE**0.5
    for solver in (Neumann(2, 0.1), ConjugateGradient(6, 1e-6)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make = partial(near, (SMOOTH | KINKS)[name], solver, distance, dtype)
            found, exact = (make(product).gradient("lam")["x"] for product in ("finite_difference", "reverse"))
        assert float((found - exact).norm() / exact.norm()) < 1e-2


INPUT = torch.randn(32, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGET = torch.randint(0, 3, (32,), generator=torch.Generator().manual_seed(1))


def network(scale: float) -> Any:
    """The loss of a small one, weighted by sample, in units of which the parameters are multiples of `scale`."""

    def function(theta: Any, inputs: Any) -> Tensor:
        first, second = (tensor / scale for tensor in theta)
        outputs = torch.tanh(INPUT.to(first) @ first) @ second
        each = functional.cross_entropy(outputs, TARGET, reduction="none")
        return (torch.sigmoid(inputs[0]) * each).mean() + 0.1 * (first**2).sum()

    return function


def draw(seed: int, dtype: torch.dtype, scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((6, 5), (5, 3))
    return [(scale * torch.randn(*shape, dtype=torch.float64, generator=generator)).to(dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("dtype", "scale", "tolerance"),
    [
        *[(torch.float64, scale, 1e-7) for scale in (1e-4, 1.0, 1e8)],
        (torch.float64, 1e-8, 1e-4),  # at the floor of the radius
        *[(torch.float32, scale, 1e-3) for scale in (1.0, 1e8)],
    ],
)
def test_products_at_any_scale(dtype: torch.dtype, scale: float, tolerance: float) -> None:
    inputs = [torch.linspace(-1, 1, 32, dtype=torch.float64)]
    theta, direction = draw(2, dtype, scale), draw(3, dtype, 1.0)
    view = LowerView(LowerProblem("w"), tuple(theta), network(scale))
    found = FiniteDifferenceProduct(view, theta, [inputs[0].to(dtype)], [True])
    exact = ReverseProduct(view, [each.double() for each in theta], inputs, [True])
    wide = [each.double() for each in direction]
    pairs = [
        (found.hessian(direction), exact.hessian(wide)),
        (found.push([inputs[0].to(dtype)]), exact.push(inputs)),
        (found.cross(direction), exact.cross(wide)),
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
        each = functional.cross_entropy(INPUT.to(theta[0]) @ theta[0], TARGET, reduction="none")
        return (inputs[0] * each).mean()

    theta, direction = [torch.full((6, 3), begin / 18**0.5, dtype=dtype)], [draw(4, dtype, 1.0)[0][:, :3]]
    inputs = [torch.linspace(0, 1, 32, dtype=dtype)]
    view = LowerView(LowerProblem("w"), tuple(theta), function)
    found, exact = (kind(view, theta, inputs, [True]) for kind in (FiniteDifferenceProduct, ReverseProduct))
    assert apart(found.hessian(direction), exact.hessian(direction)) < tolerance
    assert apart(found.cross(direction), exact.cross(direction)) < tolerance


def scaled_program(scale: float, **settings: Any) -> Program:
    def lower(batch: Any, *, w: Any, lam: Any) -> Tensor:
        value: Tensor = network(scale)(list(dict(w.named_parameters()).values()), [lam()])
        return value

    def upper(batch: Any, *, w: Any) -> Tensor:
        return sum(((each / scale) ** 3).sum() for each in dict(w.named_parameters()).values())  # type: ignore[return-value]

    module = nn.ParameterList(draw(2, torch.float32, scale))
    algorithm = Implicit(Identity(1.0), **settings)
    low = Problem("w", module, lower, roles={"w": "w", "lam": "lam"}, hypergradient=algorithm)
    lam = Problem("lam", Point(torch.linspace(-1, 1, 32)), upper, roles={"w": "w"})
    return Program([low, lam], Graph({"lam": ["w"]}, {"w": ["lam"]}))


def test_a_radius_that_does_not_fit_the_scale_of_the_parameters_is_told() -> None:
    with pytest.warns(UserWarning, match=WARNING.format("w", "M") + ".*another hypergradient.radius"):
        scaled_program(1e-6, product="finite_difference").gradient("lam")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = scaled_program(1e-6, product="finite_difference", radius=1e-7).gradient("lam")["x"]
        for scale in (1e-2, 1.0, 1e6):
            scaled_program(scale, product="finite_difference").gradient("lam")
    assert apart([found], [scaled_program(1e-6).gradient("lam")["x"]]) < 1e-2


class OldStyle(torch.autograd.Function):
    """Has no derivative in forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * cotangent


LOSSES = {
    "another derivative": lambda theta, inputs: quadratic(theta, inputs) + (Doubled.apply(theta[0]) ** 2).sum(),
    "no derivative": lambda theta, inputs: quadratic(theta, inputs) + OldStyle.apply(theta[0]).sum(),
}


class Pair:
    """This rank's side of two; the other one sends what it is told to.

    Args:
        other: flags of the other rank: it has failed, it lacks memory, a parameter has no gradient.
    """

    def __init__(self, other: list[float]) -> None:
        self.sent: list[list[float]] = []
        self._other = other

    def of(self, view: LowerView) -> LowerView:
        mean = RankMean(self._exchange)
        return replace(view, problem=replace(view.problem, rank_mean=mean, has_blocks=True))

    def _exchange(self, vector: Vector) -> list[Tensor]:
        [flags] = vector
        self.sent.append(flags.tolist())
        return [(flags + torch.tensor(self._other)) / 2]


@pytest.mark.parametrize("name", LOSSES)
def test_a_rank_that_finds_a_difference_tells_the_others_before_it_stops(name: str) -> None:
    pair = Pair([0.0, 0.0, 0.0])
    view, theta, inputs = view_of(LOSSES[name])
    with pytest.raises(ConfigError, match=r"found forward|found what torch cannot differentiate .*autograd\.Function"):
        check_forward_product(pair.of(view), theta, inputs, (True,))
    assert [each[0] for each in pair.sent] == [1.0]


def test_a_rank_stops_where_another_one_has_found_a_difference() -> None:
    view, theta, inputs = view_of(quadratic)
    with pytest.raises(ConfigError, match="another rank has found to fail"):
        check_forward_product(Pair([1.0, 0.0, 0.0]).of(view), theta, inputs, (True,))


@pytest.mark.parametrize(
    ("other", "is_done"), [([0.0, 0.0, 0.0], True), ([0.0, 0.0, 1.0], False), ([0.0, 1.0, 1.0], True)]
)
def test_ranks_compare_again_alike(other: list[float], is_done: bool) -> None:
    view, theta, inputs = view_of(quadratic)
    check_forward_product(Pair(other).of(view), theta, inputs, (True,))
    assert view.problem.traits.has_compared_product is is_done


@pytest.mark.parametrize(("name", "other"), [("another derivative", 0.0), (None, 1.0)])
def test_all_fall_back_with_auto(name: str | None, other: float) -> None:
    view, theta, inputs = view_of(quadratic if name is None else LOSSES[name])
    there = Pair([other, 0.0, 0.0]).of(view)
    assert chosen_product("auto", there, theta, inputs, (True,)) == "reverse"
    assert there.problem.traits.lacks_tangents
