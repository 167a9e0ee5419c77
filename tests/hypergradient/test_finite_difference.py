"""Both sides of a finite difference in one backward pass, or one after the other."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mlotool.core.replay import stop_gradient
from mlotool.hypergradient.products import FiniteDifferenceProduct, ReverseProduct, finite_difference
from mlotool.problem.interface import LowerProblem, LowerView, Vector

BATCH = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def loss(theta: Vector, inputs: Vector) -> Tensor:
    hidden = functional.dropout(torch.tanh(BATCH @ theta[0] + theta[1]), 0.3)
    losses = (hidden @ theta[2]).square()
    return (torch.sigmoid(inputs[0] * stop_gradient(losses) + inputs[1]) * losses).mean()


def plain(theta: Vector, inputs: Vector) -> Tensor:
    losses = (torch.tanh(BATCH @ theta[0] + theta[1]) @ theta[2]).square()
    return (torch.sigmoid(inputs[0]) * losses).mean() + (inputs[1] * theta[2]).sum()


def per_task(theta: Vector, inputs: Vector) -> Tensor:
    """Three tasks that share nothing: the leading axis of every parameter."""
    return (inputs[0] * torch.sin(theta[0]).square()).sum() + (theta[1].square() * theta[0].sum(1)).sum()


def vectors(*shapes: tuple[int, ...], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


THETA = vectors((5, 4), (4,), (4,), seed=1)
INPUTS = vectors((), (), seed=2)


def products(view: LowerView, inputs: Vector, direction: Vector, moved: Vector) -> list[list[Tensor]]:
    torch.manual_seed(3)
    product = FiniteDifferenceProduct(view, view.theta, inputs, [True, False])
    found = [product.hessian(direction), product.push(moved), product.cross(direction, -2.0)]
    # The generator goes on from the same place.
    return [*found, [torch.rand(())]]


@pytest.mark.parametrize("function", [loss, plain])
def test_one_pass_gives_the_same_as_two(monkeypatch: pytest.MonkeyPatch, function: object) -> None:
    view = LowerView(LowerProblem("w"), tuple(THETA), function)  # type: ignore[arg-type]
    direction, moved = vectors((5, 4), (4,), (4,), seed=4), vectors((), seed=5)
    joint = products(view, INPUTS, direction, moved)
    monkeypatch.setattr(finite_difference, "MOST_PARAMETERS_AT_ONCE", 0)
    apart = products(view, INPUTS, direction, moved)
    for a, b in zip(joint, apart, strict=True):
        # The product is a difference over a small step, which magnifies rounding.
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_tasks_have_steps_of_their_own() -> None:
    theta, inputs, direction = vectors((3, 2), (3,), seed=6), vectors((), seed=7), vectors((3, 2), (3,), seed=8)
    # One task's direction is a thousand times another's.
    direction[0][1] *= 1e3
    view = LowerView(LowerProblem("w", num_tasks=3), tuple(theta), per_task)
    exact = ReverseProduct(view, theta, inputs, [True]).hessian(direction)
    found = FiniteDifferenceProduct(view, theta, inputs, [True]).hessian(direction)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-7)


def test_both_ways_are_those_of_double_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    view = LowerView(LowerProblem("w"), tuple(THETA), plain)
    direction = vectors((5, 4), (4,), (4,), seed=9)
    exact = ReverseProduct(view, THETA, INPUTS, [True, True])
    expected = exact.hessian(direction), exact.cross(direction, 3.0)
    for limit in (finite_difference.MOST_PARAMETERS_AT_ONCE, 0):
        monkeypatch.setattr(finite_difference, "MOST_PARAMETERS_AT_ONCE", limit)
        product = FiniteDifferenceProduct(view, THETA, INPUTS, [True, True])
        found = product.hessian(direction), product.cross(direction, 3.0)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_a_loss_that_does_not_depend_on_the_inputs_gives_zeros() -> None:
    view = LowerView(LowerProblem("w"), tuple(THETA), lambda theta, inputs: theta[2].square().sum())
    product = FiniteDifferenceProduct(view, THETA, INPUTS, [True, True])
    assert all(not each.any() for each in product.cross(THETA))
    assert all(not each.any() for each in product.hessian([torch.zeros_like(each) for each in THETA]))


def test_a_product_leaves_no_circle_of_references() -> None:
    # It would keep the perturbed tensors until the collector comes by.
    theta, inputs = [torch.ones(3)], [torch.ones(3, requires_grad=True)]
    view = LowerView(LowerProblem("w"), tuple(theta), lambda at, given: (at[0] ** 2 * given[0]).sum())
    product = FiniteDifferenceProduct(view, theta, inputs, [True])
    product.hessian([torch.ones(3)])
    product.cross([torch.ones(3)])
    reference = weakref.ref(product)
    gc.disable()
    try:
        del product
        assert reference() is None
    finally:
        gc.enable()
