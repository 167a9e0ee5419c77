"""Hypergradients that are zero because nothing depends on what they are the gradient of."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool import Exact, FirstOrder, Graph, Identity, Implicit, Problem, Program, Stream, Unrolled
from tests.program.small import run_ticks, sgd
from tests.programs import Point


def problem(name: str, loss: Any, roles: str, start: float = 0.5, algorithm: Any = None) -> Problem:
    point, played = Point(torch.full((2,), start)), {role: role for role in roles.split()}
    return Problem(name, point, loss, roles=played, optimizer=sgd, hypergradient=algorithm or Implicit(Exact()))


def program(lower: Any, upper: Any, algorithm: Any = None, start: float = 0.5, trace: str | None = None) -> Program:
    problems = [problem("w", lower, "w lam", start, algorithm), problem("lam", upper, "w lam", 1.0)]
    return Program(problems, Graph({"lam": ["w"]}, {"w": ["lam"]}), trace=trace)


def run(made: Program, num_ticks: int = 6) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ticks(made, num_ticks)
    return [str(each.message) for each in caught]


def sound(batch: Any, *, w: Any, lam: Any) -> Tensor:
    return ((w() - lam()) ** 2).sum()


def square(batch: Any, *, w: Any, lam: Any) -> Tensor:
    return (w() ** 2).sum()


def both(batch: Any, *, w: Any, lam: Any) -> Tensor:
    return (w() ** 2).sum() + (lam() ** 2).sum()


IGNORED = "'lam' shapes 'w', but at 3 steps of 'lam' the loss of 'w' did not depend on the parameters of 'lam'"
DEAD = "problems.{0}.loss: the hypergradient of '{0}' was exactly 0 at 3 steps"
UNUSED: dict[str, tuple[Any, Any, str]] = {
    "a lower loss that ignores what shapes it": (square, square, IGNORED),
    # So that the gradient is not zero.
    "where the upper loss has a part of its own": (square, both, IGNORED),
    "an upper loss that ignores the solution": (
        sound,
        lambda batch, *, w, lam: 0 * lam().sum() + (w().detach() ** 2).sum(),
        "Evaluate the role of 'w' in the loss, without detach",
    ),
    "a factor that is zero": (
        lambda batch, *, w, lam: square(batch, w=w, lam=lam) + 0 * (w() * lam()).sum(),
        square,
        DEAD.format("lam"),
    ),
    "terms of their own": (both, square, DEAD.format("lam")),
}


@pytest.mark.parametrize("name", UNUSED)
def test_what_cannot_be_meant_is_told_once(name: str) -> None:
    lower, upper, text = UNUSED[name]
    [found] = run(program(lower, upper))
    assert text in found


@pytest.mark.parametrize("trace", [None, "eager"])
def test_each_run_is_told_also_one_that_goes_on(trace: str | None) -> None:
    made, again = (program(square, square, Implicit(Identity()), trace=trace) for _ in range(2))
    assert run(made, 2) == []
    again.load_state_dict(made.state_dict())
    for each in (made, again):
        [text] = run(each, 4)
        assert IGNORED in text


def test_of_several_above_one_the_unused_is_named() -> None:
    low = problem("w", lambda batch, *, w, used, ignored: ((w() - used()) ** 2).sum(), "w used ignored")
    above = [problem(name, lambda batch, *, w: (w() ** 2).sum(), "w") for name in ("used", "ignored")]
    graph = Graph({"used": ["w"], "ignored": ["w"]}, {"w": ["used", "ignored"]})
    [text] = run(Program([low, *above], graph))
    assert "'ignored' shapes 'w', but at 3 steps of 'ignored'" in text


def three_levels(factor: float) -> Program:
    """The loss of the top reads nothing of the lowest, which its gradient passes through."""

    def mid(batch: Any, *, low: Any, mid: Any, top: Any) -> Tensor:
        return (low() ** 2).sum() + ((mid() - factor * top()) ** 2).sum()

    problems = [
        problem("low", lambda batch, *, low, mid: ((low() - mid()) ** 2).sum(), "low mid"),
        problem("mid", mid, "low mid top"),
        problem("top", lambda batch, *, mid: (mid() ** 2).sum(), "mid"),
    ]
    return Program(problems, Graph({"mid": ["low"], "top": ["mid"]}, {"low": ["mid"], "mid": ["top"]}))


def test_a_factor_of_zero_two_levels_above_is_told() -> None:
    [text] = run(three_levels(0.0))
    assert DEAD.format("top") in text


def through_statistics() -> Program:
    """A batch norm shapes the steps, of which two are unrolled."""
    net, norm, data = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.randn(8, 2)

    def lower(batch: Any, *, w: Any, lam: Any) -> Tensor:
        return (w(lam(data)) ** 2).mean() + (w(data) - 1).square().mean()

    roles, settings = {"w": "w", "lam": "lam"}, {"hypergradient": Unrolled(), "unroll_steps": 2, "warmup_steps": 1}
    low = Problem("w", net, lower, roles=roles, optimizer=sgd, **settings)
    up = Problem("lam", norm, lambda batch, *, w: (w(data) ** 2).mean(), roles={"w": "w"}, optimizer=sgd)
    return Program([low, up], Graph({"lam": ["w"]}, {"w": ["lam"]}))


def at_a_saddle() -> Program:
    """The first gradient is 0 in each of the batches of a step: w begins at zero, and lam scales it."""
    made = program(lambda batch, *, w, lam: ((w() * lam() - batch) ** 2).sum() + (w() ** 2).sum(), square, start=0.0)
    for problem in made.problems.values():
        problem.settings = replace(problem.settings, accumulate_batches=4)
        problem.stream = Stream([torch.ones(2)] * 8, 1)
    return made


SOUND: dict[str, Callable[[], Program]] = {
    "from zero": lambda: program(sound, square, start=0.0),
    "first order": lambda: program(square, both, FirstOrder()),
    "a start that is left": at_a_saddle,
    "two levels above": lambda: three_levels(1.0),
    "a batch norm and several steps": through_statistics,
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_programs_are_silent(name: str) -> None:
    assert run(SOUND[name]()) == []


def test_looking_moves_no_random_number() -> None:
    def noisy(batch: Any, *, w: Any, lam: Any) -> Tensor:
        return ((w() - lam() + torch.randn(2)) ** 2).sum()

    ends = []
    for looks in (True, False):
        torch.manual_seed(0)
        made = program(noisy, square)
        if not looks:
            made.internals._looked_at.clear()
        run(made)
        ends.append((made.problems["lam"].theta["x"].detach().clone(), made.random.state_dict()["cpu"]))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize(
    "algorithm", [Implicit(Exact()), Unrolled(), Unrolled(remat=False)], ids=["implicit", "again", "kept"]
)
def test_a_loss_may_take_gradients_itself(algorithm: Any) -> None:
    """A penalty on the gradient is rehearsed and looked at like any loss: `1.4 (w - lam)^2` here."""

    def penalized(batch: Any, *, w: Any, lam: Any) -> Tensor:
        loss = sound(batch, w=w, lam=lam)
        (slope,) = torch.autograd.grad(loss, list(w.parameters()), create_graph=True)
        return loss + 0.1 * slope.square().sum()

    def plain(batch: Any, *, w: Any, lam: Any) -> Tensor:
        return 1.4 * sound(batch, w=w, lam=lam)

    found, expected = program(penalized, square, algorithm), program(plain, square, algorithm)
    found.internals.rehearse("w", None)
    assert run(found) == run(expected) == []
    assert found.gradient("lam")["x"].tolist() == pytest.approx(expected.gradient("lam")["x"].tolist(), rel=1e-5)
    assert found.problems["lam"].module.x.tolist() == pytest.approx(expected.problems["lam"].module.x.tolist())
