"""Unrolled hypergradients, with blocks that are evaluated again and by either product, against one graph of all steps.

The reference (`plain_unroll.py`) shares nothing with mlotool. What is compared is what is left when the part of first
order is taken away: that part is most of many hypergradients, and hides errors in the rest.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from mlotool import Schedule
from mlotool.hypergradient import Unrolled
from tests.hypergradient.unrolled_cases import (
    BOTH,
    OPTIMIZERS,
    REMAT,
    WAYS,
    UnrolledCase,
    decoder,
    mixed,
    parameters_of,
)

# torch.func opens levels of forward mode itself.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")

TOLERANCE = 1e-10
LEAST_SHARE = 0.05


def assert_exact(case: UnrolledCase, found: Sequence[Tensor], least_share: float = LEAST_SHARE) -> None:
    """Compare what is of second order, of which there must be some."""
    whole, first = case.expected(), case.expected(is_second_order=False)
    assert (whole - first).norm() > least_share * whole.norm()
    for each in found:
        assert ((each - first) - (whole - first)).norm() < TOLERANCE * (whole - first).norm()


def check(way: str, optimizer: str, num_steps: int) -> None:
    case = UnrolledCase(way, optimizer, num_steps)
    found = [case.found(algorithm, remat) for algorithm in BOTH.values() for remat in REMAT.values()]
    if way == "lr" and num_steps == 1:
        # The gradient at the start does not depend on the rate.
        expected = case.expected()
        assert all((each - expected).norm() < TOLERANCE * expected.norm() for each in found)
    else:
        assert_exact(case, found)


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_table(way: str, optimizer: str, num_steps: int) -> None:
    check(way, optimizer, num_steps)


@pytest.mark.parametrize(("way", "optimizer"), [("lr", "adamw"), ("weighting", "momentum")])
def test_table_of_eight_steps(way: str, optimizer: str) -> None:
    check(way, optimizer, 8)


dropped = partial(decoder, dropout=0.3)
untied = partial(decoder, feedforward="swiglu", tied=False)
SETTINGS = {
    "dropout, weighting": UnrolledCase("weighting", "sgd", network=dropped),
    "dropout, start": UnrolledCase("maml", "adam", network=dropped),
    "dropout, rate": UnrolledCase("lr", "momentum", network=dropped),
    # Of tokens that do not occur, the gradient of the embedding is zero at each step.
    "rows without a gradient, start": UnrolledCase("maml", "adam", network=untied),
    "rows without a gradient, rate": UnrolledCase("lr", "adamw", network=untied),
    "batch norm": UnrolledCase("weighting", "momentum", network=mixed),
    "batch norm, read in eval mode": UnrolledCase("weighting", "momentum", network=mixed, mode="eval"),
    "batch norm and dropout, read in eval mode": UnrolledCase(
        "maml", "adam", network=partial(mixed, dropout=0.3), mode="eval"
    ),
    "batch norm and dropout": UnrolledCase("maml", "adam", network=partial(mixed, dropout=0.3), mode="train"),
    "a frozen block, start": UnrolledCase("maml", "adamw", network=partial(mixed, frozen=1)),
    "a frozen block, weighting": UnrolledCase("weighting", "adamw", network=partial(mixed, frozen=1)),
    "accumulation, weighting": UnrolledCase("weighting", "adamw", network=dropped, accumulate=2),
    "accumulation, start": UnrolledCase("maml", "sgd", network=dropped, accumulate=2),
    "clipping, weighting": UnrolledCase("weighting", "momentum", network=dropped, clip=0.05),
    "clipping, rate": UnrolledCase("lr", "adam", network=dropped, clip=0.05),
    "clipping and accumulation": UnrolledCase("maml", "adam", network=dropped, clip=0.05, accumulate=2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str) -> None:
    """All random numbers are those of the reference, from one seed."""
    case = SETTINGS[name]
    algorithms = [*BOTH.values(), Unrolled(remat=False)]
    assert_exact(case, [case.found(each, remat) for each in algorithms for remat in REMAT.values()])


@pytest.mark.parametrize("way", ["maml", "weighting"])
def test_tasks(way: str) -> None:
    case = UnrolledCase(way, "adam", tasks=4)
    assert_exact(case, [case.found(each, remat) for each in BOTH.values() for remat in REMAT.values()])


def test_tasks_whose_networks_drop() -> None:
    """The draws of `torch.vmap` are not those of one task after the other: here the ways are compared."""
    case = UnrolledCase("maml", "adam", network=dropped, tasks=4)
    expected, *found = (case.found(each, remat) for each in BOTH.values() for remat in REMAT.values())
    assert (expected - case.expected()).norm() > LEAST_SHARE * expected.norm()
    assert all((each - expected).norm() < TOLERANCE * expected.norm() for each in found)


def test_autocast() -> None:
    """In bf16 the ways round differently; all are far from what a product without autocast gives."""
    case = UnrolledCase("maml", "sgd", 1, partial(decoder, is_double=False), is_autocast=True)
    expected, exact = case.expected(), replace(case, is_autocast=False).expected()
    assert (exact - expected).norm() > 0.2 * expected.norm()
    found = {(kind, again): case.found(BOTH[kind], REMAT[again]) for kind in BOTH for again in REMAT}
    assert (found["reverse", "plain"] - expected).norm() < 1e-6 * expected.norm()
    assert torch.equal(found["forward", "plain"], found["forward", "remat"])
    assert all((each - expected).norm() < 0.02 * expected.norm() for each in found.values())


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("way", "optimizer"), [("weighting", "momentum"), ("maml", "sgd"), ("lr", "adam")])
def test_steps_of_a_schedule(way: str, optimizer: str, kind: str) -> None:
    """The upper problem's step, of rate 1, is along the gradient of the recorded steps."""
    case = UnrolledCase(way, optimizer, is_streamed=True)
    made = case.program(BOTH[kind], ["blocks.*"])
    before = parameters_of(made.problems["upper"])
    schedule = Schedule(made)
    for _ in range(3):
        schedule.tick()
    assert_exact(case, [before - parameters_of(made.problems["upper"])])


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("remat", REMAT)
def test_from_a_constant_start_where_the_horizon_is_shorter(kind: str, remat: str) -> None:
    case = UnrolledCase("weighting", "momentum", 4)
    # Without the first two steps: these lead to another start, and to a state that is constant too.
    found = case.found(replace(BOTH[kind], horizon=2), REMAT[remat])
    expected = case.expected(horizon=2)
    assert (expected - case.expected()).norm() > LEAST_SHARE * expected.norm()
    assert (found - expected).norm() < TOLERANCE * expected.norm()


def test_the_comparison_can_fail() -> None:
    case = UnrolledCase("maml", "sgd", 2, dropped)
    with pytest.raises(AssertionError):
        assert_exact(case, [case.found(Unrolled(), ["blocks.*"], seed=8)])
    with pytest.raises(AssertionError):
        assert_exact(case, [case.expected(is_second_order=False)])
    wrong = case.expected() + 1e-9 * torch.ones_like(case.expected())
    with pytest.raises(AssertionError):
        assert_exact(case, [wrong])
