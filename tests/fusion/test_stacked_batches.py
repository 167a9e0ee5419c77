"""The stacked streams of several runs: each row's batch is its member's own, bit for bit."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from mlotool.data import CropAndFlip, InMemoryDataset, InMemoryTensors, Normalization, TextWindows
from mlotool.fusion.stacked_batches import NotFusedError, StackedStream, UnlikeBatchesError, stacked_streams
from mlotool.problem.stream import SameBatch
from mlotool.program import Stream

M = 3
ALL = [True] * M
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


def assert_rows(stacked: StackedStream, alone: Sequence[Stream], num_ticks: int) -> None:
    for _ in range(num_ticks):
        batch = stacked.next([True] * len(alone))
        for number, each in enumerate(alone):
            assert_same(row(batch.value, number), each.next())


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
    batch = StackedStream([None, *streams_on([data] * 2, (1, 1))], shares=False).next([False, True, True])
    assert not batch.is_shared
    assert_same(row(batch.value, 2), Stream(data, 4, seed=1).next())
    with pytest.raises(NotFusedError, match="different samples"):
        StackedStream(streams_on([data] * 3), shares=True)


def test_rows_of_one_seed_are_loaded_once_where_others_differ() -> None:
    data = Theirs(0, 5)
    assert_rows(StackedStream(streams_on([data] * M, (1, 2, 1))), streams_on([Theirs(0, 5)] * M, (1, 2, 1)), 3)
    assert data.count == 2 * 4 * 3
    # At different places, with epochs of other lengths, and by workers.
    datasets = [images(0, 8), images(1, 12), images(2, 23)]
    for settings in ({}, {"num_workers": 1}):
        ours, alone = streams_on(datasets, **settings), streams_on(datasets, **settings)
        ours[1].next(), ours[2].next(), ours[2].next()
        for mine, theirs in zip(ours, alone, strict=True):
            theirs.load_state_dict(mine.state_dict())
        assert_rows(StackedStream(ours), alone, 5)


@pytest.mark.parametrize("kind", ["images", "theirs"])
def test_a_row_without_its_member_has_another_ones_samples(kind: str) -> None:
    datasets = [DATA[kind](seed) for seed in range(M)]
    ours, alone = streams_on(datasets), streams_on(datasets)
    stacked = StackedStream(ours)
    stacked.next(ALL)
    left = ours[0].state_dict()
    alone[1].next(), alone[2].next()
    for _ in range(6):
        batch = stacked.next([False, True, True])
        expected = alone[1].next()
        assert_same(row(batch.value, 0), expected)
        assert_same(row(batch.value, 1), expected)
        assert_same(row(batch.value, 2), alone[2].next())
    assert ours[0].state_dict() == left
    # A resumed group has no stream for it.
    resumed = [None, *(Stream(data, 4, seed=seed) for data, seed in zip(datasets[1:], (2, 3), strict=True))]
    for stream, other in zip(resumed[1:], alone[1:], strict=True):
        stream.load_state_dict(other.state_dict())
    batch = StackedStream(resumed).next([False, True, True])
    for number in (1, 2):
        assert_same(row(batch.value, number), alone[number].next())


def test_last_batches_of_other_sizes_do_not_fit_and_no_stream_goes_on() -> None:
    for make in (images, Theirs):
        streams = [Stream(make(seed, size), 4, seed=seed, drop_last=False) for seed, size in enumerate((6, 9))]
        stacked = StackedStream(streams)
        stacked.next([True, True])
        before = [each.state_dict() for each in streams]
        with pytest.raises(UnlikeBatchesError, match="different"):
            stacked.next([True, True])
        assert [each.state_dict() for each in streams] == before


def test_another_dtype_is_honoured_and_nan_stays_in_its_row() -> None:
    datasets = [nested(seed) for seed in range(M)]
    datasets[1].values["phase"][:] = torch.nan
    ours = [each.to(dtype=torch.float64) for each in streams_on(datasets)]
    alone = [each.to(dtype=torch.float64) for each in streams_on(datasets)]
    batch = StackedStream(ours).next(ALL).value
    assert batch["phase"].dtype == torch.float64 and batch["phase"].isnan().any(1).tolist() == [False, True, False]
    for number, each in enumerate(alone):
        assert_same(row(batch, number), each.next())
    with pytest.raises(NotFusedError, match="dtypes"):
        StackedStream([*ours[:2], *streams_on(datasets)[2:]])


def test_a_problem_that_repeats_anothers_batch_reads_nothing_again() -> None:
    data = Theirs(0, 5)
    lower = streams_on([data] * M)
    stacked = stacked_streams({"lower": lower, "upper": [SameBatch(each) for each in lower], "none": [None] * M})
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
