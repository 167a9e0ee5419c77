"""Chunks, rounds and flushes."""

from types import SimpleNamespace
from typing import Any

import pytest

from mlotool.runner.plan import ChunkLoader, Objective, TickPlan, make_plan
from tests.runner.tiny import make_config


def chunks(plan: TickPlan) -> list[list[tuple[int, int]]]:
    """Return the chunks of every round."""
    schedule: Any = SimpleNamespace(num_ticks=0)
    loader, rounds = ChunkLoader(plan, schedule), []
    while schedule.num_ticks < plan.max_ticks:
        rounds.append(list(loader))
        schedule.num_ticks = rounds[-1][-1][1]
    return rounds


def test_chunks_end_at_evaluations_and_at_the_last_tick() -> None:
    plan = TickPlan(250, 50, 50, {"val": 120, "train": 90}, 120)
    assert chunks(plan) == [
        [(0, 50), (50, 90), (90, 120)],
        [(120, 170), (170, 180), (180, 230), (230, 240)],
        [(240, 250)],
    ]
    assert [plan.due_splits(tick) for tick in (90, 100, 120, 250)] == [["train"], [], ["val"], ["val", "train"]]


def test_flushes_do_not_depend_on_chunks() -> None:
    plan = TickPlan(100, 50, 30, {}, 1000)
    assert [plan.flush_end(tick, 50) for tick in (0, 30)] == [30, 50]
    assert [tick for tick in range(1, 101) if plan.is_flush(tick)] == [30, 60, 90, 100]


@pytest.mark.parametrize(
    ("changes", "round_ticks", "monitor"),
    [
        ({}, 10, "val/accuracy"),
        ({"objective": "test/accuracy"}, 40, None),
        ({"objective": "classifier/loss", "runner.log_every": 100}, 100, "classifier/loss"),
        ({"objective": None}, 40, None),
    ],
)
def test_rounds_end_where_the_objective_is_known(changes: dict[str, Any], round_ticks: int, monitor: str) -> None:
    config = make_config(**changes)
    objective = Objective.from_config(config)
    assert objective.monitor == monitor
    assert make_plan(config, objective).round_ticks == round_ticks
