"""`Program.to` moves a program in the middle of its training, with all that its problems and algorithms keep."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from mlotool.hypergradient import ConjugateGradient, Implicit, Unrolled
from mlotool.program import AbstractHypergradient, Schedule
from tests.program.small import adam, assert_identical, pair, parameters

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("make", [Unrolled, partial(Implicit, ConjugateGradient(5, 1e-8), warm_start=True)])
def test_there_and_back_it_goes_on_as_if_it_had_stayed(
    make: Callable[[], AbstractHypergradient], device: torch.device
) -> None:
    moved, stayed = (pair({"optimizer": adam, "unroll_steps": 2}, hypergradient=make) for _ in range(2))
    schedules = [Schedule(moved), Schedule(stayed)]
    for _ in range(3):
        for schedule in schedules:
            schedule.tick()
    assert moved.to(device) is moved
    for problem in moved.problems.values():
        kept = [x for entry in problem.optimizer.state.values() for x in entry.values() if x.dim()]  # type: ignore[union-attr]
        assert {tensor.device for tensor in (*problem.own, *kept)} == {device}
    moved.to("cpu")
    for _ in range(3):
        for schedule in schedules:
            schedule.tick()
    assert_identical(parameters(moved), parameters(stayed))
