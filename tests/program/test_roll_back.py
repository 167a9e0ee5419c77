"""Look-ahead steps: taken for the upper problem's sake, then taken back."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from mlotool.program import Schedule, Stream
from tests.program.by_hand import ByHand
from tests.program.small import adam, assert_identical, numbers, pair, parameters, samples, sgd, web
from tests.program.test_trace import network


def _halving(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


@contextmanager
def _ahead(twin: ByHand, name: str) -> Iterator[None]:
    """Take look-ahead steps of a problem, then return it to where it was, and let it take one real step."""
    problem = twin.program.problems[name]
    parts = [each for each in (problem.module, problem.optimizer, problem.scheduler) if each is not None]
    saved = copy.deepcopy([each.state_dict() for each in parts])
    yield
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    twin.step(name, draw=False)


def test_against_a_loop_by_hand_in_plain_torch() -> None:
    """Adam with a schedule: the look-ahead would show in its moments, its step count and its learning rate."""
    lower = {"optimizer": adam, "scheduler": _halving, "roll_back": True}
    program = pair(lower, {"optimizer": sgd})
    w, u = numbers(0.5, -0.3, 0.8).requires_grad_(), numbers(0.1, 0.2, -0.4)
    train, meta = Stream(samples(12, 1), 4, seed=1), Stream(samples(12, 2), 4, seed=2)
    schedule, optimizer = Schedule(program), adam([w])
    scheduler = _halving(optimizer)

    def slope(point: Tensor, batch: Tensor) -> Tensor:
        return (point - batch.mean(0) + torch.exp(u) * point).detach()

    for _ in range(5):
        schedule.tick()
        batch = train.next()
        ahead = w.detach().clone().requires_grad_()
        other = adam([ahead])
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        ahead.grad = slope(ahead, batch)
        other.step()
        v = 4 * ((ahead.detach() - meta.next()) ** 3).mean(0)
        u = u + 0.1 * torch.exp(u) * ahead.detach() * v / (1 + torch.exp(u))
        w.grad = slope(w, batch)
        optimizer.step()
        scheduler.step()
        assert torch.allclose(program.problems["w"].module.x, w, rtol=1e-11)
        assert torch.allclose(program.problems["u"].module.x, u, rtol=1e-9)
    state = program.problems["w"].optimizer.state_dict()["state"][0]
    assert int(state["step"]) == 5
    assert torch.allclose(state["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"], rtol=1e-9)
    assert program.problems["w"].optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.05 / 2**5
    assert program.problems["w"].num_steps == 5


def test_several_look_ahead_steps_end_in_one_real_step_on_the_last_batch() -> None:
    lower = {"roll_back": True, "unroll_steps": 3, "scheduler": _halving}
    schedule, twin = Schedule(pair(lower)), ByHand(pair(lower))
    for _ in range(2):
        assert [sorted(schedule.tick()) for _ in range(3)] == [["w"], ["w"], ["u", "w"]]
        with _ahead(twin, "w"):
            for _ in range(3):
                twin.step("w")
            twin.step("u")
    assert_identical(parameters(schedule.program), parameters(twin.program))
    assert schedule.program.problems["w"].num_steps == 2


def test_a_middle_problem_looks_ahead_too() -> None:
    up: dict[str, list[str]] = {"top": ["low"]}
    down: dict[str, list[str]] = {"low": ["mid"], "mid": ["top"]}
    settings = {"low": {"roll_back": True}, "mid": {"roll_back": True, "unroll_steps": 2}}
    schedule, twin = Schedule(web(up, down, settings=settings)), ByHand(web(up, down, settings=settings))

    for _ in range(2):
        assert [sorted(schedule.tick()) for _ in range(2)] == [["low", "mid"], ["low", "mid", "top"]]
        with _ahead(twin, "mid"):
            for _ in range(2):
                with _ahead(twin, "low"):
                    twin.step("low")
                    twin.step("mid")
            twin.step("top")
    assert_identical(parameters(schedule.program), parameters(twin.program))


def test_siblings_that_look_ahead_return_together() -> None:
    up, down = {"u": ["a", "b"]}, {"a": ["u"], "b": ["u"]}
    settings: dict[str, dict[str, Any]] = {"a": {"roll_back": True}, "b": {"unroll_steps": 2}}
    schedule, twin = Schedule(web(up, down, settings=settings)), ByHand(web(up, down, settings=settings))
    for _ in range(2):
        assert [sorted(schedule.tick()) for _ in range(2)] == [["a", "b"], ["a", "b", "u"]]
        with _ahead(twin, "a"):
            twin.step("a", "b")
            twin.step("a", "b")
            twin.step("u")
    assert_identical(parameters(schedule.program), parameters(twin.program))


def test_batch_statistics_move_once_for_one_real_step() -> None:
    def lower(batch: Tensor, *, model: Any, weights: Any) -> Tensor:
        return (torch.exp(weights()) * model(batch) ** 2).mean()

    program = network(nn.BatchNorm1d(5, momentum=0.5).double(), lower=lower, roll_back=True)
    norm = program.problems["model"].module.body[1]
    schedule = Schedule(program)
    for tick in range(1, 4):
        before, hidden = norm.running_mean.clone(), program.problems["model"].module.body[0]
        weight = hidden.weight.detach().clone(), hidden.bias.detach().clone()
        schedule.tick()
        batch = program.problems["model"].stream.last()
        mean = (batch @ weight[0].T + weight[1]).mean(0)
        assert int(norm.num_batches_tracked) == tick
        assert torch.allclose(norm.running_mean, 0.5 * before + 0.5 * mean, rtol=1e-12)


def test_a_problem_that_nothing_reads_just_steps() -> None:
    """No upper step would ever end its look-ahead."""
    found = []
    for roll_back in (False, True):
        program = pair({}, {"roll_back": roll_back})
        schedule = Schedule(program)
        for _ in range(3):
            schedule.tick()
        found.append(parameters(program))
    assert_identical(*found)


def test_warm_up_steps_are_not_taken_back() -> None:
    lower = {"roll_back": True, "warmup_steps": 2}
    schedule, twin = Schedule(pair(lower)), ByHand(pair(lower))
    assert [sorted(schedule.tick()) for _ in range(4)] == [["w"], ["w"], ["u", "w"], ["u", "w"]]
    twin.step("w")
    twin.step("w")
    for _ in range(2):
        with _ahead(twin, "w"):
            twin.step("w")
            twin.step("u")
    assert_identical(parameters(schedule.program), parameters(twin.program))
    assert schedule.program.problems["w"].num_steps == 4


def test_the_real_step_is_on_all_accumulated_batches() -> None:
    """An epoch has three batches: some pairs of them lie in two epochs."""
    schedule, twin = Schedule(pair({"roll_back": True, "accumulate_batches": 2})), ByHand(pair())
    stream = twin.program.problems["w"].stream

    def step(batches: list[Tensor]) -> None:
        first, second = (twin.program.gradient("w", {"w": batch})["x"] for batch in batches)
        twin.apply({"w": {"x": (first + second) / 2}})

    for _ in range(4):
        schedule.tick()
        batches = [stream.next(), stream.next()]
        parts = [twin.program.problems["w"].module, twin.program.problems["w"].optimizer]
        saved = copy.deepcopy([each.state_dict() for each in parts])
        step(batches)
        twin.batches["w"] = batches[1]
        twin.step("u")
        for part, state in zip(parts, saved, strict=True):
            part.load_state_dict(state)
        step(batches)
        assert_identical(parameters(schedule.program), parameters(twin.program))
