"""Data sets that can only be read in their own order: epochs, resume, workers, ranks."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mlotool.core.errors import ConfigError
from mlotool.core.user_code import UserCodeError
from mlotool.problem.streams.batches import Share
from mlotool.problem.streams.stream import SameBatch, Stream


class Noisy(IterableDataset[Any]):
    """Eleven samples with noise, in an order that turns with the epoch; of several workers each has its own.

    Attributes:
        num_read: samples of all epochs.
    """

    def __init__(self) -> None:
        self.epoch = self.num_read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, 11, step):
            self.num_read += 1
            yield torch.tensor([(index + self.epoch) % 11 + 0.4 * random.random(), float(torch.rand(()))])


class Stateful(Noisy):
    """Can be put anywhere, and begins there each time in that epoch, as Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = {"epoch": 0, "place": 0}
        self.place = 0

    def __iter__(self) -> Iterator[Tensor]:
        begin = self.begin["place"] if self.begin["epoch"] == self.epoch else 0
        for index in range(begin, 11):
            self.num_read += 1
            self.place = index + 1
            yield torch.tensor([(index + self.epoch) % 11 + 0.4 * random.random(), float(torch.rand(()))])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state


def draw(stream: Stream, count: int) -> list[Any]:
    return [stream.next() for _ in range(count)]


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_end_begins_a_new_epoch() -> None:
    stream = Stream(Noisy(), 4, drop_last=False)
    random.seed(0)
    outside = random.getstate()
    batches = draw(stream, 6)
    assert random.getstate() == outside
    assert [[int(x) for x in batch[:, 0]] for batch in batches] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0],
    ]  # fmt: skip
    assert len({float(x) % 1 for batch in batches for x in batch[:, 1]}) == 22
    assert stream.state_dict() == {"epoch": 1, "batches_consumed": 3}
    assert stream.next_place == (2, 0)
    assert [len(batch) for batch in draw(Stream(Noisy(), 4), 3)] == [4, 4, 4]
    assert [len(batch) for batch in draw(Stream(Noisy(), 40), 2)] == [11, 11]


@pytest.mark.parametrize("kind", [Noisy, Stateful])
def test_a_resumed_stream_goes_on_as_if_nothing_had_happened(kind: type[Noisy]) -> None:
    """Epochs have 3 batches: in an epoch, at its end; with what was last, recent and comes."""
    whole = draw(Stream(kind(), 4, drop_last=False, seed=5), 12)
    for position in (0, 2, 3, 4, 7):
        stream = Stream(kind(), 4, drop_last=False, seed=5)
        draw(stream, position)
        stream.peek()
        state = stream.state_dict()
        for reads_recent in (False, True):
            data = kind()
            resumed = Stream(data, 4, drop_last=False, seed=5)
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            if reads_recent:
                expected = whole[max(position - 4, 0) : max(position, 1)]
                assert_same(resumed.recent(4), expected)
                assert_same(resumed.at(state).recent(4), expected)
                assert_same(SameBatch(resumed).next(), whole[max(position - 1, 0)])
            assert_same(resumed.peek(), whole[position])
            if kind is Stateful and not reads_recent and position == 7:
                # A batch of the third epoch, and nothing before it.
                assert data.num_read == 4
            assert_same(draw(resumed, 4), whole[position : position + 4])
            # Also what lies before the place at which it went on.
            assert_same(resumed.recent(6), whole[max(position - 2, 0) : position + 4])
        assert_same(draw(stream, 2), whole[position : position + 2])


def test_workers_read_an_epoch_each_its_part() -> None:
    """One worker reads what this process would; of two the batches depend on their number, and so does a state."""
    alone = Stream(Noisy(), 4, drop_last=False, seed=5, num_workers=1)
    assert_same(draw(alone, 4), draw(Stream(Noisy(), 4, drop_last=False, seed=5), 4))
    stream = Stream(Noisy(), 4, drop_last=False, seed=5, num_workers=2)
    batches = draw(stream, 2)
    assert [[int(x) for x in batch[:, 0]] for batch in batches] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    state = stream.state_dict()
    assert state == {"epoch": 0, "batches_consumed": 2, "num_workers": 2}
    assert_same(Stream(Noisy(), 4, drop_last=False, seed=5, num_workers=2).at(state).next(), stream.next())


def test_what_lies_behind_is_read_once() -> None:
    """Recent batches and copies of the stream cost nothing while it goes on."""
    data = Noisy()
    stream = Stream(data, 2)
    draw(stream, 2)
    stream.recent(3)
    for _ in range(3):
        stream.next()
        copy = stream.copy()
        assert_same(copy.recent(3), stream.recent(3))
        assert_same(copy.next(), stream.peek())
    # An epoch, and the first batch of the next one, which was looked at.
    assert data.num_read == 11 + 2


def test_ranks_take_their_shares_of_the_samples() -> None:
    whole = Stream(Noisy(), 4, drop_last=False)
    ranks = [Stream(Noisy(), 4, drop_last=False).divide(rank, 2) for rank in range(2)]
    for _ in range(4):
        shares = [Share.opened(stream.next()) for stream in ranks]
        assert_same(torch.cat([batch for batch, _ in shares]), whole.next())
        assert sum(weight for _, weight in shares) == pytest.approx(2)


def test_loaders_of_batches_of_pairs_and_with_collate_fn() -> None:
    class Ready(Noisy):
        def __iter__(self) -> Iterator[Any]:
            return iter([torch.zeros(3, 2), torch.ones(2, 2)])

    stream = Stream(DataLoader(Ready(), batch_size=None))
    assert [batch.shape for batch in draw(stream, 3)] == [(3, 2), (2, 2), (3, 2)]
    assert stream.has_ready_batches
    stream = Stream(DataLoader(Ready(), batch_size=2, collate_fn=torch.cat))
    assert draw(stream, 1)[0].shape == (5, 2)


def test_what_cannot_be_read_again_is_an_error_that_says_so() -> None:
    class Once(IterableDataset[int]):
        def __init__(self, size: int) -> None:
            self.rest = iter(range(size))

        def __iter__(self) -> Iterator[int]:
            return self.rest

    stream = Stream(Once(4), 2)
    draw(stream, 2)
    with pytest.raises(ConfigError, match=r"found no batch in epoch 1 of .*; expected at least one in each epoch"):
        stream.next()
    resumed = Stream(Once(4), 2)
    resumed.load_state_dict({"epoch": 0, "batches_consumed": 3})
    with pytest.raises(ConfigError, match=r"batches in epoch 0 of .*: found 2; expected the 3 that were read"):
        resumed.next()
    with pytest.raises(ConfigError, match=r"found a list_iterator; .* It can be read once"):
        Stream(iter([1, 2]), 2)


def test_settings_that_an_order_of_its_own_excludes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"found \['shuffle'\]; expected none with a data set .* own order"):
        Stream(Noisy(), 2, shuffle=True)
    saved = Stream(Noisy(), 2, num_workers=2).state_dict()
    with pytest.raises(ConfigError, match=r"stream.num_workers: found 1; expected 2, as before"):
        Stream(Noisy(), 2).load_state_dict(saved)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_fails_is_told(num_workers: int) -> None:
    class Broken(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise ValueError("the second sample is broken")

    stream = Stream(Broken(), 1, num_workers=num_workers)
    stream.next()
    with pytest.raises(UserCodeError if num_workers else ValueError, match="the second sample is broken"):
        stream.next()
