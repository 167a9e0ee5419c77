"""What a user does to parameters between ticks, and to the tensors that a loss gets in their place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool import Graph, Identity, Implicit, Penalty, Problem, Program, Unrolled
from tests.program.small import run_ticks
from tests.programs import Point


def below(batch: Any, *, w: Any, u: Any) -> Tensor:
    return ((w() - u() * w().exp()) ** 2).sum() + (w() ** 4 * u()).sum()


def above(batch: Any, *, w: Any) -> Tensor:
    return ((w() - 1) ** 2 * torch.arange(1.0, 1 + w().numel(), dtype=torch.float64).view_as(w())).sum()


START = torch.tensor([[0.3, 0.5], [0.1, 0.9]], dtype=torch.float64)


def program(
    algorithm: Any = None, lower: Any = below, upper: Any = above, values: tuple[Tensor, Tensor] = (START, START)
) -> Program:
    modules = [Point(each) for each in values]
    rates = [torch.optim.SGD(module.parameters(), lr=0.01) for module in modules]
    low = Problem("w", modules[0], lower, roles={"w": "w", "u": "u"}, optimizer=rates[0])
    low.hypergradient = algorithm or Implicit(Identity(), product="reverse")
    up = Problem("u", modules[1], upper, roles={"w": "w"}, optimizer=rates[1])
    return Program([low, up], Graph({"u": ["w"]}, {"w": ["u"]}))


def ticked(made: Program) -> Program:
    return run_ticks(made, 3).program


def parameter(made: Program, name: str) -> Tensor:
    return made.problems[name].theta["x"]


@pytest.mark.parametrize(
    "algorithm",
    [
        Implicit(Identity(), product="reverse"),
        Implicit(Identity(), product="finite_difference"),
        Unrolled(remat=False),
        Unrolled(remat=True),
        Penalty(multiplier=10.0, step_size=1.0),
    ],
)
def test_hooks_of_a_parameter_do_not_change_partial_derivatives(algorithm: Any) -> None:
    # The upper loss depends on `u` through the solution alone: its own step takes no derivative at the parameter.
    plain, hooked = program(algorithm), program(algorithm)
    parameter(hooked, "u").register_hook(lambda gradient: gradient * 0.5)
    assert torch.equal(parameter(ticked(hooked), "u"), parameter(ticked(plain), "u"))
    assert not torch.equal(parameter(plain, "u"), START)


@pytest.mark.parametrize("change", [Tensor.t, lambda values: values[:1]], ids=["transposed", "pruned"])
def test_other_data_at_the_same_address_is_seen(change: Callable[[Tensor], Tensor]) -> None:
    made = ticked(program())
    for name in ("w", "u"):
        parameter(made, name).data = change(parameter(made, name).data)
    other = program(values=(parameter(made, "w").detach(), parameter(made, "u").detach()))
    found, expected = (parameter(ticked(each), "u") for each in (made, other))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_hooks_within_a_loss_are_gone_after_it() -> None:
    def halved(batch: Any, *, w: Any) -> Tensor:
        for each in w.parameters():
            each.register_hook(lambda gradient: gradient * 0.5)
        return above(batch, w=w)

    def half(batch: Any, *, w: Any) -> Tensor:
        return above(batch, w=w) * 0.5

    found, expected = (parameter(ticked(program(upper=each)), "u") for each in (halved, half))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_what_a_loss_requires_of_constants_is_gone_after_it() -> None:
    seen: list[bool] = []

    def lower(batch: Any, *, w: Any, u: Any) -> Tensor:
        [constant] = u.parameters()
        if not constant.requires_grad:
            constant.requires_grad_()
            seen.append(True)
        return below(batch, w=w, u=u)

    ticked(program(lower=lower))
    assert len(seen) == 3
