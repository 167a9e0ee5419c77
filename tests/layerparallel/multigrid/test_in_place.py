"""Models that people have, whose blocks are solved by multigrid where they stand."""

import copy
import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.layerparallel import Multigrid
from mlotool.layerparallel.multigrid.setting import equal_blocks, find_parts
from tests.layerparallel.multigrid.test_exchange import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*too few for a coarse grid.*:UserWarning")


class Stack(nn.Module):
    """Blocks that `run` calls."""

    def __init__(self, run: Callable[[nn.ModuleList, Tensor], Tensor], blocks: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or eight(Residual))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.blocks, x)


class Residual(nn.Module):
    """A block of a user's own: it may be given more than the state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        return x + 0.2 * scale * torch.tanh(self.linear(x))


def attached(module: nn.Module, *part: Any, **settings: Any) -> Multigrid:
    parallel = Multigrid(*part, **settings)
    parallel.attach("net", module)
    return parallel


def chained(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for each in blocks:
        x = each(x)
    return x


def all_states(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Reads what is between the blocks, as networks with several outputs do."""
    found = [x]
    for each in blocks:
        found.append(each(found[-1]))
    weights = torch.linspace(0.5, 2.0, len(found), dtype=x.dtype)
    return (torch.stack(found) * weights[:, None, None]).sum(0)


def twice(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return chained(blocks, chained(blocks, x) * 0.5)


def by_name(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for each in blocks:
        x = each(scale=0.5, x=x)
    return x


Pair = namedtuple("Pair", ["gain", "shift"])


class Packed(Residual):
    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        return super().forward(x + scale["pair"].shift, scale["pair"].gain)


def packed(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Gives its blocks a mapping with a named tuple in it, of which one entry has a gradient."""
    pair = Pair(blocks[0].linear.weight.mean(), 0.1)
    for each in blocks:
        x = each(x, {"pair": pair})
    return x


RUNS = [chained, all_states, twice, by_name]


@pytest.mark.parametrize(
    ("run", "make"),
    [
        *((run, lambda: eight(Residual)) for run in RUNS),
        (chained, lambda: [Residual()] * 8),
        (packed, lambda: eight(Packed)),
    ],
)
def test_whatever_the_module_does_around_its_blocks(run: Any, make: Callable[[], list[nn.Module]]) -> None:
    """Also where one block stands in all places."""
    torch.manual_seed(0)
    module = Stack(run, make()).double()
    parallel = attached(module, coarsening=2, cycles=4)
    x = torch.randn(4, 3, dtype=torch.float64)
    found, expected = (
        torch.autograd.grad(each(x).square().sum(), list(module.parameters()), materialize_grads=True)
        for each in (parallel, module)
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    # Afterwards the module is as it was.
    assert all("forward" not in each.__dict__ for each in module.blocks)


def between(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for each in blocks:
        x = each(x) + 1
    return x


def unlike_arguments(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for n, each in enumerate(blocks):
        x = each(x, 1.0 + n)
    return x


class Dropped(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        return super().forward(self.dropout(x))


def test_dropout_is_the_same_in_all_evaluations_of_a_batch() -> None:
    torch.manual_seed(0)
    module = Stack(chained, eight(Dropped)).double()
    parallel = attached(module, coarsening=2, cycles=4)
    x = torch.randn(4, 3, dtype=torch.float64)
    parallel(x)

    def loss() -> Tensor:
        torch.manual_seed(5)
        return parallel(x).square().sum()

    weight = module.blocks[3].linear.weight
    (slope,) = torch.autograd.grad(loss(), weight)
    direction, step = torch.randn_like(weight), 1e-6
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * step * direction
            values.append(loss())
            weight -= sign * step * direction
    torch.testing.assert_close((slope * direction).sum(), (values[0] - values[1]) / (2 * step), rtol=1e-7, atol=1e-9)
    # Another batch has other masks.
    assert not torch.equal(parallel(x), parallel(x))


def test_frozen_statistics_stay_frozen() -> None:
    module = Stack(chained, [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(8)])
    module.blocks[2].eval()
    before = module.blocks[2][1].running_mean.clone()
    parallel = attached(module, coarsening=2)
    parallel(torch.randn(6, 3))
    assert torch.equal(module.blocks[2][1].running_mean, before)
    assert not torch.equal(module.blocks[3][1].running_mean, before)


class Named(nn.Module):
    """Blocks under several names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Sequential(nn.Linear(2, 3)), *[Residual() for _ in range(6)])
        self.more = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return chained(self.more, self.layers(x))


def test_parts_are_found_and_named() -> None:
    module = Named()
    assert {name: len(blocks) for name, blocks in equal_blocks(module).items()} == {"layers[1:7]": 6, "more": 4}
    assert {name: part.layers.num_layers for name, part in find_parts(module, None).items()} == {
        "layers[1:7]": 6,
        "more": 4,
    }
    assert [part.layers.num_layers for part in find_parts(module, ["layers[2:]", "more[:-1]"]).values()] == [5, 3]
    assert find_parts(module, "layers[1:2]")["layers[1:2]"].layers.num_layers == 1


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("layer", r"problems.net.parallel.part: found 'layer', which Named has not; .* Did you mean 'layers'\?"),
        ("layers.0", r"block 0 \(Linear\) of the multigrid part turned a state of shape \(2, 2\) into \(2, 3\)"),
        (["more", "more[1:]"], r"part: found \['more', 'more\[1:\]'\]; expected parts that have no blocks in common"),
        ("layers.0.0", r"part: found Linear at 'layers.0.0' in Named; .*Name one of layers\[1:7\] \(6 equal blocks\)"),
    ],
)
def test_wrong_names_say_what_there_is(part: Any, message: str) -> None:
    parallel = Multigrid(part)
    with pytest.raises(ConfigError, match=message):
        parallel.attach("net", Named())
        parallel(torch.ones(2, 2))


def partly_cast(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = blocks[0](x)
    for each in list(blocks)[1:]:
        x = each(x)
    return x


class Sided(Residual):
    """Leaves what a loss may read."""

    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        self.side = self.linear(x).square().mean()
        return super().forward(x)


class Gambling(Residual):
    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        return super().forward(x) * (1 + random.random())


class Spectral(nn.Module):
    """Its weight depends on a buffer that each forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * torch.tanh(self.linear(x))


def test_a_backward_has_the_buffers_of_its_forward() -> None:
    torch.manual_seed(0)
    module = Stack(chained, [Spectral() for _ in range(8)]).double()
    other = copy.deepcopy(module)
    parallel = attached(module, coarsening=2, cycles=4)
    x = torch.randn(4, 3, dtype=torch.float64)
    for _ in range(3):
        found, expected = (
            torch.autograd.grad(run(x).square().sum(), list(owner.parameters()))
            for run, owner in ((parallel, module), (other, other))
        )
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Scaled(Residual):
    """Reads an attribute, which its owner sets to what it has computed."""

    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        return super().forward(x, self.scale)


def modulated(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for each in blocks:
        each.scale = blocks[0].linear(x)
    return chained(blocks, x)


def hooked() -> list[nn.Module]:
    blocks = eight(Residual)
    blocks[7].register_forward_hook(lambda each, inputs, output: output * 0.5)
    return blocks


READS = r"layer 0 reads a tensor of shape \(.*\) that requires a gradient, and is neither its parameter"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "between": (lambda: Stack(between), r"block 1 \(Residual\) called with another input than the output"),
    "arguments": (
        lambda: Stack(unlike_arguments),
        r"block 1 \(Residual\) called with other arguments beside the state",
    ),
    "cast": (lambda: Stack(partly_cast), r"block 1 \(Residual\) called with gradients or autocast switched otherwise"),
    "hooks": (lambda: Stack(chained, hooked()), r"blocks with hooks: found \[7\]; expected no hooks"),
    "an attribute": (lambda: Stack(modulated, eight(Scaled)), READS),
    "a side": (lambda: Stack(chained, eight(Sided)), "layer 0 leaves a tensor with a gradient in its attribute 'side'"),
    "gambling": (lambda: Stack(chained, eight(Gambling)), "layer 0 draws random numbers of Python's or numpy's"),
}


def eight(kind: Callable[[], nn.Module]) -> list[nn.Module]:
    return [kind() for _ in range(8)]


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_solved_wrongly_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    module = make()
    parallel = attached(module)
    with pytest.raises(ConfigError, match=message):
        parallel(torch.ones(2, 3))
    assert all("forward" not in each.__dict__ for each in module.blocks)


@pytest.mark.parametrize("run", [all_states, between])
def test_ranks_refuse_what_reads_states_between_blocks(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = attached(Stack(run), over_ranks=True)
    with pytest.raises((ConfigError, RuntimeError), match=r"device meta|another input than the output"):
        on_ranks(monkeypatch, lambda rank: parallel(torch.ones(2, 3)), size=1)
