"""A program and its schedule, saved at any tick and loaded into a new one, go on bit by bit as before."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, SequentialLR, StepLR

from mlotool.hypergradient import ConjugateGradient, Implicit
from mlotool.program import Program, Schedule
from tests.program.small import adam, assert_identical, pair, parameters, run_ticks, web


def _sequence(optimizer: torch.optim.Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.5, total_iters=3), StepLR(optimizer, 2, gamma=0.5)]
    return SequentialLR(optimizer, parts, milestones=[3])


def _one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.2, total_steps=60)


def _plain() -> Program:
    lower = {"unroll_steps": 2, "warmup_steps": 4, "accumulate_batches": 2, "gradient_clip_norm": 0.1}
    return pair({**lower, "scheduler": _sequence}, {"scheduler": _one_cycle})


def _looking_ahead() -> Program:
    return pair({"unroll_steps": 3, "roll_back": True, "optimizer": adam, "scheduler": _sequence})


def _by_fresh_batches() -> Program:
    return pair(hypergradient=lambda: Implicit(ConjugateGradient(10, 1e-8), batch="fresh"))


def _three_levels() -> Program:
    settings = {"low": {"unroll_steps": 2, "roll_back": True}, "mid": {"unroll_steps": 2, "optimizer": adam}}
    return web({"top": ["low"]}, {"low": ["mid"], "mid": ["top"]}, settings=settings)


def _siblings() -> Program:
    settings = {"a": {"unroll_steps": 2, "roll_back": True}, "b": {"unroll_steps": 3, "scheduler": _one_cycle}}
    return web({"u": ["a", "b"], "v": ["a"]}, {"a": ["u", "v"], "b": ["u"]}, settings=settings)


MAKERS = [_plain, _looking_ahead, _by_fresh_batches, _three_levels, _siblings]
NUM_TICKS = 12


def _through_a_file(state: Any) -> Any:
    """Save and load with `weights_only`, as checkpoints are."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", MAKERS, ids=[make.__name__[1:] for make in MAKERS])
def test_a_resumed_run_is_the_same_bit_by_bit(make: Callable[[], Program]) -> None:
    program = make()
    schedule = Schedule(program)
    saved, stepped, losses = [], [], []
    for _ in range(NUM_TICKS):
        saved.append(_through_a_file({"program": program.state_dict(), "schedule": schedule.state_dict()}))
        results = schedule.tick()
        stepped.append(list(results))
        losses.append({name: result.loss for name, result in results.items()})
    final = parameters(program)
    # Not one tick's state at a time only: one program is loaded again and again.
    other = make()
    for _ in range(2):
        Schedule(other).tick()
    for start in (0, 2, 5, 9):
        resumed = Schedule(other)
        other.load_state_dict(saved[start]["program"])
        resumed.load_state_dict(saved[start]["schedule"])
        assert resumed.num_ticks == start
        for tick in range(start, NUM_TICKS):
            results = resumed.tick()
            assert list(results) == stepped[tick]
            assert_identical({name: result.loss for name, result in results.items()}, losses[tick])
        assert_identical(parameters(other), final)
        assert resumed.num_ticks == NUM_TICKS
        for name, problem in program.problems.items():
            assert other.problems[name].num_steps == problem.num_steps
            rates = [each.problems[name].optimizer.param_groups[0]["lr"] for each in (program, other)]
            assert rates[0] == rates[1]


def test_the_state_tells_runs_apart() -> None:
    """The test above would fail if a part of the state were left out."""
    program = _looking_ahead()
    schedule = run_ticks(program, 5)
    state = schedule.state_dict()
    assert state["num_ticks"] == 5
    assert list(state["snapshots"]) == ["w"]  # in the middle of a look-ahead
    assert state["waited"] == [["u", "w", 2]]
    own = program.state_dict()["w"]
    assert own["num_steps"] == 3  # one real step, and two that look ahead
    assert own["stream"] == {"epoch": 1, "batches_consumed": 2}
    assert own["optimizer"]["state"]
    assert own["scheduler"]["last_epoch"] == 3


def test_a_schedules_state_does_not_change_afterwards() -> None:
    """Neither in the run that saved it nor in one that loads it."""
    schedule, resumed = run_ticks(_looking_ahead(), 4), Schedule(_looking_ahead())
    state = schedule.state_dict()
    before = copy.deepcopy(state)
    resumed.load_state_dict(state)
    for _ in range(3):
        schedule.tick()
        resumed.tick()
    assert list(state["snapshots"]) == list(before["snapshots"]) == ["w"]
    for part in ("module", "optimizer"):
        torch.testing.assert_close(state["snapshots"]["w"][part], before["snapshots"]["w"][part], rtol=0, atol=0)
    assert (state["num_ticks"], state["waited"]) == (before["num_ticks"], before["waited"])
