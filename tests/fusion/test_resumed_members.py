"""Members that are stopped at any tick go on, in another process, to the very bits that they had come to without it."""

import json
import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from mlotool import ConjugateGradient, Implicit, Program, Schedule, Stream, Unrolled
from mlotool.fusion.fused_ticks import FusedTicks
from mlotool.runner.together import FusionRecord
from tests.fusion.members import Blobs, bilevel, network, plain
from tests.fusion.test_unlike_members import Broken, Counted, Failing, Mislabelled, Scaled, Tempered, tempered_loss
from tests.runner.test_resume import assert_equal

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


LENGTHS = {0: 9, 1: 4, 2: 8, 3: 6}


def partly_frozen(number: int) -> nn.Module:
    """Member 1, which ends first, has other frozen weights."""
    module = network()
    with torch.no_grad():
        module[0].weight.fill_(0.25 if number == 1 else 0.5)  # type: ignore[index]
    module[0].requires_grad_(False)  # type: ignore[index]
    return module


def spectral_loss(batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
    """A loss with an operation that fails for all matrices where one of them is not finite."""
    logits = model(batch["input"])
    values = torch.linalg.eigvalsh(logits.T @ logits)
    return functional.cross_entropy(logits, batch["target"]) + 1e-3 * values.square().sum()


class Cooling(torch.optim.lr_scheduler.StepLR):
    """A scheduler that changes a number of a loss at tick 6, after a resume as well."""

    def __init__(self, optimizer: Any, loss: Tempered) -> None:
        self.loss = loss
        super().__init__(optimizer, 3)

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        self._cool()

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "loss"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._cool()

    def _cool(self) -> None:
        self.loss.temperature = 0.9 if self.last_epoch >= 6 else 1.0


def cooled(number: int) -> Program:
    loss = Tempered()
    return plain(number, loss=loss, scheduler=partial(Cooling, loss=loss), scheduler_interval="step")


def failing(number: int) -> Program:
    scheduler = Failing if number == 2 else torch.optim.lr_scheduler.StepLR
    return bilevel(number, scheduler=partial(scheduler, step_size=3), scheduler_interval="step")


def diverging(number: int) -> Program:
    rate = 1e200 if number in (0, 3) else 0.1
    return plain(number, loss=spectral_loss, optimizer=partial(torch.optim.SGD, lr=rate))


SOLVER = Implicit(ConjugateGradient(3, tolerance=1e-2))
PROGRAMS: dict[str, Callable[[int], Program]] = {
    "plain": plain,
    "running statistics": lambda k: bilevel(k, lambda: network(nn.BatchNorm1d(8))),
    "one set of batches": lambda k: bilevel(k, stream=Stream(Blobs(40, 5), 8, seed=[1, 2, 1, 1, 1][k])),
    "a number of a loss": lambda k: plain(k, loss=partial(tempered_loss, temperature=2.0 if k == 1 else 0.5)),
    "frozen weights": lambda k: plain(k, lambda: partly_frozen(k)),
    "a solver that decides": lambda k: bilevel(k, hypergradient=SOLVER, unroll_steps=2),
    "unrolled": lambda k: bilevel(k, hypergradient=Unrolled(), unroll_steps=2),
    "a scheduler that fails": failing,
    "a file that cannot be read": lambda k: plain(k, stream=Stream(Broken(40, k, 17 if k == 2 else -1), 8, seed=k)),
    "a target out of range": lambda k: plain(k, stream=Stream(Mislabelled(40, k, 17 if k == 2 else -1), 8, seed=k)),
    "a verdict that changes": cooled,
    "members that diverge": diverging,
}


def check_same(found: Trained, whole: Trained, begun: Trained) -> None:
    assert found.ends == whole.ends
    assert found.errors == whole.errors
    for member, states in found.states.items():
        for tick, state in states.items():
            if tick not in begun.states[member]:
                assert_equal(state, whole.states[member][tick], f"{member} at {tick}")


QUICK = ("a number of a loss", "a verdict that changes", "members that diverge")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "num_chains"),
    [
        *[pytest.param(name, 1, marks=[] if name in QUICK else [pytest.mark.slow]) for name in PROGRAMS],
        *[pytest.param(name, 8, marks=pytest.mark.slow) for name in PROGRAMS],
    ],
)
@pytest.mark.filterwarnings("ignore:The ConjugateGradient solve", "ignore:Detected call of `lr_scheduler")
def test_members_go_on_to_the_same_bits(tmp_path: Path, name: str, num_chains: int) -> None:
    make, chance = PROGRAMS[name], random.Random(name)
    whole = train(make, LENGTHS, tmp_path / "whole" / "0.json")
    total = max(tick for states in whole.states.values() for tick in states)
    for number in range(num_chains):
        record = tmp_path / str(number) / "0.json"
        found = train(make, LENGTHS, record, most=chance.randint(total // 2, total))
        while len(found.ends) < len(LENGTHS):
            begun = stopped(found, chance)
            found = train(
                make, LENGTHS, record, begun, most=None if chance.random() < 0.7 else chance.randint(4, 2 * total)
            )
            check_same(found, whole if len(found.ends) == len(LENGTHS) else _until(whole, found), begun)
    [stack] = json.loads((tmp_path / "whole" / "0.json").read_text())["stacks"]
    assert stack["is_fused"] == (name != "a verdict that changes")
    if name == "a verdict that changes":
        assert stack["until_tick"] == 6
    if name == "members that diverge":
        # `eigvalsh` refuses a stack with one matrix that is not finite.
        assert {*whole.errors} == {0, 3} and max(whole.ends[0], whole.ends[3]) < 4 and not stack["reason"]
        assert whole.ends == {**LENGTHS, 0: whole.ends[0], 3: whole.ends[3]}


def _until(whole: Trained, found: Trained) -> Trained:
    """Return what had come of a whole run where another is."""
    ends = {member: whole.ends[member] for member in found.ends}
    return Trained(whole.states, ends, {member: text for member, text in whole.errors.items() if member in ends})


@pytest.mark.parametrize("name", ["one function", "a counter", "other functions"])
def test_a_record_that_lies_makes_no_gradient_wrong(tmp_path: Path, name: str) -> None:
    """Whatever it says, as long as it could have been written."""
    makes: dict[str, Callable[[int], Program]] = {
        "one function": lambda k: plain(k, loss=partial(tempered_loss, temperature=2.0 if k == 1 else 0.5)),
        "a counter": lambda k: plain(k, loss=Counted()),
        "other functions": lambda k: plain(k, lambda: network(Scaled(1 + 1e-3 * k))),
    }
    lengths = {0: 6, 1: 3, 2: 5}
    right = train(makes[name], lengths, tmp_path / "right" / "0.json")
    record, chance = tmp_path / "0" / "0.json", random.Random(name)
    record.parent.mkdir()
    jobs = [*lengths]
    for number in range(4):
        verdict = {"is_fused": True, "fused_s": 1e-9, "alone_s": 1e9, "reason": "", "at_once": number or None}
        verdict |= {"since_tick": chance.choice([0, 3, 10**12]), "before": None}
        if number > 1:
            verdict = {**verdict, "is_fused": number == 3, "since_tick": 2 + number, "before": verdict}
        layout = {
            "jobs": jobs,
            "shares": {"classifier": number == 2},
            "own_values": ["problems.classifier.loss.temperature", "problems.classifier.loss", "x"],
            "courses": {"classifier:0": [True, False]},
        }
        stack = {"jobs": jobs, "rounds": {"classifier": verdict, "other": verdict}, "layouts": [layout]}
        stack["apart"] = {"reason": "", "since_tick": number}
        record.write_text(json.dumps({"waves": [jobs], "stacks": [stack]}))
        found = train(makes[name], lengths, record)
        assert found.ends == right.ends and not found.errors
        for member, states in found.states.items():
            mine, theirs = (tree_leaves(each[lengths[member]][0]) for each in (states, right.states[member]))
            for one, other in zip(mine, theirs, strict=True):
                if isinstance(one, Tensor):
                    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
