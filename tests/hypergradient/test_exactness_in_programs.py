"""Programs in which steps by forward mode, with blocks that are evaluated again, meet what else there is."""

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
from tests.hypergradient.test_exactness import TOLERANCE, assert_exact, dropped
from tests.hypergradient.unrolled_cases import BOTH, REMAT, UnrolledCase, mixed, parameters_of
from tests.program.small import numbers
from tests.programs import Point

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")

INPUTS = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
RATE = 0.2


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("way", ["maml", "weighting"])
def test_resumed_in_mid_unroll(way: str, kind: str) -> None:
    """The first two of three steps are taken by another process; their dropout is drawn again in this one."""
    case = UnrolledCase(way, "adam", network=dropped, accumulate=2, clip=0.05, is_streamed=True)
    whole, first, second = (case.program(BOTH[kind], REMAT["remat"]) for _ in range(3))
    runs = [Schedule(each) for each in (whole, first, second)]
    for made in (whole, first):
        made.random.manual_seed(7)
    second.random.manual_seed(8)
    before = parameters_of(whole.problems["upper"])
    for _ in range(3):
        runs[0].tick()
    for _ in range(2):
        runs[1].tick()
    second.load_state_dict(first.state_dict())
    runs[2].load_state_dict(runs[1].state_dict())
    second.random.load_state_dict(first.random.state_dict())
    runs[2].tick()
    found = [before - parameters_of(each.problems["upper"]) for each in (whole, second)]
    assert torch.equal(*found)
    assert_exact(case, found[:1])


@pytest.mark.parametrize("kind", BOTH)
def test_after_a_warm_up_from_the_start_of_each_unroll(kind: str) -> None:
    """Steps of the warm-up lead to where the unroll begins, and `reset_to: initial` back to where all began."""
    warm = UnrolledCase("weighting", "momentum", 5, is_streamed=True, settings={"warmup_steps": 2, "unroll_steps": 3})
    made = warm.program(BOTH[kind], REMAT["remat"])
    schedule, before = Schedule(made), parameters_of(made.problems["upper"])
    for _ in range(5):
        schedule.tick()
    # The reference begins with the warm-up, of which it differentiates nothing.
    expected = warm.expected(horizon=3)
    assert (before - parameters_of(made.problems["upper"]) - expected).norm() < TOLERANCE * expected.norm()
    reset = UnrolledCase("weighting", "momentum", 6, is_streamed=True)
    made = replace(reset, settings={"reset_to": "initial", "unroll_steps": 3}).program(BOTH[kind], REMAT["remat"])
    schedule = Schedule(made)
    for first in (0, 3):
        for _ in range(3):
            schedule.tick()
        assert_exact(replace(reset, num_steps=3, offset=first), [before - parameters_of(made.problems["upper"])])
        with torch.no_grad():
            made.problems["upper"].module.x.copy_(before)


@pytest.mark.parametrize("mode", [None, "eval"])
def test_running_statistics_are_those_without_remat(mode: str | None) -> None:
    case = UnrolledCase("weighting", "momentum", network=partial(mixed, dropout=0.3), mode=mode, is_streamed=True)

    def trained(algorithm: Any, remat: Any) -> list[Tensor]:
        made = case.program(algorithm, remat)
        made.random.manual_seed(3)
        schedule = Schedule(made)
        for _ in range(7):
            schedule.tick()
        return [each.detach().clone() for problem in made.problems.values() for each in _state(problem.module)]

    expected = trained(Unrolled(remat=False), None)
    for algorithm in BOTH.values():
        for remat in REMAT.values():
            for mine, its in zip(trained(algorithm, remat), expected, strict=True):
                assert torch.allclose(mine, its, rtol=1e-10, atol=1e-12)


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


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
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("remat", [None, ["blocks.*"]])
def test_a_network_that_is_unrolled_below_two_levels(is_unrolled: bool, kind: str, remat: Any) -> None:
    expected, held = one_graph(is_unrolled)
    assert (expected - held).norm() > 0.01 * expected.norm()
    between, forward = (
        (Unrolled(), BOTH["forward"]) if is_unrolled else (Implicit(Exact()), Implicit(Exact(), "forward"))
    )
    found = three_levels(BOTH[kind], between, remat).gradient("u", None)["x"]
    assert (found - expected).norm() < TOLERANCE * expected.norm()
    with pytest.raises(ConfigError, match="Unrolled does not tell how the solution of 'w' moves"):
        three_levels(BOTH[kind], forward, remat)


@pytest.mark.slow
@pytest.mark.parametrize("above", ["reverse", "forward"])
@pytest.mark.parametrize("remat", [None, ["blocks.*"]])
def test_an_implicit_network_below_two_levels(above: str, remat: Any) -> None:
    """Against the same by double backward without remat, which other tests hold to closed forms."""
    solver = Exact(damping=0.0)
    expected = three_levels(Implicit(solver), Implicit(Exact()), None).gradient("u")["x"]
    found = three_levels(Implicit(solver, "forward"), Implicit(Exact(), above), remat).gradient("u")["x"]
    assert (found - expected).norm() < TOLERANCE * expected.norm()
