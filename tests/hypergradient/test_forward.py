"""Products by forward mode over reverse mode, beside double backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import (
    ConjugateGradient,
    Identity,
    Implicit,
    Neumann,
    Unrolled,
    remat,
)
from mlotool.core.errors import ConfigError
from mlotool.core.replay import RandomState
from mlotool.hypergradient.products import forward
from mlotool.hypergradient.products.base import ReverseProduct
from mlotool.hypergradient.products.forward import ForwardProduct, check_forward_product
from mlotool.hypergradient.unrolled import ForwardStepProduct, RecordedStep
from mlotool.problem.interface import LowerProblem, LowerView, Unroll, Vector
from mlotool.problem.rank_mean import RankMean
from mlotool.problem.trajectory import StepRecord
from tests.hypergradient.unrolled_cases import REMAT, UnrolledCase, mixed
from tests.live_storage import LiveStorage


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


def test_all_products_see_the_same_random_numbers() -> None:
    def noisy(theta: Vector, inputs: Vector) -> Tensor:
        return (torch.rand(2, dtype=torch.float64) * theta[0].pow(3) * inputs[0]).sum()

    view, theta, inputs = view_of(noisy)
    direction = [torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)]
    torch.manual_seed(0)
    product = ForwardProduct(view, theta, inputs, [True])
    first, again = product.hessian(direction), product.hessian(direction)
    after = torch.rand(1)
    assert torch.equal(first[0], again[0])
    torch.manual_seed(0)
    reverse = ReverseProduct(view, theta, inputs, [True])
    assert torch.allclose(reverse.hessian(direction)[0], first[0], rtol=1e-12)
    assert torch.equal(torch.rand(1), after)


def test_a_loss_whose_modes_disagree_is_refused_once() -> None:
    def hidden(theta: Vector, inputs: Vector) -> Tensor:
        # What forward mode sees and double backward does not.
        return ((Doubled.apply(theta[0]) ** 2) * inputs[0]).sum() + theta[1].square().sum()

    view, theta, inputs = view_of(hidden)
    with pytest.raises(ConfigError, match=r"problems.w.hypergradient.product: found forward, whose product with H"):
        check_forward_product(view, theta, inputs, (True,))


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
    def peak(num_blocks: int, product: type[ForwardProduct] | type[ReverseProduct], is_remat: bool) -> int:
        weights = [torch.eye(8, dtype=torch.float64) for _ in range(num_blocks)]

        def block(x: Tensor, weight: Tensor) -> Tensor:
            for _ in range(6):
                x = torch.softmax(x @ weight, dim=1)
            return x

        def loss(theta: Vector, inputs: Vector) -> Tensor:
            x = torch.ones(64, 8, dtype=torch.float64)
            for weight in theta:
                x = remat(block, x, weight) if is_remat else block(x, weight)
            return x.square().sum()

        view = LowerView(LowerProblem("w"), tuple(weights), loss)
        with LiveStorage() as live:
            product(view, weights, [], []).own_hessian(weights)
        return live.peak

    def per_block(*given: Any) -> float:
        return (peak(12, *given) - peak(6, *given)) / 6

    one_input = 64 * 8 * 8
    assert per_block(ForwardProduct, True) < 3.5 * one_input
    assert per_block(ForwardProduct, False) < 0.9 * per_block(ReverseProduct, False)
    assert per_block(ForwardProduct, True) < per_block(ForwardProduct, False) / 5


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
        assert len(vector) == 2
        return [each / 2 for each in vector]

    def loss(theta: Vector, inputs: Vector, batch: Any, lower: Any) -> Tensor:
        return (theta[0].pow(3) + theta[1]).sum() * inputs[0].sum()

    theta = (torch.tensor([2.0]), torch.tensor([3.0]))
    view = LowerView(LowerProblem("w", rank_mean=RankMean(other_rank)), theta, lambda *given: loss(*given, None, None))
    record = StepRecord(theta, ({}, {}), ({}, {}), ((None, RandomState()),), {}, gradient=theta)
    step = RecordedStep(Unroll((), True, (), loss, *[None] * 5), view, record, [torch.ones(1)], [True])
    of_theta, _ = ForwardStepProduct(step).pull([torch.ones(1), torch.ones(1)], needs_theta=True)
    assert [float(each) for each in of_theta] == [6.0, 0.0]


@pytest.mark.parametrize(
    "block",
    [
        nn.functional.silu,
        lambda x: nn.functional.mse_loss(x, torch.ones_like(x)),
        lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None] ** 2, x[None]),
        lambda x: nn.functional.group_norm(x[None].transpose(1, 2), 2).sin(),
    ],
    ids=["silu", "mse", "attention", "group_norm"],
)
@pytest.mark.parametrize("is_remat", [False, True])
def test_operators_without_forward_mode(block: Callable[[Tensor], Tensor], is_remat: bool) -> None:
    def loss(theta: Vector, inputs: Vector) -> Tensor:
        x = torch.outer(theta[0], theta[1]).repeat(2, 2)
        return ((remat(block, x) if is_remat else block(x)) * inputs[0].sum()).sum()

    def by_differences(vector: Vector) -> list[Tensor]:
        def slope(sign: float) -> list[Tensor]:
            at = [(x + sign * 1e-5 * u).requires_grad_() for x, u in zip(theta, vector, strict=True)]
            return list(torch.autograd.grad(loss(at, inputs), at))

        return [(a - b) / 2e-5 for a, b in zip(slope(1.0), slope(-1.0), strict=True)]

    view, theta, inputs = view_of(loss)
    vector = [torch.tensor([0.3, -0.5], dtype=torch.float64), torch.tensor([0.2, 0.9], dtype=torch.float64)]
    found = ForwardProduct(view, theta, inputs, [True]).hessian(vector)
    for mine, its in zip(found, by_differences(vector), strict=True):
        assert torch.allclose(mine, its, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("again", REMAT)
@pytest.mark.parametrize("solver", [Identity(), Neumann(3, 0.1), ConjugateGradient(4, 1e-12, damping=1.0)])
def test_hypergradients_are_those_of_double_backward(solver: Any, again: str) -> None:
    """With dropout and BatchNorm in train mode, inside blocks that are evaluated again."""
    case = UnrolledCase("weighting", num_steps=1, network=partial(mixed, dropout=0.3))

    def gradient(product: Any, remat: Any) -> Tensor:
        made = case.program(Implicit(solver, product), remat)
        made.random.manual_seed(7)
        return made.gradient("upper", {"model": case.batches[0]})["x"]

    expected = gradient("reverse", None)
    for product in ("forward", "reverse"):
        assert (gradient(product, REMAT[again]) - expected).norm() < 1e-10 * expected.norm()


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
