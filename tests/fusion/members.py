"""Programs of small networks that are trained as members of a stack and alone, and how far the two are apart."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mlotool import Graph, Identity, Implicit, LossOutput, Problem, Program, Schedule, Stream
from mlotool.fusion.fused_ticks import FusedTicks
from mlotool.fusion.stacked_gradients import Verdict
from tests.runner import tiny
from tests.runner.tiny import NUM_CLASSES, NUM_FEATURES, ClassWeights
from tests.runner.tiny import upper_loss as plain_loss


class Blobs:
    """Samples of three Gaussian blobs, in float64."""

    def __init__(self, size: int, seed: int) -> None:
        blobs = tiny.Blobs(size, seed)
        self.target, self.input = blobs.target, blobs.input.double()

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": self.input[index], "target": self.target[index]}


def weighted_loss(batch: Mapping[str, Tensor], *, model: Any, weigher: Any, temperature: float = 1.0) -> LossOutput:
    logits = model(batch["input"]) / temperature
    losses = functional.cross_entropy(logits, batch["target"], reduction="none")
    correct = (logits.argmax(1) == batch["target"]).double().mean()
    return LossOutput((losses * weigher(batch["target"])).mean(), {"accuracy": correct})


def network(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, 8), *between, nn.Tanh(), nn.Linear(8, NUM_CLASSES)).double()


def bilevel(
    seed: int, module: Callable[[], nn.Module] = network, *, upper: Mapping[str, Any] | None = None, **settings: Any
) -> Program:
    """Return a program of two levels; `settings` go to the lower problem, `upper` to the upper one."""
    torch.manual_seed(seed)
    lower: dict[str, Any] = {
        "loss": weighted_loss,
        "roles": {"model": "classifier", "weigher": "weights"},
        "stream": Stream(Blobs(40, seed), 8, seed=seed),
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "hypergradient": Implicit(Identity(), product="finite_difference"),
    }
    above: dict[str, Any] = {
        "loss": plain_loss,
        "roles": {"model": "classifier"},
        "stream": Stream(Blobs(16, seed + 100), 8, seed=seed),
        "optimizer": partial(torch.optim.Adam, lr=0.01),
    }
    classifier = Problem("classifier", module(), **{**lower, **settings})
    weights = Problem("weights", ClassWeights().double(), **{**above, **(upper or {})})
    return Program([weights, classifier], Graph({"weights": ["classifier"]}, {"classifier": ["weights"]}))


def plain(seed: int, module: Callable[[], nn.Module] = network, **settings: Any) -> Program:
    """Return a program of one problem."""
    torch.manual_seed(seed)
    given: dict[str, Any] = {
        "loss": plain_loss,
        "roles": {"model": "classifier"},
        "stream": Stream(Blobs(40, seed), 8, seed=seed),
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    }
    return Program([Problem("classifier", module(), **{**given, **settings})], Graph())


@dataclass
class Compared:
    """What members of a stack and the same programs alone have come to.

    Args:
        verdicts: by round.
        reason: why they are no stack at all.
        error: the largest relative difference of a parameter, a buffer, a tensor of an optimizer, a loss, a statistic.
        failures: by member, the text of its error, alone and fused.
        steps: by problem, how many the first member has taken.
    """

    verdicts: Mapping[str, Verdict]
    reason: str
    error: float = 0.0
    failures: dict[int, list[str | None]] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)

    @property
    def reasons(self) -> list[str]:
        """Why rounds are taken one by one."""
        return [self.reason] if self.reason else [each.reason for each in self.verdicts.values() if not each.is_fused]


def compared(
    make: Callable[[int], Program],
    num_members: int = 3,
    ticks: int = 12,
    *,
    ends: Mapping[int, int] | None = None,
    change: tuple[int, Callable[[Program], Any]] | None = None,
) -> Compared:
    """Return how members 0, 1, ... do as a stack, beside each alone.

    Args:
        make: makes the program of a member.
        num_members: how many.
        ticks: that each takes.
        ends: by member that leaves early, after how many ticks.
        change: what is done to member 1, and before which tick.
    """
    alone, fused = ([Schedule(make(number), with_norms=True) for number in range(num_members)] for _ in range(2))
    together = joined(fused)
    live = list(range(num_members))
    found = Compared({}, "")
    for tick in range(ticks):
        for number in [each for each in live if (ends or {}).get(each) == tick]:
            live.remove(number)
            together.leave(number)
        if change is not None and tick == change[0]:
            for schedules in (alone, fused):
                change[1](schedules[1].program)
        if tick % 5 == 0:
            together.begin(live)
        outcomes = together.tick(live)
        for number in tuple(live):
            outcome, expected = outcomes[number], _tick(alone[number])
            if isinstance(outcome, Exception) or isinstance(expected, Exception):
                texts = [str(each) if isinstance(each, Exception) else None for each in (expected, outcome)]
                found.failures[number] = texts
                live.remove(number)
                together.leave(number)
                continue
            assert outcome is not None and outcome.keys() == expected.keys()
            found.steps.update([] if number else list(expected))
            said, reported = (each.program.statistics() for each in (alone[number], fused[number]))
            assert said.keys() == reported.keys()
            found.error = max([found.error, *[difference(said[key], reported[key]) for key in said]])
            for name, result in expected.items():
                assert result.metrics.keys() == outcome[name].metrics.keys()
                pairs = [(result.loss, outcome[name].loss)]
                pairs += [(value, outcome[name].metrics[key]) for key, value in result.metrics.items()]
                found.error = max([found.error, *[difference(x, y) for x, y in pairs]])
    [record] = together.records
    found.verdicts, found.reason = record.verdicts, record.reason
    errors = [state_difference(alone[number].program, fused[number].program) for number in live]
    found.error = max([found.error, *errors])
    return found


def joined(schedules: Sequence[Schedule]) -> FusedTicks:
    together = FusedTicks(dict.fromkeys(range(len(schedules)), "the same"))
    for number, schedule in enumerate(schedules):
        together.join(number, schedule)
    return together


def _tick(schedule: Schedule) -> Any:
    try:
        return schedule.tick()
    except Exception as error:
        return error


def state_difference(first: Program, second: Program) -> float:
    """Return the largest relative difference of what two programs hold."""
    return max(
        difference(x, y)
        for name in first.problems
        for x, y in zip(tensors(first.problems[name]), tensors(second.problems[name]), strict=True)
    )


def tensors(problem: Problem) -> Sequence[Tensor]:
    """Return parameters, buffers and the optimizer's tensors."""
    states = [each for state in problem.optimizer_state() for _, each in sorted(state.items())]
    return [*problem.own, *problem.slots.buffers(), *[each for each in states if isinstance(each, Tensor)]]


def difference(x: Tensor | float, y: Tensor | float) -> float:
    """Return how far two tensors are apart, relative to the first one, of which what is below 1e-3 counts as that."""
    x, y = (torch.as_tensor(each).detach().double() for each in (x, y))
    assert x.shape == y.shape
    if not x.numel() or torch.equal(x, y):
        return 0.0
    return float((x - y).norm() / (x.norm() + 1e-3))
