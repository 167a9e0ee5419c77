"""Models that people have are cut as they are: torch's, torchvision's, and those whose code looks at its inputs."""

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

from mlotool.core.errors import ConfigError, RunError
from mlotool.layerparallel import BlockLayers, StackedLayers
from mlotool.layerparallel.partition import Chain, Stage, partition
from mlotool.layerparallel.partition.chain import bound
from mlotool.layerparallel.partition.cut import LARGEST_IMBALANCE, balanced_cut, chain_for, imbalance
from mlotool.models import Decoder, DenseResidualNetwork


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


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


class Held(nn.Module):
    """Holds one of torch's stacks of blocks."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def vision_transformer() -> nn.Module:
    kind = torchvision.models.VisionTransformer
    return kind(image_size=32, patch_size=8, num_layers=4, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), num_layers=4)


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=4), drawn(4, 3, 64, 64), "layer3.0"),
    "vision transformer": (vision_transformer, drawn(4, 3, 32, 32), "encoder.layers.encoder_layer_2"),
    "tied decoder": (
        lambda: Decoder(20, width=16, hidden=32, num_heads=2, num_layers=6),
        torch.arange(24).view(2, 12) % 20,
        "blocks.3",
    ),
    "encoder": (encoder, drawn(2, 6, 16), "layers.2"),
    "held encoder": (Held, drawn(2, 6, 8), "encoder.layers.2"),
    "checked": (Checked, drawn(16, 8), "blocks.3.0"),
    "blocks": (lambda: BlockLayers([block() for _ in range(6)], 0.5), drawn(16, 8), "blocks.3.0"),
    "stacked": (lambda: StackedLayers(block, 6, 0.5), drawn(16, 8), "layers.3"),
    "dense residual": (lambda: DenseResidualNetwork([8], 3, num_layers=16), drawn(16, 8), "layers.8"),
}


def run(stages: list[Stage], *inputs: Tensor) -> Tensor:
    """Return what stages make of inputs, one after the other."""
    state: Tensor | None = None
    torch.manual_seed(1)
    for stage in stages:
        state = stage(state, inputs)
    assert state is not None
    return state


class Measured(nn.Module):
    """Python numbers leave its tracer."""

    def forward(self, x: Tensor) -> Tensor:
        return x / float(np.abs(x.detach().numpy()).max())


class Opaque(nn.Module):
    """Its opening cannot be traced, and need not be."""

    def __init__(self) -> None:
        super().__init__()
        self.opening, self.inner = Measured(), Checked()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.opening(x))


def test_a_named_block_is_enough() -> None:
    """Only what holds it is looked into."""
    module, x = Opaque(), drawn(4, 8)
    with pytest.raises(ConfigError, match=r"Name the blocks before which it may be cut, as in cut: \[blocks.3\]"):
        partition(module, 2, example=x)
    stages = partition(module, 2, cut=["inner.blocks.3"], example=x)
    assert [stage.layers[0] for stage in stages] == ["opening", "inner.blocks.3"]
    assert torch.equal(run(stages, x), module(x))


def test_an_input_check_still_checks() -> None:
    first, _ = partition(Checked(), 2, example=drawn(4, 8))
    with pytest.raises(
        RunError, match=r"decides by bool\(..\) at .*test_partition_of_real_models.py:\d+, which is True for"
    ):
        first(None, (torch.full((4, 8), float("nan")), None))


def test_a_mask_that_is_given_is_used() -> None:
    module = Checked()
    inputs = bound(module, (drawn(4, 8), torch.rand(4, 8)), {})
    assert torch.equal(
        run(chain_for(module, "parallel", inputs, None).stages(["blocks.3.0"]), *inputs), module(*inputs)
    )


def test_what_fails_by_itself_says_so_itself() -> None:
    with pytest.raises(ValueError, match="expected eight numbers a row"):
        partition(Checked(), 2, example=drawn(4, 7))


def test_without_a_batch_it_says_what_to_give() -> None:
    with pytest.raises(
        ConfigError, match=r"found None for Checked, whose forward decides by values .* Give the module's input"
    ):
        partition(Checked(), 2, cut=["blocks.3"])


def test_stages_that_are_out_of_balance_are_told() -> None:
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    with pytest.warns(
        UserWarning, match=r"takes 1.8\d times their mean, by the counted operations.* Set cut: \[4\], which has 1.0"
    ):
        assert balanced_cut(Chain(module), 2, ["1"], (torch.zeros(8, 64),), "parallel") == ["1"]


def test_stages_balanced_by_time() -> None:
    """A layer that waits costs time, and no operations."""

    class Slow(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            time.sleep(0.02)
            return super().forward(input)

    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)], Slow(4, 4), Slow(4, 4))
    inputs = (torch.zeros(2, 4),)
    assert balanced_cut(Chain(module), 2, "measured", inputs, "parallel") == ["5"]
    with pytest.warns(UserWarning, match=r"by the time of the first batch.*Set cut: \[5\].*or cut: measured"):
        assert balanced_cut(Chain(module), 2, None, inputs, "parallel") == ["3"]


class Masked(nn.Module):
    """Makes its mask for as many tokens as its embedding returns, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        return self.head(self.encoder(x, mask=mask, is_causal=True))


class Rgb(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 3, -1, -1)


NESTED: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "a mask by the size of an embedding": (Masked, torch.arange(24).view(2, 12) % 20, "encoder.layers.3"),
    "a network in a Sequential": (
        lambda: nn.Sequential(Rgb(), torchvision.models.resnet18(num_classes=4)),
        drawn(4, 1, 64, 64),
        "1.layer3.0",
    ),
    "an encoder in a Sequential": (
        lambda: nn.Sequential(nn.Linear(4, 16), encoder(), nn.Linear(16, 2)),
        drawn(2, 6, 4),
        "1.layers.2",
    ),
    "a network in networks": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(Held(), nn.Linear(3, 3))),
        drawn(2, 6, 8),
        "1.0.encoder.layers.2",
    ),
}


@pytest.mark.filterwarnings("ignore:.*by the time of the first batch:UserWarning")
@pytest.mark.parametrize("name", [*CASES, *NESTED])
def test_it_is_cut_where_its_stages_are_balanced_and_stays_the_same(name: str) -> None:
    """Blocks are looked into where stages are out of balance."""
    make, x, cut = {**CASES, **NESTED}[name]
    torch.manual_seed(0)
    module = make()
    inputs = bound(module, (x,), {})
    chain = chain_for(module, "parallel", inputs, None, num_stages=2 if name in NESTED else None)
    assert balanced_cut(chain, 2, None, inputs, "parallel") == [cut]
    assert imbalance(chain.costs_of([cut], inputs)) < LARGEST_IMBALANCE
    torch.manual_seed(1)
    expected = module(x)
    # A checkpoint, and a user, name what was found.
    for found in (chain, chain_for(module, "parallel", inputs, [cut])):
        assert torch.equal(run(found.stages([cut]), *inputs), expected)


def test_a_size_that_is_told_by_the_inputs_follows_them() -> None:
    module, tokens = Masked(), torch.arange(24).view(2, 12) % 20
    stages = chain_for(module, "parallel", (tokens,), None, num_stages=2).stages(["encoder.layers.3"])
    shorter = torch.arange(15).view(3, 5)
    assert torch.equal(run(stages, shorter), module(shorter))


class Strided(nn.Module):
    """Asks for a size that only by chance is one of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.opening = nn.Conv1d(1, 4, 3)
        self.blocks = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.opening(x)
        scale = torch.linspace(0, 1, x.shape[2])
        for block in self.blocks:
            x = block(x) * scale
        return x


def test_a_size_that_no_input_has_is_a_constant_that_is_checked() -> None:
    module = Strided()
    chain = chain_for(module, "parallel", (drawn(2, 1, 12),), None, num_stages=2)
    stages = chain.stages(["blocks.3"])
    assert torch.equal(run(stages, drawn(3, 1, 12)), module(drawn(3, 1, 12)))
    with pytest.raises(RunError, match=r"asks for a size, type or device at .*, which is 7 for this batch; .*it is 10"):
        stages[0](None, (drawn(2, 1, 9),))


class Chained(nn.Module):
    """Six layers, with what `around` does before them."""

    def __init__(self, around: Callable[[Tensor], Tensor], width: int = 4) -> None:
        super().__init__()
        self.opening = nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        x = self.around(self.opening(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


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
    mask = torch.tril(torch.ones(x.shape[1], x.shape[1]))
    return mask @ x


def noisy(x: Tensor) -> Tensor:
    return x + torch.zeros(*x.shape)


@pytest.mark.parametrize(
    ("around", "first", "later"),
    [
        (decides_then_divides, drawn(8, 4) * 0.01, drawn(8, 4) * 100),
        (loops_over_a_size, drawn(2, 3, 4), drawn(2, 5, 4)),
        (causal, drawn(2, 5, 4), drawn(3, 5, 4)),
        (noisy, drawn(2, 5, 4), drawn(3, 5, 4)),
    ],
)
def test_later_batches_are_right_or_refused(around: Callable[[Tensor], Tensor], first: Tensor, later: Tensor) -> None:
    """A decision of the user's code is never forgotten; what only asks for a size follows the batch."""
    torch.manual_seed(0)
    module = Chained(around)
    stages = chain_for(module, "parallel", (first,), None, num_stages=2).stages(["blocks.3"])
    expected = module(later)
    try:
        state = run(stages, later)
    except RunError as error:
        assert around not in (causal, noisy)
        assert "the forward decides by int(..)" in str(error)
    else:
        assert torch.equal(state, expected)


def test_a_default_device_makes_no_decisions() -> None:
    """With it torch asks a size for its value more than once, and from code of its own."""
    module = Chained(noisy)
    try:
        torch.set_default_device("cpu")
        stages = chain_for(module, "parallel", (drawn(2, 5, 4),), None, num_stages=2).stages(["blocks.3"])
        later = drawn(3, 5, 4)
        assert torch.equal(run(stages, later), module(later))
    finally:
        torch.set_default_device(None)


def test_a_width_like_the_batch_is_no_batch() -> None:
    """The batch of 4 has a width of 4 beside it; the last batch is smaller."""
    module = Chained(lambda x: x.view(x.shape[0], 2, x.shape[1] // 2).flatten(1))
    stages = chain_for(module, "parallel", (drawn(4, 4),), None, num_stages=2).stages(["blocks.3"])
    assert torch.equal(run(stages, drawn(2, 4)), module(drawn(2, 4)))


class Frozen(nn.Module):
    """Runs a part of itself without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = torch.relu(self.encoder(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.mark.parametrize("has_values", [False, True])
def test_what_runs_without_gradients_has_none(has_values: bool) -> None:
    module, x = Frozen(), drawn(4, 4)
    found = run(Chain(module, "parallel", (x,) if has_values else None).stages(["blocks.3"]), x)
    assert torch.equal(found, module(x))
    slopes = torch.autograd.grad(found.sum(), list(module.parameters()), allow_unused=True)
    assert [slope is None for slope in slopes] == [True, True, *[False] * 12]


def test_autocast_in_a_forward_is_refused() -> None:
    def around(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ x.T @ x).float()

    with pytest.raises(ConfigError, match="it switches autocast; set the problem's precision"):
        chain_for(Chained(around), "parallel", (drawn(4, 4),), None, num_stages=2)


class Masking(nn.Module):
    """Draws a mask that it needs on both sides of any cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.bernoulli(torch.full_like(x, 0.5))
        h = x * mask
        for block in self.blocks:
            h = torch.tanh(block(h))
        return h * (1 - mask)


def test_a_random_mask_is_not_drawn_again() -> None:
    with pytest.raises(
        ConfigError, match="found 2 stages; expected at most 1, since Masking may be cut before no layer"
    ):
        partition(Masking(), 2, example=drawn(4, 4))
