"""Modules that read their own tensors past their places: right, or refused by the name of the module."""

import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlotool import (
    ConjugateGradient,
    Exact,
    Graph,
    Identity,
    Implicit,
    Problem,
    Program,
    Schedule,
    Stream,
    Unrolled,
)
from mlotool.core.errors import ConfigError, MlotoolError

GENERATOR = torch.Generator().manual_seed(0)
SAMPLES = list(
    zip(torch.randn(12, 4, generator=GENERATOR).double(), torch.randint(0, 3, (12,), generator=GENERATOR), strict=True)
)


class Layer(nn.Module):
    """A linear layer with a scale in a buffer, of which something is read by a reference.

    Args:
        keep: `layer -> a function that returns weight, bias and scale`.
    """

    def __init__(self, keep: Callable[["Layer"], Callable[[], tuple[Tensor, ...]]]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.zeros(4))
        self.register_buffer("scale", torch.ones(4))
        self.double()
        self.keep = keep(self)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, scale = self.keep()
        return torch.tanh(F.linear(x, weight, bias)) * scale


class Net(nn.Module):
    def __init__(self, keep: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.last = nn.Sequential(Layer(keep)), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.body(x))
        return found


class Weights(nn.Module):
    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([0.1, 0.3]).double())
        self.kept = [self.x] if keeps else None

    def forward(self) -> Tensor:
        return self.x if self.kept is None else self.kept[0]


def lower(batch: Any, *, model: Any, weights: Any) -> Tensor:
    w, out = weights(), model(batch[0])
    losses = F.cross_entropy(out, batch[1], reduction="none")
    return (torch.sigmoid(w[1] * batch[0][:, 0] + w[0]) * losses).mean() + 0.05 * out.square().mean()


def upper(batch: Any, *, model: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def program(net: nn.Module, algorithm: Any, weights: nn.Module | None = None) -> Program:
    streams = [Stream(SAMPLES[:6], batch_size=6, shuffle=False), Stream(SAMPLES[6:], batch_size=6, shuffle=False)]
    sgd = partial(torch.optim.SGD, lr=0.1)
    roles = {"model": "low", "weights": "up"}
    low = Problem("low", net, lower, roles=roles, stream=streams[0], optimizer=sgd, hypergradient=algorithm)
    up = Problem("up", weights or Weights(), upper, roles={"model": "low"}, stream=streams[1], optimizer=sgd)
    return Program([low, up], Graph({"up": ["low"]}, {"low": ["up"]}))


def plain(layer: Layer) -> Any:
    return lambda: (layer.weight, layer.bias, layer.scale)


def in_list(layer: Layer) -> Any:
    kept = [layer.weight, layer.bias]
    return lambda: (kept[0], kept[1], layer.scale)


def in_closure(layer: Layer) -> Any:
    bias = layer.bias
    return lambda: (layer.weight, bias, layer.scale)


def in_partial(layer: Layer) -> Any:
    return partial(lambda weight: (weight, layer.bias, layer.scale), layer.weight)


def cached_copy(layer: Layer) -> Any:
    view = layer.weight.T.contiguous().T
    return lambda: (view, layer.bias, layer.scale)


def cached_view(layer: Layer) -> Any:
    view = layer.weight.T
    return lambda: (view.T, layer.bias, layer.scale)


def by_weak_reference(layer: Layer) -> Any:
    reference = weakref.ref(layer.weight)
    return lambda: (reference(), layer.bias, layer.scale)


def in_object(layer: Layer) -> Any:
    kept = SimpleNamespace(weight=layer.weight)
    return lambda: (kept.weight, layer.bias, layer.scale)


def by_hook(layer: Layer) -> Any:
    bias = layer.bias
    layer.register_forward_hook(lambda module, inputs, result: result + bias)
    return plain(layer)


PARAMETERS = [in_list, in_closure, in_partial, cached_view, cached_copy, by_weak_reference, in_object, by_hook]
ALGORITHMS = [
    Implicit(ConjugateGradient(20, 1e-10, damping=0.5)),
    Implicit(Identity(), "finite_difference"),
    Implicit(Exact(damping=0.5), "forward"),
    Unrolled(),
]
MODULE = r"problems\.low\.module: found tests\.program\.test_past_slots\.Layer .*at 'body\.0', which reads"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
@pytest.mark.parametrize("keep", PARAMETERS)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["cg", "difference", "forward", "unrolled"])
def test_a_parameter_that_is_read_past_its_place_is_refused(keep: Any, algorithm: Any) -> None:
    with pytest.raises(ConfigError, match=MODULE):
        Schedule(program(Net(keep), algorithm)).tick()


def detached(layer: Layer) -> Any:
    weight = layer.weight.detach()
    return lambda: (weight, layer.bias, layer.scale)


def of_numpy(layer: Layer) -> Any:
    weight = layer.weight.detach().numpy()
    return lambda: (torch.from_numpy(weight), layer.bias, layer.scale)


def kept_buffer(layer: Layer) -> Any:
    scale = layer.scale
    return lambda: (layer.weight, layer.bias, scale)


def part_of_buffer(layer: Layer) -> Any:
    scale = layer.scale[:1]
    return lambda: (layer.weight, layer.bias, scale)


def buffer_in_object(layer: Layer) -> Any:
    kept = SimpleNamespace(scale=[layer.scale])
    return lambda: (layer.weight, layer.bias, kept.scale[0])


@pytest.mark.parametrize("keep", [detached, of_numpy, kept_buffer, part_of_buffer, buffer_in_object])
@pytest.mark.parametrize("algorithm", ALGORITHMS[1::2], ids=["difference", "unrolled"])
def test_so_are_values_and_buffers_where_evaluations_are_at_other_ones(keep: Any, algorithm: Any) -> None:
    with pytest.raises(ConfigError, match=MODULE):
        Schedule(program(Net(keep), algorithm)).tick()


def test_what_shapes_a_problem_is_looked_at_too() -> None:
    made = program(Net(plain), ALGORITHMS[0], Weights(keeps=True))
    with pytest.raises(ConfigError, match=r"problems\.up\.module: found .*Weights .*at 'the top', .*parameter 'x'"):
        Schedule(made).tick()


def test_a_loss_that_reads_a_parameter_is_blamed_itself() -> None:
    net = Net(plain)
    made = program(net, ALGORITHMS[0])

    def reads(batch: Any, *, model: Any, weights: Any) -> Tensor:
        return lower(batch, model=model, weights=weights) + net.last.bias.square().sum()

    made.problems["low"].loss = reads
    with pytest.raises(MlotoolError, match=r"problems\.low\.loss: .*depends on the parameter 'last\.bias'"):
        Schedule(made).tick()


@pytest.mark.parametrize("algorithm", ALGORITHMS[1::2])
def test_nothing_is_left_of_the_look(algorithm: Any) -> None:
    class Counting(Net):
        def __init__(self, keep: Any) -> None:
            super().__init__(keep)
            self.calls, self.seen = 0, []
            self.norm = nn.BatchNorm1d(4).double()

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(self.calls)
            return super().forward(F.dropout(self.norm(x), 0.2))

    def state(is_rehearsed: bool) -> list[Any]:
        net = Counting(plain)
        made = program(net, algorithm)
        made.random.manual_seed(3)
        if not is_rehearsed:
            made.rehearse_once = lambda: None  # type: ignore[method-assign]
        schedule = Schedule(made)
        for _ in range(3):
            schedule.tick()
        return [net.calls, net.seen, *net.state_dict().values(), *made.problems["up"].theta.values()]

    expected, found = state(is_rehearsed=False), state(is_rehearsed=True)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_a_checkpoint_inside_a_library_module_is_found_from_python() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
            return found

    Checkpointed.__module__ = "transformers.models"
    net = nn.Sequential(Checkpointed(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3)).double()
    with pytest.raises(MlotoolError, match=r"looks the module's parameters up again.*mlotool\.remat"):
        Schedule(program(net, Unrolled())).tick()
