"""Members that are no stack after all are found out, and an error of one of them is its own."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mlotool import EvolutionStrategies, Program, Schedule, Stream
from tests.fusion.members import NUM_CLASSES, NUM_FEATURES, Blobs, bilevel, compared, joined, network, plain, plain_loss


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Failing(torch.optim.lr_scheduler.StepLR):
    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch == 6:
            raise ValueError("no more rates")
        super().step(epoch)


def test_a_member_that_overflows_leaves_the_others_alone() -> None:
    def make(k: int) -> Program:
        return bilevel(k, optimizer=partial(torch.optim.SGD, lr=1e9 if k == 1 else 0.1))

    found = compared(make, ticks=5)
    assert not found.reasons
    assert found.failures == {}


class Broken(Blobs):
    """Data of which one sample cannot be read."""

    def __init__(self, size: int, seed: int, broken: int) -> None:
        super().__init__(size, seed)
        self.broken = broken

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.broken:
            raise OSError("a broken file")
        return super().__getitem__(index)


class Mislabelled(Blobs):
    def __init__(self, size: int, seed: int, wrong: int) -> None:
        super().__init__(size, seed)
        if wrong >= 0:
            self.target[wrong] = NUM_CLASSES


class Growing(nn.Module):
    """A buffer of a new shape each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach().mean()[None]])
        return x - 0.01 * self.seen.mean()


class Counted:
    """A loss that changes with the count of its calls."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def __call__(self, batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
        self.count += 1
        return plain_loss(batch, model=model) * (1 + 1e-3 * self.count)


class Tempered:
    def __init__(self) -> None:
        self.temperature = 1.0

    def __call__(self, batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
        return functional.cross_entropy(model(batch["input"]) / self.temperature, batch["target"])


class Setting(torch.optim.lr_scheduler.StepLR):
    """A scheduler that changes something after six steps."""

    def __init__(self, optimizer: Any, change: Callable[[], None]) -> None:
        self.change = change
        super().__init__(optimizer, 100)

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch == 6:
            self.change()


@pytest.mark.parametrize("kind", ["in all", "in one", "a keyword"])
def test_a_number_that_changes_between_two_ticks_is_seen_at_once(kind: str) -> None:
    def make(k: int) -> Program:
        loss: Any = partial(tempered_loss, temperature=1.0 + k) if kind == "a keyword" else Tempered()
        change = partial(setattr, loss if k == 2 or kind == "in all" else Tempered(), "temperature", 0.999)
        if kind == "a keyword":
            change = partial(loss.keywords.update, {"temperature": 3.5} if k == 1 else {})
        scheduler = partial(Setting, change=change)
        return plain(k, loss=loss, scheduler=scheduler, scheduler_interval="step")

    found = compared(make, ticks=14)
    assert len(found.reasons) == 1 and "has changed, which a trace has fixed" in found.reasons[0]
    [verdict] = found.verdicts.values()
    assert verdict.since_tick == 6
    assert verdict.before is not None and verdict.before.is_fused and verdict.before.since_tick == 1
    assert verdict.at(5).is_fused and not verdict.at(6).is_fused
    assert not found.failures
    assert found.error < 1e-9


def tempered_loss(batch: Mapping[str, Tensor], *, model: Any, temperature: float) -> Tensor:
    return functional.cross_entropy(model(batch["input"]) / temperature, batch["target"])


def closed_loss() -> Any:
    count = 0

    def loss(batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
        nonlocal count
        count += 1
        return plain_loss(batch, model=model) * (1 + (count > 40))

    return loss


class Warming(nn.Module):
    """A regulariser that begins at call 41, whose counter is a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + (self.calls > 40))


def top_loss(batch: Mapping[str, Tensor], *, model: Any, k: float) -> Tensor:
    logits = model(batch["input"])
    return functional.cross_entropy(logits, batch["target"]) + logits.topk(int(k)).values.mean()


CLOSED = closed_loss()
CHANGES = "problems.classifier: evaluating its loss changes {}, which a trace would fix"
LINE_SEARCH = [partial(torch.optim.SGD, lr=0.1), partial(torch.optim.LBFGS, lr=0.1), partial(torch.optim.Adam, lr=0.1)]
UNLIKE: dict[str, tuple[Callable[[int], Program], str]] = {
    "a counter": (lambda k: plain(k, loss=Counted(100 * k)), CHANGES.format("Counted.count")),
    "a counter in a closure": (lambda k: plain(k, loss=CLOSED), CHANGES.format("count")),
    "a counter in a tensor": (lambda k: plain(k, lambda: network(Warming())), CHANGES.format("Warming.calls")),
    "a number of a module": (lambda k: plain(k, lambda: network(Scaled(1 + 1e-3 * k))), "is another function in other"),
    "other structures": (
        lambda k: plain(k, lambda: network(nn.ReLU() if k == 1 else nn.Identity())),
        "the modules of problems.classifier are of different structures",
    ),
    "dropout": (lambda k: plain(k, lambda: network(nn.Dropout(0.5))), "the losses draw random numbers"),
    "a line search": (
        lambda k: plain(k, optimizer=LINE_SEARCH[k]),
        "problems.classifier: its optimizer evaluates the loss itself",
    ),
    "a mean of all batches": (
        lambda k: plain(k, lambda: network(nn.BatchNorm1d(8, momentum=None))),
        "takes the value of a tensor",
    ),
    "a buffer that grows": (lambda k: plain(k, lambda: network(Growing())), "a buffer of a module changes its shape"),
    "a number that is no arithmetic": (
        lambda k: plain(k, loss=partial(top_loss, k=1 + k)),
        "; problems.classifier.loss.k, in which runs differ, may do arithmetic alone",
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_those_that_are_no_stack_are_found_out_at_the_first_attempt(name: str) -> None:
    make, reason = UNLIKE[name]
    found = compared(make, ticks=4)
    assert len(found.reasons) == 1 and reason in found.reasons[0]
    assert found.error == 0 and not found.failures


def steps_of(k: int) -> Any:
    return partial(Failing if k == 1 else torch.optim.lr_scheduler.StepLR, step_size=3)


FAILURES: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "a scheduler": (lambda k: {"scheduler": steps_of(k), "scheduler_interval": "step"}, "no more rates"),
    "data": (lambda k: {"stream": Stream(Broken(80, k, 17 if k == 1 else -1), 8, seed=k)}, "a broken file"),
    "a target": (lambda k: {"stream": Stream(Mislabelled(80, k, 17 if k == 1 else -1), 8, seed=k)}, "out of bounds"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_exception_of_one_member_is_its_own(name: str) -> None:
    settings, text = FAILURES[name]
    found = compared(lambda k: plain(k, **settings(k)))
    [(number, (alone, fused))] = found.failures.items()
    assert number == 1
    assert alone is not None and text in alone
    assert alone == fused
    assert not found.reasons
    assert found.error < 1e-9


class Hidden:
    """What nobody looks at."""

    scale = 1.0


class Rescaling(torch.optim.lr_scheduler.StepLR):
    """A scheduler that changes what a loss depends on."""

    def __init__(self, optimizer: Any, at: int) -> None:
        self.at = at
        super().__init__(optimizer, 100)

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch == self.at:
            Hidden.scale = 1.5


class Numbered:
    def __init__(self, number: int, only: int | None) -> None:
        self.scales = (lambda: Hidden.scale) if only in (None, number) else (lambda: 1.0)

    def __call__(self, batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
        return plain_loss(batch, model=model) * self.scales()


@pytest.mark.parametrize(("at", "only"), [(2, None), (2, 0), (5, None), (5, 2)])
def test_a_change_that_nobody_sees_ends_the_runs_that_it_concerns(at: int, only: int | None) -> None:
    """The gradients of those that have changed were wrong; the others go on one by one."""

    def make(k: int) -> Program:
        return plain(k, loss=Numbered(k, only), scheduler=partial(Rescaling, at=at), scheduler_interval="step")

    Hidden.scale = 1.0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        schedules = [Schedule(make(number)) for number in range(3)]
        together = joined(schedules)
        live, errors = [0, 1, 2], {}
        for _ in range(12):
            for number, outcome in together.tick(live).items():
                if isinstance(outcome, Exception):
                    errors[number] = str(outcome)
            live = [number for number in live if number not in errors]
            if not live:
                break
    # The second, third and fifth steps as one program are looked at, of one member after the other: ticks 3, 4 and 6.
    tick, since = (3, 3) if at == 2 else (6, 5)
    assert [*errors] == ([0, 1, 2] if only is None else [only])
    assert all(f"at tick {tick};" in text and f"since tick {since} may be wrong" in text for text in errors.values())
    assert all("write sweep.fuse=1" in text for text in errors.values())
    if only is not None:
        [text] = [str(each.message) for each in told]
        assert f"right at tick {tick}, and are taken one by one from there on" in text
        assert len(live) == 2 and [schedules[number].num_ticks for number in live] == [12, 12]


def squares(batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
    return (model(batch["input"]) - functional.one_hot(batch["target"], NUM_CLASSES)).square().mean()


def test_rounding_of_gradients_that_vanish_is_no_difference() -> None:
    """At the minimum a gradient is nothing but what is left of large terms."""

    def make(k: int) -> Program:
        linear = lambda: nn.Linear(NUM_FEATURES, NUM_CLASSES)  # noqa: E731
        stream = Stream(Blobs(40, k), 40, seed=k).to(dtype=torch.float32)
        return plain(k, linear, loss=squares, stream=stream, optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.5))

    # The look at the hundredth step is at nothing but rounding.
    found = compared(make, ticks=104)
    assert not found.reasons
    assert not found.failures
    assert found.error < 1e-4


@pytest.mark.filterwarnings("ignore:problems.classifier.hypergradient")
def test_evolution_strategies_are_left_to_the_plans() -> None:
    algorithm = EvolutionStrategies()
    found = compared(lambda k: bilevel(k, hypergradient=algorithm, unroll_steps=2), ticks=4)
    assert list(found.verdicts) == ["classifier", "weights"] and found.verdicts["classifier"].is_fused
    assert "keeps something from one use to the next" in found.reasons[0]
    assert found.error < 1e-9
