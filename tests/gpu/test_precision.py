"""Autocast, loss scales, TF32, compiled modules and traced ticks on the device."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._triton import has_triton

from mlotool import Identity, Implicit, Neumann, Unrolled
from mlotool.program import Program, Schedule
from mlotool.runner.process_settings import torch_settings
from tests.gpu.placed import cosine, follow, parameters, placed, relative_error
from tests.program.reweighting import reweighting
from tests.program.small import Mlp
from tests.program.test_trace import is_traced, ticked

NUM_TICKS = 6
OPTIMIZERS = {
    "fused_adamw": partial(torch.optim.AdamW, lr=0.05, fused=True),
    "fused_sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.05),
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


pytestmark = pytest.mark.gpu

ALGORITHMS: dict[str, Any] = {
    "identity": lambda: Implicit(Identity(0.1)),
    "neumann": lambda: Implicit(Neumann(3, 0.1)),
    "finite_difference": lambda: Implicit(Identity(0.1), "finite_difference"),
    "unrolled": Unrolled,
}


def single(device: torch.device, precision: str, name: str = "identity", **settings: Any) -> Program:
    """Return a program in float32, both problems of which are evaluated in a precision."""
    made = reweighting(
        ALGORITHMS[name], Mlp().float(), Mlp(num_inputs=1, seed=1).float(), precision=precision, **settings
    )
    return placed(made, device, torch.float32)


def need_fp16(device: torch.device) -> None:
    """Skip where torch cannot multiply in float16."""
    try:
        with torch.autocast(device.type, dtype=torch.float16):
            torch.nn.functional.linear(torch.ones(2, 2, device=device), torch.ones(2, 2, device=device))
    except RuntimeError as error:
        pytest.skip(f"torch has no float16 on {device.type}: {error}")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_bf16_is_near_full_precision(name: str, device: torch.device) -> None:
    found, expected = (follow(single(device, precision, name), 1).gradient("weigher") for precision in ("bf16", "fp32"))
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    assert cosine(found, expected) > 0.99
    assert relative_error(found, expected) > 1e-6


def test_fp16_is_near_full_precision(device: torch.device) -> None:
    need_fp16(device)
    programs = [single(device, precision) for precision in ("fp16", "fp32")]
    for problem in programs[0].problems.values():
        assert problem.optimizer_step.loss_scale is not None
        # Small enough for the losses of the first step.
        problem.optimizer_step.loss_scale.value = 2.0**8
    found, expected = (follow(program, 1).gradient("weigher") for program in programs)
    assert cosine(found, expected) > 0.999


def steep(batch: Tensor, *, model: Any, weigher: Any) -> Tensor:
    """Its slope overflows in fp16 at a loss scale above about 2^8."""
    return (1e3 * model(batch)).float().mean() * weigher(batch[:, :1]).float().sigmoid().mean()


def test_an_overflow_skips_a_step_and_training_goes_on(device: torch.device) -> None:
    need_fp16(device)
    made = single(device, "fp16", "finite_difference", lower=steep)
    problem, schedule = made.problems["model"], Schedule(made)
    assert problem.optimizer_step.loss_scale is not None
    before = thetas(problem.theta)
    schedule.tick()
    assert problem.optimizer_step.loss_scale.value == 2.0**15
    assert all(torch.equal(before[key], tensor) for key, tensor in thetas(problem.theta).items())
    for _ in range(11):
        schedule.tick()
    after = thetas(problem.theta)
    assert 1 < problem.optimizer_step.loss_scale.value < 2.0**12
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())
    assert relative_error(after, before) > 1e-3


def thetas(theta: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().clone() for key, tensor in theta.items()}


def test_without_tf32_products_have_all_digits(device: torch.device) -> None:
    """TF32 keeps ten bits of a factor, so that the error would be 3e-4."""
    generator = torch.Generator("cpu").manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator).to(device) for _ in range(2))
    with torch_settings(num_threads=None, deterministic=True, tf32=False):
        found = a @ b
        assert torch.equal(a @ b, found)
    assert relative_error(found, a.double() @ b.double()) < 2e-6


@pytest.mark.parametrize("name", ALGORITHMS)
def test_full_precision_is_the_same_bit_by_bit(name: str, device: torch.device) -> None:
    with torch_settings(num_threads=None, deterministic=True, tf32=False):
        first, second = (parameters(follow(single(device, "fp32", name), 4)) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


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
