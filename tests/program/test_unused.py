"""Hypergradients that are zero because nothing depends on what they are the gradient of."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool import Exact, FirstOrder, Graph, Implicit, Problem, Program, Schedule, Stream, Unrolled
from tests.program.small import sgd
from tests.programs import Point


def point(value: float) -> Point:
    return Point(torch.full((2,), value))


def program(lower: Any, upper: Any, algorithm: Any = None, start: float = 0.5) -> Program:
    roles = {"w": "w", "lam": "lam"}
    hypergradient = algorithm or Implicit(Exact())
    low = Problem("w", point(start), lower, roles=roles, optimizer=sgd, hypergradient=hypergradient)
    up = Problem("lam", point(1.0), upper, roles=roles, optimizer=sgd)
    return Program([low, up], Graph({"lam": ["w"]}, {"w": ["lam"]}))


def run(made: Program, num_ticks: int = 6) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule = Schedule(made)
        for _ in range(num_ticks):
            schedule.tick()
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
            made._looked_at.clear()
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
    found.rehearse("w", None)
    assert run(found) == run(expected) == []
    assert found.gradient("lam")["x"].tolist() == pytest.approx(expected.gradient("lam")["x"].tolist(), rel=1e-5)
    assert found.problems["lam"].module.x.tolist() == pytest.approx(expected.problems["lam"].module.x.tolist())
