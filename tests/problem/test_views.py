"""Views of parameters that are kept from one evaluation to the next."""

import torch
from torch import nn

from mlotool.core.tracing import tracing
from mlotool.problem.views import ParameterViews


def _layer() -> tuple[nn.Linear, ParameterViews]:
    layer = nn.Linear(2, 1)
    return layer, ParameterViews(tuple(layer.parameters()))


def test_views_are_kept_and_show_a_step_in_place() -> None:
    layer, views = _layer()
    first, leaves = views.constants(), views.leaves(views.constants())
    with torch.no_grad():
        layer.weight.add_(1.0)
    assert views.constants() is first
    assert views.leaves(first) is leaves
    assert torch.equal(first[0], layer.weight)
    assert torch.equal(leaves[0], layer.weight)
    assert not first[0].requires_grad
    assert all(each.is_leaf and each.requires_grad for each in leaves)


def test_other_memory_makes_them_anew() -> None:
    layer, views = _layer()
    before = views.constants()
    layer.double()
    after = views.constants()
    assert after is not before
    assert after[0].dtype == views.leaves(after)[0].dtype == torch.float64
    layer.weight.data = torch.zeros(1, 2, dtype=torch.float64)
    assert torch.equal(views.constants()[0], torch.zeros(1, 2, dtype=torch.float64))


def test_leaves_of_other_tensors_share_their_memory() -> None:
    _, views = _layer()
    other = torch.ones(3)
    [leaf] = views.leaves([other])
    assert leaf.requires_grad
    assert leaf.data_ptr() == other.data_ptr()


def test_views_of_a_special_moment_are_not_kept() -> None:
    _, views = _layer()
    with torch.inference_mode():
        views.constants()
    kept: list[tuple[torch.Tensor, ...]] = []
    torch.func.grad(lambda x: kept.append(views.constants()) or x)(torch.ones(()))  # type: ignore[func-returns-value]
    with tracing():
        kept.append(views.constants())
    after = views.constants()
    assert all(each is not after for each in kept)
    # A tensor of inference mode, or of a transformation, could not be part of a graph.
    (after[0] * views.leaves(after)[0]).sum().backward()


def test_parameters_without_an_address_are_not_kept() -> None:
    weight = nn.Parameter(torch.ones(2, device="meta"))
    views = ParameterViews([weight])
    assert views.constants() is not views.constants()
    weight.data = torch.ones(2, device="meta", dtype=torch.float64)
    assert views.constants()[0].dtype == torch.float64
