"""`H u` and `M^T u` alone, by both modes with and without blocks that are evaluated again, against central differences.

Within a hypergradient other terms hide an error of a product; here there is nothing else.
"""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from mlotool.core.rematerialization import RematerializedModule
from mlotool.core.replay import RandomState
from mlotool.hypergradient.products import ForwardProduct, ReverseProduct
from mlotool.hypergradient.step_products import ForwardStepProduct, RecordedStep, ReverseStepProduct
from mlotool.problem.interface import LowerProblem, LowerView, Unroll, Vector
from mlotool.problem.trajectory import StepRecord
from tests.hypergradient.unrolled_cases import ROWS, TOKENS, by_row, decoder, mixed

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "decoder": decoder,
    "decoder with dropout": partial(decoder, dropout=0.3),
    "swiglu": partial(decoder, feedforward="swiglu", tied=False),
    "batch norm and dropout": partial(mixed, dropout=0.3),
    "a frozen block": partial(mixed, frozen=1),
}
SEED = 11
Products = tuple[list[Tensor], list[Tensor]]


class _Loss:
    """The weighted loss of a network, on the same random numbers each time; its inputs are logits of the weights."""

    def __init__(self, make: Callable[[], nn.Module], is_remat: bool) -> None:
        self.network = make()
        self.names = [name for name, each in self.network.named_parameters() if each.requires_grad]
        self.theta = [each.detach() for each in self.network.parameters() if each.requires_grad]
        self.inputs = [torch.linspace(-1, 1, ROWS, dtype=torch.float64)]
        generator = torch.Generator().manual_seed(5)
        self.vector = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in self.theta]
        blocks = list(self.network.blocks) if is_remat else []
        self._scalar = _Scalar(self.network, RematerializedModule(self.network, blocks))

    def __call__(self, theta: Vector, inputs: Vector, batch: object = None, lower: object = None) -> Tensor:
        torch.manual_seed(SEED)
        buffers = {f"network.{name}": each.clone() for name, each in self.network.named_buffers()}
        given = {f"network.{name}": each for name, each in zip(self.names, theta, strict=True)} | buffers
        return functional_call(self._scalar, given, (inputs[0],))

    @property
    def view(self) -> LowerView:
        return LowerView(LowerProblem("model"), tuple(self.theta), self)

    def step(self) -> RecordedStep:
        torch.manual_seed(SEED)
        record = StepRecord(tuple(self.theta), (), (), ((None, RandomState()),), {})
        return RecordedStep(Unroll((), True, (), self, *[None] * 5), self.view, record, self.inputs, [True])


class _Scalar(nn.Module):
    def __init__(self, network: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.run = network, run

    def forward(self, logits: Tensor) -> Tensor:
        return (logits.sigmoid() * by_row(self.run(TOKENS[0][:, :-1]), TOKENS[0])).sum()


def reverse(loss: _Loss) -> Products:
    product = ReverseProduct(loss.view, loss.theta, loss.inputs, [True])
    return product.own_hessian(loss.vector), product.cross(loss.vector)


def forward(loss: _Loss) -> Products:
    product = ForwardProduct(loss.view, loss.theta, loss.inputs, [True])
    return product.own_hessian(loss.vector), product.cross(loss.vector)


def forward_at_once(loss: _Loss) -> Products:
    return ForwardProduct(loss.view, loss.theta, loss.inputs, [True]).pull(loss.vector)


def reverse_step(loss: _Loss) -> Products:
    return ReverseStepProduct(loss.step()).pull(loss.vector, needs_theta=True)


def forward_step(loss: _Loss) -> Products:
    return ForwardStepProduct(loss.step()).pull(loss.vector, needs_theta=True)


def by_differences(loss: _Loss) -> Products:
    """Return central differences of fourth order of the gradient, without mlotool's own evaluations."""
    step = 2e-3 / float(torch.cat([each.reshape(-1) for each in loss.vector]).norm())

    def slopes(factor: float) -> list[Tensor]:
        at = [(x + factor * step * u).requires_grad_() for x, u in zip(loss.theta, loss.vector, strict=True)]
        inputs = [each.clone().requires_grad_() for each in loss.inputs]
        return list(torch.autograd.grad(loss(at, inputs), [*at, *inputs]))

    near, far = ([a - b for a, b in zip(slopes(k), slopes(-k), strict=True)] for k in (1.0, 2.0))
    found = [(8 * a - b) / (12 * step) for a, b in zip(near, far, strict=True)]
    return found[: len(loss.theta)], found[len(loss.theta) :]


def error(found: Sequence[Tensor | None], expected: Sequence[Tensor]) -> float:
    whole = torch.cat([each.reshape(-1) for each in expected])
    mine = torch.cat(
        [(torch.zeros_like(y) if x is None else x).reshape(-1) for x, y in zip(found, expected, strict=True)]
    )
    return float((mine - whole).norm() / whole.norm())


@pytest.mark.parametrize("name", NETWORKS)
def test_products(name: str) -> None:
    plain, again = (_Loss(NETWORKS[name], is_remat) for is_remat in (False, True))
    expected, near = reverse(plain), by_differences(plain)
    ways = (reverse, forward, forward_at_once, reverse_step, forward_step)
    for part in (0, 1):
        assert error(expected[part], near[part]) < 1e-7
        for way in ways:
            for loss in (plain, again):
                assert error(way(loss)[part], expected[part]) < 1e-10, (way.__name__, part, loss is again)


def test_other_random_numbers_are_seen() -> None:
    loss, other = _Loss(NETWORKS["decoder with dropout"], True), _Loss(partial(decoder, dropout=0.31), True)
    assert error(forward_step(other)[0], reverse(loss)[0]) > 0.01
