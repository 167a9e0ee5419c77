"""Traced ticks take the steps that the plans take, with a GPU's fused optimizers too."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._triton import has_triton

from mlotool import Identity, Implicit
from mlotool.program import Program
from tests.gpu.placed import follow, parameters, placed, relative_error
from tests.program.reweighting import reweighting
from tests.program.small import Mlp
from tests.program.test_trace import is_traced, ticked

pytestmark = pytest.mark.gpu

NUM_TICKS = 6
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.05),
    "fused_sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "fused_adamw": partial(torch.optim.AdamW, lr=0.05, fused=True),
}


def made(optimizer: Any, dtype: torch.dtype, device: torch.device, trace: str | None) -> Program:
    model, weigher = Mlp().to(dtype), Mlp(num_inputs=1, seed=1).to(dtype)
    found = reweighting(lambda: Implicit(Identity(0.1), "finite_difference"), model, weigher, optimizer=optimizer)
    return Program(placed(found, device, dtype).problems.values(), found.graph, trace=trace)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("trace", ["eager", "cuda_graph"])
def test_traced_ticks_take_the_steps_of_the_plans(
    trace: str, name: str, dtype: torch.dtype, device: torch.device
) -> None:
    if trace == "cuda_graph" and device.type != "cuda":
        pytest.skip("a CUDA graph wants a GPU")
    compare(trace, OPTIMIZERS[name], dtype, device)


# The compiler takes long.
@pytest.mark.slow
def test_so_do_compiled_ones(device: torch.device) -> None:
    if device.type == "cuda" and not has_triton():
        pytest.skip("PyTorch's compiler needs Triton for this GPU")
    compare("inductor", OPTIMIZERS["fused_adamw"], torch.float32, device)


def compare(trace: str, optimizer: Any, dtype: torch.dtype, device: torch.device) -> None:
    expected = parameters(follow(made(optimizer, dtype, device, None), NUM_TICKS))
    program = made(optimizer, dtype, device, trace)
    program.random.manual_seed(0)
    ticked(program, NUM_TICKS)
    # What cannot be traced is left to the plans, with a warning.
    assert is_traced(program, "model")
    assert relative_error(parameters(program), expected) < (1e-4 if dtype is torch.float32 else 1e-7)
