"""Steps that are computed again are the steps that were taken, to the bit, or a run stops."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from mlotool import Graph, Problem
from mlotool.core.errors import ConfigError, MlotoolError
from mlotool.core.replay import RandomState
from mlotool.hypergradient import AbstractStepStore, Binomial, Exact, Implicit, KeepAll, KeepEvery, Unrolled
from mlotool.hypergradient.unrolled import fit, measure
from mlotool.problem.interface import LowerProblem, LowerView, Unroll
from mlotool.problem.rank_mean import RankMean
from mlotool.problem.trajectory import StepRecord
from mlotool.program import Program, Schedule, Stream
from tests.hypergradient import test_unrolled_readings as readings
from tests.hypergradient.test_unrolled import BATCHES, OPTIMIZERS, Pair, lower_loss, program, upper_loss
from tests.hypergradient.two_levels import ticked, two_levels
from tests.live_storage import LiveStorage
from tests.program.small import assert_identical, assert_resumes, momentum, numbers, parameters, samples
from tests.programs import Point


class Momentum(nn.Module):
    """A network that subtracts a running mean of its inputs, which it keeps in a buffer that it assigns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("still", torch.ones(100))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return torch.tanh(self.layer(x - self.mean))


class Late(nn.Module):
    """A network that scales its inputs with a buffer which changes at every k-th evaluation."""

    def __init__(self, change: Callable[[Tensor], Tensor], period: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("number", torch.zeros((), dtype=torch.long))
        self.change, self.period = change, period

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        if int(self.number) % self.period == 0:
            self.scale = self.change(self.scale)
        return torch.tanh(self.layer(x * self.scale))


def in_inference_mode(scale: Tensor) -> Tensor:
    with torch.inference_mode():
        return scale * 0.5


MOVING: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(3, 5)), nn.BatchNorm1d(5), nn.Linear(5, 3)),
    "running mean": Momentum,
    "at the third": lambda: Late(lambda x: torch.full((3,), 0.1).to(x), 3),
    "every time, in place": lambda: Late(lambda x: x.mul_(0.8), 1),
    "with a graph": lambda: Late(lambda x: (x * torch.ones(3, requires_grad=True).to(x)) * 0.5, 2),
    "in inference mode": lambda: Late(in_inference_mode, 2),
}

AUTO = partial(Unrolled, remat="auto")


def stream() -> Stream:
    return Stream(samples(12, 1), 4, seed=1)


def after_ticks(built: Program, num_ticks: int = 10) -> dict[str, Tensor]:
    return parameters(ticked(built, num_ticks))


def decision(built: Program, name: str = "w") -> bool | None:
    state: bool | None = built.internals.algorithm_state(name)
    return state


def are_kept(built: Program, name: str = "w") -> set[bool]:
    """Return whether the recorded steps have a graph."""
    return {record.graph is not None for record in built.problems[name].trajectory}


@pytest.mark.parametrize(("name", "accumulate"), [("momentum", 1), ("adam", 2)])
@pytest.mark.parametrize("way", ["loss", "start", "lr"])
def test_all_ways_are_equal_to_the_bit(name: str, way: str, accumulate: int) -> None:
    def run(hypergradient: Unrolled) -> tuple[dict[str, Tensor], set[bool]]:
        settings = {"stream": stream(), "accumulate_batches": accumulate, "gradient_clip_norm": 0.5}
        built = program(way, OPTIMIZERS[name], hypergradient, **settings)
        return after_ticks(built), are_kept(built)

    (again, none), (kept, both) = run(Unrolled(remat=True)), run(Unrolled(remat=False))
    (fitting, all_of_them), (beyond, none_of_them) = run(AUTO()), run(AUTO(graph_budget=0))
    assert (none, both, all_of_them, none_of_them) == ({False}, {True}, {True}, {False})
    for found in (kept, fitting, beyond):
        assert_identical(found, again)


def with_activation(activation: nn.Module, hypergradient: Unrolled, **settings: Any) -> Program:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), activation, nn.Dropout(0.3), nn.Linear(5, 3)).double()
    return above(net, hypergradient, **settings)


def above(net: nn.Module, hypergradient: Unrolled, **settings: Any) -> Program:
    """Return a program in which a with_activation takes three steps for one of the point that weighs its loss."""
    lower = net, lambda batch, *, w, u: (w(batch).square() * torch.exp(u())).mean()
    upper = Point(numbers(0.1, 0.2, -0.4)), lambda batch, *, w: (w(batch) - 1).square().mean()
    of_upper = {"stream": Stream(samples(12, 2), 4, seed=2), "optimizer": partial(torch.optim.SGD, lr=0.1)}
    of_lower = {"stream": stream(), "optimizer": momentum, "unroll_steps": 3}
    made = two_levels(lower, upper, hypergradient, of_upper=of_upper, **of_lower)
    return Program(list(made.problems.values()), made.graph, **settings)


# torch has another backward of SiLU for gradients with a graph than for those without.
@pytest.mark.parametrize(("activation", "is_exact"), [(nn.Tanh, True), (nn.ReLU, True), (nn.SiLU, False)])
def test_a_graph_is_kept_where_it_changes_no_bit(
    activation: Callable[[], nn.Module], is_exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="mlotool")
    built, again = with_activation(activation(), AUTO()), with_activation(activation(), Unrolled(remat=True))
    assert_identical(after_ticks(built), after_ticks(again))
    assert decision(built) is is_exact
    assert are_kept(built) == {is_exact}
    expected = "keeps the graphs of its steps: 3 graphs take" if is_exact else "with a graph have other rounding errors"
    assert [expected in record.message for record in caplog.records] == [True]


def test_the_budget_is_what_the_steps_take_together(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mlotool")
    seen: list[int] = []

    class Watched(Unrolled):
        def pullback(self, view: LowerView, inputs: Any) -> Any:
            assert view.unroll is not None
            seen.append(3 * measure(view.unroll, inputs, view)[0])
            return super().pullback(view, inputs)

    after_ticks(with_activation(nn.Tanh(), Watched(remat="auto")))
    size = seen[0]
    within, beyond = (with_activation(nn.Tanh(), AUTO(graph_budget=budget)) for budget in (size, size - 1))
    assert_identical(after_ticks(within), after_ticks(beyond))
    assert (decision(within), decision(beyond)) == (True, False)
    assert "w.hypergradient computes its steps again in the backward pass: 3 graphs take" in caplog.records[-1].message


def view_of(loss: Callable[..., Tensor], theta: Tensor, num_steps: int = 1) -> tuple[Unroll, LowerView]:
    step = StepRecord((theta,), (), (), ((None, RandomState(())),), {})
    unroll = Unroll((step,) * num_steps, True, (), lambda theta, inputs, batch, lower: loss(theta, inputs), *[None] * 5)  # type: ignore[arg-type]
    return unroll, LowerView(LowerProblem("w"), (theta,), loss)


def test_all_ranks_decide_alike() -> None:
    def loss(theta: Any, inputs: Any) -> Tensor:
        return (theta[0] * inputs[0]).exp().sum()

    unroll, view = view_of(loss, torch.ones(2), num_steps=2)
    assert fit(unroll, [torch.ones(2)], view, 1000)
    # The other one of two ranks does not fit: the mean of the flags 0 and 1.
    of_two = RankMean(lambda flags: [(flag + 1) / 2 for flag in flags])
    assert not fit(unroll, [torch.ones(2)], replace(view, problem=replace(view.problem, rank_mean=of_two)), 1000)


def test_steps_that_read_solutions_keep_no_graph() -> None:
    built = readings.trained(readings.program(Implicit(Exact()), AUTO()))
    assert decision(built, "v") is None
    assert are_kept(built, "v") == {False}


def test_the_decision_is_taken_once_and_resumed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mlotool")
    first = ticked(with_activation(nn.Tanh(), AUTO()), 7)
    assert first.state_dict()["w"]["hypergradient"] == {"keeps_graphs": True}
    # With another budget, which has no part in it any more.
    second = with_activation(nn.Tanh(), AUTO(graph_budget=0))
    second.load_state_dict(first.state_dict())
    assert decision(ticked(second, 7)) is True
    assert len(caplog.records) == 1


WAYS = {
    "reverse": Unrolled(),
    "forward": Unrolled(product="forward"),
    "every": Unrolled(trajectory=KeepEvery(steps=2)),
    "every, forward": Unrolled(trajectory=KeepEvery(steps=2), product="forward"),
    "binomial": Unrolled(trajectory=Binomial(checkpoints=2)),
}


class Counting:
    """A loss that weighs its k-th evaluation with k."""

    def __init__(self) -> None:
        self.num_calls = 0

    def factor(self) -> float:
        self.num_calls += 1
        return 1 + 0.1 * self.num_calls

    def __call__(self, batch: Tensor, *, w: Any, u: Any) -> Tensor:
        return self.factor() * lower_loss(BATCHES[0], w=w, u=u)


class OfNumpy(Counting):
    def factor(self) -> float:
        return 1 + float(numpy.random.rand())


class OfGenerator(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def factor(self) -> float:
        return 1 + float(torch.rand((), generator=self.generator))


def with_loss(loss: Any, hypergradient: Unrolled) -> Program:
    slow = {"optimizer": partial(torch.optim.SGD, lr=0.01)}
    settings = {"optimizer": partial(torch.optim.SGD, lr=0.05), "unroll_steps": 4, "of_upper": slow}
    return two_levels((Pair(), loss), (Point(numbers(0.1, 0.2, -0.4)), upper_loss), hypergradient, **settings)


@pytest.mark.parametrize(
    ("loss", "way"), [*[(Counting, way) for way in WAYS], (OfNumpy, "forward"), (OfGenerator, "reverse")]
)
def test_a_loss_that_is_no_function_is_refused(loss: type[Counting], way: str) -> None:
    # The rehearsal before the first step puts numbers in Python back, but not a generator.
    with pytest.raises(MlotoolError, match=r"problems\.w\.loss: (found another gradient|.* for the same batch)"):
        ticked(with_loss(loss(), WAYS[way]), 4)


def test_a_converged_problem_goes_on() -> None:
    """Its gradients are rounding alone: none is like the other."""

    class Converging(Counting):
        """Falls to a size at which noise is all that there is."""

        def factor(self) -> float:
            self.num_calls += 1
            return 1.0 if self.num_calls <= 8 else 1e-16 * (1 + self.num_calls % 7)

    ticked(with_loss(Converging(), Unrolled(horizon=1)), 40)


def network(module: nn.Module, hypergradient: Unrolled, **settings: Any) -> Program:
    def fit(batch: Tensor, *, w: Any, u: Any) -> Tensor:
        return (w(batch) - torch.sin(batch)).square().mean() + 0.01 * (
            torch.exp(u()) * torch.cat([each.reshape(-1) for each in w.parameters()])[:3] ** 2
        ).sum()

    upper = Point(numbers(0.1, 0.2, -0.4)), lambda batch, *, w: (w(batch) - 1).square().mean()
    of_upper = {"stream": Stream(samples(12, 2), 4, seed=2), "optimizer": partial(torch.optim.SGD, lr=1.0)}
    settings |= {"stream": Stream(samples(20, 1), 5, seed=1), "unroll_steps": 4}
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return two_levels((module, fit), upper, hypergradient, of_upper=of_upper, optimizer=optimizer, **settings)


def after(program: Program, num_ticks: int = 8) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in ticked(program, num_ticks).problems["u"].current()])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "way", "num_batches"),
    [
        *[(kind, way, 1) for kind in MOVING for way in ("reverse", "every, forward", "binomial")],
        *[("running mean", way, 1) for way in ("forward", "every")],
        ("at the third", "every, forward", 2),
    ],
)
def test_buffers_that_move_are_those_of_each_step(kind: str, way: str, num_batches: int) -> None:
    settings = {"accumulate_batches": num_batches}
    whole = moved(kind, Unrolled(remat=False), **settings)
    assert torch.allclose(moved(kind, WAYS[way], **settings), whole, rtol=1e-10, atol=1e-12)


@cache
def moved(kind: str, algorithm: Unrolled, **settings: Any) -> Tensor:
    torch.manual_seed(0)
    return after(network(MOVING[kind]().double(), algorithm, **settings))


def test_buffers_are_there_after_a_resume_in_the_middle_of_an_unroll() -> None:
    def make() -> Program:
        torch.manual_seed(0)
        return network(MOVING["running mean"]().double(), Unrolled(trajectory=Binomial(checkpoints=2)))

    assert_resumes(make, num_ticks=6, num_more=6)


def test_a_teacher_that_trains_beside_is_named() -> None:
    """Buffers of other problems' modules are today's in steps that are taken again."""
    teacher = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()

    def fit(batch: Tensor, *, w: Any, t: Any, u: Any) -> Tensor:
        return (w(batch) - t(batch)).square().mean() * torch.exp(u()).sum()

    def streamed(name: str, module: nn.Module, loss: Any, roles: Any, **settings: Any) -> Problem:
        optimizer = partial(torch.optim.SGD, lr=0.1)
        return Problem(
            name, module, loss, roles=roles, stream=Stream(samples(20, 1), 5), optimizer=optimizer, **settings
        )

    problems = [
        streamed("t", teacher, lambda batch, *, t: (t(batch) - torch.cos(batch)).square().mean(), {"t": "t"}),
        streamed("w", nn.Linear(3, 3).double(), fit, {"w": "w", "u": "u", "t": {"problem": "t", "mode": "eval"}},
                 unroll_steps=4, hypergradient=Unrolled()),
        streamed("u", Point(numbers(0.1, 0.2, -0.4)), lambda batch, *, w: (w(batch) - 1).square().mean(), {"w": "w"}),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="do not read changing buffers of other problems"):
        ticked(Program(problems, Graph({"u": ["w"]}, {"w": ["u"], "t": ["w"]})), 12)


STORES: dict[str, AbstractStepStore] = {
    "every 2": KeepEvery(steps=2),
    "every 3": KeepEvery(steps=3, offload=True),
    "every 20": KeepEvery(steps=20),
    "binomial 1": Binomial(checkpoints=1),
    "binomial 2": Binomial(checkpoints=2),
    "binomial 3": Binomial(checkpoints=3, offload=True),
}
OTHER_STORES = [name for name in STORES if name not in ("every 3", "binomial 2")]
"""Beside them; a product does not see where steps come from."""


@cache
def trained(way: str, name: str, algorithm: Unrolled, num_ticks: int, **settings: Any) -> dict[str, torch.Tensor]:
    built = program(way, OPTIMIZERS[name], algorithm, stream=stream(), **{"num_steps": 7, **settings})
    return after_ticks(built, num_ticks)


@pytest.mark.parametrize(
    ("store", "way", "name", "product"),
    [
        *[(store, "loss", "adam", "forward") for store in ("every 3", "binomial 2")],
        *[pytest.param(store, "loss", "adam", "forward", marks=pytest.mark.slow) for store in OTHER_STORES],
        *[(store, "start", "nesterov", "reverse") for store in STORES],
        *[(store, "lr", "adamw", "reverse") for store in ("every 3", "binomial 2")],
        *[("every 2", way, name, "reverse") for way, name in (("loss", "maximize"), ("start", "amsgrad"))],
    ],
)
def test_training_is_the_same_to_the_bit(store: str, way: str, name: str, product: Any) -> None:
    """Also across several unrolls, whose state of the optimizer goes on where it is not reset."""
    # What maximizes is infinite soon.
    num_ticks = 8 if name == "maximize" else 15
    whole = trained(way, name, Unrolled(product=product), num_ticks)
    assert_identical(trained(way, name, Unrolled(product=product, trajectory=STORES[store]), num_ticks), whole)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("store", ["every 3", "binomial 2"])
@pytest.mark.parametrize(
    "settings",
    [
        *({"gradient_clip_norm": 0.5}, {"accumulate_batches": 2}, {"warmup_steps": 3}, {"num_steps": 1}),
        *({"horizon": horizon} for horizon in (1, 3, 5, 7)),
    ],
    ids=str,
)
def test_with_other_settings(store: str, settings: dict[str, Any]) -> None:
    whole, kept = Unrolled(), Unrolled(trajectory=STORES[store])
    if "horizon" in settings:
        whole, kept, settings = replace(whole, **settings), replace(kept, **settings), {}
    assert_identical(trained("loss", "adam", kept, 16, **settings), trained("loss", "adam", whole, 16, **settings))


@pytest.mark.parametrize("store", ["every 3", "binomial 2"])
@pytest.mark.parametrize("num_before", [2, 10])
def test_a_resumed_run_is_bit_identical_in_the_middle_of_an_unroll(store: str, num_before: int) -> None:
    def make() -> Any:
        return program("loss", OPTIMIZERS["adam"], Unrolled(trajectory=STORES[store]), stream=stream(), num_steps=7)

    assert_resumes(make, num_ticks=num_before, num_more=15 - num_before)


def test_memory_of_a_long_unroll() -> None:
    """Vectors of the size of the parameters that are held before the upper step, and at most."""

    def held(store: AbstractStepStore) -> tuple[float, float]:
        size = 1000
        weight = torch.nn.Linear(size, 1, bias=False, dtype=torch.float64)

        def loss(batch: None, w: Any, u: Any) -> torch.Tensor:
            return (
                (w(torch.ones(1, size, dtype=torch.float64)) - u(torch.ones(1, 1, dtype=torch.float64))).square().sum()
            )

        upper = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        optimizer = partial(torch.optim.Adam, lr=0.01)
        settings = {"unroll_steps": 17, "of_upper": {"optimizer": partial(torch.optim.SGD, lr=0.0)}}
        algorithm = Unrolled(trajectory=store)
        schedule = Schedule(two_levels((weight, loss), (upper, loss), algorithm, optimizer=optimizer, **settings))
        with LiveStorage() as live:
            for _ in range(16):
                schedule.tick()
            static = live.now
            live.reset_peak()
            schedule.tick()
        return static / (8 * size), live.peak / (8 * size)

    whole, every, binomial = held(KeepAll()), held(KeepEvery(steps=4)), held(Binomial(checkpoints=4))
    # Parameters and two moments a step, of all; a gradient a step, and three at each fourth; three at each checkpoint.
    assert whole[0] > 45
    assert every[0] < 16 + 3 * 4 + 6
    assert binomial[0] < 3 * 4 + 6
    assert binomial[1] < every[1] < whole[1]
