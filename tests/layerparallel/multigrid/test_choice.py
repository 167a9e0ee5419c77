"""`cycles: auto`: the cheapest cycles whose gradient is near enough to the serial one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.layerparallel import MultigridResidual
from mlotool.layerparallel.multigrid.guard import Choice
from mlotool.layerparallel.multigrid.solver import Method
from tests.layerparallel.multigrid.test_residual import Wave, loss_of

U0 = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def wave(num_layers: int = 64, time: float = 2.0) -> nn.Module:
    """Layers whose weights are near those of their neighbours, as a coarse grid wants them."""
    torch.manual_seed(0)
    layers = Wave(num_layers, h=time / num_layers)
    with torch.no_grad():
        for tensor in layers.parameters():
            tensor.copy_(
                tensor[:1] + torch.linspace(0, 1, num_layers).view(-1, *[1] * (tensor.dim() - 1)) * tensor[-1:]
            )
    return layers


def auto(layers: nn.Module | None = None, **settings: Any) -> MultigridResidual:
    settings = {"workers": 64, "guard_threshold": 0.01, **settings}
    return MultigridResidual(layers or wave(), cycles="auto", **settings)


def step(part: MultigridResidual) -> list[Tensor]:
    return list(torch.autograd.grad(loss_of(part(U0)), list(part.parameters())))


def bias_of(layers: nn.Module, method: Method) -> float:
    """Return the bias as it is defined, by autograd alone."""
    part = MultigridResidual(
        layers, coarsening=method.coarsening, cycles=method.cycles, nested=method.nested, relaxation=method.relaxation
    )
    u0 = U0.clone().requires_grad_()
    inputs = [u0, *part.parameters()]
    exact_last = part.layers(u0)
    cotangent = torch.autograd.grad(loss_of(exact_last), exact_last, retain_graph=True)
    last = part(u0)
    mine, exact = (
        torch.cat([each.flatten() for each in torch.autograd.grad(found, inputs, cotangent)])
        for found in (last, exact_last)
    )
    of_state = (last - exact_last).detach().norm() / exact_last.detach().norm()
    return max(float((mine - exact).norm() / exact.norm()), float(of_state))


@pytest.mark.parametrize(("threshold", "nested"), [(0.3, False), (0.03, True)])
def test_it_is_the_cheapest_plan_within_the_bound(threshold: float, nested: bool) -> None:
    part = auto(wave(32), guard_threshold=threshold, nested=nested)
    serial = step(MultigridResidual(wave(32)).serial())
    # The first step is serial, and so is each gradient that is compared.
    torch.testing.assert_close(step(part), serial, rtol=1e-11, atol=1e-13)
    assert isinstance(part.guard, Choice)
    plans = part.guard.plans
    assert [plan.cost for plan in plans] == sorted(plan.cost for plan in plans)
    assert plans[-1].cost < 32
    expected = next((plan for plan in plans if bias_of(part.layers, plan.forward) <= threshold), None)
    assert part.guard.plan == expected
    assert expected is not None
    assert part.guard.bias == pytest.approx(bias_of(part.layers, expected.forward), rel=1e-6)
    # From the second step on it is what is solved.
    found, exact = (torch.cat([each.flatten() for each in slopes]) for slopes in (step(part), serial))
    assert 0 < (found - exact).norm() / exact.norm() < 2 * threshold
    assert part.statistics()["layers_in_a_row"] == expected.cost
    assert len(part.residuals["forward"]) == expected.forward.cycles + 1


def test_it_moves_to_dearer_and_cheaper_plans() -> None:
    part = auto(guard_every=1, guard_threshold=0.05)
    costs = []
    for factor, num_steps in ((1.0, 1), (3.0, 1), (1 / 3.0, 5)):
        with torch.no_grad():
            for parameter in part.layers.parameters():
                parameter.mul_(factor)
        for _ in range(num_steps):
            step(part)
            assert part.guard.bias is not None and part.guard.bias <= 0.05
        costs.append(part.statistics()["layers_in_a_row"])
    assert costs[0] == costs[2] < costs[1]


def test_it_goes_serial_where_no_plan_is_near_enough_and_comes_back() -> None:
    part = auto(wave(64, time=30.0), guard_threshold=1e-3, guard_max_cycles=2, guard_every=3)
    with pytest.warns(UserWarning, match="none of .* within guard_threshold=0.001.* one after the other"):
        step(part)
    assert part.statistics() == {"is_serial": 1.0, "gradient_bias": 0.0}
    torch.testing.assert_close(part(U0), part.layers(U0), rtol=0, atol=0)
    with torch.no_grad():
        for parameter in part.layers.parameters():
            parameter.mul_(0.01)
    for _ in range(12):
        step(part)
    assert not part.guard.is_serial
    with torch.no_grad():
        for parameter in part.layers.parameters():
            parameter.mul_(100)
    with pytest.warns(UserWarning, match="has a gradient within"):
        for _ in range(3):
            step(part)
    assert part.guard.is_serial


@pytest.mark.parametrize("settings", [{"cycles": "auto", "workers": 64}, {"cycles": 0, "guard_every": 1}])
def test_a_batch_with_a_nan_decides_nothing(settings: dict[str, Any]) -> None:
    part = MultigridResidual(wave(), **settings)
    for _ in range(3):
        loss_of(part(U0 * float("nan"))).backward()
    assert part.guard.bias is None
    if settings["cycles"] == "auto":
        step(part)
        assert not part.guard.is_serial


def test_a_gradient_with_a_graph_is_compared_and_stays_what_its_graph_says() -> None:
    part = MultigridResidual(wave(), cycles=0, guard_every=1, guard_threshold=10.0)
    parameters = list(part.parameters())
    slopes, plain = (
        torch.autograd.grad(loss_of(run(U0)), parameters, create_graph=True)
        for run in (part, MultigridResidual(part.layers, cycles=0))
    )
    assert part.guard.bias is not None
    torch.testing.assert_close(slopes, plain, rtol=0, atol=0)
    again = [torch.autograd.grad(sum(each.square().sum() for each in some), parameters) for some in (slopes, plain)]
    torch.testing.assert_close(*again, rtol=1e-12, atol=1e-14)
