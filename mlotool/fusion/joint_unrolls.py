"""The recorded steps of the same problem of several members as one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mlotool.fusion.feed import JointBatch
from mlotool.fusion.stacked_batches import stacked
from mlotool.fusion.stacking import NotJointError
from mlotool.problem.problem import Problem
from mlotool.problem.trajectory import StepRecord
from mlotool.program.traced_function import NumberPlace, TakenStep, TakenSteps


def joint_steps(problems: Sequence[Problem]) -> JointBatch:
    """Return the steps of the unrolls that problems of several members are in, each tensor with an axis of members.

    Args:
        problems: of each member; a member that has left has another one's.

    Raises:
        NotJointError: they differ in more than tensors and numbers.
    """
    name, unrolls = problems[0].name, [tuple(each.trajectory) for each in problems]
    if not unrolls[0]:
        raise NotJointError(f"no steps of problems.{name} are recorded to be differentiated: they are simulated")
    if len({(len(each.trajectory), each.trajectory.has_all) for each in problems}) > 1:
        raise NotJointError(f"different steps of problems.{name} are recorded in different runs")
    kinds = {_kind(each) for each in problems}
    if len(kinds) > 1:
        raise NotJointError(
            f"optimizers of problems.{name}, whose steps are differentiated, differ in kind or clipping"
        )
    steps = [_step(name, records) for records in zip(*unrolls, strict=True)]
    return JointBatch(TakenSteps(kinds.pop(), problems[0].trajectory.has_all, steps), is_shared=False)


def _step(name: str, records: Sequence[StepRecord]) -> TakenStep:
    if any(each.lower_snapshots for each in records):
        raise NotJointError(f"the steps of problems.{name}, which are differentiated, read other problems")
    own = [
        (list(each.theta), [*map(dict, each.state)], [batch for batch, _ in each.draws], [*map(dict, each.buffers)])
        for each in records
    ]
    theta, state, batches, buffers = stacked(own, f"the record of a step of problems.{name}")
    settings = [dict(each) for each in records[0].hyperparameters]
    columns: dict[tuple[float, ...], int] = {}
    places: list[dict[NumberPlace, int]] = []
    for position, own_settings in enumerate(settings):
        places.append({})
        for key in [*own_settings]:
            values = [each.hyperparameters[position][key] for each in records]
            for place, numbers in _numbers(name, key, values):
                places[-1][place] = columns.setdefault(numbers, len(columns))
                # Not what it is this time: the function is that of any other.
                _take_out(own_settings, place)
    joined = torch.tensor(list(columns), dtype=torch.float64, device=theta[0].device).reshape(-1, len(records)).T
    return TakenStep(theta, state, batches, buffers, settings, joined, places)


def _take_out(settings: dict[str, Any], place: NumberPlace) -> None:
    """Leave None where a number is."""
    key, position = place
    if position is None:
        settings[key] = None
    else:
        settings[key] = tuple(None if number == position else each for number, each in enumerate(settings[key]))


def _numbers(name: str, key: str, values: Sequence[Any]) -> list[tuple[NumberPlace, tuple[float, ...]]]:
    """Return the values of a hyperparameter that are to be arguments, by run: rates, which move, and what differs."""
    parts: list[tuple[NumberPlace, tuple[Any, ...]]] = [((key, None), tuple(values))]
    if isinstance(values[0], tuple) and all(isinstance(each, tuple) for each in values):
        parts = [((key, position), each) for position, each in enumerate(zip(*values, strict=True))]
    found: list[tuple[NumberPlace, tuple[float, ...]]] = []
    for place, numbers in parts:
        is_number = all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
        if is_number and (key == "lr" or len(set(numbers)) > 1):
            found.append((place, tuple(map(float, numbers))))
        elif any(isinstance(each, Tensor) for each in numbers):
            raise NotJointError(
                f"{key} of the optimizer of problems.{name}, whose steps are differentiated, is a tensor"
            )
        elif any(each != numbers[0] for each in numbers):
            raise NotJointError(f"optimizers of problems.{name}, whose steps are differentiated, differ in {key}")
    return found


def _kind(problem: Problem) -> str:
    """Return the optimizer's class, and what else shapes its steps."""
    settings = problem.settings
    return f"{type(problem.optimizer)}, {settings.gradient_clip_norm}, {sorted(settings.optimizer_roles.items())}"
