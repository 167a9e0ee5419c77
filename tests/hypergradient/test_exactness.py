"""Unrolled hypergradients, with blocks that are evaluated again and by either product, against one graph of all steps.

The reference (`PlainUnroll`) shares nothing with mlotool. What is compared is what is left when the part of first
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
from tests.hypergradient import unrolled_cases
from tests.hypergradient.two_levels import ticked
from tests.hypergradient.unrolled_cases import BOTH, REMAT, WAYS, UnrolledCase, decoder, mixed, parameters_of

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


# Product and blocks see nothing of the optimizer: each with each for one, and for the others each once.
PAIRS = [("reverse", "remat"), ("forward", "plain")]
ALL = [(kind, again) for kind in BOTH for again in REMAT]


@pytest.mark.parametrize("optimizer", unrolled_cases.OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_table(way: str, optimizer: str) -> None:
    case, pairs = UnrolledCase(way, optimizer, 2), ALL if (way, optimizer) == ("weighting", "adam") else PAIRS
    assert_exact(case, [case.found(BOTH[kind], REMAT[again]) for kind, again in pairs])


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
    "clipping, rate": UnrolledCase("lr", "adam", network=partial(dropped, num_layers=2), clip=0.05),
    "clipping and accumulation": UnrolledCase("maml", "adam", network=dropped, clip=0.05, accumulate=2),
}

KEPT = {"kept": Unrolled(remat=False)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str) -> None:
    """All random numbers are those of the reference, from one seed."""
    case, pairs = replace(SETTINGS[name], num_steps=2), PAIRS
    if name in ("batch norm and dropout", "clipping, rate"):
        pairs = [*ALL, ("kept", "plain"), ("kept", "remat")]
    assert_exact(case, [case.found((BOTH | KEPT)[kind], REMAT[again]) for kind, again in pairs])


@pytest.mark.parametrize("way", ["maml", "weighting"])
def test_tasks(way: str) -> None:
    case, pairs = UnrolledCase(way, "adam", 2, tasks=2), ALL if way == "maml" else PAIRS
    assert_exact(case, [case.found(BOTH[kind], REMAT[again]) for kind, again in pairs])


def test_autocast() -> None:
    """In bf16 the ways round differently; all are far from what a product without autocast gives."""
    case = UnrolledCase("maml", "sgd", 1, partial(decoder, is_double=False, num_layers=2), is_autocast=True)
    expected, exact = case.expected(), replace(case, is_autocast=False).expected()
    assert (exact - expected).norm() > 0.2 * expected.norm()
    found = {(kind, again): case.found(BOTH[kind], REMAT[again]) for kind in BOTH for again in REMAT}
    assert (found["reverse", "plain"] - expected).norm() < 1e-6 * expected.norm()
    assert torch.equal(found["forward", "plain"], found["forward", "remat"])
    assert all((each - expected).norm() < 0.02 * expected.norm() for each in found.values())


@pytest.mark.parametrize(
    ("way", "optimizer", "kind"),
    [("weighting", "momentum", "reverse"), ("maml", "sgd", "forward"), ("lr", "adam", "forward")],
)
def test_steps_of_a_schedule(way: str, optimizer: str, kind: str) -> None:
    """The upper problem's step, of rate 1, is along the gradient of the recorded steps."""
    case = UnrolledCase(way, optimizer, is_streamed=True)
    made = case.program(BOTH[kind], ["blocks.*"])
    before = parameters_of(made.problems["upper"])
    assert_exact(case, [before - parameters_of(ticked(made, 3).problems["upper"])])


@pytest.mark.parametrize(("kind", "remat"), PAIRS)
def test_from_a_constant_start_where_the_horizon_is_shorter(kind: str, remat: str) -> None:
    case = UnrolledCase("weighting", "momentum", 4)
    # Without the first two steps: these lead to another start, and to a state that is constant too.
    found = case.found(replace(BOTH[kind], horizon=2), REMAT[remat])
    expected = case.expected(horizon=2)
    assert (expected - case.expected()).norm() > LEAST_SHARE * expected.norm()
    assert (found - expected).norm() < TOLERANCE * expected.norm()


@pytest.mark.parametrize(("way", "kind"), [("maml", "forward"), ("weighting", "reverse")])
def test_resumed_in_mid_unroll(way: str, kind: str) -> None:
    """The first of two steps is taken by another process; its dropout is drawn again in this one."""
    case = UnrolledCase(way, "adam", 2, dropped, accumulate=2, clip=0.05, is_streamed=True)
    whole, first, second = (case.program(BOTH[kind], REMAT["remat"]) for _ in range(3))
    runs = [Schedule(each) for each in (whole, first, second)]
    for made in (whole, first):
        made.random.manual_seed(7)
    second.random.manual_seed(8)
    before = parameters_of(whole.problems["upper"])
    for run in (runs[0], runs[0], runs[1]):
        run.tick()
    second.load_state_dict(first.state_dict())
    runs[2].load_state_dict(runs[1].state_dict())
    second.random.load_state_dict(first.random.state_dict())
    runs[2].tick()
    found = [before - parameters_of(each.problems["upper"]) for each in (whole, second)]
    assert torch.equal(*found)
    assert_exact(case, found[:1])
