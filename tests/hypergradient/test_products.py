"""Second-order products: forward mode, and finite differences in one backward pass or in two."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mlotool import ConjugateGradient, Identity, Implicit, Neumann, Unrolled
from mlotool.core.errors import ConfigError
from mlotool.core.replay import RandomState, stop_gradient
from mlotool.hypergradient.products import finite_difference, forward
from mlotool.hypergradient.products.base import ReverseProduct
from mlotool.hypergradient.products.finite_difference import (
    FiniteDifferenceProduct,
    default_radius,
    warn_of_differences,
)
from mlotool.hypergradient.products.forward import ForwardProduct, check_forward_product, chosen_product
from mlotool.hypergradient.unrolled import ForwardStepProduct, RecordedStep
from mlotool.hypergradient.vector import add, norm
from mlotool.problem.interface import LowerProblem, LowerView, Unroll, Vector
from mlotool.problem.rank_mean import RankMean
from mlotool.problem.trajectory import StepRecord
from tests.core.test_rematerialization import per_block
from tests.hypergradient.test_nasty_blocks import OldSine
from tests.hypergradient.unrolled_cases import REMAT, UnrolledCase, mixed


def quadratic(theta: Vector, inputs: Vector) -> Tensor:
    return (theta[0].pow(3) * inputs[0].exp() + theta[1].sin() * theta[0]).sum()


def view_of(loss: Callable[[Vector, Vector], Tensor]) -> tuple[LowerView, list[Tensor], list[Tensor]]:
    theta = [torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([0.5, -1.0], dtype=torch.float64)]
    return LowerView(LowerProblem("w"), tuple(theta), loss), theta, [torch.tensor([0.3, 0.1], dtype=torch.float64)]


def test_products_are_those_of_the_closed_form() -> None:
    view, (a, b), (x,) = view_of(quadratic)
    product = ForwardProduct(view, [a, b], [x], [True])
    u, v = torch.tensor([0.7, -0.2], dtype=torch.float64), torch.tensor([1.1, 0.4], dtype=torch.float64)
    expected = [6 * a * x.exp() * u + b.cos() * v, b.cos() * u - b.sin() * a * v]
    for found in (product.hessian([u, v]), product.pull([u, v])[0]):
        assert all(torch.allclose(mine, its, rtol=1e-14) for mine, its in zip(found, expected, strict=True))
    cross = 3 * a.square() * x.exp() * u
    for found in (product.cross([u, v]), product.pull([u, v])[1]):
        assert torch.allclose(found[0], cross, rtol=1e-14)
    assert torch.allclose(product.cross([u, v], -2.0)[0], -2 * cross, rtol=1e-14)
    pushed = product.push([u])
    assert torch.allclose(pushed[0], 3 * a.square() * x.exp() * u, rtol=1e-14)
    assert torch.equal(pushed[1], torch.zeros_like(b))


class Doubled(torch.autograd.Function):
    """Has another derivative in forward mode than in reverse mode."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        return

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * 2


def test_memory_does_not_grow_with_the_inside_of_blocks() -> None:
    def of_block(product: Any, is_remat: bool) -> float:
        def way(loss: Any, theta: Vector, vector: Vector) -> None:
            view = LowerView(LowerProblem("w"), tuple(theta), lambda theta, inputs: loss(theta))
            product(view, theta, [], []).own_hessian(vector)

        return per_block(way, is_remat)

    with_blocks, without = of_block(ForwardProduct, True), of_block(ForwardProduct, False)
    assert with_blocks < 3.5
    assert with_blocks < without / 5
    assert without < 0.9 * of_block(ReverseProduct, False)


def test_parameters_without_a_gradient_are_compared_again() -> None:
    """As below a last layer that begins at zero."""
    gain = torch.zeros(2, dtype=torch.float64)

    def loss(theta: Vector, inputs: Vector) -> Tensor:
        return (gain * Doubled.apply(theta[0]) ** 2 * inputs[0]).sum() + theta[1].square().sum()

    view, theta, inputs = view_of(loss)
    check_forward_product(view, theta, inputs, (True,))
    assert not view.problem.traits.has_compared_product
    gain += 1
    with pytest.raises(ConfigError, match="differs from that of double"):
        check_forward_product(view, theta, inputs, (True,))


def test_on_ranks_all_exchange_the_same_tensors() -> None:
    """A parameter that enters linearly on one rank has no tangent there."""

    def other_rank(vector: Any) -> Any:
        # The last one says which of them are used.
        assert len(vector) == 3
        return [each / 2 for each in vector]

    def loss(theta: Vector, inputs: Vector, batch: Any, lower: Any) -> Tensor:
        return (theta[0].pow(3) + theta[1]).sum() * inputs[0].sum()

    theta = (torch.tensor([2.0]), torch.tensor([3.0]))
    view = LowerView(LowerProblem("w", rank_mean=RankMean(other_rank)), theta, lambda *given: loss(*given, None, None))
    record = StepRecord(theta, ({}, {}), ({}, {}), ((None, RandomState()),), {}, gradient=theta)
    step = RecordedStep(Unroll((), True, (), loss, *[None] * 5), view, record, [torch.ones(1)], [True])
    of_theta, _ = ForwardStepProduct(step).pull([torch.ones(1), torch.ones(1)], needs_theta=True)
    assert of_theta == [torch.tensor([6.0]), None]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("solver", [Identity(), Neumann(3, 0.1), ConjugateGradient(4, 1e-12, damping=1.0)])
def test_hypergradients_are_those_of_double_backward(solver: Any) -> None:
    """With dropout and BatchNorm in train mode, inside blocks that are evaluated again."""
    case = UnrolledCase("weighting", num_steps=1, network=partial(mixed, dropout=0.3))

    def gradient(product: Any, remat: Any) -> tuple[Tensor, Tensor]:
        made = case.program(Implicit(solver, product), remat)
        made.random.manual_seed(7)
        return made.gradient("upper", {"model": case.batches[0]})["x"], made.random.state_dict()["cpu"]

    expected, state = gradient("reverse", None)
    for product, again in (("forward", "plain"), ("forward", "remat"), ("reverse", "remat")):
        found, after = gradient(product, REMAT[again])
        assert (found - expected).norm() < 1e-10 * expected.norm()
        assert torch.equal(after, state)


@pytest.mark.parametrize("algorithm", [Implicit(Neumann(2, 0.1), "auto"), Unrolled(product="auto")])
def test_auto_takes_forward_mode_where_blocks_are_evaluated_again(
    algorithm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    there = forward.moving_gradient

    def noting(*given: Any, **settings: Any) -> Any:
        taken.append(settings.get("problem"))
        return there(*given, **settings)

    monkeypatch.setattr(forward, "moving_gradient", noting)
    case = UnrolledCase("weighting", num_steps=2, network=mixed)
    batches = case.batches if isinstance(algorithm, Unrolled) else case.batches[0]
    found = []
    for remat_setting in REMAT.values():
        found.append(case.program(algorithm, remat_setting).gradient("upper", {"model": batches})["x"])
        assert bool(taken) is (remat_setting is not None)
    assert (found[1] - found[0]).norm() < 1e-10 * found[0].norm()


BATCH = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def loss(theta: Vector, inputs: Vector) -> Tensor:
    hidden = functional.dropout(torch.tanh(BATCH @ theta[0] + theta[1]), 0.3)
    losses = (hidden @ theta[2]).square()
    return (torch.sigmoid(inputs[0] * stop_gradient(losses) + inputs[1]) * losses).mean()


def plain(theta: Vector, inputs: Vector) -> Tensor:
    losses = (torch.tanh(BATCH @ theta[0] + theta[1]) @ theta[2]).square()
    return (torch.sigmoid(inputs[0]) * losses).mean() + (inputs[1] * theta[2]).sum()


def per_task(theta: Vector, inputs: Vector) -> Tensor:
    """Three tasks that share nothing: the leading axis of every parameter."""
    return (inputs[0] * torch.sin(theta[0]).square()).sum() + (theta[1].square() * theta[0].sum(1)).sum()


def apart(a: Vector, b: Vector) -> float:
    """Return the norm of the difference over that of the longer one."""
    return float(norm(add(a, b, -1.0))) / max(float(norm(a)), float(norm(b)))


def vectors(*shapes: tuple[int, ...], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


THETA = vectors((5, 4), (4,), (4,), seed=1)
INPUTS = vectors((), (), seed=2)


def products(view: LowerView, inputs: Vector, direction: Vector, moved: Vector) -> list[list[Tensor]]:
    torch.manual_seed(3)
    product = FiniteDifferenceProduct(view, view.theta, inputs, [True, False])
    found = [product.hessian(direction), product.push(moved), product.cross(direction, -2.0)]
    # The generator goes on from the same place.
    return [*found, [torch.rand(())]]


@pytest.mark.parametrize("function", [loss, plain])
def test_one_pass_gives_the_same_as_two(monkeypatch: pytest.MonkeyPatch, function: object) -> None:
    view = LowerView(LowerProblem("w"), tuple(THETA), function)  # type: ignore[arg-type]
    direction, moved = vectors((5, 4), (4,), (4,), seed=4), vectors((), seed=5)
    joint = products(view, INPUTS, direction, moved)
    monkeypatch.setattr(finite_difference, "MOST_PARAMETERS_AT_ONCE", 0)
    separate = products(view, INPUTS, direction, moved)
    for a, b in zip(joint, separate, strict=True):
        # The product is a difference over a small step, which magnifies rounding.
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_tasks_have_steps_of_their_own() -> None:
    theta, inputs, direction = vectors((3, 2), (3,), seed=6), vectors((), seed=7), vectors((3, 2), (3,), seed=8)
    # One task's direction is a thousand times another's.
    direction[0][1] *= 1e3
    view = LowerView(LowerProblem("w", num_tasks=3), tuple(theta), per_task)
    exact = ReverseProduct(view, theta, inputs, [True]).hessian(direction)
    found = FiniteDifferenceProduct(view, theta, inputs, [True]).hessian(direction)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-7)


def test_a_loss_that_does_not_depend_on_the_inputs_gives_zeros() -> None:
    view = LowerView(LowerProblem("w"), tuple(THETA), lambda theta, inputs: theta[2].square().sum())
    product = FiniteDifferenceProduct(view, THETA, INPUTS, [True, True])
    assert all(not each.any() for each in product.cross(THETA))
    assert all(not each.any() for each in product.hessian([torch.zeros_like(each) for each in THETA]))


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


@pytest.mark.parametrize("seed", range(4))
def test_kinks_and_masks_are_not_taken_for_hidden_values(seed: int) -> None:
    torch.manual_seed(seed)
    layers = nn.Linear(6, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    network = nn.Sequential(*layers)
    names, theta = zip(*network.named_parameters(), strict=True)

    def function(theta: Any, inputs: Any) -> Tensor:
        outputs = torch.func.functional_call(network, dict(zip(names, theta, strict=True)), (INPUT.float(),))
        return inputs[0] * functional.cross_entropy(outputs, TARGET)

    direction = [torch.randn_like(tensor) for tensor in theta]
    before = torch.get_rng_state()
    warn_of_differences(LowerView(LowerProblem("w"), theta, function), theta, [torch.ones(())], [True], direction)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_kink_within_the_radius_is_warned_of() -> None:
    theta = (torch.zeros(3),)
    view = LowerView(LowerProblem("w"), theta, lambda theta, inputs: inputs[0] * (theta[0].abs() + theta[0]).sum())
    look = partial(warn_of_differences, view, theta, [torch.ones(())], [True], [torch.ones(3)], with_hessian=True)
    # What a loss hides may matter later: the ninth pullback is not looked at, the tenth is.
    view.problem.traits.num_pullbacks = 8
    look()
    with pytest.warns(UserWarning, match="an error of 75%; .* have kinks"):
        look()


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


LOSSES = {
    "another derivative": lambda theta, inputs: quadratic(theta, inputs) + (Doubled.apply(theta[0]) ** 2).sum(),
    "no derivative": lambda theta, inputs: quadratic(theta, inputs) + OldSine.apply(theta[0]).sum(),
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
    with pytest.raises(ConfigError, match="wrong on another rank"):
        check_forward_product(Pair([1.0, 0.0, 0.0]).of(view), theta, inputs, (True,))


@pytest.mark.parametrize(("name", "other"), [("another derivative", 0.0), (None, 1.0)])
def test_all_fall_back_with_auto(name: str | None, other: float) -> None:
    view, theta, inputs = view_of(quadratic if name is None else LOSSES[name])
    there = Pair([other, 0.0, 0.0]).of(view)
    assert chosen_product("auto", there, theta, inputs, (True,)) == "reverse"
    assert there.problem.traits.lacks_tangents
