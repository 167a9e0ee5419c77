"""Hypergradients that are zero because nothing depends on what they are the gradient of."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import Exact, FirstOrder, Graph, Implicit, Problem, Program, Schedule, Stream, Unrolled


class Point(nn.Module):
    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((2,), value))

    def forward(self) -> Tensor:
        return self.x


def program(lower: Any, upper: Any, algorithm: Any = None) -> Program:
    modules = [Point(0.5), Point(1.0)]
    rates = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    low = Problem("w", modules[0], lower, roles={"w": "w", "lam": "lam"}, optimizer=rates[0])
    low.hypergradient = algorithm or Implicit(Exact())
    up = Problem("lam", modules[1], upper, roles={"w": "w", "lam": "lam"}, optimizer=rates[1])
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


@pytest.mark.parametrize("ignoring", [square, lambda batch, *, w, lam: ((w() - lam().detach()) ** 2).sum()])
@pytest.mark.parametrize("upper", [square, lambda batch, *, w, lam: (w() ** 2).sum() + (lam() ** 2).sum()])
def test_a_lower_loss_that_ignores_what_shapes_it(ignoring: Any, upper: Any) -> None:
    """Also where the upper loss has a part of its own, so that the gradient is not zero."""
    [text] = run(program(ignoring, upper))
    assert "'lam' shapes 'w', but at 3 steps of 'lam' the loss of 'w' did not depend on the parameters of 'lam'" in text


def test_an_upper_loss_that_ignores_the_solution() -> None:
    [text] = run(program(sound, lambda batch, *, w, lam: 0 * lam().sum() + (w().detach() ** 2).sum()))
    assert "since its loss does not depend on the parameters of 'w'" in text


@pytest.mark.parametrize(
    "lower",
    [
        lambda batch, *, w, lam: (w() ** 2).sum() + 0 * (w() * lam()).sum(),
        lambda batch, *, w, lam: (w() ** 2).sum() + (lam() ** 2).sum(),
    ],
    ids=["a factor that is zero", "terms of their own"],
)
def test_losses_that_depend_on_all_but_move_nothing(lower: Any) -> None:
    [text] = run(program(lower, square))
    assert "exactly 0 at 3 steps, though autograd finds that the losses depend on what they read" in text


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_sound_programs_are_silent(start: float) -> None:
    made = program(sound, square)
    with torch.no_grad():
        made.problems["w"].module.x.fill_(start)  # type: ignore[union-attr, operator]
    assert run(made) == []
    first_order = program(square, lambda batch, *, w, lam: (lam() ** 2).sum() + (w() ** 2).sum(), FirstOrder())
    assert run(first_order) == []


def test_a_start_at_which_nothing_moves_but_that_is_left_is_silent() -> None:
    """The first gradient is 0 in each of the batches of a step: w begins at zero, and lam scales it."""
    made = program(lambda batch, *, w, lam: ((w() * lam() - batch) ** 2).sum() + (w() ** 2).sum(), square)
    with torch.no_grad():
        made.problems["w"].module.x.fill_(0.0)  # type: ignore[union-attr, operator]
    for problem in made.problems.values():
        problem.settings = replace(problem.settings, accumulate_batches=4)
        problem.stream = Stream([torch.ones(2)] * 8, 1)
    assert run(made) == []


def test_of_several_above_one_the_unused_is_named() -> None:
    modules = {name: Point(0.5) for name in ("w", "used", "ignored")}

    def make(name: str, loss: Any, **roles: str) -> Problem:
        optimizer = torch.optim.SGD(modules[name].parameters(), lr=0.1)
        return Problem(name, modules[name], loss, roles=roles, optimizer=optimizer)

    low = make(
        "w", lambda batch, *, w, used, ignored: ((w() - used()) ** 2).sum(), w="w", used="used", ignored="ignored"
    )
    low.hypergradient = Implicit(Exact())
    above = [make(name, lambda batch, *, w: (w() ** 2).sum(), w="w") for name in ("used", "ignored")]
    graph = Graph({"used": ["w"], "ignored": ["w"]}, {"w": ["used", "ignored"]})
    [text] = run(Program([low, *above], graph))
    assert "'ignored' shapes 'w', but at 3 steps of 'ignored'" in text


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_problem_two_levels_below_need_not_be_read_by_the_loss(is_dead: bool) -> None:
    modules = {name: Point(0.5) for name in ("low", "mid", "top")}

    def make(name: str, loss: Any, **roles: str) -> Problem:
        optimizer = torch.optim.SGD(modules[name].parameters(), lr=0.1)
        return Problem(name, modules[name], loss, roles=roles, optimizer=optimizer, hypergradient=Implicit(Exact()))

    factor = 0.0 if is_dead else 1.0
    problems = [
        make("low", lambda batch, *, low, mid: ((low() - mid()) ** 2).sum(), low="low", mid="mid"),
        make(
            "mid",
            lambda batch, *, low, mid, top: (low() ** 2).sum() + ((mid() - factor * top()) ** 2).sum(),
            low="low", mid="mid", top="top",
        ),
        make("top", lambda batch, *, mid: (mid() ** 2).sum(), mid="mid"),
    ]  # fmt: skip
    problems[-1].hypergradient = None
    graph = Graph({"mid": ["low"], "top": ["mid"]}, {"low": ["mid"], "mid": ["top"]})
    found = run(Program(problems, graph))
    assert len(found) == is_dead
    assert all("exactly 0 at 3 steps, though autograd finds" in text for text in found)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("warmup", [0, 4])
def test_a_dependence_through_batch_norm_alone_and_long_unrolls_are_silent(steps: int, warmup: int) -> None:
    norm = nn.BatchNorm1d(2).double()
    net = nn.Linear(2, 2).double()
    data = torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lower = Problem(
        "w", net, lambda batch, *, w, lam: (w(lam(data)) ** 2).mean() + (w(data) - 1).square().mean(),
        roles={"w": "w", "lam": "lam"}, optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        hypergradient=Unrolled(), unroll_steps=steps, warmup_steps=warmup,
    )  # fmt: skip
    upper = Problem(
        "lam", norm, lambda batch, *, w: (w(data) ** 2).mean(), roles={"w": "w"},
        optimizer=torch.optim.SGD(norm.parameters(), lr=0.1),
    )  # fmt: skip
    assert run(Program([lower, upper], Graph({"lam": ["w"]}, {"w": ["lam"]})), 5 * steps + warmup) == []


def test_a_resumed_program_looks_again_and_says_the_same() -> None:
    made = program(square, square)
    run(made, 2)
    again = program(square, square)
    again.load_state_dict(made.state_dict())
    [text] = run(again, 4)
    assert "the loss of 'w' did not depend on the parameters of 'lam'" in text


def test_looking_moves_no_random_number() -> None:
    def noisy(batch: Any, *, w: Any, lam: Any) -> Tensor:
        return ((w() - lam() + torch.randn(2)) ** 2).sum()

    ends = []
    for looks in (True, False):
        torch.manual_seed(0)
        made = program(noisy, square)
        if not looks:
            made._unused.waiting.clear()
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
