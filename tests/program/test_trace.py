"""Traced gradients: the plan's numbers, buffers and resumption; and what cannot be traced says so and goes on."""

import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError, RunError
from mlotool.hypergradient import (
    ConjugateGradient,
    EvolutionStrategies,
    Exact,
    FixedPoint,
    Identity,
    Implicit,
    Neumann,
    NormalEquationConjugateGradient,
    Unrolled,
)
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule, Stream
from mlotool.program.backends import BACKENDS, GraphedRun
from mlotool.program.decompositions import FUSIBLE
from mlotool.program.trace import TracedRounds, copied
from tests.program.small import Mlp, assert_identical, momentum, pair, parameters, run_ticks, samples, sgd, web
from tests.programs import Point

Make = Callable[[], AbstractHypergradient]
ALGORITHMS: dict[str, Make] = {
    "identity": lambda: Implicit(Identity(0.1)),
    "finite differences": lambda: Implicit(Identity(0.1), "finite_difference"),
    "neumann": lambda: Implicit(Neumann(3, 0.1)),
    "neumann by differences": lambda: Implicit(Neumann(2, 0.1), "finite_difference"),
    "cg": lambda: Implicit(ConjugateGradient(2, 1e-12)),
    "damped cg": lambda: Implicit(ConjugateGradient(2, 0.0, damping=0.3)),
    "normal cg": lambda: Implicit(NormalEquationConjugateGradient(2, 1e-12)),
    "fixed point": lambda: Implicit(FixedPoint(2, 0.1)),
    "fresh batch": lambda: Implicit(Neumann(2, 0.1), batch="fresh"),
}
TRILEVEL = ({"top": ["low"]}, {"low": ["mid"], "mid": ["top"]})
NESTED = ({"top": ["mid"], "mid": ["low"]}, {"low": ["mid", "top"], "mid": ["top"]})
DIAMOND = ({"top": ["base"]}, {"base": ["left", "right"], "left": ["top"], "right": ["top"]})


def traced(program: Program, backend: str | None = "eager", begin: int = 0) -> Program:
    """Return a program of the same problems whose training steps are traced."""
    return Program(program.problems.values(), program.graph, trace=backend, trace_from=begin)


SCHEDULES: weakref.WeakKeyDictionary[Program, Schedule] = weakref.WeakKeyDictionary()


def ticked(program: Program, count: int = 5) -> dict[str, Tensor]:
    """Return the parameters after a planned step, three traced ones that are compared with planned ones, and others."""
    SCHEDULES[program] = run_ticks(program, count)
    return parameters(program)


def gone_on(run: Schedule, program: Program) -> Schedule:
    """Return the schedule of another program, which goes on from where a run is."""
    schedule = Schedule(program)
    program.load_state_dict(run.program.state_dict())
    schedule.load_state_dict(run.state_dict())
    return schedule


def tracers(program: Program, name: str) -> list[TracedRounds]:
    """Return what traces the steps of a problem."""
    traced = SCHEDULES[program]._parts._traced
    return [each for rounds, each in traced.items() if any(name in names for names in rounds)]


def is_traced(program: Program, name: str) -> bool:
    return any(each._num_traces for each in tracers(program, name))


def assert_close(a: Mapping[str, Tensor], b: Mapping[str, Tensor], tolerance: float = 1e-10) -> None:
    for key, value in a.items():
        assert torch.allclose(value, b[key], rtol=tolerance, atol=tolerance), key


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_trace_takes_the_steps_of_the_plan(name: str) -> None:
    make = partial(pair, hypergradient=ALGORITHMS[name])
    found = traced(make())
    # A difference divides rounding by its radius.
    tolerance = 1e-7 if "differences" in name else 1e-10
    assert_close(ticked(found), ticked(make()), tolerance)
    assert is_traced(found, "u")
    assert is_traced(found, "w")


# Short: the trace of a nested program grows with the square of the steps of a solve, and takes seconds to make.
SOLVES: dict[str, Make] = {
    "identity": lambda: Implicit(Identity(0.1)),
    "neumann": lambda: Implicit(Neumann(2, 0.1)),
    "cg": lambda: Implicit(ConjugateGradient(1)),
    "differences": lambda: Implicit(Identity(0.1), "finite_difference"),
}


@pytest.mark.parametrize(
    ("algorithm", "edges"), [("neumann", NESTED), ("identity", DIAMOND), ("cg", TRILEVEL), ("differences", NESTED)]
)
def test_in_programs_of_several_levels(edges: Any, algorithm: str) -> None:
    make = partial(web, *edges, hypergradient=SOLVES[algorithm])
    found = traced(make())
    assert_close(ticked(found), ticked(make()), 1e-6 if algorithm == "differences" else 1e-10)
    assert is_traced(found, "top")


def test_a_run_goes_on_bit_by_bit_and_reports_the_residual_of_each_solve() -> None:
    """And no residual of the solve that was traced."""
    make = partial(pair, hypergradient=lambda: Implicit(ConjugateGradient(1)))

    def residuals(run: Schedule, count: int) -> list[float]:
        return [run.tick() and run.program.statistics()["w/solver_residual"] for _ in range(count)]

    found, other = traced(make(), begin=2), traced(make(), begin=2)
    run = SCHEDULES[found] = Schedule(found)
    seen = residuals(run, 2)
    assert not is_traced(found, "w")
    seen += residuals(run, 2)
    assert is_traced(found, "w")
    resumed = gone_on(run, other)
    seen += residuals(run, 2)
    assert residuals(resumed, 2) == pytest.approx(seen[4:], rel=1e-6, abs=1e-12)
    assert_identical(parameters(other), parameters(found))
    expected = residuals(Schedule(make()), 6)
    assert len(set(expected)) == 6
    assert seen == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_inductor_compiles_it() -> None:
    def loss(batch: Tensor, *, point: Any) -> Tensor:
        return (point() - batch).square().mean()

    def make(trace: str | None) -> Program:
        settings: dict[str, Any] = {"stream": Stream(samples(24, 1), 4), "optimizer": momentum}
        return Program([Problem("point", weights(3), loss, roles={"point": "point"}, **settings)], Graph(), trace=trace)

    found, plan = make("inductor"), make(None)
    assert_close(ticked(found), ticked(plan))
    assert is_traced(found, "point")


def square(batch: Tensor, *, model: Any, weights: Any) -> Tensor:
    return (torch.exp(weights()) * model(batch) ** 2).mean() + 0.1 * model(batch).mean()


def cubic(batch: Tensor, *, model: Any) -> Tensor:
    return (model(batch) - 1.0).abs().pow(3).mean()


def weights(size: int) -> Point:
    return Point(torch.linspace(-0.5, 0.5, size, dtype=torch.float64))


def network(
    *between: nn.Module,
    lower: Callable[..., Any] = square,
    hypergradient: AbstractHypergradient | None = None,
    optimizer: Any = momentum,
    trace: str | None = None,
    dataset: Any = None,
    **settings: Any,
) -> Program:
    module = Mlp(*between)
    data = samples(24, 1) if dataset is None else dataset
    problems = [
        Problem(
            "model",
            module,
            lower,
            roles={"model": "model", "weights": "weights"},
            stream=Stream(data, 4, seed=1),
            optimizer=optimizer,
            hypergradient=hypergradient or Implicit(Identity(0.05)),
            **settings,
        ),
        Problem(
            "weights", weights(4), cubic, roles={"model": "model"}, stream=Stream(samples(24, 2), 4), optimizer=sgd
        ),
    ]
    return Program(problems, Graph({"weights": ["model"]}, {"model": ["weights"]}), trace=trace)


def alone(loss: Callable[..., Tensor] = cubic, trace: str | None = "eager", **settings: Any) -> Program:
    """Return a program of one problem, for what has nothing to do with hypergradients."""
    given = {"stream": Stream(samples(24, 1), 4, seed=1), "optimizer": momentum, **settings}
    return Program([Problem("model", Mlp(), loss, roles={"model": "model"}, **given)], Graph(), trace=trace)


def test_running_statistics_move_once_a_step() -> None:
    plan, found = network(nn.BatchNorm1d(5).double()), network(nn.BatchNorm1d(5).double(), trace="eager")
    ticked(plan)
    ticked(found)
    assert is_traced(found, "model") and is_traced(found, "weights")
    states = [{k: v.double() for k, v in each.problems["model"].module.state_dict().items()} for each in (plan, found)]
    # The loss calls the module twice.
    assert int(states[0]["body.1.num_batches_tracked"]) == 10
    assert_close(*states)


def test_steps_in_place_scheduled_rates_clipping_and_several_batches_are_those_of_the_step() -> None:
    settings: dict[str, Any] = {
        "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
        "gradient_clip_norm": 0.05,
        "accumulate_batches": 2,
    }
    plan, found = (network(nn.ReLU(inplace=True), trace=trace, **settings) for trace in (None, "eager"))
    assert_close(ticked(found), ticked(plan))
    assert is_traced(found, "model") and is_traced(found, "weights")


def test_losses_that_draw_random_numbers_go_on_by_their_plan() -> None:
    ends = []
    for trace in (None, "eager"):
        torch.manual_seed(0)
        made = network(nn.Dropout(0.5), trace=trace)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ends.append(ticked(made))
        texts = [str(each.message) for each in caught if "are not traced" in str(each.message)]
        assert len(texts) == (0 if trace is None else 2)
        assert all("the losses draw random numbers" in text for text in texts)
    assert_identical(*ends)


class Count:
    """A count in an attribute."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> int:
        self.number += 1
        return self.number


COUNTS: dict[str, tuple[Callable[[], Callable[[], float]], str]] = {
    "an attribute": (Count, r"evaluating its loss changes Count\.number, which a trace would fix"),
    "an iterator": (lambda: partial(next, itertools.count(1)), "gives other values each time"),
    "a clock": (
        lambda: lambda: time.perf_counter() % 1 + 1,
        "after 1 steps its traced steps differ from steps without a trace",
    ),
    "numpy's global generator": (lambda: lambda: numpy.random.randint(1, 9), "draws from numpy's or Python's global"),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_what_a_loss_changes_in_python_is_left_to_the_plan(kind: str) -> None:
    make, reason = COUNTS[kind]

    def found(trace: str | None) -> dict[str, Tensor]:
        numpy.random.seed(0)
        number = make()
        # A loss that is differentiated twice would have to give the same twice.
        return ticked(alone(lambda batch, *, model: model(batch).square().mean() * number() ** 0.5, trace))

    with pytest.warns(UserWarning, match=reason):
        traced = found("eager")
    if kind != "a clock":
        assert_close(traced, found(None))


def test_not_finite_in_both_ways_is_equal() -> None:
    """A loss that is NaN from a tick on is no fault of the trace."""
    batches = samples(24, 1)
    batches[9] = float("nan")
    found = ticked(traced := alone(stream=Stream(batches, 4, shuffle=False)))
    assert is_traced(traced, "model")
    assert all(each.isnan().all() for each in found.values())


def test_a_later_change_out_of_sight_stops_the_run(tmp_path: Path) -> None:
    file = tmp_path / "rate"
    file.write_text("1.0")

    schedule = run_ticks(alone(lambda batch, *, model: cubic(batch, model=model) * float(file.read_text())), 6)
    file.write_text("1.01")
    with pytest.raises(RunError, match=r"problems\.model: after 10 steps its traced steps differ"):
        for _ in range(5):
            schedule.tick()


class Flipping(nn.Module):
    """A quadratic whose curvature depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, sign: Tensor) -> Tensor:
        return 0.5 * (sign * self.x**2).sum()

    def double(self) -> Tensor:
        return self.x


def flipping(trace: str | None) -> Program:
    """Return a program whose solves meet negative curvature in every fourth batch, not in the first ones."""

    def lower(batch: Tensor, *, model: Any, weights: Any) -> Tensor:
        return model(batch[0]) + 0.1 * (weights() * model.method("double")).sum()

    signs = torch.ones(12, 1, dtype=torch.float64)
    signs[3::4] = -1.0
    low = Problem(
        "model",
        Flipping(),
        lower,
        roles={"model": "model", "weights": "weights"},
        stream=Stream(signs, 1, shuffle=False),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        hypergradient=Implicit(ConjugateGradient(1, 0.0)),
    )
    upper = Problem(
        "weights",
        weights(1),
        lambda batch, *, model: (model(torch.ones(1, dtype=torch.float64)) - 1.0) ** 2,
        roles={"model": "model"},
        optimizer=sgd,
    )
    return Program([low, upper], Graph({"weights": ["model"]}, {"model": ["weights"]}), trace=trace)


@pytest.mark.filterwarnings("ignore:The ConjugateGradient solve at problem 'model' ended with negative curvature")
def test_a_solve_that_ends_otherwise_has_a_trace_of_its_own() -> None:
    """No course is taken for another one; a resumed run, which meets them in another order, goes on bit by bit."""
    found, other = flipping("eager"), flipping("eager")
    ticked(found, 3)
    resumed = gone_on(SCHEDULES[found], other)
    for run in (SCHEDULES[found], resumed):
        for _ in range(5):
            run.tick()
    assert_identical(parameters(other), parameters(found))
    assert_close(parameters(found), ticked(flipping(None), 8))
    assert tracers(found, "weights")[0]._num_traces > 1


@pytest.mark.parametrize(
    "make",
    [
        Unrolled,
        lambda: EvolutionStrategies(2, 0.1),
        lambda: Implicit(Exact()),
        lambda: Implicit(ConjugateGradient(2), warm_start=True),
        lambda: Implicit(ConjugateGradient(2), report_every=2),
    ],
)
def test_what_remembers_is_not_traced(make: Make) -> None:
    found, plan = traced(pair(hypergradient=make)), pair(hypergradient=make)
    reason = "(the hypergradient method of 'w' may compute something else|a trace does not keep the steps of 'w')"
    with pytest.warns(UserWarning, match=rf"problems\.u: its steps are not traced: {reason}"):
        ends = ticked(found), ticked(plan)
    assert not is_traced(found, "u")
    assert is_traced(found, "w")
    assert_close(*ends)


OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=0.05, weight_decay=0.1),
    "amsgrad": partial(torch.optim.Adam, lr=0.05, amsgrad=True, betas=(0.8, 0.9)),
    "adamw": partial(torch.optim.AdamW, lr=0.05, maximize=True),
    "unfused": partial(torch.optim.AdamW, lr=0.05, fused=False, foreach=False),
}


@pytest.mark.parametrize("backend", ["eager", "plain operations"])
def test_steps_of_optimizers(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both by torch's kernels, in place, and by the operations that a compiler gets; of problems beside each other."""
    if backend != "eager":
        monkeypatch.setitem(
            BACKENDS, "eager", replace(BACKENDS["eager"], has_fused_steps=False, decompositions=FUSIBLE)
        )

    def make(name: str) -> Problem:
        settings: dict[str, Any] = {"stream": Stream(samples(24, 1), 4), "optimizer": OPTIMIZERS[name]}
        torch.manual_seed(0)
        return Problem(name, nn.Linear(3, 2).double(), cubic, roles={"model": name}, **settings)

    plan, found = (Program(map(make, OPTIMIZERS), Graph(), trace=trace) for trace in (None, "eager"))
    assert_close(ticked(found), ticked(plan), 1e-9)
    for name in OPTIMIZERS:
        assert is_traced(found, name)
        states = [each.problems[name].optimizer_state() for each in (found, plan)]
        for mine, other in zip(*states, strict=True):
            assert_close(mine, other, 1e-9)


def test_kernels_of_optimizers_write_in_place() -> None:
    ticked(found := alone())
    [tracer] = tracers(found, "model")
    [[trace]] = tracer._traces.values()
    code = trace.run.__self__.code  # type: ignore[attr-defined]
    assert "_fused_sgd_" in code
    assert "copy" not in code


def test_a_setting_that_changes_is_traced_anew() -> None:
    ends = []
    for trace in (None, "eager"):
        program = alone(trace=trace)
        schedule = SCHEDULES[program] = Schedule(program)
        optimizer = program.problems["model"].optimizer
        assert optimizer is not None
        for number in range(6):
            optimizer.param_groups[0]["momentum"] = 0.5 if number < 3 else 0.9
            optimizer.param_groups[0]["lr"] = 0.01 * (number + 1)
            schedule.tick()
        ends.append(parameters(program))
    assert_close(*ends)
    assert len(tracers(program, "model")[0]._traces) == 2


def test_a_trace_for_each_kind_of_tick() -> None:
    """Two steps of the lower problem for one of the upper one."""
    make = partial(network, unroll_steps=2)
    found = make(trace="eager")
    assert_close(ticked(found, 6), ticked(make(), 6))
    assert set(SCHEDULES[found]._parts._traced) == {(("model",),), (("model",), ("weights",))}


def test_steps_that_are_recorded_are_traced() -> None:
    make = partial(network, hypergradient=Unrolled(), unroll_steps=2)
    with pytest.warns(UserWarning, match="problems.weights: its steps are not traced: a trace does not keep the steps"):
        found = ticked(traced := make(trace="eager"))
    assert_close(found, ticked(make()))
    assert is_traced(traced, "model")


def test_a_recording_replays_at_the_addresses_it_was_made_with() -> None:
    """What a CUDA graph does, by a function in its place: recorded once, anew where a parameter has moved."""
    recorded = []

    def capture(function: Callable[[], Any]) -> tuple[Callable[[], None], list[Tensor]]:
        outputs = [torch.zeros(())]

        def replay() -> None:
            outputs[0].copy_(function()[0])

        recorded.append(replay)
        return replay, outputs

    def step(theta: Tensor, batch: Tensor) -> list[Tensor]:
        theta.add_(batch)
        return [theta.sum()]

    run, theta = GraphedRun(step, 1, capture), torch.zeros(2)
    [first] = run(theta, torch.ones(2))
    [second] = run(theta, torch.full((2,), 2.0))
    assert (float(first), float(second), len(recorded)) == (2.0, 6.0, 1)
    moved = theta.clone()
    assert float(run(moved, torch.ones(2))[0]) == 8.0
    assert len(recorded) == 2
    assert float(theta.sum()) == 6.0


class Alternating(torch.utils.data.Dataset[Tensor]):
    """Batches (b, 3) by turns as they are and as a part of wider ones."""

    def __init__(self) -> None:
        self._num_batches = 0

    def __len__(self) -> int:
        return 12

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        self._num_batches += 1
        batch = samples(12)[torch.as_tensor(indices)]
        return batch if self._num_batches % 2 else torch.cat([batch, batch], 1)[:, :3]


def test_batches_of_other_strides_have_a_trace_of_their_own() -> None:
    def flat(batch: Tensor, *, model: Any) -> Tensor:
        return (model(batch.flatten().view(-1, 3)) - 1).square().mean()

    found, plan = (alone(flat, trace, stream=Stream(Alternating(), 4, seed=1)) for trace in ("eager", None))
    assert_close(ticked(found, 6), ticked(plan, 6))
    assert len(tracers(found, "model")[0]._traces) == 2


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda x: x[:, 1:4],
    "rows and columns": lambda x: x[2:, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 7),
    "a part of it transposed": lambda x: x[1:, 2:].T,
    "nothing": lambda x: x[:0],
    "whole": lambda x: x,
}


@pytest.mark.parametrize("name", PARTS)
def test_a_copy_has_the_strides(name: str) -> None:
    whole = samples(6)
    tensor = PARTS[name](whole)
    copy = copied(tensor)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride() or not tensor.numel()
    whole.zero_()
    assert not copy.numel() or bool(copy.any())


def test_a_batch_of_an_own_class_goes_on_by_its_plan() -> None:
    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitems__(self, indices: Sequence[int]) -> Any:
            return SimpleNamespace(x=samples(12)[torch.as_tensor(indices)])

    with pytest.warns(UserWarning, match="a batch holds a SimpleNamespace"):
        ticked(alone(lambda batch, *, model: cubic(batch.x, model=model), stream=Stream(Samples(), 4)))


def test_a_cuda_graph_wants_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(ConfigError, match="trace: found 'cuda_graph', and torch finds no CUDA device"):
            alone(trace="cuda_graph")
        patched.setattr(torch.cuda, "is_available", lambda: True)
        program = alone(trace="cuda_graph")
    with pytest.warns(UserWarning, match="its steps are not traced: a CUDA graph reads no tensors on the CPU"):
        ticked(program)
