"""Stages, one after the other, are the module."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.layerparallel.partition import Chain, partition
from mlotool.layerparallel.partition.chain import balanced
from mlotool.layerparallel.partition.costs import OperationCounter
from mlotool.models import MLP, Decoder, ResNet, TextTransformer


def images(size: int = 3, shape: tuple[int, ...] = (3, 8, 8)) -> Tensor:
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(0))


def resnet8() -> nn.Module:
    return ResNet(14, 4, [3, 8, 8], width=4)


def perceptron() -> nn.Module:
    return MLP([3, 8, 8], 4, hidden=[16, 16, 16])


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(64, 4),
    )


def torchvision_resnet() -> nn.Module:
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=4)


def transformer() -> nn.Module:
    return TextTransformer(12, 6, 2, width=8, num_heads=2, num_layers=3, hidden=8)


def decoder() -> nn.Module:
    return Decoder(12, width=8, hidden=8, num_heads=2, num_layers=3, tied=False)


def texts() -> Tensor:
    return torch.randint(0, 12, (3, 6), generator=torch.Generator().manual_seed(0))


CASES = {
    "resnet": (resnet8, images),
    "perceptron": (perceptron, images),
    "sequential": (convolutions, images),
    "torchvision": (torchvision_resnet, lambda: images(2, (3, 32, 32))),
    "transformer": (transformer, texts),
    "decoder": (decoder, texts),
}


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_stages_are_the_module_bit_for_bit(case: str, num_stages: int) -> None:
    """Outputs, gradients, and what the buffers become; each parameter belongs to one stage."""
    make, sample = CASES[case]
    found = []
    for is_cut in (False, True):
        torch.manual_seed(0)
        module, x = make(), sample()
        state = None
        if is_cut:
            stages = partition(module, num_stages, example=x)
            assert len(stages) == num_stages
            names = [name for stage in stages for name in (*stage.parameters, *stage.buffers())]
            tensors = (*module.named_parameters(), *module.named_buffers())
            assert sorted(names) == sorted(name for name, _ in tensors)
            for stage in stages:
                state = stage(state, (x,))
        else:
            state = module(x)
        state.square().sum().backward()
        slopes = [parameter.grad for parameter in module.parameters()]
        found.append([state, *slopes, *module.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_looking_for_cuts_changes_nothing() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    before, random = [each.clone() for each in module.state_dict().values()], torch.get_rng_state()
    partition(module, 2, example=torch.ones(2, 3))
    assert all(torch.equal(a, b) for a, b in zip(before, module.state_dict().values(), strict=True))
    assert torch.equal(random, torch.get_rng_state())
    assert all(child.training for child in module.modules())


def test_cuts_by_name() -> None:
    stages = partition(resnet8(), 3, cut=["stages.1", "stages.2.1"])
    assert [stage.layers[0] for stage in stages] == ["convolution", "stages.1.0", "stages.2.1"]
    assert stages[1].layers == ["stages.1.0", "stages.1.1", "stages.2.0"]


def test_costs_are_balanced() -> None:
    """Of 1 + 9 blocks: the first three are at the full size, and have more numbers to read and write."""
    chain = Chain(ResNet(20, 4, [3, 8, 8], width=4))
    cut = chain.balance(3, (images(),))
    shares = chain.costs_of(cut, (images(),))
    assert max(shares) * 3 / sum(shares) < 1.2


def test_costs_are_counted() -> None:
    """Of a step, forward and backward, by hand."""
    module = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))
    counters: list[OperationCounter] = []

    def counted(run: Callable[[], None], device: torch.device) -> float:
        with OperationCounter() as counter:
            run()
        counters.append(counter)
        return counter.total

    costs = Chain(module).costs((torch.ones(9, 5),), counted)
    # The first layer has no gradient with respect to its input; the last one has.
    assert [counter.products for counter in counters] == [2 * (2 * 9 * 5 * 7), 3 * (2 * 9 * 7 * 2)]
    assert list(costs) == ["", "2"]
    # The first part reads and writes a good deal more than its products' operands: those of the activation.
    assert counters[0].elements > 9 * 5 + 5 * 7 + 9 * 7 + 4 * 9 * 7


@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_layer_costs_what_it_computes(training: bool) -> None:
    """In eval mode torch takes a fused path, of which no operation is seen."""
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(8)]
    module = nn.Sequential(*layers, nn.Linear(8, 3)).train(training)
    assert Chain(module).balance(2, (torch.randn(2, 5, 8),)) == ["4"]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_no_cut_is_better(num_stages: int) -> None:
    costs = [5, 0, 3, 4, 9, 0, 2, 1]
    names = [str(number) for number in range(1, len(costs))]

    def largest(cuts: tuple[int, ...]) -> int:
        bounds = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))

    found = tuple(int(name) for name in balanced(costs, names, num_stages))
    best = min(largest(cuts) for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1))
    assert largest(found) == best


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
        self.blocks[2].weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_tied_parameters_may_be_on_both_sides_of_a_cut() -> None:
    module = Tied()
    assert Chain(module).names == ["blocks.1", "blocks.2", "blocks.3"]
    first, second = partition(module, 2, cut=["blocks.1"])
    assert set(first.parameters) & set(second.parameters) == {"blocks.0.weight"}


def test_a_norm_that_is_called_twice_stays_in_one_stage() -> None:
    norm = nn.BatchNorm1d(3)
    module = nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 3), norm, nn.Linear(3, 3))
    assert Chain(module).names == ["1", "4"]


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        return first + self.blocks[2](self.blocks[1](first))


def test_no_cut_under_a_shortcut() -> None:
    assert Chain(Skip()).names == ["blocks.1"]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("make", "num_stages", "cut", "message"),
    [
        (perceptron, 5, None, r"found 5 stages; expected at most 4.*Set stages=4"),
        (perceptron, 3, ["layers.3"], r"found 3 stages and 1 cuts.*Set stages=2"),
        (perceptron, 2, ["layer.3"], r"found the cut 'layer\.3'.*Did you mean 'layers\.3'\?"),
        (perceptron, 3, ["layers.5", "layers.3"], r"expected each once, in the order"),
        (Branching, 2, None, r"found 2 stages; expected at most 1, since Branching may be cut before no layer"),
        (convolutions, 2, None, r"partition.example: found None; expected a tensor, by which stages are balanced"),
    ],
)
def test_what_cannot_be_cut(make, num_stages, cut, message) -> None:
    examples = {Branching: torch.ones(2, 3), convolutions: None}
    with pytest.raises(ConfigError, match=message):
        partition(make(), num_stages, cut, example=examples.get(make, images(2, (3, 8, 8))))
