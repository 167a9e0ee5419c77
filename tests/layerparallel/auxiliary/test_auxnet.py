"""Equations of the method, and the networks that give variables: thinned stages, and parts of a smaller module."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.data.splits import InMemoryTensors
from mlotool.layerparallel import Auxiliary
from mlotool.layerparallel.auxiliary.equations import next_multiplier
from mlotool.layerparallel.auxiliary.variables import matching_parts, thinned_parts
from mlotool.layerparallel.partition import Chain, partition
from mlotool.layerparallel.speedup import BatchSeconds, predicted_speedup
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


def squares(batch: Any, *, model: Any) -> Tensor:
    return model(batch["input"]).square().mean()


def step(module: nn.Module, shape: tuple[int, ...], cut: str, **settings: Any) -> dict[str, Any]:
    """Take a step in two stages; return what they keep."""
    stream = Stream(InMemoryTensors({"input": torch.ones(shape)}), 4, seed=1)
    optimizer = partial(torch.optim.SGD, lr=0.01)
    how: dict[str, Any] = {"parallel": Auxiliary(stages=2, cut=[cut], beta=1.0, **settings), "optimizer": optimizer}
    net = Problem("net", module, squares, roles={"model": "net"}, stream=stream, **how)
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


def violation_after(rate: float, beta: float, num_steps: int) -> float:
    """Minimise the augmented Lagrangian of two scalar stages exactly, then move the multiplier; so many times.

    X = w (stage 0 on the input 1), phi = (lambda - 1)^2 / 2 + w^2 / 2, so that X is pulled one way and lambda another:
    L is quadratic in (w, lambda), and its stationary point is that of a 2 x 2 system.
    """
    multiplier, violation = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for _ in range(num_steps):
        matrix = torch.tensor([[1 + 2 * beta, -2 * beta], [-2 * beta, 1 + 2 * beta]], dtype=torch.float64)
        right = torch.stack([-multiplier, 1 + multiplier])
        state, variable = torch.linalg.solve(matrix, right)
        violation = variable - state
        multiplier = next_multiplier(multiplier, variable, state, rate)
    return violation.item()


def test_the_multiplier_rule_of_the_stationarity_and_the_printed_one() -> None:
    """The exact one leaves no violation after 11 steps at beta=5; the printed one leaves that of the penalty method."""
    beta, step_size = 5.0, 0.1
    penalty = violation_after(0.0, beta, 1)
    assert penalty == pytest.approx(1 / (1 + 4 * beta), rel=1e-12)
    assert abs(violation_after(2 * beta, beta, 11)) < 1e-12
    assert violation_after(step_size / (2 * beta), beta, 11) > 0.9 * penalty


def test_it_is_the_printed_formula() -> None:
    data, forward, backward, penalty, auxiliary, num_stages = 0.1, 1.1, 2.3, 0.05, 0.4, 3
    total = data + forward + backward
    printed = 1 / ((1 / num_stages) * (forward + backward) / total + (data + penalty + auxiliary) / total)
    assert predicted_speedup(BatchSeconds(forward, backward, data, penalty, auxiliary), num_stages) == pytest.approx(
        printed
    )
