"""Any number of layers: the last chunk may be shorter than the others, and a few layers have no coarse grid at all."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mlotool.layerparallel import MultigridResidual, mgrit, mgrit_adjoint

NUM_LAYERS = (1, 3, 5, 7, 13)
SETTINGS = [
    {"relaxation": relaxation, "cycle": cycle, "nested": nested}
    for relaxation, cycle, nested in (("F", "V", False), ("FCF", "V", True), ("F", "F", True), ("FCF", "F", False))
]


@pytest.mark.parametrize("coarsening", [2, 3])
@pytest.mark.parametrize("num_layers", NUM_LAYERS)
def test_after_enough_cycles_it_is_the_serial_pass(num_layers: int, coarsening: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(num_layers, 3, 3, dtype=torch.float64, generator=generator) / 2
    start, cotangent = (torch.randn(2, 3, dtype=torch.float64, generator=generator) for _ in range(2))

    def step(u: Tensor, n: int, h: float) -> Tensor:
        return u + h * torch.tanh(u @ weights[n].T)

    found = [start]
    for n in range(num_layers):
        found.append(step(found[-1], n, 0.3))
    states = torch.stack(found)
    back = [cotangent]
    for n in reversed(range(num_layers)):
        leaf = states[n].clone().requires_grad_()
        back.append(torch.autograd.grad(step(leaf, n, 0.3), leaf, back[-1])[0])
    adjoints = torch.stack(back[::-1])
    for each in SETTINGS:
        settings = {"coarsening": coarsening, "cycles": num_layers, **each}
        ours, residuals = mgrit(step, start, num_layers, 0.3, **settings)  # type: ignore[arg-type]
        torch.testing.assert_close(ours, states, rtol=0, atol=1e-13)
        assert residuals[-1] < 1e-13
        ours, _ = mgrit_adjoint(step, states, cotangent, num_layers, 0.3, **settings)  # type: ignore[arg-type]
        torch.testing.assert_close(ours, adjoints, rtol=0, atol=1e-13)


@pytest.mark.parametrize("num_layers", [1, 5, 7])
def test_second_derivatives_are_the_serial_ones(num_layers: int) -> None:
    part = MultigridResidual(
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double(), num_layers, h=0.3, coarsening=2, cycles=8
    )
    x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    points = [x, *part.parameters()]

    def derivatives(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(run(x).square().sum(), points, create_graph=True)
        total = torch.stack([each.square().sum() for each in first]).sum()
        return [*first, *torch.autograd.grad(total, points)]

    torch.testing.assert_close(derivatives(part), derivatives(part.layers), rtol=1e-11, atol=1e-11)
