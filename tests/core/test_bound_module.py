"""A module bound to parameters: whose parameters, whose buffers, whose mode."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mlotool.core import BoundModule


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


class Net(nn.Module):
    """Has a submodule, a method beside forward, and a failing one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.norm(self.inner(x)) * scale

    def fail(self) -> None:
        raise KeyError("on purpose")


class Tied(nn.Module):
    """Encoder and decoder share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 2, bias=False)
        self.decoder = nn.Linear(2, 2, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


def others(module: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(tensor) for name, tensor in module.named_parameters()}


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_given_parameters_take_the_places_of_the_modules_own_and_get_the_gradient() -> None:
    layer, x = nn.Linear(2, 1), torch.randn(3, 2)
    weight, bias = torch.randn(1, 2, requires_grad=True), torch.randn(1, requires_grad=True)
    found = BoundModule(layer, {"weight": weight, "bias": bias})(x)
    assert torch.equal(found, functional.linear(x, weight, bias))
    gradients = torch.autograd.grad(found.sum(), [weight, bias, layer.weight], allow_unused=True)
    assert torch.equal(gradients[0], x.sum(0, keepdim=True))
    assert float(gradients[1]) == 3.0
    assert gradients[2] is None


def test_parameters_that_are_left_out_are_the_modules() -> None:
    layer, x = nn.Linear(2, 1), torch.randn(3, 2)
    layer.bias.requires_grad_(False)
    weight = torch.randn(1, 2)
    bound = BoundModule(layer, {"weight": weight})
    assert torch.equal(bound(x), functional.linear(x, weight, layer.bias))
    named = dict(bound.named_parameters())
    assert list(named) == ["weight", "bias"]
    assert named["weight"] is weight
    assert named["bias"] is layer.bias


class Counter(nn.Module):
    """Shows its buffer: each call adds one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.zeros(()))

    def forward(self) -> Tensor:
        self.count.add_(1)
        return self.weight * self.count


class Reassigning(Counter):
    """Puts a new tensor into its buffer's place."""

    def forward(self) -> Tensor:
        self.count = self.count + 1
        return self.weight * self.count


@pytest.mark.parametrize("make", [Counter, Reassigning])
def test_a_module_called_twice_sees_its_own_update_of_a_throw_away_buffer(make: type[Counter]) -> None:
    module = make()
    bound = BoundModule(module, {"weight": torch.tensor(2.0)})
    assert [float(bound()), float(bound())] == [2.0, 4.0]
    assert float(module.count) == 0.0
    assert float(BoundModule(module, {"weight": torch.tensor(2.0)})()) == 2.0


def modes(module: nn.Module) -> list[bool]:
    return [child.training for child in module.modules()]


@pytest.mark.parametrize("is_given", [False, True])
def test_an_eval_role_normalises_by_the_running_statistics_and_restores_every_mode(is_given: bool) -> None:
    net, x = Net(), torch.randn(5, 2)
    with torch.no_grad():
        net.norm.running_mean.fill_(1.0)
    net.head.eval()
    given, before = (others(net) if is_given else None), buffers(net)
    found, was = BoundModule(net, given, training=False)(x), modes(net)
    assert was == [True, True, True, False]
    assert same(before, buffers(net))
    use = given or dict(net.named_parameters())
    hidden = functional.linear(x, use["inner.weight"], use["inner.bias"])
    statistics = net.norm.running_mean, net.norm.running_var
    hidden = functional.batch_norm(hidden, *statistics, use["norm.weight"], use["norm.bias"])
    assert torch.allclose(found, functional.linear(hidden, use["head.weight"], use["head.bias"]))


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize(
    "call", [lambda bound: bound(torch.randn(4, 7)), lambda bound: bound.method("fail")], ids=["forward", "method"]
)
def test_mode_and_parameters_come_back_when_a_call_fails(call: Callable[[BoundModule], object], is_given: bool) -> None:
    net = Net()
    net.norm.eval()
    was, own = modes(net), list(net.parameters())
    with pytest.raises((RuntimeError, KeyError)):
        call(BoundModule(net, others(net) if is_given else None, training=False))
    assert modes(net) == was
    assert all(a is b for a, b in zip(net.parameters(), own, strict=True))


def test_a_method_runs_with_the_given_parameters_mode_and_throw_away_buffers() -> None:
    net, x = Net(), torch.randn(5, 2)
    given, before = others(net), buffers(net)
    hidden = functional.linear(x, given["inner.weight"], given["inner.bias"])
    for training in (None, False):
        found = BoundModule(net, given, training=training).method("features", x, scale=2.0)
        values = net.norm.running_mean.clone(), net.norm.running_var.clone(), given["norm.weight"], given["norm.bias"]
        expected = functional.batch_norm(hidden, *values, training=training is None)
        assert torch.allclose(found, 2 * expected)
        assert same(before, buffers(net))
        assert all(modes(net))


def test_a_tied_weight_is_replaced_everywhere_and_has_one_name() -> None:
    net, x = Tied(), torch.randn(3, 2)
    weight = torch.randn(2, 2, requires_grad=True)
    bound = BoundModule(net, {"encoder.weight": weight})
    assert torch.equal(bound(x), torch.tanh(x @ weight.T) @ weight.T)
    assert [name for name, _ in bound.named_parameters()] == ["encoder.weight"]
    assert torch.equal(bound.method("forward", x), bound(x))
