"""Stacked streams give each row the batch of its member, and stacked steps have the bits of a step of each."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from mlotool.data import CropAndFlip, InMemoryDataset, InMemoryTensors, Normalization, TextWindows
from mlotool.fusion import stacked_schedule
from mlotool.fusion.stack import NotFusedError, StackedStream, stacked_streams
from mlotool.fusion.stacked_gradients import Stacked
from mlotool.fusion.stacked_schedule import StackedSteps
from mlotool.problem.optimizers.optimizer_step import take_steps
from mlotool.problem.streams.stream import SameBatch
from mlotool.program import Problem, Stream

KINDS = {
    "sgd": [partial(torch.optim.SGD, lr=0.1, momentum=0.9)] * 3,
    "other rates": [partial(torch.optim.SGD, lr=lr, momentum=0.9) for lr in (0.1, 0.2, 0.1)],
    "no momentum": [partial(torch.optim.SGD, lr=0.1, momentum=m) for m in (0.0, 0.9, 0.0)],
    "adam": [partial(torch.optim.Adam, lr=0.1)] * 3,
    "adam and adamw": [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD],
    "amsgrad": [partial(torch.optim.AdamW, lr=0.1, amsgrad=True, weight_decay=0.1)] * 3,
    "without a kernel": [partial(torch.optim.RMSprop, lr=0.1), torch.optim.Adam, torch.optim.Adam],
}

GAMMAS = (0.5, 0.6, 0.7)


def problems(kinds: list[Any], gammas: Sequence[float] = GAMMAS, **settings: Any) -> list[Problem]:
    found = []
    for number, (kind, gamma) in enumerate(zip(kinds, gammas, strict=True)):
        torch.manual_seed(number)
        # Of its parameters (16, 7) fills vector registers, the others do not.
        module = nn.Sequential(nn.Linear(7, 16), nn.Linear(16, 3))
        scheduler = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=gamma)
        found.append(Problem("a", module, lambda batch, **roles: None, optimizer=kind, scheduler=scheduler, **settings))
    return found


class Pair:
    """Problems that step as rows of one tensor each, and the same ones apart."""

    def __init__(self, kinds: list[Any], **settings: Any) -> None:
        self.together, self.apart = problems(kinds, **settings), problems(kinds, **settings)
        own = zip(*[each.own for each in self.together], strict=True)
        self.parameters = [torch.stack([each.detach() for each in members]) for members in own]
        for number, problem in enumerate(self.together):
            for parameter, whole in zip(problem.own, self.parameters, strict=True):
                parameter.data = whole[number]
        self.steps = StackedSteps(dict(enumerate(self.together)), count().__next__)
        self.generator = torch.Generator().manual_seed(0)

    def step(self, numbers: Sequence[int] = (0, 1, 2)) -> None:
        """Take a step of some of them."""
        gradient = [torch.randn(each.shape, generator=self.generator) for each in self.parameters]
        norms = self.steps([*numbers], Stacked([*gradient], torch.zeros(3), {}), [None] * len(numbers))
        for number, norm in zip(numbers, norms, strict=True):
            expected = self.apart[number].step([each[number] for each in gradient])
            assert (norm is None and expected is None) or torch.equal(norm, expected)  # type: ignore[arg-type]
            self.compare(self.together[number], self.apart[number])

    def compare(self, one: Problem, other: Problem) -> None:
        """Compare all that a step changes, bit by bit."""
        assert one.num_steps == other.num_steps
        assert all(map(torch.equal, one.own, other.own))
        kept, expected = one.optimizer_state(), other.optimizer_state()
        assert [each.keys() for each in kept] == [each.keys() for each in expected]
        for state, wanted in zip(kept, expected, strict=True):
            assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of groups in each call of kernels."""
    found: list[int] = []

    def counted(steps: Any) -> None:
        found.append(len(steps))
        take_steps(steps)

    monkeypatch.setattr(stacked_schedule, "take_steps", counted)
    return found


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_rows_of_one_tensor_step_as_each_by_itself(kinds: list[Any], calls: list[int]) -> None:
    pair = Pair(kinds, scheduler_interval="evaluation")
    for _ in range(3):
        pair.step()
    # The first step is the optimizers' own; of each kind of settings one call steps all that have it.
    has_kernels = kinds is not KINDS["without a kernel"]
    num_kinds = len({repr(kind) for kind in kinds})
    assert calls == ([num_kinds] * 2 if has_kernels else [])
    for numbers in ([0, 2], [0, 2], [1], [0, 1, 2]):
        pair.step(numbers)
    pair.steps.drop(1)
    pair.step([0, 2])


M = 3
ALL = list(range(M))
NORMALIZATION = Normalization([0.4, 0.5, 0.6], [0.2, 0.3, 0.25])


def images(seed: int, size: int = 11, **settings: Any) -> InMemoryDataset:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (size, 3, 8, 8), generator=generator, dtype=torch.uint8)
    target = torch.randint(10, (size,), generator=generator)
    extra = {"level": torch.rand(size, 2, generator=generator, dtype=torch.float64)}
    return InMemoryDataset(pixels, target, NORMALIZATION, clean_target=target.flip(0), extra=extra, **settings)


def nested(seed: int, size: int = 11) -> InMemoryTensors:
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.rand(size, 4, 2, generator=generator) for name in ("input", "target")}
    return InMemoryTensors({"support": values, "phase": torch.rand(size, generator=generator)})


def windows(seed: int, size: int = 11) -> TextWindows:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(256, (40 + seed,), generator=generator, dtype=torch.uint8)
    return TextWindows(tokens, torch.randint(30, (size,), generator=generator), torch.arange(size) % 3, length=6)


class Theirs:
    """Samples one by one, drawn from all global generators; it counts them."""

    def __init__(self, seed: int, size: int = 11) -> None:
        self.values, self.count = torch.rand(size, generator=torch.Generator().manual_seed(seed)), 0

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.count += 1
        noise = torch.rand(3) + random.random() + numpy.random.randn()
        return {"input": self.values[index] + noise, "target": index, "name": "a"}


DATA: dict[str, Callable[[int], Any]] = {
    "images": images,
    "augmented": lambda seed: images(seed, augmentation=CropAndFlip(2)),
    "nested": nested,
    "windows": windows,
    "tensor": lambda seed: torch.rand(11, 2, generator=torch.Generator().manual_seed(seed)),
    "theirs": Theirs,
}


def streams_on(datasets: Sequence[Any], seeds: Sequence[int] = (1, 2, 3), **settings: Any) -> list[Stream]:
    return [Stream(each, 4, seed=seed, **settings) for each, seed in zip(datasets, seeds, strict=True)]


def row(batch: Any, number: int) -> Any:
    return tree_map(lambda each: each[number] if isinstance(each, Tensor) else each, batch)


def assert_same(found: Any, expected: Any) -> None:
    """Hold two batches against each other: containers, the order of keys, dtypes, and every bit."""
    leaves, form = tree_flatten(found)
    others, other_form = tree_flatten(expected)
    assert form == other_form
    for leaf, other in zip(leaves, others, strict=True):
        if isinstance(other, Tensor):
            assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape)
            assert leaf.numpy().tobytes() == other.numpy().tobytes()
        else:
            assert leaf == other


@pytest.mark.parametrize(("is_one", "drop_last"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("kind", DATA)
def test_each_row_has_its_members_own_batches(kind: str, is_one: bool, drop_last: bool) -> None:
    one = DATA[kind](0)
    datasets = [one if is_one else DATA[kind](seed) for seed in range(M)]
    ours, alone = streams_on(datasets, drop_last=drop_last), streams_on(datasets, drop_last=drop_last)
    stacked = StackedStream(ours)
    for tick in range(8):
        if tick % 3 == 1:
            ahead = stacked.peek(ALL)
            for number, each in enumerate(alone):
                assert_same(row(ahead.value, number), each.peek())
        batch = stacked.next(ALL)
        assert not batch.is_shared
        for number, each in enumerate(alone):
            assert_same(row(batch.value, number), each.next())
            assert_same(row(stacked.last(ALL).value, number), each.last())
        assert [each.state_dict() for each in ours] == [each.state_dict() for each in alone]
        if tick % 3 == 0:
            for mine, theirs in zip(ours, alone, strict=True):
                assert_same(mine.last(), theirs.last())
                assert_same(mine.recent(2)[0], theirs.recent(2)[0])
                assert_same(mine.peek(), theirs.peek())


def test_data_that_are_changed_while_runs_read_them_are_read_as_they_are() -> None:
    def change_a_target(data: list[Any]) -> None:
        data[1].target.add_(1)

    def replace_what_is_noted(data: list[Any]) -> None:
        data[2].extra["level"] = data[2].extra["level"] + 1.0

    def replace_the_images(data: list[Any]) -> None:
        data[0].images = data[0].images.clone() // 2

    for change in (change_a_target, replace_what_is_noted, replace_the_images):
        datasets = [images(seed) for seed in range(M)]
        stacked, alone = StackedStream(streams_on(datasets)), streams_on(datasets)
        for tick in range(4):
            if tick == 2:
                change(datasets)
            batch = stacked.next(ALL)
            for number, each in enumerate(alone):
                assert_same(row(batch.value, number), each.next())


@pytest.mark.parametrize("kind", ["images", "theirs"])
def test_runs_with_the_same_samples_share_one_batch(kind: str) -> None:
    data = DATA[kind](0)
    ours, alone = streams_on([data] * M, (1, 1, 1), repeat=2), Stream(data, 4, seed=1, repeat=2)
    stacked = StackedStream(ours)
    for _ in range(11):
        batch = stacked.next(ALL)
        assert batch.is_shared
        assert_same(batch.value, alone.next())
        assert [each.state_dict() for each in ours] == [alone.state_dict()] * M
        assert_same(stacked.last(ALL).value, alone.last())
        assert_same(stacked.peek(ALL).value, alone.peek())
    assert_same(ours[2].last(), alone.last())
    assert_same(ours[2].next(), alone.next())
    # Sharing does not change with the rows that are left.
    assert StackedStream([None, *streams_on([data] * 2, (1, 1))]).shares
    batch = StackedStream([None, *streams_on([data] * 2, (1, 1))], shares=False).next([1, 2])
    assert not batch.is_shared
    assert_same(row(batch.value, 2), Stream(data, 4, seed=1).next())
    with pytest.raises(NotFusedError, match="different samples"):
        StackedStream(streams_on([data] * 3), shares=True)


@pytest.mark.parametrize("kind", ["images", "theirs"])
def test_a_row_without_its_member_has_another_ones_samples(kind: str) -> None:
    datasets = [DATA[kind](seed) for seed in range(M)]
    ours, alone = streams_on(datasets), streams_on(datasets)
    stacked = StackedStream(ours)
    stacked.next(ALL)
    left = ours[0].state_dict()
    alone[1].next(), alone[2].next()
    for _ in range(6):
        batch = stacked.next([1, 2])
        expected = alone[1].next()
        assert_same(row(batch.value, 0), expected)
        assert_same(row(batch.value, 1), expected)
        assert_same(row(batch.value, 2), alone[2].next())
    assert ours[0].state_dict() == left
    # A resumed group has no stream for it.
    resumed = [None, *(Stream(data, 4, seed=seed) for data, seed in zip(datasets[1:], (2, 3), strict=True))]
    for stream, other in zip(resumed[1:], alone[1:], strict=True):
        stream.load_state_dict(other.state_dict())
    batch = StackedStream(resumed).next([1, 2])
    for number in (1, 2):
        assert_same(row(batch.value, number), alone[number].next())


def test_a_problem_that_repeats_anothers_batch_reads_nothing_again() -> None:
    data = Theirs(0, 5)
    lower = streams_on([data] * M)
    streams = [{"lower": stream, "upper": SameBatch(stream), "none": None} for stream in lower]
    problems = [{name: SimpleNamespace(stream=stream) for name, stream in own.items()} for own in streams]
    programs: list[Any] = [SimpleNamespace(problems=own) for own in problems]
    stacked = stacked_streams(programs, {})
    assert [*stacked] == ["lower", "upper"]
    assert_same(stacked["upper"].next(ALL).value, stacked["lower"].peek(ALL).value)
    for _ in range(3):
        batch = stacked["lower"].next(ALL)
        assert stacked["upper"].next(ALL) is batch
        assert stacked["upper"].peek(ALL) is batch
    assert data.count == M * 4 * 3
    alone = StackedStream([SameBatch(each) for each in lower])
    assert_same(alone.next(ALL).value, stacked["lower"].last(ALL).value)
    assert lower[0].state_dict() == {"epoch": 2, "batches_consumed": 1}
