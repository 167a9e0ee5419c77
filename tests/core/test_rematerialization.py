"""`remat` against the same blocks without it, in every mode of differentiation."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from mlotool import remat, stop_gradient
from mlotool.core.errors import ConfigError
from mlotool.core.replay import Replay
from mlotool.core.tangents import dual_level
from tests.core.operators.products import distance
from tests.live_storage import LiveStorage

# torch.func opens levels of forward mode itself.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")

WIDTH = 4
Loss = Callable[[Sequence[Tensor]], Tensor]


class Block(nn.Module):
    """A residual block of whose parts each would be silently wrong in another evaluation of its own."""

    def __init__(self, norm: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm = norm
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks one after the other, of which only inputs are kept where `is_remat`."""

    def __init__(self, is_remat: bool, norm: str = "layer", dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        norms = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
        self.blocks = nn.ModuleList(Block(norms[norm](WIDTH), dropout) for _ in range(3)).double()
        self.is_remat = is_remat

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = remat(block, x) if self.is_remat else block(x)
        return x


def loss_of(net: nn.Module, num_tasks: int | None = None) -> tuple[Loss, list[Tensor], list[Tensor]]:
    """Return a loss of the parameters, these, and a direction."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, WIDTH, generator=generator, dtype=torch.float64)
    names = [name for name, _ in net.named_parameters()]
    theta = [each.detach() for each in net.parameters()]
    direction = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in theta]

    def loss(tensors: Sequence[Tensor]) -> Tensor:
        torch.manual_seed(2)
        return functional_call(net, dict(zip(names, tensors, strict=True)), (x,)).square().mean()

    def of_tasks(tensors: Sequence[Tensor]) -> Tensor:
        assert num_tasks is not None
        torch.manual_seed(2)
        scales = torch.linspace(0.5, 1.5, num_tasks, dtype=torch.float64)
        stacked = [each * scales.reshape(-1, *[1] * each.dim()) for each in tensors]

        def one(*parts: Tensor) -> Tensor:
            return functional_call(net, dict(zip(names, parts, strict=True)), (x,)).square().mean()

        return torch.vmap(one, randomness="different")(*stacked).sum()

    return loss if num_tasks is None else of_tasks, theta, direction


def double_backward(loss: Loss, theta: list[Tensor], direction: list[Tensor]) -> list[Tensor]:
    points = [each.clone().requires_grad_() for each in theta]
    gradient = torch.autograd.grad(loss(points), points, create_graph=True)
    return [*gradient, *torch.autograd.grad(gradient, points, direction)]


def forward_over_reverse(loss: Loss, theta: list[Tensor], direction: list[Tensor]) -> list[Tensor]:
    points = [each.clone().requires_grad_() for each in theta]
    with dual_level():
        moved = [forward_ad.make_dual(x, u) for x, u in zip(points, direction, strict=True)]
        found = [forward_ad.unpack_dual(each) for each in torch.autograd.grad(loss(moved), points)]
    return [*[each.primal for each in found], *[each.tangent for each in found]]


def tangents_outside_a_transform(loss: Loss, theta: list[Tensor], direction: list[Tensor]) -> list[Tensor]:
    with dual_level():
        moved = [forward_ad.make_dual(x, u) for x, u in zip(theta, direction, strict=True)]
        value, pull = torch.func.vjp(lambda *points: loss(points), *moved)
        found = [forward_ad.unpack_dual(each) for each in pull(torch.ones_like(value))]
    return [*[each.primal for each in found], *[each.tangent for each in found]]


def transforms(loss: Loss, theta: list[Tensor], direction: list[Tensor]) -> list[Tensor]:
    slope = torch.func.grad(lambda points: loss(points))
    gradient, product = torch.func.jvp(slope, (theta,), (direction,))
    return [*gradient, *product]


def grad_of_grad(loss: Loss, theta: list[Tensor], direction: list[Tensor]) -> list[Tensor]:
    slope = torch.func.grad(lambda points: loss(points))

    def along(points: list[Tensor]) -> Tensor:
        return sum(((x * u).sum() for x, u in zip(slope(points), direction, strict=True)), torch.zeros(()))

    return [*slope(theta), *torch.func.grad(along)(theta)]


WAYS = [double_backward, forward_over_reverse, tangents_outside_a_transform, transforms, grad_of_grad]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("num_tasks", [None, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_and_product_are_those_without_it(way: Callable[..., Any], num_tasks: int | None, dropout: float):
    plain, theta, direction = loss_of(Net(False, dropout=dropout), num_tasks)
    ours, _, _ = loss_of(Net(True, dropout=dropout), num_tasks)
    expected = double_backward(plain, theta, direction)
    assert distance(way(ours, theta, direction), expected) < 1e-12


@pytest.mark.parametrize("way", [double_backward, forward_over_reverse])
def test_batch_norm_in_train_mode(way: Callable[..., Any]):
    nets = [Net(is_remat, norm="batch", dropout=0.3) for is_remat in (False, True)]
    (plain, theta, direction), (ours, _, _) = loss_of(nets[0]), loss_of(nets[1])
    assert distance(way(ours, theta, direction), double_backward(plain, theta, direction)) < 1e-12
    # Moved once an evaluation of the net, and not again in backward passes.
    for mine, its in zip(nets[1].buffers(), nets[0].buffers(), strict=True):
        assert torch.equal(mine, its)


def test_third_derivatives():
    plain, theta, direction = loss_of(Net(False))
    ours, _, _ = loss_of(Net(True))

    def third(loss: Loss) -> list[Tensor]:
        points = [each.clone().requires_grad_() for each in theta]
        slope = torch.autograd.grad(loss(points), points, create_graph=True)
        product = torch.autograd.grad(slope, points, direction, create_graph=True)
        return list(torch.autograd.grad(product, points, direction, materialize_grads=True))

    assert distance(third(ours), third(plain)) < 1e-12


def test_mode_autocast_and_buffers_are_those_of_the_call():
    def gradient(is_remat: bool) -> list[Tensor]:
        net = Net(is_remat, norm="batch", dropout=0.5).float()
        torch.manual_seed(3)
        x = torch.randn(6, WIDTH)
        net.eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(x).square().mean()
        if is_remat:
            # None of this may reach the evaluations that come.
            net.train()
            torch.rand(7)
            for buffer in net.buffers():
                buffer.add_(1)
        return list(torch.autograd.grad(loss, list(net.parameters())))

    for mine, its in zip(gradient(True), gradient(False), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("is_on", [True, False])
def test_all_evaluations_of_a_product_have_the_autocast_and_the_kernels_of_attention_of_the_call(is_on: bool):
    dtypes, are_math = [], []

    def block(x: Tensor) -> Tensor:
        product = x @ x
        dtypes.append(product.dtype)
        are_math.append(torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled())
        return product.float().tanh().sum()

    x = torch.eye(3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on), sdpa_kernel(SDPBackend.MATH):
        value = remat(block, x)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not is_on):
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        torch.autograd.grad(slope.square().sum(), x)
    assert len(dtypes) >= 3
    assert set(dtypes) == {torch.bfloat16 if is_on else torch.float32}
    assert all(are_math)


def test_values_behind_stop_gradient_are_those_of_the_unperturbed_evaluation():
    x = torch.tensor([0.3, -0.7], dtype=torch.float64)

    def block(w: Tensor) -> Tensor:
        return (stop_gradient(w.exp()) * w.square()).sum() + stop_gradient(w.sin()).sum()

    def difference(is_remat: bool) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            return (remat(block, w) if is_remat else block(w)) + (stop_gradient(w.cos()) * w).sum()

        replay = Replay(lambda: [loss(x)])

        def slope(point: Tensor) -> Tensor:
            point = point.clone().requires_grad_()
            return torch.autograd.grad(loss(point), point)[0]

        ahead = replay(lambda: [slope(x + 1e-4)])[0]
        return (ahead - replay(lambda: [slope(x - 1e-4)])[0]) / 2e-4

    assert torch.allclose(difference(True), 2 * x.exp(), atol=1e-9)
    assert torch.allclose(difference(False), difference(True), atol=1e-12)


def test_arguments_and_results_of_any_nesting():
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def block(pair: tuple[Tensor, int], *, scale: float, mask: Tensor) -> dict[str, Any]:
        x, count = pair
        return {"x": torch.tanh(x @ x) * scale * mask, "count": count, "where": mask.argmax()}

    mask = torch.eye(3, dtype=torch.float64)
    found = remat(block, (weight, 7), scale=2.0, mask=mask)
    expected = block((weight, 7), scale=2.0, mask=mask)
    assert found["count"] == 7
    assert int(found["where"]) == int(expected["where"])
    ours, its = (torch.autograd.grad(each["x"].sum(), weight)[0] for each in (found, expected))
    assert torch.equal(ours, its)


def test_tied_and_unused_parameters():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.unused = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    torch.manual_seed(0)
    block, x = Tied(), torch.randn(3, 2)
    parameters = [block.first.weight, block.first.bias, block.unused.weight]
    found = torch.autograd.grad(remat(block, x).sum(), parameters, allow_unused=True)
    expected = torch.autograd.grad(block(x).sum(), parameters, allow_unused=True)
    assert found[2] is None
    assert torch.allclose(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_what_would_be_wrong_is_refused():
    weight, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.raises(
        ConfigError, match="requires a gradient and is not among its inputs; expected that only its inputs"
    ):
        remat(lambda y: y * weight, x)
    with pytest.raises(ConfigError, match="changes one of its inputs or parameters in place"):
        remat(lambda y: y.mul_(2).sum(), x * 1)
    with dual_level():
        x = torch.ones(2, requires_grad=True)
        y = remat(torch.tanh, forward_ad.make_dual(x, torch.ones(2)))
        with pytest.raises(RuntimeError, match="reverse mode over forward mode"):
            torch.autograd.grad(forward_ad.unpack_dual(y).tangent.sum(), x)


def peak(way: Callable[..., Any], num_blocks: int, is_remat: bool) -> int:
    """Return the most bytes that a product of a net of some blocks holds."""
    weights = [torch.eye(8, dtype=torch.float64) / math.sqrt(2) for _ in range(num_blocks)]

    def block(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.softmax(x @ weight, dim=1)
        return x

    def loss(theta: Sequence[Tensor]) -> Tensor:
        x = torch.ones(64, 8, dtype=torch.float64)
        for weight in theta:
            x = remat(block, x, weight) if is_remat else block(x, weight)
        return x.square().sum()

    with LiveStorage() as live:
        way(loss, weights, weights)
    return live.peak


def per_block(way: Callable[..., Any], is_remat: bool) -> float:
    """Return it for one block more, in inputs of a block."""
    return (peak(way, 10, is_remat) - peak(way, 5, is_remat)) / 5 / (64 * 8 * 8)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", [double_backward, forward_over_reverse, tangents_outside_a_transform])
def test_a_deeper_net_holds_the_inputs_of_its_blocks_and_no_more(way: Callable[..., Any]):
    # Inputs and cotangents, or their tangents; and the tensors of a weight's size that come and go.
    assert per_block(way, True) < 4
    assert per_block(way, False) > 12


class _Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_nothing_is_computed_that_a_backward_pass_does_not_ask_for():
    weight, x = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    scale = torch.ones(3, 3, requires_grad=True)
    found = remat(lambda x, weight: x @ weight, x, weight)
    slopes = torch.autograd.grad(found, [x, weight], scale, create_graph=True)
    counts = {}
    for sources in ([scale], [scale, x, weight]):
        with _Products() as products:
            torch.autograd.grad(slopes, sources, [torch.ones_like(each) for each in slopes], retain_graph=True)
        counts[len(sources)] = products.count
    # The product again and its backward pass (3), then the cotangent of `scale` (2); of x and of the weight one each.
    assert counts == {1: 5, 3: 7}
    for source in (x, weight, scale):
        alone = torch.autograd.grad(slopes, source, [torch.ones_like(each) for each in slopes], retain_graph=True)[0]
        plain = torch.autograd.grad(x @ weight, [x, weight], scale, create_graph=True)
        expected = torch.autograd.grad(plain, source, [torch.ones_like(each) for each in plain])[0]
        torch.testing.assert_close(alone, expected)
