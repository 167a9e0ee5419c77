"""The search space of DARTS beside mixed operations that are written out in plain torch."""

import copy
from collections.abc import Mapping, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import mlotool
from mlotool.config.building import build_module
from mlotool.core import BoundModule
from mlotool.losses import path_analysis, path_cross_entropy
from mlotool.spaces import PathWeights, SharedSpace

# Smaller than the recipe's: cells 1 and 2 of three are reductions.
NUM_NODES, NUM_CELLS, REDUCTIONS = 2, 3, (1, 2)
# The first one reads an odd size, the second one an even one.
SIZE = 7


class Plain:
    """Equation 2 of the DARTS paper, with the values of a space and the logits of an architecture.

    Args:
        values: of parameters, by the names that the space has for them.
        logits: by decision, in the order of `names`.
        names: of the operations.
    """

    def __init__(self, values: Mapping[str, Tensor], logits: Mapping[str, Tensor], names: Sequence[str]) -> None:
        self.values, self.logits, self.names = values, logits, names

    def __call__(self, images: Tensor) -> Tensor:
        stem = F.conv2d(images, self.values["stem.0.weight"], padding=1)
        before = last = normalized(stem) * self.by("stem.1.weight") + self.by("stem.1.bias")
        for number in range(NUM_CELLS):
            before, last = last, self.cell(number, before, last)
        return F.linear(last.mean((2, 3)), self.values["classifier.weight"], self.values["classifier.bias"])

    def by(self, name: str) -> Tensor:
        return self.values[name].view(-1, 1, 1)

    def cell(self, number: int, before: Tensor, last: Tensor) -> Tensor:
        name, kind = f"cells.{number}", "reduction" if number in REDUCTIONS else "normal"
        first = self.halved if number - 1 in REDUCTIONS else self.pointwise
        nodes, edge = [first(f"{name}.inputs.0", before), self.pointwise(f"{name}.inputs.1", last)], 0
        for _ in range(NUM_NODES):
            total = torch.zeros(())
            for source, node in enumerate(nodes):
                stride = 2 if kind == "reduction" and source < 2 else 1
                weights = self.logits[f"{kind}_{edge}"].softmax(0)
                for operation, weight in zip(self.names, weights, strict=True):
                    total = total + weight * self.operation(operation, f"{name}.{kind}.{edge}", node, stride)
                edge += 1
            nodes.append(total)
        return torch.cat(nodes[2:], 1)

    def operation(self, name: str, at: str, x: Tensor, stride: int) -> Tensor:
        kind, _, size = name.rpartition("_")
        if name == "none":
            return 0 * x[:, :, ::stride, ::stride]
        if name == "skip_connect":
            return x if stride == 1 else self.halved(at, x)
        if name == "max_pool_3x3":
            return normalized(F.max_pool2d(x, 3, stride, 1))
        if name == "avg_pool_3x3":
            return normalized(F.avg_pool2d(x, 3, stride, 1, count_include_pad=False))
        is_twice, reach = kind == "sep_conv", int(size[0]) // 2 * (2 if kind == "dil_conv" else 1)
        for first, step in ((0, stride), (4, 1))[: 2 if is_twice else 1]:
            deep, wide = (self.values[f"{at}@{name}.{first + each}.weight"] for each in (1, 2))
            x = F.conv2d(F.relu(x), deep, None, step, reach, 1 if is_twice else 2, groups=len(deep))
            x = normalized(F.conv2d(x, wide))
        return x

    def pointwise(self, at: str, x: Tensor) -> Tensor:
        return normalized(F.conv2d(F.relu(x), self.values[f"{at}.1.weight"]))

    def halved(self, at: str, x: Tensor) -> Tensor:
        x = F.relu(x)
        even = F.conv2d(x, self.values[f"{at}.even.weight"], stride=2)
        odd = F.conv2d(F.pad(x, [0, 1, 0, 1])[:, :, 1:, 1:], self.values[f"{at}.odd.weight"], stride=2)
        return normalized(torch.cat([even, odd], 1))


def normalized(x: Tensor) -> Tensor:
    center = x - x.mean((0, 2, 3), keepdim=True)
    return center / (center.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()


@cache
def built() -> tuple[SharedSpace, PathWeights]:
    base = "problems.classifier.module.base"
    own = [f"{base}.num_nodes={NUM_NODES}", f"{base}.width=2", f"{base}.num_cells={NUM_CELLS}"]
    config = mlotool.compose("darts", [*own, f"data.image_shape=[1,{SIZE},{SIZE}]"])
    space, architecture = build_module(config, "classifier"), build_module(config, "architecture")
    assert isinstance(space, SharedSpace) and isinstance(architecture, PathWeights)
    return space, architecture


def search() -> tuple[SharedSpace, PathWeights]:
    space, architecture = copy.deepcopy(built())
    with torch.no_grad():
        for logits in architecture.logits.values():
            logits.copy_(torch.randn(8))
    return space, architecture


def test_loss_and_gradients_are_those_of_mixed_operations() -> None:
    torch.manual_seed(0)
    space, architecture = (each.double() for each in search())
    given = {"input": torch.randn(6, 1, SIZE, SIZE, dtype=torch.float64), "target": torch.arange(6)}
    loss = path_cross_entropy(given, model=BoundModule(space), paths=BoundModule(architecture)).loss
    values, logits = dict(space.named_parameters()), dict(architecture.logits)
    plain = Plain(values, logits, [str(each) for each in architecture.table[0].candidates])
    expected = F.cross_entropy(plain(given["input"]), given["target"])
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    every = [*values.values(), *logits.values()]
    for mine, other in zip(torch.autograd.grad(loss, every), torch.autograd.grad(expected, every), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    assert len(logits) == 10


def test_the_search_runs_under_autocast() -> None:
    torch.manual_seed(0)
    space, architecture = search()
    images = torch.randn(6, 1, SIZE, SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        reduced = space(images, path=architecture())
    torch.testing.assert_close(reduced.float(), space(images, path=architecture()), rtol=0.1, atol=0.1)


@pytest.mark.slow
def test_the_published_network_has_the_published_size() -> None:
    # Liu et al.'s search network on CIFAR-10: 8 cells of width 16.
    config = mlotool.compose("darts_paper", ["data.root=."])
    with torch.device("meta"):
        space = build_module(config, "classifier")
    assert round(sum(each.numel() for each in space.parameters()) / 1e6, 2) == 1.93


def test_what_the_search_finds_is_a_model_of_darts_evaluate() -> None:
    torch.manual_seed(0)
    _, architecture = search()
    lines = path_analysis([], paths=BoundModule(architecture))["decisions"].splitlines()
    kept = [line for line in lines if not line.endswith(": none")]
    assert len(lines) == 10 and len(kept) == 2 * 2 * NUM_NODES
    base = "problems.classifier.module.base"
    given = [f"+decisions.{line.replace(': ', '=')}" for line in lines]
    model = build_module(mlotool.compose("darts_evaluate", [f"{base}.num_nodes={NUM_NODES}", *given]), "classifier")
    assert {name: each.value for name, each in model.decisions.items()} == architecture.found()
    assert model(torch.randn(6, 1, 8, 8)).shape == (6, 10)
