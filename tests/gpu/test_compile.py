"""A compiled module takes the steps of one that is not."""

from functools import partial

import pytest
import torch
from torch.utils._triton import has_triton

from mlotool import Identity, Implicit
from tests.gpu.placed import follow, parameters, placed, relative_error
from tests.program.reweighting import reweighting
from tests.program.small import Mlp

pytestmark = pytest.mark.gpu


# The compiler of C++ or Triton code takes long.
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_module_takes_the_same_steps(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "inductor" and device.type == "cuda" and not has_triton():
        pytest.skip("torch.compile needs Triton for this GPU")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    ends = []
    for compiled in (False, True):
        model, weigher = Mlp().float(), Mlp(num_inputs=1, seed=1).float()
        made = reweighting(lambda: Implicit(Identity(0.1), "finite_difference"), model, weigher, compile=compiled)
        ends.append(parameters(follow(placed(made, device, torch.float32), 3)))
    assert relative_error(ends[1], ends[0]) < 1e-5
