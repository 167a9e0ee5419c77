"""Thinned stages, and parts of a smaller module."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.data.splits import InMemoryTensors
from mlotool.layerparallel import Auxiliary
from mlotool.layerparallel.auxiliary.variables import matching_parts, thinned_parts
from mlotool.layerparallel.partition import Chain, partition
from mlotool.models import ResNet, TextTransformer
from mlotool.program import Graph, Problem, Program, Schedule, Stream


def pictures() -> Tensor:
    return torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("num_blocks", [0, 2, 9])
def test_a_thinned_stage_keeps_the_first_blocks_and_those_that_change_the_shape(num_blocks: int) -> None:
    """Of 4 blocks a stage, in a row, the second stage has one that changes the shape, and three that do not."""
    module = ResNet(26, 3, [1, 8, 8], width=4)
    stages = partition(module, 3, ["stages.1", "stages.2"])
    parts = thinned_parts(stages, (pictures(),), num_blocks)
    state = torch.randn(2, 4, 8, 8)
    blocks = module.stages[1]
    expected = nn.Sequential(*(copy.deepcopy(block) for block in blocks[: 1 + num_blocks]))(state)
    assert torch.equal(parts[1](state, pictures()), expected)
    first = nn.Sequential(module.convolution, module.norm, nn.ReLU(), *module.stages[0][:num_blocks])
    assert torch.equal(parts[0](pictures()), copy.deepcopy(first)(pictures()))


def test_a_thinned_transformer_keeps_its_mask() -> None:
    module = TextTransformer(12, 6, 2, width=8, num_heads=2, num_layers=4, hidden=8)
    tokens = torch.tensor([[3, 4, 0, 0, 0, 0], [5, 6, 7, 8, 9, 1]])
    [part] = thinned_parts(partition(module, 2, ["blocks.3"], tokens), (tokens,), 1)
    x = module.embedding(tokens) + module.position[:6]
    assert torch.equal(part(tokens), module.blocks[0](x, tokens != 0))


def test_parts_of_a_smaller_module_have_the_shapes() -> None:
    module, small = ResNet(32, 3, [1, 8, 8], width=4), ResNet(14, 3, [1, 8, 8], width=4)
    chain = Chain(module, inputs=(pictures(),))
    state, shapes = None, []
    for stage in chain.stages(chain.balance(4))[:-1]:
        state = stage(state, (pictures()[:1],))
        shapes.append(state.shape[1:])
    parts = matching_parts(small, shapes, (pictures(),), "auxnet")
    state = None
    for number, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
        state = part(pictures()[:1]) if number == 0 else part(state, pictures()[:1])
        assert state.shape[1:] == shape


def step(module: nn.Module, shape: tuple[int, ...], cut: str, **settings: Any) -> dict[str, Any]:
    """Take a step in two stages; return what they keep."""
    net = Problem(
        "net",
        module,
        lambda batch, *, model: model(batch["input"]).square().mean(),
        roles={"model": "net"},
        parallel=Auxiliary(stages=2, cut=[cut], beta=1.0, **settings),
        stream=Stream(InMemoryTensors({"input": torch.ones(shape)}), 4, seed=1),
        optimizer=partial(torch.optim.SGD, lr=0.01),
    )
    Schedule(Program([net], Graph())).tick()
    assert net.parallel is not None
    return net.parallel.state_dict()


class Flattened(nn.Module):
    """Puts the tokens of all samples into rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        for block in self.blocks:
            rows = block(rows)
        return rows.view_as(x)


@pytest.mark.parametrize("variables", ["stored", "auxnet"])
def test_a_state_needs_a_row_for_each_sample(variables: str) -> None:
    with pytest.raises(ConfigError, match=r"cut: the state: found .* \(20, 3\); expected a row for each of 4 samples"):
        step(Flattened(), (4, 5, 3), "blocks.2", variables=variables)
