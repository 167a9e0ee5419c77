"""Unrolled steps on the device: computed again, kept, and by plain autograd through operations of torch."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool import Unrolled
from mlotool.program import Program, Schedule
from tests.gpu.placed import parameters, placed, relative_error
from tests.program.small import lower_loss, pair, upper_loss

pytestmark = pytest.mark.gpu

STEPS = 4
OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.05, weight_decay=0.01),
}


def program(device: torch.device, optimizer: Any, hypergradient: Any) -> Program:
    """Return a program whose upper problem moves by its hypergradient, after four steps of the lower one."""
    lower = {"optimizer": optimizer, "unroll_steps": STEPS}
    upper = {"optimizer": partial(torch.optim.SGD, lr=1.0)}
    return placed(pair(lower, upper, hypergradient=lambda: hypergradient), device)


def moved(device: torch.device, optimizer: Any, hypergradient: Any) -> tuple[Tensor, Tensor]:
    """Return where the lower problem has come to, and the hypergradient there."""
    made = program(device, optimizer, hypergradient)
    upper, schedule = made.problems["u"].theta["x"], Schedule(made)
    before = upper.detach().clone()
    for _ in range(STEPS):
        schedule.tick()
    return made.problems["w"].theta["x"].detach(), before - upper.detach()


def by_torch(device: torch.device, name: str) -> tuple[Tensor, Tensor]:
    """Return the same by the updates of torch's optimizers, written out."""
    problems = program(device, OPTIMIZERS[name], Unrolled()).problems
    x = problems["w"].theta["x"].detach().requires_grad_()
    u = problems["u"].theta["x"].detach().requires_grad_()
    first, second = torch.zeros_like(x), torch.zeros_like(x)
    for number in range(1, STEPS + 1):
        loss = lower_loss(problems["w"].stream.next(), w=lambda x=x: x, u=lambda: u)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope = slope + 0.01 * x
        if name == "momentum":
            first = 0.9 * first + slope
            x = x - 0.1 * first
        else:
            first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
            x = x - 0.05 * (first / (1 - 0.9**number)) / ((second / (1 - 0.999**number)).sqrt() + 1e-8)
    loss = upper_loss(problems["u"].stream.next(), w=lambda: x)
    return x.detach(), torch.autograd.grad(loss, u)[0]


@pytest.mark.parametrize("remat", [True, False], ids=["computed_again", "kept"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_equals_plain_autograd(name: str, fused: bool, remat: bool, device: torch.device) -> None:
    optimizer = partial(OPTIMIZERS[name], fused=True) if fused else OPTIMIZERS[name]
    found, expected = moved(device, optimizer, Unrolled(remat=remat)), by_torch(device, name)
    assert all(tensor.device == device for tensor in (*found, *expected))
    # Adam's own rounding, of which fused kernels have another one.
    assert relative_error(found[0], expected[0]) < 1e-9
    assert relative_error(found[1], expected[1]) < 1e-8


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kept_graphs_equal_steps_computed_again(name: str, device: torch.device) -> None:
    found = [moved(device, OPTIMIZERS[name], Unrolled(remat=remat)) for remat in (True, False)]
    assert relative_error(found[0][1], found[1][1]) < 1e-12


@pytest.mark.parametrize("remat", [True, False], ids=["computed_again", "kept"])
def test_a_horizon_cuts_the_steps(remat: bool, device: torch.device) -> None:
    whole = moved(device, OPTIMIZERS["momentum"], Unrolled(remat=remat))[1]
    part, same = (moved(device, OPTIMIZERS["momentum"], Unrolled(horizon=h, remat=remat))[1] for h in (2, STEPS))
    assert torch.equal(same, whole)
    assert relative_error(part, whole) > 1e-3


def test_a_program_that_was_made_on_the_cpu_is_reset_on_the_device(device: torch.device) -> None:
    """Its start was noted where it was made; before the first step all steps are simulated from there."""
    lower = {"optimizer": OPTIMIZERS["momentum"], "unroll_steps": STEPS, "reset_to": "initial"}
    for remat in (True, False):
        made = placed(pair(lower, hypergradient=lambda remat=remat: Unrolled(remat=remat)), device)
        simulated = made.gradient("u")["x"]
        assert simulated.device == device
        assert bool(simulated.isfinite().all())
    schedule = Schedule(made)
    start = parameters(made)["w.x"]
    for _ in range(STEPS + 1):
        schedule.tick()
    once = placed(pair(lower, hypergradient=Unrolled), device)
    assert torch.equal(parameters(once)["w.x"], start)
