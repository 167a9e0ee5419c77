"""Members that are no stack are found out; errors, and what a user changes in one of several runs, are of that one."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mlotool import Problem, Program, Schedule, Stream
from mlotool.core.errors import RunError
from mlotool.fusion import stacked_gradients
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
    """A scheduler that changes something after some steps."""

    def __init__(self, optimizer: Any, change: Callable[[], None], at: int = 6) -> None:
        self.change, self.at = change, at
        super().__init__(optimizer, 100)

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch == self.at:
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
    assert len(found.reasons) == 1 and "has changed, while a trace takes it as constant" in found.reasons[0]
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


def by_numpy(batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
    logits = model(batch["input"])
    largest = float(numpy.median(logits.detach().numpy()))
    return functional.cross_entropy(logits, batch["target"]) + 0.01 * largest * logits.square().mean()


class Drawing:
    def __init__(self) -> None:
        self.random = numpy.random.default_rng(0)

    def __call__(self, batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
        return functional.cross_entropy(model(batch["input"]) + 0.01 * self.random.random(), batch["target"])


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
        "problems.classifier: the optimizer of 'classifier' evaluates the loss itself",
    ),
    "a mean of all batches": (
        lambda k: plain(k, lambda: network(nn.BatchNorm1d(8, momentum=None))),
        "reads the value of a tensor",
    ),
    "a buffer that grows": (lambda k: plain(k, lambda: network(Growing())), "a buffer of a module changes its shape"),
    "a number that is no arithmetic": (
        lambda k: plain(k, loss=partial(top_loss, k=1 + k)),
        "; problems.classifier.loss.k, in which runs differ, may be used in arithmetic only",
    ),
    "numpy": (lambda k: plain(k, loss=by_numpy), "takes values out of torch"),
    "a generator of numpy": (lambda k: plain(k, loss=Drawing()), "gives other values each time (Generator)"),
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


class Numbered:
    def __init__(self, number: int, only: int | None) -> None:
        self.scales = (lambda: Hidden.scale) if only in (None, number) else (lambda: 1.0)

    def __call__(self, batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
        return plain_loss(batch, model=model) * self.scales()


@pytest.mark.parametrize(("at", "only"), [(2, None), (2, 0), (5, None), (5, 2)])
def test_a_change_that_nobody_sees_ends_the_runs_that_it_concerns(at: int, only: int | None) -> None:
    """The gradients of those that have changed were wrong; the others go on one by one."""

    def make(k: int) -> Program:
        scheduler = partial(Setting, change=partial(setattr, Hidden, "scale", 1.5), at=at)
        return plain(k, loss=Numbered(k, only), scheduler=scheduler, scheduler_interval="step")

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
        assert f"right at tick {tick}, and are computed one by one from now on" in text
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
    found = compared(make, 2, 104)
    assert not found.reasons
    assert not found.failures
    assert found.error < 1e-4


@pytest.mark.parametrize(("most", "num_members"), [(2, 5), (0, 2)])
def test_as_many_members_as_fit_into_memory_are_taken_at_once(
    most: int, num_members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = stacked_gradients.StackedGradients._traced

    def traced(self: Any, *arguments: Any) -> Any:
        if self.at_once > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return direct(self, *arguments)

    monkeypatch.setattr(stacked_gradients.StackedGradients, "_traced", traced)
    found = compared(plain, num_members, 5)
    [verdict] = found.verdicts.values()
    if most:
        assert verdict.is_fused and verdict.at_once == most
    else:
        assert not verdict.is_fused and "do not fit into memory" in verdict.reason
    assert found.error < 1e-12 and not found.failures


def first(problem: Problem) -> Any:
    return problem.module[0].weight  # type: ignore[index]


def emptied(problem: Problem) -> None:
    problem.optimizer.state[first(problem)]["momentum_buffer"] = torch.zeros_like(first(problem))  # type: ignore[union-attr]


CHANGED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a mode": (lambda problem: problem.module[1].eval(), "BatchNorm1d.training has changed"),
    "an attribute": (lambda problem: setattr(problem.module[1], "momentum", 0.01), "BatchNorm1d.momentum has changed"),
    "a slope": (
        lambda problem: setattr(problem.module[1], "negative_slope", 0.5),
        "LeakyReLU.negative_slope has changed",
    ),
    "a submodule": (lambda problem: problem.module.__setitem__(2, nn.Softsign()), "Sequential.2 has changed"),
    "a forward": (lambda problem: setattr(problem.module[2], "forward", lambda x: x), "Tanh.forward has changed"),
    "a forward hook": (
        lambda problem: problem.module[0].register_forward_hook(lambda _, __, out: 2 * out),
        "has a hook",
    ),
    "a hook of a parameter": (
        lambda problem: first(problem).register_hook(lambda gradient: 2 * gradient),
        "has a hook",
    ),
    "data": (lambda problem: setattr(first(problem), "data", first(problem).data.clamp(-0.1, 0.1)), ""),
    "strides": (lambda problem: setattr(first(problem), "data", first(problem).data.t().contiguous().t()), ""),
    "momentum": (emptied, ""),
    "a rate": (lambda problem: problem.optimizer.param_groups[0].update(lr=0.01), ""),
    "statistics": (lambda problem: problem.module[1].reset_running_stats(), ""),
}
OF_NORMS = ("a mode", "an attribute", "statistics")


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_of_one_member_counts_there(name: str) -> None:
    change, reason = CHANGED[name]
    done = 6, lambda program: change(program.problems["classifier"])
    second = partial(nn.BatchNorm1d, 8) if name in OF_NORMS else partial(nn.LeakyReLU, 0.1)
    found = compared(lambda k: plain(k, lambda: network(second())), 2, 8, change=done)
    assert reason in " ".join(found.reasons) and bool(found.reasons) == bool(reason)
    assert found.error < 1e-10 and not found.failures


def test_what_a_scheduler_does_counts_in_the_next_round_of_its_tick() -> None:
    def make(number: int) -> Program:
        torch.manual_seed(number)
        module: Any = network()
        hook = partial(module[0].register_forward_hook, lambda _, __, logits: 0.7 * logits)
        scheduler = partial(Setting, change=hook if number == 1 else int)
        return bilevel(number, lambda: module, scheduler=scheduler, scheduler_interval="step")

    found = compared(make, ticks=8)
    assert "has a hook" in found.reasons[0]
    assert found.error < 1e-10


def test_a_frozen_parameter_ends_its_run_alone() -> None:
    schedules = [Schedule(plain(number)) for number in range(3)]
    together = joined(schedules)
    for _ in range(5):
        together.tick(range(3))
    first(schedules[1].program.problems["classifier"]).requires_grad_(False)
    outcomes = together.tick(range(3))
    assert [type(each) for each in outcomes.values()] == [dict, RunError, dict]
    assert "'0.weight' was replaced, added, removed or frozen" in str(outcomes[1])
