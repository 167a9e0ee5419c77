"""Loaders as streams: their order, samplers and collate_fn; after a resume, with workers, on ranks."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from mlotool.core.errors import ConfigError
from mlotool.problem.problem import Problem
from mlotool.problem.streams.batches import BatchFetcher, LoaderSamples, Share
from mlotool.problem.streams.stream import Stream

# Sequences of lengths 1 to 12, of their own number.
SEQUENCES = [torch.full((1 + index,), float(index)) for index in range(12)]


def padded(samples: list[Tensor]) -> dict[str, Tensor]:
    """Pad to the longest sample, and draw noise for each batch."""
    return {"input": nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1), "noise": torch.rand(2)}


class Buckets:
    """Lists of indices of about equal lengths, in an order drawn by three generators, one of which is its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        buckets = [[0, 1, 2, 3, 4], [5, 6, 7], [8, 9], [10], [11]]
        random.shuffle(buckets)
        order = np.random.permutation(5)[: 4 + self.epoch % 2]
        yield from (buckets[place] for place in order)
        yield torch.randperm(12, generator=self.generator)[:3].tolist()


def own_sampler() -> "DataLoader[Any]":
    return DataLoader(SEQUENCES, 4, sampler=WeightedRandomSampler([1.0] * 12, 10), collate_fn=padded)


def buckets() -> "DataLoader[Any]":
    return DataLoader(SEQUENCES, batch_sampler=Buckets(), collate_fn=padded)  # type: ignore[arg-type]


def shuffled() -> "DataLoader[Any]":
    return DataLoader(SEQUENCES, 5, shuffle=True, collate_fn=padded)


def draw(stream: Stream, count: int) -> list[Any]:
    return [stream.next() for _ in range(count)]


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("make", [own_sampler, buckets, shuffled])
def test_a_loader_goes_on_after_a_resume_as_if_nothing_had_happened(make: Any) -> None:
    """Also its recent batches, over the end of an epoch of which each may have another number of batches."""
    stream = Stream(make(), seed=3)
    whole = draw(stream, 16)
    for position in (1, 5, 12):
        there = Stream(make(), seed=3, num_workers=1 if position == 5 else 0)
        draw(there, position)
        torch.rand(3)
        resumed = Stream(make(), seed=3)
        draw(resumed, 2)
        resumed.load_state_dict(there.state_dict())
        assert_same(resumed.recent(7), whole[max(position - 7, 0) : position])
        assert_same(draw(resumed, 4), whole[position : position + 4])
        assert_same(draw(there, 2), whole[position : position + 2])


def test_a_loader_without_a_sampler_gives_each_sample_once_an_epoch_as_it_does() -> None:
    loader = DataLoader(torch.arange(10), 4, shuffle=True)  # type: ignore[arg-type]
    stream = Stream(loader, seed=2)
    epochs = [torch.cat(draw(stream, 3)).tolist() for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    plain = Stream(torch.arange(10), 4, drop_last=False, seed=2)
    assert_same(draw(plain, 6), draw(Stream(loader, seed=2), 6))
    # So does what torch makes of samplers of its own.
    batches = BatchSampler(RandomSampler(range(10)), 4, drop_last=False)
    assert_same(draw(Stream(DataLoader(torch.arange(10), batch_sampler=batches), seed=2), 3), draw(plain.at(START), 3))  # type: ignore[arg-type]
    in_order = DataLoader(torch.arange(10), sampler=SequentialSampler(range(10)), batch_size=4, drop_last=True)  # type: ignore[arg-type]
    assert_same(draw(Stream(in_order), 2), list(in_order))
    assert_same(Stream(in_order, 3, shuffle=True, seed=2).next(), Stream(torch.arange(10), 3, seed=2).next())


START = {"epoch": 0, "batches_consumed": 0}


def test_a_sampler_draws_the_order_of_an_epoch_by_the_seed_and_the_epoch() -> None:
    weights = torch.tensor([1.0, 0, 0, 3.0])
    stream = Stream(torch.arange(4), 50, sampler=WeightedRandomSampler(weights.tolist(), 4000), seed=1)
    random.seed(0)
    before = random.getstate()
    drawn = torch.cat(draw(stream, 80))
    assert random.getstate() == before
    assert {0, 3} == set(drawn.tolist())
    assert abs(float((drawn == 3).double().mean()) - 0.75) < 0.03
    again = Stream(torch.arange(4), 50, sampler=WeightedRandomSampler(weights.tolist(), 4000), seed=1)
    assert_same(torch.cat(draw(again, 80)), drawn)
    assert not torch.equal(torch.cat(draw(again, 80)), drawn)
    assert stream.is_repeatable()
    assert stream.last_number is None


def test_what_a_sampler_keeps_from_epoch_to_epoch_is_found() -> None:
    class Turning(list[int]):
        def __iter__(self) -> Iterator[int]:
            self.append(self.pop(0))
            return super().__iter__()

    assert not Stream(torch.arange(4), 2, sampler=Turning(range(4))).is_repeatable()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_collate_their_shares(num_workers: int) -> None:
    """A share is padded to its own longest sample."""
    whole = Stream(buckets(), seed=3)
    ranks = [Stream(buckets(), seed=3, num_workers=num_workers).divide(rank, 2) for rank in range(2)]
    for _ in range(4):
        rows = [row[row >= 0] for row in whole.next()["input"]]
        shares = [Share.opened(stream.next()) for stream in ranks]
        if len(rows) > 1:
            assert_same([row[row >= 0] for batch, _ in shares for row in batch["input"]], rows)
        assert sum(weight for _, weight in shares) == pytest.approx(2)


def test_evaluations_make_batches_as_the_loader_does() -> None:
    batch = BatchFetcher(LoaderSamples(shuffled()), seed=0)[0, 0, torch.tensor([0, 2])]
    assert_same(batch["input"], torch.tensor([[0.0, -1, -1], [2, 2, 2]]))
    pairs = DataLoader([(1.0, 2), (3.0, 4)])  # type: ignore[arg-type]
    named = BatchFetcher(LoaderSamples(pairs, names_pairs=True), seed=0)[0, 0, torch.tensor([1, 0])]
    assert {name: values.tolist() for name, values in named.items()} == {
        "input": [3.0, 1.0], "target": [4, 2], "index": [1, 0],
    }  # fmt: skip


def test_a_problem_takes_a_loader() -> None:
    orders = []
    for name in ("a", "b"):
        loader = DataLoader(torch.arange(40.0)[:, None], 20, shuffle=True)  # type: ignore[arg-type]
        stream = Problem(name, nn.Linear(1, 1), lambda batch: batch.mean(), stream=loader).stream
        assert isinstance(stream, Stream)
        orders.append(stream.next())
    assert not torch.equal(*orders)


def test_a_loaders_generator_is_told_to_have_no_part() -> None:
    loader = DataLoader([1, 2], shuffle=True, generator=torch.Generator())  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="found a loader with a generator"):
        Stream(loader)


class Endless(list[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Distributed(list[int]):
    num_replicas = 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": [0], "shuffle": True}, r"stream.sampler: found .* expected none with \['shuffle'\]"),
        ({"batch_sampler": [[0]], "batch_size": 3}, r"stream.batch_sampler: .* none with \['batch_size'\]"),
        ({"sampler": iter([0])}, "expected a sampler: an object whose __iter__"),
        ({"sampler": Distributed([0])}, "stream.sampler.num_replicas: .*every rank draws the same order"),
        ({"sampler": Endless()}, "stream.sampler: found .*Endless.* without an end"),
        ({"sampler": []}, "expected a sampler with an index in each epoch"),
        ({"batch_sampler": [[0.5]]}, "stream.batch_sampler: found .*; expected whole numbers"),
    ],
)
def test_what_no_stream_can_be_made_of_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Stream([1, 2], **settings).next()


def test_a_collate_fn_beside_batches_that_are_ready_is_refused() -> None:
    class Whole(list[int]):
        def __getitems__(self, indices: Tensor) -> Tensor:
            return indices

    with pytest.raises(ConfigError, match="found a collate_fn, and a Tensor from the __getitems__ of"):
        Stream(Whole([1, 2]), 2, collate_fn=padded).next()
