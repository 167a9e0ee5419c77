"""`Unrolled(remat="auto")`: graphs are kept where they fit a budget and a comparison shows no other bit."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from mlotool.core.replay import RandomState
from mlotool.hypergradient import Exact, Implicit, Unrolled
from mlotool.hypergradient.unrolled import UnrolledState, fit, measure
from mlotool.problem.interface import LowerProblem, LowerView, Unroll
from mlotool.problem.rank_mean import RankMean
from mlotool.problem.trajectory import StepRecord
from mlotool.program import Program, Schedule, Stream
from tests.hypergradient import test_unrolled_readings as readings
from tests.hypergradient.test_unrolled import OPTIMIZERS, program
from tests.hypergradient.two_levels import two_levels
from tests.program.small import assert_identical, momentum, numbers, parameters, samples
from tests.programs import Point

NUM_TICKS = 10
AUTO = partial(Unrolled, remat="auto")


def stream() -> Stream:
    return Stream(samples(12, 1), 4, seed=1)


def ticked(built: Program, num_ticks: int = NUM_TICKS) -> dict[str, Tensor]:
    schedule = Schedule(built)
    for _ in range(num_ticks):
        schedule.tick()
    return parameters(built)


def decision(built: Program, name: str = "w") -> bool | None:
    state: UnrolledState = built.algorithm_state(name)
    return state.keeps_graphs


def are_kept(built: Program, name: str = "w") -> set[bool]:
    """Return whether the recorded steps have a graph."""
    return {record.graph is not None for record in built.problems[name].trajectory}


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("way", ["loss", "start", "lr"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_all_ways_are_equal_to_the_bit(name: str, way: str, accumulate: int) -> None:
    def run(hypergradient: Unrolled) -> tuple[dict[str, Tensor], set[bool]]:
        settings = {"stream": stream(), "accumulate_batches": accumulate, "gradient_clip_norm": 0.5}
        built = program(way, OPTIMIZERS[name], hypergradient, **settings)
        return ticked(built), are_kept(built)

    (again, none), (kept, both) = run(Unrolled(remat=True)), run(Unrolled(remat=False))
    (fitting, all_of_them), (beyond, none_of_them) = run(AUTO()), run(AUTO(graph_budget=0))
    assert (none, both, all_of_them, none_of_them) == ({False}, {True}, {True}, {False})
    for found in (kept, fitting, beyond):
        assert_identical(found, again)


def network(activation: nn.Module, hypergradient: Unrolled, **settings: Any) -> Program:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), activation, nn.Dropout(0.3), nn.Linear(5, 3)).double()
    return above(net, hypergradient, **settings)


def above(net: nn.Module, hypergradient: Unrolled, **settings: Any) -> Program:
    """Return a program in which a network takes three steps for one of the point that weighs its loss."""
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
    built, again = network(activation(), AUTO()), network(activation(), Unrolled(remat=True))
    assert_identical(ticked(built), ticked(again))
    assert decision(built) is is_exact
    assert are_kept(built) == {is_exact}
    expected = "keeps the graphs of its steps: 3 of them take" if is_exact else "is rounded otherwise with a graph"
    assert [expected in record.message for record in caplog.records] == [True]


def test_the_budget_is_what_the_steps_take_together(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mlotool")
    seen: list[int] = []

    class Watched(Unrolled):
        def pullback(self, view: LowerView, inputs: Any) -> Any:
            assert view.unroll is not None
            seen.append(3 * measure(view.unroll, inputs, view)[0])
            return super().pullback(view, inputs)

    ticked(network(nn.Tanh(), Watched(remat="auto")))
    size = seen[0]
    within, beyond = (network(nn.Tanh(), AUTO(graph_budget=budget)) for budget in (size, size - 1))
    assert_identical(ticked(within), ticked(beyond))
    assert (decision(within), decision(beyond)) == (True, False)
    assert "w.hypergradient computes its steps again in the backward pass: 3 of them take" in caplog.records[-1].message


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


def resume(first: Program, second: Program, num_ticks: int) -> None:
    """Let one program take ticks, and another one as many from its state on."""
    schedule = Schedule(first)
    for _ in range(num_ticks):
        schedule.tick()
    assert len(first.problems["w"].trajectory) % 3
    second.load_state_dict(first.state_dict())
    second.random.load_state_dict(first.random.state_dict())
    resumed = Schedule(second)
    resumed.load_state_dict(schedule.state_dict())
    for _ in range(num_ticks):
        resumed.tick()


def test_the_largest_step_counts_for_all_of_an_unroll() -> None:
    def loss(theta: Any, inputs: Any, batch: Tensor, lower: Any) -> Tensor:
        return (theta[0] * inputs[0] * batch).exp().sum()

    theta, random = torch.ones(()), RandomState(())
    steps = [StepRecord((theta,), (), (), ((torch.ones(size), random),), {}) for size in (1000, 1000, 1)]
    _, view = view_of(lambda theta, inputs: theta[0], theta)
    unroll = Unroll(tuple(steps), True, (), loss, *[None] * 5)  # type: ignore[arg-type]
    size = measure(unroll, [theta], view)[0]
    assert size == measure(replace(unroll, records=tuple(steps[:1])), [theta], view)[0] >= 4000
    assert fit(unroll, [theta], view, 3 * size)
    assert not fit(unroll, [theta], view, 3 * size - 1)
    # In the middle of an unroll.
    begun = replace(unroll, records=tuple(steps[:1]), num_steps=3)
    assert fit(begun, [theta], view, 3 * size)
    assert not fit(begun, [theta], view, 3 * size - 1)


@pytest.mark.filterwarnings("ignore:problems.u. its steps are not traced:UserWarning")
def test_nothing_is_chosen_for_steps_of_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mlotool")

    def make(**settings: Any) -> Program:
        torch.manual_seed(0)
        return above(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double(), AUTO(), **settings)

    built = make(trace="eager")
    ticked(built)
    assert not any("w.hypergradient" in record.message for record in caplog.records)
    assert decision(built) is None
    assert are_kept(built) == {False}
    ticked(make())
    assert any("keeps the graphs" in record.message for record in caplog.records)


def test_the_decision_is_taken_once_and_resumed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mlotool")

    def make(budget: int = 2**30) -> Program:
        return network(nn.Tanh(), AUTO(graph_budget=budget))

    whole, first, second = make(), make(), make(budget=0)
    expected = ticked(whole, 14)
    caplog.clear()
    resume(first, second, 7)
    assert first.state_dict()["w"]["hypergradient"] == {"keeps_graphs": True}
    # With another budget, which has no part in it any more.
    assert decision(second) is True
    assert len(caplog.records) == 1
    assert_identical(parameters(second), expected)


def test_what_is_measured_are_the_activations() -> None:
    """Of each further function that autograd saves something of, and in proportion to the batch."""

    def size(num_layers: int, num_samples: int) -> int:
        batch = torch.ones(num_samples, dtype=torch.float64)

        def loss(theta: Any, inputs: Any) -> Tensor:
            value = batch * theta[0]
            for _ in range(num_layers):
                value = value.tanh()
            return value.sum() * inputs[0]

        unroll, view = view_of(loss, torch.ones((), dtype=torch.float64))
        return measure(unroll, [torch.ones((), dtype=torch.float64)], view)[0]

    per_layer = (size(9, 1000) - size(5, 1000)) / 4
    # Its value, and at most four more of the size in its derivative.
    assert 8000 <= per_layer <= 5 * 8000
    assert (size(9, 2000) - size(5, 2000)) / 4 == pytest.approx(2 * per_layer, rel=0.01)


def test_a_loss_that_cannot_be_measured_is_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mlotool")

    def loss(theta: Any, inputs: Any) -> Tensor:
        return torch.func.grad(lambda x: (x**3 * inputs[0]).sum())(theta[0]).sum()

    unroll, view = view_of(loss, torch.ones(2))
    assert not fit(unroll, [torch.ones(2)], view, 10**9)
    assert "cannot be measured" in caplog.text


class Moving(nn.Module):
    """A layer whose forward pass reads a buffer that each training step moves.

    Args:
        is_count: the buffer is an integer.
    """

    def __init__(self, is_count: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.zeros((), dtype=torch.int64 if is_count else torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale += 1
        out: Tensor = self.layer(x) / self.scale.clone()
        return out


READERS: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: spectral_norm(nn.Linear(3, 3).double()),
    "scale": lambda: Moving(is_count=False).double(),
    "count": lambda: Moving(is_count=True).double(),
    "batch_norm_in_eval_mode": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval()).double(),
}


@pytest.mark.parametrize("name", READERS)
def test_a_forward_pass_that_reads_buffers_is_the_same_with_graphs_and_without_and_resumes_to_the_bit(
    name: str,
) -> None:
    def make(hypergradient: Unrolled) -> Program:
        torch.manual_seed(0)
        net = READERS[name]()
        built = above(net, hypergradient)
        if name == "batch_norm_in_eval_mode":
            net[1].train(False)  # type: ignore[index]
        return built

    whole, first, second = (make(AUTO()) for _ in range(3))
    expected = ticked(whole, 14)
    assert_identical(ticked(make(Unrolled(remat=True)), 14), expected)
    # In the middle of an unroll: one of its three steps has been taken.
    resume(first, second, 7)
    assert_identical(parameters(second), expected)
    assert_identical(ticked(make(Unrolled(remat=False)), 14), expected)


def test_a_last_layer_that_begins_at_zero_hides_no_rounding() -> None:
    """Below it all gradients are zero at the first pullback, with a graph and without."""

    def make(hypergradient: Unrolled) -> Program:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 3)).double()
        nn.init.zeros_(net[2].weight)  # type: ignore[arg-type]
        built = above(net, hypergradient)
        built.problems["w"].optimizer.param_groups[0]["lr"] = 0.0  # type: ignore[union-attr]
        return built

    built = make(AUTO())
    ticked(built, 4)
    assert decision(built) is False
