"""Layer-parallel steps on the device: multigrid across layers, auxiliary variables, streams of their own."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from mlotool.layerparallel import Multigrid, StackedLayers
from tests.gpu.placed import CPU, follow, on_the_cpu, parameters, placed, relative_error
from tests.layerparallel.auxiliary.small import KINDS, alone, auxiliary, reweighted, stack

# Stages of a few numbers each cannot be balanced.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.* times their mean:UserWarning")]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return state + 0.2 * torch.tanh(self.inner(state))


METHODS = [kind for kind in KINDS if kind != "mean"]
LAYERS = {
    "blocks": lambda: nn.Sequential(*[Residual() for _ in range(8)]),
    "stacked": lambda: StackedLayers(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 8, 0.2),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("warm_start", [False, True], ids=["cold", "warm"])
def test_multigrid_training_equals_the_cpu(warm_start: bool, kind: str, device: torch.device) -> None:
    ends = []
    for where in (CPU, device):
        torch.manual_seed(0)
        parts = OrderedDict(first=nn.Linear(3, 4), residual=LAYERS[kind](), last=nn.Linear(4, 2))
        program = alone(Multigrid(cycles=1, warm_start=warm_start), nn.Sequential(parts).double())
        ends.append(parameters(follow(placed(program, where), 8)))
    assert relative_error(ends[1], ends[0]) < 1e-9


@pytest.mark.parametrize("kind", METHODS)
def test_two_stages_with_auxiliary_variables_equal_the_cpu(kind: str, device: torch.device) -> None:
    ends = []
    for where in (CPU, device):
        program = reweighted(auxiliary(stages=2, cut=["2"], **KINDS[kind]), stack(norm=True))
        ends.append(parameters(follow(placed(program, where), 12)))
    assert relative_error(ends[1], ends[0]) < 1e-9


@pytest.mark.parametrize("kind", METHODS)
def test_streams_change_nothing(kind: str, device: torch.device) -> None:
    """On a GPU the stages have streams of their own; elsewhere the setting does nothing."""
    ends = []
    for streams in (False, True):
        parallel = auxiliary(streams=streams, noise=0.1, **KINDS[kind])
        program = placed(alone(parallel, stack(widths=(64, 64, 64, 64))), device)
        ends.append(parameters(follow(program, 20)))
    assert relative_error(ends[1], ends[0]) < 1e-11


@pytest.mark.parametrize("kind", METHODS)
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
