"""Stages, one after the other, are the module: ours, torch's, torchvision's, and code that looks at its inputs."""

import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

from mlotool.core.errors import ConfigError, RunError
from mlotool.layerparallel import BlockLayers, StackedLayers
from mlotool.layerparallel.partition import Chain, Stage, partition
from mlotool.layerparallel.partition.chain import (
    LARGEST_IMBALANCE,
    OperationCounter,
    balanced_cut,
    bound,
    chain_for,
    imbalance,
)
from mlotool.models import MLP, Decoder, DenseResidualNetwork, ResNet, TextTransformer


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def tokens(length: int = 12) -> Tensor:
    return torch.arange(2 * length).view(2, length) % 20


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


class Checked(nn.Module):
    """Looks at its input before it takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(6))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not isinstance(x, torch.Tensor) or x.dim() != 2:
            raise TypeError("expected a matrix")
        if x.shape[1] != 8 or torch.isnan(x).any():
            raise ValueError("expected eight numbers a row")
        for each in self.blocks:
            x = each(x)
        if mask is not None:
            x = x * mask
        return self.head(x)


def layer(width: int, dropout: float = 0.1) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=dropout, batch_first=True)


class Masked(nn.Module):
    """Makes its mask for as many tokens as its embedding returns, as language models do."""

    def __init__(self, num_layers: int = 6) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.encoder = nn.TransformerEncoder(layer(16, 0.0), num_layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        return self.head(self.encoder(x, mask=mask, is_causal=True))


Pair = namedtuple("Pair", ["first", "second"])


class Packed(nn.Module):
    """Takes a mapping with a named tuple in it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(6))

    def forward(self, given: Any) -> Tensor:
        x = given["pair"].first
        for each in self.blocks:
            x = each(x)
        return x * given["pair"].second + given["shift"]


class Rgb(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 3, -1, -1)


def vision_transformer() -> nn.Module:
    kind, sizes = torchvision.models.VisionTransformer, {"hidden_dim": 32, "mlp_dim": 64, "num_classes": 5}
    return kind(image_size=32, patch_size=8, num_layers=4, num_heads=2, **sizes)


def resnet18() -> nn.Module:
    return torchvision.models.resnet18(num_classes=4)


def resnet10() -> nn.Module:
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=4)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(layer(16), num_layers=4)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "ours": (lambda: ResNet(14, 4, [3, 8, 8], width=4), drawn(3, 3, 8, 8), "stages.1.0"),
    "perceptron": (lambda: MLP([8], 4, hidden=[16, 16, 16]), drawn(8, 8), "layers.5"),
    "transformer": (
        lambda: TextTransformer(20, 12, 2, width=8, num_heads=2, num_layers=4, hidden=8),
        tokens(),
        "blocks.2",
    ),
    "resnet18": (resnet18, drawn(2, 3, 32, 32), "layer4.0"),
    "vision transformer": (vision_transformer, drawn(4, 3, 32, 32), "encoder.layers.encoder_layer_2"),
    "tied decoder": (lambda: Decoder(20, width=16, hidden=32, num_heads=2, num_layers=6), tokens(), "blocks.3"),
    "encoder": (encoder, drawn(2, 6, 16), "layers.2"),
    "checked": (Checked, drawn(16, 8), "blocks.3.0"),
    "packed": (Packed, {"pair": Pair(drawn(16, 8), drawn(16, 8)), "shift": drawn(16, 1)}, "blocks.3.0"),
    "blocks": (lambda: BlockLayers([block() for _ in range(6)], 0.5), drawn(16, 8), "blocks.3.0"),
    "stacked": (lambda: StackedLayers(block, 6, 0.5), drawn(16, 8), "layers.3"),
    "dense residual": (lambda: DenseResidualNetwork([8], 3, num_layers=16), drawn(16, 8), "layers.8"),
}
NESTED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "a mask by the size of an embedding": (Masked, tokens(), "encoder.layers.3"),
    "a network in a Sequential": (lambda: nn.Sequential(Rgb(), resnet10()), drawn(2, 1, 32, 32), "1.layer4.0"),
    "an encoder in a Sequential": (
        lambda: nn.Sequential(nn.Linear(4, 16), encoder(), nn.Linear(16, 2)),
        drawn(2, 6, 4),
        "1.layers.2",
    ),
    "a network in networks": (
        lambda: nn.Sequential(nn.Linear(16, 16), nn.Sequential(encoder(), nn.Linear(16, 16))),
        drawn(2, 6, 16),
        "1.0.layers.2",
    ),
}


def run(stages: list[Stage], *inputs: Tensor) -> Tensor:
    """Return what stages make of inputs, one after the other."""
    state: Tensor | None = None
    torch.manual_seed(1)
    for stage in stages:
        state = stage(state, inputs)
    assert state is not None
    return state


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [*CASES, *NESTED])
def test_it_is_cut_where_its_stages_are_balanced_and_stays_the_same(name: str) -> None:
    """Outputs, gradients and what the buffers become, bit for bit; blocks are looked into where that is needed."""
    make, x, cut = {**CASES, **NESTED}[name]
    torch.manual_seed(0)
    module = make()
    inputs = bound(module, (x,), {})
    chain = chain_for(module, "parallel", inputs, None, num_stages=2 if name in NESTED else None)
    assert balanced_cut(chain, 2, None, "parallel") == [cut]
    assert imbalance(chain.costs([cut])) < LARGEST_IMBALANCE

    def computed(call: Callable[[], Tensor]) -> list[Tensor]:
        module.load_state_dict(start)
        torch.manual_seed(1)
        value = call()
        return [value, *torch.autograd.grad(value.square().sum(), list(module.parameters())), *module.buffers()]

    start = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    expected = [each.clone() for each in computed(lambda: module(x))]
    # A checkpoint, and a user, name what was found.
    for traced in (chain, chain_for(module, "parallel", inputs, [cut])):
        stages = traced.stages([cut])
        used = [each for stage in stages for each in (*stage.parameters.values(), *stage.buffers().values())]
        assert set(map(id, used)) == set(map(id, (*module.parameters(), *module.buffers())))
        for ours, theirs in zip(computed(lambda stages=stages: run(stages, *inputs)), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_costs_are_counted() -> None:
    """Of a step, forward and backward, by hand."""
    module = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))
    counters: list[OperationCounter] = []

    def counted(run: Callable[[], None], device: torch.device) -> float:
        with OperationCounter() as counter:
            run()
        counters.append(counter)
        return counter.products

    chain = Chain(module, inputs=(torch.ones(9, 5),))
    costs = chain.costs(chain.names, counted)
    # The first layer has no gradient with respect to its input; the last one has.
    assert [counter.products for counter in counters] == [2 * (2 * 9 * 5 * 7), 3 * (2 * 9 * 7 * 2)]
    assert chain.names == ["2"] and len(costs) == 2
    # The first part reads and writes a good deal more than its products' operands: those of the activation.
    assert counters[0].elements > 9 * 5 + 5 * 7 + 9 * 7 + 4 * 9 * 7


def test_stages_balanced_by_time() -> None:
    """A layer that waits costs time, and no operations."""

    class Slow(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            time.sleep(0.02)
            return super().forward(input)

    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)], Slow(4, 4), Slow(4, 4))
    chain = Chain(module, inputs=(torch.zeros(2, 4),))
    assert balanced_cut(chain, 2, "measured", "parallel") == ["5"]
    assert balanced_cut(chain, 2, None, "parallel") == ["3"]
    with pytest.warns(UserWarning, match=r"takes 1.\d\d times their mean; .* Set cut: \[3\]"):
        assert balanced_cut(chain, 2, ["1"], "parallel") == ["1"]


class Called(nn.Module):
    """Linear layers, called as `run` says; those of the same number share their weight."""

    def __init__(self, run: Callable[[nn.ModuleList, Tensor], Tensor], shares: Sequence[int] = (0, 1, 2, 3)) -> None:
        super().__init__()
        self.blocks, self.run = nn.ModuleList(nn.Linear(4, 4) for _ in shares), run
        for linear, number in zip(self.blocks, shares, strict=True):
            linear.weight = self.blocks[number].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.blocks, x)


def chained(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for each in blocks:
        x = torch.tanh(each(x))
    return x


def shortcut(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    first = blocks[0](x)
    return first + blocks[3](blocks[2](blocks[1](first)))


def masking(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Draws a mask that it needs on both sides of any cut."""
    mask = torch.bernoulli(torch.full_like(x, 0.5))
    return chained(blocks, x * mask) * (1 - mask)


norm = nn.BatchNorm1d(4)
TWICE = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        # Parameters may be on both sides of a cut, and a layer's buffers on one.
        (Called(chained, (0, 1, 0, 3)), ["blocks.1", "blocks.2", "blocks.3"]),
        (TWICE, ["1", "4"]),
        (Called(shortcut), ["blocks.1"]),
        (Called(masking), []),
    ],
)
def test_where_it_may_be_cut(module: nn.Module, names: list[str]) -> None:
    assert Chain(module, inputs=(drawn(4, 4),)).names == names


class Measured(nn.Module):
    """Python numbers leave its tracer."""

    def forward(self, x: Tensor) -> Tensor:
        return x / float(np.abs(x.detach().numpy()).max())


def test_a_named_block_is_enough() -> None:
    """Only what holds it is looked into; the opening cannot be traced, and need not be."""

    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.opening, self.inner = Measured(), Checked()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.opening(x))

    module, x = Opaque(), drawn(4, 8)
    with pytest.raises(ConfigError, match=r"Name the blocks before which it may be cut, as in cut: \[blocks.3\]"):
        partition(module, 2, example=x)
    stages = partition(module, 2, cut=["inner.blocks.3"], example=x)
    assert [stage.layers[0] for stage in stages] == ["opening", "inner.blocks.3"]
    assert torch.equal(run(stages, x), module(x))


def test_what_the_inputs_are_is_still_looked_at() -> None:
    module, x = Checked(), drawn(4, 8)
    inputs = bound(module, (x, torch.rand(4, 8)), {})
    stages = chain_for(module, "parallel", inputs, None).stages(["blocks.3.0"])
    assert torch.equal(run(stages, *inputs), module(*inputs))
    first, _ = partition(module, 2, example=x)
    with pytest.raises(RunError, match=r"decides by bool\(..\) at .*test_partition.py:\d+, which is True for"):
        first(None, (torch.full((4, 8), float("nan")), None))
    # What fails by itself says so itself.
    with pytest.raises(ValueError, match="expected eight numbers a row"):
        partition(module, 2, example=drawn(4, 7))


def opened(around: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return seven layers, with something done behind the first."""
    return Called(lambda blocks, x: chained(blocks[1:], around(blocks[0](x))), range(7))


def decides_then_divides(x: Tensor) -> Tensor:
    k = x.abs().max()
    if int(k * 1000) > 3000:
        x = x * 0.1
    return x / k


def loops_over_a_size(x: Tensor) -> Tensor:
    total, length = torch.zeros_like(x[:, 0]), x.shape[1]
    for i in range(length):
        total = total + (i / length) * x[:, i]
    return total


def causal(x: Tensor) -> Tensor:
    return torch.tril(torch.ones(x.shape[1], x.shape[1])) @ x


def noisy(x: Tensor) -> Tensor:
    return x + torch.zeros(*x.shape)


def halved(x: Tensor) -> Tensor:
    """Its width is that of the batch by chance."""
    return x.view(x.shape[0], 2, x.shape[1] // 2).flatten(1)


@pytest.mark.parametrize(
    ("around", "first", "later"),
    [
        (decides_then_divides, drawn(8, 4) * 0.01, drawn(8, 4) * 100),
        (loops_over_a_size, drawn(2, 3, 4), drawn(2, 5, 4)),
        (causal, drawn(2, 5, 4), drawn(3, 5, 4)),
        (noisy, drawn(2, 5, 4), drawn(3, 5, 4)),
        (halved, drawn(4, 4), drawn(2, 4)),
    ],
)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_later_batches_are_right_or_refused(around: Any, first: Tensor, later: Tensor, device: str | None) -> None:
    """A decision of the user's code is never forgotten; what only asks for a size follows the batch.

    With a default device torch asks a size for its value more than once, and from code of its own.
    """
    module = opened(around)
    try:
        torch.set_default_device(device)
        stages = chain_for(module, "parallel", (first,), None, num_stages=2).stages(["blocks.4"])
        state = run(stages, later)
    except RunError as error:
        assert around in (decides_then_divides, loops_over_a_size)
        assert "the forward decides by int(..)" in str(error)
    else:
        assert torch.equal(state, module(later))
    finally:
        torch.set_default_device(None)


class Strided(nn.Module):
    """Asks for a size that only by chance is one of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.opening = nn.Conv1d(1, 4, 3)
        self.blocks = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.opening(x)
        scale = torch.linspace(0, 1, x.shape[2])
        for each in self.blocks:
            x = each(x) * scale
        return x


def test_a_size_follows_the_inputs_or_is_a_constant_that_is_checked() -> None:
    module = Masked()
    stages = chain_for(module, "parallel", (tokens(),), None, num_stages=2).stages(["encoder.layers.3"])
    assert torch.equal(run(stages, tokens(5)), module(tokens(5)))
    strided = Strided()
    stages = chain_for(strided, "parallel", (drawn(2, 1, 12),), None, num_stages=2).stages(["blocks.3"])
    assert torch.equal(run(stages, drawn(3, 1, 12)), strided(drawn(3, 1, 12)))
    with pytest.raises(RunError, match=r"asks for a size, .* at .*, which is 7 for this batch and 10 by"):
        stages[0](None, (drawn(2, 1, 9),))


def test_an_example_is_not_needed_where_cuts_are_named() -> None:
    module, x = ResNet(14, 4, [3, 8, 8], width=4), drawn(2, 3, 8, 8)
    stages = partition(module, 3, cut=["stages.1", "stages.2.1"])
    assert [stage.layers[0] for stage in stages] == ["convolution", "stages.1.0", "stages.2.1"]
    assert torch.equal(run(stages, x), module(x))
    assert Chain(Called(chained)).names == ["blocks.1", "blocks.2", "blocks.3"]


def test_what_runs_without_gradients_has_none() -> None:
    def frozen(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = torch.relu(blocks[0](x))
        return chained(blocks[1:], x)

    module, x = Called(frozen), drawn(4, 4)
    value = run(Chain(module, inputs=(x,)).stages(["blocks.2"]), x)
    assert torch.equal(value, module(x))
    slopes = torch.autograd.grad(value.sum(), list(module.parameters()), allow_unused=True)
    assert [slope is None for slope in slopes] == [True, True, *[False] * 6]


def casts(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.T @ x).float()


PERCEPTRON = MLP([8], 4, hidden=[16, 16, 16])


@pytest.mark.parametrize(
    ("module", "example", "num_stages", "cut", "message"),
    [
        (PERCEPTRON, drawn(2, 8), 5, None, r"stages: found 5; expected at most 4.*Set stages=4"),
        (PERCEPTRON, drawn(2, 8), 3, ["layers.3"], r"cut: found .*; expected 2 names for 3 stages"),
        (PERCEPTRON, drawn(2, 8), 2, ["layer.3"], r"cut: found 'layer\.3'.*Did you mean 'layers\.3'\?"),
        (PERCEPTRON, drawn(2, 8), 3, ["layers.5", "layers.3"], "expected each once, in the order"),
        (PERCEPTRON, None, 2, None, "example: found None; expected a batch, by which stages are balanced"),
        (Checked(), None, 2, ["blocks.3"], "Give example inputs, so that decisions by their values"),
        (Called(masking), drawn(4, 4), 2, None, "expected at most 1, since Called .* no layer"),
        (opened(casts), drawn(4, 4), 2, None, "it switches autocast; set the problem's precision"),
    ],
)
def test_what_cannot_be_cut(module: nn.Module, example: Tensor, num_stages: int, cut: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partition(module, num_stages, cut, example)
