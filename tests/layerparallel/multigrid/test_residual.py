import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mlotool.core.bound_module import BoundModule
from mlotool.core.errors import ConfigError
from mlotool.layerparallel import BlockLayers, MultigridResidual, StackedLayers
from mlotool.layerparallel.multigrid import WholeLayers

N = 16


class Wave(nn.Module):
    """Dense layers with stacked weights, `u + h tanh(K u + b)`, at once by one batched product."""

    def __init__(self, num_layers: int = N, width: int = 3, h: float = 0.2) -> None:
        super().__init__()
        self.num_layers, self.h = num_layers, h
        self.weight = nn.Parameter(torch.randn(num_layers, width, width, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(num_layers, width, dtype=torch.float64))
        self.calls: list[range] = []

    def many(self, states: Tensor, layers: range, h: float) -> Tensor:
        self.calls.append(layers)
        part = slice(layers.start, layers.stop, layers.step)
        return states + h * torch.tanh(torch.baddbmm(self.bias[part, None], states, self.weight[part].mT))

    def forward(self, state: Tensor) -> Tensor:
        for n in range(self.num_layers):
            state = state + self.h * torch.tanh(state @ self.weight[n].T + self.bias[n])
        return state


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, state: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(state)))


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh())


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 1))


MAKERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "stacked by hand": (Wave, (5, 3)),
    "dense blocks": (lambda: BlockLayers([dense() for _ in range(N)], 0.2), (5, 3)),
    "dense blocks, stacked": (lambda: StackedLayers(dense, N, 0.2), (5, 3)),
    "convolutions": (lambda: BlockLayers([convolution() for _ in range(N)], 0.2), (2, 2, 4, 4)),
    "convolutions, stacked": (lambda: StackedLayers(convolution, N, 0.2), (2, 2, 4, 4)),
    "normalised blocks": (lambda: BlockLayers([WithNorm() for _ in range(N)], 0.1), (5, 3)),
    "whole blocks": (lambda: WholeLayers(nn.Sequential(*[nn.Tanh() for _ in range(N)])), (5, 3)),
}


def loss_of(last: Tensor) -> Tensor:
    return (last.square() * torch.linspace(0.5, 1, last.numel(), dtype=last.dtype).view_as(last)).sum()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("relaxation", "cycles"), [("F", 4), ("FCF", 2)])
def test_gradients_equal_those_of_autograd_at_convergence(name: str, relaxation: str, cycles: int) -> None:
    torch.manual_seed(0)
    make, shape = MAKERS[name]
    part = MultigridResidual(make().double(), relaxation=relaxation, cycles=cycles)
    u0 = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    inputs = [u0, *part.parameters()]
    loss = loss_of(part(u0))
    found = torch.autograd.grad(loss, inputs)
    expected_loss = loss_of(part.serial()(u0))
    expected = torch.autograd.grad(expected_loss, inputs)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_gradcheck() -> None:
    torch.manual_seed(0)
    part = MultigridResidual(Wave(8, 2), coarsening=2, cycles=4, levels=2)
    points = [torch.randn(2, 2, dtype=torch.float64), *part.parameters()]

    def run(u0: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return BoundModule(part, {"layers.weight": weight, "layers.bias": bias})(u0)

    given = tuple(each.detach().clone().requires_grad_() for each in points)
    assert torch.autograd.gradcheck(run, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


@pytest.mark.parametrize("name", ["stacked by hand", "dense blocks", "convolutions, stacked"])
def test_second_and_third_derivatives_equal_those_of_autograd_at_convergence(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MAKERS[name]
    part = MultigridResidual(make().double(), cycles=2)
    u0 = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    inputs = [u0, *part.parameters()]
    directions = [torch.randn_like(each) for each in inputs]

    def derivatives() -> list[tuple[Tensor, ...]]:
        value, found = loss_of(part(u0)), []
        for _ in range(3):
            slopes = torch.autograd.grad(value, inputs, create_graph=True)
            found.append(tuple(slope.detach() for slope in slopes))
            value = sum((slope * direction).sum() for slope, direction in zip(slopes, directions, strict=True))
        return found

    mine = derivatives()
    part.serial()
    for found, expected in zip(mine, derivatives(), strict=True):
        assert max(each.abs().max() for each in expected) > 1e-3
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("num_layers", [1, 5, 7])
def test_second_derivatives_of_ragged_layers_are_the_serial_ones(num_layers: int) -> None:
    settings = {"h": 0.3, "coarsening": 2, "cycles": 8}
    part = MultigridResidual(lambda: dense().double(), num_layers, **settings)
    x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    points = [x, *part.parameters()]

    def derivatives(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(run(x).square().sum(), points, create_graph=True)
        return [*first, *torch.autograd.grad(sum(each.square().sum() for each in first), points)]

    torch.testing.assert_close(derivatives(part), derivatives(part.layers), rtol=1e-11, atol=1e-11)


def test_a_loss_may_read_all_states() -> None:
    """Gradients and second derivatives through all states at once."""
    torch.manual_seed(0)
    part = MultigridResidual(Wave(), cycles=2)
    u0 = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    inputs, weight = [u0, *part.parameters()], torch.rand(N + 1, 1, 1, dtype=torch.float64)
    states = [u0]
    for n in range(N):
        states.append(part.layers.many(states[-1][None], range(n, n + 1), part.layers.h)[0])
    first = [
        torch.autograd.grad((each.square() * weight).sum(), inputs, create_graph=True)
        for each in (part.states(u0), torch.stack(states))
    ]
    torch.testing.assert_close(*first, rtol=1e-8, atol=1e-8)
    second = [torch.autograd.grad(sum(each.square().sum() for each in slopes), inputs) for slopes in first]
    torch.testing.assert_close(*second, rtol=1e-7, atol=1e-7)


def test_autocast_reaches_the_backward() -> None:
    torch.manual_seed(0)
    part = MultigridResidual(StackedLayers(dense, N, 0.2), cycles=2)
    u0 = torch.randn(5, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(part(u0))
        expected_loss = loss_of(part.serial()(u0))
    torch.testing.assert_close(loss, expected_loss, rtol=0.01, atol=0)
    assert not torch.equal(loss, loss_of(part(u0)))
    found, expected = (torch.autograd.grad(each, list(part.parameters())) for each in (loss, expected_loss))
    for mine, exact in zip(found, expected, strict=True):
        assert torch.linalg.vector_norm(mine - exact) < 0.02 * torch.linalg.vector_norm(exact)


def test_a_warm_start_of_each_sample_converges_over_the_steps() -> None:
    torch.manual_seed(0)
    part = MultigridResidual(Wave(64, h=0.03), cycles=1, warm_start=True)
    samples = torch.randn(10, 3, dtype=torch.float64)
    scale = torch.linspace(0.5, 1, 10, dtype=torch.float64)
    residuals = []
    for _ in range(6):
        for index in torch.randperm(10).split(5):
            part.begin(index)
            (part(samples[index]).square() * scale[index, None]).sum().backward()
            residuals.append([float(part.residuals[name][-1]) for name in ("forward", "backward")])
    assert residuals[-1][0] < 1e-3 * residuals[0][0]
    assert residuals[-1][1] < 1e-2 * residuals[0][1]


def test_the_guard_adds_cycles_until_the_gradient_is_right() -> None:
    torch.manual_seed(0)
    u0 = torch.randn(5, 3, dtype=torch.float64)
    part = MultigridResidual(Wave(64, h=0.1), cycles=0, guard_every=3, guard_threshold=0.01)
    biases = []
    with pytest.warns(UserWarning, match="more cycles than set"):
        for _ in range(12):
            loss_of(part(u0)).backward()
            biases.append(part.statistics().get("gradient_bias"))
    assert biases[:2] == [None, None]
    assert biases[2] > 0.01 > biases[-1] > 0
    assert 1 <= part.guard.extra_cycles < 8
    assert len(part.residuals["forward"]) == 1 + part.guard.extra_cycles
    assert not part.guard.is_serial


def test_the_guard_measures_the_bias_of_the_gradient() -> None:
    torch.manual_seed(0)
    u0 = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    part = MultigridResidual(Wave(64, h=0.02), cycles=1, backward_cycles=0, relaxation="F")
    last = part(u0)
    cotangent = torch.ones_like(last)
    inputs = [u0, *part.parameters()]
    mine = torch.cat([each.flatten() for each in torch.autograd.grad(last, inputs, cotangent)])
    exact = torch.cat([each.flatten() for each in torch.autograd.grad(part.serial()(u0), inputs, cotangent)])
    part.serial(False)
    part.guard.every = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handed_on = torch.autograd.grad(part(u0), inputs, cotangent)
    assert part.guard.bias == pytest.approx(float((mine - exact).norm() / exact.norm()), rel=1e-10)
    torch.testing.assert_close(torch.cat([each.flatten() for each in handed_on]), exact, rtol=1e-12, atol=1e-12)


def test_the_guard_goes_serial_at_its_limit() -> None:
    torch.manual_seed(0)
    u0 = torch.randn(5, 3, dtype=torch.float64)
    part = MultigridResidual(Wave(64, h=2.0), cycles=0, guard_every=1, guard_threshold=1e-9, guard_max_cycles=2)
    with pytest.warns(UserWarning) as caught:
        for _ in range(5):
            loss_of(part(u0)).backward()
    assert len(caught) == 3
    assert "run serially from now on" in str(caught[-1].message)
    assert part.statistics()["is_serial"] == 1.0
    torch.testing.assert_close(part(u0), part.layers(u0), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultigridResidual(dense, 8, coarsening=[2, 2, 2]), "coarsening: found"),
        (lambda: MultigridResidual(dense, 8, cycles="atuo"), "cycles: found 'atuo'; expected .* or auto"),
        (lambda: MultigridResidual(dense, 8, workers=4), "workers: found 4; expected null with cycles=2"),
        (lambda: MultigridResidual(dense, 8, cycles="auto", guard_every=0), "guard_every: found 0; expected at least"),
        (lambda: MultigridResidual([dense] * 8), "blocks: found .*; expected Layers, a list of N modules"),
        (lambda: MultigridResidual(Wave(), h=0.3), "h: found 0.3; expected null, since Wave has 0.2 itself"),
        (lambda: MultigridResidual([WithNorm()] * 8, over_ranks=True), "over_ranks: .* without running statistics"),
        (lambda: StackedLayers(WithNorm, 8), r"make_block: found \['norm.running_mean'"),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
