"""Unrolled hypergradients, with blocks that are evaluated again and by either product, against one graph of all steps.

The reference (`plain_unroll.py`) shares nothing with mlotool. What is compared is what is left when the part of first
order is taken away: that part is most of many hypergradients, and hides errors in the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from mlotool import Graph, Problem, Program, Schedule
from mlotool.core.errors import ConfigError
from mlotool.hypergradient import Exact, Implicit, Unrolled
from tests.hypergradient.two_levels import ticked
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
from tests.program.small import numbers
from tests.programs import Point

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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_table(way: str, optimizer: str) -> None:
    case, pairs = UnrolledCase(way, optimizer), ALL if (way, optimizer) == ("weighting", "adam") else PAIRS
    assert_exact(case, [case.found(BOTH[kind], REMAT[again]) for kind, again in pairs])


@pytest.mark.parametrize("way", WAYS)
def test_one_step(way: str) -> None:
    case = UnrolledCase(way, "sgd", 1)
    expected = case.expected()
    # The gradient at the start does not depend on the rate.
    assert bool((expected - case.expected(is_second_order=False)).norm() > LEAST_SHARE * expected.norm()) is (
        way != "lr"
    )
    for kind, again in PAIRS:
        assert (case.found(BOTH[kind], REMAT[again]) - expected).norm() < TOLERANCE * expected.norm()


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


KEPT = {"kept": Unrolled(remat=False)}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str) -> None:
    """All random numbers are those of the reference, from one seed."""
    case, pairs = replace(SETTINGS[name], num_steps=2), PAIRS
    if name in ("batch norm and dropout", "dropout, weighting", "clipping, rate", "a frozen block, start"):
        pairs = [*ALL, ("kept", "plain"), ("kept", "remat")]
    assert_exact(case, [case.found((BOTH | KEPT)[kind], REMAT[again]) for kind, again in pairs])


@pytest.mark.parametrize("way", ["maml", "weighting"])
def test_tasks(way: str) -> None:
    case, pairs = UnrolledCase(way, "adam", 2, tasks=2), ALL if way == "maml" else PAIRS
    assert_exact(case, [case.found(BOTH[kind], REMAT[again]) for kind, again in pairs])


def test_autocast() -> None:
    """In bf16 the ways round differently; all are far from what a product without autocast gives."""
    case = UnrolledCase("maml", "sgd", 1, partial(decoder, is_double=False), is_autocast=True)
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


INPUTS = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
RATE = 0.2


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


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 1), nn.Tanh(), nn.Linear(1, 3)) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def low(model: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    return 2 * (model(INPUTS) - v).square().mean() + 0.1 * (model(INPUTS + v) ** 4).mean()


def middle(model: Callable[[Tensor], Tensor], v: Tensor, u: Tensor) -> Tensor:
    return 2 * (model(INPUTS) * v).square().mean() + 0.2 * (u.exp() * v**2).sum() + (v**4).sum() / 4


def top(v: Tensor) -> Tensor:
    return (v - 0.3).square().sum() + v.prod()


def three_levels(lower: Any, between: Any, remat: Any) -> Program:
    """Return a network below a point that it shapes, below a point that shapes that one."""
    optimizer = partial(torch.optim.SGD, lr=RATE)
    steps = {"unroll_steps": 2, "reset_to": "initial"}
    problems = [
        Problem(
            "w",
            Blocks(),
            lambda batch, *, w, v: low(w, v()),
            roles={"w": "w", "v": "v"},
            optimizer=optimizer,
            hypergradient=lower,
            remat=remat,
            **(steps if isinstance(lower, Unrolled) else {}),
        ),
        Problem(
            "v",
            Point(numbers(0.3, -0.2, 0.5)),
            lambda batch, *, v, w, u: middle(w, v(), u()),
            roles={"v": "v", "w": "w", "u": "u"},
            optimizer=optimizer,
            hypergradient=between,
            **(steps if isinstance(between, Unrolled) else {}),
        ),
        Problem("u", Point(numbers(0.2, -0.1, 0.4)), lambda batch, *, v: top(v()), roles={"v": "v"}),
    ]
    return Program(problems, Graph({"v": ["w"], "u": ["v"]}, {"w": ["v"], "v": ["u"]}))


def one_graph(is_unrolled: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient of the top by one graph through all levels, and what it is with the network held."""
    network, found = Blocks(), []
    names = [name for name, _ in network.named_parameters()]
    for is_moving in (True, False):
        u, v = numbers(0.2, -0.1, 0.4).requires_grad_(), numbers(0.3, -0.2, 0.5).requires_grad_()

        def model(theta: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda x: functional_call(network, dict(zip(names, theta, strict=True)), (x,))

        def slope(v: Tensor, u: Tensor = u, is_moving: bool = is_moving) -> Tensor:
            theta = [each.detach().requires_grad_() for each in network.parameters()]
            for _ in range(2):
                slopes = torch.autograd.grad(low(model(theta), v), theta, create_graph=True)
                theta = [x - RATE * g for x, g in zip(theta, slopes, strict=True)]
            if not is_moving:
                theta = [each.detach() for each in theta]
            return torch.autograd.grad(middle(model(theta), v, u), v, create_graph=True)[0]

        if is_unrolled:
            at = v
            for _ in range(2):
                at = at - RATE * slope(at)
            found.append(torch.autograd.grad(top(at), u)[0])
        else:
            here = slope(v)
            hessian = torch.stack([torch.autograd.grad(each, v, retain_graph=True)[0] for each in here])
            q = torch.linalg.solve(hessian.T, torch.autograd.grad(top(v), v)[0])
            found.append(-torch.autograd.grad(here, u, q)[0])
    return found[0], found[1]


@pytest.mark.parametrize("is_unrolled", [True, False])
@pytest.mark.parametrize(("kind", "remat"), PAIRS)
def test_a_network_that_is_unrolled_below_two_levels(is_unrolled: bool, kind: str, remat: str) -> None:
    expected, held = one_graph(is_unrolled)
    assert (expected - held).norm() > 0.01 * expected.norm()
    between, forward = (
        (Unrolled(), BOTH["forward"]) if is_unrolled else (Implicit(Exact()), Implicit(Exact(), "forward"))
    )
    found = three_levels(BOTH[kind], between, REMAT[remat]).gradient("u", None)["x"]
    assert (found - expected).norm() < TOLERANCE * expected.norm()
    with pytest.raises(ConfigError, match="Unrolled does not tell how the solution of 'w' moves"):
        three_levels(BOTH[kind], forward, REMAT[remat])
