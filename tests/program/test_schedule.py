"""When problems step, and on what: against loops written by hand."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, SequentialLR, StepLR

from mlotool.core import LossOutput
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from tests.program.by_hand import ByHand
from tests.program.small import adam, assert_identical, momentum, numbers, pair, parameters, samples, sgd, web
from tests.programs import Point

THREE_UP: dict[str, list[str]] = {"top": ["low"]}
THREE_DOWN: dict[str, list[str]] = {"low": ["mid"], "mid": ["top"]}


def names(schedule: Schedule, num_ticks: int) -> list[str]:
    """Return who stepped at each tick."""
    return [" ".join(sorted(schedule.tick())) for _ in range(num_ticks)]


def test_the_numbers_of_a_bilevel_program() -> None:
    """By hand with torch alone: H and M of the lower loss are diagonal."""
    program = pair({"unroll_steps": 2})
    w, u = (torch.nn.Parameter(program.problems[name].module.x.detach().clone()) for name in "wu")
    lower, upper = momentum([w]), adam([u])
    train, meta = Stream(samples(12, 1), 4, seed=1), Stream(samples(12, 2), 4, seed=2)
    schedule = Schedule(program)
    for tick in range(1, 7):
        results = schedule.tick()
        batch = train.next()
        loss = 0.5 * ((w - batch) ** 2).sum(1).mean() + 0.5 * (torch.exp(u) * w**2).sum()
        assert torch.allclose(results["w"].loss, loss.detach(), rtol=1e-12)
        assert not results["w"].loss.requires_grad
        w.grad = (w - batch.mean(0) + torch.exp(u) * w).detach()
        lower.step()
        if tick % 2 == 0:
            v = 4 * ((w - meta.next()) ** 3).mean(0)
            u.grad = (-torch.exp(u) * w * v / (1 + torch.exp(u))).detach()
            upper.step()
        assert ("u" in results) == (tick % 2 == 0)
        assert torch.allclose(program.problems["w"].module.x, w, rtol=1e-12)
        assert torch.allclose(program.problems["u"].module.x, u, rtol=1e-10)


# Edges, unroll_steps, and who steps in each tick: those together, and > those that read them.
COURSES: dict[str, tuple[dict[str, list[str]], dict[str, list[str]], dict[str, int], list[str]]] = {
    "a sibling that has finished goes on": (
        {"top": ["a", "b"]},
        {"a": ["top"], "b": ["top"]},
        {"a": 2, "b": 3},
        ["a b", "a b", "a b > top", "a b", "a b", "a b > top", "a b"],
    ),
    # One of them reads `a` alone, the other one `a` and the slower `b`.
    "two above at their own pace": (
        {"u": ["a"], "v": ["a", "b"]},
        {"a": ["u", "v"], "b": ["v"]},
        {"b": 3},
        ["a b > u", "a b > u", "a b > u v", "a b > u"],
    ),
    "three levels": (
        THREE_UP,
        THREE_DOWN,
        {"low": 2, "mid": 3},
        ["low", "low > mid", "low", "low > mid", "low", "low > mid > top", "low"],
    ),
}


@pytest.mark.parametrize("name", COURSES)
def test_the_course_of_a_program(name: str) -> None:
    up, down, unroll_steps, course = COURSES[name]
    settings = {each: {"unroll_steps": count} for each, count in unroll_steps.items()}
    schedule, twin = Schedule(web(up, down, settings=settings)), ByHand(web(up, down, settings=settings))
    assert names(schedule, len(course)) == [" ".join(sorted(tick.replace(" >", "").split())) for tick in course]
    for tick in course:
        for together in tick.split(" > "):
            twin.step(*together.split())
    assert_identical(parameters(schedule.program), parameters(twin.program))


@pytest.mark.parametrize(
    ("up", "down", "unroll"),
    [
        ({"u": ["w"]}, {"w": ["u"]}, {"w": 5, "u": 7}),
        ({"top": ["a"]}, {"a": ["top"], "b": ["top"]}, {"a": 2, "b": 5}),
        ({"top": ["low"]}, {"low": ["mid", "top"], "mid": ["top"], "slow": ["top"]}, {"low": 2, "mid": 2, "slow": 7}),
    ],
)
def test_the_cycle_length_is_the_tick_at_which_the_last_problem_first_steps(
    up: dict[str, list[str]], down: dict[str, list[str]], unroll: dict[str, int]
) -> None:
    schedule = Schedule(web(up, down, settings={name: {"unroll_steps": steps} for name, steps in unroll.items()}))
    waiting, ticks = set(schedule.program.problems), 0
    while waiting:
        waiting -= set(schedule.tick())
        ticks += 1
        assert ticks < 50
    assert schedule.cycle_length() == ticks


def test_warm_up_steps_do_not_count() -> None:
    schedule = Schedule(pair({"warmup_steps": 3, "unroll_steps": 2}, upper_first=True))
    assert names(schedule, 8) == ["w", "w", "w", "w", "u w", "w", "u w", "w"]
    settings = {"low": {"unroll_steps": 2}, "mid": {"warmup_steps": 2}}
    schedule = Schedule(web(THREE_UP, THREE_DOWN, settings=settings))
    assert names(schedule, 8) == ["low", "low mid", "low", "low mid", "low", "low mid top", "low", "low mid top"]


@pytest.mark.parametrize("down", [{"a": ["u", "v"]}, {"a": ["u", "v"], "v": ["u"]}])
def test_the_order_of_declaration_does_not_matter(down: dict[str, list[str]]) -> None:
    """Uppers that are due together see each other, and the problems below, as they were before any of them stepped."""
    up, found = {"u": ["a"], "v": ["a"]}, []
    for order in (["a", "u", "v"], ["v", "u", "a"], ["u", "v", "a"]):
        schedule = Schedule(web(up, down, order=order))
        names(schedule, 5)
        found.append(parameters(schedule.program))
    for other in found[1:]:
        assert_identical(found[0], {name: other[name] for name in found[0]})


def test_accumulated_batches_equal_one_big_batch() -> None:
    many = pair({"accumulate_batches": 3}, {"accumulate_batches": 2})
    one = pair()
    for name, count in {"w": 3, "u": 2}.items():
        one.problems[name].stream = Stream(
            samples(12, 1 if name == "w" else 2), 4 * count, seed=1 if name == "w" else 2
        )
    results = [Schedule(program).tick() for program in (many, one)]
    assert torch.allclose(results[0]["w"].loss, results[1]["w"].loss, rtol=1e-13)
    assert torch.allclose(many.problems["w"].module.x, one.problems["w"].module.x, rtol=1e-13)
    # H and M of this loss do not depend on the batch, so the upper steps agree as well.
    assert torch.allclose(results[0]["u"].loss, results[1]["u"].loss, rtol=1e-13)
    assert torch.allclose(many.problems["u"].module.x, one.problems["u"].module.x, rtol=1e-13)
    assert many.problems["w"].num_steps == 1


def test_metrics_are_means_over_accumulated_batches() -> None:
    def loss(batch: Tensor, *, w: Any) -> LossOutput:
        return LossOutput((w() * batch).sum(), {"first": batch[0, 0], "graph": w().sum()})

    stream = Stream(numbers(1, 2, 3, 4).reshape(4, 1), 1, shuffle=False)
    settings: dict[str, Any] = {"stream": stream, "optimizer": sgd, "accumulate_batches": 4}
    problem = Problem("w", Point(numbers(1.0, 2.0, 3.0)), loss, roles={"w": "w"}, **settings)
    result = Schedule(Program([problem], Graph())).tick()["w"]
    assert float(result.metrics["first"]) == 2.5
    assert float(result.loss) == 15.0
    assert not result.metrics["graph"].requires_grad


@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_clipping_is_of_the_total_gradient(limit: float) -> None:
    program, twin = pair({}, {"gradient_clip_norm": limit, "optimizer": sgd}), ByHand(pair({}, {"optimizer": sgd}))
    result = Schedule(program).tick()["u"]
    twin.step("w")
    gradient = twin.gradients("u")["u"]["x"]
    assert float(result.metrics["gradient_norm"]) == pytest.approx(float(gradient.norm()), rel=1e-12)
    moved = numbers(0.1, 0.2, -0.4) - program.problems["u"].module.x
    assert torch.allclose(moved, 0.1 * gradient * min(1.0, limit / float(gradient.norm())), rtol=1e-2)
    assert "gradient_norm" not in Schedule(pair()).tick()["w"].metrics


def test_a_gradient_through_solutions_reports_its_norm() -> None:
    program, twin = pair({}, {"optimizer": sgd}), ByHand(pair({}, {"optimizer": sgd}))
    result = Schedule(program, with_norms=True).tick()
    twin.step("w")
    norm = twin.gradients("u")["u"]["x"].norm()
    assert float(result["u"].metrics["hypergradient_norm"]) == pytest.approx(float(norm), rel=1e-12)
    assert not result["u"].metrics["hypergradient_norm"].requires_grad
    assert "hypergradient_norm" not in result["w"].metrics
    assert "hypergradient_norm" not in Schedule(program).tick()["u"].metrics


def _sequence(optimizer: torch.optim.Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.5, total_iters=3), StepLR(optimizer, 2, gamma=0.5)]
    return SequentialLR(optimizer, parts, milestones=[3])


@pytest.mark.parametrize("make", [_sequence, partial(OneCycleLR, max_lr=0.2, total_steps=12)])
def test_schedulers_step_with_each_optimizer_step(make: Callable[..., Any]) -> None:
    settings = {"scheduler": make, "accumulate_batches": 2}
    schedule = Schedule(pair({**settings, "unroll_steps": 2}, settings))
    own = {"w": torch.nn.Parameter(numbers(0.0)), "u": torch.nn.Parameter(numbers(0.0))}
    expected = {"w": momentum([own["w"]]), "u": adam([own["u"]])}
    schedulers = {name: make(optimizer) for name, optimizer in expected.items()}
    for _ in range(10):
        for name in schedule.tick():
            expected[name].step()
            schedulers[name].step()
        for name, problem in schedule.program.problems.items():
            assert problem.optimizer.param_groups[0]["lr"] == expected[name].param_groups[0]["lr"]
    assert schedule.program.problems["w"].optimizer.param_groups[0]["lr"] != 0.1


def test_a_scheduler_of_evaluations_is_left_alone_and_gradients_are_gone_after_a_step() -> None:
    schedule = Schedule(pair({"scheduler": _sequence, "scheduler_interval": "evaluation"}))
    assert names(schedule, 3) == ["u w"] * 3
    assert schedule.program.problems["w"].optimizer.param_groups[0]["lr"] == 0.05
    for problem in schedule.program.problems.values():
        assert all(parameter.grad is None for parameter in problem.module.parameters())


def test_an_optimizer_object_keeps_its_groups() -> None:
    module = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD([{"params": [module.weight], "lr": 0.5}, {"params": [module.bias], "lr": 0.0}])
    before = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    problem = Problem("w", module, lambda batch, *, w: w(numbers(2.0)).sum(), roles={"w": "w"}, optimizer=optimizer)
    Schedule(Program([problem], Graph())).tick()
    assert torch.allclose(module.weight, before["weight"] - 1.0)
    assert torch.equal(module.bias, before["bias"])
