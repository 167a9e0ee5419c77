"""Products by forward mode over reverse mode, beside double backward."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import (
    BoundModule,
    ConjugateGradient,
    Graph,
    Identity,
    Implicit,
    Neumann,
    Problem,
    Program,
    Unrolled,
    remat,
)
from mlotool.core.errors import ConfigError
from mlotool.core.replay import RandomState
from mlotool.hypergradient import step_products
from mlotool.hypergradient.products import ForwardProduct, ReverseProduct, forward
from mlotool.hypergradient.products.choice import check_forward_product
from mlotool.hypergradient.step_products import ForwardStepProduct, RecordedStep
from mlotool.problem.interface import LowerProblem, LowerView, Unroll, Vector
from mlotool.problem.rank_mean import RankMean
from mlotool.problem.trajectory import StepRecord
from tests.live_storage import LiveStorage

INPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(nn.Module):
    """Blocks of which each evaluation draws random numbers and, in train mode, moves buffers."""

    def __init__(self, is_remat: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3)
        )
        self.is_remat = is_remat
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (remat(block, x) if self.is_remat else block(x))
        return x


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.logits.sigmoid()


def program(algorithm: Implicit, is_remat: bool = False, **settings: Any) -> Program:
    """Return weights of samples, learned through a net."""

    def upper(batch: None, model: BoundModule) -> Tensor:
        return model(INPUTS).cos().mean()

    def lower(batch: None, model: BoundModule, weights: BoundModule) -> Tensor:
        return (weights()[:, None] * model(INPUTS).square()).mean()

    weights, net = Weights(), Net(is_remat)
    torch.manual_seed(1)
    return Program(
        [
            Problem(
                "upper", weights, upper, roles={"model": "lower"}, optimizer=torch.optim.SGD(weights.parameters(), 1)
            ),
            Problem(
                "lower",
                net,
                lower,
                roles={"model": "lower", "weights": "upper"},
                optimizer=torch.optim.SGD(net.parameters(), 0.1),
                hypergradient=algorithm,
                **settings,
            ),
        ],
        Graph(upper_to_lower={"upper": ["lower"]}, lower_to_upper={"lower": ["upper"]}),
    )


def apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    return max(float((found[name] - each).norm() / each.norm()) for name, each in expected.items())


@pytest.mark.parametrize("is_remat", [False, True])
@pytest.mark.parametrize("solver", [Identity(), Neumann(3, 0.1), ConjugateGradient(4, 1e-12, damping=1.0)])
def test_hypergradients_are_those_of_double_backward(solver: Any, is_remat: bool) -> None:
    """With dropout and BatchNorm in train mode, inside blocks that are evaluated again."""
    expected = program(Implicit(solver)).gradient("upper")
    assert float(expected["logits"].norm()) > 1e-6
    found = program(Implicit(solver, "forward"), is_remat).gradient("upper")
    assert apart(found, expected) < 1e-10
    assert apart(program(Implicit(solver), is_remat).gradient("upper"), expected) < 1e-10


def test_in_bf16_it_is_double_backward_up_to_rounding() -> None:
    expected = program(Implicit(Neumann(2, 0.1))).gradient("upper")
    found = program(Implicit(Neumann(2, 0.1), "forward"), is_remat=True, precision="bf16").gradient("upper")
    assert apart(found, expected) < 0.1


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


def test_a_row_for_padding_is_no_disagreement() -> None:
    """Torch drops its gradient, so the derivative of the gradient is no symmetric matrix."""
    tokens = torch.tensor([[0, 1, 2, 0]])

    def loss(theta: Vector, inputs: Vector) -> Tensor:
        return nn.functional.embedding(tokens, theta[0], padding_idx=0).sum(1).pow(3).mul(inputs[0]).sum()

    theta = [torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)]
    view = LowerView(LowerProblem("w"), tuple(theta), loss)
    check_forward_product(view, theta, [torch.ones(2, dtype=torch.float64)], (True,))


@pytest.mark.parametrize("make", [lambda: Implicit(Neumann(2, 0.1), "auto"), lambda: Unrolled(product="auto")])
def test_auto_takes_forward_mode_where_blocks_are_evaluated_again(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    there = forward.moving_gradient

    def noting(*given: Any, **settings: Any) -> Any:
        taken.append(settings.get("problem"))
        return there(*given, **settings)

    for module in (forward, step_products):
        monkeypatch.setattr(module, "moving_gradient", noting)
    found = []
    for remat_setting in (None, ["blocks.*"]):
        built = program(make(), remat=remat_setting)
        found.append(built.gradient("upper", {"lower": [None] * 2} if isinstance(make(), Unrolled) else None))
        assert bool(taken) is (remat_setting is not None)
    assert apart(found[1], found[0]) < 1e-10


def test_auto_takes_reverse_where_there_are_no_tangents(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="mlotool")
    built = program(Implicit(Identity(), "auto"), remat=["blocks.*"])

    def lower(batch: None, model: BoundModule, weights: BoundModule) -> Tensor:
        return (weights()[:, None] * NoTangent.apply(model(INPUTS)).square()).mean()

    built.problems["lower"].loss = lower
    assert float(built.gradient("upper")["logits"].norm()) > 0
    assert "product auto takes reverse" in caplog.text


class NoTangent(torch.autograd.Function):
    """A function in the style that has no forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


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


def test_numbers_that_are_not_finite_either_way_are_no_disagreement() -> None:
    view, theta, inputs = view_of(lambda theta, inputs: (theta[0] - theta[0].detach()).sqrt().sum() + theta[1].sum())
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
