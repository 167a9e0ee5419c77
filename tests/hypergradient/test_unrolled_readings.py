"""Unrolled steps that read solutions: each is differentiated through the solution as it was then.

The references solve or unroll every level in plain torch and take fourth-order differences of the whole.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool import remat
from mlotool.core.errors import ConfigError
from mlotool.hypergradient import ConjugateGradient, Exact, FirstOrder, Implicit, Unrolled
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule, Stream
from tests.hypergradient.test_unrolled import by_differences, flat
from tests.hypergradient.two_levels import ticked
from tests.program.small import numbers, samples
from tests.programs import Point, newton

STEPS, RATE, SOLVE = 3, 0.2, 20
LOW_START, MID_START, TOP = numbers(0.4, -0.1), numbers(0.3, -0.2), numbers(0.2, -0.3)
MID_BATCHES, LOW_BATCHES = samples(6, 1)[:, :2], samples(6, 2)[:, :2]
MID = partial(torch.optim.SGD, lr=RATE, momentum=0.5)
LOW = {"solved": partial(torch.optim.SGD, lr=0.7), "unrolled": partial(torch.optim.SGD, lr=0.2, momentum=0.9)}


def low_loss(w: Tensor, v: Tensor, u: Tensor, batch: Tensor) -> Tensor:
    shift = torch.sin(v) + 0.3 * u + 0.2 * batch
    return 0.5 * ((1 + v**2) * (w - shift) ** 2).sum() + 0.1 * (w**4).sum()


def mid_loss(v: Tensor, w: Tensor, u: Tensor, batch: Tensor) -> Tensor:
    return 0.5 * ((v - batch) ** 2 * torch.exp(u)).sum() + 0.5 * ((w * v - 1) ** 2).sum() + (w**2).sum()


def goal(v: Tensor) -> Tensor:
    return ((v - 1) ** 2).sum() + (v**3).sum()


def low(batch: Tensor, *, w: Any, v: Any = None, u: Any, through: Any = None) -> Tensor:
    given = w(), torch.zeros(2, dtype=torch.float64) if v is None else v(), u(), batch.mean(0)
    return low_loss(*given) if through is None else through(low_loss, *given)


def mid(batch: Tensor, *, v: Any, w: Any, u: Any) -> Tensor:
    return mid_loss(v(), w(), u(), batch.mean(0))


def program(
    hypergradient: AbstractHypergradient,
    of_mid: AbstractHypergradient | None = None,
    *,
    is_shaped: bool = True,
    accumulate: int = 1,
    **settings: Any,
) -> Program:
    """Return `v`, which reads `w` and shapes it, or does not; `u` shapes both and reads `v`."""
    is_unrolled = hypergradient.sees_steps
    count = 2 if is_unrolled else SOLVE
    roles = {"w": "w", "v": "v", "u": "u"}
    problems = [
        Problem(
            "w",
            Point(LOW_START),
            settings.pop("loss", low),
            roles=roles if is_shaped else {"w": "w", "u": "u"},
            # A solved one stays at one batch until it is solved.
            stream=Stream(LOW_BATCHES, 2, shuffle=False, repeat=1 if is_unrolled else SOLVE),
            optimizer=LOW["unrolled" if is_unrolled else "solved"],
            unroll_steps=count,
            reset_to="initial" if is_unrolled else None,
            hypergradient=hypergradient,
        ),
        Problem(
            "v",
            Point(MID_START),
            mid,
            roles=roles,
            stream=Stream(MID_BATCHES, 1, shuffle=False),
            optimizer=MID,
            unroll_steps=STEPS,
            accumulate_batches=accumulate,
            hypergradient=of_mid or Unrolled(),
            **settings,
        ),
        Problem(
            "u", Point(TOP), lambda _, *, v: goal(v()), roles={"v": "v"}, optimizer=partial(torch.optim.SGD, lr=0.0)
        ),
    ]
    shaping = {"u": ["v", "w"], "v": ["w"]} if is_shaped else {"u": ["v", "w"]}
    return Program(problems, Graph(shaping, {"w": ["v"], "v": ["u"]}))


def trained(built: Program) -> Program:
    """Return it after the steps of `v`, which the top problem, at a learning rate of zero, leaves as they are."""
    return ticked(built, Schedule(built).cycle_length())


def plain_solve(v: Tensor, u: Tensor, number: int) -> Tensor:
    """Return the solution of `w` on its batch of this number."""
    batch = LOW_BATCHES[2 * (number % 3) :][:2].mean(0)

    def gradient(w: Tensor) -> Tensor:
        return torch.autograd.grad(low_loss(w, v, u, batch), w, create_graph=True)[0]

    return newton(gradient, LOW_START)


def plain_unroll(v: Tensor, u: Tensor, number: int) -> Tensor:
    """Return `w` after two steps from its start, on its two batches of this number."""
    w, momentum = LOW_START.clone().requires_grad_(), torch.zeros(2, dtype=torch.float64)
    for step in (1, 2):
        batch = LOW_BATCHES[2 * ((2 * number + step - 1) % 3) :][:2].mean(0)
        slope = torch.autograd.grad(low_loss(w, v, u, batch), w, create_graph=True)[0]
        momentum = 0.9 * momentum + slope
        w = w - 0.2 * momentum
    return w


def plain(
    below: Callable[[Tensor, Tensor, int], Tensor],
    u: Tensor,
    *,
    is_shaped: bool = True,
    accumulate: int = 1,
    first: int = 0,
    number_of: Callable[[int], int] = lambda step: step,
) -> Tensor:
    """Return the top loss after the steps of `v` along its total gradient; those before `first` are at TOP."""
    v, momentum = MID_START, torch.zeros(2, dtype=torch.float64)
    for step in range(STEPS):
        at, v = u if step >= first else TOP, v.clone().requires_grad_()
        w = below(v if is_shaped else torch.zeros_like(v), at, number_of(step))
        batches = [MID_BATCHES[(accumulate * step + each) % 6] for each in range(accumulate)]
        loss = sum(mid_loss(v, w, at, batch) for batch in batches) / accumulate
        slope = torch.autograd.grad(loss, v)[0]
        momentum = slope if step == 0 else 0.5 * momentum + slope
        v = (v - RATE * momentum).detach()
    return goal(v)


BELOW: dict[str, tuple[Callable[[], AbstractHypergradient], Callable[[Tensor, Tensor, int], Tensor], float]] = {
    "exact": (lambda: Implicit(Exact()), plain_solve, 1e-8),
    "cg": (lambda: Implicit(ConjugateGradient(20, 1e-14)), plain_solve, 1e-8),
    "unrolled": (Unrolled, plain_unroll, 1e-8),
    "unrolled_graphs": (lambda: Unrolled(remat=False), plain_unroll, 1e-8),
    "unrolled_forward": (lambda: Unrolled(product="forward"), plain_unroll, 1e-8),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("is_shaped", "accumulate", "is_again"),
    [
        *[(True, 2, True), (False, 1, False)],
        *[pytest.param(*each, marks=pytest.mark.slow) for each in ((True, 1, False), (False, 2, True))],
    ],
)
@pytest.mark.parametrize("name", BELOW)
def test_steps_of_a_schedule(name: str, is_shaped: bool, accumulate: int, is_again: bool) -> None:
    make, below, tolerance = BELOW[name]
    built = trained(program(make(), Unrolled(remat=is_again), is_shaped=is_shaped, accumulate=accumulate))
    assert len(built.problems["v"].trajectory) == STEPS
    loop = partial(plain, below, is_shaped=is_shaped, accumulate=accumulate)
    value = goal(built.problems["v"].theta["x"].detach())
    assert torch.allclose(value, loop(TOP), rtol=1e-10)
    expected = by_differences(loop, TOP)
    assert torch.allclose(flat(built.gradient("u")), expected, rtol=tolerance, atol=tolerance * float(expected.norm()))


@pytest.mark.parametrize("is_shaped", [True, False], ids=["shapes-and-reads", "reads"])
@pytest.mark.parametrize("settings", [{}, {"remat": False}, {"product": "forward"}], ids=str)
def test_simulated_steps_above_simulated_ones(is_shaped: bool, settings: dict[str, Any]) -> None:
    """The lower problem takes the same two batches from its start for each step, in blocks evaluated again or not."""
    loss = low if "remat" in settings else partial(low, through=remat)
    above = Unrolled(remat=settings.get("remat", True))
    built = program(Unrolled(**settings), above, is_shaped=is_shaped, accumulate=2, loss=loss)
    lower, middle = [LOW_BATCHES[:2], LOW_BATCHES[2:4]], [MID_BATCHES[[each % 6]] for each in range(2 * STEPS)]
    loop = partial(plain, plain_unroll, is_shaped=is_shaped, accumulate=2, number_of=lambda step: 0)
    found = flat(built.gradient("u", {"w": lower, "v": middle}))
    assert torch.allclose(found, by_differences(loop, TOP), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("algorithm", [Unrolled(), Unrolled(product="forward")], ids=["reverse", "forward"])
@pytest.mark.parametrize("loss", [low, partial(low, through=remat)], ids=["plain", "remat"])
def test_an_implicit_solution_above_simulated_steps(algorithm: Unrolled, loss: Callable[..., Tensor]) -> None:
    def slope(v: Tensor, u: Tensor) -> Tensor:
        return torch.autograd.grad(mid_loss(v, plain_unroll(v, u, 0), u, MID_BATCHES[0]), v, create_graph=True)[0]

    hessian, cross = torch.autograd.functional.jacobian(slope, (MID_START, TOP))
    expected = -cross.T @ torch.linalg.solve(hessian.T, torch.autograd.functional.jacobian(goal, MID_START))
    batches = {"w": [LOW_BATCHES[:2], LOW_BATCHES[2:4]], "v": MID_BATCHES[:1]}
    found = flat(program(algorithm, Implicit(Exact()), loss=loss).gradient("u", batches))
    assert torch.allclose(found, expected, rtol=1e-10)
    with pytest.raises(ConfigError, match="Unrolled does not compute the derivative of the solution of 'w'"):
        program(algorithm, Implicit(Exact(), "forward"))


def test_several_simulated_steps_above_a_solution_that_does_not_follow_are_refused() -> None:
    batches = [MID_BATCHES[:1]] * STEPS
    for make in (lambda: Implicit(Exact()), FirstOrder):
        with pytest.raises(ConfigError, match=r"several steps of 'v', whose loss reads 'w'; expected one step"):
            program(make()).gradient("u", {"v": batches})
        assert program(make()).gradient("u", {"v": batches[:1]})["x"].isfinite().all()
    with pytest.raises(ConfigError, match="or a list of batches for 'w' as well"):
        trained(program(Unrolled())).gradient("u", {"v": batches})


@pytest.mark.parametrize(("name", "is_shaped"), [("exact", True), ("unrolled", True), ("unrolled", False)])
def test_a_derivative_of_the_gradient(name: str, is_shaped: bool) -> None:
    """As a problem further above would need it: of `<gradient, r>`, against differences of the whole training."""
    make, direction = BELOW[name][0], numbers(0.7, -1.1)

    def gradient(u: Tensor) -> Tensor:
        built = program(make(), is_shaped=is_shaped)
        with torch.no_grad():
            built.problems["u"].theta["x"].copy_(u)
        return flat(trained(built).gradient("u")) @ direction

    built = trained(program(make(), is_shaped=is_shaped))
    top = built.problems["u"].theta["x"]
    (slope,) = torch.autograd.grad(goal(built.solution("v")["x"]), top, create_graph=True)
    (found,) = torch.autograd.grad(slope @ direction, top)
    expected = by_differences(gradient, TOP)
    assert torch.allclose(found, expected, rtol=1e-7, atol=1e-7 * float(expected.norm()))
