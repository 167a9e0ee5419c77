"""Members of a stack that are stopped at any tick, and go on in another process from checkpoints of their own."""

import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlotool import Program, Schedule
from mlotool.fusion.fused_ticks import FusedTicks
from mlotool.runner.together import FusionRecord

Make = Callable[[int], Program]


@dataclass
class Trained:
    """What members have come to.

    Args:
        states: by member and tick, all that a checkpoint holds.
        ends: by member that has ended, its last tick.
        errors: by member, what it has raised.
    """

    states: dict[int, dict[int, Any]] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


def train(
    make: Make, lengths: Mapping[int, int], record: Path, begun: Trained | None = None, most: int | None = None
) -> Trained:
    """Train members to their ends, as `runner.company.Company` does, or go on.

    Args:
        make: makes the program of a member.
        lengths: by member, its last tick.
        record: of what is found out.
        begun: what an earlier process has left: of each member one state, from which it goes on.
        most: stop after so many ticks of the stack.
    """
    book = FusionRecord(record, [*lengths])
    found = deepcopy(begun) if begun is not None else Trained()
    fused = FusedTicks(dict.fromkeys(lengths, "the same"), dict(found.ends), book.stacks(), book.take)
    schedules: dict[int, Schedule] = {}
    for member in lengths:
        if member in found.ends:
            continue
        schedules[member] = schedule = Schedule(make(member), with_norms=True)
        for tick, state in found.states.get(member, {}).items():
            schedule.program.load_state_dict(deepcopy(state[0]))
            schedule.load_state_dict(deepcopy(state[1]))
            schedule.program.random.load_state_dict(deepcopy(state[2]))
            assert schedule.num_ticks == tick
        fused.join(member, schedule)
        found.states.setdefault(member, {})[schedule.num_ticks] = _state(schedule)
    taken = 0
    while schedules and taken != most:
        taken += 1
        lowest = min(each.num_ticks for each in schedules.values())
        members = [member for member, each in schedules.items() if each.num_ticks == lowest]
        fused.begin(members)
        for member, outcome in fused.tick(members).items():
            schedule = schedules[member]
            if isinstance(outcome, Exception):
                found.errors[member] = str(outcome)
            else:
                found.states[member][schedule.num_ticks] = _state(schedule)
            if isinstance(outcome, Exception) or schedule.num_ticks == lengths[member]:
                found.ends[member] = schedule.num_ticks
                del schedules[member]
                fused.leave(member)
    return found


def stopped(found: Trained, chance: random.Random) -> Trained:
    """Return what is left when a process dies: of each member that has not ended, a checkpoint of some tick."""
    left = Trained(ends=dict(found.ends), errors=dict(found.errors))
    for member, states in found.states.items():
        tick = chance.choice([*states]) if member not in found.ends else 0
        left.states[member] = {} if member in found.ends else {tick: states[tick]}
    return left


def _state(schedule: Schedule) -> Any:
    program = schedule.program
    problems = program.state_dict()
    for problem in problems.values():
        # How a solve has ended is said when it happens, and is forgotten by a checkpoint.
        if "last" in problem["hypergradient"]:
            problem["hypergradient"]["last"] = ["", *problem["hypergradient"]["last"][1:]]
    return deepcopy((problems, schedule.state_dict(), program.random.state_dict()))
