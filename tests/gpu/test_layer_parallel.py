"""Layer-parallel steps on the device: multigrid across layers, auxiliary variables, streams of their own."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from mlotool.layerparallel import BlockLayers, Multigrid, MultigridResidual, StackedLayers
from tests.gpu.placed import CPU, follow, on_the_cpu, parameters, placed, relative_error
from tests.layerparallel.auxiliary.small import KINDS, alone, auxiliary, reweighted, stack

# Stages of a few numbers each cannot be balanced.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.* times their mean:UserWarning")]

NUM_LAYERS = 16


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh())


@pytest.mark.parametrize("relaxation", ["F", "FCF"])
@pytest.mark.parametrize("kind", ["blocks", "stacked"])
def test_multigrid_gradients_equal_those_of_autograd(kind: str, relaxation: str, device: torch.device) -> None:
    torch.manual_seed(0)
    layers = (
        BlockLayers([dense() for _ in range(NUM_LAYERS)], 0.2)
        if kind == "blocks"
        else StackedLayers(dense, NUM_LAYERS, 0.2)
    )
    part = MultigridResidual(layers.double(), relaxation=relaxation, cycles=4 if relaxation == "F" else 2).to(device)
    u0 = torch.randn(5, 3, dtype=torch.float64).to(device).requires_grad_()
    inputs = [u0, *part.parameters()]
    found, expected = (torch.autograd.grad(run(u0).square().sum(), inputs) for run in (part, part.serial()))
    for a, b in zip(found, expected, strict=True):
        assert a.device == device
        assert relative_error(a, b) < 1e-9


@pytest.mark.parametrize("warm_start", [False, True], ids=["cold", "warm"])
def test_multigrid_training_equals_the_cpu(warm_start: bool, device: torch.device) -> None:
    ends = []
    for where in (CPU, device):
        torch.manual_seed(0)
        residual = nn.Sequential(*[Residual() for _ in range(8)])
        net = nn.Sequential(OrderedDict(first=nn.Linear(3, 4), residual=residual, last=nn.Linear(4, 2))).double()
        parallel = Multigrid(cycles=1, warm_start=warm_start)
        ends.append(parameters(follow(placed(alone(parallel, net), where), 8)))
    assert relative_error(ends[1], ends[0]) < 1e-9


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return state + 0.2 * torch.tanh(self.inner(state))


@pytest.mark.parametrize("kind", KINDS)
def test_two_stages_with_auxiliary_variables_equal_the_cpu(kind: str, device: torch.device) -> None:
    ends = []
    for where in (CPU, device):
        program = reweighted(auxiliary(stages=2, cut=["2"], **KINDS[kind]), stack(norm=True))
        ends.append(parameters(follow(placed(program, where), 12)))
    assert relative_error(ends[1], ends[0]) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_streams_change_nothing(kind: str, device: torch.device) -> None:
    """On a GPU the stages have streams of their own; elsewhere the setting does nothing."""
    ends = []
    for streams in (False, True):
        parallel = auxiliary(streams=streams, noise=0.1, **KINDS[kind])
        program = placed(alone(parallel, stack(widths=(64, 64, 64, 64))), device)
        ends.append(parameters(follow(program, 20)))
    assert relative_error(ends[1], ends[0]) < 1e-11


@pytest.mark.parametrize("kind", KINDS)
def test_its_state_comes_back_to_the_device(kind: str, device: torch.device) -> None:
    """A checkpoint's tensors are on the CPU."""
    settings = {"noise": 0.1, **KINDS[kind]}
    whole, first, second = (placed(alone(auxiliary(**settings)), device) for _ in range(3))
    follow(whole, 8)
    follow(first, 5)
    follow(second, 1)
    second.load_state_dict(on_the_cpu(first.state_dict()))
    follow(second, 3)
    found, expected = parameters(second), parameters(whole)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
