"""What a loss may do besides calling operators: under forward over reverse it means what it means to gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mlotool import remat, stop_gradient
from mlotool.core.errors import ConfigError
from mlotool.core.forward_mode import forward_mode, twice_differentiable_mode
from tests.core.operators.products import difference, distance, forward, forward_by_autograd, reverse
from tests.hypergradient.test_nasty_blocks import OldSine

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]

POINT = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
VECTOR = torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

Way = Callable[..., list[Tensor]]
ways = pytest.mark.parametrize("way", [forward, forward_by_autograd], ids=lambda way: way.__name__)


def product(way: Way, function: Callable[[Tensor], Tensor], num_tasks: int | None = None, mode: Any = None) -> Tensor:
    """Return `H u` of a loss whose Hessian is that of each entry of the function, weighted."""
    point, vector, called = POINT, VECTOR, function
    if num_tasks is not None:
        scale = torch.linspace(1.0, 0.5, num_tasks, dtype=torch.float64)[:, None]
        point, vector, called = scale * point, scale.flip(0) * vector, torch.vmap(function, randomness="different")
    return way(lambda x: (called(x) * WEIGHTS).sum(), [point], [vector], mode or (lambda: forward_mode("w")))[0]


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * x
        with torch.enable_grad():
            z = x * x
        y = y + x
    return y * x + z * x.sin()


@torch.no_grad()
def decorated(x: Tensor) -> Tensor:
    return x * x


def switched(x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    y = x * x
    torch.set_grad_enabled(True)
    return y * x**2


def set_within(x: Tensor) -> Tensor:
    with suppress(KeyError), torch.set_grad_enabled(False):
        y = x * x
        raise KeyError
    return y * x**2


def in_inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = x * x
    return y.clone() * x**2


def into_buffer(x: Tensor) -> Tensor:
    buffer = torch.ones(3, dtype=torch.float64)
    with torch.no_grad():
        buffer.copy_(x)
    return buffer * x**2


def detached_in_place(x: Tensor) -> Tensor:
    y = x * x
    y.detach_()
    return y * x**2


def data_in_place(x: Tensor) -> Tensor:
    y = x * 1.0
    y.data.mul_(2.0)
    return y * y * x


HIDDEN: dict[str, Callable[[Tensor], Tensor]] = {
    "no_grad and enable_grad": without_gradients,
    "no_grad as a decorator": lambda x: decorated(x) * x**2,
    "set_grad_enabled called": switched,
    "set_grad_enabled as a context, left by an error": set_within,
    "data": lambda x: (x * x).data * x.sin(),
    "detach": lambda x: (x * x).detach() * x.sin(),
    "stop_gradient": lambda x: stop_gradient(x * x) * x.sin(),
    "straight through": lambda x: (x + (x.round() - x).detach()) ** 2 * x,
}
"""The same with tasks and without."""

ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "inference_mode": in_inference,
    "a buffer under no_grad": into_buffer,
    "detach_": detached_in_place,
    "data in place": data_in_place,
    "item": lambda x: x[0].item() * x**2,
    "Parameter": lambda x: nn.Parameter(x) * x**2,
    "argmax": lambda x: x[x.argmax()] ** 3 * x,
    "a gradient inside": lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0] * x,
    "torch.func inside": lambda x: torch.func.grad(lambda y: (y**3).sum())(x) * x,
}


@ways
@pytest.mark.parametrize("num_tasks", [None, 2])
@pytest.mark.parametrize("name", HIDDEN)
def test_what_has_no_gradient_has_no_tangent(name: str, num_tasks: int | None, way: Way):
    function = HIDDEN[name]
    scales = [(1.0, 1.0)] if num_tasks is None else [(1.0, 0.5), (0.5, 1.0)]
    products = [reverse(lambda x: (function(x) * WEIGHTS).sum(), [a * POINT], [b * VECTOR])[0] for a, b in scales]
    expected = products[0] if num_tasks is None else torch.stack(products)
    torch.testing.assert_close(product(way, function, num_tasks), expected, rtol=1e-12, atol=1e-12)


@ways
@pytest.mark.parametrize("name", ALONE)
def test_values_that_leave_the_graph_are_constants(name: str, way: Way):
    expected = reverse(lambda x: (ALONE[name](x) * WEIGHTS).sum(), [POINT], [VECTOR])[0]
    torch.testing.assert_close(product(way, ALONE[name]), expected, rtol=1e-12, atol=1e-12)


@ways
@pytest.mark.parametrize("change", [lambda g: 2.0 * g, lambda g: g.clamp(-1.0, 1.0), lambda g: g * g])
def test_hooks_on_gradients_are_differentiated(change: Callable[[Tensor], Tensor], way: Way):
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(change)
        return y * y * x

    expected = difference(lambda x: (function(x) * WEIGHTS).sum(), [POINT], [VECTOR])
    assert distance([product(way, function)], expected) < 1e-8
    # Double backward calls the hook in the second pass too.
    assert distance(reverse(lambda x: (function(x) * WEIGHTS).sum(), [POINT], [VECTOR]), expected) > 0.1


def test_gradients_that_are_switched_in_a_backward_pass():
    # There gradients are off, and tangents live.
    class Recomputed(Sine):
        @staticmethod
        def backward(ctx: Any, slope: Tensor) -> Tensor:
            with torch.enable_grad():
                factor = ctx.saved_tensors[0].cos()
            with torch.no_grad():
                torch.ones(1)
            return slope * factor

    found = product(forward, lambda x: Recomputed.apply(x.exp()) ** 2)
    torch.testing.assert_close(found, product(forward, lambda x: x.exp().sin() ** 2), rtol=1e-12, atol=1e-12)


class Sine(torch.autograd.Function):
    """A function with tangents of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, move: Tensor) -> Tensor:
        return move * ctx.saved_tensors[0].cos()


class RoundStraight(Sine):
    """Rounds; with a slope of its own."""

    forward = staticmethod(lambda x: x.round())
    backward = jvp = staticmethod(lambda ctx, slope: 1.5 * slope)


class NoTangent(Sine):
    """Without jvp."""

    jvp = torch.autograd.Function.jvp


@ways
@pytest.mark.parametrize("num_tasks", [None, 2])
def test_functions_with_tangents(num_tasks: int | None, way: Way):
    found = product(way, lambda x: Sine.apply(x) ** 2 + RoundStraight.apply(x) ** 2 * x, num_tasks)
    straight = lambda x: 1.5 * x + (x.round() - 1.5 * x).detach()  # noqa: E731
    expected = product(way, lambda x: x.sin() ** 2 + straight(x) ** 2 * x, num_tasks)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


OUTSIDE = torch.zeros(3, dtype=torch.float64)
REFUSED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "old function": ("setup_context", OldSine.apply),
    "function without jvp": ("jvp function", NoTangent.apply),
    "checkpoint": (r"mlotool\.remat", lambda x: checkpoint(torch.sin, x, use_reentrant=False)),
    "jvp inside": ("Nested forward mode", lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1]),
    "outside in place": ("copy_", lambda x: OUTSIDE.copy_(x) * x),
    "requires_grad_": (r"requires_grad_\(\)", lambda x: x.detach().requires_grad_() * x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_said_with_what_to_write(name: str):
    message, function = REFUSED[name]
    pattern = rf"problems\.w\.loss: found (?=.*{message}).*Write (product: reverse|mlotool\.remat)"
    with pytest.raises(ConfigError, match=pattern):
        product(forward, function)


class Block(nn.Module):
    """Operators of the table in a module with attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.GroupNorm(2, 4)
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.norm(F.silu(self.linear(x)).transpose(1, 2)).transpose(1, 2)


@ways
@pytest.mark.parametrize("num_tasks", [None, 2])
@pytest.mark.parametrize("is_remat", [False, True])
def test_the_mode_acts_in_blocks_and_in_tasks(is_remat: bool, num_tasks: int | None, way: Way):
    block = Block().double().eval()
    names = [name for name, _ in block.named_parameters()]
    data = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).view(2, 3, 4)

    def loss(*theta: Tensor) -> Tensor:
        own = dict(zip(names, theta, strict=True))
        called = (lambda x: remat(block, x)) if is_remat else block
        with torch.nn.utils.stateless._reparametrize_module(block, own):
            y = called(called(data))
        return (y**2).sum()

    theta = [each.detach() for each in block.parameters()]
    vector = [torch.ones_like(each).cumsum(0) * 0.1 for each in theta]
    if num_tasks is not None:
        theta, vector = ([torch.stack([each, 0.9 * each]) for each in group] for group in (theta, vector))
    whole = loss if num_tasks is None else lambda *theta: torch.vmap(loss)(*theta).sum()
    apart = loss if num_tasks is None else lambda *theta: sum(loss(*each) for each in zip(*theta, strict=True))
    found = way(whole, theta, vector, lambda: forward_mode("w"))
    assert distance(found, difference(apart, theta, vector)) < 1e-8
    twice = reverse(whole, theta, vector, lambda: twice_differentiable_mode("w"))
    assert distance(twice, found) < 1e-12


@ways
@pytest.mark.parametrize("name", ["no_grad and enable_grad", "set_grad_enabled as a context, left by an error"])
def test_below_and_above_other_modes(name: str, way: Way):
    def function(x: Tensor) -> Tensor:
        # A device is a mode of its own.
        with torch.device("cpu"):
            return HIDDEN[name](x) + HIDDEN[name](x)

    @contextmanager
    def nested() -> Iterator[None]:
        with forward_mode("w"), torch.device("cpu"), forward_mode("w"):
            yield

    expected = 2 * reverse(lambda x: (HIDDEN[name](x) * WEIGHTS).sum(), [POINT], [VECTOR])[0]
    for mode in (None, nested):
        torch.testing.assert_close(product(way, function, mode=mode), expected, rtol=1e-12, atol=1e-12)
