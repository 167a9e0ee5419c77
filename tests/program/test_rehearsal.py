"""The evaluation of a loss before the first tick: what reads tensors past their places in a module is refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mlotool import ConjugateGradient, Exact, Graph, Identity, Implicit, Problem, Program, Stream, Unrolled, remat
from mlotool.core.errors import MlotoolError
from mlotool.core.user_code import WrongResultError
from tests.program.small import assert_identical, parameters, run_ticks, sgd

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


def once(block: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = block(x)
    return found


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(block, x, use_reentrant=False)
    return found


class Net(nn.Module):
    """Two layers, of which one may be evaluated again in the backward pass."""

    def __init__(self, keep: Any, call: Callable[..., Tensor] = once) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.last, self.call = nn.Sequential(Layer(keep)), nn.Linear(4, 3).double(), call

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.call(self.body, x))
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


def program(net: nn.Module, algorithm: Any, weights: nn.Module | None = None, loss: Any = lower) -> Program:
    streams = [Stream(SAMPLES[:6], batch_size=6, shuffle=False), Stream(SAMPLES[6:], batch_size=6, shuffle=False)]
    roles = {"model": "low", "weights": "up"}
    low = Problem("low", net, loss, roles=roles, stream=streams[0], optimizer=sgd, hypergradient=algorithm)
    up = Problem("up", weights or Weights(), upper, roles={"model": "low"}, stream=streams[1], optimizer=sgd)
    return Program([low, up], Graph({"up": ["low"]}, {"low": ["up"]}))


def plain(layer: Layer) -> Any:
    return lambda: (layer.weight, layer.bias, layer.scale)


def by_hook(layer: Layer) -> Any:
    bias = layer.bias
    layer.register_forward_hook(lambda module, inputs, result: result + bias)
    return plain(layer)


def of(make: Callable[[Layer], Any], read: Callable[[Any], Tensor], place: int = 0) -> Callable[[Layer], Any]:
    """Keep something of a layer, and read it in the place of its weight, its bias or its scale."""

    def keep(layer: Layer) -> Any:
        kept = make(layer)
        return lambda: tuple(read(kept) if n == place else x for n, x in enumerate(plain(layer)()))

    return keep


PARAMETERS: dict[str, Any] = {
    "list": of(lambda layer: [layer.weight], lambda kept: kept[0]),
    "closure": of(lambda layer: layer.bias, lambda kept: kept, 1),
    "copy": of(lambda layer: layer.weight.T.contiguous().T, lambda kept: kept),
    "object": of(lambda layer: SimpleNamespace(weight=layer.weight), lambda kept: kept.weight),
    "hook": by_hook,
}
VALUES: dict[str, Any] = {
    "detached": of(lambda layer: layer.weight.detach(), lambda kept: kept),
    "numpy": of(lambda layer: layer.weight.detach().numpy(), torch.from_numpy),
    "part of a buffer": of(lambda layer: layer.scale[:1], lambda kept: kept, 2),
    "buffer in an object": of(lambda layer: SimpleNamespace(x=[layer.scale]), lambda kept: kept.x[0], 2),
}
ALGORITHMS = {
    "cg": Implicit(ConjugateGradient(20, 1e-10, damping=0.5)),
    "difference": Implicit(Identity(), "finite_difference"),
    "forward": Implicit(Exact(damping=0.5), "forward"),
    "unrolled": Unrolled(),
    "unrolled kept": Unrolled(remat=False),
}


def rehearsed(call: Callable[..., Tensor], algorithm: str) -> Program:
    made = program(Net(plain, call), ALGORITHMS[algorithm])
    assert made.internals.rehearse("low", made.problems["low"].stream.peek()).loss.requires_grad
    return made


@pytest.mark.parametrize("algorithm", ["difference", "unrolled", "unrolled kept"])
def test_a_checkpoint_of_torch_is_refused_where_gradients_are_taken_at_other_parameters(algorithm: str) -> None:
    with pytest.raises(WrongResultError) as error:
        rehearsed(checkpointed, algorithm)
    assert "without reading it from the module" in error.value.found
    assert "mlotool.remat" in error.value.advice
    expected = program(Net(plain), ALGORITHMS[algorithm])
    assert_identical(parameters(rehearsed(remat, algorithm)), parameters(expected))


def test_a_checkpoint_of_torch_is_right_at_the_parameters_of_the_module() -> None:
    rehearsed(checkpointed, "cg")


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [*[(name, "cg") for name in PARAMETERS], ("list", "difference"), ("copy", "forward"), ("hook", "unrolled")],
)
def test_a_parameter_that_is_read_past_its_place_is_refused(name: str, algorithm: str) -> None:
    text = r"problems\.low\.loss: .*depends on the parameter 'body\.0\.\w+' of the module of 'low' itself"
    with pytest.raises(MlotoolError, match=text):
        run_ticks(program(Net(PARAMETERS[name]), ALGORITHMS[algorithm]), 1)


@pytest.mark.parametrize("algorithm", ["difference", "unrolled"])
@pytest.mark.parametrize("name", VALUES)
def test_so_are_values_and_buffers_where_evaluations_are_at_other_ones(name: str, algorithm: str) -> None:
    with pytest.raises(MlotoolError, match=r"problems\.low\.loss: .*without reading it from the module"):
        run_ticks(program(Net(VALUES[name]), ALGORITHMS[algorithm]), 1)


def test_what_shapes_a_problem_and_what_a_loss_reads_itself_are_looked_at_too() -> None:
    net = Net(plain)

    def reads(batch: Any, *, model: Any, weights: Any) -> Tensor:
        return lower(batch, model=model, weights=weights) + net.last.bias.square().sum()

    for made, text in (
        (
            program(Net(plain), ALGORITHMS["cg"], Weights(keeps=True)),
            "depends on the parameter 'x' of the module of 'up'",
        ),
        (program(net, ALGORITHMS["cg"], loss=reads), r"depends on the parameter 'last\.bias' of the module of 'low'"),
    ):
        with pytest.raises(MlotoolError, match=text):
            run_ticks(made, 1)


@pytest.mark.parametrize("algorithm", ["difference", "unrolled"])
def test_nothing_is_left_of_the_look(algorithm: str) -> None:
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
        made = program(net, ALGORITHMS[algorithm])
        made.random.manual_seed(3)
        if not is_rehearsed:
            made.rehearse = lambda: None  # type: ignore[method-assign]
        run_ticks(made, 3)
        return [net.calls, net.seen, *net.state_dict().values(), *made.problems["up"].theta.values()]

    for a, b in zip(state(is_rehearsed=False), state(is_rehearsed=True), strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def spent(batch: Any, *, model: Any, weights: Any) -> Tensor:
    loss = lower(batch, model=model, weights=weights)
    torch.autograd.grad(loss, [*model.parameters()])
    return loss


def with_root(batch: Any, *, model: Any, weights: Any) -> Tensor:
    return lower(batch, model=model, weights=weights) + (0 * model(batch[0])).sum().sqrt()


GRADIENTS: dict[str, tuple[Any, str]] = {
    "spent": (spent, "Trying to backward through the graph a second time"),
    "a root of zero": (with_root, "a loss whose gradient is not finite before the first step"),
    "elsewhere": (
        lambda batch, *, model, weights: torch.ones((), requires_grad=True) * 2.0,
        "a tensor whose gradient does not reach the parameters",
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_of_a_users_loss_is_taken(name: str) -> None:
    loss, said = GRADIENTS[name]
    made = program(Net(plain), ALGORITHMS["cg"], loss=loss)
    with pytest.raises((WrongResultError, RuntimeError)) as refused:
        made.internals.rehearse("low", made.problems["low"].stream.peek())
    assert said in getattr(refused.value, "found", str(refused.value))


def test_a_loss_that_freezes_what_it_is_given_is_refused() -> None:
    def frozen(batch: Any, *, model: Any, weights: Any) -> Tensor:
        for each in weights.parameters():
            each.requires_grad_(False)
        return lower(batch, model=model, weights=weights)

    with pytest.raises(MlotoolError, match="has changed the parameter 'x' of 'up'"):
        run_ticks(program(Net(plain), Unrolled(), loss=frozen), 1)
